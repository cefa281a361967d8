"""What an engine has in other tiers than the device: kept apart, never claimed as a hit, and priced by what it takes to
load.
"""

from __future__ import annotations

import msgspec
import pytest

from kvplane.base.groups import TierKind, TierSpec
from kvplane.v1 import routing_pb2 as pb
from kvplane_fleet.decisions import Event
from kvplane_fleet.router.messages import encode_decision
from kvplane_fleet.wire.events import Batch, Removed, Stored, Tier
from tests.core.builders import full, replica_spec, window
from tests.router.fleets import BLOCK, DOMAIN, FULL, GROUPS, WINDOW, Scene, chosen, content, finished, tokens

PROMPT = tokens(1, 20)
KEYS = DOMAIN.keys(PROMPT)
HOST, PEERS = TierSpec(TierKind.HOST, 8), TierSpec(TierKind.PEERS, 16)
MEDIA = {Tier.HOST: "CPU", Tier.DISK: "STORAGE"}


def offloads(scene, name, tier, keys, group=0):
    """Publish an event of vLLM's connector about blocks that it has: no tokens, no parent, block size 0."""
    event: dict[str, object] = {"type": "BlockStored", "block_hashes": list(keys), "token_ids": []}
    event["parent_block_hash"] = None
    event |= {"block_size": 0, "lora_id": None, "medium": MEDIA[tier], "lora_name": None, "group_idx": group}
    finished(scene.place(name).applying(msgspec.msgpack.encode([1.0, [event], 0])))
    assert not scene.place(name).faults.counts


def claim_of(scene, name, prompt=PROMPT):
    return next(one.claim for one in scene.score(prompt).places if one.claim.place == name)


def test_tiers_extend_a_hit_and_are_no_part_of_it():
    scene = Scene("a")
    scene.stores("a", PROMPT[: 4 * BLOCK])
    offloads(scene, "a", Tier.HOST, KEYS[2:10])
    offloads(scene, "a", Tier.DISK, KEYS[10:])
    claim = claim_of(scene, "a")
    assert (claim.tokens, claim.expected, claim.host, claim.disk) == (64, 64, 6 * BLOCK, 9 * BLOCK)
    finished(scene.place("a").applying_batch(Batch(1.0, [Removed(0, Tier.HOST, KEYS[4:5])])))
    claim = claim_of(scene, "a")
    assert (claim.tokens, claim.host, claim.disk) == (64, 0, 0)
    scene.removes("a", PROMPT[: 4 * BLOCK])
    assert claim_of(scene, "a").tokens == 0


def test_a_window_in_host_memory_extends_the_hit_of_all_groups():
    scene = Scene("a", groups=GROUPS)
    scene.stores("a", PROMPT, only=0)
    assert claim_of(scene, "a").expected == 0
    offloads(scene, "a", Tier.HOST, KEYS[8:10], group=1)
    claim = claim_of(scene, "a")
    assert (claim.tokens, claim.host) == (0, 10 * BLOCK)
    assert claim.single_group > claim.expected


def test_what_is_in_a_tier_costs_its_load_and_not_its_computation():
    scene = Scene("a", "b", "c", host_tokens_per_s=1e6, disk_tokens_per_s=3e4)
    offloads(scene, "a", Tier.HOST, KEYS)
    offloads(scene, "b", Tier.DISK, KEYS)
    decision = scene.score(PROMPT)
    costs = {one.claim.place: one.option.cost for one in decision.places}
    assert [one.claim.place for one in decision.places] == ["a", "b", "c"]
    assert costs["a"].load_s == pytest.approx(19 * BLOCK / 1e6)
    assert costs["b"].load_s == pytest.approx(19 * BLOCK / 3e4)
    assert (costs["c"].load_s, costs["a"].miss_s < costs["c"].miss_s) == (0.0, True)
    assert costs["a"].first_token_s == costs["a"].queue_s + costs["a"].miss_s + costs["a"].load_s
    scene.stores("c", PROMPT)
    assert chosen(scene.score(PROMPT)) == "c"
    shares = {one.claim.place: one.option.cached_share for one in scene.score(PROMPT).places}
    assert shares["a"] == shares["b"] == pytest.approx(0.8 * shares["c"])


def test_a_disk_that_is_slower_than_the_engine_is_not_worth_a_detour():
    scene = Scene("a", "b", prefill_tokens_per_s=1e5, disk_tokens_per_s=100.0)
    offloads(scene, "b", Tier.DISK, KEYS)
    assert chosen(scene.score(PROMPT)) == "a"


