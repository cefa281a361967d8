"""Two routers over the engines of a fleet: claims and choices, compared with each other and with the services."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

import kvplane
from kvplane.base.errors import KvplaneError
from kvplane.base.requests import Content
from kvplane.rpc.channel import open_channel
from kvplane.v1 import routing_pb2 as pb
from kvplane.v1.routing_pb2_grpc import RoutingStub
from tests.store.servers import free_port

if TYPE_CHECKING:
    from tests.fleet.processes import Fleet

NAMES = ("router-0", "router-1")
MODEL = "m"
CALL_S = 1.0
PAUSE_S = 0.2
AGREE_S, ANSWER_S = 45.0, 120.0  # leases end and sessions lapse repeatedly on a machine that is too busy
AT_A_TIME, AT_LAST, KEPT = 3, 10, 32  # prompts


@dataclass(frozen=True)
class Answer:
    """What a router says of a prompt: the place that it chooses, and the tokens that each place would hit."""

    chosen: str
    hits: Mapping[str, int]


class Router:
    """`kvplane router`, restarted at one address."""

    def __init__(self, name: str, fleet: Fleet, twin: str) -> None:
        self.name, self._network, self._twin = name, fleet.network, twin
        (folder := fleet.folder / name).mkdir()
        self._folder, self._lives = folder, 0
        self.address = f"{self._network.host(name)}:{free_port()}"
        rest = f"model: {MODEL}, service: '{','.join(fleet.fronts)}'"
        places = (f"  - {{name: {one.name}, {rest}}}" for one in fleet.replicas)
        (folder / "places.yaml").write_text("\n".join(["places:", *places]) + "\n")
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the router, and wait until it listens."""
        twin = ["-m", "tests.twins", self._twin, "kvplane"] if self._twin else ["-m", "kvplane_tools"]
        command = [sys.executable, *twin, "router", str(self._folder / "places.yaml"), "--listen", self.address]
        self._lives += 1
        with self._network.inside(self.name), (self._folder / f"{self.name}-{self._lives}.log").open("w") as log:
            command += ["--metrics", f"{self._network.host(self.name)}:0"]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        with self.process.stdout as output:
            assert all(output.readline() for _ in range(2)), "a router does not start"

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self, stopped: bool) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP if stopped else signal.SIGCONT)

    def ask(self, prompts: Sequence[tuple[int, ...]]) -> list[Answer]:
        """Score prompts. Raises grpc.RpcError."""
        with open_channel(self.address) as channel:
            stub, answers = RoutingStub(channel), list[Answer]()
            for prompt in prompts:
                request = pb.ScoreRequest(model=MODEL, prompt=pb.Prompt(token_ids=prompt))
                places = stub.Score(request, timeout=CALL_S).places
                answers.append(Answer(places[0].place, {one.place: one.hit_tokens for one in places}))
        return answers


@dataclass
class Counts:
    """How two routers compared while faults lasted.

    Attributes:
        decisions: prompts that both answered. chosen_otherwise, hits_otherwise: those at which they differ.
        no_answer: prompts that one of them did not answer.
        agreed_s: seconds from each repair, and a round of requests, until both claimed what the services hit.
        quiet, quiet_otherwise: prompts that were asked then, and those for which they chose two places.
    """

    decisions: int = 0
    chosen_otherwise: int = 0
    hits_otherwise: int = 0
    no_answer: int = 0
    agreed_s: list[float] = field(default_factory=list)
    quiet: int = 0
    quiet_otherwise: int = 0

    @property
    def line(self) -> str:
        share = 100 * self.chosen_otherwise / max(1, self.decisions)
        return (
            f"decisions={self.decisions} chosen_otherwise={self.chosen_otherwise} ({share:.1f} %) "
            f"hits_otherwise={self.hits_otherwise} no_answer={self.no_answer} quiet={self.quiet} "
            f"quiet_otherwise={self.quiet_otherwise}"
        )


