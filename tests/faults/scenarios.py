"""A scenario for each twin (planted fault): the sequence of faults that the missing rule protects against.

With the product, every answer equals the dense model's. With the twin, an answer differs or the engine ends.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from kvplane.base.errors import KvplaneError, OtherWriter
from kvplane.base.groups import DENSE_RETENTION
from kvplane.v1 import allocation_pb2 as pb
from tests.engine.reference.config import ATTENTION
from tests.engine.reference.weights import draw_weights
from tests.engine.twin import Twin
from tests.engine.world import Pool
from tests.faults import child
from tests.faults.child import LAUNCH, LONG, ORDERS, Trap
from tests.faults.cluster import LEASE_S, LIMIT_S, Cluster, Engines, Plan, is_stopped, resume, running
from tests.store.servers import wait_until

OTHER = [(7 * token + 3) % 251 for token in range(100)]
MAX_NEW = 4
FLOOD = [[Random(number).randrange(256) for _ in range(150)] for number in range(6)]


class Caught(AssertionError):
    """A violation, which only a twin may cause."""


class Stage:
    """A cluster, with the answers of its engine.

    Attributes:
        faults: number of faults so far.
        outputs: outputs of the last prompts, in order.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.faults = 0
        self.outputs: list[list[int]] = []
        model = cluster.plan.pool.model
        self._twin = Twin(model, draw_weights(model))

    def answer(self, *prompts: list[int], engines: Engines | None = None, **how: Any) -> int:
        """Send prompts and compare the answers.
        Returns hit tokens. Raises Caught for a wrong token, or an engine that ends.
        """
        self.ask(*prompts, engines=engines, **how)
        return self.finish(engines)

    def ask(self, *prompts: list[int], engines: Engines | None = None, max_new: int = MAX_NEW, **how: Any) -> None:
        work = {number: (prompt, max_new) for number, prompt in enumerate(prompts)}
        (engines or self.cluster.engines).ask(work, **how)
        self._asked = prompts

    def finish(self, engines: Engines | None = None) -> int:
        """The answers to `ask`; a dead engine is replaced by a new one."""
        engines = engines or self.cluster.engines
        while not engines.is_done:
            refusal = engines.listen(LIMIT_S)
            if refusal is not None:
                raise Caught(f"{type(refusal).__name__}: {refusal}")
            if engines.process is None:
                engines.begin()
        ended, engines.ended = engines.ended, []
        self.outputs = [output for _, _, output in sorted(ended)]
        wrong = sum(self._twin.count_wrong(self._asked[number], output) for number, _, output in ended)
        if wrong:
            raise Caught(f"{wrong} tokens differ")
        return sum(sum(hits) for _, hits, _ in ended)

    def restart_service(self, store: Path | None = None) -> None:
        """Kill the service, and restart it with its store, or with another one."""
        self.faults += 1
        self.cluster.service.kill()
        if store is not None:
            self.faults += 1
            self.cluster.restore_store(store)
        self.cluster.repair()

    def kill_engine(self) -> None:
        """Kill the engine, once it has reported the end of its requests."""
        wait_until(lambda: not self.cluster.describe().running_requests, "an idle engine", LIMIT_S)
        self.faults += 1
        self.cluster.engines.discard()

    def store_now(self) -> Path:
        """Copy the store, once it is up to date."""
        self.cluster.wait_until_stored()
        self.cluster.copy_store()
        return self.cluster.copies[-1]

    def wait_until_stopped(self) -> int:
        """Wait until the engine has stopped itself at its trap. Returns its process."""
        process = self.cluster.engines.process
        assert process is not None
        wait_until(lambda: is_stopped(process.pid), "an engine stops itself", LIMIT_S)
        self.faults += 1
        return process.pid


def store_of_yesterday(stage: Stage) -> None:
    """The store has keys of pages whose content was overwritten since."""
    stage.answer(LONG)
    store = stage.store_now()
    stage.answer(*FLOOD)
    stage.restart_service(store)
    stage.answer(LONG)


def failed_loads(stage: Stage) -> None:
    """Loads failed, and the engine reports it; an older store still has the keys of these pages."""
    stage.answer(LONG)
    store = stage.store_now()
    stage.faults += 1
    stage.answer(OTHER[:5], act="spoil")
    stage.restart_service(store)
    stage.answer(LONG)


def states_run_past(stage: Stage) -> None:
    """Launches with drafts ran past boundaries and left no state there; a new engine continues the conversations."""
    prompts = [flood[:20] for flood in FLOOD[:4]]
    stage.answer(*prompts, max_new=60)
    talks = [prompt + output for prompt, output in zip(prompts, stage.outputs, strict=True)]
    stage.kill_engine()
    stage.cluster.begin_engine()
    stage.answer(*[[*talk[:length], *OTHER[:9]] for talk in talks for length in range(32, len(talk), 16)])


