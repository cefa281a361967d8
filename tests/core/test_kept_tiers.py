"""What tiers keep over engine lives, and what is recovered from a store: slots whose version all ranks show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import TierKind, TierSpec
from kvplane.base.session import OpenRequest
from kvplane.base.stamps import Stamp
from kvplane_core.face import inspect, setup
from kvplane_core.face.entries import Entries
from kvplane_core.spec.replica import Replica
from kvplane_service.replicas.sessions import check_request
from kvplane_service.replicas.stamps import disks_alone
from tests.core.builders import compared, full, new_replica
from tests.core.test_tiers import Mover

BLOCKS, HOST = 21, 12
DISK = BLOCKS + HOST  # id of the first slot of the disk
TIERS = (TierSpec(TierKind.HOST, HOST), TierSpec(TierKind.DISK, 64))
TEXT = "aaaabbbbcccc"


@pytest.fixture(autouse=True)
def small_pools(monkeypatch):
    monkeypatch.setattr(setup, "AHEAD_SHARE", 1)


@pytest.fixture
def engine() -> Mover:
    made = Mover(full(), tiers=TIERS)
    made.save(TEXT)
    assert made.outside(TEXT + "x") == 0
    for _ in range(4):
        made.report()
    assert all(tier.key for tier in made.tiers.each)
    return made


def keys(replica: Replica) -> list[set[object]]:
    return [set(tier.key.values()) for tier in replica.coordinator.tiers.each]


def recovered(engine: Mover, table: list[int], *stored: Entries) -> Replica:
    replica = new_replica(engine.replica.spec)
    replica.recover(9, [table], stored)
    inspect.check(replica)
    return replica


def test_a_new_life_keeps_the_slots_that_have_their_version(engine):
    table, before = engine.shown(), keys(engine.replica)
    (tier, other) = engine.tiers.each
    lost, changed = next(iter(tier.key)), next(iter(other.key))
    gone = tier.key[lost], other.key[changed]
    table[BLOCKS + lost] = 0
    table[DISK + changed] += 1
    engine.replica.begin_epoch(5, table)
    inspect.check(engine.replica)
    assert keys(engine.replica) == [before[0] - {gone[0]}, before[1] - {gone[1]}]


def test_a_table_without_slots_keeps_none(engine):
    engine.replica.begin_epoch(5, list(engine.pool.stamp))
    assert keys(engine.replica) == [set(), set()]
    inspect.check(engine.replica)


def test_a_disk_outlives_the_pages(engine):
    """The worker is a new one: its table shows what its disk kept. Versions of its host slots prove nothing, even if
    they are equal to those of the slots before: an epoch may have been given out twice.
    """
    table, (host, disk) = engine.shown(), keys(engine.replica)
    assert host
    engine.replica.begin_epoch(5, disks_alone(table, engine.replica.spec), memory_is_new=True)
    assert keys(engine.replica) == [set(), disk]
    assert not engine.replica.count_keys()
    inspect.check(engine.replica)


def test_a_service_without_memory_takes_slots_from_a_store(engine):
    stored, table = engine.replica.entries(), engine.shown()
    replica = recovered(engine, table, stored)
    assert keys(replica) == keys(engine.replica)
    assert [tier.version for tier in replica.coordinator.tiers.each] == [tier.version for tier in engine.tiers.each]
    table[DISK:] = [0] * 64
    assert keys(recovered(engine, table, stored)) == [keys(engine.replica)[0], set()]


def test_slots_that_were_used_last_are_evicted_last_after_a_recovery(engine):
    stored, (_, disk) = engine.replica.entries(), engine.tiers.each
    slots = [block - DISK for block in stored.block if block >= DISK]
    used = [slots[2], slots[0], slots[1], *slots[3:]]
    stored.age = [used.index(block - DISK) if block >= DISK else 0 for block in stored.block]
    replica = recovered(engine, engine.shown(), stored)
    assert [slot for _, slot in replica.coordinator.tiers.each[1].in_order()] == used
    assert set(used) == set(disk.key)


def test_a_store_that_repeats_and_contradicts_itself_costs_hits_alone(engine):
    new, old = engine.replica.entries(), engine.replica.entries()
    slots = [at for at, block in enumerate(old.block) if block >= DISK]
    digests = [old.digests[at * old.digest_size :][: old.digest_size] for at in range(len(old))]
    turned = dict(zip(slots, slots[1:] + slots[:1], strict=True))
    old.digests = b"".join(digests[turned.get(at, at)] for at in range(len(old)))
    replica = recovered(engine, engine.shown(), new, old, new)
    assert keys(replica) == keys(engine.replica)


@pytest.mark.parametrize("block", [DISK + 64, 1 << 31])
def test_rows_of_slots_that_no_tier_has_are_left_out(engine, block):
    stored = engine.replica.entries()
    stored.block = [block if at >= DISK else at for at in stored.block]
    outcome = new_replica(engine.replica.spec).recover(9, [engine.shown()], [stored])
    assert outcome.impossible == len(engine.tiers.each[1].key)


def test_a_reset_is_not_undone_by_a_store_and_a_disk(engine):
    """The disk still holds all versions; the stamp of the null block is younger."""
    stored, table = engine.replica.entries(), engine.shown()
    result = engine.cache(reset=True)
    assert result.reset_done
    obey(table, result)
    assert keys(recovered(engine, table, stored)) == [set(), set()]


def test_a_reset_that_the_core_does_not_know_of_counts(engine):
    table = engine.shown()
    table[0] = engine.pool.draw()
    engine.replica = compared(engine.replica)
    engine.replica.begin_epoch(5, table)
    assert keys(engine.replica) == [set(), set()]


def test_what_is_saved_after_a_reset_counts(engine):
    result = engine.cache(reset=True)
    assert result.reset_done
    engine.save("ddddeeeeffff")
    assert keys(recovered(engine, engine.shown(), engine.replica.entries())) == keys(engine.replica)
    assert any(keys(engine.replica))


def test_an_evicted_key_is_not_recovered_from_its_slots(engine):
    """Every rank writes another version for them; the mover's own word, the seal, still has the old one."""
    asked = engine.ask(3, TEXT + "x")
    engine.cache(jobs_done=asked.result.admit_job)
    stored, table = engine.replica.entries(), engine.shown()
    block = asked.table[0][1]
    key = engine.pool.key_of(block)
    result = engine.cache(evicted=[block])
    assert any(at >= BLOCKS for at in result.orders.stamp_block)
    obey(table, result)
    replica = recovered(engine, table, stored)
    assert all(key not in held for held in keys(replica))
    assert sum(map(len, keys(replica))) > 0, "the others came back"


