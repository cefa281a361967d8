"""What `python -m tests.fuzz SECONDS --steps` runs: steps on the compiled core, with the Python core as oracle.

An input draws a spec, an honest engine that plays some steps over simulated pages (`tests.core.page_engine`), and then
raw steps, engine lives, recoveries, states and questions that no contract restrains (`drawn_steps`). Both cores apply
them. Every program must satisfy:

- equal results, errors, events, orders and states, see `ComparedCores`, and equal answers to every question;
- a refused step changes nothing;
- the compiled core applies every step that the Python core applies, but those that have a value of another type or
  continue requests.

"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from random import Random
from typing import Any

from kvplane.base.errors import KvplaneError
from kvplane.base.groups import CommitRule, GroupKind, GroupSpec, ReplicaSpec, TierKind, TierSpec
from kvplane.base.step import ExtraKeys, Part, Step
from kvplane_core.face import native
from kvplane_core.face.inspect import check
from kvplane_core.face.setup import check_spec, states_for_drafts
from kvplane_core.face.state import digest, export_state
from kvplane_core.spec.loading import load_state
from kvplane_core.spec.replica import Replica
from tests.core import page_engine
from tests.core.builders import cross, fake_digest, full, prompt_and_window, replica_spec, ring, sinks, state, window
from tests.core.compared import ComparedCores, CoresDiffer
from tests.core.specification import specification_of
from tests.core.test_page_contents import ALL_MIXES
from tests.core.tier_engine import TierEngine, small_pools
from tests.core.tier_spoils import slots_of
from tests.fuzz.drawn_steps import EDGES, SECTIONS, Source, StepSource

MOST_STEPS = 80
MORE: list[tuple[list[GroupSpec], dict[str, Any]]] = [  # kinds that no honest engine plays
    ([full(), cross()], {"enable_caching": False}),
    ([sinks(8), ring()], {}),
    ([GroupSpec(GroupKind.MLA, 4), GroupSpec(GroupKind.SLIDING_WINDOW_MLA, 4, window=5, lookup_class=1)], {}),
    ([state(mamba_mode=state().mamba_mode.NONE, speculative_blocks=1), full()], {"enable_caching": False}),
    ([prompt_and_window(5), window(9, 8), state(8), sinks(8, 8)], {"scheduler_block_size": 8, "hash_block_size": 4}),
    ([full(admission_cap_blocks=16)], {"watermark_blocks": 2, "keep_divergence_boundary": True}),
    ([full()], {"enable_caching": False}),
]


class NotEqual(AssertionError):
    """The two cores differ outside of a step."""


def new_twin(spec: ReplicaSpec) -> ComparedCores:
    """An empty replica of both cores. Steps that no contract restrains may break invariants."""
    return ComparedCores(Replica(spec), checks=False)


def run(data: bytes) -> Program:
    """Run a program; AssertionError when it breaks one of the rules of the module."""
    source = Source(data)
    with small_pools():
        program = Program(source)
        program.run()
    return program


class Program:
    """One input.

    Attributes:
        counts: what it did, for tests of the fuzzer.
    """

    def __init__(self, source: Source) -> None:
        self.source, self.steps = source, StepSource(source, source.pick([32] * 9 + [16]))
        self.counts = dict.fromkeys(
            (
                *("steps", "refused", "broken", "strange", "lives", "recoveries", "questions", "admitted"),
                *("with tiers", "saves", "jobs done", "saved", "loaded", "moved", "prefetches"),
            ),
            0,
        )
        mixes = [*ALL_MIXES.values(), *MORE]
        has_tiers, number = divmod(source.below(2 * len(mixes)), len(mixes))
        groups, changes = mixes[number]
        blocks = {"num_blocks": source.pick([10, 12, 16, 20] if has_tiers else [10, 16, 24, 40]), **changes}
        spec = replica_spec(*groups, max_model_len=64, max_in_flight_tokens=256, **blocks)
        spec = replace(spec, events=not source.chance(10))
        if source.chance(20) and spec.blocks_per_state == 1:
            spec = replace(spec, commit=CommitRule.REFERENCE)
        if source.chance(10):
            spec = _extreme(source, spec)
        if has_tiers:
            spec = _tiered(source, spec)
        self.counts["with tiers"] += bool(spec.tiers)
        self.spec, self.shown = spec, list[int]()
        is_played = number < len(ALL_MIXES) and spec.commit is CommitRule.SAFE and spec.events
        self.twin = self._play() if is_played and source.chance(60) else new_twin(spec)
        self.seq = self.twin.seq

    def _play(self) -> ComparedCores:
        """The replica of an honest engine after some steps."""
        source = self.source
        drafts = 2 if states_for_drafts(self.spec) is None else min(2, states_for_drafts(self.spec) or 0)
        kind = TierEngine if self.spec.tiers else page_engine.RandomEngine
        engine = kind(self.spec, Random(source.below(256) << 8 | source.below(256)), drafts)
        for _ in range(30 + source.below(60) if self.spec.tiers else source.below(24)):
            engine.step()
        return ComparedCores(specification_of(engine.replica), checks=False)

    def run(self) -> None:
        """Draw operations until the bytes end."""
        acts: list[Callable[[], object]] = [self.life, self.recover, self.recover, self.ask, self.move, self.events]
        others = 10 if self.spec.tiers else 25
        for _ in range(MOST_STEPS):
            if self.source.is_over:
                break
            act = acts[self.source.below(len(acts))] if self.source.chance(others) else self.step
            act()
        self.ask()
        _equal("state", digest(self.twin.first), digest(self.second))
        counters = self.twin.first.tiers.counters
        self.counts |= {"saved": counters.saved, "loaded": counters.loaded, "moved": counters.moved}

    @property
    def second(self) -> native.NativeReplica:
        """The compiled core of the twin."""
        return self.twin.second  # type: ignore[return-value]

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Apply a drawn step, in one message or several, on both cores."""
        source, first = self.source, self.twin.first
        seq = first.seq + 1
        executed = min(first.executed_through + source.pick([0, 0, 1, 1, 2, 4]), seq - 1)
        parts = self.steps.parts(first, seq)
        at = source.below(len(parts)) if source.chance(10) else 0
        for begin, end in ((0, at), (at, len(parts))):
            if begin < end:
                step = Step(first.epoch, seq, parts[begin:end], begin, end == len(parts), executed)
                if source.chance(2):
                    step.executed_through = source.pick([*EDGES, None])
                if not self._apply(step):
                    return

    def _apply(self, step: Step) -> bool:
        self.counts["steps"] += 1
        before = digest(self.twin.first)
        try:
            result = self.twin.apply(step)
        except KvplaneError:
            self.counts["refused"] += 1
            _equal("state after a refusal", before, digest(self.twin.first))
            return False
        except CoresDiffer:
            raise
        except Exception as error:
            self._both_break(step, error)
            return False
        self.counts["admitted"] += sum(status == 1 for part in result.parts for status in part.admit_status)
        self.counts["jobs done"] += sum(len(part.cache.jobs_done) for part in step.parts if self.spec.tiers)
        for part in result.parts:
            self.counts["saves"] += len(part.orders.save_job)
            self.counts["prefetches"] += len(part.prefetched.hit)
        if _is_plain(step):
            if self.spec.commit is CommitRule.SAFE:
                check(self.twin)
        else:
            self.counts["strange"] += 1
            self.twin = new_twin(self.spec)  # the contract does not define the state
        return True

    def _both_break(self, step: Step, error: Exception) -> None:
        """The Python core could not read a value of another type: neither can the other one. Both begin again."""
        is_safe = self.spec.commit is CommitRule.SAFE  # the other rule is for conformance, with steps of vLLM
        assert not (is_safe and _is_plain(step)), f"the Python core broke: {error!r}"
        self.counts["broken"] += 1
        try:
            self.second.apply(step)
        except Exception:  # it may have noticed the value at another place
            self.twin = new_twin(self.spec)
        else:
            raise NotEqual(f"the Python core raised {error!r}, the compiled core nothing")

    # -- engine lives ------------------------------------------------------------------------------------------------

    def _stamps(self, whole: bool = False) -> list[int]:
        """The stamps of a memory: those of the pool, of a time before, or others; not all of them, unless `whole`."""
        source, now = self.source, self._versions()
        shown = list(now)
        if source.chance(30):
            shown = (self.shown + shown)[: len(shown)]
        for _ in range(source.below(4)):
            shown[source.below(len(shown))] = source.pick([0, 1, (1 << 64) - 1, shown[-1]])
        self.shown = now
        return shown if whole else [] if source.chance(15) else shown[: len(shown) - source.pick([0, 0, 0, 1])]

    def _versions(self) -> list[int]:
        """The stamps of a memory that has all that the core knows: of blocks, then of slots of tiers."""
        pool, tiers = self.twin.first.coordinator.pool, self.twin.first.tiers
        return [*pool.stamp, *(tier.version.get(slot, 0) for tier in tiers.each for slot in range(tier.num_slots))]

    def life(self) -> None:
        """Another engine life begins."""
        source, twin = self.source, self.twin
        self.counts["lives"] += 1
        busy = [1 + source.below(self.spec.num_blocks - 1) for _ in range(source.pick([0, 0, 1, 3]))]
        twin.begin_epoch(twin.epoch + 1 + source.below(3), self._stamps(), busy, source.chance(20))
        self._begin()

    def recover(self) -> None:
        """A new service finds what a store has, and what the memory proves."""
        source, before = self.source, self.twin
        if self.steps.digest_size != self.twin.digest_size:
            return  # no store can distinguish such keys
        self.counts["recoveries"] += 1
        stored = [before.first.entries(), *([before.first.entries([1, 2])] if source.chance(30) else [])]
        tables = [self._stamps(whole=True) for _ in range(1 + source.below(2))]
        other = native.NativeReplica(self.spec)
        self.twin, epoch = new_twin(self.spec), before.epoch + 1
        self.twin.first.recover(epoch, tables, stored)
        other.install_recovered(other.verify_entries(tables, stored))
        other.enter_epoch(epoch, tables[0] if len(tables) == 1 else ())
        _equal("recovered state", digest(self.twin.first), digest(other))
        _equal("recovered keys", _entries(self.twin.first), _entries(other))
        self.twin.first.take_events()
        self.twin._second = other
        _equal("recovered tiers", slots_of(self.twin.first), slots_of(other))
        self._begin()

    def _begin(self) -> None:
        """Begin an engine life as every engine does; its first answer has the stamps of busy blocks."""
        self.events()
        check(self.twin)
        self._apply(Step(self.twin.epoch, 1, [Part()]))

    def events(self) -> None:
        """Events of an engine life are equal on both cores, and taken."""
        self.second.take_events()
        self.twin.first.take_events()
        self.twin.tiers.take_events()

    def move(self) -> None:
        """The state goes through its bytes, and through the compiled core."""
        raw = export_state(self.twin.first)
        _equal("exported state", raw, export_state(self.second))
        loaded = load_state(self.spec, raw)
        _equal("loaded state", raw, export_state(native.NativeReplica.of(loaded)))
        self.twin = ComparedCores(loaded, checks=False)

    # -- questions ---------------------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Both cores answer every question about the state alike."""
        source, first, second = self.source, self.twin.first, self.second
        self.counts["questions"] += 1
        for name in ("seq", "epoch", "executed_through", "free_blocks", "num_running", "block_counts", "busy_blocks"):
            _equal(name, getattr(first, name), getattr(second, name))
        for name in ("counters", "residency", "digest_size"):
            _equal(name, getattr(first, name), getattr(second, name))
        for name in ("count_keys", "group_counters", "common_prefix_blocks"):
            _equal(name, getattr(first, name)(), getattr(second, name)())
        cells = 1 + source.below(first.spec.num_blocks)
        _equal("block_map", first.block_map(cells), second.block_map(cells))
        _equal("entries", _entries(first), _entries(second))
        _equal("stored_events", _keys(first), _keys(second))
        _equal("tiers", slots_of(first), slots_of(second))
        for slot in first.requests.slots():
            self._ask_of(slot)
        limits = [0, 1, 9, 64, 1 << 20, *EDGES[:4]]
        script = [fake_digest(source.below(9)) for _ in range(source.below(5))]
        for digests in (script, *(first.requests.hashes(slot) for slot in first.requests.slots())):
            most = source.pick(limits)
            domain = source.pick(["", "d", "unknown"])
            _equal("lookup", first.lookup(list(digests), domain, most), second.lookup(list(digests), domain, most))
            _equal("cached_columns", *(core.cached_columns(list(digests), domain) for core in (first, second)))
            of_tiers = [[core.tiers.tier_of(domain, 0, one) for one in digests] for core in (first, second)]
            _equal("tier_of", *of_tiers)

    def _ask_of(self, slot: int) -> None:
        first, second, source = self.twin.first, self.second, self.source
        _equal("peek_slot", first.peek_slot(slot), second.peek_slot(slot))
        _equal("hashes", list(first.requests.hashes(slot)), list(second.requests.hashes(slot)))
        _equal("request_id", first.requests.request_id[slot], second.requests.request_id[slot])
        _equal("count_held", first.count_held(slot), second.count_held(slot))
        for name in ("running", "held", "num_tokens", "computed"):
            _equal(name, getattr(first.requests, name)[slot], getattr(second.requests, name)[slot])
        at, wanted = source.below(66), source.below(40)
        _equal("shorten_chunk", first.shorten_chunk(slot, at, wanted), second.shorten_chunk(slot, at, wanted))
        for digest_of in first.requests.hashes(slot):
            domain = first.requests.domain[slot]
            for group in range(len(self.spec.groups)):
                _equal("blocks_of", *(list(core.blocks_of(domain, group, digest_of)) for core in (first, second)))
                _equal("key_step", *(core.key_step(domain, group, digest_of) for core in (first, second)))


