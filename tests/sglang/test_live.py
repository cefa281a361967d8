"""A real SGLang with the linker: `make test-sglang`. Tokens equal those of stock; most of what an infinite cache would
hit is hit; what is damaged on purpose shows in the tokens.
"""

from __future__ import annotations

import json
from functools import cache

import pytest

from tests.sglang import environment, live

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(0)]
MODELS = ["llama", "gemma3"]


@pytest.fixture(scope="module", autouse=True)
def sglang():
    environment.set_up()


def run(model, *acts, ends=0, **variables):
    return environment.run("live.py", str(environment.MODELS / model), *acts, ends=ends, **variables)


stock_of = cache(lambda model: run(model, "serve")[0])


def options(folder):
    return json.dumps({"host": "64MiB", "disk": str(folder), "disk_size": "64MiB"})


def infinite():
    """Tokens that an infinite cache hits when all conversations were served before: whole pages, not the last token."""
    return sum((len(one) - 1) // live.PAGE * live.PAGE for one in live.conversations())


@pytest.mark.parametrize("model", MODELS)
def test_tokens_equal_those_of_stock_over_flush_kill_and_restart(model, tmp_path):
    stock = stock_of(model)
    first = run(model, "serve", "serve", "flush", "serve", "pause", "kill", ends=-9, KVPLANE_LINKER=options(tmp_path))
    second = run(model, "serve", "weights", "flush", "serve", KVPLANE_LINKER=options(tmp_path))
    served = [one for one in (*first, *second) if one["act"] == "serve"]
    assert [one["tokens"] for one in served] == [stock["tokens"]] * 5
    most = infinite()
    shares = [one["cached"] / most for one in served]
    print(f"{model}: cached tokens of {most}: {[one['cached'] for one in served]}, stock {stock['cached']}")
    assert min(shares[1:4]) >= 0.6  # again, after the flush, after the restart
    assert served[4]["cached"] == stock["cached"]  # nothing is loaded with other weights
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("model", MODELS)
def test_a_load_of_other_bytes_shows_in_the_tokens(model):
    found = run(
        model, "serve", "flush", "serve",
        KVPLANE_LINKER='{"host": "64MiB"}', KVPLANE_MODULE="tests.sglang.faulty:FaultyLinker",
    )  # fmt: skip
    assert found[-1]["tokens"] != stock_of(model)["tokens"]


def test_all_configurations_of_its_cache_kit_load_what_they_saved(tmp_path):
    found = environment.run("kit.py", str(tmp_path))
    assert len(found) == 19
    for one in found:
        for act in (one["flush"], one["restart"]):
            assert act["loaded"] == one["tokens"], one
            assert act["equal"], one
            assert act["bytes"] == act["planned"], one
