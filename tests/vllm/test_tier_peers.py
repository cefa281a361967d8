"""Engines that load what others have in host memory: no page is wrong, and little is computed twice."""

from __future__ import annotations

import itertools
import random
import threading
import time
from dataclasses import replace

import pytest

from kvplane.base.errors import Diverged, NoPlan, Unavailable
from kvplane.base.groups import SavePolicy, TierKind, TierSpec
from kvplane.base.sections import Peers
from kvplane.base.step import Part, Step
from kvplane_service.config import Config
from kvplane_service.replicas import mirror
from kvplane_service.rpc import session
from kvplane_vllm.target import Target
from kvplane_vllm.tiers import hints, peers
from kvplane_vllm.tiers.host import host_spec
from kvplane_vllm.tiers.messages import Seals
from kvplane_vllm.tiers.rank import TierRank
from kvplane_vllm.tiers.service import joined
from kvplane_vllm.tiers.settings import Settings
from kvplane_worker.tiers import PeerSlots
from kvplane_worker.tiers.seal import HEADER_BYTES
from tests.core.builders import new_replica
from tests.service.rig import running
from tests.store.servers import wait_until
from tests.vllm.followed import Followed, hashed_as_by_a_service, hint
from tests.vllm.tier_world import PAGE, cache, engine_spec

PROMPT = [3] * 40
OTHERS = itertools.count(1 << 20)  # first tokens of prompts that nothing else has
WAIT_S = 20.0
AMPLE, SCARCE = 4000, 70  # blocks of host memory


@pytest.fixture(autouse=True)
def hashed():
    with hashed_as_by_a_service():
        yield


@pytest.fixture
def service(monkeypatch):
    for module in (session, mirror):
        monkeypatch.setattr(module, "LOOK_S", 0.002)  # these engines take a step in as little time
    with running(Config(listen="127.0.0.1:0", worker_lease_ms=1000)) as one:
        yield one