def test_an_answer_states_the_tiers():
    scene = Scene("a")
    offloads(scene, "a", Tier.HOST, KEYS[:4])
    (place,) = encode_decision(scene.score(PROMPT), scene.decisions, 0).places
    assert (place.hit_tokens, place.host_tokens, place.disk_tokens) == (0, 64, 0)
    assert place.cost.load_s > 0
    assert isinstance(place, pb.PlaceScore)


@pytest.mark.parametrize(
    ("cached", "cause"),
    [(64, "equal"), (160, "equal"), (128, "loaded"), (48, "unexplained"), (176, "loaded")],
)
def test_an_engine_that_loads_all_or_nothing_of_a_tier_is_as_claimed(cached, cause):
    scene = Scene("a")
    scene.stores("a", PROMPT[: 4 * BLOCK])
    offloads(scene, "a", Tier.HOST, KEYS[4:10])
    name = scene.book(PROMPT)[1]
    assert scene.decisions.ended(name, Event(scene.clock(), cached)) == cause
    truth = scene.decisions.work_of("a").truth
    assert truth.claimed - truth.real in (0, 160 - cached)
    assert truth.differences[cause] == abs(truth.claimed - truth.real)


@pytest.mark.parametrize(
    ("tiers", "blocks", "cause"),
    [((HOST,), 10, "unexplained"), ((HOST, PEERS), 10, "loaded"), ((HOST, PEERS), 2, "unexplained")],
)
def test_a_hit_that_peers_made_longer_is_no_reason_to_doubt(tiers, blocks, cause):
    scene = Scene("a")
    place = scene.place("a")
    place.use(replica_spec(full(BLOCK), hash_block_size=BLOCK, tiers=tiers, hash_algorithm=DOMAIN.algorithm))
    place.proof.domain = DOMAIN
    scene.stores("a", PROMPT[: 4 * BLOCK])
    name = scene.book(PROMPT)[1]
    assert scene.decisions.ended(name, Event(scene.clock(), blocks * BLOCK)) == cause


def test_a_life_that_ends_takes_its_tiers_along():
    scene = Scene("a")
    offloads(scene, "a", Tier.HOST, KEYS)
    scene.place("a").clear(life_ended=True)
    assert content(scene.place("a")) == {}
    scene.stores("a", tokens(999, 3))
    assert claim_of(scene, "a").host == 0


def test_stores_of_a_tier_teach_no_group():
    scene = Scene("a", groups=(FULL, WINDOW))
    before = dict(scene.place("a").formats)
    offloads(scene, "a", Tier.HOST, KEYS, group=1)
    assert scene.place("a").formats == before
    assert Stored(1, Tier.HOST, KEYS, WINDOW).tier is Tier.HOST


def lending(*names, groups=GROUPS, **settings):
    """Places of one namespace that may read each other's host memory, without entries."""
    scene = Scene(*names, groups=groups, **settings)
    for name in names:
        in_namespace(scene, name, b"one")
    return scene


def in_namespace(scene, name, namespace, tiers=(HOST, PEERS)):
    place = scene.place(name)
    kinds = [window(2 * BLOCK, BLOCK) if one is WINDOW else full(BLOCK) for one in scene.groups]
    spec = replica_spec(*kinds, hash_block_size=BLOCK, tiers=tiers, hash_algorithm=DOMAIN.algorithm)
    place.use(spec, namespace)
    place.proof.domain = DOMAIN


def test_peers_extend_a_hit_by_group_and_the_one_that_has_most_is_named():
    scene = lending("a", "b", "c")
    scene.stores("a", PROMPT, only=0)
    offloads(scene, "b", Tier.HOST, KEYS[8:10], group=1)
    offloads(scene, "c", Tier.HOST, KEYS[:3], group=0)
    claim = claim_of(scene, "a")
    assert (claim.tokens, claim.expected, claim.host, claim.peers) == (0, 0, 0, 10 * BLOCK)
    assert (claim.reachable, claim.peer) == (10 * BLOCK, "b")
    offloads(scene, "c", Tier.HOST, KEYS[:12], group=0)
    assert claim_of(scene, "a").peer == "c"
    offloads(scene, "b", Tier.HOST, KEYS[:10], group=0)
    claim = claim_of(scene, "b")
    assert (claim.host, claim.peers, claim.peer) == (10 * BLOCK, 0, "")
    assert claim_of(scene, "c").peers == 10 * BLOCK


