"""The plan and the result types that all parts share. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REFERENCE = "vLLM"
IN_PROCESS, SOCKET, UNIX, TCP = "in process", "session socket", "Unix socket", "TCP loopback"
PLACES = (IN_PROCESS, SOCKET, UNIX, TCP)  # all but the first two by gRPC

# Kinds of intervals.
DECODE, AHEAD, WAIT = "decode", "decode ahead", "decode ahead, waiting"
DELAY, CPU = "decode ahead, delay", "decode ahead, process CPU"  # delay: what other work waits for Python's lock
PACED = "decode, paced"  # of the reference: behind the same work of the GPU as a step sent ahead
MISS, HIT = "admission miss", "admission hit"

DEFAULT_HASH, CBOR_HASH = "default", "sha256_cbor"
HASHES: Mapping[str, Mapping[str, str]] = {
    DEFAULT_HASH: {"ours": "kvplane", "reference": "sha256"},
    CBOR_HASH: {"ours": "sha256_cbor", "reference": "sha256_cbor"},
}

SETTLING_STEPS = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """The cases of one process start.

    Attributes:
        models: by name.
        requests: decoding requests, per case.
        prompts: tokens of the admitted prompt, per case.
        rounds: measured rounds of each case; one more goes before them.
        steps: decode steps of a round.
        ahead_steps: of a round, sent one step ahead.
        gpu_ms: how long the GPU is taken to work on such a step: half of it the engine sleeps, and half of it does
            other Python work.
        admissions: prompts admitted in a round, each twice: a miss, then a full hit.
        reference: measure it too; without it there are no ratios.
    """

    models: tuple[str, ...]
    requests: tuple[int, ...] = (1, 8, 32, 64, 256, 1024)
    prompts: tuple[int, ...] = (2048, 6144, 32768)
    rounds: int = 7
    steps: int = 8
    ahead_steps: int = 4
    gpu_ms: float = 20.0
    admissions: int = 1
    reference: bool = True

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Plan:
        """The plan that was written as JSON."""
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
        }
        return cls(**given)

    @property
    def all_rounds(self) -> int:
        """Including the one that is not measured."""
        return self.rounds + 1

    @property
    def all_steps(self) -> int:
        """Steps that each side of a decode case has made in the end, measured or not.

        The last are no steps ahead, which give back a step later what they need no more.
        """
        return self.all_rounds * (self.steps + self.ahead_steps + 2) + SETTLING_STEPS


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the report: `size` in requests or tokens; `hashing` of admissions."""

    model: str
    kind: str
    size: int
    hashing: str = ""


@dataclass(frozen=True, slots=True)
class Round:
    """Durations of one side in one round, in microseconds per interval."""

    case: Case
    side: str
    median_us: float
    mean_us: float
