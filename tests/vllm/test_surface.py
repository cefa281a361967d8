"""The surface of vLLM that the adapter uses: what is recorded is complete, and a change in vLLM is seen."""

from __future__ import annotations

import re

import pytest

from tests.vllm import surface

MANAGER = "vllm/v1/core/kv_cache_manager.py"
SOURCES = {
    surface.SPECS: "class MambaSpec:\n    block_size: int\n",
    MANAGER: "class KVCacheManager:\n    def allocate_slots(self, request, num_new_tokens=0): ...\n",
    "vllm/v1/core/sched/scheduler.py": "self.kv_cache_manager.allocate_slots(request)\n",
}


def test_every_import_of_the_adapter_is_recorded():
    recorded = surface.RECORDED.read_text()
    for module, name in surface.adapter_imports():
        assert f".{name}" in recorded or f"module {module}" in recorded, f"run tests.vllm.surface --record: {name}"
    assert "missing" not in recorded


@pytest.mark.parametrize(
    ("path", "old", "new", "line"),
    [
        (MANAGER, "num_new_tokens=0", "num_new_tokens", "member vllm.v1.core.kv_cache_manager.KVCacheManager.allocate"),
        (MANAGER, "class KVCacheManager", "class Other", "missing vllm.v1.core.kv_cache_manager.KVCacheManager"),
        (surface.SPECS, "block_size", "tokens", "spec MambaSpec.tokens"),
        ("vllm/v1/core/sched/scheduler.py", "allocate_slots", "reserve", "asks vllm/v1/core/sched/scheduler.py"),
    ],
)
def test_a_change_in_vllm_changes_the_surface(path, old, new, line):
    before, after = surface.surface(SOURCES), surface.surface(SOURCES | {path: SOURCES[path].replace(old, new)})
    assert any(one.startswith(line) for one in set(after) - set(before))


# Names of vLLM that the adapter reads of objects, none of whose classes it imports, and arguments by name.
READ = (
    "kv_holding_waiting _pause_state num_waiting_for_streaming_input max_num_active_reqs "
    "adaptive_long_prefill_threshold block_hashes "
    "scheduler_reserve_full_isl get_request_counts _preempt_request max_num_scheduled_tokens "
    "num_sampled_tokens_per_step max_num_new_slots_for_drafting records_new_block_ids has_prefill_checkpoint_blocks "
    "max_admission_blocks_per_request shared_prefix_checkpoint invalid_block_ids attention_groups single_type_managers "
    "long_prefill_token_threshold mamba_cache_mode is_eagle_group use_eagle enable_partial_hash_hits "
    "num_in_flight_tokens shared_prefix_boundary lookahead_token_ids data_parallel_index mm_features identifier"
).split()


@pytest.mark.vllm
@pytest.mark.parametrize("name", READ)
def test_a_renamed_name_that_the_adapter_reads_is_seen(name):
    recorded = surface.RECORDED.read_text().splitlines()
    assert any(re.search(rf"\b{name}\b", line) for line in recorded if line.startswith(("names", "member")))


@pytest.mark.vllm
def test_the_recorded_surface_is_that_of_the_installed_vllm():
    assert surface.surface(surface.installed()) == surface.RECORDED.read_text().splitlines()


def test_without_an_environment_recording_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(surface, "FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match="make vllm-env"):
        surface.installed()
