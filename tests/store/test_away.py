"""Redis is unavailable for an hour: allocation continues, pending changes are bounded, and the store catches up.

The server, its driver and the writer are the real ones; the clock is passed, and pauses take no time.
"""

from __future__ import annotations

import pytest

from kvplane_service.config import Config
from kvplane_service.runtime.reports import StoreReport, StoreState
from kvplane_service.store.journal import Lag
from kvplane_service.store.writer import Runtime, StoreWriter, Watch
from tests.core.builders import full
from tests.core.compared import specification
from tests.store import servers
from tests.store.contract import opened, run
from tests.store.test_journal import Journaled
from tests.store.test_writer import idle

HOUR_NS = 3600 * 10**9
NS_PER_MS = 10**6
REQUEST = "x" * 600  # 150 blocks
BLOCKS = 140_000  # more than may be pending


class Over(Exception):
    """The time of the test is over."""


async def unexpected(number):
    """No other process writes the log."""
    raise AssertionError(f"chunk {number} is another process's")


class Hours:
    """An engine that serves a request at every pause of the writer, with the observed states of the store.

    Attributes:
        reports, lags: at each pause.
    """

    def __init__(self, server: servers.Server) -> None:
        config = Config(store=f"redis://{server.address}")
        self.engine = Journaled(full(), num_blocks=BLOCKS, max_model_len=1024, max_entries=config.store_lag_entries)
        self.engine.store = self.store = opened(config)
        runtime = Runtime(lambda: self.engine.now_ns, self.pause, self.offload, lambda: 0.0)
        self.writer = StoreWriter(self.store.store, config, runtime)
        self.writer.watch("r", Watch(self.engine.journal, lambda: b"record", idle, unexpected))
        self.reports: list[StoreReport] = []
        self.lags: list[Lag] = []
        self.served = 0
        self.until_ns = 0

    async def offload(self, call):
        return call()

    async def pause(self, seconds):
        self.reports.append(self.writer.report("r"))
        self.lags.append(self.engine.journal.lag)
        if self.engine.now_ns >= self.until_ns:
            raise Over
        self.engine.now_ns += int(seconds * 1e9)
        self.serve()

    def serve(self):
        """A new prompt; raises if it is not granted."""
        self.engine.serve(0, f"{self.served:06d}{REQUEST}")
        self.engine.idle()
        self.served += 1

    def go_on(self, duration_ns):
        self.until_ns = self.engine.now_ns + duration_ns
        self.reports, self.lags = [], []
        with pytest.raises(Over):
            run(self.writer.run())


def test_an_hour_without_redis_loses_no_change(tmp_path):
    with servers.serving(tmp_path) as server, specification():  # comparing images of this size takes most of the time
        hours = Hours(server)
        hours.go_on(10**9)
        assert hours.reports[-1].state is StoreState.OK
        server.kill()
        began_ns, before = hours.engine.now_ns, hours.served

        hours.go_on(HOUR_NS)
        assert hours.engine.now_ns - began_ns >= HOUR_NS
        assert hours.served - before > 700, "allocation continued throughout"
        assert max(lag.entries for lag in hours.lags) <= 100_000
        assert hours.lags[-1].shed, "changes were shed at the bound"
        assert hours.engine.journal.written.shed_entries > 0
        assert {report.state for report in hours.reports[2:]} == {StoreState.DEGRADED}
        assert "Connection" in hours.reports[-1].problem
        late = [report for report, lag in zip(hours.reports, hours.lags, strict=True) if not lag.shed]
        assert max(report.lag_ms for report in late) > 5000, "the lag is reported beyond the bound too"
        assert hours.reports[-1].failures < 800, "retries are rare"

        server.start()
        hours.go_on(60 * 10**9)
        assert hours.reports[-1].state is StoreState.OK
        assert (hours.reports[-1].problem, hours.lags[-1].entries, hours.lags[-1].shed) == ("", 0, False)
        assert hours.engine.journal.written.resyncs == 1
        keyed = hours.engine.keyed()
        assert len(keyed) > 100_000
        hours.engine.restart()
        assert hours.engine.keyed() == keyed
