"""An engine that decides itself, and its mirror in a real service: equal states, divergence, restarts, no waiting."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace

import grpc
import pytest

from kvplane.base.errors import PermissionDenied, QuotaExceeded, Unauthenticated
from kvplane.base.groups import CommitRule
from kvplane.base.session import CORE_VERSION
from kvplane.base.step import Cache, End
from kvplane.blocking import mirror as mirrors
from kvplane.blocking.mirror import MirrorSender
from kvplane.v1 import allocation_pb2 as pb
from kvplane_core.face import state
from kvplane_core.face.part_rows import Update
from kvplane_core.face.state import digest
from kvplane_service.config import Config
from tests.core.builders import open_step
from tests.core.specification import specification_of
from tests.core.test_step_law import MIXES
from tests.service.mirrors import DecidingEngine, open_request, spec_of
from tests.service.rig import WAIT_S, held_thread, running, until


class MirroredEngine(DecidingEngine):
    """A random engine that sends each step to the service at `address`."""

    def __init__(self, address, mix="window and full", seed=1, more_blocks=0, **options):
        spec = spec_of(mix)
        super().__init__(replace(spec, num_blocks=spec.num_blocks + more_blocks), seed)
        self.address, self.options = address, options
        self.attach()

    def attach(self, **terms):
        request = open_request(0, **terms)
        self.sender = MirrorSender(self.address, request, self.spec, self.export, **self.options)

    def export(self):
        return self.replica.seq, state.slices(self.replica)

    def advance(self, steps):
        for _ in range(steps):
            self.run_step()
            self.sender.submit([self.sent[-1]])

    def end_all(self):
        """End every request, in a step."""
        step = open_step(self.replica, self.executed)
        for slot in list(self.text):
            step.update(Update(slot, end=End.FREE))
            del self.text[slot]
        result = step.close()
        assert self.follower.apply(step.recorded()) == result
        self.sender.submit([(step, result)])

    def carry_out(self):
        """Carry out what callers of the service ask for, each in a step of its own; returns how many."""
        asked = self.sender.take_cache_requests()
        for one in asked:
            step = open_step(self.replica, self.executed)
            step.change_cache(Cache(evicted=list(one.blocks), reset=one.reset))
            result, recorded = step.close(), step.recorded()
            assert self.follower.apply(recorded) == result
            self.sender.submit([(recorded, result)], {recorded.seq: one.number})
        return len(asked)

    def answer(self, call):
        """Carry out what comes until the call of a caller has its answer."""
        until(lambda: self.carry_out() < 0 or call.done())
        return call.result()

    def check(self, service):
        assert self.sender.wait_applied(WAIT_S), self.sender.state
        assert service.digest("r") == digest(self.replica)


@contextmanager
def engine_on(service, *args, **options):
    engine = MirroredEngine(service.address, *args, **options)
    try:
        yield engine
    finally:
        engine.sender.close()


@pytest.fixture(scope="module")
def service():
    with running() as one:
        yield one


@pytest.fixture(autouse=True)
def _no_replica(request):
    yield
    if "service" in request.fixturenames:
        one = request.getfixturevalue("service")
        if "r" in one.app.registry:
            one.in_loop(lambda: one.app.registry.remove("r"))


def test_a_new_engine_process_with_another_number_of_blocks_is_mirrored():
    with running() as service:
        with engine_on(service) as engine:
            engine.advance(5)
            engine.check(service)
        with engine_on(service, more_blocks=9) as engine:
            engine.advance(5)
            engine.check(service)
            assert service.describe().spec.num_blocks == engine.spec.num_blocks


@pytest.mark.parametrize("mix", MIXES)
def test_a_service_has_the_state_of_the_engine(service, mix):
    with engine_on(service, mix) as engine:
        for _ in range(3):
            engine.advance(20)
            engine.check(service)
        assert engine.sender.state.divergences == 0
        status = service.describe()
        assert (status.mirror.images, status.mirror.divergences, status.mirror.hidden) == (1, 0, "")
        assert service.state() == "LIVE"


def restamp(core):
    changed = specification_of(core)
    changed.coordinator.pool.restamp(3)
    changed.coordinator.pool.stamped.clear()
    core.adopt(changed)


def diverge(service, engine):
    """Change the state of the service, and run steps until one differs."""
    service.in_loop(lambda: restamp(service.app.registry.get("r").host.replica))
    until(lambda: engine.advance(1) or engine.sender.state.divergences > 0)


def test_a_planted_divergence_ends_with_an_image(service):
    with engine_on(service) as engine:
        engine.advance(5)
        engine.check(service)
        diverge(service, engine)
        engine.advance(5)
        engine.check(service)
        assert service.describe().mirror.divergences == 1
        assert engine.sender.state.images == 2


def test_a_restarted_service_gets_an_image():
    with running() as service:
        engine = MirroredEngine(service.address)
        engine.advance(5)
        engine.check(service)
        address = service.address
    until(lambda: engine.sender.state.problem is not None)
    engine.advance(20)
    with running(Config(listen=address)) as service:
        until(lambda: engine.advance(1) or engine.sender.state.problem is None)
        engine.advance(5)
        engine.check(service)
        assert engine.sender.state.images > 1
        engine.sender.close()


def test_an_engine_that_starts_before_its_service_attaches_later():
    with running() as service:
        address = service.address
    engine = MirroredEngine(address)
    engine.advance(5)
    with running(Config(listen=address)) as service:
        engine.check(service)
        engine.sender.close()


def test_the_engine_does_not_wait_for_a_slow_service(service, monkeypatch):
    """The service holds a step in its thread; the engine continues, and its log grows."""
    monkeypatch.setattr("kvplane_service.replicas.applying.MOST_INLINE_NS", -1)
    with engine_on(service) as engine:
        engine.advance(1)
        engine.check(service)
        with held_thread() as held:
            engine.advance(1)
            assert held.began.wait(WAIT_S)
            engine.advance(50)
            assert engine.sender.state.waiting == 51
        engine.check(service)
        assert engine.sender.state.images == 1


def test_a_full_log_costs_an_image(service, monkeypatch):
    monkeypatch.setattr("kvplane_service.replicas.applying.MOST_INLINE_NS", -1)
    monkeypatch.setattr(mirrors, "MOST_ITERATIONS", 10)
    with engine_on(service) as engine:
        engine.advance(1)
        engine.check(service)
        with held_thread() as held:
            engine.advance(1)
            assert held.began.wait(WAIT_S)
            engine.advance(50)
            assert engine.sender.state.waiting <= 10
        engine.check(service)
        assert engine.sender.state.images > 1


def evict(service, *blocks, **header):
    request = pb.EvictBlocksRequest(header=pb.MutationHeader(replica="r", **header), block_ids=blocks)
    return service.allocation.EvictBlocks.future(request, timeout=WAIT_S)


def test_an_engine_evicts_blocks_for_a_caller_of_the_service(service):
    with engine_on(service) as engine:
        engine.advance(20)
        engine.check(service)
        pool = engine.replica.coordinator.pool
        keyed = [block for block, key in enumerate(pool.key) if key]
        answer = engine.answer(evict(service, *keyed, op_id="once"))
        assert answer.result.seq == engine.replica.seq == 21
        assert keyed
        assert not any(pool.key)
        engine.advance(5)
        engine.check(service)
        assert evict(service, *keyed, op_id="once").result() == answer
        assert not engine.carry_out()


def test_a_reset_is_answered_with_what_the_engine_did(service):
    reset = pb.ResetPrefixCacheRequest(header=pb.MutationHeader(replica="r"))
    with engine_on(service) as engine:
        engine.advance(20)
        engine.check(service)
        for end in (False, True):
            if end:
                engine.end_all()
            assert engine.answer(service.allocation.ResetPrefixCache.future(reset, timeout=WAIT_S)).done is end
        engine.check(service)


def test_a_call_ends_when_the_engine_does_not_carry_it_out(service, monkeypatch):
    monkeypatch.setattr("kvplane_service.replicas.cache_requests.TIMEOUT_S", 0.2)
    with engine_on(service) as engine:
        engine.advance(3)
        engine.check(service)
        assert evict(service, 3).code() is grpc.StatusCode.UNAVAILABLE
        assert evict(service, 99999).code() is grpc.StatusCode.INVALID_ARGUMENT
        assert engine.carry_out() == 1  # the late one
        engine.check(service)


def test_a_request_is_sent_again_after_an_image(service):
    """The step that carried it out is in the image only."""
    with engine_on(service) as engine:
        engine.advance(3)
        engine.check(service)
        call = evict(service, 3)
        until(lambda: engine.sender._requests)
        diverge(service, engine)
        engine.sender.take_cache_requests()
        engine.advance(1)
        assert engine.answer(call).result.seq
        engine.check(service)


def test_other_rules_are_refused_by_name(service, caplog):
    engine = MirroredEngine.__new__(MirroredEngine)
    DecidingEngine.__init__(engine, spec_of("full"), 1)
    engine.address, engine.options = service.address, {}
    engine.attach(commit=CommitRule.REFERENCE)
    until(lambda: engine.sender.ended is not None)
    assert "commit reference" in str(engine.sender.ended)
    assert "not mirrored any more" in caplog.text
    engine.advance(5)


def test_a_service_of_another_version_is_asked_again_until_it_is_upgraded(service, monkeypatch, caplog):
    """In a rolling upgrade engine or service is the first; the engine is not restarted for it."""
    monkeypatch.setattr("kvplane_service.replicas.mirror.CORE_VERSION", CORE_VERSION + 1)
    with engine_on(service) as engine:
        until(lambda: engine.sender.state.problem is not None and "core_version" in engine.sender.state.problem.field)
        until(lambda: "is not mirrored now" in caplog.text)  # it is logged after the state has it
        engine.advance(3)
        assert engine.sender.ended is None
        assert caplog.text.count("is not mirrored now") == 1
        monkeypatch.undo()
        engine.check(service)


@pytest.mark.parametrize("refusal", [Unauthenticated, PermissionDenied, QuotaExceeded])
def test_an_engine_that_is_refused_is_followed_when_the_service_accepts_it(service, monkeypatch, caplog, refusal):
    """Its token is renewed, or its owner's rights and limits are changed; the engine is not restarted for it."""
    refused = []

    def refuse(*given):
        refused.append(given)
        raise refusal("not now", field="token")

    with monkeypatch.context() as patched:
        patched.setattr(mirrors, "register_engine", refuse)
        engine = MirroredEngine(service.address)
        try:
            engine.advance(3)
            until(lambda: len(refused) > 2)
            assert isinstance(engine.sender.state.problem, refusal)
            assert engine.sender.ended is None
            assert caplog.text.count("is not mirrored now") == 1
            patched.undo()
            engine.check(service)
        finally:
            engine.sender.close()


def test_the_sender_thread_ends(service):
    with engine_on(service) as engine:
        engine.advance(3)
        engine.check(service)
    names = [thread.name for thread in threading.enumerate()]
    assert "kvplane-mirror-r" not in names
    assert service.state() == "IDLE"
    assert mirrors.MOST_ITERATIONS >= 1
