"""What a launch carries out: pages to zero and copy, and the orders of its steps for ranks with pages of a worker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvplane.base.step import Orders

ATTRIBUTE = "kvplane_launch"  # of a SchedulerOutput


@dataclass(slots=True)
class Launch:
    """The orders that each rank carries out before it launches the step.

    Attributes:
        epoch: the engine life that owns the pages.
        executed: number of the last step that has finished on all ranks; 0 = none.
        parts: the orders, with step and part: of this step, and of the steps that ended since the last launch.
    """

    epoch: int
    executed: int = 0
    parts: list[tuple[int, int, Orders]] = field(default_factory=list)


class PageOrders:
    """The pages to zero and to copy before the next launch, of all steps since the last one.

    vLLM zeroes first, then copies, and reads every source before it writes a target. The orders of several steps are
    merged so that this has the result of carrying them out one after the other.
    """

    def __init__(self) -> None:
        """Nothing is ordered."""
        self._zero: list[tuple[int, int]] = []  # (group, block)
        self._copies: dict[int, tuple[int, int]] = {}  # target -> (group, source)

    @property
    def targets(self) -> list[int]:
        """The blocks that copies write."""
        return list(self._copies)

    def add(self, orders: Orders) -> None:
        """Add what is carried out after everything so far."""
        self.add_zeroes(zip(orders.zero_group, orders.zero_block, strict=True))
        for group, source, target in zip(orders.copy_group, orders.copy_src, orders.copy_dst, strict=True):
            _, origin = self._copies.get(source, (group, source))  # a target would be read before it is written
            self._copies[target] = group, origin

    def add_zeroes(self, pages: Iterable[tuple[int, int]]) -> None:
        """Add pages to zero: group and block."""
        before = len(self._zero)
        self._zero.extend(pages)
        if self._copies and len(self._zero) > before:
            zeroed = {block for _, block in self._zero[before:]}
            self.give_up(zeroed)
            read = zeroed.intersection(source for _, source in self._copies.values())
            assert not read, f"pages {read} are zeroed before a launch has copied them: their copies hold them"

    def give_up(self, targets: Iterable[int]) -> None:
        """Take back the copies to these blocks."""
        for target in targets:
            self._copies.pop(target, None)

    def take_zeroes(self) -> list[int]:
        """Return the blocks to zero, by group, and forget them."""
        zero, self._zero = self._zero, []
        return [block for _, block in sorted(zero, key=lambda one: one[0])]

    def take_copies(self) -> list[tuple[int, int]]:
        """Return (source, target) of the copies, by group, and forget them."""
        copies, self._copies = self._copies, {}
        return [(source, target) for target, (_, source) in sorted(copies.items(), key=lambda one: one[1][0])]
