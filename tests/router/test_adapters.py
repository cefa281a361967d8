"""Prompts of LoRA adapters: a name of an adapter is a model of its place, and hits blocks of this adapter alone."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from kvplane.base.errors import InvalidArgument, NotFound
from kvplane.base.groups import HashAlgorithm
from kvplane.base.hashing import HashScheme, RequestHasher, pack_tokens
from kvplane.base.step import ExtraKeys
from kvplane_fleet.decisions import Ask, Decisions
from kvplane_fleet.domains import Domain, keys_of
from kvplane_fleet.faults import Fault
from kvplane_fleet.fleet import Fleet, Prompt
from kvplane_fleet.settings import PlaceSettings, RouterSettings, load
from tests.router.fleets import BLOCK, NO_EVENTS, Clock, finished, tokens

PROOF, PROMPT = tokens(1, 3), tokens(2, 4)
SHA256 = Domain(HashAlgorithm.SHA256, "", BLOCK)
SQL, CHAT = ("sql", "/adapters/sql"), ("chat", "/adapters/chat")
ADAPTERS = dict((SQL, CHAT))


def hashed(prompt, lora=None, salt="", tagged=True):
    """The keys of an engine, computed without the code of the fleet."""
    scheme = replace(HashScheme.named(BLOCK, HashAlgorithm.SHA256, "", 0), tagged=tagged)
    return keys_of(RequestHasher(scheme, ExtraKeys(lora=lora, salt=salt)).append(pack_tokens(prompt)), 32)


def stored(prompt, lora=None, salt="", tagged=True, **more):
    """The event of a prompt, as vLLM states it: the name of the adapter, and not its path."""
    keys = hashed(prompt, lora, salt, tagged)
    each = [[lora[0]] if lora else [] for _ in keys]
    each[0] += [salt] if salt else []
    return {
        "type": "BlockStored", "block_hashes": keys, "parent_block_hash": None, "token_ids": list(prompt),
        "block_size": BLOCK, "lora_id": 1 if lora else None, "medium": "GPU", "lora_name": lora and lora[0],
        "extra_keys": [one or None for one in each], "group_idx": 0, "kv_cache_spec_kind": "full_attention", **more,
    }  # fmt: skip


class Place:
    """A fleet of one engine, whose hashes are proven."""

    def __init__(self, **settings):
        self.fleet = Fleet()
        place = {"events": NO_EVENTS, "model": "base", "adapters": ADAPTERS, **settings}
        self.fleet.add(PlaceSettings("a", **place)).source.is_connected = True
        self.place = self.fleet.followed["a"].place
        self.publish(stored(PROOF))

    def publish(self, *events):
        finished(self.place.applying(msgspec.msgpack.encode([1.0, list(events), 0])))

    def hit(self, model, prompt=PROMPT, **extra):
        """Blocks that the place claims of a prompt of a model, and what is said of them."""
        (claim,) = self.fleet.claims(model, Prompt([*prompt, 1], ExtraKeys(**extra)))
        return claim.tokens // BLOCK, claim.inexact


@pytest.mark.parametrize("tagged", [True, False], ids=["vLLM 0.33", "before"])
def test_hits_never_cross_between_base_model_and_adapters(tagged):
    one, prompts = Place(), {"base": tokens(3, 4), "sql": tokens(4, 4), "chat": tokens(5, 4)}
    loras = {"base": None, "sql": SQL, "chat": CHAT}
    for model, prompt in prompts.items():
        one.publish(stored(prompt, loras[model], tagged=tagged))
    found = {model: {of: one.hit(model, prompt)[0] for of, prompt in prompts.items()} for model in prompts}
    assert found == {model: {of: 4 * (of == model) for of in prompts} for model in prompts}
    one.publish(stored(prompts["base"], SQL, tagged=tagged))
    assert [one.hit(model, prompts["base"])[0] for model in prompts] == [4, 4, 0]
    assert not one.place.faults.counts


@pytest.mark.parametrize("tagged", [True, False], ids=["vLLM 0.33", "before"])
def test_salts_are_found_in_the_form_of_the_engine(tagged):
    one = Place()
    one.publish(stored(PROMPT, salt="t", tagged=tagged), stored(PROMPT, SQL, "u", tagged=tagged))
    assert [one.hit("base", salt=salt)[0] for salt in ("t", "u", "")] == [4, 0, 0]
    assert [one.hit("sql", salt=salt)[0] for salt in ("t", "u", "")] == [0, 4, 0]
    assert one.place.domain == replace(SHA256, tagged=tagged)


def test_an_adapter_that_was_loaded_from_elsewhere_claims_nothing_until_it_is_back():
    one = Place()
    one.publish(stored(PROMPT, SQL), stored(PROMPT, CHAT))
    assert one.hit("sql") == one.hit("chat") == (4, "")
    one.publish(stored(tokens(6, 2), ("sql", "/adapters/sql@2")))  # reloaded under its name, with other weights
    found, said = one.hit("sql")
    assert found == 0
    assert "'/adapters/sql'" in said
    assert "name the path" in said
    assert (one.hit("chat"), one.hit("base", PROOF)) == ((4, ""), (3, ""))
    assert one.place.faults.counts == {Fault.ADAPTER_DIFFERS: 1}
    one.publish(stored(tokens(7, 2), SQL))
    assert one.hit("sql") == (4, "")


def test_a_restarted_engine_may_have_loaded_the_adapter_from_its_path():
    one = Place()
    one.publish(stored(PROMPT, ("sql", "/elsewhere")))
    one.place.clear(life_ended=True)
    one.publish(stored(PROOF), stored(PROMPT, SQL))
    assert one.hit("sql") == (4, "")


def test_blocks_whose_content_is_not_stated_prove_nothing_about_an_adapter():
    one, other = Place(), ("sql", "/elsewhere")
    unknown = [["sql", ["image", 0]]] * 4
    one.publish(
        stored(PROMPT, other, parent_block_hash=5), stored(PROMPT, other, token_ids=list(PROMPT[:-1])),
        stored(PROMPT, other, extra_keys=unknown), stored(PROMPT, ("unnamed", "/u")),
    )  # fmt: skip
    assert one.place.faults.counts == {}
    one.publish(stored(PROMPT, SQL))
    assert one.hit("sql") == (4, "")


def test_names_of_other_models_are_refused():
    one = Place(aliases=("base-latest",))
    decisions = Decisions(one.fleet, RouterSettings(), Clock())
    assert one.hit("base-latest", PROOF) == one.hit("base", PROOF) == (3, "")
    for model in ("unknown", "", "SQL", "/adapters/sql"):
        assert one.fleet.claims(model, Prompt(PROMPT)) == []
        with pytest.raises(NotFound, match="no place has the model"):
            decisions.score(Ask(model, Prompt(PROMPT)), {})


def test_a_prompt_may_state_its_adapter_itself_but_no_other_than_its_model():
    one, moved = Place(), ("sql", "/adapters/sql@2")
    one.publish(stored(PROMPT, moved))
    assert one.hit("base", lora=moved)[0] == 4
    assert one.hit("base", lora=SQL)[0] == 0
    with pytest.raises(InvalidArgument, match="another adapter") as refused:
        replace(SHA256, lora=SQL).keys(PROMPT, ExtraKeys(lora=CHAT))
    assert refused.value.field == "prompt.extra_keys.lora_name"


def test_a_booked_prompt_of_an_adapter_is_expected_for_this_adapter_alone():
    one = Place()
    decisions = Decisions(one.fleet, RouterSettings(), Clock())
    keys = {domain: Prompt(PROMPT).keys_of(domain) for domain in one.fleet.domains("sql")}
    decisions.score(Ask("sql", Prompt(PROMPT), book=True), keys)
    expected = {
        model: one.fleet.claims(model, Prompt([*PROMPT, 1]))[0].expected // BLOCK for model in ("base", "sql", "chat")
    }
    assert expected == {"base": 0, "sql": 4, "chat": 0}


def test_a_name_that_stands_for_two_models_of_a_place_is_refused(tmp_path):
    file = tmp_path / "places.yaml"
    for names in ("adapters: {m: /p}", "aliases: [m]", "aliases: [a, a]", "aliases: [a], adapters: {a: /p}"):
        file.write_text(f"places: [{{name: e, events: 'tcp://h:1', model: m, {names}}}]")
        with pytest.raises(InvalidArgument, match="twice as a model"):
            load(file)
    file.write_text("places: [{name: e, events: 'tcp://h:1', model: m, aliases: [n], adapters: {a: /p, b: /p}}]")
    assert load(file).places[0].adapters == {"a": "/p", "b": "/p"}
