"""Retries with exponential backoff: a policy, and the attempts of one call."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from kvplane.base.errors import KvplaneError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The limits and pauses of retries, with exponential backoff. Tests and simulations replace its randomness.

    Attributes:
        attempts: most retries after the first failure; None = limited by time only.
        first_delay_s: pause before the second retry; the first retry has none.
        max_delay_s: longest pause; pauses double up to it.
        sleep: waits for a number of seconds. None: time.sleep; in a session, a wait that `abort` interrupts.
        jitter: returns a number of [0, 1), which shortens a pause by up to half, so that clients do not retry together.
        within_s: no retry begins later than this number of seconds after the first failure.
    """

    attempts: int | None = 9
    first_delay_s: float = 0.05
    max_delay_s: float = 1.0
    sleep: Callable[[float], object] | None = None
    jitter: Callable[[], float] = random.random
    within_s: float = 60.0

    def delays_s(self) -> Iterator[float]:
        """Yield the pause before each retry, in seconds."""
        delay = 0.0
        for _ in count() if self.attempts is None else range(self.attempts):
            yield delay * (1.0 - self.jitter() / 2)
            delay = min(self.max_delay_s, 2 * delay) or self.first_delay_s


class Attempts:
    """The retries of one call. The number of retries counts from the last success, the time limit from the first
    failure.
    """

    def __init__(self, policy: RetryPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without a failure. `clock` returns the time in seconds."""
        self._policy, self._clock = policy, clock
        self._delays = policy.delays_s()
        self._deadline_s = float("inf")

    def pause_s(self, failed: KvplaneError) -> float:
        """Return the seconds to wait before the next attempt. Raises `failed` if no attempt is left."""
        now = self._clock()
        self._deadline_s = min(self._deadline_s, now + self._policy.within_s)
        delay = next(self._delays, None)
        if delay is None or now + delay > self._deadline_s:
            raise failed
        return delay

    def succeeded(self) -> None:
        """Count retries from 0 again. If the next attempt fails too, a pause precedes its retry."""
        self._delays = self._policy.delays_s()
        next(self._delays, None)
