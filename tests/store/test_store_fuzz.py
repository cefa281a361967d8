"""Whatever a store holds, a service starts with it, serves, stores again, keeps what is undamaged, and causes no wrong
hit.

    python -m tests.store.test_store_fuzz SEED CASES     more cases; a failure names its seed
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvplane.base.session import OpenRequest
from kvplane.blocking.session import Session
from kvplane.sansio.retry import RetryPolicy
from kvplane_core.face.inspect import check, take_snapshot
from kvplane_service.config import Config
from kvplane_service.registry import Registration, UnknownReplica
from kvplane_service.store.errors import RecordRefused, StoreDamaged, StoreForeign, StoreNewer
from kvplane_service.store.interface import IndexStore, LogName, StoredChunk
from kvplane_service.store.keeper import Entropy
from kvplane_service.store.offloaded import Offloaded
from kvplane_service.store.opening import make_store
from kvplane_service.store.record import unpack_chunk
from kvplane_service.store.registration import unpack_record
from kvplane_service.store.seals import Seals, guarded
from kvplane_service.store.sqlite import SqliteStore
from tests.client.lasting import HYBRID, PageMemory
from tests.service.inprocess import InProcessTransport
from tests.store import servers
from tests.store.contract import run
from tests.store.damages import damage_key, damaged_bytes, forge_key, forge_row
from tests.store.test_ownership import Net, Service
from tests.store.test_restart import NONCES, inline, serve

INCARNATION = 77
PROMPTS = [list(range(start, start + 100)) for start in (0, 5000, 9000)]
HIT = 96
KEY = b"k" * 32

Keys = set[tuple[str, int, bytes, int]]
MOST_FLUSHES = 3


@dataclass
class Engine:
    """An engine on one page memory, which outlives the services."""

    memory: PageMemory
    now_ms: int = 1_000_000

    def copy(self) -> Engine:
        memory = PageMemory(HYBRID.num_blocks)
        memory.stamps = list(self.memory.stamps)
        return Engine(memory, self.now_ms)

    async def service(self, store: IndexStore) -> Service:
        """A service that has read the store."""
        net = Net()
        self.now_ms += 1_000
        service = Service(net, Config(listen="a:1", store="redis://unused"))
        draws = itertools.count(self.now_ms)
        service.keeper._entropy = Entropy(lambda: self.now_ms, lambda: next(draws))
        await service.keeper.start(store)
        await service.keeper.load()
        await asyncio.gather(*service.keeper._loads.tasks)
        await service.ownership.beat()
        return service

    async def session(self, service: Service) -> Session:
        if "r" not in service.registry:  # as the call RegisterReplica
            with contextlib.suppress(UnknownReplica):
                await service.adopt()
            await service.ownership.resume("r", Registration(HYBRID))
            await service.register()
            await asyncio.gather(*service.keeper._loads.tasks)  # an engine tries again until its keys are read
        host = service.registry.get("r").host
        request = OpenRequest("r", next(NONCES), stamp_table=tuple(self.memory.stamps), incarnation=INCARNATION)
        return Session(
            InProcessTransport(lambda _: host), request, retry=RetryPolicy(1), nonces=NONCES.__next__, heartbeats=False
        )


async def flush(service: Service) -> int:
    """Write all changes; returns how often that failed."""
    for failures in range(MOST_FLUSHES):
        if await service.writer.write_all():
            return failures
    raise AssertionError(f"{MOST_FLUSHES} flushes failed: {service.keeper.report(service.registry.get('r')).problem}")


def keys_of(service: Service) -> Keys:
    replica = service.registry.get("r").host.replica
    check(replica)
    return {(*one.key, one.block) for one in take_snapshot(replica).keys}


async def filled(store: IndexStore) -> tuple[Engine, Keys]:
    """Fill a store; returns the engine and its published keys with their pages."""
    engine = Engine(PageMemory(HYBRID.num_blocks))
    service = await engine.service(store)
    session = await engine.session(service)
    for tokens in PROMPTS:
        serve(session, engine.memory, tokens=tokens)
        await flush(service)
    await store.close()
    return engine, keys_of(service)


async def outcome(
    open_store: Callable[[], IndexStore], before: Engine, true: Keys, may_be_wrong: bool, expected: Keys | None = None
) -> str:
    """Start a service on the damaged store, let it serve and store, and restart it; returns what was kept. `expected`
    are keys that it must have kept.
    """
    engine = before.copy()
    store = open_store()
    try:
        service = await engine.service(store)
        session = await engine.session(service)
        found = keys_of(service)
        assert found <= true or may_be_wrong, f"wrong hits: {found - true}"
        assert found >= (expected or set()), f"{len((expected or set()) - found)} undamaged keys are lost"
        for tokens in PROMPTS:
            serve(session, engine.memory, tokens=tokens)
        failures = await flush(service)
    finally:
        await store.close()
    store = open_store()
    try:
        again = await engine.service(store)
        session = await engine.session(again)
        assert serve(session, engine.memory, tokens=PROMPTS[-1]) == HIT, "what the service stored is not used"
    finally:
        await store.close()
    kept = "all kept" if found >= true else "some kept" if found & true else "none kept"
    return kept + (f", {failures} failed flushes" if failures else "")


# -- SQLite


COLUMNS = {"record": "replica, raw", "log": "name", "chunk": "log, seq, raw"}


def rows_of(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of a sound file: of each table, rowid and content in order."""
    with closing(sqlite3.connect(path)) as file:
        return {
            table: file.execute(f"SELECT rowid, {columns} FROM {table} ORDER BY rowid").fetchall()
            for table, columns in COLUMNS.items()
        }


