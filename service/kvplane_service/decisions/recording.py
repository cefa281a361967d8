"""Recordings: the messages that Admin.Record streams, stored in a file with frames and checksums.

    file    magic, then frames
    frame   u32 length, u32 CRC-32, RecordResponse (little-endian)

A truncated file is read up to its last complete frame.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from os import SEEK_CUR
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError

from kvplane import wire
from kvplane.base.errors import InvalidArgument, NotFound
from kvplane.base.groups import ReplicaSpec
from kvplane.base.step import KEY_COLUMNS, STEP_VERSION, CacheEvent, Part, RemoveReason, RowFlag, Step, StepResult
from kvplane.v1.admin_pb2 import RecordedDecision, RecordedLife, RecordHeader, RecordResponse
from kvplane_core.face.columns import words_of
from kvplane_service.decisions.log import Decision, Entry, hashed_step
from kvplane_service.decisions.sent import result_with, step_with

MAGIC = b"kvplane decisions 2\n"
_READS = (MAGIC, b"kvplane decisions 1\n")
_ALIGNED_BY_DEFAULT, _ALIGNED = 2, 1  # step version since which rows are aligned by default; the flag of older versions
_FRAME = struct.Struct("<II")
_MAX_FRAME_BYTES = 256 << 20


def is_recording(path: Path) -> bool:
    """Return True if the file begins as a recording does; False also for one that cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) in _READS
    except OSError:
        return False


def header_of(replica: str, spec: ReplicaSpec) -> RecordResponse:
    """Return the first message of a recording, which describes the replica and the format."""
    return RecordResponse(
        header=RecordHeader(
            replica=replica, version=version("kvplane"), spec=wire.encode_spec(spec), step_version=STEP_VERSION
        )
    )


def message_of(entry: Entry, digest_size: int) -> RecordResponse:
    """Return the message that records an entry of the decision log, without tokens, salts, adapter names and trace
    contexts.
    """
    if not isinstance(entry, Decision):
        stamps = words_of(entry.stamp_table).tobytes()
        life = RecordedLife(epoch=entry.epoch, stamp_table=stamps, memory_is_new=entry.memory_is_new)
        life.state = entry.state
        life.busy_blocks = array("I", entry.busy).tobytes()
        return RecordResponse(life=life)
    step = hashed_step(entry, digest_size)
    step = step_with(step, [_anonymous(part) for part in step.parts])
    digest = result_digest(entry.result, entry.events)
    return RecordResponse(
        decision=RecordedDecision(step=wire.encode_step(step), result_digest=digest, took_ns=entry.took_ns)
    )


def result_digest(result: StepResult, events: tuple[Sequence[CacheEvent], ...]) -> bytes:
    """Return a SHA-256 digest of an answer and its cache events, by which a replay is compared. Moves of keys between
    blocks, changes of tiers, `admit_needed`, `run_needed` and the keys of jobs are left out, because older versions did
    not report them.
    """
    keys: dict[str, list[int]] = {name: [] for name in KEY_COLUMNS}
    parts = [
        replace(
            part,
            events=_without_moves(of_part),
            tier_events=(),
            admit_needed=[],
            run_needed=[],
            orders=replace(part.orders, **keys),
        )
        for part, of_part in zip(result.parts, events, strict=True)
    ]
    return hashlib.sha256(wire.encode_result(result_with(result, parts)).SerializeToString()).digest()


def _without_moves(events: Sequence[CacheEvent]) -> list[CacheEvent]:
    kept, moved = list[CacheEvent](), False
    for event in events:
        if not moved and event.reason is not RemoveReason.MOVED:
            kept.append(event)
        moved = event.reason is RemoveReason.MOVED  # the next event stores the key in the copy of the block
    return kept


def write_frame(file: BinaryIO, message: RecordResponse) -> None:
    """Append a message to the file as one frame."""
    raw = message.SerializeToString()
    file.write(_FRAME.pack(len(raw), zlib.crc32(raw)) + raw)


class Frames:
    """An iterable over the messages of a recording.

    Attributes:
        is_cut: True if the file ends inside a frame; set when the iteration ends.

    Raises:
        NotFound: the file cannot be read (raised when the iteration begins).
        InvalidArgument: the file is not a recording, has an unsupported version, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.is_cut = False
        self._path = path

    def __iter__(self) -> Iterator[RecordResponse]:
        path = self._path
        try:
            file = path.open("rb")
        except OSError as error:
            problem = f"{path} cannot be read: {error.strerror}"
            raise NotFound(problem, field="--log", remedy="name a file that `kvplane record` wrote") from None
        with file:
            _check_magic(path, file.read(len(MAGIC)))
            while head := file.read(_FRAME.size):
                frame = _read_frame(path, file, head)
                self.is_cut = frame is None
                if frame is None:
                    return
                yield frame


def _check_magic(path: Path, magic: bytes) -> None:
    if magic in _READS:
        return
    of_us = magic.startswith(MAGIC[: MAGIC.rindex(b" ")])
    found = magic.split()[-1].decode(errors="replace") if of_us else ""
    problem = f"is a recording of version {found}" if of_us else "is not a recording of kvplane"
    remedy = f"this kvplane reads versions up to {MAGIC.split()[-1].decode()}; use the kvplane that recorded it"
    remedy = remedy if of_us else "name a file that `kvplane record` wrote"
    raise InvalidArgument(f"{path} {problem}", field="--log", remedy=remedy)


def _read_frame(path: Path, file: BinaryIO, head: bytes) -> RecordResponse | None:
    """Return the message that follows a frame header, or None if the frame is truncated."""
    if len(head) < _FRAME.size:
        return None
    length, checksum = _FRAME.unpack(head)
    what = f"{path} is damaged at byte {file.seek(0, SEEK_CUR)}"
    damaged = InvalidArgument(what, field="--log", remedy="record again")
    if length > _MAX_FRAME_BYTES:
        raise damaged
    raw = file.read(length)
    if len(raw) < length:
        return None
    try:
        message = RecordResponse.FromString(raw) if zlib.crc32(raw) == checksum else None
    except DecodeError:
        message = None
    if message is None:
        raise damaged
    return message


def step_of(message: RecordedDecision, digest_size: int, version: int) -> Step:
    """Return the step of a recorded decision, converted from version `version` of the step format to the
    current one.
    """
    step = wire.decode_step(message.step, digest_size)
    if version < _ALIGNED_BY_DEFAULT:
        for part in step.parts:
            for rows in (part.run, part.admit):
                flags = rows.flags or [0] * len(rows.slot)
                rows.flags = [bits if bits & _ALIGNED else bits | RowFlag.UNALIGNED for bits in flags]
    return step


def _anonymous(part: Part) -> Part:
    """Return the part of a step without extra keys (salts, adapters) and without trace contexts."""
    if not (part.news.extra_keys or part.news.traceparent):
        return part
    return replace(part, news=replace(part.news, extra_keys=[], traceparent=[]))
