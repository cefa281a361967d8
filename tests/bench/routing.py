"""Routing policies on a fleet of simulated engines: time to the first token, throughput, hits and claims by policy.

    python -m tests.bench.routing                     prints tables, writes results/routing.md
    python -m tests.bench.routing --scenes shared --rates 20 30 --limit 400 --no-write

Every engine is kvplane's own allocator under its scheduler, on a virtual clock; its cache events reach the router's
index after `DELAY_S`, and its answers are reported to the router's decisions, as in `kvplane router`. The groups are
those of gpt-oss: full attention and a window of 128 tokens, in one pool that holds a few prompts only. Times of steps
are a model, not a measurement: PREFILL tokens per second, BASE_US for a step, ROW_US for each prompt that decodes.

`shared` has prompts that share the first 15,900 of 16,800 tokens in groups, with Poisson arrivals; `conversation` and
`Weka` are public traces (KVPLANE_WORKLOADS), their arrivals compressed to the given rate.

    random, round_robin, least_loaded    know no cache
    approximate       weights on what was sent to each place before, least recently used first out
    full_only         weights on an index of full attention alone, as routers of today have it
    weights           weights on the engines' hits
    ttft, cost        the least predicted time to the first token; the least cost for all
"""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from statistics import mean, quantiles

from kvplane.base.groups import GroupKind, GroupSpec, ReplicaSpec
from kvplane.base.hashing import HashScheme, RequestHasher
from kvplane.base.step import CacheEvent, EventKind, Part, PartResult, RowFlag, Step, StepResult
from kvplane.scheduling import Limits, Request, Scheduled, Scheduler
from kvplane_core.face.cache_events import runs_of
from kvplane_core.face.loader import new_replica
from kvplane_fleet.decisions import Ask, Decision, Decisions, Event
from kvplane_fleet.domains import Domain, keys_of
from kvplane_fleet.fleet import Fleet as Places
from kvplane_fleet.fleet import Prompt
from kvplane_fleet.policies import Chooser, Option, Policy
from kvplane_fleet.settings import PlaceSettings, RouterSettings
from kvplane_fleet.wire.events import Batch, GroupFormat, Removed, Stored, Tier
from kvplane_tools.replay.engine import Engine
from kvplane_tools.replay.fleet import Arriving, Fleet
from kvplane_tools.replay.plan import NS_PER_SECOND, CostModel, EngineConfig
from kvplane_tools.replay.requests import LiveRequest
from kvplane_tools.replay.workloads import Span, TokenSource, TraceRequest
from tests.bench.machine import machine_line
from tests.bench.policies import requests_of
from tests.conftest import workloads_folder, workloads_line
from tests.router.fleets import finished

