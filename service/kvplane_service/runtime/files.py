"""How many files this process may open, which a connection is too."""

from __future__ import annotations

import logging
import resource

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
