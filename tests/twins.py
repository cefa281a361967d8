"""Twins: the real product with one of its rules removed, to prove that a campaign catches the violation.

    with weakened("no stamp check"): ...                        the product of this process
    python -m tests.twins "no stamp check" kvplane serve        a program of the product, or any module, with the twin

A twin is a small patch of the product by name. A missing name is an error, so that no twin is without effect.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import runpy
import sys
import threading
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from itertools import accumulate, islice
from typing import Any

from kvplane.base.errors import DeadlineExceeded, Unavailable
from kvplane.base.groups import GroupKind, TierKind
from kvplane_core.face import loader
from kvplane_core.face.state import digest_as_stated
from kvplane_service.auth.gate import CALL
from kvplane_service.store.record import MAGIC

Real = Callable[..., Any]

FAR = 1 << 62  # a step that no engine reaches


@dataclass(frozen=True)
class Patch:
    """One name of the product and its replacement.

    Attributes:
        path: module, colon, class, dot, attribute; or module, colon, function.
        change: from the real function to the weakened one.
    """

    path: str
    change: Callable[[Real], Real]

    def find(self) -> tuple[Any, str, Any]:
        """The class or module, the name and what it holds; raises LookupError when the product has no such name."""
        module, _, names = self.path.partition(":")
        owner_name, _, name = names.rpartition(".")
        owner: Any = importlib.import_module(module)
        if owner_name:
            owner = getattr(owner, owner_name, None)
        if owner is None or name not in vars(owner):
            raise LookupError(f"{self.path} has gone: update what this twin patches")
        return owner, name, vars(owner)[name]


@dataclass(frozen=True)
class Twin:
    """The product without one rule.

    Attributes:
        rule: the removed rule.
    """

    rule: str
    patches: tuple[Patch, ...]


@contextmanager
def weakened(name: str) -> Iterator[Twin]:
    """Patch the product of this process inside the block; replicas have the Python core, which patches change."""
    twin = TWINS[name]
    found = [patch.find() for patch in twin.patches]
    selected = os.environ.get(loader.VARIABLE, "")
    os.environ[loader.VARIABLE] = "python"
    for patch, (owner, attribute, real) in zip(twin.patches, found, strict=True):
        setattr(owner, attribute, _changed(real, patch.change))
    try:
        yield twin
    finally:
        os.environ[loader.VARIABLE] = selected
        for owner, attribute, real in found:
            setattr(owner, attribute, real)


def _changed(real: Any, change: Callable[[Real], Real]) -> Any:
    if isinstance(real, property):
        assert real.fget is not None
        return property(wraps(real.fget)(change(real.fget)))
    return wraps(real)(change(real))


# -- stamps ------------------------------------------------------------------------------------------------------------


def recover_whatever_is_stored(real: Real) -> Real:
    """Take stored stamps as the stamps of the memory; the newest entries come first."""

    def verify_entries(self: Any, tables: Any, stored: Any) -> Any:
        entries, stamps = list(stored), dict[int, int]()
        for one in entries:
            for block, stamp in zip(one.block, one.stamp, strict=True):
                stamps.setdefault(block, stamp)
        blocks = range(self.spec.num_blocks)
        return real(self, [[stamps.get(block, 0) for block in blocks] for _ in tables], entries)

    return verify_entries


def trust_every_epoch(real: Real) -> Real:
    """The highest epoch of any row or record in the store has begun."""

    def epoch_above(self: Any, replica: Any, shown: Any, owner: int) -> Any:
        state = self._proof_of(replica, shown).state
        return max(real(self, replica, shown, owner), 1 + max(self.epoch, state.stored_epoch))

    return epoch_above


def accept_what_has_no_seal(real: Real) -> Real:
    return lambda self, kind, place, raw: raw if raw.startswith(MAGIC) else real(self, kind, place, raw)


def look_up_without_limits(real: Real) -> Real:
    """A registration of a new name is checked against no limit."""
    del real
    return lambda self, name, registration: self._registry._entries.get(name)


def check_limits_when_adding(real: Real) -> Real:
    """The limits of an owner are checked when its pool has been built."""

    def add(self: Any, name: str, registration: Any, replica: Any) -> Any:
        self._check_limits(CALL.get().owner, registration)
        return real(self, name, registration, replica)

    return add


def record_always(_: Real) -> Real:
    """The record of a replica is written without a look at the one that is stored."""

    async def may_record(self: Any, name: str, journal: Any) -> bool:
        return True

    return may_record


def seal_for_any_place(real: Real) -> Real:
    return lambda key, head, place, raw: real(key, head, "", raw)


def keep_what_is_executed(real: Real) -> Real:
    """A new life uses the stamps of the pool instead of those of the memory."""

    def end_epoch(self: Any, stamp_table: Sequence[int] = ()) -> Any:
        pool = self.coordinator.pool
        return real(self, list(pool.stamp) if stamp_table else stamp_table)

    return end_epoch


def without_restamps(real: Real) -> Real:
    """Call `real` without changing stamps."""

    def act(self: Any, *given: Any) -> Any:
        self.restamp = lambda block: None
        try:
            return real(self, *given)
        finally:
            del self.restamp

    return act


def show_rank_zero(real: Real) -> Real:
    """Use the table of rank 0 for all ranks."""

    def ask_rank_zero(self: Any) -> Any:
        return real(type(self)(self._tables[:1]))

    return ask_rank_zero


def trust_the_engine(_: Real) -> Real:
    """Do not compare the workers' stamps at a claim with the engine's."""

    async def trust(shown: Any, _: Any) -> Any:
        return shown

    return trust


# -- who may write -----------------------------------------------------------------------------------------------------


def carry_out_for_anyone(real: Real) -> Real:
    """Carry out orders of engine lives that do not own the pages, too."""

    def carry_out(self: Any, epoch: int, seq: int, part: int, orders: Any) -> None:
        if epoch == self._stamps.owner_epoch:
            real(self, epoch, seq, part, orders)
        else:
            self._obey(orders)

    return carry_out


def accept_anyone(_: Real) -> Real:
    """Accept every epoch."""
    return lambda self, epoch: None


def lend_while_lent(real: Real) -> Real:
    """Lend the pages to another process although the attached one is alive."""

    def lend(self: Any, name: Any) -> None:
        self.close()
        real(self, name)

    return lend


def answer(value: Any) -> Callable[[Real], Real]:
    """Always return the same value."""
    return lambda _: lambda *arguments: value


def states_by_keys(real: Real) -> Real:
    """Trust that every state longer than `num_computed` has a key of its length."""
    del real

    def can_rewind(self: Any, slot: int, num_computed: int, *_: int) -> bool:
        states = [one for one in self.managers if one.spec.kind is GroupKind.MAMBA]
        blocks = [block for one in states for block in one.table[slot][num_computed // one.block_size :]]
        is_longer = any(self.pool.key_tokens[block] > num_computed for block in blocks)
        return not is_longer and all(one.can_rewind(slot, num_computed) for one in self.managers)

    return can_rewind


def check_without_life(real: Real) -> Real:
    """Continue an engine life by its epoch alone."""
    return lambda self, request: real(self, replace(request, life_nonce=request.epoch and self._life_nonce))


def ask_no_memory(real: Real) -> Real:
    """Ignore the owner epoch that the engine sends."""
    return lambda self, begun, request: real(self, begun, replace(request, owner_epoch=0))


def free_when_silent(real: Real) -> Real:
    """Release all blocks of a replica when its session lapses."""

    def expire(self: Any) -> None:
        if self.state.value == "lapsed":
            self.replica.tracker.abandon()
        real(self)

    return expire


def release_held_at_resume(real: Real) -> Real:
    """Release held blocks when a session resumes."""

    async def open_session(self: Any, request: Any, *given: Any) -> Any:
        opened = await real(self, request, *given)
        for slot in list(self.replica.tracker.held):
            self.replica.tracker.release_held(slot, 0)
        return opened

    return open_session


def complete_at_once(real: Real) -> Real:
    def new_table(self: Any) -> Any:
        return replace(real(self), is_complete=True)

    return new_table


def ended_after_half(real: Real) -> Real:
    def ended(self: Any, table: Any, now_ns: int) -> Any:
        lease_ns = self._lease_ns
        self._lease_ns = lease_ns // 2
        try:
            return real(self, table, now_ns)
        finally:
            self._lease_ns = lease_ns

    return ended


def held_since_the_answer(real: Real) -> Real:
    async def attempt(self: Any, edit: Any) -> None:
        await real(self, edit)
        self._until_ns = self._runtime.clock() + self._lease_ns

    return attempt


def replace_what_is_there(real: Real) -> Real:
    """Replace a table whatever it has become since it was read."""

    async def replace_any(self: Any, _: str | None, raw: bytes) -> bool:
        return bool(await real(self, (await self.read()).version, raw))

    return replace_any


def only_what_the_table_counts(_: Real) -> Real:
    """The next epoch is above those that this process began, those that workers refused, and its grant's alone."""

    def next_epoch(self: Any, request: Any) -> int:
        del request
        grants = self.may_begin.func.__self__._grants
        begun = self.epoch if self.recovering is None else 0
        return int(max(begun, self._owner_epoch, grants.epoch_of(self.name)) + 1)

    return next_epoch


