"""An honest engine that does everything at random, and the page memory behind it.

`RandomScheduler` writes the steps and reads the answers, and knows nothing else of the allocator; `RandomEngine` drives
a core in this process with it, the simulation (`tests/sim`) a service behind a network.

It keeps the contract and nothing more: several steps in flight, drafts that are rejected, loads that arrive late or
never, steps that fail, transfers that read held pages, crashes. After each step every key that others may see is
compared with what its page holds, and every launch with what it reads (`page_memory`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from kvplane.base.groups import GroupKind, ReplicaSpec
from kvplane.base.step import (
    UNCHANGED,
    UNLIMITED,
    Admit,
    AdmitStatus,
    Budget,
    Cache,
    End,
    Facts,
    News,
    OnRefusal,
    Part,
    PartResult,
    RowFlag,
    Run,
    Step,
)
from kvplane.tables import BlockTables
from kvplane_service.core import inspect
from kvplane_service.core.replica import Replica
from tests.core.builders import digests, tokens
from tests.core.page_memory import SCRATCH, Launch, Memory, Row, WrongPage, first_seen

SLOTS = range(5)
MOST_IN_FLIGHT = 4
HEADS = ["", "aaaa", "aaaabbbb", "aaaabbbbaaaabbbb"]


@dataclass
class Request:
    """What the engine knows of one request.

    Attributes:
        life: (slot, stay): a preemption ends a stay.
        known: tokens of the script that the service has been told.
        computed: tokens that its steps so far compute, as the answers say.
        running: it holds blocks and may run.
        drafts: what was computed behind them.
        states: lengths whose state lies beside the running one, after drafts.
        load: first and last token that a transfer brings, as long as it runs.
        tables: where the transfer writes to, or reads from when the request is held.
    """

    life: tuple[int, int]
    script: str
    known: int
    computed: int = 0
    running: bool = False
    drafts: str = ""
    states: frozenset[int] = frozenset()
    load: tuple[int, int] | None = None
    tables: list[list[int]] | None = None
    checked: int = 0  # held: tokens that its pages hold
    reached: int = 0  # held: tokens that it had computed, before drafts were rejected; windows ended there

    @property
    def is_held(self) -> bool:
        return self.tables is not None and self.load is None


@dataclass
class Texts:
    """What block hashes stand for: by digest the tokens, and the text that they cover."""

    spec: ReplicaSpec
    by_digest: dict[bytes, tuple[int, str]] = field(default_factory=dict)

    def learn(self, script: str) -> None:
        """Every prefix of this text that has a hash."""
        size, ahead = self.spec.hash_block_size, self.spec.hash_lookahead_tokens
        for number, digest in enumerate(digests(self.spec, script), 1):
            self.by_digest[digest] = number * size, script[: number * size + ahead]

    def check_keys(self, replica: Replica, memories: list[Memory]) -> int:
        """Every key that others may see names a page that holds just that, on every rank; how many were looked at."""
        pool, seen = replica.coordinator.pool, 0
        for block in range(pool.num_blocks):
            primary = pool.key_of(block)
            if primary is None or pool.key_step[block] > pool.executed_through:
                continue
            for key in (primary, *pool.more_keys.get(block, ())):
                seen += 1
                num_tokens, text = self.by_digest[key.digest]
                for memory in memories:
                    if not memory.holds(key.group, block, num_tokens, text):
                        raise WrongPage(f"block {block} has the key of {text!r} and holds {memory.pages.get(block)}")
        return seen


class RandomScheduler:
    """One engine life: writes steps at random, and knows of the allocator what the answers say.

    Attributes:
        pending: answered steps whose launch has not run.
        failed: steps that never ran, not told yet.
        lost: lives that may read garbage since a launch failed.
        launched: steps up to this one have run.
        told: what of it was told.
        hits: admissions that found a prefix.
    """

    def __init__(self, texts: Texts, memories: list[Memory], rng: Random, most_drafts: int = 0) -> None:
        self.spec, self.texts, self.memories = texts.spec, texts, memories
        self.rng, self.most_drafts = rng, most_drafts
        self.has_states = any(group.kind is GroupKind.MAMBA for group in self.spec.groups)
        self.hits = self.stays = 0
        self.begin()

    def begin(self) -> None:
        """A new life, without requests."""
        self.seq = self.told = self.launched = 0
        self.requests: dict[int, Request] = {}
        self.tables = BlockTables(len(self.spec.groups))
        self.pending: list[Launch] = []
        self.failed: list[int] = []
        self.lost: set[tuple[int, int]] = set()

    def plan(self) -> list[Part]:
        """The parts of the next step; `told` is what it says to be executed."""
        self.seq += 1
        most = min([self.launched, *(seq - 1 for seq in self.failed)])
        self.told = self.rng.randint(min(most, max(self.told, self.seq - MOST_IN_FLIGHT)), most)
        return self._parts()

    def plan_end(self) -> list[Part]:
        """Ends every request; what transfers hold is released."""
        self.seq += 1
        self.told = max(self.told, min([self.launched, *(seq - 1 for seq in self.failed)]))
        facts, released = Facts(), list[int]()
        for slot, request in list(self.requests.items()):
            if request.is_held:
                released.append(slot)
                del self.requests[slot]
            else:
                request.load = request.tables = None
                self._row(facts, slot, end=End.FREE)
        return [Part(facts=facts, cache=Cache(failed_steps=self.failed, released=released))]

    def settle(self, parts: list[Part], results: list[PartResult]) -> None:
        """Take the answer of the step; its launch is pending now."""
        self._take(parts, results)
        self.failed = []

    def fail(self, first: int = 0) -> None:
        """A pending step, not before `first`, will never run; those behind it either fail too, or run without what was
        lost.
        """
        first = self.rng.randrange(first, len(self.pending))
        last = len(self.pending) if self._chance(50) else first + 1
        self.failed = [launch.seq for launch in self.pending[first:last]]
        del self.pending[first:last]
        for request in self.requests.values():
            request.checked = 0

    def note_launched(self) -> None:
        """The oldest pending launch has run."""
        self.pending.pop(0)
        self.launched = self.pending[0].seq - 1 if self.pending else self.seq

    # -- writing a step ----------------------------------------------------------------------------------------------

    def _parts(self) -> list[Part]:
        self.guess: dict[int, str] = {}
        self.asked: dict[int, tuple[int, bool]] = {}  # admit rows: external tokens, whether they come late
        held = [slot for slot, request in self.requests.items() if request.is_held]
        facts = self._facts()
        cache = self._cache(held)
        news = self._news()
        first = Part(facts=facts, cache=cache, news=news, run=self._run(), budget=self._budget())
        admit = self._admit()
        if self._chance(70):
            first.admit = admit
            return [first]
        rows = len(first.run.slot) // 2
        second = Part(run=_tail(first.run, rows), admit=admit, budget=self._budget())
        return [first, second]

    def _facts(self) -> Facts:
        facts = Facts()
        for slot, request in list(self.requests.items()):
            if request.load is not None and self._is_running(slot):
                self._load_fact(facts, slot, request)
            elif request.tables is None and self._is_running(slot) and self._chance(80):
                self._progress_fact(facts, slot, request)
            elif request.tables is None and request.load is None and self._chance(10):
                self._row(facts, slot, end=End.FREE)
        return facts

    def _load_fact(self, facts: Facts, slot: int, request: Request) -> None:
        """A transfer comes to its end, or is given up."""
        if not self._is_launched(request) or not self._chance(40):
            return
        if self._chance(75):
            total = self._end_load(request)
            self._row(facts, slot, commit=total)
        else:
            request.load = request.tables = None
            self._row(facts, slot, end=self.rng.choice([End.FREE, End.PREEMPTED]))

    def _progress_fact(self, facts: Facts, slot: int, request: Request) -> None:
        computed, still = request.computed, self._is_launched(request)
        appended, corrected, commit = 0, UNCHANGED, UNCHANGED
        if request.drafts and still:
            right = _common(request.drafts, request.script[request.known :])
            corrected = request.known + right
            appended = right + 1
            request.drafts = ""
        elif not request.drafts and computed >= request.known and self._chance(80):
            appended = 1
        appended = min(appended, len(request.script) - request.known)
        if still and not request.drafts and not self.has_states and self._chance(6):
            corrected = self.rng.randint(0, min(computed, request.known))
        if not request.drafts and self._chance(15):
            commit = self.rng.randint(0, min(computed, request.known))
        end = End.NONE
        if self._chance(18):
            end = self.rng.choice([End.FREE, End.FREE, End.PREEMPTED, End.HELD])
        if appended or corrected != UNCHANGED or commit != UNCHANGED or end:
            text = request.script[request.known : request.known + appended]
            request.known += appended
            self._row(facts, slot, end, corrected, text, commit)

    def _row(
        self,
        facts: Facts,
        slot: int,
        end: End = End.NONE,
        computed: int = UNCHANGED,
        text: str = "",
        commit: int = UNCHANGED,
    ) -> None:
        facts.slot.append(slot)
        facts.computed.append(computed)
        facts.appended.append(len(text))
        facts.tokens += tokens(text)
        facts.commit.append(commit)
        facts.end.append(int(end))
        facts.fence.append(self.rng.choice([0, self.seq]) if end in (End.FREE, End.PREEMPTED) else 0)
        request = self.requests[slot]
        request.reached = request.computed
        if computed != UNCHANGED:
            request.computed = min(request.computed, computed)
        if end is End.FREE:
            del self.requests[slot]
        elif end is End.HELD:
            right = [request.reached, request.known - len(text), computed]
            request.checked = 0 if self.failed else min(count for count in right if count != UNCHANGED)
            request.tables = self._tables(slot)
            request.running = False
        elif end is End.PREEMPTED:
            self._ends_stay(slot)

    def _cache(self, held: list[int]) -> Cache:
        released = []
        for slot, request in list(self.requests.items()):
            if slot in held and self._is_launched(request) and self._chance(40):
                self._read_held(request)
                released.append(slot)
                del self.requests[slot]
            elif request.load is not None and not self._is_running(slot) and self._chance(40):
                self._end_load(request)  # it was preempted meanwhile: its pages were kept for the transfer
                released.append(slot)
        evicted = [self.rng.randint(1, self.spec.num_blocks - 1)] if self._chance(8) else []
        return Cache(failed_steps=self.failed, evicted=evicted, released=released, reset=self._chance(3))

    def _news(self) -> News:
        news = News()
        for slot in SLOTS:
            if slot in self.requests or not self._chance(40):
                continue
            script = self.rng.choice(HEADS) + "".join(self.rng.choices("ab", k=self.rng.randint(2, 30)))
            known = self.rng.randint(1, len(script) - 1)
            self.stays += 1
            self.requests[slot] = Request((slot, self.stays), script, known)
            self.texts.learn(script)
            news.slot.append(slot)
            news.num_tokens.append(known)
            news.tokens += tokens(script[:known])
        return news

    def _run(self) -> Run:
        can = [slot for slot, one in self.requests.items() if one.tables is None and not one.drafts]
        slots = self._some([slot for slot in can if self._is_running(slot)])
        extra = [self.rng.randint(0, self.most_drafts) for _ in slots]
        for slot, count in zip(slots, extra, strict=True):
            request = self.requests[slot]
            true = request.script[request.known : request.known + count].ljust(count, "a")
            self.guess[slot] = "".join(token if self._chance(70) else "x" for token in true)
        flags = [int(RowFlag.DELAY_CACHING) * self._chance(10) | self._align() for _ in slots]
        caps = [self.rng.choice([1, 4, 6, 100]) for _ in slots]
        rule = self.rng.choice([OnRefusal.PREEMPT, OnRefusal.PREEMPT, OnRefusal.SKIP])
        victims = self._some([slot for slot in self.requests if self._is_running(slot)])
        return Run(slots, extra, caps, flags=flags, victims=victims, on_refusal=rule)

    def _admit(self) -> Admit:
        waiting = [slot for slot, request in self.requests.items() if not request.running and not request.is_held]
        admit = Admit(self._some(waiting), on_refusal=OnRefusal.SKIP)
        for slot in admit.slot:
            external = self.rng.randint(1, 9) if self._chance(15) else 0
            late = bool(external) and self._chance(60)
            self.asked[slot] = external, late
            admit.external.append(external)
            admit.cap.append(0 if late else self.rng.choice([4, 8, 100, 100]))
            admit.flags.append(int(RowFlag.DELAY_CACHING) if late else self._align())
        return admit

    def _budget(self) -> Budget:
        return Budget(tokens=self.rng.choice([UNLIMITED, UNLIMITED, 5, 12]))

    # -- reading the answer ------------------------------------------------------------------------------------------

    def _take(self, parts: list[Part], results: list[PartResult]) -> None:
        rows: dict[int, Row] = {}
        for part, result in zip(parts, results, strict=True):
            self.tables.update(part, result)
            for slot in result.preempted:
                rows.pop(slot, None)
                self._ends_stay(slot)
            for slot, granted in zip(part.run.slot, result.granted, strict=True):
                if granted:
                    rows[slot] = self._ran(slot, granted)
            admitted = zip(part.admit.slot, result.admit_status, result.admit_hit, result.admit_granted, strict=True)
            for slot, status, hit, granted in admitted:
                if status == AdmitStatus.GRANTED:
                    rows[slot] = self._admitted(slot, hit, granted)
        if self.failed:  # who is not there any more may have lost something to the failure, and is heard no more
            current = {request.life for request in self.requests.values() if not request.is_held}
            self.lost |= {row.life for launch in self.pending for row in launch.rows} - current
        self.pending.append(Launch(self.seq, [result.orders for result in results], list(rows.values())))

    def _ran(self, slot: int, granted: int) -> Row:
        request = self.requests[slot]
        request.computed = computed = request.computed + granted
        launched = (request.script[: request.known] + self.guess[slot])[:computed]
        assert len(launched) == computed
        start, states = computed - granted, request.states
        request.drafts = launched[request.known :]
        request.states = frozenset(range(request.known, computed + 1)) if request.drafts else frozenset()
        return Row(request.life, request.script, launched, start, start, self._tables(slot), states)

    def _admitted(self, slot: int, hit: int, granted: int) -> Row:
        request, (external, late) = self.requests[slot], self.asked[slot]
        start, tables = hit + external, self._tables(slot)
        self.hits += hit > 0
        request.running, request.computed = True, start + granted
        if late:
            request.load, request.tables = (hit, start), tables
        loaded = start if late else hit
        return Row(request.life, request.script, request.script[: start + granted], start, loaded, tables)

    def _ends_stay(self, slot: int) -> None:
        """The request lost its blocks; a transfer that writes to them goes on."""
        request = self.requests.get(slot)
        if request is None:
            return
        self.stays += 1
        request.life, request.drafts, request.states = (slot, self.stays), "", frozenset()
        request.running, request.computed = False, 0

    def _read_held(self, request: Request) -> None:
        """A transfer has read a held request's pages: they are still what they were."""
        assert request.tables is not None
        for number, group in enumerate(self.spec.groups):
            if group.kind in SCRATCH:
                continue
            first = first_seen(group, request.reached) // group.block_size
            for index, block in list(enumerate(request.tables[number]))[first:]:
                end = min((index + 1) * group.block_size, request.checked)
                if block and end > index * group.block_size:
                    self._check_held(request, number, block, end)

    def _check_held(self, request: Request, number: int, block: int, end: int) -> None:
        for memory in self.memories:
            if not memory.holds(number, block, end, request.script[:end]):
                raise WrongPage(f"{request.life}: held block {block} holds {memory.pages.get(block)}")

    def _end_load(self, request: Request) -> int:
        """The transfer has written its pages; tokens that are there now."""
        assert request.load is not None
        assert request.tables is not None
        first, total = request.load
        for memory in self.memories:
            memory.load(request.tables, request.script, first, total)
        request.load = request.tables = None
        return total

    # -- small words -------------------------------------------------------------------------------------------------

    def _chance(self, percent: int) -> bool:
        return self.rng.randrange(100) < percent

    def _some(self, slots: list[int]) -> list[int]:
        return self.rng.sample(slots, self.rng.randint(0, len(slots)))

    def _align(self) -> int:
        return int(RowFlag.ALIGN) if self.spec.align.block_size and self._chance(80) else 0

    def _tables(self, slot: int) -> list[list[int]]:
        return [list(table) for table in self.tables[slot]]

    def _is_running(self, slot: int) -> bool:
        return slot in self.requests and self.requests[slot].running

    def _is_launched(self, request: Request) -> bool:
        return not any(row.life == request.life for launch in self.pending for row in launch.rows)


