"""Small layers for planner tests. A page of full() and window() has PAGE bytes: 16 tokens, 16 bytes each."""

from __future__ import annotations

from typing import Any

from kvplane.base.groups import MambaMode
from kvplane.base.layer_spec import DType, LayerSpec
from kvplane.base.layers import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    HiddenStateSpec,
    KVSharingLayer,
    Layer,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
)
from kvplane_plan.planner import CachePlan, PlanOptions, Worker, plan_cache

PAGE = 256
SMALL: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 4, "dtype": DType.BFLOAT16}


def full(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**{**SMALL, **changes})


def window(tokens: int = 64, **changes: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(**{**SMALL, "window": tokens, **changes})


def chunked(tokens: int = 64, **changes: Any) -> ChunkedLocalSpec:
    return ChunkedLocalSpec(**{**SMALL, "chunk": tokens, **changes})


def latent(**changes: Any) -> MLASpec:
    return MLASpec(**{**SMALL, "head_size": 8, **changes})


def hidden(**changes: Any) -> HiddenStateSpec:
    return HiddenStateSpec(**{**SMALL, **changes})


def state(num_bytes: int = PAGE, **changes: Any) -> MambaSpec:
    given = {"block_size": 16, "shapes": ((num_bytes,),), "dtypes": (DType.UINT8,), "mode": MambaMode.ALIGN}
    return MambaSpec(**{**given, **changes})


def named(**specs: tuple[int, LayerSpec]) -> tuple[Layer, ...]:
    """Layers, kind after kind: f=(2, full()) makes f.0 and f.1."""
    return tuple(Layer(f"{name}.{i}", spec) for name, (n, spec) in specs.items() for i in range(n))


def repeated(times: int, *specs: LayerSpec) -> tuple[Layer, ...]:
    """A pattern of layers, repeated; the layers are named by their number."""
    return tuple(Layer(str(i), spec) for i, spec in enumerate(specs * times))


def plan(layers: tuple[Layer | KVSharingLayer, ...], **options: Any) -> CachePlan:
    """A plan for one worker with plenty of blocks."""
    given = {"num_blocks": 10_000, "max_model_len": 1024, **options}
    return plan_cache([Worker(layers)], PlanOptions(**given))


def names(cache_plan: CachePlan) -> list[str]:
    """The layers of each group, as text."""
    return [" ".join(group.layer_names) for group in cache_plan.groups]


def widths(cache_plan: CachePlan) -> list[int]:
    """The number of layers of each group."""
    return [len(group.layer_names) for group in cache_plan.groups]