def by_wall_clocks(real: Real) -> Real:
    """Leases of owners are measured by the wall clock."""

    def begin(self: Any, table: Any, me: Any, lease_ms: int, runtime: Any, draw: Any) -> None:
        real(self, table, me, lease_ms, replace(runtime, clock=time.time_ns), draw)

    return begin


def know_no_epochs_of_others(real: Real) -> Real:
    async def ensure(self: Any, name: str) -> int:
        await real(self, name)
        return 0

    return ensure


def count_from_nothing(real: Real) -> Real:
    return lambda self: replace(real(self), epoch=0)


def report_no_epochs(real: Real) -> Real:
    return lambda self, epochs, moving=(): real(self, dict.fromkeys(epochs, 0), moving)


def forget_what_is_preempted(real: Real) -> Real:
    """Requests that lose their blocks are not computed again."""

    def preempt(self: Any, slots: Sequence[int]) -> None:
        real(self, slots)
        for slot in slots:
            self._waiting.remove(self._request(slot))

    return preempt


def without_image(real: Real) -> Real:
    return lambda self: replace(real(self), resume=None)


def without_uid(real: Real) -> Real:
    async def replace_any(self: Any, version: str | None, raw: bytes) -> bool:
        last, found = self._read
        metadata = {key: value for key, value in found.get("metadata", {}).items() if key != "uid"}
        self._read = last, {**found, "metadata": metadata}
        return bool(await real(self, version, raw))

    return replace_any


def renew_after_reading(_: Real) -> Real:
    """Renew the lease and read the records of all replicas in turn."""

    async def keep(self: Any) -> None:
        await self._repeat(self.beat)

    return keep


def confirm_whatever_the_record_says(_: Real) -> Real:
    """Keep a replica that another service has, and confirm it in the store."""
    return lambda self, name, record: self._keeper.confirm(name)


def record_whatever_the_record_says(_: Real) -> Real:
    """Write the record of a replica that another service has adopted."""

    async def may_record(self: Any, name: str, journal: Any) -> bool:
        return True

    return may_record


def release_without_flushing(_: Real) -> Real:
    """Replicas are let go while what they published waits to be written."""

    async def write_released(self: Any, names: Sequence[str], expired: bool) -> bool:
        for name in names:
            self._released[name] = expired
            self._writer.record_changed(name)
            await self._writer.write_record(name)
        return True

    return write_released


def expect_a_registration(_: Real) -> Real:
    """Assume that every replica with a journal is registered."""

    def has_engine(self: Any, name: str) -> bool:
        return self._registry.get(name).host.state.value in ("live", "opening")

    return has_engine


def know_loads_by_name(_: Real) -> Real:
    """Take the load of an adoption that was given up for that of the next one."""
    return lambda self, name, record: name in self._restored


# -- content of pages -------------------------------------------------------------------------------------------------


def end_wherever_a_block_ends(_: Real) -> Real:
    """Assume that a launch leaves a state at every boundary that it passes."""
    return lambda self, slot, index: (index + 1) * self.block_size


def keep_keys_of_overwritten_states(_: Real) -> Real:
    """States after rejected drafts keep their keys."""
    return lambda self, slot, num_computed: None


def with_all_executed(real: Real) -> Real:
    """Call `real` as if every answered step had been executed."""

    def act(self: Any, *given: Any) -> Any:
        pool = self.coordinator.pool
        true, pool.executed_through = pool.executed_through, FAR
        try:
            return real(self, *given)
        finally:
            if pool.executed_through == FAR:
                pool.executed_through = true

    return act


def with_all_executed_meanwhile(real: Real) -> Real:
    """As `with_all_executed`, for generators."""

    def act(self: Any, *given: Any) -> Any:
        pool = self.coordinator.pool
        true, pool.executed_through = pool.executed_through, FAR
        try:
            yield from real(self, *given)
        finally:
            pool.executed_through = true

    return act


def release_all(real: Real) -> Real:
    """Publish events of steps that may never run."""
    return lambda self, executed_through: real(self, FAR)


def swallow_removals_of_held_content(real: Real) -> Real:
    """Treat a removed key as held if its content is held under any block."""

    def add(self: Any, seq: int, events: Any) -> Any:
        kept = list[Any]()
        for event in events:
            held = {
                (one.event.group, one.event.domain, digest)
                for _, one in self._steps
                for at, digest in enumerate(one.event.hashes)
                if at not in one.gone
            }
            shown = real(self, seq, [event])
            named = {(event.group, event.domain, digest) for digest in event.hashes}
            kept += [] if event.kind.name == "REMOVED" and named & held else shown
        return kept

    return add


def ignore_withdrawals(real: Real) -> Real:
    """Do not publish removals of keys whose step will not run."""
    return lambda self, seq, events: real(self, seq, [event for event in events if event.reason.name != "WITHDRAWN"])


