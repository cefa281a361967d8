"""A session without gRPC: straight onto the host of a replica in this process.

For harnesses, simulations, and engines with batches so small that a message would cost more than the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvplane.base.errors import KvplaneError, OtherWriter, StaleEpoch, Unavailable
from kvplane.base.session import Opened, OpenRequest
from kvplane.base.step import Step, StepResult
from kvplane_service.replicas.host import ReplicaHost

# Steps are handed over by reference and never twice, so there are no bytes to compare repeats by.
_NO_FINGERPRINT = b""


class InProcessTransport:
    """Implements SessionTransport. A step is applied when it is sent; its answer waits for `receive`.

    Sessions of one registry belong to one thread: the logs of its hosts share a budget.
    """

    def __init__(self, find_host: Callable[[str], ReplicaHost]) -> None:
        """`find_host` returns the host of a replica by name, or raises NotFound."""
        self._find_host = find_host
        self._host: ReplicaHost | None = None
        self._nonce = 0
        self._answers: deque[StepResult | KvplaneError] = deque()
        self._ended: KvplaneError | None = None
        self.draining = self.can_move = False  # nobody drains a registry

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
        """As if the engine had died."""
        host, self._host = self._host, None
        self._answers.clear()
        if host is not None and self._ended is None:
            host.lost(self._nonce)

    def _end(self, reason: KvplaneError) -> None:
        self._ended = reason