def zombie(stage: Stage) -> None:
    """An engine stops before it carries out orders; another one attaches; the first continues and writes first."""
    cluster = stage.cluster
    stage.answer(LONG)
    sleeper = cluster.engines
    stage.ask(OTHER, FLOOD[0], trap=Trap(ORDERS, 0, signal.SIGSTOP))
    pid = stage.wait_until_stopped()
    rival = Engines(cluster.start_engine)
    try:
        rival.begin()
    except OtherWriter:
        resume([pid])
        stage.finish(sleeper)
        return
    stage.answer(*FLOOD, engines=rival)
    cluster.engines = rival
    resume([pid])
    while sleeper.process is not None:
        sleeper.listen(LIMIT_S)
    stage.answer(*reversed(FLOOD))


def other_memory(stage: Stage) -> None:
    """Both workers are lost; a service without a store gives the new memory the same stamps again.

    Then the store of the old memory comes back.
    """
    cluster = stage.cluster
    stage.answer(LONG)
    store = stage.store_now()
    stage.faults += 1
    cluster.engines.discard()
    cluster.service.kill()
    for rank, worker in enumerate(cluster.workers):
        assert worker is not None
        worker.kill()
        cluster.workers[rank] = None
    cluster.move_store_away()
    cluster.repair()
    cluster.engines.begin()
    stage.answer(OTHER)
    stage.restart_service(store)
    stage.answer(LONG)


def one_rank_differs(stage: Stage) -> None:
    """One rank's pages and stamps are changed by orders that the other rank did not get."""
    stage.answer(LONG)
    stage.kill_engine()
    stage.cluster.do(child.vandal, stage.cluster.addresses[1])
    stage.cluster.begin_engine()
    stage.answer(LONG)


def killed_before_the_launch(stage: Stage) -> None:
    """The stamps of a step are written and its keys were answered, but the step did not run."""
    stage.faults += 1
    stage.answer(LONG, trap=Trap(LAUNCH, 1))


def link_cut(stage: Stage) -> None:
    """A response is lost and sent again."""
    stage.ask(LONG, OTHER)
    stage.cluster.engines.listen(LIMIT_S)
    stage.faults += 1
    stage.cluster.to_service.cut()
    stage.finish()


def lapsed_lease(stage: Stage) -> None:
    """An engine stops for longer than its lease, and continues with its blocks."""
    stage.ask(LONG, *FLOOD[:2], trap=Trap(LAUNCH, 2, signal.SIGSTOP))
    pid = stage.wait_until_stopped()
    lapsed = pb.REPLICA_STATE_LAPSED
    wait_until(lambda: stage.cluster.describe().state == lapsed, "the lease ends", LIMIT_S)
    time.sleep(LEASE_S)  # longer than the interval of the check for expired leases
    resume([pid])
    stage.finish()


def held_pages(stage: Stage) -> None:
    """A transfer reads pages of an ended request while the session resumes and other requests need blocks."""
    stage.answer(LONG)
    stage.answer(OTHER[:5], act="hold")
    stage.faults += 1
    stage.cluster.to_service.cut()
    stage.answer(*FLOOD)
    stage.answer(OTHER[:5], act="release")


TIGHT = Pool(num_blocks=90)


@dataclass(frozen=True)
class Scenario:
    """A scenario, and the twin that it must catch."""

    twin: str
    play: Callable[[Stage], None]
    pool: Pool = TIGHT


SCENARIOS = (
    Scenario("no stamp check", store_of_yesterday),
    Scenario("no restamp on key moves", failed_loads),
    Scenario("sealed check removed", states_run_past, Pool(num_blocks=300, retention_interval=DENSE_RETENTION)),
    Scenario("fencing removed", zombie),
    Scenario("incarnation ignored", other_memory),
    Scenario("one rank unchecked", one_rank_differs),
    Scenario("publication before execution", killed_before_the_launch, Pool(ATTENTION, num_blocks=90)),
    Scenario("orders run twice", link_cut),
    Scenario("lease expiry frees pages", lapsed_lease),
    Scenario("resume forgets held pages", held_pages),
)


def play(scenario: Scenario, twin: str) -> tuple[int, str]:
    """Run a scenario. Returns the number of faults, and what was caught; "" = nothing."""
    plan = Plan(pool=scenario.pool, twin=twin)
    with tempfile.TemporaryDirectory(prefix="kvplane-") as folder, running(Path(folder), plan) as cluster:
        stage = Stage(cluster)
        try:
            scenario.play(stage)
        except (Caught, KvplaneError) as caught:
            return stage.faults, str(caught)
        return stage.faults, ""
