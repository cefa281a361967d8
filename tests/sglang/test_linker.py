"""The linker behind a model of SGLang: what is loaded has the bytes that were computed, or is computed again."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import deque
from typing import Any

import pytest
import torch

from kvplane.base.errors import InvalidArgument, WorkerExists
from kvplane_sglang.settings import MEANING, content_of
from kvplane_sglang.slots import Directory
from kvplane_worker.tiers.disk import erase_left
from tests.sglang import model
from tests.sglang.model import Engine, keys


@pytest.fixture
def module(monkeypatch):
    return model.install(monkeypatch)


@pytest.fixture
def start(module, tmp_path):
    """Starts engines, which are closed at the end."""
    engines = []
    (tmp_path / "model.safetensors").write_bytes(b"weights")

    def begin(disk="disk", **options):
        files = {"disk": str(tmp_path / disk), "disk_size": "4MiB"} if disk else {}
        engines.append(Engine(module, tmp_path, **files, **options))
        return engines[-1]

    yield begin
    for one in engines:
        if not one.linker.tiers._is_closed:
            one.linker.close()


def test_pages_are_loaded_after_a_flush(start):
    engine, path = start(disk=None), keys(5)
    assert engine.save(path)
    engine.linker.reset()
    assert engine.lengths(path) == [5]  # the state is that of the end
    assert engine.load(path)
    assert engine.counts("swa", "host").loaded == Engine.WINDOW


def test_lengths_are_those_where_every_pool_has_what_it_needs(start):
    engine, path = start(disk=None), keys(8)
    assert engine.save(path[:3])
    assert engine.save(path[3:6], first=10)
    assert engine.save(path[6:], first=20, states=False)
    assert engine.lengths(path) == [3, 6]
    assert engine.lengths(path[1:]) == [2, 5]
    assert engine.lengths(keys(3, "other")) == []


def test_a_restarted_engine_loads_from_the_disk(start):
    engine, path = start(), keys(6)
    assert engine.save(path)
    engine.linker.close()
    engine = start()
    assert engine.lengths(path) == [6]
    assert engine.load(path)
    assert engine.counts("kv", "disk").loaded == 6


def test_a_killed_engine_leaves_its_pages(start, tmp_path):
    engine, path = start(), keys(6)
    assert engine.save(path)
    shutil.copytree(tmp_path / "disk", tmp_path / "left")  # as the files are when nothing is closed
    assert start("left").load(path)


def test_other_weights_find_an_empty_disk(start, tmp_path):
    engine, path = start(), keys(4)
    assert engine.save(path)
    engine.linker.close()
    (tmp_path / "model.safetensors").write_bytes(b"others")
    assert start().lengths(path) == []


@pytest.mark.parametrize("pool", ["kv", "swa", "mamba"])
def test_a_damaged_slot_in_host_memory_is_refused(start, pool):
    engine, path = start(disk=None), keys(4)
    assert engine.save(path)
    slots = engine.linker.tiers.slots[pool]
    slots.host._rows[slots._in_host.pin(bytes.fromhex(path[-1])), 7] ^= 1
    slots.unpin([slots._in_host._slots[bytes.fromhex(path[-1])]])
    assert not engine.load(path)
    assert engine.counts(pool, "host").refused == 1
    assert engine.lengths(path) == []
    assert all(not one._in_host.num_pinned for one in engine.linker.tiers.slots.values())


def test_a_slot_that_is_damaged_after_it_was_verified_fails_its_batch(start):
    engine, path = start(disk=None), keys(4)
    assert engine.save(path)
    assert engine.queue(path, 30)
    engine.linker.tiers.slots["kv"].host._rows[0, 3] ^= 1
    batch = engine.linker.start_layer_wise_loading()
    assert not engine.linker.finish_layer_wise_loading(batch)
    assert (engine.pools["kv"].tensors[0][30 * model.PAGE : 34 * model.PAGE] == 0).all()
    assert engine.linker.tiers.slots["kv"]._in_host.num_pinned == 0


@pytest.mark.parametrize("pool", ["kv", "swa", "mamba"])
def test_a_damaged_slot_on_the_disk_is_refused(start, tmp_path, pool):
    engine, path = start(), keys(4)
    assert engine.save(path)
    engine.linker.close()
    file = tmp_path / "disk" / f"sglang-{pool}.slots"
    raw = bytearray(file.read_bytes())
    raw[4096 * 2 + 5] ^= 1  # in the payload of slot 0
    file.write_bytes(raw)
    engine = start()
    refused = not engine.load(path)
    assert engine.counts(pool, "disk").refused == refused
    assert refused or pool == "swa"  # slot 0 may be of a page before the window
    assert engine.lengths(path) == ([] if refused else [4])


def test_a_directory_that_names_other_pages_is_refused(start, tmp_path):
    engine, path = start(), keys(4)
    assert engine.save(path)
    engine.linker.close()
    file = tmp_path / "disk" / "sglang-kv.keys"
    raw = file.read_bytes()
    file.write_bytes(raw[32:64] + raw[:32] + raw[64:])
    engine = start()
    assert not engine.load(path)
    assert engine.counts("kv", "disk").refused == 2


def test_a_save_that_is_taken_from_the_queue_is_not_at_its_end(start):
    class Slow(deque[Any]):
        def popleft(self):
            time.sleep(0.05)  # the queue is empty before `popleft` returns
            one = super().popleft()
            time.sleep(0.05)
            return one

    engine = start(disk=None)
    engine.linker.tiers._saves = Slow()
    assert all(engine.save(keys(2, f"path {at}"), first=10) for at in range(3))


def test_the_end_of_a_save_is_reported_when_its_pages_are_read(start):
    engine, path, computed = start(disk=None), keys(3), threading.Event()
    engine.compute(path, 1)
    parts = engine.linker._parts(engine.transfers(path, 1))
    assert engine.linker.tiers.save(parts, lambda: computed.wait(10))
    assert engine.linker.num_completed_offloads() == 0
    computed.set()
    engine.wait()
    assert engine.linker.num_completed_offloads() == 1
    engine.compute(keys(3, "other"), 1)  # SGLang gives the pages away only now
    assert engine.load(path)


def test_a_reset_ends_saves_before_their_pages_are_given_away(start):
    engine, path, begun, computed = start(disk=None), keys(3), threading.Event(), threading.Event()
    parts = engine.linker._parts(engine.transfers(path, 1))

    def is_computed():
        begun.set()
        computed.wait(10)

    for _ in range(2):
        assert engine.linker.tiers.save(parts, is_computed)
    assert begun.wait(10)
    engine.linker.reset()
    engine.compute(keys(3, "other"), 1)
    computed.set()
    engine.wait()
    assert engine.linker.num_completed_offloads() == 0
    assert engine.lengths(path) == []


def test_a_reset_waits_for_the_page_that_is_being_read(start, monkeypatch):
    engine, path, reading, go = start(disk=None), keys(3), threading.Event(), threading.Event()
    pool = type(engine.pools["kv"])
    gather = pool.gather

    def slow(self, indices, target):
        reading.set()
        go.wait(10)
        gather(self, indices, target)

    monkeypatch.setattr(pool, "gather", slow)
    assert engine.linker.offload(engine.transfers(path, 1))
    assert reading.wait(10)
    ended = threading.Event()

    def reset():
        engine.linker.reset()
        ended.set()

    thread = threading.Thread(target=reset)
    thread.start()
    assert not ended.wait(0.05)
    go.set()
    thread.join(10)
    assert ended.is_set()
    engine.wait()


def test_a_cancelled_load_gives_its_slots_back(start):
    engine, path = start(disk=None), keys(4)
    assert engine.save(path)
    assert engine.queue(path, 30)
    assert engine.linker.tiers.slots["kv"]._in_host.num_pinned == 4
    assert engine.linker.cancel_queued_load("r")
    assert not engine.linker.cancel_queued_load("r")
    assert engine.linker.tiers.slots["kv"]._in_host.num_pinned == 0
    assert engine.linker.start_layer_wise_loading() == -1


def test_slots_that_a_load_needs_are_not_given_away(start):
    engine, path = start(disk=None, host="192KiB"), keys(4)
    assert engine.save(path)
    most = engine.linker.tiers.slots["kv"].num_slots[0]
    assert engine.queue(path, 30)
    for at in range(most):  # more than host memory has room for
        engine.save(keys(2, f"other {at}"), first=10)
    engine.linker.start_layer_wise_loading()
    for name, pool in engine.pools.items():
        number = 29 + len(path) if name != "mamba" else 30
        rows = slice(number * pool.rows, (number + 1) * pool.rows)
        assert (pool.tensors[0][rows] == model.content(path[-1], 0)).all()


@pytest.mark.parametrize("name", MEANING)
def test_another_setting_of_the_model_finds_an_empty_disk(tmp_path, name):
    content = [content_of(model.arguments(tmp_path, **changed), [], "0") for changed in ({}, {}, {name: "other"})]
    assert content[0] == content[1] != content[2]


def test_a_slot_that_is_forgotten_while_it_is_read_is_given_away_when_that_ends():
    directory = Directory(2)
    for key, slot in zip((b"a", b"b"), directory.take(2) or (), strict=True):
        directory.end(key, slot, True)
    pinned = directory.pin(b"a")
    assert pinned is not None
    directory.drop(b"a")
    assert directory.take(2) is None
    assert b"a" not in directory
    directory.unpin(pinned)
    assert directory.take(2) == [0, 1]


def test_a_path_longer_than_host_memory_goes_to_the_disk_in_parts(start):
    engine, path = start(host="192KiB"), keys(40)
    most = engine.linker.tiers.slots["kv"].num_slots[0]
    assert most < 40
    assert engine.save(path)
    assert len(engine.linker.tiers.slots["kv"]._on_disk) == 40
    assert engine.lengths(path) == []  # its end cannot be staged as a whole


def test_a_disk_that_hangs_costs_a_load_its_time_limit(start, monkeypatch):
    engine, path, go = start(), keys(4), threading.Event()
    assert engine.save(path)
    engine.linker.close()
    engine = start(load_timeout="50ms")
    read = os.preadv

    def hang(*arguments):
        go.wait(10)
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", hang)
    assert not engine.load(path)
    go.set()
    monkeypatch.undo()
    assert engine.load(path)  # what was read late is kept


def test_a_disk_that_fails_is_left_alone(start, monkeypatch):
    engine, path = start(), keys(4)
    assert engine.save(path)
    engine.linker.close()
    engine = start()

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    assert not engine.load(path)
    assert engine.lengths(path) == []
    assert engine.counts("kv", "disk").refused == 0
    assert engine.counts("kv", "disk").failed == 3


@pytest.mark.parametrize("update", ["update_weights_from_disk", "update_weights_from_tensor", "begin_weight_update"])
def test_new_weights_find_no_page_of_old_ones(start, tmp_path, update):
    engine, path = start(), keys(4)
    assert engine.save(path)
    getattr(model.SchedulerWeightUpdaterManager(), update)(None)
    engine.linker.reset()
    assert engine.lengths(path) == []
    assert not engine.linker.offload(engine.transfers(path, 1))
    assert not engine.queue(path, 30)
    engine.linker.close()
    assert list((tmp_path / "disk").iterdir()) == []
    assert start().lengths(path) == []


def test_saves_above_the_limit_are_refused(start):
    engine, computed = start(disk=None), threading.Event()
    parts = engine.linker._parts(engine.transfers(keys(1), 1))
    taken = [engine.linker.tiers.save(parts, lambda: computed.wait(10)) for _ in range(80)]
    assert 64 <= sum(taken) <= 65
    computed.set()
    engine.wait()
    assert engine.linker.num_completed_offloads() == sum(taken)


def test_indices_that_are_no_pages_are_refused(start):
    engine = start(disk=None)
    transfer = model.PoolTransfer(model.PoolName.KV, torch.arange(3), keys(1))
    with pytest.raises(InvalidArgument, match="3 entries for 1 pages"):
        engine.linker.offload([transfer])
    transfer.device_indices = torch.arange(254, 258)
    with pytest.raises(InvalidArgument, match="entries"):
        engine.linker.offload([transfer])


def test_what_an_ended_engine_left_can_be_erased(start, tmp_path):
    engine = start()
    assert engine.save(keys(2))
    assert {is_erased for _, is_erased in erase_left(tmp_path / "disk")} == {False}
    engine.linker.close()
    assert {is_erased for _, is_erased in erase_left(tmp_path / "disk")} == {True}
    assert list((tmp_path / "disk").iterdir()) == []


def test_two_engines_do_not_share_files(start):
    start()
    with pytest.raises(WorkerExists, match="give each engine a folder of its own"):
        start()
