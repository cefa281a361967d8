"""Rate and concurrency limits per owner: a token bucket that holds one second of requests."""

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
    """Usage per owner. Bounded by the number of configured owners."""

    def __init__(self, clock: Callable[[], int]) -> None:
        """`clock`: monotonic nanoseconds."""
        self._clock = clock
        self._usage: dict[str, _Usage] = {}

    def enter(self, owner: Owner) -> None:
        """Count a call that begins. Raises QuotaExceeded, and does not count it then."""
        usage = self._usage.setdefault(owner.name, _Usage())
        most = owner.limits.concurrent_calls
        if most is not None and usage.calls >= most:
            raise quota_exceeded(owner, "concurrent_calls", most, _BUSY_RETRY_MS)
        rate = owner.limits.requests_per_second
        if rate is not None:
            self._take(usage, owner, rate)
        usage.calls += 1

    def leave(self, owner: Owner) -> None:
        """Count a call that has ended."""
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
    """The error at a limit of an owner; `retry_ms` 0 = waiting does not help."""
    return QuotaExceeded(
        f"owner {owner.name} is at its limit of {most}",
        field=limit,
        remedy="slow down, or ask an operator to raise the limit" if retry_ms else "ask an operator to raise the limit",
        metadata={"quota": f"owner:{owner.name}", **({"retry_ms": str(retry_ms)} if retry_ms else {})},
    )
