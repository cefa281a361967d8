"""How often, how fast and for how long to try again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from kvplane.base.errors import KvplaneError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Attempts with growing pauses, bounded in number and in time. Chance is passed in, for tests and simulations.

    Attributes:
        attempts: after the first one failed; None = as many as there is time for.
        first_delay_s: pause before the second of them; the first comes at once.
        max_delay_s: longest pause; pauses double up to it.
        sleep: waits for that many seconds. None: time.sleep, or what an abort of the session ends.
        jitter: draws from [0, 1); a pause is shortened by up to half, so that many clients spread out.
        within_s: seconds after the first failure at which no further attempt begins.
    """

    attempts: int | None = 9
    first_delay_s: float = 0.05
    max_delay_s: float = 1.0
    sleep: Callable[[float], object] | None = None
    jitter: Callable[[], float] = random.random
    within_s: float = 60.0

    def delays_s(self) -> Iterator[float]:
        """The pause before each attempt."""
        delay = 0.0
        for _ in count() if self.attempts is None else range(self.attempts):
            yield delay * (1.0 - self.jitter() / 2)
            delay = min(self.max_delay_s, 2 * delay) or self.first_delay_s


class Attempts:
    """Those of one call. They are counted from the last success, the time from the first failure."""

    def __init__(self, policy: RetryPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` counts seconds."""
        self._policy, self._clock = policy, clock
        self._delays = policy.delays_s()
        self._deadline_s = float("inf")

    def pause_s(self, failed: KvplaneError) -> float:
        """How long to wait before the next attempt; raises `failed` when there is none."""
        now = self._clock()
        self._deadline_s = min(self._deadline_s, now + self._policy.within_s)
        delay = next(self._delays, None)
        if delay is None or now + delay > self._deadline_s:
            raise failed
        return delay

    def succeeded(self) -> None:
        """Count anew. What breaks at once all the same is tried again after a pause."""
        self._delays = self._policy.delays_s()
        next(self._delays, None)
