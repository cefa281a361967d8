"""Code that holds the event loop is measured, and its function is logged."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time

from kvplane_service.telemetry import holds
from kvplane_service.telemetry.holds import Holds, LoopMonitor

BLOCK = """
def decide(wait):
    wait()

def handle(wait):
    decide(wait)
"""


def handler_of_ours(module="kvplane_service.rpc.some"):
    space = {"__name__": module}
    exec(BLOCK, space)
    return space["handle"]


def until_seen(monitor, text=""):
    """Blocks this thread until it has been seen at this."""
    for _ in range(2000):
        if monitor.seen and text in monitor.seen:
            return
        time.sleep(0.01)
    raise AssertionError("no sample was taken")


async def until(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


def test_a_busy_thread_is_sampled(monkeypatch):
    monkeypatch.setattr(holds, "_LONG_S", 0.02)
    monitor = LoopMonitor(threading.get_ident())
    monitor.start()
    handler_of_ours()(lambda: until_seen(monitor))
    monitor.end()
    assert monitor.take() == "rpc.some.handle, in rpc.some.decide"
    assert monitor.take() == "by the machine, or by code outside of kvplane_service"


def test_foreign_code_is_not_named():
    seen = []
    for module in ("kvplane_tools.cli.server", "json.decoder", "kvplane_service.replicas.host"):
        handler_of_ours(module)(lambda: seen.append(holds._describe(sys._getframe())))
    assert seen == ["", "", "replicas.host.handle, in replicas.host.decide"]


async def test_a_hold_is_counted_and_its_cause_logged(monkeypatch, caplog):
    monkeypatch.setattr(holds, "_LONG_S", 0.02)
    made = []

    class Seen(LoopMonitor):
        def __init__(self, thread):
            super().__init__(thread)
            made.append(self)

    monkeypatch.setattr(holds, "LoopMonitor", Seen)
    measured = Holds()
    watching = asyncio.ensure_future(measured.watch())
    with caplog.at_level(logging.WARNING):
        await until(lambda: made)
        handler_of_ours()(lambda: until_seen(made[0], "rpc.some"))
        await until(lambda: "rpc.some.handle, in rpc.some.decide" in caplog.text)
    watching.cancel()
    assert "blocked for" in caplog.text
    assert sum(measured.counts[2:]) >= 1
    await asyncio.wait([watching])
    assert made[0]._ended.is_set()
