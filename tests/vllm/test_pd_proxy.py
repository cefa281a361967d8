"""The example of a proxy, with two live `vllm serve` on kvplane: each prompt is prefilled where it is cached, decoded
on the other engine, and answered also when an engine was killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack

import pytest

from tests.store.servers import free_port
from tests.vllm import environment
from tests.vllm.pairs import NEW, prompts
from tests.vllm.served import Vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(0)]
EVENTS_S = 1.0  # more than an event takes to the proxy
CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


class Engine(Vllm):
    """`vllm serve` with kvplane's scheduler, NixlConnector and KV events."""

    def __init__(self, folder, name):
        self.name, self._events, self._replay = name, free_port(), free_port()
        publish = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{self._events}"}
        options = ["--kv-events-config", json.dumps({**publish, "replay_endpoint": f"tcp://*:{self._replay}"})]
        options += ["--kv-transfer-config", json.dumps(CONNECTOR), "--num-gpu-blocks-override", "400"]
        options += ["--scheduler-cls", "kvplane_vllm.Scheduler"]
        variables = environment.variables_of_nixl(free_port())
        super().__init__(folder / f"{name}.log", "gptoss", *options, **variables)

    @property
    def place(self):
        addresses = {"events": f"tcp://127.0.0.1:{self._events}", "replay": f"tcp://127.0.0.1:{self._replay}"}
        return {"name": self.name, "url": self.url} | addresses


def complete(url, prompt):
    """The headers of an answer, and its tokens."""
    asked = {"model": "m", "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    body = json.dumps(asked | {"return_token_ids": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return answer.headers, json.load(answer)["choices"][0]["token_ids"]


def test_prompts_are_prefilled_where_they_are_cached_and_decoded_elsewhere(tmp_path):
    environment.set_up()
    with ExitStack() as stack:
        engines = {name: Engine(tmp_path, name) for name in ("a", "b")}
        for one in engines.values():
            stack.callback(one.kill)
        for one in engines.values():
            one.wait_until_ready()
        places, port = tmp_path / "places.json", free_port()
        places.write_text(json.dumps([one.place for one in engines.values()]))
        command = [sys.executable, "-m", "tests.vllm.pd_proxy", str(port), str(places)]
        proxy = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(proxy.kill)
        assert proxy.stdout is not None
        assert "serving" in proxy.stdout.readline()

        url, claimed = f"http://127.0.0.1:{port}", []
        for prompt in prompts(1):
            said, tokens = complete(url, prompt)
            assert {said["x-prefill"], said["x-decode"]} == {"a", "b"}
            assert said["x-claimed"] == said["x-cached"]
            claimed.append(int(said["x-cached"]))
            assert tokens == complete(engines[said["x-prefill"]].url, prompt)[1], "as the engine that computed it"
            time.sleep(EVENTS_S)
        assert sum(one > 0 for one in claimed) > 3
        print(f"tokens cached where the prompts were prefilled: {claimed}")

        for prompt, (name, engine) in zip(prompts(3), engines.items(), strict=False):
            complete(engine.url, prompt)
            time.sleep(EVENTS_S)
            said, _ = complete(url, prompt)
            assert (said["x-prefill"], said["x-claimed"]) == (name, said["x-cached"])
            assert int(said["x-cached"]) > 0

        right = complete(engines["a"].url, prompts(2)[0])[1]
        time.sleep(EVENTS_S)
        engines["a"].kill()
        said, tokens = complete(url, prompts(2)[0])
        assert (said["x-decode"], tokens) == ("b", right)
