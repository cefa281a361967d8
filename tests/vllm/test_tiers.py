"""kvplane's tiers for vLLM, without vLLM: what is refused, where pages are, and that copies keep their order."""

from __future__ import annotations

import ast
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvplane.base.errors import InvalidArgument
from kvplane_kernels.torch_ops import TorchOps
from kvplane_vllm.tiers import settings
from kvplane_vllm.tiers.copier import Copier, Task
from kvplane_vllm.tiers.layout import WrongLayout, device_pages, host_plan, row_bytes
from kvplane_vllm.tiers.messages import Copies
from kvplane_worker.pages import PageBuffers
from tests.service.rig import until
from tests.vllm import surface

BLOCKS, PAGE, LAYERS = 6, 64, 2
IMPORTED = """
    vllm.config VllmConfig
    vllm.distributed.parallel_state get_tensor_model_parallel_rank
    vllm.distributed.kv_transfer.kv_connector.v1.base KVConnectorBase_V1 KVConnectorHandshakeMetadata
        KVConnectorMetadata KVConnectorRole KVConnectorTransferResults KVConnectorWorkerMetadata SupportsHMA
    vllm.v1.core.kv_cache_manager KVCacheBlocks KVCacheManager
    vllm.v1.core.sched.output KVConnectorBlockState SchedulerOutput
    vllm.v1.kv_cache_interface KVCacheConfig
    vllm.v1.outputs KVConnectorOutput
    vllm.v1.request Request
""".split()


def files():
    return [surface.ADAPTER / "connector.py", *(surface.ADAPTER / "tiers").glob("*.py")]


def test_what_the_connector_imports_of_vllm():
    nodes = [node for path in files() for node in ast.walk(ast.parse(path.read_text()))]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm")]
    assert {name for node in imports for name in (node.module, *(one.name for one in node.names))} == set(IMPORTED)


@pytest.mark.parametrize("path", files(), ids=lambda path: path.stem)
def test_no_private_name_of_another_object_is_used(path):
    """Of itself, its own class, and of what the tiers define."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    private = [node for node in nodes if node.attr.startswith("_") and not node.attr.endswith("__")]
    assert [node.attr for node in private if getattr(node.value, "id", "") not in ("self", "cls")] == []
    inherited = "_vllm_config _kv_transfer_config _kv_cache_config _connector_metadata _kv_cache_manager _role".split()
    assert [node.attr for node in private if node.attr in inherited] == []


def engine(given=None, **other):
    """The parts of vLLM's configuration that are read."""
    transfer = {"kv_load_failure_policy": "recompute", "kv_role": "kv_both"}
    extra = {"host": "1GiB"} if given is None else given
    parts = {
        "kv_transfer_config": SimpleNamespace(**transfer | other, kv_connector_extra_config=extra),
        "cache_config": SimpleNamespace(enable_prefix_caching=True, prefix_caching_hash_algo="sha256"),
        "parallel_config": SimpleNamespace(
            world_size=1,
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_index=3,
            data_parallel_size=4,
        ),
        "model_config": SimpleNamespace(enable_sleep_mode=False, served_model_name="model", max_model_len=4096),
        "additional_config": {"kvplane": {"mode": "mirror", "replica": "device"}},
        "speculative_config": None,
        "lora_config": None,
    }
    return SimpleNamespace(**parts)


DISK = {"host": "1GiB", "disk": "/nvme", "disk_size": "2GiB"}
SERVICE = {"host": "1GiB", "address": "kvplane:7070", "replica": "r-{dp_rank}"}


def test_the_service_that_follows():
    found = settings.settings_of(engine(SERVICE)).service
    assert found is not None
    assert (found.address, found.replica, found.model_name) == ("kvplane:7070", "r-3", "model")
    assert settings.settings_of(engine()).service is None
    config = engine(SERVICE)
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    with pytest.raises(InvalidArgument, match="cannot compute block hashes"):
        settings.settings_of(config)