def shown(condition, worlds):
    """Let engines run steps until something holds."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it does not come to hold"
        for world in worlds:
            world.answer([next(OTHERS), *range(5)])


class Peer(Followed):
    """An engine that reads the host memory of others, and lends its own."""

    def __init__(self, service, name, host=AMPLE, seed=5, lag=0):
        self.name, self.service, self.on_turn = name, service, lambda: None
        target = Target(service.address, name)
        super().__init__(service, name, Settings(host * PAGE, None, 0, SavePolicy.THROUGH, 5.0, target, 4), seed, lag)

    def turn(self):
        super().turn()
        self.on_turn()

    @property
    def lent(self):
        """What its rank lends and reads."""
        assert self.rank.peers is not None
        return self.rank.peers

    @property
    def counts(self):
        """What was loaded from peers."""
        return self.lent.slots.counts

    @property
    def num_known(self):
        """Blocks of peers that the engine can load."""
        return self.planner.host.replica.tiers.each[0].num_held

    @property
    def reads(self):
        """Names of the peers that its ranks read."""
        return {one.replica for one in self.service.describe(self.name).peers if one.is_read}

    def knows(self, *others):
        """Run steps until the engine knows all that the others have, which are idle."""
        self.applied()
        shown(lambda: self.reads == {one.name for one in others}, [self])
        for one in others:
            one.applied()
        held = lambda: sum(one.planner.host.replica.count_keys() for one in others)  # noqa: E731
        shown(lambda: self.num_known == held(), [self])


def test_what_one_engine_has_another_loads(service):
    with Peer(service, "a") as a, Peer(service, "b") as b:
        a.answer([*PROMPT, 1])
        b.knows(a)
        b.answer([*PROMPT, 2])
        assert (a.wrong, b.wrong, b.planner.counts.loaded_tokens) == (0, 0, 40)
        blocks = 10 + 2  # of full attention, and of a window of two blocks
        assert (b.counts.loaded, b.counts.loaded_bytes, b.counts.refused) == (blocks, blocks * PAGE, 0)
        b.applied()
        (found,) = [one for one in service.describe("b").tiers if one.kind]
        assert found.held_blocks == b.num_known


def test_what_steps_in_flight_store_while_the_service_reads_all_is_known_too(service):
    with Peer(service, "b") as b, Peer(service, "a") as a:
        a.applied()
        b.applied()
        shown(lambda: b.reads == {"a"}, [b])
        namespace = service.app.registry.get("a").namespace
        member = namespace._members["a"]
        seen: list[object] = []

        def read_all():
            if member.stored and not seen:
                seen.extend(member.stored)
                member.note_all()
                namespace.news_of("b")

        a.on_turn = lambda: service.in_loop(read_all)
        a.answer([*PROMPT, 1])
        assert seen
        b.knows(a)


def test_what_was_copied_is_lent_in_turn(service):
    with Peer(service, "b") as b:
        with Peer(service, "a") as a:
            a.answer([*PROMPT, 1])
            b.knows(a)
            b.answer([*PROMPT, 2])
        with Peer(service, "c") as c:
            c.knows(b)
            c.answer([*PROMPT, 3])
            assert (c.wrong, c.planner.counts.loaded_tokens, c.counts.loaded) == (0, 40, 12)


class Ranks:
    """Two ranks of tensor parallelism, with equal pages."""

    def __init__(self, config, settings, views):
        self.each = [TierRank(config, cache(), settings, views, number) for number in range(2)]
        self.loaded: list[set[str]] = [set(), set()]
        self.failed: set[str] = set()

    def begin(self, orders):
        for one in self.each:
            one.begin(orders)

    def end(self, orders):
        for one in self.each:
            one.end(orders)

    def take_loads(self):
        """As vLLM: a load has ended when all ranks have ended it."""
        for loaded, one in zip(self.loaded, self.each, strict=True):
            ended, failed = one.take_loads()
            loaded |= ended
            self.failed |= failed
        done = set.intersection(*self.loaded)
        self.loaded = [loaded - done for loaded in self.loaded]
        failed, self.failed = self.failed & done, self.failed - done
        return done, failed

    def progress(self):
        first, second = (one.progress() for one in self.each)
        return first.with_(second)

    def close(self):
        for one in self.each:
            one.close()


class Parallel(Peer):
    def start_rank(self, config, settings, views):
        return Ranks(config, settings, views)

    @property
    def ready(self):
        return [one.ready for one in self.rank.each]


def test_each_rank_loads_from_its_own_and_a_rank_that_cannot_is_no_peer(service):
    with Parallel(service, "a") as a, Parallel(service, "b") as b:
        a.answer([*PROMPT, 1])
        b.knows(a)
        b.answer([*PROMPT, 2])
        assert (b.wrong, b.planner.counts.loaded_tokens) == (0, 40)
        assert [one.peers.slots.counts.loaded for one in b.rank.each] == [12, 12]
        a.answer([*[4] * 40, 1])
        b.knows(a)
        a.rank.each[1].peers._arena.headers[:] = bytes(len(a.rank.each[1].peers._arena.headers))
        b.answer([*[4] * 40, 2])
        assert (b.wrong, b.planner.counts.loaded_tokens) == (0, 40)
        assert b.planner.counts.failed_loads == 1
        with Peer(service, "c") as c:  # of another number of ranks
            c.applied()
            assert list(service.describe("c").peers) == []


def played(service, host, seed, lag, steps=150):
    """Let three engines answer prompts with beginnings in common at the same time; return them, at rest and closed."""
    worlds = [Peer(service, name, host, seed, lag) for name in "abc"]
    rng = random.Random(seed)
    prompts = [[rng.randrange(9) for _ in range(72)] for _ in range(40)]
    try:
        for world in worlds:
            world.prompts = prompts
            world.applied()
        for world in worlds:
            shown(lambda: len(world.reads) == 2, [world])  # noqa: B023 -- it is called in the loop
        for number in range(steps + 4000):
            for world in worlds:
                if number < steps and len(world.requests) < 6 and rng.random() < 0.5:
                    world.arrive()
                if number < steps and world.of("waiting") and rng.random() < 0.05:
                    world.abort()
                world.schedule()
                while len(world.flight) > rng.randint(0, lag):
                    world.execute()
            time.sleep(0.004)  # what peers have arrives meanwhile
            is_idle = not any(one.requests or one.flight or one.planner.is_busy for one in worlds)
            if number >= steps and is_idle:
                break
        for world in worlds:
            world.applied()
            assert world.planner.host.replica.block_counts.held == 0
            assert world.planner.counts.mismatched == 0
        return worlds
    finally:
        for world in worlds:
            world.__exit__()


@pytest.mark.parametrize(("host", "lag"), [(AMPLE, 0), (AMPLE, 2), (SCARCE, 0), (SCARCE, 1)])
def test_no_page_is_wrong_while_engines_lend_evict_and_load(host, lag, service):
    worlds = played(service, host, 3 + lag, lag)
    assert sum(one.wrong for one in worlds) == 0
    assert sum(one.checked for one in worlds) > 500
    assert sum(one.counts.loaded for one in worlds) > 20


def test_what_the_service_has_said_at_different_times_is_said_at_once():
    """Against a core that learns one after another."""
    rng, keys = random.Random(4), [(group, bytes([number]) * 32) for group in range(2) for number in range(12)]
    for _ in range(300):
        said = []
        for _ in range(rng.randint(1, 5)):
            chosen = rng.sample(keys, rng.randint(0, 5))
            slots = rng.sample(range(16), len(chosen))
            digests = b"".join(digest for _, digest in chosen)
            versions = [rng.randint(1, 99) for _ in chosen]
            gone = rng.sample(range(16), rng.randint(0, 3))
            said.append(Peers(slots, versions, [group for group, _ in chosen], digests, [""] * len(chosen), gone))
        assert known_by_core(said, keys) == known_by_core([joined(said)], keys)


def known_by_core(sections, keys):
    """Return in which slots a core finds keys then."""
    core = new_replica(host_spec(engine_spec(128, 64), SCARCE, (TierSpec(TierKind.PEERS, 16),)))
    for seq, one in enumerate(sections, 1):
        core.apply(Step(0, seq, [Part(peers=one)]))
    return [core.tiers.each[0].find(("", *key)) for key in keys]


def damage_payload(peer):
    for at in range(0, len(peer.lent._arena.rows), 32):
        peer.lent._arena.rows[at] ^= 1


def damage_headers(peer):
    peer.lent._arena.headers[40] ^= 1
    for at in range(0, len(peer.lent._arena.headers), 8):
        peer.lent._arena.headers[at] ^= 1


@pytest.mark.parametrize("damage", [damage_payload, damage_headers])
def test_damaged_memory_is_refused_and_the_prompt_is_computed(damage, service):
    with Peer(service, "a") as a, Peer(service, "b") as b:
        a.answer([*PROMPT, 1])
        b.knows(a)
        damage(a)
        b.answer([*PROMPT, 2])
        assert (b.wrong, b.planner.counts.loaded_tokens, b.counts.loaded) == (0, 0, 0)
        assert b.planner.counts.failed_loads == 1
        assert b.planner.host.replica.block_counts.held == 0


def test_what_is_not_verified_gives_wrong_pages(service, monkeypatch):
    """The planted fault: a reader trusts what it has copied."""
    monkeypatch.setattr(PeerSlots, "_is_right", lambda *_: True)
    with Peer(service, "a") as a, Peer(service, "b") as b:
        a.answer([*PROMPT, 1])
        b.knows(a)
        damage_payload(a)
        b.answer([*PROMPT, 2])
        assert b.wrong > 0


def test_a_row_that_is_written_again_gets_no_seal_of_what_it_held(service):
    with Peer(service, "a") as a:
        a.answer([*PROMPT, 1])
        lent, stamps = a.lent, a.lent._stamps
        before = bytes(lent._arena.headers)
        lent.seal(Seals([1], [0], [stamps.words[1] - 1], [5]))
        assert bytes(lent._arena.headers) == before


def test_a_service_that_accepts_few_rows_from_engines_still_says_what_peers_have(monkeypatch):
    config = Config(listen="127.0.0.1:0", worker_lease_ms=1000, max_rows_per_step=32)
    with running(config) as service, Peer(service, "a") as a, Peer(service, "b") as b:
        for number in range(8):
            a.answer([*[50 + number] * 60, 1])
        b.knows(a)
        assert b.num_known > 200
        b.answer([*[50] * 60, 2])
        assert (b.wrong, b.planner.counts.loaded_tokens) == (0, 60)
        b.applied()
        assert service.describe("b").mirror.images == 1


def test_what_an_earlier_service_has_said_is_forgotten(service):
    """As when a service starts again: it has the engine's state, and gives the memory of peers other slots."""
    with Peer(service, "a") as a, Peer(service, "b") as b:
        a.answer([*PROMPT, 1])
        b.knows(a)
        core, slots = b.planner.host.replica, range(3000, 3010)
        digests = b"".join(bytes([at]) * 32 for at in range(10))
        b.planner.host.apply(Part(peers=Peers(list(slots), [7] * 10, [0] * 10, digests, [""] * 10)))
        assert b.num_known == a.planner.host.replica.count_keys() + 10
        service.in_loop(lambda: service.app.registry.get("b").host.mirror.cut_off(Diverged("planted")))
        shown(lambda: core.tiers.each[0].num_held == a.planner.host.replica.count_keys(), [b])
        b.answer([*PROMPT, 2])
        assert (b.wrong, b.planner.counts.loaded_tokens) == (0, 40)


