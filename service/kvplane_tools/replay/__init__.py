"""Replays of workloads through a service, without a model.

The input is a serving trace (`workloads`) or a recording of decisions (`from_log`). The output are counts, of the
service and of the simulated engines (`summary`). The engines queue, prefill in chunks, decode, preempt and end requests
as a real engine does; a cost model advances their virtual clock, so two runs of one trace are identical.
"""
