"""Explanations of random histories, compared with a model that never reads the log.

The model looks at which keys the cache has after each step, remembers what the engine did when one went, and compares
texts where kvplane compares hashes. One thing is done per step, so that every loss has one cause.
"""

from __future__ import annotations

import asyncio
import string
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple

import pytest

from kvplane.base.groups import GroupKind
from kvplane.base.step import NO_EXTRA_KEYS, AdmitStatus, Cache, End, ExtraKeys, Facts, Part, Run
from kvplane_service.explain.causes import Cause, Why
from kvplane_service.explain.service import Explanation, explain_request
from kvplane_service.runtime.executors import Executor
from kvplane_service.runtime.slices import Turns
from tests.core.builders import chunked, full, replica_spec, state, window
from tests.core.specification import specification_of
from tests.service.test_explain import SPARSE, Desk

SIZE = 4
NUM_STEPS, NUM_SEEDS = 60, 2
SPECS = {
    "full": replica_spec(full(), num_blocks=14),
    "full and window": replica_spec(full(), window(8), num_blocks=26, **SPARSE),
    "full and chunk": replica_spec(full(), chunked(8), num_blocks=26),
    "full and state": replica_spec(full(), state(), num_blocks=26, **SPARSE),
    "state alone": replica_spec(state(), num_blocks=7, **SPARSE),
}
KEPT_NOT = {GroupKind.MAMBA: Cause.NO_STATE_AT_BOUNDARY}


class Place(NamedTuple):
    """Where a text is cached: equal texts of other places do not meet."""

    domain: str = ""
    salt: str = ""


@dataclass
class Known:
    """A request that had blocks, and how many of its tokens were computed."""

    place: Place
    text: str
    computed: int = 0


@dataclass
class Model:
    """The history of each key, observed from outside of the cache."""

    desk: Desk
    requests: dict[str, Known] = field(default_factory=dict)
    present: set[tuple[str, int, bytes]] = field(default_factory=set)
    gone: dict[tuple[str, int, bytes], tuple[set[Cause], str, int]] = field(default_factory=dict)
    of_request: bool = False

    def look(self, causes: set[Cause], by: str = "") -> None:
        """After a step: what is gone went by one of these causes."""
        replica = self.desk.world.host.replica
        now = set(specification_of(replica).coordinator.pool.index)
        for key in self.present - now:
            self.gone[key] = (causes, by, self.desk.engine.seq)
        for key in now:
            self.gone.pop(key, None)
        self.present = now

    def as_it_is(self) -> Model:
        """A copy that later steps leave alone."""
        requests = {name: replace(one) for name, one in self.requests.items()}
        return Model(self.desk, requests, set(self.present), dict(self.gone))

    def check(self, found: Explanation, place: Place, text: str, digests: list[bytes]) -> Cause:
        """The explanation is the model's. Of a request tokens are not known, so other salts are not looked at."""
        self.of_request = bool(found.seq)
        why, missing = found.why, found.account.missing
        if missing is None:
            expected = Cause.NOTHING if len(text) > SIZE else Cause.BELOW_ONE_BLOCK
            assert (why.cause, found.account.hit) == (expected, found.account.longest)
            return expected
        key = (place.domain, missing.group, digests[missing.num_hashes - 1])
        if key in self.present:
            assert why.cause is Cause.TENTATIVE
        elif key in self.gone:
            causes, by, seq = self.gone[key]
            assert why.cause in causes
            assert (why.by, why.seq) == ("" if why.cause is not Cause.EVICTED else by, seq)
        else:
            kind = self.desk.world.host.replica.spec.groups[missing.group].kind
            assert why in set(self._of_others(place, text, (missing.start, missing.end), kind))
        return why.cause

    def _of_others(self, place: Place, text: str, span: tuple[int, int], kind: GroupKind) -> Iterator[Why]:
        """The key was never there: what others computed; the first cause of the list that holds."""
        start, end = span
        places = {one.place for one in self.requests.values() if one.text[:end] == text[:end] and one.computed >= end}
        if place in places:
            assert kind is not GroupKind.FULL_ATTENTION
            yield Why(KEPT_NOT.get(kind, Cause.WINDOW_NOT_RESIDENT), start, end)
        elif {one for one in places if one.salt == place.salt}:
            for one in places:
                if one.salt == place.salt:
                    yield Why(Cause.OTHER_DOMAIN, start, end, by=one.domain)
        elif not self.of_request and {one for one in places if one.domain == place.domain}:
            yield Why(Cause.OTHER_SALT, start, end)
        else:
            yield self._nearest(place, text, span)

    def _nearest(self, place: Place, text: str, span: tuple[int, int]) -> Why:
        texts = [blocks(one.text) for one in self.requests.values() if one.place == place]
        own = blocks(text)
        shared = max((common(other, own) for other in texts), default=0)
        if shared * SIZE < span[1] and any(len(other) > shared == common(other, own) for other in texts):
            return Why(Cause.DIFFERS, shared * SIZE, (shared + 1) * SIZE)
        return Why(Cause.NEVER_CACHED, *span)


def blocks(text: str) -> list[str]:
    return [text[at : at + SIZE] for at in range(0, len(text) - len(text) % SIZE, SIZE)]


