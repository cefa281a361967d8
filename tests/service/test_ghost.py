"""The ghost pool: equal to LRU pools of each size where it follows all keys, near them where it follows a sample."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from itertools import accumulate, pairwise
from random import Random

import pytest

from kvplane.base.groups import GroupKind, GroupSpec
from kvplane.base.step import (
    Admit,
    AdmitStatus,
    Cache,
    CacheEvent,
    End,
    EventKind,
    Facts,
    News,
    Part,
    PartResult,
    Step,
    StepResult,
)
from kvplane.session.builder import StepBuilder
from kvplane_core.spec.replica import Replica
from kvplane_service.decisions.ghost import DEPTH, SIZES, GhostLru, MissCurve
from kvplane_service.decisions.log import Decision, Life
from tests.service.hosts import BLOCK, FULL, HostWorld, spec_of
from tests.service.test_decisions import new

DIGEST = 32


def chain(names: tuple[int, ...]) -> list[bytes]:
    """Return the digests of the blocks of a prompt with this content."""
    return list(accumulate(names, lambda parent, name: blake2b(parent + b"%d" % name).digest()[:DIGEST], initial=b""))[
        1:
    ]


def prompts(seed: int, count: int, sessions: int, longest: int) -> Iterator[tuple[int, ...]]:
    """Yield prompts of sessions that grow and begin again; those of one kind begin with the same blocks."""
    rng = Random(seed)
    open_sessions: list[tuple[int, ...]] = [(0,)] * sessions
    for number in range(count):
        which = min(int(rng.expovariate(4 / sessions)), sessions - 1)
        before = open_sessions[which]
        grown = (*before, *(number * 100 + at for at in range(1 + rng.randrange(longest // 4))))
        open_sessions[which] = grown if len(grown) <= longest else (which % 3,)
        yield open_sessions[which]


class Followed:
    """A ghost, and what a replica reports to it."""

    def __init__(self, num_blocks: int, groups: tuple[GroupSpec, ...] = (FULL,)) -> None:
        self.replica = Replica(replace(spec_of(num_blocks + 1, max_model_len=1 << 20), groups=groups))
        self.ghost = GhostLru(self.replica)

    def report(self, part: Part, *status: AdmitStatus, reset_done: bool = False) -> None:
        result = PartResult(admit_status=[*map(int, status)], reset_done=reset_done)
        self.ghost.add(Decision(Step(1, 1, [part]), StepResult(1, 0, [result]), ((),), 0, 0))

    def serve(self, names: tuple[int, ...], domain: str = "", skips: bool = False) -> None:
        """Admit and end a request whose prompt has a token more than these blocks."""
        self.begin(names, domain, skips)
        self.report(Part(facts=Facts([0], end=[int(End.FREE)])))

    def begin(self, names: tuple[int, ...], domain: str = "", skips: bool = False) -> None:
        one = News([0], [len(names) * BLOCK + 1], num_hashes=[len(names)], hashes=b"".join(chain(names)))
        one.skip_reading = [1] if skips else []
        one.domain = [domain] if domain else []
        self.report(Part(news=one, admit=Admit([0])), AdmitStatus.GRANTED)

    @property
    def curve(self) -> MissCurve:
        found = self.ghost.curve(self.replica)
        assert found is not None
        return found

    def hits(self, part: tuple[int, int] = (1, 1)) -> int:
        """Return the hit blocks of a pool of a size."""
        return self.curve.sizes[SIZES.index(part)].hit_tokens // BLOCK


class LruPool:
    """A pool of blocks with keys that evicts the least recently used one."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks, self.hits, self._keys = num_blocks, 0, OrderedDict[bytes, None]()

    def serve(self, digests: list[bytes]) -> None:
        self.hits += next((at for at, digest in enumerate(digests) if digest not in self._keys), len(digests))
        for digest in reversed(digests):
            self._keys[digest] = None
            self._keys.move_to_end(digest)
        while len(self._keys) > self.num_blocks:
            self._keys.popitem(last=False)


