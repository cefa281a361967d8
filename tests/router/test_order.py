"""Batches are applied once and in order within a life, whatever is lost, repeated or restarted."""

from __future__ import annotations

from random import Random

import pytest

from kvplane_fleet.faults import Fault, Faults
from kvplane_fleet.follow import order as order_module
from kvplane_fleet.follow.order import SourceOrder
from kvplane_fleet.wire.frames import Frame


class Engine:
    """A publisher with a replay buffer."""

    def __init__(self, life=0, keeps=10_000):
        self.life, self.keeps, self.frames = life, keeps, []

    def publish(self, count=1):
        new = [Frame(len(self.frames) + i, f"{self.life}.{len(self.frames) + i}".encode()) for i in range(count)]
        self.frames += new
        return new

    def kept(self, start):
        return [one for one in self.frames[-self.keeps :] if one.sequence >= start]


class Applied:
    """A sink that keeps what was applied since it was cleared."""

    def __init__(self):
        self.payloads = []

    def apply(self, payload):
        self.payloads.append(payload)

    def clear(self, life_ended):
        del life_ended
        self.payloads = []


class Rig:
    def __init__(self, engine, can_replay=True):
        self.engine, self.sink, self.faults = engine, Applied(), Faults()
        self.order = SourceOrder(self.sink, self.faults, can_replay)

    def replay(self):
        """Answer what is asked for until nothing is."""
        for _ in range(10):
            if self.order.wanted is None:
                return
            start, self.order.wanted = self.order.wanted, None
            for frame in self.engine.kept(start):
                self.order.replayed(frame)
                if self.order.wanted is not None or not self.order.replaying:
                    break
            else:
                self.order.replay_ended()
        raise AssertionError("the replays do not end")

    def live(self, frames):
        for frame in frames:
            self.order.live(frame)
        self.replay()

    @property
    def whole(self):
        return self.sink.payloads == [one.payload for one in self.engine.frames]


@pytest.fixture
def rig():
    engine = Engine()
    engine.publish(5)
    rig = Rig(engine)
    rig.order.connected()
    rig.replay()
    assert rig.whole
    assert not rig.order.partial
    return rig


def test_frames_in_sequence_are_applied(rig):
    rig.live(rig.engine.publish(3))
    assert rig.whole
    assert not rig.faults.counts


def test_a_frame_before_the_connection_is_reported_starts_a_replay():
    rig = Rig(Engine())
    first = rig.engine.publish(4)
    rig.live(first[2:])
    assert rig.whole
    assert not rig.order.partial


def test_a_gap_is_filled_by_the_replay(rig):
    rig.live(rig.engine.publish(6)[4:])
    assert rig.whole
    assert rig.faults.counts == {Fault.FRAMES_LOST: 4}


def test_live_frames_wait_for_the_replay(rig):
    rig.order.live(rig.engine.publish(2)[1])
    for frame in rig.engine.publish(3):
        rig.order.live(frame)
    assert len(rig.sink.payloads) == 5
    rig.replay()
    assert rig.whole


def test_what_the_buffer_no_longer_has_clears(rig):
    rig.engine.keeps = 3
    rig.live(rig.engine.publish(9)[8:])
    assert rig.sink.payloads == [one.payload for one in rig.engine.frames[-3:]]
    assert rig.order.partial
    assert rig.faults.counts[Fault.FRAMES_GONE] == 7


def test_a_repeated_frame_is_applied_once(rig):
    (frame,) = rig.engine.publish()
    rig.live([frame, frame])
    assert rig.whole
    assert rig.faults.counts == {Fault.FRAME_REPEATED: 1}


def restarted(rig, frames):
    rig.engine = Engine(rig.engine.life + 1)
    return rig.engine.publish(frames)


def test_a_sequence_that_goes_back_is_another_life(rig):
    rig.live(rig.engine.publish(1))
    rig.live(restarted(rig, 2)[1:])
    assert rig.whole
    assert rig.order.lives == 2
    assert rig.faults.counts == {Fault.LIFE_ENDED: 1}


@pytest.mark.parametrize("frames", [0, 1, 4, 5, 6, 50])
def test_another_engine_behind_the_address_is_noticed_at_the_connection(rig, frames):
    restarted(rig, frames)
    rig.order.connected()
    rig.replay()
    assert rig.whole
    assert rig.order.lives == 2
    rig.live(rig.engine.publish(2))
    assert rig.whole
    assert rig.order.lives == 2


@pytest.mark.parametrize("frames", [7, 8, 50])
def test_another_engine_that_is_ahead_is_noticed_by_its_bytes(rig, frames):
    rig.live(restarted(rig, frames)[-1:])
    assert rig.whole
    assert rig.order.lives == 2


def test_another_engine_is_noticed_after_a_silence(rig):
    restarted(rig, 3)
    rig.order.check()
    rig.replay()
    assert rig.whole


def test_a_lost_last_frame_is_noticed_after_a_silence(rig):
    rig.engine.publish(2)
    rig.order.check()
    rig.replay()
    assert rig.whole


def test_what_is_learned_again_is_the_same_life_from_its_first_frame(rig):
    rig.order.learn_again()
    assert rig.sink.payloads == []
    rig.replay()
    assert rig.whole
    assert not rig.order.partial
    assert rig.order.lives == 1


def test_a_connection_during_a_replay_checks_again(rig):
    rig.order.check()
    rig.order.connected()
    rig.replay()
    restarted(rig, 3)
    rig.order.connected()
    rig.replay()
    assert rig.whole


