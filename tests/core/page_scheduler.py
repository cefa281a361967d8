"""An honest engine that does everything that the contract permits, at random.

`RandomScheduler` writes the steps and reads the answers (`page_answers`), and knows nothing else of the allocator;
`page_engine` drives a core in this process with it, the simulation (`tests/sim`) a service behind a network.

It keeps the contract and nothing more: outcomes of launches are sent in order, before executed_through passes them for
a request that runs. Everything else is drawn: steps ahead over unverified drafts, loads that write before, between and
after launches, failed steps, ends with any fence, parts, budgets, caps, victims, flags, domains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy

from kvplane.base.step import (
    ALL_GROUPS,
    ANY_HIT,
    UNCHANGED,
    UNLIMITED,
    Admit,
    Budget,
    Cache,
    End,
    Facts,
    News,
    OnRefusal,
    Part,
    Peek,
    RowFlag,
    Run,
    Watermark,
)
from tests.core.builders import tokens
from tests.core.page_answers import MOST_IN_FLIGHT, Answers
from tests.core.page_requests import LONGEST, OTHER, PlannedRow, Request

SLOTS = range(5)
HEADS = ["", "aaaa", "aaaabbbb", "aaaabbbbaaaabbbb"]
DELAY = int(RowFlag.DELAY_CACHING)


class RandomScheduler(Answers):
    """One engine life: writes steps at random, and knows of the allocator what the answers say.

    Attributes:
        ends_loads_by_rows: draws rows that end a load and whose request goes in the same part, and what is said then.
            The simulation does not: its seeds stand.
    """

    ends_loads_by_rows = False
    limits_rows = False  # draws hit limits, reserved blocks and rows that only adopt; the simulation does not
    accepts = 70  # percent of drafts
    ends = 15  # percent of requests in each step
    comes = 40  # percent of free slots in each step
    ways_to_end: tuple[End, ...] = (End.FREE, End.FREE, End.PREEMPTED, End.HELD)
    evicts = 8  # percent of steps
    goes_back = 6  # percent of requests whose launches have all run, in each step: tokens are taken back
    most_external = 9  # tokens of an admission that come from outside
    decodes = False  # prompts are short, and every request that may run does
    lags = False  # reports steps as executed as late as allowed
    repeats = 0  # percent of new requests: the text of an earlier one, with another end of the prompt
    splits = 30  # percent of steps: several parts

    def plan(self) -> list[Part]:
        """The parts of the next step; sets `executed_through` of it."""
        self.seq += 1
        most = min([self.launched, *(seq - 1 for seq in self.failed)])
        least = min(most, max(self.executed_through, self.seq - MOST_IN_FLIGHT))
        drawn = self.rng.randint(least, most)
        self.executed_through = least if self.lags or self._has_rare_in_flight() else drawn
        return self._parts()

    def plan_end(self) -> list[Part]:
        """Ends every request; what transfers hold is released."""
        self.seq += 1
        self.executed_through = max(self.executed_through, min([self.launched, *(seq - 1 for seq in self.failed)]))
        facts, released = Facts(), list[int]()
        for slot, request in list(self.requests.items()):
            if request.is_held:
                released.append(slot)
                del self.requests[slot]
            else:
                self._give_up(request)
                self._row(facts, slot, end=End.FREE)
        return [Part(facts=facts, cache=Cache(failed_steps=self.failed, released=released))]

    # -- parts -------------------------------------------------------------------------------------------------------

    def _parts(self) -> list[Part]:
        self.luck: dict[int, tuple[bool, ...]] = {}
        self.asked: dict[int, tuple[int, bool]] = {}  # admit rows: external tokens, whether they come late
        self.late_ends: dict[int, list[tuple[int, End]]] = {}
        self.known: dict[int, int] = {}  # of each request when the step is sent
        held = [slot for slot, request in self.requests.items() if request.is_held]
        facts = self._facts()
        first = Part(facts=facts, cache=self._cache(held), news=self._news(), budget=self._budget())
        run, admit, peek = self._run(), self._admit(), self._peek()
        self.known = {slot: request.known for slot, request in self.requests.items()}
        if self._chance(100 - self.splits):
            first.run, first.admit, first.peek = run, admit, peek
            return [first]
        second = Part(run=run, budget=self._budget())
        if self._chance(50):
            first.run, second.run = run, _tail(run, len(run.slot) // 2)
        if self._chance(50):
            second.admit, second.peek = admit, peek
            return [first, second]
        third = Part(admit=admit, peek=peek, budget=self._budget())
        self._end_late(third, 2, run.slot, first.cache.evicted)
        return [first, second, third]

    def _end_late(self, part: Part, number: int, slots: Sequence[int], evicted: Sequence[int]) -> None:
        """Some request ends in the step that ran it: its row of this step will not run."""
        can = [slot for slot in slots if slot not in self.reported]
        lost = [slot for slot in can if any(block in evicted for table in self.tables[slot] for block in table)]
        if can and self.ends_late and self._chance(80 if self.repeats and lost else 40):
            can = lost if self.repeats and lost else can
            slot, end = self.rng.choice(can), self.rng.choice([End.FREE, End.PREEMPTED])
            part.facts = Facts([slot], end=[int(end)], fence=[self._fence()])
            part.admit = Admit()  # who ends late is admitted later
            self.late_ends[number] = [(slot, end)]

    def _budget(self) -> Budget:
        if self._chance(50):
            return Budget()
        most = self.rng.choice([UNLIMITED, 12, 24])
        return Budget(tokens=self.rng.choice([UNLIMITED, 5, 12]), input=most, overhead=self.rng.choice([0, 2]))

    def _fence(self) -> int:
        """Any step up to this one; 0 = none."""
        return max(0, self.seq - self.rng.choice([0, 0, 1, 2, 3])) if self._chance(50) else 0

    # -- facts -------------------------------------------------------------------------------------------------------

    def _facts(self) -> Facts:
        facts = Facts()
        self.reported: set[int] = set()  # slots with a row
        for slot, request in list(self.requests.items()):
            if request.is_held:
                continue
            if request.load is not None:
                self._load_fact(facts, slot, request)
            elif request.running and (self._chance(75) or self._is_due(request)):
                self._progress_fact(facts, slot, request)
            elif not request.running:
                is_unsure = self.ends_loads_by_rows and request.may_hold
                if self._chance(30 if is_unsure else 8):
                    self._row(facts, slot, end=End.PREEMPTED if is_unsure else End.FREE)
                elif self.limits_rows and self._chance(60 if self.decodes else 25):
                    self._append(facts, slot, request)
        return facts

    def _append(self, facts: Facts, slot: int, request: Request) -> None:
        """Tokens join a request that waits."""
        known = self.rng.randint(request.known, max(request.known, request.limit - 1))
        text, request.known = request.script[request.known : known], known
        self._row(facts, slot, text=text)

    def _is_due(self, request: Request) -> bool:
        """Whether executed_through passes a launch whose rejected drafts are not reported."""
        return any(row.seq <= self.executed_through for row in request.rows)

    def _load_fact(self, facts: Facts, slot: int, request: Request) -> None:
        """A transfer ends, continues behind a request that ended, or is given up."""
        load = request.load
        assert load is not None
        if not request.running:
            if self._chance(6):  # it was preempted meanwhile, and is not wanted any more
                self._give_up(request)
                self._row(facts, slot, end=End.FREE)
            else:
                self._release_skipped(facts, slot)
            return
        if self._may_end(request) and self._chance(50):
            self._end_load(request)
            if self._chance(50):
                self._row(facts, slot, commit=self._any_commit(request))
            elif self._chance(30):
                self._fail_load(facts, slot, request, load.first, load.end)
            return  # or a run row, or a release, says that it is over
        if self._chance(20 if self._is_rare(slot) else 5) and not self.failed:
            self._row(facts, slot, end=End.HELD)
        elif self._chance(10):
            self._give_up(request)
            self._row(facts, slot, end=self.rng.choice([End.FREE, End.PREEMPTED]))
        else:
            self._release_skipped(facts, slot)

    def _release_skipped(self, facts: Facts, slot: int) -> None:
        """A row that only asks for this, while a load writes blocks that the position given here does not need."""
        if self.limits_rows and self._chance(60):
            self._row(facts, slot)
            facts.release_skipped[-1] = self.rng.randint(0, LONGEST)

    def _fail_load(self, facts: Facts, slot: int, request: Request, first: int, end: int) -> None:
        """Only the first tokens came."""
        if request.truth is None or request.computed != end:
            return
        came = self.rng.randint(max(first, 1), end)
        request.truth.end = came
        self._row(facts, slot, computed=came, commit=came)

    def _progress_fact(self, facts: Facts, slot: int, request: Request) -> None:
        computed, commit = UNCHANGED, UNCHANGED
        appended = self._take_outcomes(request)
        rejected = self.just_rejected
        if rejected or (self.has_reported and self._chance(10)):
            computed = request.computed - rejected
        goes_back = 30 if self._is_rare(slot) else self.goes_back
        if not request.rows and self._is_launched(request) and self._chance(goes_back):
            appended, computed = self._back(request, computed, min(appended, request.limit - request.known))
        elif not request.rows and not appended and request.computed >= request.known and self._chance(25):
            appended = self.rng.randint(1, 2)  # text that is forced on it
        appended = max(0, min(appended, request.limit - request.known))
        if self._chance(15):
            commit = self._any_commit(request)
        end = End.NONE
        if self._chance(self.ends):
            end = End.HELD if self._is_rare(slot) else self.rng.choice(self.ways_to_end)
        if appended or computed != UNCHANGED or commit != UNCHANGED or end:
            text = request.script[request.known : request.known + appended]
            request.known += appended
            self._row(facts, slot, end, computed, text, commit)

    def _take_outcomes(self, request: Request) -> int:
        """Outcomes of launches that have run, in order; tokens that join the request by them."""
        waiting = {id(row) for launch in self.pending for row in launch.rows}
        ran = [row for row in request.rows if row.is_resolved and id(row) not in waiting]
        must = len([row for row in ran if row.seq <= self.executed_through])
        ran = ran[: max(must, self.rng.randint(0, len(ran)) if self._chance(30) else len(ran))]
        request.rows = request.rows[len(ran) :]
        self.just_rejected, self.has_reported = sum(row.rejected for row in ran), bool(ran)
        return ran[-1].sampled - request.known if ran else 0

    def _back(self, request: Request, computed: int, appended: int) -> tuple[int, int]:
        """Tokens are taken back, and the engine computes them again; returns what the row appends and `computed`.

        As long as the outcome of a launch is not reported, the number is that of its drafts: a state is there. With the
        outcome, or behind it, it may be any. A copy of the generator: the run of a seed stays as it was.
        """
        assert request.truth is not None
        rng = copy(self.rng)
        appended = appended if self.has_states and rng.random() < 0.5 else 0
        low, high = 1, min(request.truth.end, request.known + appended)
        is_known = request.known + appended > request.truth.end or not request.has_run
        if self.has_states and not (is_known and rng.random() < 0.4):
            low = request.truth.shortest
        elif appended > 1:
            low = request.known  # where only this outcome shows how far launches came
        if low > high:
            return 0, computed
        request.truth.end = self.rng.randint(low, high)
        return appended, request.truth.end

    def _any_commit(self, request: Request) -> int:
        return self.rng.randint(0, min(request.known + 2, LONGEST))

    def _row(
        self,
        facts: Facts,
        slot: int,
        end: End = End.NONE,
        computed: int = UNCHANGED,
        text: str = "",
        commit: int = UNCHANGED,
    ) -> None:
        request = self.requests[slot]
        self.reported.add(slot)
        facts.slot.append(slot)
        facts.computed.append(computed)
        facts.appended.append(len(text))
        if self.hashes:
            made = self._new_hashes(request)
            facts.num_hashes.append(len(made))
            facts.hashes += b"".join(made)
        else:
            facts.tokens += tokens(text.lower())
        facts.commit.append(commit)
        facts.end.append(int(end))
        facts.fence.append(self._fence() if end in (End.FREE, End.PREEMPTED) else 0)
        if self.limits_rows:
            facts.release_skipped.append(self.rng.randint(0, LONGEST) if self._chance(20) else UNCHANGED)
        if self.spec.hint_values:
            facts.hint.append(self.rng.randrange(UNCHANGED, self.spec.hint_values))
        request.reached = request.computed
        if commit != UNCHANGED or end not in (End.NONE, End.HELD):
            request.may_hold = False
        if computed != UNCHANGED:
            request.computed = min(request.computed, computed)
        if end is End.FREE:
            del self.requests[slot]
        elif end is End.HELD:
            request.checked = 0 if self.failed else 1
            request.tables = self._tables(slot)
            request.running, request.held, request.held_seq = False, True, self.seq
        elif end is End.PREEMPTED:
            self._ends_stay(slot)

    def _new_hashes(self, request: Request, late: int = 20) -> list[bytes]:
        """Hashes of blocks that are full by now; some are sent later."""
        digests = self.digests[request.script, request.domain]
        size, ahead = self.spec.hash_block_size, self.spec.hash_lookahead_tokens
        complete = max(0, request.known - ahead) // size
        count = max(request.hashed, self.rng.randint(0, complete) if self._chance(late) else complete)
        made, request.hashed = digests[request.hashed : count], count
        return made

    # -- cache, news, look-ups ---------------------------------------------------------------------------------------

    def _cache(self, held: list[int]) -> Cache:
        released = []
        for slot, request in list(self.requests.items()):
            likely = 80 if self._is_rare(slot) else 40
            if slot in held and request.load is None and self._is_launched(request) and self._chance(likely):
                self._read_held(request)
                released.append(slot)
                del self.requests[slot]
            elif slot in held and request.load is not None and self._chance(30):
                released.append(slot)  # the transfer has ended, or is given up
                request.checked = 0
                self._read_held(request)
                self._give_up(request)
                del self.requests[slot]
            elif self._releases(slot, request) and self._release_load(request):
                released.append(slot)
        return Cache(
            failed_steps=self.failed,
            evicted=self._evicted() if self._chance(max(self.evicts, 16 if self._busy_blocks() else 0)) else [],
            released=released,
            reset=self._chance(3 if any(one.running for one in self.requests.values()) else 30),
            loads_over=self._loads_over(),
        )

    def _releases(self, slot: int, request: Request) -> bool:
        loads = request.load is not None and not request.is_held and slot not in self.reported
        return loads and self._chance(5 if request.running and not self._is_rare(slot) else 40)

    def _has_rare_in_flight(self) -> bool:
        """Whether a step in flight did something rare: it is then reported as executed as late as allowed."""
        return False

    def _is_rare(self, _slot: int) -> bool:
        """Whether it did so to a block that the slot has now: the request is then ended or set back more often."""
        return False

    def _evicted(self) -> list[int]:
        """Some block, or one of a request, or those that its next launch writes first."""
        own = [b for slot in self.requests if slot in self.tables for table in self.tables[slot] for b in table if b]
        some = self.rng.randrange(1, self.spec.num_blocks)
        shared = [block for block, count in Counter(own).items() if count > 1]
        if self.repeats and self._chance(80):
            return [self.rng.choice(shared)] if shared else []
        kinds = [[some], own, self._busy_blocks(), self._last_blocks()]
        blocks = self.rng.choice([blocks for blocks in kinds if blocks])
        return blocks if blocks is kinds[-1] else [self.rng.choice(blocks)]

    def _last_blocks(self) -> list[int]:
        """The blocks of the last computed token of each request."""
        last = set[int]()
        for slot, one in self.requests.items():
            for group, table in zip(self.spec.groups, self.tables[slot] if one.running else (), strict=False):
                last.update(table[(one.computed - 1) // group.block_size :][:1])
        return sorted(last - {0})

    def _release_load(self, request: Request) -> bool:
        """The load is over; before it was allowed to start it has failed, and the answer preempts the request."""
        load = request.load
        assert load is not None
        if request.running and load.after <= self.executed_through:
            if not self._may_end(request):
                return False
            self._end_load(request)
        else:
            self._give_up(request)
        return True

    def _give_up(self, request: Request) -> None:
        """The transfer ends where it is."""
        if request.load is not None:
            request.load.given_up, request.checked = True, 0
        request.load = request.tables = None

    def _news(self) -> News:
        news = News()
        for slot in SLOTS:
            if slot in self.requests or not self._chance(self.comes):
                continue
            script, domain, known, limit = self._draw_request()
            self.stays += 1
            self.digests[script, domain] = self.texts.learn(script, domain)
            request = self.requests[slot] = Request((slot, self.stays), script, known, limit, domain)
            news.slot.append(slot)
            news.num_tokens.append(known)
            news.domain.append(domain)
            news.skip_reading.append(int(self._chance(8)))
            news.max_tokens.append(self.rng.choice([0, limit, LONGEST]))
            if self.spec.hint_values:
                news.hint.append(self.rng.randrange(self.spec.hint_values))
            if self.hashes:
                made = self._new_hashes(request)
                news.num_hashes.append(len(made))
                news.hashes += b"".join(made)
            else:
                news.tokens += tokens(script[:known].lower())
        return news

    def _draw_request(self) -> tuple[str, str, int, int]:
        """Text and domain of a new request, its tokens so far and when it ends."""
        script = self._head() + "".join(self.rng.choices("ab", k=LONGEST))
        limit = self.rng.randint(24 if self.decodes else 4, 46)
        domain = OTHER if self._chance(15) else ""
        script = script[:LONGEST].upper() if domain else script[:LONGEST]
        known = self.rng.randint(2, 10) if self.decodes else self.rng.randint(limit // 2, limit - 1)
        if self.repeats and self.digests and self._chance(self.repeats):
            script, domain = self.rng.choice(list(self.digests)[-2:])
            known = self.rng.randint(2, limit - 1)
        return script, domain, known, limit

    def _head(self) -> str:
        return self.rng.choice(HEADS)

    def _peek(self) -> Peek:
        waiting = [slot for slot, request in self.requests.items() if not request.running and not request.is_held]
        return Peek(self._some(waiting) if self._chance(20) else [], with_blocks=self._chance(50))

    # -- run and admit -----------------------------------------------------------------------------------------------

    def _run(self) -> Run:
        slots = [slot for slot, one in self.requests.items() if self._may_run(one)]
        slots = slots if self.decodes else self._some(slots)
        victims = self._some([slot for slot in self.requests if self._is_running(slot)])
        if self.ends_loads_by_rows and self._chance(30):
            victims = slots  # who has tokens, and so no load, loses them in the part
        rare = [slot for slot in self.requests if self._is_running(slot) and self._is_rare(slot)]
        victims = rare + [slot for slot in victims if slot not in rare]
        run = Run(slots, victims=victims)
        run.on_refusal = self.rng.choice([OnRefusal.PREEMPT, OnRefusal.PREEMPT, OnRefusal.SKIP, OnRefusal.STOP])
        for slot in slots:
            request = self.requests[slot]
            if request.load is not None:
                request.load, request.tables, request.may_hold = None, None, True  # over when the row has tokens
            extra, cap = self._amount(request)
            run.extra.append(extra)
            run.cap.append(cap)
            run.lookahead.append(self.rng.choice([0, 0, self.most_drafts]))
            run.flags.append(DELAY * self._chance(10) | self._unaligned())
            run.in_flight.append(self._in_flight(request) + self.rng.choice([0, 3]) if self._chance(15) else -1)
            if self.limits_rows:
                run.reserved.append(self.rng.choice([0, 0, 0, 0, 2]))
                run.flags[-1] |= int(RowFlag.FULL_FIT) * self._chance(10)
            self.luck[slot] = tuple(self._chance(self.accepts) for _ in range(8))
        return run

    def _may_run(self, request: Request) -> bool:
        """Whether the request may run: what it loads is there, and each reported launch has its outcome."""
        if not request.running or request.is_held or self._is_due(request):
            return False
        if request.load is None:
            return True
        if request.load.is_done and request.load.after <= self.executed_through:
            return True
        if not self._may_end(request) or not self._chance(30):
            return False
        self._finish_load(request)
        return True

    def _amount(self, request: Request) -> tuple[int, int]:
        """Drafts and placeholders beyond the known tokens, and the cap."""
        drafts = self.rng.randint(0, self.most_drafts)
        ahead = request.computed - request.known
        if ahead < -1:
            cap = self.rng.choice([1, 4, 6, 100])
            return drafts if self._chance(60 if self.decodes else 20) else 0, cap
        if ahead < 0:
            return drafts, 1 + self.most_drafts
        if not self._chance(60):
            return ahead, 1
        return ahead + 1 + drafts, 1 + self.most_drafts  # a step ahead: the token that is sampled, and drafts

    def _in_flight(self, request: Request) -> int:
        """Tokens whose place is not known for certain."""
        waiting = [row for launch in self.pending for row in launch.rows if row.life == request.life]
        return sum(row.count for row in [*waiting, *request.rows] if isinstance(row, PlannedRow))

    def _admit(self) -> Admit:
        waiting = [slot for slot, request in self.requests.items() if not request.running and not request.is_held]
        admit = Admit(self._some(waiting), on_refusal=self.rng.choice([OnRefusal.SKIP, OnRefusal.SKIP, OnRefusal.STOP]))
        admit.max_running = self.rng.choice([UNLIMITED, UNLIMITED, UNLIMITED, 2, 4])
        admit.only_if_no_preemption = self._chance(15)
        for slot in admit.slot:
            external = self.rng.randint(1, self.most_external) if self._chance(self.loads) else 0
            late = bool(external) and self._chance(50)
            self.asked[slot] = external, late
            self.luck[slot] = tuple(self._chance(self.accepts) for _ in range(8))
            admit.external.append(external)
            drafts = self.rng.randint(0, self.most_drafts)
            admit.extra.append(0 if late else drafts if self.decodes else self.rng.choice([0, 0, drafts]))
            admit.cap.append(self.rng.choice([0, 0, 0, 4]) if late else self.rng.choice([4, 8, 100, 100]))
            admit.flags.append(DELAY if late else self._admit_flags(bool(external)))
            admit.lookahead.append(self.rng.choice([0, 0, self.most_drafts]))
            admit.reserved.append(self.rng.choice([0, 0, 0, 2]))
            admit.watermark.append(int(self.rng.choice([Watermark.AUTO, Watermark.ALWAYS, Watermark.NEVER])))
            admit.expected_hit.append(self.rng.choice([ANY_HIT, ANY_HIT, ANY_HIT, ANY_HIT, 0, 4, 8]))
            if self.limits_rows:
                admit.hit_limit.append(self.rng.choice([UNLIMITED, UNLIMITED, UNLIMITED, self.rng.randint(0, LONGEST)]))
                admit.min_new.append(self.rng.choice([1, 1, 1, 0, 3]))
                admit.skip_zero_groups.append(self.rng.choice([ALL_GROUPS, ALL_GROUPS, self.rng.randint(0, 7)]))
                admit.single_group_hit.append(self.rng.choice([UNLIMITED, UNLIMITED, self.rng.randint(0, LONGEST)]))
                if not admit.min_new[-1] and self._chance(50):
                    admit.cap[-1] = 0  # the row only adopts
                if external and self._chance(80 if self.decodes else 50):  # what it generated is loaded too
                    admit.hit_limit[-1] = 0
                    admit.external[-1] = self.rng.randint(external, max(external, self.requests[slot].known))
                    self.asked[slot] = admit.external[-1], late
        return admit

    def _admit_flags(self, loads: bool) -> int:
        flags = self._unaligned()
        flags |= DELAY * (self._chance(5) and not loads)
        flags |= int(RowFlag.FULL_FIT) * self._chance(10)
        return flags | int(RowFlag.WHOLE) * self._chance(10)


def _tail(run: Run, rows: int) -> Run:
    """Take the last rows from a section; the rest stays in it."""
    names = ("slot", "extra", "cap", "lookahead", "flags", "in_flight", "reserved")
    columns = {name: getattr(run, name) for name in names}
    taken = {name: column[rows:] for name, column in columns.items()}
    for column in columns.values():
        del column[rows:]
    return Run(**taken, victims=run.victims, on_refusal=run.on_refusal)


__all__ = ["MOST_IN_FLIGHT", "RandomScheduler", "Request"]
