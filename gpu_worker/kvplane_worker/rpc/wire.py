"""Messages of kvplane.v1.Worker <-> the worker's own types."""

from __future__ import annotations

from collections.abc import Sequence

from kvplane import wire
from kvplane.base.errors import InvalidArgument
from kvplane.base.rank_plan import RankPlan
from kvplane.v1 import worker_pb2 as pb
from kvplane.wire.columns import U32, pack, unpack
from kvplane.wire.spec import decode_enum
from kvplane_worker.lending.holdings import Handles, Holdings
from kvplane_worker.memory import MemoryHandle, MemoryKind
from kvplane_worker.transfers import Outcome, Transfer, TransferKind


def encode_handle(handle: MemoryHandle) -> pb.MemoryHandle:
    """Encode a memory handle."""
    message = pb.MemoryHandle(
        offset_bytes=handle.offset_bytes,
        size_bytes=handle.size_bytes,
        device=handle.device,
        device_uuid=handle.device_uuid,
    )
    if handle.kind is MemoryKind.SHARED:
        message.shared_path = handle.path
    else:
        message.cuda_ipc = handle.ipc
    return message


def decode_handle(message: pb.MemoryHandle) -> MemoryHandle:
    """Decode a memory handle. Raises InvalidArgument when it has no name."""
    kinds = {"shared_path": MemoryKind.SHARED, "cuda_ipc": MemoryKind.CUDA_IPC}
    kind = kinds.get(message.WhichOneof("kind") or "")
    if kind is None:
        raise InvalidArgument(
            "the memory handle has no name", field="kind", remedy="use the same version on both sides"
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
    """Encode what an engine needs to map the holdings; with `stamps_only`, the stamp table alone."""
    handles = holdings.handles
    message = pb.AttachResponse(
        stamps=encode_handle(handles.stamps),
        plan=wire.encode_plan(holdings.buffers.plan),
        incarnation=holdings.stamps.incarnation,
    )
    if not stamps_only:
        message.pages.CopyFrom(encode_handle(handles.pages))
        message.staging.CopyFrom(encode_handle(handles.staging))
    return message


def decode_attached(message: pb.AttachResponse) -> tuple[RankPlan, Handles]:
    """Decode the plan and the handles of an `Attach` response."""
    handles = Handles(*(decode_handle(one) for one in (message.pages, message.stamps, message.staging)))
    return wire.decode_plan(message.plan), handles


def decode_transfer(message: pb.TransferRequest) -> Transfer:
    """Decode a transfer. Raises InvalidArgument when its kind is missing or unknown."""
    if not message.kind:
        raise InvalidArgument("the kind is missing", field="kind", remedy="send a value of TransferKind")
    kind = decode_enum(pb.TransferKind, "TRANSFER_KIND", message.kind, "kind", TransferKind.COPY)
    return Transfer(
        kind,
        message.group,
        tuple(message.blocks),
        tuple(message.dst_blocks),
        message.first_row,
        tuple(message.expected_stamps),
        message.seq,
        message.part,
        message.load_after,
    )


def encode_transferred(outcome: Outcome) -> pb.TransferResponse:
    """Encode the outcome of a transfer."""
    return pb.TransferResponse(stamps=outcome.stamps, discarded=outcome.discarded)


def encode_checksums(outcome: Outcome) -> pb.ChecksumResponse:
    """Encode checksums."""
    return pb.ChecksumResponse(checksums=outcome.checksums, stamps=outcome.stamps, discarded=outcome.discarded)


def encode_claimed(holdings: Holdings, busy: Sequence[int]) -> pb.ClaimResponse:
    """Encode the content of the stamp table, and the blocks that the running transfer writes."""
    stamps = holdings.stamps
    return pb.ClaimResponse(
        incarnation=stamps.incarnation,
        stamps=stamps.stamp_bytes(),
        busy=encode_blocks(busy),
    )


def encode_blocks(blocks: Sequence[int]) -> bytes:
    """Pack block ids, u32 little-endian each."""
    return pack(blocks, U32, "busy", "blocks")


def decode_blocks(packed: bytes) -> tuple[int, ...]:
    """Unpack block ids."""
    return tuple(unpack(packed, U32, "busy", "blocks"))
