"""The settings of a replay: the limits of an engine, its cost model, the routing, and the replicas to register."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kvplane.base.errors import InvalidArgument

if TYPE_CHECKING:
    from kvplane.base.groups import EvictionPolicy, TierSpec
    from kvplane.base.sources import LayerSource, ModelSource

NS_PER_SECOND = 1_000_000_000
NS_PER_US = 1_000
UNLIMITED_OUTPUT = 1 << 30


@dataclass(frozen=True, slots=True)
class CostModel:
    """The virtual time that a step takes: linear in prefill tokens, plus a constant for decode, plus a constant per
    step.

    It is a convention, not a measurement: equal in every run, and of the order of magnitude of a 70B model on four
    current accelerators.

    Attributes:
        prefill_tokens_per_second: prompt tokens that one replica computes per second.
        decode_step_us: microseconds added to a step with at least one decoding request, independent of their number.
        step_overhead_us: microseconds added to every step.
    """

    prefill_tokens_per_second: int = 20_000
    decode_step_us: int = 20_000
    step_overhead_us: int = 2_000

    def __post_init__(self) -> None:
        if self.prefill_tokens_per_second < 1:
            raise InvalidArgument(
                f"it is {self.prefill_tokens_per_second}, but must be 1 or more", field="prefill_tokens_per_second"
            )
        if self.decode_step_us < 0 or self.step_overhead_us < 0:
            found = f"they are {self.decode_step_us} and {self.step_overhead_us}, but must be 0 or more"
            raise InvalidArgument(found, field="decode_step_us, step_overhead_us")

    def step_ns(self, prefill_tokens: int, decode_rows: int) -> int:
        """Return the duration of a step in nanoseconds. It uses integers, so that machines do not differ by
        rounding.
        """
        prefill_ns = prefill_tokens * NS_PER_SECOND // self.prefill_tokens_per_second
        decode_ns = self.decode_step_us * NS_PER_US if decode_rows else 0
        return self.step_overhead_us * NS_PER_US + prefill_ns + decode_ns

    def __str__(self) -> str:
        return (
            f"{self.prefill_tokens_per_second} prefill tokens/s, {self.decode_step_us / 1000:g} ms per decode step, "
            f"{self.step_overhead_us / 1000:g} ms per step"
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The limits of a simulated engine's scheduler.

    Attributes:
        max_running: most requests that run concurrently.
        token_budget: most tokens scheduled in one step.
        admit_rows: most requests that one step asks to admit; they are announced to the service before they can run.
        max_output: most tokens that a request generates; with 1 only the prefill is replayed.
        mover_steps: steps after which a job of the movers of tiers ends.
    """

    max_running: int = 256
    token_budget: int = 8192
    admit_rows: int = 16
    max_output: int = UNLIMITED_OUTPUT
    mover_steps: int = 2

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise InvalidArgument(f"it is {getattr(self, name)}, but must be 1 or more", field=name)


class Routing(Enum):
    """How requests are assigned to replicas.

    STICKY: by the hash of the session, so that a conversation returns to its cached blocks; requests without a session
    are assigned in rotation. ROUND_ROBIN: all requests are assigned in rotation.
    """

    STICKY = "sticky"
    ROUND_ROBIN = "round-robin"


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The replicas that a replay registers, and the settings of their engines.

    Attributes:
        model: name of the model in the service's catalogue.
        tensor_parallel: number of ranks of each replica.
        replicas: number of equal replicas, each with its own engine.
        pool_blocks: blocks of each replica.
        block_size: tokens per attention block. Groups may get larger blocks, so that all pages have one size.
        max_model_len: longest request in tokens.
        prefix_match_unit, eviction: as in ModelSource.
        engine, cost, routing: see their types.
        with_events: whether results contain cache events, so that the engines count evictions too.
        tiers: places for blocks that leave the device of each replica.
    """

    model: str
    tensor_parallel: int = 1
    replicas: int = 1
    pool_blocks: int = 65_536
    block_size: int = 16
    max_model_len: int = 131_072
    engine: EngineConfig = field(default_factory=EngineConfig)
    cost: CostModel = field(default_factory=CostModel)
    routing: Routing = Routing.STICKY
    with_events: bool = False
    prefix_match_unit: int = 0
    eviction: EvictionPolicy | None = None
    tiers: tuple[TierSpec, ...] = ()

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise InvalidArgument(f"it is {self.replicas}, but must be 1 or more", field="replicas")

    def source(self) -> ModelSource | LayerSource:
        """Return the source with which each replica is registered."""
        from kvplane.base.sources import ModelSource  # not for the options of a command
        from kvplane_tools.replay.workloads.traces import WEKA_HINTS

        return ModelSource(
            model=self.model,
            tensor_parallel=self.tensor_parallel,
            num_blocks=self.pool_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_batched_tokens=self.engine.token_budget,
            prefix_match_unit=self.prefix_match_unit,
            eviction=self.eviction,
            tiers=self.tiers,
            hint_values=WEKA_HINTS,
        )
