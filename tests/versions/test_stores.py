"""A service on a store of an earlier version knows its replicas, and recovers all the keys that their memory proves."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvplane.base.session import OpenRequest
from kvplane_core.face.inspect import check
from kvplane_service.store.interface import LogName
from kvplane_service.store.memory import MemoryStore
from kvplane_service.store.sqlite import SqliteStore
from tests.core.specification import specification_of
from tests.store.test_restart import Life
from tests.versions.kept import COMMITS, HERE, KEY
from tests.versions.served import registration_of
from tests.versions.write import SERVED, keys_of

NONCES = itertools.count(1)


def memory_store(content: dict[str, Any]) -> MemoryStore:
    """A store with what `content_of` returned."""
    store = MemoryStore()
    store.records_by_name = {name: bytes.fromhex(raw) for name, raw in content["records"].items()}
    for replica, namespace, incarnation, chunks in content["logs"]:
        name = LogName(replica, bytes.fromhex(namespace), incarnation)
        store.logs[name] = {seq: bytes.fromhex(raw) for seq, raw in chunks}
    return store


def life_on(commit: str, form: str, folder: Path) -> Life:
    """A service on the store of a commit."""
    config = {}
    if form == "sqlite":
        shutil.copy(HERE / commit / "store.db", folder / "store.db")
        return Life(SqliteStore(folder / "store.db"))
    if form == "sealed":
        key = folder / "key"
        key.touch(0o600)
        key.write_text(base64.b64encode(KEY).decode())
        config["store_key_file"] = str(key)
    name = "sealed.json" if form == "sealed" else "store.json"
    return Life(memory_store(json.loads((HERE / commit / name).read_text())), **config)


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("form", ["sqlite", "records", "sealed"])
def test_a_store_of_an_earlier_version_gives_back_all_keys(commit, form, tmp_path):
    life = life_on(commit, form, tmp_path)
    memories = json.loads((HERE / commit / "memory.json").read_text())
    assert {entry.host.name for entry in life.registry} == set(memories) == set(SERVED)
    for name, memory in memories.items():
        host = life.registry.get(name).host
        request = OpenRequest(
            name, next(NONCES), stamp_table=tuple(memory["stamps"]), incarnation=memory["incarnation"]
        )
        opened = host.open(request)
        check(host.replica)
        assert keys_of(specification_of(host.replica).coordinator) == memory["keys"]
        assert opened.kept_keys > 0


@pytest.mark.parametrize("commit", COMMITS)
def test_a_registration_of_an_earlier_version_can_be_repeated(commit, tmp_path):
    life = life_on(commit, "records", tmp_path)
    for name, spec in SERVED.items():
        before = life.registry.get(name)
        assert life.registry.register(name, registration_of(spec)) is before
    asyncio.run(life.keeper.stop())
