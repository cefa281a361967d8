"""The spec of a registration: groups given explicitly, a model of the catalogue, or a model given by its layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from kvplane import wire
from kvplane.base.errors import InvalidArgument, KvplaneError
from kvplane.base.groups import AlignSpec, CommitRule, Drafter, HashAlgorithm, MambaMode, ReplicaSpec
from kvplane.base.layers import KVSharingLayer, Layer, MambaSpec
from kvplane.base.rank_plan import RankPlan
from kvplane.v1 import allocation_pb2, replica_pb2
from kvplane.wire.spec import decode_enum
from kvplane_service.core.planner import (
    CacheGroup,
    CachePlan,
    Layout,
    PlanOptions,
    Worker,
    plan_cache,
    to_groups,
    to_rank_plan,
)
from kvplane_service.models.catalogue import ModelOptions, check_speculation, model_layers

MAX_LAYERS = 4096
_AnyLayer: TypeAlias = Layer | KVSharingLayer
_Source: TypeAlias = replica_pb2.ModelSource | replica_pb2.LayerSource


@dataclass(frozen=True, slots=True)
class Planned:
    """A spec with the results of the planner; groups given explicitly have no plans and figures.

    Attributes:
        plans: memory layout of a rank, one per pipeline stage.
    """

    spec: ReplicaSpec
    plans: tuple[RankPlan, ...] = ()
    bytes_per_block: int = 0
    max_concurrency: float = 0.0
    warnings: tuple[str, ...] = ()


def plan_source(request: allocation_pb2.RegisterReplicaRequest) -> Planned:
    """The spec of a registration.

    Raises:
        InvalidArgument: naming a field below `spec`, `model` or `layers`.
        NotFound: unknown model.
    """
    kind = request.WhichOneof("source")
    if kind is None:
        raise InvalidArgument("no source", field="source", remedy="give exactly one of spec, model and layers")
    try:
        if kind == "spec":
            return Planned(wire.decode_spec(request.spec))
        return _plan_model(request.model) if kind == "model" else _plan_layers(request.layers)
    except KvplaneError as error:
        error.field = f"{kind}.{error.field}" if error.field else kind
        raise


def _plan_model(source: replica_pb2.ModelSource) -> Planned:
    given = _given(source, "tensor_parallel", "cache_dtype", "block_size", "max_model_len", "speculative_tokens")
    mode = MambaMode.NONE if source.disable_caching else MambaMode.ALIGN
    options = ModelOptions(mamba_mode=mode, drafter=_drafter(source), **given)
    layers = model_layers(source.model, options)
    drops = options.drafter is not Drafter.NONE
    return _planned(source, [layers], _plan_options(source, tp_size=options.tensor_parallel, drops_last_block=drops))


def _drafter(source: _Source) -> Drafter:
    names = replica_pb2.Drafter
    return decode_enum(names, "DRAFTER", source.drafter, "drafter", Drafter.NONE)


def _plan_layers(source: replica_pb2.LayerSource) -> Planned:
    if not 1 <= len(source.layers) <= MAX_LAYERS:
        raise InvalidArgument(f"{len(source.layers)} layers", field="layers", remedy=f"give 1 to {MAX_LAYERS}")
    layers = [
        _with_states_for(source.speculative_tokens, wire.decode_layer(layer, f"layers[{at}]"), f"layers[{at}]")
        for at, layer in enumerate(source.layers)
    ]
    drafts, drafter = any(isinstance(layer, Layer) and layer.is_draft for layer in layers), _drafter(source)
    check_speculation(source.speculative_tokens, drafter)
    if drafter is not Drafter.NONE and not drafts:
        raise InvalidArgument(
            f"no layer belongs to drafter {drafter.value}", field="drafter", remedy="set is_draft of its layers"
        )
    options = _plan_options(
        source,
        layout=Layout.BLOCK_OUTERMOST if source.block_outermost else Layout.LAYER_OUTERMOST,
        drops_last_block=drafts,
        dcp_size=source.decode_context_parallel or 1,
    )
    return _planned(source, _stages(source, layers), options)


def _with_states_for(num_drafts: int, layer: _AnyLayer, field: str) -> _AnyLayer:
    """A recurrent layer keeps a state for each draft token."""
    if not num_drafts or not isinstance(layer, Layer) or not isinstance(layer.spec, MambaSpec):
        return layer
    if layer.spec.speculative_blocks not in (0, num_drafts):
        raise InvalidArgument(
            f"{layer.spec.speculative_blocks} states for {num_drafts} draft tokens",
            field=f"{field}.format.speculative_blocks",
            remedy="leave it at 0, or give speculative_tokens",
        )
    return replace(layer, spec=replace(layer.spec, speculative_blocks=num_drafts))


def _plan_options(source: _Source, **special: Any) -> PlanOptions:  # noqa: ANN401
    """Planner options that both kinds of sources have."""
    if bool(source.memory_bytes) == bool(source.num_blocks):
        raise InvalidArgument(
            f"memory_bytes is {source.memory_bytes}, num_blocks {source.num_blocks}",
            field="memory_bytes",
            remedy="give exactly one of memory_bytes and num_blocks",
        )
    return PlanOptions(
        num_blocks=source.num_blocks,
        prefix_caching=not source.disable_caching,
        retention_interval=source.retention_interval,
        **_given(source, "max_model_len", "max_batched_tokens", "max_concurrent_batches"),
        **special,
    )


def _given(source: _Source, *names: str) -> dict[str, Any]:
    """The fields that are set; the others keep their defaults."""
    return {name: value for name in names if (value := getattr(source, name))}


def _planned(source: _Source, stages: Iterable[Iterable[_AnyLayer]], options: PlanOptions) -> Planned:
    plan = plan_cache([Worker(tuple(layers), source.memory_bytes) for layers in stages], options)
    if not 0.0 <= source.watermark < 1.0:
        raise InvalidArgument(f"{source.watermark}", field="watermark", remedy="give 0 to below 1")
    spec = ReplicaSpec(
        groups=to_groups(plan),
        num_blocks=plan.num_blocks,
        max_model_len=plan.options.max_model_len,
        hash_block_size=plan.hash_block_size,
        scheduler_block_size=plan.scheduler_block_size,
        max_in_flight_tokens=plan.options.max_in_flight_tokens,
        hash_algorithm=_hash_algorithm(source),
        hash_seed=source.hash_seed,
        enable_caching=not source.disable_caching,
        retention_interval=source.retention_interval,
        partial_hits=plan.partial_hits,
        watermark_blocks=int(source.watermark * plan.num_blocks),
        commit=decode_enum(replica_pb2.CommitRule, "COMMIT_RULE", source.commit, "commit", CommitRule.SAFE),
        align=_align(plan),
    )
    warnings = tuple(warning.message for warning in plan.warnings)
    plans = tuple(to_rank_plan(plan, stage) for stage in range(len(plan.workers)))
    return Planned(spec, plans, plan.bytes_per_block, plan.max_concurrency, warnings)


def _hash_algorithm(source: _Source) -> HashAlgorithm:
    names = replica_pb2.HashAlgorithm
    return decode_enum(names, "HASH_ALGORITHM", source.hash_algorithm, "hash_algorithm", HashAlgorithm.KVPLANE)


def _align(plan: CachePlan) -> AlignSpec:
    """States are cached at block boundaries, so prefill chunks have to end there."""
    cached = [group for group in plan.groups if _is_cached_state(group)]
    if not cached or not plan.options.prefix_caching:
        return AlignSpec()
    return AlignSpec(cached[0].block_size, plan.options.max_batched_tokens, plan.partial_hits)


def _is_cached_state(group: CacheGroup) -> bool:
    return group.spec.is_state and group.spec.mamba_mode is MambaMode.ALIGN


def _stages(source: replica_pb2.LayerSource, layers: list[_AnyLayer]) -> list[list[_AnyLayer]]:
    """The layers of each pipeline stage; one stage with all of them when none is given."""
    if not source.stages:
        return [layers]
    by_name = {layer.name: layer for layer in layers}
    stages = []
    for at, stage in enumerate(source.stages):
        unknown = [name for name in stage.layer_names if name not in by_name]
        if unknown or not stage.layer_names:
            raise InvalidArgument(
                f"there is no layer {unknown[0]!r}" if unknown else "no layers",
                field=f"stages[{at}].layer_names",
                remedy="name layers of this source",
            )
        stages.append([by_name[name] for name in stage.layer_names])
    return stages
