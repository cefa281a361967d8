"""One engine of a pair that prefills and decodes. It takes a command per line as JSON, and answers with a line of JSON.

python tests/vllm/disaggregated.py MODEL stock|kvplane|mirror|"freed early" NUM_BLOCKS TIMED EXTRA [ADDRESS REPLICA]

"freed early" is kvplane with a fault: it frees the blocks of a prompt at its end, without asking the connector.
TIMED 0 leaves the times of transfers to the machine; EXTRA is JSON with further options of NixlConnector. A command is
a method of `Engine` with its arguments: ["abort", "7"].

Runs in the environment of vLLM with NIXL (`environment.variables_of_nixl`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from workload import EVENTS, Observed, engine, mirror_state

STEPS = 3  # all loads are waited for in each third step, and not looked at in the others
WAIT_S = 30.0


class Sorted(set[str]):
    """Names in an order that depends on nothing else: blocks are freed in it."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))


class Timed:
    """Lets two runs see the ends of the same transfers in the same steps, whatever else the machine does.

    Attributes:
        read: requests of the other engine whose blocks this one has read or does not need, since the last answer.
        sent: requests of this engine whose blocks the other one has read, to be seen in the next step.
    """

    def __init__(self, worker: Any) -> None:
        self.read: list[str] = []
        self.sent: set[str] = set()
        self._worker, self._results, self._read_blocks = worker, worker.get_transfer_results, worker._read_blocks
        self._asked: dict[str, str] = {}  # of the other engine, by request of this one
        self._early: set[str] = set()
        self._step = 0
        worker.get_transfer_results, worker._read_blocks = self._transfers, self._asks

    def _asks(self, **options: Any) -> Any:
        is_asked = self._read_blocks(**options)
        if is_asked:
            self._asked[options["request_id"]] = options["remote_request_id"]
        return is_asked

    def _transfers(self) -> KVConnectorTransferResults:
        found, until_s = KVConnectorTransferResults(), time.monotonic() + WAIT_S
        self._step += 1
        if self._step % STEPS and not self.sent:
            return found
        while self._worker._recving_metadata or self.sent - self._early:
            assert time.monotonic() < until_s, (self.sent, list(self._worker._recving_metadata))
            while not self._worker._ready_requests.empty():
                self._worker._read_blocks_for_req(*self._worker._ready_requests.get_nowait())
            one = self._results()
            found.finished_recving |= one.finished_recving
            found.failed_recving |= one.failed_recving
            self._early |= one.finished_sending
            time.sleep(0.001)
        found.finished_sending, found.finished_recving = Sorted(self.sent), Sorted(found.finished_recving)
        self._early, self.sent = self._early - self.sent, set()
        self.read += [name for here, name in self._asked.items() if here not in found.failed_recving]
        self._asked = {}
        return found


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

    def step(self, sent: list[str]) -> dict[str, Any]:
        """Run a step; returns what has ended in it."""
        del sent
        ended = {}
        for one in self.llm.llm_engine.step():
            if one.finished:
                ended[one.request_id] = list(one.outputs[0].token_ids), one.kv_transfer_params
        return {"ended": ended, "busy": self.llm.llm_engine.engine_core.engine_core.scheduler.has_requests()}

    def reset(self) -> bool:
        """Empty the prefix cache."""
        return bool(self.llm.reset_prefix_cache())


class Engine(Driven):
    """An engine with NixlConnector."""

    def __init__(self, model: str, kind: str, num_blocks: str, timed: str, extra: str, *target: str) -> None:
        options: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        options |= {"kv_load_failure_policy": "recompute", "kv_buffer_device": "cpu"}
        more = EVENTS | {"kv_transfer_config": KVTransferConfig(**options, kv_connector_extra_config=json.loads(extra))}
        if kind == "mirror":
            address, replica = target
            more["additional_config"] = {"kvplane": {"mode": "mirror", "address": address, "replica": replica}}
        self.llm, self._target = engine(model, kind, int(num_blocks), **more), target
        self._observed = Observed(self.llm, model)
        self._scheduler = self._observed.scheduler
        self._timed = Timed(get_kv_transfer_group().connector_worker) if int(timed) else None
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

    def step(self, sent: list[str]) -> dict[str, Any]:
        """Run a step; returns what has ended in it, and the requests whose blocks were read by then."""
        if self._timed is not None:
            self._timed.sent |= set(sent)
        found = super().step(sent)
        read = self._timed.read if self._timed is not None else []
        if self._timed is not None:
            self._timed.read = []
        return found | {"read": read}

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