def test_without_replays_a_gap_and_a_connection_clear():
    rig = Rig(Engine(), can_replay=False)
    rig.live(rig.engine.publish(3))
    assert rig.whole
    rig.live(rig.engine.publish(3)[2:])
    assert rig.sink.payloads == [rig.engine.frames[-1].payload]
    assert rig.order.partial
    rig.order.connected()
    assert rig.sink.payloads == []


def test_no_answer_at_a_connection_clears_and_follows_on(rig):
    rig.order.connected()
    rig.order.live(rig.engine.publish()[0])
    rig.order.replay_failed()
    rig.replay()
    assert rig.sink.payloads == [rig.engine.frames[-1].payload] or rig.whole
    assert rig.faults.counts[Fault.REPLAY_TIMEOUT] == 1


def test_what_an_unanswered_replay_owes_is_learned_after_a_silence(rig):
    rig.order.connected()
    rig.order.live(rig.engine.publish()[0])
    rig.order.replay_failed()
    rig.order.wanted = None
    assert rig.order.partial
    rig.order.check()
    rig.order.replay_failed()
    assert rig.sink.payloads == [rig.engine.frames[-1].payload], "no answer, no loss"
    rig.order.check()
    rig.replay()
    assert rig.whole
    assert not rig.order.partial


def test_no_answer_after_a_silence_clears_nothing(rig):
    rig.order.check()
    rig.order.replay_failed()
    assert rig.whole


def test_a_replay_out_of_order_is_given_up(rig):
    rig.order.live(rig.engine.publish(5)[4])
    rig.order.replayed(rig.engine.frames[4])
    rig.order.replayed(rig.engine.frames[7])
    assert rig.faults.counts[Fault.REPLAY_ORDER] == 1
    assert not rig.order.replaying
    assert rig.sink.payloads == [rig.engine.frames[-1].payload]


def test_a_replay_that_never_ends_is_given_up(rig, monkeypatch):
    monkeypatch.setattr(order_module, "MAX_REPLAY_BYTES", 100)
    rig.order.check()
    rig.engine.publish(200)
    for frame in rig.engine.frames[4:]:
        rig.order.replayed(frame)
        if not rig.order.replaying:
            break
    assert rig.faults.counts[Fault.REPLAY_TOO_LONG] == 1


def test_a_full_queue_is_a_gap(rig, monkeypatch):
    monkeypatch.setattr(order_module, "MAX_QUEUE_BYTES", 20)
    rig.order.check()
    for frame in rig.engine.publish(20):
        rig.order.live(frame)
    assert rig.faults.counts[Fault.QUEUE_FULL] > 0
    rig.replay()
    assert rig.whole


@pytest.mark.parametrize("seed", range(200))
def test_any_losses_and_restarts_end_in_the_state_of_a_fresh_follower(seed):
    rng = Random(seed)
    rig = Rig(Engine(keeps=rng.choice([5, 30, 10_000])))
    rig.order.connected()
    for _ in range(60):
        action = rng.random()
        if action < 0.05:
            rig.engine = Engine(rig.engine.life + 1, rig.engine.keeps)
            if rng.random() < 0.7:
                rig.order.connected()
        elif action < 0.1:
            rig.order.connected()
        for frame in rig.engine.publish(rng.randrange(4)):
            if rng.random() > 0.2:
                rig.order.live(frame)
        if rng.random() < 0.7:
            rig.replay()
    rig.live(rig.engine.publish())
    rig.order.check()
    rig.replay()
    expected = [one.payload for one in rig.engine.frames]
    applied = rig.sink.payloads
    assert applied == expected[len(expected) - len(applied) :], "one life, no gap, to the end"
    assert len(applied) >= min(len(expected), rig.engine.keeps)
    assert rig.order.partial == (len(applied) < len(expected))


class Mixed(Rig):
    """Live frames of one engine, and the replays of another behind the same address."""

    def __init__(self, live, other):
        super().__init__(other)
        self.sender = live
        for engine, count in ((live, 5), (other, 9)):
            engine.publish(count)
        self.order.connected()
        self.replay()

    @property
    def others(self):
        """What was applied of the engine whose frames do not come live."""
        return [one for one in self.sink.payloads if one.startswith(f"{self.engine.life}.".encode())]


@pytest.mark.parametrize("ahead", [0, 3, 4, 10, 50])
def test_replays_of_another_engine_behind_the_address_are_not_trusted_for_long(ahead):
    one = Mixed(Engine(life=1), Engine(life=2))
    one.sender.publish(ahead)
    assert len(one.others) == 9
    for _ in range(4):
        one.live(one.sender.publish())
        one.order.check()
        one.replay()
    assert one.others == []
    assert one.faults.counts[Fault.SOURCES_MIXED] == 1
    assert one.order.partial
    last = one.sender.publish(20)
    one.live(last)
    assert one.sink.payloads[-20:] == [frame.payload for frame in last]
    assert one.faults.counts[Fault.SOURCES_MIXED] == 1


def test_frames_that_the_replay_had_are_no_sign_of_another_engine(rig):
    for frame in rig.engine.publish(6)[2:]:
        rig.order.live(frame)
    rig.replay()
    assert rig.whole
    assert rig.faults.counts == {Fault.FRAMES_LOST: 2}


def test_a_restart_that_only_a_replay_shows_is_no_sign_of_another_engine():
    rig = Rig(Engine())
    rig.order.connected()
    rig.replay()
    rig.live(rig.engine.publish(8))
    rig.engine = Engine(life=1)
    rig.live([])
    rig.engine.publish(3)
    rig.order.check()
    rig.replay()
    rig.live(rig.engine.publish(2))
    assert rig.whole
    assert rig.faults.counts == {Fault.LIFE_ENDED: 1}
