"""The manager of mode "mirror": kvplane's allocator decides in the engine's process, and a service follows its steps.

Every schedule() sends one message, for whose answer the engine never waits. The service then has the index, the events,
the metrics, the explanations and the store of this replica. It may be away at any time.

    alone:           the pages end with the process; each life begins with an empty cache and an incarnation of its own
    pages: worker:   incarnation and epoch are those of the page memory; what the new life keeps is in its first image

The first image needs nothing from the service: the key records are in the same memory as the stamps, have the key of
every block whose step was executed, and end with the pages; the service has at most the keys of the steps that it has
applied. Only further keys of a block, of prefixes that end inside it, are not recorded: after a restart such a prefix
hits the blocks before this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from kvplane.base.groups import ReplicaSpec
from kvplane.base.session import CacheRequest
from kvplane.base.step import StepResult
from kvplane.blocking.mirror import MirrorSender
from kvplane_core.face.loader import new_in_process
from kvplane_vllm.engine_lock import EngineLock
from kvplane_vllm.following import last_epoch, sender_of
from kvplane_vllm.manager import InProcessManager
from kvplane_vllm.pages import PagesOfWorker
from kvplane_vllm.target import Target

if TYPE_CHECKING:
    from kvplane_core.face.native import NativeReplica
    from kvplane_core.face.native.open_step import NativeOpenStep


class MirrorManager(InProcessManager):
    """Answers the calls of vLLM's scheduler in this process, and sends each step to a service.

    Attributes:
        target: the service; set in a subclass, see `mirroring`.
        sender: sends the steps.
        lock: excludes a second engine process; None where a worker lends its pages to one process at a time.
    """

    target: ClassVar[Target]
    records_steps = True
    needs_events = True  # the service has subscribers and a store of its own
    sender: MirrorSender | None = None
    lock: EngineLock | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take the arguments of vLLM's manager. Waits for the service only to ask for the last epoch, 2 s at most."""
        super().__init__(*args, **options)
        self._closed: list[tuple[NativeOpenStep, StepResult]] = []
        self._carried_out: dict[int, int] = {}  # by number of a step: the cache request that it carries out
        self.close_step()
        self.sender = sender_of(self.target, self.replica, self.memory_incarnation())

    def new_replica(self, spec: ReplicaSpec) -> NativeReplica:
        """Return an empty replica in the epoch after the one that the service knows.

        Raises OtherWriter if another engine process of this host writes the replica.
        """
        self.lock = EngineLock(self.target.address, self.target.replica)
        replica = new_in_process(spec)
        replica.begin_epoch(self.known_epoch() + 1)
        return replica

    def known_epoch(self) -> int:
        """Return the newest epoch of the replica at the service; 0 if it has none, or cannot be reached."""
        return last_epoch(self.target)

    def memory_incarnation(self) -> int:
        """Return the number of the memory that has the pages; 0 if they end with this process."""
        return 0

    def step_closed(self, step: NativeOpenStep, result: StepResult) -> None:
        """Keep the step until the end of schedule(); send it at once if no scheduler of kvplane uses this manager."""
        if self.sender is None:
            return  # the image has it
        self._closed.append((step, result))
        if self.executed is None:
            self.send_steps()

    def send_steps(self, waiting: int | None = None) -> None:
        """Send the steps that ended since the last call, in one message. Before that, carry out what callers of the
        service ask for. `waiting`: number of requests that wait for admission, None if it has not changed.
        """
        assert self.sender is not None, "the manager is not built yet"
        if waiting is not None:
            self.sender.waiting_requests = waiting
        for request in self.sender.take_cache_requests():
            self._carry_out(request)
        closed, self._closed = self._closed, []
        carried_out, self._carried_out = self._carried_out, {}
        self.sender.submit(closed, carried_out)

    def _carry_out(self, request: CacheRequest) -> None:
        """Evict blocks, or reset the cache, in a step of its own, whose result is the answer."""
        self.close_step()
        self._carried_out[self._open().seq] = request.number
        if request.reset:
            self.reset_prefix_cache()
        else:
            self.evict_blocks(set(request.blocks))
        self.close_step()

    def shut_down(self) -> None:
        """Notify the service that the engine leaves."""
        self.close_step()
        self.send_steps()
        assert self.sender is not None, "the manager is not built yet"
        self.sender.close()
        if self.lock is not None:
            self.lock.release()


class MirrorOnPages(PagesOfWorker, MirrorManager):
    """A mirrored manager on pages of a kvplane worker: its first image has the keys that survived the last process."""

    known_epoch = MirrorManager.known_epoch


def mirroring(target: Target, has_worker: bool = False) -> type[MirrorManager]:
    """Return the manager's class for this service."""
    base = MirrorOnPages if has_worker else MirrorManager
    return type(base.__name__, (base,), {"target": target})
