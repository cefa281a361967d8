"""Faults planted in the adapter, which random schedules on page contents must find: `page_contents --fault NAME`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvplane_vllm import scheduler
from kvplane_vllm.launch import PageOrders
from kvplane_vllm.manager import InProcessManager
from kvplane_vllm.remote.books import Books
from kvplane_vllm.remote.driver import Driver
from kvplane_vllm.remote.link import Away, Lost


def lose_copies() -> None:
    """The first copy of a launch is lost."""
    take = PageOrders.take_copies
    PageOrders.take_copies = lambda self: take(self)[1:]  # type: ignore[method-assign]


def keep_waiting_copies() -> None:
    """Between two iterations a step counts as executed although no launch has carried out its copies."""
    Books.give_up_copies = lambda self: None  # type: ignore[method-assign]


def keep_unwritten() -> None:
    """The keys of blocks that no launch writes are kept."""
    Books.unwritten = lambda self, entry, computed: []  # type: ignore[method-assign]


def run_ahead() -> None:
    """The step of a launch that has not ended counts as executed."""
    Driver._done = property(lambda self: self._link.answered)  # type: ignore[method-assign,assignment]


def lose_resets() -> None:
    """A reset whose session ends returns True, and nothing is removed."""

    def reset(self: Any) -> bool:
        try:
            return self._reset()
        except Away:
            return False
        except Lost:
            self._begin_life()
            self._books._reset = False
            return True

    Driver.reset = reset  # type: ignore[method-assign]


def trust_keys() -> None:
    """An image without an identifier has hashes."""
    scheduler.check_proof = lambda *_: None  # type: ignore[attr-defined]


def reset_under_requests() -> None:
    """A reset evicts what requests hold, and returns True."""
    InProcessManager._any_request_holds_blocks = property(lambda self: False)  # type: ignore[assignment,method-assign]


FAULTS: dict[str, Callable[[], None]] = {  # as in `test_page_contents`
    "copy lost in process": lose_copies,
    "copy lost in mode remote": lose_copies,
    "step counts as executed before its copies": keep_waiting_copies,
    "unwritten blocks keep their keys": keep_unwritten,
    "launch counts as executed too early": run_ahead,
    "reset lost with its session": lose_resets,
    "reset under requests that hold blocks": reset_under_requests,
    "images without an identifier are hashed": trust_keys,
}
