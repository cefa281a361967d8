"""One engine with a KV connector answers requests, and prints what it did as JSON: stock, or with kvplane.

python tests/vllm/connected.py refusals | refusal MODEL CONNECTOR
python tests/vllm/connected.py MODEL CONNECTOR stock|kvplane|mirror SEEDS NUM_BLOCKS [ADDRESS REPLICA]

CONNECTOR is one of `CONNECTORS`. Each seed is two rounds of the same prompts with a reset of the prefix cache between,
so that the second round hits what the connector has; then requests of which some are aborted, also while they load.
Before the first load of all it prints a line "STEP", and waits for a line on standard input.
"refusals" prints the answer to each connector of vLLM, "refusal" that of an engine which is started with this one.

Runs in the environment of vLLM (`environment`).
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from page_movers import PageStore
from remote_aborts import Disturbed, gives_up
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.umbp.connector import UMBPStoreConnector
from vllm.triton_utils import dispatcher
from workload import EVENTS, Observed, engine, mirror_state, prompts

from kvplane.base.errors import InvalidArgument
from kvplane_vllm.connectors import check_connector

STORE = {"kv_connector": "PageStore", "kv_connector_module_path": "page_movers"}
OFFLOAD = {"spec_name": "CopiedPages", "spec_module_path": "page_movers", "cpu_bytes_to_use": 1 << 26}


def offloading(**extra: Any) -> dict[str, Any]:
    """Return the options of vLLM's OffloadingConnector."""
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": OFFLOAD | extra}


def store(is_async: bool, failing: int) -> dict[str, Any]:
    """Return the options of the connector of these tests."""
    return STORE | {"kv_connector_extra_config": {"is_async": is_async, "failing": failing}}


