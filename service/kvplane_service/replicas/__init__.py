"""One replica behind its host: which session may write, in which engine life, and what others see of its cache.

Steps and requests to open a session come in; the core's answers, events and decisions go out.

host           `ReplicaHost`: the writer, the epoch, the lease; every change of the core passes through the host
sessions       the newest session, and the limits of a request to open one
engine_lives   how an engine life begins, in slices
recovery       stored entries that wait until the engine's stamps verify them
stamps         operations on the stamp tables of a whole page memory
step_order     which step comes next; stored answers for repeated steps
applying       how a step is applied: inline, or on a thread when it is estimated to take long
idle_check     the invariants of a replica that is idle, checked in slices
recent         samples of the last hour
events         batches of cache events that a subscriber can resume
workers        which worker holds the pages of which rank
trace_context  trace context of the unary call that is being served
"""
