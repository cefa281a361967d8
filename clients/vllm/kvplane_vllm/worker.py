"""vLLM's worker on pages that a kvplane worker lends: the class to give to `--worker-cls`.

The one allocation of vLLM's KV cache becomes the memory of the kvplane worker, and each step's stamps are written
before its launch. Pages that are written without stamps would be wrong hits later, so a step without orders is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm import platforms
from vllm.model_executor.model_loader import base_loader
from vllm.model_executor.model_loader.base_loader import process_weights_after_loading
from vllm.v1.worker.utils import allocate_kv_cache

from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane.base.rank_plan import RankPlan
from kvplane.rank import CallersMoves, Rank
from kvplane_vllm.launch import ATTRIBUTE, Launch
from kvplane_vllm.options import options_of, worker_addresses
from kvplane_worker.attach import attach
from kvplane_worker.lending.holdings import Holdings

if platforms.current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
elif platforms.current_platform.is_cuda_alike():
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker
else:
    raise InvalidArgument(
        f"kvplane lends no pages on the platform {platforms.current_platform.device_type}",
        field="worker_cls",
        remedy="leave --worker-cls out",
    )

ALLOCATE = allocate_kv_cache.__name__
USERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.attn_utils")  # they import ALLOCATE by name
COLUMNS = 4096  # words per row of a checksum


class LentPages:
    """The pages of this rank, in the memory of its kvplane worker."""

    def __init__(self, attached: Holdings, num_groups: int) -> None:
        self._attached = attached
        self._rank = Rank(attached.stamps, CallersMoves(num_groups))

    @property
    def region(self) -> Tensor:
        """The bytes of the pages, int8."""
        return self._attached.buffers.memory[: self._attached.plan.size_bytes].view(torch.int8)

    def carry_out(self, launch: Launch | None) -> None:
        """Write the stamps of a step that is about to be launched. vLLM zeroes and copies pages itself, then launches.

        Raises FailedPrecondition if the step has no orders, and the errors of `Rank.carry_out`.
        """
        if launch is None:
            raise FailedPrecondition(
                "a step has no orders for the pages of the kvplane worker",
                field="scheduler_cls",
                remedy="start vLLM with --scheduler-cls kvplane_vllm.Scheduler",
            )
        if launch.executed > self._rank.executed_through:
            self._rank.executed(launch.executed)
        for seq, part, orders in launch.parts:
            self._rank.carry_out(launch.epoch, seq, part, orders)


class Worker(PlatformWorker):
    """The platform's worker of vLLM. With `pages: own` it changes nothing."""

    kvplane_pages: LentPages | None = None
    kvplane_weights: list[str] | None = None  # digests of the models, as they were loaded

    def load_model(self, *args: Any, **options: Any) -> None:
        """See vLLM's worker. With `pages: worker`, the weights are summed before kernels repack or remove them."""
        if not worker_addresses(self.vllm_config, options_of(self.vllm_config)):
            super().load_model(*args, **options)
            return
        digests = self.kvplane_weights = list[str]()

        def process(model: torch.nn.Module, *more: Any, **rest: Any) -> None:
            digests.append(weights_digest(model))
            process_weights_after_loading(model, *more, **rest)

        base_loader.process_weights_after_loading = process
        try:
            super().load_model(*args, **options)
        finally:
            base_loader.process_weights_after_loading = process_weights_after_loading
        if not digests:
            raise InvalidArgument(
                f"the weights of load_format {self.vllm_config.load_config.load_format} cannot be identified",
                field="load_config.load_format",
                remedy="give pages: own, or load_format auto",
            )

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """See vLLM's worker. With `pages: worker`, the KV cache is the memory of this rank's kvplane worker.

        Raises the errors of `attach`, and FailedPrecondition if vLLM allocates its cache in another way.
        """
        addresses = worker_addresses(self.vllm_config, options_of(self.vllm_config))
        if not addresses:
            super().initialize_from_config(kv_cache_config)
            return

        def lend(config: Any, layout: Any, kernel_block_sizes: Any) -> Tensor:
            digest = layout_digest(self, config, layout, kernel_block_sizes)
            plan = RankPlan.opaque(config.num_blocks, config.kv_cache_tensors[0].size, digest)
            attached = attach(addresses[self.rank], opaque_plan=plan)
            if (found := attached.buffers.memory.device) != torch.device(self.device):
                raise InvalidArgument(
                    f"the kvplane worker has its pages on {found}, this rank needs {self.device}",
                    field="device",
                    remedy=f"start the kvplane worker with --device {self.device}",
                )
            self.kvplane_pages = LentPages(attached, len(config.kv_cache_groups))
            return self.kvplane_pages.region

        with _lent(lend):
            super().initialize_from_config(kv_cache_config)

    def execute_model(self, scheduler_output: Any) -> Any:
        """See vLLM's worker. Writes the step's stamps first."""
        if self.kvplane_pages is not None:
            self.kvplane_pages.carry_out(getattr(scheduler_output, ATTRIBUTE, None))
        return super().execute_model(scheduler_output)

    def _start_weight_update(self, *args: Any, **options: Any) -> None:
        self._refuse_new_weights()
        super()._start_weight_update(*args, **options)

    def reload_weights(self, *args: Any, **options: Any) -> None:
        """See vLLM's worker. Refused with `pages: worker`."""
        self._refuse_new_weights()
        super().reload_weights(*args, **options)

    def _refuse_new_weights(self) -> None:
        if self.kvplane_pages is not None:
            raise FailedPrecondition(
                "the pages of the kvplane worker are kept for the weights with which the engine started",
                field="additional_config.kvplane.pages",
                remedy="start a new engine for new weights, or give pages: own",
            )


