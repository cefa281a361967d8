"""The background writer: it never blocks allocation, reports its lag, and catches up without help."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvplane_service.config import Config
from kvplane_service.runtime.reports import StoreState
from kvplane_service.store.errors import StoreFull, StoreUnavailable
from kvplane_service.store.interface import LogName
from kvplane_service.store.memory import MemoryStore
from kvplane_service.store.offloaded import Offloaded
from kvplane_service.store.writer import Runtime, StoreWriter, Watch
from tests.core.builders import full
from tests.store import servers
from tests.store.contract import Blocking, load_log, opened, run
from tests.store.test_journal import LOG, Journaled


class Away(MemoryStore):
    """A store that can be unavailable, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.error: Exception | None = None
        self.asked = 0
        self.on_put: Callable[[], object] = lambda: None

    def append(self, log, chunk, trim_below):
        self.asked += 1
        if self.error:
            raise self.error
        return super().append(log, chunk, trim_below)

    def put_record(self, replica, record):
        self.asked += 1
        if self.error:
            raise self.error
        super().put_record(replica, record)
        self.on_put()


async def idle():
    """Returns at once: no step is being applied."""


class Bench:
    """A writer of one journaled engine; pauses take no time and are recorded."""

    def __init__(self, store, **changes):
        self.engine = Journaled(full(), **changes)
        self.pauses: list[float] = []
        self.superseded: list[int] = []
        self.journal = self.engine.journal
        runtime = Runtime(lambda: self.engine.now_ns, self._sleep, self._offload, lambda: 0.0)
        self.store = store
        awaited = store.store if isinstance(store, Blocking) else Offloaded(lambda: store, self._offload)
        run(awaited.open())
        limits = Config(store_flush_ms=100, store_lag_entries=100, store_lag_ms=5000, store_ttl_ms=4000)
        self.writer = StoreWriter(awaited, limits, runtime)
        self.watch = Watch(self.journal, lambda: b"record", idle, self._superseded)
        self.writer.watch("r", self.watch)

    async def _superseded(self, number):
        self.superseded.append(number)
        return False

    async def _sleep(self, seconds):
        self.pauses.append(seconds)
        if len(self.pauses) > 12:
            raise asyncio.CancelledError

    async def _offload(self, call):
        return call()

    def write(self) -> bool:
        return run(self.writer.write_all())

    def serve(self, text):
        self.engine.serve(0, text)
        self.engine.idle()

    @property
    def report(self):
        return self.writer.report("r")


def test_pending_changes_are_written_and_reported():
    bench = Bench(MemoryStore())
    bench.serve("aaaab")
    assert (bench.report.state, bench.report.lag_entries) == (StoreState.OK, 2), "an entry and the record"
    assert bench.write()
    assert bench.report.lag_entries == 0
    assert bench.store.get_record("r") == b"record"
    assert bench.writer.report() == bench.report


def test_an_unavailable_store_is_degraded_and_allocation_continues():
    store = Away()
    bench = Bench(store)
    store.error = StoreUnavailable("no answer")
    for number in range(30):
        bench.serve(f"{number:04d}x")
        assert not bench.write()
    assert bench.report.state is StoreState.DEGRADED
    assert (bench.report.failures, bench.report.problem) == (30, "no answer")
    store.error = None
    assert bench.write()
    assert (bench.report.state, bench.report.problem) == (StoreState.OK, "")
    assert sum(map(len, load_log(store, LOG).entries())) == 30


def test_pauses_between_retries_grow_to_a_bound():
    store = Away()
    store.error = StoreFull("no room")
    bench = Bench(store)
    bench.serve("aaaab")
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(bench.writer.run())
    assert bench.pauses[:4] == [0.1, 0.05, 0.1, 0.2]
    assert bench.pauses[-1] == 5.0
    assert store.asked == 12


def test_a_long_lag_is_degraded_without_a_failure():
    bench = Bench(MemoryStore())
    bench.serve("aaaab")
    bench.engine.now_ns = 5_001_000_000
    assert (bench.report.state, bench.report.lag_ms) == (StoreState.DEGRADED, 5001)


