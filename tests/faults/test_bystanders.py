"""Bystanders detect a service that answers late, or not at all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvplane_service.config import Config
from tests.cli.hung import TooLate
from tests.client.proxy import CuttingProxy
from tests.faults import bystanders
from tests.faults.bystanders import DEADLINES_S, Answers, Bystanders
from tests.service.rig import running


@pytest.fixture(scope="module")
def link() -> Iterator[tuple[CuttingProxy, str]]:
    """A channel to a service, and the address of its metrics."""
    with running(Config(listen="127.0.0.1:0", metrics_listen="127.0.0.1:0")) as service:
        proxy = CuttingProxy(service.address)
        yield proxy, service.app.metrics_address
        proxy.close()


@pytest.fixture
def connected(link, monkeypatch):
    """Bystanders with short deadlines."""
    proxy, metrics = link
    for name in ("QUICK_S", "LATE_S"):
        monkeypatch.setattr(bystanders, name, 1.0)
    monkeypatch.setattr(bystanders, "DEADLINES_S", dict.fromkeys(DEADLINES_S, 1.0))

    def make(is_served: bool) -> Bystanders:
        made.append(Bystanders(proxy.address, metrics, is_served))
        made[-1].connect()
        return made[-1]

    made = list[Bystanders]()
    yield make
    for one in made:
        one.close()


def test_answering_service_is_in_time(connected):
    asked = connected(True)
    answers = Answers()
    for _ in range(2):
        answers.note("nothing", asked.ask())
        asked.forget_guest()
    assert set(answers.slowest_s["nothing"]) == set(DEADLINES_S)
    answers.note_drain("nothing", 0.25, 2.0)
    assert list(answers.table())[-1].endswith("| 0.25 | 2.00 |")


def test_silent_service_is_late_for_clients_that_expect_an_answer(connected, link):
    asked = connected(True)
    link[0].hold(True)
    try:
        with pytest.raises(TooLate, match=r"unary call: .* after"):
            asked.ask()
    finally:
        link[0].hold(False)


def test_client_without_a_promise_gets_an_error_in_time(connected, link):
    asked = connected(False)
    link[0].hold(True)
    try:
        assert asked.ask() == {}
        assert asked.ask() == {}, "the step in flight is sent again"
    finally:
        link[0].hold(False)
