"""Weakened twins: the real product with one of its rules taken out, to prove that a campaign would see it broken.

    with weakened("no stamp check"): ...                        the product of this process
    python -m tests.twins "no stamp check" kvplane serve        a program of the product, or any module, weakened

A twin is a small patch of the product by name. A name that has gone is an error, not a twin that weakens nothing.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

Real = Callable[..., Any]

FAR = 1 << 62  # a step that no engine reaches


@dataclass(frozen=True)
class Patch:
    """One name of the product and what stands in its place.

    Attributes:
        path: module, colon, class, dot, attribute; or module, colon, function.
        change: from the real function to the weakened one.
    """

    path: str
    change: Callable[[Real], Real]

    def find(self) -> tuple[Any, str, Any]:
        """The class or module, the name and what it holds; raises LookupError when the product has no such name."""
        module, _, names = self.path.partition(":")
        owner_name, _, name = names.rpartition(".")
        owner: Any = importlib.import_module(module)
        if owner_name:
            owner = getattr(owner, owner_name, None)
        if owner is None or name not in vars(owner):
            raise LookupError(f"{self.path} has gone: say anew what this twin weakens")
        return owner, name, vars(owner)[name]


@dataclass(frozen=True)
class Twin:
    """The product without one rule.

    Attributes:
        rule: what it no longer does.
    """

    rule: str
    patches: tuple[Patch, ...]


@contextmanager
def weakened(name: str) -> Iterator[Twin]:
    """The product of this process is the twin inside the block."""
    twin = TWINS[name]
    found = [patch.find() for patch in twin.patches]
    for patch, (owner, attribute, real) in zip(twin.patches, found, strict=True):
        setattr(owner, attribute, _changed(real, patch.change))
    try:
        yield twin
    finally:
        for owner, attribute, real in found:
            setattr(owner, attribute, real)


def _changed(real: Any, change: Callable[[Real], Real]) -> Any:
    if isinstance(real, property):
        assert real.fget is not None
        return property(wraps(real.fget)(change(real.fget)))
    return wraps(real)(change(real))


# -- stamps ------------------------------------------------------------------------------------------------------------


def recover_whatever_is_stored(real: Real) -> Real:
    """The memory is taken to show what the entries say of it; the newest come first."""

    def regain(self: Any, tables: Any, stored: Any) -> Any:
        entries, told = list(stored), dict[int, int]()
        for one in entries:
            for block, stamp in zip(one.block, one.stamp, strict=True):
                told.setdefault(block, stamp)
        blocks = range(self.spec.num_blocks)
        return real(self, [[told.get(block, 0) for block in blocks] for _ in tables], entries)

    return regain


def keep_what_is_executed(real: Real) -> Real:
    """A new life believes the pool in place of the memory, wherever it is shown any."""

    def begin_epoch(self: Any, epoch: int, stamp_table: Sequence[int] = ()) -> Any:
        pool = self.coordinator.pool
        return real(self, epoch, list(pool.stamp) if stamp_table else stamp_table)

    return begin_epoch


def without_restamps(real: Real) -> Real:
    """What `real` does to keys, with every page's stamp left as it was."""

    def act(self: Any, *given: Any) -> Any:
        self.restamp = lambda block: None
        try:
            return real(self, *given)
        finally:
            del self.restamp

    return act


def show_rank_zero(real: Real) -> Real:
    """What one table says is said of all of them."""

    def tell(self: Any) -> Any:
        return real(type(self)(self._tables[:1]))

    return tell


def believe_the_engine(_: Real) -> Real:
    """What workers say at a claim is not compared with what the engine showed."""
    return lambda shown, readings: shown


# -- who may write -----------------------------------------------------------------------------------------------------


def carry_out_for_anyone(real: Real) -> Real:
    """Orders of an engine life that owns the pages no more, or not yet, are obeyed too."""

    def carry_out(self: Any, epoch: int, seq: int, part: int, orders: Any) -> None:
        if epoch == self._stamps.owner_epoch:
            real(self, epoch, seq, part, orders)
        else:
            self._obey(orders)

    return carry_out


def accept_anyone(_: Real) -> Real:
    """Every epoch is the owner's."""
    return lambda self, epoch: None


def lend_while_lent(real: Real) -> Real:
    """The pages change hands though their writer lives."""

    def lend(self: Any, name: Any) -> None:
        self.close()
        real(self, name)

    return lend


def open_without_incarnation(real: Real) -> Real:
    """Whatever memory an engine names, it is taken for the one that is known."""

    def open_session(self: Any, request: Any, *told: Any) -> Any:
        return real(self, replace(request, incarnation=0), *told)

    return open_session


def free_when_silent(real: Real) -> Real:
    """A replica whose session lapsed gives its blocks back."""

    def expire(self: Any) -> None:
        if self.state.value == "lapsed":
            self.replica.ledger.abandon()
        real(self)

    return expire


def release_held_at_resume(real: Real) -> Real:
    """A session that resumes finds what it held released."""

    def open_session(self: Any, request: Any, *told: Any) -> Any:
        opened = real(self, request, *told)
        for slot in list(self.replica.ledger.held):
            self.replica.ledger.release_held(slot)
        return opened

    return open_session


# -- when a page is what its key says ----------------------------------------------------------------------------------


