"""The reference's side: vLLM's KVCacheManager doing the same work, timed where it runs, in its own environment.

One JSON record per line, as tests.conformance.live.reference; an answer holds the nanoseconds of its intervals and the
free blocks after it, which must equal ours.
"""

from __future__ import annotations

import gc
import platform
from importlib.metadata import version
from time import perf_counter_ns
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request, RequestStatus

from tests.bench.peer.work import Clock, Shape, gpu, prompt, sampled
from tests.conformance.live.reference import Reference, serve

Record = dict[str, Any]


class Scheduler:
    """The part of a scheduler that the manager needs."""

    def __init__(self, record: Record) -> None:
        self._shape = Shape(**record["shape"])
        reference = Reference(record["header"])
        self._manager = reference.manager
        self._hasher = reference.hasher
        self._running: list[Request] = []
        self._steps = 0
        self._clock = Clock()

    @property
    def free_blocks(self) -> int:
        return self._manager.block_pool.get_num_free_blocks()

    # -- decode ------------------------------------------------------------------------------------------------------

    def admit(self, num_requests: int) -> None:
        """Prefill `num_requests` requests."""
        for index, length in enumerate(self._shape.decode_prompts(num_requests)):
            request = _request(f"d{index}", prompt(index, length))
            self._admission(request, self._hasher)
            self._finish_prompt(request)
            self._running.append(request)

    def decode(self, gpu_s: float = 0.0) -> int:
        """One step: append a token to each request and allocate its slot, behind the GPU's work on the step before;
        returns nanoseconds.

        Excluded, in the reference's favour: the conversion of new blocks to ids, events taken and published, and other
        work of a scheduler.
        """
        self._steps += 1
        tokens = sampled(self._steps, len(self._running))
        manager, now_ns = self._manager, self._clock.now_ns if gpu_s else perf_counter_ns
        if gpu_s:
            gpu(gpu_s)
        begin = now_ns()
        manager.new_step_starts()
        for request, token in zip(self._running, tokens, strict=True):
            request.append_output_token_ids(token)
            blocks = manager.allocate_slots(request, 1)
            assert blocks is not None
            request.num_computed_tokens += 1
        took = now_ns() - begin
        self._end_step()
        return took

    # -- admission ---------------------------------------------------------------------------------------------------

    def measure_admission(self, record: Record) -> Record:
        """Hash a prompt, look it up, allocate its first chunk; then finish and free it."""
        hash_function = get_hash_fn_by_name(record["hash"])
        request = _request("admission", prompt(record["seed"], record["tokens"]))
        took, hit = self._admission(request, get_request_block_hasher(self._shape.unit, hash_function))
        self._finish_prompt(request)
        self._manager.free(request)
        return {"ns": [took], "hit": hit}

    def _admission(self, request: Request, hasher: Any) -> tuple[int, int]:
        manager = self._manager
        begin = perf_counter_ns()
        manager.new_step_starts()
        request._block_hasher = hasher  # as its constructor does, outside the interval
        request.update_block_hashes()
        found, hit, boundary = manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        chunk = self._shape.first_chunk(request.num_tokens, hit)
        blocks = manager.allocate_slots(request, chunk, hit, found)
        assert blocks is not None
        request.num_computed_tokens = hit + chunk
        took = perf_counter_ns() - begin
        request.status = RequestStatus.RUNNING
        self._end_step()
        return took, hit

    def _finish_prompt(self, request: Request) -> None:
        left = request.num_tokens - request.num_computed_tokens
        if left:
            self._manager.new_step_starts()
            assert self._manager.allocate_slots(request, left) is not None
            request.num_computed_tokens += left
            self._end_step()

    def _end_step(self) -> None:
        self._manager.take_new_block_ids()
        _, retained = self._manager.take_kv_cache_block_copies()
        self._manager.block_pool.free_blocks(retained)
        self._manager.take_events()


class Answers:
    """Executes records; `open` begins a case."""

    def __init__(self) -> None:
        self._scheduler: Scheduler | None = None

    def answer(self, record: Record) -> Record:
        """Execute one line."""
        if record["op"] == "about":
            return {name: version(name) for name in ("vllm", "torch")} | {"python": platform.python_version()}
        if record["op"] == "open":
            self._scheduler = None
            gc.unfreeze()
            gc.collect()
            self._scheduler = Scheduler(record)
            return {}
        assert self._scheduler is not None, "open comes first"
        outputs = self._carry_out(self._scheduler, record)
        return outputs | {"free": self._scheduler.free_blocks}

    @staticmethod
    def _carry_out(scheduler: Scheduler, record: Record) -> Record:
        if record["op"] == "admit":
            scheduler.admit(record["requests"])
            return {}
        if record["op"] == "freeze":  # as vLLM's engine core does when ready
            gc.collect()
            gc.freeze()
            return {}
        if record["op"] == "decode":
            return {"ns": [scheduler.decode(record["gpu_s"]) for _ in range(record["steps"])]}
        assert record["op"] == "admission", record
        return scheduler.measure_admission(record)


def _request(name: str, tokens: list[int]) -> Request:
    parameters = SamplingParams(max_tokens=1 << 20)
    return Request(request_id=name, prompt_token_ids=tokens, sampling_params=parameters, pooling_params=None)


if __name__ == "__main__":
    serve(Answers().answer)