def common(one: list[str], other: list[str]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Story:
    """Random deeds of an engine, one a step, each looked at by the model."""

    def __init__(self, desk: Desk, random: Random) -> None:
        self.desk, self.random = desk, random
        self.model = Model(desk)
        self.live: list[str] = []
        self.num_unknown = 0
        self._count = 0
        self._texts = ["".join(random.choices("ab", k=40)) for _ in range(3)]

    def text(self) -> str:
        """Shares its prefix with others, and may differ after it."""
        random = self.random
        text = random.choice(self._texts)[: random.randint(3, 30)]
        if random.random() < 0.5:
            at = random.randrange(len(text))
            text = text[:at] + random.choice(string.ascii_uppercase) + text[at + 1 :]
        return text

    def place(self) -> Place:
        return self.random.choices([Place(), Place(domain="d"), Place(salt="s")], [6, 1, 1])[0]

    def act(self) -> None:
        deeds = (self.admit, self.run, self.free, self.evict, self.reset, self.fail, self.restart)
        self.random.choices(deeds, [8, 3, 6, 1, 0.3, 0.5, 0.3])[0]()

    def admit(self) -> None:
        self._count += 1
        name, place, text = f"r{self._count}", self.place(), self.text()
        slot = self.desk._slots[name] = self._count
        cap = self.random.choice([SIZE, 2 * SIZE, 64])
        part = self.desk.admission(name, text, domain=place.domain, extra_keys=ExtraKeys(salt=place.salt))
        part.admit.cap = [cap]
        before = self.model.as_it_is()
        found = self.desk.step(part).parts[0]
        self._explain_request(before, name, place, text)
        if found.admit_status[0] == AdmitStatus.GRANTED:
            self.live.append(name)
            self.model.requests[name] = Known(place, text, found.admit_hit[0] + found.admit_granted[0])
        self.model.look({Cause.EVICTED, Cause.DROPPED}, name)
        if found.admit_status[0] != AdmitStatus.GRANTED:
            self._end(name)
        assert slot == self._count

    def _explain_request(self, before: Model, name: str, place: Place, text: str) -> None:
        turns, offload = Turns("explanations", 0), Executor("explanations")
        found = asyncio.run(explain_request(self.desk.world.host, name, turns, offload))
        if found.why.cause is Cause.NOT_RECORDED:
            self.num_unknown += 1
        else:
            before.check(found, place, text, self.desk.digests(text, ExtraKeys(salt=place.salt)))

    def run(self) -> None:
        if self.live:
            name = self.random.choice(self.live)
            slot = self.desk._slots[name]
            found = self.desk.step(Part(run=Run(slot=[slot], cap=[2 * SIZE]))).parts[0]
            if found.preempted:
                self.live.remove(name)
            self.model.requests[name].computed += found.granted[0]
            self.model.look({Cause.EVICTED, Cause.DROPPED}, name)
            if found.preempted:
                self._end(name)

    def free(self) -> None:
        if self.live:
            self._end(self.live.pop(self.random.randrange(len(self.live))))

    def _end(self, name: str) -> None:
        self.desk.step(Part(facts=Facts(slot=[self.desk._slots[name]], end=[End.FREE])))
        self.model.look({Cause.DROPPED})

    def evict(self) -> None:
        num_blocks = self.desk.world.host.replica.spec.num_blocks
        self.desk.step(Part(cache=Cache(evicted=[self.random.randrange(1, num_blocks)])))
        self.model.look({Cause.DROPPED})

    def reset(self) -> None:
        self.desk.step(Part(cache=Cache(reset=True)))
        self.model.look({Cause.RESET})

    def fail(self) -> None:
        """The last step never ran: its requests are taken back."""
        if not self.desk.engine.seq:
            return
        done = self.desk.world.host.replica.executed_through
        found = self.desk.step(Part(cache=Cache(failed_steps=[self.desk.engine.seq])), executed_through=done)
        taken = {name for name in self.live if self.desk._slots[name] in found.parts[0].preempted}
        self.live = [name for name in self.live if name not in taken]
        self.model.look({Cause.WITHDRAWN})
        for name in sorted(taken):
            self._end(name)

    def restart(self) -> None:
        """Without stamps: what went before would have gone now, if there is anything to go."""
        self.desk.engine = self.desk.world.open()
        if self.model.present:
            self.model.gone = dict.fromkeys(self.model.gone, ({Cause.WITHOUT_STAMPS}, "", 0))
        self.live.clear()
        self.desk._slots.clear()
        self._count += 1000  # new slots
        self.model.look({Cause.WITHOUT_STAMPS})

    def ask(self) -> Cause:
        place, text = self.place(), self.text()
        keys = ExtraKeys(salt=place.salt) if place.salt else NO_EXTRA_KEYS
        found = self.desk.explain(text, place.domain, keys)
        return self.model.check(found, place, text, self.desk.digests(text, keys))


SEEN: set[Cause] = set()


@pytest.mark.parametrize("name", SPECS)
def test_every_explanation_is_that_of_the_model(name):
    for seed in range(NUM_SEEDS):
        story = Story(Desk(SPECS[name]), Random(seed))
        for _ in range(NUM_STEPS):
            story.act()
            SEEN.add(story.ask())
        assert story.num_unknown == 0


def test_random_scenarios_cover_most_causes():
    assert len(SEEN) >= 13, SEEN