class Routers:
    """Two routers, asked for the same prompts all the time."""

    def __init__(self, fleet: Fleet, twin: str) -> None:
        self._fleet = fleet
        self.both = [Router(name, fleet, twin) for name in NAMES]
        self.counts: dict[str, Counts] = {}
        self.prompts = deque[tuple[int, ...]](
            maxlen=KEPT
        )  # the latest, of all engines; older ones may be claimed without reason

    def start(self) -> None:
        for one in self.both:
            one.start()

    def repair(self) -> None:
        for one in self.both:
            if one.is_alive:
                one.stop(False)
            else:
                one.start()

    def end(self) -> None:
        for one in self.both:
            if one.process is not None:
                one.kill()

    @contextmanager
    def compared(self, kind: str) -> Iterator[None]:
        """Compare both all the time inside the block."""
        counts, ends = self.counts.setdefault(kind, Counts()), threading.Event()

        def work() -> None:
            while not ends.wait(PAUSE_S):
                self._compare(counts, list(self.prompts)[-AT_A_TIME:])

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            ends.set()
            thread.join()

    def _compare(self, counts: Counts, prompts: Sequence[tuple[int, ...]]) -> None:
        answers = list[list[Answer]]()
        for one in self.both:
            try:
                answers.append(one.ask(prompts))
            except (grpc.RpcError, IndexError):
                counts.no_answer += len(prompts)
                return
        for first, second in zip(*answers, strict=True):
            counts.decisions += 1
            counts.chosen_otherwise += first.chosen != second.chosen
            counts.hits_otherwise += first.hits != second.hits

    def compare_quiet(self, kind: str, ask: Callable[[], None]) -> str:
        """Wait until both claim what the services hit, and count how they choose then. Returns what a router claims
        otherwise AGREE_S after all services answer; "" if nothing. `ask` lets every engine answer a request: an idle
        one whose session has ended opens no other one.
        """
        counts, began_s, said = self.counts.setdefault(kind, Counts()), time.monotonic(), "nothing was asked"
        ends_s = began_s + AGREE_S
        while said and time.monotonic() < ends_s:
            prompts = list(dict.fromkeys(self.prompts))
            try:
                said = self.difference(prompts[:: max(1, len(prompts) // AT_LAST)], counts)
            except KvplaneError as error:
                said = f"{type(error).__name__}: {error}"
                ask()
                ends_s = min(time.monotonic(), began_s + ANSWER_S) + AGREE_S
            time.sleep(PAUSE_S if said else 0)
        counts.agreed_s.append(time.monotonic() - began_s)
        return said

    def difference(self, prompts: Sequence[tuple[int, ...]], counts: Counts) -> str:
        """The first difference between what a router claims and what the services hit. If there is none, count how
        both choose. Raises KvplaneError: a service does not answer.
        """
        try:
            answers = [one.ask(prompts) for one in self.both]
            hits = self._hits(prompts)
        except (grpc.RpcError, IndexError) as error:
            return f"{type(error).__name__}: {error}"
        for router, claims in zip(NAMES, answers, strict=True):
            for prompt, claim, hit in zip(prompts, claims, hits, strict=True):
                if claim.hits != hit:
                    return f"{router} claims {dict(claim.hits)} of {list(prompt)}, and services hit {hit}"
        counts.quiet += len(prompts)
        counts.quiet_otherwise += sum(one.chosen != other.chosen for one, other in zip(*answers, strict=True))
        return ""

    def _hits(self, prompts: Sequence[tuple[int, ...]]) -> list[dict[str, int]]:
        """What the services would hit of each prompt, by replica."""
        names = [one.name for one in self._fleet.replicas]
        with kvplane.connect(",".join(self._fleet.fronts)) as client:
            contents = (Content(token_ids=list(prompt)) for prompt in prompts)
            return [{name: client.find_cache_hit(name, one).hit_tokens for name in names} for one in contents]


def logs_of(folder: Path) -> list[Path]:
    """What routers log."""
    return [*folder.glob("router-*/router-*.log")]
