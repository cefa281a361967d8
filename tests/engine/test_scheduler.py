"""Parts of the reference engine: drafts, blocks of states, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvplane.base.errors import InvalidArgument, OtherWriter, StaleEpoch
from tests.engine.reference.batch import Launch, Row, state_index
from tests.engine.reference.config import ATTENTION, EVEN, MIXED, ModelConfig
from tests.engine.reference.drafter import draft
from tests.engine.reference.engine import Engine
from tests.engine.reference.request import Request
from tests.engine.reference.scheduler import SchedulerConfig
from tests.engine.world import Pool, World


@pytest.mark.parametrize(
    ("tokens", "most", "drafts"),
    [
        ([1, 2, 3, 4, 1, 2, 3], 3, [4, 1, 2]),
        ([1, 2, 3, 4, 1, 2, 3], 1, [4]),
        ([7, 1, 2, 8, 1, 2, 9, 1, 2], 2, [9, 1]),
        ([1, 2, 3], 3, []),
        ([5], 3, []),
        ([5, 5], 0, []),
    ],
    ids=["longest match", "limit", "latest match", "nothing", "too short", "none asked for"],
)
def test_draft_returns_the_tokens_after_the_latest_match(tokens, most, drafts):
    assert draft(tokens, most) == drafts


@pytest.mark.parametrize(("tokens", "index"), [(0, -1), (1, 0), (16, 0), (17, 1)])
def test_state_is_in_the_block_of_its_last_token(tokens, index):
    assert state_index(tokens, 16) == index


def test_states_after_drafts_are_in_the_speculative_blocks():
    """14 tokens, one known token and three drafts: the last state is after 18 tokens, in the second block."""
    table = [90, 91, 92, 93, 94]
    row = Row([1, 2, 3, 4], start=14, num_outputs=4, tables=[table], states={0: 90})
    chunk = Row([1, 2, 3, 4], start=14, num_outputs=0, tables=[table[::-1]], states={0: 94})
    read, written = Launch([row, chunk], torch.device("cpu")).states(0, 16)
    assert read.tolist() == [90, 94]
    assert written.tolist() == [94, 93, 92, 91, 0, 0, 0, 93]


@pytest.mark.parametrize(
    ("prompt", "max_new", "field"), [([], 1, "prompt"), ([1], 0, "max_new_tokens"), ([1] * 190, 11, "prompt")]
)
def test_request_beyond_max_model_len_is_refused(prompt, max_new, field):
    world = World()
    with pytest.raises(InvalidArgument) as refused:
        world.engine.add(Request("q", prompt, max_new))
    assert refused.value.field == field
    assert not world.engine.has_work


def test_more_drafts_than_speculative_blocks_are_refused():
    with pytest.raises(InvalidArgument) as refused:
        World(config=SchedulerConfig(num_drafts=MIXED.max_drafts + 1))
    assert refused.value.field == "num_drafts"
    World(Pool(ATTENTION), SchedulerConfig(num_drafts=8))


def test_heads_not_divisible_by_ranks_are_refused():
    with pytest.raises(InvalidArgument) as refused:
        ModelConfig(EVEN.layers, num_ranks=4)
    assert refused.value.field == "layers[0].heads"


def test_engine_with_a_stale_epoch_is_refused():
    world = World()
    old, session = world.engine, world.session
    world.begin()
    old.add(Request("q", [1, 2, 3], 1))
    with pytest.raises(OtherWriter):
        old.step()
    with pytest.raises(StaleEpoch):
        Engine(lambda _: session, world.memory, old._model, SchedulerConfig())


def test_two_ranks_compute_the_same_logits_as_one():
    def output(num_ranks: int) -> list[int]:
        world = World(Pool(replace(EVEN, num_ranks=num_ranks), num_blocks=80))
        request = Request("q", [1, 2, 3], 12)
        world.engine.add(request)
        while world.engine.has_work:
            world.engine.step()
        return request.output

    assert output(1) == output(2)


def test_first_request_after_a_crash_hits():
    world = World(Pool(num_blocks=200))
    first, second, other = (Request(name, list(range(90)), 3, keep_logits=True) for name in ("a", "b", "c"))
    world.engine.add(first)
    while not first.is_done:
        world.engine.step()
    world.engine = world.begin()
    assert world.session.kept_keys > 0
    world.engine.add(second)
    world.engine.step()
    assert second.hits == [88]
    world.engine = world.begin()
    world.engine.add(other)
    while not other.is_done:
        world.engine.step()
    assert other.output == first.output
