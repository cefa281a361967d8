"""Options, engines and releases that the linker refuses, each with field and remedy."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvplane.base.errors import FailedPrecondition, InvalidArgument, KvplaneError
from kvplane_sglang import contract, pools, settings
from tests.sglang import model
from tests.sglang.model import Engine

WRONG = [
    ({}, "host: it is missing"),
    ({"host": "8GiB", "tier": "x"}, "tier: 'tier' is not one of the options"),
    ({"host": 8}, "host: 8 is not a text"),
    ({"host": "many"}, "host: 'many' is not a size in bytes"),
    ({"host": "1MiB", "disk": "/kv"}, "disk_size: disk and disk_size need each other"),
    ({"host": "1MiB", "disk_size": "1MiB"}, "disk_size: disk and disk_size need each other"),
    ({"host": "1MiB", "disk": "kv", "disk_size": "1MiB"}, "disk: 'kv' depends on the folder"),
    ({"host": "1MiB", "load_timeout": "soon"}, "load_timeout: 'soon' is not a duration"),
    ({"host": "1MiB", "load_timeout": "0s"}, "load_timeout: a load needs time"),
    ({"host": "1KiB"}, "host: 1024 bytes have room for no page"),
    ({"host": "9000TiB"}, "host: .* more than 80% of the free memory"),
    ({"host": "1MiB", "disk": "/proc/kv", "disk_size": "1MiB"}, "disk: .*cannot be made"),
    ({"host": "1MiB", "disk": "FOLDER", "disk_size": "9KiB"}, "disk_size: 9216 bytes have room for no page"),
    ({"host": "1MiB", "disk": "FOLDER", "disk_size": "900TiB"}, "disk_size: .* are free"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[message.partition(" ")[0] for _, message in WRONG])
def test_a_wrong_option_names_field_and_remedy(monkeypatch, tmp_path, options, message):
    module = model.install(monkeypatch)
    options = {"host": None} | {name: str(tmp_path / "kv") if one == "FOLDER" else one for name, one in options.items()}
    if options["host"] is None:
        del options["host"]
        monkeypatch.setattr(model.Engine, "__init__", bare)
    with pytest.raises(KvplaneError, match=message) as found:
        Engine(module, tmp_path, **options)
    assert found.value.field.startswith(settings.FIELD)
    assert found.value.remedy
    assert not list(tmp_path.glob("kv/*"))


def bare(self, module, folder, **options):
    settings.settings_of(options)


@pytest.mark.parametrize(
    ("field", "value"),
    [("tp_size", 2), ("pp_size", 2), ("dp_size", 2), ("dcp_size", 2), ("attn_cp_size", 2), ("enable_lora", True),
     ("lora_paths", ["a"]), ("speculative_algorithm", "EAGLE"), ("disaggregation_mode", "prefill"),
     ("enable_memory_saver", True), ("model_path", "org/name"), ("load_format", "dummy")],
)  # fmt: skip
def test_an_engine_with_which_tiers_do_not_run_is_refused(tmp_path, field, value):
    options = settings.settings_of({"host": "1MiB", "disk": "/kv", "disk_size": "1MiB"})
    settings.check_engine(model.arguments(tmp_path), options)
    with pytest.raises(InvalidArgument, match="do not run with this engine") as found:
        settings.check_engine(model.arguments(tmp_path, **{field: value}), options)
    assert field in found.value.field or field == "lora_paths"


def test_the_model_of_the_contract_passes(monkeypatch):
    monkeypatch.setattr(contract, "version", lambda name: contract.TESTED)
    contract.check(model.UnifiedCacheLinker, model.PoolTransfer, model.PoolName)


def test_another_release_is_refused(monkeypatch):
    monkeypatch.setattr(contract, "version", lambda name: "0.5.24")
    with pytest.raises(FailedPrecondition, match=r"SGLang 0\.5\.23 alone: it is 0\.5\.24"):
        contract.check(model.UnifiedCacheLinker, model.PoolTransfer, model.PoolName)


def test_what_differs_from_the_contract_is_named(monkeypatch):
    monkeypatch.setattr(contract, "version", lambda name: contract.TESTED)

    class Linker(model.UnifiedCacheLinker):
        def reset(self):
            return None

        def lookup(self, rid, transfers, priority):  # type: ignore[override]
            return None

        lookup.__isabstractmethod__ = True  # type: ignore[attr-defined]

    Linker.__abstractmethods__ = (model.UnifiedCacheLinker.__abstractmethods__ | {"prefetch"}) - {"reset"}
    Linker.prefetch = lambda self: None  # type: ignore[attr-defined]
    transfer = dataclasses.make_dataclass("Transfer", ["name", "keys"])
    with pytest.raises(FailedPrecondition) as found:
        contract.check(Linker, transfer, [one for one in model.PoolName if one != "mamba"])
    for text in (
        "the linker has a method prefetch",
        "the linker has no method reset",
        r"lookup takes (rid, transfers, priority), not (rid, transfers)",
        "a transfer has no device_indices",
        "there is no pool mamba",
    ):
        assert text in str(found.value)


def test_hooks_that_do_not_apply_are_refused(monkeypatch):
    model.install(monkeypatch)
    monkeypatch.setattr(model.HookRegistry, "apply_hooks", classmethod(lambda cls: None))
    for name in contract.UPDATES:
        monkeypatch.setattr(model.SchedulerWeightUpdaterManager, name, lambda self: None)
    with pytest.raises(FailedPrecondition, match="is not notified before"):
        contract.before_updates(lambda: None)


@pytest.mark.parametrize("change", ["layout", "scales", "states", "draft", "windows", "kind"])
def test_memory_of_an_unknown_kind_is_refused(change):
    memory: Any = model.SWAKVPool(16)
    requests: Any = model.HybridReqToTokenPool(16)
    params = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: memory), page_size=4, is_eagle=False,
        req_to_token_pool=requests, swa_gates_prefix_match=change != "windows", draft_swa_window=0,
        decoder_swa_bounded_replay=False, mtp_draft_device_pools=(1,) if change == "draft" else (),
        sidecar_draft_device_pools=(),
    )  # fmt: skip
    if change == "layout":
        memory.swa_kv_pool.kv_cache_layout = "hnd"
    if change == "scales":
        memory.full_kv_pool.k_scale_buffer = torch.zeros(1)
    if change == "states":
        requests.mamba_ckpt_pool = object()
    if change == "kind":
        memory.full_kv_pool = SimpleNamespace()
    with pytest.raises(InvalidArgument, match="no pages of this kind"):
        pools.pools_of(params, ["kv", "swa", "mamba"])
