"""Twins of what follows, indexes and claims, each without one rule: the campaigns here find every one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import pytest

from kvplane.base.step import NO_EXTRA_KEYS, ExtraKeys
from kvplane_fleet.fleet import Prompt
from kvplane_fleet.hits import Claim
from kvplane_fleet.wire.events import Tier
from tests.router import test_adapters, test_decisions, test_index, test_keys, test_order, test_places, test_tiers
from tests.router.fleets import DOMAIN, GROUPS, Scene, keys_in, tokens
from tests.router.test_hits import claims_of_table
from tests.twins import Patch, Real


def tables():
    """Claims equal brute force."""
    for seed in range(400):
        for claim, longest, spec in claims_of_table(seed):
            assert claim.tokens == longest, f"seed {seed}: {spec}"


def multiset():
    """The index equals a multiset."""
    for seed in range(5):
        test_index.test_the_index_equals_a_multiset(seed, "python")


def orders():
    """Losses, repetitions and restarts end in the state of a fresh follower."""
    for seed in range(60):
        test_order.test_any_losses_and_restarts_end_in_the_state_of_a_fresh_follower(seed)
    one = test_order.Rig(test_order.Engine())
    one.order.connected()
    one.engine.publish(5)
    one.order.live(one.engine.frames[4])
    one.replay()
    assert one.whole


def contents():
    """Prompts of other content claim nothing: salts, and domains of tenants."""
    scene, prompt = Scene("a"), tokens(1, 4)
    scene.stores("a", prompt)
    for other in (Prompt(prompt, ExtraKeys(salt="x")), Prompt(prompt, domain="tenant")):
        (claim,) = scene.fleet.claims("m", other, {DOMAIN: other.keys_of(DOMAIN)})
        assert claim.tokens == 0


def collisions():
    """Prompts whose hashes end alike are two prompts."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        test_keys.test_prompts_whose_keys_end_alike_are_not_taken_for_each_other("off", monkeypatch)


def expectations():
    """What is expected ends."""
    test_decisions.test_a_booked_prompt_is_expected_where_it_went_until_it_expires(GROUPS)


def adapters():
    """Prompts of a base model and of adapters hit their own blocks, in both forms of keys."""
    for tagged in (True, False):
        test_adapters.test_hits_never_cross_between_base_model_and_adapters(tagged)
        test_adapters.test_salts_are_found_in_the_form_of_the_engine(tagged)


def unreadable():
    """Peers that cannot be read claim nothing."""
    for why in ("namespace", "reads none", "gone", "withdrawn", "invisible"):
        test_tiers.test_only_peers_that_can_be_read_count(why)


@dataclass(frozen=True)
class Twin:
    """A rule that is removed, and the campaign that finds it."""

    patch: Patch
    campaign: Callable[[], None]


def twin(path: str, campaign: Callable[[], None], change: Callable[[Real], Real]) -> Twin:
    return Twin(Patch(f"kvplane_{path}", change), campaign)


def undropped(real: Real) -> Real:
    return lambda self, column, limit, drops: real(self, column, limit, False)


def only_first_copies(real: Real) -> Real:
    return lambda self, cell, keys: real(self, cell, list(dict.fromkeys(keys) - keys_in(self, cell).keys()))


def any_state(_: Real) -> Real:
    def length(self, column, limit, drops):
        ends = column[: limit // self._hash_size].nonzero()[0]
        del drops
        return (int(ends[-1]) + 1) * self._hash_size if len(ends) else 0

    return length


def of_group_0(real: Real) -> Real:
    return lambda *given: (lambda claim: Claim(max(claim.alone[0], 0), claim.alone))(real(*given))


def on_the_device(real: Real) -> Real:
    return lambda self, event: real(self, replace(event, tier=Tier.DEVICE))


def applied_again(real: Real) -> Real:
    def accept(self, frame):
        if self.last is not None and frame.sequence <= self.last:
            self._sink.apply(frame.payload)
        real(self, frame)

    return accept


def without_clear(real: Real) -> Real:
    def restart(self):
        with mock.patch.object(self._sink, "clear"):
            real(self)

    return restart


TWINS = {
    "group 0 is trusted": twin("fleet.hits:HitRule.claim", tables, of_group_0),
    "copies are not counted": twin("fleet.index:Index.add", multiset, only_first_copies),
    "a window is one block short": twin(
        "core.face.hit_rules:_WindowRule._needed", tables, lambda real: lambda *one: max(real(*one) - 1, 1)
    ),
    "a state may end anywhere": twin("core.face.hit_rules:_StateRule.length", tables, any_state),
    "no block is dropped for a drafter": twin("core.face.hit_rules:_FullRule.length", tables, undropped),
    "tiers are mixed": twin("fleet.places:Place._store", test_places.test_other_tiers_are_kept_apart, on_the_device),
    "frames of a replay count again": twin("fleet.follow.order:SourceOrder._accept", orders, applied_again),
    "a clear is ignored": twin(
        "fleet.places:Place._remove_all",
        test_places.test_a_clear_and_an_unreadable_batch_remove_all,
        lambda _: lambda _: None,
    ),
    "salt is ignored": twin(
        "fleet.domains:Domain.keys", contents, lambda real: lambda self, tokens, _=NO_EXTRA_KEYS: real(self, tokens)
    ),
    "domains of tenants are ignored": twin("fleet.fleet:domain_mask", contents, lambda _: lambda name: 0),
    "the entries of a life that ended stay": twin("fleet.follow.order:SourceOrder._restart", orders, without_clear),
    "keys are cut to 64 bits": twin(
        "fleet.wire.msgpack:WHOLE_KEY_BYTES",
        collisions,
        lambda _: 8,  # type: ignore[arg-type, return-value]
    ),
    "an adapter has the blocks of its base model": twin(
        "fleet.places:Place.domain_of", adapters, lambda _: lambda self, model: self.proof.domain
    ),
    "one form of keys is tried": twin(
        "fleet.domains:DomainProof.wants_extra",
        adapters,
        lambda _: property(lambda self: False),  # type: ignore[arg-type, return-value]
    ),
    "an adapter that was loaded from elsewhere is the same": twin(
        "fleet.domains:DomainProof._prove_extra",
        test_adapters.test_an_adapter_that_was_loaded_from_elsewhere_claims_nothing_until_it_is_back,
        lambda _: lambda *given: True,
    ),
    "what peers have is ignored": twin(
        "fleet.places:Place.asked",
        test_tiers.test_peers_extend_a_hit_by_group_and_the_one_that_has_most_is_named,
        lambda real: lambda self, expects=False, tiers=(), _=(): real(self, expects, tiers),
    ),
    "a peer that is gone is read": twin(
        "fleet.fleet:Followed.is_readable",
        unreadable,
        lambda _: property(lambda self: True),  # type: ignore[arg-type, return-value]
    ),
    "blocks of a peer load cost nothing": twin(
        "fleet.work:Work.crowding_s",
        test_tiers.test_blocks_of_a_peer_load_delay_the_prompts_of_a_full_place,
        lambda _: lambda *given: 0.0,
    ),
    "expectations stay": twin("fleet.places:Expected.forget", expectations, lambda _: lambda self, name: None),
}


@contextmanager
def planted(patch: Patch):
    owner, name, real = patch.find()
    with mock.patch.object(owner, name, patch.change(real)):
        yield


@pytest.mark.parametrize("name", TWINS)
def test_the_campaign_passes_without_the_twin_and_finds_it(name):
    one = TWINS[name]
    one.campaign()
    with planted(one.patch), pytest.raises(AssertionError):
        one.campaign()
