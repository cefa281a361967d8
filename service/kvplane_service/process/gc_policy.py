"""The cycle collector of a service process: it seldom runs, for what it would look through lives and makes no cycles.

The index keeps many objects (logs are packed and have none), and with Python's own thresholds a step now and then
waits until all of them have been visited. Reference counts free nearly everything: the core makes no cycles, and what
does (errors, connections) is young and few. So young objects are looked through now and then, and old ones rarely.
"""

from __future__ import annotations

import gc

# New container objects before the young are looked through (under a millisecond), and how many times that is done
# before the next older generation is.
YOUNG, MIDDLE, OLD = 10_000, 20, 100


def settle() -> None:
    """For a whole process: set aside for good what was imported and made so far, and collect rarely from now on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
