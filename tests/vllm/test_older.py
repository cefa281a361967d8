"""vLLM 0.32, in an environment of its own: equal to stock in each mode; kvplane's connector is refused by name."""

from __future__ import annotations

import json

import pytest

from tests.vllm import environment, processes
from tests.vllm.test_live import POOLS, differing

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def env():
    return environment.variables_of_older()


def run(env, model, kind, *target):
    return processes.run("workload.py", model, kind, "1-2", POOLS[model], *target, env=env)


@pytest.mark.parametrize("model", ["llama", "gemma3", "qwen3next"])
def test_all_decisions_equal_those_of_stock(model, env):
    stock = run(env, model, "stock")
    assert differing(stock, run(env, model, "kvplane")) == {}
    with processes.Service() as service:
        assert differing(stock, run(env, model, "mirror", service.address, "r")) == {}


@pytest.mark.parametrize("model", ["llama", "qwen3next"])
def test_a_service_decides_as_stock_does(model, env):
    stock = run(env, model, "stock")
    with processes.Service() as service:
        assert differing(stock, run(env, model, "remote", service.address, "r", "off")) == {}
        found = run(env, model, "remote", service.address, "s", "on")
    assert [seed["tokens"] for seed in found["seeds"]] == [seed["tokens"] for seed in stock["seeds"]]


def test_kvplanes_connector_is_refused_by_name(env):
    given = {"kv_connector": "KvplaneConnector", "kv_connector_module_path": "kvplane_vllm.connector"}
    given |= {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    options = json.dumps({"kv_transfer_config": given | {"kv_connector_extra_config": {"host": "1MiB"}}})
    with pytest.raises(AssertionError, match=r"vLLM 0\.32\.0 is not supported \(install vLLM 0\.33"):
        processes.run("first_request.py", "{}", options, env=env)
