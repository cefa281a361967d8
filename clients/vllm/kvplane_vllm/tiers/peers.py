"""What one rank lends of its host memory to engines of the same model, and loads of theirs.

    copies of a step end ─▶ the allocator stores keys ─▶ their rows are sealed ─▶ peers may read them
                                        └─▶ the service ─▶ engines of peers: section `peers` of a step

The rank registers with the service as the worker of this memory, and learns from its renewals which memory it may read
(`kvplane_worker.rpc.arenas`). Its movers verify what they have read before they write a row.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b

from kvplane.base.errors import KvplaneError, NotFound
from kvplane.base.groups import TierSpec
from kvplane.base.job_table import JobTable
from kvplane.base.stamp_table import StampTable
from kvplane.base.worker import WorkerInfo, WorkerState
from kvplane.blocking.workers import WorkersClient
from kvplane.rpc.channel import open_channel
from kvplane.sansio.owners import Owners
from kvplane_kernels.interface import PageOps
from kvplane_vllm.target import Target
from kvplane_vllm.tiers.messages import Seals
from kvplane_worker.lending.rundir import RunDir, default_run_dir
from kvplane_worker.nixl.transport import PeerTransport
from kvplane_worker.pages import PageBuffers
from kvplane_worker.rpc.arenas import PeersOfWorker
from kvplane_worker.tiers import PeerSlots, use_of
from kvplane_worker.tiers.arena import Arena
from kvplane_worker.tiers.movers import MoverMemory, Movers
from kvplane_worker.tiers.peers import HOST
from kvplane_worker.tiers.seal import HEADER_BYTES, IDENTITY_BYTES, Content

RENEWALS_PER_LEASE, FIRST_S = 3, 1.0
CLOSE_S = 5.0  # for a service that hangs
_log = logging.getLogger("vllm.kvplane")


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """What a rank reads, and how.

    Attributes:
        service: says what peers have.
        spec: the tier that stands for their memory.
        transport: how it is read.
        content: names what gives the bytes their meaning.
        rows: bytes of a block of each group.
        rank: number of this rank.
    """

    service: Target
    spec: TierSpec
    transport: PeerTransport
    content: bytes
    rows: Sequence[int]
    rank: int

    @property
    def namespace(self) -> bytes:
        """16 bytes, equal for ranks whose rows have the same meaning."""
        named = repr((self.content, list(self.rows), self.rank)).encode()
        return blake2b(named, digest_size=IDENTITY_BYTES, person=b"kvplane rows").digest()


class RankPeers:
    """Lends and reads, until `close`.

    Attributes:
        slots: of the tier that stands for the memory of peers.
    """

    def __init__(
        self, options: PeerOptions, arena: Arena, buffers: PageBuffers, stamps: StampTable, jobs: JobTable, ops: PageOps
    ) -> None:
        """`arena`: the memory of `buffers`. Raises the errors of `RunDir`, and FailedPrecondition for a transport that
        this machine does not have.
        """
        target, namespace = options.service, options.namespace
        self._rows, self._replica, self._arena, self._stamps = options.rows, target.replica, arena, stamps
        self._identity = namespace + arena.incarnation
        self.slots = PeerSlots(options.spec, arena.slot_bytes, namespace)
        self._client = WorkersClient(Owners.at(target.address, partial(open_channel, access=target.access)))
        with ExitStack() as undo:
            undo.callback(self._client.close)
            self._run_dir = run_dir = RunDir(default_run_dir(f"{target.address} {target.replica}", options.rank))
            undo.callback(run_dir.give_up)
            self._peers = PeersOfWorker(arena, self.slots, run_dir.path, options.transport)
            undo.pop_all()
        self._movers = Movers(MoverMemory(buffers, stamps, [self.slots]), ops, jobs)
        worker_id, where = secrets.randbits(64) or 1, str(buffers.memory.device)
        self._info = WorkerInfo(
            options.rank,
            worker_id,
            run_dir.address,
            os.getpid(),
            where,
            WorkerState.READY,
            host_incarnation=arena.incarnation,
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvplane-peers", daemon=True)
        self._thread.start()

    def seal(self, seals: Seals) -> None:
        """Let peers read these rows. One that is not what its seal would say any more, by its stamp before and after it
        was read, gets none.
        """
        words, width = self._stamps.words, self._arena.slot_bytes
        for block, group, version, key in zip(*seals, strict=True):
            if words[block] != version:
                continue
            row = self._arena.rows[block * width : block * width + self._rows[group]]
            header = Content(self._identity, HOST, block, group, version, key).seal(row)
            if words[block] == version:
                self._arena.headers[block * HEADER_BYTES : (block + 1) * HEADER_BYTES] = header

    def close(self) -> None:
        """Lend and read nothing more. Memory that is mapped elsewhere stays readable there. Does not wait for a service
        that hangs: it forgets this worker when the lease has expired.
        """
        self._stop.set()
        self._thread.join(CLOSE_S)
        self._peers.close()
        self._movers.close()
        if not self._thread.is_alive():
            self._client.close()
            self._run_dir.leave()

    def _run(self) -> None:
        wait_s, problem, last = 0.0, "", self._run_dir.last
        if last is not None:
            self._deregister(last.worker_id)  # its process has exited
        self._run_dir.write_state(self._info.worker_id)
        while not self._stop.wait(wait_s):
            try:
                wait_s, problem = self._renew() / RENEWALS_PER_LEASE, ""
            except KvplaneError as error:
                if problem != str(error):
                    _log.warning("rank %d has no peers now: %s", self._info.rank, error)
                wait_s, problem = FIRST_S, str(error)
        self._deregister(self._info.worker_id)

    def _renew(self) -> float:
        """Renew the registration, and read the peers that its answer names. Returns the lease in seconds."""
        self._update()
        try:
            renewal = self._client.renew_worker(self._replica, self._info)
        except NotFound:
            self._client.register_worker(self._replica, self._info)
            renewal = self._client.renew_worker(self._replica, self._info)
        if self._peers.follow(renewal.peers):
            self._update()  # the engine learns of a peer once all of its ranks can read it
            self._client.renew_worker(self._replica, self._info)
        return renewal.lease_ms / 1000

    def _update(self) -> None:
        peers = self._peers
        self._info = replace(
            self._info,
            tiers=(use_of(self.slots),),
            mapped=peers.mapped,
            nixl_arena=peers.nixl_arena,
            nixl_peers=peers.nixl_peers,
        )

    def _deregister(self, worker_id: int) -> None:
        try:
            self._client.deregister_worker(self._replica, worker_id)
        except KvplaneError as error:
            _log.info("worker %d of %s is left to its lease: %s", worker_id, self._replica, error)
