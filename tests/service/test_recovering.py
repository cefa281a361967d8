"""A replica that comes back keeps nobody else waiting."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from kvplane_service.config import Config
from kvplane_service.core.replica import Replica
from tests.service.rig import SPEC, WAIT_S, column, running, until


def test_other_replicas_are_answered_while_a_memory_is_compared(tmp_path, monkeypatch):
    config = Config(listen="127.0.0.1:0", store=f"sqlite:{tmp_path / 'entries.db'}")
    with running(config) as service:
        service.register("a")
        service.open("a").step()
    begun, may_end, real = threading.Event(), threading.Event(), Replica.regain

    def regain(self, *given):
        begun.set()
        assert may_end.wait(WAIT_S)
        return real(self, *given)

    monkeypatch.setattr(Replica, "regain", regain)
    with running(config) as service, ThreadPoolExecutor() as pool:
        until(lambda: not service.describe("a").store.loading)
        opening = pool.submit(service.open, "a", stamp_table=column(*[0] * SPEC.num_blocks, size=8))
        assert begun.wait(WAIT_S)
        service.register("b")
        stream = service.open("b")
        for _ in range(20):
            assert stream.step().WhichOneof("kind") == "result"
        assert (service.state("a"), opening.done()) == ("RECOVERING", False)
        may_end.set()
        assert opening.result(WAIT_S).opened.epoch > 1
        assert service.state("a") == "LIVE"
