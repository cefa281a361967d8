"""A transport whose stream breaks where a test wants it."""

from __future__ import annotations

from collections.abc import Callable

from kvplane.base.errors import KvplaneError, Unavailable
from kvplane.base.session import Opened, OpenRequest, SessionTransport
from kvplane.base.step import Step, StepResult


def never(call: str) -> bool:
    """For streams that hold."""
    del call
    return False


class FlakyTransport:
    """Passes calls on to a transport, until the stream breaks; then what is sent and answered on it is lost.

    Attributes:
        breaks: asked with the name of each call before it is made; True breaks the stream (or fails the open).
        calls: names of the calls made, in order.
        opens: requests of all opens.
    """

    def __init__(self, inner: SessionTransport) -> None:
        self.breaks: Callable[[str], bool] = never
        self.calls: list[str] = []
        self.opens: list[OpenRequest] = []
        self.draining = self.can_move = False
        self._inner = inner
        self._broken = True

    def open(self, request: OpenRequest) -> Opened:
        self.opens.append(request)
        self._broken = True
        self.calls.append("open")
        if self.breaks("open"):
            raise Unavailable("cannot connect")
        opened = self._inner.open(request)
        self._broken = False
        return opened

    def send(self, step: Step) -> None:
        if self._holds("send"):
            self._inner.send(step)

    def receive(self) -> StepResult | KvplaneError:
        if self._holds("receive"):
            return self._inner.receive()
        raise Unavailable("connection reset")

    def heartbeat(self, waiting_requests: int | None = None) -> None:
        if not self._holds("heartbeat"):
            raise Unavailable("connection reset")
        self._inner.heartbeat(waiting_requests)

    def close(self) -> None:
        self.calls.append("close")
        self._inner.close()

    def abort(self) -> None:
        self.calls.append("abort")
        self._inner.abort()

    def _holds(self, call: str) -> bool:
        self.calls.append(call)
        self._broken = self.breaks(call) or self._broken
        return not self._broken


def breaking(call: str, times: int = 1) -> Callable[[str], bool]:
    """Breaks before the next `times` calls of that name."""
    left = [times]

    def breaks(name: str) -> bool:
        if name != call or not left[0]:
            return False
        left[0] -= 1
        return True

    return breaks
