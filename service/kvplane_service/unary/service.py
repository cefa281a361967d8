"""Applies the unary calls of one replica: each call becomes a step of one part; with `more` in its header, it becomes
one part of a step to which further calls belong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane.base.hashing import HashTail
from kvplane.base.requests import Ending
from kvplane.base.session import NEW_EPOCH
from kvplane.base.step import (
    UNCHANGED,
    AdmitStatus,
    Cache,
    End,
    ExtraKeys,
    Facts,
    Part,
    PartResult,
    RowFlag,
    StepResult,
)
from kvplane_service.config import Config
from kvplane_service.replicas.host import ReplicaHost
from kvplane_service.replicas.step_order import Turn, UnaryStep
from kvplane_service.runtime.executors import Offload
from kvplane_service.runtime.rota import Busy
from kvplane_service.unary.asking import EngineCalls, OpWindow
from kvplane_service.unary.calls import (
    AllocateCall,
    Allocated,
    AllocationStatus,
    Appended,
    CacheCall,
    CallHeader,
    CommitCall,
    Committed,
    Content,
    EvictCall,
    FreeCall,
    Hashes,
    Plan,
    PrefetchCall,
    RetainCall,
    UnaryCall,
)
from kvplane_service.unary.fields import unary_fields
from kvplane_service.unary.hashing import ContentHasher
from kvplane_service.unary.requests import KnownRequest, RequestBook

MAX_REQUEST_ID_CHARS = 128

_Answer = TypeVar("_Answer")
_Call = TypeVar("_Call", bound=UnaryCall[Any])
Encode: TypeAlias = Callable[[_Answer], bytes]

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


_ENDS = {Ending.FREE: End.FREE, Ending.HELD: End.HELD, Ending.PREEMPTED: End.PREEMPTED}


class UnaryCalls:
    """Applies unary calls to one replica; keeps the requests that they created, and answers for repeated calls."""

    def __init__(self, host: ReplicaHost, config: Config, hasher: ContentHasher, offload: Offload) -> None:
        """`hasher` hashes token ids; `offload` is the thread on which long calls are applied."""
        self.host = host
        self._offload = offload
        self._config = config
        self._hasher = hasher
        self._epoch = host.epoch
        self._book = RequestBook(config.max_requests)
        self._ops = OpWindow(config.op_window, config.op_window_bytes)
        self._asking = EngineCalls(host, self._ops)

    async def do(self, header: CallHeader, call: UnaryCall[_Answer], encode: Encode[_Answer]) -> bytes:
        """Apply a call once and return its encoded answer; a repeat of its op_id gets the answer of the first call.

        Hashing, and long work of other calls, may wait, and an equal call may be applied meanwhile: everything is
        checked again after each wait. After the last check nothing waits, so that no other call comes between the
        look-up of the answer, the mutation and the stored answer. When the caller is cancelled, a call that is being
        applied still completes, and its answer is kept.

        Raises:
            OtherWriter: a session writes to the replica.
            Unavailable: the engine of a replica with a session has not evicted blocks, or reset its cache, in time.
            FailedPrecondition: blocks are to be evicted after the engine has left: its other keys would be lost too; or
                a prompt is to be prefetched without an engine that the service decides for.
            StaleEpoch: the header names an engine life that has ended.
            OpIdReused: `op_id` was used with other content.
            Busy: too many long contents wait to be hashed, or too many long calls to be applied.
            KvplaneError: the call is refused; nothing changes, and no answer is kept.
        """
        host = self.host
        prepared: UnaryCall[_Answer] | None = None
        self._asking.check(call)
        if isinstance(call, CacheCall):
            hashed: UnaryCall[Any] = await self._hashed(call)
            self._asking.check(call)  # it was awaited
            if self._asking.are_for(call):
                return await self._ask_engine(header, hashed, encode)
            prepared = hashed
        while True:
            await host.idle()
            host.check_unary(header.at)
            answer = self._kept_answer(header)
            if answer is not None:
                return answer
            if prepared is None:
                prepared = await self._hashed(call)
            elif host.has_left:
                self._check_begins(header.at, prepared)
                await host.begin_unary()
            else:
                return await self.apply(header, prepared, encode)

    async def _ask_engine(self, header: CallHeader, call: UnaryCall[Any], encode: Encode[Any]) -> bytes:
        """Let the engine of a replica with a session change its cache, or prefetch; returns the answer when it has.

        Raises Unavailable if it has not in time, and InvalidArgument as `do`.
        """
        if header.at.epoch != NEW_EPOCH:
            self.host.check_epoch(header.at.epoch)
        answer = self._kept_answer(header)
        if answer is not None:
            return answer
        plan = self._plan(call)
        if not (self.host.mirror.takes_rows and isinstance(call, PrefetchCall)):  # which it admits, into its pool
            with unary_fields():
                self.host.replica.check_alone(plan.part)
        return await self._asking.ask(header, plan, encode)

    def _check_begins(self, at: UnaryStep, call: UnaryCall[Any]) -> None:
        """Raise the error with which this call would be refused as the first of an engine life: the life would remove
        every key. Changes nothing else.
        """
        self._asking.check(call)
        if isinstance(call, EvictCall):
            raise FailedPrecondition(
                f"the engine of {self.host.name} has left: without its stamps an eviction would remove every key",
                field="replica",
                remedy="wait for an engine, or remove every key by a reset",
            )
        self._book = RequestBook(self._config.max_requests)  # its requests have ended with the engine life
        plan = self._plan(call)
        with unary_fields():
            self.host.check_begins(at, plan.part)

    async def apply(self, header: CallHeader, call: UnaryCall[_Answer], encode: Encode[_Answer]) -> bytes:
        """Apply a prepared call now; keeps and returns its encoded answer. Raises as `do`.

        A long call is applied and encoded on a thread; other calls of the replica wait until its answer is kept.
        """
        self._follow_epoch()
        plan = self._plan(call)
        with unary_fields():
            turn = self.host.next_unary(header.at, [plan.part])
            if self.host.steps.is_long(turn.step):
                return await self.host.steps.aside(self._apply_long(header, turn, plan, encode))
            result = self.host.apply_unary(turn)
        return self._keep(header, encode(plan.done(result)))

    async def _apply_long(self, header: CallHeader, turn: Turn, plan: Plan[_Answer], encode: Encode[_Answer]) -> bytes:
        answer = plan.done(await self.host.apply_unary_by(self._offload, turn))
        try:
            encoded = await self._offload(partial(encode, answer))
        except Busy:  # the step is applied, so its answer must be kept
            encoded = encode(answer)
        return self._keep(header, encoded)

    def _keep(self, header: CallHeader, answer: bytes) -> bytes:
        self._ops.keep(header.op_id, header.fingerprint, answer)
        return answer

    async def _hashed(self, call: _Call) -> _Call:
        """Return the call with its token ids hashed, or itself if it has none. Raises as `do`."""
        changed: dict[str, Any] = {}
        if isinstance(call, AllocateCall | PrefetchCall | RetainCall) and call.content is not None:
            changed["content"] = await self.hash_content(call.content)
        if isinstance(call, AllocateCall | CommitCall):
            changed["appended"] = await self.hash_appended(call.request_id, call.appended)
        return replace(call, **changed) if changed else call  # type: ignore[type-var]

    def _plan(self, call: UnaryCall[Any]) -> Plan[Any]:
        """Plan how to apply a call whose token ids are hashed to the replica as it is now. Changes nothing; raises as
        `do`.
        """
        match call:
            case AllocateCall():
                return self._plan_allocation(call)
            case CommitCall():
                return self._plan_commit(call)
            case FreeCall():
                return self._plan_end(call)
            case CacheCall():
                return call.plan(self.host.now_ns)
        raise TypeError(f"no such call: {call}")

    async def hash_content(self, content: Content) -> Content:
        """Return the content with its token ids hashed. Changes nothing.

        Raises:
            InvalidArgument: too many tokens, or a token id or extra key that is not accepted.
            Busy: too many long contents wait to be hashed.
        """
        if not content.token_ids:
            return content
        limit = self.host.replica.spec.max_model_len
        if content.num_tokens > limit:  # checked before the work of hashing
            raise InvalidArgument(
                f"{content.num_tokens} tokens",
                field="content.token_ids",
                remedy=f"give at most {limit} tokens, max_model_len of the replica",
            )
        hashes, tail = await self._hash(content.token_ids, content.extra_keys, None, "content.token_ids")
        return replace(content, hashes=hashes, num_hashes=tail.num_blocks, tail=tail, token_ids=())

    async def hash_appended(self, name: str, appended: Appended) -> Appended:
        """Return the tokens appended to request `name`, hashed from the end of its hash chain. Changes nothing.

        Raises:
            NotFound: no such request.
            InvalidArgument: token ids for a request that was created with hashes, or the reverse; or as `hash_content`.
            Busy: as `hash_content`.
        """
        if appended.is_empty:
            return appended
        request = self._known(name)
        if not appended.token_ids:
            if request.tail is not None:
                raise InvalidArgument(
                    "the request was created with token ids", field="appended.num_tokens", remedy="give token_ids"
                )
            return appended
        if request.tail is None:
            raise InvalidArgument(
                "the request was created with hashes",
                field="appended.token_ids",
                remedy="append num_tokens and hashes instead of token ids",
            )
        was = request.tail
        hashes, tail = await self._hash(appended.token_ids, request.extra_keys, was, "appended.token_ids")
        return Appended(appended.num_tokens, hashes, self._count(hashes), was, tail)

    def num_waiting_hashes(self, call: AllocateCall) -> int:
        """Return the number of hashes that an admission of a known request looks up; 0 for a new or running one. The
        replica must be idle.
        """
        request = self._book.find(call.request_id)
        requests = self.host.replica.requests
        if request is None or self._epoch != self.host.epoch or not requests.is_live(request.slot):
            return 0
        return 0 if requests.running[request.slot] else len(requests.hashes(request.slot))

    def _plan_allocation(self, call: AllocateCall) -> Plan[Allocated]:
        """Plan an allocation for a request, which is admitted first unless it is running. Raises as `do`."""
        request = self._requested(call)
        part = Part(with_tables=True)
        self._add_content(part, request, call)
        runs = self.host.replica.requests.running
        is_running = call.content is None and bool(runs[request.slot])
        if is_running:
            victims = [self._book.get(name, f"victims[{at}]").slot for at, name in enumerate(call.victims)]
            part.run = call.as_run(request.slot, victims)
        else:
            part.admit = call.as_admit(request.slot)
        is_new = bool(part.news.slot)

        def done(step: StepResult) -> Allocated:
            if is_new:
                self._enter(request)
            self._note_appended(request, call.appended)
            result = step.parts[0]
            status = self._running_status(request.slot, call, result) if is_running else _admission_status(result)
            return self._allocated(step, request.slot, status)

        return Plan(part, done)

    def _plan_commit(self, call: CommitCall) -> Plan[Committed]:
        """Plan to append tokens and register full blocks. Raises NotFound, InvalidArgument."""
        if not call.request_id:
            if call != CommitCall():
                raise InvalidArgument(
                    "the call has other fields but no request_id",
                    field="request_id",
                    remedy="name the request, or send only the header to end the step",
                )
            return Plan(Part(), lambda step: Committed(step, Hashes()))
        request = self._book.get(call.request_id)

        def done(step: StepResult) -> Committed:
            self._note_appended(request, call.appended)
            return Committed(step, self._hashes(request.slot))

        return Plan(Part(facts=self._facts(request, call.computed, call.appended, call.commit)), done)

    def _plan_end(self, call: FreeCall) -> Plan[StepResult]:
        """Plan to end a request, to end it and hold its blocks, to preempt it, or to release its held blocks. Raises
        NotFound, InvalidArgument.
        """
        request = self._book.get(call.request_id)
        if call.end is Ending.RELEASED:
            if call.fence_seq:
                raise InvalidArgument(
                    f"fence_seq is {call.fence_seq}, and a release takes no fence",
                    field="fence_seq",
                    remedy="give 0, and release the request when the transfer has ended",
                )
            part = Part(cache=Cache(released=[request.slot]))
        else:
            part = Part(facts=Facts(slot=[request.slot], end=[_ENDS[call.end]], fence=[call.fence_seq]))

        def done(step: StepResult) -> StepResult:
            if not self.host.replica.requests.is_live(request.slot):
                self._book.remove(request)
            return step

        return Plan(part, done)

    # ---- inside

    def _kept_answer(self, header: CallHeader) -> bytes | None:
        self._follow_epoch()
        return self._ops.find(header.op_id, header.fingerprint)

    def _known(self, name: str) -> KnownRequest:
        self._follow_epoch()
        return self._book.get(name)

    async def _hash(
        self, token_ids: Sequence[int], keys: ExtraKeys, tail: HashTail | None, field: str
    ) -> tuple[bytes, HashTail]:
        hashed = await self._hasher.hash(self.host.scheme, token_ids, keys, tail, field)
        return hashed.hashes, hashed.tail

    def _count(self, hashes: bytes) -> int:
        return len(hashes) // self.host.scheme.digest.size

    def _follow_epoch(self) -> None:
        """Drop requests and answers of an engine life that has ended."""
        if self._epoch != self.host.epoch:
            self._epoch = self.host.epoch
            self._book = RequestBook(self._config.max_requests)
            self._ops.clear()

    def _requested(self, call: AllocateCall) -> KnownRequest:
        """Return the request of a call; a new one is not added to the known requests yet."""
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
        """Add to the part the row that must precede the allocation: the row that creates a new request, or, for a known
        one, the row with its computed and appended tokens.
        """
        if call.content is None:
            if call.computed != UNCHANGED or call.appended.num_tokens or call.appended.num_hashes:
                part.facts = self._facts(request, call.computed, call.appended, UNCHANGED)
            return
        if call.computed != UNCHANGED or call.appended.num_tokens:
            wrong = "appended" if call.appended.num_tokens else "computed_tokens"
            raise InvalidArgument(
                f"{wrong} is not allowed with content",
                field=wrong,
                remedy="put all tokens of a new request into content",
            )
        if self._book.find(request.name) is not None:  # waiting, and sent again
            if request.slot in self.host.replica.requests.loading:
                return  # preempted during its load, which continues: deferred, as without content
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
            return AllocationStatus.REFUSED  # preempted itself, because its victims did not suffice
        computed = requests.computed[slot]
        wanted = min(requests.num_tokens[slot] + call.extra - computed, call.cap, replica.spec.max_model_len - computed)
        if RowFlag.UNALIGNED not in call.flags:
            wanted = replica.shorten_chunk(slot, computed, wanted)
        return AllocationStatus.REFUSED if wanted > 0 else AllocationStatus.NOTHING_TO_DO

    def _allocated(self, step: StepResult, slot: int, status: AllocationStatus) -> Allocated:
        result = step.parts[0]
        return Allocated(
            step=step,
            status=status,
            hit=result.admit_hit[0] if result.admit_hit else 0,
            granted=(result.granted or result.admit_granted)[0],
            single_group_hit=result.admit_single_group_hit[0] if result.admit_single_group_hit else 0,
            load_after=result.admit_load_after[0] if result.admit_load_after else 0,
            needed=[*result.admit_needed, *result.run_needed, 0][0],
            new_blocks=self._per_group(result.new_blocks.by_row()),
            table=self._per_group(result.tables.by_row()),
            preempted=[self._book.name_of(gone) for gone in result.preempted],
            hashes=self._hashes(slot),
        )

    def _per_group(self, by_row: dict[int, dict[int, list[int]]]) -> list[list[int]]:
        ids = by_row.get(0, {})
        return [ids.get(group, []) for group in range(len(self.host.replica.spec.groups))]

    def _hashes(self, slot: int) -> Hashes:
        digests = self.host.replica.requests.hashes(slot)
        return Hashes(len(digests), digests[-1]) if digests else Hashes()


def _admission_status(result: PartResult) -> AllocationStatus:
    return _OF_ADMISSION[AdmitStatus(result.admit_status[0])]


def _check_name(name: str) -> None:
    if not 1 <= len(name) <= MAX_REQUEST_ID_CHARS:
        raise InvalidArgument(
            f"{len(name)} characters",
            field="request_id",
            remedy=f"give 1 to {MAX_REQUEST_ID_CHARS} characters",
        )
