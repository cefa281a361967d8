"""Engines in pods that work through what happens to a release: no request is lost, and no hit is wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.cluster.cluster import Failed, Object, Space, merged, wait_until
from tests.cluster.programs import Program, add_programs, counts_of, is_there, script
from tests.cluster.runs import Run

ENGINES = 3
FURTHER = 20  # requests that each engine answers after an event
SERVICE = "app.kubernetes.io/component=service"
STORE = "app.kubernetes.io/component=valkey"
QUICK: Object = {"drain": {"preStopSeconds": 2, "graceSeconds": 10}, "podDisruptionBudget": {"maxUnavailable": 1}}


@dataclass(frozen=True)
class Promise:
    """A release under load, and what holds for it.

    Attributes:
        keeps: whether a service that begins again has the keys of pages that still have their content.
    """

    slug: str
    title: str
    values: Object
    processes: int
    keeps: bool


BUILT_IN = Promise("load", "3 services, built-in store", {"replicas": 3, "store": {"type": "builtin"}}, 3, True)
SQLITE = Promise("sqlite", "1 service, SQLite", {"store": {"type": "sqlite", "sqlite": {"size": "64Mi"}}}, 1, True)
NONE = Promise("none", "1 service, no store", {}, 1, False)


def addresses(space: Space, release: str = "kvplane") -> str:
    """Where engines connect, as the notes of a release say."""
    end = f"{space.name}.svc.cluster.local"
    return f"{release}.{end}:7070,*.{release}-headless.{end}"


class Engines:
    """Engine pods of one namespace."""

    def __init__(self, space: Space, count: int = ENGINES) -> None:
        self.space = space
        self.names = [f"engine-{at}" for at in range(count)]

    def start(self) -> None:
        add_programs(self.space)
        image = self.space.cluster.images.service
        for at, name in enumerate(self.names):
            command = script("engine", addresses(self.space), name, str(at + 1))
            self.space.apply(Program(name, image, command).pod)
        for name in self.names:
            wait_until(is_there(self.space, name), f"{name} works", 180)
        self.go_on(5)

    def counts(self) -> list[Object]:
        return [counts_of(self.space, name) for name in self.names]

    def go_on(self, further: int = FURTHER, limit_s: float = 180) -> None:
        """Wait until each has answered this number of further requests."""
        wanted = [one["answered"] + further for one in self.counts()]

        def done() -> bool:
            return all(one["answered"] >= least for one, least in zip(self.counts(), wanted, strict=True))

        wait_until(done, f"each engine answers {further} further requests", limit_s)

    def finish(self) -> list[Object]:
        """Ask nothing more; returns the counts after the last answer."""
        for name in self.names:
            self.space.execute(name, "python", "-c", "import os; os.kill(1, 15)")
        for name in self.names:
            self.space.ended(name)
        return self.counts()


def check(counts: Sequence[Object]) -> None:
    """No request is refused, and no read of a page and no token is wrong. Raises Failed."""
    for name in ("refused", "wrong_tokens", "wrong_reads"):
        total = sum(one[name] for one in counts)
        if total:
            raise Failed(f"{name}: {total}")


def difference(before: Sequence[Object], after: Sequence[Object], keeps: bool | None) -> str:
    """What the engines did during an event. Raises Failed if keys were not kept as promised; None = no promise."""
    check(after)
    answered = sum(one["answered"] for one in after) - sum(one["answered"] for one in before)
    opened = [tuple(kept) for one, old in zip(after, before, strict=True) for kept in one["kept"][len(old["kept"]) :]]
    kept, pages = sum(one for one, _ in opened), sum(pages for _, pages in opened)
    said = f"{answered} answered, 0 lost, 0 wrong"
    if not opened and keeps is not None:
        raise Failed("no session moved: the event ended no service that an engine used")
    if not opened:
        return f"{said}; no session moved"
    if keeps is True and not kept:
        raise Failed(f"{len(opened)} sessions were opened again and kept no key of {pages} pages")
    if keeps is False and kept:
        raise Failed(f"{len(opened)} sessions kept {kept} keys, and there is no store")
    return f"{said}; {len(opened)} sessions moved, {kept} of {pages} pages kept their key"


Event = Callable[[Space, Promise], None]


def rolling_upgrade(space: Space, of: Promise) -> None:
    """Every pod of the service is replaced, one at a time."""
    before = uids(space, SERVICE)
    space.upgrade(merged(merged(QUICK, of.values), {"podAnnotations": {"test/generation": "2"}}))
    are_others(space, before, of)


def busiest(space: Space, of: Promise) -> str:
    """The pod of the service that owns most replicas."""
    owned = {}
    for at in range(of.processes):
        said = space.execute(f"kvplane-{at}", "kvplane", "replicas", "--output", "json")
        owned[f"kvplane-{at}"] = len(json.loads(said)["replicas"])
    return max(owned, key=lambda pod: owned[pod])


def drain(space: Space, of: Promise) -> None:
    """The busiest pod of the service is deleted: preStop, SIGTERM, and its replicas move."""
    space.kubectl("delete", "pod", busiest(space, of), "--wait=true", limit_s=120)
    space.ready(SERVICE, of.processes)


def kill(space: Space, of: Promise) -> None:
    """The busiest pod of the service ends at once, as with its node."""
    pod = busiest(space, of)
    space.kubectl("delete", "pod", pod, "--force", "--grace-period=0", "--wait=true", limit_s=120)
    space.ready(SERVICE, of.processes)


def restart_store(space: Space, of: Promise) -> None:
    """The store's pod ends at once; it had no disk, so that the next one is empty."""
    before = uids(space, STORE)
    space.kubectl("delete", "pod", f"--selector={STORE}", "--force", "--grace-period=0", limit_s=120)
    wait_until(lambda: not before & uids(space, STORE), "the store's pod is another one", 60)
    space.ready(STORE, 1)


