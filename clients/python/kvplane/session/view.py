"""The read-only attributes of a session, shared by the blocking and the asyncio session."""

from __future__ import annotations

from kvplane.base.errors import FailedPrecondition, KvplaneError
from kvplane.base.groups import ReplicaSpec
from kvplane.session.machine import SessionMachine

BEATS_PER_LEASE = 3


def aborted() -> KvplaneError:
    """The error that every call of a session raises after `abort`."""
    return FailedPrecondition("the session was aborted", remedy="open a new one")


class SessionView:
    """The read-only attributes of a session."""

    _machine: SessionMachine

    @property
    def epoch(self) -> int:
        """The engine life of the steps that are sent."""
        return self._machine.state.epoch

    @property
    def spec(self) -> ReplicaSpec:
        """The spec of the replica."""
        return self._machine.state.spec

    @property
    def free_blocks(self) -> int:
        """Number of free blocks; exact after the last answer."""
        return self._machine.state.free_blocks

    @property
    def kept_keys(self) -> int:
        """Number of cached keys that survived into this engine life."""
        return self._machine.state.kept_keys

    @property
    def busy_blocks(self) -> tuple[int, ...]:
        """Blocks that loads of earlier lives may still write; not allocated until `Cache.loads_over` names them.

        Name each when its transfers have ended, and all of them when every rank allocated its memory for this life.
        """
        return self._machine.state.busy_blocks

    @property
    def in_flight(self) -> int:
        """Number of steps that were submitted and not answered."""
        return self._machine.state.in_flight

    @property
    def next_seq(self) -> int:
        """Number of the step that the next part belongs to."""
        return self._machine.state.next_seq

    @property
    def ended(self) -> KvplaneError | None:
        """Why the session ended; None while it is open."""
        return self._machine.ended

    @property
    def resume_refused(self) -> KvplaneError | None:
        """Why the last image was refused, so that running requests lost their blocks; None when none was refused."""
        return self._machine.resume_refused