@pytest.mark.parametrize(
    "why", ["namespace", "no namespace", "reads none", "gone", "withdrawn", "invisible", "evicted"]
)
def test_only_peers_that_can_be_read_count(why):
    scene = lending("a", "b", groups=(FULL,))
    offloads(scene, "b", Tier.HOST, KEYS)
    assert claim_of(scene, "a").peers == 19 * BLOCK
    if why in ("namespace", "no namespace"):
        in_namespace(scene, "b", b"other" if why == "namespace" else b"")
    elif why == "reads none":
        in_namespace(scene, "a", b"one", tiers=(HOST,))
    elif why == "gone":
        scene.fleet.followed["b"].source.is_connected = False
    elif why == "withdrawn":
        scene.place("b").withdrawn = True
    elif why == "evicted":
        finished(scene.place("b").applying_batch(Batch(1.0, [Removed(0, Tier.HOST, KEYS)])))
    visible = frozenset("a") if why == "invisible" else None
    (claim,) = (one.claim for one in scene.score(PROMPT, visible=visible).places if one.claim.place == "a")
    assert (claim.peers, claim.peer) == (0, "")


def test_a_peer_load_is_priced_as_the_queue_of_the_peer_and_computing_are():
    scene = lending("a", "b", groups=(FULL,), peer_tokens_per_s=1e4, host_tokens_per_s=1e6, prefill_tokens_per_s=1e3)
    offloads(scene, "b", Tier.HOST, KEYS)
    assert chosen(scene.score(PROMPT)) == "b"
    costs = {one.claim.place: one.option.cost for one in scene.score(PROMPT).places}
    assert costs["a"].load_s == pytest.approx(19 * BLOCK / 1e4)
    assert costs["b"].load_s == pytest.approx(19 * BLOCK / 1e6)
    other = tokens(2, 400)  # that keeps b busy for longer than the load takes
    assert scene.book(other, candidates=frozenset("b"))[0] == "b"
    decision = scene.score(PROMPT)
    assert chosen(decision) == "a"
    answer = encode_decision(decision, scene.decisions, 0)
    assert (answer.places[0].peer_tokens, answer.places[0].peer) == (19 * BLOCK, "b")
    assert "304 more loaded from peers such as b" in answer.reason
    slow = lending("a", "b", groups=(FULL,), peer_tokens_per_s=10, prefill_tokens_per_s=1e3)
    offloads(slow, "b", Tier.HOST, KEYS)
    costs = {one.claim.place: one.option.cost for one in slow.score(PROMPT).places}
    assert (costs["a"].load_s, chosen(slow.score(PROMPT))) == (0.0, "b")  # it computes what is loaded later
    assert costs["a"].miss_s > 0.3
    name = slow.book(PROMPT, candidates=frozenset("a"))[1]
    assert slow.decisions.ended(name, Event(slow.clock(), 0)) == "equal"
    assert slow.decisions.work_of("a").trust == 1.0  # it was not claimed


def test_blocks_of_a_peer_load_delay_the_prompts_of_a_full_place():
    scene = lending("a", "b", groups=(FULL,), peer_tokens_per_s=1e9)
    offloads(scene, "b", Tier.HOST, KEYS)

    def delay_s():
        return next(one.option.cost.delay_s for one in scene.score(PROMPT).places if one.claim.place == "a")

    name = scene.book(tokens(3, 4), candidates=frozenset("a"))[1]
    scene.decisions.first_token(name, Event(scene.clock()))
    scene.clock.now_s += 10
    assert delay_s() == pytest.approx(0, abs=1e-4)  # it is not known how long prompts stay
    scene.decisions.ended(name, Event(scene.clock()))
    delays = [delay_s()]
    for seed in (4, 5):
        scene.book(tokens(seed, 20), candidates=frozenset("a"))
        delays.append(delay_s())
    assert delays[0] == pytest.approx(0, abs=1e-4)
    share = scene.place("a").capacity
    held = 20 + 200 / BLOCK
    assert delays[1] == pytest.approx(10 * (held / share) ** 2 * 304 / 320, rel=0.1)
    assert delays[2] == pytest.approx(10 * held / share * min(2 * held / share, 1) * 2 * 304 / 320, rel=0.1)
    finished(scene.place("b").applying_batch(Batch(1.0, [Removed(0, Tier.HOST, KEYS)])))
    assert delay_s() < 0.1 * delays[2]


@pytest.mark.parametrize(("cached", "cause"), [(0, "equal"), (304, "equal"), (160, "loaded"), (320, "loaded")])
def test_an_engine_that_loads_from_peers_is_as_claimed(cached, cause):
    scene = lending("a", "b", groups=(FULL,))
    offloads(scene, "b", Tier.HOST, KEYS)
    name = scene.book(PROMPT, candidates=frozenset("a"))[1]
    assert scene.decisions.ended(name, Event(scene.clock(), cached)) == cause


def test_an_engine_that_comes_back_has_no_namespace_until_its_service_states_it():
    scene = lending("a", "b", groups=(FULL,))
    offloads(scene, "b", Tier.HOST, KEYS)
    scene.place("b").clear(life_ended=True)
    assert scene.place("b").namespace == b""
    assert claim_of(scene, "a").peers == 0
