"""Why a prompt, or a request when it was admitted, hit this much of the prefix cache. Reads only.

service  state at one moment, the decision log in slices
causes   from both to a cause per block
history  when each key came and went, and by which step
"""
