"""Callers that need nothing of what is broken: what they are answered meanwhile, and how long it takes."""

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
# Each function within the deadline that its caller has by default.
DEADLINES_S = {
    "metrics": 10.0,  # what Prometheus waits
    "registration": TIMEOUT_S,
    "unary call": TIMEOUT_S,
    "step": STEP_TIMEOUT_S,
    "new session": OPEN_TIMEOUT_S,
}
QUICK_S = 2.0  # the deadline of who calls a service that answers nothing
LATE_S = 10.0  # that a deadline may be late, on a machine that is overrun
MODEL = ModelSource(model="llama-3.1-8b", num_blocks=700, max_model_len=10000)
TOKENS = list(range(9000))
_ONCE, _PATIENT = RetryPolicy(attempts=0), RetryPolicy(attempts=10)


@dataclass
class Answers:
    """What a campaign saw of bystanders.

    Attributes:
        slowest_s: by what was broken, then by function: seconds until the answer.
        drains_s: by what was broken: until a session was told, and until the process had ended, at most.
    """

    num_drains: int = 0
    slowest_s: dict[str, dict[str, float]] = field(default_factory=dict)
    drains_s: dict[str, tuple[float, float]] = field(default_factory=dict)

    def note(self, broken: str, seconds: dict[str, float]) -> None:
        known = self.slowest_s.setdefault(broken, {}) if seconds else {}
        for what, took_s in seconds.items():
            known[what] = max(known.get(what, 0.0), took_s)

    def note_drain(self, broken: str, told_s: float, ended_s: float) -> None:
        self.num_drains += 1
        told, ended = self.drains_s.get(broken, (0.0, 0.0))
        self.drains_s[broken] = max(told, told_s), max(ended, ended_s)

    @property
    def worst_s(self) -> float:
        return max((took_s for known in self.slowest_s.values() for took_s in known.values()), default=0.0)

    def table(self) -> Iterator[str]:
        """Lines of Markdown, in seconds."""
        columns = [*DEADLINES_S, "told of a drain", "drained"]
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
        """`is_served`: the service answers while the fault lasts; otherwise each call must end all the same."""
        self._address, self._metrics, self._is_served = address, metrics, is_served
        self._deadlines_s = DEADLINES_S if is_served else dict.fromkeys(DEADLINES_S, QUICK_S)
        self._clients = ExitStack()
        self.session: kvplane.Session | None = None

    def connect(self) -> None:
        """Register the replicas and open the session, or its successor. Raises KvplaneError."""
        if self.session is not None:
            self.session.abort()  # or it would come back beside its successor
        client = self._client(_PATIENT)
        for replica in REPLICAS:
            client.register_replica(replica, MODEL)
        self.session = self._open(client, REPLICAS[0], _PATIENT)

    def close(self) -> None:
        """Let go of everything."""
        if self.session is not None:
            with contextlib.suppress(KvplaneError):
                self.session.close()
        self._clients.close()

    def ask(self) -> dict[str, float]:
        """Ask everything at once: seconds until each answer.

        Raises:
            TooLate: something was not answered in time; or, of a service that answers nothing, did not end.
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
        """SIGTERM, as `tests.cli.hung.drain`; the process ends within 2 s of the grace, and LATE_S."""
        assert self.session is not None
        return drain(process, [self.session], grace_s, 2.0 + LATE_S)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _calls(self) -> dict[str, Callable[[], object]]:
        session, client = self.session, self._client(_ONCE)
        assert session is not None
        calls: dict[str, Callable[[], object]] = {
            "metrics": self._scrape,
            "unary call": lambda: client.find_cache_hit(REPLICAS[0], Content(token_ids=TOKENS)),
            "step": session.receive if session.in_flight else lambda: session.apply(Part()),
            "new session": lambda: self._open(client, REPLICAS[1], _ONCE).close(),
        }
        if self._is_served:  # its own deadline is that of building a pool
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
        """Deregister what was registered, so that the next time it is new."""
        with contextlib.suppress(NotFound):
            self._client(_PATIENT).deregister_replica(GUEST)
