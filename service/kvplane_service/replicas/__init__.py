"""One replica behind its host: which session may write, in which engine life, and what others see of its cache.

Steps and requests to open a session come in; the core's answers, events and decisions go out.

host           the door: session, epoch, order of steps, lease
session_slot   the newest session
open_checks    limits of a request to open a session
engine_lives   how an engine life begins, in slices
recovery       stored entries that wait for an engine that proves them by its stamps
stamps         stamp tables of whole page memories
step_order     which step comes next; stored answers of the last ones
events         batches of cache events that a subscriber can resume
applying       steps and closes, on the event loop or beside it
effort         how long a step will take, estimated before it is applied
workers        which worker holds the pages of which rank
inprocess      a session without gRPC
trace_context  trace context of the call under way
"""
