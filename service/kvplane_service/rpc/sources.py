"""Determine the spec of a registration from its source: explicit groups, a model of the catalogue or of a
config.json, or a list of layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from kvplane import wire
from kvplane.base.errors import InvalidArgument, KvplaneError
from kvplane.base.groups import (
    AlignSpec,
    CommitRule,
    Drafter,
    EvictionPolicy,
    HashAlgorithm,
    MambaMode,
    Planner,
    ReplicaSpec,
)
from kvplane.base.layers import KVSharingLayer, Layer, MambaSpec
from kvplane.base.rank_plan import RankPlan
from kvplane.v1 import allocation_pb2, replica_pb2
from kvplane.wire.same import decode_enum
from kvplane_plan.models.catalogue import model_named
from kvplane_plan.models.config_fields import MAX_LAYERS
from kvplane_plan.models.hf_config import parse_model
from kvplane_plan.models.shapes import Model, ModelOptions, check_speculation
from kvplane_plan.planner import (
    CacheGroup,
    CachePlan,
    Layout,
    PlanOptions,
    Worker,
    plan_cache,
    to_groups,
    to_rank_plan,
)

MAX_CONFIG_CHARACTERS = 1 << 20
MAX_STAGES = 64  # the cost of a plan grows with stages times layers
_AnyLayer: TypeAlias = Layer | KVSharingLayer
_Source: TypeAlias = replica_pb2.ModelSource | replica_pb2.LayerSource


@dataclass(frozen=True, slots=True)
class Planned:
    """A replica spec and the results of the planner. For explicit groups, which are not planned, the other fields are
    empty.

    Attributes:
        plans: memory layout of a rank, one per pipeline stage.
        bytes_per_block: memory of a block on one rank.
        max_concurrency: number of requests of max_model_len tokens that fit at the same time.
        warnings: what an operator should know about the plan.
    """

    spec: ReplicaSpec
    plans: tuple[RankPlan, ...] = ()
    bytes_per_block: int = 0
    max_concurrency: float = 0.0
    warnings: tuple[str, ...] = ()

    def with_policy(self, policy: EvictionPolicy) -> Planned:
        """Return the same with another eviction policy."""
        return replace(self, spec=replace(self.spec, eviction=policy))


def names_policy(request: allocation_pb2.RegisterReplicaRequest) -> bool:
    """Whether the source determines the eviction policy: a spec always does."""
    kind = request.WhichOneof("source")
    return kind == "spec" or bool(getattr(request, kind).eviction)


def plan_source(request: allocation_pb2.RegisterReplicaRequest) -> Planned:
    """Return the spec for a registration, with the plan of its memory.

    Raises:
        InvalidArgument: a field inside `spec`, `model` or `layers` is invalid; the error names it.
        NotFound: the catalogue has no such model.
    """
    kind = request.WhichOneof("source")
    if kind is None:
        what = "none of spec, model and layers is set"
        raise InvalidArgument(what, field="source", remedy="set exactly one of spec, model and layers")
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
    model = _model_of_config(source) if source.config else model_named(source.model)
    drops = options.drafter is not Drafter.NONE
    planning = _plan_options(source, layout=model.layout, tp_size=options.tensor_parallel, drops_last_block=drops)
    return _planned(source, [model.layers(options)], planning)


def _model_of_config(source: replica_pb2.ModelSource) -> Model:
    if source.model:
        what, remedy = f"it is {source.model[:40]!r}, and config is set", "set exactly one of model and config"
        raise InvalidArgument(what, field="model", remedy=remedy)
    if len(source.config) > MAX_CONFIG_CHARACTERS:
        what = f"it has {len(source.config)} characters, at most {MAX_CONFIG_CHARACTERS} are read"
        raise InvalidArgument(what, field="config", remedy="give the model's config.json")
    return parse_model(source.config)


def _drafter(source: _Source) -> Drafter:
    names = replica_pb2.Drafter
    return decode_enum(names, source.drafter, "drafter", Drafter.NONE)


def _plan_layers(source: replica_pb2.LayerSource) -> Planned:
    if not 1 <= len(source.layers) <= MAX_LAYERS:
        what = f"it has {len(source.layers)} layers"
        raise InvalidArgument(what, field="layers", remedy=f"give 1 to {MAX_LAYERS} layers")
    layers = [
        _with_states_for(source.speculative_tokens, wire.decode_layer(layer, f"layers[{at}]"), f"layers[{at}]")
        for at, layer in enumerate(source.layers)
    ]
    drafts, drafter = any(isinstance(layer, Layer) and layer.is_draft for layer in layers), _drafter(source)
    check_speculation(source.speculative_tokens, drafter)
    if drafter is not Drafter.NONE and not drafts:
        raise InvalidArgument(
            f"it is {drafter.value!r}, but no layer has is_draft set",
            field="drafter",
            remedy="set is_draft in the layers of the drafter",
        )
    options = _plan_options(
        source,
        layout=Layout.BLOCK_OUTERMOST if source.block_outermost else Layout.LAYER_OUTERMOST,
        drops_last_block=drafts,
        dcp_size=source.decode_context_parallel or 1,
    )
    return _planned(source, _stages(source, layers), options)


def _with_states_for(num_drafts: int, layer: _AnyLayer, field: str) -> _AnyLayer:
    """Return the layer. A layer with a recurrent state gets room for one state per draft token. Raises InvalidArgument
    if the layer states another number.
    """
    if not num_drafts or not isinstance(layer, Layer) or not isinstance(layer.spec, MambaSpec):
        return layer
    if layer.spec.speculative_blocks not in (0, num_drafts):
        raise InvalidArgument(
            f"it is {layer.spec.speculative_blocks}, but speculative_tokens is {num_drafts}",
            field=f"{field}.format.speculative_blocks",
            remedy="leave it at 0, or set it to the value of speculative_tokens",
        )
    return replace(layer, spec=replace(layer.spec, speculative_blocks=num_drafts))


def _plan_options(source: _Source, **special: Any) -> PlanOptions:  # noqa: ANN401
    """Return the planner's options; `special` are the options that only one kind of source (model or layers) has."""
    if bool(source.memory_bytes) == bool(source.num_blocks):
        raise InvalidArgument(
            f"it is {source.memory_bytes}, and num_blocks is {source.num_blocks}",
            field="memory_bytes",
            remedy="set exactly one of memory_bytes and num_blocks",
        )
    return PlanOptions(
        num_blocks=source.num_blocks,
        prefix_caching=not source.disable_caching,
        retention_interval=source.retention_interval,
        planner=decode_enum(replica_pb2.Planner, source.planner, "planner", Planner.REFERENCE),
        **_given(source, "max_model_len", "max_batched_tokens", "max_concurrent_batches", "prefix_match_unit"),
        **special,
    )


