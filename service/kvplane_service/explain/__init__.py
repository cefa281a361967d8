"""Explain why the cache hit of a prompt or of a request is not longer. Nothing is changed: the state of the replica and
its decision log come in; a cause goes out.

service  reads the state at one moment, and the log on a thread
causes   determines the cause from both
history  when each key was stored and removed, and by which step
"""