def mark_at_once(real: Real) -> Real:
    """Store keys whose steps may never run."""

    def note(self: Any, decision: Any) -> None:
        real(self, decision)
        while self._waiting:
            self._mark(self._waiting.popleft()[1])

    return note


def take_every_turn(_: Real) -> Real:
    """Accept a part that has been carried out already."""
    return lambda self, seq, part: None


def obey_again(real: Real) -> Real:
    """Carry out the orders of the previous part again, after its launch."""

    def obey(self: Any, orders: Any) -> None:
        before = vars(self).get("obeyed")
        if before is not None:
            real(self, before)
        self.obeyed = orders
        real(self, orders)

    return obey


def leave_the_stream_as_it_is(_: Real) -> Real:
    """A cancelled call does not break its stream."""

    @asynccontextmanager
    async def within(self: Any, timeout_s: float) -> AsyncIterator[None]:
        del self
        async with asyncio.timeout(timeout_s):
            yield

    return within


def lose_the_answer_of_a_cancelled_read(real: Real) -> Real:
    """Take the answer before the last points where the task can be cancelled."""

    async def read(self: Any) -> Any:
        answer = await real(self)
        for _ in range(100):
            await asyncio.sleep(0)
        return answer

    return read


def wait_for_a_day(real: Real) -> Real:
    """An answer may take any time."""

    def receive(self: Any, timeout_s: float) -> Any:
        del timeout_s
        return real(self, 86_400.0)

    return receive


def use_broken_streams(_: Real) -> Real:
    """Assume that an interrupted action leaves the stream intact."""

    def use(self: Any, action: Any) -> Any:
        try:
            return (yield action)
        except (Unavailable, DeadlineExceeded) as error:
            self._is_up, self._broken_by = False, error
            raise

    return use


def do_nothing(_: Real) -> Real:
    """Do nothing."""
    return lambda self, *given: None


# -- mirrors -----------------------------------------------------------------------------------------------------------


def show_whatever_the_lag(real: Real) -> Real:
    """A mirror shows its entries however old they are."""

    def show(self: Any) -> None:
        self.lag_ms = 0
        real(self)

    return show


def apply_repeats(_: Real) -> Real:
    """A mirror applies every step that arrives, also one that it has."""

    async def apply(self: Any, steps: Any, newest: int, age_ms: int, offload: Any) -> Any:
        for step in steps:
            await self._host.idle()
            if self._image_wanted:
                break
            await self._apply(step, offload)
        self.lag_steps, self.lag_ms = max(0, newest - self._host.seq), age_ms
        self._show()
        return self.progress()

    return apply


def publish_unchecked(real: Real) -> Real:
    """Publish the answer to a step without a check."""
    return lambda self, step, check=None: real(self, step)


def read_late(real: Real) -> Real:
    """Write each piece of an image when it is read."""

    def pieces(*given):
        for number in range(len([*real(*given)])):
            yield from islice(real(*given), number, number + 1)

    return pieces


# -- what hangs --------------------------------------------------------------------------------------------------------

_ONE_AT_A_TIME = threading.Lock()


