"""The PyTorch backend: correct on every device, used where no kernel supports the device, shape or type."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from kvplane_kernels import checks
from kvplane_kernels.interface import (
    AttentionPages,
    AttentionRule,
    Batch,
    DeltaInputs,
    GroupPages,
    LatentPages,
    LayerUse,
    ScanInputs,
    StateInputs,
    StatePages,
    StateRows,
    StateWeights,
    WarmUp,
)
from kvplane_kernels.torch_ops import attention, pages, state, write


class TorchOps:
    """The operations of `interface.PagedOps` in PyTorch, for CPU and CUDA tensors. Each method checks its arguments
    first.

    Sums are computed in float32, for float64 in float64. Prefill, state steps and writes with skipped tokens wait for
    the device, because the shapes of their tensors depend on values there.
    """

    name = "torch"

    @staticmethod
    def unfit(device: torch.device) -> str:
        """Return why the backend cannot work on a device; "" if it can."""
        if device.type not in ("cpu", "cuda"):
            return f"not tested on {device.type}"
        if device.type == "cuda" and not torch.cuda.is_available():
            return "PyTorch finds no CUDA device"
        return ""

    def warm_up(
        self,
        groups: Sequence[GroupPages],
        operations: Collection[str],
        layers: Sequence[LayerUse] = (),
    ) -> WarmUp:
        """Return at once: PyTorch's kernels are compiled already."""
        del groups, operations, layers
        return WarmUp()

    def write_kv(self, pages: AttentionPages, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write keys and values of new tokens; see `AttentionOps.write_kv`."""
        checks.check_write_kv(pages, key, value, slots)
        write.write_kv(pages, key, value, slots)

    def decode_attention(
        self, query: Tensor, pages: AttentionPages, batch: Batch, rule: AttentionRule, lse: Tensor | None = None
    ) -> Tensor:
        """Compute attention for one query per row; see `AttentionOps.decode_attention`."""
        checks.check_one_query_per_row(batch)
        checks.check_attention(query, pages, batch, rule)
        checks.check_lse(lse, query)
        return attention.attention(query, pages, batch, rule, lse)

    def prefill_attention(
        self, query: Tensor, pages: AttentionPages, batch: Batch, rule: AttentionRule, lse: Tensor | None = None
    ) -> Tensor:
        """Compute attention for any number of queries per row; see `AttentionOps.prefill_attention`."""
        checks.check_attention(query, pages, batch, rule)
        checks.check_lse(lse, query)
        return attention.attention(query, pages, batch, rule, lse)

    def write_latent(self, pages: LatentPages, latent: Tensor, slots: Tensor) -> None:
        """Write latent rows; see `AttentionOps.write_latent`."""
        checks.check_write_latent(pages, latent, slots)
        write.write_latent(pages, latent, slots)

    def mla_decode(
        self, query: Tensor, pages: LatentPages, batch: Batch, scale: float, value_size: int, lse: Tensor | None = None
    ) -> Tensor:
        """Compute latent attention; see `AttentionOps.mla_decode`."""
        checks.check_mla(query, pages, batch, scale, value_size)
        checks.check_lse(lse, query)
        return attention.mla_decode(query, pages, batch, scale, value_size, lse)

    def state_step(self, pages: StatePages, inputs: StateInputs, weights: StateWeights) -> Tensor:
        """Advance recurrent states; see `StateOps.state_step`."""
        checks.check_state(pages, inputs, weights)
        return state.step(pages, inputs, weights)

    def convolve(self, conv: Tensor, rows: StateRows, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Compute a causal convolution; see `StateOps.convolve`."""
        checks.check_convolution(conv, rows, x, weight, bias)
        return state.convolve(conv, rows, x, weight, bias)

    def selective_scan(self, states: Tensor, inputs: ScanInputs, a: Tensor, d: Tensor) -> Tensor:
        """Advance the states of Mamba-1; see `StateOps.selective_scan`."""
        checks.check_scan(states, inputs, a, d)
        return state.selective_scan(states, inputs, a, d)

    def gated_delta_rule(self, states: Tensor, inputs: DeltaInputs) -> Tensor:
        """Advance the states of the gated delta rule; see `StateOps.gated_delta_rule`."""
        checks.check_delta_rule(states, inputs)
        return state.gated_delta_rule(states, inputs)

    def copy_pages(self, group: GroupPages, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy whole blocks; see `PageOps.copy_pages`."""
        checks.check_copies(group, src, dst)
        pages.copy(group, src, dst)

    def zero_pages(self, group: GroupPages, blocks: Sequence[int]) -> None:
        """Set whole blocks to 0; see `PageOps.zero_pages`."""
        checks.check_group(group)
        checks.check_blocks(group, "blocks", blocks, written=True)
        pages.zero(group, blocks)

    def gather(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        """Copy blocks into a staging buffer; see `PageOps.gather`."""
        checks.check_group(group)
        checks.check_blocks(group, "blocks", blocks, written=False)
        checks.check_staging(group, blocks, staging)
        pages.gather(group, blocks, staging)

    def scatter(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        """Copy a staging buffer into blocks; see `PageOps.scatter`."""
        checks.check_group(group)
        checks.check_blocks(group, "blocks", blocks, written=True)
        checks.check_named_once(blocks)
        checks.check_staging(group, blocks, staging)
        pages.scatter(group, blocks, staging)

    def checksum(self, group: GroupPages, blocks: Sequence[int]) -> Tensor:
        """Return a checksum of each block; see `PageOps.checksum`."""
        checks.check_group(group)
        checks.check_blocks(group, "blocks", blocks, written=False)
        return pages.checksum(group, blocks)
