from __future__ import annotations

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.key_records import RECORD_BYTES, KeyRecord, KeyRecords, records_bytes

BLOCKS = 8
RECORD = KeyRecord(3, 77, bytes(range(32)), 2, 640, 9)


def test_a_record_keeps_the_values_of_its_layout():
    buffer = bytearray(records_bytes(BLOCKS))
    KeyRecords.create(buffer, BLOCKS, 32).write(RECORD)
    row = KeyRecords(buffer).records()[3 * RECORD_BYTES : 4 * RECORD_BYTES]
    numbers = [int.from_bytes(row[at : at + 4], "little") for at in (40, 44, 48)]
    assert (int.from_bytes(row[:8], "little"), bytes(row[8:40]), numbers) == (77, RECORD.digest, [640, 2, 9])


def test_an_interrupted_write_leaves_no_stamp():
    """The earlier record had a stamp, which may prove the block still, with a digest that is half overwritten."""
    buffer = bytearray(records_bytes(BLOCKS))
    records = KeyRecords.create(buffer, BLOCKS, 32)
    later = KeyRecord(3, 78, b"x" * 32, 0, 64)
    for count in (1, 2):
        records.write(RECORD)
        for at, part in later.writes()[:count]:
            buffer[at : at + len(part)] = part
        assert bytes(records.records()[3 * RECORD_BYTES : 3 * RECORD_BYTES + 8]) == bytes(8)


def test_wrong_buffers_and_digests_are_refused():
    with pytest.raises(InvalidArgument, match="1 to 32 bytes"):
        KeyRecords.create(bytearray(records_bytes(BLOCKS)), BLOCKS, 64)
    for buffer in (bytearray(8), bytearray(records_bytes(BLOCKS))):
        with pytest.raises(InvalidArgument, match="no key records"):
            KeyRecords(buffer)
    with pytest.raises(InvalidArgument, match="no key records"):
        KeyRecords.create(bytearray(records_bytes(BLOCKS) - 1), BLOCKS, 32)