def _extreme(source: Source, spec: ReplicaSpec) -> ReplicaSpec:
    """A spec with a value that is unusual; the given one if that is refused."""
    groups, value = list(spec.groups), source.pick([16, 1 << 20, (1 << 30) - 4, (1 << 32) - 4, (1 << 32) - 1])
    if source.chance(50):
        of_group = ["speculative_blocks", "window", "chunk", "extra_retained_tokens", "checkpoint_alignment"]
        at = source.below(len(groups))
        groups[at] = replace(groups[at], **{source.pick(of_group): value})
        made = replace(spec, groups=tuple(groups))
    else:
        of_replica = ["prefill_lookahead", "retention_interval", "scheduler_block_size", "watermark_blocks"]
        made = replace(spec, **{source.pick(of_replica): value})
    with suppress(KvplaneError):
        check_spec(made)
        return made
    return spec


def _tiered(source: Source, spec: ReplicaSpec) -> ReplicaSpec:
    """A spec with tiers; the given one if that is refused."""
    host = TierSpec(TierKind.HOST, source.pick([12, 60, 240]))
    disk = TierSpec(TierKind.DISK, source.pick([8, 40, 160]))
    made = replace(spec, tiers=source.pick([(host,), (host, disk), (host, disk), (disk,)]))
    with suppress(KvplaneError):
        check_spec(made)
        return made
    return spec


