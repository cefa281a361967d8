"""The host of one replica decides whether a step may be applied; the core decides the result. Its states:

    IDLE --open--> LIVE --silence, broken stream--> LAPSED --message of the newest session, open--> LIVE
      ^-----close---'
    RECOVERING --open--> LIVE            (after a restart of the service, until an engine sends its stamps)
    open on a large pool: OPENING while its slices run, IDLE if its caller is cancelled meanwhile
    long work (step, close, look-up) runs aside (`applying`): the state is unchanged, and all other calls wait

No transport, no protobuf and no clock of its own: the gRPC service, the in-process transport and the simulation call
the same code. A refused call changes nothing but the lease.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial

from kvplane.base.errors import InvalidArgument, KvplaneError, OtherWriter
from kvplane.base.groups import NULL_BLOCK
from kvplane.base.sections import Retain
from kvplane.base.session import NEW_EPOCH, Opened, OpenRequest
from kvplane.base.step import Part, Step, StepResult
from kvplane_service.decisions.log import Life
from kvplane_service.decisions.sent import SentStep
from kvplane_service.replicas.engine_lives import Opening, ignore_end, in_slices
from kvplane_service.replicas.host_state import HostState
from kvplane_service.replicas.host_state import ReplicaState as ReplicaState
from kvplane_service.replicas.host_state import new_replica as new_replica
from kvplane_service.replicas.mirror import WINDOW, Mirror
from kvplane_service.replicas.published import EntriesScan
from kvplane_service.replicas.sessions import OnEnd, SessionSlot, check_request, restarted
from kvplane_service.replicas.step_order import (
    StepOrder,
    Turn,
    UnaryStep,
    check_sections,
    check_step,
    part_that_ends_all,
)
from kvplane_service.replicas.trace_context import CURRENT
from kvplane_service.runtime.executors import Offload

OnDone = Callable[[StepResult], None]


class ReplicaHost(HostState):
    """Controls one core Replica: which client may write, epochs, the order of steps, the lease, and publication."""

    @cached_property
    def mirror(self) -> Mirror:  # type: ignore[override]
        """Follows an engine that decides itself."""
        return Mirror(self, self._clock, self._config.mirror_max_lag_ms, self._config.max_rows_per_step)

    # ---- the session

    def check_open(self, request: OpenRequest) -> None:
        """Raise an error unless this request may open a session now. Changes nothing but the observed epochs.

        Raises:
            StaleEpoch: `epoch` is neither NEW_EPOCH nor one that a session can resume.
            ServiceRestarted: `epoch` is unknown: the service was restarted, or began another life with this number.
            Unavailable: the store is still being read, or this service may not begin an epoch of the replica.
            InvalidArgument: the nonce is in use, or stamps or blocks do not fit this pool.
        """
        self._check_sound()
        check_request(request, self.replica.spec)
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
            return self.may_begin()
        if self.recovering is not None:
            self.recovering.observe_epoch(request.epoch)
            raise restarted(f"the service was restarted and lost the requests of {self.name}", self.epoch)
        if request.epoch == self.epoch and request.life_nonce != self._life_nonce:
            raise restarted(f"this service began another epoch with this number on {self.name}", self.epoch)
        if request.epoch != self.epoch or not self._resumable:
            raise self._stale_epoch(request.epoch, "open with epoch 0 to begin a new epoch")

    async def prove_ahead(self, request: OpenRequest, offload: Offload) -> None:
        """After a restart, verify stored entries on a thread, so that `open` does not delay other replicas.

        May be called for any request; does not affect which session may open. Raises as `check_open`.
        """
        if self.recovering is not None and request.epoch == NEW_EPOCH:
            self.check_open(request)
            shown = self.recovering.shown_by(request, self.replica.spec)
            await self.recovering.prove_ahead(self.replica, shown, offload)

    def next_epoch(self, request: OpenRequest) -> int:
        """Return the epoch number of the engine life that this request would begin. Raises LimitExceeded."""
        if self.recovering is None:
            return self._lives.next_epoch(max(self.epoch, self._owner_epoch), request)
        epoch = self._lives.next_epoch(self._owner_epoch, request)
        self.epoch = min(self.epoch, epoch - 1)  # it was read from the store, which may state any
        return epoch

    def open(self, request: OpenRequest, on_end: OnEnd | None = None, epoch: int = NEW_EPOCH) -> Opened:
        """Open a session, which may then write. `on_end` is called once, with the reason, if a newer one replaces it.

        A new engine life gets number `epoch` if the workers were claimed for that epoch, else the next number.

        Raises as `check_open`, and LimitExceeded when all epochs are used.
        """
        opening = self._start_opening(request, on_end or ignore_end, epoch)
        while not self._go_on(opening):
            pass
        return self._opened()

    async def open_in_slices(self, request: OpenRequest, on_end: OnEnd, epoch: int = NEW_EPOCH) -> Opened:
        """Open a session as `open` does, in slices, so that the event loop serves other replicas meanwhile.

        Until the session is open, the replica accepts only a newer open, which replaces this open. If the caller is
        cancelled, the work pauses until the next open.

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
        """Apply a step, or return the stored answer if this step was applied before.

        `fingerprint`: digest of the step's content; equal steps have equal fingerprints.

        Raises:
            OtherWriter, StaleEpoch, SequenceError, LimitExceeded: this step may not be applied now.
            KvplaneError: the core refuses the step's content.
        """
        turn = self._turn(nonce, step, fingerprint)
        return turn if isinstance(turn, StepResult) else turn.done(self.steps.apply(turn.step))

    async def step_aside(
        self, nonce: int, step: Step, fingerprint: bytes, offload: Offload, effort_ns: int | None = None
    ) -> StepResult:
        """Apply a step as `step` does, a long one on a thread of `offload`; reads of the replica wait for the step.

        `effort_ns` is what the step is estimated to take, if it is known. If the caller is cancelled, the step
        still completes and its answer is kept. Raises as `step`, and Busy.
        """
        if self.steps.is_aside:  # a long look-up
            with self.holding(nonce):
                await self.idle()
        turn = self._turn(nonce, step, fingerprint)
        if isinstance(turn, StepResult):
            return turn

        def done(result: StepResult) -> StepResult:
            if self._session is not None:
                self._session.deadline_ns = self._deadline_ns()  # messages that arrived meanwhile were not read
            return turn.done(result)

        effort_ns = effort_ns if turn.step is step else None  # an operator has added to it
        return await self.steps.apply_aside(turn.step, offload, done, effort_ns=effort_ns)

    def heartbeat(self, nonce: int, waiting_requests: int | None = None) -> None:
        """Renew the lease, also while long work is running, and note how many requests wait in the engine. Raises
        OtherWriter.
        """
        if self._retired is not None or not self.steps.is_aside:
            self._check_sound()
        session = self._renew_lease(nonce)
        if waiting_requests is not None:
            session.waiting_requests = waiting_requests

    def holding(self, nonce: int) -> AbstractContextManager[None]:
        """Renew the lease, and keep it valid while a message of the session waits here. Raises OtherWriter."""
        self.heartbeat(nonce)
        return self._renew_lease(nonce).held(self._deadline_ns)

    def close(self, nonce: int) -> None:
        """Close the session: its requests are freed, and the keys are kept for a new life on the same memory.

        Reads are refused until a new life begins, because the pages may be overwritten. Raises OtherWriter.
        """
        self._renew(nonce)
        step = self._last_step()
        self.steps.apply(step)
        self._closed(step)

    async def close_aside(self, nonce: int, offload: Offload) -> None:
        """Close the session as `close` does; many requests are freed on a thread of `offload`, even if the caller is
        cancelled. Raises OtherWriter, Busy.
        """
        if self.steps.is_aside:  # a long look-up
            await self.idle()
        self._renew(nonce)
        if self.mirror.wants_image:
            self._leave_epoch()
            return
        step = self._last_step()
        await self.steps.apply_aside(step, offload, lambda _: self._closed(step))

    def lost(self, nonce: int) -> None:
        """Record that the stream of a session broke, so that its lease lapses. Only the newest session counts."""
        session = self._session
        if session is not None and session.nonce == nonce:
            session.broken = True
            self.expire()

    def extend_lease(self, late_ns: int) -> None:
        """Extend the session's lease by `late_ns` nanoseconds."""
        if self._session is not None:
            self._session.deadline_ns += late_ns

    def expire(self) -> None:
        """Withdraw the replica's entries from subscribers if its lease has expired, and end a session that stays
        silent; call periodically.
        """
        if self._session is not None and not self.steps.is_aside:
            self._session.end_if_silent(self._clock())
        if self.state in (ReplicaState.LAPSED, ReplicaState.DIVERGED):
            self.events.withdraw()

    # ---- the mirror of an engine

    def attach(self, request: OpenRequest, on_end: OnEnd) -> Opened:
        """Open the session of a mirror: the service applies what the engine has decided. Nothing is claimed or freed.

        Raises as `check_open` and `Mirror.check_attach`.
        """
        is_broken = self.steps.in_core and not self.steps.is_aside  # an exception left the state undefined
        if is_broken:
            self.steps.in_core = False
        try:
            self.check_open(replace(request, epoch=NEW_EPOCH))
            self.mirror.check_attach(request)
        except KvplaneError:
            self.steps.in_core = is_broken
            raise
        if is_broken:
            self.mirror.leave()  # so that the engine's image replaces the state
        session, before, self._lives.opening = self._session, self._lives.opening, None
        slot = request.nonce, request.with_events, request.client, on_end, self._deadline_ns()
        self._session, self._resumable = SessionSlot(*slot), False
        self.mirror.attach(request)
        self._end_older(session, before)
        self.show_or_hide()
        return replace(self._opened(), epoch=request.epoch, mirror_window=WINDOW, image_wanted=self.mirror.wants_image)

    def scan_entries(self) -> EntriesScan:
        """Begin to read the published keys."""
        return EntriesScan(self.replica, self._hold)

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
        if at.epoch != NEW_EPOCH and (at.epoch != self.epoch or self.has_left):
            raise self._stale_epoch(at.epoch, "send epoch 0")

    def check_begins(self, at: UnaryStep, part: Part) -> None:
        """Raise InvalidArgument or LimitExceeded if this part could not be the first of a life for unary calls."""
        order = StepOrder(self._config.max_steps_in_flight)
        check_step(order.make_next(NEW_EPOCH, [part], at.executed_through or 0), order, 0, self._config)
        self.replica.check_alone(part)

    async def begin_unary(self) -> None:
        """Begin the next engine life for unary calls, in slices, so that the event loop serves other replicas.

        Call it if `has_left`, the replica is idle and `check_unary` passes. Cancelling the caller does not stop it.
        """
        opening = self._start_opening(OpenRequest(self.name, 0), ignore_end, NEW_EPOCH)
        await self.steps.aside(self._begin_unary_life(opening))

    async def _begin_unary_life(self, opening: Opening) -> None:
        await in_slices(lambda: not self._work_on(opening), self._clock, self.events.withdraw)
        self._lives.opening = None
        self.events.restore()
        await in_slices(self._lives.forget_some, self._clock)

    def next_unary(self, at: UnaryStep, parts: list[Part]) -> Turn:
        """Return the permission to apply these parts as a step, or a piece of one; valid until the next `await`.

        Raises:
            OtherWriter, StaleEpoch: as `check_unary`.
            InvalidArgument, LimitExceeded: as `check_step`.
        """
        self.check_unary(at)
        self.touch()
        order, requests = self._order, self.mirror.requests
        if requests.is_due(self._clock) and not parts[0].retain.now_ns:
            parts = [replace(parts[0], retain=Retain(now_ns=[self._clock()])), *parts[1:]]
        executed_through = order.seq if at.executed_through is None else at.executed_through
        step = order.make_next(self.epoch, parts, executed_through, not at.more, CURRENT.get())
        return Turn(order, step, check_step(step, order, self.replica.executed_through, self._config))

    def apply_unary(self, turn: Turn) -> StepResult:
        """Apply the step of a unary call. Raises KvplaneError if the core refuses its content."""
        return self._advanced(turn, self.steps.apply(turn.step))

    async def apply_unary_by(self, offload: Offload, turn: Turn) -> StepResult:
        """Apply the step on a thread of `offload`; run this in `steps.aside`. Raises as `apply_unary`, and Busy."""
        return self._advanced(turn, await self.steps.apply_by(offload, turn.step))

    def _advanced(self, turn: Turn, result: StepResult) -> StepResult:
        if turn.step.parts[0].retain.now_ns:
            self.mirror.requests.note_ends(result.parts[0].retained)
        return turn.advance(result)

    # ---- the end

    @property
    def is_retired(self) -> bool:
        """Whether the replica was removed."""
        return self._retired is not None

    def retire(self, reason: KvplaneError) -> None:
        """Remove the replica: end its session and subscriptions with `reason`, and refuse later calls of this host."""
        self._retired = reason
        self.steps.changes += 1  # drops a check that runs, so that the replica can be freed
        session, self._session = self._session, None
        opening, self._lives.opening = self._lives.opening, None
        self.events.close(reason)
        self.mirror.requests.fail(reason)
        self.decisions.leave_budget()
        if session is not None and not session.broken:
            session.on_end(reason)
        if opening is not None:
            opening.end(reason)

    # ---- inside

    def _start_opening(self, request: OpenRequest, on_end: OnEnd, epoch: int) -> Opening:
        """Replace the current session or opening by this one. Raises as `open`, and then changes nothing."""
        self.check_open(request)
        session, before = self._session, self._lives.opening
        opening = Opening(request, on_end, epoch or request.epoch or self.next_epoch(request))
        if request.epoch == NEW_EPOCH:
            begun = before.take_work(request) if before is not None else None
            opening.work = begun or self._lives.begin(request, self._began)
            self._leave_epoch()
        self._lives.opening = opening
        self.mirror.leave()
        self._end_older(session, before)
        return opening

    def _end_older(self, session: SessionSlot | None, opening: Opening | None) -> None:
        newer = OtherWriter(f"a newer session of {self.name} is open", field="nonce", remedy="end this engine")
        if session is not None and not session.broken:
            session.on_end(newer)
        if opening is not None:
            opening.end(newer)

    def _go_on(self, opening: Opening) -> bool:
        """Do a slice of the work of opening a session. Returns True once that session may write."""
        if self._work_on(opening):
            return False
        request, self._lives.opening = opening.request, None
        slot = request.nonce, request.with_events, request.client, opening.on_end, self._deadline_ns()
        self._session = SessionSlot(*slot)
        self._resumable = True
        self.events.restore()
        return True

    def _work_on(self, opening: Opening) -> bool:
        """Do a slice of the work of opening a session. Returns whether more work may be left."""
        if opening.ended is not None:
            raise opening.ended
        return self.steps.go_on(opening)

    def _began(self, life: Life) -> None:
        self._note_all()
        opening = self._lives.opening
        assert opening is not None and life.epoch > self.epoch, f"epoch {life.epoch} has begun"
        self.epoch, self._life_nonce = life.epoch, opening.nonce
        self.memory_had_reset = len(life.stamp_table) > 0 and life.stamp_table[NULL_BLOCK] != 0
        self._resumable = self.has_left = False
        self._order = StepOrder(self._config.max_steps_in_flight)
        self.mirror.requests.image_may_come = len(life.stamp_table) > 0
        self.decisions.append(life)

    def _leave_epoch(self) -> None:
        self.mirror.leave()
        self.touch()
        self._session, self._resumable, self.has_left = None, False, True

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
        """Renew the lease of the session that sent a message, and return this session. Raises OtherWriter."""
        self._check_sound()
        return self._renew_lease(nonce)

    def _renew_lease(self, nonce: int) -> SessionSlot:
        session = self._session
        if session is None or session.nonce != nonce:
            raise OtherWriter(f"{self.name} has a newer writer", field="nonce", remedy="end this engine")
        session.deadline_ns, session.broken = self._clock() + self._lease_ns, False
        mirror = self.mirror
        is_opening = self._lives.opening is not None
        if is_opening or self.events.is_withdrawn or mirror.attached is not None or mirror.hidden is not None:
            self.show_or_hide()  # else the state is LIVE, and published as such
        return session

    def _turn(self, nonce: int, step: Step, fingerprint: bytes) -> StepResult | Turn:
        """Return the stored answer of a repeated step, or the permission to apply the next step. Raises as `step`."""
        self._check_sound()
        session = self._renew_lease(nonce)
        if step.epoch != self.epoch:
            raise self._stale_epoch(step.epoch, "end this epoch")
        answer = self._order.find(step, fingerprint)
        if answer is not None:
            return answer
        check_sections(step)
        rows = check_step(step, self._order, self.replica.executed_through, self._config)
        requests = self.mirror.requests
        on_done: OnDone | None = None
        if requests.may_join(step):
            if requests.want_step(self._clock):
                step, asked = requests.merged(step, self._clock())
                on_done = partial(requests.all_carried_out, asked)
            if self.peers is not None:
                step, on_done = self._with_news(step, on_done)
        if isinstance(step, SentStep):
            step.with_events = session.with_events
        return Turn(self._order, step, rows, fingerprint, session.with_events, on_done)

    def _with_news(self, step: Step, on_done: OnDone | None) -> tuple[Step, OnDone | None]:
        """Add to a step what peers have stored or evicted meanwhile."""
        assert self.peers is not None
        sent = self.peers.with_news(self.name, step)
        if sent is step:
            return step, on_done

        def done(result: StepResult) -> None:
            if self.peers is not None:
                self.peers.was_sent(self.name, sent.parts[0].peers)
            if on_done is not None:
                on_done(result)

        return sent, done

    def _last_step(self) -> Step:
        """Make the step that ends every request, for `close`."""
        assert not self.mirror.wants_image, "the state is not the engine's"
        parts = [part_that_ends_all(self.replica.requests)]
        return self._order.make_next(self.epoch, parts, self.replica.executed_through)

    def _closed(self, step: Step) -> None:
        self._order.advance(step, 0)
        self._leave_epoch()
        self.events.withdraw()
