"""Stored records: any change of the bytes is refused by name, and a refused record is not used."""

from __future__ import annotations

import json
import struct
from dataclasses import fields, replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvplane_core.face.entries import Entries, KeyRun
from kvplane_service.registry import Registration
from kvplane_service.store.errors import RecordRefused, Refusal
from kvplane_service.store.interface import LogName, StoredChunk
from kvplane_service.store.memory import MemoryStore
from kvplane_service.store.record import CHUNK, HEADER_BYTES, REGISTRATION, pack_chunk, seal, unpack_chunk, unseal
from kvplane_service.store.registration import ReplicaRecord, pack_record, unpack_record
from tests.core.builders import full, replica_spec
from tests.store.contract import load_log

LOG = LogName("r", b"n" * 16, 7)
ENTRIES = Entries(
    digest_size=4,
    runs=[KeyRun("", 0, 2), KeyRun("tenant é", 3, 1)],
    block=[1, 2, 2**32 - 1],
    stamp=[5, 2**64 - 1, 6],
    num_tokens=[16, 32, 0],
    age=[1, 1, 2],
    digests=b"aaaabbbbcccc",
    unkeyed_block=[9],
    unkeyed_stamp=[77],
    used_block=[1, 2],
    used_age=[3, 3],
)
PACKED = pack_chunk(LOG, 12, ENTRIES)


def why(raw: bytes, seq: int = 12, log: LogName = LOG) -> Refusal:
    with pytest.raises(RecordRefused) as refused:
        unpack_chunk(log, StoredChunk(seq, raw))
    assert refused.value.why.value in str(refused.value)
    return refused.value.why


def sealed(body: bytes, version: int = 1, kind: int = CHUNK) -> bytes:
    head = struct.pack("<4sHHII", b"kvps", version, kind, len(body), 0)
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + body)) + body


def in_lists(entries: Entries) -> Entries:
    """The entries with columns as plain lists, for comparison."""
    columns = {field.name: list(getattr(entries, field.name)) for field in fields(entries)[2:]}
    digests = bytes(entries.digests)
    return Entries(entries.digest_size, entries.runs, **{**columns, "digests": digests})  # type: ignore[arg-type]


def test_a_chunk_is_decoded_as_it_was_encoded():
    assert in_lists(unpack_chunk(LOG, PACKED)) == ENTRIES
    empty = Entries(32)
    assert in_lists(unpack_chunk(LOG, pack_chunk(LOG, 1, empty))) == empty


def test_the_format_is_the_documented_one():
    body = PACKED.raw[HEADER_BYTES:]
    assert PACKED.raw == sealed(body)
    assert body.startswith(b"n" * 16 + struct.pack("<QQHHIIII", 7, 12, 4, 2, 2, 3, 1, 2))
    assert body.endswith(b"aaaabbbbcccc")


def test_a_shortened_chunk_is_truncated():
    for length in range(len(PACKED.raw)):
        assert why(PACKED.raw[:length]) is Refusal.TRUNCATED


def test_any_flipped_bit_is_detected():
    for at in range(len(PACKED.raw)):
        for bit in (1, 128):
            raw = bytearray(PACKED.raw)
            raw[at] ^= bit
            found = why(bytes(raw))
            if at >= 16:
                assert found is Refusal.DAMAGED
            else:
                assert found in (Refusal.FOREIGN, Refusal.OTHER_VERSION, Refusal.DAMAGED, Refusal.TRUNCATED)


def test_trailing_bytes_are_damage():
    assert why(PACKED.raw + b"x") is Refusal.DAMAGED


def test_other_version_namespace_incarnation_and_number_are_distinct_refusals():
    body = PACKED.raw[HEADER_BYTES:]
    assert why(sealed(body, version=2)) is Refusal.OTHER_VERSION
    assert why(sealed(body, kind=REGISTRATION)) is Refusal.OTHER_KIND
    assert why(b"GIF89a" + PACKED.raw) is Refusal.FOREIGN
    assert why(PACKED.raw, log=replace(LOG, namespace=b"m" * 16)) is Refusal.OTHER_NAMESPACE
    assert why(PACKED.raw, log=replace(LOG, incarnation=8)) is Refusal.OTHER_INCARNATION
    assert why(PACKED.raw, seq=13) is Refusal.MISPLACED


@given(st.binary(max_size=200))
def test_any_body_is_refused_or_decoded(body):
    head = PACKED.raw[HEADER_BYTES:][:32]
    for candidate in (body, head + body):
        try:
            entries = unpack_chunk(LOG, StoredChunk(12, sealed(candidate)))
        except RecordRefused:
            continue
        assert len(entries.block) == len(entries.stamp) == len(entries.digests) // max(1, entries.digest_size)


def test_a_record_of_another_kind_is_refused():
    raw = seal(REGISTRATION, b"body")
    assert bytes(unseal(REGISTRATION, raw)) == b"body"
    with pytest.raises(RecordRefused, match="other kind"):
        unseal(CHUNK, raw)


def test_a_log_is_used_without_its_refused_chunks():
    store = MemoryStore()
    good = [pack_chunk(LOG, seq, replace(ENTRIES, age=[seq] * 3)) for seq in range(1, 8)]
    flipped = bytearray(good[1].raw)
    flipped[60] ^= 4
    store.logs[LOG] = {one.seq: one.raw for one in good} | {
        2: bytes(flipped),
        3: good[2].raw[:50],
        4: good[4].raw,
        5: good[3].raw,
        6: pack_chunk(replace(LOG, namespace=b"x" * 16), 6, ENTRIES).raw,
    }
    loaded = load_log(store, LOG)
    assert loaded.refused == {
        Refusal.DAMAGED: 1,
        Refusal.TRUNCATED: 1,
        Refusal.MISPLACED: 2,
        Refusal.OTHER_NAMESPACE: 1,
    }
    assert [entries.age[0] for entries in loaded.entries()] == [7, 1]
    assert loaded.rows == 6


def test_a_record_of_an_earlier_version_names_no_disks():
    record = ReplicaRecord("r", Registration(replica_spec(full(16))), 3, 77, "host:7070", 10**12, disk_incarnation=9)
    raw = pack_record(record)
    assert unpack_record(raw) == record
    content = json.loads(bytes(unseal(REGISTRATION, raw)))
    del content["disk_incarnation"]
    earlier = unpack_record(seal(REGISTRATION, json.dumps(content).encode()))
    assert earlier == replace(record, disk_incarnation=0)
