"""vLLM's KVCacheManager, whose allocations a service decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.request import Request, RequestStatus

from kvplane.base.groups import AlignSpec, CommitRule
from kvplane.base.step import End
from kvplane_vllm import events
from kvplane_vllm.launch import Launch
from kvplane_vllm.pages import RankMemory
from kvplane_vllm.ready import Notice
from kvplane_vllm.remote.books import Books, Entry
from kvplane_vllm.remote.driver import Driver
from kvplane_vllm.remote.link import Link
from kvplane_vllm.remote.settings import Settings
from kvplane_vllm.spec import limits_of, replica_spec

DIGEST_BYTES = 32  # of sha256, which this mode requires


class Block:
    """A block of the service's pool, as vLLM's KVCacheBlock."""

    __slots__ = ("block_id",)

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id

    @property
    def is_null(self) -> bool:
        """Whether this is the null block."""
        return self.block_id == 0


class Pool:
    """What vLLM reads of its BlockPool."""

    def __init__(self, manager: RemoteManager) -> None:
        self._manager = manager
        self.enable_kv_cache_events = manager.enable_kv_cache_events
        self.num_gpu_blocks = manager.spec.num_blocks

    @property
    def null_block(self) -> Block:
        """Block 0, which is never allocated and stands for a missing block."""
        return self._manager.blocks[0]

    def get_num_free_blocks(self) -> int:
        """Return the number of free blocks, as of the service's last answer."""
        return self._manager.books.free_blocks

    def get_usage(self) -> float:
        """Return the share of the blocks that requests hold, 0 to 1."""
        total = self.num_gpu_blocks - 1
        return 1.0 - self.get_num_free_blocks() / total if total else 0.0

    def take_events(self) -> list[Any]:
        """Return the cache events since the last call."""
        return self._manager.take_pending_events()

    def free_blocks(self, blocks: Sequence[Block]) -> None:
        """Do nothing: the service keeps the blocks of copies until they are carried out."""


