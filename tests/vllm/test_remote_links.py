"""A session of mode remote that is refused in mid-run: the engine waits for another one, and does not end."""

from __future__ import annotations

import pytest

from kvplane.base.errors import (
    AlreadyExists,
    InternalError,
    InvalidArgument,
    LimitExceeded,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
)
from kvplane.base.step import Part, StepResult
from kvplane_vllm.remote import link as links
from kvplane_vllm.remote.settings import Settings
from kvplane_vllm.target import target_of
from tests.service.hosts import spec_of

REFUSALS = [Unauthenticated, PermissionDenied, LimitExceeded, QuotaExceeded, InternalError]


class Client:
    """A client whose service refuses what `refusal` says."""

    def __init__(self) -> None:
        self.refusal: Exception | None = None
        self.num_sessions = 0

    def session(self, name, **options):
        self._refuse()
        self.num_sessions += 1
        return Session(self)

    def _refuse(self):
        if self.refusal is not None:
            raise self.refusal


class Session:
    epoch, kept_keys, next_seq, draining = 1, 0, 1, False

    def __init__(self, client):
        self.client, self.in_flight, self.is_aborted = client, 0, False

    def submit(self, *parts, executed_through):
        self.in_flight += 1

    def receive(self):
        self.client._refuse()
        self.in_flight -= 1
        return StepResult(1, 0, [])

    def abort(self):
        self.is_aborted = True


@pytest.fixture
def client(monkeypatch) -> Client:
    client = Client()
    monkeypatch.setattr(links, "connect", lambda *given, **options: client)
    monkeypatch.setattr(links, "register_engine", lambda *given: None)
    return client


@pytest.fixture
def link(client):
    settings = Settings(target_of({"address": "127.0.0.1:1", "replica": "r"}))
    one = links.Link(settings, spec_of())
    yield one
    one._thread.shutdown()


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("is_sent_ahead", [False, True])
def test_a_refused_step_loses_the_session_and_the_next_one_begins_when_the_service_accepts_it(
    link, client, refusal, is_sent_ahead
):
    session, client.refusal = link._session, refusal("no more")
    if is_sent_ahead:
        link.send([Part()], 0)
    with pytest.raises(links.Lost):
        link.receive() if is_sent_ahead else link.exchange([Part()], 0)
    assert session.is_aborted
    for _ in range(3):
        with pytest.raises(links.Away):
            link.reopen()
    client.refusal = None
    link.reopen()
    assert (client.num_sessions, link.life) == (2, 2)
    assert link.exchange([Part()], 0).seq == 1


@pytest.mark.parametrize("refusal", [*REFUSALS, AlreadyExists, InvalidArgument])
def test_a_session_that_is_refused_is_logged_once_for_each_reason(link, client, caplog, monkeypatch, refusal):
    monkeypatch.setattr(links.logger, "propagate", True)
    link._session, client.refusal = None, refusal("registered by another", field="replica", remedy="rename it")
    for _ in range(3):
        with pytest.raises(links.Away):
            link.reopen()
    assert [one.getMessage().count("registered by another") for one in caplog.records] == [1]


def test_a_step_that_the_contract_forbids_ends_the_engine(link, client):
    """A new session would send it again, repeatedly."""
    client.refusal = InvalidArgument("rows", field="parts[0]")
    with pytest.raises(InvalidArgument):
        link.exchange([Part()], 0)


def test_a_start_that_is_refused_says_so(client):
    client.refusal = Unauthenticated("which token?")
    settings = Settings(target_of({"address": "127.0.0.1:1", "replica": "r"}))
    with pytest.raises(Unauthenticated):
        links.Link(settings, spec_of())
    assert client.num_sessions == 0
