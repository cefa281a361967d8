"""Explain the hit length of a prompt or of an admitted request. Read only: state and log come in, a cause goes out.

service  reads the state at one moment and the decision log in slices
causes   determines the cause from both
history  when each key was stored and removed, and by which step
"""
