"""Metrics over time: pages of a collector as series for Prometheus, and Prometheus itself."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from prometheus_client.registry import Collector

from kvplane.base.session import OpenRequest
from kvplane.blocking.session import Session
from kvplane_service.registry import Registration
from kvplane_service.store.memory import MemoryStore
from kvplane_service.telemetry.collector import ServiceCollector
from kvplane_tools.replay.engine import Engine
from kvplane_tools.replay.fleet import Fleet
from kvplane_tools.replay.plan import EngineConfig
from kvplane_tools.replay.workloads import ChatShape, chat_workload
from tests.service.inprocess import InProcessTransport
from tests.service.replaying import BUDGET, COST, SPECS
from tests.service.rig import until
from tests.store.servers import free_port
from tests.store.test_restart import Life

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "helm" / "kvplane" / "files"
INTERVAL_S = 15
START_S = 1_700_000_000
NUM_REQUESTS = 60

Series = Mapping[str, Sequence[float | None]]  # by name and labels as Prometheus writes them; None = absent


class Pages:
    """Pages of metrics, `INTERVAL_S` apart."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._pages: list[dict[str, float]] = []

    def __len__(self) -> int:
        return len(self._pages)

    def take(self) -> None:
        page = {}
        for family in self._collector.collect():
            for sample in family.samples:
                labels = ",".join(f"{name}={json.dumps(value)}" for name, value in sorted(sample.labels.items()))
                page[f"{sample.name}{{{labels}}}"] = sample.value
        self._pages.append(page)

    def series(self) -> Series:
        names = dict.fromkeys(name for page in self._pages for name in page)
        return {name: [page.get(name) for page in self._pages] for name in names}


def demo(pools: Mapping[str, int], num_pages: int = 60) -> Pages:
    """Chats and agents on replicas of these names of `SPECS`, with pools of this number of blocks, scraped
    periodically.

    What they publish is stored between two looks.
    """
    life = Life(MemoryStore())
    registry = life.registry
    pages = Pages(ServiceCollector(registry, life.keeper.report))
    shape = ChatShape(max_model_len=1024, num_sessions=30, sessions_per_s=5.0)
    trace = [request for request, _ in zip(chat_workload(Random(1), shape), range(NUM_REQUESTS), strict=False)]
    fleets = []
    for name, blocks in pools.items():
        registry.register(name, Registration(replace(SPECS[name], num_blocks=blocks)))
        transport = InProcessTransport(lambda name: registry.get(name).host)
        session = Session(transport, OpenRequest(name, nonce=1), heartbeats=False)
        fleets.append(Fleet([Engine(session, EngineConfig(max_running=16, token_budget=BUDGET), COST)], trace))
    step, due, goes_on = 0, 1, True
    while goes_on:
        goes_on = sum(fleet.run_step() for fleet in fleets) > 0
        step += 1
        if step == due and len(pages) < num_pages:
            pages.take()
            life.flush()
            due += 4
    return pages


def promtool(*arguments: str | Path) -> str:
    """Its output; fails with what it complains about."""
    done = subprocess.run(
        [ROOT / "scripts" / "debian.sh", "promtool", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def backfill(series: Series, folder: Path) -> Path:
    """A database of Prometheus that holds the series."""
    kinds = {name.partition("{")[0] for name in series}
    lines = []
    for kind in sorted(kinds):
        for name, values in series.items():
            if name.partition("{")[0] == kind:
                times = range(START_S, START_S + len(values) * INTERVAL_S, INTERVAL_S)
                known = ((time, value) for time, value in zip(times, values, strict=True) if value is not None)
                lines += [f"{name} {value} {time}" for time, value in known]
    file = folder / "series.txt"
    file.write_text("\n".join([*lines, "# EOF", ""]))
    data = folder / "data"
    promtool("tsdb", "create-blocks-from", "openmetrics", file, data)
    return data


class Prometheus:
    """A running server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str | float) -> list[dict[str, Any]]:
        """The data of an answer."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=20) as answer:
                body = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None
        data = body["data"]
        return data["result"] if isinstance(data, dict) else data


@contextmanager
def prometheus(folder: Path, data: Path, config: str = "") -> Iterator[Prometheus]:
    """The real one, on a free port, with a database that is there or will be."""
    file = folder / "prometheus.yml"
    file.write_text(config)
    port = free_port()
    command = [str(ROOT / "scripts" / "debian.sh"), "prometheus", f"--config.file={file}"]
    command += [f"--storage.tsdb.path={data}", "--storage.tsdb.retention.time=100y"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage", "--log.level=warn"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stderr=log, stdout=log)
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: process.poll() is not None or _answers(f"{url}/-/ready"))
            assert process.poll() is None, (folder / "log").read_text()
            yield Prometheus(url)
        finally:
            process.terminate()
            process.wait(20)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False
