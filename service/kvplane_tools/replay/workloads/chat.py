"""The built-in workload: chats and agents with shared system prompts, generated from a seed.

    chat    system | user 1 | answer 1 | user 2 | answer 2 | ...        a person reads and thinks between turns
    agent   tools  | task   | call 1   | result | call 2   | ...        a tool answers within seconds

The prompt of a turn is the previous prompt, its generated answer, and new text, as in conversations. Lengths are
log-normal with medians that are shares of `max_model_len`, so that a session fills the model's context over its turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from kvplane.base.errors import InvalidArgument
from kvplane_tools.replay.workloads.requests import Span, TokenSource, TraceRequest, overlay

MIN_MODEL_LEN = 256
_SCALED_MODEL_LEN = 16_384  # above it lengths do not grow: longer contexts do not make people write more
_SECONDS_PER_TOKEN = 0.02  # least time to read an answer, or to run a tool


@dataclass(frozen=True, slots=True)
class ChatShape:
    """The size and mix of the built-in workload. The defaults are those of typical services.

    Attributes:
        max_model_len: longest prompt with its output, in tokens; `MIN_MODEL_LEN` or more.
        num_sessions: number of chats and agents together.
        sessions_per_s: mean number of new sessions per second; they start at random times.
        agent_share: share of agents in the sessions, 0..1.
        num_system_prompts: number of system prompts of chats, used with Zipf frequencies. Agents have a quarter as
            many.
    """

    max_model_len: int
    num_sessions: int = 100
    sessions_per_s: float = 1.0
    agent_share: float = 0.3
    num_system_prompts: int = 8

    def __post_init__(self) -> None:
        _require(self.max_model_len >= MIN_MODEL_LEN, "max_model_len", self.max_model_len, f"{MIN_MODEL_LEN} or more")
        _require(self.num_sessions >= 0, "num_sessions", self.num_sessions, "0 or more")
        _require(self.sessions_per_s > 0, "sessions_per_s", self.sessions_per_s, "above 0")
        _require(0 <= self.agent_share <= 1, "agent_share", self.agent_share, "in 0..1")
        _require(self.num_system_prompts >= 1, "num_system_prompts", self.num_system_prompts, "1 or more")

    @property
    def unit(self) -> int:
        """The length in tokens of which the medians of all lengths are multiples."""
        return min(self.max_model_len, _SCALED_MODEL_LEN) // 64


@dataclass(frozen=True, slots=True)
class _Kind:
    """The parameters that differ between chats and agents.

    Lengths are medians, in multiples of `ChatShape.unit`; `gap_s` is the mean pause after an answer, in seconds.
    """

    name: str
    first_system: int
    num_systems: int
    system_units: int
    new_units: float
    output_units: float
    mean_turns: float
    gap_s: float


def chat_workload(rng: Random, shape: ChatShape) -> Iterator[TraceRequest]:
    """Yield the requests of all sessions in order of arrival. Equal `rng` and `shape` give equal requests."""
    clock = Random(rng.getrandbits(64))
    starts_s = list(accumulate(clock.expovariate(shape.sessions_per_s) for _ in range(shape.num_sessions)))
    chat = _Kind("chat", 0, shape.num_system_prompts, 5, 1.0, 1.5, 5, 15.0)
    agent = _Kind("agent", shape.num_system_prompts, -(-shape.num_system_prompts // 4), 10, 2.5, 0.6, 12, 1.0)

    def sessions() -> Iterator[list[TraceRequest]]:
        for number, start_s in enumerate(starts_s):
            own = Random(rng.getrandbits(64))
            kind = agent if own.random() < shape.agent_share else chat
            yield list(_Session(kind, shape, number, own).turns(start_s))

    return overlay(starts_s, sessions())


class _Session:
    """One chat or agent: a shared system prompt, and its own input and output texts."""

    def __init__(self, kind: _Kind, shape: ChatShape, number: int, rng: Random) -> None:
        self._kind, self._shape, self._rng = kind, shape, rng
        self._name = f"{kind.name}-{number}"
        self._number = number
        self._written = self._answered = 0

    def turns(self, start_s: float) -> Iterator[TraceRequest]:
        """Yield the turns of the session. It ends early if the next turn would exceed `max_model_len`."""
        kind, rng, now_s = self._kind, self._rng, start_s
        num_turns = 1 + int(rng.expovariate(1 / kind.mean_turns))
        prompt = self._system()
        for turn in range(num_turns):
            prompt += self._new_text()
            output = self._answer()
            if len(prompt) + len(output) > self._shape.max_model_len:
                return
            yield TraceRequest(f"{self._name}/{turn}", now_s, self._name, prompt, output)
            prompt += output
            now_s += len(output) * _SECONDS_PER_TOKEN + rng.expovariate(1 / kind.gap_s)

    def _system(self) -> TokenSource:
        """Return one of the shared system prompts. The k-th is used 1/k as frequently as the first."""
        kind = self._kind
        choices = range(kind.num_systems)
        choice = self._rng.choices(choices, [1 / (k + 1) for k in choices])[0]
        length = kind.system_units * self._shape.unit + choice * self._shape.unit // 2
        stream = kind.first_system + choice
        return TokenSource((Span(stream, 0, min(length, self._shape.max_model_len // 3)),))

    def _new_text(self) -> TokenSource:
        start = self._written
        self._written += self._length(self._kind.new_units)
        shared = self._shape.num_system_prompts * 2
        return TokenSource((Span(shared + self._number, start, self._written),))

    def _answer(self) -> TokenSource:
        start = self._answered
        self._answered += self._length(self._kind.output_units)
        return TokenSource((Span(self._number, start, self._answered, generated=True),))

    def _length(self, median_units: float) -> int:
        return max(1, round(self._rng.lognormvariate(0.0, 0.7) * median_units * self._shape.unit))


def _require(holds: bool, field: str, found: float, allowed: str) -> None:
    if not holds:
        raise InvalidArgument(f"it is {found}, but must be {allowed}", field=field)
