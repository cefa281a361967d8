"""The engine's loop: schedule, carry out the service's orders on every rank, compute, sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvplane.base.errors import KvplaneError
from kvplane.base.step import News, PartResult, Resume, StepResult
from kvplane.blocking.session import Session
from kvplane.rank import Rank, RankGroup
from kvplane.scheduling import Counts
from kvplane.session.reopening import Revival
from kvplane.tier_jobs import TierJobs
from tests.engine.reference.batch import Launch
from tests.engine.reference.canary import Canary
from tests.engine.reference.model import Model
from tests.engine.reference.ranks import RankMemory
from tests.engine.reference.request import Request
from tests.engine.reference.scheduler import Scheduled, Scheduler, SchedulerConfig
from tests.engine.reference.weights import Weights

IDLE_WAIT_S = 0.05
EARLIER_WAIT_S = 60  # for the movers to stop the jobs of an engine before this one
MEASURED_TOKENS = 32  # of a launch whose time per token counts: smaller ones are mostly overhead

OpenSession = Callable[[Callable[[], Revival]], Session]


class LaunchFailed(KvplaneError):
    """A forward pass did not run, so the pages do not contain the tokens that the service granted to its step."""


class Engine:
    """The reference engine of one replica, with all ranks in this process.

        memory = attach_ranks(addresses, ops)
        model = Model(config, weights, [one.pages for one in memory], ops)
        engine = Engine(partial(client.lasting_session, "replica"), memory, model, SchedulerConfig())
        engine.add(Request("q", prompt, max_new_tokens=20))
        while engine.has_work:
            print([request.output for request in engine.step()])

    Steps are synchronous: a launch has finished before the next step is sent. After a restart of the service, the
    engine reopens the session with the stamps (version numbers of the pages' contents) and its requests, and running
    requests continue from their cached blocks.

    Attributes:
        warmed: the kernels that each rank compiled at the start, with CPU time.
    """

    def __init__(
        self, open_session: OpenSession, memory: Sequence[RankMemory], model: Model, config: SchedulerConfig
    ) -> None:
        """Open the session and claim the pages: make the session's engine life (epoch) the only one that may write
        them. Prefix cache keys whose stamp is still the stamp (version number) of their page stay valid.

        Raises:
            StaleEpoch: a newer engine life owns the pages.
            KvplaneError: the session cannot be opened.
        """
        self.warmed = model.warm_up()
        self._model = model
        self._ranks = [Rank(one.stamps, one.mover) for one in memory]
        self._group = RankGroup([one.stamps for one in memory])
        tables = [one.jobs for one in memory if one.jobs is not None]
        self._jobs = TierJobs(tables) if len(tables) == len(memory) else None
        self._known_requests: Callable[[], tuple[News, tuple[int, ...]]] = _none_yet
        self._known_image: Callable[[], Resume | None] = _no_image_yet
        self._session = open_session(self.revival)
        self._epoch = 0
        self._claim(1)
        self._scheduler = Scheduler(self._session.spec, config)
        self._known_requests, self._known_image = self._scheduler.known_requests, self._scheduler.resume
        self._report_lag = config.report_lag
        self._reported = 0
        self._load_deadline_s = config.load_deadline_s
        self._weighs_loads, self._token_ns = config.weighs_loads, 0.0
        self._waits_since: dict[int, float] = {}  # by number of a load: when it was ordered
        self._canary = Canary(model, config.canary_rate) if config.canary_rate else None

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running, or the end of a request was not reported to the service yet."""
        return self._scheduler.has_work

    @property
    def kept_keys(self) -> int:
        """The number of cached keys that stayed valid when the session was opened, or reopened on another service."""
        return self._session.kept_keys

    @property
    def canary(self) -> Canary | None:
        """What compares hits; None if the rate is 0."""
        return self._canary

    @property
    def num_waiting(self) -> int:
        """The number of requests in the queue."""
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        """The number of requests that hold blocks."""
        return self._scheduler.num_running

    @property
    def counts(self) -> Counts:
        """The counters of the scheduler since its start."""
        return self._scheduler.counts

    def add(self, request: Request) -> None:
        """Append a request to the queue. Raises InvalidArgument if it can become longer than max_model_len."""
        self._scheduler.add(request)

    def change_weights(self, weights: Weights) -> list[Request]:
        """Change the weights in place, between two steps: running requests start again, and nothing that was cached is
        ever hit again, on the device, in tiers, in the store, or by a router.

        The reset comes first: it is final when every rank has written its stamps, so that after a crash no key of the
        old weights is verified. Returns the requests that ended meanwhile.
        """
        finished = list[Request]()
        self._scheduler.reset()
        while self._scheduler.is_resetting:
            finished += self.step()
        self._model.replace_weights(weights)
        return finished

    def step(self) -> list[Request]:
        """Run one scheduler iteration and return the requests that ended in it."""
        self._give_up_late_loads()
        part, executed = self._scheduler.plan(), self._executed_through()
        if self._jobs is not None:
            self._jobs.report(part.cache, executed, self._session.next_seq)
            if self._weighs_loads and part.cache.jobs_done:
                part.cache.costs_ns = self._jobs.costs_ns(round(self._token_ns), len(self._session.spec.tiers))
        if self._canary is not None:
            self._canary.report(part.cache)
        self._session.waiting_requests = self._scheduler.num_waiting
        answer = self._session.apply(part, executed_through=executed)
        (result,) = answer.parts
        if self._canary is not None and self._epoch != self._session.epoch:
            self._canary.report_again()
        self._claim(answer.seq)
        self._carry_out(answer)
        scheduled = self._scheduler.apply_result(part, result)
        if self._jobs is not None and not scheduled and self._scheduler.awaits_loads:
            self._jobs.wait(IDLE_WAIT_S)  # nothing to compute before a load ends
        try:
            self._check_hits(scheduled, result)
            self._compute(scheduled)
        except LaunchFailed:
            self._scheduler.lose_step(answer.seq)
        else:
            for rank in self._ranks:
                rank.executed(answer.seq)
        return [request for request in self._scheduler.take_finished() if isinstance(request, Request)]

    def _claim(self, next_seq: int) -> None:
        """Claim the pages for the session's epoch, from step `next_seq` on, if the epoch is new because the session was
        opened or reopened.
        """
        if self._epoch != self._session.epoch:
            self._epoch = self._session.epoch
            self._group.claim(self._epoch, next_seq)
            if self._jobs is not None:
                self._jobs.begin(self._epoch, self._session.busy_blocks)
                self._jobs.await_earlier(EARLIER_WAIT_S)

    def _give_up_late_loads(self) -> None:
        """Compute what was not loaded within the deadline."""
        now, waits = time.monotonic(), self._scheduler.loading
        self._waits_since = {one.load: self._waits_since.get(one.load, now) for one in waits}
        for request in waits:
            if now - self._waits_since[request.load] > self._load_deadline_s:
                self._scheduler.give_up_load(request)

    def revival(self) -> Revival:
        """Return what the session sends to a restarted service: stamps (version numbers of the pages' contents),
        incarnation (a number that identifies the page memory), requests, and the blocks of the running requests (the
        image).
        """
        news, running = self._known_requests()
        group, image = self._group, self._known_image()
        stamps = group.agreed_stamps()
        busy = self._jobs.blocks_loading if self._jobs is not None else ()
        return Revival(
            stamps,
            group.incarnation,
            news,
            running,
            resume=image,
            busy_blocks=busy,
            owner_epoch=group.owner_epoch,
            disk_incarnation=group.disk_incarnation,
        )

    def _executed_through(self) -> int:
        """Return the number of the last step that all ranks have executed, minus `report_lag`; never less than an
        earlier result.
        """
        finished = self._group.executed_through(self._session.epoch)
        self._reported = max(self._reported, finished - self._report_lag)
        return self._reported

    def _carry_out(self, answer: StepResult) -> None:
        for rank in self._ranks:
            for number, part in enumerate(answer.parts, answer.part):
                rank.carry_out(self._session.epoch, answer.seq, number, part.orders)
        for number, part in enumerate(answer.parts, answer.part):
            if self._jobs is not None:
                self._jobs.order(answer.seq, number, part)

    def _check_hits(self, scheduled: list[Scheduled], result: PartResult) -> None:
        """Compare the sampled hits. If one is wrong, the launch must not run, and every request with its blocks
        starts again. Raises LaunchFailed.
        """
        if self._canary is None or not scheduled:
            return
        copies = dict(zip(result.orders.copy_dst, result.orders.copy_src, strict=True))
        wrong = self._canary.check(scheduled, copies)
        if wrong is not None:
            self._scheduler.distrust(wrong.evicted, wrong.requests)
            raise LaunchFailed(f"blocks {sorted(wrong.blocks)} of a hit have other content than their keys name")

    def _compute(self, scheduled: list[Scheduled]) -> None:
        """Run the forward pass of the scheduled rows and sample their next tokens."""
        if not scheduled:
            return
        began = time.perf_counter_ns()
        launch = Launch([one.row for one in scheduled], self._model.device)
        self._scheduler.take(scheduled, self._model.logits(launch))
        num_tokens = sum(len(one.row.tokens) for one in scheduled)
        if num_tokens >= MEASURED_TOKENS:
            took = (time.perf_counter_ns() - began) / num_tokens
            self._token_ns += (took - self._token_ns) / (8 if self._token_ns else 1)


def _no_image_yet() -> None:
    return None


def _none_yet() -> tuple[News, tuple[int, ...]]:
    return News(), ()
