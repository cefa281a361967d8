"""Asks the service for each schedule(), and gives its answer to vLLM's calls."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvplane.base.step import AdmitStatus, End, StepResult
from kvplane_vllm.remote.books import Books, Entry, Program
from kvplane_vllm.remote.link import Away, Link, Lost
from kvplane_vllm.remote.program import Planner

logger = logging.getLogger("vllm.kvplane")  # with the handlers of vLLM

FLUSH_TIMEOUT_S = 0.5  # between two iterations, where a client of vLLM may wait for a reset
_FINAL = (AdmitStatus.REFUSED, AdmitStatus.NEVER_FITS, AdmitStatus.NO_ROOM)


class Driver:
    """The service's part in one iteration of vLLM's scheduler.

    begin        the answer of the program that was sent ahead; without one, a program is sent and answered
    schedule()   vLLM's calls take what was granted; what the program did not have is asked for by a further message
    end          the program of the next step is sent ahead

    Attributes:
        executed: (engine life, step) of the last step that has finished on the worker.
        messages: how many calls of schedule() sent how many messages.
    """

    def __init__(self, scheduler: Any, link: Link, books: Books, *, is_async: bool, pipeline: bool) -> None:
        """`is_async`: vLLM schedules asynchronously; `pipeline`: programs are sent ahead."""
        self._scheduler, self._link, self._books = scheduler, link, books
        self._planner = Planner(scheduler, books, is_async=is_async)
        self._pipeline, self._is_async = pipeline, is_async
        self._budget = scheduler.max_num_scheduled_tokens
        self.executed = self._launched = (link.life, link.answered)
        self._reported = link.answered
        self._sent: Program | None = None
        self._used: dict[str, int] = {}
        self._asked: set[str] = set()
        self._is_away = False
        self._was_ahead = False  # whether the answer in the books was asked for before the last step had ended
        self.messages: Counter[int] = Counter()
        self._num_sent = 0

    # -- an iteration ------------------------------------------------------------------------------------------------

    def begin(self, preempt: Callable[[list[Any]], None]) -> bool:
        """Begin an iteration; returns False if nothing can be scheduled, since the service does not answer.

        `preempt` preempts requests in vLLM's queues.
        """
        books = self._books
        self._num_sent = self._link.num_messages
        self._used.clear()
        self._asked.clear()
        books.refused.clear()
        unused, self._was_ahead, self._is_away = 0, self._link.in_flight, False
        try:
            if self._was_ahead:
                unused = self._take(self._link.receive())
            self._preempt_lost(preempt)
            self._reopen()
            if not self._was_ahead:
                if not self._may_send():
                    raise Away  # until a launch in flight has finished
                self._exchange(self._planner.plan(0, self._used))
                self._preempt_lost(preempt)
        except Away:
            self._is_away = True
        except Lost:
            self._begin_life()
            self._preempt_lost(preempt)
            self._is_away = True
        # vLLM has the budget that the program had: that of rows that are not needed any more went to no other row.
        granted = sum(books.grants.values()) + sum(one.num_tokens for one in books.admitted.values())
        most = min(self._budget, self._scheduler.scheduler_config.max_num_batched_tokens)
        if unused and granted + unused >= most:
            self._scheduler.max_num_scheduled_tokens = most - unused
        return not self._is_away

    def end(self) -> tuple[int, int]:
        """End an iteration; returns the last (engine life, step) of it."""
        books = self._books
        self._launched = done = (self._link.life, self._link.answered)
        self._scheduler.max_num_scheduled_tokens = self._budget
        books.drop_unused()
        is_ready = not (self._is_away or books.lost or books.victims or self._link.in_flight)
        if self._pipeline and is_ready and self._may_send(more=1):
            program = self._planner.plan(0, {}, is_ahead=True)
            if not program.is_empty:
                self._sent = program
                self._link.send(program.parts(), self._executed())
        self.messages[self._link.num_messages - self._num_sent] += 1
        return done

    def _reopen(self, within_s: float | None = None) -> None:
        if not self._link.is_open and self._books.launch_orders:
            self.write_ahead()
            self._books.launch_orders.clear()  # the ranks refuse those of the last engine life
        self._link.reopen(within_s)

    def _preempt_lost(self, preempt: Callable[[list[Any]], None]) -> None:
        if self._books.lost:
            lost, self._books.lost = self._books.lost, []
            preempt(lost)

    # -- messages ----------------------------------------------------------------------------------------------------

    def _executed(self) -> int:
        """Return what the next message reports as executed."""
        self._reported = max(self._reported, self._books.executed(self._done))
        return self._reported

    @property
    def _done(self) -> int:
        """The last step of this life that has finished on the worker."""
        life, seq = self.executed
        return seq if life == self._link.life else self._reported

    def _may_send(self, more: int = 0) -> bool:
        """Whether the service accepts a step, and `more` behind it, before another one is executed."""
        return self._link.answered + 1 + more - max(self._done, self._reported) <= self._link.max_steps

    def _take(self, answer: StepResult) -> int:
        program, self._sent = self._sent, None
        assert program is not None, "an answer belongs to a program"
        return self._books.take(program, answer)

    def _exchange(self, program: Program, within_s: float | None = None) -> None:
        if not program.is_empty:
            self._sent = program
            self._take(self._link.exchange(program.parts(), self._executed(), within_s))

    def _begin_life(self) -> None:
        """Forget what the service knew; the running requests are preempted at the next iteration."""
        self._sent = None
        scheduler = self._scheduler
        waiting = [one for one in scheduler.kv_holding_waiting if one.num_computed_tokens]
        self._books.forget([*waiting, *scheduler.running])
        self._reported = 0

    def _ask(self, make: Callable[[], Program]) -> None:
        """Send what was not predicted, and wait for the answer. Without one, nothing is granted in this iteration."""
        if self._is_away or not self._link.is_open or not self._may_send():
            return
        self._was_ahead = False
        try:
            self._exchange(make())
        except Away:
            self._is_away = True
        except Lost:
            self._begin_life()
            self._is_away = True

    # -- vLLM's calls ------------------------------------------------------------------------------------------------

    def use(self, name: str, num_tokens: int) -> bool:
        """Use the grant of a running request, if it is what vLLM asks for, without new blocks: the common case."""
        books = self._books
        if books.grants.get(name) != num_tokens or name in books.fresh or books.victims:
            return False
        del books.grants[name]
        self._used[name] = num_tokens
        return True

    def run(self, request: Any, num_tokens: int) -> Entry | None:
        """Use the grant of a running request; returns None if vLLM must preempt."""
        books, name = self._books, request.request_id
        if books.victims:
            return None  # the service has preempted them, vLLM must too
        granted = books.grants.get(name, 0)
        if granted < num_tokens:
            entry = books.entries.get(name)
            if entry is None or not entry.running:
                return None
            if not granted and self._may_ask(name):
                self._ask(lambda: self._planner.plan(self._scheduler.running.index(request), self._used))
                if books.victims:
                    return None
                granted = books.grants.get(name, 0)
            if not self._fill(entry, granted, num_tokens):
                return None
        return self._use(books.entries[name], granted, num_tokens)

    def look_up(self, request: Any) -> tuple[int, int]:
        """Return the hit of a waiting request, and its longest hit in a single group."""
        books, name = self._books, request.request_id
        found = books.admitted.get(name)
        if found is None or (found.entry.hit and books.in_doubt):
            if self._asks_again(name) and self._may_ask(name):
                self._ask(lambda: self._plan_admissions(request))
            found = books.admitted.get(name)
        if found is not None:
            return found.entry.hit, found.single_group_hit
        return books.refused.get(name, (0, 0))[0], 0

    def admit(self, request: Any, num_tokens: int) -> Entry | None:
        """Use the admission of a waiting request; returns None if it is refused."""
        books, name = self._books, request.request_id
        found = books.admitted.get(name)
        if found is None or (found.entry.hit and books.in_doubt):
            return None
        if not self._fill(found.entry, found.num_tokens, num_tokens):
            return None
        del books.admitted[name]
        return self._use(found.entry, found.num_tokens, num_tokens)

    def resume(self, request: Any, num_tokens: int) -> Entry | None:
        """Grant tokens to a waiting request that holds blocks, the session of a streamed input."""
        books, name = self._books, request.request_id
        entry = books.entries.get(name)
        books.grants.pop(name, None)  # from before the session's last answer ended
        if entry is not None and entry.running and entry.computed > request.num_computed_tokens:
            self._ask(lambda: self._planner.lowering(entry))
        if entry is None or not entry.running:
            if request not in books.lost:
                books.lost.append(request)  # it starts over
            return None
        if entry.computed > request.num_computed_tokens or not self._fill(entry, 0, num_tokens):
            return None
        return self._use(entry, num_tokens, num_tokens)

    def unscheduled(self, request: Any) -> None:
        """Record that vLLM preempts a request, which it may have scheduled in this iteration."""
        self._used.pop(request.request_id, None)

    def _may_ask(self, name: str) -> bool:
        """Whether this call may send a message: the first for this request, or the first since blocks returned."""
        if name in self._asked and not self._books.has_news_of_blocks:
            return False
        self._asked.add(name)
        return True

    def _asks_again(self, name: str) -> bool:
        """Whether a waiting request that is not admitted may be admitted now."""
        books = self._books
        if name not in books.refused:
            return True
        if not self._was_ahead:
            return name in books.admitted  # the admission is in doubt
        return books.refused[name][1] not in _FINAL or books.has_news_of_blocks

    def _plan_admissions(self, first: Any) -> Program:
        """Return a program of the waiting requests; what vLLM has not used of the last answer is taken back first."""
        books = self._books
        for name in books.grants:
            entry = books.entries[name]
            books.evict_unwritten(entry, entry.request.num_computed_tokens)
        books.drop_unused()
        return self._planner.plan(None, self._used, first)

    def _fill(self, entry: Entry, granted: int, num_tokens: int) -> bool:
        """Ask for what a grant lacks; returns whether all is granted."""
        if granted >= num_tokens:
            return True
        if granted and self._books.has_states:
            return False  # one launch would carry out both grants, and not leave the state after the first one
        grants, name = self._books.grants, entry.request.request_id
        before = grants.get(name, 0)
        self._ask(lambda: self._planner.extension(entry, num_tokens - granted))
        return granted + grants.get(name, 0) - before >= num_tokens

    def _use(self, entry: Entry, granted: int, num_tokens: int) -> Entry:
        books, name = self._books, entry.request.request_id
        books.grants.pop(name, None)
        self._used[name] = num_tokens
        if granted > num_tokens:
            books.num_unused += 1
            start = entry.hit if entry.request.num_computed_tokens == 0 else entry.request.num_computed_tokens
            books.evict_unwritten(entry, start + num_tokens)
        return entry

    # -- between iterations ------------------------------------------------------------------------------------------

    def reset(self) -> bool:
        """Remove all keys of the prefix cache; returns whether they were removed. While requests hold blocks nothing is
        done, as in vLLM.
        """
        books, link = self._books, self._link
        if books.is_held:
            return False
        if link.is_open and not self._is_away:
            try:
                books.reset()
                self._flush()
                if books.reset_done:
                    self.write_ahead()
                    return True
            except (Away, Lost):
                pass
        # The service does not answer now, or copies of a launch in flight hold their blocks. No request holds one, so
        # that a new session, which knows no key, costs nothing else.
        link.abandon()
        self._begin_life()
        return True

    def write_ahead(self) -> None:
        """Write the stamps of all orders that wait for a launch, so that removals of keys hold even if the engine, or
        the service, ends before that. Safe: a stamp that is written early only costs hits.
        """
        for _, _, orders in self._books.launch_orders or ():
            self._link.write_stamps(orders)

    def flush(self) -> None:
        """Report what ended, if vLLM has no request for which it would call schedule()."""
        if self._books.has_news_of_blocks and not (self._scheduler.running or self._scheduler.waiting):
            try:
                self._flush()
            except Away:
                pass
            except Lost:
                self._begin_life()

    def _flush(self) -> None:
        """Receive what is in flight, take it back, and report everything, while no request of vLLM holds blocks. Raises
        Away or Lost. Waits only briefly: vLLM has other work than this.
        """
        books = self._books
        if self._link.in_flight:
            self._take(self._link.receive(FLUSH_TIMEOUT_S))
        self._reopen(FLUSH_TIMEOUT_S)
        books.drop_unused()
        books.give_up_copies()
        if not self._may_send():
            raise Away
        rows, program = books.begin_facts()
        books.end_facts(rows, program, [])
        self._exchange(program, FLUSH_TIMEOUT_S)
        if self.executed == self._launched:  # no launch runs: what it did not carry out has been taken back
            self.executed = self._launched = (self._link.life, self._link.answered)

    def free(self, request: Any, end: End) -> None:
        """Record that vLLM ended or preempted a request."""
        self.unscheduled(request)
        self._books.free(request, end)

    def close(self) -> None:
        """End the session."""
        self._link.close()
