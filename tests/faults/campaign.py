"""Rounds of work under faults: answers must equal the dense model's, and everything must recover by itself."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import grpc
import torch

from kvplane.base.errors import FailedPrecondition, KvplaneError, NotFound, StaleEpoch
from kvplane.v1 import allocation_pb2 as pb
from tests.cli.hung import TooLate
from tests.engine.reference.config import MIXED
from tests.engine.reference.request import Request
from tests.engine.reference.weights import draw_weights
from tests.engine.twin import Twin
from tests.engine.workload import Requests, Returning
from tests.engine.world import Pool
from tests.faults.bystanders import Answers, Bystanders
from tests.faults.child import LONG  # a prompt that is repeated
from tests.faults.cluster import (
    GRACE_S,
    LEASE_S,
    LIMIT_S,
    PLAIN,
    Cluster,
    Ended,
    Plan,
    descriptors,
    is_stopped,
    is_stored,
    resume,
    running,
)
from tests.faults.kinds import KINDS, Kind
from tests.faults.tiers import TIER_KINDS
from tests.store.servers import wait_until

STORES = ("sqlite", "redis")
ROUNDS_PER_CLUSTER = 25
REQUESTS = 4
SHARE_OF_PAIRS = 0.25
SPARE_DESCRIPTORS = 12  # descriptors that a process may have open in addition to its first idle ones
LONG_HIT = 96
FILES_PER_WORKER = 3
SHARE_OF_DRAINS = 0.2
FURTHER = 15  # faults, until what must be seen was seen
TOLD = (NotFound, StaleEpoch, FailedPrecondition)


class Finding(AssertionError):
    """A violation of the campaign's rules."""


@dataclass
class Report:
    """Results of a campaign.

    Attributes:
        asked: least number of faults.
        tiers: whether the replica has tiers.
        only: the kinds of faults that were asked for; () = all, which must show what a campaign is for.
        faults: number of faults by kind.
        hits_after_restart: hit tokens in rounds in which a process was restarted.
        loaded, refused: blocks that were loaded from tiers, and that movers did not find as they should be.
        slowest_s: longest time of a round's requests after the repair.
        answers: latencies of bystanders during faults.
        finding: the violation that ended the campaign; "" = none.
    """

    asked: int = 0
    tiers: bool = False
    only: Sequence[str] = ()
    faults: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    requests: int = 0
    tokens: int = 0
    differing: int = 0
    hits_after_restart: int = 0
    leaks: int = 0
    loaded: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    answers: Answers = field(default_factory=Answers)
    finding: str = ""

    @property
    def unseen(self) -> list[str]:
        """What no round has shown yet: without it a campaign could not find what it is for."""
        seen = {
            "no request had a hit after a restart": self.hits_after_restart,
            "no bystander was answered during a fault": self.answers.slowest_s,
            "no block was loaded from a tier": self.loaded or not self.tiers,
        }
        return [what for what, is_seen in seen.items() if not (is_seen or self.only)]

    @property
    def is_over(self) -> bool:
        """Whether there were as many faults as asked for, or some further ones where something was unseen."""
        return self.faults.total() >= self.asked + FURTHER * bool(self.unseen)

    @property
    def complaints(self) -> list[str]:
        """Why the campaign failed; empty = it found nothing, and could have found something."""
        if self.finding:
            return [self.finding]
        return [f"{what} in {self.faults.total()} faults: run more, or with another seed" for what in self.unseen]

    @property
    def line(self) -> str:
        return (
            f"faults={self.faults.total()} kinds={len(self.faults)} restarts={self.restarts} requests={self.requests} "
            f"tokens={self.tokens} slowest_s={self.slowest_s:.1f} differing={self.differing} "
            f"hits_after_restart={self.hits_after_restart} leaks={self.leaks} "
            f"bystanders_s={self.answers.worst_s:.1f} drains={self.answers.num_drains}"
            + (f" loaded={self.loaded} refused={self.refused}" if self.loaded else "")
        )


