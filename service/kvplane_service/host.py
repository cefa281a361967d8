"""One replica and who may write to it.

    IDLE --open--> LIVE --silence, broken stream--> LAPSED --message of the newest session, open--> LIVE
      ^-----close---'
    RECOVERING --open--> LIVE            (after a restart of the service, until an engine shows its stamps)

The host decides whether a step may be applied, the core what it does. No transport, no protobuf, no clock of its own:
the gRPC service, the in-process transport and the simulation call the same code. A refusal changes nothing but the
lease.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvplane.base.errors import (
    InternalError,
    InvalidArgument,
    KvplaneError,
    LimitExceeded,
    OtherWriter,
    ReplicaLapsed,
    ServiceRestarted,
    StaleEpoch,
)
from kvplane.base.groups import ReplicaSpec
from kvplane.base.hashing import HashScheme
from kvplane.base.session import NEW_EPOCH, Opened, OpenRequest
from kvplane.base.stamps import MAX_EPOCH, newest_epoch
from kvplane.base.step import Cache, CacheEvent, End, EventKind, Facts, Part, Step, StepResult
from kvplane_service.config import Config
from kvplane_service.core.replica import Replica
from kvplane_service.core.retelling import MAX_HASHES
from kvplane_service.decisions import Decision, DecisionLog, Life, without_tokens
from kvplane_service.events import EventLog, PublicationHold
from kvplane_service.order import StepOrder, check_step
from kvplane_service.recovering import Recovering
from kvplane_service.store.writer import Offload
from kvplane_service.telemetry.context import CURRENT
from kvplane_service.telemetry.tally import Tally

Clock = Callable[[], int]  # nanoseconds, never going back
Told = Callable[[KvplaneError], None]

FIRST_EPOCH = 1
MAX_CLIENT_CHARS = 128
_NS_PER_MS = 1_000_000


class ReplicaState(Enum):
    """Who may write."""

    IDLE = "idle"  # no session; unary calls may
    LIVE = "live"  # the session
    LAPSED = "lapsed"  # the session, which is gone or silent; its entries are withdrawn from what others see
    RECOVERING = "recovering"  # nobody yet: what was stored waits for an engine that shows its stamps


@dataclass(slots=True)
class _Session:
    """The newest session of a replica."""

    nonce: int
    with_events: bool
    client: str
    told: Told
    deadline_ns: int
    broken: bool = False  # its stream ended without a close


@dataclass(frozen=True, slots=True)
class UnaryStep:
    """Where a unary mutation belongs.

    Attributes:
        epoch: engine life, 0 = the current one.
        more: more calls belong to the same step.
        executed_through: as in Step; None = all steps before this call's.
    """

    epoch: int = NEW_EPOCH
    more: bool = False
    executed_through: int | None = None


def new_replica(spec: ReplicaSpec) -> Replica:
    """A replica in its first epoch. A large pool takes a while, and needs nothing of the event loop."""
    replica = Replica(spec)
    replica.begin_epoch(FIRST_EPOCH)
    return replica


class ReplicaHost:
    """Guards one core Replica: writers, epochs, the order of steps, leases, publication."""

    def __init__(self, name: str, replica: Replica, config: Config, clock: Clock) -> None:
        """`replica` is fresh from `new_replica`."""
        self.name = name
        self.replica = replica
        self.scheme = HashScheme.of(replica.spec)
        self.events = EventLog(config.events_resume, config.events_resume_bytes, config.max_subscribers)
        self.decisions = DecisionLog(config.decision_log_steps, config.decision_log_entries)
        self.tally = Tally()
        self.decisions.follow(self.tally.add)
        self.epoch = FIRST_EPOCH
        self._config = config
        self._clock = clock
        self._hold = PublicationHold()
        self._order = StepOrder(config.max_steps_in_flight)
        self._session: _Session | None = None
        self._resumable = False  # a session was opened in this epoch and has not closed
        self._left = False  # ... and has closed: the engine is gone, the epoch has ended
        self._kept_keys = 0
        self._in_core = False
        self._retired: KvplaneError | None = None  # why nothing more is done here
        self._owner_epoch = 0  # that the memory names
        self._incarnation = 0  # of the page memory, 0 = no engine has named it
        self.recovering: Recovering | None = None
        self.recovered: Recovering | None = None  # what has become of it

    # ---- what others see; touches nothing

    @property
    def state(self) -> ReplicaState:
        """Who may write now."""
        if self._session is None:
            return ReplicaState.RECOVERING if self.recovering else ReplicaState.IDLE
        return ReplicaState.LAPSED if self._is_silent(self._session) else ReplicaState.LIVE

    @property
    def seq(self) -> int:
        """Last step applied completely."""
        return self._order.seq

    @property
    def client(self) -> str:
        """Name that the newest session gave, "" when there is none."""
        return self._session.client if self._session else ""

    @property
    def lease_left_ns(self) -> int | None:
        """Until the session counts as gone, 0 when it does; None when there is none."""
        session = self._session
        if session is None:
            return None
        return 0 if session.broken else max(0, session.deadline_ns - self._clock())

    def age_ns(self, at_ns: int) -> int:
        """How long ago that was, by the clock of decisions."""
        return max(0, self._clock() - at_ns)

    def check_readable(self, remedy: str = "compute the prefix instead") -> None:
        """Raise when nothing can be promised about the replica's pages."""
        self._check_sound()
        if self._left or self.state is ReplicaState.LAPSED:
            how = "has not come back" if self.recovering else "is gone or silent"
            raise ReplicaLapsed(f"the engine of {self.name} {how}", field="replica", remedy=remedy)

    def check_epoch(self, epoch: int) -> None:
        """Raise StaleEpoch when this is not the current engine life."""
        if epoch != self.epoch:
            raise self._stale_epoch(epoch, "ask again with DescribeReplica")

    def recover(self, recovering: Recovering) -> None:
        """Wait for the engine of what was stored; for a host that nobody has used. Nothing can be read meanwhile."""
        self.recovering = recovering
        self.epoch = max(self.epoch, recovering.epoch)
        self._left = True

    def follow_owner(self, epoch: int) -> None:
        """The page memory names this engine life as its owner: the next one is numbered above it."""
        self._owner_epoch = max(self._owner_epoch, epoch)

    # ---- the session

    def check_open(self, request: OpenRequest) -> None:
        """Raise what keeps this request from opening a session now; nothing changes, but epochs are heard of.

        Raises:
            StaleEpoch: `epoch` is neither NEW_EPOCH nor one that a session can resume.
            ServiceRestarted: the same, because the service was started anew.
            Unavailable: what was stored is still being read.
            InvalidArgument: the nonce of the present session, or a stamp table that is not of this pool.
        """
        self._check_sound()
        if len(request.client) > MAX_CLIENT_CHARS:
            raise InvalidArgument(
                f"{len(request.client)} characters", field="client", remedy=f"give at most {MAX_CLIENT_CHARS}"
            )
        old = self._session
        if old is not None and old.nonce == request.nonce:
            raise InvalidArgument(
                f"nonce {request.nonce} is in use",
                field="nonce",
                remedy="draw a new one at random for each stream",
            )
        self._check_loaded()
        if request.epoch == NEW_EPOCH:
            self._check_stamps(request.stamp_table)
        elif self.recovering is not None:
            self.recovering.heard_of(request.epoch)
            raise ServiceRestarted(
                f"the service was started anew and knows nothing of what {self.name} ran",
                field="epoch",
                remedy="open with epoch 0 and the stamp table, and send the requests again",
                metadata={"epoch": str(self.epoch)},
            )
        elif request.epoch != self.epoch or not self._resumable:
            raise self._stale_epoch(request.epoch, "open with epoch 0 to begin a new engine life")

    async def prove_ahead(self, request: OpenRequest, offload: Offload) -> None:
        """After a restart: do beside the event loop what `open` would keep every other replica waiting for.

        Raises as `check_open`; for any request, and with no effect on who may open.
        """
        if self.recovering is not None and request.epoch == NEW_EPOCH:
            self.check_open(request)
            await self.recovering.prove_ahead(self.replica, request.stamp_table, offload)

    def next_epoch(self, request: OpenRequest) -> int:
        """The engine life that this request, which may open, begins now. Raises LimitExceeded."""
        epoch = max(self.epoch, self._owner_epoch, newest_epoch(request.stamp_table)) + 1
        if self.recovering is not None:
            epoch = max(epoch, self.recovering.epoch_above(self.replica, request.stamp_table))
        if epoch > MAX_EPOCH:
            raise LimitExceeded(f"{self.name} has had {MAX_EPOCH} engine lives", remedy="register the replica anew")
        return epoch

    def open(self, request: OpenRequest, told: Told | None = None, epoch: int = NEW_EPOCH) -> Opened:
        """Make this the newest session. `told` is called once, with the reason, when the replica is taken from it.

        A new engine life is `epoch` where the workers were claimed for that, and the next one elsewhere.

        Raises as `check_open`, and LimitExceeded for one engine life too many.
        """
        self.check_open(request)
        old = self._session
        if request.epoch == NEW_EPOCH:
            self._begin_epoch(request, epoch or self.next_epoch(request))
        self._session = _Session(
            request.nonce, request.with_events, request.client, told or _tell_nobody, self._deadline_ns()
        )
        self._resumable = True
        self.events.restore()
        if old is not None and not old.broken:
            old.told(OtherWriter(f"a newer session took {self.name} over", field="nonce", remedy="end this engine"))
        return self._opened()

    def step(self, nonce: int, step: Step, fingerprint: bytes) -> StepResult:
        """Apply a step, or repeat the stored answer when it has been applied.

        `fingerprint` stands for the step's content: equal content, equal fingerprint.

        Raises:
            OtherWriter, StaleEpoch, SequenceError, LimitExceeded: it is not this step's turn.
            KvplaneError: of the core, for the step's content.
        """
        session = self._renew(nonce)
        if step.epoch != self.epoch:
            raise self._stale_epoch(step.epoch, "end this engine life")
        answer = self._order.find(step, fingerprint)
        if answer is not None:
            return answer
        rows = check_step(step, self._order, self.replica.executed_through, self._config)
        result = self._apply(step)
        if not session.with_events:
            for part in result.parts:
                part.events = []
        self._order.record(step, rows, fingerprint, result)
        return result

    def heartbeat(self, nonce: int) -> None:
        """Keep the lease. Raises OtherWriter."""
        self._renew(nonce)

    def close(self, nonce: int) -> None:
        """The engine leaves: its requests are freed, its keys wait for a new life on the same memory.

        Nobody may read them meanwhile: it is not known what becomes of the pages. Raises OtherWriter.
        """
        self._renew(nonce)
        self._free_all()
        self._session = None
        self._resumable = False
        self._left = True
        self.events.withdraw()

    def lost(self, nonce: int) -> None:
        """The stream of a session broke. Nothing when the session is not the newest."""
        session = self._session
        if session is not None and session.nonce == nonce:
            session.broken = True
            self.expire()

    def expire(self) -> None:
        """Withdraw the replica's entries from what others see if its session is gone or silent; call now and then."""
        if self.state is ReplicaState.LAPSED:
            self.events.withdraw()

    # ---- unary calls

    def check_unary(self, at: UnaryStep) -> None:
        """Raise OtherWriter or StaleEpoch when a unary call may not write here."""
        self._check_sound()
        if self._session is not None:
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
            KvplaneError: of the core, for the content.
        """
        self.check_unary(at)
        order = self._order
        step = Step(
            epoch=self.epoch,
            seq=order.seq + 1,
            parts=parts,
            part=order.next_part,
            last=not at.more,
            executed_through=order.seq if at.executed_through is None else at.executed_through,
            traceparent=CURRENT.get(),
        )
        rows = check_step(step, self._order, self.replica.executed_through, self._config)
        result = self._apply(step)
        order.advance(step, rows)
        return result

    def revive(self) -> None:
        """Begin an engine life for unary calls when the last one has left, whatever becomes of the call."""
        if self._left:
            self._check_loaded()
            request = OpenRequest(self.name, 0)
            self._begin_epoch(request, self.next_epoch(request))
            self.events.restore()

    # ---- the end

    @property
    def is_retired(self) -> bool:
        """The replica was removed."""
        return self._retired is not None

    def retire(self, reason: KvplaneError) -> None:
        """The replica is removed: tell its session and its subscribers, and refuse who still holds this host."""
        self._retired = reason
        session, self._session = self._session, None
        self.events.close(reason)
        if session is not None and not session.broken:
            session.told(reason)

    # ---- inside

    def _begin_epoch(self, request: OpenRequest, epoch: int) -> None:
        assert epoch > self.epoch, f"epoch {epoch} has begun"
        stored = self.recovering
        stamp_table, incarnation = request.stamp_table, request.incarnation
        if 0 != incarnation != self._incarnation != 0:
            stamp_table = ()  # other memory: what its stamps say is of no page that is known here
        self._incarnation = incarnation or self._incarnation
        self.recovering = None
        self._in_core = True
        self._kept_keys = self._keep_keys(epoch, stamp_table, stored, incarnation)
        self._in_core = False
        self.epoch = epoch
        self._resumable = self._left = False
        self._order = StepOrder(self._config.max_steps_in_flight)
        told = self.replica.take_events()
        self.decisions.append(Life(self.epoch, stamp_table, told, self._clock(), incarnation))
        lost = self._hold.add(0, told)
        self._hold.clear()
        if lost and not self._kept_keys:
            lost = [CacheEvent(EventKind.CLEARED)]
        self.events.publish(self.epoch, lost)
        if stored is not None and self.replica.spec.events:
            self._announce()

    def _announce(self) -> None:
        """Tell those who follow what has come back, in place of what they knew."""
        self.events.publish(self.epoch, [CacheEvent(EventKind.CLEARED)])
        batch, num_hashes = list[CacheEvent](), 0
        for event in self.replica.retold():
            if batch and num_hashes + len(event.hashes) > MAX_HASHES:
                self.events.publish(self.epoch, batch)
                batch, num_hashes = [], 0
            batch.append(event)
            num_hashes += len(event.hashes)
        self.events.publish(self.epoch, batch)

    def _keep_keys(self, epoch: int, stamp_table: tuple[int, ...], stored: Recovering | None, incarnation: int) -> int:
        """Begin the life in the core with what the memory proves; the number of keys."""
        if stored is None:
            return self.replica.begin_epoch(epoch, stamp_table)
        self.recovered = stored
        stored.prove(self.replica, epoch, stamp_table, incarnation)
        return self.replica.count_keys()

    def _check_loaded(self) -> None:
        if self.recovering is not None:
            self.recovering.check_loaded(self.name)

    def _check_stamps(self, stamp_table: tuple[int, ...]) -> None:
        num_blocks = self.replica.spec.num_blocks
        if len(stamp_table) not in (0, num_blocks):
            raise InvalidArgument(
                f"{len(stamp_table)} stamps for {num_blocks} blocks",
                field="stamp_table",
                remedy="give one stamp per block, or none when no page is to be kept",
            )

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
            kept_keys=self._kept_keys,
        )

    def _renew(self, nonce: int) -> _Session:
        """The newest session, its lease renewed by a message."""
        self._check_sound()
        session = self._session
        if session is None or session.nonce != nonce:
            raise OtherWriter(f"{self.name} has a newer writer", field="nonce", remedy="end this engine")
        session.deadline_ns = self._deadline_ns()
        session.broken = False
        self.events.restore()
        return session

    def _apply(self, step: Step) -> StepResult:
        """Let the core apply a step and publish what may be seen.

        When the core fails otherwise than by a refusal its state is unknown, so that nothing may be read from it again.
        """
        at_ns = self._clock()
        self._in_core = True
        try:
            result = self.replica.apply(step)
        except KvplaneError:
            self._in_core = False
            raise
        self._in_core = False
        events = tuple([part.events for part in result.parts])
        self.decisions.append(Decision(without_tokens(step), result, events, at_ns, self._clock() - at_ns))
        shown = self._hold.release(step.executed_through)
        shown += self._hold.add(step.seq, (event for of_part in events for event in of_part))
        self.events.publish(self.epoch, shown)
        return result

    def _free_all(self) -> None:
        """End every request in a step of its own."""
        requests = self.replica.requests
        held = [slot for slot in requests.slots() if requests.held[slot]]
        free = [slot for slot in requests.slots() if not requests.held[slot]]
        part = Part(facts=Facts(slot=free, end=[End.FREE] * len(free)), cache=Cache(released=held))
        order = self._order
        step = Step(self.epoch, order.seq + 1, [part], order.next_part, True, self.replica.executed_through)
        self._apply(step)
        order.advance(step, 0)

    def _check_sound(self) -> None:
        if self._retired is not None:
            raise self._retired
        if self._in_core:
            raise InternalError(f"{self.name} broke in an earlier step", remedy="deregister it and register it anew")

    def _stale_epoch(self, epoch: int, remedy: str) -> StaleEpoch:
        return StaleEpoch(
            f"epoch {epoch} of {self.name} cannot go on, the newest is {self.epoch}"
            + (", which has ended" if self._left else ""),
            field="epoch",
            remedy=remedy,
            metadata={"epoch": str(self.epoch)},
        )

    def _is_silent(self, session: _Session) -> bool:
        return session.broken or self._clock() > session.deadline_ns

    def _deadline_ns(self) -> int:
        return self._clock() + self._config.lease_ms * _NS_PER_MS


def _tell_nobody(_: KvplaneError) -> None:
    """For sessions that find out with their next message."""
