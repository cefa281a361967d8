"""What a place learns from events: how the engine hashes, its groups, and nothing from faults."""

from __future__ import annotations

import traceback

import msgspec
import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import HashAlgorithm
from kvplane_fleet.domains import MOST_TRIES, Domain, DomainProof
from kvplane_fleet.faults import Fault
from kvplane_fleet.hits import claims
from kvplane_fleet.index import Index
from kvplane_fleet.places import Place
from kvplane_fleet.settings import PlaceSettings, load
from kvplane_fleet.wire.events import Batch, Cleared, Evidence, GroupFormat, Removed, Stored, Tier
from tests.router.fleets import NO_EVENTS, finished

PROMPT = [(7 * at) % 501 for at in range(96)]
FULL = GroupFormat("full_attention", 16, 0)
SHA256 = Domain(HashAlgorithm.SHA256, "", 16)


def stored(keys, form=FULL, group=0, tokens=PROMPT, parent=None, tier=Tier.DEVICE, plain=True):
    return Stored(group, tier, keys, form, Evidence(tokens[: len(keys) * form.block_size], parent, plain))


def place(**settings):
    return Place(PlaceSettings("a", events="tcp://127.0.0.1:1", **settings), Index())


def apply(one, *events, time_s=1.0, rank=None):
    finished(one.applying_batch(Batch(time_s, events, rank)))


def tokens_claimed(one, prompt):
    return claims(one._index, one.domain.keys(prompt), len(prompt), [one.asked()])[0].tokens


