"""Two ways to register a replica without a ReplicaSpec: by a model of the service's catalogue or its config.json, or
by a list of layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvplane.base.groups import CommitRule, Drafter, EvictionPolicy, HashAlgorithm, Planner, TierSpec
from kvplane.base.layers import KVSharingLayer, Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """The settings of a block pool, for both sources. 0 selects the service's default, which the proto files state.

    Attributes:
        memory_bytes: cache memory per rank in bytes; give either memory_bytes or num_blocks.
        num_blocks: blocks in the pool.
        max_model_len: longest request in tokens.
        max_batched_tokens: most tokens scheduled in one step.
        max_concurrent_batches: most steps that the engine has in flight.
        disable_caching: turns prefix caching off.
        prefix_match_unit: tokens per block hash; prefix hits are multiples of it. It divides the block sizes of all
            groups; 0 selects the most that every group allows. In a model with recurrent states a small unit, such as
            16, lets hits end inside the large blocks, which the engine then copies as the answers order.
        retention_interval, commit, hash_algorithm, hash_seed: as in ReplicaSpec.
        eviction: as in ReplicaSpec; None selects the service's default (its configuration key `eviction`).
        watermark: share of the pool that stays free when a request is admitted while others run, 0 to below 1.
        speculative_tokens: most draft tokens of a decode step. Recurrent states are kept for this number of draft
            tokens; a row that asks for more is refused.
        drafter: the drafter, if it has layers in the pool: EAGLE, or the model's own multi-token prediction. A prefix
            look-up then omits the last matched block, which the drafter recomputes. In a LayerSource, its layers have
            `is_draft`.
        planner: how layers are distributed over groups. BEST needs memory_bytes; BEST and SPLIT need an engine that
            uses the placement of the answer.
        hint_values: as in ReplicaSpec.
        tiers: as in ReplicaSpec; needs `namespace_digest` at the registration.
    """

    memory_bytes: int = 0
    num_blocks: int = 0
    max_model_len: int = 0
    max_batched_tokens: int = 0
    max_concurrent_batches: int = 0
    disable_caching: bool = False
    retention_interval: int = 0
    prefix_match_unit: int = 0
    watermark: float = 0.0
    speculative_tokens: int = 0
    drafter: Drafter = Drafter.NONE
    commit: CommitRule = CommitRule.SAFE
    hash_algorithm: HashAlgorithm = HashAlgorithm.KVPLANE
    hash_seed: str = ""
    eviction: EvictionPolicy | None = None
    planner: Planner = Planner.REFERENCE
    tiers: tuple[TierSpec, ...] = ()
    hint_values: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource(PoolSettings):
    """A replica for a model of the service's catalogue, or for the model of a config.json. Give one of `model` and
    `config`.

    Attributes:
        model: name of the model, such as "llama-3.1-70b".
        config: text of the model's Hugging Face config.json.
        tensor_parallel: number of tensor-parallel ranks; all have the same memory layout.
        cache_dtype: "bfloat16" (default), "float16" or "fp8".
        block_size: tokens per attention block. Groups may get larger blocks, so that all pages have one size.
    """

    model: str = ""
    config: str = ""
    tensor_parallel: int = 0
    cache_dtype: str = ""
    block_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSource(PoolSettings):
    """A replica for a model that is described by its layers, from which the service computes the KV cache groups.

    Attributes:
        layers: the layers in model order, with the sizes that they have on one rank.
        block_outermost: store all layers of a block together (for large transfers) instead of all blocks of a layer.
        decode_context_parallel: number of ranks; a block of a sharded group covers this number times as many tokens.
        stages: names of the layers of each pipeline stage, if there is more than one.
    """

    layers: tuple[Layer | KVSharingLayer, ...]
    block_outermost: bool = False
    decode_context_parallel: int = 0
    stages: tuple[tuple[str, ...], ...] = ()