class RandomEngine(RandomScheduler):
    """Drives one replica in this process for some steps."""

    def __init__(self, spec: ReplicaSpec, rng: Random, most_drafts: int = 0) -> None:
        self.replica = Replica(spec)
        self.memory = Memory(spec)
        self.epoch = 0
        self.keys_seen = 0
        super().__init__(Texts(spec), [self.memory], rng, most_drafts)

    def begin(self) -> None:
        """The engine before this one died, or there was none."""
        super().begin()
        self.epoch += 1
        self.replica.begin_epoch(self.epoch, self.memory.stamps)

    def step(self) -> None:
        """Send a step, then let some launches run."""
        if self._chance(2):
            self._crash()
        if self.pending and self._chance(6):
            self.fail()
        parts = self.plan()
        step = Step(self.epoch, self.seq, parts, executed_through=self.told)
        self.settle(parts, self.replica.apply(step).parts)
        inspect.check(self.replica)
        self.check_keys()
        while self.pending and (len(self.pending) >= MOST_IN_FLIGHT or self._chance(60)):
            self._launch()
        self.check_keys()

    def check_keys(self) -> None:
        """Every key that others may see names a page that holds just that."""
        self.keys_seen += self.texts.check_keys(self.replica, [self.memory])

    def _launch(self) -> None:
        self.memory.run(self.pending[0], self.lost)
        self.note_launched()

    def _crash(self) -> None:
        """The engine dies; some of what was in flight ran, and nobody was told."""
        for _ in range(self.rng.randint(0, len(self.pending))):
            self._launch()
        self.begin()


def _common(one: str, other: str) -> int:
    """Length of the common prefix."""
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


def _tail(run: Run, rows: int) -> Run:
    """Take the last rows from a section; the rest stays in it."""
    columns = {name: getattr(run, name) for name in ("slot", "extra", "cap", "flags")}
    taken = {name: column[rows:] for name, column in columns.items()}
    for column in columns.values():
        del column[rows:]
    return Run(**taken, victims=run.victims, on_refusal=run.on_refusal)