def _is_plain(step: Step) -> bool:
    """Whether all values of a step have the types that the contract names, and none continues requests."""
    return type(step.executed_through) is int and all(_is_plain_part(part) for part in step.parts)


def _is_plain_part(part: Part) -> bool:
    sections = [getattr(part, name) for name in SECTIONS]
    values = [(one.name, getattr(section, one.name)) for section in sections for one in fields(section)]
    values += [(one.name, getattr(part.budget, one.name)) for one in fields(part.budget)]
    return part.resume is None and all(_is_plain_value(*one) for one in values)


def _is_plain_value(name: str, value: object) -> bool:
    if not isinstance(value, list | array | memoryview | tuple):
        return type(value) is bytes or _is_number(value)
    expected = {"request_id": str, "domain": str, "traceparent": str, "extra_keys": ExtraKeys}.get(name)
    return all(_is_number(one) if expected is None else type(one) is expected for one in value)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and -(1 << 63) <= value < 1 << 63


def _entries(core: Any) -> object:
    """The published keys, as a set: the cores have orders of their own."""
    entries = core.entries()
    names = [(run.domain, run.group) for run in entries.runs for _ in range(run.count)]
    size = entries.digest_size
    digests = [entries.digests[at * size : (at + 1) * size] for at in range(len(names))]
    rows = sorted(zip(names, entries.block, entries.stamp, entries.num_tokens, digests, strict=True))
    return rows, sorted(zip(entries.unkeyed_block, entries.unkeyed_stamp, strict=True))


def _keys(core: Any) -> object:
    return sorted(
        (step, event.group, event.domain, digest, block)
        for step, event in core.stored_events()
        for digest, block in zip(event.hashes, event.blocks, strict=True)
    )


def _equal(name: str, one: object, other: object) -> None:
    if one != other:
        raise NotEqual(f"{name}: the Python core has {one!r}, the compiled core {other!r}")


def seeds() -> Iterator[bytes]:
    """Programs for each spec, without tiers and with."""
    count = len(ALL_MIXES) + len(MORE)
    for number in range(2 * count):
        for seed in range(2 if number < count else 5):
            size = 900 if number < count else 2500  # until what was saved is evicted and asked for again
            yield bytes([number, *Random(number * 8 + seed).randbytes(size)])
