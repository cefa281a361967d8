"""The messages between an engine that decides in its own process and the service that applies the same steps."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvplane.base.session import CacheRequest, Progress
from kvplane.base.step import (
    KEY_COLUMNS,
    LOAD_COLUMNS,
    MOVE_COLUMNS,
    SAVE_COLUMNS,
    Blocks,
    CacheEvent,
    EventKind,
    PartResult,
    Step,
    StepResult,
)
from kvplane.v1 import allocation_pb2 as pb
from kvplane.wire.step import decode_part, decode_step, encode_part, encode_step
from kvplane.wire.tables import BLOCKS, ORDERS, PART_RESULT

if TYPE_CHECKING:
    from hashlib import blake2b

DIGEST_BYTES = 16
_COLUMNS = (
    "granted", "preempted", "admit_status", "admit_hit", "admit_granted", "admit_single_group_hit",
    "admit_load_after", "peek_hit", "peek_single_group_hit", "num_hashes",
)  # fmt: skip
_ORDERS = ("stamp_block", "stamp", "copy_src", "copy_dst", "copy_group", "zero_block", "zero_group")
# Say why a row was refused, or which keys jobs copy. They decide nothing; engines of version 0.1.0 do not report them.
_NOT_COMPARED = ("admit_needed", "run_needed", *KEY_COLUMNS)
_OF_JOBS = [name for name in (*LOAD_COLUMNS, *SAVE_COLUMNS, *MOVE_COLUMNS) if name not in _NOT_COMPARED]
# What few parts have: other columns of the part, and sections with all their columns. Left out where they are empty.
_RARE_COLUMNS = [column.name for column in PART_RESULT.columns.each if column.name not in (*_COLUMNS, *_NOT_COMPARED)]
_RARE_SECTIONS = {
    name: [column.name for column in of.columns.each]
    for name, of in PART_RESULT.inner.items()
    if of not in (BLOCKS, ORDERS)
}


@dataclass(frozen=True, slots=True)
class Mirrored:
    """A step that an engine has applied, the digest of its answer, and the number of the CacheRequest that it carries
    out.
    """

    step: Step
    digest: bytes
    cache_request: int = 0


def answer_digest(result: StepResult) -> bytes:
    """Return a digest of everything that is compared in an answer: ids, amounts, orders with stamps, jobs, and events
    with their keys, of the device and of tiers.

    Does not depend on how the answer is stored: lists and arrays, or joined and single removals, give equal digests.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digest.update(array("Q", [result.seq, result.part, len(result.parts), result.published_through]).tobytes())
    for part in result.parts:
        _add_part(digest, part)
    return digest.digest()


def _add_part(digest: blake2b, part: PartResult) -> None:
    columns = [getattr(part, name) for name in _COLUMNS]
    for blocks in (part.new_blocks, part.tables, part.peek_blocks):
        columns += _columns_of(blocks)
    columns += [getattr(part.orders, name) for name in _ORDERS]
    columns += [[part.reset_done, part.free_blocks]]
    for at, rare in enumerate(_rare_columns(part)):
        if any(rare):
            columns += [[at], *rare]
    digest.update(array("Q", [len(column) for column in columns]).tobytes())
    for column in columns:
        if column:
            digest.update(array("Q", column).tobytes())
    digest.update(b"".join([*part.last_hash, *_packed_events(part.events)]))
    if part.tier_events:
        digest.update(b"".join([b"tiers", *_packed_events(part.tier_events)]))


def _rare_columns(part: PartResult) -> Iterator[list[Sequence[int]]]:
    """Yield the columns of each kind that few parts have."""
    given = vars(part)  # a section that is missing is empty, and is not made
    yield [getattr(part.orders, name) for name in _OF_JOBS]
    yield [given.get(name, ()) for name in _RARE_COLUMNS]
    for section, names in _RARE_SECTIONS.items():
        yield [getattr(given[section], name) for name in names] if section in given else []


def _columns_of(blocks: Blocks) -> list[Sequence[int]]:
    return [blocks.row, blocks.group, blocks.count, blocks.ids]


def _packed_events(events: Sequence[CacheEvent]) -> Iterator[bytes]:
    for event in getattr(events, "runs", events):
        head = f"{event.kind.name} {event.group} {event.reason.name} {event.domain} ".encode()
        head += event.tier.name.encode() if event.tier else b""
        if event.kind is EventKind.REMOVED:
            for block, key in zip(event.blocks, event.hashes, strict=True):
                yield b"%b%d %b" % (head, block, key)
            continue
        amounts = [event.block_size, event.slot, event.start, event.end, len(event.hashes), *event.blocks]
        yield head + array("Q", [*amounts, *event.block_starts]).tobytes() + event.parent
        yield from event.hashes


def mirrored_message(steps: Iterable[Mirrored], newest: int, age_ms: int) -> pb.SessionRequest:
    """Return the message with the steps of one iteration of the engine."""
    packed = [
        pb.MirroredStep(step=encode_step(one.step), digest=one.digest, cache_request=one.cache_request) for one in steps
    ]
    return pb.SessionRequest(mirrored_steps=pb.MirroredSteps(steps=packed, newest=newest, age_ms=age_ms))


def decode_mirrored(message: pb.MirroredSteps, digest_size: int) -> list[Mirrored]:
    """Return the steps of a message. Raises InvalidArgument for a step that is malformed."""
    return [Mirrored(decode_step(one.step, digest_size), one.digest, one.cache_request) for one in message.steps]


def slice_message(data: bytes, first: bool, last: bool) -> pb.SessionRequest:
    """Return the message with a piece of an image."""
    return pb.SessionRequest(image=pb.ImageSlice(data=data, first=first, last=last))


def progress_message(progress: Progress) -> pb.SessionResponse:
    """Return the message with the progress of the service."""
    return pb.SessionResponse(
        progress=pb.MirrorProgress(
            applied_through=progress.applied_through,
            image_wanted=progress.image_wanted,
            reason=progress.reason,
            message=progress.message,
        )
    )


def decode_progress(message: pb.MirrorProgress) -> Progress:
    """Return the progress of the service in a message."""
    return Progress(message.applied_through, message.image_wanted, message.reason, message.message)


def cache_request_message(request: CacheRequest) -> pb.SessionResponse:
    """Return the message with a change that the engine carries out."""
    rows = None if request.rows is None else encode_part(request.rows, "rows")
    asked = pb.CacheRequest(number=request.number, block_ids=request.blocks, reset=request.reset, rows=rows)
    return pb.SessionResponse(cache_request=asked)


def decode_cache_request(message: pb.CacheRequest, digest_size: int) -> CacheRequest:
    """Return the change that a message asks for, whose hashes have `digest_size` bytes. Raises InvalidArgument for rows
    that are malformed.
    """
    rows = decode_part(message.rows, digest_size, "rows") if message.HasField("rows") else None
    return CacheRequest(message.number, tuple(message.block_ids), message.reset, rows)
