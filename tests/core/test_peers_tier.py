"""The tier of peers in both cores: what the service adds, loads, failures, images, and what is refused."""

from __future__ import annotations

from random import Random

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import Medium, SavePolicy, TierKind, TierSpec
from kvplane.base.sections import Peers
from kvplane.base.step import Part, Step
from kvplane_core.face import inspect, setup
from kvplane_core.face.keys import seal_key
from kvplane_core.face.state import export_state
from kvplane_core.spec.loading import load_state
from tests.core.builders import digests, full, replica_spec, window
from tests.core.test_tiers import HOST, Mover

PEERS = TierSpec(TierKind.PEERS, 30)
SPEC = replica_spec(full())
TEXT = "aaaabbbbcccc"  # three blocks of four tokens


@pytest.fixture(autouse=True)
def small_pools(monkeypatch):
    monkeypatch.setattr(setup, "AHEAD_SHARE", 1)


def rows(text: str, first: int = 0, group: int = 0, version: int = 1 << 40, domain: str = "") -> Peers:
    """The full blocks of a text, in slots from `first` on; versions are those of another replica."""
    found = digests(SPEC, text)
    slots = list(range(first, first + len(found)))
    versions = [version + at for at in range(len(found))]
    return Peers(slots, versions, [group] * len(found), b"".join(found), [domain] * len(found))


def knowing(*groups, text: str = TEXT) -> Mover:
    engine = Mover(*(groups or (full(),)), tiers=(HOST, PEERS))
    for group in range(len(groups) or 1):
        engine.step(Part(peers=rows(text, 10 * group, group)))
    return engine


def test_a_hit_of_peers_is_loaded_and_registered():
    engine = knowing()
    asked = engine.ask(3, TEXT + "x")
    orders = asked.result.orders
    assert (asked.hit, list(orders.load_tier), list(orders.load_slot)) == (12, [1, 1, 1], [0, 1, 2])
    assert list(orders.load_version) == [1 << 40, (1 << 40) + 1, (1 << 40) + 2]
    assert list(orders.load_key) == [seal_key(("", 0, one)) for one in digests(SPEC, TEXT)]
    assert engine.cache(jobs_done=asked.result.admit_job).preempted == []
    assert engine.admit(4, TEXT + "y").hit == 12
    inspect.check(engine.replica)


def test_each_group_loads_only_what_it_needs():
    engine = knowing(full(), window(4, lookup_class=1))
    orders = engine.ask(3, TEXT + "x").result.orders
    assert sorted(zip(orders.load_group, orders.load_slot, strict=True)) == [(0, 0), (0, 1), (0, 2), (1, 12)]


def test_a_failed_load_forgets_what_it_read():
    engine = knowing()
    (job,) = engine.ask(3, TEXT + "x").result.admit_job
    assert engine.cache(jobs_failed=[job]).preempted == [3]
    assert engine.ask(4, TEXT + "x").hit == 0
    inspect.check(engine.replica)


def host_and_peer() -> Mover:
    """The host has the first two blocks, a peer the third."""
    engine = Mover(full(), tiers=(HOST, PEERS))
    engine.save(TEXT[:8])
    engine.step(Part(peers=rows(TEXT)))
    return engine


def test_a_failed_load_forgets_what_it_read_in_its_farthest_tier_and_the_next_one_the_rest():
    engine = host_and_peer()
    asked = engine.ask(3, TEXT + "x")
    assert list(asked.result.orders.load_tier) == [0, 0, 1]
    assert engine.cache(jobs_failed=asked.result.admit_job).preempted == [3]
    again = engine.ask(4, TEXT[:8] + "y")
    assert list(again.result.orders.load_tier) == [0, 0], "the copies of the host are sound as far as is known"
    assert engine.cache(jobs_failed=again.result.admit_job).preempted == [4]
    last = engine.ask(5, TEXT + "z")
    assert set(last.result.orders.load_tier) == {1}, "those of the peer"
    inspect.check(engine.replica)


@pytest.mark.parametrize("said", ["jobs_done", "jobs_failed"])
def test_a_load_whose_peer_is_gone_forgets_nothing_else(said):
    engine = host_and_peer()
    (job,) = engine.ask(3, TEXT + "x").result.admit_job
    engine.step(Part(peers=Peers(gone=[0, 1, 2])))
    assert engine.cache(**{said: [job]}).preempted == [3]
    assert engine.ask(4, TEXT + "y").hit == 8
    inspect.check(engine.replica)


@pytest.mark.parametrize("change", [Peers(gone=[1]), rows("zzzz", 1), rows(TEXT[:4] + "zzzz", 20)], ids=str)
def test_a_slot_that_changes_while_it_is_loaded_fails_the_load(change):
    engine = knowing()
    (job,) = engine.ask(3, TEXT + "x").result.admit_job
    engine.step(Part(peers=change))
    assert engine.cache(jobs_done=[job]).preempted == [3]
    inspect.check(engine.replica)


def test_what_a_peer_has_is_not_saved_and_nothing_is_saved_at_peers():
    engine = knowing()
    engine.serve(0, TEXT)
    for at in range(12):
        engine.serve(1, "".join(chr(300 + 16 * at + one) for one in range(16)))
        engine.report()
    host, peers = engine.tiers.each
    assert host.num_held > 0
    assert all(host.find(("", 0, one)) is None for one in digests(SPEC, TEXT))
    assert peers.num_held == 3
    inspect.check(engine.replica)


