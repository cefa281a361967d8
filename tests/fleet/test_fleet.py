"""Three services on one Redis, eight engines at work: a service is killed, one added, one drained, all upgraded."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch

from kvplane.base.errors import Moved
from kvplane.blocking.client import Client
from kvplane.rpc.channel import open_channel
from tests.cli.test_serve import end, serving
from tests.fleet.driver import EngineThread, all_go_on
from tests.store import servers

ENGINES = 8
SERVICES = 3


class Fleet:
    """Services by number, each at an address of its own that it keeps over its lives."""

    def __init__(self, store: str, stack: ExitStack) -> None:
        self.addresses = [f"127.0.0.1:{servers.free_port()}" for _ in range(SERVICES + 1)]
        self._store = store
        self._stack = stack
        self.running: dict[int, subprocess.Popen[str]] = {}

    @property
    def address_list(self) -> str:
        return ",".join(self.addresses)

    def start(self, number: int) -> None:
        settings = (f"store=redis://{self._store}", "store_flush_ms=20", "owner_lease_ms=1500")
        arguments = [argument for setting in settings for argument in ("--set", setting)]
        process, _ = self._stack.enter_context(serving(*arguments, listen=self.addresses[number]))
        self.running[number] = process

    def kill(self, number: int) -> None:
        process = self.running.pop(number)
        process.kill()
        process.wait()

    def drain(self, number: int) -> None:
        """SIGTERM, as Kubernetes sends it, and wait for the end."""
        process = self.running.pop(number)
        process.send_signal(signal.SIGTERM)
        status, logged = end(process)
        assert status == 0, logged
        assert "Traceback" not in logged

    def wait_for_one_home(self, replica: str) -> None:
        """One of the running services alone says that the replica is its own."""
        servers.wait_until(
            lambda: sum(map(partial(self._is_home, replica), self.running)) == 1, f"{replica} has one home"
        )

    def _is_home(self, replica: str, number: int) -> bool:
        with Client(open_channel(self.addresses[number])) as client:  # a client that does not follow redirects
            try:
                client.describe_replica(replica)
            except Moved:
                return False
            return True


@pytest.fixture
def fleet(tmp_path) -> Iterator[Fleet]:
    with servers.serving(tmp_path / "redis") as redis, ExitStack() as stack:
        yield Fleet(redis.address, stack)


@contextmanager
def engines_on(fleet: Fleet) -> Iterator[list[EngineThread]]:
    """Eight at work, at home on the services in turn; all must have ended well."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engines = [
        EngineThread(f"engine-{at}", fleet.addresses[at % SERVICES], fleet.address_list, seed=at)
        for at in range(ENGINES)
    ]
    for engine in engines:
        engine.start()
    try:
        yield engines
    finally:
        for engine in engines:
            engine.finish()
        torch.set_num_threads(threads)


def test_services_come_and_go_under_load_and_no_token_changes(fleet):
    for number in range(SERVICES):
        fleet.start(number)
    with engines_on(fleet) as engines:
        all_go_on(engines)
        fleet.kill(0)
        all_go_on(engines)
        fleet.start(SERVICES)
        fleet.drain(1)
        all_go_on(engines)
        for engine in engines:
            fleet.wait_for_one_home(engine.name)
        for number in sorted(fleet.running):  # an upgrade, one service after the other
            fleet.drain(number)
            fleet.start(number)
            all_go_on(engines)
    for engine in engines:
        assert engine.answered == engine.asked, "no request is lost"
        assert engine.differing == 0
        assert engine.compared > 0
        assert engine.hit > 0
        assert len(engine.epochs) > 1, "it has seen its service go"
    print(
        f"answered={sum(one.answered for one in engines)} tokens={sum(one.compared for one in engines)} differing=0 "
        f"hit={sum(one.hit for one in engines)} moves={sum(len(one.epochs) - 1 for one in engines)}"
    )
