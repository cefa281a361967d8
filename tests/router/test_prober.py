"""A probe compares what an engine states with the claim: entries that it does not have are found within a bound."""

from __future__ import annotations

import json

import msgspec
import pytest

from kvplane.base.step import ExtraKeys
from kvplane_fleet.decisions import Ask, Event
from kvplane_fleet.faults import Fault
from kvplane_fleet.fleet import Prompt
from kvplane_fleet.router.prober import FAILED, REMEMBERED, UNSTATED, Prober, cached_tokens
from tests.router.fleets import BLOCK, DOMAIN, Scene, tokens

PROMPTS = [tokens(seed, 4) for seed in range(8)]


class Probed:
    """A place with an endpoint whose engine answers from a cache of its own, which events may misrepresent."""

    def __init__(self, **settings):
        self.scene = Scene("a", probe_period_s=10.0, **settings)
        place, decisions = self.scene.place("a"), self.scene.decisions
        place.settings = msgspec.structs.replace(place.settings, endpoint="http://engine")
        self.prober = Prober(self.scene.fleet, decisions, decisions.settings, self.scene.clock)
        self.cache, self.asked = set[int](), list[list[int]]()
        for prompt in PROMPTS:
            self.computes(prompt)

    def computes(self, prompt):
        """A prompt is sent there, computed and cached."""
        decisions = self.scene.decisions
        decisions.ended(self.scene.book(prompt)[1], Event(self.scene.clock()))
        self.scene.clock.now_s += 10
        decisions.sweep()
        self.scene.stores("a", prompt)
        self.cache.update(DOMAIN.keys(prompt))

    async def complete(self, endpoint, body):
        asked = json.loads(body)
        assert (endpoint, asked["model"], asked["max_tokens"]) == ("http://engine", "m", 1)
        self.asked.append(asked["prompt"])
        keys = DOMAIN.keys(asked["prompt"])
        known = next((at for at, key in enumerate(keys) if key not in self.cache), len(keys))
        return min(known, (len(asked["prompt"]) - 1) // BLOCK) * BLOCK

    async def probe(self):
        return await self.prober.probe("a", self.complete)


async def test_probes_of_a_true_index_are_equal_and_go_through_all_prompts():
    one = Probed()
    assert [await one.probe() for _ in range(2 * len(PROMPTS))] == ["equal"] * 2 * len(PROMPTS)
    assert one.asked == PROMPTS * 2
    assert one.prober.results == {"a": {"equal": 2 * len(PROMPTS)}}
    assert not one.scene.decisions.work_of("a").in_flight


async def test_entries_that_an_engine_lost_silently_are_found_within_as_many_probes_as_there_are_prompts():
    one = Probed()
    for prompt in PROMPTS[4:7]:
        one.cache.difference_update(DOMAIN.keys(prompt))
    results = list[str]()
    while one.scene.place("a").entries and len(results) < len(PROMPTS):
        results.append(await one.probe())
    assert results == ["equal"] * 4 + ["unexplained"] * 3
    assert one.scene.place("a").faults.counts[Fault.HITS_CONTRADICT] == 1
    assert one.scene.place("a").entries == 0
    assert await one.probe() == ""  # nothing is claimed


async def test_a_probe_costs_few_tokens_or_is_none():
    one = Probed(probe_tokens=BLOCK)
    for prompt in PROMPTS[1:]:
        one.scene.removes("a", prompt[2 * BLOCK :])
        one.scene.removes("a", prompt[: 4 * BLOCK])
        one.scene.stores("a", prompt[: 2 * BLOCK])
    assert [await one.probe() for _ in range(3)] == ["equal"] * 3
    assert one.asked == [PROMPTS[0]] * 3


@pytest.mark.parametrize(
    "prompt",
    [
        Prompt(PROMPTS[0], ExtraKeys(salt="x")),
        Prompt(PROMPTS[0], domain="tenant"),
        Prompt((), keys=DOMAIN.keys(PROMPTS[0]), num_keyed=4 * BLOCK),
        Prompt(PROMPTS[0]),
    ],
    ids=["salted", "of a tenant", "keys", "known"],
)
def test_what_an_engine_cannot_be_asked_again_is_not_remembered(prompt):
    one = Probed()
    before = list(one.prober._prompts["a"])
    one.scene.decisions.score(Ask("m", prompt, book=True), {DOMAIN: prompt.keys_of(DOMAIN)})
    assert list(one.prober._prompts["a"]) == before
    for seed in range(100, 100 + REMEMBERED):
        one.scene.book(tokens(seed, 1))
    assert len(one.prober._prompts["a"]) == REMEMBERED


async def refuse(*_):
    raise ConnectionRefusedError


def states(cached):
    async def complete(*_):
        return cached

    return complete


async def test_an_engine_that_fails_or_states_nothing_is_counted_and_teaches_nothing():
    one = Probed()
    assert await one.prober.probe("a", refuse) == FAILED
    assert await one.prober.probe("a", states(None)) == UNSTATED
    assert await one.prober.probe("a", states(10**9)) == UNSTATED
    assert one.scene.decisions.work_of("a").truth.real == 0
    assert not one.scene.decisions.work_of("a").in_flight


async def test_nothing_is_probed_unless_it_is_asked_for():
    scene = Scene("a")
    prober = Prober(scene.fleet, scene.decisions, scene.decisions.settings, scene.clock)
    scene.book(PROMPTS[0])
    await prober.run()
    assert not prober.results


@pytest.mark.parametrize(
    ("answer", "cached"),
    [
        ({"usage": {"prompt_tokens_details": {"cached_tokens": 32}}}, 32),
        ({"usage": {"prompt_tokens_details": {"cached_tokens": True}}}, None),
        ({"usage": {"prompt_tokens_details": None}}, None),
        ({"usage": [1]}, None),
        ([], None),
    ],
)
def test_cached_tokens_are_read_from_the_usage_of_a_completion(answer, cached):
    assert cached_tokens(json.dumps(answer).encode()) == cached
