from __future__ import annotations

import pytest

from kvplane.base.errors import FailedPrecondition, InvalidArgument, SequenceError, StaleEpoch
from kvplane.base.stamp_table import StampTable, table_bytes
from kvplane.base.stamps import Stamp
from kvplane.base.step import Orders
from kvplane.rank import Rank, RankGroup

BLOCKS = 8
EPOCH = 3


class Tape:
    """A mover that records its calls, and the table's stamp of block 1 at that time."""

    num_groups = 2

    def __init__(self, table: StampTable) -> None:
        self.table = table
        self.calls: list[object] = []
        self.broken = False

    def zero(self, group, blocks):
        if self.broken:
            raise RuntimeError("the device is gone")
        self.calls.append(("zero", group, list(blocks), self.table.read(1)))

    def copy(self, group, src, dst):
        self.calls.append(("copy", group, list(src), list(dst)))

    def moves(self):
        return None


def table() -> StampTable:
    return StampTable.create(bytearray(table_bytes(BLOCKS)), BLOCKS, incarnation=7)


@pytest.fixture
def tape() -> Tape:
    return Tape(table())


@pytest.fixture
def rank(tape) -> Rank:
    rank = Rank(tape.table, tape)
    rank.claim(EPOCH)
    return rank


def stamped(*blocks: int) -> Orders:
    return Orders(stamp_block=list(blocks), stamp=[Stamp(0, EPOCH, 10 + b).pack() for b in blocks])


def test_orders_run_as_stamps_then_zeroes_then_copies(rank, tape):
    orders = stamped(1, 2)
    orders.zero_block, orders.zero_group = [1, 2, 2], [0, 0, 1]
    orders.copy_src, orders.copy_dst, orders.copy_group = [3, 1, 4], [1, 2, 5], [1, 1, 0]
    rank.carry_out(EPOCH, 1, 0, orders)
    new = Stamp(0, EPOCH, 11).pack()
    assert tape.calls == [
        ("zero", 0, [1, 2], new),
        ("zero", 1, [2], new),
        ("copy", 1, [3, 1], [1, 2]),
        ("copy", 0, [4], [5]),
    ]
    assert tape.table.read_all() == (0, new, Stamp(0, EPOCH, 12).pack(), 0, 0, 0, 0, 0)


def test_parts_run_exactly_once_and_in_order(rank, tape):
    for seq, part in ((1, 0), (1, 1), (2, 0), (3, 0), (3, 1), (3, 2)):
        rank.carry_out(EPOCH, seq, part, Orders())
    before = tape.table.snapshot()
    for seq, part in ((3, 2), (3, 1), (1, 0), (3, 4), (4, 1), (5, 0), (0, 1), (0, 0)):
        with pytest.raises(SequenceError, match=f"step {seq}, part {part}"):
            rank.carry_out(EPOCH, seq, part, stamped(1))
    assert tape.table.snapshot() == before
    rank.carry_out(EPOCH, 4, 0, Orders())


def test_an_epoch_begins_with_step_1(rank):
    for seq, part in ((0, 1), (1, 1), (2, 0)):
        with pytest.raises(SequenceError):
            rank.carry_out(EPOCH, seq, part, Orders())


def test_a_session_that_moves_keeps_its_step_numbers(rank, tape):
    rank.carry_out(EPOCH, 1, 0, Orders())
    rank.claim(EPOCH + 1, 57)
    assert rank.executed_through == 56
    for seq, part in ((1, 0), (2, 0), (56, 0), (56, 1), (57, 1), (58, 0)):
        with pytest.raises(SequenceError):
            rank.carry_out(EPOCH + 1, seq, part, Orders())
    rank.carry_out(EPOCH + 1, 57, 0, Orders())
    rank.carry_out(EPOCH + 1, 57, 1, Orders())
    rank.executed(57)
    with pytest.raises(InvalidArgument, match=r"^next_seq"):
        rank.claim(EPOCH + 2, 0)


