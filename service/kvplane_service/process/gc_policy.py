"""Thresholds of Python's cyclic garbage collector, which make full collections rare.

A full collection visits the long-lived objects of all replicas: the tables and columns of the pools, but neither keys
(plain tuples) nor logs (packed). With the default thresholds a step periodically waits for such a collection. Rare
collections are safe: reference counting frees nearly everything, because the core creates no reference cycles, and the
few cycles that exist (errors, connections) are young. So young objects are collected often enough, and old ones rarely.
"""

from __future__ import annotations

import gc

# New container objects until a collection of the youngest generation (under a millisecond), and collections of each
# generation until one of the next older generation.
YOUNG, MIDDLE, OLD = 10_000, 20, 100


def apply() -> None:
    """Exclude all existing objects from collection permanently, and set the thresholds. Affects the whole process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