def test_the_options():
    found = settings.settings_of(engine(DISK | {"save": "reuse", "load_timeout": "500ms"}))
    assert (found.host_bytes, found.disk, found.disk_bytes) == (1 << 30, Path("/nvme"), 2 << 30)
    assert (found.save.value, found.load_timeout_s) == ("reuse", 0.5)
    assert settings.settings_of(engine(DISK)).save.value == "through"
    found = settings.settings_of(engine(SERVICE | {"peers": "3", "peer_transport": "nixl"}))
    num_blocks, (tier,) = settings.tiers_of(cache_config(), found)
    assert (found.peers, found.peer_transport.value, tier.num_blocks) == (3, "nixl", 4 * num_blocks)
    assert settings.settings_of(engine(SERVICE)).peers == 0
    assert [settings.settings_of(engine(DISK | more)).min_load for more in ({}, {"min_load": "256"})] == [0, 256]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "host"),
        ({"host": 5}, "host"),
        ({"host": "many"}, "host"),
        ({"host": "1GiB", "disk": "/nvme"}, "disk_size"),
        ({"host": "1GiB", "disk_size": "1GiB"}, "disk_size"),
        (DISK | {"save": "never"}, "save"),
        (DISK | {"load_timeout": "soon"}, "load_timeout"),
        (DISK | {"min_load": "few"}, "min_load"),
        (DISK | {"min_load": "-1"}, "min_load"),
        (DISK | {"min_load": "4097"}, "min_load"),
        ({"host": "1GiB", "hosts": "1GiB"}, "hosts"),
        ({"host": "1GiB", "address": "kvplane:7070"}, "replica"),
        ({"host": "1GiB", "replica": "r"}, "replica"),
        ({"host": "1GiB", "token_file": "/token"}, "token_file"),
        (SERVICE | {"tls_cert": "/cert"}, "tls_ca"),
        (SERVICE | {"replica": "device"}, "replica"),
        ({"host": "1GiB", "peers": "2"}, "peers"),
        (SERVICE | {"peers": "0"}, "peers"),
        (SERVICE | {"peers": "many"}, "peers"),
        (SERVICE | {"peers": "1025"}, "peers"),
        (SERVICE | DISK | {"peers": "2"}, "peers"),
        (SERVICE | {"peer_transport": "nixl"}, "peer_transport"),
        (SERVICE | {"peers": "2", "peer_transport": "mail"}, "peer_transport"),
    ],
)
def test_a_wrong_option_is_refused_with_its_name(given, field):
    with pytest.raises(InvalidArgument) as refused:
        settings.settings_of(engine(given))
    assert refused.value.field == f"{settings.FIELD}.{field}"
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("kv_transfer_config", "kv_load_failure_policy", "fail"),
        ("kv_transfer_config", "kv_role", "kv_producer"),
        ("cache_config", "enable_prefix_caching", False),
        ("cache_config", "prefix_caching_hash_algo", "xxhash"),
        ("cache_config", "calculate_kv_scales", True),
        ("parallel_config", "world_size", 2),
        ("model_config", "enable_sleep_mode", True),
        ("", "speculative_config", object()),
        ("", "lora_config", object()),
    ],
)
def test_an_engine_that_is_not_tested_is_refused_with_field_and_remedy(part, name, value):
    config = engine(DISK)
    setattr(getattr(config, part) if part else config, name, value)
    with pytest.raises(InvalidArgument, match="do not run with this engine") as refused:
        settings.settings_of(config)
    assert refused.value.field
    assert refused.value.remedy


def cache_config(stride=PAGE, layer_stride=PAGE * BLOCKS):
    """A KV cache of one group of two layers, whose pages have 64 bytes."""
    spec = SimpleNamespace(page_size_bytes=PAGE, prefix_replay_tokens=0, has_layer_views=True)
    names = [f"layer {number}" for number in range(LAYERS)]
    group = SimpleNamespace(layer_names=names, kv_cache_spec=spec, host_resident=False, is_eagle_group=False)
    tensor = SimpleNamespace(layers=names, offset=0, layer_stride=layer_stride, block_stride=stride)
    return SimpleNamespace(
        num_blocks=BLOCKS,
        kv_cache_groups=[group],
        kv_cache_tensors=[tensor],
        prefix_cacheable_group_ids=(0,),
    )