@pytest.mark.parametrize("algorithm", [HashAlgorithm.SHA256, HashAlgorithm.SHA256_CBOR, HashAlgorithm.KVPLANE])
@pytest.mark.parametrize("hash_block", [16, 8, 4])
@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_the_domain_is_proven_from_the_first_blocks(algorithm, hash_block, lookahead):
    domain = Domain(algorithm, "", hash_block, lookahead)
    keys = domain.keys(PROMPT)[16 // hash_block - 1 :: 16 // hash_block][:5]
    ahead = [PROMPT[(n + 1) * 16 : (n + 1) * 16 + lookahead] for n in range(5)] if lookahead else ()
    proof = DomainProof(tuple(HashAlgorithm), "")
    proof.observe(keys, 16, Evidence(PROMPT[:80], None, True, ahead))
    assert proof.domain == domain


def test_a_seed_must_be_given_to_be_found():
    keys = Domain(HashAlgorithm.XXHASH, "secret", 16).keys(PROMPT)
    for seed, found in (("", None), ("secret", HashAlgorithm.XXHASH), ("other", None)):
        proof = DomainProof(tuple(HashAlgorithm), seed)
        proof.observe(keys, 16, Evidence(PROMPT, None, True))
        assert (proof.domain.algorithm if proof.domain else None) is found


def test_one_block_proves_nothing_and_two_prompts_do():
    proof = DomainProof(tuple(HashAlgorithm), "")
    for prompt in (PROMPT[:16], PROMPT[3:19]):
        assert proof.domain is None
        proof.observe(SHA256.keys(prompt), 16, Evidence(prompt, None, True))
    assert proof.domain == SHA256


@pytest.mark.parametrize(
    "evidence",
    [
        Evidence(PROMPT, None, False),
        Evidence(PROMPT, 5, True),
        Evidence(PROMPT[:90], None, True),
        Evidence(PROMPT[::-1], None, True),
        Evidence(PROMPT, None, True, [[1]]),
    ],
    ids=["extra keys", "inside a prompt", "sparse", "other tokens", "too little lookahead"],
)
def test_what_does_not_fit_proves_nothing(evidence):
    proof = DomainProof(tuple(HashAlgorithm), "")
    proof.observe(SHA256.keys(PROMPT), 16, evidence)
    assert proof.domain is None


def test_the_search_for_a_domain_ends():
    proof = DomainProof((HashAlgorithm.SHA256,), "")
    for _ in range(MOST_TRIES):
        assert proof.wants_tokens
        proof.observe([1, 2], 16, Evidence(PROMPT[:32], None, True))
    assert not proof.wants_tokens


def test_a_place_claims_what_its_groups_have():
    one = place()
    keys = SHA256.keys(PROMPT)
    window = GroupFormat("sliding_window", 16, 17)
    apply(one, stored(keys), stored(keys[3:4], window, 1))
    assert tokens_claimed(one, PROMPT) == 64
    apply(one, Removed(1, Tier.DEVICE, keys[3:4]))
    assert tokens_claimed(one, PROMPT) == 0
    assert not one.faults.counts


def test_a_key_in_two_blocks_stays_until_both_are_removed():
    one = place()
    keys = SHA256.keys(PROMPT)
    apply(one, stored(keys), stored(keys))
    apply(one, Removed(0, Tier.DEVICE, keys))
    assert tokens_claimed(one, PROMPT) == 80
    apply(one, Removed(0, Tier.DEVICE, keys[1:2]))
    assert tokens_claimed(one, PROMPT) == 16


def test_other_tiers_are_kept_apart():
    one = place()
    keys = SHA256.keys(PROMPT)
    apply(one, stored(keys[:2]), stored(keys, tier=Tier.HOST))
    assert tokens_claimed(one, PROMPT) == 32
    assert one.entries == 8
    apply(one, Removed(0, Tier.HOST, keys))
    assert tokens_claimed(one, PROMPT) == 32


def test_faults_of_events_are_counted_and_change_no_other_entry():
    one = place()
    keys = SHA256.keys(PROMPT)
    apply(one, stored(keys), rank=0, time_s=5.0)
    apply(one, Removed(0, Tier.DEVICE, [1]), Removed(7, Tier.DEVICE, [1, 2]), rank=1, time_s=4.0)
    expected = {Fault.REMOVAL_UNKNOWN: 3, Fault.RANK_CHANGED: 1, Fault.CLOCK_BACKWARDS: 1}
    assert one.faults.counts == expected
    assert tokens_claimed(one, PROMPT) == 80


def test_a_group_that_changes_clears_the_place():
    one = place()
    apply(one, stored(SHA256.keys(PROMPT)))
    keys = Domain(HashAlgorithm.SHA256, "", 32).keys(PROMPT)
    apply(one, stored(keys, GroupFormat("full_attention", 32, 0)))
    assert one.faults.counts == {Fault.GROUP_CHANGED: 1}
    assert one.entries == 3
    assert tokens_claimed(one, PROMPT) == 64


def test_a_clear_and_an_unreadable_batch_remove_all():
    for end in (lambda one: apply(one, Cleared()), lambda one: finished(one.applying(b"\xc1"))):
        one = place()
        apply(one, stored(SHA256.keys(PROMPT)))
        end(one)
        assert one.entries == 0
        assert tokens_claimed(one, PROMPT) == 0


def test_chunked_attention_needs_its_chunk():
    keys, form = SHA256.keys(PROMPT), GroupFormat("chunked_local_attention", 16, 0)
    for chunk, tokens in ((None, None), (32, 80)):
        one = place(attention_chunk=chunk)
        apply(one, stored(keys), stored(keys[4:], form, 1))
        if chunk is None:
            with pytest.raises(InvalidArgument, match="no event states it"):
                tokens_claimed(one, PROMPT)
        else:
            assert tokens_claimed(one, PROMPT) == tokens


def test_an_engine_that_names_no_kind_is_inexact():
    one = place()
    apply(one, stored(SHA256.keys(PROMPT), GroupFormat("", 16, 0)))
    assert "does not state" in one.layout().inexact


def test_before_the_domain_is_proven_nothing_is_claimed():
    one = place()
    apply(one, stored([1, 2, 3]))
    with pytest.raises(InvalidArgument, match="not known yet"):
        one.layout()


def test_a_limit_of_entries_holds(monkeypatch):
    monkeypatch.setattr("kvplane_fleet.places.MAX_ENTRIES", 8)
    one = place()
    keys = SHA256.keys(PROMPT)
    apply(one, stored(keys), stored(keys))
    assert one.entries == 6
    assert one.faults.counts == {Fault.TOO_MANY_ENTRIES: 1}


def test_payloads_of_the_wire_are_applied():
    one = place()
    event: dict[str, object] = {"type": "BlockStored", "block_hashes": SHA256.keys(PROMPT)}
    event |= {"parent_block_hash": None}
    event |= {"token_ids": PROMPT, "block_size": 16, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    finished(one.applying(msgspec.msgpack.encode([1.0, [event], 0])))
    assert tokens_claimed(one, PROMPT) == 80


BAD_FILES = {
    "places: [{name: a}]": "events",
    "places: [{name: a, service: s, events: 'ipc://b'}]": "events",
    "places: [{name: a, events: 'tcp://host'}]": "events",
    "places: [{name: a, events: 'http://host:1'}]": "events",
    "places: [{name: '', events: 'ipc://b'}]": "name",
    "places: [{name: a, events: 'ipc://b', widow: 3}]": "widow",
    "places: [{name: a, events: 'ipc://b'}, {name: a, events: 'ipc://c'}]": "two places",
    "places: [{name: a, events: 'ipc://b', attention_chunk: 0}]": "attention_chunk",
    "places: [{name: a, events: 'ipc://b', hash_algorithms: [md5]}]": "hash_algorithms",
    "][": "cannot be read",
    "7": "object",
}


@pytest.mark.parametrize(("text", "named"), BAD_FILES.items())
def test_a_bad_file_is_refused_by_name(tmp_path, text, named):
    path = tmp_path / "places.yaml"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=named):
        load(path)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("2024-99-99", "timestamp"),
        ("2024-01-01T99:99:99Z", "timestamp"),
        ("9" * 5000, "int"),
        ("!!timestamp x", "timestamp"),
        ("!!int x", "int"),
        ("!!float [1]", ""),
        ("!!bool x", "bool"),
        ("!!binary x", ""),
        ("!!set {a, b}", ""),
        ("!!python/name:os.system x", ""),
        ("2024-01-01", ""),
        ("[" * 2000, ""),
        ("*no", ""),
        ("0x" + "9" * 5000, ""),
        (".nan", ""),
    ],
    ids=lambda text: text[:12],
)
def test_values_that_yaml_reads_otherwise_are_refused_with_line_and_remedy(value, kind, tmp_path):
    path = tmp_path / "places.yaml"
    path.write_text(f"places:\n  - events: tcp://e:1\n    name: {value}\n")
    with pytest.raises(InvalidArgument) as refused:
        load(path)
    assert "quotation marks" in str(refused.value)
    assert len(str(refused.value)) < 1000
    if kind:
        assert f"line 3: {value.rpartition(' ')[2][:40]!r} is no {kind}" in str(refused.value)


def test_a_file_names_places(tmp_path):
    path = tmp_path / "places.yaml"
    path.write_text("places: [{name: a, events: 'tcp://e:1', hash_algorithms: [sha256], draft_groups: [0, 2]}]")
    (one,) = load(path).places
    assert one == PlaceSettings("a", events="tcp://e:1", hash_algorithms=(HashAlgorithm.SHA256,), draft_groups=(0, 2))
    with pytest.raises(InvalidArgument, match="cannot be read"):
        load(tmp_path / "missing")


def test_a_place_that_is_not_proven_costs_a_prompt_no_memory_for_long():
    """The error is made once and raised for each prompt: its traceback must not keep the frames of all of them."""
    place, depths = Place(PlaceSettings("a", events=NO_EVENTS), Index()), list[int]()
    for _ in range(50):
        with pytest.raises(InvalidArgument) as raised:
            place.layout()
        depths.append(len(list(traceback.walk_tb(raised.value.__traceback__))))
    assert max(depths) == depths[0]
