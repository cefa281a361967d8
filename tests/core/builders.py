"""Small replicas for tests of the core, and an engine that drives them with one short call per step.

Blocks have 4 tokens unless a test says otherwise, and a prompt is a string, one token per character, so that blocks can
be read off: "aaaabbbbc" is two full blocks and one token. Every call of `Engine` is a step of its own, applied through
the one door `Replica.apply`, and the invariants are checked after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvplane.base.groups import DENSE_RETENTION, CommitRule, GroupKind, GroupSpec, MambaMode, ReplicaSpec
from kvplane.base.hashing import HashScheme, RequestHasher, pack_tokens, split_hashes
from kvplane.base.step import (
    UNCHANGED,
    Admit,
    AdmitStatus,
    Budget,
    Cache,
    CacheEvent,
    End,
    EventKind,
    ExtraKeys,
    Facts,
    News,
    OnRefusal,
    Part,
    PartResult,
    Peek,
    Run,
    Step,
)
from kvplane_core.face import inspect
from kvplane_core.face.interface import INSIDE, Hit
from kvplane_core.face.setup import states_for_drafts
from kvplane_core.face.state import digest as state_digest
from kvplane_core.spec.managers.questions import Query
from kvplane_core.spec.open_step import OpenStep
from kvplane_core.spec.replica import Replica
from kvplane_core.spec.retained import RetainedBlocks
from tests.core.compared import ComparedCores, changed, compared, new_replica

__all__ = ["changed", "compared", "new_replica"]

GRANTED, REFUSED, DEFERRED = AdmitStatus.GRANTED, AdmitStatus.REFUSED, AdmitStatus.DEFERRED
STALE_HIT, NO_ROOM, NEVER_FITS = AdmitStatus.STALE_HIT, AdmitStatus.NO_ROOM, AdmitStatus.NEVER_FITS
NOT_REACHED, NOT_WAITING = AdmitStatus.NOT_REACHED, AdmitStatus.NOT_WAITING
BLOCK = 4


# -- groups and replicas -----------------------------------------------------------------------------------------------


def full(block_size: int = BLOCK, **changes: Any) -> GroupSpec:
    return GroupSpec(GroupKind.FULL_ATTENTION, block_size, **changes)


def window(tokens: int, block_size: int = BLOCK, **changes: Any) -> GroupSpec:
    return GroupSpec(GroupKind.SLIDING_WINDOW, block_size, window=tokens, **{"lookup_class": 1, **changes})


def chunked(tokens: int, block_size: int = BLOCK, **changes: Any) -> GroupSpec:
    return GroupSpec(GroupKind.CHUNKED_LOCAL, block_size, chunk=tokens, **{"lookup_class": 2, **changes})


def state(block_size: int = BLOCK, **changes: Any) -> GroupSpec:
    """Recurrent state that is cached at block boundaries (mode "align")."""
    aligned = {"mamba_mode": MambaMode.ALIGN, "lookup_class": 3}
    return GroupSpec(GroupKind.MAMBA, block_size, **{**aligned, **changes})


def ring(block_size: int = BLOCK, **changes: Any) -> GroupSpec:
    return GroupSpec(GroupKind.RING, block_size, **{"lookup_class": 4, **changes})


def cross(block_size: int = BLOCK, **changes: Any) -> GroupSpec:
    return GroupSpec(GroupKind.CROSS, block_size, **{"lookup_class": 5, **changes})


def prompt_and_window(tokens: int, block_size: int = BLOCK, **changes: Any) -> GroupSpec:
    """R-SWA: the prompt and the last `tokens` tokens stay."""
    return GroupSpec(GroupKind.R_SWA, block_size, window=tokens, **{"lookup_class": 6, **changes})


def sinks(num_tokens: int, block_size: int = BLOCK, **changes: Any) -> GroupSpec:
    return GroupSpec(GroupKind.SINK_FULL, block_size, sink_tokens=num_tokens, **{"lookup_class": 7, **changes})


def replica_spec(*groups: GroupSpec, num_blocks: int = 101, **changes: Any) -> ReplicaSpec:
    """A pool of `num_blocks` with the null block; hits are multiples of the largest block."""
    sizes = [group.block_size for group in groups]
    defaults: dict[str, Any] = {
        "max_model_len": 4096,
        "hash_block_size": min(sizes),
        "scheduler_block_size": max(sizes),
        "max_in_flight_tokens": 8192,
        "retention_interval": DENSE_RETENTION,
    }
    return ReplicaSpec(groups, num_blocks, **{**defaults, **changes})


# -- tokens and hashes -------------------------------------------------------------------------------------------------


def tokens(text: str) -> list[int]:
    """One token per character."""
    return [ord(letter) for letter in text]


def digests(spec: ReplicaSpec, text: str, extra: ExtraKeys | None = None) -> list[bytes]:
    """The chained hashes of the text's full hash blocks."""
    scheme = HashScheme.of(spec)
    hasher = RequestHasher(scheme, extra or ExtraKeys())
    return split_hashes(hasher.append(pack_tokens(tokens(text))), scheme.digest.size)


