"""How logic without I/O waits, retries and chooses a service.

A generator yields actions; a driver carries them out, blocking or awaited, and sends back their outcomes. Nothing here
opens a connection or waits.

driver   runs a generator of actions; an action's exception is raised where it was yielded
retry    how often, how fast and for how long to try again
owners   one channel per service: the client's list, and the owners of replicas
tracing  the engine's trace context
"""
