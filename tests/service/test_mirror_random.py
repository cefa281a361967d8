"""Random histories of a mirror on a virtual clock: lag, lost messages, a service that restarts, planted differences.

After each event: while the service shows the replica, it has the state that the engine had after the same step, and a
subscriber sees only keys of that state. At the end the service has the engine's state. A seed repeats a history.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from random import Random

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.session.mirror_log import Iteration, MirrorLog, Piece
from kvplane.wire.mirror import Mirrored, answer_digest
from kvplane_core.face.state import digest, slices
from tests.core.follower import Follower, _published
from tests.core.specification import specification_of
from tests.core.test_step_law import MIXES
from tests.service.hosts import HostWorld
from tests.service.mirrors import DecidingEngine, open_request, renumbered, spec_of
from tests.twins import weakened

EVENTS = (
    ["step"] * 8 + ["send"] * 8 + ["deliver"] * 8 + ["connect"] * 3
    + ["breaks", "restarts", "differs", "is_damaged", "lapses", "loses_answer"]
)  # fmt: skip
STEPS = 160


async def offload(call):
    return call()


class History:
    """An engine with its log, a service, and what is under way between them."""

    connected: bool
    damaged: bool
    differs_next: bool

    def __init__(self, mix, seed):
        self.random = Random(seed)
        self.engine = DecidingEngine(spec_of(mix), seed)
        # Equal classes, numbered otherwise.
        self.spec = renumbered(self.engine.spec) if seed % 2 else self.engine.spec
        self.log = MirrorLog(self.random.choice([3, 8, 50]))
        self.log.begin_image(0, slices(self.engine.replica))
        self.states = {0: digest(self.engine.replica)}
        self.seen: Counter[str] = Counter()
        self.nonce = 0
        self.restarts()

    @property
    def host(self):
        return self.world.host

    def step(self):
        self.engine.run_step()
        seq = self.engine.replica.seq
        self.states[seq] = digest(self.engine.replica)
        self.log.add(Iteration((self.engine.sent[-1],), self.world.now_ns))
        if self.log.image_wanted:
            self.log.begin_image(seq, slices(self.engine.replica))
        self.world.now_ns += 1_000_000

    def connect(self):
        if self.connected:
            return
        self.nonce += 1
        opened = self.host.attach(open_request(self.nonce), lambda _: None)
        self.log.opened(opened.seq, opened.image_wanted, 4)
        self.under_way.clear()
        self.connected = True

    def send(self):
        if self.connected and (message := self.log.next_message()) is not None:
            self.under_way.append(message)

    async def deliver(self, answers=True):
        if not self.connected or not self.under_way:
            return
        message, mirror = self.under_way.popleft(), self.host.mirror
        self.host.heartbeat(self.nonce)
        if isinstance(message, Piece):
            progress = await mirror.add_piece(message.data, message.first, message.last, offload)
            self.damaged = self.damaged and progress is None
        else:
            steps = [Mirrored(step, answer_digest(result)) for step, result in message.recorded()]
            if self.differs_next:
                steps, self.differs_next = [replace(one, digest=b"other") for one in steps], False
            late_ms = (self.world.now_ns - message.at_ns) // 1_000_000
            progress = await mirror.apply(steps, self.log.newest, late_ms, offload)
        if progress is not None and answers:
            self.log.answered(progress)
        if not answers:
            self.breaks()

    async def loses_answer(self):
        await self.deliver(answers=False)

    def breaks(self):
        if self.connected:
            self.host.lost(self.nonce)
            self.connected = False

    def restarts(self):
        self.world = HostWorld(spec=self.spec)
        self.follower, self.connected = Follower(), False
        self.subscription = self.host.events.subscribe(0, lambda: None)
        self.under_way: deque[Iteration | Piece] = deque()
        self.differs_next = self.damaged = False

    def differs(self):
        self.differs_next = True

    def is_damaged(self):
        """The service's state changes on its own; a later answer differs."""
        if self.host.state.value == "live":
            pool = specification_of(self.host.replica).coordinator.pool
            pool.restamp(self.random.randrange(1, pool.num_blocks))
            pool.stamped.clear()
            self.damaged = True

    def lapses(self):
        self.world.pass_lease()
        self.host.expire()

    async def happen(self, event):
        done = getattr(self, event)()
        if done is not None:
            await done
        self.check()

    def check(self):
        state = self.host.state.value
        self.seen[state] += 1
        self.follower.read(self.subscription.take())
        if state != "live":
            assert self.follower.withdrawn or not self.follower.view
            return
        assert not self.follower.withdrawn
        assert self.follower.view <= set(_published(self.host.replica))
        if not self.damaged:
            assert digest(self.host.replica) == self.states[self.host.seq]

    async def catch_up(self):
        """Everything works again; the engine continues until the service has followed it."""
        for _ in range(60):
            for event in ("connect", "step", "send", "deliver", "send", "deliver"):
                await self.happen(event)
        while self.log.has_message or self.under_way:
            await self.happen("send")
            await self.happen("deliver")
        assert self.host.seq == self.engine.replica.seq
        assert digest(self.host.replica) == digest(self.engine.replica)


async def play(mix, seed):
    history = History(mix, seed)
    for _ in range(STEPS):
        await history.happen(history.random.choice(EVENTS))
    history.differs_next = False
    await history.catch_up()
    history.seen["divergences"] += history.host.mirror.divergences
    return history


@pytest.mark.parametrize("mix", MIXES)
async def test_a_mirror_is_right_or_hidden(mix):
    histories = [await play(mix, seed) for seed in range(6)]
    seen: Counter[str] = sum((history.seen for history in histories), Counter())
    assert min(seen["live"], seen["lapsed"], seen["diverged"], seen["idle"]) > 10
    assert sum(history.log.num_images for history in histories) > 12


async def test_an_image_that_is_known_by_the_numbers_of_its_classes_is_found():
    with weakened("specs as stated"), pytest.raises(InvalidArgument, match="another spec"):
        await play("window and full", 1)
