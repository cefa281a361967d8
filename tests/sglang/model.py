"""A small model of what SGLang 0.5.23 promises to a linker, for tests without it: the classes that the linker imports,
and an engine of three pools with pages that are given away again.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import sys
import types
from abc import ABC, abstractmethod
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from kvplane_sglang.settings import MEANING
from tests.service.rig import until

PAGE = 4
SIZES = dict.fromkeys(("tp_size", "pp_size", "dp_size", "dcp_size", "attn_cp_size"), 1)


class PoolName(enum.StrEnum):
    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"


@dataclasses.dataclass
class PoolTransfer:
    name: PoolName
    device_indices: torch.Tensor | None = None
    keys: list[str] | None = None


class UnifiedCacheLinker(ABC):
    @abstractmethod
    def lookup(self, rid, transfers): ...
    @abstractmethod
    def load(self, rid, transfers): ...
    @abstractmethod
    def start_layer_wise_loading(self): ...
    @abstractmethod
    def finish_layer_wise_loading(self, counter_index): ...
    @abstractmethod
    def cancel_queued_load(self, rid): ...
    @abstractmethod
    def offload(self, transfers, session_id=None): ...
    @abstractmethod
    def num_completed_offloads(self): ...
    @abstractmethod
    def pop_completed_offload(self): ...
    @abstractmethod
    def reset(self): ...
    @abstractmethod
    def close(self): ...


class SchedulerWeightUpdaterManager:
    def begin_weight_update(self, request): ...
    def update_weights_from_disk(self, request): ...
    def update_weights_from_distributed(self, request): ...
    def update_weights_from_ipc(self, request): ...
    def update_weights_from_tensor(self, request): ...


class HookRegistry:
    """Hooks that run before a method."""

    hooks: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register(cls, target, hook, hook_type):
        cls.hooks[target.rpartition(".")[2]] = hook

    @classmethod
    def apply_hooks(cls):
        for name, hook in cls.hooks.items():
            inner = getattr(SchedulerWeightUpdaterManager, name)

            def outer(*args, _hook=hook, _inner=inner):
                _hook(*args)
                return _inner(*args)

            outer.__wrapped__ = inner  # type: ignore[attr-defined]
            setattr(SchedulerWeightUpdaterManager, name, outer)


MODULES: dict[str, dict[str, Any]] = {
    "sglang": {},
    "sglang.srt": {},
    "sglang.srt.mem_cache": {},
    "sglang.srt.mem_cache.hicache_storage": {"PoolName": PoolName, "PoolTransfer": PoolTransfer},
    "sglang.srt.mem_cache.unified_cache": {},
    "sglang.srt.mem_cache.unified_cache.unified_cache_linker": {"UnifiedCacheLinker": UnifiedCacheLinker},
    "sglang.srt.managers": {},
    "sglang.srt.managers.scheduler_components": {},
    "sglang.srt.managers.scheduler_components.weight_updater": {
        "SchedulerWeightUpdaterManager": SchedulerWeightUpdaterManager
    },
    "sglang.srt.plugins": {},
    "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": SimpleNamespace(BEFORE="before")},
}


def install(monkeypatch):
    """Let the model be SGLang; returns the module of the linker, imported with it."""
    for name, members in MODULES.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "kvplane_sglang.linker", raising=False)
    from kvplane_sglang import contract

    monkeypatch.setattr(contract, "version", lambda name: contract.TESTED)
    import kvplane_sglang.linker as linker

    monkeypatch.delitem(sys.modules, "kvplane_sglang.linker")
    return linker


class MHATokenToKVPool:
    kv_cache_layout = "nhd"
    k_scale_buffer = native_k_scale_buffer = dq_k_buffer = None

    def __init__(self, entries, layers):
        self.k_buffer = [torch.zeros(entries, 2, 8) for _ in range(layers)]
        self.v_buffer = [torch.zeros(entries, 2, 8) for _ in range(layers)]


class SWAKVPool:
    def __init__(self, entries):
        self.full_kv_pool, self.swa_kv_pool = MHATokenToKVPool(entries, 1), MHATokenToKVPool(entries, 3)


class MambaPool:
    def __init__(self, entries):
        conv = [torch.zeros(2, entries, 6, dtype=torch.bfloat16)]
        self.mamba_cache = SimpleNamespace(temporal=torch.zeros(2, entries, 3, 5), conv=conv, replayssm_d=None)


class HybridReqToTokenPool:
    mamba_ckpt_pool = None
    short_conv_pool = ngram_pool = SimpleNamespace(enabled=False)

    def __init__(self, entries):
        self.mamba_pool = MambaPool(entries)


def arguments(folder, **changed):
    """What the command line of SGLang says."""
    settings: dict[str, Any] = {**dict.fromkeys(MEANING, "auto"), **SIZES}
    settings |= {"enable_lora": False, "lora_paths": None, "speculative_algorithm": None, "disaggregation_mode": "null"}
    settings |= {"enable_memory_saver": False, "model_path": str(folder)}
    return SimpleNamespace(**settings | changed)


class Engine:
    """Pages of a window of two pages, and states, whose owner is known by their bytes."""

    WINDOW = 2

    def __init__(self, module, folder, entries=256, **options):
        self.folder, self.entries = folder, entries
        memory = SWAKVPool(entries)
        params = SimpleNamespace(
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: memory), page_size=PAGE, is_eagle=False,
            req_to_token_pool=HybridReqToTokenPool(entries), swa_gates_prefix_match=True, draft_swa_window=0,
            decoder_swa_bounded_replay=False, mtp_draft_device_pools=(), sidecar_draft_device_pools=(),
        )  # fmt: skip
        components = [SimpleNamespace(name=name) for name in ("FULL", "SWA", "MAMBA")]
        options = {"host": "1MiB"} | options
        self.linker = module.KvplaneLinker(arguments(folder), params, components=components, extra_config=options)
        self.pools = {one.value: pool for one, pool in self.linker.pools.items()}

    def transfers(self, keys, first, states=True):
        """Transfers of these pages, at consecutive pages from this one on."""
        full = torch.arange(first * PAGE, (first + len(keys)) * PAGE)
        found = [PoolTransfer(PoolName.KV, full, keys), PoolTransfer(PoolName.SWA, full, keys)]
        return [*found, PoolTransfer(PoolName.MAMBA, torch.tensor([first]), keys[-1:])] if states else found

    def compute(self, keys, first):
        """Write pages as a forward pass does."""
        for name, pool in self.pools.items():
            for at, key in enumerate(keys if name != "mamba" else keys[-1:]):
                rows = slice((first + at) * pool.rows, (first + at + 1) * pool.rows)
                for number, tensor in enumerate(pool.tensors):
                    tensor[rows] = content(key, number)

    def save(self, keys, first=1, states=True):
        """Compute and save pages; returns whether the save is good."""
        self.compute(keys, first)
        assert self.linker.offload(self.transfers(keys, first, states))
        self.wait()
        return self.linker.pop_completed_offload()

    def wait(self):
        """Until nothing is being saved."""
        until(lambda: not self.linker.tiers.is_busy)

    def lengths(self, keys):
        """What a look-up says."""
        tail = PoolTransfer(PoolName.SWA, None, keys[-self.WINDOW :])
        wanted = [PoolTransfer(PoolName.KV, None, keys), tail, PoolTransfer(PoolName.MAMBA, None, keys[-1:])]
        return self.linker.lookup("r", wanted)

    def queue(self, keys, first, rid="r"):
        """Queue the load of a hit."""
        window, full = keys[-self.WINDOW :], torch.arange(first * PAGE, (first + len(keys)) * PAGE)
        swa = PoolTransfer(PoolName.SWA, full[-len(window) * PAGE :], window)
        return self.linker.load(
            rid,
            [
                PoolTransfer(PoolName.KV, full, keys),
                swa,
                PoolTransfer(PoolName.MAMBA, torch.tensor([first]), keys[-1:]),
            ],
        )

    def load(self, keys, first=30):
        """Load a hit into other pages; returns whether it was queued. All bytes must be those that were computed."""
        if not self.queue(keys, first):
            return False
        batch = self.linker.start_layer_wise_loading()
        assert batch > 0
        assert self.linker.finish_layer_wise_loading(batch)
        for name, pool in self.pools.items():
            count = {"kv": len(keys), "swa": min(self.WINDOW, len(keys)), "mamba": 1}[name]
            for at in range(count):
                page = first + at + (len(keys) - count if name == "swa" else 0)
                rows = slice(page * pool.rows, (page + 1) * pool.rows)
                for number, tensor in enumerate(pool.tensors):
                    assert (tensor[rows] == content(keys[len(keys) - count + at], number)).all(), (name, at)
        return True

    def counts(self, pool, tier):
        """What happened to the slots of a pool."""
        return self.linker.tiers.slots[pool].counts()[tier]


def content(key, number):
    """The value that every element of a page has in a tensor."""
    return int(key[:4], 16) % 200 + number


def keys(count, seed=""):
    """The keys of pages that follow each other."""
    return [hashlib.sha256(f"{seed}{at}".encode()).hexdigest() for at in range(count)]
