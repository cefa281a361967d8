"""The cycle collector of a service: set for a whole process, so each test has one of its own."""

from __future__ import annotations

import subprocess
import sys


def lines_of(program: str) -> list[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()


def test_decision_log_is_not_traversed_by_the_gc():
    collections = lines_of(
        """
import gc
from kvplane_service.runtime import interpreter
from tests.bench.overhead import Side, always_on

for prepare in (lambda: None, interpreter.tune):
    prepare()
    before = gc.get_stats()[1]["collections"]
    side = Side(900, always_on)
    side.begin()
    side.decode(900)
    print(gc.get_stats()[1]["collections"] - before)
"""
    )
    as_python_does, as_the_service_does = map(int, collections)
    assert as_python_does > 0
    assert as_the_service_does == 0


def test_young_cycles_are_still_found():
    program = """
import gc, weakref
from kvplane_service.runtime import interpreter

interpreter.tune()
class Cycle:
    def __init__(self): self.me = self
first = weakref.ref(Cycle())
rest = [[] for _ in range(interpreter.YOUNG + 1)]
print(first() is None)
"""
    assert lines_of(program) == ["True"]


def test_a_service_sets_gc_thresholds_before_it_is_ready():
    program = """
import asyncio, gc, os, signal
from kvplane_service.runtime import interpreter
from kvplane_service.process.app import serve
from kvplane_service.config import Config

def ready(app):
    print(gc.get_threshold()[0] == interpreter.YOUNG, gc.get_freeze_count() > 0)
    os.kill(os.getpid(), signal.SIGTERM)

asyncio.run(serve(Config(listen="127.0.0.1:0"), ready))
"""
    assert lines_of(program) == ["True True"]


def test_a_router_does_too():
    program = """
import asyncio, gc, os, signal
from kvplane_service.runtime import interpreter
from kvplane_fleet.router.process import serve
from kvplane_fleet.settings import FleetSettings
from kvplane_service.config import Config

def ready(router):
    print(gc.get_threshold()[0] == interpreter.YOUNG, gc.get_freeze_count() > 0)
    os.kill(os.getpid(), signal.SIGTERM)

asyncio.run(serve(Config(listen="127.0.0.1:0"), FleetSettings(()), ready))
"""
    assert lines_of(program) == ["True True"]
