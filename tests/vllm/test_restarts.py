"""Engines that are killed by SIGKILL come back with their cache: pages of a real kvplane worker, real vLLM engines."""

from __future__ import annotations

import pytest

from tests.service.rig import running
from tests.vllm import environment
from tests.vllm.processes import Service, run, worker_in

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
SEEDS = {"llama": 5, "gptoss": 5, "gemma3": 5, "qwen3next": 1}  # states are cached at block ends, which few lives reach


@pytest.fixture(scope="module", autouse=True)
def vllm():
    environment.set_up()


@pytest.fixture
def worker(tmp_path):
    with worker_in(tmp_path / "w") as folder:
        yield folder


@pytest.mark.parametrize("model", SEEDS)
def test_a_killed_engine_comes_back_with_its_cache_and_the_same_tokens(worker, model):
    lives = run("restarts.py", model, worker, SEEDS[model], 6)
    published, kept = (sum(life[name] for life in lives) for name in ("of", "kept"))
    print(f"{model}: {len(lives) - 1} kills, {kept} of {published} published keys kept")
    assert [life["epoch"] for life in lives] == [1, 2, 3, 4, 5, 6]
    assert sum(life["compared"] for life in lives) > 100
    assert sum(life["differing"] for life in lives) == 0
    assert kept >= 0.9 * published > 0
    assert sum(life["cached"] for life in lives) > 0


@pytest.mark.parametrize("model", ["llama", "gptoss"])
def test_a_service_has_the_keys_that_an_engine_kept(worker, model):
    """Mode mirror with `pages: worker`: the first image of each life has what the killed one left."""
    with running() as service:
        lives = run("restarts.py", model, worker, 5, 6, "mirror", service.address)
        status = service.describe()
    kept, published = (sum(life[name] for life in lives) for name in ("kept", "of"))
    print(f"{model}: {len(lives) - 1} kills, {kept} of {published} published keys kept and shown by the service")
    assert [life["epoch"] for life in lives] == [1, 2, 3, 4, 5, 6]
    assert all(life["mirror"]["same_state"] for life in lives)
    assert lives[-1]["mirror_at_end"]["same_state"]
    assert (status.epoch, status.mirror.divergences, status.mirror.images) == (6, 0, 6)
    assert sum(life["differing"] for life in lives) == 0
    assert kept >= 0.9 * published > 0
    assert sum(life["cached"] for life in lives) > 0


@pytest.mark.parametrize("pipeline", ["on", "off"])
@pytest.mark.parametrize("model", SEEDS)
def test_a_service_that_decides_keeps_the_cache_of_a_killed_engine(worker, model, pipeline):
    """Mode remote with `pages: worker`: the stamps prove what the service knows to a new engine life."""
    with Service() as service:
        lives = run("restarts.py", model, worker, SEEDS[model], 6, "remote", service.address, pipeline)
    kept, published = (sum(life[name] for life in lives) for name in ("kept", "of"))
    print(f"{model}, pipeline {pipeline}: {len(lives) - 1} kills, {kept} of {published} published keys kept")
    epochs = [life["epoch"] for life in lives]
    assert epochs == list(range(epochs[0], epochs[0] + 6))
    assert sum(life["compared"] for life in lives) > 100
    assert sum(life["differing"] for life in lives) == 0
    assert kept >= 0.9 * published > 0
    assert sum(life["cached"] for life in lives) > 0


def test_tokens_differ_where_pages_are_overwritten_and_their_stamps_kept(worker):
    """The negative control: hits of a new engine life read the pages of the old one."""
    _, last = run("restarts.py", "llama", worker, 5, 2, "overwritten")
    assert last["kept"] == last["of"] > 0
    assert last["cached"] > 0
    assert last["differing"] > 0


def test_no_key_is_kept_of_a_life_that_wrote_no_stamps(worker):
    _, last = run("restarts.py", "llama", worker, 5, 2, "unstamped")
    assert (last["kept"], last["differing"]) == (0, 0)
    assert last["of"] > 0


def test_pages_of_another_layout_are_new_memory_and_equal_ones_are_kept(worker):
    lives = run("incarnations.py", worker)
    kept = {name for name, life in lives.items() if life["kept"]}
    assert kept == {"same", "moved model"}
    assert {name for name, life in lives.items() if not life["new"]} == kept
    assert len(lives) == 9


REFUSED = {
    "no worker class": "has not attached the pages of the worker",
    "no scheduler class": "a step has no orders for the pages of the kvplane worker",
    "another engine": "the pages are lent to process",
    "fallback": "vLLM's own KV cache manager writes no stamps",
    "xxhash": "block hashes of this algorithm differ between processes",
    "no worker named": "the worker is not named",
    "asynchronous, in mode remote": "pages: worker in the mode remote needs --no-async-scheduling",
    "new weights": "the pages of the kvplane worker are kept for the weights",
    "steps without stamps": "without writing its stamps",
    "another allocation": "does not allocate its KV cache as one tensor of zeroes",
}


def test_an_engine_whose_pages_would_have_no_stamps_is_refused(worker):
    found = run("refusals.py", worker)
    assert set(found) == set(REFUSED)
    assert {name: error for name, error in found.items() if REFUSED[name] not in error} == {}
