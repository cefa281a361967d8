"""The disk of one rank: its file, the movers between it and host memory, and the stamp table that outlives a kill."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvplane.base.errors import KvplaneError, WorkerExists
from kvplane.base.groups import TierSpec
from kvplane.base.job_table import JobTable
from kvplane.base.stamp_table import StampTable, table_bytes
from kvplane_kernels.interface import PageOps
from kvplane_worker.lending.rundir import RunDir, default_run_dir
from kvplane_worker.memory import SharedMemory
from kvplane_worker.pages import PageBuffers
from kvplane_worker.tiers import Movers, TierOptions, start_movers

CLOSE_S = 5.0  # for a disk that hangs
EXIT_S = 10.0  # for the workers of an engine that was killed
_log = logging.getLogger("vllm.kvplane")


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """Where the disk of a rank is, and what it holds.

    Attributes:
        folder: of the file.
        content: names what gives its bytes their meaning; b"" = nothing is kept for the next start.
        specs: its tier.
        name: of the rank among those that use the folder.
        rank: its number.
    """

    folder: Path
    content: bytes
    specs: Sequence[TierSpec]
    name: str
    rank: int


class Disk:
    """The disk, while an engine uses it.

    Attributes:
        stamps: of the blocks in host memory and the slots; what the disk has kept is in it.
    """

    def __init__(self, options: DiskOptions, buffers: PageBuffers, jobs: JobTable, ops: PageOps) -> None:
        """Raise the errors of `RunDir`, `SharedMemory.create` and `start_movers`."""
        self._keeps = bool(options.content)
        place = f"{options.name} {options.folder.resolve()} {options.content.hex()}"
        num_ids = buffers.num_blocks + sum(one.num_blocks for one in options.specs)
        with ExitStack() as undo:
            self._run_dir = run_dir = RunDir(default_run_dir(place, options.rank))
            undo.callback(run_dir.give_up)
            memory = SharedMemory.create(run_dir.shared_path("stamps"), table_bytes(num_ids))
            undo.callback(memory.close)
            self.stamps = StampTable.create(memory.view, num_ids, secrets.randbits(64) or 1)
            left = (run_dir.left, run_dir.forget_left) if self._keeps else (b"", run_dir.forget_left)
            where = TierOptions(options.specs, options.folder, options.name, options.content, options.rank, *left)
            self._movers: Movers = start_movers(buffers, self.stamps, jobs, where, ops)
            undo.pop_all()

    def close(self) -> None:
        """Stop, and keep what the disk holds. Does not wait for a disk that hangs: then the next start finds what a
        kill leaves.
        """
        thread = threading.Thread(target=partial(self._movers.close, keep=self._keeps), daemon=True)
        thread.start()
        thread.join(CLOSE_S)
        if not thread.is_alive():
            self._run_dir.leave()


def start(options: DiskOptions, buffers: PageBuffers, jobs: JobTable, ops: PageOps) -> Disk | None:
    """Start the disk; None, with the reason in the log, if it cannot be used: the engine continues without."""
    deadline = time.monotonic() + EXIT_S
    while True:
        try:
            return Disk(options, buffers, jobs, ops)
        except WorkerExists as error:
            if time.monotonic() > deadline:
                _log.error("kvplane's tiers continue without a disk: %s", error)
                return None
            time.sleep(0.2)  # a worker of the engine before may still be exiting
        except KvplaneError as error:
            _log.error("kvplane's tiers continue without a disk: %s", error)
            return None