class Round:
    """One round: requests, one or two faults during them, and the checks afterwards."""

    def __init__(self, cluster: Cluster, requests: Requests, rng: Random, report: Report) -> None:
        self._cluster = cluster
        self._requests = requests
        self._rng = rng
        self._report = report
        self._sent: dict[int, Request] = {}
        self._twin = Twin(MIXED, draw_weights(MIXED))

    def run(self, kinds: list[Kind]) -> None:
        """Raise Finding."""
        cluster, rng = self._cluster, self._rng
        restarts, lives = cluster.restarts, cluster.engines.lives
        count = 3 * REQUESTS if cluster.plan.pool.tiers else REQUESTS
        self._ask([Request("", LONG, 4), *(self._requests.next() for _ in range(count))], kinds)
        for _ in range(rng.randrange(6)):
            self._cluster.engines.listen(LEASE_S)
        self._strike(kinds)
        forgetful = any(kind.forgetful for kind in kinds)
        hits = self._finish(forgetful)
        if cluster.restarts > restarts or cluster.engines.lives > lives:
            self._report.hits_after_restart += hits
        self._check_warm(forgetful)
        self._check_idle()
        self._count_loads()

    def _strike(self, kinds: list[Kind]) -> None:
        """Strike the faults, let bystanders make calls, and repair."""
        cluster, rng, service = self._cluster, self._rng, self._cluster.service
        is_served = all(kind.is_served for kind in kinds)
        bystanders = Bystanders(service.address, service.metrics, is_served)
        with closing(bystanders):
            bystanders.connect()
            lives = service.lives
            for kind in kinds:
                kind.strike(cluster, rng)
                self._report.faults[kind.name] += 1
            if is_served and service.lives != lives:
                bystanders.connect()
            names = " and ".join(kind.name for kind in kinds)
            self._report.answers.note(names, bystanders.ask())
            time.sleep(rng.uniform(0, 1.5 * LEASE_S))  # the fault lasts for a while
            if is_served:
                self._report.answers.note(names, bystanders.ask())
                self._check_jobs()
            if is_served and rng.random() < SHARE_OF_DRAINS and not any(kind.hung_disk for kind in kinds):
                assert service.process is not None
                self._report.answers.note_drain(names, *bystanders.drain(service.process, GRACE_S))
            cluster.repair()
            if is_served:
                bystanders.forget_guest()

    # -- requests and answers ----------------------------------------------------------------------------------------

    def _ask(self, requests: list[Request], kinds: list[Kind]) -> None:
        traps = [trap for trap in (kind.draw_trap(self._rng) for kind in kinds) if trap]
        self._sent = dict(enumerate(requests))
        prompts = {number: (one.prompt, one.max_new_tokens) for number, one in self._sent.items()}
        self._cluster.engines.ask(prompts, traps[0] if traps else None)

    def _finish(self, forgetful: bool) -> int:
        """Wait for every answer, and compare it. Returns the number of hit tokens."""
        engines, began_s = self._cluster.engines, time.monotonic()
        while not engines.is_done:
            if time.monotonic() - began_s > LIMIT_S:
                raise Finding(f"no answer within {LIMIT_S} s")
            self._go_on(forgetful)
        self._report.slowest_s = max(self._report.slowest_s, time.monotonic() - began_s)
        ended, engines.ended = engines.ended, []
        for one in ended:
            self._compare(one)
        return sum(sum(hits) for _, hits, _ in ended)

    def _go_on(self, forgetful: bool) -> None:
        """Receive the results of a step; start a new engine life when the engine has ended."""
        engines = self._cluster.engines
        if engines.process is not None and is_stopped(engines.process.pid):
            resume([engines.process.pid])  # it reached its trap after the repair
        refusal = engines.listen(1.0)
        if refusal is not None and not (forgetful and isinstance(refusal, TOLD)):
            raise Finding(f"the engine ended: {type(refusal).__name__}: {refusal}")
        if engines.process is None:
            with_patience(self._cluster.begin_engine)

    def _compare(self, ended: Ended) -> None:
        number, _, output = ended
        request = self._sent[number]
        prompt = request.prompt
        wrong = self._twin.count_wrong(prompt, output)
        self._report.requests += 1
        self._report.tokens += len(output)
        self._report.differing += wrong
        if wrong:
            raise Finding(f"output {output} of prompt {prompt}: {wrong} tokens differ from the dense model's")
        if prompt is not LONG:
            answered = replace(request)
            answered.tokens = [*prompt, *output]
            self._requests.done(answered)

    # -- checks after a round ----------------------------------------------------------------------------------------

    def _check_warm(self, forgetful: bool) -> None:
        """Hits come back: a prompt that was just answered is hit.

        A service that forgot the replica may do so once more, when its store is back and is read.
        """
        hits = list[int]()
        while len(hits) < 2 or (forgetful and hits[-1] != LONG_HIT and len(hits) < 4):
            self._ask([Request("", LONG, 2)], [])
            hits.append(self._finish(forgetful))
        if hits[-1] != LONG_HIT:
            raise Finding(f"{hits} of {LONG_HIT} tokens of a prompt that was just answered were hit")

    def _check_idle(self) -> None:
        """All blocks are free, session and workers are registered, the store is up to date, and nothing leaks."""
        cluster = self._cluster
        try:
            wait_until(lambda: not self._pending(), "idle", LIMIT_S)
            cluster.prove()
        except AssertionError as error:
            self._report.leaks += len(self._leaks())
            raise Finding(f"{error}: {self._pending()}") from error
        for log in cluster.logs.iterdir():
            text = log.read_text()
            if "Traceback" in text:
                raise Finding(f"{log.name}: {text[text.index('Traceback') :][:4000]}")

    def _check_jobs(self) -> None:
        """The invariants of the allocator hold while jobs of tiers are in flight, and a fault lasts."""
        if self._cluster.plan.pool.tiers:
            with contextlib.suppress(grpc.RpcError):  # the fault, or the replica has no engine
                self._cluster.prove(LEASE_S)

    def _count_loads(self) -> None:
        """Add what was loaded since the last round. Counters begin at 0 with a service, and with a worker."""
        status, before = self._cluster.describe(), self._cluster.loads
        uses = [use for worker in status.workers for use in worker.tiers]
        now = {"loaded": status.tier_counts["loaded"], "refused": sum(use.refused_blocks for use in uses)}
        self._report.loaded += now["loaded"] - min(before["loaded"], now["loaded"])
        self._report.refused += now["refused"] - min(before["refused"], now["refused"])
        before.update(now)

    def _pending(self) -> list[str]:
        cluster = self._cluster
        status = cluster.describe()
        in_use = sum(one.num_blocks - one.held_blocks - one.free_blocks for one in status.tiers)
        writes = status.tier_jobs["save"] + status.tier_jobs["move"]
        checks = {
            f"{status.free_blocks} free blocks": status.free_blocks == status.spec.num_blocks - 1,
            f"{status.running_requests} requests run": not status.running_requests,
            f"{len(status.workers)} workers": len(status.workers) == status.num_ranks,
            f"the session is {status.state}": status.state == pb.REPLICA_STATE_LIVE,
            f"the store is {status.store}": is_stored(status.store),
            f"{status.tier_jobs['load']} loads": not status.tier_jobs["load"],
            f"{in_use} slots in use, {writes} jobs write": in_use == writes,
        }
        return [what for what, is_so in checks.items() if not is_so] + self._leaks()

    def _leaks(self) -> list[str]:
        cluster = self._cluster
        shared, sockets = cluster.shared_files(), cluster.sockets()
        found = []
        if shared != (FILES_PER_WORKER + bool(cluster.plan.pool.tiers)) * len(cluster.workers):
            found.append(f"{shared} files of shared memory")
        if sockets != len(cluster.workers):
            found.append(f"{sockets} sockets")
        for name, pid in cluster.pids().items():
            first = cluster.first_descriptors.setdefault(pid, descriptors(pid))
            if descriptors(pid) > first + SPARE_DESCRIPTORS:
                found.append(f"{descriptors(pid)} descriptors of the {name}, {first} at first")
        return found