def test_what_a_broken_stream_has_lost_is_sent_again(service):
    with Peer(service, "a") as a, Peer(service, "b") as b:
        a.applied()
        b.applied()
        shown(lambda: b.reads == {"a"}, [b])
        b.applied()
        host = service.app.registry.get("b").host
        requests = host.mirror.requests
        service.in_loop(lambda: setattr(requests, "send", lambda _: None))
        a.answer([*PROMPT, 1])
        a.applied()
        wait_until(lambda: requests.offered, "the service has sent what is lost")
        service.in_loop(lambda: host._session.on_end(Unavailable("planted")))
        wait_until(lambda: b.follows.sender.state.problem is not None, "the stream has ended")
        b.knows(a)
        b.answer([*PROMPT, 2])
        assert (b.wrong, b.planner.counts.loaded_tokens) == (0, 40)
        assert b.follows.sender.state.images == 1


def test_a_prompt_that_is_read_and_not_asked_for_is_lent_in_turn(service):
    """Its keys are stored in a step without copies."""
    with Peer(service, "a") as a, Peer(service, "b") as b, Peer(service, "c") as c:
        a.answer([*PROMPT, 1])
        b.knows(a, c)
        b.answer([8] * 6, hint(hints.PREFETCH, token_ids=PROMPT))
        b.idle()
        assert b.in_host(PROMPT) == 40
        assert not b.planner.host._stored
        stored, headers = set(b.planner.host.replica.entries(range(1, AMPLE)).block), b.lent._arena.headers
        is_sealed = lambda at: any(headers[at * HEADER_BYTES : (at + 1) * HEADER_BYTES])  # noqa: E731
        shown(lambda: {at for at in range(AMPLE) if is_sealed(at)} == stored, [])  # by the thread that copies


