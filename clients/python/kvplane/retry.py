"""How often and how fast to try again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounded attempts with growing pauses. Clock and chance are passed in, for tests and simulations.

    Attributes:
        attempts: after the first one failed.
        first_delay_s: pause before the second of them; the first comes at once.
        max_delay_s: longest pause; pauses double up to it.
        sleep: waits so many seconds.
        jitter: draws from [0, 1); a pause is shortened by up to half, so that many clients spread out.
    """

    attempts: int = 9
    first_delay_s: float = 0.05
    max_delay_s: float = 1.0
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = random.random

    def delays_s(self) -> Iterator[float]:
        """The pause before each attempt."""
        delay = 0.0
        for _ in range(self.attempts):
            yield delay * (1.0 - self.jitter() / 2)
            delay = min(self.max_delay_s, 2 * delay) or self.first_delay_s
