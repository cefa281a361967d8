"""Bad input that the other files of this folder do not have: what is named here must end no stream and touch no other
engine's entries.

frame counts, sequence numbers, payloads, events, hashes, tokens, sizes, groups, kinds, media, ranks: test_decoding
groups that change, removals of the unknown, clocks, limits: test_places
replays, lives, queues: test_order
prompts and candidates that do not exist, places of other owners: test_router_process, test_decisions
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.v1 import routing_pb2 as pb
from kvplane_fleet import fleet as fleet_module
from kvplane_fleet.decisions import Ask
from kvplane_fleet.faults import Fault
from kvplane_fleet.fleet import Fleet, Prompt
from kvplane_fleet.router.messages import MAX_TOKENS, decode_ask
from kvplane_fleet.settings import PlaceSettings
from kvplane_fleet.wire.events import Batch, Cleared, Removed, Stored, Tier
from tests.router.fleets import BLOCK, DOMAIN, FULL, NO_EVENTS, Scene, chosen, finished, tokens
from tests.router.fuzz import Fuzzer
from tests.router.test_follow import Engine, address, content, following, settings, until
from tests.router.test_order import Engine as Frames
from tests.router.test_order import Rig
from tests.store.servers import free_port


@pytest.mark.parametrize("seed", range(3))
def test_mutated_payloads_find_nothing(seed):
    fuzzer = Fuzzer(seed)
    for _ in range(3000):
        fuzzer.run()
    assert fuzzer.ways > 150
    assert len(fuzzer.place.faults.counts) > 15


def test_clears_without_end_cost_little_and_touch_no_other_place():
    scene = Scene("a", "b")
    prompts = [tokens(seed, 50) for seed in range(20)]
    for name in ("a", "b"):
        for prompt in prompts:
            scene.stores(name, prompt)
    for _ in range(5000):
        finished(scene.place("a").applying_batch(Batch(1.0, [Cleared()] * 4)))
    assert scene.place("a").entries == 0
    assert scene.place("b").entries == 20 * 50
    assert scene.score(prompts[0]).places[0].claim.tokens == 49 * BLOCK


def test_a_removal_before_its_store_and_twice_is_counted_each_time():
    scene, keys = Scene("a"), DOMAIN.keys(tokens(1, 3))
    place = scene.place("a")
    for _ in range(2):
        finished(place.applying_batch(Batch(1.0, [Removed(0, Tier.DEVICE, keys)])))
    finished(place.applying_batch(Batch(1.0, [Stored(0, Tier.DEVICE, keys, FULL), Removed(0, Tier.DEVICE, keys)])))
    assert place.faults.counts[Fault.REMOVAL_UNKNOWN] == 6
    assert place.entries == 0


def test_two_engines_at_one_address_are_counted_and_nothing_of_an_ended_life_stays():
    """Their numbers interleave, so that each looks like a new life of the other."""
    rig, other = Rig(Frames(0)), Frames(1)
    rig.order.connected()
    rig.replay()
    for _ in range(20):
        for engine in (rig.engine, other):
            (frame,) = engine.publish()
            rig.order.live(frame)
    assert rig.faults.counts[Fault.LIFE_ENDED] >= 20
    assert len(rig.sink.payloads) <= 2


async def test_one_engine_under_two_names_has_two_places():
    engine = Engine()
    try:
        await engine.publish(20)
        async with following(settings(engine, "a"), settings(engine, "b")) as fleet:
            assert content(fleet, "a") == content(fleet, "b") != {}
            fleet.followed["a"].place.clear(life_ended=True)
            assert any(content(fleet, "b").values())
    finally:
        engine.process.kill()


@pytest.mark.parametrize("sent", [b"", b"\xff", b"\xff" + bytes(8) + b"\x7f\x03", b"HTTP/1.1 400\r\n\r\n"], ids=repr)
async def test_a_publisher_that_is_silent_or_none_delays_no_other(sent):
    async def accept(reader, writer):
        writer.write(sent)
        await reader.read()  # until the follower gives up
        writer.close()

    engine = Engine()
    server = await asyncio.start_server(accept, "127.0.0.1", free_port())
    try:
        async with server:
            port = server.sockets[0].getsockname()[1]
            await engine.publish(10)
            fleet, slow = Fleet(), PlaceSettings("slow", events=address(port), replay=address(port))
            async with fleet_module.following(fleet, [slow, settings(engine)]):
                await until(lambda: fleet.followed["a"].state == "current" and any(content(fleet).values()))
                await engine.publish(10)
                await until(lambda: fleet.followed["a"].place.batches == 20)
                assert fleet.followed["slow"].state == "not connected"
    finally:
        engine.process.kill()


async def test_a_replay_from_the_future_clears_and_follows_on():
    rig = Rig(Frames())
    rig.engine.publish(3)
    rig.order.connected()
    rig.replay()
    rig.engine.publish(5)
    rig.order.live(rig.engine.publish()[0])
    rig.order.wanted = None
    rig.order.replayed(rig.engine.frames[7])
    rig.order.replay_ended()
    assert rig.faults.counts[Fault.FRAMES_GONE] > 0
    assert rig.order.partial
    assert rig.sink.payloads == [one.payload for one in rig.engine.frames[7:]]


def test_two_thousand_places_are_scored_together():
    fleet, prompt = Fleet(), tokens(1, 30)
    for number in range(2000):
        place = fleet.add(PlaceSettings(f"p{number}", events=NO_EVENTS, model="m")).place
        place.proof.domain = DOMAIN
        keys = DOMAIN.keys(prompt[: BLOCK * (number % 31)])
        finished(place.applying_batch(Batch(1.0, [Stored(0, Tier.DEVICE, keys, FULL)])))
    found = fleet.claims("m", Prompt([*prompt, 1]))
    assert [one.tokens for one in found] == sorted((BLOCK * (number % 31) for number in range(2000)), reverse=True)


def test_prompts_of_one_and_of_the_most_tokens_are_scored_and_longer_ones_refused():
    scene = Scene("a")
    assert chosen(scene.score([7])) == "a"
    longest = [7] * MAX_TOKENS
    ask = Ask("m", Prompt(longest))
    assert scene.decisions.score(ask, {DOMAIN: ask.prompt.keys_of(DOMAIN)}).places[0].claim.tokens == 0
    request = pb.ScoreRequest(model="m", prompt=pb.Prompt(keys=b"x" * 8, num_tokens=MAX_TOKENS + 1))
    with pytest.raises(InvalidArgument, match="too long"):
        decode_ask(request)


def test_a_batch_of_another_rank_is_counted():
    scene = Scene("a")
    for rank in (0, 0, 1, None, 1):
        finished(scene.place("a").applying(msgspec.msgpack.encode([1.0, [], rank])))
    assert scene.place("a").faults.counts[Fault.RANK_CHANGED] == 1
