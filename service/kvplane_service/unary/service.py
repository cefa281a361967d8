"""Unary calls: the operations of a step one at a time, with names in place of slots, for engines that start
small.

Each mutation is a step of its own (or, with `more`, a piece of one) with a single part. Tokens are hashed
before they get here (`kvplane_service.unary.hashing`): the core sees hashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from kvplane.base.errors import FailedPrecondition, InvalidArgument, KvplaneError
from kvplane.base.hashing import HashTail
from kvplane.base.step import (
    ANY_HIT,
    NO_EXTRA_KEYS,
    UNCHANGED,
    UNLIMITED,
    Admit,
    AdmitStatus,
    Cache,
    End,
    ExtraKeys,
    Facts,
    News,
    OnRefusal,
    Part,
    PartResult,
    RowFlag,
    Run,
    StepResult,
    Watermark,
)
from kvplane_service.config import Config
from kvplane_service.core.program import align_chunk
from kvplane_service.replicas.host import ReplicaHost, UnaryStep
from kvplane_service.unary.idempotency import OpWindow
from kvplane_service.unary.requests import KnownRequest, RequestBook

MAX_REQUEST_ID_CHARS = 128


@dataclass(frozen=True, slots=True)
class Content:
    """What a new request consists of. `tail` is where its hashes stand, None when the caller made them."""

    num_tokens: int
    hashes: bytes
    num_hashes: int
    tail: HashTail | None = None
    extra_keys: ExtraKeys = NO_EXTRA_KEYS
    domain: str = ""
    skip_reading: bool = False
    max_tokens: int = 0

    def as_news(self, slot: int, name: str) -> News:
        """The row that creates the request."""
        return News(
            slot=[slot],
            num_tokens=[self.num_tokens],
            num_hashes=[self.num_hashes],
            hashes=self.hashes,
            request_id=[name],
            domain=[self.domain],
            extra_keys=[self.extra_keys],
            skip_reading=[int(self.skip_reading)],
            max_tokens=[self.max_tokens],
        )


@dataclass(frozen=True, slots=True)
class Appended:
    """Tokens that joined a request.

    `was` and `tail`: where its hashes stood before, and stand after; None when the caller makes them.
    """

    num_tokens: int = 0
    hashes: bytes = b""
    num_hashes: int = 0
    was: HashTail | None = None
    tail: HashTail | None = None


@dataclass(frozen=True, slots=True)
class AllocateCall:
    """One AllocateSlots, see the contract."""

    request_id: str
    content: Content | None = None
    computed: int = UNCHANGED
    appended: Appended = field(default_factory=Appended)
    cap: int = UNLIMITED
    extra: int = 0
    lookahead: int = 0
    flags: RowFlag = RowFlag.NONE
    external: int = 0
    encoder_tokens: int = 0
    reserved: int = 0
    watermark: Watermark = Watermark.AUTO
    expected_hit: int = ANY_HIT
    in_flight: int = -1
    victims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CommitCall:
    """One CommitBlocks, see the contract; without a name it only ends the step."""

    request_id: str = ""
    computed: int = UNCHANGED
    appended: Appended = field(default_factory=Appended)
    commit: int = UNCHANGED


class AllocationStatus(Enum):
    """What became of an allocation; the value is the name in the contract."""

    GRANTED = "GRANTED"
    REFUSED = "REFUSED"
    DEFERRED = "DEFERRED"
    STALE_HIT = "STALE_HIT"
    NOTHING_TO_DO = "NOTHING_TO_DO"
    NEVER_FITS = "NEVER_FITS"


_OF_ADMISSION = {
    AdmitStatus.NOT_REACHED: AllocationStatus.NOTHING_TO_DO,
    AdmitStatus.GRANTED: AllocationStatus.GRANTED,
    AdmitStatus.REFUSED: AllocationStatus.REFUSED,
    AdmitStatus.DEFERRED: AllocationStatus.DEFERRED,
    AdmitStatus.STALE_HIT: AllocationStatus.STALE_HIT,
    AdmitStatus.NO_ROOM: AllocationStatus.NOTHING_TO_DO,
    AdmitStatus.NEVER_FITS: AllocationStatus.NEVER_FITS,
    AdmitStatus.NOT_WAITING: AllocationStatus.NOTHING_TO_DO,
}


@dataclass(frozen=True, slots=True)
class Hashes:
    """The block hashes that are known of a request: how many, and the last."""

    count: int = 0
    last: bytes = b""


@dataclass(frozen=True, slots=True)
class Allocated:
    """Answer of an allocation; blocks per group."""

    step: StepResult
    status: AllocationStatus
    hit: int
    granted: int
    junction: int
    load_after: int
    new_blocks: list[list[int]]
    table: list[list[int]]
    preempted: list[str]
    hashes: Hashes


class EndKind(Enum):
    """How a request leaves; the value is the name in the contract."""

    FREE = "FREE"
    HELD = "HELD"
    PREEMPTED = "PREEMPTED"
    RELEASED = "RELEASED"


_ENDS = {EndKind.FREE: End.FREE, EndKind.HELD: End.HELD, EndKind.PREEMPTED: End.PREEMPTED}


class UnaryCalls:
    """Unary mutations of one replica, and the requests they know."""

    def __init__(self, host: ReplicaHost, config: Config) -> None:
        self.host = host
        self._config = config
        self._epoch = host.epoch
        self._book = RequestBook(config.max_requests)
        self._ops = OpWindow(config.op_window, config.op_window_bytes)

    @property
    def ops(self) -> OpWindow:
        """Answers by op_id, of the present engine life."""
        self._follow_epoch()
        return self._ops

    def known(self, name: str) -> KnownRequest:
        """A request that unary calls made. Raises NotFound."""
        self._follow_epoch()
        return self._book.get(name)

    def allocate(self, at: UnaryStep, call: AllocateCall) -> Allocated:
        """Give a request blocks; admits it first when it is not running. Raises as the contract's
        AllocateSlots.
        """
        self._begin(at)
        request = self._requested(call)
        part = Part(with_tables=True)
        self._add_content(part, request, call)
        runs = self.host.replica.requests.running
        is_running = call.content is None and runs[request.slot]
        if is_running:
            victims = [self._book.get(name, f"victims[{at}]").slot for at, name in enumerate(call.victims)]
            part.run = _run_row(request.slot, call, victims)
        else:
            part.admit = _admit_row(request.slot, call)
        step = self._apply(at, part)
        if part.news.slot:
            self._enter(request)
        self._note_appended(request, call.appended)
        result = step.parts[0]
        status = self._running_status(request.slot, call, result) if is_running else _admission_status(result)
        return self._allocated(step, request.slot, status)

    def commit(self, at: UnaryStep, call: CommitCall) -> tuple[StepResult, Hashes]:
        """Append tokens and register full blocks."""
        self._begin(at)
        if not call.request_id:
            if call != CommitCall():
                raise InvalidArgument(
                    "no request is named", field="request_id", remedy="name it, or give the header alone"
                )
            return self._apply(at, Part()), Hashes()
        request = self._book.get(call.request_id)
        step = self._apply(at, Part(facts=self._facts(request, call.computed, call.appended, call.commit)))
        self._note_appended(request, call.appended)
        return step, self._hashes(request.slot)

    def free(self, at: UnaryStep, name: str, end: EndKind, fence: int) -> StepResult:
        """End, hold, preempt or release a request."""
        self._begin(at)
        request = self._book.get(name)
        if end is EndKind.RELEASED:
            if fence:
                raise InvalidArgument("a release has no fence", field="fence_seq", remedy="release it later")
            part = Part(cache=Cache(released=[request.slot]))
        else:
            part = Part(facts=Facts(slot=[request.slot], end=[_ENDS[end]], fence=[fence]))
        step = self._apply(at, part)
        if not self.host.replica.requests.is_live(request.slot):
            self._book.remove(request)
        return step

    def evict(self, at: UnaryStep, blocks: list[int]) -> StepResult:
        """Drop the keys of blocks."""
        self._begin(at)
        return self._apply(at, Part(cache=Cache(evicted=blocks)))

    def reset(self, at: UnaryStep) -> StepResult:
        """Drop every key when no block is in use."""
        self._begin(at)
        return self._apply(at, Part(cache=Cache(reset=True)))

    # ---- inside

    def _begin(self, at: UnaryStep) -> None:
        self.host.check_unary(at)
        self.host.revive()
        self._follow_epoch()

    def _follow_epoch(self) -> None:
        """A new engine life knows none of the old requests and answers."""
        if self._epoch != self.host.epoch:
            self._epoch = self.host.epoch
            self._book = RequestBook(self._config.max_requests)
            self._ops.clear()

    def _requested(self, call: AllocateCall) -> KnownRequest:
        """The request of a call; a new one is not entered yet."""
        known = self._book.find(call.request_id)
        if known is None:
            if call.content is None:
                return self._book.get(call.request_id)
            _check_name(call.request_id)
            return KnownRequest(call.request_id, self._book.next_slot(), call.content.tail, call.content.extra_keys)
        requests = self.host.replica.requests
        if requests.held[known.slot]:
            raise FailedPrecondition(
                f"request {known.name} has ended, its blocks are held",
                field="request_id",
                remedy="release it with END_KIND_RELEASED",
            )
        if call.content is None:
            return known
        if requests.running[known.slot]:
            raise InvalidArgument(
                f"request {known.name} is running",
                field="content",
                remedy="leave it out; use appended for new tokens",
            )
        return KnownRequest(known.name, known.slot, call.content.tail, call.content.extra_keys)

    def _add_content(self, part: Part, request: KnownRequest, call: AllocateCall) -> None:
        """What has to happen before the allocation: a new request, or facts about the old one."""
        if call.content is None:
            if call.computed != UNCHANGED or call.appended.num_tokens or call.appended.num_hashes:
                part.facts = self._facts(request, call.computed, call.appended, UNCHANGED)
            return
        if call.computed != UNCHANGED or call.appended.num_tokens:
            wrong = "appended" if call.appended.num_tokens else "computed_tokens"
            raise InvalidArgument("a new request has none", field=wrong, remedy="put all tokens into content")
        if request.slot in self.host.replica.requests.loading:
            return  # preempted under its load, which content does not end: deferred as without content
        if self._book.find(request.name) is not None:  # waiting, and given anew
            part.facts = Facts(slot=[request.slot], end=[End.FREE])
        part.news = call.content.as_news(request.slot, request.name)

    def _facts(self, request: KnownRequest, computed: int, appended: Appended, commit: int) -> Facts:
        if appended.was is not request.tail and appended.num_tokens:
            raise FailedPrecondition(
                f"request {request.name} changed while its tokens were hashed",
                field="request_id",
                remedy="send one call for a request at a time",
            )
        return Facts(
            slot=[request.slot],
            computed=[computed],
            appended=[appended.num_tokens],
            num_hashes=[appended.num_hashes],
            hashes=appended.hashes,
            commit=[commit],
        )

    def _apply(self, at: UnaryStep, part: Part) -> StepResult:
        with _unary_fields():
            return self.host.apply_unary(at, [part])

    def _enter(self, request: KnownRequest) -> None:
        old = self._book.find(request.name)
        if old is None:
            self._book.add(request)
        else:
            old.tail, old.extra_keys = request.tail, request.extra_keys

    def _note_appended(self, request: KnownRequest, appended: Appended) -> None:
        if appended.num_tokens:
            request.tail = appended.tail

    def _running_status(self, slot: int, call: AllocateCall, result: PartResult) -> AllocationStatus:
        if result.granted[0]:
            return AllocationStatus.GRANTED
        replica = self.host.replica
        requests = replica.requests
        if not requests.running[slot]:
            return AllocationStatus.REFUSED  # the victims did not suffice and it was one of them
        computed = requests.computed[slot]
        wanted = min(requests.num_tokens[slot] + call.extra - computed, call.cap, replica.spec.max_model_len - computed)
        if RowFlag.UNALIGNED not in call.flags:
            wanted = align_chunk(replica.coordinator, slot, computed, wanted)
        return AllocationStatus.REFUSED if wanted > 0 else AllocationStatus.NOTHING_TO_DO

    def _allocated(self, step: StepResult, slot: int, status: AllocationStatus) -> Allocated:
        result = step.parts[0]
        return Allocated(
            step=step,
            status=status,
            hit=result.admit_hit[0] if result.admit_hit else 0,
            granted=(result.granted or result.admit_granted)[0],
            junction=result.admit_junction[0] if result.admit_junction else 0,
            load_after=result.admit_load_after[0] if result.admit_load_after else 0,
            new_blocks=self._per_group(result.new_blocks.by_row()),
            table=self._per_group(result.tables.by_row()),
            preempted=[self._book.name_of(gone) for gone in result.preempted],
            hashes=self._hashes(slot),
        )

    def _per_group(self, by_row: dict[int, dict[int, list[int]]]) -> list[list[int]]:
        ids = by_row.get(0, {})
        return [ids.get(group, []) for group in range(len(self.host.replica.spec.groups))]

    def _hashes(self, slot: int) -> Hashes:
        digests = self.host.replica.requests.content[slot].digests
        return Hashes(len(digests), digests[-1]) if digests else Hashes()


def _run_row(slot: int, call: AllocateCall, victims: list[int]) -> Run:
    return Run(
        slot=[slot],
        extra=[call.extra],
        cap=[call.cap],
        lookahead=[call.lookahead],
        in_flight=[call.in_flight],
        flags=[call.flags & (RowFlag.UNALIGNED | RowFlag.DELAY_CACHING)],
        victims=victims,
        on_refusal=OnRefusal.PREEMPT if victims else OnRefusal.STOP,
    )


def _admit_row(slot: int, call: AllocateCall) -> Admit:
    return Admit(
        slot=[slot],
        extra=[call.extra],
        cap=[call.cap],
        lookahead=[call.lookahead],
        external=[call.external],
        expected_hit=[call.expected_hit],
        encoder_tokens=[call.encoder_tokens],
        reserved=[call.reserved],
        watermark=[call.watermark],
        flags=[call.flags],
    )


def _admission_status(result: PartResult) -> AllocationStatus:
    return _OF_ADMISSION[AdmitStatus(result.admit_status[0])]


def _check_name(name: str) -> None:
    if not 1 <= len(name) <= MAX_REQUEST_ID_CHARS:
        raise InvalidArgument(
            f"{len(name)} characters",
            field="request_id",
            remedy=f"give 1 to {MAX_REQUEST_ID_CHARS} characters",
        )


# Columns of the step that a call becomes -> fields of the call.
_FIELDS = {
    "news.num_tokens": "content.num_tokens",
    "news.num_hashes": "content.hashes",
    "news.hashes": "content.hashes",
    "news.max_tokens": "content.max_tokens",
    "news.slot": "request_id",
    "facts.slot": "request_id",
    "facts.computed": "computed_tokens",
    "facts.appended": "appended.num_tokens",
    "facts.num_hashes": "appended.hashes",
    "facts.hashes": "appended.hashes",
    "facts.tokens": "appended.token_ids",
    "facts.commit": "commit_tokens",
    "facts.end": "end",
    "facts.fence": "fence_seq",
    "cache.evicted": "block_ids",
    "cache.released": "end",
    "cache.reset": "header",
    "extra": "extra_tokens",
    "cap": "max_new_tokens",
    "lookahead": "lookahead_tokens",
    "in_flight": "in_flight_tokens",
    "external": "external_tokens",
    "expected_hit": "expected_hit_tokens",
    "encoder_tokens": "encoder_tokens",
    "reserved": "reserved_blocks",
    "watermark": "watermark",
    "executed_through": "header.executed_through",
    "parts": "header.more",
}
_COLUMN = re.compile(r"(?:parts\[\d+\]\.)?(?:run\.|admit\.)?([a-z_.]+)(\[\d+\])?")


@contextmanager
def _unary_fields() -> Iterator[None]:
    """Let refusals name the field of the call in place of the step's column."""
    try:
        yield
    except KvplaneError as error:
        error.field = unary_field(error.field)
        raise


def unary_field(column: str) -> str:
    """The field of a call that a column of its step came from."""
    match = _COLUMN.fullmatch(column)
    name = _FIELDS.get(match[1]) if match else None
    if name is None or match is None:
        return column
    return f"{name}{match[2] or ''}" if name == "block_ids" else name
