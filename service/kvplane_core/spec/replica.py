"""The cache of one engine instance: applies steps, which change what blocks requests have, and answers reads.

apply(step):  validate -> executed_through -> for each part:
              facts -> cache -> news -> resume -> run -> admit -> peek -> prefetch -> retain -> result
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

from kvplane.base.groups import CommitRule, ReplicaSpec
from kvplane.base.hashing import HashScheme
from kvplane.base.step import (
    UNLIMITED,
    AdmitStatus,
    CacheEvent,
    EventKind,
    News,
    Part,
    PartResult,
    Peek,
    Step,
    StepResult,
)
from kvplane_core.face.cache_events import CacheEvents
from kvplane_core.face.common import CommonCore
from kvplane_core.face.contents import Content, hash_news
from kvplane_core.face.counters import Counters, GroupCounters, GroupTotals, Residency
from kvplane_core.face.entries import Entries
from kvplane_core.face.interface import INSIDE, BlockCounts, Hit, KeyRow
from kvplane_core.face.keys import NULL_BLOCK
from kvplane_core.face.recovery import PoolShape, RecoveredState, RecoveryOutcome, verify_entries
from kvplane_core.face.setup import check_spec
from kvplane_core.spec.coordinator import Coordinator
from kvplane_core.spec.effort import Effort
from kvplane_core.spec.facts import FactApplier, report_hashes
from kvplane_core.spec.group_counts import count_by_cell, count_by_group, count_common_blocks
from kvplane_core.spec.in_flight import InFlightTracker
from kvplane_core.spec.invariants import check_in_slices
from kvplane_core.spec.requests import Requests
from kvplane_core.spec.resume import Resumption
from kvplane_core.spec.retaining import retain
from kvplane_core.spec.split import SplitPool
from kvplane_core.spec.state_entries import encode
from kvplane_core.spec.step_applier import StepApplier, align_chunk
from kvplane_core.spec.tiers.behind import SaveBehind
from kvplane_core.spec.tiers.loads import TierLoads
from kvplane_core.spec.tiers.prefetch import order_prefetch
from kvplane_core.spec.validate import StepValidator

UNIT_NS = 2_000  # to allocate and register a block, of requests of 40 blocks and more, rounded up


class Replica(CommonCore):
    """The block pool and the requests of one engine instance.

    Deterministic: the same spec and the same operations give the same results and the same digest. `apply` raises
    KvplaneError subclasses for steps that cannot be applied, and then changes nothing. The caller must check that a
    step has the current epoch, the next number, and comes from the client that may write.
    """

    def __init__(self, spec: ReplicaSpec) -> None:
        """Raise InvalidArgument if fields of the spec contradict each other."""
        check_spec(spec)
        self.spec = spec
        self.requests = Requests()
        self.coordinator = Coordinator(spec, self.requests)
        self.counters = Counters()
        self.tracker = InFlightTracker(self.coordinator, self.counters)
        self._pool = self.coordinator.pool
        self._scheme = HashScheme.of(spec)
        self.facts = FactApplier(self.coordinator, self.tracker, self._scheme.digest.size)
        self.tiers = self.coordinator.tiers
        self._save_behind = SaveBehind(spec, self.coordinator)
        self._pool.stamped.clear()
        self.seq = 0
        self._keeps_keys = True  # False while an engine life begins without a stamp table
        self._shown: Sequence[int] = ()  # stamps of the memory when this engine life began, for an image

    # -- steps and engine lives --------------------------------------------------------------------------------------

    def apply(self, step: Step) -> StepResult:
        """Apply the parts of a step. Raises InvalidArgument, and changes nothing, if one of them cannot be applied."""
        self._validator().check(step)
        if any(part.resume is not None for part in step.parts):
            Resumption(self.coordinator, self._shown).check(step)
        hashed = [hash_news(self._scheme, part.news) for part in step.parts]
        contents_of_news = [[one.content() for one in of_part] for of_part in hashed]
        self.begin_step(step.seq, step.executed_through)
        results = []
        for number, (part, contents) in enumerate(zip(step.parts, contents_of_news, strict=True)):
            results.append(self._apply_part(part, contents, step.seq, step.part + number == 0))
        if step.last:
            self.complete_step(step.seq, results[-1])
        return StepResult(step.seq, step.part, results, self._pool.executed_through)

    def apply_concurrently(self, step: Step) -> StepResult:
        """Apply a step as `apply` does, on a thread. The compiled core lets other threads run meanwhile."""
        return self.apply(step)

    def end_epoch(self, stamp_table: Sequence[int] = ()) -> Generator[None]:
        """Do the first part of `begin_epoch`: release all requests, and verify or drop all keys; yields in between.

        No step may be applied before `enter_epoch`. The invariants hold whenever it yields, so the generator can be
        closed before its end; a later call continues with what is left.
        """
        pool = self._pool
        self.tracker.abandon()
        yield
        pool.retained.suspend()
        if pool.index:
            if not stamp_table and self._keeps_keys:
                self._keeps_keys = False
                self.tiers.clear(is_reported=False)
                if self.spec.events:
                    pool.events.append(CacheEvent(EventKind.CLEARED))
            if self._keeps_keys:
                pool.drop_unproven(stamp_table)
            else:
                pool.clear()
            yield
            pool.free.put_unkeyed_first(pool.key_tokens)
        self.tiers.end_epoch(stamp_table)

    def enter_epoch(
        self, epoch: int, stamp_table: Sequence[int] = (), busy: Iterable[int] = (), memory_is_new: bool = False
    ) -> int:
        """Do the second part of `begin_epoch`, after `end_epoch` with the same stamps.

        Arguments and result are those of `begin_epoch`.
        """
        under_load = self.tracker.close()
        if memory_is_new:
            under_load = []
            self._pool.release_busy(sorted(self._pool.busy))
        self._keeps_keys = True
        self._pool.begin_epoch(epoch)
        self._pool.hold_busy([*under_load, *busy])
        self.tiers.begin_epoch(epoch, memory_is_new, stamp_table)
        self._pool.retained.resume()
        self.seq = 0
        self._shown = stamp_table[: self.spec.num_blocks]  # a copy: the caller may reuse its array
        return self._pool.count_keys()

    def verify_entries(self, tables: Sequence[Sequence[int]], stored: Iterable[Entries]) -> RecoveredState:
        """Do the first part of `recover`, on any thread: select the stored entries whose content memory still has."""
        return verify_entries(PoolShape.of(self.spec, self.digest_size), tables, stored)

    def install_recovered(self, state: RecoveredState) -> RecoveryOutcome:
        """Do the second part of `recover`: install the result of `verify_entries` in this unused replica.

        The third part is `enter_epoch`: requests may resume with the blocks whose stamps it is given.
        """
        assert not self.requests.slots(), "only an unused replica can recover"
        self._pool.install(state)
        self.tiers.install(state.slots)
        return state.outcome

    def store_empty_ranges(self) -> None:
        """Make empty registrations emit STORED events without hashes, which is needed to replay recordings of version
        1.
        """
        for manager in self.coordinator.managers:
            manager.stores_empty_ranges = True

    def take_events(self) -> CacheEvents:
        """Return and clear the events of the device that `begin_epoch` caused; those of a part are in its result."""
        events, self._pool.events = self._pool.events, CacheEvents()
        return events

    def effort(self, step: Step) -> int:
        """Estimate what it takes to apply a step, in nanoseconds. Invalid steps are accepted too. Changes nothing."""
        return UNIT_NS * self._effort().of(step)

    def look_up_effort(self, num_tokens: int) -> int:
        """Estimate what the look-up of a prompt of this length takes, in nanoseconds."""
        return UNIT_NS * self._effort().of_look_up(num_tokens)

    def _effort(self) -> Effort:
        return Effort(self.spec, self.digest_size, self.coordinator, self.tracker)

    def check_in_slices(self) -> Generator[None]:
        """Check all invariants, see `invariants.check_in_slices`. The caller must close it when the replica changes."""
        return check_in_slices(self)

    def adopt(self, other: Replica) -> None:
        """Take over the state of another replica with an equal spec, which must not be used afterwards."""
        assert self.spec == other.spec, "the replicas have different specs"
        vars(self).update(vars(other))

    def check(self, step: Step) -> None:
        """Raise InvalidArgument if any part of the step cannot be applied. Changes nothing."""
        self._validator().check(step)

    def _validator(self) -> StepValidator:
        return StepValidator(self.spec, self.requests, self._pool.executed_through, self._pool.busy, self.tiers)

    def image(self, with_statistics: bool = True, hashed: bool = False) -> Iterator[bytes]:
        """Return the image of the state at the time of this call, in pieces, see `state`. No step may be open.

        `hashed`: as if all requests had been added with hashes, without the states of hashers.
        """
        return encode(self, with_statistics, hashed)

    # -- reads -------------------------------------------------------------------------------------------------------

    def lookup(self, digests: Sequence[bytes], domain: str, num_tokens: int) -> Hit:
        """Find the cached prefix that other clients may use: with commit=safe, only content whose step is executed.

        `num_tokens`: tokens of the prompt; its last token is never part of a hit. Changes nothing.
        """
        return self.coordinator.lookup.find(digests, domain, num_tokens - 1, self._horizon)

    @property
    def _horizon(self) -> int:
        return self._pool.executed_through if self.spec.commit is CommitRule.SAFE else INSIDE

    def blocks_of(self, domain: str, group: int, digest: bytes) -> list[int]:
        """Return all blocks that have this key (domain, group and hash), published or not."""
        return self._pool.blocks_of((domain, group, digest))

    def key_step(self, domain: str, group: int, digest: bytes) -> int | None:
        """Return the step that registered this key, whether or not it is executed; None if no block has the key."""
        found = self._pool.find(domain, (group,), digest, INSIDE)
        return None if found is None else self._pool.key_step[found[0]]

    def check_alone(self, part: Part) -> None:
        """Raise InvalidArgument if a replica with this spec and no requests could not apply the part."""
        check_alone(self.spec, part)

    def peek_slot(self, slot: int) -> Hit:
        """Return the hit that an admission of this request would find now. Changes nothing."""
        return self.coordinator.find_hit(slot)

    def key_rows(self, blocks: Iterable[int]) -> Iterator[KeyRow]:
        """Return what each of these blocks, or slots of tiers, has; see `KeyRow`."""
        pool, tiers = self._pool, self.tiers
        for block in blocks:
            if block < pool.num_blocks:
                primary, more = pool.key[block], pool.more_keys.get(block, {})
                keys = [] if primary is None else [(primary, pool.key_tokens[block]), *more.items()]
                stamp, step = pool.stamp[block], pool.key_step[block]
            else:
                key, stamp = tiers.held(block)
                keys, step = [] if key is None else [(key, 0)], 0
            yield stamp, step, [((key[:2], key[2]), tokens) for key, tokens in keys], 0

    def pair_names(self) -> Callable[[tuple[str, int]], tuple[str, int]]:
        """Return a function that returns domain and group of a pair of `key_rows`, which are the pair here."""
        return lambda pair: pair

    def free_order(self) -> list[int]:
        """Return the free blocks in the order of eviction."""
        return [*self._pool.free, *self._pool.retained]

    def first_blocks(self, domain: str, groups: Sequence[int], digest: bytes, horizon: int) -> list[int] | None:
        """Return the first block of each group with this digest, see `BlockPool.find`."""
        return self._pool.find(domain, groups, digest, horizon)

    def count_keys(self) -> int:
        """Count the distinct keys of the prefix cache."""
        return self._pool.count_keys()

    def group_totals(self) -> list[GroupTotals]:
        """Return the keys of each group, and the blocks that it ever took."""
        managers = self.coordinator.managers
        return [GroupTotals(self._pool.count_keys_of(one.group), one.allocated, one.adopted) for one in managers]

    @property
    def epoch(self) -> int:
        """Number of the engine life."""
        return self._pool.epoch

    @property
    def block_counts(self) -> BlockCounts:
        """Number of blocks by state."""
        pool = self._pool
        slack = pool.free.bare.count if isinstance(pool, SplitPool) else 0
        return BlockCounts.of(self.spec, len(pool.busy), pool.num_free, pool.num_evictable, slack)

    @property
    def retained_counts(self) -> tuple[int, int]:
        """Number of retained prefixes, and of the keys of blocks that they name."""
        return len(self._pool.retained.each), len(self._pool.retained.of_key)

    @property
    def digest_size(self) -> int:
        """Bytes of a block hash."""
        return self._scheme.digest.size

    @property
    def free_blocks(self) -> int:
        """Number of blocks that can be allocated now."""
        return self._pool.num_free

    @property
    def busy_blocks(self) -> tuple[int, ...]:
        """Blocks that loads of earlier engine lives (epochs) may still write, ascending; a step releases them in
        `Cache.loads_over`.
        """
        return tuple(sorted(self._pool.busy))

    @property
    def executed_through(self) -> int:
        """Number of the last executed step: this step and all steps before it have finished on all ranks."""
        return self._pool.executed_through

    @property
    def num_running(self) -> int:
        """Number of requests that hold blocks and may run."""
        return self.requests.num_running

    def group_counters(self) -> list[GroupCounters]:
        """Return the counters of each group. Passes over the pool, 0.1 s per million blocks: not for the hot path."""
        return count_by_group(self._pool, self.coordinator.managers)

    def block_map(self, cells: int) -> list[list[int]]:
        """Return per group the held and the cached free blocks of each cell, then the others in use; 1 to all cells."""
        return count_by_cell(self._pool, self.coordinator.managers, cells)

    @property
    def residency(self) -> Residency:
        """Histograms of block lifetimes; do not change them."""
        return self._pool.residency

    def shorten_chunk(self, slot: int, start: int, wanted: int) -> int:
        """Return how many of the `wanted` tokens from `start` on an aligned row grants at most."""
        return align_chunk(self.coordinator, slot, start, wanted)

    def count_held(self, slot: int) -> int:
        """Count the blocks that are held for the transfer of an ended request."""
        return len(self.tracker.held.get(slot, ()))

    def group_blocks(self, slot: int) -> list[int]:
        """Count the blocks of a request by group; one that several requests share counts for each."""
        tables = (manager.table[slot] for manager in self.coordinator.managers)
        return [len(table) - table.count(NULL_BLOCK) for table in tables]

    def common_prefix_blocks(self) -> list[int]:
        """Return, per group, how many leading blocks all running requests share (for cascade attention)."""
        return count_common_blocks(self.requests, self.coordinator.managers)

    # -- sections ----------------------------------------------------------------------------------------------------

    def _apply_part(self, part: Part, contents: list[Content], seq: int, opens: bool) -> PartResult:
        result = PartResult()
        self.facts.apply(part, seq, result)
        self.facts.apply_cache(part.cache, result)
        self.facts.apply_peers(part.peers)
        result.taken_back = len(result.preempted)
        self.apply_news(part.news, contents)
        if part.news.tokens:
            result.hashed_news = [b"".join(content.digests) for content in contents]
        if part.with_hashes:
            for content in contents:
                report_hashes(content.digests, result)
        if part.resume is not None:
            Resumption(self.coordinator, self._shown).apply(part.resume, self.tracker)
        if opens:
            self.coordinator.new_step()
        applier = StepApplier(self.coordinator, self.tracker, part.budget, result, seq)
        if part.run.slot:
            applier.run(part.run)
        if part.admit.slot:
            applier.admit(part.admit)
        self._peek(part.peek, result)
        if part.prefetch.slot:
            loads = TierLoads(self.coordinator, self.tracker)
            order_prefetch(self.coordinator, loads, part.prefetch, result.prefetched)
        if part.retain.num_hashes or part.retain.now_ns:
            retain(self.coordinator, part.retain, result.retained)
        if part.with_tables:
            self._add_all_tables(part, result)
        self.counters.unaligned_chunks += applier.unaligned_chunks
        self.counters.starved_chunks += applier.starved_chunks
        self.complete_part(result)
        return result

    def begin_step(self, seq: int, executed_through: int) -> None:
        """Begin to apply a step: set its number, and release what waited for the steps up to `executed_through`."""
        self.seq = max(self.seq, seq)
        self._pool.step = seq
        self.tracker.executed(executed_through)

    def complete_part(self, result: PartResult) -> None:
        """Count the refusals of a part; add its orders and events, and the number of free blocks, to its result."""
        if self._pool.retained.lost:
            self._pool.retained.forget_lost()
        self.counters.refused += result.admit_status.count(int(AdmitStatus.REFUSED))
        result.orders = self.coordinator.take_orders()
        self.tiers.demand_now += len(result.orders.stamp_block)
        result.events, result.tier_events = self.take_events(), self.tiers.take_events()
        result.free_blocks = self._pool.num_free

    def complete_step(self, seq: int, last: PartResult) -> None:
        """Complete a step after its last part: the blocks of its copies are released once the step is executed."""
        self.tracker.close_step(seq)
        if self.spec.tiers:
            self._save_behind.close_step(self.tracker.next_victim(seq))
            self.tiers.complete(last)
            self._pool.retained.forget_lost()  # what the saves and moves evicted
        self.counters.steps += 1
        last.free_blocks = self._pool.num_free

    def apply_news(self, news: News, contents: list[Content]) -> None:
        """Put the new requests, which have these contents (block hashes), into their slots."""
        requests, longest = self.requests, self.spec.max_model_len
        for row, slot in enumerate(news.slot):
            limit = news.max_tokens[row] if news.max_tokens else 0
            requests.add(slot, news.num_tokens[row], min(limit or longest, longest), contents[row])
            self.coordinator.grow(slot)
            requests.request_id[slot] = news.request_id[row] if news.request_id else ""
            requests.domain[slot] = news.domain[row] if news.domain else ""
            requests.skip_reading[slot] = bool(news.skip_reading and news.skip_reading[row])
        self.facts.note_hints(news)

    def _peek(self, peek: Peek, result: PartResult) -> None:
        for row, slot in enumerate(peek.slot):
            hit = self.coordinator.find_hit(slot, peek.limit[row] if peek.limit else UNLIMITED)
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


def check_alone(spec: ReplicaSpec, part: Part) -> None:
    """Raise InvalidArgument if a replica with this spec and no requests could not apply the part."""
    StepValidator(spec, Requests(), 0).check(Step(0, 1, [part]))
