"""The permissions of the contract, one cell each, and how often a campaign reached each cell.

A cell is a field of a section of `step.proto` (or one of its values), or two acts that overlap: the second happens to a
block while the step of the first is in flight, in the same step or a later one. The fields come from the contract: a
new one is a cell that nothing reaches, until the engine draws it or it stands below with a reason.

A cell counts only when the oracle reads a page afterwards that this could have spoilt.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum, IntFlag

from kvplane.base.step import (
    ALL_GROUPS,
    UNLIMITED,
    Admit,
    AdmitStatus,
    End,
    Facts,
    OnRefusal,
    Part,
    PartResult,
    RowFlag,
    Run,
    Watermark,
)
from kvplane.v1 import step_pb2 as pb

LEAST = 100
SECTIONS = ("facts", "cache", "news", "run", "admit", "peek", "budget", "resume")
VALUES: dict[str, type[IntEnum | IntFlag]] = {
    "facts.end": End,
    "run.flags": RowFlag,
    "run.on_refusal": OnRefusal,
    "admit.flags": RowFlag,
    "admit.on_refusal": OnRefusal,
    "admit.watermark": Watermark,
}
DEFAULTS = {
    "hit_limit": UNLIMITED,
    "min_new": 1,
    "skip_zero_groups": ALL_GROUPS,
    "admit.single_group_hit": UNLIMITED,
}  # of a row; else 0, -1 or ""
LOAD, DEATH, PREEMPTED, LATE = "transfer writes", "engine dies", "core preempts", "admit.flags=DELAY_CACHING"
# What happens to blocks, in the order of sections: each pair of them is a cell.
ACTS = (
    "facts.computed",
    "facts.commit",
    "facts.end=FREE",
    "facts.end=HELD",
    "facts.end=PREEMPTED",
    "cache.failed_steps",
    "cache.evicted",
    "cache.released",
    "cache.reset",
    "cache.loads_over",
    "resume.slot",
    "run.slot",
    "run.extra",
    PREEMPTED,
    "admit.slot",
    "admit.external",
    LATE,
    LOAD,
    DEATH,
)
_IMAGE = "drawn by tests/core/test_image.py and test_busy_blocks.py, where images come from the replica"
NOT_DRAWN = {
    "news.request_id": "a name, which decides nothing",
    "news.traceparent": "a name, which decides nothing",
    "news.extra_keys": "makes hashes and nothing else: tests/base/test_hashing.py",
    "news.tokens": "stands for num_tokens",
    "facts.tokens": "stands for appended",
    "facts.hashes": "stands for num_hashes",
    "news.hashes": "stands for num_hashes",
    "admit.encoder_tokens": "cross attention has no page that a key names",
    "admit.on_refusal=PREEMPT": "refused by name",
    "facts.end=NONE": "no end",
    "cache.hits_checked": "a count, which decides nothing",
    "run.flags=LOAD": "refused by name",
    "admit.flags=LOAD": "refused without tiers: tests/core/tier_engine.py",
    "run.flags=WHOLE": "refused by name",
    "peek.slot": "advice: touches no page",
    "peek.with_blocks": "advice: touches no page",
    "peek.limit": "advice: touches no page",
    "resume.single_group_hit": _IMAGE,
    "resume.num_cached_blocks": _IMAGE,
    "resume.held_slot": _IMAGE,
    "resume.held_count": _IMAGE,
    "resume.held_blocks": _IMAGE,
    "resume.held_loading": _IMAGE,
}


def _fields_of(section: str) -> list[str]:
    message = pb.Part.DESCRIPTOR.fields_by_name[section].message_type
    assert message is not None
    return [field.name for field in message.fields]


def fields() -> list[str]:
    """Every field of every section, and every value where it has names."""
    found = list[str]()
    for section in SECTIONS:
        for field in _fields_of(section):
            name = f"{section}.{field}"
            found += [f"{name}={value.name}" for value in VALUES[name]] if name in VALUES else [name]
    return found


Cell = tuple[str, ...]
_FREE_OF_OWNERS = ("cache.evicted", "cache.reset", LOAD, DEATH)


def unreachable(first: str, second: str) -> str:
    """Why the second cannot happen to a block while the first is in flight; "" when it can."""
    if second == "resume.slot" and first != DEATH:
        return "an image comes first in an engine life: nothing of it is in flight"
    if second == "cache.loads_over" and first == second:
        return "only a new engine life makes a block busy again"
    if second == "cache.loads_over" and first not in _FREE_OF_OWNERS:
        return "a block under a load of an earlier engine life belongs to no request of this one"
    return ""


def cells() -> dict[Cell, str]:
    """All cells, each with the reason why it cannot be reached, or ""."""
    known = fields()
    assert set(NOT_DRAWN) <= set(known), f"gone from the contract: {set(NOT_DRAWN) - set(known)}"
    assert {act for act in ACTS if "." in act} <= set(known), "an act without a field"
    singles: dict[Cell, str] = {(name,): NOT_DRAWN.get(name, "") for name in known}
    return singles | {(one, other): unreachable(one, other) for one in ACTS for other in ACTS}


class Cells:
    """Counts cells of one engine after the other; `engine` shows where it stands."""

    def __init__(self) -> None:
        self.counts: Counter[Cell] = Counter()
        self.begin()

    def begin(self) -> None:
        """Another run, on other pages."""
        self._pending: defaultdict[int, set[Cell]] = defaultdict(set)
        self._acts: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
        self._news: dict[int, set[str]] = {}
        self._seq = self._executed = 0

    def read(self, block: int) -> None:
        """The oracle has compared this page."""
        for cell in self._pending.pop(block, ()):
            self.counts[cell] += 1

    def note(self, name: str, blocks: Iterable[int]) -> None:
        """This happened to these blocks."""
        is_act = name in ACTS
        for block in set(blocks) - {0}:
            if "." in name:
                self._pending[block].add((name,))
            if is_act:
                acts = self._acts[block] = [(act, seq) for act, seq in self._acts[block] if seq > self._executed]
                self._pending[block].update((act, name) for act, _ in acts)
                acts.append((name, self._seq))

    def die(self, blocks: Iterable[int]) -> None:
        """The engine dies; what comes next happens to what it leaves."""
        self.note(DEATH, blocks)
        self._acts.clear()
        self._news.clear()
        self._executed, self._seq = 0, 1
        for block in blocks:
            self._acts[block].append((DEATH, 1))

    def answered(
        self,
        place: tuple[int, int],
        parts: Sequence[Part],
        results: Sequence[PartResult],
        tables: tuple[Mapping[int, list[int]], Mapping[int, list[int]]],
        failed: Iterable[int],
    ) -> None:
        """A step was answered.

        Args:
            place: its number, and the last step reported as executed.
            tables: the blocks of each slot before and after it.
            failed: blocks of the launches that it says have failed.
        """
        self._seq, self._executed = place
        before, after = tables
        for part, result in zip(parts, results, strict=True):
            self._facts(part.facts, before)
            self._cache(part, result, before, failed)
            for row, slot in enumerate(part.news.slot):
                self._news[slot] = {f"news.{name}" for name in _said(part.news, row)}
            if part.resume is not None:
                blocks = [block for slot in part.resume.slot for block in after.get(slot, ())]
                for name in _said(part.resume, None):
                    self.note(f"resume.{name}", blocks)
            named = {*part.facts.slot, *part.cache.released}
            for slot in result.preempted:
                if slot not in named and not part.cache.failed_steps:
                    self.note(PREEMPTED, before.get(slot, ()))
            self._run(part.run, result, after)
            self._admit(part.admit, result, after)
            self._budget(part, result, after)

    def _facts(self, facts: Facts, before: Mapping[int, list[int]]) -> None:
        for row, slot in enumerate(facts.slot):
            for name in _said(facts, row):
                self.note(f"facts.{name}", before.get(slot, ()))

    def _cache(self, part: Part, result: PartResult, before: Mapping[int, list[int]], failed: Iterable[int]) -> None:
        cache = part.cache
        if cache.failed_steps:
            self.note("cache.failed_steps", failed)
        self.note("cache.evicted", cache.evicted)
        self.note("cache.released", [block for slot in cache.released for block in before.get(slot, ())])
        self.note("cache.loads_over", cache.loads_over)
        if result.reset_done:
            self.note("cache.reset", list(self._acts))

    def _run(self, run: Run, result: PartResult, after: Mapping[int, list[int]]) -> None:
        for row, slot in enumerate(run.slot):
            if result.granted[row]:
                for name in [*_said(run, row), f"on_refusal={OnRefusal(run.on_refusal).name}"]:
                    self.note(f"run.{name}", after.get(slot, ()))
                if run.victims:
                    self.note("run.victims", after.get(slot, ()))

    def _admit(self, admit: Admit, result: PartResult, after: Mapping[int, list[int]]) -> None:
        for row, slot in enumerate(admit.slot):
            if result.admit_status[row] != AdmitStatus.GRANTED:
                continue
            names = [f"admit.{name}" for name in _said(admit, row)]
            late = "admit.external" in names and LATE in names
            names = [name for name in names if name not in (("admit.external",) if late else (LATE,))]
            names.append(f"admit.on_refusal={OnRefusal(admit.on_refusal).name}")
            names += ["admit.max_running"] if admit.max_running < 100 else []
            names += ["admit.only_if_no_preemption"] if admit.only_if_no_preemption else []
            for name in [*names, *self._news.get(slot, ())]:
                self.note(name, after.get(slot, ()))

    def _budget(self, part: Part, result: PartResult, after: Mapping[int, list[int]]) -> None:
        given = [slot for slot, count in zip(part.run.slot, result.granted, strict=True) if count]
        given += [slot for slot, count in zip(part.admit.slot, result.admit_granted, strict=True) if count]
        blocks = [block for slot in given for block in after.get(slot, ())]
        for name in ("tokens", "input", "overhead"):
            if getattr(part.budget, name) != getattr(Part().budget, name):
                self.note(f"budget.{name}", blocks)


def _said(section: object, row: int | None) -> Iterator[str]:
    """Fields of a row that say something; those with names as name=VALUE."""
    where = type(section).__name__.lower()
    for name in _fields_of(where):
        column = getattr(section, name)
        if not isinstance(column, list) or not column or name in ("victims", "tokens"):
            continue
        value = column[row] if row is not None else max(column)
        if name == "slot":
            yield name
        elif f"{where}.{name}" in VALUES:
            kind = VALUES[f"{where}.{name}"]
            if issubclass(kind, IntFlag):
                yield from (f"{name}={flag.name}" for flag in kind if flag & value)
            else:
                yield from (f"{name}={one.name}" for one in kind if one == value and one.name != "NONE")
        elif value != DEFAULTS.get(name, DEFAULTS.get(f"{where}.{name}", 0)) and value not in (-1, ""):
            yield name
