from __future__ import annotations

import pytest

from kvplane.base.errors import FailedPrecondition, InvalidArgument, StaleEpoch
from kvplane.base.stamp_table import StampTable, table_bytes
from kvplane.base.stamps import Stamp


def table(num_blocks: int = 8) -> StampTable:
    return StampTable.create(bytearray(table_bytes(num_blocks)), num_blocks, incarnation=7)


def test_a_table_is_read_by_others_as_it_was_written():
    buffer = bytearray(table_bytes(8))
    mine = StampTable.create(buffer, 8, incarnation=2**64 - 1)
    theirs = StampTable(buffer)
    mine.claim(3)
    mine.write([1, 5], [11, Stamp(2, 3, 9).pack()])
    assert (theirs.incarnation, theirs.owner_epoch, theirs.num_blocks) == (2**64 - 1, 3, 8)
    assert theirs.read_all() == (0, 11, 0, 0, 0, Stamp(2, 3, 9).pack(), 0, 0)
    assert theirs.read(5) == Stamp(2, 3, 9).pack()
    assert theirs.snapshot() == bytes(buffer)


def test_the_owner_never_goes_back():
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


def test_a_new_owner_starts_with_no_progress_and_the_same_one_keeps_it():
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


def test_only_steps_carried_out_can_have_been_executed():
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
def test_what_is_no_table_is_refused(buffer):
    with pytest.raises(InvalidArgument, match=r"^buffer"):
        StampTable(bytearray(buffer))


def test_a_table_cut_short_is_refused():
    buffer = bytearray(table_bytes(8))
    StampTable.create(buffer, 8, incarnation=7)
    with pytest.raises(InvalidArgument, match=str(table_bytes(8))):
        StampTable(buffer[:-8])


def test_a_table_is_not_created_where_it_does_not_fit():
    buffer = bytearray(table_bytes(8) - 1)
    with pytest.raises(InvalidArgument, match=r"^num_blocks"):
        StampTable.create(buffer, 8, incarnation=7)
    with pytest.raises(InvalidArgument, match=r"^incarnation"):
        StampTable.create(bytearray(table_bytes(8)), 8, incarnation=0)
    assert bytes(buffer) == bytes(len(buffer))


def test_a_released_table_lets_its_buffer_go():
    buffer = bytearray(table_bytes(8))
    stamps = StampTable.create(buffer, 8, incarnation=7)
    with pytest.raises(BufferError):
        buffer.extend(b"x")
    stamps.release()
    buffer.extend(b"x")
