"""The work of both sides. Standard library only: the reference's environment has no kvplane."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

VOCABULARY = 128_000
DECODE_PROMPT = 1100  # tokens; longer than every window, so that each step releases blocks
ADMISSION_SLOTS = 3  # longest prompts that the pool of an admission case holds before it evicts
MAX_MODEL_LEN = 40_960
FILLING_BLOCKS = 128  # of a prompt that fills the pool, in each group
SETUP_BATCH = 32  # requests admitted per step while a case is set up
LOOPS_PER_S = 20_000_000


@dataclass(frozen=True, slots=True)
class Shape:
    """Properties of a model that determine the work.

    Attributes:
        unit: tokens of a block; the four models have equal ones in all their groups.
        num_groups: KV cache groups.
        has_states: recurrent states: a prefill chunk ends at the last multiple of the unit, the rest is another one.
    """

    unit: int
    num_groups: int
    has_states: bool

    def decode_prompts(self, num_requests: int) -> list[int]:
        """Prompt lengths that spread the requests evenly over a block: every step starts and fills its share."""
        spread = min(num_requests, self.unit)
        return [DECODE_PROMPT + index * self.unit // spread % self.unit for index in range(num_requests)]

    def decode_blocks(self, num_requests: int, num_steps: int) -> int:
        """Blocks for the requests over the steps, with a margin."""
        tokens = DECODE_PROMPT + 2 * self.unit + num_steps
        return 64 + num_requests * self.num_groups * (tokens // self.unit + 2)

    def admission_blocks(self, num_tokens: int) -> int:
        """Blocks of a pool that begins to evict after a few prompts of this length."""
        return 64 + ADMISSION_SLOTS * self.num_groups * (num_tokens // self.unit + 2)

    def filling(self, num_blocks: int) -> tuple[int, int]:
        """The length and number of prompts that fill a pool with cached blocks before a decode case."""
        blocks = max(1, min(num_blocks // self.num_groups // 2, FILLING_BLOCKS))
        return blocks * self.unit, 2 * num_blocks // (blocks * self.num_groups) + 1

    def first_chunk(self, num_tokens: int, num_hit: int) -> int:
        """Tokens that the scheduler gives a prompt at its admission; it has budget for all."""
        stop = (num_tokens - 1) // self.unit * self.unit
        return (stop if self.has_states and num_hit < stop else num_tokens) - num_hit


def prompt(seed: int, num_tokens: int) -> list[int]:
    """A prompt that shares no block with those of other seeds."""
    return [(seed * 1_000_003 + position * 7919) % VOCABULARY for position in range(num_tokens)]


def sampled(step: int, num_requests: int) -> list[int]:
    """The tokens that the model samples in a step, one per request."""
    return [(step * 104_729 + index * 31) % VOCABULARY for index in range(num_requests)]


def gpu(seconds: float) -> None:
    """In the GPU's place: the thread does other Python work, and then sleeps, half of the time each."""
    other_work(seconds / 2)
    time.sleep(seconds / 2)


def other_work(seconds: float) -> None:
    """Pure Python of about this length."""
    total = 0
    for index in range(int(seconds * LOOPS_PER_S)):
        total += index


class Clock:
    """The clock of one thread, which stands still while the thread is ready to run and other threads have the CPU.

    Linux counts that time in /proc/thread-self/schedstat; elsewhere this is a wall clock. It does not measure the wait
    for a message, which may come while the thread has no CPU.
    """

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = -1

    def now_ns(self) -> int:
        """The time in nanoseconds. A reading takes some microseconds."""
        waited = int(os.pread(self._file, 100, 0).split()[1]) if self._file >= 0 else 0
        return time.perf_counter_ns() - waited