def test_shed_changes_are_written_by_a_resync():
    store = Away()
    bench = Bench(store, max_entries=3)
    store.error = StoreUnavailable("no answer")
    for number in range(20):
        bench.serve(f"{number:04d}x")
        bench.write()
    assert bench.journal.lag.shed
    assert bench.report.state is StoreState.DEGRADED
    store.error = None
    assert bench.write()
    assert bench.journal.written.resyncs == 1
    bench.engine.store = store
    keyed = bench.engine.keyed()
    bench.engine.restart()
    assert bench.engine.keyed() == keyed


def test_a_record_whose_caller_is_cancelled_is_written_later():
    store = Away()
    bench = Bench(store)

    def cancel():
        store.on_put = lambda: None
        raise asyncio.CancelledError

    store.on_put = cancel
    with pytest.raises(asyncio.CancelledError):
        run(bench.writer.write_record("r"))
    store.records_by_name.clear()
    assert bench.write()
    assert "r" in store.records_by_name


def test_a_replica_given_up_while_its_record_is_written_gets_no_chunk():
    store = Away()
    bench = Bench(store)
    bench.serve("aaaabbbbc")
    store.on_put = lambda: bench.writer.leave("r")
    assert bench.write()
    assert not any(store.logs.values())


def test_the_core_is_not_read_while_a_step_is_applied():
    store, is_applied = Away(), []
    bench = Bench(store)
    bench.serve("aaaab")
    store.on_put = lambda: is_applied.append(True)  # a long step starts while the record is written
    take = bench.journal.take

    async def wait():
        is_applied.clear()

    def look():
        assert not is_applied
        return take()

    bench.watch.idle, bench.journal.take = wait, look
    assert bench.write()
    assert load_log(store, LOG).rows == 1


def test_records_are_renewed_before_they_expire():
    bench = Bench(MemoryStore())
    bench.write()
    bench.store.drop_record("r")
    bench.write()
    assert bench.store.get_record("r") is None, "not with every write"
    bench.engine.now_ns = 1_100_000_000
    bench.write()
    assert bench.store.get_record("r") == b"record"


def test_deletions_are_retried_after_an_unavailable_store():
    store = Away()
    bench = Bench(store)
    bench.serve("aaaab")
    bench.write()
    bench.writer.drop(LogName("r", b"n" * 16, 99))
    bench.writer.forget("r")
    assert bench.write()
    assert (store.logs, store.records_by_name) == ({}, {})


# -- real servers


def test_everything_is_written_after_an_outage_of_redis(tmp_path):
    with servers.serving(tmp_path) as server:
        store = opened(Config(store=f"redis://{server.address}"))
        bench = Bench(store)
        bench.serve("aaaab")
        assert bench.write()
        server.kill()
        for number in range(20):
            bench.serve(f"{number:04d}x")
            assert not bench.write()
        server.start()
        assert bench.write(), bench.report
        assert bench.journal.written.resyncs == 1, "it was empty after the restart, which was detected"
        bench.engine.store = store
        keyed = bench.engine.keyed()
        bench.engine.restart()
        assert (bench.engine.keyed(), len(keyed)) == (keyed, 21)


def test_a_failover_during_writes_loses_nothing(tmp_path):
    with servers.watched(tmp_path) as watched:
        store = opened(Config(store=f"redis+sentinel://{watched.sentinel.address}/main", store_timeout_ms=500))
        bench = Bench(store)
        for number in range(50):
            bench.serve(f"{number:04d}x")
            assert bench.write()
        bench.serve("half way")
        batch = bench.journal.take()
        assert batch is not None
        watched.fail_over()
        bench.serve("afterwards")
        servers.wait_until(bench.write, "the writer uses the new primary")
        bench.serve("one more")
        assert bench.write()
        bench.engine.store = store
        keyed = bench.engine.keyed()
        bench.engine.restart()
        assert bench.engine.keyed() == keyed
