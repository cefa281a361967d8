from __future__ import annotations

import pytest

from kvplane.base.errors import FailedPrecondition, InvalidArgument, StaleEpoch
from kvplane.base.stamp_table import StampTable, table_bytes
from kvplane.base.stamps import Stamp


def table(num_blocks: int = 8) -> StampTable:
    return StampTable.create(bytearray(table_bytes(num_blocks)), num_blocks, incarnation=7)


def test_another_reader_sees_the_written_table():
    buffer = bytearray(table_bytes(8))
    mine = StampTable.create(buffer, 8, incarnation=2**64 - 1)
    theirs = StampTable(buffer)
    mine.claim(3)
    mine.write([1, 5], [11, Stamp(2, 3, 9).pack()])
    assert (theirs.incarnation, theirs.owner_epoch, theirs.num_blocks) == (2**64 - 1, 3, 8)
    assert theirs.read_all() == (0, 11, 0, 0, 0, Stamp(2, 3, 9).pack(), 0, 0)
    assert theirs.read(5) == Stamp(2, 3, 9).pack()
    assert theirs.snapshot() == bytes(buffer)


def test_the_owner_epoch_does_not_decrease():
    stamps = table()
    stamps.claim(5)
    stamps.claim(5)
    before = stamps.snapshot()
    with pytest.raises(StaleEpoch) as caught:
        stamps.claim(4)
    assert caught.value.metadata == {"epoch": "5"}
    with pytest.raises(StaleEpoch):
        stamps.check_owner(4)
    with pytest.raises(InvalidArgument):
        stamps.claim(0)
    assert stamps.snapshot() == before


def test_a_new_owner_resets_the_progress_and_the_same_owner_keeps_it():
    stamps = table()
    stamps.claim(1)
    stamps.begin(1, 0)
    assert stamps.is_busy
    stamps.finish()
    stamps.set_executed(1)
    stamps.claim(1)
    assert (stamps.position, stamps.executed, stamps.is_busy) == ((1, 0), 1, False)
    stamps.claim(2)
    assert (stamps.position[0], stamps.executed) == (0, 0)


def test_executed_is_limited_to_steps_carried_out():
    stamps = table()
    stamps.claim(1)
    with pytest.raises(FailedPrecondition):
        stamps.set_executed(1)
    stamps.begin(3, 1)
    stamps.finish()
    assert stamps.position == (3, 1)
    stamps.set_executed(2)
    for seq in (1, 4):
        with pytest.raises(FailedPrecondition):
            stamps.set_executed(seq)


@pytest.mark.parametrize(
    "buffer",
    [b"", bytes(63), bytes(256), b"kvpstamp" + (2).to_bytes(4, "little") + bytes(52)],
    ids=["empty", "short", "zeroes", "other version"],
)
def test_a_buffer_without_a_table_is_refused(buffer):
    with pytest.raises(InvalidArgument, match=r"^buffer"):
        StampTable(bytearray(buffer))


def test_a_truncated_table_is_refused():
    buffer = bytearray(table_bytes(8))
    StampTable.create(buffer, 8, incarnation=7)
    with pytest.raises(InvalidArgument, match=str(table_bytes(8))):
        StampTable(buffer[:-8])


def test_create_refuses_a_buffer_that_is_too_small():
    buffer = bytearray(table_bytes(8) - 1)
    with pytest.raises(InvalidArgument, match=r"^num_blocks"):
        StampTable.create(buffer, 8, incarnation=7)
    with pytest.raises(InvalidArgument, match=r"^incarnation"):
        StampTable.create(bytearray(table_bytes(8)), 8, incarnation=0)
    assert bytes(buffer) == bytes(len(buffer))


def test_release_frees_the_buffer():
    buffer = bytearray(table_bytes(8))
    stamps = StampTable.create(buffer, 8, incarnation=7)
    with pytest.raises(BufferError):
        buffer.extend(b"x")
    stamps.release()
    buffer.extend(b"x")
