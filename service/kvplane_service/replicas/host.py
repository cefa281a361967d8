"""The host of one replica: it decides whether a step may be applied, and the core decides the result.

    IDLE --open--> LIVE --silence, broken stream--> LAPSED --message of the newest session, open--> LIVE
      ^-----close---'
    RECOVERING --open--> LIVE            (after a restart of the service, until an engine sends its stamps)
    open on a large pool: OPENING while its slices run, IDLE when its caller is cancelled meanwhile
    long step, close with many requests: on a thread; the state stays, and reads and opens wait

No transport, no protobuf and no clock of its own: the gRPC service, the in-process transport and the simulation call
the same code. A refused call changes nothing but the lease.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial

from kvplane.base.errors import InvalidArgument, KvplaneError, OtherWriter, ReplicaLapsed, StaleEpoch
from kvplane.base.groups import ReplicaSpec
from kvplane.base.hashing import HashScheme
from kvplane.base.session import NEW_EPOCH, Opened, OpenRequest
from kvplane.base.step import Part, Step, StepResult
from kvplane_service.config import Config
from kvplane_service.core.replica import Replica
from kvplane_service.decisions.counters import Tally
from kvplane_service.decisions.log import DecisionLog, Life
from kvplane_service.decisions.packed_log import LogBudget
from kvplane_service.replicas.applying import Applying
from kvplane_service.replicas.engine_lives import Clock, EngineLives, Opening, ignore_end, in_slices
from kvplane_service.replicas.events import EventLog, PublicationHold
from kvplane_service.replicas.recovery import Recovering
from kvplane_service.replicas.sessions import OnEnd, SessionSlot, check_request, restarted
from kvplane_service.replicas.step_order import StepOrder, Turn, check_step, part_that_ends_all
from kvplane_service.replicas.trace_context import CURRENT
from kvplane_service.runtime.executors import Offload

FIRST_EPOCH = 1
_NS_PER_MS = 1_000_000


class ReplicaState(Enum):
    """Which writer is accepted."""

    IDLE = "idle"  # no session: unary calls
    LIVE = "live"  # the session
    LAPSED = "lapsed"  # the session, whose lease expired; its entries are withdrawn from subscribers
    RECOVERING = "recovering"  # none: stored entries wait for the stamps of an engine
    OPENING = "opening"  # none: the engine life of a session is beginning


@dataclass(frozen=True, slots=True)
class UnaryStep:
    """The step that a unary mutation belongs to.

    Attributes:
        epoch: engine life, 0 = the current one.
        more: further calls belong to the same step.
        executed_through: as in Step; None = all steps before this call's.
    """

    epoch: int = NEW_EPOCH
    more: bool = False
    executed_through: int | None = None


def new_replica(spec: ReplicaSpec) -> Replica:
    """A replica in its first epoch. Can run on a thread, since a large pool takes long to build."""
    replica = Replica(spec)
    replica.begin_epoch(FIRST_EPOCH)
    return replica


class ReplicaHost:
    """Guards one core Replica: its writer, epochs, order of steps, lease, and publication."""

    def __init__(
        self, name: str, replica: Replica, config: Config, clock: Clock, num_ranks: int = 1,
        logs: LogBudget | None = None,
    ) -> None:
        """`replica`: from `new_replica`; `num_ranks`: of the engine; `logs`: budget shared with other hosts."""
        logs = logs or LogBudget(config.log_bytes)
        self.name = name
        self.replica = replica
        self.scheme = HashScheme.of(replica.spec)
        self.events = EventLog(config.events_resume, logs, config.max_subscribers)
        self.decisions = DecisionLog(config.decision_log_steps, logs)
        self.tally = Tally()
        self.decisions.follow(self.tally.add)
        self.epoch = FIRST_EPOCH
        self._config, self._clock = config, clock
        self._hold = PublicationHold()
        self._steps = Applying(replica, self.decisions, self.events, self._hold, clock)
        self._lives = EngineLives(replica, self.events, self._hold, clock, num_ranks)
        self._order = StepOrder(config.max_steps_in_flight)
        self._session: SessionSlot | None = None
        self._resumable = False  # a session was opened in this epoch and has not closed
        self._life_nonce = 0  # nonce of the session that began this epoch
        self._left = False  # the session has closed: the engine is gone, the epoch has ended
        self._retired: KvplaneError | None = None  # why the replica was removed
        self._owner_epoch = 0  # highest one seen in the page memory

    # ---- state; read only

    @property
    def state(self) -> ReplicaState:
        """Which writer is accepted now."""
        if self._lives.is_opening:
            return ReplicaState.OPENING
        if self._session is None:
            return ReplicaState.RECOVERING if self.recovering else ReplicaState.IDLE
        return ReplicaState.LAPSED if self._is_silent(self._session) else ReplicaState.LIVE

    @property
    def recovering(self) -> Recovering | None:
        """Entries from a store that wait for the engine."""
        return self._lives.recovering

    @property
    def recovered(self) -> Recovering | None:
        """The same entries after an engine verified them."""
        return self._lives.recovered

    @property
    def seq(self) -> int:
        """The last step that was applied completely."""
        return self._order.seq

    @property
    def client(self) -> str:
        """Client name of the newest session, "" when there is none."""
        return self._session.client if self._session else ""

    @property
    def lease_left_ns(self) -> int | None:
        """Nanoseconds until the session's lease expires, 0 when it has; None without a session."""
        session = self._session
        if session is None:
            return None
        return 0 if session.broken else max(0, session.deadline_ns - self._clock())

    def age_ns(self, at_ns: int) -> int:
        """Nanoseconds since `at_ns`, by the clock of decisions."""
        return max(0, self._clock() - at_ns)

    async def idle(self) -> None:
        """Wait until no step is being applied. Read the core before awaiting anything else."""
        await self._steps.idle()

    def check_readable(self, remedy: str = "compute the prefix instead") -> None:
        """Raise ReplicaLapsed when the content of the replica's pages is unknown."""
        self._check_sound()
        if self._left or self.state is ReplicaState.LAPSED:
            how = "has not reconnected" if self.recovering else "is gone or silent"
            if self.state is ReplicaState.OPENING:
                how = "is beginning a new life"
            raise ReplicaLapsed(f"the engine of {self.name} {how}", field="replica", remedy=remedy)

    def check_epoch(self, epoch: int) -> None:
        """Raise StaleEpoch when this is not the current engine life."""
        if epoch != self.epoch:
            raise self._stale_epoch(epoch, "get the current epoch with DescribeReplica")

    def recover(self, recovering: Recovering) -> None:
        """Hold entries from a store until an engine connects; for a host that was not used yet. Reads are
        refused until then.
        """
        self._lives.recovering = recovering
        self.epoch = max(self.epoch, recovering.epoch)
        self._left = True

    def observe_owner_epoch(self, epoch: int) -> None:
        """Note the owner epoch found in the page memory: the next engine life is numbered above it."""
        self._owner_epoch = max(self._owner_epoch, epoch)

    # ---- the session

    def check_open(self, request: OpenRequest) -> None:
        """Raise unless this request may open a session now. Changes nothing but the observed epochs.

        Raises:
            StaleEpoch: `epoch` is neither NEW_EPOCH nor one that a session can resume.
            ServiceRestarted: as StaleEpoch, because the service was restarted, or began another life of this number.
            Unavailable: the store is still being read.
            InvalidArgument: the nonce is in use, or stamps or blocks do not fit this pool.
        """
        self._check_sound()
        check_request(request, self.replica.spec.num_blocks)
        newest = self._session or self._lives.opening
        if newest is not None and newest.nonce == request.nonce:
            raise InvalidArgument(
                f"nonce {request.nonce} is in use",
                field="nonce",
                remedy="draw a random nonce for each stream",
            )
        if self.recovering is not None:
            self.recovering.check_loaded(self.name)
        if request.epoch == NEW_EPOCH:
            return
        if self.recovering is not None:
            self.recovering.observe_epoch(request.epoch)
            raise restarted(f"the service was restarted and lost the requests of {self.name}", self.epoch)
        if request.epoch == self.epoch and request.life_nonce not in (0, self._life_nonce):
            raise restarted(f"this service began another engine life with this number on {self.name}", self.epoch)
        if request.epoch != self.epoch or not self._resumable:
            raise self._stale_epoch(request.epoch, "open with epoch 0 to begin a new engine life")

    async def prove_ahead(self, request: OpenRequest, offload: Offload) -> None:
        """After a restart, verify stored entries on a thread, so that `open` does not delay other replicas.

        May be called for any request; does not affect which session may open. Raises as `check_open`.
        """
        if self.recovering is not None and request.epoch == NEW_EPOCH:
            self.check_open(request)
            await self.recovering.prove_ahead(self.replica, request.stamp_table, offload)

    def next_epoch(self, request: OpenRequest) -> int:
        """The number of the engine life that this request would begin. Raises LimitExceeded."""
        return self._lives.next_epoch(max(self.epoch, self._owner_epoch), request)

    def open(self, request: OpenRequest, on_end: OnEnd | None = None, epoch: int = NEW_EPOCH) -> Opened:
        """Make this the newest session. `on_end` is called once, with the reason, when another one replaces it.

        A new engine life is numbered `epoch` if the workers were claimed for it, and the next number otherwise.

        Raises as `check_open`, and LimitExceeded when all epochs are used.
        """
        opening = self._start_opening(request, on_end or ignore_end, epoch)
        while not self._go_on(opening):
            pass
        return self._opened()

    async def open_in_slices(self, request: OpenRequest, on_end: OnEnd, epoch: int = NEW_EPOCH) -> Opened:
        """As `open`, in slices, so that the event loop serves other replicas while a large pool is processed.

        Until the session is open the replica accepts no other call than a newer open, which replaces this one. When the
        caller is cancelled the work pauses until the next open.

        Raises also the reason that `on_end` is called with.
        """
        await self.idle()
        opening = self._start_opening(request, on_end, epoch)
        try:
            await in_slices(partial(self._go_on, opening), self._clock, self.events.withdraw)
            await in_slices(self._lives.forget_some, self._clock)
        finally:
            opening.is_left = True
        return self._opened()

    def step(self, nonce: int, step: Step, fingerprint: bytes) -> StepResult:
        """Apply a step, or return the stored answer when it was applied before.

        `fingerprint`: digest of the step's content; equal steps have equal fingerprints.

        Raises:
            OtherWriter, StaleEpoch, SequenceError, LimitExceeded: it is not the turn of this step.
            KvplaneError: the core refuses the step's content.
        """
        turn = self._turn(nonce, step, fingerprint)
        return turn if isinstance(turn, StepResult) else turn.done(self._steps.apply(step))

    async def step_aside(self, nonce: int, step: Step, fingerprint: bytes, offload: Offload) -> StepResult:
        """As `step`, but a long step is applied by `offload`; reads of the replica wait for it.

        When the caller is cancelled the step still completes, and its answer is kept. Raises as `step`, and Busy.
        """
        turn = self._turn(nonce, step, fingerprint)
        if isinstance(turn, StepResult):
            return turn

        def done(result: StepResult) -> StepResult:
            if self._session is not None:
                self._session.deadline_ns = self._deadline_ns()  # messages that arrived meanwhile were not read
            return turn.done(result)

        return await self._steps.apply_aside(step, offload, done)

    def heartbeat(self, nonce: int) -> None:
        """Renew the lease. Raises OtherWriter."""
        self._renew(nonce)

    def close(self, nonce: int) -> None:
        """The engine leaves: its requests are freed, its keys are kept for a new life on the same memory.

        Reads are refused until then, because the pages may be overwritten unnoticed. Raises OtherWriter.
        """
        self._renew(nonce)
        step = self._last_step()
        self._steps.apply(step)
        self._closed(step)

    async def close_aside(self, nonce: int, offload: Offload) -> None:
        """As `close`; many requests are freed by `offload`, even when the caller is cancelled. Raises
        OtherWriter, Busy.
        """
        self._renew(nonce)
        step = self._last_step()
        await self._steps.apply_aside(step, offload, lambda _: self._closed(step))

    def lost(self, nonce: int) -> None:
        """The stream of a session broke. Does nothing when it is not the newest session."""
        session = self._session
        if session is not None and session.nonce == nonce:
            session.broken = True
            self.expire()

    def extend_lease(self, late_ns: int) -> None:
        """Extend the session's lease by this much."""
        if self._session is not None:
            self._session.deadline_ns += late_ns

    def expire(self) -> None:
        """Withdraw the replica's entries from subscribers if its lease has expired; call periodically."""
        if self.state is ReplicaState.LAPSED:
            self.events.withdraw()

    # ---- unary calls

    def check_unary(self, at: UnaryStep) -> None:
        """Raise OtherWriter or StaleEpoch unless a unary call may write."""
        self._check_sound()
        if self._session is not None or self.state is ReplicaState.OPENING:
            raise OtherWriter(
                f"{self.name} has a session ({self.state.value})",
                field="replica",
                remedy="close the session, or deregister the replica",
            )
        if at.epoch != NEW_EPOCH and (at.epoch != self.epoch or self._left):
            raise self._stale_epoch(at.epoch, "send epoch 0")

    def apply_unary(self, at: UnaryStep, parts: list[Part]) -> StepResult:
        """Apply parts as (a piece of) a step of their own.

        Raises:
            OtherWriter, StaleEpoch: as check_unary.
            LimitExceeded: too many rows.
            KvplaneError: the core refuses the content.
        """
        self.check_unary(at)
        order = self._order
        executed_through = order.seq if at.executed_through is None else at.executed_through
        step = order.make_next(self.epoch, parts, executed_through, not at.more, CURRENT.get())
        rows = check_step(step, self._order, self.replica.executed_through, self._config)
        result = self._steps.apply(step)
        order.advance(step, rows)
        return result

    def begin_unary(self, at: UnaryStep) -> None:
        """Prepare for a unary call: begin an engine life when the last one has ended, whether the call succeeds or not.

        Raises:
            OtherWriter, StaleEpoch: as check_unary.
        """
        self.check_unary(at)
        if self._left:
            request = OpenRequest(self.name, 0)
            opening = self._start_opening(request, ignore_end, NEW_EPOCH)
            while self._work_on(opening):
                pass
            self._lives.opening = None
            self.events.restore()

    # ---- the end

    @property
    def is_retired(self) -> bool:
        """Whether the replica was removed."""
        return self._retired is not None

    def retire(self, reason: KvplaneError) -> None:
        """Remove the replica: end its session and subscriptions with `reason`, and refuse later calls of this host."""
        self._retired = reason
        session, self._session = self._session, None
        opening, self._lives.opening = self._lives.opening, None
        self.events.close(reason)
        self.decisions.leave_budget()
        if session is not None and not session.broken:
            session.on_end(reason)
        if opening is not None:
            opening.end(reason)

    # ---- inside

    def _start_opening(self, request: OpenRequest, on_end: OnEnd, epoch: int) -> Opening:
        """Replace the current session or opening. Raises as `open`, and changes nothing then."""
        self.check_open(request)
        session, before = self._session, self._lives.opening
        opening = Opening(request, on_end, epoch or request.epoch or self.next_epoch(request))
        if request.epoch == NEW_EPOCH:
            begun = before.take_work(request) if before is not None else None
            opening.work = begun or self._lives.begin(request, self._began)
            self._leave_epoch()
        self._lives.opening = opening
        newer = OtherWriter(f"a newer session of {self.name} is open", field="nonce", remedy="end this engine")
        if session is not None and not session.broken:
            session.on_end(newer)
        if before is not None:
            before.end(newer)
        return opening

    def _go_on(self, opening: Opening) -> bool:
        """Do a slice of the work of an opening. Returns True once its session is the newest."""
        if self._work_on(opening):
            return False
        request, self._lives.opening = opening.request, None
        self._session = SessionSlot(
            request.nonce, request.with_events, request.client, opening.on_end, self._deadline_ns()
        )
        self._resumable = True
        self.events.restore()
        return True

    def _work_on(self, opening: Opening) -> bool:
        """Do a slice of the work of an opening. Returns whether there may be more."""
        if opening.ended is not None:
            raise opening.ended
        self._steps.in_core = True
        has_more = opening.go_on()
        self._steps.in_core = False
        return has_more

    def _began(self, life: Life) -> None:
        opening = self._lives.opening
        assert opening is not None and life.epoch > self.epoch, f"epoch {life.epoch} has begun"
        self.epoch, self._life_nonce = life.epoch, opening.nonce
        self._resumable = self._left = False
        self._order = StepOrder(self._config.max_steps_in_flight)
        self.decisions.append(life)

    def _leave_epoch(self) -> None:
        self._session = None
        self._resumable = False
        self._left = True

    def _opened(self) -> Opened:
        return Opened(
            epoch=self.epoch,
            seq=self._order.seq,
            next_part=self._order.next_part,
            max_steps_in_flight=self._config.max_steps_in_flight,
            max_rows=self._config.max_rows_per_step,
            lease_ms=self._config.lease_ms,
            spec=self.replica.spec,
            free_blocks=self.replica.free_blocks,
            kept_keys=self._lives.kept_keys,
            busy_blocks=self.replica.busy_blocks,
        )

    def _renew(self, nonce: int) -> SessionSlot:
        """Renew the lease of the newest session by a message, and return the session."""
        self._check_sound()
        session = self._session
        if session is None or session.nonce != nonce:
            raise OtherWriter(f"{self.name} has a newer writer", field="nonce", remedy="end this engine")
        session.deadline_ns = self._deadline_ns()
        session.broken = False
        self.events.restore()
        return session

    def _turn(self, nonce: int, step: Step, fingerprint: bytes) -> StepResult | Turn:
        """The stored answer of a repeated step; for the next step, its permission to be applied. Raises as `step`."""
        session = self._renew(nonce)
        if step.epoch != self.epoch:
            raise self._stale_epoch(step.epoch, "end this engine life")
        answer = self._order.find(step, fingerprint)
        if answer is not None:
            return answer
        rows = check_step(step, self._order, self.replica.executed_through, self._config)
        return Turn(self._order, step, rows, fingerprint, session.with_events)

    def _last_step(self) -> Step:
        """The step with which the host ends every request."""
        part = part_that_ends_all(self.replica.requests)
        return self._order.make_next(self.epoch, [part], self.replica.executed_through)

    def _closed(self, step: Step) -> None:
        self._order.advance(step, 0)
        self._leave_epoch()
        self.events.withdraw()

    def _check_sound(self) -> None:
        if self._retired is not None:
            raise self._retired
        self._steps.check(self.name)

    def _stale_epoch(self, epoch: int, remedy: str) -> StaleEpoch:
        return StaleEpoch(
            f"epoch {epoch} of {self.name} is stale, the newest is {self.epoch}"
            + (", which has ended" if self._left else ""),
            field="epoch",
            remedy=remedy,
            metadata={"epoch": str(self.epoch)},
        )

    def _is_silent(self, session: SessionSlot) -> bool:
        return session.broken or (self._clock() > session.deadline_ns and not self._steps.is_aside)

    def _deadline_ns(self) -> int:
        return self._clock() + self._config.lease_ms * _NS_PER_MS