def test_a_rank_group_has_one_incarnation():
    tables = [StampTable.create(bytearray(table_bytes(4)), 4, incarnation=number) for number in (7, 8, 9)]
    assert RankGroup(tables[:1]).incarnation == 7
    together = {RankGroup(some).incarnation for some in (tables[:2], tables[1:], tables[1::-1], tables)}
    assert len(together) == 4
    assert all(0 < number < 1 << 64 for number in together)


def test_another_rank_object_on_the_table_continues_and_repeats_nothing(rank, tape):
    rank.carry_out(EPOCH, 1, 0, Orders())
    other = Rank(tape.table, tape)
    with pytest.raises(SequenceError):
        other.carry_out(EPOCH, 1, 0, Orders())
    other.carry_out(EPOCH, 2, 0, Orders())


@pytest.mark.parametrize("epoch", [0, EPOCH - 1, EPOCH + 1])
def test_orders_of_another_epoch_than_the_owner_are_refused(rank, tape, epoch):
    before = tape.table.snapshot()
    with pytest.raises(StaleEpoch) as caught:
        rank.carry_out(epoch, 1, 0, stamped(1))
    assert caught.value.metadata == {"epoch": str(EPOCH)}
    assert tape.table.snapshot() == before


def test_an_unclaimed_table_refuses_orders():
    stamps = table()
    with pytest.raises(StaleEpoch):
        Rank(stamps, Tape(stamps)).carry_out(0, 1, 0, Orders())


def test_interrupted_orders_are_not_repeated(rank, tape):
    tape.broken = True
    with pytest.raises(RuntimeError):
        rank.carry_out(EPOCH, 1, 0, Orders(zero_block=[1], zero_group=[0]))
    tape.broken = False
    for seq, part in ((1, 0), (1, 1), (2, 0)):
        with pytest.raises(FailedPrecondition, match="were interrupted"):
            rank.carry_out(EPOCH, seq, part, Orders())
    rank.claim(EPOCH + 1)
    rank.carry_out(EPOCH + 1, 1, 0, Orders())


def test_invalidate_clears_stamps_and_ends_the_engine_life(rank, tape):
    rank.carry_out(EPOCH, 1, 0, stamped(1, 2, 3))
    rank.invalidate(EPOCH, [2])
    rank.invalidate(EPOCH, [2, 4])
    one, three = (Stamp(0, EPOCH, 10 + block).pack() for block in (1, 3))
    assert tape.table.read_all() == (0, one, 0, three, 0, 0, 0, 0)
    for seq, part in ((1, 0), (1, 1), (2, 0)):
        with pytest.raises(FailedPrecondition, match="pages were invalidated"):
            rank.carry_out(EPOCH, seq, part, Orders())
    assert Rank(tape.table, tape).executed_through == 0
    rank.executed(1)
    rank.claim(EPOCH)
    with pytest.raises(FailedPrecondition):
        rank.carry_out(EPOCH, 2, 0, Orders())
    rank.claim(EPOCH + 1)
    rank.carry_out(EPOCH + 1, 1, 0, Orders())


def test_invalidate_before_the_first_step_ends_the_epoch(rank):
    rank.invalidate(EPOCH, [])
    rank.claim(EPOCH, 9)
    for seq in (1, 9):
        with pytest.raises(FailedPrecondition):
            rank.carry_out(EPOCH, seq, 0, Orders())


@pytest.mark.parametrize("blocks", [[0], [BLOCKS], [-1], [1, BLOCKS]])
def test_invalidate_refuses_pages_outside_the_pool(rank, tape, blocks):
    rank.carry_out(EPOCH, 1, 0, stamped(1))
    before = tape.table.snapshot()
    with pytest.raises(InvalidArgument, match=r"^blocks:"):
        rank.invalidate(EPOCH, blocks)
    with pytest.raises(StaleEpoch):
        rank.invalidate(EPOCH - 1, [1])
    assert tape.table.snapshot() == before
    rank.carry_out(EPOCH, 2, 0, Orders())


