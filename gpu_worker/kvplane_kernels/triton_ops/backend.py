"""The Triton backend. The PyTorch backend computes an operation if no kernel supports the shape or type."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from functools import partial

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
    PagedOps,
    ScanInputs,
    StateInputs,
    StatePages,
    StateRows,
    StateWeights,
    WarmUp,
)
from kvplane_kernels.torch_ops import TorchOps
from kvplane_kernels.triton_ops import attention, compiles, delta_rule, moves, selective_scan, states, writes
from kvplane_kernels.triton_ops.kernels.moves import CHECKED_GATHER, CHECKSUM, COPY, GATHER, SCATTER, ZERO
from kvplane_kernels.triton_ops.launch import Launch, chip_of
from kvplane_kernels.triton_ops.link import HostLink
from kvplane_kernels.triton_ops.remembered import Batches, ByForm, form_of, form_of_rule, form_of_sums

MAX_LAYER_TABLES = 256


class TritonOps:
    """The operations in Triton, for CUDA tensors, and for CPU tensors in Triton's interpreter (TRITON_INTERPRET=1).

    Attributes:
        fallbacks: maps an operation to the reason why it was last passed to PyTorch; returned by `Worker.Describe`.
    """

    name = "triton"

    def __init__(self) -> None:
        compiles.WATCH.install()
        self.fallbacks: dict[str, str] = {}
        self._other: PagedOps = TorchOps()
        self._attention: ByForm[attention.Prepared] = ByForm()
        self._writes: ByForm[writes.PreparedWrite] = ByForm()
        self._batches = Batches()
        self._tables: dict[object, moves.LayerTable] = {}
        self._links: dict[torch.device, HostLink] = {}
        self._warmed: WarmUp | None = None

    def warm_up(
        self,
        groups: Sequence[GroupPages],
        operations: Collection[str],
        layers: Sequence[LayerUse] = (),
    ) -> WarmUp:
        """Compile kernels; see `PagedOps.warm_up`."""
        device = groups[0].layers[0].device if groups else torch.device("cpu")
        done = compiles.warm_up(compiles.launches_of(groups, operations, layers, chip_of(device)))
        before = self._warmed or WarmUp()
        self._warmed = WarmUp((*before.kernels, *done.kernels), before.cpu_s + done.cpu_s)
        return done

    def write_kv(self, pages: AttentionPages, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write keys and values of new tokens; see `AttentionOps.write_kv`."""
        form = form_of(key), form_of(value), form_of(slots), key.shape[0] == value.shape[0] == slots.shape[0]
        prepared = self._writes.get(pages, form)
        if prepared is None:
            checks.check_write_kv(pages, key, value, slots)
            k, v = writes.Written(key, pages.k, pages.k_scale), writes.Written(value, pages.v, pages.v_scale)
            if self._refused("write_kv", k.refusal() or v.refusal()):
                return self._other.write_kv(pages, key, value, slots)
            prepared = writes.PreparedWrite(k, v, chip_of(key.device))
            self._writes.keep(pages, form, prepared)
        if slots.shape[0]:
            prepared.run(key, value, slots)
        return None

    def write_latent(self, pages: LatentPages, latent: Tensor, slots: Tensor) -> None:
        """Write latent rows; see `AttentionOps.write_latent`."""
        form = form_of(latent), form_of(slots), latent.shape[0] == slots.shape[0]
        prepared = self._writes.get(pages, form)
        rows = latent.unsqueeze(1)
        if prepared is None:
            checks.check_write_latent(pages, latent, slots)
            written = writes.Written(rows, pages.rows.unsqueeze(2), pages.scale)
            if self._refused("write_latent", written.refusal()):
                return self._other.write_latent(pages, latent, slots)
            prepared = writes.PreparedWrite(written, None, chip_of(latent.device))
            self._writes.keep(pages, form, prepared)
        if slots.shape[0]:
            prepared.run(rows, rows, slots)
        return None

    def decode_attention(
        self, query: Tensor, pages: AttentionPages, batch: Batch, rule: AttentionRule, lse: Tensor | None = None
    ) -> Tensor:
        """Compute attention for one query per row; see `AttentionOps.decode_attention`."""
        checks.check_one_query_per_row(batch)
        return self.prefill_attention(query, pages, batch, rule, lse)

    def prefill_attention(
        self, query: Tensor, pages: AttentionPages, batch: Batch, rule: AttentionRule, lse: Tensor | None = None
    ) -> Tensor:
        """Compute attention for any number of queries per row; see `AttentionOps.prefill_attention`."""
        form = form_of_rule(rule), form_of_sums(lse, query), *self._form_of(query, batch)
        rows, prepared = self._batches.get(batch, query), self._attention.get(pages, form)
        if rows is None or prepared is None:
            checks.check_attention(query, pages, batch, rule)
            checks.check_lse(lse, query)
            operation = "decode_attention" if batch.query_start is None else "prefill_attention"
            if self._refused(operation, attention.pages_refusal(query, pages)):
                return self._other.prefill_attention(query, pages, batch, rule, lse)
            call = attention.keys_and_values(query, pages, batch, rule, lse)
            prepared, rows = self._prepare(pages, form, call), self._batches.keep(batch, query)
        return prepared.run(query, rows, lse)

    def mla_decode(
        self, query: Tensor, pages: LatentPages, batch: Batch, scale: float, value_size: int, lse: Tensor | None = None
    ) -> Tensor:
        """Compute latent attention; see `AttentionOps.mla_decode`."""
        form = scale, value_size, form_of_sums(lse, query), *self._form_of(query, batch)
        rows, prepared = self._batches.get(batch, query), self._attention.get(pages, form)
        if rows is None or prepared is None:
            checks.check_mla(query, pages, batch, scale, value_size)
            checks.check_lse(lse, query)
            if self._refused("mla_decode", attention.latent_refusal(query, pages, value_size)):
                return self._other.mla_decode(query, pages, batch, scale, value_size, lse)
            call = attention.latent(query, pages, batch, scale, value_size, lse)
            prepared, rows = self._prepare(pages, form, call), self._batches.keep(batch, query)
        return prepared.run(query, rows, lse)

    @staticmethod
    def _form_of(query: Tensor, batch: Batch) -> tuple[Hashable, ...]:
        return form_of(query), attention.kind_of(query, batch), batch.tree is None

    def _prepare(self, pages: AttentionPages | LatentPages, form: Hashable, call: attention.Call) -> attention.Prepared:
        """Return the launches for a form: those that were kept, or new ones."""
        prepared = self._attention.get(pages, form)
        if prepared is None:
            prepared = attention.Prepared(call, chip_of(call.query.device))
            self._attention.keep(pages, form, prepared)
        return prepared

    def state_step(self, pages: StatePages, inputs: StateInputs, weights: StateWeights) -> Tensor:
        """Advance recurrent states; see `StateOps.state_step`."""
        checks.check_state(pages, inputs, weights)
        if self._refused("state_step", states.refusal(pages, inputs)):
            return self._other.state_step(pages, inputs, weights)
        return _result(inputs.x, *states.launches(pages, inputs, weights, chip_of(inputs.x.device)))

    def convolve(self, conv: Tensor, rows: StateRows, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Compute a causal convolution; see `StateOps.convolve`."""
        checks.check_convolution(conv, rows, x, weight, bias)
        if self._refused("convolve", states.refused_convolution(conv, x)):
            return self._other.convolve(conv, rows, x, weight, bias)
        return _result(x, *states.convolve(conv, rows, x, weight, bias, chip_of(x.device)))

    def selective_scan(self, states: Tensor, inputs: ScanInputs, a: Tensor, d: Tensor) -> Tensor:
        """Advance the states of Mamba-1; see `StateOps.selective_scan`."""
        checks.check_scan(states, inputs, a, d)
        if self._refused("selective_scan", selective_scan.refusal(states, inputs)):
            return self._other.selective_scan(states, inputs, a, d)
        return _result(inputs.x, *selective_scan.launches(states, inputs, a, d, chip_of(inputs.x.device)))

    def gated_delta_rule(self, states: Tensor, inputs: DeltaInputs) -> Tensor:
        """Advance the states of the gated delta rule; see `StateOps.gated_delta_rule`."""
        checks.check_delta_rule(states, inputs)
        if self._refused("gated_delta_rule", delta_rule.refusal(states, inputs)):
            return self._other.gated_delta_rule(states, inputs)
        return _result(inputs.v, *delta_rule.launches(states, inputs, chip_of(inputs.v.device)))

    def copy_pages(self, group: GroupPages, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy whole blocks; see `PageOps.copy_pages`."""
        checks.check_copies(group, src, dst)
        if self._refused("copy_pages", moves.refusal(group)):
            return self._other.copy_pages(group, src, dst)
        plan = moves.plan_copies(src, dst)
        kept = self._kept(group, [source for source, _ in plan.staged])  # by torch: too rare to compile kernels for
        if plan.direct:
            sources, targets = zip(*plan.direct, strict=True)
            device = group.layers[0].device
            self._move(group, moves.Move(int(COPY), moves.on_device(sources, device), moves.on_device(targets, device)))
        if kept is not None:
            self._other.scatter(group, [target for _, target in plan.staged], kept)
        return None

    def zero_pages(self, group: GroupPages, blocks: Sequence[int]) -> None:
        """Set whole blocks to 0; see `PageOps.zero_pages`."""
        checks.check_group(group)
        checks.check_blocks(group, "blocks", blocks, written=True)
        if self._refused("zero_pages", moves.refusal(group)):
            self._other.zero_pages(group, blocks)
        elif blocks:
            self._move(group, moves.Move(int(ZERO), moves.on_device(blocks, group.layers[0].device)))

    def gather(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        """Copy blocks into a staging buffer; see `PageOps.gather`."""
        checks.check_group(group)
        checks.check_blocks(group, "blocks", blocks, written=False)
        checks.check_staging(group, blocks, staging)
        if self._refused("gather", moves.refusal(group) or moves.staging_refusal(group, staging)):
            self._other.gather(group, blocks, staging)
        elif staging.device != group.layers[0].device:
            self.link_of(group).save(group, blocks, staging)
        elif blocks:
            self._stage(GATHER, group, moves.on_device(blocks, staging.device), staging)

    def scatter(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        """Copy a staging buffer into blocks; see `PageOps.scatter`."""
        checks.check_group(group)
        checks.check_blocks(group, "blocks", blocks, written=True)
        checks.check_named_once(blocks)
        checks.check_staging(group, blocks, staging)
        if self._refused("scatter", moves.refusal(group) or moves.staging_refusal(group, staging)):
            self._other.scatter(group, blocks, staging)
        elif staging.device != group.layers[0].device:
            self.link_of(group).load(group, blocks, staging)
        elif blocks:
            self._stage(SCATTER, group, moves.on_device(blocks, staging.device), staging)

    def checksum(self, group: GroupPages, blocks: Sequence[int]) -> Tensor:
        """Return a checksum of each block; see `PageOps.checksum`."""
        checks.check_group(group)
        checks.check_blocks(group, "blocks", blocks, written=False)
        if self._refused("checksum", moves.refusal(group)):
            return self._other.checksum(group, blocks)
        return self._summed(group, blocks, None)

    def gather_checked(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> Tensor:
        """Gather blocks and return their checksums, reading the bytes once; twice if staging is on the host."""
        checks.check_group(group)
        checks.check_blocks(group, "blocks", blocks, written=False)
        checks.check_staging(group, blocks, staging)
        if self._refused("gather_checked", moves.refusal(group) or moves.staging_refusal(group, staging)):
            self._other.gather(group, blocks, staging)
            return self._other.checksum(group, blocks)
        if staging.device != group.layers[0].device:
            self.gather(group, blocks, staging)
            return self.checksum(group, blocks)
        return self._summed(group, blocks, staging)

    def _summed(self, group: GroupPages, blocks: Sequence[int], staging: Tensor | None) -> Tensor:
        device = group.layers[0].device
        sums = torch.zeros(len(blocks), dtype=torch.int64, device=device)
        if blocks:
            what = int(CHECKSUM if staging is None else CHECKED_GATHER)
            self._move(group, moves.Move(what, moves.on_device(blocks, device), staging=staging, sums=sums))
        return sums

    @property
    def late_compiles(self) -> int:
        """The number of kernels that Triton compiled for a launch in this process, and not in a warm-up."""
        return compiles.WATCH.late.total()

    @property
    def explained(self) -> tuple[str, ...]:
        """The lines that explain which operations PyTorch computed so far, which kernels were compiled while serving,
        and which routes the host link chose.
        """
        ready = [self._readiness(self._warmed)] if self._warmed else []
        left = (f"{operation} by torch: {why}" for operation, why in self.fallbacks.items())
        late = (f"{kernel} compiled {count} times while serving" for kernel, count in compiles.WATCH.late.items())
        return (*ready, *left, *late, *(line for link in self._links.values() for line in link.explained))

    def _readiness(self, warmed: WarmUp) -> str:
        count, late = len(warmed.kernels), self.late_compiles
        return f"{count} kernels compiled before serving, in {warmed.cpu_s:.1f} s of CPU time; {late} compiled since"

    def link_of(self, group: GroupPages) -> HostLink:
        """Return the link between the group's device and the host. The link is created on first use."""
        device = group.layers[0].device
        if device not in self._links:
            self._links[device] = HostLink(device, partial(self._stage, background=True))
        return self._links[device]

    def _stage(self, what: int, group: GroupPages, ids: Tensor, staging: Tensor, background: bool = False) -> None:
        """Gather or scatter blocks on the device."""
        self._move(group, moves.Move(int(what), ids, staging=staging, background=background))

    def _kept(self, group: GroupPages, blocks: Sequence[int]) -> Tensor | None:
        """Copy the current content of blocks into a new staging buffer and return it; None if there are no blocks."""
        if not blocks:
            return None
        staging = torch.empty((len(blocks), group.bytes_per_block), dtype=torch.uint8, device=group.layers[0].device)
        self._other.gather(group, blocks, staging)
        return staging

    def _move(self, group: GroupPages, move: moves.Move) -> None:
        key = moves.key_of(group)
        table = self._tables.get(key)
        if table is None:
            while len(self._tables) >= MAX_LAYER_TABLES:
                del self._tables[next(iter(self._tables))]
            table = self._tables[key] = moves.LayerTable.of(group)
        moves.move_launch(table, move).run()

    def _refused(self, operation: str, reason: str) -> bool:
        if reason:
            self.fallbacks[operation] = reason
        return bool(reason)


def _result(tokens: Tensor, out: Tensor, launches: Iterable[Launch]) -> Tensor:
    """Run launches unless there are no tokens, and return their result in the type of the tokens."""
    if tokens.shape[0]:
        for launch in launches:
            launch.run()
    return out.to(tokens.dtype)
