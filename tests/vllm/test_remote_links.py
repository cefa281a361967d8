"""A session of mode remote that is refused in mid-run: the engine waits for another one, and does not end."""

from __future__ import annotations

import asyncio
import os
import time
from itertools import pairwise
from threading import Event
from types import SimpleNamespace

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
from kvplane_vllm import ready
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
        self.answers = Event()
        self.answers.set()
        self.said: list[str] = []

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
        self.client.answers.wait()
        self.client._refuse()
        self.in_flight -= 1
        return StepResult(1, 0, [])

    def abort(self):
        self.is_aborted = True


@pytest.fixture
def client(monkeypatch) -> Client:
    client = Client()
    monkeypatch.setattr(links, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(links, "connect", lambda *given, **options: client)
    monkeypatch.setattr(links, "register_engine", lambda *given: None)
    return client


@pytest.fixture
def link(client):
    settings = Settings(target_of({"address": "127.0.0.1:1", "replica": "r"}))
    one = links.Link(settings, spec_of(), say=client.said.append)
    yield one
    client.answers.set()
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


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_service_that_refuses_each_step_is_asked_more_and_more_rarely(link, client, monkeypatch, refusal, caplog):
    """Each new session computes the running requests again."""
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(links, "time", clock)
    monkeypatch.setattr(links, "FIRST_PAUSE_S", 1.0)
    monkeypatch.setattr(links.logger, "propagate", True)
    opened = []
    while now[0] < 1600:
        client.refusal = None
        try:
            link.reopen()
        except links.Away:
            continue
        opened.append(now[0])
        client.refusal = refusal("no more", field="limits", remedy="raise it")
        with pytest.raises(links.Lost):
            link.exchange([Part()], 0)
    pauses = [round(after - before) for before, after in pairwise(opened)]
    assert pauses[:7] == [1, 2, 4, 8, 16, 32, 60]
    assert set(pauses[7:]) == {60}
    errors = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert len(errors) == len(opened)
    assert all("limits" in one and "raise it" in one for one in errors)
    now[0] += 61
    client.refusal = None
    link.reopen()
    now[0] += 61
    client.refusal = refusal("no more")
    with pytest.raises(links.Lost):
        link.exchange([Part()], 0)
    assert link._pause_s == 1, "the session before was long enough"


def test_what_the_engine_waits_for_is_said_until_the_service_answers(link, client):
    client.refusal = Unauthenticated("which token?")
    with pytest.raises(links.Lost):
        link.exchange([Part()], 0)
    with pytest.raises(links.Away):
        link.reopen()
    assert all("which token?" in one for one in client.said)
    client.refusal = None
    link.reopen()
    link.exchange([Part()], 0)
    assert client.said[-1] == ""


@pytest.mark.parametrize("is_sent_ahead", [False, True])
def test_a_call_that_may_wait_only_briefly_leaves_the_step_in_flight(link, client, is_sent_ahead):
    client.answers.clear()
    if is_sent_ahead:
        link.send([Part()], 0)
    for _ in range(2):
        begin = time.monotonic()
        with pytest.raises(links.Away):
            link.receive(0.05) if link.in_flight else link.exchange([Part()], 0, 0.05)
        assert time.monotonic() - begin < 1
        assert link.in_flight
    client.answers.set()
    assert link.receive().seq == 1
    assert not link.in_flight


def test_an_abandoned_session_is_replaced_without_its_answer(link, client):
    session = link._session
    link.send([Part()], 0)
    link.abandon()
    assert session.is_aborted
    assert not link.in_flight
    link.reopen()
    assert (client.num_sessions, link.life) == (2, 2)


def ask(config, path):
    """Status and body that an API server with the middleware answers; the app itself answers 200 with its path."""
    sent = []

    async def send(message):
        sent.append(message)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    scope = {"type": "http", "path": path, "app": SimpleNamespace(state=SimpleNamespace(vllm_config=config))}
    asyncio.run(ready.Ready(app)(scope, None, send))
    return sent[0]["status"], sent[1]["body"].decode()


def config_of(rank=0, **given):
    return SimpleNamespace(
        additional_config={"kvplane": given} if given else None,
        parallel_config=SimpleNamespace(data_parallel_index=rank),
    )


def test_an_engine_that_waits_is_not_ready_but_healthy(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    config, other = config_of(address="a:1", replica="r-{dp_rank}"), config_of(address="a:1", replica="s")
    ranks = [ready.Notice(config_of(rank, address="a:1", replica="r-{dp_rank}")) for rank in range(2)]
    assert ask(config, "/ready") == (200, "/health")
    ranks[1].say("the service is away")
    assert ask(config, "/ready") == (503, "the service is away")
    assert ask(config, "/health") == (200, "/health")
    assert ask(other, "/ready") == ask(config_of(), "/ready") == (200, "/health")
    ranks[1].say("")
    assert ask(config, "/ready") == (200, "/health")


def test_the_notice_of_an_engine_that_was_killed_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    config = config_of(address="a:1", replica="r")
    child = os.fork()
    if not child:
        ready.Notice(config).say("away")
        os._exit(0)
    os.waitpid(child, 0)
    assert ask(config, "/ready") == (200, "/health")
