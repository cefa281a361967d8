"""How the interpreter of a service or a router takes turns, when its garbage collector runs, and how many files, which
connections are too, its process may open.

A full collection visits the long-lived objects of all replicas: the tables and columns of the pools, but neither keys
(plain tuples) nor logs (packed). With the default thresholds a step periodically waits for such a collection, as does a
call of a router while a payload of many events is decoded. Rare collections are safe: reference counting frees nearly
everything, because the core creates no reference cycles, and the few cycles that exist (errors, connections) are young.
So young objects are collected often enough, and old ones rarely.
"""

from __future__ import annotations

import gc
import logging
import resource
import sys

# New container objects until a collection of the youngest generation (under a millisecond), and collections of each
# generation until one of the next older generation.
YOUNG, MIDDLE, OLD = 10_000, 20, 100
_SWITCH_S = 0.001


def tune() -> None:
    """Exclude all existing objects from collection permanently, make full collections rare, and let threads take turns
    after 1 ms instead of 5, so that the event loop gets the interpreter sooner. Affects the whole process.
    """
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)


OTHER_FILES = 1024  # of logs, stores, workers and the ports of health and metrics

_log = logging.getLogger(__name__)


def allow_connections(most: int, key: str = "max_connections") -> None:
    """Let this process open as many connections as `most`, the sum of its limits `key`: raise the soft limit of open
    files to what that needs, as far as the hard limit permits, and warn if it does not.
    """
    needed = most + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    if allowed < needed:
        what = "this process may open %d files, and %s needs %d: set `ulimit -n %d` (systemd: LimitNOFILE), or lower it"
        _log.warning(what, allowed, key, needed, needed)
