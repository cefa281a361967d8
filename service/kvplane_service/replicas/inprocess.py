"""A session without gRPC: direct calls of the host of a replica in this process.

For test harnesses, simulations, and engines whose steps are so small that a message would cost more than the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvplane.base.errors import KvplaneError, OtherWriter, StaleEpoch, Unavailable
from kvplane.base.session import Opened, OpenRequest
from kvplane.base.step import Step, StepResult
from kvplane_service.replicas.host import ReplicaHost

# Steps are passed by reference and never repeated, so no fingerprint is needed.
_NO_FINGERPRINT = b""


class InProcessTransport:
    """Implements SessionTransport. A step is applied when it is sent; `receive` returns its answer.

    Use all sessions of one registry from one thread: the logs of its hosts share a budget.
    """

    def __init__(self, find_host: Callable[[str], ReplicaHost]) -> None:
        """`find_host` returns the host of a replica by name, or raises NotFound."""
        self._find_host = find_host
        self._host: ReplicaHost | None = None
        self._nonce = 0
        self._answers: deque[StepResult | KvplaneError] = deque()
        self._ended: KvplaneError | None = None
        self.draining = self.can_move = False  # a registry is never drained

    def open(self, request: OpenRequest) -> Opened:
        """Make this the newest session of the replica."""
        host = self._find_host(request.replica)
        opened = host.open(request, self._end)
        self._host, self._nonce, self._ended = host, request.nonce, None
        self._answers.clear()
        return opened

    def send(self, step: Step) -> None:
        """Apply the step."""
        if self._host is None or self._ended is not None:
            return
        try:
            self._answers.append(self._host.step(self._nonce, step, _NO_FINGERPRINT))
        except (StaleEpoch, OtherWriter) as error:
            self._end(error)
        except KvplaneError as error:
            self._answers.append(error)

    def receive(self) -> StepResult | KvplaneError:
        """The next answer."""
        if self._answers:
            return self._answers.popleft()
        raise self._ended or Unavailable("no answer is outstanding")

    def heartbeat(self) -> None:
        """Keep the lease."""
        if self._host is None or self._ended is not None:
            raise self._ended or Unavailable("no session is open")
        self._host.heartbeat(self._nonce)

    def close(self) -> None:
        """Leave the replica."""
        host, self._host = self._host, None
        if host is not None and self._ended is None:
            host.close(self._nonce)

    def abort(self) -> None:
        """Drop the session without a close, as when the engine dies."""
        host, self._host = self._host, None
        self._answers.clear()
        if host is not None and self._ended is None:
            host.lost(self._nonce)

    def _end(self, reason: KvplaneError) -> None:
        self._ended = reason
