"""Conversion between the messages of kvplane.v1.Worker and the worker's own types, for workers and engines."""

from __future__ import annotations

from collections.abc import Sequence

from kvplane import wire
from kvplane.base.errors import InvalidArgument
from kvplane.base.rank_plan import RankPlan
from kvplane.v1 import worker_pb2 as pb
from kvplane.wire.columns import U32, pack, unpack
from kvplane.wire.same import encode_same
from kvplane_worker.lending.holdings import Handles, Holdings
from kvplane_worker.memory import MemoryHandle, MemoryKind


def encode_handle(handle: MemoryHandle) -> pb.MemoryHandle:
    """Return the message of a memory handle."""
    message = encode_same(handle, pb.MemoryHandle, "handle")
    if handle.kind is MemoryKind.SHARED:
        message.shared_path = handle.path
    else:
        message.cuda_ipc = handle.ipc
    return message


def decode_handle(message: pb.MemoryHandle) -> MemoryHandle:
    """Return the memory handle of a message. Raises InvalidArgument if the message has neither a path nor an IPC
    handle.
    """
    kinds = {"shared_path": MemoryKind.SHARED, "cuda_ipc": MemoryKind.CUDA_IPC}
    kind = kinds.get(message.WhichOneof("kind") or "")
    if kind is None:
        raise InvalidArgument(
            "the memory handle has neither shared_path nor cuda_ipc",
            field="kind",
            remedy="use the same version of engine and worker",
        )
    return MemoryHandle(
        kind,
        message.size_bytes,
        message.device,
        path=message.shared_path,
        ipc=message.cuda_ipc,
        offset_bytes=message.offset_bytes,
        device_uuid=message.device_uuid,
    )


def encode_attached(holdings: Holdings, stamps_only: bool) -> pb.AttachResponse:
    """Return the message with which an engine maps a worker's memory; with `stamps_only` only the stamp table."""
    handles = holdings.handles
    message = pb.AttachResponse(
        stamps=encode_handle(handles.stamps),
        plan=wire.encode_plan(holdings.buffers.plan),
        incarnation=holdings.stamps.incarnation,
    )
    if not stamps_only:
        message.pages.CopyFrom(encode_handle(handles.pages))
        message.staging.CopyFrom(encode_handle(handles.staging))
        if handles.jobs is not None:
            message.jobs.CopyFrom(encode_handle(handles.jobs))
    return message


def decode_attached(message: pb.AttachResponse) -> tuple[RankPlan, Handles]:
    """Return the memory layout and the handles in an `Attach` response."""
    shared = [message.pages, message.stamps, message.staging, *([message.jobs] if message.HasField("jobs") else [])]
    handles = Handles(*map(decode_handle, shared))
    return wire.decode_plan(message.plan), handles


def encode_claimed(holdings: Holdings, busy: Sequence[int]) -> pb.ClaimResponse:
    """Return the answer to a claim, with which a new epoch becomes the pages' owner: the stamp table, and the blocks
    that the running transfer writes.
    """
    stamps = holdings.stamps
    return pb.ClaimResponse(
        incarnation=stamps.incarnation,
        stamps=stamps.stamp_bytes(),
        busy=encode_blocks(busy),
    )


def encode_blocks(blocks: Sequence[int]) -> bytes:
    """Return block ids as bytes, u32 little-endian each."""
    return pack(blocks, U32, "busy", "blocks")


def decode_blocks(packed: bytes) -> tuple[int, ...]:
    """Return the block ids in bytes, u32 little-endian each."""
    return tuple(unpack(packed, U32, "busy", "blocks"))
