"""Zeroes and copies run on a device in the order of launches: transfers and `executed` wait for them."""

from __future__ import annotations

from random import Random

import pytest

from kvplane.base.errors import FailedPrecondition
from kvplane.base.stamp_table import StampTable, table_bytes
from kvplane.base.step import Orders
from kvplane.rank import Rank, RankGroup
from tests.core.later import Later
from tests.twins import weakened

BLOCKS = 8
EPOCH = 3


class NoPages:
    num_groups = 1

    def zero(self, group, blocks):
        """No bytes here."""

    def copy(self, group, src, dst):
        """No bytes here."""

    def moves(self):
        return None


class Scene:
    """A rank whose device is late, and what another process sees of it."""

    def __init__(self) -> None:
        buffer = bytearray(table_bytes(BLOCKS))
        self.table = StampTable.create(buffer, BLOCKS, incarnation=7)
        self.device = Later(NoPages())
        self.rank = Rank(self.table, self.device)
        self.group = RankGroup([StampTable(buffer)])
        self.rank.claim(EPOCH)

    def carry_out(self, seq: int, part: int = 0, zeroes: int = 0, copies: int = 0, epoch: int = EPOCH) -> None:
        orders = Orders(zero_block=[1] * zeroes, zero_group=[0] * zeroes)
        orders.copy_src, orders.copy_dst, orders.copy_group = [2] * copies, [3] * copies, [0] * copies
        self.rank.carry_out(epoch, seq, part, orders)

    def may_load(self, seq: int, part: int = 0, epoch: int = EPOCH) -> bool:
        return self.group.may_load(epoch, seq, part, 0)


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.mark.parametrize("what", [{"zeroes": 1}, {"copies": 1}])
def test_a_load_waits_for_zeroes_and_copies_of_its_step(scene, what):
    scene.carry_out(1, **what)
    assert not scene.may_load(1)
    with pytest.raises(FailedPrecondition, match="step 1 zeroes or copies") as caught:
        scene.rank.check_load(EPOCH, 1, 0, 0)
    assert caught.value.field == "seq"
    scene.device.run()
    scene.rank.poll()
    assert scene.may_load(1)


def test_a_load_does_not_wait_for_moves_of_later_steps(scene):
    scene.carry_out(1)
    scene.carry_out(2, zeroes=1)
    assert scene.may_load(1)
    assert not scene.may_load(2)


def test_synchronize_waits_for_the_device(scene):
    scene.carry_out(1, copies=2)
    scene.rank.synchronize()
    assert scene.device.done == 1
    assert scene.may_load(1)


def test_executed_waits_for_the_moves_of_a_step_without_a_launch(scene):
    """Its copies' sources return to the pool then, and its keys are shown."""
    scene.carry_out(1, copies=1)
    scene.carry_out(2, zeroes=1)
    scene.rank.executed(1)
    assert scene.device.done == 1, "and no later ones"
    assert scene.may_load(1)
    assert not scene.may_load(2)


def test_a_new_life_waits_for_moves_of_the_previous_life(scene):
    scene.carry_out(1)
    scene.rank.executed(1)
    scene.carry_out(2, zeroes=1)
    scene.table.set_executed(2)
    scene.carry_out(3, zeroes=1)
    scene.group.claim(EPOCH + 1)
    scene.carry_out(1, epoch=EPOCH + 1)
    assert not scene.may_load(1, epoch=EPOCH + 1)
    scene.rank.launches_ended()
    assert scene.device.done == 2
    assert scene.may_load(1, epoch=EPOCH + 1)


def test_another_rank_object_on_the_table_waits_for_earlier_moves(scene):
    scene.carry_out(1, zeroes=1)
    scene.rank = Rank(scene.table, scene.device)
    assert not scene.may_load(1)
    scene.rank.executed(1)
    assert scene.device.done == 1
    scene.carry_out(2, zeroes=1)
    scene.device.run()
    scene.rank = Rank(scene.table, scene.device)
    assert scene.may_load(2), "the device has nothing left to do"


def play(seed: int) -> None:
    """Steps and a device at random. The table never shows too much, and all that has ended once the rank polls."""
    rng, scene = Random(seed), Scene()
    last_call: dict[tuple[int, int], int] = {}  # number of the device's call that a part's orders end with
    seq, part, executed = 0, 0, 0
    for _ in range(40):
        act = rng.choice(["orders", "orders", "device", "poll", "executed"])
        if act == "orders":
            seq, part = (seq, part + 1) if seq and rng.random() < 0.3 else (seq + 1, 0)
            scene.carry_out(seq, part, zeroes=rng.choice([0, 0, 1]), copies=rng.choice([0, 0, 1]))
            last_call[seq, part] = scene.device.given
        elif act == "device":
            scene.device.run(rng.randint(1, 2))
        elif act == "poll":
            scene.rank.poll()
        elif executed < seq:
            executed = rng.randint(executed, seq)
            scene.rank.executed(executed)
        within = [(step, max(end for (other, _), end in last_call.items() if other <= step)) for step, _ in last_call]
        for step, end in within:
            has_ended = scene.device.done >= end
            assert has_ended or not scene.may_load(step), f"step {step}, seed {seed}"
            assert act != "poll" or not has_ended or scene.may_load(step), f"step {step}, seed {seed}: late"


@pytest.mark.parametrize("seed", range(40))
def test_the_stamp_table_shows_which_moves_have_ended(seed):
    play(seed)


def test_a_rank_that_does_not_wait_for_moves_is_caught():
    """It shows too much, not too little."""
    with weakened("orders end when they are given"), pytest.raises(AssertionError, match=r"step \d+, seed \d+\n"):
        for_all(range(40))


def for_all(seeds) -> None:
    for seed in seeds:
        play(seed)
