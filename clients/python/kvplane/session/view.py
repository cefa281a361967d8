"""The read-only attributes of a session, shared by the blocking and the asyncio session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from kvplane.base.errors import FailedPrecondition, KvplaneError
from kvplane.base.groups import ReplicaSpec
from kvplane.base.step import StepResult
from kvplane.session.machine import SessionMachine

BEATS_PER_LEASE = 3


def aborted() -> KvplaneError:
    """Return the error that every call of a session raises after `abort`."""
    return FailedPrecondition("the session was aborted", remedy="open a new one")


class SessionView:
    """The read-only attributes of a session."""

    _machine: SessionMachine

    @property
    def waiting_requests(self) -> int | None:
        """The number of requests that wait for admission in the engine, for the service's metrics; None = not
        reported. The engine sets it, as often as it likes: the next heartbeat sends it.
        """
        return self._machine.waiting_requests

    @waiting_requests.setter
    def waiting_requests(self, count: int | None) -> None:
        self._machine.waiting_requests = count

    @property
    def epoch(self) -> int:
        """The epoch to which new steps belong."""
        return self._machine.state.epoch

    @property
    def life_nonce(self) -> int:
        """The nonce of the stream that began this epoch. Another session needs it, with the epoch, to continue
        the life.
        """
        return self._machine.life_nonce

    @property
    def spec(self) -> ReplicaSpec:
        """The settings of the replica."""
        return self._machine.state.spec

    @property
    def max_rows(self) -> int:
        """The most rows of a step that the service accepts."""
        return self._machine.state.max_rows

    @property
    def max_steps_in_flight(self) -> int:
        """The most steps that may be sent and not executed."""
        return self._machine.state.max_steps

    @property
    def free_blocks(self) -> int:
        """The number of free blocks of the pool; exact after the last answer."""
        return self._machine.state.free_blocks

    @property
    def kept_keys(self) -> int:
        """The number of prefix cache keys that stayed valid at the start of this epoch."""
        return self._machine.state.kept_keys

    @property
    def busy_blocks(self) -> tuple[int, ...]:
        """Blocks that loads (transfers into pages from outside) of earlier epochs may still write. The service
        does not allocate such a block until `Cache.loads_over` of a step lists it.

        List a block in `Cache.loads_over` when its transfers have ended. List all these blocks when every rank has
        allocated new memory for this life.
        """
        return self._machine.state.busy_blocks

    @property
    def in_flight(self) -> int:
        """The number of steps that were submitted and not answered."""
        return self._machine.state.in_flight

    @property
    def next_seq(self) -> int:
        """The number of the step to which the next part belongs."""
        return self._machine.state.next_seq

    @property
    def ended(self) -> KvplaneError | None:
        """Why the session ended; None while it is open."""
        return self._machine.ended

    @property
    def resume_refused(self) -> KvplaneError | None:
        """Why the service refused the last image (the blocks of running requests, see `Resume`), so that running
        requests lost their blocks; None if it did not.
        """
        return self._machine.resume_refused


class Looked(Protocol):
    """A transport with a `ready`, see `SessionTransport`."""

    @property
    def ready(self) -> Callable[[], StepResult | None]:
        """Read before each look, because a transport may have another one for each stream."""


def looked_at(transport: object) -> Looked | None:
    """Return the transport if the session may call its `ready` before `receive`; None otherwise.

    It may if the class that defines `receive` defines `ready` too. Otherwise `ready` is that of a base class or of a
    wrapped transport, and would pass by what the other class does in its `receive`; it may even be a coroutine.
    """
    for kind in type(transport).__mro__:
        if "receive" in vars(kind):
            return cast(Looked, transport) if "ready" in vars(kind) else None
    return None
