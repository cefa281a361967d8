"""Long work on the event loop runs in slices with other calls between them, and its holding times are measured."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import pytest
from prometheus_client.exposition import choose_encoder

from kvplane.base.step import Admit, News, Part
from kvplane_service.config import Config
from kvplane_service.explain.history import HistoryReader
from kvplane_service.explain.service import explain_block, explain_request
from kvplane_service.registry import Registration, Registry
from kvplane_service.runtime import slices
from kvplane_service.runtime.executors import Executor
from kvplane_service.runtime.rota import OWNER, Busy
from kvplane_service.runtime.slices import Turns, in_slices
from kvplane_service.telemetry.collector import ServiceCollector
from kvplane_service.telemetry.holds import Holds
from kvplane_service.telemetry.http import MetricsServer
from tests.service.hosts import Engine, spec_of
from tests.service.rig import WAIT_S, running, until
from tests.service.test_metrics import OPENMETRICS, get

REPLICAS = 40


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch):
    """Every item takes longer than a slice."""
    monkeypatch.setattr(slices, "SLICE_S", 0.0)


async def turns_during(work: Awaitable[object]) -> int:
    """How often others have their turn meanwhile."""
    num_turns, task = 0, asyncio.ensure_future(work)
    while not task.done():
        await asyncio.sleep(0)
        num_turns += 1
    await task
    return num_turns


def registered() -> Registry:
    registry = Registry(Config(), lambda: 5)
    for number in range(REPLICAS):
        Engine(registry.register(f"r{number}", Registration(spec_of())).host).step()
    return registry


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
async def test_a_sliced_scrape_yields_and_equals_an_unsliced_page(accept):
    collector = ServiceCollector(registered())
    server, pages = MetricsServer(collector), list[list[bytes]]()

    async def scrape() -> None:
        pages.append(await server._response(["GET /metrics HTTP/1.1", f"Accept: {accept}"]))

    assert await turns_during(scrape()) >= REPLICAS
    head, *pieces = pages[0]
    body = b"".join(pieces)
    assert b"".join([f"Content-Length: {len(body)}\r\n".encode()]) in head

    class Whole:
        collect = staticmethod(collector.collect)

    assert body == choose_encoder(accept)[0](Whole)


async def test_too_many_scrapes_at_a_time_are_refused(monkeypatch):
    server = MetricsServer(ServiceCollector(registered()))
    ask: Callable[[], Awaitable[list[bytes]]] = lambda: server._response(["GET /metrics HTTP/1.1"])  # noqa: E731
    answers = [(await one)[0] for one in [asyncio.ensure_future(ask()) for _ in range(20)]]
    served = sum(answer.startswith(f"HTTP/1.1 {HTTPStatus.OK}".encode()) for answer in answers)
    assert (served, len(answers) - served) == (17, 3), "one at a time, and sixteen wait"


def with_request(registry, name):
    """Register a replica whose engine has admitted the request "a"."""
    engine = Engine(registry.register(name, Registration(spec_of())).host)
    news = News(slot=[0], num_tokens=[40], tokens=[7] * 40, request_id=["a"])
    engine.step(Part(news=news, admit=Admit(slot=[0])))
    return engine


async def test_an_explanation_that_waits_for_its_replica_leaves_the_turn_to_others():
    registry, turns, offload = Registry(Config(), lambda: 5), Turns("explanations", 1), Executor("explanations")
    busy, other = with_request(registry, "r").host, with_request(registry, "other").host
    ends = asyncio.Event()
    work = asyncio.ensure_future(busy.steps.aside(ends.wait()))
    first = asyncio.ensure_future(explain_request(busy, "a", turns, offload))
    await asyncio.sleep(0)
    assert (await asyncio.wait_for(explain_request(other, "a", turns, offload), WAIT_S)).num_tokens == 40
    assert not first.done()
    ends.set()
    assert (await first).num_tokens == 40
    await work


async def test_an_explanation_reads_the_log_on_a_thread(monkeypatch):
    engine = with_request(Registry(Config(), lambda: 5), "r")
    for _ in range(100):
        engine.step()
    threads, real = list[int](), HistoryReader.add

    def add(self, number, entry):
        threads.append(threading.get_ident())
        real(self, number, entry)

    monkeypatch.setattr(HistoryReader, "add", add)
    await explain_request(engine.host, "a", Turns("explanations", 0), Executor("explanations"))
    assert len(threads) >= 100
    assert threading.get_ident() not in threads


async def test_an_explanation_ends_with_its_call(monkeypatch):
    engine = with_request(Registry(Config(), lambda: 5), "r")
    for _ in range(400):
        engine.step()
    read, real, ended = list[int](), HistoryReader.add, threading.Event()

    def add(self, number, entry):
        read.append(number)
        assert ended.wait(WAIT_S)
        real(self, number, entry)

    monkeypatch.setattr(HistoryReader, "add", add)
    offload = Executor("explanations")
    call = asyncio.ensure_future(explain_block(engine.host, 1, Turns("explanations", 0), offload))
    await asyncio.to_thread(until, lambda: len(read) > 0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    ended.set()
    await offload(lambda: None)  # behind it
    assert len(read) < 400


async def test_turns_run_one_at_a_time_with_a_bounded_queue():
    turns, inside = Turns("explanations", 2), 0

    async def work() -> None:
        nonlocal inside
        async with turns.take():
            assert inside == 0
            inside += 1
            await asyncio.sleep(0)
            inside -= 1

    outcomes = await asyncio.gather(*(work() for _ in range(5)), return_exceptions=True)
    assert [type(one) for one in outcomes] == [type(None)] * 3 + [Busy] * 2
    assert "3 calls run or wait for explanations" in str(outcomes[-1])
    await work()


async def test_turns_are_given_to_owners_in_turn_and_a_cancelled_caller_passes_its_own_on():
    turns, order = Turns("explanations", 40), list[str]()

    async def work(owner: str, number: int) -> None:
        OWNER.set(owner)
        async with turns.take():
            order.append(f"{owner}{number}")
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(work("bob", at)) for at in range(40)]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(work("alice", 0)))
    await asyncio.sleep(0)
    for at in (1, 2, 3):
        tasks[at].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order.index("alice0") <= 3
    assert len(order) == 41 - 3
    await work("alice", 1)


async def test_a_caller_that_is_cancelled_when_it_gets_the_turn_gives_it_back():
    turns = Turns("explanations", 2)
    await turns.begin()
    waiting = asyncio.create_task(turns.begin())
    await asyncio.sleep(0)
    turns.end()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.wait_for(turns.begin(), WAIT_S)


async def test_in_slices_yields_every_item():
    assert [item async for item in in_slices(range(1000))] == list(range(1000))


def test_loop_hold_time_is_a_metric(caplog):
    def held(service, over: str) -> float:
        text, _ = get(f"http://{service.app.metrics_address}/metrics")
        bounds = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("kvplane_loop_held_seconds"))
        return float(bounds["kvplane_loop_held_seconds_count"]) - float(
            bounds[f'kvplane_loop_held_seconds_bucket{{le="{over}"}}']
        )

    with running(Config(listen="127.0.0.1:0", metrics_listen="127.0.0.1:0")) as service:
        until(lambda: held(service, "0.005") >= 0)
        before = held(service, "1.0")
        service.in_loop(lambda: time.sleep(1.2))
        until(lambda: held(service, "1.0") == before + 1)
    assert "the event loop was blocked for 1." in caplog.text


def test_a_loop_hold_is_counted_in_its_bucket():
    holds = Holds()
    for late_s in (-0.001, 0.004, 0.005, 0.03, 11.0):
        holds.add(late_s)
    assert holds.counts == [3, 0, 0, 1, 0, 0, 0, 0, 0, 1]
    assert holds.sum_s == pytest.approx(11.039)
