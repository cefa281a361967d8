"""The loop of the engine: schedule, carry out the service's orders on every rank, compute, sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvplane.base.errors import KvplaneError
from kvplane.base.step import News, Resume, StepResult
from kvplane.blocking.session import Session
from kvplane.rank import Rank, RankGroup
from kvplane.scheduling import Counts
from kvplane.session.reopening import Revival
from kvplane_worker.engine.batch import Launch
from kvplane_worker.engine.model import Model
from kvplane_worker.engine.ranks import RankMemory
from kvplane_worker.engine.request import Request
from kvplane_worker.engine.scheduler import Scheduled, Scheduler, SchedulerConfig

OpenSession = Callable[[Callable[[], Revival]], Session]


class LaunchFailed(KvplaneError):
    """A forward pass did not run; the tokens that its step granted are not in the pages."""


class Engine:
    """One engine life on one replica, with all ranks in this process.

        memory = attach_ranks(addresses, ops)
        model = Model(config, weights, [one.pages for one in memory], ops)
        engine = Engine(partial(client.lasting_session, "replica"), memory, model, SchedulerConfig())
        engine.add(Request("q", prompt, max_new_tokens=20))
        while engine.has_work:
            print([request.output for request in engine.step()])

    Steps are synchronous: a launch has finished before the next step is sent. After a restart of the service the engine
    reopens the session with its stamps and requests; running requests continue from their cached blocks.
    """

    def __init__(
        self, open_session: OpenSession, memory: Sequence[RankMemory], model: Model, config: SchedulerConfig
    ) -> None:
        """Open the session, which keeps the keys whose stamps the memory still shows, and claim the pages for it.

        Raises:
            StaleEpoch: a newer engine life owns the pages.
            KvplaneError: the session cannot be opened.
        """
        self._model = model
        self._ranks = [Rank(one.stamps, one.mover) for one in memory]
        self._group = RankGroup([one.stamps for one in memory])
        self._known_requests: Callable[[], tuple[News, tuple[int, ...]]] = _none_yet
        self._known_image: Callable[[], Resume | None] = _no_image_yet
        self._session = open_session(self.revival)
        self._epoch = 0
        self._claim(1)
        self._scheduler = Scheduler(self._session.spec, config)
        self._known_requests, self._known_image = self._scheduler.known_requests, self._scheduler.resume
        self._report_lag = config.report_lag
        self._reported = 0

    @property
    def has_work(self) -> bool:
        """Whether another step is needed."""
        return self._scheduler.has_work

    @property
    def kept_keys(self) -> int:
        """Cached keys that were kept when the session was opened, or reopened on another service."""
        return self._session.kept_keys

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return self._scheduler.num_running

    @property
    def counts(self) -> Counts:
        """Counters since the start."""
        return self._scheduler.counts

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidArgument when it does not fit in max_model_len."""
        self._scheduler.add(request)

    def step(self) -> list[Request]:
        """Run one scheduler iteration. Returns the requests that ended in it."""
        part = self._scheduler.plan()
        answer = self._session.apply(part, executed_through=self._executed_through())
        (result,) = answer.parts
        self._claim(answer.seq)
        self._carry_out(answer)
        scheduled = self._scheduler.apply_result(part, result)
        try:
            self._compute(scheduled)
        except LaunchFailed:
            self._scheduler.lose_step(answer.seq)
        else:
            for rank in self._ranks:
                rank.executed(answer.seq)
        return [request for request in self._scheduler.take_finished() if isinstance(request, Request)]

    def _claim(self, next_seq: int) -> None:
        """Claim the pages from this step on, when the session has a new epoch: after it was opened or reopened."""
        if self._epoch != self._session.epoch:
            self._epoch = self._session.epoch
            self._group.claim(self._epoch, next_seq)

    def revival(self) -> Revival:
        """State with which a restarted service reopens the session: stamps, incarnation, requests and their image."""
        news, running = self._known_requests()
        group, image = self._group, self._known_image()
        stamps = group.agreed_stamps()
        return Revival(stamps, group.incarnation, news, running, resume=image, owner_epoch=group.owner_epoch)

    def _executed_through(self) -> int:
        """The last step that all ranks have executed, reported `report_lag` steps late."""
        finished = self._group.executed_through(self._session.epoch)
        self._reported = max(self._reported, finished - self._report_lag)
        return self._reported

    def _carry_out(self, answer: StepResult) -> None:
        for rank in self._ranks:
            for number, part in enumerate(answer.parts, answer.part):
                rank.carry_out(self._session.epoch, answer.seq, number, part.orders)

    def _compute(self, scheduled: list[Scheduled]) -> None:
        """Run the forward pass of the scheduled rows, and sample their next tokens."""
        if scheduled:
            launch = Launch([one.row for one in scheduled], self._model.device)
            self._scheduler.take(scheduled, self._model.logits(launch))


def _no_image_yet() -> None:
    return None


def _none_yet() -> tuple[News, tuple[int, ...]]:
    return News(), ()
