"""What the service knows and has granted: the engine's record of its requests, and what it must report of them.

The rules that keep a page without content from becoming a hit:

- A grant that vLLM does not use, or only in part, is taken back by the next message: it lowers the request's computed
  tokens, ends an admission as preempted, and evicts the keys of the blocks that no launch writes.
- Until that message is sent, the step of the grant is not reported as executed (`executed`), so that these keys are
  never published; and an admission of the same answer that may have adopted such a block is not used (`in_doubt`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvplane.base.groups import GroupKind, ReplicaSpec
from kvplane.base.step import UNCHANGED, AdmitStatus, Cache, End, Facts, News, Orders, Part, PartResult, StepResult
from kvplane_vllm.launch import PageOrders


class Entry:
    """A request that the service knows.

    Attributes:
        slot: its number at the service.
        request: vLLM's object.
        num_tokens, num_hashes: how many of its tokens and hashes were reported.
        computed: its computed tokens at the service, with all grants.
        hit: how many of them were cached when it was admitted.
        commit: the tokens whose blocks can be registered, as vLLM reported since the last message; -1 if it did not.
        running: whether it holds blocks at the service.
        leaving: whether its end waits for the next message.
        step: the step that granted it tokens last; the first one of those that vLLM has not used.
        name: its id.
        longest: its most tokens, prompt and output; 0 if it ends without an output.
        tables: its blocks, by group.
        given: how many of them vLLM was given, by group.
    """

    __slots__ = (
        "commit",
        "computed",
        "given",
        "hit",
        "leaving",
        "longest",
        "name",
        "num_hashes",
        "num_tokens",
        "request",
        "running",
        "slot",
        "step",
        "tables",
    )

    def __init__(self, slot: int, request: Any, num_groups: int, most_tokens: int) -> None:
        """A request that is not reported yet."""
        self.slot, self.request, self.name = slot, request, request.request_id
        is_pooling = request.pooling_params is not None
        self.longest = 0 if is_pooling else min(request.num_prompt_tokens + request.max_tokens, most_tokens)
        self.num_tokens = self.num_hashes = self.computed = self.hit = self.step = 0
        self.commit = UNCHANGED
        self.running = self.leaving = False
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.given = [0] * num_groups

    def clear(self) -> None:
        """Record that it holds no blocks any more."""
        self.running = False
        self.computed = self.hit = 0
        self.tables = [[] for _ in self.tables]
        self.given = [0] * len(self.tables)


@dataclass(slots=True)
class Admitted:
    """An admission that vLLM has not used yet."""

    entry: Entry
    single_group_hit: int
    num_tokens: int
    copies: set[int]  # targets of copies that were ordered for it


@dataclass(slots=True)
class Program:
    """One message: its parts, and the requests of the rows of the last part."""

    facts: Part = field(default_factory=Part)
    rows: Part = field(default_factory=Part)
    run: list[Entry] = field(default_factory=list)
    admit: list[Entry] = field(default_factory=list)
    lowered: set[int] = field(default_factory=set)  # slots whose computed tokens were lowered
    is_ahead: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        facts, cache = self.facts.facts, self.facts.cache
        return not (facts.slot or self.facts.news.slot or self.run or self.admit or cache.evicted or cache.reset)

    def parts(self) -> list[Part]:
        """Return the parts to send. The facts are a part of their own if they may preempt, so that the answer
        distinguishes these preemptions from those of the run rows.
        """
        if self.lowered or self.rows.facts.slot:
            return [self.facts, self.rows]
        rows, facts = self.rows, self.facts
        rows.facts, rows.cache, rows.news = facts.facts, facts.cache, facts.news
        return [rows]


class FactRows:
    """Rows of facts, whose columns that have only defaults are left out."""

    def __init__(self, hash_block_size: int) -> None:
        self._hash_block_size = hash_block_size
        self.slot: list[int] = []
        self.appended: list[int] = []
        self.num_hashes: list[int] = []
        self.hashes: list[bytes] = []
        self.rare: dict[int, tuple[int, int, int]] = {}  # row -> computed, commit, end

    def add(self, entry: Entry, computed: int = UNCHANGED, end: End = End.NONE, *, grows: bool = True) -> None:
        """Add a row of this request, if there is something to report."""
        appended = count = 0
        if grows:
            request = entry.request
            appended = request.num_tokens - entry.num_tokens
            if appended:
                entry.num_tokens += appended
            hashes = request.block_hashes
            if len(hashes) > entry.num_hashes:
                full = min(entry.num_tokens // self._hash_block_size, len(hashes))
                count = full - entry.num_hashes
                self.hashes += hashes[entry.num_hashes : full]
                entry.num_hashes = full
        commit, entry.commit = entry.commit, UNCHANGED
        if end is not End.NONE or computed != UNCHANGED or commit != UNCHANGED:
            self.rare[len(self.slot)] = computed, commit, int(end)
        elif not (appended or count):
            return
        self.slot.append(entry.slot)
        self.appended.append(appended)
        self.num_hashes.append(count)

    def add_tokens(self, entry: Entry, num_tokens: int) -> None:
        """Add the tokens of a request that has no new hash, as `add`."""
        if entry.commit != UNCHANGED:
            self.add(entry)
        elif num_tokens != entry.num_tokens:
            self.slot.append(entry.slot)
            self.appended.append(num_tokens - entry.num_tokens)
            self.num_hashes.append(0)
            entry.num_tokens = num_tokens

    def facts(self) -> Facts:
        """Return the section."""
        facts = Facts(slot=self.slot, appended=self.appended)
        if self.hashes:
            facts.num_hashes, facts.hashes = self.num_hashes, b"".join(self.hashes)
        if self.rare:
            unchanged = UNCHANGED, UNCHANGED, int(End.NONE)
            rows = [self.rare.get(row, unchanged) for row in range(len(self.slot))]
            facts.computed, facts.commit, facts.end = (list(column) for column in zip(*rows, strict=True))
        return facts


class Books:
    """The requests that the service knows, and its grants that vLLM has not used yet.

    Attributes:
        entries: the requests that have not ended, by id.
        grants: tokens granted to running requests, by id.
        admitted: admissions, by id.
        fresh: requests whose tables have blocks that vLLM was not given.
        refused: admit rows that were not granted, by id: hit and status.
        victims: requests that the service preempted for run rows, in its order; vLLM must preempt the same.
        lost: requests that the service preempted for another reason.
        free_blocks: free blocks, as of the last answer.
        has_states: whether the model has recurrent states.
        num_unused: grants that vLLM did not use, or only in part.
        launch_orders: (step, part, orders) since the last launch; None if nothing takes them.
    """

    def __init__(self, spec: ReplicaSpec) -> None:
        """`spec`: the settings of the replica."""
        self._block_sizes = [group.block_size for group in spec.groups]
        self._hash_block_size, self._is_cached = spec.hash_block_size, spec.enable_caching
        self.has_states = any(group.kind is GroupKind.MAMBA for group in spec.groups)
        self._most_tokens = spec.max_model_len
        self.free_blocks = spec.num_blocks - 1
        self.lost: list[Any] = []
        self.launch_orders: list[tuple[int, int, Orders]] | None = None
        self.num_unused = 0
        self._evicted: list[int] = []
        self._reset = False
        self._unanswered = Cache()  # of the message in flight
        self.forget([])

    def forget(self, running: Sequence[Any]) -> None:
        """Begin with a service that knows nothing; the running requests lost their blocks.

        Removals of keys without an answer are sent again: the pages may have kept their keys.
        """
        sent, self._unanswered = self._unanswered, Cache()
        self._evicted, self._reset = [*sent.evicted, *self._evicted], self._reset or sent.reset
        self.entries: dict[str, Entry] = {}
        self.by_slot: dict[int, Entry] = {}
        self._free_slots: list[int] = []
        self._num_slots = 0
        self._ended_slots: list[int] = []
        self._ends: list[tuple[Entry, End, int]] = []
        self._hold: int | None = None
        self.grants: dict[str, int] = {}
        self.admitted: dict[str, Admitted] = {}
        self.fresh: set[str] = set()
        self.refused: dict[str, tuple[int, int]] = {}
        self.victims: deque[Entry] = deque()
        self.page_orders = PageOrders()
        self.events: list[Any] = []
        self.reset_done = False
        self.lost += [one for one in running if one not in self.lost][::-1]  # the last one returns to the queue first

    # -- what to report ----------------------------------------------------------------------------------------------

    @property
    def has_news_of_blocks(self) -> bool:
        """Whether the next message returns blocks."""
        return bool(self._ends)

    def executed(self, done: int) -> int:
        """Return up to which step the next message may report execution, if the steps up to `done` were executed.

        Call it after the message is built.
        """
        hold, self._hold = self._hold, None
        return done if hold is None else min(done, hold - 1)

    def begin_facts(self) -> tuple[FactRows, Program]:
        """Begin a message: with the ends since the last one."""
        rows, program = FactRows(self._hash_block_size), Program()
        for entry, end, computed in self._ends:
            computed = self._withdraw(entry, computed)
            lowered = computed if computed < entry.computed else UNCHANGED
            rows.add(entry, lowered, end, grows=entry.commit != UNCHANGED)
            entry.leaving = False
            entry.clear()
            if end is End.FREE:
                self._ended_slots.append(entry.slot)
        self._ends.clear()
        return rows, program

    def report(self, entry: Entry, rows: FactRows, program: Program, computed: int, *, grows: bool = True) -> None:
        """Add what happened to a request that holds blocks, which has this number of computed tokens.

        `grows`: whether its new tokens are reported; a session drops the last one of each answer.
        """
        if computed < entry.computed:
            entry.computed = computed = self._withdraw(entry, computed)
            program.lowered.add(entry.slot)
            rows.add(entry, computed, grows=grows)
        else:
            rows.add(entry, grows=grows)

    def end_facts(self, rows: FactRows, program: Program, news: Sequence[Any]) -> None:
        """Complete the facts of a message; `news` are requests that the service does not know."""
        part = program.facts
        part.cache = self._unanswered = Cache(evicted=list(dict.fromkeys(self._evicted)), reset=self._reset)
        self._evicted.clear()
        self._reset = False
        part.facts = rows.facts()
        if news:
            added = [self._add(request) for request in news]
            self._fill_news(part.news, added)
            grown = FactRows(self._hash_block_size)
            for entry in added:  # outputs, which are not a part of the prompt
                grown.add(entry)
            program.rows.facts = grown.facts()

    def _add(self, request: Any) -> Entry:
        slot = self._free_slots.pop() if self._free_slots else self._num_slots
        self._num_slots = max(self._num_slots, slot + 1)
        entry = Entry(slot, request, len(self._block_sizes), self._most_tokens)
        self.entries[request.request_id] = self.by_slot[slot] = entry
        return entry

    def _fill_news(self, news: News, added: Sequence[Entry]) -> None:
        hashes: list[bytes] = []
        for entry in added:
            request = entry.request
            entry.num_tokens = max(1, min(request.num_prompt_tokens, request.num_tokens))
            full = min(entry.num_tokens // self._hash_block_size, len(request.block_hashes)) if self._is_cached else 0
            entry.num_hashes = full
            news.slot.append(entry.slot)
            news.num_tokens.append(entry.num_tokens)
            news.num_hashes.append(full)
            hashes += request.block_hashes[:full]
            news.request_id.append(request.request_id)
            news.skip_reading.append(int(request.skip_reading_prefix_cache))
        news.hashes = b"".join(hashes)
        if not any(news.num_hashes):
            news.num_hashes = []
        if not any(news.skip_reading):
            news.skip_reading = []

    def unwritten(self, entry: Entry, computed: int) -> list[int]:
        """Return the blocks of a request that may have a key although only `computed` of its tokens are written, or
        will be by a launch that was scheduled.
        """
        known = min(entry.computed, entry.num_tokens)  # only known tokens are registered
        if known <= computed or not entry.running:
            return []
        found = []
        for table, size in zip(entry.tables, self._block_sizes, strict=True):
            found += [block for block in table[computed // size : -(-known // size)] if block]
        return found

    def _withdraw(self, entry: Entry, computed: int) -> int:
        """Let the next message evict the keys of what is not written; returns the computed tokens, at least the hit."""
        computed = max(computed, entry.hit)
        unwritten = self.unwritten(entry, computed)
        if unwritten:
            self._evicted += unwritten
            self._hold = entry.step if self._hold is None else min(self._hold, entry.step)
        return computed

    def evict_unwritten(self, entry: Entry, computed: int) -> None:
        """Let the next message evict what a launch that uses only a part of a grant does not write. The computed tokens
        are lowered after that launch: lowering them can preempt the request.
        """
        self._withdraw(entry, computed)

    @property
    def in_doubt(self) -> bool:
        """Whether a block without content may be a hit of an admission that vLLM has not used."""
        if self._evicted:
            return True
        unused = [(self.entries[name], self.entries[name].request.num_computed_tokens) for name in self.grants]
        ended = [(entry, computed) for entry, _, computed in self._ends]
        return any(self.unwritten(entry, max(computed, entry.hit)) for entry, computed in unused + ended)

    # -- what vLLM reports -------------------------------------------------------------------------------------------

    def free(self, request: Any, end: End) -> None:
        """Record that vLLM ended or preempted a request."""
        entry = self.entries.get(request.request_id)
        if entry is None:
            return
        self.grants.pop(request.request_id, None)
        self.admitted.pop(request.request_id, None)
        if end is End.FREE:
            del self.entries[request.request_id]
        if entry in self.victims:
            self.victims.remove(entry)
        if end is End.PREEMPTED and not entry.running:
            return  # preempted by the service, as vLLM does now
        self._leave(entry, end, request.num_computed_tokens)

    def _leave(self, entry: Entry, end: End, computed: int) -> None:
        entry.leaving = True
        self._ends.append((entry, end, computed))

    def drop_unused(self) -> None:
        """Take back what vLLM has not used of the answers so far. The next program of all running requests lowers their
        computed tokens.
        """
        self.num_unused += len(self.grants) + len(self.admitted)
        self.grants.clear()
        for one in self.admitted.values():
            self.page_orders.give_up(one.copies)
            self._leave(one.entry, End.PREEMPTED, one.entry.hit)
        self.admitted.clear()

    def give_up_copies(self) -> None:
        """Take back the copies that no launch has carried out, when the next message returns their blocks: the next
        request may get them, and zeroes for their sources. No key of their targets may outlive that message.
        """
        self._evicted += self.page_orders.targets
        self.page_orders.give_up(self.page_orders.targets)

    @property
    def is_held(self) -> bool:
        """Whether vLLM's requests hold blocks. Call it between two iterations, before an answer is received."""
        return any(entry.running and not entry.leaving for entry in self.entries.values())

    def commit(self, request: Any, num_tokens: int) -> None:
        """Record that the blocks of these tokens can be registered."""
        entry = self.entries.get(request.request_id)
        if entry is not None and self._is_cached:
            entry.commit = num_tokens

    def evict(self, blocks: Iterable[int]) -> None:
        """Let the next message remove the keys of these blocks."""
        self._evicted += blocks

    def reset(self) -> None:
        """Let the next message remove all keys."""
        self._reset = True
        self.reset_done = False

    def take_new(self, entry: Entry) -> list[list[int]] | None:
        """Return the blocks that vLLM was not given yet, by group; None if there is none."""
        self.fresh.discard(entry.name)
        if list(map(len, entry.tables)) == entry.given:
            return None
        new = [table[given:] for table, given in zip(entry.tables, entry.given, strict=True)]
        entry.given = list(map(len, entry.tables))
        return new

    # -- answers -----------------------------------------------------------------------------------------------------

    def take(self, program: Program, answer: StepResult) -> int:
        """Record an answer; returns how many tokens it granted to requests that do not need them any more."""
        self._unanswered = Cache()
        if len(answer.parts) > 1:
            first = answer.parts[0]
            self._lose(first.preempted)
            self._take_orders(first)
        if self.launch_orders is not None:
            self.launch_orders += [(answer.seq, part, one.orders) for part, one in enumerate(answer.parts)]
        result = answer.parts[-1]
        self.free_blocks = result.free_blocks
        self._take_victims(result, answer.seq)
        unused = self._take_run(program, result, answer.seq)
        unused += self._take_admit(program, result, answer.seq)
        self._take_orders(result)
        self._free_slots += self._ended_slots  # after the events, which name slots
        self._ended_slots.clear()
        return unused

    def _lose(self, slots: Iterable[int]) -> None:
        for slot in slots:
            entry = self.by_slot[slot]
            entry.clear()
            self.grants.pop(entry.request.request_id, None)
            if not entry.leaving:
                self.lost.append(entry.request)

    def _take_victims(self, result: PartResult, seq: int) -> None:
        for slot in result.preempted:
            entry = self.by_slot[slot]
            if entry.step < seq:  # an earlier grant may not have been used; the service withdrew those of this step
                self._withdraw(entry, entry.request.num_computed_tokens)
            entry.clear()
            self.grants.pop(entry.request.request_id, None)
            if not entry.leaving:
                self.victims.append(entry)

    def _take_run(self, program: Program, result: PartResult, seq: int) -> int:
        entries, unused, grants = program.run, 0, self.grants
        for entry, granted in zip(entries, result.granted, strict=True):
            if granted:
                entry.computed += granted
                if entry.name not in grants and entry.name not in self.admitted:
                    entry.step = seq
                if entry.leaving:
                    unused += granted
                    self.num_unused += 1
                else:
                    grants[entry.name] = grants.get(entry.name, 0) + granted
        new, at = result.new_blocks, 0
        for row, group, count in zip(new.row, new.group, new.count, strict=True):
            if row < len(entries):
                entries[row].tables[group] += new.ids[at : at + count]
                self.fresh.add(entries[row].name)
            at += count
        return unused

    def _take_admit(self, program: Program, result: PartResult, seq: int) -> int:
        unused = 0
        tables = result.tables.by_row() if program.admit else {}
        first = len(program.run)
        for row, entry in enumerate(program.admit):
            name, status, hit = entry.request.request_id, result.admit_status[row], result.admit_hit[row]
            if status != AdmitStatus.GRANTED:
                self.refused[name] = hit, status
                continue
            self.refused.pop(name, None)
            granted, blocks = result.admit_granted[row], tables[first + row]
            entry.running, entry.step, entry.hit, entry.computed = True, seq, hit, hit + granted
            entry.tables = [blocks.get(group, []) for group in range(len(self._block_sizes))]
            entry.given = [0] * len(entry.tables)
            if entry.leaving:  # it ended meanwhile
                unused += granted
                self.num_unused += 1
                continue
            copies = set(result.orders.copy_dst).intersection(block for table in entry.tables for block in table)
            self.admitted[name] = Admitted(entry, result.admit_single_group_hit[row], granted, copies)
        return unused

    def _take_orders(self, result: PartResult) -> None:
        orders = result.orders
        self.page_orders.add(orders)
        if result.events:
            self.events += [(event, self.by_slot.get(event.slot)) for event in result.events]
        self.reset_done = self.reset_done or result.reset_done