def views(config, shape=(BLOCKS, 2, 4, 2)):
    """The views that vLLM registers, float32 [blocks, heads, tokens, elements]."""
    (tensor,) = config.kv_cache_tensors
    memory = torch.arange(BLOCKS * LAYERS * PAGE // 4, dtype=torch.float32)
    parts, tail = shape[0] // BLOCKS, (shape[2] * shape[3], shape[3], 1)
    steps = tensor.block_stride // 4 // parts, *tail
    return {
        name: memory.as_strided(shape, steps, number * tensor.layer_stride // 4)
        for number, name in enumerate(tensor.layers)
    }


@pytest.mark.parametrize(
    ("strides", "shape"),
    [
        ((PAGE, PAGE * BLOCKS), (BLOCKS, 2, 4, 2)),
        ((PAGE * LAYERS, PAGE), (BLOCKS, 2, 4, 2)),
        ((PAGE, PAGE * BLOCKS), (2 * BLOCKS, 2, 2, 2)),
    ],
    ids=["by layer", "by block", "kernel blocks"],
)
def test_pages_are_the_bytes_of_the_views(strides, shape):
    config = cache_config(*strides)
    registered = views(config, shape)
    (pages,) = device_pages(config, registered)
    for page, view in zip(pages.layers, registered.values(), strict=True):
        whole = view.reshape(BLOCKS, -1)
        assert torch.equal(page.contiguous().view(torch.float32), whole)
    assert row_bytes(config) == [PAGE * LAYERS]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda view: view[..., 1:], "it begins at byte 4"),
        (lambda view: view[1:], "it begins at byte"),
        (lambda view: view[:-1], "it has 5 blocks"),
        (lambda view: view.as_strided(view.shape, (15, 8, 2, 1)), "60 bytes apart"),
        (lambda view: view.as_strided(view.shape, (16, 16, 2, 1)), "a block has elements up to byte"),
        (lambda view: view.as_strided((BLOCKS, 3, 4, 2), (16, 4, 2, 1)), "a block has 96 bytes"),
    ],
)
def test_a_view_that_is_wrong_by_one_piece_is_refused(wrong, why):
    config = cache_config()
    registered = views(config)
    name = "layer 0"
    with pytest.raises(WrongLayout, match=why):
        device_pages(config, registered | {name: wrong(registered[name])})


