"""Sources of a replica's groups other than a ReplicaSpec: a model of the service's catalogue, or a list of layers."""

from __future__ import annotations

from dataclasses import dataclass

from kvplane.base.groups import CommitRule, Drafter, HashAlgorithm
from kvplane.base.layers import KVSharingLayer, Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Settings of the pool, for every source. 0 selects the service's default, which the contract states.

    Attributes:
        memory_bytes: cache memory per rank; exactly one of memory_bytes and num_blocks.
        num_blocks: blocks in the pool, instead of memory_bytes.
        max_model_len: longest request in tokens.
        max_batched_tokens: most tokens scheduled in one step.
        max_concurrent_batches: most steps that the engine has in flight.
        disable_caching: turns prefix caching off.
        retention_interval, commit, hash_algorithm, hash_seed: as in ReplicaSpec.
        watermark: share of the pool left free when a request is admitted while others run, 0 to below 1.
        speculative_tokens: maximum draft tokens of a decode step. Recurrent states are kept for them; a row that asks
            for more is refused.
        drafter: a drafter with layers in the pool: EAGLE, or the model's own multi-token prediction. A look-up then
            drops the last matched block, which the drafter recomputes. In a LayerSource, its `is_draft` layers.
    """

    memory_bytes: int = 0
    num_blocks: int = 0
    max_model_len: int = 0
    max_batched_tokens: int = 0
    max_concurrent_batches: int = 0
    disable_caching: bool = False
    retention_interval: int = 0
    watermark: float = 0.0
    speculative_tokens: int = 0
    drafter: Drafter = Drafter.NONE
    commit: CommitRule = CommitRule.SAFE
    hash_algorithm: HashAlgorithm = HashAlgorithm.KVPLANE
    hash_seed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource(PoolSettings):
    """A model of the catalogue.

    Attributes:
        model: its name, such as "llama-3.1-70b".
        tensor_parallel: degree; every rank has an equal plan.
        cache_dtype: "bfloat16" (default), "float16" or "fp8".
        block_size: tokens per attention block before unification.
    """

    model: str
    tensor_parallel: int = 0
    cache_dtype: str = ""
    block_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSource(PoolSettings):
    """A model by its layers; the service plans the groups.

    Attributes:
        layers: in model order, on one rank.
        block_outermost: store all layers of a block together (for large transfers) instead of all blocks of a layer.
        decode_context_parallel: degree; a block of a sharded group covers that many times more tokens.
        stages: names of the layers of each pipeline stage, when there is more than one.
    """

    layers: tuple[Layer | KVSharingLayer, ...]
    block_outermost: bool = False
    decode_context_parallel: int = 0
    stages: tuple[tuple[str, ...], ...] = ()
