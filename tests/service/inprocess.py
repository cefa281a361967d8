"""A session without gRPC, which calls the host of a replica in the same process."""

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
    """A SessionTransport (the interface between a client and its session) that applies a step when the step is sent.

    `receive` returns the answers. All sessions of one registry must be used from one thread, because the logs of its
    hosts share a budget.
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
        """Open this session as the newest session of the replica."""
        host = self._find_host(request.replica)
        opened = host.open(request, self._end)
        self._host, self._nonce, self._ended = host, request.nonce, None
        self._answers.clear()
        return opened

    def send(self, step: Step) -> None:
        """Apply the step, and keep the answer for `receive`. Does nothing if the session has ended."""
        if self._host is None or self._ended is not None:
            return
        try:
            self._answers.append(self._host.step(self._nonce, step, _NO_FINGERPRINT))
        except (StaleEpoch, OtherWriter) as error:
            self._end(error)
        except KvplaneError as error:
            self._answers.append(error)

    def receive(self) -> StepResult | KvplaneError:
        """Return the answer to the oldest unanswered step.

        If no answer is left and the session has ended, raises the reason why it ended.
        """
        if self._answers:
            return self._answers.popleft()
        raise self._ended or Unavailable("no answer is outstanding")

    def ready(self) -> StepResult | None:
        """Return the answer to the oldest unanswered step; None if there is none, or the step was refused."""
        answers = self._answers
        return answers.popleft() if answers and isinstance(answers[0], StepResult) else None  # type: ignore[return-value]

    def heartbeat(self, waiting_requests: int | None = None) -> None:
        """Renew the lease of the session. If the session has ended, raises the reason why it ended."""
        if self._host is None or self._ended is not None:
            raise self._ended or Unavailable("no session is open")
        self._host.heartbeat(self._nonce, waiting_requests)

    def close(self) -> None:
        """Close the session: its requests are freed, and its keys are kept."""
        host, self._host = self._host, None
        if host is not None and self._ended is None:
            host.close(self._nonce)

    def abort(self) -> None:
        """End the session without a close, as when the engine dies."""
        host, self._host = self._host, None
        self._answers.clear()
        if host is not None and self._ended is None:
            host.lost(self._nonce)

    def _end(self, reason: KvplaneError) -> None:
        self._ended = reason
