"""The state of the host of one replica: what other packages may read, and what the mirror of an engine changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from typing import Protocol

from kvplane.base.errors import KvplaneError, ReplicaLapsed, StaleEpoch
from kvplane.base.groups import ReplicaSpec
from kvplane.base.hashing import HashScheme
from kvplane.base.step import CacheEvent, Step, StepResult
from kvplane_core.face import loader
from kvplane_core.face.interface import ReplicaCore
from kvplane_service.config import Config
from kvplane_service.decisions.counters import Tally
from kvplane_service.decisions.log import DecisionLog, Life
from kvplane_service.decisions.packed_log import LogBudget
from kvplane_service.replicas.applying import Applying
from kvplane_service.replicas.engine_lives import Clock, EngineLives
from kvplane_service.replicas.events import EventLog, PublicationHold
from kvplane_service.replicas.idle_check import IdleCheck
from kvplane_service.replicas.lenders import Member
from kvplane_service.replicas.peers import Namespace
from kvplane_service.replicas.recovery import Recovering
from kvplane_service.replicas.sessions import SessionSlot
from kvplane_service.replicas.step_order import StepOrder

FIRST_EPOCH = 1


class ReplicaState(Enum):
    """States of a replica: they decide whether the newest session, unary calls or no client may change it."""

    IDLE = "idle"  # no session: unary calls
    LIVE = "live"  # the session
    LAPSED = "lapsed"  # the session, whose lease expired or which lags; its entries are withdrawn from subscribers
    RECOVERING = "recovering"  # none: stored entries wait for the stamps of an engine
    OPENING = "opening"  # none: the engine life of a session is beginning
    DIVERGED = "diverged"  # the session of a mirror, whose state the service does not have


def new_replica(spec: ReplicaSpec) -> ReplicaCore:
    """Make a replica in its first epoch. May be called on a thread, since a large pool takes long to build."""
    replica = loader.new_replica(spec)
    replica.begin_epoch(FIRST_EPOCH)
    return replica


_NS_PER_MS = 1_000_000


class _Mirror(Protocol):
    @property
    def wants_image(self) -> bool: ...
    @property
    def hidden(self) -> KvplaneError | None: ...


class HostState:
    """What the host of one replica knows: which client may write, epochs, the order of steps, the lease.

    Attributes:
        has_left: whether the engine life has ended and the next one has not begun.
        steps: applies the steps, and runs long work; other packages must not apply steps with this object.
        mirror: follows an engine that decides itself.
    """

    mirror: _Mirror

    def __init__(
        self,
        name: str,
        replica: ReplicaCore,
        config: Config,
        clock: Clock,
        num_ranks: int = 1,
        logs: LogBudget | None = None,
    ) -> None:
        """`replica`: a result of `new_replica`; `num_ranks`: ranks of the engine; `logs`: budget of all event logs."""
        logs = logs or LogBudget(config.log_bytes)
        self.name = name
        self.max_rows = config.max_rows_per_step
        self.replica = replica
        self.scheme = HashScheme.of(replica.spec)
        self.events = EventLog(config.events_resume, logs, config.max_subscribers)
        self.decisions = DecisionLog(config.decision_log_steps, logs)
        self._tally = Tally(name)
        self.decisions.follow_later(self._tally.add)
        self.epoch = FIRST_EPOCH
        self._config, self._clock, self._lease_ns = config, clock, config.lease_ms * _NS_PER_MS
        self._hold = PublicationHold()
        self.steps = Applying(replica, self.decisions, self.events, self._hold, clock)
        self.peers: Namespace | None = None  # those whose host tiers this one may read, and its own among them
        self._note_all: Callable[[], None] = _ignore
        self.may_begin: Callable[[], None] = _ignore  # raises if another service may begin epochs of this replica
        self.memory_had_reset = False  # by the stamps that the engine stated, also before this service started
        self.idle_check = IdleCheck(name, replica, self.steps)
        self._lives = EngineLives(replica, self.events, self._hold, clock, num_ranks)
        self._order = StepOrder(config.max_steps_in_flight)
        self._session: SessionSlot | None = None
        self._resumable = False  # a session was opened in this epoch and has not closed
        self._life_nonce = 0  # nonce of the session that began this epoch
        self.has_left = False
        self._retired: KvplaneError | None = None  # why the replica was removed
        self._owner_epoch = 0  # highest one seen in the page memory
        self._made_ns = self._used_ns = clock()

    # ---- state; read only

    @property
    def state(self) -> ReplicaState:
        """The current state, which decides which client may change the replica."""
        if self._lives.is_opening:
            return ReplicaState.OPENING
        if self._session is None:
            return ReplicaState.RECOVERING if self.recovering else ReplicaState.IDLE
        if self.mirror.wants_image:
            return ReplicaState.DIVERGED
        is_hidden = self._is_silent(self._session) or self.mirror.hidden is not None
        return ReplicaState.LAPSED if is_hidden else ReplicaState.LIVE

    @property
    def is_in_use(self) -> bool:
        """Whether an engine uses the replica: its session is open or opening, and has not lapsed."""
        return self.state in (ReplicaState.LIVE, ReplicaState.DIVERGED, ReplicaState.OPENING)

    @property
    def has_live_session(self) -> bool:
        """Whether a session is open and its lease has not expired."""
        return self._session is not None and not self._is_silent(self._session)

    @property
    def recovering(self) -> Recovering | None:
        """Entries of a store that wait until an engine verifies them; None if there are none."""
        return self._lives.recovering

    @property
    def recovered(self) -> Recovering | None:
        """The entries of a store that an engine has verified; None if there were none."""
        return self._lives.recovered

    @property
    def seq(self) -> int:
        """Number of the last step that was applied completely."""
        return self._order.seq

    @property
    def is_step_open(self) -> bool:
        """Whether further parts of a step that was applied in part are missing."""
        return self._order.next_part > 0

    @property
    def client(self) -> str:
        """Client name of the newest session, "" when there is none."""
        return self._session.client if self._session else ""

    @property
    def lease_left_ns(self) -> int | None:
        """Nanoseconds until the session's lease expires, 0 if it has expired; None without a session."""
        return None if self._session is None else self._session.left_ns(self._clock())

    @property
    def waiting_requests(self) -> int | None:
        """Number of requests that wait for admission in the engine; None if no connected engine has reported it."""
        session = self._session
        return session.waiting_requests if session is not None and not self._is_silent(session) else None

    def join(self, namespace: Namespace, member: Member) -> None:
        """Become a member of a namespace."""
        self.peers, self._note_all = namespace, member.note_all
        self.steps.on_lent = partial(namespace.note, member)

    @property
    def is_live(self) -> bool:
        """Whether its engine is connected."""
        return self.state is ReplicaState.LIVE

    @property
    def is_readable(self) -> bool:
        """Whether the core may be read now: no long work is running, and it is sound."""
        return not self.steps.is_aside and not self.steps.in_core and self._retired is None

    def touch(self) -> None:
        """Record that the replica is used: by an engine, a worker, or a call that changes it."""
        self._used_ns = self._clock()

    @property
    def lifetime_ns(self) -> int:
        """Nanoseconds since this host was made: the replica was registered, read from a store, or taken over."""
        return self._clock() - self._made_ns

    @property
    def unused_ns(self) -> int:
        """Nanoseconds since the replica was last used, 0 while it is: while a session is open or opening, a call runs
        on a thread, or stored entries are read.
        """
        is_loading = self.recovering is not None and self.recovering.loading
        if self.has_live_session or self._lives.is_opening or self.steps.is_aside or is_loading:
            return 0
        renewed_ns = self._session.deadline_ns - self._lease_ns if self._session is not None else 0
        return max(0, self._clock() - max(self._used_ns, renewed_ns))

    @property
    def tally(self) -> Tally:
        """Counts of all steps so far; see `Tally`."""
        self.decisions.catch_up()
        return self._tally

    def age_ns(self, at_ns: int) -> int:
        """Return the nanoseconds since `at_ns`, a time of the decision log (monotonic clock)."""
        return max(0, self._clock() - at_ns)

    @property
    def now_ns(self) -> int:
        """The time of the clock by which prefixes are retained."""
        return self._clock()

    async def idle(self) -> None:
        """Wait until no long work is running. None starts before the caller awaits something else."""
        await self.steps.idle()

    def check_readable(self, remedy: str = "compute the prefix instead") -> None:
        """Raise ReplicaLapsed if the engine is not connected: the content of the replica's pages is then unknown."""
        self._check_sound()
        if self.has_left or self.state in (ReplicaState.LAPSED, ReplicaState.DIVERGED):
            how = "has not reconnected" if self.recovering else "is gone or silent"
            if self.state is ReplicaState.OPENING:
                how = "is beginning a new life"
            raise ReplicaLapsed(f"the engine of {self.name} {how}", field="replica", remedy=remedy)

    def check_epoch(self, epoch: int) -> None:
        """Raise StaleEpoch unless `epoch` is the number of the current engine life."""
        if epoch != self.epoch:
            raise self._stale_epoch(epoch, "get the current epoch with DescribeReplica")

    def recover(self, recovering: Recovering) -> None:
        """Hold entries of a store until an engine connects; until then reads are refused. The host must not have been
        used.
        """
        self._lives.recovering = recovering
        self.epoch = max(self.epoch, recovering.epoch)
        self.has_left = True

    def observe_owner_epoch(self, epoch: int) -> None:
        """Record the owner epoch found in the page memory: the next engine life gets a higher epoch number."""
        self._owner_epoch = max(self._owner_epoch, epoch)

    # ---- what the mirror changes

    def continue_from(self, life: Life, nonce: int, events: Iterable[tuple[int, CacheEvent]]) -> None:
        """Continue the engine life of a mirror's image, which the replica has adopted: publish its keys.

        `events`: STORED events of all keys, each with the step in flight that registered them, 0 = published.
        """
        self.steps.replaced()
        self._note_all()
        self.idle_check.broken = None  # of the state before
        self.epoch, self._life_nonce, self.has_left = life.epoch, nonce, False
        self._order = StepOrder(self._config.max_steps_in_flight)
        self._order.seq = self.replica.seq
        self._lives.continue_from(life)
        self._hold.clear()
        self.decisions.append(life)
        self.events.publish(life.epoch, life.events)
        for step, event in events:
            if step:
                self._hold.add(step, [event])
            else:
                self.events.publish(life.epoch, [event])

    def advance_mirror(self, step: Step, _: StepResult) -> None:
        """Record that a step of the mirrored engine was applied."""
        self._order.advance(step, 0)

    def lose_entries(self) -> None:
        """Withdraw the replica's entries, and publish none that wait for the execution of their step."""
        self._hold.clear()
        self.events.withdraw()

    def show_or_hide(self) -> None:
        """Publish whether the replica's entries may be used now."""
        if self.state is ReplicaState.LIVE:
            self.events.restore()
        else:
            self.events.withdraw()

    # ---- for the host

    def _check_sound(self) -> None:
        if self._retired is not None:
            raise self._retired
        self.steps.check(self.name)

    def _stale_epoch(self, epoch: int, remedy: str) -> StaleEpoch:
        return StaleEpoch(
            f"epoch {epoch} of {self.name} is stale, the newest is {self.epoch}"
            + (", which has ended" if self.has_left else ""),
            field="epoch",
            remedy=remedy,
            metadata={"epoch": str(self.epoch)},
        )

    def _is_silent(self, session: SessionSlot) -> bool:
        return session.broken or (session.is_expired(self._clock()) and not self.steps.is_aside)

    def _deadline_ns(self) -> int:
        return self._clock() + self._lease_ns


def _ignore() -> None:
    return
