"""`kvplane bench` on a running service."""

from __future__ import annotations

import json

import pytest

from tests.service.rig import running


@pytest.fixture(scope="module")
def service():
    with running() as service:
        yield service


def test_bench_measures_and_leaves_nothing(service, kvplane, tmp_path):
    words = ("--requests", "1,4", "--seconds", "0.3", "--prompt", "64", "--output-tokens", "4", "--blocks", "100")
    plot = tmp_path / "bench.svg"
    code, out, errors = kvplane("bench", *words, "-o", "json", "--plot", str(plot), "--service", service.address)
    assert (code, errors) == (0, "")
    loads = json.loads(out)["loads"]
    assert [load["requests"] for load in loads] == [1, 4]
    for load in loads:
        assert load["steps"] > 5
        assert 0 < load["median_ms"] <= load["p99_ms"]
        assert load["tokens_per_s"] > load["steps_per_s"] > 0
        assert 0.3 < load["hit_share"] < 0.6  # half of a prompt is that of the others
    assert "<svg" in plot.read_text()
    assert kvplane("replicas", "-o", "name", "--service", service.address)[1].strip() == ""


def test_bench_refuses_wrong_numbers_before_it_connects(kvplane, tmp_path):
    for wrong in ("", "0", "1,x"):
        code, _, errors = kvplane("bench", "--requests", wrong, "--service", "127.0.0.1:1")
        assert code == 2
        assert "--requests" in errors
    code, _, errors = kvplane("bench", "--plot", str(tmp_path / "no" / "plot.svg"), "--service", "127.0.0.1:1")
    assert code == 2
    assert "--plot" in errors