def with_patience(act: Callable[[], None]) -> None:
    """Retry while the error is transient: workers are still registering at the service."""
    until_s = time.monotonic() + LIMIT_S
    while True:
        try:
            return act()
        except (StaleEpoch, FailedPrecondition):
            if time.monotonic() > until_s:
                raise


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_campaign(
    num_faults: int, seed: int, say: Callable[[str], None], pool: Pool = PLAIN, only: Sequence[str] = ()
) -> Report:
    """Run at least `num_faults` faults, on clusters with each store; `report.finding` names the round that failed.

    Where `report.unseen` names something then, up to FURTHER more follow.

    `only`: the names of the kinds to draw; () = all.
    """
    kinds = [kind for kind in (TIER_KINDS if pool.tiers else KINDS) if not only or kind.name in only]
    stores = [store for store in STORES if any(store in kind.stores for kind in kinds)]
    report, rng, number = Report(num_faults, bool(pool.tiers), only), Random(seed), 0
    with one_thread():
        while not (report.finding or report.is_over):
            store = stores[number % len(stores)]
            left = num_faults - report.faults.total()
            share = min(ROUNDS_PER_CLUSTER, left if number else max(1, left // len(stores)))
            try:
                run_cluster(
                    Plan(store, pool, local=rng.random() < 0.5), share, kinds, Random(rng.getrandbits(64)), report, say
                )
            except Finding as finding:
                report.finding = str(finding)
            except (AssertionError, KvplaneError, grpc.RpcError) as error:
                report.finding = f"the processes with {store} did not start or end: {error}"
            number += 1
    return report


def run_cluster(
    plan: Plan, num_faults: int, all_kinds: list[Kind], rng: Random, report: Report, say: Callable[[str], None]
) -> None:
    """Run rounds on one cluster, from start to end. The last cluster continues while the campaign is not over."""
    until = report.faults.total() + num_faults
    with tempfile.TemporaryDirectory(prefix="kvplane-") as folder, running(Path(folder), plan) as cluster:
        requests = (Returning if plan.pool.tiers else Requests)(plan.pool.max_model_len, rng.getrandbits(32))
        kinds = [kind for kind in all_kinds if kind.fits(cluster)]
        if not kinds:
            raise Finding(f"none of the kinds is possible here: {[kind.name for kind in all_kinds]}")
        bag: list[Kind] = []
        while report.faults.total() < until or (until >= report.asked and not report.is_over):
            chosen = draw_kinds(bag, kinds, rng)
            names, began_s = " and ".join(kind.name for kind in chosen), time.monotonic()
            try:
                Round(cluster, requests, rng, report).run(chosen)
            except (AssertionError, KvplaneError, TooLate, grpc.RpcError) as error:
                raise Finding(f"fault {report.faults.total()}, {plan.store}, {names}: {error}") from error
            say(f"{report.faults.total():>4} {plan.store:<6} {time.monotonic() - began_s:5.1f} s  {names}")
            if plan.store == "sqlite" and rng.random() < 0.3:
                cluster.copy_store()
        report.restarts += cluster.restarts


def draw_kinds(bag: list[Kind], kinds: list[Kind], rng: Random) -> list[Kind]:
    """The next kind of a shuffled bag, which is refilled when empty; sometimes two at once."""
    chosen: list[Kind] = []
    for _ in range(2 if rng.random() < SHARE_OF_PAIRS else 1):
        if not bag:
            bag.extend(rng.sample(kinds, len(kinds)))
        if not chosen or not (chosen[0].alone or bag[-1].alone or chosen[0] is bag[-1]):
            chosen.append(bag.pop())
    return chosen
