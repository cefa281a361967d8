"""Faults of a fleet under load, and what must hold afterwards: nothing is lost, wrong, or granted twice."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from random import Random

from tests.faults.campaign import one_thread
from tests.fleet import clocks, history
from tests.fleet.kinds import HARMLESS, OF_CLOCKS, OF_HOSTS, OF_ROUTERS, TRAPS, Fault, Scene
from tests.fleet.load import LIMIT_S, Load, Report
from tests.fleet.processes import Fleet, Shape, running
from tests.fleet.routers import AGREE_S, logs_of


def strike(scene: Scene, fault: Fault, report: Report) -> None:
    """One round: requests, a fault, the repair, and every answer."""
    name, routers = name_of(fault), scene.fleet.routers
    scene.trapped, ended = scene.replica(), report.ended.total()
    with routers.compared(name) if routers is not None else nullcontext():
        scene.load.ask(scene.trapped, TRAPS.get(fault))
        scene.load.listen(scene.rng.uniform(0, 0.5))
        fault(scene)
        scene.fleet.repair()
        began_s = time.monotonic()
        scene.load.finish()
    report.faults[name] += 1
    report.recovered_s[name].append(time.monotonic() - began_s)
    if fault in HARMLESS and report.ended.total() > ended:
        report.findings.append(f"an engine ended: {dict(report.ended)}")
    if routers is not None:
        scene.load.ask_all()
        if said := routers.compare_quiet(name, scene.load.ask_all):
            report.findings.append(f"{AGREE_S:g} s after the repair {said}")
        report.routers = routers.counts


def name_of(fault: Fault) -> str:
    return fault.__name__.replace("_", " ")


def run(
    shape: Shape, faults: Sequence[Fault], seed: int, say: Callable[[str], None], limit_s: float = LIMIT_S
) -> Report:
    """Run these faults, until one breaks a rule. A request is lost that is not answered `limit_s` after a repair."""
    report, rng = Report(shape.ownership), Random(seed)
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder, one_thread(), running(Path(folder), shape) as fleet:
        scene = Scene(fleet, Load(fleet, seed, report, limit_s), rng)
        say(fleet.network_line)
        for fault in faults:
            if lacks := lack_of(fault, fleet):
                say(f"{name_of(fault)}: LEFT OUT, it needs {lacks}")
                continue
            strike(scene, fault, report)
            judge(fleet, report)
            report.findings += scene.complaints
            say(f"{name_of(fault)}: {report.line}")
            if report.findings:
                break
        report.findings += tracebacks(fleet)
        for finding in report.findings:
            say(f"VIOLATION: {finding}")
    return report


def lack_of(fault: Fault, fleet: Fleet) -> str:
    """What this machine lacks for a kind of fault; "" if it lacks nothing."""
    if fault in OF_HOSTS and not fleet.network.has_hosts:
        return "network namespaces"
    if fault in OF_ROUTERS and fleet.routers is None:
        return "routers"
    return "libfaketime" if fault in OF_CLOCKS and clocks.library() is None else ""


def judge(fleet: Fleet, report: Report) -> None:
    """Look at what every process noted so far."""
    events = history.read(fleet.history)
    report.findings += history.violations(events)
    report.epochs = len({(one.replica, one.epoch) for one in events if isinstance(one, history.Granted)})
    report.failovers = history.failovers(events)
    report.findings += [f"{report.lost} requests were lost"] * bool(report.lost)
    report.knocks, report.taken = fleet.knocks, fleet.taken


def tracebacks(fleet: Fleet) -> list[str]:
    """What no process may log."""
    logs = [*fleet.logs.iterdir(), *fleet.folder.glob("service-*/service-*.log"), *logs_of(fleet.folder)]
    texts = {log.name: log.read_text() for log in logs}
    return [f"{name}: {text[text.index('Traceback') :][:2000]}" for name, text in texts.items() if "Traceback" in text]