def test_one_rank_that_invalidates_clears_the_agreed_stamp():
    tables = [table(), table()]
    group = RankGroup(tables)
    group.claim(EPOCH)
    ranks = [Rank(stamps, Tape(stamps)) for stamps in tables]
    for each in ranks:
        each.carry_out(EPOCH, 1, 0, stamped(1, 2))
    ranks[1].invalidate(EPOCH, [1])
    assert group.agreed_stamps()[:3] == (0, 0, Stamp(0, EPOCH, 12).pack())


@pytest.mark.parametrize(
    ("orders", "field"),
    [
        (Orders(stamp_block=[-1], stamp=[1]), "stamp_block"),
        (Orders(stamp_block=[BLOCKS], stamp=[1]), "stamp_block"),
        (Orders(stamp_block=[1], stamp=[0]), "stamp"),
        (Orders(stamp_block=[1], stamp=[1 << 64]), "stamp"),
        (Orders(stamp_block=[1, 2], stamp=[1]), "stamp_block"),
        (Orders(zero_block=[BLOCKS], zero_group=[0]), "zero_block"),
        (Orders(zero_block=[1], zero_group=[2]), "zero_group"),
        (Orders(zero_block=[1]), "zero_block"),
        (Orders(copy_src=[0], copy_dst=[1], copy_group=[0]), "copy_src"),
        (Orders(copy_src=[1], copy_dst=[-1], copy_group=[0]), "copy_dst"),
        (Orders(copy_src=[1], copy_dst=[2], copy_group=[-1]), "copy_group"),
        (Orders(copy_src=[1], copy_dst=[2]), "copy_src"),
    ],
)
def test_orders_outside_the_pool_write_nothing(rank, tape, orders, field):
    before = tape.table.snapshot()
    orders.stamp_block = [1, *orders.stamp_block]
    orders.stamp = [5, *orders.stamp]
    with pytest.raises(InvalidArgument, match=rf"^orders\.{field}:"):
        rank.carry_out(EPOCH, 1, 0, orders)
    assert (tape.table.snapshot(), tape.calls) == (before, [])


def test_executed_through_is_that_of_the_slowest_rank():
    tables = [table(), table()]
    group = RankGroup(tables)
    ranks = [Rank(stamps, Tape(stamps)) for stamps in tables]
    group.claim(EPOCH)
    for seq in (1, 2, 3):
        for rank in ranks:
            rank.carry_out(EPOCH, seq, 0, Orders())
    ranks[0].executed(3)
    assert group.executed_through(EPOCH) == 0
    ranks[1].executed(2)
    assert group.executed_through(EPOCH) == 2
    tables[0].claim(EPOCH + 1)
    assert group.executed_through(EPOCH) == group.executed_through(EPOCH + 1) == 0


def test_owner_epoch_of_a_group_is_the_newest_of_any_rank():
    tables = [table(), table()]
    group = RankGroup(tables)
    assert group.owner_epoch == 0
    group.claim(EPOCH)
    tables[0].claim(EPOCH + 1)
    assert group.owner_epoch == EPOCH + 1, "a claim that was cut short counts"


def test_a_stamp_counts_only_if_all_ranks_agree():
    tables = [table(), table()]
    group = RankGroup(tables)
    group.claim(EPOCH)
    for stamps in tables:
        Rank(stamps, Tape(stamps)).carry_out(EPOCH, 1, 0, stamped(1, 2, 3))
    alike = group.agreed_stamps()
    assert alike[:4] == (0, *(Stamp(0, EPOCH, 10 + b).pack() for b in (1, 2, 3)))
    tables[1].write([2], [Stamp(0, EPOCH, 99).pack()])
    assert group.agreed_stamps() == (*alike[:2], 0, *alike[3:])


