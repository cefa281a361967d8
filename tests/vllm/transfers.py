"""The transfers of the KV connectors that pass pages between two engines, each seen to end in a fixed step.

Two runs see the ends of the same transfers in the same steps, whatever else the machine does: all loads are waited for
in each third step, and not looked at in the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

STEPS = 3
WAIT_S = 30.0


class Sorted(set[str]):
    """Names in an order that depends on nothing else: blocks are freed in it."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))


class Timed:
    """NixlConnector's: the decode engine reads.

    Attributes:
        seen: requests of the other engine since the last answer: those whose blocks this one has "asked" for, has
            "read" or does not need, or leaves "unread", of which the other one does not learn.
        sent: requests of this engine whose blocks the other one has read, to be seen in the next step.
        dropped: requests of this engine whose blocks are not read: their lease ends in the next step.
    """

    def __init__(self, worker: Any) -> None:
        self.seen: dict[str, list[str]] = {"asked": [], "read": [], "unread": []}
        self.sent: set[str] = set()
        self.dropped: set[str] = set()
        self._worker, self._results = worker, worker.get_transfer_results
        self._asked: dict[str, str] = {}  # of the other engine, by request of this one
        self._early: set[str] = set()
        self._step = 0
        worker.get_transfer_results = self._transfers
        self._watch()

    def take(self) -> dict[str, list[str]]:
        """Return what was seen since the last answer."""
        taken, self.seen = self.seen, {name: [] for name in self.seen}
        return taken

    def _watch(self) -> None:
        worker, reads, shakes = self._worker, self._worker._read_blocks, self._worker._background_nixl_handshake

        def read(**options: Any) -> Any:
            is_asked = reads(**options)
            if is_asked:
                self._ask(options["request_id"], options["remote_request_id"])
            return is_asked

        def shake(*args: Any) -> None:
            shakes(*args)
            while worker._ready_requests.empty() and worker._failed_recv_reqs.empty():
                time.sleep(0.001)

        worker._read_blocks, worker._background_nixl_handshake = read, shake

    def _ask(self, here: str, there: str) -> None:
        self._asked[here] = there
        self.seen["asked"].append(there)

    def _is_loading(self) -> bool:
        return any(any(one.local_block_ids) for one in self._worker._recving_metadata.values())

    def _ending(self) -> set[str]:
        for name in self.dropped:
            self._worker._reqs_to_send[name] = 0.0
        return self.sent | self.dropped

    def _transfers(self) -> KVConnectorTransferResults:
        found, until_s = KVConnectorTransferResults(), time.monotonic() + WAIT_S
        self._step += 1
        if self._step % STEPS and not self.sent | self.dropped:
            return found
        ending, is_open = self._ending(), True
        while is_open:
            assert time.monotonic() < until_s, (ending - self._early, self._asked)
            is_loading = self._is_loading()
            one = self._results()
            found.finished_recving |= one.finished_recving
            found.failed_recving |= one.failed_recving
            self._early |= one.finished_sending
            is_open = is_loading or bool(ending - self._early)
            time.sleep(0.001)
        found.finished_sending, found.finished_recving = Sorted(ending), Sorted(found.finished_recving)
        self._early, self.sent, self.dropped = self._early - ending, set(), set()
        self.seen["read"] += [name for here, name in self._asked.items() if here not in found.failed_recving]
        self._asked = {}
        return found


class TimedPush(Timed):
    """NixlPushConnector's: the decode engine names its blocks, and the other one writes there.

    NIXL notifies the decode engine when the other one asks for the state of the write, which that does at once here:
    it runs no step while the decode engine waits.
    """

    def _watch(self) -> None:
        loads, writes, nixl = self._worker.start_load_kv, self._worker._xfer_blocks, self._worker.nixl_wrapper

        def load(metadata: Any) -> None:
            for name, one in metadata.reqs_to_recv.items():
                if any(one.local_block_ids):
                    self._ask(name, one.remote.request_id)
                else:
                    self.seen["unread"].append(one.remote.request_id)
            loads(metadata)

        def write(**options: Any) -> Any:
            handle = writes(**options)
            while handle is not None and nixl.check_xfer_state(handle) == "PROC":
                time.sleep(0.001)
            return handle

        self._worker.start_load_kv, self._worker._xfer_blocks = load, write


class TimedMooncake(Timed):
    """MooncakeConnector's: as with a push, but both engines know a transfer by a name from the router."""

    def _watch(self) -> None:
        loads, ends = self._worker.start_load_kv, self._worker._complete_pull_task
        self._open: set[str] = set()
        self._names: dict[str, str] = {}  # requests of this engine by transfer

        def load(metadata: Any) -> None:
            for name, one in [pair for pulls in metadata.reqs_to_recv.values() for pair in pulls.items()]:
                self._open.add(name)
                self._ask(name, one.transfer_id)
            self._names |= {transfer: name for name, (transfer, _) in metadata.reqs_to_send.items()}
            loads(metadata)

        def end(pull: Any) -> None:
            ends(pull)
            if not pull.pull_tasks_count:
                if pull.failed:
                    self._asked.pop(pull.d_req_id)
                self._open.discard(pull.d_req_id)

        self._worker.start_load_kv, self._worker._complete_pull_task = load, end

    def _is_loading(self) -> bool:
        return bool(self._open)

    def _ending(self) -> set[str]:
        return {self._names[name] for name in self.sent}


TIMED = {"NixlConnector": Timed, "NixlPushConnector": TimedPush, "MooncakeConnector": TimedMooncake}
