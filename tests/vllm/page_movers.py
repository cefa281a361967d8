"""KV connectors that run on a CPU: what `connected.py` gives to vLLM.

`CopiedPages` is the spec of vLLM's OffloadingConnector with a worker that copies pages in this process; vLLM's own
worker needs a GPU. `PageStore` is a connector that behaves like those between engines: it loads while other requests
run, keeps the blocks of a request after its end until they are saved, and reports loads that failed.

Both copy as late as they may, so that a block that is reused too early shows in the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

STEPS = 2  # that a transfer takes
GARBAGE = 0.25  # content of a page whose load failed


class CopiedPages(CPUOffloadingSpec):
    """vLLM's spec for pages in CPU memory, with a worker for a CPU."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker."""
        assert self.blocks_per_chunk == 1
        return PageCopier(kv_caches, self.num_chunks)


class PageCopier(OffloadingWorker):
    """Copies pages between the KV cache and a second tensor, when a job is waited for or `STEPS` steps later."""

    def __init__(self, caches: CanonicalKVCaches, num_chunks: int) -> None:
        self._pages = [one.tensor for one in caches.tensors]
        self._chunks = [torch.zeros((num_chunks, one.shape[1]), dtype=one.dtype) for one in self._pages]
        self._tensors = [sorted({one.tensor_idx for one in refs}) for refs in caches.group_data_refs]
        self._jobs: dict[int, tuple[Any, Any, bool]] = {}  # by id, in order: blocks, chunks, whether it loads
        self._age: dict[int, int] = {}
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Save pages."""
        return self._submit(job_id, src_spec, dst_spec, loads=False)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Load pages."""
        return self._submit(job_id, dst_spec, src_spec, loads=True)

    def _submit(self, job_id: int, blocks: Any, chunks: Any, loads: bool) -> bool:
        self._jobs[job_id] = blocks, chunks, loads
        self._age[job_id] = 0
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that have ended since the last call."""
        for job_id in list(self._jobs):
            self._age[job_id] += 1
            if self._age[job_id] >= STEPS:
                self._copy(job_id)
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """End these jobs, and the ones before them."""
        for job_id in list(self._jobs):
            if any(one in self._jobs for one in job_ids):
                self._copy(job_id)

    def _copy(self, job_id: int) -> None:
        blocks, chunks, loads = self._jobs.pop(job_id)
        at = 0
        for group, count in enumerate(blocks.group_sizes):
            for block, chunk in zip(blocks.block_ids[at : at + count], chunks.block_ids[at : at + count], strict=True):
                for tensor in self._tensors[group]:
                    page, kept = self._pages[tensor][block], self._chunks[tensor][chunk]
                    (page if loads else kept).copy_(kept if loads else page)
            at += count
        self._finished.append(TransferResult(job_id, True))


@dataclass
class Moves(KVConnectorMetadata):
    """What the workers move in a step: (request, its blocks, their keys)."""

    loads: list[tuple[str, list[int], list[bytes]]] = field(default_factory=list)
    saves: list[tuple[str, list[int], list[bytes]]] = field(default_factory=list)


STORED: dict[bytes, list[torch.Tensor]] = {}  # by block hash: the page of each layer; both halves are in this process


class PageStore(KVConnectorBase_V1):
    """Saves the full blocks of each request at its end, and loads them for later requests.

    Options: `is_async`: requests wait for their load while others run; `failing`: each load whose number
    is a multiple of it fails, from the middle of its blocks on; 0: none.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._is_async, self._failing = extra["is_async"], extra["failing"]
        self._block_size = vllm_config.cache_config.block_size
        self._moves = Moves()
        self._loading: set[str] = set()
        self._layers: list[torch.Tensor] = []
        self._running: list[list[Any]] = []  # steps left, whether it loads, request, blocks, keys
        self._failed: set[int] = set()
        self.num_loads = self.num_failed = 0

    # the scheduler's half

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens behind the computed ones are stored."""
        size = self._block_size
        first, most = num_computed_tokens // size, (request.num_tokens - 1) // size
        stored = first
        while stored < min(most, len(request.block_hashes)) and request.block_hashes[stored] in STORED:
            stored += 1
        return (stored - first) * size, self._is_async and stored > first

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load of the last tokens of these blocks' full part."""
        if num_external_tokens:
            count = num_external_tokens // self._block_size
            (ids,) = blocks.get_block_ids()
            stored = list(request.block_hashes)
            hits = [index for index in range(len(ids)) if index < len(stored) and stored[index] in STORED]
            end = self._end(ids, request, count, hits)
            self._moves.loads.append((request.request_id, ids[end - count : end], stored[end - count : end]))
            if self._is_async:
                self._loading.add(request.request_id)

    def _end(self, ids: list[int], request: Any, count: int, hits: list[int]) -> int:
        most = min((request.num_tokens - 1) // self._block_size, len(ids))
        return next(end for end in range(most, 0, -1) if all(index in hits for index in range(end - count, end)))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the moves since the last call."""
        moves, self._moves = self._moves, Moves()
        return moves

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a request that ran until they are saved."""
        if request.request_id in self._loading:
            return False, None
        count = min(request.num_computed_tokens // self._block_size, len(request.block_hashes), len(block_ids))
        if not count:
            return False, None
        self._moves.saves.append((request.request_id, block_ids[:count], list(request.block_hashes[:count])))
        return True, None

    def update_connector_output(self, connector_output: Any) -> None:
        """Forget the loads that ended."""
        self._loading.difference_update(connector_output.finished_recving or ())

    # the workers' half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the pages of each layer."""
        self._layers = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the loads of this step; synchronous ones end here."""
        moves = self._get_connector_metadata()
        assert isinstance(moves, Moves)
        self._running += [[STEPS, False, *one] for one in moves.saves]
        for one in moves.loads:
            if self._is_async:
                self._running.append([STEPS, True, *one])
            else:
                self._load(*one[1:])

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads have ended already."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Pages are saved when their request has ended."""

    def wait_for_save(self) -> None:
        """Saves end later."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Carry out the moves whose time has come; returns the requests saved and loaded: one of each at most, since
        vLLM frees those of a set in random order.
        """
        done: tuple[set[str], set[str]] = set(), set()
        for one in self._running[:]:
            one[0] -= 1
            _, loads, name, blocks, keys = one
            if one[0] <= 0 and not done[loads]:
                self._load(blocks, keys) if loads else self._save(blocks, keys)
                done[loads].add(name)
                self._running.remove(one)
        return done

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be loaded since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def _load(self, blocks: list[int], keys: list[bytes]) -> None:
        self.num_loads += 1
        fails = self._failing and self.num_loads % self._failing == 0
        good = len(blocks) // 2 if fails else len(blocks)
        self.num_failed += bool(fails)
        self._failed.update(blocks[good:])
        for index, (block, key) in enumerate(zip(blocks, keys, strict=True)):
            for layer, page in zip(self._layers, STORED[key], strict=True):
                layer[block] = page if index < good else GARBAGE

    def _save(self, blocks: Iterable[int], keys: Iterable[bytes]) -> None:
        for block, key in zip(blocks, keys, strict=True):
            if key not in STORED:
                STORED[key] = [layer[block].clone() for layer in self._layers]