def end_wherever_a_block_ends(_: Real) -> Real:
    """A launch is taken to have left a state at every boundary that it ran past."""
    return lambda self, slot, index: (index + 1) * self.block_size


def keep_keys_of_overwritten_states(_: Real) -> Real:
    """States behind rejected drafts keep their names."""
    return lambda self, slot, num_computed: None


def with_all_executed(real: Real) -> Real:
    """What `real` sees: every step has been executed as soon as it was answered."""

    def act(self: Any, *given: Any) -> Any:
        pool = self.coordinator.pool
        true, pool.executed_through = pool.executed_through, FAR
        try:
            return real(self, *given)
        finally:
            if pool.executed_through == FAR:
                pool.executed_through = true

    return act


def release_all(real: Real) -> Real:
    """Events of steps that may never run are shown."""
    return lambda self, executed_through: real(self, FAR)


def mark_at_once(real: Real) -> Real:
    """The store is told of keys whose steps may never run."""

    def note(self: Any, decision: Any) -> None:
        real(self, decision)
        while self._waiting:
            self._mark(self._waiting.popleft()[1])

    return note


def take_every_turn(_: Real) -> Real:
    """No part is refused because it was carried out."""
    return lambda self, seq, part: None


def obey_again(real: Real) -> Real:
    """Before the orders of a part those of the one before are obeyed once more: after its launch."""

    def obey(self: Any, orders: Any) -> None:
        before = vars(self).get("obeyed")
        if before is not None:
            real(self, before)
        self.obeyed = orders
        real(self, orders)

    return obey


CORE, SERVICE = "kvplane_service.core", "kvplane_service"

TWINS: dict[str, Twin] = {
    "no stamp check": Twin(
        "a key is hit after a restart only where the page memory still shows its stamp",
        (
            Patch(f"{CORE}.replica:Replica.regain", recover_whatever_is_stored),
            Patch(f"{CORE}.replica:Replica.begin_epoch", keep_what_is_executed),
        ),
    ),
    "no restamp on key moves": Twin(
        "a page gets a new stamp whenever a key leaves it",
        (
            Patch(f"{CORE}.pool:BlockPool.move_keys", without_restamps),
            Patch(f"{CORE}.pool:BlockPool.drop_keys", without_restamps),
        ),
    ),
    "sealed check removed": Twin(
        "a state is published only where it stays as its key says",
        (
            Patch(f"{CORE}.managers.mamba:AlignedStateManager._ends_in", end_wherever_a_block_ends),
            Patch(f"{CORE}.managers.mamba:AlignedStateManager.rewind", keep_keys_of_overwritten_states),
        ),
    ),
    "fencing removed": Twin(
        "only the engine life that owns the pages writes them, and only proof that it is gone gives them to another",
        (
            Patch("kvplane.rank:Rank.carry_out", carry_out_for_anyone),
            Patch("kvplane.base.stamp_table:StampTable.check_owner", accept_anyone),
            Patch("kvplane_worker.writer:Writer.lend", lend_while_lent),
        ),
    ),
    "incarnation ignored": Twin(
        "entries are of one life of the page memory",
        (Patch(f"{SERVICE}.host:ReplicaHost.open", open_without_incarnation),),
    ),
    "one rank unchecked": Twin(
        "a hit after a restart needs a match on every rank",
        (
            Patch("kvplane.rank:RankGroup.agreed_stamps", show_rank_zero),
            Patch("kvplane.rank:RankGroup.incarnation", show_rank_zero),
            Patch(f"{SERVICE}.claims:_proven", believe_the_engine),
        ),
    ),
    "publication before execution": Twin(
        "others see a key when its step has been executed on all ranks",
        (
            Patch(f"{CORE}.replica:Replica.begin_epoch", with_all_executed),
            Patch(f"{CORE}.replica:Replica.entries", with_all_executed),
            Patch(f"{CORE}.replica:Replica.lookup", with_all_executed),
            Patch(f"{SERVICE}.events:PublicationHold.release", release_all),
            Patch(f"{SERVICE}.store.journal:ReplicaJournal.note", mark_at_once),
        ),
    ),
    "orders run twice": Twin(
        "orders run exactly once per rank",
        (Patch("kvplane.rank:Rank._check_turn", take_every_turn), Patch("kvplane.rank:Rank._obey", obey_again)),
    ),
    "lease expiry frees pages": Twin(
        "a lease that lapses withdraws entries from what others see, and nothing else",
        (Patch(f"{SERVICE}.host:ReplicaHost.expire", free_when_silent),),
    ),
    "resume forgets held pages": Twin(
        "a session that resumes finds its held pages held",
        (Patch(f"{SERVICE}.host:ReplicaHost.open", release_held_at_resume),),
    ),
}


def main(arguments: Sequence[str]) -> None:
    """Run a program weakened: `kvplane` with its arguments, or a module."""
    if len(arguments) < 2 or arguments[0] not in TWINS:
        sys.exit(f"python -m tests.twins TWIN PROGRAM ARGS...\ntwins: {', '.join(TWINS)}")
    name, program, *_ = arguments
    sys.argv = list(arguments[1:])
    with weakened(name):
        if program == "kvplane":
            importlib.import_module("kvplane_service.cli").main()
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
