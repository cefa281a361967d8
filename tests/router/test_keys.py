"""Keys of 64 and of 128 bits: prompts whose hashes end in the same 64 bits are two prompts where engines state whole
hashes, and what fits one width is not taken for the other.
"""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.events import domain_mask
from kvplane.base.groups import HashAlgorithm
from kvplane.base.hashing import HashScheme, RequestHasher, pack_tokens
from kvplane.v1 import routing_pb2 as pb
from kvplane_fleet.domains import Domain, keys_of
from kvplane_fleet.faults import Fault
from kvplane_fleet.fleet import Fleet, Prompt
from kvplane_fleet.router.messages import decode_ask, pack_keys
from kvplane_fleet.settings import PlaceSettings
from kvplane_fleet.wire.events import KEY_MASK, Tier
from tests.router.fleets import BLOCK, NO_EVENTS, content, finished, tokens

WHOLE = Domain(HashAlgorithm.SHA256, "", BLOCK, key_bytes=16)
PROOF, PROMPT = tokens(1, 3), tokens(2, 2)


def digests(prompt):
    hashes = RequestHasher(HashScheme.named(BLOCK, HashAlgorithm.SHA256, "", 0)).append(pack_tokens(prompt))
    return [hashes[at : at + 32] for at in range(0, len(hashes), 32)]


def colliding(digest):
    """Another hash with the same last 64 bits."""
    return bytes([*digest[:20], *(byte ^ 0xA5 for byte in digest[20:24]), *digest[24:]])


def event(kind, hashes, prompt=()):
    one = {"type": kind, "block_hashes": hashes, "medium": "GPU", "group_idx": 0}
    if kind == "BlockStored":
        one |= {"token_ids": list(prompt), "block_size": BLOCK, "kv_cache_spec_kind": "full_attention"}
        one["parent_block_hash"] = None
    return one


def fleet_of(*names):
    """Engines that state whole hashes, and whose domain is proven."""
    fleet = Fleet()
    for name in names:
        fleet.add(PlaceSettings(name, events=NO_EVENTS, model="m")).source.is_connected = True
        publish(fleet, name, event("BlockStored", digests(PROOF), PROOF))
    return fleet


def publish(fleet, name, *events):
    finished(fleet.followed[name].place.applying(msgspec.msgpack.encode([1.0, list(events), 0])))


def claimed(fleet, hashes):
    keys = keys_of(b"".join(hashes), 32, 16)
    prompt = Prompt((), keys=keys, num_keyed=len(hashes) * BLOCK + 1, key_bytes=16)
    return {one.place: one.tokens for one in fleet.claims("m", prompt)}


@pytest.mark.parametrize("compiled", ["on", "off"])
def test_prompts_whose_keys_end_alike_are_not_taken_for_each_other(compiled, monkeypatch):
    monkeypatch.setenv("KVPLANE_NATIVE", compiled)
    fleet, first = fleet_of("a", "b"), digests(PROMPT)
    second = [colliding(one) for one in first]
    assert [one[-8:] for one in first] == [one[-8:] for one in second]
    publish(fleet, "a", event("BlockStored", first))
    publish(fleet, "b", event("BlockStored", second))
    assert claimed(fleet, first) == {"a": 2 * BLOCK, "b": 0}
    assert claimed(fleet, second) == {"a": 0, "b": 2 * BLOCK}
    publish(fleet, "a", event("BlockRemoved", second))
    assert fleet.followed["a"].place.faults.counts == {Fault.REMOVAL_UNKNOWN: 2}
    assert claimed(fleet, first)["a"] == 2 * BLOCK
    publish(fleet, "a", event("BlockStored", second), event("BlockRemoved", first))
    assert claimed(fleet, first) == {"a": 0, "b": 0}
    assert claimed(fleet, second) == {"a": 2 * BLOCK, "b": 2 * BLOCK}


