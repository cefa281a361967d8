"""An engine process that notes which service granted its epochs, and each write of its pages."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import kvplane
from kvplane.base.errors import KvplaneError
from kvplane.base.step import StepResult
from kvplane_kernels.torch_ops import TorchOps
from tests.engine.child import serve
from tests.engine.reference.config import ModelConfig
from tests.engine.reference.engine import OpenSession
from tests.engine.reference.model import Model
from tests.engine.reference.ranks import RankMemory, attach_ranks
from tests.engine.reference.scheduler import SchedulerConfig
from tests.engine.reference.weights import draw_weights
from tests.faults.child import ORDERS, TrappedEngine, Work
from tests.fleet.history import Granted, Notes, Wrote
from tests.worker.children import picklable

CALL_S = 1.0  # a service that is stopped takes connections and answers nothing


@dataclass(frozen=True)
class Way:
    """How an engine of a replica begins: addresses of services and workers, and where its notes are."""

    replica: str
    services: tuple[str, ...]
    workers: tuple[str, ...]
    model: ModelConfig
    notes: Path


def engine(connection: Connection, way: Way) -> None:
    """As `tests.engine.child.engine`, for Work. An error is sent, and ends the process."""
    torch.set_num_threads(1)
    notes = Notes(way.notes)
    try:
        with kvplane.connect(",".join(way.services)) as client:
            ops = TorchOps()
            memory = attach_ranks(way.workers, ops)
            model = Model(way.model, draw_weights(way.model), [one.pages for one in memory], ops)
            session = partial(client.session, way.replica, step_timeout_s=CALL_S, open_timeout_s=CALL_S)
            served = NotedEngine(session, memory, model, (way, notes))
            connection.send(served.kept_keys)
            with contextlib.suppress(EOFError):
                while True:
                    work: Work = connection.recv()
                    served.trap = work.trap
                    serve(connection, served, list(work.prompts))
    except KvplaneError as error:
        connection.send(picklable(error))


class NotedEngine(TrappedEngine):
    """An engine that survives time-outs, and notes what it does."""

    def __init__(
        self, open_session: OpenSession, memory: Sequence[RankMemory], model: Model, noted: tuple[Way, Notes]
    ) -> None:
        self._way, self._notes = noted
        self._granted, self._last_ns = (0, ""), time.monotonic_ns()
        self._began_ns = self._owner = 0  # of the step that is carried out: when it began, and the owner then
        super().__init__(open_session, memory, model, SchedulerConfig(token_budget=64))

    def _claim(self, next_seq: int) -> None:
        began_ns = time.monotonic_ns()
        self._note_grant()
        is_new = self._epoch != self._session.epoch
        super()._claim(next_seq)
        if is_new:
            self._note_write(began_ns, 0)

    def reach(self, point: str) -> None:
        super().reach(point)
        if point == ORDERS:
            self._began_ns, self._owner = time.monotonic_ns(), self._group.owner_epoch  # behind a trap

    def _carry_out(self, answer: StepResult) -> None:
        super()._carry_out(answer)
        self._note_write(self._began_ns, self._owner)

    def _note_grant(self) -> None:
        now = self._session.epoch, self._service()
        if now != self._granted:
            self._granted = now
            when = self._last_ns, time.monotonic_ns()  # it was asked for after what was noted last
            self._notes.add(Granted(self._way.replica, now[0], str(os.getpid()), now[1], *when))

    def _note_write(self, began_ns: int, owner: int) -> None:
        name, memory, self._last_ns = self._way.replica, self._group.incarnation, time.monotonic_ns()
        self._notes.add(Wrote(name, self._epoch, memory, began_ns, self._last_ns, owner))

    def _service(self) -> str:
        """The address of the service that has the session."""
        session: Any = getattr(self._session, "_sound", self._session)  # inside a PatientSession, once it is open
        owners, channel = session._transport._owners, session._transport._channel
        if channel is owners.first:
            return self._way.services[0]
        (address,) = (address for address, one in owners._channels.items() if one is channel)
        return str(address)
