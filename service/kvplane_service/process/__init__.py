"""How a service process starts, drains and ends: a configuration comes in, a running service and an exit status go out.

app        the composition root: builds every part and ends them in order
gc_policy  thresholds of the cyclic garbage collector
"""