def test_a_long_prompt_takes_little_more_memory_than_its_hashes():
    message = pb.Prompt(token_ids=[(at * 2654435761) % (1 << 31) for at in range(400_000)])
    tracemalloc.start()
    keys = WHOLE.keys(message.token_ids)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 12_000_000  # as objects, the tokens alone would take 14 million
    assert keys == keys_of(b"".join(digests(list(message.token_ids))), 32, 16)


def test_the_domain_is_proven_with_the_width_of_the_keys():
    fleet = fleet_of("a")
    assert fleet.domains("m") == {WHOLE}
    assert str(WHOLE).endswith("keys of 16 bytes")
    publish(fleet, "a", event("BlockStored", digests(PROMPT)))
    assert fleet.claims("m", Prompt([*PROMPT, 1]))[0].tokens == 2 * BLOCK


def test_an_engine_that_changes_the_width_of_its_keys_is_cleared():
    fleet, place = (one := fleet_of("a")), one.followed["a"].place
    keys = keys_of(b"".join(digests(PROOF)), 32)
    publish(fleet, "a", event("BlockRemoved", keys[:1]))
    assert (place.entries, place.faults.counts) == (0, {Fault.HASH_CHANGED: 1, Fault.REMOVAL_UNKNOWN: 1})
    publish(fleet, "a", event("BlockStored", keys, PROOF), event("BlockStored", []), event("BlockRemoved", []))
    assert content(place) == {(Tier.DEVICE, 0): dict.fromkeys(keys, 1)}
    publish(fleet, "a", event("BlockStored", [keys[0], digests(PROOF)[0]]))
    assert place.faults.counts[Fault.HASH_INVALID] == 1


def test_keys_of_16_bytes_fit_every_place_and_those_of_8_only_some():
    fleet, narrow = fleet_of("a"), "b"
    fleet.add(PlaceSettings(narrow, events=NO_EVENTS, model="m")).source.is_connected = True
    for prompt in (PROOF, PROMPT):
        publish(fleet, "a", event("BlockStored", digests(prompt)))
        publish(fleet, narrow, event("BlockStored", keys_of(b"".join(digests(prompt)), 32), prompt))
    assert claimed(fleet, digests(PROMPT)) == {"a": 2 * BLOCK, narrow: 2 * BLOCK}
    keys = keys_of(b"".join(digests(PROMPT)), 32)
    claims = {one.place: one for one in fleet.claims("m", Prompt((), keys=keys, num_keyed=2 * BLOCK + 1))}
    assert (claims["a"].tokens, claims[narrow].tokens) == (0, 2 * BLOCK)
    assert "the engine states 16" in claims["a"].inexact


@pytest.mark.parametrize("width", [8, 16])
def test_keys_of_messages_are_those_that_were_packed(width):
    keys = [one & ((1 << 8 * width) - 1) for one in (0, 1, KEY_MASK, (1 << 128) - 1, 5 << 64)]
    message = pb.Prompt(keys=pack_keys(keys, width), num_tokens=80, key_bytes=width)
    prompt = decode_ask(pb.ScoreRequest(prompt=message)).prompt
    assert (prompt.keys, prompt.key_bytes) == (keys, width)
    for wrong in (pb.Prompt(keys=b"x" * 24, num_tokens=80, key_bytes=16), pb.Prompt(num_tokens=1, key_bytes=9)):
        with pytest.raises(InvalidArgument, match="16 bytes"):
            decode_ask(pb.ScoreRequest(prompt=wrong))


def test_tenants_share_no_key_of_either_width():
    for domain in (WHOLE, Domain(HashAlgorithm.SHA256, "", BLOCK)):
        names = ("", "one", "two")
        keys = [Prompt(PROMPT, domain=name).keys_of(domain) for name in names]
        assert len({key for each in keys for key in each}) == len(names) * len(keys[0])
        assert keys[1] == [key ^ domain_mask("one") & domain.mask for key in keys[0]]