RESULTS = Path(__file__).parent / "results" / "routing.md"
BLOCK, WINDOW, BUDGET, RUNNING, OUTPUT = 128, 128, 8192, 64, 128
PREFILL, BASE_US, ROW_US = 40_000, 2_600, 850
DELAY_S = 0.05
SHARED, OWN, QUESTIONS = 15_900, 900, 10  # tokens, and prompts of a group
MODEL = "m"
APPROXIMATE, FULL_ONLY = "approximate", "full_only"
POLICIES = (
    "random", "round_robin", "least_loaded", APPROXIMATE, FULL_ONLY, "weights", "ttft", "cost",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RowCost(CostModel):
    """A step that also takes time for each prompt that decodes in it."""

    def step_ns(self, prefill_tokens: int, decode_rows: int) -> int:
        """See CostModel."""
        return CostModel.step_ns(self, prefill_tokens, 0) + ROW_US * 1000 * decode_rows


COST = RowCost(PREFILL, 0, BASE_US)
SETTINGS = RouterSettings(prefill_tokens_per_s=PREFILL / 2, decode_s=(BASE_US + 8 * ROW_US) / 1e6)


@dataclass(frozen=True, slots=True)
class Scene:
    """A workload on a fleet: its engines, the blocks of each, requests, and arrivals per second."""

    name: str
    engines: int
    num_blocks: int
    limit: int
    rates: tuple[float, ...]

    def spec(self) -> ReplicaSpec:
        """Return the replica of each engine."""
        cap = 1 + -(-(WINDOW + BUDGET) // BLOCK)
        window = GroupSpec(
            GroupKind.SLIDING_WINDOW, BLOCK, window=WINDOW, lookup_class=1, admission_cap_blocks=cap
        )  # fmt: skip
        return ReplicaSpec(
            groups=(GroupSpec(GroupKind.FULL_ATTENTION, BLOCK), window),
            num_blocks=self.num_blocks + 1,
            max_model_len=1 << 20,
            hash_block_size=BLOCK,
            scheduler_block_size=BLOCK,
            max_in_flight_tokens=BUDGET,
        )


SCENES = (
    Scene("shared", 8, 1100, 1200, (15.0, 25.0, 35.0)),
    Scene("conversation", 8, 3000, 1200, (8.0, 14.0)),
    Scene("Weka", 4, 6000, 500, (1.0, 2.0)),
)


def shared_prompts(limit: int, rng: Random) -> list[TraceRequest]:
    """Return prompts that share their first tokens with those of their group, shuffled; arrivals are set later."""
    groups = -(-limit // QUESTIONS)
    numbers = [(group, question) for group in range(groups) for question in range(QUESTIONS)][:limit]
    rng.shuffle(numbers)
    found = []
    for at, (group, question) in enumerate(numbers):
        own = groups + group * QUESTIONS + question
        prompt = TokenSource((Span(group, 0, SHARED), Span(own, 0, OWN)))
        found.append(TraceRequest(str(at), 0.0, "", prompt, TokenSource((Span(own, 0, OUTPUT, generated=True),))))
    return found


def arrivals(scene: Scene, rate: float, seed: int, files: ExitStack) -> Iterator[TraceRequest]:
    """Yield the requests of a scene at a mean rate per second: Poisson for `shared`, else compressed as a whole."""
    rng = Random(seed)
    if scene.name == "shared":
        at_s = 0.0
        for one in shared_prompts(scene.limit, rng):
            at_s += rng.expovariate(rate)
            yield replace(one, arrival_s=at_s)
        return
    folder = workloads_folder()
    assert folder is not None, workloads_line()
    requests = list(requests_of(folder, scene.name, scene.limit, files))
    first_s, last_s = requests[0].arrival_s, requests[-1].arrival_s
    factor = len(requests) / rate / max(last_s - first_s, 1e-9)
    for one in requests:
        yield replace(one, arrival_s=(one.arrival_s - first_s) * factor)


class Timeline:
    """What reaches the router later, in order of time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._number = 0

    def later(self, at_s: float, act: Callable[[], object]) -> None:
        """Call `act` once the time is reached."""
        self._number += 1
        heappush(self._due, (at_s, self._number, act))

    def advance(self, to_s: float) -> None:
        """Advance to a time, and call what is due on the way."""
        while self._due and self._due[0][0] <= to_s:
            at_s, _, act = heappop(self._due)
            self.now_s = max(self.now_s, at_s)
            act()
        self.now_s = max(self.now_s, to_s)


class PublishingSession:
    """A session (`StepSession`) on a core of its own, whose events are kept until they are taken."""

    waiting_requests: int | None = None

    def __init__(self, spec: ReplicaSpec) -> None:
        self.replica, self.spec, self._seq = new_replica(spec), spec, 0
        self.replica.begin_epoch(1)
        self.events: list[CacheEvent] = []

    def submit(self, *parts: Part) -> int:
        """Apply one step; the one before it is executed."""
        self._seq += 1
        self._result = self._apply(Step(1, self._seq, list(parts), executed_through=self._seq - 1))
        for part in self._result.parts:
            self.events += [*runs_of(part.events), *part.tier_events]
        return self._seq

    def _apply(self, step: Step) -> StepResult:
        return self.replica.apply(step)

    def receive(self) -> StepResult:
        """Return the result of the step."""
        return self._result


class TimedScheduler(Scheduler):
    """A scheduler that says which requests get their first token."""

    def __init__(self, spec: ReplicaSpec, limits: Limits, first_token: Callable[[LiveRequest], None]) -> None:
        super().__init__(spec, limits)
        self._first_token = first_token

    def finish_row(self, row: Scheduled, sampled: Sequence[int]) -> int:
        """See Scheduler."""
        request = row.request
        assert isinstance(request, LiveRequest)
        if row.num_outputs and request.num_tokens == request.num_prompt:
            self._first_token(request)
        return super().finish_row(row, sampled)


class ServedEngine(Engine):
    """An engine that reports its events, first tokens and ends to the router, at their times."""

    def __init__(self, name: str, spec: ReplicaSpec, router: Router) -> None:
        self._publishing = PublishingSession(spec)
        super().__init__(self._publishing, EngineConfig(RUNNING, BUDGET, max_output=OUTPUT), COST)
        limits = Limits(RUNNING, BUDGET, admit_rows=16, admit_flags=RowFlag.FULL_FIT)
        self._scheduler = TimedScheduler(spec, limits, self._first_token)
        self._name, self._router = name, router

    @property
    def now_s(self) -> float:
        """The engine's time."""
        return self.clock_ns / NS_PER_SECOND

    def _first_token(self, request: LiveRequest) -> None:
        self._router.first_token(self.now_s, request)

    def _compute(self, part: Part, answer: PartResult) -> None:
        super()._compute(part, answer)
        events, self._publishing.events = self._publishing.events, []
        if events:
            self._router.publish(self.now_s, self._name, events)

    def _finish(self, request: Request) -> None:
        super()._finish(request)
        assert isinstance(request, LiveRequest), request.error
        self._router.ended(self.now_s, request)


@dataclass(slots=True)
class Outcome:
    """What became of the requests of one run."""

    first_token_s: list[float] = field(default_factory=list)
    prompt: int = 0
    claimed: int = 0
    real: int = 0
    over: int = 0  # requests of which more was claimed than hit
    full: int = 0  # tokens that full attention alone claims at the chosen place
    generated: int = 0
    last_s: float = 0.0

    def row(self) -> list[str]:
        """Return the cells of the table."""
        times = sorted(self.first_token_s)
        tenths = quantiles(times, n=100, method="inclusive")
        return [
            *(f"{value:.2f}" for value in (mean(times), tenths[49], tenths[89], tenths[98])),
            f"{self.generated / self.last_s:,.0f}",
            f"{100 * self.real / self.prompt:.1f}",
            f"{100 * self.claimed / self.prompt:.1f}",
            f"{100 * self.over / len(times):.1f}",
        ]


class History:
    """What was sent to each place, as a router knows it that follows no events; the least recently used leaves."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._sent: dict[str, OrderedDict[int, None]] = {}

    def hit_tokens(self, place: str, keys: Sequence[int]) -> int:
        """Return the leading tokens that were sent there before."""
        sent = self._sent.setdefault(place, OrderedDict())
        return next((at for at, key in enumerate(keys) if key not in sent), len(keys)) * BLOCK

    def send(self, place: str, keys: Sequence[int]) -> None:
        """Take note of a prompt."""
        sent = self._sent.setdefault(place, OrderedDict())
        for key in keys:
            sent[key] = None
            sent.move_to_end(key)
        while len(sent) > self._capacity:
            sent.popitem(last=False)


class Router:
    """The product's decisions over the places, on the timeline."""

    def __init__(
        self, spec: ReplicaSpec, names: Sequence[str], policy: str, seed: int, settings: RouterSettings = SETTINGS,
        namespace: bytes = b"",
    ) -> None:  # fmt: skip
        self.time, self.outcome, self._policy = Timeline(), Outcome(), policy
        self._places, self._history = Places(), History(spec.num_blocks)
        self._decisions = Decisions(self._places, settings, lambda: self.time.now_s)
        self._decisions._chooser = self._chooser = Chooser(Random(seed))
        for name in names:
            followed = self._places.add(PlaceSettings(name, service="inproc", model=MODEL))
            followed.source.is_connected = True
            followed.place.use(spec, namespace)
        self._scheme, self._domain = HashScheme.of(spec), followed.place.domain
        self._forms = [GroupFormat(group.kind.value, group.block_size, group.window) for group in spec.groups]
        self._open: dict[str, tuple[str, int, int, float]] = {}  # by request: decision, claims, arrival

    def route(self, request: TraceRequest) -> str:
        """Return the place of a request, and book it there."""
        self.time.advance(request.arrival_s)
        assert self._domain is not None
        raw = RequestHasher(self._scheme).append(request.prompt.packed())
        known = {self._domain: keys_of(raw, self._scheme.digest.size)}
        prompt = Prompt((), keys=known[self._domain], num_keyed=len(request.prompt))
        ask = Ask(MODEL, prompt, book=True, output_tokens=request.output_tokens)
        if self._policy in (APPROXIMATE, FULL_ONLY):
            place, claimed = self._by_other_claims(ask, known)
            decision = self._decisions.score(replace(ask, candidates=frozenset((place,))), known)
        else:
            decision = self._decisions.score(replace(ask, policy=Policy(self._policy)), known)
            place, claimed = decision.places[0].claim.place, decision.places[0].claim.expected
        self._history.send(place, known[self._domain])
        claim = decision.places[0].claim.claim
        assert claim is not None
        self._open[request.name] = decision.name, claimed, claim.alone[0], request.arrival_s
        return place

    def _by_other_claims(self, ask: Ask, known: Mapping[Domain, Sequence[int]]) -> tuple[str, int]:
        """Choose by weights as if the claims were others; return the place and its claim."""
        decision: Decision = self._decisions.score(replace(ask, book=False), known)
        (keys,), claims, options = known.values(), dict[str, int](), list[Option]()
        for one in decision.places:
            assert one.claim.claim is not None
            full = one.claim.claim.alone[0]
            tokens = full if self._policy == FULL_ONLY else self._history.hit_tokens(one.claim.place, keys)
            claims[one.claim.place] = min(tokens, ask.prompt.num_tokens - 1)
            options.append(replace(one.option, cached_share=claims[one.claim.place] / ask.prompt.num_tokens))
        first = b"".join(key.to_bytes(8, "big") for key in keys[:4])
        place = self._chooser.order(Policy.WEIGHTS, options, first)[0].place
        return place, claims[place]

    def publish(self, at_s: float, place: str, events: Sequence[CacheEvent]) -> None:
        """The events of a step reach the index later."""
        found = [self._event(one) for one in events]
        applying = self._places.followed[place].place.applying_batch
        self.time.later(at_s + DELAY_S, lambda: finished(applying(Batch(at_s, found))))

    def _event(self, one: CacheEvent) -> Stored | Removed:
        keys = keys_of(b"".join(one.hashes), self._scheme.digest.size) if one.hashes else []
        assert one.kind is not EventKind.CLEARED
        tier = Tier[one.tier.name]
        if one.kind is EventKind.REMOVED:
            return Removed(one.group, tier, keys)
        return Stored(one.group, tier, keys, self._forms[one.group])

    def first_token(self, at_s: float, request: LiveRequest) -> None:
        """The first token of a request."""
        name, claimed, full, arrival_s = self._open[request.request_id]
        outcome, hit = self.outcome, request.hits[0]
        outcome.first_token_s.append(at_s - arrival_s)
        outcome.prompt, outcome.real = outcome.prompt + request.num_prompt, outcome.real + hit
        outcome.claimed, outcome.over = outcome.claimed + claimed, outcome.over + (claimed > hit)
        outcome.full += full
        self.time.later(at_s, lambda: self._decisions.first_token(name, Event(at_s, hit)))

    def ended(self, at_s: float, request: LiveRequest) -> None:
        """The end of a request."""
        name, *_ = self._open.pop(request.request_id)
        tokens = request.num_tokens - request.num_prompt
        self.outcome.generated, self.outcome.last_s = self.outcome.generated + tokens, max(self.outcome.last_s, at_s)
        self.time.later(at_s, lambda: self._decisions.ended(name, Event(at_s, output_tokens=tokens)))


class RoutedFleet(Fleet):
    """Engines to which a router assigns the requests of a trace."""

    def __init__(self, scene: Scene, policy: str, seed: int, trace: Iterable[TraceRequest]) -> None:
        spec = scene.spec()
        names = [f"engine-{number}" for number in range(scene.engines)]
        self.router = Router(spec, names, policy, seed)
        self._numbers = {name: number for number, name in enumerate(names)}
        super().__init__([ServedEngine(name, spec, self.router) for name in names], trace)

    def _route(self, request: Arriving) -> int:
        assert isinstance(request, TraceRequest)
        return self._numbers[self.router.route(request)]


def run(scene: Scene, rate: float, policy: str, seed: int) -> Outcome:
    """Run a scene under a policy."""
    with ExitStack() as files:
        fleet = RoutedFleet(scene, policy, seed, arrivals(scene, rate, seed, files))
        while fleet.run_step():
            pass
    refused = [one for engine in fleet.engines for one in engine.refusals]
    assert not refused, refused[0]
    return fleet.router.outcome


HEAD = (
    "| policy | mean TTFT s | p50 | p90 | p99 | tokens/s | hit % | claimed % | over-claimed requests % |",
    "|---|---|---|---|---|---|---|---|---|",
)


def main() -> int:
    """Run every scene, rate and policy, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", nargs="+", choices=[one.name for one in SCENES])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--rates", type=float, nargs="+")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--blocks", type=int, help="blocks of each engine")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    lines = list[str]()
    for scene in SCENES:
        if options.scenes and scene.name not in options.scenes:
            continue
        if scene.name != "shared" and workloads_folder() is None:
            print(workloads_line(), file=sys.stderr)
            return 2
        used = replace(scene, limit=options.limit or scene.limit, num_blocks=options.blocks or scene.num_blocks)
        for rate in options.rates or scene.rates:
            engines = f"{used.engines} engines of {used.num_blocks} blocks"
            lines += ["", f"## {used.name}, {rate:g} requests/s, {used.limit} requests, {engines}", "", *HEAD]
            print("\n".join(lines[-4:]), flush=True)
            for policy in options.policies:
                lines.append(f"| {policy} | " + " | ".join(run(used, rate, policy, options.seed).row()) + " |")
                print(lines[-1], flush=True)
    if not options.no_write:
        head = "Routing policies on simulated engines: `python -m tests.bench.routing`, whose docstring has the model."
        RESULTS.write_text("\n".join(["# Routing", "", head, machine_line(), *lines, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