def run_on_shared_threads(_: Real) -> Real:
    """Run all blocking calls on a few shared threads."""

    async def run(self: Any, call: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(call)

    return run


def ask_on_shared_threads(real: Real) -> Real:
    """Occupy a shared thread during each store call, one call at a time."""

    async def ask(self: Any, *given: Any) -> Any:
        loop = asyncio.get_running_loop()

        def wait() -> Any:
            with _ONE_AT_A_TIME:
                return asyncio.run_coroutine_threadsafe(real(self, *given), loop).result()

        return await asyncio.to_thread(wait)

    return ask


def forget_that_it_is_away(real: Real) -> Real:
    """Forget that the store is unavailable, so that every caller waits for it."""

    def note_failure(self: Any, error: Any) -> None:
        real(self, error)
        self._away_since_ns = None

    return note_failure


def wait_for_the_store(_: Real) -> Real:
    """Call the store without a deadline."""
    from kvplane_service.runtime.rota import Busy
    from kvplane_service.store.errors import StoreUnavailable

    async def do(self: Any, call: Callable[[], Any]) -> Any:
        try:
            return await self._offload(call)
        except Busy as error:
            raise StoreUnavailable(error.message) from error

    return do


def flush_without_deadline(_: Real) -> Real:
    """Answer a registration only when it is stored."""

    async def flush(self: Any, name: str) -> None:
        if self.is_on and self.is_read:
            await self._writer.write_record(name)

    return flush


def release_first(real: Real) -> Real:
    """Notify engines of a drain after releasing every idle replica, one by one."""

    async def drain(self: Any, grace_ms: int) -> None:
        self._streams.refuse_new()
        busy = self._streams.replicas()
        for entry in self._ownership._registry:
            if entry.host.name not in busy:
                await self._ownership.release(entry.host.name)
        await real(self, grace_ms)

    return drain


def forgive_nothing(_: Real) -> Real:
    """Count the time during which the service was paused as silence of its engines."""
    return lambda self, late_ns: None


# -- drafts, loads and failed steps ------------------------------------------------------------------------------------


def keep_ends_behind_drafts(real: Real) -> Real:
    """Use the planned end of a step as the end of its state."""

    def rewind(self: Any, slot: int, num_computed: int) -> None:
        ends = dict(self._stopped_at.get(slot, {}))
        real(self, slot, num_computed)
        if ends:
            self._stopped_at[slot] = ends

    return rewind


def keep_checkpoint_behind_drafts(real: Real) -> Real:
    """The state that a launch left inside its chunk stays recorded when drafts before it are rejected."""

    def rewind(self: Any, slot: int, num_computed: int) -> None:
        checkpoint = self.last_checkpoints.get(slot)
        real(self, slot, num_computed)
        if checkpoint is not None:
            self.last_checkpoints[slot] = checkpoint

    return rewind


def count_shared_blocks(real: Real) -> Real:
    """After an image, register no block that another request has in its table."""

    def resume(self: Any, slot: int, table: list[int], *given: Any) -> None:
        real(self, slot, table, *given)
        shared = [index + 1 for index, block in enumerate(table) if block and self.pool.references[block] > 1]
        self.num_cached[slot] = max([self.num_cached[slot], *shared])

    return resume


def count_to_the_last_key(real: Real) -> Real:
    """After an image, register no block before the last one with a key."""

    def resume(self: Any, slot: int, table: list[int], at: Any, num_cached_blocks: int | None) -> None:
        real(self, slot, table, at, None)
        self.num_cached[slot] = max(self.num_cached[slot], min(num_cached_blocks or 0, len(table)))

    return resume


def lose_blocks_behind_computed(real: Real) -> Real:
    """After an image, assume that the whole prompt of a request has blocks."""

    def normalize_table(self: Any, table: list[int], at: Any) -> list[int] | None:
        start = min(self._blocks_for(at.num_prompt), len(table))
        stop = max(start, at.num_prompt // self.block_size)
        normalized = real(self, table, at)
        return normalized and normalized[:start] + [0] * (stop - start) + normalized[stop:]

    return normalize_table


def release_while_loading(_: Real) -> Real:
    """Release what the request does not attend to, although a load may still write it."""

    def release_skipped(self: Any, slot: int, num_processed: int) -> None:
        processed = min(num_processed, self.requests.computed[slot] - self.requests.in_flight[slot])
        for manager in self.managers:
            manager.release_skipped(slot, max(0, processed))

    return release_skipped


def lose_load_after(real: Real) -> Real:
    """An open step does not say when a load may start."""

    def admit(self: Any, *row: Any) -> Any:
        status = real(self, *row)
        self._result.admit_load_after = []
        return status

    return admit


def limit_what_is_read(real: Real) -> Real:
    """The limit of a hit counts the block that a look-up leaves out."""
    return lambda self, digests, domain, most, horizon, longest=FAR: real(
        self, digests, domain, min(most, longest), horizon
    )


def search_once(real: Real) -> Real:
    """With a limit, the search without one has no say."""
    return lambda self, most, longest=0: real(self, most if longest else 0, longest)


def classes_as_stated(_: Real) -> Real:
    """Groups whose look-up class is not stated are looked up by the rule of the first one."""
    return lambda self: tuple(group.lookup_class for group in self.groups)


def chunk_of_the_longest_hit(_: Real) -> Real:
    """As vLLM: blocks of the chunk of the longest possible hit, also where the hit ends in an earlier chunk."""

    def find(self: Any, query: Any) -> tuple[list[list[int]], int]:
        size = self.block_size
        first = self.skipped_tokens(max(query.max_tokens, 0)) // size
        rows = [[0] * first for _ in query.groups]
        for index in range(first, min(query.max_tokens, len(query.digests) * self.hash_size) // size):
            blocks = query.find(self._digest(query.digests, index))
            if blocks is None:
                break
            for row, block in zip(rows, blocks, strict=True):
                row.append(block)
        return rows, len(rows[0]) * size

    return find


def align_what_is_left_out(real: Real) -> Real:
    """As vLLM: of a run from the first block on, the end is aligned before a block is left out, and behind that."""

    def find_run(self: Any, query: Any) -> tuple[dict[int, list[int]], int, int]:
        found, first, end = real(self, query)
        return found, first, self._align(end) if first == 0 else end

    return find_run


def need_what_is_retained(real: Real) -> Real:
    """A request needs the blocks that are retained before its window, which no hit has."""
    return lambda self, num_computed: self.skipped_tokens(num_computed) // self.block_size


def keep_copy_of_evicted_state(_: Real) -> Real:
    """A running state is copied before it is overwritten, although its key has gone."""

    def register_again(self: Any, blocks: Any) -> None:
        super(type(self), self).register_again(blocks)

    return register_again


def without(owner: str, name: str) -> Callable[[Real], Real]:
    """Call the real function while the method `name` of its attribute `owner` does nothing."""

    def change(real: Real) -> Real:
        def act(self: Any, *given: Any) -> Any:
            owned = getattr(self, owner)
            setattr(owned, name, lambda *_: None)
            try:
                return real(self, *given)
            finally:
                delattr(owned, name)

        return act

    return change


def keep_old_stamps(real: Real) -> Real:
    """A state takes a superblock, and the blocks behind its first one keep their stamps."""

    def pop_whole(self: Any) -> int:
        self.has_state[next(iter(self.whole))] = True
        taken: int = real(self)
        return taken

    return pop_whole


def cut_behind_the_first(_: Real) -> Real:
    """A superblock is cut, and the stamp of the state that was in it stays: its first block is not handed out first."""

    def cut(self: Any) -> int:
        (number,) = self.whole.pop(1)
        first, second, *others = self.blocks(number)
        for block in self.blocks(number):
            if self._pool.key[block] is not None:
                self._pool._evict(block)
        self.has_state[number], self.held[number] = False, 1
        self._add([first, *others])
        taken: int = second
        return taken

    return cut


def rely_on_the_ended_life(_: Real) -> Real:
    """A new engine life counts the stamps that states of the one before gave their blocks as those in the memory."""
    return lambda self, epoch: super(type(self), self).begin_epoch(epoch)


def assume_no_states(_: Real) -> Real:
    """Count each held block of an image as one of attention."""
    return lambda self, blocks: self.assign(blocks, is_state=False)


def start_at_once(_: Real) -> Real:
    """A load does not wait for launches."""
    return lambda self, blocks: 0


def use_of_the_blocks_alone(_: Real) -> Real:
    """A load waits for launches that use the blocks that it fills, by their numbers alone."""
    return lambda self, blocks: super(type(self), self).last_use(blocks)


def release_unread(_: Real) -> Real:
    """Ignore launches that read a block which leaves a window."""
    return lambda self, slot, blocks: self.pool.release(blocks)


def trims_always(_: Real) -> Real:
    """A late chunk is not added, but still trims the log."""

    def append(self: Any, log: Any, chunk: Any, trim_below: int) -> int:
        chunks = self.logs.setdefault(log, {})
        if chunk.seq > max(chunks, default=-1):
            chunks[chunk.seq] = chunk.raw
        for seq in [seq for seq in chunks if seq < trim_below]:
            del chunks[seq]
        return len(chunks)

    return append


def without_hit(_: Real) -> Real:
    """Assume that a load never writes a block of the hit, at any position."""

    def loaded_blocks(self: Any, slot: int, hit: Sequence[Sequence[int]]) -> set[int]:
        held = {block for table in self._blocks.tables(slot) for block in table}
        return held.difference(*hit)

    return loaded_blocks


def note_writers(_: Real) -> Real:
    """Note only launches in flight that write the blocks which a request releases."""

    def note_use(self: Any, slot: int) -> None:
        requests, pool = self._requests, self._blocks.pool
        written = requests.computed[slot] - requests.in_flight[slot]
        last = min(requests.granted_step[slot], pool.step - 1)
        for manager in self._blocks.managers:
            pool.note_use(manager.table[slot][written // manager.block_size :], last)

    return note_use


def obeyed_before_all(_: Real) -> Real:
    """A mover does not wait for the orders of the admitting step."""
    return lambda self, seq: True


def obeyed_when_stamped(_: Real) -> Real:
    """A mover waits for stamps only."""
    return lambda self, seq: seq <= self.stamped


def zero_what_is_loaded(_: Real) -> Real:
    """Zero pages that a transfer fills."""
    return lambda self, *given: None


def end_loads_with_the_part(real: Real) -> Real:
    """A row with tokens does not end a load if its request is preempted later in the part."""

    def preempt(self: Any, slot: int, row: int) -> None:
        self._tracker.end_loads = lambda slots: None
        try:
            real(self, slot, row)
        finally:
            del self._tracker.end_loads

    return preempt


def skip_failed_steps(real: Real) -> Real:
    """A rank skips the orders of a failed step."""
    return lambda self, launch: real(self, launch) if launch in self.pending else []


def save_unread(_: Real) -> Real:
    """A mover saves a page without a look at its stamp."""

    def save(self: Any, piece: Any) -> list[int]:
        pages = self._place.pages.group(piece[0].group)

        def fill(target: Any) -> list[bool]:
            self._ops.gather(pages, [row.block for row in piece], target)
            return [True for _ in piece]

        contents = [self._content(row.tier, row.slot, row.group, row.job) for row in piece]
        good = self._write(contents, pages.bytes_per_block, fill)
        return [row.job for row, is_good in zip(piece, good, strict=True) if is_good]

    return save


def seal_any_content(real: Real) -> Real:
    """A seal has neither the version nor the key. One of them is enough where equal keys have equal bytes, as here."""
    return lambda self, payload: real(self._replace(version=0, key=0), payload)


def slots_of_any_memory(real: Real) -> Real:
    """Slots of the host prove keys, whatever memory they belong to."""

    def shown_of(shown: Any, spec: Any, now: Any, before: Any) -> Any:
        kept = array("Q", real(shown, spec, now, before) or bytes(8 * len(shown)))
        firsts = accumulate((tier.num_blocks for tier in spec.tiers), initial=spec.num_blocks)
        for first, tier in zip(firsts, spec.tiers, strict=False):
            if tier.kind is TierKind.HOST and shown:
                kept[first : first + tier.num_blocks] = array("Q", shown[first : first + tier.num_blocks])
        return memoryview(kept)

    return shown_of


def all_alike(real: Real) -> Real:
    return lambda self, number: real(self, 1)


def first_end_counts(real: Real) -> Real:
    """A job is over when one rank has ended it."""

    def end(self: Any, rank: int, first: int, count: int, is_done: bool) -> None:
        for moving in self._moving:
            if moving.first <= first < moving.first + moving.count:
                moving.left = [left if at == rank else 0 for at, left in enumerate(moving.left)]
        real(self, rank, first, count, is_done)

    return end


SPEC, FACE, SERVICE = "kvplane_core.spec", "kvplane_core.face", "kvplane_service"
MOVERS = "kvplane_worker.tiers.movers:Movers"
ENGINE = "tests.core.page_engine:RandomEngine"

TWINS: dict[str, Twin] = {
    "epoch raised by a forged row": Twin(
        "no row that the memory does not prove raises the epoch beyond a fixed allowance",
        (Patch(f"{SERVICE}.replicas.recovery:Recovering.epoch_above", trust_every_epoch),),
    ),
    "unsealed record accepted": Twin(
        "with a key, a record without a seal is not parsed",
        (Patch(f"{SERVICE}.store.seals:Seals.prove", accept_what_has_no_seal),),
    ),
    "redirect followed blindly": Twin(
        "a client follows redirections only to the hosts that its addresses name",
        (Patch("kvplane.sansio.owners:Addresses.permit", answer(True)),),
    ),
    "limit checked after building": Twin(
        "no pool is built that a limit refuses",
        (
            Patch(f"{SERVICE}.auth.visible:VisibleReplicas.find_equal", look_up_without_limits),
            Patch(f"{SERVICE}.auth.visible:VisibleReplicas.add", check_limits_when_adding),
        ),
    ),
    "record of another place accepted": Twin(
        "a seal proves a record at its place only: its replica, log, incarnation and number",
        (Patch(f"{SERVICE}.store.seals:_mac", seal_for_any_place),),
    ),
    "idle check over a change": Twin(
        "a check of an idle replica ends when the replica changes",
        (Patch(f"{SERVICE}.replicas.idle_check:IdleCheck._is_unchanged", answer(True)),),
    ),
    "a cancel that leaks": Twin(
        "a cancelled call breaks its stream and affects no other call",
        (
            Patch("kvplane.aio.transport:GrpcTransport._within", leave_the_stream_as_it_is),
            Patch("kvplane.aio.transport:_Stream.read", lose_the_answer_of_a_cancelled_read),
            Patch("kvplane.aio.session:Session.receive", lose_the_answer_of_a_cancelled_read),  # one that is there
            Patch("kvplane.session.machine:SessionMachine._use", use_broken_streams),
            Patch("kvplane.session.machine:SessionMachine.interrupted", do_nothing),
        ),
    ),
    "no deadline of a step": Twin(
        "an unanswered call ends by its deadline",
        (Patch("kvplane.blocking.transport:_Stream.receive", wait_for_a_day),),
    ),
    "no stamp check": Twin(
        "a key is hit after a restart only if the page memory still has its stamp",
        (
            Patch(f"{SPEC}.replica:Replica.verify_entries", recover_whatever_is_stored),
            Patch(f"{SPEC}.replica:Replica.end_epoch", keep_what_is_executed),
        ),
    ),
    "no restamp on key moves": Twin(
        "a page gets a new stamp whenever a key leaves it",
        (
            Patch(f"{SPEC}.pool:BlockPool.move_keys", without_restamps),
            Patch(f"{SPEC}.pool:BlockPool.drop_keys", without_restamps),
        ),
    ),
    "sealed check removed": Twin(
        "a state is published only if its page keeps the content of its key",
        (
            Patch(f"{SPEC}.managers.mamba:AlignedStateManager._ends_in", end_wherever_a_block_ends),
            Patch(f"{SPEC}.managers.mamba:AlignedStateManager.rewind", keep_keys_of_overwritten_states),
        ),
    ),
    "fencing removed": Twin(
        "only the engine life that owns the pages writes them, and only proof of its end gives them to another",
        (
            Patch("kvplane.rank:Rank.carry_out", carry_out_for_anyone),
            Patch("kvplane.base.stamp_table:StampTable.check_owner", accept_anyone),
            Patch("kvplane_worker.lending.writer:Writer.lend", lend_while_lent),
        ),
    ),
    "incarnation ignored": Twin(
        "stored keys belong to one incarnation of the page memory",
        (Patch(f"{SERVICE}.replicas.stamps:Contents.may_have_pages_of", answer(True)),),
    ),
    "one rank unchecked": Twin(
        "a hit after a restart needs a match on every rank",
        (
            Patch("kvplane.rank:RankGroup.agreed_stamps", show_rank_zero),
            Patch("kvplane.rank:RankGroup.incarnation", show_rank_zero),
            Patch(f"{SERVICE}.rpc.claims:_proven", trust_the_engine),
        ),
    ),
    "publication before execution": Twin(
        "a key is published when its step has been executed on all ranks",
        (
            Patch(f"{SPEC}.replica:Replica.end_epoch", with_all_executed_meanwhile),
            Patch(f"{FACE}.common:CommonCore.entries", with_all_executed),
            Patch(f"{SPEC}.replica:Replica.lookup", with_all_executed),
            Patch(f"{SERVICE}.replicas.events:PublicationHold.release", release_all),
            Patch(f"{SERVICE}.store.journal:ReplicaJournal.note", mark_at_once),
        ),
    ),
    "a removal of a held key is swallowed": Twin(
        "when nothing is in flight, a subscriber has exactly the published keys, by block",
        (Patch(f"{SERVICE}.replicas.events:PublicationHold._add", swallow_removals_of_held_content),),
    ),
    "held keys are read": Twin(
        "who reads the entries of a replica has what a subscriber from the beginning has",
        (Patch(f"{SERVICE}.replicas.events:PublicationHold.without_held", lambda _: lambda self, event: [event]),),
    ),
    "changes of blocks that are not read yet count": Twin(
        "who reads the entries of a replica has what a subscriber from the beginning has",
        (Patch(f"{SERVICE}.replicas.published:EntriesScan.follow", lambda _: lambda self, events: list(events)),),
    ),
    "withdrawn keys stay shown": Twin(
        "a key whose step did not run is never published",
        (Patch(f"{SERVICE}.replicas.events:PublicationHold._add", ignore_withdrawals),),
    ),
    "state of rejected drafts": Twin(
        "a state gets a key only for a verified length",
        (Patch(f"{SPEC}.managers.mamba:AlignedStateManager.rewind", keep_ends_behind_drafts),),
    ),
    "checkpoint of rejected drafts": Twin(
        "a state inside a chunk gets a key only for a verified length",
        (Patch(f"{SPEC}.managers.mamba:AlignedStateManager.rewind", keep_checkpoint_behind_drafts),),
    ),
    "image skips shared blocks": Twin(
        "after an image, each request registers the blocks that it would have registered",
        (Patch(f"{SPEC}.managers.base:GroupManager.resume", count_shared_blocks),),
    ),
    "image skips blocks before a key": Twin(
        "after an image, a block that lost its key is registered again, although later ones kept theirs",
        (Patch(f"{SPEC}.managers.base:GroupManager.resume", count_to_the_last_key),),
    ),
    "image loses blocks behind the computed tokens": Twin(
        "an image of a request in the middle of its prompt keeps the blocks behind the computed tokens",
        (Patch(f"{SPEC}.managers.full:RetainedWindowManager.normalize_table", lose_blocks_behind_computed),),
    ),
    "skipped blocks released during a load": Twin(
        "no block that a load may write is released before the load has ended",
        (Patch(f"{SPEC}.coordinator:Coordinator.release_skipped", release_while_loading),),
    ),
    "open step without load_after": Twin(
        "a step that is applied row by row is answered as the step that is sent whole",
        (Patch(f"{SPEC}.open_step:OpenStep.admit", lose_load_after),),
    ),
    "limit of a hit counts what is left out": Twin(
        "a limit equal to the length of a hit finds this hit",
        (Patch(f"{SPEC}.lookup:PrefixLookup.find", limit_what_is_read),),
    ),
    "limit searched once": Twin(
        "a limit equal to the length of a hit finds this hit",
        (Patch(f"{SPEC}.lookup:Search.run", search_once),),
    ),
    "classes as stated": Twin(
        "groups of different formats are looked up each by its own rule, whatever classes are stated",
        (
            Patch("kvplane.base.groups:ReplicaSpec.lookup_classes", classes_as_stated),
            Patch(f"{FACE}.setup:_check_classes", do_nothing),
        ),
    ),
    "chunk of the longest hit": Twin(
        "a hit has the blocks of the chunk in which it ends",
        (Patch(f"{SPEC}.managers.window:ChunkedLocalManager.find", chunk_of_the_longest_hit),),
    ),
    "end aligned twice": Twin(
        "a limit equal to the length of a hit finds this hit",
        (Patch(f"{SPEC}.managers.window:SlidingWindowManager._find_run", align_what_is_left_out),),
    ),
    "retained blocks needed": Twin(
        "a hit needs no block before the window",
        (Patch(f"{SPEC}.managers.window:SlidingWindowManager.first_read", need_what_is_retained),),
    ),
    "keys under a state": Twin(
        "a superblock that is taken for a state, or cut, loses the keys of all its blocks",
        (Patch(f"{SPEC}.split:SplitPool.empty", do_nothing),),
    ),
    "stamps under a state": Twin(
        "all blocks of a superblock get other stamps before a state is written",
        (Patch(f"{SPEC}.split:SplitList.pop_whole", keep_old_stamps),),
    ),
    "stamp of a divided state": Twin(
        "a superblock that is cut gets another stamp at the block that names its state, before anything is written",
        (Patch(f"{SPEC}.split:SplitList._cut", cut_behind_the_first),),
    ),
    "stamps of an ended life": Twin(
        "a new engine life relies on no stamps that the ended one ordered, unless the memory has them",
        (Patch(f"{SPEC}.split:SplitPool.begin_epoch", rely_on_the_ended_life),),
    ),
    "held states are blocks of attention": Twin(
        "a held block of an image keeps its superblock where it may be a state",
        (Patch(f"{SPEC}.split:SplitPool.assume", assume_no_states),),
    ),
    "load over a superblock in use": Twin(
        "a load waits for launches that use any block with memory of the blocks that it fills",
        (Patch(f"{SPEC}.split:SplitPool.last_use", use_of_the_blocks_alone),),
    ),
    "copy of an evicted state": Twin(
        "a running state whose key was evicted is overwritten without a copy, as after an image",
        (Patch(f"{SPEC}.managers.mamba:AlignedStateManager.register_again", keep_copy_of_evicted_state),),
    ),
    "withdrawn keys stay away": Twin(
        "a request that holds a block whose key was withdrawn registers the block again",
        (Patch(f"{SPEC}.in_flight:InFlightTracker._register_again", without("_blocks", "register_again")),),
    ),
    "load before launches": Twin(
        "a load starts after every launch that may read or write its blocks",
        (Patch(f"{SPEC}.pool:BlockPool.last_use", start_at_once),),
    ),
    "load behind writers only": Twin(
        "launches that read the blocks of a load count as those that write them",
        (
            Patch(f"{SPEC}.managers.base:GroupManager._give_up", release_unread),
            Patch(f"{SPEC}.in_flight:InFlightTracker._note_use", note_writers),
        ),
    ),
    "load into a block of the hit": Twin(
        "a block that the hit names, and that the load's request got for another position, is written by the load",
        (Patch(f"{SPEC}.in_flight:InFlightTracker._loaded_blocks", without_hit),),
    ),
    "a process that continues trims the log": Twin(
        "a process that was stopped drops no chunk of the one that took its replica over",
        (Patch("kvplane_service.store.memory:MemoryStore.append", trims_always),),
    ),
    "load before stamps": Twin(
        "a load starts when the stamps, zeroes and copies of its step are done",
        (Patch(f"{ENGINE}._has_obeyed", obeyed_before_all),),
    ),
    "load concurrent with launches of the previous life": Twin(
        "a load of a new engine life starts after the launches of the previous life",
        (Patch("kvplane.base.stamp_table:StampTable._may_run", answer(False)),),
    ),
    "lives known by their number": Twin(
        "a session continues only the engine life that its own stream began, whatever the epoch of another one is",
        (Patch(f"{SERVICE}.replicas.host:ReplicaHost.check_open", check_without_life),),
    ),
    "owner epoch ignored": Twin(
        "the epoch of an engine life is above the owner epoch of the memory",
        (Patch(f"{SERVICE}.replicas.engine_lives:EngineLives.next_epoch", ask_no_memory),),
    ),
    "zero after load": Twin(
        "a page that a transfer fills is not zeroed",
        (
            Patch(f"{SPEC}.coordinator:Coordinator._leave_to_load", zero_what_is_loaded),
            Patch(f"{ENGINE}._has_obeyed", obeyed_when_stamped),
        ),
    ),
    "a load outlives its row": Twin(
        "a step sent whole and one sent row by row end the same loads",
        (Patch(f"{SPEC}.step_applier:StepApplier._preempt", end_loads_with_the_part),),
    ),
    "orders end when they are given": Twin(
        "zeroes and copies are done when the device has done them",
        (Patch("kvplane.rank:Rank._note_moves", answer(False)),),
    ),
    "failed orders forgotten": Twin(
        "orders of a failed step are carried out on every rank",
        (Patch(f"{ENGINE}._orders", skip_failed_steps),),
    ),
    "orders run twice": Twin(
        "orders run exactly once per rank",
        (Patch("kvplane.rank:Rank._check_turn", take_every_turn), Patch("kvplane.rank:Rank._obey", obey_again)),
    ),
    "launches without an answer keep their stamps": Twin(
        "a rank writes stamp 0 on every page that a launch without an answer may overwrite",
        (Patch("kvplane.rank:Rank.invalidate", do_nothing),),
    ),
    "new life during a load": Twin(
        "pages that a load of an earlier engine life may still write are not allocated until its mover is done",
        (Patch(f"{SPEC}.pool:BlockPool.hold_busy", do_nothing),),
    ),
    "two owners write": Twin(
        "of two services that hold a replica, the one without its engine gives up",
        (
            Patch(f"{SERVICE}.store.ownership:Ownership._compare", confirm_whatever_the_record_says),
            Patch(f"{SERVICE}.store.keeper:Keeper._may_record", record_whatever_the_record_says),
        ),
    ),
    "a drain loses what waits": Twin(
        "published keys are stored before a replica is released",
        (Patch(f"{SERVICE}.store.keeper:Keeper._write_released", release_without_flushing),),
    ),
    "release fails on the log of another process": Twin(
        "a service that releases a replica leaves a log that another process writes",
        (Patch(f"{SERVICE}.store.keeper:Keeper.has_engine", expect_a_registration),),
    ),
    "a lost table is complete": Twin(
        "after a table of owners is lost, nothing is granted for a lease",
        (Patch(f"{SERVICE}.store.grants:Grants._new_table", complete_at_once),),
    ),
    "owners are dropped early": Twin(
        "a process is dropped when it has not renewed for a whole lease of the clock of the reader",
        (Patch(f"{SERVICE}.store.grants:Grants._ended", ended_after_half),),
    ),
    "grants held for a lease": Twin(
        "a process holds what it was granted for 2/3 of a lease from when it sent the renewal",
        (Patch(f"{SERVICE}.store.grants:Grants._attempt", held_since_the_answer),),
    ),
    "no compare-and-set": Twin(
        "a table of owners is replaced only as it was read",
        (
            Patch(f"{SERVICE}.store.owning:InStore.replace", replace_what_is_there),
            Patch(f"{SERVICE}.store.lease:LeaseTable.replace", replace_what_is_there),
            Patch(f"{SERVICE}.store.etcd:EtcdTable.replace", replace_what_is_there),
        ),
    ),
    "leases by wall clocks": Twin(
        "a grant ends by a monotonic clock, which no change of the date moves",
        (Patch(f"{SERVICE}.store.grants:Grants.__init__", by_wall_clocks),),
    ),
    "a grant comes back as it was": Twin(
        "a service that gets a replica back begins above the epochs of others, also if it never gave it up",
        (Patch(f"{SERVICE}.store.owners:GrantedOwners.ensure", know_no_epochs_of_others),),
    ),
    "grants without an end": Twin(
        "what a process was granted ends by its own clock",
        (Patch(f"{SERVICE}.store.grants:Grants._is_valid", answer(True)),),
    ),
    "epochs count from the table": Twin(
        "an epoch is above those that services report and the index has, not above that of the table alone",
        (
            Patch(f"{SERVICE}.store.grants:Grants._new_table", count_from_nothing),
            Patch(f"{SERVICE}.store.grants:Grants.renew", report_no_epochs),
            Patch(f"{SERVICE}.replicas.host:ReplicaHost.next_epoch", only_what_the_table_counts),
        ),
    ),
    "preempted requests are forgotten": Twin(
        "requests that a service does not know after it was replaced are computed again",
        (
            Patch("kvplane.scheduling.scheduler:Scheduler._preempt", forget_what_is_preempted),
            Patch("tests.engine.reference.engine:Engine.revival", without_image),
        ),
    ),
    "what is cleared stays claimed": Twin(
        "a router claims nothing of a replica whose entries have been cleared",
        (Patch("kvplane_fleet.places:Place._remove_all", do_nothing),),
    ),
    "keys outlive their memory": Twin(
        "no key is hit whose page went with the worker that had it",
        (
            Patch(f"{SERVICE}.replicas.stamps:Contents.may_have_pages_of", answer(True)),
            Patch(f"{SPEC}.replica:Replica.verify_entries", recover_whatever_is_stored),
            Patch(f"{SPEC}.replica:Replica.end_epoch", keep_what_is_executed),
        ),
    ),
    "a deleted Lease comes back": Twin(
        "an update of a Lease states its uid, so that it does not create a deleted one again",
        (Patch(f"{SERVICE}.store.lease:LeaseTable.replace", without_uid),),
    ),
    "the lease is renewed after the records are read": Twin(
        "a service renews its lease while it reads the records of its replicas",
        (Patch(f"{SERVICE}.store.ownership:Ownership.keep", renew_after_reading),),
    ),
    "loads known by name": Twin(
        "the load of an adoption that was given up does not change a later adoption",
        (Patch(f"{SERVICE}.store.keeper:Keeper._is_loading", know_loads_by_name),),
    ),
    "what diverged stays shown": Twin(
        "a mirror that differs from its engine is hidden before anything else happens",
        (Patch(f"{SERVICE}.replicas.host_state:HostState.lose_entries", do_nothing),),
    ),
    "lag limit ignored": Twin(
        "a mirror that lags too far behind its engine is hidden",
        (Patch(f"{SERVICE}.replicas.mirror:Mirror._show", show_whatever_the_lag),),
    ),
    "repeats applied again": Twin(
        "a mirror drops the steps that it has",
        (Patch(f"{SERVICE}.replicas.mirror:Mirror.apply", apply_repeats),),
    ),
    "answers not compared": Twin(
        "a mirror publishes a step only if its answer is the engine's",
        (Patch(f"{SERVICE}.replicas.applying:Applying.apply", publish_unchecked),),
    ),
    "image of several steps": Twin(
        "an image is the state of one step, however late its pieces are read",
        (Patch(f"{SPEC}.replica:encode", read_late),),
    ),
    "lease expiry frees pages": Twin(
        "an expired lease hides keys, and changes nothing else",
        (Patch(f"{SERVICE}.replicas.host:ReplicaHost.expire", free_when_silent),),
    ),
    "shared executor": Twin(
        "each resource has its own threads, and only its writer calls an unavailable store",
        (
            Patch(f"{SERVICE}.runtime.executors:Executor.__call__", run_on_shared_threads),
            Patch(f"{SERVICE}.store.redis_store:RedisStore.get_record", ask_on_shared_threads),
            Patch(f"{SERVICE}.store.redis_store:RedisStore.put_record", ask_on_shared_threads),
            Patch(f"{SERVICE}.store.writer:StoreWriter.note_failure", forget_that_it_is_away),
        ),
    ),
    "no deadline of the store": Twin(
        "a store call ends by its deadline",
        (
            Patch(f"{SERVICE}.store.offloaded:Offloaded._do", wait_for_the_store),
            Patch(f"{SERVICE}.store.keeper:Keeper.flush", flush_without_deadline),
        ),
    ),
    "releases before notices": Twin(
        "engines are notified of a drain before any call that may hang",
        (
            Patch(f"{SERVICE}.rpc.server:RpcServer.drain", release_first),
            Patch(f"{SERVICE}.store.writer:StoreWriter.note_failure", forget_that_it_is_away),
        ),
    ),
    "lapse by own delay": Twin(
        "a service that was paused does not count the pause as silence of its engines",
        (Patch(f"{SERVICE}.registry:Entry.extend_leases", forgive_nothing),),
    ),
    "resume forgets held pages": Twin(
        "held pages stay held when a session resumes",
        (Patch(f"{SERVICE}.replicas.host:ReplicaHost.open_in_slices", release_held_at_resume),),
    ),
    # -- tiers ---------------------------------------------------------------------------------------------------------
    "saved before execution": Twin(
        "a page is saved when the step of its key is executed",
        (Patch(f"{SPEC}.tiers.behind:SaveBehind._is_executed", answer(True)),),
    ),
    "a reset leaves tiers": Twin(
        "a reset of the cache clears the tiers too",
        (Patch(f"{SPEC}.tiers.tiers:Tiers.reset", answer(None)),),
    ),
    "an eviction leaves tiers": Twin(
        "an eviction drops its key from the tiers, and gives its slots another version",
        (Patch(f"{SPEC}.tiers.tiers:Tiers.revoke", answer(None)),),
    ),
    "saves of pages that changed": Twin(
        "a save counts if the page has the same stamp before and after",
        (Patch(f"{MOVERS}._save", save_unread), Patch(f"{SPEC}.tiers.loads:TierLoads._source_is_intact", answer(True))),
    ),
    "tier load before launches": Twin(
        "a load waits for launches that may still use its pages",
        (Patch(f"{SPEC}.pool:BlockPool.last_use", answer(0)),),
    ),
    "loads done on one rank": Twin(
        "a job is over when every rank has ended it",
        (Patch("kvplane.tier_jobs:TierJobs._end", first_end_counts),),
    ),
    "jobs of an earlier engine not awaited": Twin(
        "a new engine carries out no order while movers work on jobs of the one before",
        (Patch("kvplane.tier_jobs:TierJobs.may_carry_out", answer(True)),),
    ),
    "host slots of another memory prove keys": Twin(
        "a slot of the host proves a key only in the memory in which it was written",
        (
            Patch(f"{SERVICE}.replicas.engine_lives:shown_of", slots_of_any_memory),
            Patch(f"{SERVICE}.replicas.recovery:shown_of", slots_of_any_memory),
        ),
    ),
    "slots of another disk prove keys": Twin(
        "a slot of a disk proves a key only in the file in which it was written",
        (Patch("kvplane.base.stamp_table:StampTable.name_disks", all_alike),),
    ),
    "rows of callers join an image": Twin(
        "an image is alone in its step, and nothing that callers ask for comes before it",
        (Patch(f"{SERVICE}.replicas.cache_requests:CacheRequests.may_join", answer(True)),),
    ),
    "a refused call begins a life": Twin(
        "a call that is refused begins no engine life, which would remove every key",
        (Patch(f"{SERVICE}.unary.service:UnaryCalls._check_begins", answer(None)),),
    ),
    "callers wait for the next engine": Twin(
        "what callers have asked of an engine is not asked of the next one",
        (Patch(f"{SERVICE}.replicas.cache_requests:CacheRequests.fail", answer(None)),),
    ),
    "a repeat is asked again": Twin(
        "a repeat of a call that waits for the engine waits for the same answer",
        (
            Patch(
                f"{SERVICE}.unary.asking:EngineCalls.ask",
                lambda real: lambda self, header, *given: real(self, replace(header, op_id=""), *given),
            ),
        ),
    ),
    "specs as stated": Twin(
        "an image is that of a pool that decides equally, however the classes of its spec are numbered",
        (Patch(f"{SPEC}.state_entries:spec_digest", lambda _: digest_as_stated),),
    ),
    "a service that comes back is the owner": Twin(
        "a replica that another service has adopted meanwhile is given up, unless its engine is here",
        (
            Patch(f"{SERVICE}.store.keeper:Keeper._may_record", record_always),
            Patch(f"{SERVICE}.store.keeper:Keeper.came_from", answer(True)),
        ),
    ),
    "states below a hit": Twin(
        "a request that goes back below a hit that ends in a state is preempted",
        (Patch(f"{SPEC}.requests:Requests.shortest_state", answer(0)),),
    ),
    "states below known tokens": Twin(
        "a request that goes back below its known tokens is preempted, whatever keys its states have",
        (Patch(f"{SPEC}.coordinator:Coordinator.can_rewind", states_by_keys),),
    ),
    "states below an outcome": Twin(
        "an outcome in the row that goes back counts",
        (
            Patch(
                f"{SPEC}.requests:Requests.shortest_state",
                lambda real: lambda self, slot, appended: real(self, slot, 0),
            ),
        ),
    ),
    "stored incarnation forgotten": Twin(
        "a session that states no incarnation leaves the known one",
        (Patch(f"{SERVICE}.replicas.stamps:Contents.after", lambda _: lambda now, before: now),),
    ),
    "keys are not compared with the prompt": Twin(
        "a request whose extra keys do not prove its content has no hashes",
        (Patch("kvplane.base.hashing.extra_keys:RequestKeys.check_prompt", answer(None)),),
    ),
    "what has no name is a key": Twin(
        "a multimodal item without an identifier proves nothing",
        (Patch("kvplane.base.hashing.extra_keys:_check_items", answer(None)),),
    ),
    "content not in the seal": Twin(
        "a load takes only the content that its order names, also where a write was lost",
        (Patch("kvplane_worker.tiers.seal:Content.seal", seal_any_content),),
    ),
    "runs before its load is done": Twin(
        "a request runs when its hit is loaded",
        (Patch(f"{SPEC}.in_flight:InFlightTracker.loads_from_tiers", answer(False)),),
    ),
}


def main(arguments: Sequence[str]) -> None:
    """Run a program with a twin: `kvplane` with its arguments, or a module."""
    if len(arguments) < 2 or arguments[0] not in TWINS:
        sys.exit(f"python -m tests.twins TWIN PROGRAM ARGS...\ntwins: {', '.join(TWINS)}")
    name, program, *_ = arguments
    sys.argv = list(arguments[1:])
    with weakened(name):
        if program == "kvplane":
            importlib.import_module("kvplane_tools.cli").main()
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
