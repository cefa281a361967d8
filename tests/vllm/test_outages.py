"""Service, kvplane worker and engine are killed under a `vllm serve` that answers clients, which see right tokens."""

from __future__ import annotations

import pytest

from tests.vllm import environment
from tests.vllm.outages import Outages, stock_answers

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]
SECONDS = 3.0


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    environment.set_up()
    return stock_answers(tmp_path_factory.mktemp("stock"))


@pytest.mark.parametrize("mode", ["mirror", "remote"])
@pytest.mark.parametrize("pages", ["own", "worker"])
def test_clients_see_right_tokens_through_kills(mode, pages, right, tmp_path):
    found = Outages(tmp_path, mode, right, has_worker=pages == "worker", seconds=SECONDS).run()
    print(found)
    assert found["problems"] == []
    assert found["answers"] > 100
