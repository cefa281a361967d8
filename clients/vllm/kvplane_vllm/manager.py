"""vLLM's KVCacheManager on kvplane's allocator, in the engine's process.

vLLM's scheduler calls the manager several times for each request and step. Each call applies one row (the entry of one
request) to the open step of the allocator. The step ends when the scheduler takes its orders: the pages to zero and to
copy. Calls between two steps, such as the frees of finished requests, belong to the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.request import Request, RequestStatus

from kvplane.base.groups import CommitRule, GroupKind, ReplicaSpec
from kvplane.base.sections import AdmitRow
from kvplane.base.step import UNCHANGED, UNLIMITED, AdmitStatus, Cache, End, PartResult, RowFlag, StepResult, Watermark
from kvplane_core.face.interface import INSIDE, Hit
from kvplane_core.face.loader import new_in_process, open_step
from kvplane_core.face.part_rows import AdmitTerms, Update
from kvplane_vllm import events, views
from kvplane_vllm.known import Known
from kvplane_vllm.launch import PageOrders
from kvplane_vllm.spec import limits_of, replica_spec
from kvplane_vllm.state_offers import StateOffers

if TYPE_CHECKING:
    from kvplane_core.face.native import NativeReplica
    from kvplane_core.face.native.open_step import NativeOpenStep

DELAY_CACHING, FULL_FIT = int(RowFlag.DELAY_CACHING), int(RowFlag.FULL_FIT)
RUNNING = RequestStatus.RUNNING
DENIED = {AdmitStatus.REFUSED, AdmitStatus.NEVER_FITS, AdmitStatus.DEFERRED}


class InProcessManager(KVCacheManager):
    """Answer the calls of vLLM's scheduler with kvplane's allocator, which runs in this process.

    Attributes:
        commit: when other requests may hit a block, see `CommitRule`.
        known: the requests that the allocator knows, by id.
        executed: number of the last step that has finished on the worker. None: the engine does not report this number,
            and each step counts as executed when the next one begins.
        preempted: the requests that the allocator preempted and the scheduler has not yet processed.
    """

    commit = CommitRule.SAFE
    hash_algorithm = "sha256"  # of the block hashes that vLLM computes
    records_steps = False  # whether the rows of each step are kept
    needs_events = False  # whether the allocator reports cache events even if vLLM does not publish them

    def __init__(
        self,
        kv_cache_config: Any,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        *args: Any,
        **options: Any,
    ) -> None:
        """Take the arguments of vLLM's manager. Raises UnsupportedModel for a kind of cache that
        kvplane does not have.
        """
        limits_of_vllm = max_model_len, scheduler_block_size, hash_block_size, max_in_flight_tokens
        super().__init__(kv_cache_config, *limits_of_vllm, *args, **options)
        sizes = max_in_flight_tokens, scheduler_block_size, hash_block_size
        limits = limits_of(self, max_model_len, *sizes, options)
        self._real = real = self.coordinator
        has_events = self.enable_kv_cache_events or self.needs_events
        self.spec = replica_spec(kv_cache_config, real, limits, self.commit, has_events)
        self.replica = self.new_replica(self.spec)
        self.pool, self.managers = self.replica.coordinator.pool, self.replica.coordinator.managers
        self.state_offers: StateOffers | None = None  # for a connector
        self._computed = self.replica.requests.computed  # by slot
        self.blocks = [views.Block(self.pool, block) for block in range(self.spec.num_blocks)]
        self.empty_kv_cache_blocks = views.Blocks(self.blocks, [()] * len(self.managers))
        self.known: dict[str, Known] = {}
        self.executed: int | None = None
        self._by_slot: dict[int, Known] = {}
        self.preempted: list[Request] = []
        self._looked_up: tuple[Request, int, int] | None = None  # request, limit and tokens of the last look-up
        self._free_slots: list[int] = []
        self._num_slots = 1  # slot 0 belongs to no request, see `spare_slot`
        self._popped: dict[tuple[int, ...], int] = {}  # blocks of `pop_blocks_for_free`, in order -> slot
        self._step: NativeOpenStep | None = None
        self._taken = 0  # parts of the open step whose results were taken
        self._page_orders = PageOrders()
        self._events: list[Any] = []
        self.block_pool: Any = views.Pool(self)
        self.coordinator: Any = views.Coordinator.of(self, real)
        self._open().add(self.spare_slot, 1, [])

    spare_slot = 0  # of a request that never runs, for questions about requests that the allocator does not know

    def new_replica(self, spec: ReplicaSpec) -> NativeReplica:
        """Return the allocator of this engine life, with an empty cache."""
        return new_in_process(spec)

    # -- steps -------------------------------------------------------------------------------------------------------

    @property
    def seq(self) -> int:
        """The number of the last step that ended."""
        return self.replica.seq if self._step is None else self.replica.seq - 1

    def _open(self) -> NativeOpenStep:
        if self._step is None:
            executed = self.replica.seq if self.executed is None else self.executed
            self._step = open_step(self.replica, executed, self.records_steps)
            self._taken = 0
        return self._step

    def step_executed(self, seq: int) -> None:
        """Record that all ranks have finished this step and all earlier ones."""
        self.executed = seq

    def close_step(self) -> None:
        """End the open step, if there is one, and collect its orders (pages to zero and to copy)
        and its cache events.
        """
        if self._step is not None:
            step, self._step = self._step, None
            result = step.close()
            self._take(result.parts[self._taken :])
            self.step_closed(step, result)

    def step_closed(self, step: NativeOpenStep, result: StepResult) -> None:
        """Called with each step that ended, and its result."""

    def send_steps(self, waiting: int | None = None) -> None:
        """Called at the end of schedule(), with the number of requests that wait for admission."""

    def shut_down(self) -> None:
        """Called when the engine ends."""

    def _flush(self) -> None:
        """Collect the cache events of the calls so far; the step stays open."""
        if self._step is not None:
            results = self._step.flush() if self._step.has_events else self._step.results
            self._take(results[self._taken :])
            self._taken = len(results)

    def _take(self, results: Iterable[PartResult]) -> None:
        lookahead = self.spec.hash_lookahead_tokens
        for result in results:
            orders = result.orders
            if orders.zero_block or orders.copy_src:
                self._page_orders.add(orders)
            if self.enable_kv_cache_events:
                self._events += events.convert_all(result.events, self._by_slot, lookahead)

    def new_step_starts(self) -> None:
        """Begin a step, if the engine does not report which steps are executed. Else its scheduler does this, see
        `scheduler.OnKvplane`.
        """
        if self.executed is None:
            if self._step is not None and self._step.any_granted:
                self.close_step()
            self._open()

    @property
    def only_full_attention(self) -> bool:
        """Whether no request that goes back is preempted, since its tables keep all their blocks."""
        return all(manager.spec.kind in (GroupKind.FULL_ATTENTION, GroupKind.MLA) for manager in self.managers)

    def report_progress(self) -> None:
        """Report which requests went back since the last step, because drafts were rejected. Other changes are
        reported with the next call for the request.
        """
        computed = self.replica.requests.computed  # 0 for requests that do not run
        for known in [one for one in self.known.values() if one.request.num_computed_tokens < computed[one.slot]]:
            self._update(self._progress(known, known.request.num_computed_tokens))

    def _update(self, update: Update) -> None:
        """Apply what happened to one request, and record which requests the allocator preempts because of it."""
        slots = self._open().update(update)
        self.preempted += [self._by_slot[slot].request for slot in slots if slot != update.slot or not update.end]

    def _progress(self, known: Known, computed: int = UNCHANGED, commit: int = UNCHANGED) -> Update:
        """Return the row that reports the tokens and hashes that a request gained since its last report."""
        kept = known.num_kept
        appended, known.num_tokens = kept - known.num_tokens, kept
        digests = known.new_hashes(self.spec.hash_block_size, kept)
        known.num_hashes += len(digests)
        return Update(known.slot, computed=computed, appended=appended, digests=digests, commit=commit)

    # -- requests ----------------------------------------------------------------------------------------------------

    def _find(self, request: Request) -> Known:
        """Return the allocator's record of a request, after all tokens of the request are reported. Adds an unknown
        request.
        """
        known = self.known.get(request.request_id)
        if known is not None and known.request is not request:
            self._end(known, End.FREE)  # the id is used again
            known = None
        if known is None:
            return self._add(request)
        if request.num_tokens > known.num_tokens or known.new_hashes(self.spec.hash_block_size, request.num_tokens):
            self._update(self._progress(known))
        return known

    def _add(self, request: Request) -> Known:
        known = self.known[request.request_id] = Known(self._take_slot(), request, self.enable_caching)
        self._by_slot[known.slot] = known
        prompt = max(1, min(request.num_prompt_tokens, request.num_tokens))
        skips = int(request.skip_reading_prefix_cache)
        known.num_tokens = prompt
        digests = known.new_hashes(self.spec.hash_block_size, prompt)
        known.num_hashes = len(digests)
        self._open().add(known.slot, prompt, digests, request_id=request.request_id, skip_reading=skips)
        if request.num_tokens > prompt:
            self._update(self._progress(known))
        return known

    def _take_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        self._num_slots += 1
        return self._num_slots - 1

    def _end(self, known: Known, end: End) -> None:
        self._has_run(known.slot)
        self._update(Update(known.slot, end=end))
        if end is not End.PREEMPTED:
            del self.known[known.request.request_id]
        if end is End.FREE:
            self._forget_slot(known.slot)

    def _has_run(self, slot: int) -> None:
        if self.executed is None and self._step is not None and self._step.is_granted(slot):
            self.close_step()  # launches are not reported: the one of this step has run

    def _forget_slot(self, slot: int) -> None:
        self._flush()  # its events name the request
        self._by_slot.pop(slot, None)
        self._free_slots.append(slot)

    def tables_of(self, slot: int) -> list[list[int]]:
        """Return the block ids of the request in `slot`, one list per group."""
        return self.replica.coordinator.tables(slot)

    def _view(self, rows: Sequence[Sequence[int]]) -> KVCacheBlocks:
        """Return the blocks with these ids, by group. The caller must not change `rows` later."""
        if not any(rows):
            return self.empty_kv_cache_blocks
        return views.Blocks(self.blocks, rows)

    # -- look-ups ----------------------------------------------------------------------------------------------------

    def find_hit(self, digests: Sequence[bytes], max_tokens: int, longest: int = UNLIMITED) -> Hit:
        """Return the longest cached prefix of at most `longest` tokens; at most `max_tokens` tokens are looked up."""
        return self.replica.coordinator.lookup.find(digests, "", max_tokens, INSIDE, longest)

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int]:
        """See vLLM's KVCacheManager."""
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        limit = UNLIMITED if max_cache_hit_length is None else max_cache_hit_length
        hit = self._hit_of(request, limit)
        self._looked_up = request, limit, hit.num_tokens
        if hit.num_tokens and self.enable_kv_cache_events and request.kv_cache_report_mode == "full":
            self._flush()
            self._events += events.of_hit(self._real, request, hit.blocks)
        return self._view(hit.blocks), hit.num_tokens, hit.single_group_hit

    def _hit_of(self, request: Request, limit: int) -> Hit:
        most = request.num_prompt_tokens if self.replica.coordinator.hits_end_in_prompt else UNLIMITED
        return self.find_hit(request.block_hashes, min(request.num_tokens - 1, most), limit)

    def get_computed_blocks_for_connector(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        """See vLLM's KVCacheManager. The returned prefix is the longest that is cached in every group."""
        return *self.get_computed_blocks(request, max_cache_hit_length), False

    # -- allocation --------------------------------------------------------------------------------------------------

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> KVCacheBlocks | None:
        """See vLLM's KVCacheManager."""
        known = self.known.get(request.request_id)
        if (
            known is not None
            and known.request is request
            and request.status is RUNNING  # the watermark is for requests that wait
            and request.num_computed_tokens == self._computed[known.slot]
            and not (num_new_computed_tokens or num_external_computed_tokens or delay_cache_blocks)
            and not (full_sequence_must_fit or reserved_blocks)
        ):
            num_tokens, hashes = request.num_tokens, request.block_hashes
            digests: Sequence[bytes] = ()
            if len(hashes) != known.num_hashes:
                digests = known.new_hashes(self.spec.hash_block_size, num_tokens)
            step, in_flight = self._step or self._open(), request.num_in_flight_tokens
            new = step.decode(known.slot, num_tokens, digests, num_new_tokens, num_lookahead_tokens, in_flight)
            if new is not False:
                known.num_tokens = num_tokens
                known.num_hashes += len(digests)
                return self._view(new) if new else self.empty_kv_cache_blocks if new is not None else None
        if num_new_tokens == 0 and num_external_computed_tokens == 0 and num_new_computed_tokens == 0:
            raise ValueError("num_new_tokens must be greater than 0 when there are no computed tokens to adopt")
        known = self._find(request)
        slot = known.slot
        granted: Sequence[Sequence[int]] | None
        if self._step is not None and self._step.is_granted(slot) and self.commit is CommitRule.SAFE:
            self.close_step()  # a request runs once in a step
        flags = (DELAY_CACHING if delay_cache_blocks else 0) | (FULL_FIT if full_sequence_must_fit else 0)
        if self.replica.requests.running[slot]:
            if has_scheduled_reqs and request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                reserved_blocks += self.watermark_blocks
            self._go_back(known)
            if not self.replica.requests.running[slot]:
                return None  # it went back behind the blocks that it holds: the scheduler preempts it
            in_flight = request.num_in_flight_tokens
            granted = self._open().extend(slot, num_new_tokens, num_lookahead_tokens, in_flight, flags, reserved_blocks)
        elif request.num_computed_tokens:
            if request not in self.preempted:
                self.preempted.append(request)
            return None  # computed in blocks that the allocator took back: it starts over, with the next step
        else:
            waits = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            terms = AdmitTerms(
                hit_limit=self._limit_of(request, num_new_computed_tokens),
                external=num_external_computed_tokens,
                lookahead=num_lookahead_tokens,
                encoder_tokens=num_encoder_tokens,
                reserved=reserved_blocks,
                watermark=Watermark.ALWAYS if has_scheduled_reqs and waits else Watermark.NEVER,
                flags=flags,
                skip_zero_groups=sum(1 << group for group in skip_zeroing_group_ids),
                single_group_hit=request.shared_prefix_boundary,
            )
            granted = self._admit(known, num_new_computed_tokens, num_new_tokens, terms)
        return None if granted is None else self._view(granted)

    def _go_back(self, known: Known) -> None:
        computed = known.request.num_computed_tokens
        if computed < self.replica.requests.computed[known.slot]:
            self._update(Update(known.slot, computed=computed))

    def _limit_of(self, request: Request, num_hit: int) -> int:
        """Return the limit in tokens for which a look-up finds a hit of this length: none, or the length itself."""
        if not self.prefix_cache_lookup_enabled(request):
            return UNLIMITED
        if self._looked_up is not None:
            looked_up, limit, found = self._looked_up
            if looked_up is request and found == num_hit:
                return limit
        longest = self._hit_of(request, UNLIMITED).num_tokens
        return UNLIMITED if longest == num_hit else num_hit

    def _admit(self, known: Known, num_hit: int, num_new: int, terms: AdmitRow) -> Sequence[Sequence[int]] | None:
        step = self._open()
        status = step.admit(known.slot, num_hit, num_new, terms)
        if status is AdmitStatus.GRANTED:
            return step.new_blocks
        assert status in DENIED, f"{known.request.request_id} with a hit of {num_hit} tokens: {status.name}"
        return None

    def free(self, request: Request) -> None:
        """See vLLM's KVCacheManager."""
        self.free_id(request.request_id)

    def free_id(self, request_id: str) -> None:
        """Free the blocks of a request by its id. The allocator keeps the record of a request that is not finished,
        unless it is a session, whose last hash may contain a token that it drops.
        """
        known = self.known.get(request_id)
        if known is not None:
            is_over = known.request.is_finished() or known.request.resumable
            self._end(known, End.FREE if is_over else End.PREEMPTED)

    def pop_blocks_for_free(self, request: Request) -> list[Any]:
        """See vLLM's KVCacheManager. The blocks stay allocated until `release_popped` is called with them."""
        known = self.known.get(request.request_id)
        if known is None or not self.replica.requests.running[known.slot]:
            self.free(request)
            return []
        self._end(known, End.HELD)
        held = self.replica.tracker.held[known.slot]  # in the order of release
        self._popped[tuple(held)] = known.slot
        return [self.blocks[block] for block in reversed(held)]

    def release_popped(self, blocks: Sequence[int]) -> None:
        """Return blocks of `pop_blocks_for_free` to the pool, in this order."""
        if blocks:
            slot = self._popped.pop(tuple(blocks))
            self._open().change_cache(Cache(released=[slot]))
            self._forget_slot(slot)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """See vLLM's KVCacheManager."""
        known = self.known.get(request_id)
        if known is not None:
            self._has_run(known.slot)
            self._update(Update(known.slot, release_skipped=processed_computed_tokens))

    # -- prefix cache ------------------------------------------------------------------------------------------------

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """See vLLM's KVCacheManager."""
        if self.enable_caching:
            self._update(self._progress(self._find(request), commit=num_computed_tokens))

    def evict_blocks(self, block_ids: set[int]) -> None:
        """See vLLM's KVCacheManager."""
        self._open().change_cache(Cache(evicted=sorted(block for block in block_ids if block)))

    def reset_prefix_cache(self) -> bool:
        """See vLLM's KVCacheManager."""
        step = self._open()
        step.change_cache(Cache(reset=True))
        if not step.reset_done:
            if self._any_request_holds_blocks:
                return False
            # Copies that a launch in flight makes hold theirs. Nothing gets a key there: their requests are preempted.
            step.change_cache(Cache(evicted=list(range(1, self.spec.num_blocks))))
        if self.log_stats:
            assert self.prefix_cache_stats is not None
            self.prefix_cache_stats.reset = True
        return True

    @property
    def _any_request_holds_blocks(self) -> bool:
        requests = self.replica.requests
        running = any(requests.running[known.slot] for known in self.known.values())
        return running or bool(self._popped or requests.loading)

    def pending_events(self) -> list[Any]:
        """The cache events that `take_pending_events` has not returned yet."""
        self._flush()
        return self._events

    def take_pending_events(self) -> list[Any]:
        """Return the cache events since the last call."""
        self._flush()
        taken, self._events = self._events, []
        return taken

    # -- orders ------------------------------------------------------------------------------------------------------

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """See vLLM's KVCacheManager."""
        known = self.known.get(request_id)
        return self.empty_kv_cache_blocks if known is None else self._view(self.tables_of(known.slot))

    def take_new_block_ids(self) -> list[int]:
        """See vLLM's KVCacheManager. Ends the open step."""
        self.close_step()
        return self._page_orders.take_zeroes()

    def record_blocks_for_zeroing(self, request_id: str, start_token: int) -> None:
        """See vLLM's KVCacheManager. A load failed after `start_token` tokens were received."""
        if self.commit is CommitRule.SAFE:
            return  # ordered with the row that lowered the request's computed tokens
        known = self.known[request_id]
        for manager in self.managers:
            if manager.spec.zero_new_blocks:
                rest = manager.table[known.slot][start_token // manager.block_size :]
                self._page_orders.add_zeroes((manager.group, block) for block in rest)

    def take_kv_cache_block_copies(self) -> tuple[list[KVCacheBlockCopy], list[Any]]:
        """See vLLM's KVCacheManager. Ends the open step. The allocator itself keeps source and target blocks of the
        copies allocated.
        """
        self.close_step()
        return [KVCacheBlockCopy(*pages) for pages in self._page_orders.take_copies()], []

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """Return the states that this step leaves in cached blocks, by request. See vLLM's KVCacheManager."""
        return self.state_offers.take(self.known) if self.state_offers is not None else {}

    def finalize_partial_tail_offloads(self, request: Request) -> list[tuple[int, int, int]]:
        """Return nothing, see `take_boundary_state_offloads`."""
        return []
