"""Where prompts are sent, what is expected of them, and what reports teach."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from kvplane.base.errors import InvalidArgument, LimitExceeded, NotFound
from kvplane.base.groups import DENSE_RETENTION, GroupKind
from kvplane.base.hashing import HashScheme, RequestHasher
from kvplane_fleet.decisions import Ask, Event
from kvplane_fleet.domains import keys_of
from kvplane_fleet.faults import Fault
from kvplane_fleet.fleet import Prompt
from kvplane_fleet.hits import HitRule
from kvplane_fleet.policies import Policy
from kvplane_fleet.router.watching import MAX_OF_OWNER, Watching
from kvplane_tools.replay.workloads import Span, TokenSource, TraceRequest
from tests.bench.policies import replay
from tests.router.fleets import BLOCK, GROUPS, Scene, chosen, tokens
from tests.router.tables import WINDOWS, draw_spec


def test_a_prompt_is_sent_to_the_place_that_has_it():
    scene, prompt = Scene("a", "b", "c"), tokens(1, 20)
    scene.stores("b", prompt)
    decision = scene.score([*prompt, 1])
    assert chosen(decision) == "b"
    assert decision.places[0].claim.tokens == 20 * BLOCK
    assert [one.claim.tokens for one in decision.places[1:]] == [0, 0]


def test_a_queue_moves_a_prompt_to_another_place_and_reports_of_first_tokens_end_the_queue():
    scene, prompt = Scene("a", "b"), tokens(1, 100)
    scene.stores("b", prompt)
    names = [scene.book(tokens(seed, 400), candidates=frozenset("b"))[1] for seed in range(2, 6)]
    assert chosen(scene.score(prompt, policy=Policy.TTFT)) == "a"
    for name in names:
        scene.decisions.first_token(name, Event(scene.clock()))
    assert chosen(scene.score(prompt, policy=Policy.TTFT)) == "b"


def test_a_queue_that_is_not_reported_on_ends_by_itself():
    scene, prompt = Scene("a", "b"), tokens(1, 100)
    scene.stores("b", prompt)
    scene.book(tokens(2, 400), candidates=frozenset("b"))
    assert scene.decisions.work_of("b").queue_s(scene.clock()) > 0.5
    scene.clock.now_s += 30
    assert scene.decisions.work_of("b").queue_s(scene.clock()) == 0


@pytest.mark.parametrize("groups", [GROUPS[:1], GROUPS], ids=["full", "hybrid"])
def test_a_booked_prompt_is_expected_where_it_went_until_it_expires(groups):
    scene, prompt = Scene("a", "b", "c", groups=groups), tokens(1, 40)
    place, _ = scene.book(prompt)
    again = scene.score([*prompt, *tokens(2, 1)])
    assert chosen(again) == place
    # A repeated prompt computes its last token, so windows are kept for a hit that ends a block earlier.
    assert again.places[0].claim.expected == (40 if len(groups) == 1 else 39) * BLOCK
    assert again.places[0].claim.tokens == 0
    scene.clock.now_s += 60
    assert all(one.claim.expected == 0 for one in scene.score(prompt).places)


def test_a_hybrid_is_not_expected_to_hit_inside_a_booked_prompt():
    """The window is kept at the end of the prompt, and not where another prompt leaves it."""
    shared, seen = tokens(1, 40), dict[str, int]()
    for name, groups in [("full", GROUPS[:1]), ("hybrid", GROUPS)]:
        scene = Scene("a", groups=groups)
        scene.book([*shared, *tokens(2, 10)])
        seen[name] = scene.score([*shared, *tokens(3, 10)]).places[0].claim.expected
    assert seen == {"full": 40 * BLOCK, "hybrid": 0}


def test_the_second_prompt_of_a_group_goes_where_the_first_was_and_the_third_hits_there():
    """The first prompt leaves no window where the second one leaves it; the second does, where the first was."""
    scene, shared = Scene("a", "b", "c", groups=GROUPS), tokens(1, 400)
    first = [*shared, *tokens(2, 10)]
    scene.stores("b", first, only=0)
    scene.stores("b", first[-2 * BLOCK :], only=1)
    decision = scene.score([*shared, *tokens(3, 10)], book=True)
    assert chosen(decision) == "b"
    assert [one.option.cost.later_s < 0 for one in decision.places] == [True, False, False]
    third = scene.score([*shared, *tokens(4, 10)])
    assert chosen(third) == "b"
    assert third.places[0].claim.expected == 400 * BLOCK
    assert all(one.option.cost.later_s == 0 for one in third.places), "b has it as a whole"


def test_claims_of_a_place_count_by_the_share_that_came_true_there():
    scene, prompt = Scene("a", "b"), tokens(1, 40)
    scene.stores("a", prompt)
    before = scene.score(prompt).places[0].option.cost.miss_s
    for cached in (0,) * 40:
        name = scene.book(prompt, candidates=frozenset("a"))[1]
        scene.decisions.ended(name, Event(scene.clock(), cached))
    scene.clock.now_s += 60
    miss = {one.claim.place: one.option.cost.miss_s for one in scene.score(prompt).places}
    assert scene.decisions.work_of("a").trust < 0.1
    assert miss["a"] > 5 * before


def test_a_prompt_that_waits_long_stays_in_the_queue_of_a_place_that_is_reported_on():
    scene = Scene("a")
    names = [scene.book(tokens(seed, 400))[1] for seed in range(4)]
    scene.decisions.first_token(names[0], Event(scene.clock()))
    scene.clock.now_s += 100
    work = scene.decisions.work_of("a")
    assert work.waiting(scene.clock()) == len(names[1:])
    later = scene.book(tokens(9, 400))[1]
    scene.decisions.first_token(later, Event(scene.clock()))
    assert not work.waiting(scene.clock()), "engines begin with the oldest"


def test_what_a_hybrid_is_expected_to_have_is_what_it_then_stores():
    scene, prompt = Scene("a", groups=GROUPS), tokens(1, 40)
    scene.book(prompt)
    expected = scene.score(prompt).places[0].claim.expected
    scene.stores("a", prompt, only=0)
    scene.stores("a", prompt[: 39 * BLOCK], only=1)
    assert expected == scene.score(prompt).places[0].claim.tokens == 39 * BLOCK


def computed(spec, length):
    """The keys that each group of a replica has once it has computed a prompt, and the keys of the prompt."""
    spec = replace(spec, num_blocks=1000, max_in_flight_tokens=8192)
    prompt = TokenSource((Span(1, 0, length),))
    output = TokenSource((Span(1, 0, 1, generated=True),))
    engine = replay(spec, [TraceRequest("one", 0.0, "", prompt, output)])
    pool = engine._session.replica.coordinator.pool  # type: ignore[attr-defined]
    held = [set[int]() for _ in spec.groups]
    for block in range(pool.num_blocks):
        key = pool.key_of(block)
        if key is not None:
            held[key[1]].add(int.from_bytes(key[2][-8:], "big"))
    scheme = HashScheme.of(spec)
    return held, keys_of(RequestHasher(scheme).append(prompt.packed()), scheme.digest.size)


def test_what_replicas_keep_of_a_prompt_is_what_is_expected_there():
    """Prompts of whole blocks, and of a token more and less, with every interval of windows. A replica publishes no
    state that its owner may still overwrite, and this one ends with its prompt, so replicas with states are left out.
    """
    found = Counter[int]()
    for seed in range(300):
        rng = Random(seed)
        spec = draw_spec(rng)
        if any(group.kind is GroupKind.MAMBA for group in spec.groups):
            continue
        interval = rng.choice([0, 0, DENSE_RETENTION, spec.scheduler_block_size * rng.randrange(1, 5)])
        if any(group.kind in WINDOWS for group in spec.groups):
            spec = replace(spec, retention_interval=interval)
        length = rng.choice([1, 2, 5, 8, 20]) * spec.scheduler_block_size + rng.choice([-1, 0, 1])
        held, keys = computed(spec, length)
        kept = HitRule(spec).kept(length)
        for group, units in enumerate(kept):
            expected = {keys[unit] for unit in units if unit < len(keys)}
            assert expected == held[group], f"seed {seed}: group {group} of {spec}"
            found[spec.retention_interval] += len(expected)
    assert min(found[0], found[DENSE_RETENTION], found.total() - found[0] - found[DENSE_RETENTION]) > 300, found


def test_an_engine_life_that_ends_takes_expectations_with_it_and_gives_its_cells_back():
    scene, prompt = Scene("a"), tokens(1, 40)
    _, name = scene.book(prompt)
    scene.place("a").clear(life_ended=True)
    scene.stores("a", prompt)
    scene.decisions.ended(name, Event(scene.clock()))
    scene.clock.now_s += 60
    assert scene.score(prompt).places[0].claim.tokens == 39 * BLOCK
    scene.removes("a", prompt)
    assert scene.fleet.index.num_keys == 0


def test_reports_teach_which_engine_is_slow():
    scene = Scene("slow", "fast")
    for seed in range(40):
        for place, rate in [("slow", 1000), ("fast", 50_000)]:
            prompt = tokens(seed * 2 + (place == "fast"), 10 + 20 * (seed % 5))
            _, name = scene.book(prompt, candidates=frozenset([place]))
            scene.clock.now_s += len(prompt) / rate
            scene.decisions.first_token(name, Event(scene.clock(), cached=0))
            scene.decisions.ended(name, Event(scene.clock() + 1, output_tokens=10))
    prompt = tokens(500, 50)
    slow, fast = (scene.decisions.work_of(name).costs.prefill_s(800, 0) for name in ("slow", "fast"))
    assert slow == pytest.approx(0.8, rel=0.2)
    assert fast == pytest.approx(0.016, rel=0.5)
    scene.stores("slow", prompt[: 10 * BLOCK])
    assert chosen(scene.score(prompt)) == "fast"


def test_claims_are_compared_with_what_the_engine_had_by_cause():
    def cause(before, cached):
        scene, prompt = Scene("a"), tokens(1, 10)
        scene.stores("a", prompt[: 5 * BLOCK])
        if before == "booked":
            scene.book(prompt)
        if before == "partial":
            order = scene.fleet.followed["a"].order
            assert order is not None
            order.partial = True
        _, name = scene.book(prompt)
        if before == "removed":
            scene.removes("a", prompt[4 * BLOCK : 5 * BLOCK])
        if before == "stored":
            scene.stores("a", tokens(2, 1))
        answer = scene.decisions.started(name, Event(scene.clock(), cached))
        truth = scene.decisions.work_of("a").truth
        assert truth.real == cached
        assert sum(truth.differences.values()) == abs(truth.claimed - cached)
        return answer

    assert cause("", 5 * BLOCK) == "equal"
    assert cause("removed", 4 * BLOCK) == "removed"
    assert cause("stored", 6 * BLOCK) == "stored"
    assert cause("booked", 5 * BLOCK) == "expected"
    assert cause("partial", 9 * BLOCK) == "incomplete"
    assert cause("", 4 * BLOCK) == "unexplained"
    assert cause("removed", 6 * BLOCK) == "unexplained"


def test_a_place_whose_hits_contradict_its_events_three_times_in_a_minute_is_learned_again():
    scene, prompt = Scene("a"), tokens(1, 10)
    place = scene.place("a")
    scene.stores("a", prompt)
    for seconds in (0, 50, 50, 5):
        scene.clock.now_s += seconds
        assert place.entries == 10
        name = scene.book(prompt)[1]
        assert scene.decisions.ended(name, Event(scene.clock(), BLOCK)) == "unexplained"
    assert (place.entries, scene.fleet.followed["a"].state) == (0, "partial")
    assert place.faults.counts[Fault.HITS_CONTRADICT] == 1


def test_a_caller_that_reports_false_hits_costs_a_place_no_more_than_one_learning_in_ten_minutes():
    scene = Scene("a")
    followed, place = scene.fleet.followed["a"], scene.place("a")
    for _ in range(100):
        scene.clock.now_s += 10
        scene.decisions._doubt("a", followed)
    assert place.faults.counts[Fault.HITS_CONTRADICT] == 2


def test_regret_is_the_time_by_which_the_best_other_place_was_predicted_earlier():
    scene, prompt = Scene("a", "b"), tokens(1, 10)
    decision = scene.score(prompt, book=True)
    other = decision.places[1].option.cost.first_token_s
    scene.decisions.first_token(decision.name, Event(scene.clock() + other + 0.5))
    assert scene.decisions.work_of(chosen(decision)).truth.regret_s == pytest.approx(0.5)


def test_an_engine_that_must_evict_what_is_asked_for_again_costs_more():
    costs = {}
    for asked_again in (True, False):
        scene = Scene("a")
        for seed in range(30):
            scene.stores("a", tokens(seed, 40))
        for seed in range(20):
            scene.removes("a", tokens(seed, 40))
            if asked_again:
                scene.book(tokens(seed, 40))
            scene.stores("a", tokens(1000 + seed, 40))
        costs[asked_again] = scene.score(tokens(5000, 40)).places[0].option.cost.displacement_s
    assert costs[True] > 3 * costs[False] > 0


def test_bookings_are_limited_expire_and_are_reported_once():
    scene = Scene("a", max_decisions=2, forget_after_s=50.0)
    names = [scene.book(tokens(seed, 2))[1] for seed in (1, 2)]
    with pytest.raises(LimitExceeded):
        scene.book(tokens(3, 2))
    scene.score(tokens(3, 2))
    scene.decisions.ended(names[0], Event(scene.clock()))
    with pytest.raises(NotFound, match="no open decision"):
        scene.decisions.ended(names[0], Event(scene.clock()))
    scene.book(tokens(3, 2))
    scene.clock.now_s += 51
    scene.decisions.sweep()
    assert scene.decisions.work_of("a").in_flight == 0
    assert scene.decisions.work_of("a").truth.unreported == 2


def test_an_owner_books_its_share_and_leaves_the_rest_to_others():
    scene = Scene("a", max_decisions=8, forget_after_s=50.0)
    names = [scene.book(tokens(seed, 2), owner="greedy")[1] for seed in range(4)]
    with pytest.raises(LimitExceeded, match="greedy"):
        scene.book(tokens(9, 2), owner="greedy")
    scene.book(tokens(9, 2), owner="other")
    scene.decisions.ended(names[0], Event(scene.clock()))
    scene.book(tokens(9, 2), owner="greedy")  # there is room again
    scene.clock.now_s += 51
    scene.decisions.sweep()
    assert not scene.decisions._of_owner
    assert not scene.decisions._expected
    assert not scene.place("a").expected


async def test_an_owner_watches_its_share_and_leaves_the_rest_to_others():
    watching, streams = Watching(Scene("a").fleet), []
    for _ in range(MAX_OF_OWNER):
        streams.append(watching.watch(["a"], "greedy"))
        assert (await anext(streams[-1])).place == "a"
    with pytest.raises(LimitExceeded, match="greedy"):
        await anext(watching.watch(["a"], "greedy"))
    streams.append(watching.watch(["a"], "other"))
    assert (await anext(streams[-1])).place == "a"
    for one in streams:
        await one.aclose()
    assert not watching._watchers


def test_unknown_models_and_candidates_and_empty_prompts_are_refused():
    scene = Scene("a")
    with pytest.raises(NotFound, match="none of the 1 candidates"):
        scene.score(tokens(1, 1), candidates=frozenset(["x"]))
    with pytest.raises(InvalidArgument, match="no token"):
        scene.score([])
    assert chosen(scene.score([5])) == "a"


def test_places_that_are_not_connected_come_last():
    scene, prompt = Scene("a", "b"), tokens(1, 10)
    scene.stores("a", prompt)
    scene.fleet.followed["a"].source.is_connected = False
    assert chosen(scene.score(prompt)) == "b"


@pytest.mark.parametrize("policy", Policy)
def test_every_policy_orders_all_places(policy):
    scene = Scene("a", "b", "c")
    decision = scene.score(tokens(1, 3), policy=policy)
    assert sorted(one.claim.place for one in decision.places) == ["a", "b", "c"]


def test_round_robin_takes_turns_and_random_takes_all():
    scene = Scene("a", "b", "c")
    turns = [chosen(scene.score(tokens(1, 3), policy=Policy.ROUND_ROBIN)) for _ in range(6)]
    assert sorted(turns[:3]) == ["a", "b", "c"]
    assert turns[3:] == turns[:3]
    assert {chosen(scene.score(tokens(1, 3), policy=Policy.RANDOM)) for _ in range(60)} == {"a", "b", "c"}


def test_equal_places_are_chosen_alike_by_every_router():
    prompts = [tokens(seed, 3) for seed in range(20)]
    first, second = ([chosen(Scene("a", "b", "c").score(prompt)) for prompt in prompts] for _ in range(2))
    assert first == second
    assert set(first) == {"a", "b", "c"}


def test_prompts_are_spread_before_it_is_known_how_engines_hash():
    scene = Scene("a", "b")
    for name in ("a", "b"):
        scene.place(name).clear(life_ended=True)
    asks = [Ask("m", Prompt(tokens(seed, 2))) for seed in range(20)]
    first, again = ([chosen(scene.decisions.score(ask, {})) for ask in asks] for _ in range(2))
    assert first == again
    assert set(first) == {"a", "b"}
