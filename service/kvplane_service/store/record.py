"""The format of stored records (a chunk or a registration), little-endian.

    byte 0      4         6      8        12           16         24
         | magic | version | kind | length | (reserved) | checksum | body ...

`length` is the length of the body. The checksum (XXH3, 64 bits) covers the header before it and the body. Body of a
chunk:

    namespace 16 | incarnation 8 | seq 8 | digest size 2 | domains 2 | runs 4 | rows 4 | unkeyed 4 | used 4
    domains: length 4, UTF-8 each
    runs:    domain 2, group 2, rows 4 each
    columns: block 4·rows, num_tokens 4·rows, age 4·rows, stamp 8·rows
             unkeyed block 4·unkeyed, unkeyed stamp 8·unkeyed, used block 4·used, used age 4·used
    digests: digest size·rows

Rows are blocks with a key. Unkeyed blocks have lost their key. Of used blocks only the age has changed: the time of
last use, counted in chunks. A stamp is the version number of the content of a block's page.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, TypeAlias

import xxhash

from kvplane_core.face.entries import Entries, KeyRun
from kvplane_service.store.errors import RecordRefused, Refusal
from kvplane_service.store.interface import LogName, StoredChunk

MAGIC, SEAL_MAGIC = b"kvps", b"kvpm"
VERSION = 1
CHUNK, REGISTRATION, LEASE, OWNERS = 1, 2, 3, 4
NOT_PROVEN = b"not proven"  # stands for a record that no key of the service proves (see `seals`)
HEADER_BYTES = 24
ROW_BYTES = 20  # of a chunk, without the digest

Code: TypeAlias = Literal["I", "Q"]

_HEADER = struct.Struct("<4sHHIIQ")
_CHECKED = 16  # bytes of the header that the checksum covers
_CHUNK = struct.Struct("<16sQQHHIIII")
_RUN = struct.Struct("<HHI")
_SIZES: dict[Code, int] = {"I": 4, "Q": 8}
_MAX_DOMAINS = 0xFFFF


def seal(kind: int, body: bytes) -> bytes:
    """Return a stored record with this kind and body: header, checksum, body."""
    head = _HEADER.pack(MAGIC, VERSION, kind, len(body), 0, 0)[:_CHECKED]
    return head + struct.pack("<Q", _checksum(head, body)) + body


def unseal(kind: int, raw: bytes) -> memoryview:
    """Check the header and the checksum of a stored record of this kind, and return its body. Raises RecordRefused."""
    if raw == NOT_PROVEN:
        what = "no key of store_key_file proves the record: it has no seal, or one of another key or of another place"
        raise RecordRefused(Refusal.NOT_PROVEN, what)
    if raw[:4] == SEAL_MAGIC:
        what = "the record is sealed, and this service has no key: set store_key_file"
        raise RecordRefused(Refusal.SEALED, what)
    if len(raw) < HEADER_BYTES:
        raise RecordRefused(Refusal.TRUNCATED, f"the record has {len(raw)} bytes, its header {HEADER_BYTES}")
    magic, version, found, length, _, checksum = _HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise RecordRefused(Refusal.FOREIGN, f"the record begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        what = f"the record has version {version}, this service reads version {VERSION}"
        raise RecordRefused(Refusal.OTHER_VERSION, what)
    body = memoryview(raw)[HEADER_BYTES:]
    if len(body) < length:
        raise RecordRefused(Refusal.TRUNCATED, f"the record has {len(body)} of the {length} bytes of its body")
    if len(body) > length or _checksum(raw[:_CHECKED], body) != checksum:
        raise RecordRefused(Refusal.DAMAGED, "the checksum of the record does not match its content")
    if found != kind:
        raise RecordRefused(Refusal.OTHER_KIND, f"the record is of kind {found}, not {kind}")
    return body


def _checksum(head: bytes, body: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64(head)
    digest.update(body)
    return digest.intdigest()


def pack_chunk(log: LogName, seq: int, entries: Entries) -> StoredChunk:
    """Serialize the entries as chunk `seq` of the log."""
    domains = sorted({run.domain for run in entries.runs})
    assert len(domains) <= _MAX_DOMAINS, "a chunk has fewer rows than that"
    number = {domain: index for index, domain in enumerate(domains)}
    counts = (len(domains), len(entries.runs), len(entries), len(entries.unkeyed_block), len(entries.used_block))
    parts: list[bytes | memoryview] = [_CHUNK.pack(log.namespace, log.incarnation, seq, entries.digest_size, *counts)]
    for domain in domains:
        text = domain.encode()
        parts.append(struct.pack("<I", len(text)) + text)
    parts += [_RUN.pack(number[run.domain], run.group, run.count) for run in entries.runs]
    parts += [_pack(values, code) for values, code in _columns(entries)]
    parts.append(entries.digests)
    return StoredChunk(seq, seal(CHUNK, b"".join(parts)))


def unpack_chunk(log: LogName, chunk: StoredChunk) -> Entries:
    """Parse a chunk of this log and return the chunk's entries. Raises RecordRefused."""
    body = unseal(CHUNK, chunk.raw)
    if len(body) < _CHUNK.size:
        raise RecordRefused(Refusal.IMPOSSIBLE, f"the chunk has {len(body)} bytes, at least {_CHUNK.size} are needed")
    namespace, incarnation, seq, *_ = head = _CHUNK.unpack_from(body)
    if namespace != log.namespace:
        what = f"the chunk is of namespace {namespace.hex()}, the log of {log.namespace.hex()}"
        raise RecordRefused(Refusal.OTHER_NAMESPACE, what)
    if incarnation != log.incarnation:
        what = f"the chunk is of incarnation {incarnation:016x}, the log of {log.incarnation:016x}"
        raise RecordRefused(Refusal.OTHER_INCARNATION, what)
    if seq != chunk.seq:
        raise RecordRefused(Refusal.MISPLACED, f"chunk {seq} is stored under number {chunk.seq}")
    try:
        return _unpack_body(body, *head[3:])
    except Exception as error:  # whatever a forged body raises ends here
        raise RecordRefused(Refusal.IMPOSSIBLE, f"{type(error).__name__}: {error}") from error


