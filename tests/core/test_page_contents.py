"""No hit is wrong: under any correct engine, pages contain the tokens of their keys, and launches read the right pages.

The pages are simulated (`page_memory`), the engine does everything at random (`page_engine`). A failing example is a
seed: `run("mix", seed)` repeats it.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplane.base.groups import DENSE_RETENTION, AlignSpec, EvictionPolicy, GroupSpec, MambaMode
from kvplane_core.face.setup import states_for_drafts
from tests.core.builders import chunked, full, prompt_and_window, replica_spec, ring, state, window
from tests.core.page_engine import RandomEngine
from tests.core.page_memory import Left, WrongPage
from tests.core.page_requests import PlannedRow, Truth
from tests.core.permissions import Cells
from tests.twins import weakened

STEPS = 30
MIXES: dict[str, tuple[list[GroupSpec], dict[str, Any]]] = {
    "window and full": ([window(6), full()], {"retention_interval": 0}),
    "chunks and full": ([chunked(8), full(lookup_class=5)], {}),
    "states and full": (
        [state(zero_new_blocks=True), full(zero_new_blocks=True)],
        {"align": AlignSpec(4, 4096)},
    ),
    "states, hits inside blocks": (
        [state(8), full(8)],
        {"hash_block_size": 4, "partial_hits": True, "align": AlignSpec(8, 4096, stop_at_tail=True)},
    ),
    "checkpoints inside chunks": (
        [state(checkpoint_alignment=1, zero_new_blocks=True), full(zero_new_blocks=True)],
        {"align": AlignSpec(4, 4096)},
    ),
    "checkpoints, hits inside blocks": (
        [state(8, checkpoint_alignment=2), full(8)],
        {"hash_block_size": 2, "partial_hits": True, "align": AlignSpec(8, 4096, stop_at_tail=True)},
    ),
    "checkpoints of every chunk, drafts": (
        [state(speculative_blocks=4, checkpoint_alignment=4), full()],
        {"retention_interval": DENSE_RETENTION, "num_blocks": 40},
    ),
    "checkpoints and drafts": (
        [
            state(4, speculative_blocks=4, checkpoint_alignment=2, checkpoints_single_group_hits=True),
            full(4, is_draft=True, drops_last_block=True),
        ],
        {
            "hash_block_size": 2,
            "partial_hits": True,
            "align": AlignSpec(4, 4096, stop_at_tail=True),
            "num_blocks": 60,
        },
    ),
    "three sizes, hits inside blocks": (
        [window(5, 2), full(8), full(4, lookup_class=5)],
        {"hash_block_size": 2, "partial_hits": True},
    ),
    "seven groups": (
        [full(), window(6), window(6), window(6), window(10, lookup_class=8), state(), ring()],
        {"retention_interval": 8, "num_blocks": 60},
    ),
    "drafts": ([full(), window(6, is_draft=True, drops_last_block=True)], {}),
    "drafts, hashes that look ahead": (
        [full(), window(6, is_draft=True, drops_last_block=True)],
        {"hash_lookahead_tokens": 1},
    ),
    "states, drafts and windows": (
        [state(speculative_blocks=2, zero_new_blocks=True), full(), window(6, zero_new_blocks=True)],
        {"align": AlignSpec(4, 4096)},
    ),
    "drafts, one group": ([full(is_draft=True, drops_last_block=True)], {}),
    "prompt and window": ([prompt_and_window(5), full(lookup_class=5)], {"num_blocks": 32}),
    "states and drafts": ([state(speculative_blocks=2), full(is_draft=True, drops_last_block=True)], {}),
    "windows leave first": (
        [full(), window(6), window(10, lookup_class=8)],
        {"eviction": EvictionPolicy.WINDOW_TAIL, "retention_interval": DENSE_RETENTION},
    ),
    "states, drafts and chunks leave first": (
        [state(speculative_blocks=2), full(), chunked(8, lookup_class=5)],
        {"eviction": EvictionPolicy.WINDOW_TAIL, "retention_interval": DENSE_RETENTION, "num_blocks": 40},
    ),
    "superseded states leave first": (
        [full(8), state(8), state(8, lookup_class=4)],
        {
            "eviction": EvictionPolicy.TURN_TAIL,
            "hash_block_size": 2,
            "partial_hits": True,
            "align": AlignSpec(8, 4096, True),
            "num_blocks": 24,
        },
    ),
    "what is learnt": ([full(), window(6, lookup_class=1)], {"eviction": EvictionPolicy.HAZARD, "hint_values": 3}),
    "what is learnt of states": ([state(), full(8)], {"eviction": EvictionPolicy.HAZARD}),
}

# These have no tiers.
SPLIT_MIXES: dict[str, tuple[list[GroupSpec], dict[str, Any]]] = {
    "split pages": (
        [state(8, zero_new_blocks=True), full(2, zero_new_blocks=True)],
        {
            "hash_block_size": 2,
            "partial_hits": True,
            "align": AlignSpec(8, 4096, stop_at_tail=True),
            "blocks_per_state": 4,
            "num_blocks": 60,
        },
    ),
    "split pages, drafts and windows": (
        [full(2), state(6, speculative_blocks=2), window(6, 2), state(6, speculative_blocks=2)],
        {
            "hash_block_size": 2,
            "partial_hits": True,
            "scheduler_block_size": 6,
            "align": AlignSpec(6, 4096, stop_at_tail=True),
            "blocks_per_state": 3,
            "num_blocks": 96,
        },
    ),
    "split pages, checkpoints and drafts": (
        [
            state(4, speculative_blocks=4, checkpoint_alignment=2, checkpoints_single_group_hits=True),
            full(2, is_draft=True, drops_last_block=True),
        ],
        {
            "hash_block_size": 2,
            "partial_hits": True,
            "align": AlignSpec(4, 4096, stop_at_tail=True),
            "blocks_per_state": 2,
            "num_blocks": 80,
        },
    ),
    "split pages, drafts, states that are not cached": (
        [state(64, mamba_mode=MambaMode.NONE, speculative_blocks=2, zero_new_blocks=True), full(2), window(6, 2)],
        {
            "hash_block_size": 2,
            "scheduler_block_size": 2,
            "enable_caching": False,
            "blocks_per_state": 3,
            "num_blocks": 60,
        },
    ),
}
ALL_MIXES = {**MIXES, **SPLIT_MIXES}
CACHED_MIXES = [mix for mix, (_, changes) in ALL_MIXES.items() if changes.get("enable_caching", True)]

# Engines with prompts that end inside a block and whose last chunk registers nothing: a later row does.
ENDS_INSIDE = [("checkpoints and drafts", 21), ("states, hits inside blocks", 68)]


def run(mix: str, seed: int, steps: int = STEPS, deaths: int | None = None, cells: Cells | None = None) -> RandomEngine:
    """One engine life (or a few): raises WrongPage, or what `inspect.check` finds."""
    rng = Random(seed)
    groups, changes = SPLIT_MIXES[mix] if mix in SPLIT_MIXES else MIXES[mix]
    blocks = {"num_blocks": rng.choice([10, 16, 24, 40]), **changes}
    spec = replica_spec(*groups, max_model_len=64, max_in_flight_tokens=256, **blocks)
    engine = RandomEngine(spec, rng, most_drafts=(states_for_drafts(spec) or 2) if "drafts" in mix else 0)
    engine.deaths = engine.deaths if deaths is None else deaths
    if cells is not None:
        cells.begin()
        engine.cells, engine.memory.read = cells, cells.read
    for _ in range(steps):
        engine.step()
    return engine


@pytest.mark.parametrize("mix", ALL_MIXES)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_a_page_holds_what_its_key_says(mix, seed):
    run(mix, seed)


@pytest.mark.parametrize("mix", CACHED_MIXES)
def test_random_engines_reach_hits(mix):
    """Without hits the test above proves nothing."""
    engines = [run(mix, seed) for seed in range(12)]
    assert sum(engine.hits for engine in engines) > 5
    assert sum(engine.keys_seen for engine in engines) > 1000


def test_a_launch_behind_drafts_uses_the_blocks_that_it_would_read_if_all_were_rejected():
    """Blocks that no token from the accepted ones on attends to are not used, whatever the tables of an engine say."""
    spec = replica_spec(window(6), full())
    tables = [[1, 2, 3, 4, 0], [5, 6, 7, 8, 9]]
    row = PlannedRow((0, 0), "a" * 20, "", 13, 13, tables, truth=Truth(9, Left(tables, 9, 9), 9), count=2, luck=(True,))
    assert row.used_blocks(spec) == {2, 3, 4, 5, 6, 7, 8}
    row.resolve(())
    assert (row.start, row.end) == (9, 11)
    assert row.used_blocks(spec) == {2, 3, 5, 6, 7}


@pytest.mark.parametrize(
    ("twin", "mix", "seed"),
    [
        ("states below a hit", "checkpoints and drafts", 11),
        ("states below known tokens", "checkpoints and drafts", 11),
        ("states below an outcome", "checkpoints and drafts", 52),
    ],
)
def test_a_twin_that_goes_back_to_no_state_is_found(twin, mix, seed):
    with weakened(twin), pytest.raises(WrongPage):
        run(mix, seed)
