"""The same requests on an unmodified vLLM and on one with kvplane's scheduler: everything that both decide is equal."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.service.rig import running
from tests.vllm import environment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
# Blocks in the pool: few enough that requests are preempted.
POOLS = {"llama": 60, "gptoss": 90, "gemma3": 200, "qwen3next": 40}


@pytest.fixture(scope="module", autouse=True)
def vllm():
    environment.set_up()


def run(model, kind, seed, num_blocks, *target):
    script = Path(__file__).with_name("workload.py")
    command = [str(environment.PYTHON), str(script), model, kind, str(seed), str(num_blocks), *target]
    done = subprocess.run(command, env=environment.variables(), capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.mark.parametrize("seed", [7, 8])
@pytest.mark.parametrize("model", POOLS)
def test_tokens_steps_preemptions_and_hits_equal_those_of_stock(model, seed):
    stock, ours = run(model, "stock", seed, POOLS[model]), run(model, "kvplane", seed, POOLS[model])
    assert (stock.pop("manager"), ours.pop("manager")) == ("KVCacheManager", "InProcessManager")
    print(f"{model}, seed {seed}: schedule() {stock.pop('schedule_us')} us stock, {ours.pop('schedule_us')} us kvplane")
    assert stock["preempted"] > 0
    assert ours == stock


@pytest.mark.parametrize("model", POOLS)
def test_a_service_follows_the_engine(model):
    """Mode mirror: everything equals stock, one message per schedule(), and the service has the engine's state."""
    with running() as service:
        stock, ours = run(model, "stock", 7, POOLS[model]), run(model, "mirror", 7, POOLS[model], service.address, "r")
        status = service.describe()
    assert (stock.pop("manager"), ours.pop("manager")) == ("KVCacheManager", "MirrorManager")
    print(f"{model}: schedule() {stock.pop('schedule_us')} us stock, {ours.pop('schedule_us')} us mirrored")
    mirror, messages = ours.pop("mirror"), ours.pop("messages")
    print(f"{model}: {mirror['steps']} digests compared, {messages} messages in {ours['steps']} iterations")
    assert mirror["same_state"]
    assert (mirror["images"], mirror["divergences"]) == (1, 0)
    assert status.epoch == 1
    assert messages <= ours["steps"]
    assert ours == stock


def test_tokens_differ_where_pages_are_overwritten():
    """The negative control: hits read pages, so a hit on a page with other content changes tokens."""
    good, bad = run("llama", "kvplane", 7, 60), run("llama", "overwritten", 7, 60)
    half = len(good["tokens"]) // 2
    assert good["cached"] == bad["cached"]
    assert good["tokens"][:half] == bad["tokens"][:half]
    assert good["tokens"][half:] != bad["tokens"][half:]
