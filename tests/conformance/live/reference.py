"""The reference's side: runs in its own environment, builds managers from headers and carries out operations.

One JSON record per line. In: a header (a new manager replaces the one before) or an operation with its inputs. Out: the
header with what the reference derived from it, the operation with its outputs, or {"error": text}.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.request import Request, RequestStatus

Record = dict[str, Any]


class Reference:
    """One manager and its requests."""

    def __init__(self, header: Record) -> None:
        os.environ["PYTHONHASHSEED"] = header["none_hash_seed"]
        hash_function = get_hash_fn_by_name(header["hash_algo"])
        kv_cache_utils.init_none_hash(hash_function)
        args = dict(header["manager_args"])
        self.hasher = kv_cache_utils.get_request_block_hasher(
            args["hash_block_size"], hash_function, args.get("num_hash_lookahead_tokens", 0)
        )
        groups = [_group(number, group) for number, group in enumerate(header["groups"])]
        self.config = interface.KVCacheConfig(
            num_blocks=header["num_blocks"],
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=header["retention_interval"],
        )
        self.manager = KVCacheManager(self.config, **args)
        self.requests: dict[str, Request] = {}
        self.found: dict[str, KVCacheBlocks] = {}
        self.held: dict[str, list[kv_cache_utils.KVCacheBlock]] = {}
        self.operations: dict[str, Callable[[Record], Record]] = {
            "step": self.step, "new": self.new, "lookup": self.lookup, "alloc": self.alloc, "tok": self.tok,
            "cache": self.cache, "free": self.free, "preempt": self.preempt, "hold": self.hold,
            "release": self.release, "evict": self.evict, "reset": self.reset, "snapshot": self.snapshot,
        }  # fmt: skip

    def describe(self, header: Record) -> Record:
        """The header with every field that follows from the given ones."""
        coordinator = self.manager.coordinator
        split = getattr(coordinator, "attention_groups", [])
        derived = {
            "format": "kvtrace/1",
            "vllm": "0.33.0",
            "none_hash": kv_cache_utils.NONE_HASH.hex(),
            "coordinator": type(coordinator).__name__,
            "partial_hash_hits": coordinator.enable_partial_hash_hits,
            "cache_hit_alignment_tokens": coordinator.single_type_managers[0].cache_hit_alignment_tokens,
            "needs_kv_cache_zeroing": self.config.needs_kv_cache_zeroing,
            "eagle_group_ids": sorted(coordinator.eagle_group_ids),
            "drop_eagle_group_ids": sorted(coordinator.drop_eagle_group_ids),
            "attention_groups": [
                {"group_ids": one.group_ids, "manager": one.manager_cls.__name__, "use_eagle": one.use_eagle}
                for one in split
            ],
            "groups": [self._describe_group(number, group) for number, group in enumerate(header["groups"])],
        }
        return header | derived

    def _describe_group(self, number: int, group: Record) -> Record:
        manager = self.manager.coordinator.single_type_managers[number]
        spec = manager.kv_cache_spec
        return group | {
            "manager": type(manager).__name__,
            "block_size": manager.block_size,
            "spec_block_size": spec.block_size,
            "use_eagle": bool(manager.use_eagle),
            "sliding_window": getattr(spec, "sliding_window", None),
            "attention_chunk_size": getattr(spec, "attention_chunk_size", None),
            "mamba_cache_mode": getattr(spec, "mamba_cache_mode", None),
            "num_speculative_blocks": getattr(spec, "num_speculative_blocks", None),
            "max_admission_blocks_per_request": manager.max_admission_blocks_per_request,
            "records_new_block_ids": manager.records_new_block_ids,
        }

    # -- operations --------------------------------------------------------------------------------------------------

    def carry_out(self, op: Record) -> Record:
        """The operation with its outputs; those that are empty are left out as in a recording."""
        outputs = self.operations[op["op"]](op)
        outputs["free"] = self.manager.block_pool.get_num_free_blocks()
        events = [_event(one) for one in self.manager.take_events()]
        return op | outputs | ({"ev": events} if events else {})

    def step(self, op: Record) -> Record:
        del op
        self.manager.new_step_starts()
        copies, retained = self.manager.take_kv_cache_block_copies()
        outputs = {
            "copies": [[one.src_block_id, one.dst_block_id] for one in copies],
            "retained": [one.block_id for one in retained],
            "zero": self.manager.take_new_block_ids(),
        }
        self.manager.block_pool.free_blocks(retained)
        return {name: value for name, value in outputs.items() if value}

    def new(self, op: Record) -> Record:
        tokens = [(seed * 1000003 + i * 7919) % 50021 for seed, length in op["segs"] for i in range(length)]
        items = [
            MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))
            for name, offset, length in op["mm"] or ()
        ]
        lora = LoRARequest(op["lora"], 1, f"/l/{op['lora']}") if op["lora"] else None
        request = Request(
            request_id=op["id"],
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=16, skip_reading_prefix_cache=bool(op.get("skip"))),
            pooling_params=None,
            mm_features=items,
            lora_request=lora,
            cache_salt=op["salt"],
            block_hasher=self.hasher,
        )
        self.requests[op["id"]] = request
        return {"n": request.num_tokens} | _hashes(request)

    def lookup(self, op: Record) -> Record:
        request = self.requests[op["id"]]
        blocks, hit, boundary = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        self.found[op["id"]] = blocks
        return {"hit": hit, "bnd": boundary, "blk": list(blocks.get_block_ids())}

    def alloc(self, op: Record) -> Record:
        request = self.requests[op["id"]]
        request.num_computed_tokens = op["comp"]
        request.status = RequestStatus[op["st"]]
        request.num_in_flight_tokens = op.get("infl", 0)
        adopts = op.get("use_hit", False)
        blocks = self.manager.allocate_slots(
            request,
            op["new"],
            num_new_computed_tokens=op["hit"] if adopts else 0,
            new_computed_blocks=self.found[op["id"]] if adopts else None,
            num_lookahead_tokens=op.get("look", 0),
            num_external_computed_tokens=op.get("ext", 0),
            delay_cache_blocks=op.get("delay", False),
            num_encoder_tokens=op.get("enc", 0),
            full_sequence_must_fit=op.get("full", False),
            reserved_blocks=op.get("reserved", 0),
            has_scheduled_reqs=op.get("has_sched", True),
        )
        new = {"nb": list(blocks.get_block_ids())} if blocks is not None else {}
        return {"ok": blocks is not None} | new | {"tbl": list(self.manager.get_block_ids(op["id"]))}

    def tok(self, op: Record) -> Record:
        request = self.requests[op["id"]]
        request.append_output_token_ids(op["t"])
        return _hashes(request)

    def cache(self, op: Record) -> Record:
        request = self.requests[op["id"]]
        request.num_computed_tokens, request.num_in_flight_tokens = op["n"], 0
        self.manager.cache_blocks(request, op["n"])
        return {}

    def free(self, op: Record) -> Record:
        self.manager.free(self.requests.pop(op["id"]))
        return {}

    def preempt(self, op: Record) -> Record:
        request = self.requests[op["id"]]
        self.manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = request.num_in_flight_tokens = 0
        return {}

    def hold(self, op: Record) -> Record:
        self.held[op["id"]] = self.manager.pop_blocks_for_free(self.requests.pop(op["id"]))
        return {}

    def release(self, op: Record) -> Record:
        self.manager.block_pool.free_blocks(reversed(self.held.pop(op["id"])))
        return {}

    def evict(self, op: Record) -> Record:
        for block in op["ids"]:
            self.manager.evict_blocks({block})
        return {}

    def reset(self, op: Record) -> Record:
        del op
        return {"ok": self.manager.reset_prefix_cache()}

    def snapshot(self, op: Record) -> Record:
        del op
        pool = self.manager.block_pool
        order = [one.block_id for one in pool.free_block_queue.get_all_free_blocks()]
        small = self.config.num_blocks <= 400
        return {
            "freeq": order if len(order) <= 400 else None,
            "freeq_crc": zlib.crc32(json.dumps(order).encode()),
            "cached_hashes": len(pool.cached_block_hash_to_block),
            "cached": [one.block_id for one in pool.blocks if one.block_hash is not None] if small else None,
            "usage": round(self.manager.usage, 9),
        }


def _group(number: int, group: Record) -> interface.KVCacheGroupSpec:
    return interface.KVCacheGroupSpec([f"layer.{number}"], _spec(group["spec"]), group["is_eagle_group"])


def _spec(fields: Record) -> interface.KVCacheSpec:
    given = dict(fields)
    given.pop("page_size_bytes", None)
    kind = getattr(interface, given.pop("type"))
    if "dtype" in given:
        given["dtype"] = getattr(torch, given["dtype"])
    if "dtypes" in given:
        given["dtypes"] = tuple(getattr(torch, name) for name in given["dtypes"])
        given["shapes"] = tuple(tuple(shape) for shape in given["shapes"])
    spec: interface.KVCacheSpec = kind(**given)
    return spec


def _hashes(request: Request) -> Record:
    digests = request.block_hashes
    return {"nh": len(digests), "lasth": digests[-1][-8:].hex() if digests else None}


def _event(event: object) -> list[Any]:
    if isinstance(event, AllBlocksCleared):
        return ["C"]
    if isinstance(event, BlockRemoved):
        return ["R", event.group_idx, [_short(one) for one in event.block_hashes]]
    assert isinstance(event, BlockStored)
    parent = event.parent_block_hash
    tokens = list(event.token_ids)
    return [
        "S", event.group_idx, event.block_size, None if parent is None else _short(parent),
        [_short(one) for one in event.block_hashes], len(tokens), zlib.crc32(json.dumps(tokens).encode()),
        _extra(event.extra_keys), event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window, event.medium,
    ]  # fmt: skip


def _short(digest: int | bytes) -> str:
    return f"{digest:016x}" if isinstance(digest, int) else digest[-8:].hex()


def _extra(keys: Sequence[Any] | None) -> list[Any] | None:
    if not keys or not any(keys):
        return None
    return [None if one is None else [list(key) if isinstance(key, tuple) else key for key in one] for one in keys]


class Answers:
    """A header gives a new manager, and any other record an operation on it."""

    def __init__(self) -> None:
        self._reference: Reference | None = None

    def answer(self, record: Record) -> Record:
        """Carry out one line."""
        if "op" not in record:
            self._reference = Reference(record)
            return self._reference.describe(record)
        assert self._reference is not None, "the first line is a header"
        return self._reference.carry_out(record)


def serve(answer: Callable[[Record], Record]) -> None:
    """Answer each line of standard input on the pipe that the first argument names; an exception of the reference is an
    answer too.
    """
    answers = os.fdopen(int(sys.argv[1]), "w")
    logging.disable(logging.CRITICAL)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            record = answer(json.loads(line))
        except Exception as error:  # outermost handler: the driver decides what the failure means
            at = traceback.extract_tb(error.__traceback__)[-1]
            record = {"error": f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno}: {at.line})"}
        print(json.dumps(record), file=answers, flush=True)


if __name__ == "__main__":
    serve(Answers().answer)