def test_versions_and_stamps_are_drawn_from_one_sequence(engine):
    """So that the stamp of a reset divides versions too."""
    seen = [engine.replica.coordinator.tiers.next_job(), engine.pool.draw(), engine.tiers.next_job()]
    assert seen == sorted(set(seen))
    engine.pool._counter = (1 << 32) - 1
    last = engine.tiers.next_job()
    assert engine.tiers.next_job() > last
    assert engine.pool.generation == 1


def obey(table: list[int], result) -> None:
    for block, stamp in zip(result.orders.stamp_block, result.orders.stamp, strict=True):
        table[block] = stamp


def test_an_opening_with_slots_of_another_number_is_refused():
    spec = Mover(full(), tiers=TIERS).replica.spec
    for length in (0, BLOCKS, DISK + 64):
        check_request(OpenRequest("r", 1, stamp_table=[0] * length), spec)
    with pytest.raises(InvalidArgument, match="24 stamps for 21 blocks and 76 slots of tiers") as refused:
        check_request(OpenRequest("r", 1, stamp_table=[0] * 24), spec)
    assert refused.value.field == "stamp_table"
    with pytest.raises(InvalidArgument, match="24 stamps for 21 blocks"):
        check_request(OpenRequest("r", 1, stamp_table=[0] * 24), replace(spec, tiers=()))


def test_a_life_that_no_rank_obeyed_leaves_nothing_that_a_later_one_of_its_epoch_makes_true(engine):
    """Two lives get one epoch if the first claims no memory and the store becomes older: their stamps and versions are
    equal, and name other content. Whatever the first one stored, in whatever order it comes back, is of earlier epochs.
    """
    stored, table = engine.replica.entries(), engine.shown()
    others = ("mmmmnnnn", "ooooppppqqqq", "rrrr", "aaaabbbbssss")
    first, second = lived(stored, table, others, executed=0), lived(stored, table, (TEXT, *reversed(others)))
    mine, its = first.replica.entries(), second.replica.entries()
    in_both = set(mine.stamp).intersection(second.shown())
    assert max(Stamp.unpack(stamp).epoch for stamp in mine.stamp) < EPOCH <= Stamp.unpack(max(its.stamp)).epoch
    assert first.pool.stamp != second.pool.stamp
    assert any(Stamp.unpack(stamp).epoch == EPOCH for stamp in {*first.shown()} & {*second.shown()})
    right = dict(zip(zip(its.block, its.stamp, strict=True), digests_of(its), strict=True))
    right |= zip(zip(stored.block, stored.stamp, strict=True), digests_of(stored), strict=True)
    for chunks in ((mine, its), (its, mine), (mine, its, mine), (stored, mine, its)):
        found = recovered(second, second.shown(), *chunks).entries()
        assert in_both >= set(found.stamp) - {*its.stamp}
        for block, stamp, digest in zip(found.block, found.stamp, digests_of(found), strict=True):
            assert right[block, stamp] == digest


EPOCH = 9


def lived(stored: Entries, table: list[int], texts: Sequence[str], executed: int | None = None) -> Mover:
    """An engine life of this epoch, on a service that has this store. Nothing is known to be executed with 0."""
    engine = Mover(full(), tiers=TIERS)
    engine.replica = new_replica(engine.spec)
    engine.replica.recover(EPOCH, [table], (stored,))
    engine.executed = executed
    for slot, text in enumerate(texts):
        engine.ask(slot, text + "x")
        engine.report() if executed is None else engine.idle()
        engine.end(slot)
        engine.report() if executed is None else engine.idle()
    return engine


def digests_of(entries: Entries) -> list[bytes]:
    size = entries.digest_size
    return [bytes(entries.digests[at * size : (at + 1) * size]) for at in range(len(entries))]
