"""Engine replicas on a fleet of services: each on a thread of its own, until it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

import kvplane
from kvplane.base.stamp_table import StampTable, table_bytes
from kvplane.session.options import draw_nonce
from kvplane.session.reopening import Revival
from kvplane_kernels.torch_ops import TorchOps
from kvplane_worker import pages
from kvplane_worker.pages import PageBuffers
from tests.engine.reference.engine import Engine
from tests.engine.reference.model import Model
from tests.engine.reference.ranks import RankMemory
from tests.engine.reference.request import Request
from tests.engine.reference.scheduler import SchedulerConfig
from tests.engine.reference.weights import draw_weights
from tests.engine.twin import Twin
from tests.engine.workload import Requests
from tests.engine.world import Pool
from tests.store.servers import wait_until

POOL = Pool(num_blocks=150)
AT_ONCE = 2
MAX_NEW = 8
LIMIT_S = 60.0
LONGEST = 90  # tokens of a request


class EngineThread(threading.Thread):
    """One replica and its engine. Read the counts from any thread.

    Attributes:
        asked, answered: requests. compared, differing: output tokens, compared with the dense twin. hit: prompt tokens.
        epochs: one for each service that had the replica.
        failure: what ended the thread before it was stopped.
    """

    def __init__(self, name: str, home: str, addresses: str, seed: int) -> None:
        """Register the replica at `home`, then know the whole list."""
        super().__init__(name=name, daemon=True)
        self.asked = self.answered = self.compared = self.differing = self.hit = 0
        self.epochs: set[int] = set()
        self.failure: BaseException | None = None
        self._home = home
        self._addresses = addresses
        self._requests = Requests(LONGEST, seed)
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.failure = error
            raise

    def _work(self) -> None:
        ops, weights = TorchOps(), draw_weights(POOL.model)
        with kvplane.connect(self._home) as client:
            client.register_replica(self.name, POOL.source, num_ranks=POOL.model.num_ranks)
        memory = [empty_memory(ops) for _ in range(POOL.model.num_ranks)]
        model = Model(POOL.model, weights, [one.pages for one in memory], ops)
        twin = Twin(POOL.model, weights)
        with kvplane.connect(self._addresses) as client:
            session: kvplane.Session | None = None

            def open_session(revive: Callable[[], Revival]) -> kvplane.Session:
                nonlocal session
                session = client.lasting_session(self.name, revive)
                return session

            engine = Engine(open_session, memory, model, SchedulerConfig(token_budget=64))
            assert session is not None
            while engine.has_work or not self._stopping.is_set():
                if not self._stopping.is_set() and self.asked - self.answered < AT_ONCE:
                    request = self._requests.next()
                    engine.add(replace(request, max_new_tokens=min(request.max_new_tokens, MAX_NEW)))
                    self.asked += 1
                for request in engine.step():
                    self._compare(request, twin)
                self.epochs.add(session.epoch)

    def _compare(self, request: Request, twin: Twin) -> None:
        expected = twin.logits(request.tokens[:-1])[len(request.prompt) - 1 :].argmax(dim=1).tolist()
        self.compared += len(expected)
        self.differing += sum(a != b for a, b in zip(expected, request.output, strict=True))
        self.hit += sum(request.hits)
        self._requests.done(request)
        self.answered += 1

    def wait_for(self, answered: int) -> None:
        """Wait until this number of requests is answered."""
        wait_until(lambda: self.answered >= answered or self.failure is not None, f"{self.name} continues", LIMIT_S)
        assert self.failure is None, f"{self.name}: {self.failure}"

    def finish(self) -> None:
        """Ask nothing more, and wait for the last answer."""
        self._stopping.set()
        self.join(LIMIT_S)
        assert not self.is_alive(), f"{self.name} does not end"
        assert self.failure is None, f"{self.name}: {self.failure}"


def all_go_on(engines: Sequence[EngineThread], requests: int = 1) -> None:
    """Wait until each has answered this number of further requests."""
    wanted = [engine.answered + requests for engine in engines]
    for engine, number in zip(engines, wanted, strict=True):
        engine.wait_for(number)


def empty_memory(ops: TorchOps) -> RankMemory:
    """One rank's pages, NaN all over, and the table of their stamps."""
    plan = POOL.rank_plan
    buffers = PageBuffers.allocate(plan, "cpu")
    buffers.memory.view(torch.float64).fill_(float("nan"))
    stamps = StampTable.create(bytearray(table_bytes(plan.num_blocks)), plan.num_blocks, incarnation=draw_nonce() | 1)
    return RankMemory(buffers, stamps, pages.PageMover(buffers, ops))