def states(config, gap=0):
    """The views of a layer with two states, of 8 and 6 elements, with `gap` elements between them."""
    (tensor,) = config.kv_cache_tensors
    memory, step = torch.arange(BLOCKS * LAYERS * PAGE // 4, dtype=torch.float32), tensor.block_stride // 4
    return {
        name: tuple(
            memory.as_strided((BLOCKS, size), (step, 1), number * tensor.layer_stride // 4 + first)
            for first, size in ((0, 8), (8 + gap, 6))
        )
        for number, name in enumerate(tensor.layers)
    }


def test_the_states_of_a_layer_follow_each_other_in_its_pages():
    config = cache_config()
    registered = states(config)
    (pages,) = device_pages(config, registered)
    for page, views_of in zip(pages.layers, registered.values(), strict=True):
        whole = page.contiguous().view(torch.float32)
        assert torch.equal(whole[:, :14], torch.cat(views_of, dim=1))
    for gap in (1, 2, -1):
        with pytest.raises(WrongLayout, match="it begins at byte"):
            device_pages(config, states(config, gap))


def test_a_layer_without_a_place_is_refused():
    config = cache_config()
    with pytest.raises(WrongLayout, match="it has no place"):
        device_pages(config, {})


@pytest.mark.parametrize(
    ("setting", "value", "why"),
    [
        ("prefix_cacheable_group_ids", (), "no hashes"),
    ],
)
def test_a_model_that_is_not_tested_is_refused(setting, value, why):
    config = cache_config()
    settings.check_groups(config)
    setattr(config, setting, value)
    with pytest.raises(InvalidArgument, match=why):
        settings.check_groups(config)


@pytest.mark.parametrize(("option", "text"), [("host", "100B"), ("disk_size", "4KiB")])
def test_a_size_without_room_for_a_block_is_refused(option, text):
    found = settings.settings_of(engine(DISK | {option: text}))
    with pytest.raises(InvalidArgument, match="no block") as refused:
        settings.tiers_of(cache_config(), found)
    assert refused.value.field == f"{settings.FIELD}.{option}"


class Held(Copier):
    """Saves wait until they are let go.

    Attributes:
        views: of each layer, as vLLM registers them.
    """

    views: list[torch.Tensor]

    def __init__(self, *arguments):
        self.may_save = threading.Event()
        self.fails = False
        super().__init__(*arguments)

    def save(self, copies):
        assert self.may_save.wait(10)
        if self.fails:
            raise OSError("no memory")
        super().save(copies)


@pytest.fixture
def copier():
    config = cache_config()
    registered = views(config)
    device = device_pages(config, registered)
    host = PageBuffers.allocate(host_plan(row_bytes(config), BLOCKS))
    made = Held(device, [host.group(0)], TorchOps())
    made.views = [*registered.values()]
    yield made
    made.may_save.set()
    made.close()


def test_a_step_waits_for_the_saves_that_read_what_it_overwrites_and_for_no_others(copier):
    before = copier.views[0][1].clone()
    copier.submit(Task(1, [Copies(0, [1, 2], [3, 5])], {}))
    copier.fence({4})  # no save reads it
    passed = threading.Thread(target=copier.fence, args=({2, 4},))
    passed.start()
    passed.join(0.05)
    assert passed.is_alive()
    copier.may_save.set()
    passed.join(10)
    assert not passed.is_alive()
    copier.views[0][1] = 0.0
    copier.submit(Task(2, [], {"r": [Copies(0, [1], [3])]}))
    until(lambda: copier.ended()[0] == 2)
    assert torch.equal(copier.views[0][1], before)


def test_loads_behind_a_save_read_what_it_wrote(copier):
    first, last = copier.views[0][1].clone(), copier.views[1][2].clone()
    copier.submit(Task(1, [Copies(0, [1, 2], [4, 3])], {"r": [Copies(0, [3, 5], [4, 3])]}))
    copier.submit(Task(2, [], {"failed": None}))
    copier.may_save.set()
    loaded = {}
    until(lambda: loaded.update(copier.ended()[1]) or len(loaded) == 2)
    assert loaded == {"r": True, "failed": False}
    assert torch.equal(copier.views[0][3], first)
    assert torch.equal(copier.views[1][5], last)


def test_after_a_save_that_failed_nothing_is_loaded_and_no_fence_waits(copier):
    copier.fails = True
    copier.may_save.set()
    copier.submit(Task(1, [Copies(0, [1], [3])], {"a": [Copies(0, [2], [3])]}))
    copier.submit(Task(2, [Copies(0, [1], [3])], {"b": [Copies(0, [2], [3])]}))
    loaded = {}
    until(lambda: loaded.update(copier.ended()[1]) or len(loaded) == 2)
    copier.fence({1})
    assert (loaded, copier.is_broken) == ({"a": False, "b": False}, True)
    assert copier.ended()[0] == 0


def test_a_device_that_fails_ends_the_engine_instead_of_holding_it(copier, monkeypatch):
    def failed(_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    event: Any = SimpleNamespace(wait=failed)
    task = Task(1, [Copies(0, [1], [3])], {"r": [Copies(0, [2], [3])]}, computed=event)
    copier.submit(task)
    copier._thread.join(10)
    for call in (lambda: copier.fence({1}), copier.drain, copier.ended, lambda: copier.submit(task)):
        with pytest.raises(RuntimeError, match="have ended") as caught:
            call()
        assert "illegal memory access" in str(caught.value.__cause__)
