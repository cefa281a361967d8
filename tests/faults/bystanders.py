"""Clients that do not depend on the broken part: the answers that they get during a fault, and their latency."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import NoneType

import kvplane
from kvplane import Content, ModelSource, Part, RetryPolicy
from kvplane.base.errors import DeadlineExceeded, KvplaneError, NotFound, Unavailable
from kvplane.base.session import OPEN_TIMEOUT_S, STEP_TIMEOUT_S
from kvplane.unary.retrying import TIMEOUT_S
from tests.cli.hung import TooLate, drain

REPLICAS, GUEST = ("bystander/one", "bystander/two"), "bystander/guest"
# Default deadline of each client, in seconds.
DEADLINES_S = {
    "metrics": 10.0,  # scrape timeout of Prometheus
    "registration": TIMEOUT_S,
    "unary call": TIMEOUT_S,
    "step": STEP_TIMEOUT_S,
    "new session": OPEN_TIMEOUT_S,
}
QUICK_S = 2.0  # deadline of calls to a service that does not answer
LATE_S = 10.0  # allowance for an overloaded machine
MODEL = ModelSource(model="llama-3.1-8b", num_blocks=700, max_model_len=10000)
TOKENS = list(range(9000))
_ONCE, _PATIENT = RetryPolicy(attempts=0), RetryPolicy(attempts=10)


@dataclass
class Answers:
    """Latencies of bystanders in a campaign.

    Attributes:
        slowest_s: fault → function → longest time to an answer.
        drains_s: fault → longest time until a session was notified of a drain, and until the process had exited.
    """

    num_drains: int = 0
    slowest_s: dict[str, dict[str, float]] = field(default_factory=dict)
    drains_s: dict[str, tuple[float, float]] = field(default_factory=dict)

    def note(self, broken: str, seconds: dict[str, float]) -> None:
        known = self.slowest_s.setdefault(broken, {}) if seconds else {}
        for what, took_s in seconds.items():
            known[what] = max(known.get(what, 0.0), took_s)

    def note_drain(self, broken: str, notified_s: float, ended_s: float) -> None:
        self.num_drains += 1
        notified, ended = self.drains_s.get(broken, (0.0, 0.0))
        self.drains_s[broken] = max(notified, notified_s), max(ended, ended_s)

    @property
    def worst_s(self) -> float:
        return max((took_s for known in self.slowest_s.values() for took_s in known.values()), default=0.0)

    def table(self) -> Iterator[str]:
        """Lines of Markdown, in seconds."""
        columns = [*DEADLINES_S, "notified of a drain", "drained"]
        yield f"| broken | {' | '.join(columns)} |"
        yield "|---" * (len(columns) + 1) + "|"
        for broken in sorted({*self.slowest_s, *self.drains_s}):
            known = dict(self.slowest_s.get(broken, {}))
            known.update(zip(columns[-2:], self.drains_s.get(broken, ()), strict=False))
            cells = [f"{known[column]:.2f}" if column in known else "" for column in columns]
            yield f"| {broken} | {' | '.join(cells)} |"


class Bystanders:
    """Two other replicas of a service, the session of one of them, and callers. Make them before the fault."""

    def __init__(self, address: str, metrics: str, is_served: bool) -> None:
        """`is_served`: the service answers during the fault; otherwise each call must end with an error."""
        self._address, self._metrics, self._is_served = address, metrics, is_served
        self._deadlines_s = DEADLINES_S if is_served else dict.fromkeys(DEADLINES_S, QUICK_S)
        self._clients = ExitStack()
        self.session: kvplane.Session | None = None

    def connect(self) -> None:
        """Register the replicas and open the session, or its successor. Raises KvplaneError."""
        if self.session is not None:
            self.session.abort()  # or it would reconnect in addition to its successor
        client = self._client(_PATIENT)
        for replica in REPLICAS:
            client.register_replica(replica, MODEL)
        self.session = self._open(client, REPLICAS[0], _PATIENT)

    def close(self) -> None:
        """Close session and channels."""
        if self.session is not None:
            with contextlib.suppress(KvplaneError):
                self.session.close()
        self._clients.close()

    def ask(self) -> dict[str, float]:
        """Make all calls concurrently. Returns the seconds until each answer.

        Raises:
            TooLate: a call was not answered in time; or, with a service that does not answer, did not end.
        """
        took_s, refusals = dict[str, float](), dict[str, Exception]()

        def ask(what: str, call: Callable[[], object]) -> None:
            asked_s = time.monotonic()
            try:
                call()
            except (KvplaneError, OSError) as error:
                refusals[what] = error
            took_s[what] = time.monotonic() - asked_s

        calls = self._calls()
        threads = [threading.Thread(target=ask, args=one, daemon=True) for one in calls.items()]
        until_s = time.monotonic() + max(self._deadlines_s.values()) + LATE_S
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        for what in calls:
            self._check(what, took_s.get(what), refusals.get(what))
        return took_s if self._is_served else {}

    def _check(self, what: str, took_s: float | None, refusal: Exception | None) -> None:
        if took_s is None:
            raise TooLate(f"{what}: no end")
        if not self._is_served:
            if not isinstance(refusal, (DeadlineExceeded, Unavailable, OSError, NoneType)):
                raise TooLate(f"{what}: {refusal!r}")
        elif refusal is not None or took_s > self._deadlines_s[what]:
            raise TooLate(f"{what}: {refusal or 'an answer'} after {took_s:.1f} s")

    def drain(self, process: subprocess.Popen[str], grace_s: float) -> tuple[float, float]:
        """Send SIGTERM, as `tests.cli.hung.drain`; the process must exit within 2 s of the grace, plus LATE_S."""
        assert self.session is not None
        return drain(process, [self.session], grace_s, 2.0 + LATE_S)

    # -- the calls ---------------------------------------------------------------------------------------------------

    def _calls(self) -> dict[str, Callable[[], object]]:
        session, client = self.session, self._client(_ONCE)
        assert session is not None
        # As an engine does: a service that has just begun may still read the replica's log.
        again = RetryPolicy(within_s=self._deadlines_s["new session"]) if self._is_served else _ONCE
        calls: dict[str, Callable[[], object]] = {
            "metrics": self._scrape,
            "unary call": lambda: client.find_cache_hit(REPLICAS[0], Content(token_ids=TOKENS)),
            "step": session.receive if session.in_flight else lambda: session.apply(Part()),
            "new session": lambda: self._open(client, REPLICAS[1], again).close(),
        }
        if self._is_served:  # its default deadline allows for building a pool
            calls["registration"] = lambda: client.register_replica(GUEST, MODEL)
        return calls

    def _client(self, retry: RetryPolicy) -> kvplane.Client:
        timeout_s = self._deadlines_s["unary call"]
        return self._clients.enter_context(kvplane.connect(self._address, timeout_s=timeout_s, retry=retry))

    def _open(self, client: kvplane.Client, replica: str, retry: RetryPolicy) -> kvplane.Session:
        open_s, step_s = self._deadlines_s["new session"], self._deadlines_s["step"]
        session = client.session(replica, retry=retry, open_timeout_s=open_s, step_timeout_s=step_s)
        session.apply(Part())
        return session

    def _scrape(self) -> bytes:
        timeout_s = self._deadlines_s["metrics"]
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=timeout_s) as answer:
            return bytes(answer.read())

    def forget_guest(self) -> None:
        """Deregister the replica, so that the next registration is a new one."""
        with contextlib.suppress(NotFound):
            self._client(_PATIENT).deregister_replica(GUEST)
