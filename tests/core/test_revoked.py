"""Evicted content comes back from no tier once every rank has written the stamps, whatever a store returns later."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvplane.base.groups import ReplicaSpec, SavePolicy, TierKind, TierSpec
from kvplane.base.step import Cache, Part, PartResult, RemoveReason, Step, StepResult
from kvplane_core.face import inspect, setup
from kvplane_core.face.entries import Entries
from kvplane_core.face.keys import Key
from kvplane_core.face.state import export_state
from kvplane_core.spec.loading import load_state
from kvplane_core.spec.replica import Replica
from kvplane_core.spec.tiers.tiers import Tiers
from tests.core.builders import full, new_replica
from tests.core.specification import specification_of
from tests.core.test_tiers import Mover

TEXT = "aaaabbbbcccc"
HOST = TierSpec(TierKind.HOST, 12, save=SavePolicy.THROUGH)
DISK = TierSpec(TierKind.DISK, 30, save=SavePolicy.THROUGH)


class Memory:
    """The stamp table of one rank, whose movers do each job at once."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self.spec, self.table = spec, [0] * spec.num_stamps

    def id_of(self, tier: int, slot: int) -> int:
        return self.spec.num_blocks + sum(one.num_blocks for one in self.spec.tiers[:tier]) + slot

    def obey(self, results: Sequence[PartResult]) -> None:
        orders = [result.orders for result in results]
        for one in orders:
            self.write(one.stamp_block, one.stamp)
        for one in orders:
            self.write(map(self.id_of, one.save_tier, one.save_slot), one.save_job)
            self.write(map(self.id_of, one.move_to_tier, one.move_to_slot), one.move_job)

    def write(self, blocks, stamps) -> None:
        for block, stamp in zip(blocks, stamps, strict=True):
            self.table[block] = stamp


class Obeyed(Mover):
    """An engine whose rank carries out every answer.

    Attributes:
        memory: of the rank.
    """

    def __init__(self, *tiers: TierSpec) -> None:
        super().__init__(full(), tiers=tiers)
        self.memory = Memory(self.replica.spec)

    def step(self, *parts):
        results = super().step(*parts)
        self.memory.obey(results)
        return results

    def key_of(self, text: str) -> tuple[int, Key]:
        """The block with the first tokens of a text, and its key."""
        for block in range(1, self.pool.num_blocks):
            key = self.pool.key_of(block)
            if key is not None and self.pool.key_tokens[block] == 4 and key in self.tiers.each[0].key.values():
                return block, key
        raise AssertionError(f"no block has the beginning of {text}")


@pytest.fixture(autouse=True)
def small_pools(monkeypatch):
    monkeypatch.setattr(setup, "AHEAD_SHARE", 1)


@pytest.fixture(params=[(HOST,), (HOST, DISK)], ids=["host", "host and disk"])
def engine(request) -> Obeyed:
    made = Obeyed(*request.param)
    made.serve(0, TEXT)
    for _ in range(6):
        made.report()
    return made


def sent(replica: Replica, seq: int, cache: Cache) -> StepResult:
    return replica.apply(Step(replica.epoch, seq, [Part(cache=cache)], executed_through=seq - 1))


def recovered(engine: Obeyed, stored: Entries | None, epoch: int = 90) -> Replica:
    replica = new_replica(engine.replica.spec)
    replica.recover(epoch, [engine.memory.table], [] if stored is None else [stored])
    inspect.check(replica)
    return replica


def places_of(replica: Replica, key: Key) -> list[str]:
    tiers = [tier.medium.name for tier in specification_of(replica).tiers.each if tier.find(key) is not None]
    return tiers + ["DEVICE"] * bool(specification_of(replica).coordinator.pool.blocks_of(key))


def test_an_eviction_whose_answer_was_lost_is_sent_again_in_a_new_life(engine):
    """As `Revival.first_steps` does. The service dropped the key with the first one, and ordered nothing again."""
    stored, (block, key) = engine.replica.entries(), engine.key_of(TEXT)
    sent(engine.replica, engine.replica.seq + 1, Cache(evicted=[block]))
    assert places_of(recovered(engine, stored), key), "no rank has written a stamp: a crash undoes it"
    engine.replica.begin_epoch(2, list(engine.memory.table))
    engine.memory.obey(sent(engine.replica, 1, Cache(evicted=[block])).parts)
    assert places_of(recovered(engine, stored), key) == []


