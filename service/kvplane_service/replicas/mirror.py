"""Follows an engine that decides in its own process: applies the same steps, and compares the answers.

    attach -> image, unless the service has the engine's state -> steps, each with the digest of the engine's answer

The engine is right. If an answer differs, the service has *diverged*: it publishes and stores nothing of that step,
hides the replica's keys, and ignores steps until it has an image, the engine's whole state. A mirror claims nothing:
epoch and incarnation are the engine's.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvplane.base.errors import (
    Diverged,
    FailedPrecondition,
    InvalidArgument,
    KvplaneError,
    LimitExceeded,
    OtherWriter,
    Unavailable,
)
from kvplane.base.groups import ReplicaSpec
from kvplane.base.sections import Peers
from kvplane.base.session import CORE_VERSION, OpenRequest, Progress
from kvplane.base.step import CacheEvent, EventKind, StepResult
from kvplane.wire.mirror import Mirrored, answer_digest
from kvplane_core.face import loader
from kvplane_core.face.inspect import check as check_invariants
from kvplane_core.face.interface import BrokenInvariant, ReplicaCore
from kvplane_service.decisions.log import Decision, Entry, Life, without_tokens
from kvplane_service.replicas.cache_requests import MOST_OFFERED, CacheRequests
from kvplane_service.replicas.host_state import HostState
from kvplane_service.replicas.peer_watch import LOOK_S
from kvplane_service.replicas.peers import MOST_ROWS
from kvplane_service.replicas.step_order import size_of
from kvplane_service.runtime.executors import Offload

WINDOW = 64  # messages without an answer
_IMAGE_BYTES, _BLOCK_BYTES = 64 << 20, 512  # most bytes of an image, and more per block

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Divergence:
    """A step whose answer differs from the engine's.

    Attributes:
        step: the step, and the digest of the engine's answer.
        how: in words.
        result: the service's answer, which was not published; None if the core refused the step.
        before: the decision log at that time.
    """

    step: Mirrored
    how: str
    result: StepResult | None
    before: tuple[Entry, ...]

    def entries(self) -> Iterator[Entry]:
        """Yield the decision log, and the step with the service's answer as its last entry."""
        yield from self.before
        if self.result is not None:
            events = tuple(part.events for part in self.result.parts)
            yield Decision(without_tokens(self.step.step), self.result, events, 0, 0)


