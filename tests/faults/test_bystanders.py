"""Bystanders see a service that answers late, or nothing."""

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
    """To a service, and where its metrics are."""
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


def test_a_service_that_answers_is_in_time_again_and_again(connected):
    asked = connected(True)
    answers = Answers()
    for _ in range(2):
        answers.note("nothing", asked.ask())
        asked.forget_guest()
    assert set(answers.slowest_s["nothing"]) == set(DEADLINES_S)
    answers.note_drain("nothing", 0.25, 2.0)
    assert list(answers.table())[-1].endswith("| 0.25 | 2.00 |")


def test_one_that_answers_nothing_is_late_to_who_was_promised_an_answer(connected, link):
    asked = connected(True)
    link[0].hold(True)
    try:
        with pytest.raises(TooLate, match=r"unary call: .* after"):
            asked.ask()
    finally:
        link[0].hold(False)


def test_who_was_promised_nothing_is_told_in_time_that_there_is_no_answer(connected, link):
    asked = connected(False)
    link[0].hold(True)
    try:
        assert asked.ask() == {}
        assert asked.ask() == {}, "the step that is in flight is asked for again"
    finally:
        link[0].hold(False)
