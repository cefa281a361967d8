"""Turns intents into operations by the answers so far, as a scheduler would, and gives them to both managers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvplane.base.checkpoints import CheckpointRule
from kvplane.base.errors import KvplaneError
from kvplane.base.groups import MambaMode
from tests.conformance.divergence import Divergence
from tests.conformance.header import trace_spec
from tests.conformance.live import intents
from tests.conformance.live.intents import Intent
from tests.conformance.live.peer import Reference
from tests.conformance.operations import OPERATIONS
from tests.conformance.paths import InProcessPath
from tests.conformance.replay import Replayer

Record = dict[str, Any]
# If the reference answers and kvplane raises, that is a difference too.
CRASHES = (AssertionError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, KvplaneError)
NO_CRASH = "an answer"


@dataclass(frozen=True, slots=True)
class Flight:
    """One grant whose step has not run: tokens, drafts among them, and whether it samples a token."""

    granted: int
    drafts: int
    samples: bool


@dataclass(eq=False)
class Request:
    """A scheduler's state of a request. `place`: tokens that steps in flight will sample (placeholders)."""

    name: str
    segments: tuple[tuple[int, int], ...]
    tokens: int
    prompt: int
    status: str = "WAITING"  # RUNNING, LOADING, PREEMPTED
    computed: int = 0
    place: int = 0
    single_group_hit: int = 0
    flights: deque[Flight] = field(default_factory=deque)
    stale: int = 0  # steps that were in flight when it was preempted

    @property
    def in_flight(self) -> int:
        """Tokens whose step has not run."""
        return sum(one.granted for one in self.flights)

    @property
    def prefill_end(self) -> int:
        """End of the prefill chunks, in tokens: a resumed request computes its output again, but for the last token."""
        return max(self.prompt, self.tokens - 1)

    def text(self, position: int) -> int:
        """The token that would continue the prompt's last segment at this position."""
        seed, length = self.segments[-1]
        return (seed * 1000003 + (position - self.prompt + length) * 7919) % 50021


class AnswerEach(Replayer):
    """Compares every operation before the next is chosen."""

    ANSWERS_NEEDED = frozenset(OPERATIONS)


