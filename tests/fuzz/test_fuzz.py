"""The fuzzer: seeds are answered, earlier findings stay fixed, planted faults are caught, and a short run works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.step import StepResult
from kvplane.v1 import allocation_pb2 as pb
from kvplane.v1 import worker_pb2 as pb_of_worker
from kvplane_core.face.state import digest
from kvplane_service.auth.visible import VisibleReplicas
from kvplane_service.replicas.host import ReplicaHost
from kvplane_service.replicas.step_order import Turn
from kvplane_worker.lending.writer import ProcessName, Writer
from kvplane_worker.rpc.servicer import WorkerServicer
from tests.fuzz import mutator, worker, world

SECONDS = 8
SEEDS = list(mutator.seeds())
FOUND = sorted((Path(__file__).parent / "found").iterdir())


@pytest.fixture(scope="module")
def grounds(tmp_path_factory):
    grounds = world.Grounds(tmp_path_factory.mktemp("grounds"))
    yield grounds
    grounds.loop.close()


def test_seeds_cover_the_handlers(grounds):
    """Each method is answered for a seed, so that its mutations begin behind the first checks."""
    answered = set()
    of_worker = set()
    for program in SEEDS:
        operations = world.decode(program)
        service = world.World(grounds, any(kind == world.ON_STATES for kind, _ in operations))
        for kind, raw in operations:
            if kind < world.SESSION and service.call(world.METHODS[kind], raw) == 0:
                answered.add(world.METHODS[kind])
            if kind >= world.WORKER:
                method = worker.METHODS[kind - world.WORKER]
                of_worker |= {method} if grounds.worker.check(method, raw) == 0 else set()
    unanswered = dict.fromkeys(("kvplane.v1.Admin/Drain", "kvplane.v1.Workers/WatchPeers"), "needs every replica")
    unanswered["kvplane.v1.Allocation/Prefetch"] = "needs tiers"
    assert set(world.METHODS) - answered == set(unanswered)
    assert of_worker == set(worker.METHODS)


@pytest.mark.parametrize("at", range(len(SEEDS)))
def test_invariants_hold_for_every_seed(grounds, at):
    world.run(grounds, SEEDS[at])


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.name)
def test_earlier_findings_stay_fixed(grounds, path):
    world.run(grounds, path.read_bytes())


def test_a_fuzz_program_is_deterministic(grounds):
    def state(program: bytes) -> list[str]:
        world.run(grounds, program)
        return [digest(entry.host.replica) for entry in grounds.registry]

    assert all(state(program) == state(program) for program in SEEDS[::7])


def test_mutations_are_well_formed_and_deterministic(grounds):
    for seed, program in enumerate(SEEDS):
        made = mutator.mutate(program, 8192, seed, lambda raw: raw[::-1])
        assert made == mutator.mutate(program, 8192, seed, lambda raw: raw[::-1])
        assert world.encode(world.decode(made)) == made
        world.run(grounds, made)


def is_seen(grounds) -> bool:
    """Whether some seed violates an invariant."""
    for program in SEEDS:
        try:
            world.run(grounds, program)
        except AssertionError:
            return True
    return False


def test_access_to_another_owners_replica_is_caught(grounds, monkeypatch):
    monkeypatch.setattr(VisibleReplicas, "_check_reach", lambda *_: None)
    monkeypatch.setattr("kvplane_service.auth.visible._may_use", lambda *_: True)
    assert is_seen(grounds)


def test_a_refusal_that_changes_state_is_caught(grounds, monkeypatch):
    apply_unary = ReplicaHost.apply_unary

    def apply_and_refuse(self: ReplicaHost, turn: Turn) -> StepResult:
        result = apply_unary(self, turn)
        if self.replica.seq > 2:  # after the steps that prepare a world
            raise InvalidArgument("but it was done")
        return result

    monkeypatch.setattr(ReplicaHost, "apply_unary", apply_and_refuse)
    assert is_seen(grounds)


def test_an_unexpected_exception_is_caught(grounds, monkeypatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ReplicaHost, "heartbeat", broken)
    heartbeat = pb.SessionRequest(heartbeat={}).SerializeToString()
    opening = world.decode(next(program for program in SEEDS if world.decode(program)[0][0] == world.SESSION))[:1]
    with pytest.raises(AssertionError, match="broke"):
        world.run(grounds, world.encode([*opening, (world.SESSION, heartbeat)]))


def test_an_unauthenticated_caller_that_is_let_in_is_caught(grounds, monkeypatch):
    monkeypatch.setattr("hmac.compare_digest", lambda *_: True)
    assert is_seen(grounds)


def test_a_worker_that_asks_for_no_token_is_caught(grounds, monkeypatch):
    monkeypatch.setattr(WorkerServicer, "_check_token", lambda *_: None)
    assert not is_seen(grounds), "the seeds have the token"
    request = pb_of_worker.DescribeRequest(token="guessed").SerializeToString()
    with pytest.raises(AssertionError, match="needs no token"):
        world.run(grounds, world.encode([(world.WORKER + worker.METHODS.index("Describe"), request)]))


def test_a_worker_whose_refused_attach_lends_pages_is_caught(grounds, monkeypatch):
    monkeypatch.setattr(Writer, "close", lambda _: None)  # which a refused loan calls
    lend = Writer.lend

    def lend_and_refuse(self: Writer, name: ProcessName) -> bool:
        lend(self, name)
        raise InvalidArgument("but it was lent")

    monkeypatch.setattr(Writer, "lend", lend_and_refuse)
    assert is_seen(grounds)


def fuzz(folder: Path, *arguments: str) -> int:
    """Run the fuzzer; returns the number of programs."""
    command = [sys.executable, "-m", "tests.fuzz", *arguments]
    environment = {**os.environ, "TMPDIR": str(folder)}  # where its corpus goes
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    programs = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    assert programs is not None
    return int(programs[1])


def test_a_short_fuzzing_run_finds_nothing(tmp_path):
    pytest.importorskip("atheris", reason="atheris 3 is not installed, see make fuzz in tests/README.md")
    assert fuzz(tmp_path, str(SECONDS)) > len(SEEDS)
