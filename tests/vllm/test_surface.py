"""The surface of vLLM that the adapter uses: what is recorded is complete, and a change in vLLM is seen."""

from __future__ import annotations

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


@pytest.mark.vllm
def test_the_recorded_surface_is_that_of_the_installed_vllm():
    assert surface.surface(surface.installed()) == surface.RECORDED.read_text().splitlines()


def test_without_an_environment_recording_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(surface, "FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match="make vllm-env"):
        surface.installed()