class RemoteManager(KVCacheManager):
    """Answer the calls of vLLM's scheduler from what a service has granted.

    Attributes:
        spec: the settings with which the replica is registered.
        link: the connection to the service.
        books: what the service knows and granted.
        driver: asks the service; set by `bind`.
        memory: the stamps of the pages, where kvplane workers lend them.
    """

    driver: Driver

    def __init__(
        self,
        kv_cache_config: Any,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        *args: Any,
        settings: Settings,
        vllm_config: Any,
        addresses: Sequence[str] = (),
        **options: Any,
    ) -> None:
        """Take the arguments of vLLM's manager. Raises UnsupportedModel for a kind of cache that kvplane does not have,
        and KvplaneError if the service cannot be reached or refuses the replica. `addresses`: of the kvplane workers
        that lend the pages.
        """
        limits_of_vllm = max_model_len, scheduler_block_size, hash_block_size, max_in_flight_tokens
        super().__init__(kv_cache_config, *limits_of_vllm, *args, **options)
        self.hash_algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        sizes = max_in_flight_tokens, scheduler_block_size, hash_block_size
        limits = limits_of(self, max_model_len, *sizes, options)
        has_events = self.enable_kv_cache_events or bool(addresses)  # the service stores what it announces
        spec = replica_spec(kv_cache_config, self.coordinator, limits, CommitRule.SAFE, has_events)
        self.spec = replace(spec, align=self._align(vllm_config, scheduler_block_size, hash_block_size))
        self.spec.validate()
        self.blocks = [Block(number) for number in range(self.spec.num_blocks)]
        self.memory = RankMemory(addresses, self.spec.num_blocks, DIGEST_BYTES) if addresses else None
        say = Notice(vllm_config).say
        self.link = Link(settings, self.spec, self.memory, with_events=self.enable_kv_cache_events, say=say)
        self.books = Books(self.spec)
        if self.memory is not None:
            self.books.launch_orders = []
        self._finished = (self.link.life, 0)  # (engine life, step) of the last launch that finished on all ranks
        self._life = self.link.life
        self._hit_events: list[Any] = []
        self.block_pool: Any = Pool(self)

    def _align(self, config: Any, block_size: int, hash_block_size: int) -> AlignSpec:
        """Return where prefill chunks end, as vLLM's scheduler shortens them."""
        if not self.kv_cache_config.has_mamba_layers or config.cache_config.mamba_cache_mode != "align":
            return AlignSpec()
        limits, threshold = config.scheduler_config, config.scheduler_config.long_prefill_token_threshold
        most = limits.max_num_scheduled_tokens or limits.max_num_batched_tokens
        stops = hash_block_size < block_size and self.coordinator.enable_partial_hash_hits
        return AlignSpec(config.cache_config.block_size, min(most, threshold) if threshold > 0 else most, stops)

    def bind(self, driver: Driver) -> None:
        """Set the driver, which needs the scheduler."""
        self.driver = driver

    def shut_down(self) -> None:
        """Notify the service that the engine leaves."""
        self.driver.close()

    def new_step_starts(self) -> None:
        """Do nothing: the scheduler's class begins the iteration."""

    # -- calls of schedule() -----------------------------------------------------------------------------------------

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int]:
        """See vLLM's KVCacheManager. The returned blocks are empty: `allocate_slots` does not need them."""
        assert max_cache_hit_length is None, "only an output of auxiliary data limits a hit, and it is refused"
        hit, single_group_hit = self.driver.look_up(request)
        if hit and self.enable_kv_cache_events and request.kv_cache_report_mode == "full":
            blocks = [range(-(-hit // group.block_size)) for group in self.spec.groups]
            self._hit_events += events.of_hit(self.coordinator, request, blocks)
        return self.empty_kv_cache_blocks, hit, single_group_hit

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        *args: Any,
        **options: Any,
    ) -> KVCacheBlocks | None:
        """See vLLM's KVCacheManager."""
        if new_computed_blocks is None:
            if self.driver.use(request.request_id, num_new_tokens):
                return self.empty_kv_cache_blocks
            entry = self.driver.run(request, num_new_tokens)
        elif request.num_computed_tokens and request.status == RequestStatus.WAITING:
            entry = self.driver.resume(request, num_new_tokens)
        else:
            entry = self.driver.admit(request, num_new_tokens)
        if entry is None:
            return None
        return self._view(self.books.take_new(entry))

    def _view(self, new: Sequence[Sequence[int]] | None) -> KVCacheBlocks:
        if new is None:
            return self.empty_kv_cache_blocks
        blocks = self.blocks
        return KVCacheBlocks(tuple([blocks[block] for block in row] for row in new))  # type: ignore[misc]

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """See vLLM's KVCacheManager."""
        entry: Entry | None = self.books.entries.get(request_id)
        return self._view(entry.tables if entry is not None and any(entry.tables) else None)

    def free(self, request: Request) -> None:
        """See vLLM's KVCacheManager."""
        is_over = request.is_finished() or request.resumable  # the last hash of a session may have a token it drops
        self.driver.free(request, End.FREE if is_over else End.PREEMPTED)

    def take_launch(self) -> Launch:
        """Return the orders since the last launch, for the ranks that write stamps."""
        orders, self.books.launch_orders = self.books.launch_orders, []
        assert orders is not None, "kvplane workers lend the pages"
        life, seq = self._finished
        return Launch(self.link.epoch, seq if life == self.link.life else 0, orders)

    def executed(self, life: int, seq: int) -> None:
        """Take the report that all ranks have finished a step. Raises FailedPrecondition if a rank launched it without
        its orders.
        """
        if self.memory is not None and life == self.link.life:
            self.memory.check_carried_out(seq)
        self.driver.executed = self._finished = life, seq

    # -- prefix cache ------------------------------------------------------------------------------------------------

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """See vLLM's KVCacheManager."""
        self.books.commit(request, num_computed_tokens)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """See vLLM's KVCacheManager."""
        self.books.evict(sorted(block for block in block_ids if block))

    def reset_prefix_cache(self) -> bool:
        """See vLLM's KVCacheManager."""
        if not self.driver.reset():
            return False
        if self.log_stats:
            assert self.prefix_cache_stats is not None
            self.prefix_cache_stats.reset = True
        return True

    def estimate_cached_tokens(self, request: Request) -> int:
        """See vLLM's KVCacheManager. Counts the full blocks of the smallest number of tokens over all groups."""
        entry = self.books.entries.get(request.request_id)
        if entry is None or not self.enable_caching:
            return 0
        known = min(entry.computed, entry.num_tokens)
        return min(known // group.block_size * group.block_size for group in self.spec.groups)

    def take_pending_events(self) -> list[Any]:
        """Return the cache events since the last call."""
        taken, self.books.events = self.books.events, []
        found, self._hit_events = self._hit_events, []
        if self.link.life != self._life:
            self._life = self.link.life
            found.append(AllBlocksCleared())
        for event, entry in taken:
            request = entry.request if entry is not None else None
            converted = events.convert(event, request, self.spec.hash_lookahead_tokens)
            if converted is not None:
                found.append(converted)
        return found

    # -- orders ------------------------------------------------------------------------------------------------------

    def take_new_block_ids(self) -> list[int]:
        """See vLLM's KVCacheManager."""
        return self.books.page_orders.take_zeroes()

    def take_kv_cache_block_copies(self) -> tuple[list[KVCacheBlockCopy], list[Any]]:
        """See vLLM's KVCacheManager. The service keeps source and target blocks of the copies allocated."""
        return [KVCacheBlockCopy(*pages) for pages in self.books.page_orders.take_copies()], []

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """Return nothing: connectors are refused. See vLLM's KVCacheManager."""
        return {}