def most_drafts(spec: ReplicaSpec) -> int:
    """2, or as many as states are kept for."""
    states = states_for_drafts(spec) if spec.commit is CommitRule.SAFE else None
    return 2 if states is None else min(states, 2)


def open_step(replica: Replica, executed_through: int) -> OpenStep:
    """Begin the next step, whose rows are applied one by one."""
    if isinstance(replica, ComparedCores):
        step: OpenStep = replica.open_step(executed_through)
        return step
    return OpenStep(replica, executed_through)


def fake_digest(number: int) -> bytes:
    """A digest for tests that need keys but no content."""
    return number.to_bytes(32, "big")


def find_in(group: GroupSpec, cached: str, max_tokens: int = 0, drops_last_block: bool = False, **changes: Any) -> str:
    """The hit of one group's look-up, drawn: "x" a cached block, "." none, "0" a null block.

    Args:
        group: the only group that has a say.
        cached: which blocks of the prefix are in the pool.
        max_tokens: longest hit asked for; 0 = all that are drawn.
        drops_last_block: the last matched block is dropped, as for draft layers.
    """
    spec = replica_spec(group, full(lookup_class=10), num_blocks=len(cached) + 1, **changes)
    manager = Replica(spec).coordinator.managers[0]
    size, per_block = group.block_size, group.block_size // spec.hash_block_size
    made = [fake_digest(number) for number in range(len(cached) * per_block)]
    for index, mark in enumerate(cached):
        if mark == "x":
            (block,) = manager.pool.take(1)
            manager.pool.register(block, ("", 0, made[(index + 1) * per_block - 1]), (index + 1) * size)
    (row,), length = manager.find(
        Query(made, "", (0,), max_tokens or len(cached) * size, drops_last_block, INSIDE, manager.pool)
    )
    assert length <= len(row) * size < length + size
    return "".join("0" if block == 0 else "x" for block in row)


# -- answers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Admission:
    """The result of one admit row. `table` and `new` are per group."""

    status: AdmitStatus
    hit: int
    granted: int
    single_group_hit: int
    table: list[list[int]]
    new: list[list[int]]
    result: PartResult = field(repr=False)


@dataclass(frozen=True)
class Ran:
    """The result of the run rows: tokens per row, slots preempted, new blocks {slot: per group}."""

    granted: Sequence[int]
    preempted: Sequence[int]
    new: dict[int, list[list[int]]]
    result: PartResult = field(repr=False)


def used_of(retained: RetainedBlocks) -> dict[str, list[int]]:
    """The numbers of keys that each owner retains, by place."""
    return {name.owner: retained.used_by(name.owner) for name in retained.each}


def stored(events: Sequence[CacheEvent]) -> list[tuple[int, ...]]:
    """The blocks of each STORED event."""
    return [tuple(event.blocks) for event in events if event.kind is EventKind.STORED]


def removed(events: Sequence[CacheEvent]) -> list[int]:
    """The blocks of all REMOVED events, in order."""
    return [block for event in events if event.kind is EventKind.REMOVED for block in event.blocks]


# -- the engine --------------------------------------------------------------------------------------------------------