def both(num_blocks: int, trace: Iterator[tuple[int, ...]]) -> tuple[Followed, list[LruPool]]:
    followed = Followed(num_blocks)
    pools = [LruPool(num_blocks * part // whole) for part, whole in SIZES]
    for names in trace:
        followed.serve(names)
        digests = chain(names)
        for pool in pools:
            pool.serve(digests)
    return followed, pools


@pytest.mark.parametrize("seed", range(4))
def test_ghost_of_all_keys_equals_pools_of_each_size(seed):
    followed, pools = both(64, prompts(seed, 150, 12, 20))
    assert [size.hit_tokens // BLOCK for size in followed.curve.sizes] == [pool.hits for pool in pools]
    assert [size.blocks for size in followed.curve.sizes] == [pool.num_blocks for pool in pools]
    assert len({pool.hits for pool in pools}) > 4


def test_ghost_of_a_sample_is_near_pools_of_each_size():
    followed, pools = both(5000, prompts(0, 1200, 120, 120))
    queried = followed.curve.queried_tokens
    errors = [
        size.hit_tokens / queried - pool.hits * BLOCK / queried
        for size, pool in zip(followed.curve.sizes, pools, strict=True)
    ]
    assert followed.ghost._shift == 2
    assert max(map(abs, errors)) < 0.02
    assert pools[-1].hits > 1.5 * pools[0].hits
    assert len(followed.ghost._stack._age) <= 1 << 13


def test_ghost_counts_recent_look_ups_more():
    followed = Followed(16)
    for number in range(600):
        followed.serve((number * 2, number * 2 + 1))
    assert followed.hits() == 0
    tokens = followed.curve.queried_tokens
    assert tokens < 600 * 33
    for _ in range(600):
        followed.serve((1, 2))
    assert followed.hits() * BLOCK > followed.curve.queried_tokens * 0.7


def test_ghost_keeps_domains_apart_and_forgets_at_a_reset():
    followed = Followed(16)
    followed.serve((1, 2), "a")
    followed.serve((1, 2), "b")
    assert followed.hits() == 0
    followed.serve((1, 2), "a")
    assert followed.hits() == 2
    followed.report(Part(cache=Cache(reset=True)), reset_done=True)
    followed.serve((1, 2), "a")
    assert followed.hits() == 2
    followed.ghost.add(Life(2, (), [CacheEvent(EventKind.CLEARED)], 0))
    followed.serve((1, 2), "a")
    assert followed.hits() == 2
    followed.ghost.add(Life(3, (), [], 0))
    followed.serve((1, 2), "a")
    assert followed.hits() == 4


def test_ghost_follows_packed_steps_as_it_follows_others():
    rng, slots = Random(3), [0, 1, 2, 3]
    packed, plain = Followed(64), Followed(64)
    builder, compared = StepBuilder(slots), 0

    def report(one: Followed, part: Part, result: PartResult) -> None:
        one.ghost.add(Decision(Step(1, 1, [part]), StepResult(1, 0, [result]), ((),), 0, 0))

    def begin(slot: int) -> None:
        news = News([slot], [2 * BLOCK + 1], num_hashes=[2], hashes=rng.randbytes(2 * DIGEST))
        for one in (packed, plain):
            one.report(Part(news=news, admit=Admit([slot])), AdmitStatus.GRANTED)

    for slot in slots:
        begin(slot)
    for _ in range(300):
        counts = [rng.randrange(2) for _ in slots]
        hashes, gone = rng.randbytes(DIGEST * sum(counts)), [slot for slot in slots if rng.random() < 0.01]
        ends = list(accumulate(counts, lambda end, count: end + count * DIGEST, initial=0))
        made = [hashes[start:end] for start, end in pairwise(ends)]
        report(packed, builder.part(), PartResult(hashed_facts=made, preempted=gone))
        facts = Facts(slots, appended=[1] * len(slots), num_hashes=counts, hashes=hashes)
        report(plain, Part(facts=facts), PartResult(preempted=gone))
        if rng.random() < 0.1:
            slot = rng.choice(slots)
            for one in (packed, plain):
                one.report(Part(facts=Facts([slot], end=[int(End.FREE)])))
            begin(slot)
            assert list(packed.ghost._stack._age.items()) == list(plain.ghost._stack._age.items())
            compared += 1
    assert compared > 20
    assert packed.curve == plain.curve


@pytest.mark.parametrize("packed", [False, True])
def test_ghost_counts_a_preempted_request_once_and_its_output_as_used(packed):
    followed = Followed(16)
    followed.begin((1, 2))
    more = chain((1, 2, 3))[2]
    builder = StepBuilder([7, 0], hashed=True)
    builder.add_hash(1, more)
    facts = Facts([7, 0], appended=[1, 1], num_hashes=[0, 1], hashes=more)
    followed.report(builder.part() if packed else Part(facts=facts))
    followed.report(Part(facts=Facts([0], end=[int(End.PREEMPTED)]), admit=Admit([0])), AdmitStatus.GRANTED)
    followed.report(Part(facts=Facts([0], end=[int(End.FREE)])))
    assert followed.curve.queried_tokens == 33
    followed.serve((1, 2, 3))
    assert followed.hits() == 3


def test_ghost_does_not_count_requests_that_read_nothing_or_are_not_admitted():
    followed = Followed(16)
    followed.serve((1, 2), skips=True)
    part = Part(news=News([1], [33], num_hashes=[2], hashes=b"".join(chain((5, 6)))), admit=Admit([1]))
    followed.report(part, AdmitStatus.REFUSED)
    assert followed.ghost.curve(followed.replica) is None
    followed.serve((1, 2))
    assert followed.hits() == 2


def test_ghost_divides_the_pool_among_groups():
    followed = Followed(16, (FULL, FULL))
    for _ in range(2):
        for number in range(8):
            followed.serve((number,))
    assert (followed.hits((3, 4)), followed.hits((1, 1))) == (0, 8)


def test_ghost_needs_a_group_that_keeps_whole_prefixes():
    window = GroupSpec(GroupKind.SLIDING_WINDOW, BLOCK, window=32)
    followed = Followed(16, (window,))
    followed.serve((1, 2))
    assert followed.ghost.curve(followed.replica) is None


def test_ghost_follows_a_host():
    world = HostWorld()
    engine = world.open()
    engine.step(new(0))
    engine.step(new(1))
    curve = world.host.miss_curve()
    assert curve is not None
    assert (curve.queried_tokens, curve.sizes[-1]) == (80, (20 * DEPTH, 32))