def several(*options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of vLLM's MultiConnector, which joins these connectors."""
    joined = [{"kv_role": "kv_both"} | one for one in options]
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": joined}}


LMCACHE = {
    "kv_connector": "LMCacheMPConnector",
    "kv_connector_extra_config": {
        "lmcache.mp.host": "127.0.0.1",
        "lmcache.mp.port": int(os.environ.get("LMCACHE_PORT", "0")),
        "lmcache.mp.heartbeat_interval": float(os.environ.get("LMCACHE_HEARTBEAT_S", "10")),
        "lmcache.mp.mq_timeout": float(os.environ.get("LMCACHE_TIMEOUT_S", "300")),
    },
}
CONNECTORS: dict[str, Any] = {
    "offloading": offloading(),
    "offloading decoded": offloading(offload_prompt_only=False),
    "several": several(store(is_async=False, failing=0), offloading()),
    "sync": store(is_async=False, failing=0),
    "async": store(is_async=True, failing=0),
    "sync failing": store(is_async=False, failing=3),
    "async failing": store(is_async=True, failing=3),
    "lmcache": LMCACHE,
    "lmcache's own": LMCACHE | {"kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector"},
}
NUM_PROMPTS, NEW_TOKENS = 12, 16
IDLE_STEPS = 20  # more than all transfers of requests that have ended take
WAIT_S = 60.0  # for the end of transfers by a process of its own, LMCache's server
POOL = 40  # blocks, of an engine that does not start


def skip_foreign_objects() -> None:
    """Let vLLM's search for kernels pass over an object in a module of LMCache whose `__dict__` is not a dict: without
    a GPU an engine with LMCache does not start, whichever scheduler it has.
    """

    def checked(value: Any) -> Mapping[str, Any]:
        found = vars(value)
        return found if isinstance(found, Mapping) else {}

    dispatcher.vars = checked  # type: ignore[attr-defined]


class Connected(Observed):
    """An engine whose loads are counted.

    Attributes:
        loaded: tokens that the connector loaded.
    """

    def __init__(self, llm: Any, model: str) -> None:
        super().__init__(llm, model)
        self.loaded = 0
        note = self.scheduler.connector.update_state_after_alloc

        def counted(request: Any, blocks: Any, num_external_tokens: int) -> Any:
            if num_external_tokens and not self.loaded:
                print("STEP", flush=True)
                sys.stdin.readline()
            self.loaded += num_external_tokens
            return note(request, blocks, num_external_tokens)

        self.scheduler.connector.update_state_after_alloc = counted

    def finish_transfers(self) -> None:
        """End all transfers, and empty the prefix cache."""
        for _ in range(IDLE_STEPS):
            self.llm.llm_engine.step()
        until_s = time.monotonic() + WAIT_S
        while not self.llm.reset_prefix_cache():  # refused while a transfer uses blocks
            assert time.monotonic() < until_s
            time.sleep(0.01)
            self.llm.llm_engine.step()

    def aborted(self, seed: int) -> dict[str, Any]:
        """Answer requests of which some are aborted."""
        sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
        result = gives_up(self.llm, prompts(self.model, seed, NUM_PROMPTS), sampling, random.Random(seed), Disturbed(0))
        self.finish_transfers()
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return result | {"free": free, "waiting": len(self.scheduler.requests)}


def workers_connector() -> Any:
    """Return the workers' half of the connector."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def main(model: str, connector: str, kind: str, seeds: str, num_blocks: int, *target: str) -> None:
    """Run the seeds, and print the result."""
    more: dict[str, Any] = dict(EVENTS)
    if connector.startswith("lmcache"):
        skip_foreign_objects()
    options = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"} | CONNECTORS[connector]
    more["kv_transfer_config"] = KVTransferConfig(**options)
    if kind == "mirror":
        address, replica = target
        more["additional_config"] = {"kvplane": {"mode": "mirror", "address": address, "replica": replica}}
    observed = Connected(engine(model, kind, num_blocks, **more), model)
    first, last = map(int, seeds.split("-"))
    found: list[dict[str, Any]] = []
    for seed in range(first, last + 1):
        found.append(observed.seed(seed, observed.finish_transfers))
        observed.finish_transfers()
        found.append({"aborted": observed.aborted(seed)})
    result: dict[str, Any] = {"seeds": found, "loaded": observed.loaded}
    result["manager"] = type(observed.scheduler.kv_cache_manager).__name__
    if isinstance(workers_connector(), PageStore):
        result["failed"] = workers_connector().num_failed
    if kind == "mirror":
        result["mirror"] = mirror_state(observed.scheduler.kv_cache_manager, *target)
    print("RESULT " + json.dumps(result))


def refusals() -> dict[str, str]:
    """Return the error for each connector of vLLM, joined with another by MultiConnector; "" where it runs."""
    found: dict[str, str] = {}
    for name in [*sorted(KVConnectorFactory._registry), "PageStore", "UMBPStoreConnector"]:
        module = {"PageStore": "page_movers", "UMBPStoreConnector": UMBPStoreConnector.__module__}.get(name)
        options = {"kv_connector": name, "kv_connector_module_path": module}
        for one in (options, several(offloading(), options)):
            config = KVTransferConfig(kv_role="kv_both", **one)
            try:
                check_connector(SimpleNamespace(kv_transfer_config=config))  # type: ignore[arg-type]
            except InvalidArgument as error:
                answer = str(error)
            else:
                answer = ""
            assert found.setdefault(name, answer) == answer
    return found


def refusal(model: str, connector: str) -> str:
    """Return the error of an engine that is started with this connector."""
    options = CONNECTORS.get(connector, {"kv_connector": connector})
    if connector.startswith("lmcache"):
        skip_foreign_objects()
    try:
        engine(model, "kvplane", POOL, kv_transfer_config=KVTransferConfig(kv_role="kv_both", **options))
    except InvalidArgument as error:
        return str(error)
    return "not refused"


if __name__ == "__main__":
    if sys.argv[1] in ("refusals", "refusal"):
        answer = refusals() if sys.argv[1] == "refusals" else refusal(*sys.argv[2:])
        print("RESULT " + json.dumps(answer))
        sys.exit()
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]), *sys.argv[6:])
