"""Limit the concurrency of each owner's calls, their rate, and the rate of their bytes. A rate limit is a token bucket
that holds what is allowed in one second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from kvplane.base.errors import QuotaExceeded
from kvplane_service.auth.owners import Owner

_NS_PER_S = 1_000_000_000
_BUSY_RETRY_MS = 1000
READS_AT_ONCE = 4  # requests of an owner that arrive at a time; each may have the size of the largest message


@dataclass(slots=True)
class _Bucket:
    """What is left of an allowance, at most that of one second; negative after a request that was larger than it."""

    left: float = 0.0
    filled_ns: int | None = None

    def fill(self, rate: int, now_ns: int) -> None:
        earned = rate if self.filled_ns is None else (now_ns - self.filled_ns) * rate / _NS_PER_S
        self.left, self.filled_ns = min(rate, self.left + earned), now_ns

    def wait_ms(self, price: int, rate: int) -> int:
        """Return the milliseconds until `price` is left; 0 if it is."""
        return int((price - self.left) * 1000 / rate) + 1 if self.left < price else 0


@dataclass(slots=True)
class _Usage:
    num_calls: int = 0
    reads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(READS_AT_ONCE))
    calls: _Bucket = field(default_factory=_Bucket)
    bytes: _Bucket = field(default_factory=_Bucket)


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
        if most is not None and usage.num_calls >= most:
            raise quota_exceeded(owner, "concurrent_calls", most, _BUSY_RETRY_MS)
        rate = owner.limits.requests_per_second
        if rate is not None:
            usage.calls.fill(rate, self._clock())
            if wait_ms := usage.calls.wait_ms(1, rate):
                raise quota_exceeded(owner, "requests_per_second", rate, wait_ms)
            usage.calls.left -= 1
        usage.num_calls += 1

    def leave(self, owner: Owner) -> None:
        """Count the end of a call for which `enter` succeeded."""
        self._usage[owner.name].num_calls -= 1

    def reading(self, owner: Owner) -> AbstractAsyncContextManager[None]:
        """Return the context in which the request of a call is read; it waits for earlier ones of the owner. Until then
        gRPC buffers little of the request.
        """
        return self._usage[owner.name].reads

    def pay(self, owner: Owner, num_bytes: int) -> None:
        """Count the bytes of a request that is not parsed yet; 0 before it is read. Raises QuotaExceeded while the
        owner has used up its bytes; that request is not counted. One request may use more than is left.
        """
        if wait_ms := self._wait_ms(owner):
            rate = owner.limits.bytes_per_second
            assert rate is not None, "only a limit makes callers wait"
            raise quota_exceeded(owner, "bytes_per_second", rate, wait_ms)
        self._usage[owner.name].bytes.left -= num_bytes

    def count(self, owner: Owner, num_bytes: int) -> None:
        """Count bytes of a call for which `pay` succeeded, before their work begins; negative bytes are given back."""
        self._usage[owner.name].bytes.left -= num_bytes

    def owe(self, owner: Owner, num_bytes: int) -> int:
        """Count the bytes of a message of a session. Returns the milliseconds for which the message has to wait."""
        wait_ms = self._wait_ms(owner)
        self._usage[owner.name].bytes.left -= num_bytes
        return wait_ms

    def _wait_ms(self, owner: Owner) -> int:
        rate, bucket = owner.limits.bytes_per_second, self._usage[owner.name].bytes
        if rate is None:
            return 0
        bucket.fill(rate, self._clock())
        return bucket.wait_ms(1, rate)


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