def undamaged(path: Path, rows: dict[str, list[tuple[Any, ...]]]) -> dict[str, set[tuple[Any, ...]]]:
    """Those rows that are read as before, looked up one by one, and are before or behind all damaged ones."""
    with closing(sqlite3.connect(path)) as file:
        file.text_factory = lambda raw: raw.decode(errors="replace")

        def is_there(table: str, row: tuple[Any, ...]) -> bool:
            with suppress(sqlite3.Error, UnicodeDecodeError):
                query = f"SELECT rowid, {COLUMNS[table]} FROM {table} WHERE rowid = ?"
                return file.execute(query, row[:1]).fetchone() == row
            return False

        found = {}
        for table, all_rows in rows.items():
            sound = [is_there(table, row) for row in all_rows]
            last = len(sound) - sound[::-1].index(False) if False in sound else 0
            first = sound.index(False) if False in sound else len(sound)
            found[table] = {row for at, row in enumerate(all_rows) if at < first or at >= last}
    return found


def key_file(folder: Path, key: bytes) -> Path | None:
    """A file with the key, None for no key."""
    if not key:
        return None
    (folder / "keys").write_bytes(key)
    (folder / "keys").chmod(0o600)
    return folder / "keys"


class SqliteCases:
    """Damaged copies of one file."""

    def __init__(self, folder: Path, key: bytes = b"") -> None:
        self.path = folder / "entries.db"
        self.key_file = str(key_file(folder, key) or "")
        self.engine, self.true = run(filled(self.open()))
        self.raw = self.path.read_bytes()
        self.rows = rows_of(self.path)

    def open(self) -> IndexStore:
        return guarded(Offloaded(lambda: SqliteStore(self.path), inline), self.key_file, inline)

    def run_damaged(self, rng: random.Random) -> str:
        return self._run(damaged_bytes(self.raw, rng), lambda: None, False)

    def run_forged(self, rng: random.Random, seals: Seals | None = None) -> str:
        """Forge a row; who seals it by the key, or needs no seal, can cause wrong hits."""
        forge = partial(forge_row, self.path, rng, seals)
        return self._run(self.raw, forge, may_be_wrong=seals is not None or not self.key_file)

    def _run(self, raw: bytes, forge: Callable[[], None], may_be_wrong: bool) -> str:
        for path in self.path.parent.glob("entries.db*"):
            path.unlink()
        self.path.write_bytes(raw)
        forge()
        expected = undamaged(self.path, self.rows)
        try:
            SqliteStore(self.path).close()
        except StoreNewer:
            return "refused as newer"
        kept, logs = rows_of(self.path), {row[0] for row in expected["log"]}
        for table, rows in expected.items():
            wanted = {row[1:] for row in rows if table != "chunk" or row[1] in logs}
            lost = wanted - {row[1:] for row in kept[table]}
            assert not lost, f"{len(lost)} undamaged rows of {table} are lost"
        return run(outcome(self.open, self.engine, self.true, may_be_wrong))


