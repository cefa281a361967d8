"""The replays of `make policies`, on a part of a trace and on the built-in workload."""

from __future__ import annotations

from hashlib import blake2b
from itertools import accumulate
from random import Random
from typing import Any

import pytest

from kvplane.base.groups import DENSE_RETENTION, EvictionPolicy
from kvplane_core.spec import hazard
from kvplane_tools.replay.workloads import ChatShape, Span, TokenSource, TraceRequest, chat_workload
from tests.bench.curves import hits_of
from tests.bench.mixtures import Case, gain_of, made
from tests.bench.policies import (
    Cell,
    Chain,
    bound,
    chains_of,
    percentage,
    prompts_of,
    replay,
    replica_of,
    share_of_hits,
)

LRU, WINDOW_TAIL = EvictionPolicy.LRU, EvictionPolicy.WINDOW_TAIL
SIZE = 512


def shares(spec_of, chains, *policies):
    return [percentage(chains, spec_of(policy)) for policy in policies]


@pytest.mark.parametrize(("groups", "policy"), [("5 windows", WINDOW_TAIL), ("no windows", EvictionPolicy.HAZARD)])
def test_a_core_alone_hits_what_an_engine_does(groups, policy):
    requests = list(chat_workload(Random(3), ChatShape(16_384, num_sessions=20)))
    spec = replica_of(groups, SIZE, 300, eviction=policy)
    engine = share_of_hits(replay(spec, requests))
    assert percentage(chains_of(requests, SIZE), spec) == engine > 0


def test_window_tail_hits_more_of_a_real_trace(workloads):
    """Its first 1,200 requests, in a pool in which windows compete with prefixes."""
    dense, sparse = (Cell("conversation", "5 windows", 8000, retention) for retention in (DENSE_RETENTION, 0))
    chains = prompts_of(workloads, "conversation", 1200)
    lru, window_tail = shares(dense.spec, chains, LRU, WINDOW_TAIL)
    best = bound(chains, SIZE, 8000)
    assert lru + 1.5 < window_tail <= best
    lru, window_tail = shares(sparse.spec, chains, LRU, WINDOW_TAIL)
    assert lru == window_tail <= best


@pytest.mark.parametrize("groups", ["1 window", "5 windows"])
@pytest.mark.parametrize("num_blocks", [200, 400, 1600])
def test_window_tail_hits_no_less_of_chats_and_agents(groups, num_blocks):
    chains = chains_of(chat_workload(Random(3), ChatShape(16_384, num_sessions=40)), SIZE)

    def spec_of(policy):
        return replica_of(groups, SIZE, num_blocks, retention_interval=DENSE_RETENTION, eviction=policy)

    lru, window_tail = shares(spec_of, chains, LRU, WINDOW_TAIL)
    assert lru - 0.1 <= window_tail <= bound(chains, SIZE, num_blocks)


def requests_by_letter(words):
    """One request per word; each letter is a block of the same content wherever the same letters precede it."""
    numbers: dict[str, int] = {}
    for number, word in enumerate(words):
        spans = [numbers.setdefault(word[: at + 1], len(numbers)) for at in range(len(word))]
        prompt = TokenSource((*(Span(one, 0, 4) for one in spans), Span(number, 0, 1, generated=True)))
        yield TraceRequest(str(number), float(number), "", prompt, TokenSource())


def best_by_search(words, num_blocks):
    """Hits of the best choice of what to keep of blocks that no request holds: every prefix-closed set is tried."""
    reachable: dict[frozenset[str], int] = {frozenset(): 0}
    for word in words:
        chain = [word[: at + 1] for at in range(len(word))]
        after: dict[frozenset[str], int] = {}
        for kept, hits in reachable.items():
            found = next((at for at, one in enumerate(chain) if one not in kept), len(chain))
            for rest in subsets(kept, num_blocks):
                if len(held := rest | set(chain)) <= num_blocks:
                    after[held] = max(after.get(held, 0), hits + found)
        reachable = after
    return max(reachable.values())


def subsets(prefixes, most):
    found: set[frozenset[str]] = {frozenset()}
    for one in sorted(prefixes, key=len):
        found |= {kept | {one} for kept in found if len(kept) < most and (len(one) == 1 or one[:-1] in kept)}
    return found


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_is_the_best_that_any_choice_reaches(seed):
    rng = Random(seed)
    words = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 3))) for _ in range(7)]
    tokens = sum(4 * len(word) + 1 for word in words)
    found = bound(chains_of(requests_by_letter(words), 4), 4, 3)
    assert round(found * tokens / 400, 6) == best_by_search(words, 3)


@pytest.mark.parametrize(("part", "blocks"), [("second", 10_000), ("first", 10_000), ("second", 6000)])
def test_hazard_hits_no_less_than_lru_of_half_a_trace(workloads, part, blocks):
    chains = prompts_of(workloads, "synthetic", None)
    half = len(chains) // 2
    hits = hits_of(chains[:half] if part == "first" else chains[half:], SIZE, blocks)
    assert hits.lru - 0.15 <= hits.hazard <= hits.optimum


def test_a_guard_that_few_lookups_persuade_is_found(workloads, monkeypatch):
    monkeypatch.setenv("KVPLANE_CORE", "python")
    monkeypatch.setattr(hazard, "_FIRST_POOLS", 0)
    monkeypatch.setattr(hazard, "_SPREAD", (1, 0))
    with pytest.raises(AssertionError):
        test_hazard_hits_no_less_than_lru_of_half_a_trace(workloads, "second", 10_000)


def drawn_prompts(seed, count=400):
    """Prompts of a mix of documents, loops, chats and popular ones, which changes in the middle for odd seeds."""
    rng = Random(seed)
    loop, chats = rng.randint(5, 60), [list[tuple[Any, ...]]() for _ in range(rng.randint(3, 40))]
    names: list[tuple[Any, ...]]
    for number in range(count):
        if number == 0 or (number == count // 2 and seed % 2):
            weights = [rng.random() for _ in range(4)]
        kind = rng.choices(range(4), weights)[0]
        if kind == 0:
            names = [(number, at) for at in range(rng.randint(1, 24))]
        elif kind == 1:
            names = [("loop", number % loop, at) for at in range(8)]
        elif kind == 2:
            chat = rng.choice(chats)
            if len(chat) > 20 or rng.random() < 0.1:
                chat.clear()
            chat += [(number, at) for at in range(rng.randint(1, 4))]
            names = [("system",), *chat]
        else:
            names = [("popular", int(rng.paretovariate(1.1)), at) for at in range(rng.randint(1, 6))]
        digests = accumulate(names, lambda parent, one: blake2b(parent + repr(one).encode()).digest()[:32], initial=b"")
        yield Chain([*digests][1:], len(names) * 64 + 1)


@pytest.mark.parametrize("seed", range(10))
def test_hazard_hits_no_less_than_lru_of_any_mix(seed):
    """Half a point is the limit for pools of less than 3,000 blocks."""
    hits = hits_of([*drawn_prompts(seed)], 64, Random(seed).choice((48, 96, 200, 400)))
    assert hits.lru - 0.5 <= hits.hazard <= hits.optimum


@pytest.mark.parametrize("seed", range(12))
def test_hazard_hits_no_less_than_lru_of_traffic_that_is_made_against_it(seed):
    """Half a point is the limit for pools of less than 3,000 blocks."""
    case = Case("", [*made(Random(seed), 64)], 64)
    assert gain_of(case) >= -case.goal
