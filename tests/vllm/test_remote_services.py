"""Mode remote while services with a store are killed, drained and replaced: no request gets lost, no token differs."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache

import pytest

from tests.store.servers import Server
from tests.vllm import environment, processes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
LONG_DRAIN_S = 120


@pytest.fixture(scope="module", autouse=True)
def vllm():
    environment.set_up()


@pytest.fixture(params=["on", "off"])
def pipeline(request):
    return request.param


def aborts(kind, *more, **options):
    return processes.run("remote_aborts.py", "llama", kind, 1, 60, *more, **options)


stock_tokens = cache(lambda: {prompt: one for prompt, (one,) in aborts("stock")["tokens"].items()})


def check(pipeline, address, disturb, *worker):
    """Answer requests while `disturb` is called four times; returns the result."""
    found = aborts(pipeline, address, "r", "disturbed", *worker, on_step=disturb)
    answers = [(prompt, one) for prompt, many in found["tokens"].items() for one in many]
    print(f"{len(answers)} answers, {found['lives']} sessions", *found["said"], sep="\n  ")
    assert len(answers) + found["aborted"] == found["sent"]
    assert all(one == stock_tokens()[prompt] for prompt, one in answers)
    return found


def said(found, text):
    return sum(text in line for line in found["said"])


@pytest.mark.parametrize("end", ["kill", "drain"])
def test_a_service_is_started_again_on_its_store(pipeline, end, tmp_path):
    with processes.Service(store=f"sqlite:{tmp_path}/store.db", drain_grace_ms=500) as service:

        def disturb():
            getattr(service, end)()
            service.start()

        found = check(pipeline, service.address, disturb)
    assert found["lives"] > 2
    assert said(found, "the session ended: the service was restarted") == found["lives"] - 1
    assert said(found, "computed again in a new session") == found["lives"] - 1


@pytest.mark.parametrize("end", ["kill", "drain"])
def test_the_pages_of_a_worker_keep_their_cache_when_the_service_is_started_again(pipeline, end, tmp_path):
    settings = {"store": f"sqlite:{tmp_path}/store.db", "store_flush_ms": 10, "drain_grace_ms": 500}
    with processes.worker_in(tmp_path / "w") as worker, processes.Service(**settings) as service:

        def disturb():
            getattr(service, end)()
            service.start()

        found = check(pipeline, service.address, disturb, worker)
    kept = [int(line.split()[4]) for line in found["said"] if "keys kept" in line]
    assert found["lives"] > 2
    assert len(kept) == found["lives"] - 1, "the first life began before the log was read"
    assert max(kept) > 0


@contextmanager
def pair(tmp_path, drain_s):
    """Two services that share a Redis."""
    redis = Server(tmp_path / "redis")
    try:
        settings = {"store": f"redis://{redis.address}", "owner_lease_ms": 1000, "drain_grace_ms": 1000 * drain_s}
        with processes.Service(**settings) as one, processes.Service(**settings) as other:
            yield [one, other]
    finally:
        redis.kill()


@pytest.mark.parametrize("end", ["kill", "drain"])
def test_another_service_takes_over(pipeline, end, tmp_path):
    """The two services end in turn. A service that drains exits when the engine has moved, long before its grace."""
    with pair(tmp_path, LONG_DRAIN_S) as services:

        def disturb():
            getattr(services[0], end)()
            services[0].start()
            services.reverse()

        found = check(pipeline, ",".join(one.address for one in services), disturb)
    assert found["lives"] > 2
    assert said(found, "computed again in a new session") == found["lives"] - 1
    if end == "drain":
        assert said(found, "the service drains: ") == found["lives"] - 1


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_requests_with_adapters_and_grammars_do_not_wait_for_each_other(pipeline, mode):
    """Also where few steps may be in flight."""
    with processes.Service(max_steps_in_flight=2) as service:
        found = processes.run("waiting_requests.py", service.address, "r", pipeline, mode)
    print(pipeline, mode, found)
    assert all(steps <= 3 and messages <= 6 for steps, messages in found.values()), found
