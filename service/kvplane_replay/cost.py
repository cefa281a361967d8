"""What a step costs in virtual time."""

from __future__ import annotations

from dataclasses import dataclass

from kvplane.base.errors import InvalidArgument

NS_PER_SECOND = 1_000_000_000
NS_PER_US = 1_000


@dataclass(frozen=True, slots=True)
class CostModel:
    """A line through the origin for prefill, a constant for decode, a constant for the step.

    It is a stated convention and no measurement: what matters is that it is the same in every run, and of the size of a
    70B model on four current accelerators.

    Attributes:
        prefill_tokens_per_second: tokens of prompts that one replica computes per second.
        decode_step_us: a step with at least one decoding request takes so much, however many decode.
        step_overhead_us: every step takes so much beside.
    """

    prefill_tokens_per_second: int = 20_000
    decode_step_us: int = 20_000
    step_overhead_us: int = 2_000

    def __post_init__(self) -> None:
        if self.prefill_tokens_per_second < 1:
            raise InvalidArgument("must be 1 or more", field="prefill_tokens_per_second")
        if self.decode_step_us < 0 or self.step_overhead_us < 0:
            raise InvalidArgument("must be 0 or more", field="decode_step_us, step_overhead_us")

    def step_ns(self, prefill_tokens: int, decode_rows: int) -> int:
        """Nanoseconds of a step; integers, so that no rounding differs between machines."""
        prefill_ns = prefill_tokens * NS_PER_SECOND // self.prefill_tokens_per_second
        decode_ns = self.decode_step_us * NS_PER_US if decode_rows else 0
        return self.step_overhead_us * NS_PER_US + prefill_ns + decode_ns

    def __str__(self) -> str:
        return (
            f"{self.prefill_tokens_per_second} prefill tokens/s, {self.decode_step_us / 1000:g} ms per decode step, "
            f"{self.step_overhead_us / 1000:g} ms per step"
        )