def test_a_slot_whose_key_its_tier_had_evicted_before(engine):
    stored, (block, key) = engine.replica.entries(), engine.key_of(TEXT)
    for tier in engine.tiers.each:
        tier.drop(key, RemoveReason.EVICTED)
    engine.changed()
    engine.cache(evicted=[block])
    assert places_of(recovered(engine, stored), key) == []


@pytest.mark.parametrize("lacks", ["slots", "blocks", "all"])
def test_a_service_that_recovered_without_records_of_it(engine, lacks):
    """The store comes back later, as it was. Without the record of the block, nothing says which slots have its copies:
    no key of a tier is left.
    """
    stored, (block, key) = engine.replica.entries(), engine.key_of(TEXT)
    part = engine.replica.entries()
    first = engine.replica.spec.num_blocks
    gone = {"slots": lambda at: at >= first, "blocks": lambda at: at < first, "all": lambda at: True}[lacks]
    part.block = [(1 << 31 if gone(at) else at) for at in part.block]
    second = recovered(engine, part, epoch=9)
    assert ("DEVICE" in places_of(second, key)) == (lacks == "slots")
    engine.memory.obey(sent(second, 1, Cache(evicted=[block])).parts)
    inspect.check(second)
    assert places_of(second, key) == []
    assert places_of(recovered(engine, stored), key) == []


def test_another_block_of_a_recovered_service_leaves_tiers_alone(engine):
    """The memory shows a stamp of the block, which the store named."""
    _, key = engine.key_of(TEXT)
    other = next(at for at in range(1, 21) if engine.pool.key_of(at) not in (None, key))
    second = recovered(engine, engine.replica.entries(), epoch=9)
    sent(second, 1, Cache(evicted=[other]))
    assert "HOST" in places_of(second, key)


def test_what_is_written_into_such_a_slot_does_not_count(engine):
    """The rank may write the version of the eviction behind that of the job."""
    tier = engine.tiers.each[0]
    while tier.num_free:
        engine.serve(0, chr(300 + engine.seq) * 12)
        engine.report()
    engine.serve(0, "wwwwvvvv")
    flying = {save.slot for save in engine.tiers.jobs.saves.values() if save.tier == 0}
    assert flying, "saves are in flight, into slots that had keys"
    before = engine.tiers.counters.discarded
    block = next(at for at in range(1, 21) if engine.pool.key_of(at) is not None)
    engine.cache(evicted=[block])
    assert export_state(load_state(engine.replica.spec, export_state(engine.replica))) == export_state(engine.replica)
    engine.report()
    assert engine.tiers.counters.discarded >= before + len(flying)
    assert not flying.intersection(engine.tiers.each[0].key)
    inspect.check(engine.replica)


def test_an_eviction_orders_each_version_once(engine):
    (block, _), first = engine.key_of(TEXT), engine.replica.spec.num_blocks
    ordered = [engine.cache(evicted=[block]).orders.stamp_block for _ in range(2)]
    assert any(at >= first for at in ordered[0])
    assert not any(at >= first for at in ordered[1])


def test_an_eviction_of_known_slots_alone_would_leave_the_others(monkeypatch):
    """What the cases above are made of: without the rule the evicted key is there again."""
    monkeypatch.setenv("KVPLANE_CORE", "python")
    monkeypatch.setattr(Tiers, "revoke", lambda self, block, key: key is not None and self.drop(key))
    engine = Obeyed(HOST)
    engine.serve(0, TEXT)
    for _ in range(6):
        engine.report()
    stored, (block, key) = engine.replica.entries(), engine.key_of(TEXT)
    engine.tiers.each[0].drop(key, RemoveReason.EVICTED)
    engine.cache(evicted=[block])
    assert places_of(recovered(engine, stored), key) == ["HOST"]


def test_a_reset_that_is_sent_again_leaves_nothing(engine):
    stored, (_, key) = engine.replica.entries(), engine.key_of(TEXT)
    assert sent(engine.replica, engine.replica.seq + 1, Cache(reset=True)).parts[0].reset_done
    engine.replica.begin_epoch(2, list(engine.memory.table))
    answer = sent(engine.replica, 1, Cache(reset=True)).parts
    assert answer[0].reset_done
    engine.memory.obey(answer)
    assert places_of(recovered(engine, stored), key) == []