def roll_back(space: Space, of: Promise) -> None:
    """`helm rollback` to the first revision."""
    before = uids(space, SERVICE)
    where = f"--namespace={space.name}"
    space.cluster.helm("rollback", "kvplane", "1", where, "--wait", "--timeout=5m")
    are_others(space, before, of)


def are_others(space: Space, before: set[str], of: Promise) -> None:
    """Wait until every pod of the service is another one, and ready: Helm 3.6 does not wait for a single one."""
    wait_until(lambda: not before & uids(space, SERVICE), "every pod is another one", 240)
    space.ready(SERVICE, of.processes)


def uids(space: Space, selector: str) -> set[str]:
    """All pods, those that are being deleted too."""
    found = space.cluster.items(space.name, "pods", f"--selector={selector}")
    return {str(pod["metadata"]["uid"]) for pod in found}


@dataclass(frozen=True)
class Step:
    """An event, and whether it ends a service, so that sessions move."""

    name: str
    event: Event
    moves: bool = True


# A store that was lost while the services ran is written again by them: a pod that is killed later has its keys there.
EVENTS = (
    Step("rolling upgrade", rolling_upgrade),
    Step("drain of a pod (SIGTERM)", drain),
    Step("restart of the store", restart_store, moves=False),
    Step("pod killed (--force --grace-period=0)", kill),
    Step("helm rollback", roll_back),
)


def run_load(run: Run, of: Promise, steps: Sequence[Step]) -> None:
    """Rows of one release under load."""
    with run.space(of.slug) as space:
        engines = Engines(space)
        begun = False
        with run.row(f"load: {of.title}", space) as seen:
            space.install(merged(QUICK, of.values))
            engines.start()
            counts = engines.counts()
            check(counts)
            seen.text = f"{len(counts)} engines, {sum(one['answered'] for one in counts)} requests answered"
            begun = True
        for step in steps if begun else ():
            with run.row(f"  {step.name}", space) as seen:
                before = engines.counts()
                stall = Stall(engines)
                with stall:
                    step.event(space, of)
                engines.go_on()
                seen.text = difference(before, engines.counts(), of.keeps if step.moves else None)
        if begun:
            with run.row("  end of the load", space) as seen:
                seen.text = total(engines.finish())


class Stall(threading.Thread):
    """Looks at the engines while an event happens, so that one that has ended is seen then."""

    def __init__(self, engines: Engines) -> None:
        super().__init__(daemon=True)
        self._engines, self._over, self._failure = engines, threading.Event(), ""

    def __enter__(self) -> Stall:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self.join(60)
        if self._failure and raised[0] is None:
            raise Failed(self._failure)

    def run(self) -> None:
        while not self._over.wait(2):
            for name in self._engines.names:
                status = self._engines.space.cluster.get(self._engines.space.name, "pod", name)["status"]
                if status.get("phase") != "Running":
                    self._failure = f"{name} has ended: {json.dumps(status.get('containerStatuses'))[-300:]}"


def total(counts: Sequence[Object]) -> str:
    """The sums of all counts at the end. Raises Failed if a request was lost."""
    check(counts)
    sums = {name: sum(one[name] for one in counts) for name in ("asked", "answered", "tokens", "read", "prompt", "hit")}
    again = sum(one["again"] for one in counts)
    if sums["asked"] != sums["answered"]:
        raise Failed(f"{sums['asked'] - sums['answered']} of {sums['asked']} requests were lost")
    share = sums["hit"] / max(1, sums["prompt"])
    longest = max(one["longest_s"] for one in counts)
    return (
        f"{sums['answered']} of {sums['asked']} requests answered, {sums['tokens']} tokens and {sums['read']} reads "
        f"of pages, 0 wrong; {again} began again; {share:.0%} of prompts hit; longest step {longest:.1f} s"
    )
