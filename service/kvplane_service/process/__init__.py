"""How a service process starts, drains and ends: from a configuration to a running service and an exit status.

app        the composition root: builds every part, ends them in order
gc_policy  when the cycle collector runs
"""
