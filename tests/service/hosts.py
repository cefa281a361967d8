"""Hosts with a small real core, for tests without gRPC."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvplane.base.errors import KvplaneError
from kvplane.base.groups import GroupKind, GroupSpec, ReplicaSpec
from kvplane.base.session import Opened, OpenRequest
from kvplane.base.step import Part, Step, StepResult
from kvplane_core.face.inspect import check
from kvplane_core.face.state import digest
from kvplane_service.config import Config
from kvplane_service.explain.history import History, HistoryReader
from kvplane_service.replicas.host import ReplicaHost, new_replica
from kvplane_service.replicas.step_order import UnaryStep

BLOCK = 16
FULL = GroupSpec(GroupKind.FULL_ATTENTION, BLOCK)
NONCES = itertools.count(1)


def spec_of(num_blocks: int = 21, **fields) -> ReplicaSpec:
    """One full-attention group."""
    rest = {
        "max_model_len": 512,
        "hash_block_size": BLOCK,
        "scheduler_block_size": BLOCK,
        "max_in_flight_tokens": 256,
        **fields,
    }
    return ReplicaSpec(groups=(FULL,), num_blocks=num_blocks, **rest)


def history_of(host: ReplicaHost) -> History:
    """Return the history of all entries of a replica's log."""
    reader = HistoryReader(host.scheme.digest.size)
    for number, entry in enumerate(list(host.decisions)):
        reader.add(number, entry)
    return reader.history


class HostWorld:
    """A host, its clock, and who drives it.

    Attributes:
        now_ns: a test moves it.
    """

    def __init__(self, config: Config | None = None, spec: ReplicaSpec | None = None) -> None:
        self.now_ns = 0
        self.config = config or Config()
        self.host = ReplicaHost("r", new_replica(spec or spec_of()), self.config, lambda: self.now_ns)

    @property
    def digest(self) -> str:
        check(self.host.replica)
        return digest(self.host.replica)

    def pass_lease(self) -> None:
        self.now_ns += self.config.lease_ms * 1_000_000 + 1

    def open(self, epoch: int = 0, **fields) -> Engine:
        return Engine(self.host, epoch, **fields)

    def apply_unary(self, at: UnaryStep, parts: list[Part]) -> StepResult:
        """The step of a unary call."""
        return self.host.apply_unary(self.host.next_unary(at, parts))

    @contextmanager
    def refuses(self, kind: type[KvplaneError], match: str | None = None, field: str | None = None) -> Iterator[None]:
        """The block must be refused and change nothing."""
        before = self.digest
        with pytest.raises(kind, match=match) as caught:
            yield
        assert type(caught.value) is kind
        if field is not None:
            assert caught.value.field == field
        assert self.digest == before


class Engine:
    """One session on a host."""

    def __init__(self, host: ReplicaHost, epoch: int = 0, **fields) -> None:
        self.host = host
        self.nonce = next(NONCES)
        self.ended: list[KvplaneError] = []
        self.opened: Opened = host.open(OpenRequest("r", self.nonce, epoch, **fields), self.ended.append)
        self.seq = self.opened.seq

    def step(self, *parts: Part, content: bytes = b"", **fields) -> StepResult:
        """Apply the next step, or with `seq` that one."""
        values = {"epoch": self.opened.epoch, "seq": self.seq + 1, "executed_through": self.seq, **fields}
        step = Step(parts=list(parts) or [Part()], **values)
        result = self.host.step(self.nonce, step, content)
        if step.last:
            self.seq = step.seq
        return result