def test_an_engine_ends_while_its_service_hangs(service, monkeypatch):
    monkeypatch.setattr(peers, "CLOSE_S", 0.2)
    a = Peer(service, "a")
    a.answer([*PROMPT, 1])
    held = threading.Event()
    service.loop.call_soon_threadsafe(held.wait)
    try:
        a.rank.close()
        assert a.rank.peers._thread.is_alive(), "it waits for the service, and the engine does not"
    finally:
        held.set()
    a.rank.peers._thread.join(WAIT_S)
    assert not a.rank.peers._thread.is_alive()
    a.planner.host.shut_down()


def test_after_a_reset_nothing_is_lent_or_loaded(service):
    with Peer(service, "a") as a, Peer(service, "b") as b:
        a.answer([*PROMPT, 1])
        b.knows(a)
        assert a.planner.reset()
        a.answer([*PROMPT, 1])
        a.applied()
        shown(lambda: b.num_known == 0, [b])
        b.answer([*PROMPT, 2])
        assert (b.counts.loaded, b.counts.failed, b.wrong) == (0, 0, 0)


def test_an_engine_that_starts_again_is_a_peer_with_other_memory(service):
    with Peer(service, "b") as b:
        with Peer(service, "a") as a:
            a.answer([*PROMPT, 1])
            b.knows(a)
        with Peer(service, "a") as a:
            a.answer([*[4] * 40, 1])
            b.knows(a)
            b.answer([*[4] * 40, 2])
            assert (b.planner.counts.loaded_tokens, b.wrong) == (40, 0)
            b.answer([*PROMPT, 2])
            assert (b.planner.counts.loaded_tokens, b.wrong) == (40, 0)


def test_engines_with_other_weights_are_no_peers(service, monkeypatch):
    with Peer(service, "a") as a:
        a.answer([*PROMPT, 1])
        monkeypatch.setattr("kvplane_vllm.tiers.rank.content_of", lambda *_: bytes(16))
        with Peer(service, "b") as b:
            b.answer([*PROMPT, 2])
            b.applied()
            assert (b.reads, list(service.describe("b").peers), b.counts.loaded) == (set(), [], 0)


def test_a_worker_that_has_no_memory_gets_no_plan(service):
    with Peer(service, "a") as a:
        a.answer([*PROMPT, 1])
        a.applied()
        lent = a.lent
        info = replace(lent._info, host_incarnation=b"", rank=0)
        with pytest.raises(NoPlan):
            lent._client.register_worker("a", info)
