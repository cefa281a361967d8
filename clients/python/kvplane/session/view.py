"""What a session states about itself, shared by the blocking and the asyncio session."""

from __future__ import annotations

from kvplane.base.errors import FailedPrecondition, KvplaneError
from kvplane.base.groups import ReplicaSpec
from kvplane.session.machine import SessionMachine

BEATS_PER_LEASE = 3


def aborted() -> KvplaneError:
    """What every call of a session raises after `abort`."""
    return FailedPrecondition("the session was aborted", remedy="open a new one")


class SessionView:
    """What a session says of itself."""

    _machine: SessionMachine

    @property
    def epoch(self) -> int:
        """The engine life that steps are sent under."""
        return self._machine.state.epoch

    @property
    def spec(self) -> ReplicaSpec:
        """Of the replica."""
        return self._machine.state.spec

    @property
    def free_blocks(self) -> int:
        """Exact after the last answer."""
        return self._machine.state.free_blocks

    @property
    def kept_keys(self) -> int:
        """Cached keys that survived into this engine life."""
        return self._machine.state.kept_keys

    @property
    def busy_blocks(self) -> tuple[int, ...]:
        """Blocks that loads of earlier lives may still write; not allocated until `Cache.loads_over` names them.

        Name each when its movers are done, and all of them when every rank's memory was allocated for this life.
        """
        return self._machine.state.busy_blocks

    @property
    def in_flight(self) -> int:
        """Steps submitted and not answered."""
        return self._machine.state.in_flight

    @property
    def next_seq(self) -> int:
        """Number of the step that the next part belongs to."""
        return self._machine.state.next_seq

    @property
    def ended(self) -> KvplaneError | None:
        """Why the session is over; None while it is not."""
        return self._machine.ended

    @property
    def resume_refused(self) -> KvplaneError | None:
        """Why requests lost their blocks at the last revival, though the engine gave an image; None when none did."""
        return self._machine.resume_refused
