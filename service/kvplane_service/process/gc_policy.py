"""Thresholds of the cyclic garbage collector, so that full collections are rare.

The index consists of many long-lived objects (logs are packed and have none), and with the default thresholds a step
periodically waits until all of them have been visited. Reference counting frees nearly everything: the core makes no
reference cycles, and the few that exist (errors, connections) are young. So young generations are collected often
enough and old ones rarely.
"""

from __future__ import annotations

import gc

# New container objects until a collection of the youngest generation (under a millisecond), and collections of each
# generation until one of the next older generation.
YOUNG, MIDDLE, OLD = 10_000, 20, 100


def apply() -> None:
    """Exclude all current objects from collection permanently, and set the thresholds. Affects the whole process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
