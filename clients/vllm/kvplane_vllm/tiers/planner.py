"""The scheduler's half: an allocator of kvplane whose device is the host memory, and whose tier is the disk, or what
peers have in host memory. What is said of the disk here is so of peers, which are read in the same way.

A request of vLLM has a shadow there. What vLLM computes, the shadow "computes" by a copy:

    vLLM asks what is stored    the shadow is looked up in host memory and disk; what the disk has is loaded into host
                                memory first, and vLLM asks again until it is there or the time is over
    vLLM has taken blocks       those behind its own hit are copied from the shadow, which holds them from then on;
                                a request that waits for blocks of vLLM holds none
    vLLM computes tokens        full blocks are copied to new blocks of the shadow, with the next step; if there are
                                recurrent states, up to the last end of a block whose state vLLM offers

So the hit that vLLM gets is the union of its own hit and the tiers, and its load reads host memory alone, which does
not fail. All decisions (hits by group, evictions, slots and versions of the disk, what is saved there and when) are
those of the allocator.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING

from kvplane.base.errors import KvplaneError
from kvplane.base.groups import GroupKind
from kvplane.base.hashing import split_hashes
from kvplane.base.sections import AdmitRow, Prefetch, Retain
from kvplane.base.session import CacheRequest
from kvplane.base.step import ANY_HIT, UNLIMITED, AdmitStatus, Cache, End, News, Part, PartResult, RowFlag
from kvplane_core.face.part_rows import Update, admit_section, facts_section, news_section
from kvplane_vllm.tiers import hints
from kvplane_vllm.tiers.host import HostAllocator
from kvplane_vllm.tiers.messages import NO_ORDERS, Copies, Progress, StepOrders
from kvplane_vllm.tiers.plans import blocks_of, copies_between, last_state, overwritten_by
from kvplane_vllm.tiers.shadows import Counts, Filled, Prompt, Shadow, State

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.request import Request

_log = logging.getLogger("vllm.kvplane")
MOST_LOADS = 3  # of one request from the disk, before vLLM takes its hit: one may fail, or be evicted before
MOST_SHADOWS = 1 << 13
MOST_QUIET = 8  # steps of vLLM until the allocator knows that copies have ended, if none asks for it before
MOST_ASKED = 64  # hints that wait; the oldest are forgotten


@dataclass(slots=True)
class _Grows:
    """A shadow that gets blocks up to this number of tokens, in a row of a part."""

    shadow: Shadow
    first: int
    end: int
    states: Mapping[int, int]  # by group: the block of vLLM with the state at the end


class Planner:
    """The shadows of all requests, and the orders of the next step."""

    def __init__(self, host: HostAllocator, load_timeout_s: float, min_load: int = 0, is_v2: bool = False) -> None:
        """`min_load`: fewer tokens than these are computed. `is_v2`: a step writes to blocks before the connector is
        called, as vLLM's V2 runner.
        """
        self.host, self._is_v2, self.counts = host, is_v2, Counts()
        spec = host.replica.spec
        self._sizes = [group.block_size for group in spec.groups]
        self._hash_size, self._unit = spec.hash_block_size, spec.scheduler_block_size
        self._state_groups = [at for at, group in enumerate(spec.groups) if group.kind is GroupKind.MAMBA]
        # No look-up finds such a hit: a row that expects it is answered with the hit there is, and changes nothing.
        self._no_hit = spec.max_model_len
        self._load = int(RowFlag.LOAD) if spec.tiers else 0
        self._timeout_s, self._min_load, self._clock = load_timeout_s, max(1, min_load), time.monotonic
        self._shadows: dict[str, Shadow] = {}
        self._by_slot: dict[int, Shadow] = {}
        self._news: list[News] = []
        self._free_slots: list[int] = []
        self._num_slots = self._num_prompts = 0
        self._scheduled: tuple[SchedulerOutput, KVConnectorBlockState | None] | None = None  # saved by none yet
        self._filled = Filled(self._unit)
        self._saves: list[Copies] = []  # of the next orders
        self._saving = range(0)  # the steps of the allocator whose blocks they write
        self._loads: dict[str, list[Copies] | None] = {}
        self._num_quiet = 0  # steps of vLLM since the last one of the allocator
        self._is_broken = False
        self._asked: deque[CacheRequest] = deque(maxlen=MOST_ASKED)  # by hints of vLLM
        self._prompts: list[Shadow] = []  # that the disk is read for, without a request
        self._retained_until_ns = 0  # the earliest end of what is retained; 0 = nothing is
        self._busy_since: tuple[tuple[int, int], float] | None = None  # how far copies and jobs were, and since when

    # -- what is stored ----------------------------------------------------------------------------------------------

    def matched(self, request: Request, num_computed: int) -> int | None:
        """Return how many tokens behind the computed ones are loaded; None: vLLM asks again with the next step."""
        self._follow()
        self._learn()
        shadow = None if request.skip_reading_prefix_cache else self._shadow_of(request)
        if shadow is None:
            return 0
        if shadow.state in (State.RUNNING, State.LOADING):  # it was preempted, or its load failed
            self._end(shadow, End.PREEMPTED)
        if self._is_broken or shadow.is_computed:
            return 0
        if shadow.since and not self._has_waited(shadow):
            return None
        flags = self._load if shadow.tries < MOST_LOADS else 0
        found = self._hit_of(shadow, flags)
        if flags and found > num_computed:
            in_host = self._hit_of(shadow)
            if found - max(in_host, num_computed) >= self._min_load and self._fetch(shadow):
                shadow.since = shadow.since or self._clock()
                return None
            found = in_host
        shadow.asked, shadow.since = num_computed, 0.0
        return found - num_computed if found - num_computed >= self._min_load else 0

    def _has_waited(self, shadow: Shadow) -> bool:
        """Whether the disk has been read for a shadow, or may be now, or the time for that is over."""
        self.host.open_if_ended()
        self._take_ends()
        if self._is_in_time(shadow):
            return shadow.state is not State.FETCHING
        self.counts.late_loads += 1
        _log.warning("request %s is not loaded: the disk has not answered in time", shadow.request.request_id)
        shadow.tries = MOST_LOADS
        self._end(shadow, End.PREEMPTED)
        return True

    def _fetch(self, shadow: Shadow) -> bool:
        """Let the disk be read for a shadow; returns whether it is, or may be when the reads for others have ended."""
        row = AdmitRow(shadow.slot, cap=0, min_new=0, flags=self._load, expected_hit=ANY_HIT)
        result = self._apply(admits=[row])
        status = AdmitStatus(result.admit_status[0])
        if status is not AdmitStatus.GRANTED:
            reads = any(one.state is State.FETCHING for one in self._shadows.values())
            waits = status is AdmitStatus.DEFERRED or (status is AdmitStatus.REFUSED and reads)
            self.counts.refused += not waits
            return waits
        shadow.held, shadow.job = result.admit_hit[0], result.admit_job[0]
        shadow.state = State.FETCHING
        shadow.tries += 1
        return True

    def _hit_of(self, shadow: Shadow, flags: int = 0, limit: int = UNLIMITED) -> int:
        """Return the hit of a shadow that holds nothing, in tokens: with the disk if `flags` has LOAD."""
        row = AdmitRow(shadow.slot, cap=0, min_new=0, flags=flags, expected_hit=self._no_hit, hit_limit=limit)
        return self._apply([self._progress(shadow)], admits=[row]).admit_hit[0]

    def take(self, request: Request, tables: Sequence[Sequence[int]], num_external: int) -> None:
        """Copy the hit of a shadow into the blocks that vLLM has taken for it."""
        shadow = self._shadow_of(request)
        if shadow is None or shadow.state is not State.IDLE or not num_external:
            return
        end = shadow.asked + num_external
        row = AdmitRow(shadow.slot, cap=0, min_new=0, expected_hit=end, hit_limit=end)
        is_held = self._apply([self._progress(shadow)], admits=[row]).admit_status[0] == AdmitStatus.GRANTED
        shadow.held, shadow.tries, shadow.state = end if is_held else 0, 0, State.LOADING
        copies = self._copies(shadow, tables, shadow.asked, end, to_device=True) if is_held else None
        self._loads[request.request_id] = copies
        if copies is not None:
            self.counts.loaded_tokens += num_external
        elif is_held:
            self.counts.mismatched += 1
            _log.error("request %s is computed: its hit has other blocks than vLLM", request.request_id)
        else:
            self.counts.refused += 1

    # -- what is computed --------------------------------------------------------------------------------------------

    def orders(self, output: SchedulerOutput) -> StepOrders:
        """Return what the workers do with this step. What it computes is saved with the next one."""
        self._follow()
        self._scheduled = output, output.kv_connector_block_state  # which vLLM takes out of the output behind this call
        if not (self._saves or self._loads or self.host.has_work):
            return NO_ORDERS
        overwritten = overwritten_by(output, self._loads)
        if self._is_v2 and any(not overwritten.isdisjoint(one.device) for one in self._saves):
            self._void()
        if self.host.is_open:
            self._close()
        saves, loads, self._saves, self._loads = self._saves, self._loads, [], {}
        if saves or loads:
            self.host.last_copies = self.host.seq
        return StepOrders(self.host.epoch, self.host.take_orders(), saves, loads, overwritten, self.host.take_seals())

    def _follow(self) -> None:
        """Let shadows hold what the step computes that vLLM has scheduled last, if they do not yet. Whatever comes
        next may free its blocks. End the step of the allocator.
        """
        if self._scheduled is None:
            return
        (output, state), self._scheduled = self._scheduled, None
        if not self._is_broken:
            self._save(output, state)
        self._num_quiet += 1
        is_due = self._num_quiet >= MOST_QUIET or not output.num_scheduled_tokens
        if self.host.is_open or (is_due and self.host.has_ended):
            self._close()

    def _close(self) -> None:
        """End the step of the allocator, or let one of its own report what has ended."""
        self._num_quiet = 0
        if self.host.is_open or self._news:
            self._apply(last=True)
        else:
            self.host.grow(())
            self._take_ends()

    def _void(self) -> None:
        """Let shadows hold nothing of what the saves that wait would write: it is overwritten before, or incomplete."""
        self.counts.unsaved += 1
        self._saves.clear()
        self._apply(cache=Cache(failed_steps=[*self._saving]))

    def _save(self, output: SchedulerOutput, state: KVConnectorBlockState | None) -> None:
        """Let shadows hold what their requests compute in a step, and plan the copies."""
        rows, grows, new = list[tuple[Update, int]](), list[_Grows](), list[tuple[int, _Grows]]()
        states: Mapping[int, int] = {}
        offered = state.boundary_state_offloads if self._state_groups and state is not None else ()
        for shadow, count in self._filled.of(output, self._shadows, offered):
            name, computed = shadow.request.request_id, shadow.request.num_computed_tokens
            if computed < shadow.held + self._unit:
                continue
            end = self._end_of(shadow, computed)
            computed -= count
            if self._state_groups:
                end, states = self._state_of(name, end, state)
                computed = end  # of the states before it none is copied
            if not end:
                continue
            if shadow.state is State.FETCHING:
                self._end(shadow, End.PREEMPTED)
            if shadow.state is State.IDLE:
                computed += -computed % self._unit  # whole units, of which vLLM has all blocks that follow
                if computed <= end:
                    new.append((computed, _Grows(shadow, 0, end, states)))
                continue
            if end > shadow.held:
                rows.append((self._progress(shadow), end - shadow.held))
                grows.append(_Grows(shadow, shadow.held, end, states))
        if rows and (self._news or self.host.is_open):
            self._close()
        last, done = self.host.seq - self.host.is_open, list[bool]()
        if rows:
            done, self._num_quiet = self.host.grow(rows), 0
            self._take_ends()
        done += [self._begin(*one) for one in new]
        grows += [one for _, one in new]
        if self.host.is_open:
            self._close()
        self._saving = range(last + 1, self.host.seq + 1)
        self._saves = self._saves_of(grows, done, state)

    def _saves_of(
        self, grows: Sequence[_Grows], done: Sequence[bool], state: KVConnectorBlockState | None
    ) -> list[Copies]:
        """Return the copies to new blocks of shadows; none if vLLM has lost a block. Shadows without room end."""
        found = list[Copies]()
        for one, is_done in zip(grows, done, strict=True):
            if is_done:
                one.shadow.state, one.shadow.held = State.RUNNING, one.end
            else:
                self.counts.refused += 1
                self._end(one.shadow, End.PREEMPTED)
        for one in compress(grows, done):
            theirs = blocks_of(state, one.shadow.request.request_id)
            if one.states:
                behind = {group: [0] * (one.end // self._sizes[group] - 1) + [at] for group, at in one.states.items()}
                theirs = [behind.get(group, row) for group, row in enumerate(theirs)]
            copies = self._copies(one.shadow, theirs, one.first, one.end)
            if copies is None:
                self._void()
                return []
            found += copies
        return found

    def _begin(self, computed: int, one: _Grows) -> bool:
        """Let a shadow that holds nothing hold what its request has, and what it computes, if there is room."""
        one.first = hit = self._hit_of(one.shadow, limit=computed)
        external, cap = computed - hit, one.end - computed
        row = AdmitRow(one.shadow.slot, external=external, cap=cap, min_new=0, expected_hit=hit, hit_limit=computed)
        return self._apply(admits=[row]).admit_status[0] == AdmitStatus.GRANTED

    def _state_of(self, name: str, end: int, state: KVConnectorBlockState | None) -> tuple[int, Mapping[int, int]]:
        """Return up to where the states of a request are kept that vLLM offers with this step, and their blocks by
        group; 0 if there are none.
        """
        assert state is not None, "vLLM gives it where there is a connector"
        offered = [one for one in state.boundary_state_offloads.get(name, ()) if one[2] <= end]
        return last_state(offered, len(self._state_groups), self._unit)

    def _end_of(self, shadow: Shadow, end: int) -> int:
        """Return up to where a shadow follows: whole units of tokens whose hashes are known."""
        end = min(end, len(shadow.request.block_hashes) * self._hash_size, shadow.request.num_tokens)
        return end - end % self._unit

    def _copies(
        self, shadow: Shadow, tables: Sequence[Sequence[int]], first: int, end: int, to_device: bool = False
    ) -> list[Copies] | None:
        """Return the pairs of full blocks between these tokens, by group; None if what is written has a block that what
        is read lacks.
        """
        return copies_between(tables, self.host.tables(shadow.slot), (first, end), self._sizes, to_device)

    # -- what has ended ----------------------------------------------------------------------------------------------

    def finish(self, request: Request) -> None:
        """A request has ended: its shadow too, when its load has."""
        self._follow()
        self._take_hints(lambda: hints.retained(request, self._hash_size))
        shadow = self._shadows.get(request.request_id)
        if shadow is not None and shadow.state is State.LOADING:
            shadow.is_over = True
        elif shadow is not None:
            self._end(shadow, End.FREE)

    def report(self, progress: Progress | None, loaded: Iterable[str], failed: Iterable[str]) -> None:
        """Take what the workers have reported."""
        if progress is not None:
            self.host.report(progress)
            if progress.is_broken and not self._is_broken:
                self._is_broken = True
                _log.error("the tiers are left alone: a copy failed; see the log of the workers")
        for name in failed:
            if (shadow := self._shadows.get(name)) is not None:
                shadow.is_computed = True
        for name in loaded:
            shadow = self._shadows.get(name)
            if shadow is not None and shadow.state is State.LOADING:
                shadow.state = State.RUNNING if shadow.held else State.IDLE
                if shadow.is_over:
                    self._end(shadow, End.FREE)
        self._follow()
        self._carry_out()

    def reset(self) -> bool:
        """Forget all that is stored; returns False while a request loads or waits for a load, while a copy of a request
        that has ended runs, or if the disk cannot forget.
        """
        self._follow()
        held = list[Shadow]()
        if not any(one.state in (State.LOADING, State.FETCHING) for one in self._shadows.values()):
            held = [one for one in self._shadows.values() if one.held]
        rows = [Update(one.slot, end=End.PREEMPTED) for one in held]
        for shadow in held:
            shadow.state, shadow.held = State.IDLE, 0
        is_done = self._apply(rows, cache=Cache(reset=True)).reset_done  # not where a block is held
        return is_done and self.host.forget()

    @property
    def is_busy(self) -> bool:
        """Whether vLLM must run further steps so that saves end; not for a disk that hangs."""
        if self._is_broken or not self.host.is_busy:
            self._busy_since = None
            return False
        state, now = (self.host.seq, self.host.executed), self._clock()
        if self._busy_since is None or self._busy_since[0] != state:
            self._busy_since = state, now
        return now - self._busy_since[1] <= self._timeout_s

    # -- what callers ask for ------------------------------------------------------------------------------------------

    def new_request(self, request: Request) -> None:
        """Take the hints of a new request."""
        self._take_hints(lambda: hints.prefetches(request, self.host.replica.spec))

    def _take_hints(self, read: Callable[[], list[CacheRequest]]) -> None:
        try:
            self._asked += read()
        except KvplaneError as error:
            _log.warning("%s", error)

    def _carry_out(self) -> None:
        """Begin a step with what a caller of the service asks for, or a hint; and let what is retained end in time."""
        if self.host.is_open or self._news or self._is_broken:
            return
        for one in [one for one in self._prompts if one.state is not State.FETCHING or not self._is_in_time(one)]:
            self._prompts.remove(one)
            self._end(one, End.FREE)
        self._learn()
        if self.host.is_open:
            return
        asked = self.host.next_request() or (self._asked.popleft() if self._asked else None)
        if asked is None:
            if 0 < self._retained_until_ns <= time.time_ns():
                self._retain(Retain())
        elif asked.rows is None:
            self._apply(cache=Cache(evicted=list(asked.blocks))) if not asked.reset else self.reset()
        elif asked.rows.prefetch.slot:
            self._prefetch(asked.rows.prefetch)
        else:
            self._retain(asked.rows.retain)

    def _learn(self) -> None:
        """Begin a step with what peers have stored or evicted."""
        if self.host.is_open or self._news or self._is_broken:
            return
        rows = self.host.next_news()
        if rows is not None:
            self.host.apply(Part(peers=rows))
            self._take_ends()

    def _prefetch(self, rows: Prefetch) -> None:
        """Let the disk be read for a prompt without a request. What was read stays in host memory as any block."""
        self._num_prompts += 1
        hashes = split_hashes(bytes(rows.hashes), len(rows.hashes) // rows.num_hashes[0])
        num_tokens = min(len(hashes) * self._hash_size + 1, self._no_hit)
        shadow = self._shadow_of(Prompt(f"prefetch-{self._num_prompts}", num_tokens, hashes))
        if shadow is None:
            self._apply()  # the answer: nothing is copied
            return
        shadow.since = self._clock()
        self._fetch(shadow)
        if shadow.job:
            self._prompts.append(shadow)
        else:
            self._end(shadow, End.FREE)

    def _is_in_time(self, shadow: Shadow) -> bool:
        return self._clock() - shadow.since <= self._timeout_s

    def _retain(self, rows: Retain) -> None:
        """Retain a prefix, or release it; and release what has ended. Times are on the clock of this process."""
        now = time.time_ns()
        ends = [now + max(0, end - rows.now_ns[0]) if end else 0 for end in rows.until_ns]
        part = Part(retain=replace(rows, until_ns=ends, now_ns=[now]))
        self._retained_until_ns = next(iter(self.host.apply(part).retained.next_end_ns), 0)
        self._take_ends()

    # -- shadows -------------------------------------------------------------------------------------------------------

    def _shadow_of(self, request: Request | Prompt) -> Shadow | None:
        """Return the shadow of a request, a new one if it has none; None where there is none."""
        shadow = self._shadows.get(request.request_id)
        if shadow is not None and shadow.request is request:
            return shadow
        if shadow is not None:
            self._end(shadow, End.FREE)  # the id is used again
        if self._is_broken or request.resumable or len(self._shadows) >= MOST_SHADOWS:
            return None
        slot = self._free_slots.pop() if self._free_slots else self._num_slots
        self._num_slots = max(self._num_slots, slot + 1)
        prompt = max(1, min(request.num_prompt_tokens, request.num_tokens))
        digests = request.block_hashes[: prompt // self._hash_size]
        shadow = Shadow(slot, request, prompt, len(digests))
        self._shadows[request.request_id] = self._by_slot[slot] = shadow
        self._news.append(
            News([slot], [prompt], num_hashes=[len(digests)], hashes=b"".join(digests), request_id=[request.request_id])
        )
        return shadow

    def _progress(self, shadow: Shadow) -> Update:
        """Return the row with the tokens and hashes that the request has gained."""
        if any(news.slot[0] == shadow.slot for news in self._news) and shadow.request.num_tokens > shadow.num_tokens:
            self._apply()
        appended, shadow.num_tokens = shadow.request.num_tokens - shadow.num_tokens, shadow.request.num_tokens
        digests = shadow.request.block_hashes[shadow.num_hashes : shadow.num_tokens // self._hash_size]
        shadow.num_hashes += len(digests)
        return Update(shadow.slot, appended=appended, digests=digests)

    def _end(self, shadow: Shadow, end: End) -> None:
        """End a shadow (FREE), or let it hold nothing (PREEMPTED)."""
        holds = shadow.held > 0
        shadow.state, shadow.held, shadow.job = State.IDLE, 0, 0
        if holds or end is End.FREE:
            self._apply([Update(shadow.slot, end=end)])
        if end is End.FREE:
            del self._shadows[shadow.request.request_id], self._by_slot[shadow.slot]
            self._free_slots.append(shadow.slot)

    def _apply(
        self,
        facts: Sequence[Update] = (),
        admits: Sequence[AdmitRow] = (),
        cache: Cache | None = None,
        last: bool = False,
    ) -> PartResult:
        """Apply one part, the `last` one of its step or not. The shadows that it preempts hold nothing any more: their
        load failed, or blocks that they hold are voided.
        """
        news, self._news = self._news, []
        known = [one for one in facts if one.appended or one.digests or one.end]
        if news and known:
            self.host.apply(Part(news=news_section(news)))
            news = []
        part = Part(facts_section(known), cache or Cache(), news=news_section(news), admit=admit_section(admits))
        result = self.host.apply(part, last)
        self._take_ends()
        return result

    def _take_ends(self) -> None:
        """Take the ends of loads from the disk. What was read stays in host memory, and nothing holds it."""
        done, preempted = self.host.take_ends()
        for job in done:
            for shadow in [*self._by_slot.values()]:
                if shadow.job == job and shadow.state is State.FETCHING:
                    self.counts.fetched_loads += 1
                    self._end(shadow, End.PREEMPTED)
        for slot in preempted:
            one = self._by_slot.get(slot)
            if one is not None:
                self.counts.failed_loads += one.state is State.FETCHING
                one.held = one.job = 0
                if one.request.request_id in self._loads:  # of blocks that were voided
                    self._loads[one.request.request_id] = None
                else:
                    one.state = State.IDLE
