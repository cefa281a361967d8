"""Faults of an engine, planted one at a time; the stress must catch each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from kvplane.base.layers import MLASpec
from kvplane.base.stamp_table import StampTable
from kvplane.base.step import End, StepResult
from kvplane.rank import Moves, PageMover
from kvplane.session.rows import FactRow
from kvplane_kernels.interface import AttentionPages, AttentionRule, Batch, PagedOps
from kvplane_kernels.torch_ops import TorchOps
from kvplane_worker import pages
from kvplane_worker.tiers import HostSlots, Movers, PeerSlots
from tests.engine.reference.batch import state_index
from tests.engine.reference.engine import Engine
from tests.engine.reference.request import Request
from tests.engine.reference.scheduler import Scheduled

MakeMover = Callable[[pages.PageBuffers, PagedOps, int], PageMover]


def sound_mover(buffers: pages.PageBuffers, ops: PagedOps, rank: int) -> PageMover:
    del rank
    return pages.PageMover(buffers, ops)


@dataclass(frozen=True)
class Fault:
    """A faulty replacement of a part of the engine.

    Attributes:
        mix: the mix of the stress that must catch it.
        raises: name of the error that catches it; "" = differing tokens or logits, or a restart that keeps no keys.
    """

    name: str
    mix: str
    engine: type[Engine] = Engine
    mover: MakeMover = sound_mover
    stamps: type[StampTable] = StampTable
    ops: type[TorchOps] | None = None
    movers: type[Movers] = Movers
    slots: type[HostSlots] = HostSlots
    peers: type[PeerSlots] = PeerSlots
    raises: str = ""


# -- orders are not carried out correctly -----------------------------------------------------------------------------


class NoZeroes(pages.PageMover):
    def zero(self, group: int, blocks: Sequence[int]) -> None:
        return


class NoCopies(pages.PageMover):
    def copy(self, group: int, src: Sequence[int], dst: Sequence[int]) -> None:
        return


@dataclass
class CopiesAgain:
    """Repeat each copy before the next one, after the launch that wrote into its target."""

    sound: PageMover
    last: tuple[int, Sequence[int], Sequence[int]] | None = None
    num_groups: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_groups = self.sound.num_groups

    def zero(self, group: int, blocks: Sequence[int]) -> None:
        self.sound.zero(group, blocks)

    def copy(self, group: int, src: Sequence[int], dst: Sequence[int]) -> None:
        if self.last:
            self.sound.copy(*self.last)
        self.sound.copy(group, src, dst)
        self.last = (group, src, dst)

    def moves(self) -> Moves | None:
        return self.sound.moves()


class CopiesBeforeZeroes(pages.PageMover):
    """A copy target is a new page, so it is zeroed too; zeroes must come first."""

    def copy(self, group: int, src: Sequence[int], dst: Sequence[int]) -> None:
        super().copy(group, src, dst)
        super().zero(group, dst)


class OrdersTwice(Engine):
    def _carry_out(self, answer: StepResult) -> None:
        super()._carry_out(answer)
        super()._carry_out(answer)


class NoOrdersOnRankOne(Engine):
    def _carry_out(self, answer: StepResult) -> None:
        self._ranks = self._ranks[:1]
        super()._carry_out(answer)


class NoStamps(StampTable):
    def write(self, blocks: Sequence[int], stamps: Sequence[int]) -> None:
        return


def copies_on_rank_zero(buffers: pages.PageBuffers, ops: PagedOps, rank: int) -> PageMover:
    return NoCopies(buffers, ops) if rank else pages.PageMover(buffers, ops)


# -- kernels read wrong pages -----------------------------------------------------------------------------------------


class WrongBlock(Engine):
    """Periodically, a row's table of the last group names the page next to the right one."""

    _rows = 0

    def _compute(self, scheduled: list[Scheduled]) -> None:
        super()._compute([self._changed(one) for one in scheduled])

    def _changed(self, one: Scheduled) -> Scheduled:
        self._rows += 1
        tables = [list(table) for table in one.row.tables]
        attended = [at for at, block in enumerate(tables[FULL_GROUP]) if block and at < one.row.start // 16]
        if self._rows % 7 or not attended:
            return one
        at = attended[-1]
        tables[FULL_GROUP][at] = tables[FULL_GROUP][at] % (self._session.spec.num_blocks - 1) + 1
        return replace(one, row=replace(one.row, tables=tables))


FULL_GROUP = 3  # window of the model MIXED


class LongerWindow(TorchOps):
    def decode_attention(
        self, query: Tensor, pages: AttentionPages, batch: Batch, rule: AttentionRule, lse: Tensor | None = None
    ) -> Tensor:
        return super().decode_attention(query, pages, batch, longer(rule), lse)

    def prefill_attention(
        self, query: Tensor, pages: AttentionPages, batch: Batch, rule: AttentionRule, lse: Tensor | None = None
    ) -> Tensor:
        return super().prefill_attention(query, pages, batch, longer(rule), lse)


def longer(rule: AttentionRule) -> AttentionRule:
    return replace(rule, window=rule.window + 1) if rule.window else rule


class OneScale(TorchOps):
    """Keys and values of all heads are written with the first head's scale."""

    def write_kv(self, pages: AttentionPages, key: Tensor, value: Tensor, slots: Tensor) -> None:
        first = AttentionPages(pages.k, pages.v, one_of(pages.k_scale), one_of(pages.v_scale))
        super().write_kv(first, key, value, slots)


def one_of(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale[:1]


class OtherScales(Engine):
    """Later engine lives find other scales for the pages that they take over."""

    def _claim(self, next_seq: int) -> None:
        super()._claim(next_seq)
        if self._epoch > 1 and next_seq == 1:
            for buffers in self._model._pages:
                for place in buffers.plan.places():
                    if isinstance(place.spec, MLASpec):
                        scale = buffers.latent(place.name).scale
                        assert scale is not None
                        buffers.set_scales(place.name, scale * self._epoch)


# -- wrong states -----------------------------------------------------------------------------------------------------


class RejectedState(Engine):
    """After rejected drafts, use the state of the last draft instead of the last accepted token's."""

    def _compute(self, scheduled: list[Scheduled]) -> None:
        super()._compute(scheduled)
        for one in scheduled:
            for group, at in one.request.state_at.items():
                size = self._session.spec.groups[group].block_size
                one.request.state_at[group] = min(at, state_index(one.row.end, size))


class OlderState(Engine):
    """The first step of a block reads the state of the block before it."""

    def _compute(self, scheduled: list[Scheduled]) -> None:
        for one in scheduled:
            for group, at in one.request.state_at.items():
                table = one.row.tables[group]
                if at > 0 and one.row.start % self._session.spec.groups[group].block_size == 0:
                    one.row.states[group] = table[at - 1]
        super()._compute(scheduled)


# -- steps that did not run --------------------------------------------------------------------------------------------


class UncomputedHit(Engine):
    """Chunks of a prompt are not computed; their requests start again, on the pages of the step that did not run."""

    _chunks = 0

    def _compute(self, scheduled: list[Scheduled]) -> None:
        lost = [one for one in scheduled if self._is_lost(one)]
        for one in lost:
            self._scheduler._preempt([one.request.slot])
            self._scheduler._facts.append(FactRow(one.request.slot, end=End.PREEMPTED))
        super()._compute([one for one in scheduled if one not in lost])

    def _is_lost(self, one: Scheduled) -> bool:
        self._chunks += not one.row.num_outputs
        return not one.row.num_outputs and self._chunks % 3 == 0


class SilentLoss(Engine):
    """A launch fails, and the engine does not report it."""

    def step(self) -> list[Request]:
        finished = super().step()
        for seq in self._scheduler._lost_steps:
            for rank in self._ranks:
                rank.executed(seq)
        self._scheduler._lost_steps.clear()
        return finished


# -- kernels that need zeroed pages ------------------------------------------------------------------------------------


class WholePages(TorchOps):
    """Multiply masked values by 0 instead of dropping them, as kernels that load whole pages do: 0 x NaN is NaN."""

    def decode_attention(
        self, query: Tensor, pages: AttentionPages, batch: Batch, rule: AttentionRule, lse: Tensor | None = None
    ) -> Tensor:
        return super().decode_attention(query, pages, batch, rule, lse) + self._masked(pages, batch)

    def prefill_attention(
        self, query: Tensor, pages: AttentionPages, batch: Batch, rule: AttentionRule, lse: Tensor | None = None
    ) -> Tensor:
        return super().prefill_attention(query, pages, batch, rule, lse) + self._masked(pages, batch)

    def _masked(self, pages: AttentionPages, batch: Batch) -> Tensor:
        column = (batch.seq_lens.long() - 1) // pages.k.shape[1]
        last = batch.block_table.long().gather(1, column[:, None])
        return 0 * (pages.k[last].sum() + pages.v[last].sum())


FAULTS = (
    Fault("zeroing is skipped", "whole pages", mover=lambda b, o, _: NoZeroes(b, o)),
    Fault("a copy is skipped", "hits inside blocks", mover=lambda b, o, _: NoCopies(b, o)),
    Fault("a copy is skipped on one rank", "hits inside blocks", mover=copies_on_rank_zero),
    Fault("a copy is made twice", "hits inside blocks", mover=lambda b, o, rank: CopiesAgain(sound_mover(b, o, rank))),
    Fault("zeroes come after copies", "hits inside blocks", mover=lambda b, o, _: CopiesBeforeZeroes(b, o)),
    Fault("orders are carried out twice", "tight", engine=OrdersTwice, raises="SequenceError"),
    Fault("one rank carries out no orders", "tight", engine=NoOrdersOnRankOne, raises="LimitExceeded"),
    Fault("one wrong block id", "tight", engine=WrongBlock),
    Fault("a window off by one", "tight", ops=LongerWindow),
    Fault("one scale for all heads", "8-bit pages", ops=OneScale),
    Fault("other scales after a restart", "8-bit latents", engine=OtherScales),
    Fault("a state of rejected drafts", "tight", engine=RejectedState),
    Fault("a state of the block before", "tight", engine=OlderState),
    Fault("stamps are not written", "restarts", stamps=NoStamps),
    Fault("a hit on pages of a step that did not run", "dense states", engine=UncomputedHit),
    Fault("a lost launch is not reported", "lost launches", engine=SilentLoss, raises="InternalError"),
)