class Driver:
    """One run.

    Args:
        header: from the reference, complete.
        peer: the reference, with a manager of this header.
    """

    def __init__(self, header: Record, peer: Reference) -> None:
        self.header = header
        self.records: list[Record] = []
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.held: set[str] = set()
        self._free = 0
        self._peer = peer
        self._max_len = header["manager_args"]["max_model_len"]
        self._unit = header["manager_args"]["scheduler_block_size"]
        self._states = [one["block_size"] for one in header["groups"] if one["mamba_cache_mode"] == "align"]
        self.replayer = AnswerEach(header, lambda spec: InProcessPath(spec, check_every=10))
        spec = trace_spec(header)
        states = [group for group in spec.groups if group.mamba_mode is MambaMode.ALIGN]
        self._rules = [CheckpointRule.of(spec, group) for group in states]
        self._handlers: dict[type, Callable[[Any], object]] = {
            intents.Add: self._add, intents.Admit: self._admit, intents.Loaded: self._loaded, intents.Run: self._run,
            intents.Result: self._result, intents.Preempt: self._preempt, intents.Finish: self._finish,
            intents.Release: self._release, intents.Step: lambda _: self._do("step"), intents.Evict: self._evict,
            intents.Reset: lambda _: self._do("reset"), intents.Look: lambda _: self._do("snapshot"),
        }  # fmt: skip

    def perform(self, intent: Intent) -> None:
        """Carry the intent out as far as it is possible now; raises Divergence or ReferenceFailed."""
        self._handlers[type(intent)](intent)

    def perform_all(self, sequence: Iterable[Intent]) -> None:
        """One after the other, and a look at the whole state at the end."""
        for intent in sequence:
            self.perform(intent)
        self.perform(intents.Look())

    def with_status(self, *wanted: str) -> list[Request]:
        """Requests in one of the states, in order of arrival."""
        return [one for one in self.requests.values() if one.status in wanted]

    def _do(self, op: str, **inputs: Any) -> Record:
        record = self._peer.ask({"op": op} | inputs)
        self.records.append(record)
        self._free = record["free"]
        line = len(self.records) + 1
        try:
            self.replayer.replay(line, record)
        except CRASHES as error:
            raise Divergence(line, record, type(error).__name__, NO_CRASH, str(error)) from error
        return record

    # -- arrivals and ends -------------------------------------------------------------------------------------------

    def _add(self, one: intents.Add) -> None:
        inputs: Record = {"segs": [list(pair) for pair in one.segments], "salt": one.salt, "lora": one.lora}
        inputs["mm"] = [list(item) for item in one.items] or None
        if one.skip:
            inputs["skip"] = True
        record = self._do("new", id=one.name, **inputs)
        self.requests[one.name] = Request(one.name, one.segments, record["n"], record["n"])

    def _finish(self, one: intents.Finish) -> None:
        request = self.requests.pop(one.name, None)
        if request is None:
            return
        if request in self.running:
            self.running.remove(request)
        if one.hold:
            self.held.add(one.name)
        self._do("hold" if one.hold else "free", id=one.name)

    def _release(self, one: intents.Release) -> None:
        if one.name in self.held:
            self.held.remove(one.name)
            self._do("release", id=one.name)

    def _preempt(self, one: intents.Preempt) -> None:
        request = self.requests.get(one.name)
        if request is not None and request.status in ("RUNNING", "LOADING"):
            self._take_blocks(request)

    def _take_blocks(self, request: Request) -> None:
        self._do("preempt", id=request.name)
        if request in self.running:
            self.running.remove(request)
        request.stale = len(request.flights)
        request.computed = request.place = 0
        request.status = "PREEMPTED"

    def _evict(self, one: intents.Evict) -> None:
        self._do("evict", ids=list(one.blocks))

    # -- admission ---------------------------------------------------------------------------------------------------

    def _admit(self, one: intents.Admit) -> None:
        request = self.requests.get(one.name)
        if request is None or request.status not in ("WAITING", "PREEMPTED") or request.flights:
            return
        found = self._do("lookup", id=one.name)
        hit, request.single_group_hit = found["hit"], found["bnd"]
        external, load = self._external(one, request, hit)
        start = hit + external
        new = 0 if load else min(one.chunk, request.tokens - start, self._max_len - start)
        if one.aligned:
            new = self._align(request, start, new)
        if new <= 0 and not load:
            return
        inputs: Record = {"new": new, "comp": 0, "hit": hit, "use_hit": True, "st": request.status}
        inputs |= ({"ext": external} if external else {}) | ({"delay": True} if load else {}) | dict(one.options)
        if not self._do("alloc", id=one.name, **inputs)["ok"]:
            return
        request.computed = start + new
        request.status = "LOADING" if load else "RUNNING"
        if not load:
            self.running.append(request)
            self._launch(request, new, 0)

    def _external(self, one: intents.Admit, request: Request, hit: int) -> tuple[int, bool]:
        """Tokens from outside behind a hit of whole blocks, and whether the request waits for them.

        They are whole scheduler blocks, or all that a request misses (a prefill done elsewhere), for which it waits.
        """
        if hit % self._unit:
            return 0, False
        if self._states and self._free < self._blocks_at_most(request.tokens):
            return 0, False  # the reference under-counts the states of external tokens, and then crashes
        most = request.tokens - hit - (0 if one.load else 1)
        external = most if one.load and one.external >= most else min(one.external, most) // self._unit * self._unit
        return external, one.load and external > 0

    def _blocks_at_most(self, num_tokens: int) -> int:
        return sum(-(-num_tokens // group["block_size"]) + 4 for group in self.header["groups"])

    def _loaded(self, one: intents.Loaded) -> None:
        request = self.requests.get(one.name)
        if request is None or request.status != "LOADING":
            return
        valid = (request.computed - one.missing) // self._unit * self._unit if one.missing else request.computed
        if valid <= 0:
            self._take_blocks(request)
            return
        self._do("cache", id=one.name, n=valid)
        request.computed = min(valid, request.tokens - 1)
        request.status = "RUNNING"
        self.running.append(request)

    # -- running -----------------------------------------------------------------------------------------------------

    def _run(self, one: intents.Run) -> None:
        request = self.requests.get(one.name)
        if request is None or request.status != "RUNNING":
            return
        missing = request.tokens + request.place - request.computed
        drafts = one.drafts if missing == 1 else 0
        new = min(one.chunk, missing + drafts, self._max_len - 1 - request.computed)
        if one.aligned:
            new = self._align(request, request.computed, new)
        if missing <= 0 or new <= 0:
            return
        inputs: Record = {"new": new, "comp": request.computed, "st": "RUNNING"} | dict(one.options)
        if request.in_flight:
            inputs["infl"] = request.in_flight
        while not self._do("alloc", id=one.name, **inputs)["ok"]:
            victim = self.running[-1]
            self._take_blocks(victim)
            if victim is request:
                return
        request.computed += new
        self._launch(request, new, max(0, new - missing))

    def _launch(self, request: Request, granted: int, drafts: int) -> None:
        samples = request.computed >= request.tokens + request.place
        request.flights.append(Flight(granted, drafts, samples))
        if samples:
            request.place += 1 + drafts

    def _align(self, request: Request, start: int, new: int) -> int:
        """Clip a prefill chunk as the scheduler does for recurrent state (STEPS.md, section 7)."""
        if not self._states or start >= request.prefill_end or new <= 0:
            return new
        size, end = max(self._states), start + new
        if end >= request.prefill_end and all(rule.position(start, end) for rule in self._rules):
            return new  # the state from which others continue is written inside the chunk
        if end < request.prefill_end and end // size * size > start:
            end = end // size * size
        alone = request.single_group_hit
        stops = [(request.tokens - 1) // size * size, alone - (alone - start) % size]
        if self.header["manager_args"].get("enable_mamba_shared_prefix_checkpoint"):
            stops.append(alone)
        if start % size:
            stops.append(-(-start // size) * size)
        if self.header["partial_hash_hits"]:
            unit = self.header["manager_args"]["hash_block_size"]
            stops.append((request.prompt - 1) // unit * unit)
        return min([end, *(stop for stop in stops if start < stop < end)]) - start

    def _result(self, one: intents.Result) -> None:
        request = self.requests.get(one.name)
        if request is None or not request.flights:
            return
        flight = request.flights.popleft()
        if request.stale:
            request.stale -= 1
            self._sample(request, int(flight.samples), one)
            return
        if not flight.samples:
            return
        accepted = min(one.accepted, flight.drafts)
        kept = min(accepted + 1, self._max_len - request.tokens)
        request.computed -= flight.drafts + 1 - kept if kept <= accepted else flight.drafts - accepted
        request.place -= 1 + flight.drafts
        self._sample(request, kept, one)
        if one.commit:
            self._do("cache", id=one.name, n=request.computed - request.in_flight)
        if request.tokens >= self._max_len:
            self._finish(intents.Finish(one.name))

    def _sample(self, request: Request, count: int, one: intents.Result) -> None:
        count = min(count, self._max_len - request.tokens)
        if count <= 0:
            return
        drawn = [request.text(request.tokens + i) for i in range(count)]
        if one.surprise:
            drawn[-1] = 50021 + request.tokens
        self._do("tok", id=request.name, t=drawn)
        request.tokens += count
