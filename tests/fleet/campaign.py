"""Faults of a fleet under load, and what must hold afterwards: nothing is lost, wrong, or granted twice."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from kvplane.base.errors import KvplaneError
from kvplane_worker.engine.request import Request
from kvplane_worker.engine.weights import draw_weights
from tests.engine.twin import Twin
from tests.engine.workload import Requests
from tests.faults.campaign import one_thread
from tests.fleet import history
from tests.fleet.processes import POOL, Fleet, Replica, Service, Shape, pause, running

LIMIT_S = 120.0
LONGEST, MAX_NEW, AT_ONCE = 90, 6, 2


@dataclass
class Report:
    """Results of a campaign on one kind of ownership.

    Attributes:
        recovered_s: longest time from the repair to the last answer, by kind of fault.
        ended: engine processes that ended with an error, and were started again.
    """

    ownership: str
    faults: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    tokens: int = 0
    differing: int = 0
    hits: int = 0
    lost: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    epochs: int = 0
    knocks: int = 0
    taken: int = 0
    recovered_s: dict[str, float] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    @property
    def line(self) -> str:
        return (
            f"ownership={self.ownership} faults={self.faults.total()} requests={self.requests} lost={self.lost} "
            f"tokens={self.tokens} differing={self.differing} hit={self.hits} epochs={self.epochs} "
            f"rivals={self.knocks} granted={self.taken} ended={self.ended.total()} "
            f"recovered_s={max(self.recovered_s.values(), default=0.0):.1f} violations={len(self.findings)}"
        )


class Load:
    """Requests of all replicas, and the answers compared with the dense model."""

    def __init__(self, fleet: Fleet, seed: int, report: Report) -> None:
        self._fleet, self._report = fleet, report
        self._sources = [Requests(LONGEST, seed * 100 + at) for at in range(len(fleet.replicas))]
        self._sent: list[dict[int, Request]] = [{} for _ in fleet.replicas]
        self._twin = Twin(POOL.model, draw_weights(POOL.model))

    def ask(self) -> None:
        """Send each engine some requests."""
        for source, sent, replica in zip(self._sources, self._sent, self._fleet.replicas, strict=True):
            requests = [source.next() for _ in range(AT_ONCE)]
            sent.update(enumerate(replace(one, max_new_tokens=min(one.max_new_tokens, MAX_NEW)) for one in requests))
            replica.engines.ask({number: (one.prompt, one.max_new_tokens) for number, one in sent.items()})

    @property
    def is_done(self) -> bool:
        return all(replica.engines.is_done for replica in self._fleet.replicas)

    def listen(self, seconds: float, repaired: bool = False) -> None:
        """Receive answers for some time. Once the fleet is repaired, engines that have ended are started again."""
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s and not (repaired and self.is_done):
            for replica in self._fleet.replicas:
                self._note(replica.engines.listen(0.01))
                if repaired and replica.engines.process is None:
                    self._begin(replica)

    def _begin(self, replica: Replica) -> None:
        try:
            replica.engines.begin()
        except KvplaneError as refused:  # as while grants end
            self._note(refused)

    def _note(self, error: KvplaneError | None) -> None:
        if error is not None:
            self._report.ended[type(error).__name__] += 1

    def finish(self) -> None:
        """Wait for every answer, and compare them."""
        self.listen(LIMIT_S, repaired=True)
        for source, sent, replica in zip(self._sources, self._sent, self._fleet.replicas, strict=True):
            ended, replica.engines.ended = replica.engines.ended, []
            for number, hits, output in ended:
                self._compare(source, sent.pop(number), hits, output)
            self._report.lost += len(sent)
            sent.clear()

    def _compare(self, source: Requests, request: Request, hits: list[int], output: list[int]) -> None:
        wrong = self._twin.count_wrong(request.prompt, output)
        report = self._report
        report.requests += 1
        report.tokens += len(output)
        report.differing += wrong
        report.hits += sum(hits)
        if wrong:
            report.findings.append(f"{wrong} tokens of {request.prompt} differ from the dense model's")
        answered = replace(request)
        answered.tokens = [*request.prompt, *output]
        source.done(answered)


class Scene:
    """The fleet, its load and the random choices of one campaign."""

    def __init__(self, fleet: Fleet, load: Load, rng: Random) -> None:
        self.fleet, self.load, self.rng = fleet, load, rng

    def service(self) -> Service:
        return self.rng.choice(self.fleet.services)

    def replica(self) -> Replica:
        return self.rng.choice(self.fleet.replicas)

    def last(self, leases: float) -> None:
        """Let a fault last."""
        self.load.listen(leases * self.fleet.shape.lease_ms / 1000)

    def knock(self, service: Service, times: int = 2) -> None:
        """Let rivals ask a service."""
        for replica in self.rng.sample(self.fleet.replicas, min(times, len(self.fleet.replicas))):
            self.fleet.knock(service, replica.name)


def kill_service(scene: Scene) -> None:
    """A service is killed, and starts again after its lease, or at once."""
    one = scene.service()
    one.kill()
    scene.last(scene.rng.choice([0, 1.5]))
    one.start()
    scene.knock(one)


def stop_service(scene: Scene) -> None:
    """A service is stopped until others have its replicas, and continues."""
    one = scene.service()
    one.stop(True)
    scene.last(scene.rng.uniform(0.5, 2.5))
    one.stop(False)
    scene.knock(one)


def kill_engine(scene: Scene) -> None:
    """An engine is killed."""
    scene.replica().engines.discard()
    scene.last(0.2)


def stop_engine(scene: Scene) -> None:
    """An engine is stopped, and continues; a rival asks meanwhile."""
    one = scene.replica().engines.process
    if one is not None:
        pause(one)
        scene.knock(scene.service(), 1)
        scene.last(scene.rng.uniform(0.2, 1.5))


def kill_worker(scene: Scene) -> None:
    """A worker is killed with its pages; its engine has to end too."""
    scene.replica().kill_worker()
    scene.last(0.2)


def stop_worker(scene: Scene) -> None:
    """A worker is stopped, and continues."""
    one = scene.replica().worker
    assert one is not None
    pause(one)
    scene.last(scene.rng.uniform(0.2, 1.5))


def cut_table(scene: Scene) -> None:
    """A service cannot reach the table of owners, and everything else."""
    _hold(scene, scene.service(), "to_table")


def cut_index(scene: Scene) -> None:
    """A service cannot reach the index."""
    _hold(scene, scene.service(), "to_index")


def cut_clients(scene: Scene) -> None:
    """Engines and workers cannot reach a service."""
    _hold(scene, scene.service(), "front")


def _hold(scene: Scene, service: Service, link: str) -> None:
    getattr(service, link).hold(True)
    scene.last(scene.rng.uniform(0.5, 2.5))
    if link != "front":
        scene.knock(service)
    getattr(service, link).hold(False)
    scene.knock(service)


def stop_table(scene: Scene) -> None:
    """The server of the table answers nothing, or refuses."""
    scene.fleet.table.stop(True)
    scene.last(scene.rng.uniform(0.5, 1.5))
    scene.knock(scene.service())
    scene.fleet.table.stop(False)


def lose_table(scene: Scene) -> None:
    """The table is lost: a failover without the latest writes, a deleted Lease, or a killed etcd."""
    scene.fleet.table.lose()
    for one in scene.fleet.services:
        scene.knock(one, 1)
    scene.last(1.5)


def fail_over_index(scene: Scene) -> None:
    """The primary of the index is killed before it replicates."""
    scene.fleet.index.fail_over()
    scene.last(0.5)


Fault = Callable[[Scene], None]
FAULTS: Sequence[Fault] = (
    *(
        kill_service,
        stop_service,
        kill_engine,
        stop_engine,
        kill_worker,
        stop_worker,
        cut_table,
        cut_index,
        cut_clients,
    ),
    *(stop_table, lose_table, fail_over_index),
)


def strike(scene: Scene, fault: Fault, report: Report) -> None:
    """One round: requests, a fault, the repair, every answer, and the rules."""
    name = fault.__name__.replace("_", " ")
    scene.load.ask()
    scene.load.listen(scene.rng.uniform(0, 0.5))
    fault(scene)
    scene.fleet.repair()
    began_s = time.monotonic()
    scene.load.finish()
    report.faults[name] += 1
    report.recovered_s[name] = max(report.recovered_s.get(name, 0.0), time.monotonic() - began_s)


def run(shape: Shape, faults: Sequence[Fault], seed: int, say: Callable[[str], None]) -> Report:
    """Run these faults, until one breaks a rule."""
    report, rng = Report(shape.ownership), Random(seed)
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder, one_thread(), running(Path(folder), shape) as fleet:
        scene = Scene(fleet, Load(fleet, seed, report), rng)
        for fault in faults:
            strike(scene, fault, report)
            events = history.read(fleet.history)
            report.findings += history.violations(events)
            report.epochs = len({(one.replica, one.epoch) for one in events if isinstance(one, history.Granted)})
            report.findings += [f"{report.lost} requests were lost"] * bool(report.lost)
            report.knocks, report.taken = fleet.knocks, fleet.taken
            say(f"{fault.__name__.replace('_', ' ')}: {report.line}")
            if report.findings:
                break
        report.findings += tracebacks(fleet)
    return report


def tracebacks(fleet: Fleet) -> list[str]:
    """What no process may log."""
    logs = [*fleet.logs.iterdir(), *fleet.folder.glob("service-*/service-*.log")]
    texts = {log.name: log.read_text() for log in logs}
    return [f"{name}: {text[text.index('Traceback') :][:2000]}" for name, text in texts.items() if "Traceback" in text]