@contextmanager
def _lent(lend: Callable[[Any, Any, Any], Tensor]) -> Iterator[None]:
    """Let vLLM's allocation of its KV cache take the tensor of `lend(config, layout, kernel block sizes)`.

    Raises FailedPrecondition if the cache was allocated otherwise: its pages would have no stamps.
    """
    users = [sys.modules[name] for name in USERS if name in sys.modules]
    original = getattr(users[0], ALLOCATE)
    lent = 0

    def allocate(config: Any, device: Any, layout: Any, kernel_block_sizes: Any = None) -> Any:
        nonlocal lent
        region, zeros = lend(config, layout, kernel_block_sizes), torch.zeros

        def or_region(*size: Any, **options: Any) -> Tensor:
            nonlocal lent
            if size != (region.numel(),) or options.get("dtype") is not torch.int8:
                return zeros(*size, **options)
            lent += 1
            return region

        torch.zeros = or_region
        try:
            return original(config, device, layout, kernel_block_sizes)
        finally:
            torch.zeros = zeros

    for user in users:
        setattr(user, ALLOCATE, allocate)
    try:
        yield
    finally:
        for user in users:
            setattr(user, ALLOCATE, original)
    if lent != 1:
        raise FailedPrecondition(
            f"this version of vLLM, {vllm.__version__}, does not allocate its KV cache as one tensor of zeroes",
            field="worker_cls",
            remedy="give pages: own",
        )


def layout_digest(worker: Any, config: Any, layout: Any, kernel_block_sizes: Any) -> str:
    """Return a digest of everything that gives the bytes of this rank's pages their meaning: positions, formats and
    kernels of the layers, rank, model and weights, and how blocks are hashed.
    """
    vllm_config, runner = worker.vllm_config, worker.model_runner
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    architecture = {name: value for name, value in model.hf_config.to_dict().items() if name != "_name_or_path"}
    parts = {
        "vllm": vllm.__version__,
        "tensors": list(map(repr, config.kv_cache_tensors)),
        "groups": [[repr(group.kv_cache_spec), group.layer_names] for group in config.kv_cache_groups],
        "layout": [str(layout), kernel_block_sizes, worker.device.type],
        "kernels": [[one.backend.get_name() for one in groups] for groups in runner.attn_groups],
        "rank": [worker.rank, parallel.world_size, parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
        "dtypes": [str(model.dtype), str(cache.cache_dtype), str(model.quantization)],
        "model": architecture,
        "weights": worker.kvplane_weights,
        "hashes": [cache.prefix_caching_hash_algo, os.getenv("PYTHONHASHSEED"), config.hash_block_size],
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def weights_digest(model: torch.nn.Module) -> str:
    """Return a digest of the weights of a model, computed on their device at the speed of its memory."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {list(weight.shape)} ".encode())
        if isinstance(weight, Tensor) and weight.numel():
            digest.update(repr(_checksum(weight)).encode())
    return digest.hexdigest()


def _checksum(weight: Tensor) -> list[int]:
    """Return sums of the words of a tensor that change when a word changes, or when words of different rows or columns
    are exchanged.
    """
    raw = weight.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.numel() % 4 == 0 and raw.storage_offset() % 4 == 0:
        raw = raw.view(torch.int32)
    whole = raw.numel() // COLUMNS * COLUMNS
    table, rest = raw[:whole].view(-1, COLUMNS), raw[whole:].to(torch.int64)
    sums = [table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64), rest]
    weighted = [(one * torch.arange(1, one.numel() + 1, device=one.device)).sum() for one in sums]
    return [int(one) for one in torch.stack(weighted).tolist()]
