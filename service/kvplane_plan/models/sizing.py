"""Compute the memory of a model's cache and the number of requests that fit, and compare the hybrid cache (window and
state layers free what they no longer need) with a uniform one (every layer keeps every token).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import Drafter, GroupKind, MambaMode
from kvplane.base.layer_spec import LayerSpec, ceil_div
from kvplane.base.layers import ChunkedLocalSpec, Layer
from kvplane_plan.models.catalogue import MODELS, model_named
from kvplane_plan.models.hf_config import read_model
from kvplane_plan.models.shapes import Model, ModelOptions
from kvplane_plan.planner import CacheGroup, CachePlan, Comparison, PlanOptions, Worker, compare, plan_cache
from kvplane_plan.planner.search import MIX
from kvplane_plan.planner.sizes import KERNEL_BLOCK

_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131_072, 262_144)
_DTYPES = ("bfloat16", "fp8")
_RANKS = (1, 2, 4, 8)
Label = TypeVar("Label")

# Memory in MiB as the driver states it: column memory.total of `nvidia-smi`. Source: the list of a cloud's GPUs in
# github.com/modal-labs/modal-client/pull/2797 (2025-01-23); of b200 and h200 public outputs of `nvidia-smi`.
GPUS = {
    "a10": 23028, "a100": 81920, "a100-40gb": 40960, "b200": 183359, "h100": 81559, "h200": 143771, "l4": 23034,
    "l40s": 46068, "t4": 15360,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sizing:
    """The input of a plan: a model, how it is served, and the memory of one rank.

    Attributes:
        memory_bytes: cache memory of one rank, and of its share of the weights.
        max_batched_tokens: most tokens of one step.
        max_concurrent_batches: most steps in flight.
        prefix_caching: if False, recurrent states are not cached and prompts share no blocks.
        prefix_match_unit: tokens per block hash; 0: the most that every group allows.
        weights_bytes: weights of the whole model, which the ranks divide.
        pipeline_parallel: pipeline stages, of which each has a part of the layers: for `comparison`.
    """

    model: Model
    options: ModelOptions
    memory_bytes: int
    max_batched_tokens: int = 8192
    max_concurrent_batches: int = 1
    prefix_caching: bool = True
    prefix_match_unit: int = 0
    weights_bytes: int = 0
    pipeline_parallel: int = 1

    @property
    def cache_bytes(self) -> int:
        """Memory that the weights leave on one rank. Raises InvalidArgument if they leave none."""
        ranks = self.options.tensor_parallel * self.pipeline_parallel
        left = self.memory_bytes - ceil_div(self.weights_bytes, ranks)
        if left > 0:
            return left
        raise InvalidArgument(
            f"{self.weights_bytes:,} bytes on {ranks} ranks leave none of the {self.memory_bytes:,} bytes of each",
            field="weights",
            remedy="use more ranks or GPUs with more memory",
        )

    def plan(self, hybrid: bool = True) -> CachePlan:
        """Return the cache plan; if `hybrid` is False, every layer keeps every token. Raises InvalidArgument if no plan
        is possible.
        """
        return plan_cache(*self._input(hybrid))

    def comparison(self, mix: Mapping[int, int] | None = None) -> Comparison:
        """Return the reference plan and the best one for a mix of lengths. Raises InvalidArgument if no plan is
        possible, or as `compare` for the mix.
        """
        return compare(*self._input(hybrid=True), mix or MIX)

    def _input(self, hybrid: bool) -> tuple[list[Worker], PlanOptions]:
        mode = MambaMode.ALIGN if self.prefix_caching else MambaMode.NONE
        layers = self.model.layers(replace(self.options, mamba_mode=mode))
        if not hybrid:
            layers = tuple(replace(layer, spec=_keeping_all(layer.spec)) for layer in layers)
        return (
            [
                Worker(stage, self.cache_bytes)
                for stage in _stages(layers, self.model.num_layers, self.pipeline_parallel)
            ],
            PlanOptions(
                max_model_len=self.options.max_model_len,
                max_batched_tokens=self.max_batched_tokens,
                max_concurrent_batches=self.max_concurrent_batches,
                hybrid=hybrid,
                layout=self.model.layout,
                prefix_caching=self.prefix_caching,
                tp_size=self.options.tensor_parallel,
                drops_last_block=self.options.drafter is not Drafter.NONE,
                prefix_match_unit=self.prefix_match_unit if hybrid else 0,  # a uniform cache has no states
            ),
        )

    def decoding(self) -> Sizing:
        """Return an equal input for requests of which each computes one token per step, as all do between prefills."""
        return replace(self, max_batched_tokens=1 + self.options.speculative_tokens)

    def at(self, max_model_len: int) -> Sizing:
        """Return an equal input, but with another context length."""
        return replace(self, options=replace(self.options, max_model_len=max_model_len))


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """Figures of one KV cache group. `bytes_per_token` is summed over its layers; it is 0 for states, whose size is
    constant.
    """

    kind: GroupKind
    num_layers: int
    block_size: int
    page_bytes: int
    bytes_per_token: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a plan, for one rank.

    Attributes:
        bytes_per_token: memory of a token over all layers while every layer keeps it.
        bytes_per_block: memory of a block.
        num_blocks: number of blocks that fit.
        blocks_per_request: blocks of a request with the full context length.
        concurrency: number of such requests that fit at the same time if each of them computes `max_batched_tokens`
            tokens of its prompt in every step in flight: the worst case, by which engines admit.
        decoding_concurrency: the same number while all of them decode.
        uniform_concurrency: number of requests if every layer keeps every token, in either case; None if that cannot
            be planned.
        hit_unit: number of tokens that prefix hits are multiples of; 0 without prefix caching.
        warnings: what an operator should know about the plan.
    """

    groups: tuple[GroupFigures, ...]
    bytes_per_token: float
    bytes_per_block: int
    num_blocks: int
    blocks_per_request: int
    concurrency: float
    decoding_concurrency: float
    uniform_concurrency: float | None
    hit_unit: int
    warnings: tuple[str, ...]

    @property
    def gain(self) -> float | None:
        """Concurrency of the hybrid cache divided by that of the uniform cache; None if the latter cannot be
        planned.
        """
        return self.concurrency / self.uniform_concurrency if self.uniform_concurrency else None


