"""SGLang's 19 cache configurations with kvplane's linker behind its tree: `python tests/sglang/kit.py FOLDER`.

Runs in the environment of SGLang (`environment`). Each configuration is filled with pages of random bytes, saved,
flushed and loaded; then a second linker, with nothing in host memory, loads from the disk. Prints one line per
configuration as JSON: what was hit, whether all bytes are equal, and the bytes that were loaded against those planned.
"""

from __future__ import annotations

import json
import sys
import time
from array import array
from pathlib import Path
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CONFIGS
from sglang.test.kits.unified_radix_cache.mixins import UnifiedRadixCacheFixtures

from kvplane_sglang.linker import KvplaneLinker
from kvplane_sglang.settings import MEANING

LENGTHS = {1: 40, 4: 12, 16: 8, 64: 4, 128: 4}  # pages of the prompt, by the size of a page
SIZES = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "dcp_size": 1, "attn_cp_size": 1}


class Life(UnifiedRadixCacheFixtures):
    """One process of an engine: a cache and its linker."""

    def __init__(self, cfg, folder):
        self.cfg = cfg
        self.cache, self.slots, self.requests = fixtures.build_fixture(cfg, tree_core_backend="python")
        arguments = SimpleNamespace(
            **SIZES, **dict.fromkeys(MEANING, ""), enable_lora=False, lora_paths=None, speculative_algorithm=None,
            disaggregation_mode="null", enable_memory_saver=False, model_path=str(folder),
        )  # fmt: skip
        arguments.load_format = "auto"
        options = {"host": "64MiB", "disk": str(folder / "disk"), "disk_size": "64MiB"}
        params = self.cache.cache_init_params
        self.linker = KvplaneLinker(arguments, params, components=set(self.cache.components), extra_config=options)
        self.cache.init_cache_linker(self.linker)

    def fill(self, seed):
        """Give every page random bytes."""
        generator = torch.Generator().manual_seed(seed)
        for pool in self.linker.pools.values():
            for tensor in pool.tensors:
                tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))

    def wait_until_saved(self):
        """Wait until all saves have ended, on the disk too."""
        deadline = time.monotonic() + 60
        while self.cache.linker.pending_offloads or self.linker.tiers.is_busy:
            assert time.monotonic() < deadline, "saves did not end"
            self.cache.check_hicache_events()
            time.sleep(0.001)

    def insert(self, tokens):
        """Insert a prompt in two parts, as chunks are; returns bytes by pool of the whole tail."""
        for end in (len(tokens) // 2 // self.cfg.page_size * self.cfg.page_size, len(tokens)):
            if end:
                self._insert(self.cache, self.slots, self.requests, tokens[:end])
        return self.bytes_of(tokens)

    def bytes_of(self, tokens):
        """The bytes that the tree has for a prompt."""
        match = fixtures.match_prefix(self.cache, tokens)
        assert match.device_prefix_len == len(tokens)
        root = self.cache.root_node_handle()
        return self._read(self.cache.tree_core.collect_full_device_indices(match.last_device_node, root))

    def _read(self, full):
        found = {"kv": rows_of(self.linker.pools["kv"], full)}
        if self.cfg.has_swa:
            mapped = self.slots.full_to_swa_index_mapping[full[-self.window :]]
            found["swa"] = rows_of(self.linker.pools["swa"], mapped)
        return found

    @property
    def window(self):
        """Tokens of whole pages that a hit needs of the windows."""
        page = self.cfg.page_size
        return -(-self.cfg.sliding_window_size // page) * page

    def load(self, tokens):
        """Serve a prompt of these tokens and one more; returns tokens loaded and their bytes by pool."""
        request = self._make_req(self.requests)
        request.rid, request.kv = str(request.rid), request.kv
        key = RadixKey(array("q", [*tokens, 7_777_777]))
        match = self.cache.match_prefix(MatchPrefixParams(key=key, req=request))
        self._apply_match_to_req(request, match)
        if not match.host_hit_length:
            return 0, {}
        count, _ = self.cache.init_load_back(
            InitLoadBackParams(
                best_match_node=match.best_match_node, host_hit_length=match.host_hit_length, req=request
            )
        )
        if not count:
            return 0, {}
        full = self.cache.linker.private_load_indices[request.rid]
        self.cache.ready_to_load_host_cache()
        assert not self.cache.finish_external_linker_loads([request])
        found = self._read(full)
        if self.cfg.has_mamba:
            found["mamba"] = rows_of(self.linker.pools["mamba"], request.kv.mamba_pool_idx.reshape(1))
        return count, found

    def flush(self):
        """What `flush_cache` does."""
        self.cache.reset()
        self.requests.clear()
        self.slots.clear()
        self.requests.reset_aux_cache_allocator()


def rows_of(pool, indices):
    """The bytes of entries, layer after layer."""
    return b"".join(one[indices].contiguous().view(torch.uint8).numpy().tobytes() for one in pool.tensors)


def planned(life, pages):
    """Bytes of a load of this number of pages."""
    found = {"kv": pages}
    if life.cfg.has_swa:
        found["swa"] = min(pages, life.window // life.cfg.page_size)
    if life.cfg.has_mamba:
        found["mamba"] = 1
    return {name: count * life.linker.pools[name].page_bytes for name, count in found.items()}


def loaded(life):
    """Bytes loaded from host memory so far, by pool."""
    return {name: one.host.counts.loaded_bytes for name, one in life.linker.tiers.slots.items()}


def play(cfg, folder):
    """One configuration; returns what was found."""
    folder.mkdir()
    life, tokens = Life(cfg, folder), list(range(1, 1 + LENGTHS[cfg.page_size] * cfg.page_size))
    life.fill(1)
    written = life.insert(tokens)
    if cfg.has_mamba:
        state = fixtures.node_device_value(
            life.cache,
            fixtures.match_prefix(life.cache, tokens).last_device_node,
            next(c for c in cfg.components if c.name == "MAMBA"),
        )
        written["mamba"] = rows_of(life.linker.pools["mamba"], state)
    life.wait_until_saved()
    found = {"config": cfg.label, "tokens": len(tokens)}
    for act in ("flush", "restart"):
        if act == "flush":
            life.flush()
        else:
            life.cache.linker.close()
            life = Life(cfg, folder)
        life.fill(2)
        before = loaded(life)
        count, read = life.load(tokens)
        plan = planned(life, count // cfg.page_size) if count else {}
        done = {name: total - before[name] for name, total in loaded(life).items()}
        found[act] = {"loaded": count, "equal": read == written, "bytes": done, "planned": plan}
        if cfg.has_mamba and count:
            life.flush()
    life.cache.linker.close()
    return found


def main():
    for number, cfg in enumerate(CONFIGS):
        sys.stdout.write(json.dumps(play(cfg, Path(sys.argv[1]) / str(number))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
