"""Publishes batches as vLLM does, with a replay socket, so that routers that follow vLLM can follow another source."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, closing

import msgspec
import zmq
import zmq.asyncio

from kvplane.base.groups import Medium
from kvplane.base.step import CacheEvent, EventKind
from kvplane_fleet.domains import keys_of
from kvplane_fleet.wire.events import GroupFormat
from kvplane_fleet.wire.frames import END, SEQUENCE_BYTES

_encode = msgspec.msgpack.Encoder().encode


class Publisher:
    """A publisher and its replay socket, on the running event loop. Closes its sockets when it is left.

    with Publisher(context, "tcp://*:5557", "tcp://*:5558") as publisher: ...
    """

    def __init__(self, context: zmq.asyncio.Context, events: str, replay: str, topic: str = "") -> None:
        self._context, self._addresses, self._topic = context, (events, replay), topic.encode()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=10_000)
        self._next = 0
        self._stack = ExitStack()

    def __enter__(self) -> Publisher:
        self._pub = self._stack.enter_context(closing(self._context.socket(zmq.PUB)))
        self._router = self._stack.enter_context(closing(self._context.socket(zmq.ROUTER)))
        for socket, address in zip((self._pub, self._router), self._addresses, strict=True):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 2 * (10_000 + 1))
            socket.bind(address)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    async def publish(self, time_s: float, events: Sequence[object]) -> None:
        """Publish one batch of events in wire form."""
        sequence, payload = self._next.to_bytes(SEQUENCE_BYTES, "big"), _encode([time_s, events, 0])
        self._next += 1
        self._kept.append((sequence, payload))
        await self._pub.send_multipart([self._topic, sequence, payload])

    async def serve_replays(self) -> None:
        """Answer requests for replays until the task is cancelled; a request that is none is not answered."""
        while True:
            parts = await self._router.recv_multipart()
            if len(parts) != 3 or len(parts[2]) != SEQUENCE_BYTES:
                continue
            who, _, start = parts
            for sequence, payload in list(self._kept):
                if sequence >= start:
                    await self._router.send_multipart([who, b"", self._topic, sequence, payload])
            await self._router.send_multipart([who, b"", b"", END, b""])
            await asyncio.sleep(0)


_MEDIA = {Medium.DEVICE: "GPU", Medium.HOST: "CPU", Medium.DISK: "STORAGE"}  # vLLM's names


def wire_events(event: CacheEvent, groups: Sequence[GroupFormat], tokens: Sequence[int]) -> list[dict[str, object]]:
    """Return an event of a replica in vLLM's form. `tokens`: of what is stored on the device, start to end.

    As in vLLM's OffloadingConnector, what is stored in a tier has no tokens and parent, and block size 0.
    """
    if event.kind is EventKind.CLEARED:
        return [{"type": "AllBlocksCleared"}]
    digest_bytes = len(event.hashes[0]) if event.hashes else 1
    keys = keys_of(b"".join(event.hashes), digest_bytes)
    if event.kind is EventKind.REMOVED:
        return [{"type": "BlockRemoved", "block_hashes": keys, "medium": _MEDIA[event.tier], "group_idx": event.group}]
    form = groups[event.group]
    parent = keys_of(event.parent, len(event.parent))[0] if event.parent else None
    return [
        {
            "type": "BlockStored",
            "block_hashes": keys,
            "parent_block_hash": parent,
            "token_ids": list(tokens),
            "block_size": 0 if event.tier else event.block_size,
            "lora_id": None,
            "medium": _MEDIA[event.tier],
            "lora_name": None,
            "group_idx": event.group,
            "kv_cache_spec_kind": form.kind,
            "kv_cache_spec_sliding_window": form.window or None,
        }
    ]