def find_model(name: str) -> Model:
    """Return the model of the catalogue with this name, or the model of a config.json if the name is a path. Raises
    NotFound, InvalidArgument.
    """
    path = Path(name)
    if name not in MODELS and (path.suffix == ".json" or path.exists()):
        return read_model(path / "config.json" if path.is_dir() else path)
    return model_named(name)


def gpu_bytes(name: str, utilization: float) -> int:
    """Return the part of a GPU's memory that an engine uses. Raises InvalidArgument."""
    if name.lower() not in GPUS:
        what = f"the GPU {name[:40]!r} is unknown"
        raise InvalidArgument(what, field="gpu", remedy=f"use one of {', '.join(GPUS)}, or give --memory")
    if not 0.0 < utilization <= 1.0:
        raise InvalidArgument(f"it is {utilization}", field="utilization", remedy="give a part above 0 and at most 1")
    return int((GPUS[name.lower()] << 20) * utilization)


def figures_of(sizing: Sizing) -> Figures:
    """Plan the cache and return its figures. Raises InvalidArgument if no request fits."""
    plan = sizing.plan()
    groups = tuple(map(_group_figures, plan.groups))
    return Figures(
        groups=groups,
        bytes_per_token=sum(group.bytes_per_token for group in groups),
        bytes_per_block=plan.bytes_per_block,
        num_blocks=plan.num_blocks,
        blocks_per_request=plan.blocks_per_request,
        concurrency=plan.max_concurrency,
        decoding_concurrency=_concurrency(sizing.decoding()) or plan.max_concurrency,
        uniform_concurrency=_concurrency(sizing, hybrid=False),
        hit_unit=plan.hit_alignment if sizing.prefix_caching else 0,
        warnings=(
            *(warning.message for warning in plan.warnings),
            *_odd_blocks(plan),
            *_left_out(sizing),
            *_too_long(sizing),
        ),
    )


