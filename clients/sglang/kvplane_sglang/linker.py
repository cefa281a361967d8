"""What SGLang calls: a `UnifiedCacheLinker`, made in the process of the scheduler by the option
`--unified-cache-external-linker-config`.

A load is staged when SGLang queues it, so that one that is refused is computed instead; SGLang ends requests whose load
fails later. It is carried out as a whole when the batch starts: no layer waits.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from kvplane.base.errors import InvalidArgument
from kvplane_sglang import contract
from kvplane_sglang.pools import KV, PagePool, pools_of
from kvplane_sglang.settings import LEAVE_OUT, check_engine, content_of, settings_of
from kvplane_sglang.tiers import Pages, Tiers

_log = logging.getLogger("sglang.kvplane")
_linkers = weakref.WeakSet["KvplaneLinker"]()
_hooks = list[bool]()


class LoadsDone:
    """SGLang's counter of loaded layers, where all layers are there before the first one asks."""

    num_layers = 1

    def set_consumer(self, index: int) -> None:
        """The batch that waits."""

    def wait_until(self, layer: int) -> None:
        """Wait for a layer."""


class KvplaneLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Keeps the pages of SGLang's tree in host memory and on a disk.

    Attributes:
        tiers: the pages.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Iterable[Any],
        extra_config: Mapping[str, Any],
        forward_stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Check release, options and engine, and allocate the slots. Raises KvplaneError with field and remedy."""
        contract.check(UnifiedCacheLinker, PoolTransfer, PoolName)
        settings = settings_of(extra_config)
        check_engine(server_args, settings)
        pools = pools_of(params, [_POOL_OF.get(one.name, one.name) for one in components])
        layout = [one.layout for one in pools]
        self._rows = {one.name: one for one in pools}
        self.tiers = Tiers(pools, settings, content_of(server_args, layout, contract.TESTED))
        self.pools = {PoolName(one.name): one for one in pools}
        self.forward_stream = forward_stream
        self.layer_done_counter = LoadsDone()
        self._is_cuda = pools[0].device.type == "cuda"
        self._loads: dict[str, tuple[list[Pages], list[list[int]]]] = {}
        self._batches = 0
        self._failed = set[int]()
        _linkers.add(self)
        if not _hooks:
            contract.before_updates(_forget)
            _hooks.append(True)
        rooms = {name: one.num_slots for name, one in self.tiers.slots.items()}
        _log.info("kvplane's tiers: pages in host memory and on the disk by pool: %s", rooms)

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Return every number of pages that can be restored, of all pools at once."""
        by_pool = {one.name.value: one for one in transfers}
        if KV not in by_pool or not by_pool.keys() <= self._rows.keys():
            return []
        keys = [_key(one) for one in by_pool[KV].keys]
        return self.tiers.lengths(keys, {name: len(one.keys) for name, one in by_pool.items() if name != KV})

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Stage a load for the next batch; False: the request is computed. Waits for the disk."""
        parts = self._parts(transfers)
        staged = self.tiers.stage(parts)
        if staged is None:
            return False
        assert rid not in self._loads, "a request loads once"
        self._loads[rid] = parts, staged
        return True

    def start_layer_wise_loading(self) -> int:
        """Carry out the queued loads; returns the number of the batch, -1 if none is queued."""
        if not self._loads:
            return -1
        loads, self._loads = self._loads, {}
        self._batches += 1
        self._wait_for_pages()
        for rid, (parts, staged) in loads.items():
            try:
                self.tiers.load(parts, staged)
            except Exception:  # SGLang ends the requests of this batch that load, and uses nothing of it
                _log.exception("the load of request %s failed", rid)
                self._failed.add(self._batches)
        return self._batches

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Whether the loads of a batch are all there."""
        failed = counter_index in self._failed
        self._failed.discard(counter_index)
        return not failed

    def cancel_queued_load(self, rid: str) -> bool:
        """Cancel a load that has not begun; whether there was one."""
        found = self._loads.pop(rid, None)
        if found is not None:
            self.tiers.unstage(*found)
        return found is not None

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Save pages, which SGLang locks until it takes the end of the save; False: they are not saved."""
        parts = self._parts(transfers)
        if not parts:
            return False
        ready = self.record_offload_ready() if self._is_cuda else ()

        def is_computed() -> None:
            for event in ready:
                event.synchronize()

        return self.tiers.save(parts, is_computed)

    def num_completed_offloads(self) -> int:
        """The saves that have ended and were not popped."""
        return self.tiers.num_ended

    def pop_completed_offload(self) -> bool:
        """Return whether the oldest save that has ended is good."""
        return self.tiers.ended()

    def reset(self) -> None:
        """End all loads and saves, as for `flush_cache`. The tiers keep their pages: keys say all that pages mean."""
        for rid in list(self._loads):
            self.cancel_queued_load(rid)
        self.tiers.quiesce()

    def close(self) -> None:
        """End all loads and saves, and release the slots. Pages on the disk stay for the next engine."""
        self.reset()
        _log.info("kvplane's tiers: %s", {name: one.counts() for name, one in self.tiers.slots.items()})
        self.tiers.close()

    def _wait_for_pages(self) -> None:
        """Wait until nothing that was started before reads or writes the pages of a load."""
        if self._is_cuda:
            for event in self.record_offload_ready():
                event.synchronize()

    def _parts(self, transfers: Sequence[PoolTransfer]) -> list[Pages]:
        return [self._pages(one) for one in transfers if one.keys]

    def _pages(self, transfer: PoolTransfer) -> Pages:
        pool: PagePool | None = self._rows.get(transfer.name.value)
        indices = transfer.device_indices.detach().to("cpu", torch.int64).reshape(-1)
        if pool is None or not pool.holds(indices, len(transfer.keys)):
            raise InvalidArgument(
                f"SGLang names {len(indices)} entries for {len(transfer.keys)} pages of {transfer.name}",
                field="transfers",
                remedy=LEAVE_OUT,
            )
        return Pages(pool.name, [_key(one) for one in transfer.keys], indices)


_POOL_OF = {"FULL": "kv", "SWA": "swa", "MAMBA": "mamba"}  # pools by component of the tree
_key: Callable[[str], bytes] = bytes.fromhex  # SGLang's keys are SHA-256 in hexadecimal digits


def _forget() -> None:
    for one in list(_linkers):
        one.tiers.forget()
