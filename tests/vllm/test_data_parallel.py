"""Live ranks of data parallelism: each is an engine with a replica of its own, or the start is refused by name."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

import kvplane
from tests.vllm import environment, processes
from tests.vllm.outages import stock_answers
from tests.vllm.served import Vllm, prompts

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]
RANKS = {"VLLM_CPU_SIM_MULTI_NUMA": "1", "VLLM_CPU_OMP_THREADS_BIND": "auto", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    environment.set_up()
    return stock_answers(tmp_path_factory.mktemp("stock"))


def start(folder, mode, address, replica):
    given = {"mode": mode, "address": address, "replica": replica}
    options = ["--data-parallel-size", "2", "--scheduler-cls", "kvplane_vllm.Scheduler"]
    options += ["--num-gpu-blocks-override", "60", "--additional-config", json.dumps({"kvplane": given})]
    return Vllm(folder / "log", "llama", *options, **RANKS)


@pytest.mark.parametrize("mode", ["mirror", "remote"])
def test_two_ranks_answer_as_one_stock_engine(mode, right, tmp_path):
    with processes.Service() as service:
        vllm = start(tmp_path, mode, service.address, "a-{dp_rank}")
        try:
            vllm.wait_until_ready()
            with ThreadPoolExecutor(8) as pool:
                found = list(pool.map(vllm.complete, prompts()))
            with kvplane.connect(service.address) as client:
                steps = [client.describe_replica(f"a-{rank}").seq for rank in range(2)]
        finally:
            vllm.kill()
    assert [status for status, _, _ in found] == [200] * len(right)
    assert [tokens for _, tokens, _ in found] == right
    print(f"{mode}: steps of the ranks {steps}, {sum(cached for _, _, cached in found)} tokens cached")
    assert min(steps) > 10, "each rank has a replica"


@pytest.mark.parametrize("mode", ["mirror", "remote"])
def test_ranks_that_would_share_a_replica_are_refused_at_the_start(mode, tmp_path):
    vllm = start(tmp_path, mode, "127.0.0.1:1", "a")
    try:
        with pytest.raises(AssertionError):
            vllm.wait_until_ready()
        assert "a would be shared by all ranks of data parallelism" in vllm.log
        assert "write {dp_rank} where their number goes" in vllm.log
    finally:
        vllm.kill()