def _given(source: _Source, *names: str) -> dict[str, Any]:
    """Return the fields of the message that are set, so that unset ones get the planner's defaults."""
    return {name: value for name in names if (value := getattr(source, name))}


def _planned(source: _Source, stages: Iterable[Iterable[_AnyLayer]], options: PlanOptions) -> Planned:
    plan = plan_cache([Worker(tuple(layers), source.memory_bytes) for layers in stages], options)
    if not 0.0 <= source.watermark < 1.0:
        what = f"it is {source.watermark}"
        raise InvalidArgument(what, field="watermark", remedy="give a share of the blocks, 0 <= watermark < 1")
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
        commit=decode_enum(replica_pb2.CommitRule, source.commit, "commit", CommitRule.SAFE),
        align=_align(plan),
        eviction=wire.decode_policy(source),
        tiers=wire.decode_tiers(source.tiers),
        hint_values=source.hint_values,
        blocks_per_state=plan.blocks_per_state,
    )
    warnings = tuple(warning.message for warning in plan.warnings)
    plans = tuple(to_rank_plan(plan, stage) for stage in range(len(plan.workers)))
    return Planned(spec, plans, plan.bytes_per_block, plan.max_concurrency, warnings)


def _hash_algorithm(source: _Source) -> HashAlgorithm:
    names = replica_pb2.HashAlgorithm
    return decode_enum(names, source.hash_algorithm, "hash_algorithm", HashAlgorithm.KVPLANE)


def _align(plan: CachePlan) -> AlignSpec:
    """Return the settings of the block boundaries at which prefill chunks must end, because recurrent states are cached
    only there.
    """
    cached = [group for group in plan.groups if _is_cached_state(group)]
    if not cached or not plan.options.prefix_caching:
        return AlignSpec()
    return AlignSpec(cached[0].block_size, plan.options.max_batched_tokens, plan.partial_hits)


def _is_cached_state(group: CacheGroup) -> bool:
    return group.spec.is_state and group.spec.mamba_mode is MambaMode.ALIGN


def _stages(source: replica_pb2.LayerSource, layers: list[_AnyLayer]) -> list[list[_AnyLayer]]:
    """Return the layers of each pipeline stage; a single stage with all layers if the source names no stages."""
    if not source.stages:
        return [layers]
    if len(source.stages) > MAX_STAGES:
        what = f"it has {len(source.stages)} stages"
        raise InvalidArgument(what, field="stages", remedy=f"give at most {MAX_STAGES} stages")
    if sum(len(stage.layer_names) for stage in source.stages) > MAX_LAYERS:
        what, remedy = f"all together name more than {MAX_LAYERS} layers", "name each layer on its own stage"
        raise InvalidArgument(what, field="stages", remedy=remedy)
    by_name = {layer.name: layer for layer in layers}
    stages = []
    for at, stage in enumerate(source.stages):
        unknown = [name for name in stage.layer_names if name not in by_name]
        if unknown or not stage.layer_names:
            raise InvalidArgument(
                f"`layers` has no layer {unknown[0]!r}" if unknown else "it is empty",
                field=f"stages[{at}].layer_names",
                remedy="list the names of the stage's layers, each as in `layers`",
            )
        stages.append([by_name[name] for name in stage.layer_names])
    return stages