class Engine:
    """Drives one replica, a step per call.

    A synchronous engine by default: when it sends a step, all steps before it have been executed. Set `executed` to a
    number to hold execution there, as an engine with steps in flight does, and to None to let it follow again.
    """

    def __init__(self, *groups: GroupSpec, **changes: Any) -> None:
        self.spec = replica_spec(*groups, **changes)
        self.replica = new_replica(self.spec)
        self.seq = 0
        self.executed: int | None = None
        self.last: list[PartResult] = []

    # -- steps

    def step(self, *parts: Part) -> list[PartResult]:
        """One whole step."""
        self.seq += 1
        done = self.seq - 1 if self.executed is None else self.executed
        self.last = self.replica.apply(Step(0, self.seq, list(parts), executed_through=done)).parts
        inspect.check(self.replica)
        return self.last

    def idle(self) -> PartResult:
        """A step that only reports what was executed."""
        return self.step(Part())[0]

    def add(self, slot: int, text: str, **columns: Any) -> PartResult:
        """A new request that waits."""
        return self.step(Part(news=self.news(slot, text, **columns), with_hashes=True))[0]

    def admit(self, slot: int, text: str | None = None, **columns: Any) -> Admission:
        """Admit a waiting request, or a new one when its text is given."""
        news = News() if text is None else self.news(slot, text, **columns.pop("news", {}))
        part = Part(news=news, admit=admit_row(slot, **columns), budget=columns.get("budget", Budget()))
        return self.admission(self.step(part)[0])

    def run(self, *slots: int, text: str = "", **columns: Any) -> Ran:
        """Append a token per row (the k-th letter of the text to the k-th row, if any), and run the rows in order."""
        facts = Facts()
        if text:
            facts = Facts(list(slots), appended=[1] * len(slots), tokens=tokens(text))
        part = Part(facts=facts, run=run_rows(*slots, **columns), budget=columns.get("budget", Budget()))
        return self.ran(slots, self.step(part)[0])

    def extend(self, slot: int, text: str, **columns: Any) -> Ran:
        """Append tokens to one running request and compute them."""
        facts = Facts([slot], appended=[len(text)], tokens=tokens(text))
        part = Part(facts=facts, run=run_rows(slot, **columns), budget=columns.get("budget", Budget()))
        return self.ran((slot,), self.step(part)[0])

    def end(self, *slots: int, how: End = End.FREE, fence: int = 0) -> PartResult:
        """The requests leave."""
        facts = Facts(list(slots), end=[int(how)] * len(slots), fence=[fence] * len(slots))
        return self.step(Part(facts=facts))[0]

    def preempt(self, *slots: int) -> PartResult:
        return self.end(*slots, how=End.PREEMPTED)

    def fact(self, slot: int, computed: int = UNCHANGED, commit: int = UNCHANGED) -> PartResult:
        return self.step(Part(facts=Facts([slot], computed=[computed], commit=[commit])))[0]

    def cache(self, **fields: Any) -> PartResult:
        return self.step(Part(cache=Cache(**fields)))[0]

    def serve(self, slot: int, text: str, **columns: Any) -> Admission:
        """One request from beginning to end: its blocks come back, its keys stay."""
        done = self.admit(slot, text, **columns)
        assert done.status is GRANTED, done
        self.end(slot)
        return done

    # -- parts

    def news(self, slot: int, text: str, **columns: Any) -> News:
        given: dict[str, Any] = {name: [value] for name, value in columns.items()}
        return News([slot], [len(text)], tokens(text), **given)

    def admission(self, result: PartResult, row: int = 0) -> Admission:
        number = len(result.granted) + row
        groups = range(len(self.spec.groups))
        table, new = result.tables.by_row().get(number, {}), result.new_blocks.by_row().get(number, {})
        return Admission(
            AdmitStatus(result.admit_status[row]),
            result.admit_hit[row],
            result.admit_granted[row],
            result.admit_single_group_hit[row],
            [table.get(group, []) for group in groups],
            [new.get(group, []) for group in groups],
            result,
        )

    def ran(self, slots: Sequence[int], result: PartResult) -> Ran:
        rows = result.new_blocks.by_row()
        groups = range(len(self.spec.groups))
        new = {slot: [rows[row].get(group, []) for group in groups] for row, slot in enumerate(slots) if row in rows}
        return Ran(list(result.granted), result.preempted, new, result)

    # -- what can be seen

    @property
    def pool(self):
        return self.replica.coordinator.pool

    @property
    def free_order(self) -> list[int]:
        """Free blocks, next victim first."""
        return list(self.pool.free)

    @property
    def num_free(self) -> int:
        return self.replica.free_blocks

    @property
    def digest(self) -> str:
        return state_digest(self.replica)

    def table(self, slot: int, group: int = 0) -> list[int]:
        return self.replica.coordinator.tables(slot)[group]

    def keyed(self, group: int | None = None) -> list[int]:
        """Blocks that have a key, of this group if one is given, ascending."""
        keys = ((block, self.pool.key_of(block)) for block in range(self.pool.num_blocks))
        return [block for block, key in keys if key is not None and group in (None, key[1])]

    def computed(self, slot: int) -> int:
        return self.replica.requests.computed[slot]

    def outside(self, text: str, domain: str = "") -> int:
        """Hit that other clients may see: executed content only. The text is one longer than what could hit."""
        return self.replica.lookup(digests(self.spec, text), domain, len(text)).num_tokens

    def would_hit(self, text: str, **columns: Any) -> Hit:
        """The hit of a new request of this replica: it is added, peeked at and freed again."""
        slot = 999
        result = self.step(Part(news=self.news(slot, text, **columns), peek=Peek([slot], with_blocks=True)))[0]
        self.end(slot)
        rows = result.peek_blocks.by_row().get(0, {})
        blocks = tuple(rows.get(group, []) for group in range(len(self.spec.groups)))
        return Hit(result.peek_hit[0], result.peek_single_group_hit[0], blocks)


# -- rows --------------------------------------------------------------------------------------------------------------

_OF_SECTION = ("on_refusal", "max_running", "only_if_no_preemption", "victims")


def admit_row(*slots: int, **columns: Any) -> Admit:
    """An admit section; a column given as one value is that of every row."""
    return Admit(list(slots), **_columns(len(slots), columns))


def run_rows(*slots: int, **columns: Any) -> Run:
    """A run section that refuses rather than preempts; a column given as one value is that of every row."""
    return Run(list(slots), **{"on_refusal": OnRefusal.STOP, **_columns(len(slots), columns)})


def _columns(rows: int, columns: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in columns.items() if name != "budget"}
    return {
        name: value if name in _OF_SECTION or isinstance(value, list) else [int(value)] * rows
        for name, value in given.items()
    }


SAFE, REFERENCE = CommitRule.SAFE, CommitRule.REFERENCE
