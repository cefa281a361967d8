"""The cache of one engine instance. A step comes in, its result goes out; no other call changes what requests have.

apply(step):  validate -> executed_through -> for each part:
              facts -> cache -> news -> resume -> run -> admit -> peek -> result
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import chain, islice

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import CommitRule, ReplicaSpec
from kvplane.base.hashing import HashScheme, RequestHasher, pack_tokens, split_hashes
from kvplane.base.step import (
    NO_EXTRA_KEYS,
    UNCHANGED,
    AdmitStatus,
    Cache,
    CacheEvent,
    End,
    EventKind,
    ExtraKeys,
    Facts,
    News,
    Part,
    PartResult,
    Peek,
    RemoveReason,
    Step,
    StepResult,
)
from kvplane_service.core.cache_events import CacheEvents
from kvplane_service.core.columns import words_of
from kvplane_service.core.coordinator import Coordinator
from kvplane_service.core.counters import Counters, GroupCounters, Residency, count_by_group, count_common_blocks
from kvplane_service.core.dropping import confirm, drop_all_keys, forget_all_keys, keyed_blocks
from kvplane_service.core.entries import Entries, collect, replay_events
from kvplane_service.core.in_flight import InFlightTracker
from kvplane_service.core.lookup import Hit
from kvplane_service.core.pool import INSIDE
from kvplane_service.core.recovery import PoolShape, RecoveredState, RecoveryOutcome, verify_entries
from kvplane_service.core.requests import Content, Requests
from kvplane_service.core.resume import Resumption
from kvplane_service.core.setup import check_spec
from kvplane_service.core.step_applier import StepApplier
from kvplane_service.core.validate import StepValidator


class Replica:
    """A block pool and its requests.

    Deterministic: the same spec and the same operations give the same results and the same digest. `apply` raises
    KvplaneError subclasses for steps that cannot be applied, and changes nothing then. The caller checks whether a step
    may be applied now: its epoch, order and writer.
    """

    def __init__(self, spec: ReplicaSpec) -> None:
        """Raise InvalidArgument for a spec that contradicts itself."""
        check_spec(spec)
        self.spec = spec
        self.requests = Requests()
        self.coordinator = Coordinator(spec, self.requests)
        self.counters = Counters()
        self.tracker = InFlightTracker(self.coordinator, self.counters)
        self._pool = self.coordinator.pool
        self._scheme = HashScheme.of(spec)
        self._pool.stamped.clear()
        self.seq = 0
        self._keeps_keys = True  # False while a life without stamps is about to begin
        self._shown: Sequence[int] = ()  # stamps of the memory when this engine life began, for an image

    # -- steps and engine lives --------------------------------------------------------------------------------------

    def apply(self, step: Step) -> StepResult:
        """Apply the parts of a step; raises InvalidArgument, and changes nothing, when it cannot be applied whole."""
        StepValidator(self.spec, self.requests, self._pool.executed_through, self._pool.busy).check(step)
        if any(part.resume is not None for part in step.parts):
            Resumption(self.coordinator, self.tracker, self._shown).check(step)
        contents_of_news = [self._hash_news(part.news, f"parts[{n}].news") for n, part in enumerate(step.parts)]
        self.seq = max(self.seq, step.seq)
        self._pool.step = step.seq
        self.tracker.executed(step.executed_through)
        results = []
        for number, (part, contents) in enumerate(zip(step.parts, contents_of_news, strict=True)):
            opens = step.part + number == 0
            results.append(self._apply_part(part, contents, step.seq, opens))
        if step.last:
            self.tracker.close_step(step.seq)
            self.counters.steps += 1
            results[-1].free_blocks = self._pool.num_free
        return StepResult(step.seq, step.part, results, self._pool.executed_through)

    def begin_epoch(
        self, epoch: int, stamp_table: Sequence[int] = (), busy: Iterable[int] = (), memory_is_new: bool = False
    ) -> int:
        """Begin a new engine life: all requests are freed, and keys are kept where the memory proves them.

        Blocks that a load of the ended life may still write are held until `Cache.loads_over` names them.

        Args:
            epoch: above the current one.
            stamp_table: stamps of the page memory, one per block. A key is kept if its block has the pool's stamp there
                and its step was executed. Empty: no key is kept.
            busy: further blocks that a load of an earlier life may still write, as movers and the engine report.
            memory_is_new: the pages were allocated again, so no load of an earlier life writes to them.

        Returns:
            Number of keys kept. `take_events` returns the events of the others.
        """
        for _ in self.end_epoch(stamp_table):
            pass
        return self.enter_epoch(epoch, stamp_table, busy, memory_is_new)

    def end_epoch(self, stamp_table: Sequence[int] = ()) -> Generator[None]:
        """The long part of `begin_epoch`, in slices: release all requests, and verify or drop all keys.

        No step may be applied before `enter_epoch`. The invariants hold after every slice, so the generator can be
        dropped half way; a later call continues with what is left.
        """
        pool = self._pool
        yield from self.tracker.abandon()
        if pool.has_keys:
            if not stamp_table and self._keeps_keys:
                self._keeps_keys = False
                if self.spec.events:
                    pool.events.append(CacheEvent(EventKind.CLEARED))
            yield from self._drop_unproven(stamp_table) if self._keeps_keys else self._drop_all()
            yield from pool.free.put_unkeyed_first(pool.key, pool.num_evictable)

    def enter_epoch(
        self, epoch: int, stamp_table: Sequence[int] = (), busy: Iterable[int] = (), memory_is_new: bool = False
    ) -> int:
        """The short part of `begin_epoch`, after `end_epoch` with the same stamps. Arguments as there."""
        under_load = self.tracker.close()
        if memory_is_new:
            under_load = []
            self._pool.release_busy(sorted(self._pool.busy))
        self._keeps_keys = True
        self._pool.begin_epoch(epoch)
        self._pool.hold_busy([*under_load, *busy])
        self.seq = 0
        self._shown = stamp_table
        return self._pool.count_keys()

    def recover(
        self, epoch: int, tables: Sequence[Sequence[int]], stored: Iterable[Entries], busy: Iterable[int] = ()
    ) -> RecoveryOutcome:
        """Begin the first engine life of this object, on page memory that an earlier object managed.

        Args:
            epoch: above every epoch in which stamps were issued for this memory.
            tables: stamps in the memory of each rank, one per block.
            stored: results of `entries`, as far as they are stored; in any order.
            busy: as in `begin_epoch`.
        """
        outcome = self.install_recovered(self.verify_entries(tables, stored))
        self.enter_epoch(epoch, tables[0] if len(tables) == 1 else (), busy)
        return outcome

    def verify_entries(self, tables: Sequence[Sequence[int]], stored: Iterable[Entries]) -> RecoveredState:
        """First part of `recover`. Changes nothing, so it may run on another thread."""
        pool = self._pool
        shape = PoolShape(pool.num_blocks, pool.num_groups, self._scheme.digest.size, tuple(pool.reserved))
        return verify_entries(shape, tables, stored)

    def install_recovered(self, state: RecoveredState) -> RecoveryOutcome:
        """Second part of `recover`: install the result of `verify_entries` in this unused replica, within milliseconds.

        `enter_epoch` is the third part. Its stamps, those that the memory of every rank shows, are the ones with which
        requests may resume.
        """
        assert not self.requests.slots() and not self._pool.has_keys, "only an unused replica can recover"
        self._pool.install_recovered(state)
        return state.outcome

    def _drop_unproven(self, stamp_table: Sequence[int]) -> Generator[None]:
        shown = words_of(stamp_table)
        for blocks in keyed_blocks(self._pool):
            drop_all_keys(self._pool, confirm(self._pool, blocks, shown), RemoveReason.UNVERIFIED)
            yield

    def _drop_all(self) -> Generator[None]:
        for blocks in keyed_blocks(self._pool):
            forget_all_keys(self._pool, blocks)
            yield

    def store_empty_ranges(self) -> None:
        """Emit STORED events without hashes where nothing was registered, to replay recordings of version 1."""
        for manager in self.coordinator.managers:
            manager.stores_empty_ranges = True

    def take_events(self) -> CacheEvents:
        """Return and clear the cache events of `begin_epoch`; those of a part are in its result."""
        events, self._pool.events = self._pool.events, CacheEvents()
        return events

    # -- reads -------------------------------------------------------------------------------------------------------

    def lookup(self, digests: Sequence[bytes], domain: str, num_tokens: int) -> Hit:
        """The cached prefix as readers outside may see it (commit=safe: executed content only). Changes nothing."""
        horizon = self._pool.executed_through if self.spec.commit is CommitRule.SAFE else INSIDE
        return self.coordinator.lookup.find(digests, domain, num_tokens - 1, horizon)

    def digests_of(self, content: News) -> list[bytes]:
        """Block hashes of a one-row News, from its tokens or hashes; raises as a step with it would."""
        StepValidator(self.spec, Requests(), 0).check(Step(0, 1, [Part(news=content)]))
        return self._hash_news(content, "news")[0].digests

    def peek_slot(self, slot: int) -> Hit:
        """The hit that an admission of this request would find now. Changes nothing."""
        return self.coordinator.find_hit(slot)

    def entries(self, blocks: Iterable[int] | None = None) -> Entries:
        """The published keys of these blocks, or of all: free ones in eviction order, then those in use."""
        pool = self._pool
        if blocks is None:
            held = [block for block in range(1, pool.num_blocks) if pool.references[block]]
            blocks = chain(pool.free, held)
        return collect(pool, blocks, self._scheme.digest.size)

    def replay_events(self) -> Iterator[CacheEvent]:
        """STORED events of all keys, for a follower without state; after `recover`, when all keys are published."""
        return replay_events(self._pool, [manager.block_size for manager in self.coordinator.managers])

    def count_keys(self) -> int:
        """Distinct keys of the prefix cache."""
        return self._pool.count_keys()

    @property
    def digest_size(self) -> int:
        """Bytes of a block hash."""
        return self._scheme.digest.size

    @property
    def free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        return self._pool.num_free

    @property
    def busy_blocks(self) -> tuple[int, ...]:
        """Blocks that loads of earlier engine lives may still write, ascending; `Cache.loads_over` releases them."""
        return tuple(sorted(self._pool.busy))

    @property
    def executed_through(self) -> int:
        """All steps up to this one have finished on all ranks."""
        return self._pool.executed_through

    @property
    def num_running(self) -> int:
        """Requests that hold blocks and may run."""
        return self.requests.num_running

    def group_counters(self) -> list[GroupCounters]:
        """Per group. Counts by passing over the pool, 0.1 s per million blocks: not for the hot path."""
        return count_by_group(self._pool, self.coordinator.managers)

    @property
    def residency(self) -> Residency:
        """Histograms of block lifetimes; do not change them."""
        return self._pool.residency

    def common_prefix_blocks(self) -> list[int]:
        """Per group, leading blocks that every running request shares (for cascade attention)."""
        return count_common_blocks(self.requests, self.coordinator.managers)

    # -- sections ----------------------------------------------------------------------------------------------------

    def _apply_part(self, part: Part, contents: list[Content], seq: int, opens: bool) -> PartResult:
        result = PartResult()
        self._facts(part, seq, result)
        self._cache(part.cache, result)
        result.taken_back = len(result.preempted)
        self._news(part.news, contents)
        if part.news.tokens:
            result.hashed_news = [b"".join(content.digests) for content in contents]
        if part.with_hashes:
            for content in contents:
                _report_hashes(content.digests, result)
        if part.resume is not None:
            Resumption(self.coordinator, self.tracker, self._shown).apply(part.resume)
        if opens:
            self.coordinator.new_step()
        applier = StepApplier(self.coordinator, self.tracker, part.budget, result, seq)
        if part.run.slot:
            applier.run(part.run)
        if part.admit.slot:
            applier.admit(part.admit)
            self.counters.refused += result.admit_status.count(int(AdmitStatus.REFUSED))
        self.counters.unaligned_chunks += applier.unaligned_chunks
        self.counters.starved_chunks += applier.starved_chunks
        self._peek(part.peek, result)
        if part.with_tables:
            self._add_all_tables(part, result)
        result.orders = self.coordinator.take_orders()
        result.events = self.take_events()
        result.free_blocks = self._pool.num_free
        return result

    def _facts(self, part: Part, seq: int, result: PartResult) -> None:
        facts = part.facts
        if facts.computed or facts.tokens or facts.commit or facts.end or part.with_hashes:
            self._facts_by_row(part, seq, result)
            return
        num_tokens = self.requests.num_tokens
        for slot, count in zip(facts.slot, facts.appended, strict=False):
            num_tokens[slot] += count
        for row, digests in _given_hashes(facts).items():
            self._add_digests(facts.slot[row], digests)

    def _facts_by_row(self, part: Part, seq: int, result: PartResult) -> None:
        facts, requests = part.facts, self.requests
        given, token_at = _given_hashes(facts), 0
        for row, slot in enumerate(facts.slot):
            end = End(facts.end[row]) if facts.end else End.NONE
            if facts.computed and facts.computed[row] != UNCHANGED:
                self._correct(slot, facts.computed[row], end, seq, result)
            appended = facts.appended[row] if facts.appended else 0
            requests.num_tokens[slot] += appended
            if facts.tokens and appended:
                result.hashed_facts.append(self._append_tokens(slot, facts.tokens[token_at : token_at + appended]))
            token_at += appended
            self._add_digests(slot, given.get(row, ()))
            if facts.commit and facts.commit[row] != UNCHANGED:
                self._commit(slot, facts.commit[row], seq)
            if part.with_hashes:
                _report_hashes(requests.content[slot].digests, result)
            if end is not End.NONE:
                self._end(slot, end, facts.fence[row] if facts.fence else 0, seq, result)

    def _correct(self, slot: int, computed: int, end: End, seq: int, result: PartResult) -> None:
        """Lower a request's computed tokens after drafts were rejected. It is never raised: only grants compute tokens.

        A request whose tables lack blocks for that position is preempted, unless the same row ends it (its blocks may
        be held for a transfer).
        """
        requests = self.requests
        if computed < requests.computed[slot] and self.spec.commit is CommitRule.SAFE:
            if end is End.NONE and not self.coordinator.can_rewind(slot, computed):
                gone = self.tracker.preempt(slot, seq)
                result.preempted.extend(gone)
                result.went_back += len(gone)
                return
            self.coordinator.rewind(slot, computed)
            if slot in requests.not_zeroed:
                self.coordinator.zero_unloaded(slot, computed)
        requests.ends_at[slot] = requests.launch_end(slot)
        requests.computed[slot] = min(requests.computed[slot], computed)
        requests.invalidate_fast_path(slot)

    def _add_digests(self, slot: int, digests: Sequence[bytes]) -> None:
        """Add hashes of blocks that became full; these may be registrable now."""
        if digests:
            self.requests.content[slot].digests.extend(digests)
            if self.spec.enable_caching:
                self.requests.invalidate_register_bound(slot)

    def _append_tokens(self, slot: int, tokens: Sequence[int]) -> bytes:
        """Hash appended tokens; returns the digests of the blocks that became full."""
        content = self.requests.content[slot]
        if content.hasher is None:
            return b""
        made = content.hasher.append(pack_tokens(tokens))
        self._add_digests(slot, split_hashes(made, self._scheme.digest.size))
        return made

    def _commit(self, slot: int, num_tokens: int, seq: int) -> None:
        """Register a request's written blocks. Those of executed steps are published at once, others stay tentative."""
        requests, pool = self.requests, self._pool
        self.tracker.load_is_over(slot)
        num_tokens = min(num_tokens, requests.computed[slot], requests.num_tokens[slot])
        pool.step = pool.executed_through if self.tracker.is_executed(slot, num_tokens) else seq
        requests.ends_at[slot] = requests.launch_end(slot)
        self.coordinator.commit(slot, num_tokens)
        self.tracker.note_keys(slot, pool.step)
        pool.step = seq
        requests.invalidate_fast_path(slot)

    def _end(self, slot: int, end: End, fence: int, seq: int, result: PartResult) -> None:
        if end is not End.HELD:
            fence = self.tracker.load_is_over(slot, fence)
        if end is End.FREE:
            result.preempted.extend(self.tracker.end(slot, seq, fence))
        elif end is End.HELD:
            result.preempted.extend(self.tracker.hold(slot, seq))
        elif self.requests.running[slot]:
            result.preempted.extend(gone for gone in self.tracker.preempt(slot, seq, fence) if gone != slot)

    def _cache(self, cache: Cache, result: PartResult) -> None:
        for failed in cache.failed_steps:
            result.preempted.extend(self.tracker.fail_step(failed))
        dropped = [self._evict(block) for block in cache.evicted]
        if any(dropped):
            self.coordinator.register_again(cache.evicted)
            self.requests.invalidate_all_fast_paths()
        for slot in cache.released:
            result.preempted.extend(self.tracker.release_held(slot, self.seq))
        self._pool.release_busy(cache.loads_over)
        if cache.reset:
            result.reset_done = self._pool.reset()

    def _evict(self, block: int) -> bool:
        """Drop the keys of a block, and restamp it even without any: a store may have keys that the pool lacks."""
        had_keys = self._pool.drop_keys(block, RemoveReason.DROPPED)
        if not had_keys:
            self._pool.restamp(block)
        return had_keys

    def _hash_news(self, news: News, field: str) -> list[Content]:
        """Contents of the new requests. Changes nothing. Raises InvalidArgument for invalid extra keys."""
        contents, at = [], 0
        digests = split_hashes(news.hashes, len(news.hashes) // sum(news.num_hashes)) if news.hashes else []
        for row, num_tokens in enumerate(news.num_tokens):
            if news.tokens:
                extra = news.extra_keys[row] if news.extra_keys else NO_EXTRA_KEYS
                tokens = news.tokens[at : at + num_tokens]
                contents.append(self._hash_tokens(tokens, extra, f"{field}.extra_keys[{row}]"))
                at += num_tokens
            else:
                count = news.num_hashes[row] if news.num_hashes else 0
                contents.append(Content(digests[at : at + count]))
                at += count
        return contents

    def _hash_tokens(self, tokens: Sequence[int], extra: ExtraKeys, field: str) -> Content:
        try:
            hasher = RequestHasher(self._scheme, extra)
        except InvalidArgument as error:
            inner = error.field.removeprefix("extra_keys")
            raise InvalidArgument(error.message, field=field + inner, remedy=error.remedy) from None
        return Content(split_hashes(hasher.append(pack_tokens(tokens)), self._scheme.digest.size), hasher)

    def _news(self, news: News, contents: list[Content]) -> None:
        requests, longest = self.requests, self.spec.max_model_len
        for row, slot in enumerate(news.slot):
            limit = news.max_tokens[row] if news.max_tokens else 0
            requests.add(slot, news.num_tokens[row], min(limit or longest, longest), contents[row])
            self.coordinator.grow(slot)
            requests.request_id[slot] = news.request_id[row] if news.request_id else ""
            requests.domain[slot] = news.domain[row] if news.domain else ""
            requests.skip_reading[slot] = bool(news.skip_reading and news.skip_reading[row])

    def _peek(self, peek: Peek, result: PartResult) -> None:
        for row, slot in enumerate(peek.slot):
            hit = self.coordinator.find_hit(slot)
            result.peek_hit.append(hit.num_tokens)
            result.peek_single_group_hit.append(hit.single_group_hit)
            if peek.with_blocks:
                for group, blocks in enumerate(hit.blocks):
                    result.peek_blocks.add(row, group, blocks)

    def _add_all_tables(self, part: Part, result: PartResult) -> None:
        result.tables = type(result.tables)()
        for row, slot in enumerate([*part.run.slot, *part.admit.slot]):
            for group, table in enumerate(self.coordinator.tables(slot)):
                result.tables.add(row, group, table)


def _given_hashes(facts: Facts) -> dict[int, list[bytes]]:
    """Digests by row, for rows that have any."""
    if not facts.hashes:
        return {}
    digests = iter(split_hashes(facts.hashes, len(facts.hashes) // sum(facts.num_hashes)))
    return {row: list(islice(digests, count)) for row, count in enumerate(facts.num_hashes) if count}


def _report_hashes(digests: list[bytes], result: PartResult) -> None:
    result.num_hashes.append(len(digests))
    result.last_hash.append(digests[-1] if digests else b"")