class Mirror:
    """The part of a replica's host that follows an engine which decides itself.

    Attributes:
        hidden: why the replica's keys are hidden; None if they are shown.
        lag_steps: steps that the engine has applied and the service has not, as of the last message.
        lag_ms: age of the first step of the last message when it was sent.
        images, divergences: counts since the registration.
        last: the last divergence.
        attached: the request of the engine's session; None without one.
        requests: changes of the cache that the engine is to carry out.
        on_lost: called when what the service has of the replica must not be used any more, so that a store drops it.
    """

    def __init__(self, host: HostState, clock: Callable[[], int], max_lag_ms: int, max_rows: int) -> None:
        self._host: HostState = weakref.proxy(host)  # it has this mirror; a cycle would keep its pool for long
        self._clock = clock
        self._max_lag_ms, self._max_rows = max_lag_ms, max_rows
        self.hidden: KvplaneError | None = None
        self.lag_steps = self.lag_ms = 0
        self.images = self.divergences = 0
        self.last: Divergence | None = None
        self.requests = CacheRequests()
        self.on_lost: list[Callable[[], None]] = []
        self.attached: OpenRequest | None = None
        self._image_wanted = True
        self._pieces: list[bytes] = []

    @property
    def is_attached(self) -> bool:
        """Whether the replica's session is a mirror."""
        return self.attached is not None

    @property
    def takes_rows(self) -> bool:
        """Whether the attached engine prefetches prompts and retains prefixes that callers name."""
        return self.attached is not None and self.attached.mirror is not None and self.attached.mirror.takes_rows

    @property
    def wants_image(self) -> bool:
        """Whether the service does not have the state of the attached engine."""
        return self.is_attached and self._image_wanted

    def leave(self) -> None:
        """End the mirror: another kind of session, or none, writes the replica from now on."""
        self.attached, self.hidden, self._image_wanted = None, None, True
        self._pieces.clear()
        self.requests.send = None
        self.requests.fail(Unavailable(f"the engine of {self._host.name} has left", field="replica"))

    # -- attach ------------------------------------------------------------------------------------------------------

    def check_attach(self, request: OpenRequest) -> None:
        """Raise an error unless this engine may attach.

        Raises:
            FailedPrecondition: its core decides by other rules.
            InvalidArgument: the request has no epoch or no life_nonce.
            OtherWriter: another engine has a session that has not lapsed.
        """
        terms, host = request.mirror, self._host
        assert terms is not None, "the request is not one of a mirror"
        for name, given, expected in (
            ("core_version", terms.core_version, CORE_VERSION),
            ("commit", terms.commit.value, host.replica.spec.commit.value),
        ):
            if given != expected:
                raise FailedPrecondition(
                    f"the engine's core has {name} {given}, this service has {expected}",
                    field=f"open.mirror.{name}",
                    remedy="use the same version and commit rule in engine and service",
                )
        if not request.epoch or not request.life_nonce:
            raise InvalidArgument(
                "a mirror has the epoch and the life_nonce of its engine", field="open.epoch", remedy="set both"
            )
        if host.has_live_session and not self._is_same_life(request):
            raise OtherWriter(
                f"{host.name} has the session of another engine",
                field="open.replica",
                remedy="give each engine a replica of its own, or end the other engine",
            )

    def _is_same_life(self, request: OpenRequest) -> bool:
        mine = self.attached
        return mine is not None and (mine.epoch, mine.life_nonce) == (request.epoch, request.life_nonce)

    def attach(self, request: OpenRequest) -> None:
        """Follow this engine from now on; the session is open. Raises nothing after `check_attach`."""
        if not self._is_same_life(request):
            self.leave()  # no caller has asked this engine for anything
            self._want_image(Diverged(f"{self._host.name} has no state of its engine yet"))
        self.attached = request
        self._pieces.clear()

    # -- steps -------------------------------------------------------------------------------------------------------

    async def apply(self, steps: Sequence[Mirrored], newest: int, age_ms: int, offload: Offload) -> Progress:
        """Apply those of these steps that the service does not have, in order. The session's lease is renewed.

        Raises LimitExceeded, and hides the replica's keys, if a step has too many rows.
        """
        for step in steps:
            await self._host.idle()
            if self._image_wanted:
                break
            if step.step.seq > self._host.seq:
                await self._apply(step, offload)
        self.lag_steps, self.lag_ms = max(0, newest - self._host.seq), age_ms
        self._show()
        return self.progress()

    def progress(self) -> Progress:
        """What the service has applied."""
        if not self._image_wanted:
            return Progress(self._host.seq)
        why = self.hidden or Diverged("the service has no state of the engine")
        return Progress(self._host.seq, True, why.reason, why.message)

    async def _apply(self, one: Mirrored, offload: Offload) -> None:
        host, step = self._host, one.step
        rows, news = size_of(step)[0], step.parts[0].peers if step.parts else Peers()
        rows -= min(len(news.slot) + len(news.gone), MOST_ROWS)  # the service's own
        if rows > self._max_rows:
            raise self.cut_off(LimitExceeded(f"step {step.seq} has {rows} rows, {self._max_rows} are allowed"))
        if step.seq != host.seq + 1 or step.epoch != host.epoch:
            self._want_image(Diverged(f"step {step.seq} of epoch {step.epoch} follows step {host.seq} of {host.epoch}"))
            return
        seen: list[StepResult] = []

        def compare(result: StepResult) -> None:
            seen.append(result)
            if answer_digest(result) != one.digest:
                raise Diverged(f"the answer to step {step.seq} differs from the engine's")

        try:
            await host.steps.apply_aside(step, offload, partial(host.advance_mirror, step), compare)
        except KvplaneError as error:
            self._diverge(one, seen[0] if seen else None, error)
            return
        if one.cache_request:
            self.requests.carried_out(one.cache_request, seen[0])

    def offer_news(self) -> None:
        """Send the engine what peers have stored or evicted since, unless it has much to take already. It takes all in
        order, what a broken stream has lost too, so what is sent counts as known to it.
        """
        requests, peers, name = self.requests, self._host.peers, self._host.name
        is_full = len(requests.offered) >= MOST_OFFERED
        if peers is None or requests.send is None or is_full or self._image_wanted or not self.takes_rows:
            return
        rows = peers.news_of(name, LOOK_S / 2)
        if rows is not None:
            requests.offer(rows)
            peers.was_sent(name, rows)

    def _diverge(self, one: Mirrored, result: StepResult | None, error: KvplaneError) -> None:
        self.divergences += 1
        self.last = Divergence(one, error.message, result, tuple(self._host.decisions))
        _log.error("%s diverged from its engine in step %d: %s", self._host.name, one.step.seq, error)
        self._want_image(Diverged(f"step {one.step.seq}: {error.message}"))

    def cut_off(self, error: KvplaneError) -> KvplaneError:
        """Hide the replica's keys, because a row of the engine may not be applied; returns the error to raise."""
        self._want_image(error)
        return error

    def _want_image(self, why: KvplaneError) -> None:
        self._image_wanted, self.hidden = True, why
        self._host.lose_entries()
        for on_lost in self.on_lost:
            on_lost()

    def _show(self) -> None:
        """Show or hide the replica's keys by the lag."""
        if self._image_wanted:
            return
        late = self.lag_ms > self._max_lag_ms
        self.hidden = Diverged(f"the mirror is {self.lag_ms} ms behind its engine") if late else None
        self._host.show_or_hide()

    # -- images ------------------------------------------------------------------------------------------------------

    async def add_piece(self, data: bytes, first: bool, last: bool, offload: Offload) -> Progress | None:
        """Take a piece of the engine's image; with the last one, continue from the image. Returns the progress then.

        Raises LimitExceeded for an image that is too large, InvalidArgument for one that is damaged or inconsistent.
        """
        if first:
            self._pieces.clear()
        self._pieces.append(data)
        most = _IMAGE_BYTES + _BLOCK_BYTES * self._host.replica.spec.num_blocks
        if sum(map(len, self._pieces)) > most:
            raise self.cut_off(LimitExceeded(f"the image has more than {most} bytes", field="image.data"))
        if not last:
            return None
        raw = b"".join(self._pieces)
        self._pieces.clear()
        await self._host.idle()
        await self._host.steps.aside(self._continue_from(raw, offload))
        return self.progress()

    async def _continue_from(self, raw: bytes, offload: Offload) -> None:
        host, request = self._host, self.attached
        assert request is not None, "an image comes in a session"
        loaded, events = await offload(partial(_load, host.replica.spec, raw))
        if not self._is_same_life(request):
            return  # another engine attached meanwhile
        epoch = loaded.epoch
        if epoch != request.epoch:
            raise InvalidArgument(f"the image is of epoch {epoch}, the session of {request.epoch}", field="image.data")
        host.replica.adopt(loaded)
        life = Life(epoch, (), [CacheEvent(EventKind.CLEARED)], self._clock(), request.incarnation, state=raw)
        host.continue_from(life, request.life_nonce, events)
        self.images += 1
        self._image_wanted = False
        self._show()
        self.requests.offered.clear()
        if host.peers is not None:
            host.peers.continued(host.name)
        self.requests.send_again()


def _load(spec: ReplicaSpec, raw: bytes) -> tuple[ReplicaCore, list[tuple[int, CacheEvent]]]:
    loaded = loader.load_replica(spec, raw)
    try:
        check_invariants(loaded)
    except BrokenInvariant as error:
        raise InvalidArgument(f"the image is inconsistent: {error}", field="image.data") from error
    events = list(loaded.stored_events()) if loaded.spec.events else []
    events += [(0, event) for event in loaded.tiers.stored_events()]
    return loaded, events