def test_an_engine_whose_pool_peers_read_loads_from_them_and_saves_nothing():
    """The pool is in host memory: what leaves it is nowhere else, and its tier is what peers have."""
    engine = Mover(full(), tiers=(PEERS,), pool=Medium.HOST)
    engine.step(Part(peers=rows(TEXT)))
    asked = engine.ask(3, TEXT + "x")
    assert (asked.hit, list(asked.result.orders.load_tier)) == (12, [0, 0, 0])
    engine.cache(jobs_done=asked.result.admit_job)
    engine.end(3)
    for at in range(12):
        engine.serve(1, "".join(chr(300 + 16 * at + one) for one in range(16)))
        assert engine.saved == []
    assert engine.tiers.each[0].num_held == 3
    assert engine.ask(4, TEXT + "x").hit == 12
    inspect.check(engine.replica)


@pytest.mark.parametrize(("tiers", "pool"), [((HOST, PEERS), Medium.DEVICE), ((PEERS,), Medium.HOST)])
def test_a_core_that_has_recovered_learns_what_peers_have(tiers, pool):
    engine = Mover(full(), tiers=tiers, pool=pool)
    engine.replica.recover(2, [[0] * engine.replica.spec.num_stamps], [])
    engine.replica.apply(Step(2, 1, [Part(peers=rows(TEXT))]))
    assert engine.tiers.each[-1].num_held == 3
    inspect.check(engine.replica)


@pytest.mark.parametrize("behind", [(), (PEERS,)], ids=["alone", "lent"])
def test_a_host_tier_that_peers_read_keeps_what_was_computed_last(behind):
    """Alone it evicts first what the device has too; peers would read that, and read the host tier alone."""
    engine = Mover(full(), tiers=(TierSpec(TierKind.HOST, 24, SavePolicy.THROUGH), *behind), num_blocks=21)
    texts = ["".join(chr(1000 + 16 * number + letter) for letter in range(16)) for number in range(12)]
    for text in texts:
        engine.serve(1, text)
        engine.report()
    host = engine.tiers.each[0]
    kept = [host.find(("", 0, one)) is not None for text in texts[-3:-1] for one in digests(SPEC, text)]
    assert all(kept) == bool(behind)
    inspect.check(engine.replica)


def test_a_load_makes_a_key_of_a_host_tier_that_peers_read_the_last_to_be_evicted():
    engine = host_and_peer()
    engine.save("ddddeeee")
    engine.cache(jobs_done=engine.ask(3, TEXT[:8] + "x").result.admit_job)
    host = engine.tiers.each[0]
    assert not host.shadows
    assert [key for key, _ in host.in_order()][-2:] == [("", 0, one) for one in digests(SPEC, TEXT[:8])]


def test_a_new_life_and_a_reset_know_nothing_of_peers():
    engine = knowing()
    engine.replica.begin_epoch(engine.replica.epoch + 1, engine.shown())
    assert not engine.tiers.has_keys
    engine = knowing()
    engine.cache(reset=True)
    assert not engine.tiers.has_keys
    inspect.check(engine.replica)


def test_an_evicted_block_is_not_loaded_from_a_peer():
    engine = knowing()
    engine.serve(0, TEXT)
    engine.cache(evicted=engine.table(0)[:1] or [1])
    inspect.check(engine.replica)


def test_random_rows_keep_both_cores_equal_and_images_whole():
    engine, rng = Mover(full(), window(8, lookup_class=1), tiers=(HOST, PEERS)), Random(7)
    texts = ["".join(rng.choice("abc") * 4 for _ in range(4)) for _ in range(9)]
    for at in range(150):
        peers = rows(rng.choice(texts), rng.randrange(20), rng.randrange(2), rng.randrange(1, 1 << 45))
        peers.gone = rng.sample(range(30), rng.randrange(3))
        engine.step(Part(peers=peers))
        slot = at % 5
        jobs = [job for job in engine.ask(slot, rng.choice(texts) + "x").result.admit_job if job]
        if rng.random() < 0.7:
            engine.cache(**{rng.choice(["jobs_done", "jobs_failed"]): jobs})
        if rng.random() < 0.5:
            engine.report()
        engine.end(slot)
        inspect.check(engine.replica)
    image = export_state(engine.replica)
    assert export_state(load_state(engine.replica.spec, image)) == image


@pytest.mark.parametrize(
    ("peers", "field"),
    [
        (Peers([30], [1], [0], bytes(32)), "peers.slot"),
        (Peers([1], [0], [0], bytes(32)), "peers.version"),
        (Peers([1], [1], [1], bytes(32)), "peers.group"),
        (Peers([1], [1], [0], bytes(31)), "peers.hashes"),
        (Peers([1], [], [0], bytes(32)), "peers.version"),
        (Peers([1], [1], [], bytes(32)), "peers.group"),
        (Peers([1], [1], [0], bytes(32), ["", ""]), "peers.domain"),
        (Peers(gone=[30]), "peers.gone"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_rows_that_name_nothing_are_refused(peers, field):
    engine = knowing()
    with pytest.raises(InvalidArgument) as refused:
        engine.step(Part(peers=peers))
    assert refused.value.field == f"parts[0].{field}"


def test_rows_without_such_a_tier_are_refused():
    with pytest.raises(InvalidArgument, match="no tier of peers"):
        Mover(full()).step(Part(peers=rows(TEXT)))


@pytest.mark.parametrize(
    "tiers",
    [(PEERS,), (HOST, TierSpec(TierKind.DISK, 9), PEERS), (HOST, TierSpec(TierKind.PEERS, 9, SavePolicy.THROUGH))],
)
def test_other_orders_of_tiers_are_refused(tiers):
    with pytest.raises(InvalidArgument, match="tiers"):
        replica_spec(full(), tiers=tiers).validate()


def test_keys_of_seals():
    assert seal_key(("", 3, b"\x01" * 24 + b"\x00" * 7 + b"\x05")) == 5
    assert seal_key(("a", 3, bytes(32))) == 0xAF63DC4C8601EC8C, "FNV-1a of 64 bits"
