"""Metrics and traces: the counters of the core and the decision log come in, Prometheus pages and spans go out.

collector  the metrics of all replicas in Prometheus' terms
http       the endpoint that Prometheus scrapes
holds      how long the event loop was blocked, and by which function
sampling   which steps and calls are traced
tracing    spans of steps and admissions, from the decision log, to an OTLP collector
ops        the operations of a step in one attribute
"""