def test_stamps_from_before_a_reset_do_not_count():
    tables = [table(), table()]
    group = RankGroup(tables)
    for stamps in tables:
        stamps.write([1, 2], [Stamp(0, EPOCH, 1).pack(), Stamp(0, EPOCH, 2).pack()])
    reset, later = Stamp(0, EPOCH, 3).pack(), Stamp(0, EPOCH, 4).pack()
    tables[0].write([0, 2], [reset, later])
    assert group.agreed_stamps() == (reset, *(0,) * 7), "one rank that knows of it is enough"
    tables[1].write([2], [later])
    assert group.agreed_stamps() == (reset, 0, later, *(0,) * 5)


def test_stamps_are_ordered_by_epoch_before_generation():
    stamps = table()
    reset, later = Stamp(3, EPOCH, 9).pack(), Stamp(0, EPOCH + 1, 1).pack()
    stamps.write([0, 1, 2, 3], [reset, Stamp(2, EPOCH, 10).pack(), Stamp(3, EPOCH, 10).pack(), later])
    assert RankGroup([stamps]).agreed_stamps()[:4] == (reset, 0, Stamp(3, EPOCH, 10).pack(), later)


def test_ranks_with_pools_of_different_sizes_are_refused():
    with pytest.raises(InvalidArgument):
        RankGroup([])
    with pytest.raises(InvalidArgument):
        RankGroup([table(), StampTable.create(bytearray(table_bytes(4)), 4, incarnation=7)])


# -- loads: when a transfer may write the pages of an admission --------------------------------------------------------


def group_at(*positions: tuple[int, int, int]) -> tuple[RankGroup, list[StampTable]]:
    """Ranks of life EPOCH that have carried out (seq, part) and have executed `executed` steps."""
    tables = [table() for _ in positions]
    for one, (seq, part, executed) in zip(tables, positions, strict=True):
        one.claim(EPOCH)
        one.begin(seq, part)
        one.finish()
        one.set_executed(executed)
    return RankGroup(tables), tables


@pytest.mark.parametrize(
    ("ranks", "may"),
    [
        ([(5, 1, 3), (5, 1, 3)], True),
        ([(5, 1, 4), (6, 0, 5)], True),  # late: whatever has happened since, it may
        ([(5, 1, 3), (5, 0, 3)], False),  # a rank lags with its orders: stamps, zeroes or copies may still come
        ([(5, 1, 3), (4, 7, 3)], False),
        ([(5, 1, 3), (5, 1, 2)], False),  # a rank lags with its launches: one may still write
    ],
)
def test_a_load_may_start_after_admission_orders_and_load_after_on_every_rank(ranks, may):
    group, _ = group_at(*ranks)
    assert group.may_load(EPOCH, 5, 1, 3) is may
    assert group.may_load(EPOCH, 5, 1, 3) is may, "asking changes nothing"


def test_a_load_waits_for_orders_in_progress():
    group, (one,) = group_at((5, 0, 3))
    one.begin(5, 1)
    assert not group.may_load(EPOCH, 5, 1, 3)
    assert group.may_load(EPOCH, 5, 0, 3), "those of the part before are"
    one.finish()
    assert group.may_load(EPOCH, 5, 1, 3)


def test_a_load_of_an_old_engine_life_is_refused():
    group, (first, second) = group_at((5, 1, 3), (5, 1, 3))
    assert not group.may_load(EPOCH + 1, 5, 1, 3), "this life has not claimed the ranks yet"
    second.claim(EPOCH + 1)
    with pytest.raises(StaleEpoch):
        group.may_load(EPOCH, 5, 1, 3)
    assert not group.may_load(EPOCH + 1, 5, 1, 3), "one rank is claimed, one is not"
    first.claim(EPOCH + 1)
    assert not group.may_load(EPOCH + 1, 1, 0, 0), "what the life before did counts no more"


def test_check_load_names_the_missing_condition(rank, tape):
    for seq in (1, 2):
        rank.carry_out(EPOCH, seq, 0, Orders())
    rank.executed(1)
    before = tape.table.snapshot()
    rank.check_load(EPOCH, 2, 0, 1)
    for seq, part, load_after, field in ((3, 0, 0, "seq"), (2, 1, 0, "seq"), (2, 0, 2, "load_after")):
        with pytest.raises(FailedPrecondition) as caught:
            rank.check_load(EPOCH, seq, part, load_after)
        assert caught.value.field == field
        assert caught.value.remedy
    with pytest.raises(StaleEpoch):
        rank.check_load(EPOCH - 1, 2, 0, 1)
    assert tape.table.snapshot() == before


