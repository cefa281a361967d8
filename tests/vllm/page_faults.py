"""Faults planted in the adapter, which random schedules on page contents must find: `page_contents --fault NAME`."""

from __future__ import annotations

from collections.abc import Callable

from kvplane_vllm import scheduler
from kvplane_vllm.known import Known
from kvplane_vllm.launch import PageOrders
from kvplane_vllm.manager import InProcessManager
from kvplane_vllm.pages import RankMemory
from kvplane_vllm.remote.books import Books
from kvplane_vllm.remote.driver import Driver


def lose_copies() -> None:
    """The first copy of a launch is lost."""
    take = PageOrders.take_copies
    PageOrders.take_copies = lambda self: take(self)[1:]  # type: ignore[method-assign]


def keep_unwritten() -> None:
    """The keys of blocks that no launch writes are kept."""
    Books.unwritten = lambda self, entry, computed: []  # type: ignore[method-assign]


def keep_copies() -> None:
    """Copies that no launch has carried out wait for the next one, although their blocks were returned."""
    Books.give_up_copies = lambda self: None  # type: ignore[method-assign]


def run_ahead() -> None:
    """The step of a launch that has not ended counts as executed."""
    Driver._done = property(lambda self: self._link.answered)  # type: ignore[method-assign,assignment]


def lose_resets() -> None:
    """The session that begins after a reset without an answer knows the keys that the stamps prove."""
    RankMemory.invalidate = lambda self: None  # type: ignore[method-assign]


def trust_keys() -> None:
    """An image without an identifier has hashes."""
    scheduler.check_proof = lambda *_: None  # type: ignore[attr-defined]


def report_dropped() -> None:
    """The last token of an answer in a session is reported, although the session drops it."""
    Known.num_kept = property(lambda self: self.request.num_tokens)  # type: ignore[method-assign,assignment]


def reset_under_requests() -> None:
    """A reset evicts what requests hold, and returns True."""
    InProcessManager._any_request_holds_blocks = property(lambda self: False)  # type: ignore[assignment,method-assign]


FAULTS: dict[str, Callable[[], None]] = {  # as in `test_page_contents`
    "copy lost in process": lose_copies,
    "copy lost in mode remote": lose_copies,
    "unwritten blocks keep their keys": keep_unwritten,
    "copies outlive their requests": keep_copies,
    "launch counts as executed too early": run_ahead,
    "reset lost with its session": lose_resets,
    "reset under requests that hold blocks": reset_under_requests,
    "images without an identifier are hashed": trust_keys,
    "tokens that a session drops are reported": report_dropped,
}
