"""What vLLM's schedule() will ask of its KV cache manager, as the rows of one message.

The rows have the order of vLLM's queues. The service limits each row by its cap and by the token budget, looks
prefixes up, and preempts in the order of `victims`, so that every later row gets what vLLM will ask for it.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from kvplane.base.step import UNLIMITED, Admit, Budget, OnRefusal, RowFlag, Run
from kvplane_vllm.remote.books import Books, Entry, FactRows, Program

# Waiting requests that a program asks for: at least a few, and more up to this number of budgets: most may be hits.
FEW_ADMISSIONS, BUDGETS_ASKED = 8, 4
MOST_ADMISSIONS = 256


class Planner:
    """Builds programs from the queues of vLLM's scheduler."""

    def __init__(self, scheduler: Any, books: Books, *, is_async: bool) -> None:
        """`is_async`: whether vLLM schedules a step before it has the tokens of the step before."""
        self._scheduler, self._books, self._is_async = scheduler, books, is_async
        config = scheduler.vllm_config.speculative_config
        self._draft_slots = config.max_num_new_slots_for_drafting if config is not None else 0
        flags = RowFlag.FULL_FIT if scheduler.scheduler_reserve_full_isl else RowFlag.NONE
        if not scheduler.scheduler_config.enable_chunked_prefill:
            flags |= RowFlag.WHOLE
        self._admit_flags = int(flags)

    def plan(
        self, start: int | None, used: dict[str, int], first: Request | None = None, *, is_ahead: bool = False
    ) -> Program:
        """Return the program of the running requests from `start` on, and of the waiting ones.

        Args:
            start: index in `running`; None = only waiting requests.
            used: tokens that vLLM has scheduled in this iteration, by request.
            first: the waiting request that vLLM asks for, before which it has passed over all others; None = unknown.
            is_ahead: whether the tokens of the step that was scheduled last are not known yet.
        """
        scheduler, books = self._scheduler, self._books
        rows, program = books.begin_facts()
        program.is_ahead = is_ahead
        news, chosen = list[Request](), list[Request]()
        tokens = scheduler.max_num_scheduled_tokens - sum(used.values())
        inputs = scheduler.scheduler_config.max_num_batched_tokens - sum(used.values())
        inputs -= self._draft_slots * len(used)
        is_paused = scheduler._pause_state == PauseState.PAUSED_ALL
        has_room = tokens > 0 and inputs > self._draft_slots and not is_paused
        cap = self._cap()
        for request in scheduler.kv_holding_waiting:  # sessions, which go back when an answer ends
            entry = books.entries.get(request.request_id)
            if entry is not None and entry.running and request.num_computed_tokens < entry.computed:
                books.report(entry, rows, program, request.num_computed_tokens, grows=False)
        if start is not None:
            self._run(program, rows, start, cap=cap, asks=has_room)
        if has_room and scheduler._pause_state == PauseState.UNPAUSED:
            chosen = self._admit(program, rows, news, cap, first)
        books.end_facts(rows, program, news)
        program.admit = [books.entries[one.request_id] for one in chosen]
        program.rows.admit.slot = [entry.slot for entry in program.admit]
        program.rows.budget = Budget(tokens, inputs, self._draft_slots) if has_room else Budget()
        return program

    def extension(self, entry: Entry, num_tokens: int) -> Program:
        """Return the program that grants further tokens to one request, whose grant was too small."""
        books, request = self._books, entry.request
        rows, program = books.begin_facts()
        rows.add(entry)
        books.end_facts(rows, program, [])
        extra = entry.computed + num_tokens - entry.num_tokens
        lookahead, in_flight = [self._scheduler.num_lookahead_tokens], [request.num_in_flight_tokens]
        flags = [int(RowFlag.UNALIGNED)]
        run = Run([entry.slot], [extra], [num_tokens], lookahead, in_flight, flags, on_refusal=OnRefusal.STOP)
        program.rows.run, program.run = run, [entry]
        return program

    def lowering(self, entry: Entry) -> Program:
        """Return the program that reports that a session went back."""
        rows, program = self._books.begin_facts()
        self._books.report(entry, rows, program, entry.request.num_computed_tokens, grows=False)
        self._books.end_facts(rows, program, [])
        return program

    def _cap(self) -> int:
        """Return the most tokens of one request."""
        scheduler = self._scheduler
        threshold = scheduler.scheduler_config.long_prefill_token_threshold
        crowd = sum(scheduler.get_request_counts())
        if threshold <= 0 or crowd <= 1:
            return UNLIMITED
        if scheduler.adaptive_long_prefill_threshold:
            return int(max(threshold, scheduler.scheduler_config.max_num_batched_tokens // crowd))
        return int(threshold)

    # -- running requests --------------------------------------------------------------------------------------------

    def _run(self, program: Program, rows: FactRows, start: int, *, cap: int, asks: bool) -> None:
        scheduler, books = self._scheduler, self._books
        running = scheduler.running if start == 0 else scheduler.running[start:]
        run, extras, in_flight = program.run, list[int](), list[int]()
        caps: dict[int, int] = {}
        # Unless vLLM schedules asynchronously, the running step has ended when the program of the next one is used.
        ends_before = program.is_ahead and not self._is_async
        decodes_ahead = program.is_ahead and asks and not self._is_async and not scheduler.num_spec_tokens
        for request in running:
            entry = books.entries.get(request.request_id)
            if entry is None or not entry.running or (start and entry.name in books.grants):
                continue
            computed, num_tokens = request.num_computed_tokens, request.num_tokens
            if computed == entry.computed and len(request.block_hashes) == entry.num_hashes:
                rows.add_tokens(entry, num_tokens)
            else:
                books.report(entry, rows, program, computed)
            if decodes_ahead and computed == num_tokens and not request.is_prefill_chunk:
                if num_tokens + 1 < entry.longest:  # else the token of the running step is the last one
                    run.append(entry)
                    extras.append(1)
                    in_flight.append(0)
                continue
            if not asks:
                continue
            extra = self._extra(request)
            if extra is None:
                continue
            wanted = num_tokens + extra - computed
            limit = scheduler.max_model_len - computed - scheduler.num_sampled_tokens_per_step
            if wanted <= 0 or limit <= 0:
                continue
            if wanted > 1:
                caps[len(run)] = min(cap, limit)
            run.append(entry)
            extras.append(extra)
            in_flight.append(0 if ends_before else request.num_in_flight_tokens)
        self._fill(program, extras, caps, in_flight)

    def _extra(self, request: Request) -> int | None:
        """Return how many tokens vLLM schedules behind the known ones, for drafts and for tokens that are not known;
        None if a running step surely ends the request.
        """
        extra, placeholders = len(request.spec_token_ids), request.num_output_placeholders
        if placeholders:
            if request.num_computed_tokens + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens:
                return None
            extra += placeholders
        return extra

    def _fill(self, program: Program, extras: list[int], caps: dict[int, int], in_flight: list[int]) -> None:
        scheduler, run, num_rows = self._scheduler, program.rows.run, len(program.run)
        run.slot = [entry.slot for entry in program.run]
        run.in_flight = in_flight
        if any(extras):
            run.extra = extras
        if caps:
            run.cap = [caps.get(row, UNLIMITED) for row in range(num_rows)]
        if scheduler.num_lookahead_tokens:
            run.lookahead = [scheduler.num_lookahead_tokens] * num_rows
        if program.is_ahead:
            run.on_refusal = OnRefusal.STOP  # which requests end is not known yet, so nothing is preempted for a row
        else:
            run.on_refusal = OnRefusal.PREEMPT
            run.victims = self._victims(num_rows)

    def _victims(self, num_rows: int) -> list[int]:
        """Return the slots of the running requests in the order in which vLLM preempts."""
        scheduler, entries = self._scheduler, self._books.entries
        order = scheduler.running[::-1]
        if scheduler.policy == SchedulingPolicy.PRIORITY:
            order = sorted(scheduler.running, key=lambda one: (one.priority, one.arrival_time), reverse=True)
        elif num_rows == len(order):
            return []  # the rows themselves, last one first
        found = [entries[one.request_id] for one in order if one.request_id in entries]
        return [entry.slot for entry in found if entry.running]

    # -- waiting requests --------------------------------------------------------------------------------------------

    def _admit(
        self, program: Program, rows: FactRows, news: list[Request], cap: int, first: Request | None
    ) -> list[Request]:
        """Fill the rows of waiting requests, except their slots; returns them, and adds new ones to `news`."""
        scheduler, books = self._scheduler, self._books
        chosen = self._candidates(first)
        for request in chosen:
            entry = books.entries.get(request.request_id)
            if entry is None:
                news.append(request)
            else:
                rows.add(entry)
        program.rows.admit = Admit(
            cap=[cap] * len(chosen) if cap != UNLIMITED else [],
            lookahead=[scheduler.num_lookahead_tokens] * len(chosen) if scheduler.num_lookahead_tokens else [],
            flags=[self._admit_flags] * len(chosen) if self._admit_flags else [],
            max_running=scheduler.max_num_active_reqs,
            on_refusal=OnRefusal.STOP,
            only_if_no_preemption=True,
        )
        return chosen

    def _candidates(self, first: Request | None) -> list[Request]:
        """Return the waiting requests that vLLM will try to admit, in its order: `first`, and others that it does not
        pass over. An adapter that does not run takes one of the places that are left for adapters.
        """
        scheduler = self._scheduler
        places = scheduler.max_num_active_reqs - len(scheduler.running) - scheduler.num_waiting_for_streaming_input
        if places <= 0 or scheduler.kv_holding_waiting or not scheduler.waiting:
            return []
        chosen, room = list[Request](), BUDGETS_ASKED * scheduler.max_num_scheduled_tokens
        users = scheduler.running if first is None else [*scheduler.running, first]
        loras = {one.lora_request.lora_int_id for one in users if one.lora_request}
        most_loras = scheduler.lora_config.max_loras if scheduler.lora_config else 0
        for request in islice(scheduler.waiting, MOST_ADMISSIONS):
            if len(chosen) == places or (room <= 0 and len(chosen) >= FEW_ADMISSIONS):
                break
            lora = request.lora_request.lora_int_id if request.lora_request else 0
            has_place = not lora or lora in loras or len(loras) < most_loras
            if request is first or (has_place and not _is_blocked(request)):
                loras |= {lora} if lora else set()
                chosen.append(request)
                room -= request.num_tokens
        return chosen


def _is_blocked(request: Request) -> bool:
    """Whether vLLM passes this waiting request over, whatever runs."""
    if request.num_stale_output_tokens and not request.drop_stale_output:
        return True
    if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        asked = request.structured_output_request
        return not asked or asked.grammar is None or isinstance(asked.grammar, Exception)
    return request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
