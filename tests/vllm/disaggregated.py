"""One engine of a pair that prefills and decodes. It takes a command per line as JSON, and answers with a line of JSON.

python tests/vllm/disaggregated.py MODEL KIND NUM_BLOCKS TIMED CONNECTOR [ADDRESS REPLICA]

KIND is stock, kvplane, mirror or "freed early": kvplane with a fault, which frees the blocks of a prompt at its end,
without asking the connector. TIMED 0 leaves the times of transfers to the machine; CONNECTOR is JSON with options of
vLLM's --kv-transfer-config. A command is a method of `Engine` with its arguments: ["abort", "7"].

Runs in the environment of vLLM with NIXL or Mooncake (`environment`). Mooncake's worker asks torch for the number of
its accelerator: without one, the answer here is 0.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transfers import TIMED
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from workload import EVENTS, Observed, engine, mirror_state


class Driven:
    """An engine that a test drives step by step."""

    llm: Any

    def add(self, name: str, prompt: list[int], tokens: int, transfer: dict[str, Any] | None) -> None:
        """Send a request; `transfer`: its kv_transfer_params."""
        options: dict[str, Any] = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
        if transfer is not None:
            options["extra_args"] = {"kv_transfer_params": transfer}
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(**options))

    def abort(self, name: str) -> None:
        """Give a request up."""
        self.llm.llm_engine.abort_request([name])

    def step(self, sent: Sequence[str] = (), dropped: Sequence[str] = ()) -> dict[str, Any]:
        """Run a step; returns what has ended in it."""
        del sent, dropped
        ended = {}
        for one in self.llm.llm_engine.step():
            if one.finished:
                ended[one.request_id] = list(one.outputs[0].token_ids), one.kv_transfer_params
        return {"ended": ended, "busy": self.llm.llm_engine.engine_core.engine_core.scheduler.has_requests()}

    def reset(self) -> bool:
        """Empty the prefix cache."""
        return bool(self.llm.reset_prefix_cache())


class Engine(Driven):
    """An engine with a connector that passes pages to another engine."""

    def __init__(self, model: str, kind: str, num_blocks: str, timed: str, connector: str, *target: str) -> None:
        options: dict[str, Any] = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        options |= {"kv_buffer_device": "cpu"} | json.loads(connector)
        more = EVENTS | {"kv_transfer_config": KVTransferConfig(**options)}
        if options["kv_connector"] == "MooncakeConnector" and not torch.accelerator.is_available():
            torch.accelerator.current_device_index = lambda: 0
        if kind == "mirror":
            address, replica = target
            more["additional_config"] = {"kvplane": {"mode": "mirror", "address": address, "replica": replica}}
        self.llm, self._target = engine(model, kind, int(num_blocks), **more), target
        self._observed = Observed(self.llm, model)
        self._scheduler = self._observed.scheduler
        timed_transfers = TIMED[options["kv_connector"]]
        self._timed = timed_transfers(get_kv_transfer_group().connector_worker) if int(timed) else None
        self._loaded = self._failed = 0
        self._count()
        if kind == "freed early":
            self._free_early()

    def _count(self) -> None:
        begun = self._scheduler.connector.update_state_after_alloc
        ended = self._scheduler._update_waiting_for_remote_kv

        def begins(request: Any, blocks: Any, num_external_tokens: int) -> Any:
            self._loaded += num_external_tokens
            return begun(request, blocks, num_external_tokens)

        def ends(request: Any) -> None:
            self._failed += request.request_id in self._scheduler.failed_recving_kv_req_ids
            ended(request)

        self._scheduler.connector.update_state_after_alloc = begins
        self._scheduler._update_waiting_for_remote_kv = ends

    def _free_early(self) -> None:
        finished = self._scheduler._connector_finished

        def early(request: Any) -> Any:
            answer = finished(request)
            self._scheduler.kv_cache_manager.free(request)
            return answer

        self._scheduler._connector_finished = early

    def step(self, sent: Sequence[str] = (), dropped: Sequence[str] = ()) -> dict[str, Any]:
        """Run a step; returns what has ended in it, and what was seen of the blocks of the other engine (`transfers`).

        The other engine has read the blocks of `sent`, and does not read those of `dropped`.
        """
        if self._timed is None:
            return super().step()
        self._timed.sent |= set(sent)
        self._timed.dropped |= set(dropped)
        found = super().step()
        return found | self._timed.take()

    def state(self) -> dict[str, Any]:
        """Return all that was decided, and what is left."""
        seen, manager = self._observed, self._scheduler.kv_cache_manager
        result = {"manager": type(manager).__name__, "free": manager.block_pool.get_num_free_blocks()}
        result |= {"requests": list(self._scheduler.requests), "loaded": self._loaded, "failed": self._failed}
        result |= {"steps": len(seen.times), "preempted": seen._preempted, "stored": seen.stored}
        result |= {"events": seen._events.hexdigest(), "decisions": seen._decisions.hexdigest()}
        if self._target:
            result["mirror"] = mirror_state(manager, *self._target)
        return result


def serve(kind: Callable[..., Driven]) -> None:
    """Start an engine, and answer commands until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's threads log there, also in the middle of a line
    one = kind(*sys.argv[1:])
    print("RESULT null", file=answers, flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print("RESULT " + json.dumps(getattr(one, name)(*arguments)), file=answers, flush=True)


if __name__ == "__main__":
    serve(Engine)
