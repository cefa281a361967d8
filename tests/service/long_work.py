"""A host whose long work the test does, and offloads for it."""

from __future__ import annotations

import asyncio
from typing import Any

from kvplane.base.groups import ReplicaSpec
from kvplane.base.session import OpenRequest
from kvplane.base.step import Step
from kvplane_service.config import Config
from kvplane_service.replicas.engine_lives import ignore_end
from kvplane_service.replicas.step_order import UnaryStep
from kvplane_service.runtime.rota import Busy
from kvplane_service.unary.calls import CallHeader
from kvplane_service.unary.hashing import ContentHasher
from kvplane_service.unary.service import UnaryCalls
from tests.service.hosts import NONCES, HostWorld
from tests.service.test_applying import session_of, turns

PROMPT = list(range(64))


async def slowly(call):
    """An offload that leaves the loop to others before and after the call."""
    await turns(2)
    try:
        return call()
    finally:
        await turns(2)


async def full(_):
    """An offload that accepts no call."""
    raise Busy("too many", remedy="later")


class World(HostWorld):
    """A host with unary calls, whose long work is done by `offload`."""

    def __init__(self, offload: Any = slowly, config: Config | None = None, spec: ReplicaSpec | None = None) -> None:
        super().__init__(config, spec)
        self.calls = UnaryCalls(self.host, self.config, ContentHasher(self.config), self._offloaded)
        self.offload = offload

    async def _offloaded(self, call):
        return await self.offload(call)

    async def do(self, call, op_id="", at=UnaryStep(), fingerprint=b"f") -> bytes:  # noqa: B008
        return await self.calls.do(CallHeader(at, op_id, fingerprint), call, lambda answer: repr(answer).encode())

    def begin(self, call, op_id="", **fields):
        return asyncio.ensure_future(self.do(call, op_id, **fields))

    def begin_session(self):
        request = OpenRequest("r", next(NONCES))
        return asyncio.ensure_future(self.host.open_in_slices(request, ignore_end))

    async def visit(self, *parts) -> None:
        """A session opens, sends steps, and closes."""
        opened, nonce = await self.begin_session(), session_of(self.host).nonce
        for seq, part in enumerate(parts, 1):
            await self.host.step_aside(nonce, Step(opened.epoch, seq, [part]), b"", slowly)
        self.host.close(nonce)