def figures_by_layout(sizing: Sizing) -> list[tuple[ModelOptions, Figures]]:
    """Return the figures for every combination of data type and number of ranks that can divide the heads and fit a
    request.
    """
    options = [
        replace(sizing.options, cache_dtype=dtype, tensor_parallel=ranks) for dtype in _DTYPES for ranks in _RANKS
    ]
    return _where_possible((each, replace(sizing, options=each)) for each in options)


def figures_by_length(sizing: Sizing) -> list[tuple[int, Figures]]:
    """Return the figures for other context lengths, up to the longest that fits."""
    return _where_possible((length, sizing.at(length)) for length in _LENGTHS)


def _where_possible(sizings: Iterable[tuple[Label, Sizing]]) -> list[tuple[Label, Figures]]:
    rows = []
    for label, sizing in sizings:
        with suppress(InvalidArgument):
            rows.append((label, figures_of(sizing)))
    return rows


def _stages(layers: Sequence[Layer], num_layers: int, num_stages: int) -> list[tuple[Layer, ...]]:
    """Return the layers of each pipeline stage, divided as vLLM does: equal numbers, of the rest one more in each stage
    before the last, and the drafter's layers in the last.
    """
    if not 1 <= num_stages <= num_layers:
        raise InvalidArgument(
            f"the model has {num_layers} layers for {num_stages} stages",
            field="pipeline_parallel",
            remedy=f"give 1 to {num_layers}",
        )
    each, rest = divmod(num_layers, num_stages)
    ends = list(accumulate(each + int(num_stages - 1 - rest <= stage < num_stages - 1) for stage in range(num_stages)))
    stages: list[list[Layer]] = [[] for _ in ends]
    for layer in layers:
        index = int(layer.name.removeprefix("model.layers.").split(".")[0])
        stages[bisect(ends[:-1], index)].append(layer)
    return [tuple(stage) for stage in stages]


def _group_figures(group: CacheGroup) -> GroupFigures:
    per_token = 0.0 if group.spec.is_state else group.bytes_per_block / group.block_size
    return GroupFigures(group.kind, len(group.layer_names), group.block_size, group.spec.page_bytes, per_token)


def _concurrency(sizing: Sizing, hybrid: bool = True) -> float | None:
    try:
        return sizing.plan(hybrid).max_concurrency
    except InvalidArgument:
        return None


def _keeping_all(spec: LayerSpec) -> LayerSpec:
    """Return the format of a layer that keeps every token, whatever it attends to."""
    return spec.as_full_attention(spec.block_size)


def _odd_blocks(plan: CachePlan) -> list[str]:
    """Return what blocks of attention of another size than kernels have, and chunks that no block divides, mean."""
    attention = [group for group in plan.groups if group.kind is not GroupKind.MAMBA]
    own = {group.block_size for group in attention if getattr(group.spec, "page_alignment", 1) > 1}  # of such kernels
    sizes = sorted({group.block_size for group in attention if group.block_size % KERNEL_BLOCK} - own)
    found = [f"blocks of {size} tokens: attention kernels have multiples of {KERNEL_BLOCK}" for size in sizes]
    chunks = [(group.spec.chunk, group.block_size) for group in attention if isinstance(group.spec, ChunkedLocalSpec)]
    uneven = sorted({(chunk, size) for chunk, size in chunks if chunk % size})
    return found + [f"chunks of {chunk} tokens begin inside blocks of {size}" for chunk, size in uneven]


def _too_long(sizing: Sizing) -> list[str]:
    """Return that requests may be longer than the model's positions reach."""
    longest, asked = sizing.model.max_model_len, sizing.options.max_model_len
    if not longest or asked <= longest:
        return []
    return [f"the context of {asked:,} tokens is above the model's {longest:,}, which vLLM refuses"]


def _left_out(sizing: Sizing) -> list[str]:
    """Return what a plan does not contain although the model has it."""
    count = sizing.model.mtp_layers
    if not count or sizing.options.drafter is Drafter.MTP:
        return []
    layers = "layer" if count == 1 else f"{count} layers"
    return [f"the model's {layers} for multi-token prediction: planned only with the drafter mtp"]