def outcomes(case: Callable[[random.Random], str], seed: int, count: int) -> Counter[str]:
    """Run cases with these seeds; an error names its seed."""
    found = Counter[str]()
    for number in range(seed, seed + count):
        try:
            found[case(random.Random(number))] += 1
        except Exception as error:
            error.add_note(f"seed {number}")
            raise
    return found


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


NUM_DAMAGED, NUM_FORGED, NUM_IN_REDIS = 600, 240, 300
FORGERS = {"trusted": (b"", None), "sealed": (KEY, None), "with the key": (KEY, Seals([KEY]))}


@pytest.mark.parametrize("key", [b"", KEY], ids=["trusted", "sealed"])
def test_a_damaged_file_ends_no_service(key, tmp_path):
    cases = SqliteCases(tmp_path, key)
    check_damaged(cases, 1, NUM_DAMAGED // 4)
    outcomes(cases.run_damaged, 50_020, 1)  # a row behind a damaged one on a page is found by its number only


@pytest.mark.parametrize("key", [b"", KEY], ids=["trusted", "sealed"])
def test_further_damaged_files_end_no_service(key, tmp_path):
    check_damaged(SqliteCases(tmp_path, key), 1 + NUM_DAMAGED // 4, NUM_DAMAGED)


def check_damaged(cases, seed, count):
    found = outcomes(cases.run_damaged, seed, count)
    assert found["all kept"] > count // 5
    assert found["some kept"] > 0
    assert found["refused as newer"] <= count // 50


@pytest.mark.parametrize(("key", "seals"), FORGERS.values(), ids=FORGERS)
def test_a_forged_row_ends_no_service(key, seals, tmp_path):
    cases = SqliteCases(tmp_path, key)
    found = outcomes(lambda rng: cases.run_forged(rng, seals), 1, NUM_FORGED // len(FORGERS))
    assert found["none kept"] > 0
    assert found["some kept"] + found["all kept"] > 0


# -- Redis


class RedisCases:
    """A server whose keys are restored before each case."""

    def __init__(self, server: servers.Server, key_file: Path | None = None) -> None:
        self.client: Any = server.client()
        self.config = Config(store=f"redis://{server.address}", store_key_file=str(key_file or ""))
        self.client.flushall()
        self.engine, self.true = run(filled(self.open()))
        self.keys = {key: self.client.dump(key) for key in self.client.scan_iter(count=1000)}
        assert len(self.keys) == 5
        self.records, self.log, self.chunks = run(self._read(self.open()))
        self.last = {block: seq for seq, raw in sorted(self.chunks.items()) for block in self._blocks(seq, raw)}
        assert {key[-1] for key in self.true} <= self.last.keys()

    def open(self, read_only: bool = False) -> IndexStore:
        store = make_store(self.config, read_only)
        assert store is not None
        return store

    async def _read(self, store: IndexStore) -> tuple[dict[str, bytes], LogName, dict[int, bytes]]:
        """The records, and the chunks of the log that the record of "r" names; proven ones, if there is a key."""
        await store.open()
        try:
            records = dict(await store.records())
            log = unpack_record(records["r"]).log
            return records, log, await self._chunks(store, log)
        finally:
            await store.close()

    async def _chunks(self, store: IndexStore, log: LogName) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        with suppress(StoreDamaged, StoreForeign):
            async for page in store.load(log):
                found |= dict(page)
        return found

    def _blocks(self, seq: int, raw: bytes) -> set[int]:
        """The blocks of which a chunk states something; none if it is refused."""
        try:
            entries = unpack_chunk(self.log, StoredChunk(seq, raw))
        except RecordRefused:
            return set()
        return {*entries.block, *entries.unkeyed_block, *entries.used_block}

    async def _expected(self) -> Keys | None:
        """The keys that no damage concerns: the last chunk of their block is as before. None if the record is not."""
        store = self.open(read_only=True)  # repairs nothing
        try:
            await store.open()
            if dict(await store.records()).get("r") != self.records["r"]:
                return None
            chunks = await self._chunks(store, self.log)
        except (StoreDamaged, StoreForeign):
            return None
        finally:
            await store.close()
        changed = {seq: raw for seq, raw in chunks.items() if self.chunks.get(seq) != raw}
        lost = {seq for seq, raw in self.chunks.items() if chunks.get(seq) != raw}
        stated = {block for seq, raw in changed.items() for block in self._blocks(seq, raw)}
        return {key for key in self.true if self.last[key[-1]] not in lost and key[-1] not in stated}

    def run_damaged(self, rng: random.Random) -> str:
        """Damage a key; who needs no seal can cause wrong hits."""
        return self._run(lambda: damage_key(self.client, rng), may_be_wrong=not self.config.store_key_file)

    def run_forged(self, rng: random.Random, seals: Seals | None = None) -> str:
        """Forge a value; who seals it by the key can cause wrong hits."""
        return self._run(lambda: forge_key(self.client, rng, seals), may_be_wrong=seals is not None)

    def _run(self, damage: Callable[[], object], may_be_wrong: bool) -> str:
        pipe = self.client.pipeline()
        pipe.flushall()
        for key, raw in self.keys.items():
            pipe.restore(key, 0, raw)
        pipe.execute()
        damage()
        try:
            expected = run(self._expected())
            return run(outcome(self.open, self.engine, self.true, may_be_wrong, expected))
        except StoreNewer:
            return "refused as newer"


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    with servers.serving(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.mark.parametrize("key", [b"", KEY], ids=["trusted", "sealed"])
def test_a_damaged_value_in_redis_ends_no_service(key, redis_server, tmp_path):
    cases = RedisCases(redis_server, key_file(tmp_path, key))
    found = outcomes(cases.run_damaged, 1, NUM_IN_REDIS)
    assert found["all kept"] > NUM_IN_REDIS // 10
    assert found["refused as newer"] <= NUM_IN_REDIS // 50
    assert found["none kept"] > 0


@pytest.mark.parametrize("seals", [None, Seals([KEY])], ids=["without the key", "with the key"])
def test_a_forged_value_in_redis_ends_no_service(seals, redis_server, tmp_path):
    """Also one with a seal of its place, as of another service with the key."""
    cases = RedisCases(redis_server, key_file(tmp_path, KEY))
    found = outcomes(lambda rng: cases.run_forged(rng, seals), 1, NUM_IN_REDIS)
    assert found["all kept"] > NUM_IN_REDIS // 10
    assert found["some kept"] > NUM_IN_REDIS // 10
    assert found["none kept"] > 0


def main(seed: int, count: int) -> None:
    """Run more cases of each kind, and print the outcomes with the CPU time of a case."""
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        kinds: dict[str, Callable[[random.Random], str]] = {}
        for name, key in (("trusted", b""), ("sealed", KEY)):
            (Path(folder) / name).mkdir()
            cases = SqliteCases(Path(folder) / name, key)
            kinds |= {
                f"damaged file, {name}": cases.run_damaged,
                f"forged row, {name}": cases.run_forged,
            }
        kinds["forged row, sealed with the key"] = partial(cases.run_forged, seals=Seals([KEY]))
        with servers.serving(Path(folder) / "redis") as server:
            trusted, sealed = RedisCases(server), RedisCases(server, key_file(Path(folder), KEY))
            kinds |= {
                "damaged value in Redis, trusted": trusted.run_damaged,
                "damaged value in Redis, sealed": sealed.run_damaged,
                "forged value in Redis, sealed": sealed.run_forged,
                "forged value in Redis, sealed with the key": partial(sealed.run_forged, seals=Seals([KEY])),
            }
            for name, case in kinds.items():
                began = time.process_time()
                found = outcomes(case, seed, count)
                took_ms = 1000 * (time.process_time() - began) / count
                print(f"{name}: {dict(found.most_common())}, {took_ms:.1f} ms of CPU each")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
