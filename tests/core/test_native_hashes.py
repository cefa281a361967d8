"""The compiled core hashes tokens, and reads packed rows, as the Python core does."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from kvplane.base.groups import HashAlgorithm
from kvplane.base.step import Admit, Budget, End, ExtraKeys, Facts, Multimodal, News, Part, Run
from kvplane.session.builder import StepBuilder
from tests.core.builders import Engine, full, state, window

KEYS = (
    ExtraKeys(), ExtraKeys(salt="s"), ExtraKeys(lora=("adapter", "/a")),
    ExtraKeys(multimodal=(Multimodal("picture", 2, 9),)),
)  # fmt: skip


def contents(rng, slots, keyed):
    """New requests with tokens, some of which have extra keys."""
    lengths = [rng.randint(1, 23) for _ in slots]
    news = News(slots, lengths, [rng.randrange(1 << 32) for _ in range(sum(lengths))])
    if keyed:
        news.extra_keys = [rng.choice(KEYS) for _ in slots]
    return news


def appended(rng, slots):
    counts = [rng.choice((0, 1, 1, 5, 19)) for _ in slots]
    return Facts(slots, appended=counts, tokens=[rng.randrange(1 << 32) for _ in range(sum(counts))])


@pytest.mark.parametrize("seed", range(6))
def test_tokens_of_requests_are_hashed_alike(seed):
    """With and without extra keys, in several parts of a step, and in slots that are used again."""
    rng = Random(seed)
    engine = Engine(full(), num_blocks=400)
    free, live = list(range(8)), list[int]()
    for _ in range(40):
        parts = list[Part]()
        for _ in range(rng.randint(1, 3)):
            ending = [slot for slot in live if rng.random() < 0.15]
            growing = [slot for slot in live if slot not in ending and rng.random() < 0.7]
            begin = free[: rng.randint(0, 2)]
            facts = appended(rng, growing)
            if rng.random() < 0.5:  # rows that do more than append
                facts.slot, facts.appended = [*growing, *ending], [*facts.appended, *[0] * len(ending)]
                facts.end = [0] * len(growing) + [int(End.FREE)] * len(ending)
                free, live = [*free, *ending], growing + [one for one in live if one not in [*growing, *ending]]
            news = contents(rng, begin, rng.random() < 0.5) if begin else News()
            free, live = [one for one in free if one not in begin], [*live, *begin]
            parts.append(Part(facts=facts, news=news, run=Run(growing), with_hashes=rng.random() < 0.3))
        engine.step(*parts)


@pytest.mark.parametrize("algorithm", list(HashAlgorithm))
@pytest.mark.parametrize("lookahead", [0, 1])
def test_every_algorithm_hashes_alike(algorithm, lookahead):
    rng = Random(algorithm.value)
    engine = Engine(full(), window(8), hash_algorithm=algorithm, hash_seed="seed", hash_lookahead_tokens=lookahead)
    engine.step(Part(news=contents(rng, [0, 1, 2], keyed=False), admit=Admit([0, 1, 2]), budget=Budget(100)))
    for _ in range(12):
        engine.step(Part(facts=appended(rng, [0, 1, 2]), run=Run([0, 1, 2]), budget=Budget(100)))


def test_hashes_of_the_engine_are_kept_next_to_tokens_of_other_requests():
    engine = Engine(full())
    engine.step(Part(news=News([0], [7], [5] * 7), admit=Admit([0])))
    engine.step(Part(news=News([1], [8]), admit=Admit([1])))
    facts = Facts([0, 1], appended=[1, 0], tokens=[5], num_hashes=[0, 2], hashes=b"a" * 32 + b"b" * 32)
    engine.step(Part(facts=facts, run=Run([0])))
    assert len(engine.replica.requests.hashes(0)) == len(engine.replica.requests.hashes(1)) == 2


def lacking_hashes(replica, slot, appended):
    """How many hashes a request of an engine that hashes lacks after these tokens."""
    requests = replica.requests
    full = (requests.num_tokens[slot] + appended) // replica.spec.hash_block_size
    return full - len(requests.hashes(slot))


@pytest.mark.parametrize("hashed", [False, True])
def test_packed_rows_are_read_as_their_sections(hashed):
    """Twins give both cores rows that are packed; the Python core unpacks them."""
    rng = Random(hashed)
    engine = Engine(full(), state(), max_model_len=4096)
    slots = list(range(12))
    lengths = [rng.randint(1, 9) for _ in slots]
    news = News(slots, lengths) if hashed else News(slots, lengths, [3] * sum(lengths))
    engine.step(Part(news=news, admit=Admit(slots), run=Run()))
    builder = StepBuilder(slots, hashed=hashed)
    for number in range(60):
        if number == 30:
            builder.set_rows(rng.sample(slots, 7))
        builder.tokens[:] = array("I", [rng.randrange(1 << 32) for _ in range(len(builder))])
        builder.extra[:] = array("i", [number % 3 == 1] * len(builder))
        if hashed and number % 3 != 1:
            for row, slot in enumerate(builder.slots):
                for _ in range(lacking_hashes(engine.replica, slot, 1)):
                    builder.add_hash(row, rng.randbytes(32))
        engine.step(builder.part(appended=number % 3 != 1))
    assert engine.replica.requests.num_tokens[builder.slots[0]] > 30
    assert engine.replica.requests.hashes(builder.slots[0])


def test_rows_that_are_refused_name_the_fault():
    engine = Engine(full())
    builder = StepBuilder([0, 0])
    with pytest.raises(Exception, match="slot"):
        engine.step(builder.part())