def _unpack_body(
    body: memoryview, digest_size: int, num_domains: int, num_runs: int, rows: int, *other: int
) -> Entries:
    at, domains = _CHUNK.size, []
    for _ in range(num_domains):
        (length,) = struct.unpack_from("<I", body, at)
        domains.append(bytes(body[at + 4 : at + 4 + length]).decode())
        at += 4 + length
    runs = []
    for _ in range(num_runs):
        domain, group, count = _RUN.unpack_from(body, at)
        runs.append(KeyRun(domains[domain], group, count))
        at += _RUN.size
    unkeyed, used = other
    codes: tuple[Code, ...] = ("I", "I", "I", "Q", "I", "Q", "I", "I")
    lengths = tuple(zip((rows, rows, rows, rows, unkeyed, unkeyed, used, used), codes, strict=True))
    ends = [at]
    for count, code in lengths:
        ends.append(ends[-1] + count * _SIZES[code])
    if ends[-1] + rows * digest_size != len(body) or sum(run.count for run in runs) != rows:
        raise ValueError(f"the chunk's {len(body)} bytes do not match its {rows} rows")
    spans = zip(pairwise(ends), lengths, strict=True)
    block, num_tokens, age, stamp, *rest = [_unpack(body[start:end], code) for (start, end), (_, code) in spans]
    return Entries(digest_size, runs, block, stamp, num_tokens, age, body[ends[-1] :], *rest)


def _columns(entries: Entries) -> tuple[tuple[Sequence[int], Code], ...]:
    return (
        (entries.block, "I"),
        (entries.num_tokens, "I"),
        (entries.age, "I"),
        (entries.stamp, "Q"),
        (entries.unkeyed_block, "I"),
        (entries.unkeyed_stamp, "Q"),
        (entries.used_block, "I"),
        (entries.used_age, "I"),
    )


def _pack(values: Sequence[int], code: Code) -> bytes:
    column = array(code, values)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _unpack(raw: memoryview, code: Code) -> Sequence[int]:
    """Return a column as a view of the bytes, so that a million rows are not copied before they are used."""
    if sys.byteorder == "little":
        return raw.cast(code)
    column = array(code, raw)
    column.byteswap()
    return column
