"""Engines that are SGLang: how their hashes follow from tokens, and what is said of engines whose hashes do not."""

from __future__ import annotations

import struct
from hashlib import sha256

import msgspec
import pytest

from kvplane.base.hashing import chain_run, pack_tokens
from kvplane.base.step import ExtraKeys, Multimodal
from kvplane_fleet.domains import Domain, EngineHash
from kvplane_fleet.fleet import Fleet, Prompt
from kvplane_fleet.settings import PlaceSettings
from tests.router.fleets import NO_EVENTS, finished

PAGE = 4
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 65536, 4_000_000_000, 0, 9]
# Computed by hand: sha256sum of the four u32, then of its 32 bytes and the next four, the first 8 bytes of each.
VECTORS = ["cf97adeedb59e05b", "4ebfa8a1f3c34151", "3d6e385c89438d90"]


def hashes(prompt, page=PAGE, parent=b""):
    """What SGLang states of a prompt: signed numbers."""
    found = []
    for start in range(0, len(prompt) - page + 1, page):
        parent = sha256(parent + struct.pack(f"<{page}I", *prompt[start : start + page])).digest()
        found.append(int.from_bytes(parent[:8], "big", signed=True))
    return found


def stored(prompt, page=PAGE, parent=b"", **more):
    """An event of SGLang 0.5.23."""
    return {
        "type": "BlockStored", "block_hashes": hashes(prompt, page, parent), "parent_block_hash": None,
        "token_ids": list(prompt), "block_size": page, "lora_id": None, "medium": "GPU", **more,
    }  # fmt: skip


class Place:
    """A fleet of one engine."""

    def __init__(self, **settings):
        self.fleet = Fleet()
        self.one = self.fleet.add(PlaceSettings("a", events=NO_EVENTS, model="m", **settings))
        self.one.source.is_connected = True

    def publish(self, *events):
        finished(self.one.place.applying(msgspec.msgpack.encode([1.0, list(events), 0])))

    def hit(self, prompt, **extra):
        (claim,) = self.fleet.claims("m", Prompt([*prompt, 1], ExtraKeys(**extra)))
        return claim.tokens


@pytest.mark.parametrize("compiled", ["on", "off"])
def test_keys_are_those_of_vectors_computed_by_hand(compiled, monkeypatch):
    monkeypatch.setenv("KVPLANE_NATIVE", compiled)
    keys = Domain(EngineHash.SGLANG, "", PAGE).keys([*PROMPT, 1])
    assert [key.to_bytes(8, "big").hex() for key in keys] == VECTORS
    assert [key - (1 << 64) * (key >> 63) for key in keys] == hashes(PROMPT)


@pytest.mark.parametrize("page", [1, 3, 16, 64, 5000])
def test_the_compiled_form_and_the_one_in_python_are_equal(page, monkeypatch):
    packed, found = pack_tokens([(at * 2654435761) % (1 << 32) for at in range(4 * page)]), []
    for compiled in ("on", "off"):
        monkeypatch.setenv("KVPLANE_NATIVE", compiled)
        found.append([chain_run(parent, packed, page) for parent in (b"", b"p" * 32)])
    assert found[0] == found[1]
    assert len(found[0][0]) == 4 * 32


@pytest.mark.parametrize("page", [1, 4, 64])
@pytest.mark.parametrize("form", ["maps", "arrays"])
def test_a_place_claims_what_its_events_have(page, form):
    one, prompt, event = Place(), list(range(3 * page)), stored(list(range(3 * page)), page)
    names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
    one.publish(event if form == "maps" else [event[name] for name in names])
    assert (one.one.state, one.one.place.domain) == ("current", Domain(EngineHash.SGLANG, "", page))
    assert [one.hit(prompt), one.hit(prompt[: 2 * page]), one.hit([7, *prompt])] == [3 * page, 2 * page, 0]
    one.publish({"type": "BlockRemoved", "block_hashes": event["block_hashes"][1:], "medium": "GPU"})
    assert one.hit(prompt) == page


def test_a_salt_is_the_parent_of_the_first_block():
    one, parent = Place(), sha256(b"sglang-cache-salt-v1\0tenant").digest()
    one.publish(stored(list(range(8))), stored(PROMPT, parent=parent, cache_salt="tenant"))
    assert [one.hit(PROMPT, salt=salt) for salt in ("tenant", "other", "")] == [12, 0, 0]


def test_what_sglang_hashes_of_adapters_and_images_is_not_known_and_claims_nothing():
    one = Place(adapters={"sql": "/p"})
    one.publish(stored(PROMPT))
    assert one.hit(PROMPT, lora=("sql", "/p")) == 0
    assert one.hit(PROMPT, multimodal=(Multimodal("image", 0, 4),)) == 0
    assert one.fleet.claims("sql", Prompt([*PROMPT, 1]))[0].tokens == 0
    one.publish(stored(PROMPT[:8], parent=b"drawn when the adapter was loaded", lora_name="sql"))
    assert "adapter 'sql'" in one.fleet.claims("sql", Prompt([*PROMPT, 1]))[0].inexact
    assert one.hit(PROMPT) == 12


def test_an_engine_whose_hashes_do_not_follow_from_tokens_is_named():
    one = Place()
    one.publish(stored(PROMPT, parent=b"another form"))
    assert one.one.state == "unproven"
    (claim,) = one.fleet.claims("m", Prompt([*PROMPT, 1]))
    assert (claim.tokens, claim.inexact[:7]) == (0, "domain:")
    one.publish(stored(PROMPT))
    assert one.one.state == "current"
