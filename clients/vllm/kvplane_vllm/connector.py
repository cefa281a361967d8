"""vLLM's interface for KV connectors, with kvplane's tiers behind it: see `kvplane_vllm.tiers`.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvplaneConnector", "kv_role": "kv_both",
    "kv_connector_module_path": "kvplane_vllm.connector", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"host": "64GiB", "disk": "/nvme/kv", "disk_size": "900GiB"}}'
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvplane.base.errors import InvalidArgument, OutOfMemory
from kvplane.base.groups import CommitRule, ReplicaSpec
from kvplane_vllm import needed
from kvplane_vllm.spec import Limits, replica_spec
from kvplane_vllm.tiers.host import HostAllocator, host_spec
from kvplane_vllm.tiers.kept import KeyFile
from kvplane_vllm.tiers.layout import Views
from kvplane_vllm.tiers.messages import NO_ORDERS, Progress, Ready, StepOrders
from kvplane_vllm.tiers.planner import Planner
from kvplane_vllm.tiers.rank import TierRank
from kvplane_vllm.tiers.settings import check_groups, settings_of, tiers_of

DIGEST_BYTES = 32  # of the hashes with which a disk is kept: SHA-256
_log = logging.getLogger("vllm.kvplane")


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """`StepOrders` for the workers."""

    orders: StepOrders


@dataclass(slots=True)
class WorkerMetadata(KVConnectorWorkerMetadata):
    """`Progress` of the workers."""

    progress: Progress

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        """Return what this and another rank report."""
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(self.progress.with_(other.progress))


@dataclass(slots=True)
class RankMetadata(KVConnectorHandshakeMetadata):
    """`Ready` of a worker; None = it has no memory for tiers."""

    ready: Ready | None


class KvplaneConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps what leaves the device in host memory and on a disk, and loads it for later requests.

    vLLM makes one object for its scheduler, with a `planner`, and one for each worker, with a `rank`.

    Attributes:
        restores_states: whether a load ends with the recurrent states at its end.
    """

    restores_states = True

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raise InvalidArgument for options that are wrong, and for engines that are refused; FailedPrecondition for a
        version of vLLM that is not supported.
        """
        needed.check_for_tiers()
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = settings_of(vllm_config)
        check_groups(kv_cache_config)
        self._config, self._cache = vllm_config, kv_cache_config
        self._spec: ReplicaSpec | None = None
        self.planner: Planner | None = None
        self.rank: TierRank | None = None
        self._orders = NO_ORDERS

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what is not saved is computed again."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """No: the pages would be unmapped under their copies."""
        return False

    # -- the scheduler's half ----------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Take the groups of vLLM's allocator, or of kvplane's in this process."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._spec = _spec_of(self._config, self._cache, kv_cache_manager)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Make the allocator of the tiers on what the workers have allocated."""
        found = [one.ready for _, one in sorted(metadata.items()) if isinstance(one, RankMetadata)]
        ranks = [one for one in found if one is not None]
        if len(ranks) < len(found) or self._spec is None:
            return  # without memory there is no tier
        num_blocks, tiers = tiers_of(self._cache, self.settings)
        has_tiers = bool(tiers) and all(one.has_tiers for one in ranks)
        target, service = self.settings.service, None
        if target is not None:
            from kvplane_vllm.tiers.service import Service  # needs gRPC

            service = Service(target)
        spec = host_spec(self._spec, num_blocks, tiers if has_tiers else (), events=service is not None)
        host = HostAllocator(spec, ranks, self._keys(spec, ranks) if has_tiers else None, service)
        given, is_v2 = self.settings, self._config.use_v2_model_runner
        self.planner = Planner(host, given.load_timeout_s, given.min_load, is_v2)
        slots = sum(one.num_blocks for one in spec.tiers)
        where = "of peers" if self.settings.peers else "on disk"
        _log.info("kvplane's tiers: %d blocks in host memory, %d %s, %d keys kept", num_blocks, slots, where, host.kept)

    def _keys(self, spec: ReplicaSpec, ranks: Sequence[Ready]) -> KeyFile | None:
        content = ranks[0].content
        if not content or self.settings.disk is None:
            return None
        name = f"vllm-{self._config.parallel_config.data_parallel_index}-{content.hex()}"
        try:
            return KeyFile(self.settings.disk, name, spec.num_stamps, DIGEST_BYTES, [one.disk for one in ranks])
        except InvalidArgument as error:
            _log.error("the disk keeps nothing for the next start: %s", error)
            return None

    def on_new_request(self, request: Request) -> None:
        """See the base class. The request may have hints for the tiers."""
        if self.planner is not None:
            self.planner.new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See the base class. Loads are asynchronous."""
        if self.planner is None:
            return 0, False
        found = self.planner.matched(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """See the base class."""
        if self.planner is not None:
            tables = blocks.get_block_ids() if num_external_tokens else ()
            self.planner.take(request, tables, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """See the base class."""
        return StepMetadata(self.planner.orders(scheduler_output) if self.planner is not None else NO_ORDERS)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See the base class. What the last step fills is found here, not in schedule()."""
        found = connector_output.kv_connector_worker_meta
        progress = found.progress if isinstance(found, WorkerMetadata) else None
        if self.planner is not None:
            self.planner.report(progress, connector_output.finished_recving or (), connector_output.failed_recving)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See the base class. Blocks may be freed: saves end before they are overwritten."""
        if self.planner is not None:
            self.planner.finish(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`."""
        if self.planner is not None:
            self.planner.finish(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether vLLM must run further steps: what they computed last is saved with them."""
        return self.planner is not None and self.planner.is_busy

    def reset_cache(self) -> bool:
        """See the base class."""
        return self.planner is None or self.planner.reset()

    # -- the workers' half -------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Views) -> None:
        """Allocate the tiers of this rank; the engine continues without them if memory is short. Raises WrongLayout."""
        try:
            number = get_tensor_model_parallel_rank()
            self.rank = TierRank(self._config, self._cache, self.settings, kv_caches, number)
        except OutOfMemory as error:
            _log.error("the engine continues without kvplane's tiers: %s", error)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        """Return what this rank has allocated."""
        return RankMetadata(self.rank.ready if self.rank is not None else None)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step, before it computes anything: its saves begin."""
        assert isinstance(kv_connector_metadata, StepMetadata)
        self._orders = kv_connector_metadata.orders
        if self.rank is not None:
            self.rank.begin(self._orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads begin behind the computation."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, behind the computation."""

    def wait_for_save(self) -> None:
        """End a step: its loads begin."""
        orders, self._orders = self._orders, NO_ORDERS
        if self.rank is not None:
            self.rank.end(orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See the base class. What fails is the load of a whole request: groups share the numbers of blocks."""
        loaded, failed = self.rank.take_loads() if self.rank is not None else (set[str](), set[str]())
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """See the base class."""
        return WorkerMetadata(self.rank.progress()) if self.rank is not None else None

    def shutdown(self) -> None:
        """See the base class."""
        if self.planner is not None:
            self.planner.host.shut_down()
        if self.rank is not None:
            self.rank.close()
            self.rank = None


def _spec_of(config: VllmConfig, cache: KVCacheConfig, manager: Any) -> ReplicaSpec:
    """Return the settings of the engine's allocator: kvplane's, or made of vLLM's."""
    made = getattr(manager, "spec", None)
    if isinstance(made, ReplicaSpec):
        return made
    real = manager.coordinator
    unit = real.scheduler_block_size
    limits = Limits(
        max_model_len=manager.max_model_len,
        max_in_flight_tokens=config.max_in_flight_tokens,
        scheduler_block_size=unit,
        hash_block_size=cache.hash_block_size or unit,
        hash_lookahead_tokens=0,
        prefill_lookahead=0,
        watermark_blocks=0,
        enable_caching=manager.enable_caching,
        hash_algorithm=config.cache_config.prefix_caching_hash_algo,
    )
    return replica_spec(cache, real, limits, CommitRule.SAFE, events=False)