def test_a_life_that_begins_at_a_later_step_counts_earlier_steps_as_executed():
    """A session that continues with another service keeps its step numbers; load_after names no earlier step."""
    one = table()
    one.claim(EPOCH, 40)
    group = RankGroup([one])
    assert not group.may_load(EPOCH, 40, 0, 0)
    one.begin(40, 0)
    one.finish()
    assert group.may_load(EPOCH, 40, 0, 0)
    assert not group.may_load(EPOCH, 40, 0, 40)


def life_with_a_launch_in_flight() -> tuple[StampTable, Rank, RankGroup]:
    """Steps 1 and 2 were launched, 1 has executed; then a new engine life claims, which continues with step 3."""
    one = table()
    rank, group = Rank(one, Tape(one)), RankGroup([one])
    rank.claim(EPOCH)
    for seq in (1, 2):
        rank.carry_out(EPOCH, seq, 0, Orders())
    rank.executed(1)
    one.begin_life(EPOCH + 1)
    rank.claim(EPOCH + 1, 3)
    return one, rank, group


def test_a_load_of_a_new_life_waits_for_launches_of_the_previous_life():
    one, rank, group = life_with_a_launch_in_flight()
    rank.carry_out(EPOCH + 1, 3, 0, Orders())
    assert not group.may_load(EPOCH + 1, 3, 0, 0)
    with pytest.raises(FailedPrecondition, match="earlier epoch") as caught:
        rank.check_load(EPOCH + 1, 3, 0, 0)
    assert (caught.value.field, "launches_ended" in caught.value.remedy) == ("epoch", True)
    rank.executed(2)  # the number at which this life began: it does not cover launches
    assert not group.may_load(EPOCH + 1, 3, 0, 0)
    one.claim(EPOCH + 2)
    rank.carry_out(EPOCH + 2, 1, 0, Orders())
    assert not group.may_load(EPOCH + 2, 1, 0, 0), "nor does one more life"


@pytest.mark.parametrize("word", ["executed", "launches_ended"])
def test_a_load_of_a_new_life_starts_after_launches_ended(word):
    _, rank, group = life_with_a_launch_in_flight()
    for seq in (3, 4):
        rank.carry_out(EPOCH + 1, seq, 0, Orders())
    rank.executed(3) if word == "executed" else rank.launches_ended()
    assert group.may_load(EPOCH + 1, 4, 0, 3) is (word == "executed")
    assert group.may_load(EPOCH + 1, 4, 0, 0)


def test_an_exited_process_has_no_launches():
    """The worker records it before the service claims the table for the next life."""
    one = table()
    rank, group = Rank(one, Tape(one)), RankGroup([one])
    rank.claim(EPOCH)
    rank.carry_out(EPOCH, 1, 0, Orders())
    one.launches_ended()
    assert one.executed == 0, "what they computed is not known"
    one.begin_life(EPOCH + 1)
    rank.carry_out(EPOCH + 1, 1, 0, Orders())
    assert group.may_load(EPOCH + 1, 1, 0, 0)
    one.begin_life(EPOCH + 2)
    rank.carry_out(EPOCH + 2, 1, 0, Orders())
    assert not group.may_load(EPOCH + 2, 1, 0, 0), "orders since then may have a launch behind them"


def test_a_load_does_not_wait_for_a_life_without_launches_in_flight():
    one = table()
    rank, group = Rank(one, Tape(one)), RankGroup([one])
    rank.claim(EPOCH)
    rank.carry_out(EPOCH, 1, 0, Orders())
    rank.executed(1)
    rank.claim(EPOCH + 1)
    rank.carry_out(EPOCH + 1, 1, 0, Orders())
    assert group.may_load(EPOCH + 1, 1, 0, 0)
