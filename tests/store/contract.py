"""The contract of every store. A test module derives a class and has a fixture `store`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from kvplane_service.config import Config
from kvplane_service.store.errors import LogSuperseded
from kvplane_service.store.interface import BlockingStore, IndexStore, LogName, StoredChunk
from kvplane_service.store.loading import LoadedLog
from kvplane_service.store.opening import make_store
from tests.store.servers import wait_until

LOG = LogName("replica/0", b"n" * 16, 0xABCDEF)
OTHER_LOGS = (
    LogName("replica/1", LOG.namespace, LOG.incarnation),
    LogName(LOG.replica, b"m" * 16, LOG.incarnation),
    LogName(LOG.replica, LOG.namespace, LOG.incarnation + 1),
)


def chunk(seq: int, size: int = 100) -> StoredChunk:
    return StoredChunk(seq, bytes([seq % 251]) * size)


T = TypeVar("T")
_LOOP = asyncio.new_event_loop()  # connections belong to the loop on which they were made


def run(work: Coroutine[Any, Any, T]) -> T:
    return _LOOP.run_until_complete(work)


class Blocking:
    """Implements BlockingSharedStore with an awaited store, on an event loop of its own."""

    def __init__(self, store: IndexStore) -> None:
        self.store = store
        run(store.open())

    def load(self, log: LogName) -> list[StoredChunk]:
        async def load() -> list[StoredChunk]:
            return [chunk async for page in self.store.load(log) for chunk in page]

        return run(load())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self.store, name)
        return lambda *given: run(call(*given))


def opened(config: Config) -> Any:
    store = make_store(config)
    assert store is not None
    return Blocking(store)


def load_log(store: BlockingStore, log: LogName) -> LoadedLog:
    """The log of this name, loaded."""
    loaded = LoadedLog()
    loaded.add_all(log, store.load(log))
    return loaded


class StoreContract:
    def test_appended_chunks_are_loaded_in_order(self, store):
        chunks = [chunk(seq) for seq in (1, 2, 5, 300)]
        assert [store.append(LOG, one, 0) for one in chunks] == [1, 2, 3, 4]
        assert list(store.load(LOG)) == chunks

    def test_a_log_longer_than_one_page_is_loaded(self, store):
        chunks = [chunk(seq) for seq in range(1, 200)]
        for one in chunks:
            store.append(LOG, one, 0)
        assert list(store.load(LOG)) == chunks

    def test_a_repeated_append_adds_nothing(self, store):
        store.append(LOG, chunk(1), 0)
        store.append(LOG, chunk(2), 0)
        assert store.append(LOG, chunk(2), 0) == 2
        assert list(store.load(LOG)) == [chunk(1), chunk(2)]

    def test_an_append_below_a_higher_number_is_superseded_and_trims_nothing(self, store):
        for seq in (1, 2, 5):
            store.append(LOG, chunk(seq), 0)
        for seq in (1, 2, 4):
            with pytest.raises(LogSuperseded) as caught:
                store.append(LOG, chunk(seq), seq)
            assert caught.value.number > seq
        assert list(store.load(LOG)) == [chunk(1), chunk(2), chunk(5)]

    def test_an_append_below_a_trimmed_number_is_superseded_while_the_log_has_a_higher_one(self, store):
        for seq in range(1, 6):
            store.append(LOG, chunk(seq), seq)
        with pytest.raises(LogSuperseded):
            store.append(LOG, chunk(3), 3)
        assert list(store.load(LOG)) == [chunk(5)]

    def test_an_append_can_trim(self, store):
        for seq in range(1, 6):
            store.append(LOG, chunk(seq), 0)
        assert store.append(LOG, chunk(6), 4) == 3
        assert list(store.load(LOG)) == [chunk(4), chunk(5), chunk(6)]
        assert store.append(LOG, chunk(7), 7) == 1

    def test_a_lost_chunk_changes_the_count(self, store):
        store.append(LOG, chunk(1), 0)
        store.drop(LOG)
        assert store.append(LOG, chunk(2), 0) == 1

    def test_logs_are_separate_by_replica_namespace_and_incarnation(self, store):
        store.append(LOG, chunk(1), 0)
        for other in OTHER_LOGS:
            assert list(store.load(other)) == []
            store.append(other, chunk(9), 0)
        store.drop(OTHER_LOGS[0])
        assert [list(store.load(log)) for log in (LOG, *OTHER_LOGS)] == [[chunk(1)], [], [chunk(9)], [chunk(9)]]

    def test_a_missing_log_is_empty(self, store):
        assert list(store.load(LOG)) == []
        assert store.size_bytes(LOG) == 0
        store.drop(LOG)
        store.keep_alive(LOG)

    def test_size_follows_the_content(self, store):
        store.append(LOG, chunk(1, 10_000), 0)
        before = store.size_bytes(LOG)
        assert 10_000 <= before < 30_000
        store.append(LOG, chunk(2, 10_000), 0)
        assert store.size_bytes(LOG) > before
        store.append(LOG, chunk(3, 10_000), 3)
        assert store.size_bytes(LOG) < 30_000

    def test_a_large_chunk_is_stored_whole(self, store):
        large = chunk(1, 4 << 20)
        store.append(LOG, large, 0)
        assert list(store.load(LOG)) == [large]

    def test_a_record_replaces_the_previous_one(self, store):
        assert store.get_record("b") is None
        store.put_record("b", b"first")
        store.put_record("b", b"second")
        store.put_record("a/1", b"\x00\xff")
        assert store.get_record("b") == b"second"
        assert list(store.records()) == [("a/1", b"\x00\xff"), ("b", b"second")]

    def test_a_dropped_record_is_not_listed(self, store):
        store.put_record("a", b"one")
        store.put_record("b", b"two")
        store.drop_record("a")
        store.drop_record("unknown")
        assert list(store.records()) == [("b", b"two")]

    def test_close_is_idempotent(self, store):
        store.close()
        store.close()


class SharedContract:
    """The further contract of a store that several services can use."""

    def test_a_service_is_announced_until_its_lease_ends(self, store):
        assert store.lease("a:1") is None
        store.announce("a:1", 3_600_000, b"first")
        store.announce("unix:/b", 1)
        assert store.lease("a:1") is not None
        wait_until(lambda: store.lease("unix:/b") is None, "a lease of a millisecond ends")
        assert store.lease("a:1") is not None
        assert list(store.records()) == []

    def test_a_renewed_lease_does_not_end(self, store):
        store.announce("a:1", 1)
        store.announce("a:1", 3_600_000, b"again")
        assert store.lease("a:1") == b"again"
