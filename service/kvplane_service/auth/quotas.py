"""Limit the rate and the concurrency of each owner's calls. The rate limit is a token bucket that holds one second of
calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvplane.base.errors import QuotaExceeded
from kvplane_service.auth.owners import Owner

_NS_PER_S, _NS_PER_MS = 1_000_000_000, 1_000_000
_BUSY_RETRY_MS = 1000


@dataclass(slots=True)
class _Usage:
    calls: int = 0
    tokens: float = 0.0
    filled_ns: int | None = None


class Quotas:
    """Counts the calls of each owner. Memory is bounded by the number of configured owners."""

    def __init__(self, clock: Callable[[], int]) -> None:
        """`clock` is a function that returns the monotonic time in nanoseconds."""
        self._clock = clock
        self._usage: dict[str, _Usage] = {}

    def enter(self, owner: Owner) -> None:
        """Count a call that begins. Raises QuotaExceeded if the owner is at a limit; that call is not counted."""
        usage = self._usage.setdefault(owner.name, _Usage())
        most = owner.limits.concurrent_calls
        if most is not None and usage.calls >= most:
            raise quota_exceeded(owner, "concurrent_calls", most, _BUSY_RETRY_MS)
        rate = owner.limits.requests_per_second
        if rate is not None:
            self._take(usage, owner, rate)
        usage.calls += 1

    def leave(self, owner: Owner) -> None:
        """Count the end of a call for which `enter` succeeded."""
        self._usage[owner.name].calls -= 1

    def _take(self, usage: _Usage, owner: Owner, rate: int) -> None:
        now_ns = self._clock()
        earned = rate if usage.filled_ns is None else (now_ns - usage.filled_ns) * rate / _NS_PER_S
        usage.tokens, usage.filled_ns = min(rate, usage.tokens + earned), now_ns
        if usage.tokens < 1:
            wait_ms = int((1 - usage.tokens) * 1000 / rate) + 1
            raise quota_exceeded(owner, "requests_per_second", rate, wait_ms)
        usage.tokens -= 1


def quota_exceeded(owner: Owner, limit: str, most: int, retry_ms: int = 0) -> QuotaExceeded:
    """Return the error for an owner that is at a limit; `retry_ms` is the time after which a retry can succeed, 0 =
    never.
    """
    return QuotaExceeded(
        f"owner {owner.name} has reached its limit of {most} {limit.replace('_', ' ')}",
        field=limit,
        remedy=f"{f'retry after {retry_ms} ms, or ' if retry_ms else ''}ask an operator to raise the limit",
        metadata={"quota": f"owner:{owner.name}", **({"retry_ms": str(retry_ms)} if retry_ms else {})},
    )
