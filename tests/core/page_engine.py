"""A random engine on a core in this process, with its page memory and the store behind it.

After each step every key that others may see is compared with what its page holds, every launch with what it reads
(`page_memory`), and the view of a subscriber of its events with what is published (`follower`).

A launch goes in three strides: stamps, as early as the order of steps allows; zeroes and copies, behind every earlier
launch; the launch. Transfers write between any two of them, and continue after the engine died.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from random import Random

from kvplane.base.groups import ReplicaSpec
from kvplane.base.stamps import Stamp
from kvplane.base.step import End, News, Orders, Part, PartResult, Step
from kvplane.session.rows import ResumeRow, resume_of
from kvplane.session.tables import BlockTables
from kvplane_core.face import inspect
from kvplane_core.face.entries import Entries
from kvplane_core.spec.managers.full import FullAttentionManager
from kvplane_core.spec.managers.mamba import AlignedStateManager
from tests.core import retain_rows
from tests.core.builders import new_replica, tokens
from tests.core.follower import Followed
from tests.core.page_memory import Launch, Memory, Page
from tests.core.page_requests import PlannedRow, Request, Texts, Transfer
from tests.core.page_scheduler import MOST_IN_FLIGHT, SLOTS, RandomScheduler
from tests.core.permissions import LOAD, Cells

KEPT = 4  # chunks that the store has of each life


class RandomEngine(RandomScheduler):
    """Drives one replica in this process for some steps.

    Attributes:
        queue: launches whose orders or rows were not carried out, of failed steps too.
        stamped, moved: stamps of all steps up to this one are written; zeroes and copies are done.
        movers: transfers of engine lives that have ended.
        stored: entries sent to a store, oldest first.
        late: pieces that transfers wrote in another engine life than their own.
    """

    ends_loads_by_rows = True
    deaths = 0  # percent of steps
    launches = 60  # percent of strides after a step
    retains = True  # draws the section `retain`
    checks_every = 1  # steps between checks of the whole state
    cells: Cells | None = None  # of a campaign

    def __init__(self, spec: ReplicaSpec, rng: Random, most_drafts: int = 0) -> None:
        self.replica = new_replica(spec)
        self.memory = Memory(spec)
        self.followed = Followed(self.replica)
        self.epoch = self.keys_seen = self.late = 0
        self.has_failed = False
        self.movers: list[Transfer] = []
        self.over: list[int] = []  # blocks whose late loads ended last,
        self.over_seq = 0  # and the step of this engine life that reported it
        self.stored: list[Entries] = []
        super().__init__(Texts(spec), [self.memory], rng, most_drafts)
        self.hashes, self.ends_late = self._chance(30), True
        self.deaths, self.loads = rng.choice([2, 3, 8]), rng.choice([20, 40, 60])
        self.most_external, self.goes_back = rng.choice([9, 9, 24]), 10
        self.accepts, self.limits_rows = rng.choice([70, 70, 30]), rng.randrange(2) == 0
        self.evicts = rng.choice([8, 40])
        way = rng.randrange(4)
        if way == 0:  # requests come back to their own blocks while their launches are in flight
            self.launches = 15
            self.ends, self.ways_to_end = 50, (End.PREEMPTED, End.PREEMPTED, End.PREEMPTED, End.FREE)
        elif way == 1:  # requests hold each other's blocks, which are evicted; some end in the step that ran them
            self.repeats, self.splits, self.evicts, self.ends, self.deaths = 90, 90, 60, 4, 2
        elif way > 1:  # requests grow far behind their prompts, and load what they generated when they come back
            self.decodes, self.lags, self.limits_rows, self.loads = True, True, True, 60
            self.ends, self.ways_to_end = rng.choice([3, 20]), (End.PREEMPTED, End.PREEMPTED, End.FREE, End.HELD)

    def begin(self) -> None:
        """The engine before this one died, or there was none."""
        super().begin()
        self.queue: list[Launch] = []
        self.stamped = self.moved = self.over_seq = 0
        self.spoilt: list[tuple[int, int, Page]] = []  # (step, block, what it held) of evictions and resets
        self.epoch += 1
        self._begin_epoch()
        self._check_busy()
        self.followed.begin(self.epoch)

    def _begin_epoch(self) -> None:
        self.replica.begin_epoch(self.epoch, self.memory.stamps)

    def _parts(self) -> list[Part]:
        parts = super()._parts()
        rng = copy(self.rng)  # a copy: the run of a seed stays as it was
        if self.retains and rng.random() < 0.3:
            parts[-1].retain = retain_rows.drawn(self.replica, rng, self.seq)
        return parts

    def step(self) -> None:
        """Send a step, then let some launches run."""
        if self._chance(self.deaths * (5 if self.has_failed else 1)):
            self._crash()
        self.has_failed = bool(self.pending) and self._chance(6)
        if self.has_failed:
            self.fail()
        self._send(self.plan())
        is_checked = self.seq % self.checks_every == 0
        if is_checked:
            inspect.check(self.replica)
        self._check_loads()
        self._check_new_loads()
        self._check_hits()
        self._check_copies()
        self._check_registered()
        if is_checked:
            self.check_keys()
        while self.queue and (len(self.queue) >= MOST_IN_FLIGHT or self._chance(self.launches)):
            self._stride()
        self._check_stamps()
        self.check_keys()

    def _send(self, parts: list[Part]) -> None:
        before, failed = self._blocks(), [launch for launch in self.queue if launch.seq in self.failed]
        tables = {slot: self.tables[slot] for slot in self.requests if slot in self.tables}
        self.last_results = results = self.apply(parts)
        left = [tables[slot] for answer in results for slot in answer.preempted if slot in tables]
        self.take_answer(parts, results)
        self.queue.append(self.pending[-1])
        for part, answer in zip(parts, results, strict=True):
            self._spoil(range(self.spec.num_blocks) if answer.reset_done else part.cache.evicted, left)
        if self.cells is not None:
            rows = [row for launch in failed for row in launch.rows]
            lost = [block for row in rows for block in before.get(row.life[0], ())]
            self.cells.answered((self.seq, self.executed_through), parts, results, (before, self._blocks()), lost)

    def _check_loads(self) -> None:
        """The core holds pages for the loads that may still write, and for no other."""
        active = {slot for slot, one in self.requests.items() if one.load is not None}
        may_hold = active.union(slot for slot, one in self.requests.items() if one.may_hold)
        loading = self.replica.requests.loading
        assert active <= loading <= may_hold, f"{active} load, {may_hold} may hold pages, the core says {loading}"

    def _blocks(self) -> dict[int, list[int]]:
        """The blocks of each slot, for the cells of permissions."""
        if self.cells is None:
            return {}
        held, coordinator = self.replica.tracker.held, self.replica.coordinator
        live = [slot for slot in SLOTS if self.replica.requests.is_live(slot)]
        return {slot: held.get(slot) or [b for table in coordinator.tables(slot) for b in table] for slot in live}

    def apply(self, parts: list[Part]) -> list[PartResult]:
        """Let the replica apply a step, and others see what became of it."""
        step = Step(self.epoch, self.seq, parts, executed_through=self.executed_through)
        result = self.replica.apply(step)
        self.followed.step(step, result)
        if self._chance(30):
            self.stored.append(self.replica.entries())
            del self.stored[:-KEPT]
        return result.parts

    def _spoil(self, blocks: Iterable[int], left: Iterable[Sequence[Sequence[int]]]) -> None:
        """Pages that were evicted or reset hold nothing that may be found: they were damaged, or of other weights.

        Blocks of a request or a launch are left out: it continues with what it computed. So are those that requests
        `left` as this step preempted them: they register what they counted as computed. Final when stamps are written.
        """
        held = [*left, *(self.tables[slot] for slot in self.requests if slot in self.tables)]
        held += [row.tables for launch in self.pending for row in launch.rows]
        used = {block for tables in held for table in tables for block in table}
        used.update(block for launch in self.queue for orders in launch.orders for block in orders.copy_src)
        for block in set(blocks) - used:
            if block in self.memory.pages:
                self.spoilt.append((self.seq, block, self.memory.pages.pop(block)))

    def check_keys(self) -> None:
        """Every key of a step that has run names a page that holds just that."""
        self.keys_seen += self.texts.check_keys(self.replica, [self.memory], through=self.launched)

    # -- launches and transfers --------------------------------------------------------------------------------------

    def _stride(self) -> None:
        """Something happens: stamps, a launch, or a piece of a transfer."""
        likely = 60 if self._has_rare_in_flight() else 25
        for load in self._loads():
            if self._chance(likely):
                self._write(load, 6)
        for load in self.movers:
            if self._chance(25):
                load.at = load.first  # what is late may come twice
                self._write(load, 9)
                self.late += 1
        ahead = [launch for launch in self.queue if launch.seq > self.stamped]
        if ahead and self._chance(40):
            self._stamp(ahead[0])
        elif self.moved < self.queue[0].seq and self._chance(40):
            self._move()
        else:
            self._launch()

    def _write(self, load: Transfer, most: int) -> None:
        load.write(self.rng.randint(1, most))
        if self.cells is not None:
            self.cells.note(LOAD, load.blocks(self.spec))

    def _orders(self, launch: Launch) -> list[Orders]:
        """Those of a failed step are carried out like any others."""
        return launch.orders

    def _stamp(self, launch: Launch) -> None:
        for orders in self._orders(launch):
            self.memory.stamp(orders)
        self.stamped = launch.seq

    def _move(self) -> None:
        head = self.queue[0]
        if self.stamped < head.seq:
            self._stamp(head)
        for orders in self._orders(head):
            self.memory.move(orders)
        self.moved = head.seq

    def _launch(self) -> None:
        head = self.queue[0]
        if self.moved < head.seq:
            self._move()
        if head in self.pending:
            self.memory.run(Launch(head.seq, [], head.rows), self.lost_at(head.seq))
        self.queue.pop(0)
        self.pending = [launch for launch in self.pending if launch in self.queue]
        self.launched = self.queue[0].seq - 1 if self.queue else self.seq

    def _has_obeyed(self, seq: int) -> bool:
        """Stamps are done at once, where no zeroes or copies of this step or one before wait for launches."""
        waiting = [launch for launch in self.queue if self.moved < launch.seq <= seq]
        moves = any(orders.zero_block or orders.copy_src for launch in waiting for orders in launch.orders)
        return seq <= self.stamped and not moves

    def _loads(self) -> list[Transfer]:
        """Transfers that may write now."""
        own = [one.load for one in self.requests.values() if one.load is not None]
        return [load for load in own if self._may_start(load)]

    def _check_new_loads(self) -> None:
        """No launch in flight behind `load_after`, except one that waits for the load, uses a block that the load
        writes. Of what is loaded in front of a launch, the core knows every block: were the engine to die, it must hand
        out none of them.
        """
        for row in self.pending[-1].rows:
            if row.loaded < row.start:
                written = self._transfer(row.tables, row.script, row.loaded, row.start).blocks(self.spec)
                unknown = written.difference(self.replica.tracker.filling.get(self.seq, ()))
                assert not unknown, f"step {self.seq} loads blocks {unknown} of slot {row.life[0]}, which are not noted"
        references = self.replica.coordinator.pool.references
        loads = [(slot, one.load, one) for slot, one in self.requests.items() if one.load is not None]
        for slot, load, request in loads:
            if load.is_done and request.computed > load.end:
                continue  # a launch behind it has run
            free = [block for block in load.blocks(self.spec) if not references[block]]
            assert not free, f"the load of slot {slot} may write blocks {free}, which are free"
            for launch in self.pending:
                if load.after < launch.seq:
                    others = [row for row in launch.rows if isinstance(row, PlannedRow) and row.load is not load]
                    used = set[int]().union(*(row.used_blocks(self.spec) for row in others))
                    used &= load.blocks(self.spec)
                    assert not used, f"the load of slot {slot} may start while step {launch.seq} uses its blocks {used}"

    def _check_hits(self) -> None:
        """A limit equal to the length of a hit finds this hit."""
        for slot in [slot for slot, one in self.requests.items() if not (one.running or one.is_held)]:
            hit = self.replica.peek_slot(slot)
            again = self.replica.coordinator.find_hit(slot, hit.num_tokens)
            assert again.num_tokens == hit.num_tokens, f"slot {slot}: {hit}, and {again} within its length"

    def _check_copies(self) -> None:
        """No running state is copied that has no key: none could be found by the copy."""
        for manager in self.replica.coordinator.managers:
            for slot, (_, block) in manager.partial_hit.items():
                if isinstance(manager, AlignedStateManager) and manager.has_allocated[slot]:
                    assert manager.pool.key[block] is not None, f"state {block} of slot {slot} is copied without a key"

    def _check_registered(self) -> None:
        """No block of full attention that counts as registered is without its key: nothing would register it again.

        The end of a load from a tier registers the blocks that it fills.
        """
        loads = self.replica.coordinator.tiers.jobs.loads.values()
        filling = {row.block: row.num_tokens for load in loads for row in load.rows}
        for manager in self.replica.coordinator.managers:
            of_slots = zip(manager.table, manager.num_cached, strict=True)
            for slot, (table, count) in enumerate(of_slots if type(manager) is FullAttentionManager else ()):
                ends = [filling.get(block) or manager.pool.key_tokens[block] for block in table[: max(0, count)]]
                wanted = [(index + 1) * manager.block_size for index in range(len(ends))]
                assert ends == wanted, f"slot {slot} counts {wanted} as registered, its blocks have the keys of {ends}"

    def _check_stamps(self) -> None:
        """Once all orders are carried out, the memory has every stamp that the core gave in this engine life."""
        if not self.queue:
            given = enumerate(self.replica.coordinator.pool.stamp)
            mine = {block: stamp for block, stamp in given if Stamp.unpack(stamp).epoch == self.epoch}
            missing = [block for block, stamp in mine.items() if self.memory.stamps[block] != stamp]
            assert not missing, f"the memory lacks the stamps of blocks {missing}"

    def _check_busy(self) -> None:
        """A new engine life hands out no block that a load of an earlier one may still write."""
        writing = set[int]().union(*(load.blocks(self.spec) for load in self.movers))
        free = writing.difference(self.replica.busy_blocks)
        assert not free, f"loads of earlier engine lives write blocks {free}, which are not held"

    # -- deaths ------------------------------------------------------------------------------------------------------

    def _crash(self) -> None:
        """The engine dies, or the service with it; some of what was in flight ran, without a reported outcome."""
        for _ in range(self.rng.randint(0, 2 * len(self.queue))):
            if self.queue:
                self._stride()
        kind = self.rng.choice(["engine", "service", "image"])
        while kind == "image" and self.queue:
            self._launch()
        kept = [slot for slot, one in self.requests.items() if kind == "image" and one.running and self._is_sound(one)]
        self._leave_movers(kept)
        for seq, block, page in self.spoilt:
            if seq > self.stamped:
                self.memory.pages.setdefault(block, page)
        if self.cells is not None:
            self.cells.die(range(1, self.spec.num_blocks))
        if kind == "engine":
            self.begin()
        else:
            self._recover(kept)

    def _leave_movers(self, kept: list[int]) -> None:
        """Transfers outlive the engine, those in front of a launch whose orders were carried out too."""
        begun = [launch for launch in self.pending if launch.seq <= self.moved]
        rows = [row for launch in begun for row in launch.rows if row.loaded < row.start]
        waiting = [self._transfer(row.tables, row.script, row.loaded, row.start) for row in rows]
        own = [self.requests[slot].load for slot in kept]
        self.movers += [load for load in self._loads() if load not in own] + waiting

    def _busy_blocks(self) -> list[int]:
        return [*self.replica.busy_blocks, *self.over]

    def _loads_over(self) -> list[int]:
        self.movers = [load for load in self.movers if not self._chance(15)]
        busy = set[int]().union(*(load.blocks(self.spec) for load in self.movers))
        over = [block for block in self.replica.busy_blocks if block not in busy and self._chance(70)]
        if over:
            self.over, self.over_seq = over, self.seq
        return over

    def _has_rare_in_flight(self) -> bool:
        """Whether a late load ended, or a load waits for a step that was executed and is not reported to be."""
        loads = [one.load for one in self.requests.values() if one.load is not None]
        resumed = self.executed_through < 2 and any(load.seq == 0 for load in loads)
        holds_back = self.most_external == 24 or self.most_drafts > 0
        behind_launches = holds_back and any(load.after > self.executed_through for load in loads)
        return self.over_seq > self.executed_through or resumed or behind_launches

    def _is_rare(self, slot: int) -> bool:
        """Whether a step in flight ended the late load of a block of the slot, or held another request that has it."""
        mine, rare = self.requests[slot], set[int]()
        if self.over_seq > self.executed_through:
            rare.update(self.over)
        for other in self.requests.values():
            if other.held and other is not mine and other.held_seq > self.executed_through:
                rare.update(block for table in other.tables or () for block in table)
        tables = mine.tables or []
        if not tables and slot in self.tables:
            tables = self._tables(slot)
        return any(block in rare for table in tables for block in table if block)

    def _recover(self, kept: list[int]) -> None:
        """Another service: it knows what the store has, which may have lost its tail, and what the memory shows."""
        requests, tables = self.requests, self.tables
        loads = [*self.movers, *(load for slot in kept if (load := requests[slot].load) is not None)]
        busy = sorted(set[int]().union(*(load.blocks(self.spec) for load in loads)))
        stored = self.stored[: self.rng.randint(0, len(self.stored))] if self._chance(50) else self.stored
        self.replica, chunks = new_replica(self.spec), self._chunks(stored)
        self.epoch += 1
        self.replica.recover(self.epoch, [self.memory.stamps], chunks, busy)
        RandomScheduler.begin(self)
        self.queue, self.spoilt, self.stamped, self.moved, self.over_seq = [], [], 0, 0, 0
        self.replica.take_events()  # a follower begins with what is published now
        self.followed = Followed(self.replica)
        if kept:
            self._resume({slot: requests[slot] for slot in kept}, tables)

    def _chunks(self, stored: list[Entries]) -> list[Entries]:
        """What the store returns, in any order."""
        return self.rng.sample(stored, len(stored))

    def _is_sound(self, request: Request) -> bool:
        """Whether its pages hold what it counts, and nothing of it is a guess."""
        load = request.load
        there = (load is None or load.end == request.computed) and not request.rows and request.life not in self.lost
        return there and request.truth is not None and request.truth.end == request.computed > 0

    def _resume(self, kept: dict[int, Request], tables: BlockTables) -> None:
        """The requests continue with the blocks that they have; transfers continue to read held blocks."""
        news = News(slot=list(kept), domain=[one.domain for one in kept.values()])
        for request in kept.values():
            news.num_tokens.append(request.known)
            if self.hashes:
                request.hashed = 0
                made = self._new_hashes(request, late=0)  # who shares a block must know what it holds
                news.num_hashes.append(len(made))
                news.hashes += b"".join(made)
            else:
                news.tokens += tokens(request.script[: request.known].lower())
            self.tables._tables[request.life[0]] = tables[request.life[0]]
        self.requests = kept
        rows = [self._resume_row(slot, one) for slot, one in kept.items()]
        self.seq += 1
        self._send([Part(news=news)])
        self.seq += 1
        self._send([Part(resume=resume_of(rows))])
        for load in self._loads():  # they do not wait for the answer
            if self._chance(50):
                self._write(load, 6)
        inspect.check(self.replica)
        self.check_keys()

    def _resume_row(self, slot: int, request: Request) -> ResumeRow:
        assert request.truth is not None
        end = max(request.computed, request.truth.left.planned)
        load = request.load
        if load is not None:
            load.after, load.seq = 0, 0
        loading = 1 if load is not None else 2 * request.may_hold
        return ResumeRow(slot, request.computed, self._tables(slot), request.prompt, launch_end=end, loading=loading)


__all__ = ["MOST_IN_FLIGHT", "RandomEngine", "RandomScheduler", "Request", "Texts"]
