"""The law of the step: a step sent whole has the results of the same step sent with one row per part.

A part runs facts, cache, news, run, admit and peek, each in row order; the effects of a row are complete before the
next row. An engine that sends rows keeps the budgets itself: what a victim had been granted in this step comes back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from kvplane.base.groups import AlignSpec, GroupSpec
from kvplane.base.step import (
    UNCHANGED,
    UNLIMITED,
    Admit,
    AdmitStatus,
    Budget,
    Cache,
    End,
    Facts,
    News,
    OnRefusal,
    Part,
    PartResult,
    Peek,
    RowFlag,
    Run,
    Step,
)
from kvplane_core.face import inspect
from kvplane_core.face.state import digest as state_digest
from kvplane_core.spec.replica import Replica
from tests.core.builders import (
    REFERENCE,
    SAFE,
    chunked,
    full,
    most_drafts,
    new_replica,
    replica_spec,
    state,
    tokens,
    window,
)
from tests.twins import weakened

MIXES: dict[str, tuple[list[GroupSpec], dict[str, Any]]] = {
    "full": ([full()], {}),
    "window and full": ([window(6), full()], {"retention_interval": 0}),
    "state and full": ([state(), full()], {"align": AlignSpec(4, 4096)}),
    "hits inside blocks": (
        [state(8), full(8)],
        {"hash_block_size": 4, "partial_hits": True, "align": AlignSpec(8, 4096, stop_at_tail=True)},
    ),
    "chunks, drafts": ([chunked(8), full(lookup_class=5), state(speculative_blocks=1)], {}),
}
SLOTS = range(5)


@dataclass
class Outcome:
    """The results of a step, in either form."""

    granted: dict[int, int] = field(default_factory=dict)
    new: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    preempted: list[int] = field(default_factory=list)
    admitted: dict[int, tuple[int, ...]] = field(default_factory=dict)
    tables: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    peeked: list[tuple[int, int]] = field(default_factory=list)
    hashes: list[tuple[int, bytes]] = field(default_factory=list)
    events: list[object] = field(default_factory=list)
    stamps: dict[int, int] = field(default_factory=dict)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    zeroes: list[tuple[int, int]] = field(default_factory=list)
    reset: bool = False
    free: int = 0

    def take(self, part: Part, result: PartResult) -> None:
        """Add the answer to one part. A preempted request keeps nothing of what this step granted it."""
        for slot in result.preempted:
            self.granted.pop(slot, None)
            self.new.pop(slot, None)
        self.preempted += result.preempted
        slots = [*part.run.slot, *part.admit.slot]
        self.granted |= {slot: count for slot, count in zip(part.run.slot, result.granted, strict=False) if count}
        self.new |= {slots[row]: blocks for row, blocks in result.new_blocks.by_row().items()}
        self.tables |= {slots[row]: blocks for row, blocks in result.tables.by_row().items()}
        load_after = result.admit_load_after or [0] * len(part.admit.slot)
        answer = result.admit_status, result.admit_hit, result.admit_granted, result.admit_single_group_hit
        columns = (*answer, load_after)
        self.admitted |= dict(zip(part.admit.slot, zip(*columns, strict=True), strict=False))
        self.peeked += zip(result.peek_hit, result.peek_single_group_hit, strict=True)
        self.hashes += zip(result.num_hashes, result.last_hash, strict=True)
        self.events += result.events
        orders = result.orders
        self.stamps |= dict(zip(orders.stamp_block, orders.stamp, strict=True))
        self.copies += zip(orders.copy_group, orders.copy_src, orders.copy_dst, strict=True)
        self.zeroes += zip(orders.zero_group, orders.zero_block, strict=True)
        self.reset |= result.reset_done
        self.free = result.free_blocks


class Sender:
    """Sends the steps of one engine to one replica, in its way."""

    def __init__(self, spec, by_rows):
        self.replica = new_replica(spec)
        self.by_rows = by_rows
        self.seq = 0

    def send(self, part: Part, executed: int) -> Outcome:
        self.seq += 1
        outcome = Outcome()
        if self.by_rows:
            self._send_rows(part, executed, outcome)
        else:
            (result,) = self.replica.apply(Step(0, self.seq, [part], executed_through=executed)).parts
            outcome.take(part, result)
        inspect.check(self.replica)
        return outcome

    def _send_rows(self, part: Part, executed: int, outcome: Outcome) -> None:
        rows, left = list(opening_rows(part)), part.budget.tokens
        for number, row in enumerate([*rows, *closing_rows(part), Part()]):
            row.budget = Budget(tokens=left)
            last = row == Part(budget=row.budget)
            before = sum(outcome.granted.values())
            message = Step(0, self.seq, [row], number, last, executed)
            outcome.take(row, self.replica.apply(message).parts[0])
            if left != UNLIMITED:
                admitted = sum(outcome.admitted[slot][2] for slot in row.admit.slot)
                left -= sum(outcome.granted.values()) - before + admitted


def opening_rows(part):
    """Facts, cache and news, a part per row."""
    facts, news = part.facts, part.news
    at = 0
    for row, slot in enumerate(facts.slot):
        count = facts.appended[row]
        taken = facts.tokens[at : at + count]
        yield Part(
            facts=Facts([slot], [facts.computed[row]], [count], taken, commit=[facts.commit[row]], end=[facts.end[row]])
        )
        at += count
    if part.cache != Cache():
        yield Part(cache=part.cache)
    at = 0
    for row, slot in enumerate(news.slot):
        count = news.num_tokens[row]
        yield Part(news=News([slot], [count], news.tokens[at : at + count]))
        at += count


def closing_rows(part):
    """Run, admit and peek, a part per row."""
    run, admit = part.run, part.admit
    victims = run.victims or run.slot[::-1]
    for row, slot in enumerate(run.slot):
        yield Part(
            run=Run(
                [slot],
                [run.extra[row]],
                [run.cap[row]],
                flags=[run.flags[row]],
                victims=victims,
                on_refusal=run.on_refusal,
            )
        )
    for row, slot in enumerate(admit.slot):
        external = admit.external[row : row + 1]
        one = Admit([slot], cap=[admit.cap[row]], external=external, flags=[admit.flags[row]])
        one.on_refusal = OnRefusal.SKIP
        yield Part(admit=one)
    for slot in part.peek.slot:
        yield Part(peek=Peek([slot]))


# -- steps at random ---------------------------------------------------------------------------------------------------

CAPS = (1, 4, 6, 100)
FLAGS = (0, int(RowFlag.UNALIGNED))
DELAY = int(RowFlag.DELAY_CACHING)
HEADS = ("", "aaaa", "aaaaaaaa", "aaaaaaaabbbb")


@dataclass
class Writer:
    """Writes steps that are valid for what the replica knows.

    Drawn by a seed: a load that ends by a row whose request is a victim later in its part is five draws deep.
    """

    rng: Random
    replica: Replica
    executed: int  # what the step says to be executed

    def some(self, slots):
        """Some of them in any order, or all: rows that compete make refusals."""
        chosen = self.rng.sample(sorted(slots), len(slots))
        return chosen if self.rng.random() < 0.4 else chosen[: self.rng.randint(0, len(chosen))]

    def text(self, fewest, most):
        return "".join(self.rng.choices("ab", k=self.rng.randint(fewest, most)))

    def step(self) -> Part:
        requests, rng = self.replica.requests, self.rng
        live = {slot for slot in SLOTS if requests.is_live(slot)}
        held = {slot for slot in live if requests.held[slot]}
        facts, ended = self.facts(self.some(live - held))
        over = {slot for row, slot in enumerate(facts.slot) if facts.commit[row] != UNCHANGED or facts.end[row]}
        may_end = self.some(held | requests.loading - over)
        released = [slot for slot in may_end if slot in held or rng.random() < 0.2]
        live -= ended | set(released) & held
        news = self.news(self.some(set(SLOTS) - live))
        live |= set(news.slot)
        waits = {slot for slot in requests.loading - over - set(released) if self.waits(slot)}
        return Part(
            facts=facts,
            cache=Cache(evicted=[rng.randint(1, 7)] if rng.random() < 0.3 else [], released=released),
            news=news,
            run=self.run(self.some(live - waits), live),
            admit=self.admit(self.some(live)),
            peek=Peek(self.some(live)),
            budget=Budget(tokens=rng.choice([UNLIMITED, UNLIMITED, 3, 9])),
        )

    def waits(self, slot):
        """Whether a load into the pages of a running request cannot have started."""
        requests = self.replica.requests
        return slot in requests.loading and requests.running[slot] and requests.load_after[slot] > self.executed

    def facts(self, slots):
        requests, rng = self.replica.requests, self.rng
        facts = Facts(slots)
        for slot in slots:
            known, computed = requests.num_tokens[slot], requests.computed[slot]
            text = self.text(0, 5) if known < 60 else ""
            commit = UNCHANGED if self.waits(slot) else rng.choice([*[UNCHANGED] * 4, min(computed, known)])
            facts.computed.append(min(computed, known) if requests.running[slot] else UNCHANGED)
            facts.appended.append(len(text))
            facts.tokens += tokens(text)
            facts.commit.append(commit)
            facts.end.append(int(rng.choice([*[End.NONE] * 15, End.FREE, End.PREEMPTED, End.HELD])))
        ended = {slot for slot, end in zip(slots, facts.end, strict=True) if end == End.FREE}
        return facts, ended

    def news(self, slots):
        texts = [self.rng.choice(HEADS) + self.text(1, 9) for _ in slots]
        return News(slots, [len(text) for text in texts], [token for text in texts for token in tokens(text)])

    def run(self, slots, live):
        rng, count = self.rng, len(slots)
        return Run(
            slots,
            extra=[rng.randint(0, most_drafts(self.replica.spec)) for _ in slots],
            cap=[rng.choice(CAPS) for _ in slots],
            flags=[rng.choice(FLAGS)] * count,
            victims=rng.choice([self.some(live), slots]),  # in their own order: who has tokens loses them
            on_refusal=rng.choice([OnRefusal.PREEMPT, OnRefusal.PREEMPT, OnRefusal.SKIP]),
        )

    def admit(self, slots):
        rng, flags = self.rng, self.rng.choice(FLAGS)
        loads = self.replica.spec.commit is SAFE  # the reference counts one block too few for states behind a load
        admit = Admit(slots, on_refusal=OnRefusal.SKIP)
        for _ in slots:
            external = rng.choice([0, 4, 7]) if loads else 0
            late = external > 0 and rng.random() < 0.7
            admit.external.append(external)
            admit.cap.append(rng.choice([0, *CAPS]) if late else rng.choice(CAPS))
            admit.flags.append(flags | DELAY * late)
        return admit


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("seeds", [range(at, at + 12) for at in (0, 12)], ids=lambda seeds: f"from {seeds.start}")
def test_a_whole_step_equals_the_same_step_with_one_row_per_part(mix, seeds):
    for seed in seeds:
        compare(mix, seed)


def compare_all(seeds):
    for seed in seeds:
        for mix in MIXES:
            compare(mix, seed)


def compare(mix, seed):
    """Some steps of one engine, sent in both ways."""
    (groups, changes), rng = MIXES[mix], Random(f"{mix} {seed}")
    spec = replica_spec(*groups, num_blocks=rng.randint(8, 24), commit=rng.choice([SAFE, SAFE, REFERENCE]), **changes)
    whole, rows = Sender(spec, by_rows=False), Sender(spec, by_rows=True)
    executed = 0
    for number in range(rng.randint(5, 20)):
        executed = rng.randint(executed, number)
        part = Writer(rng, whole.replica, executed).step()
        place = f"{mix!r}, {seed}, step {number + 1}"
        assert whole.send(part, executed) == rows.send(part, executed), place
        assert state_digest(whole.replica) == state_digest(rows.replica), place
        assert whole.replica.counters == rows.replica.counters, place


def test_a_load_that_its_row_does_not_end_is_caught():
    with weakened("a load outlives its row"), pytest.raises(AssertionError, match="step"):
        compare_all(range(50))


def test_tokens_granted_to_a_victim_are_withdrawn_in_both_forms_of_a_step():
    """Slot 0 is given a token and a block, and loses them to slot 1 within the step."""
    whole, rows = [Sender(replica_spec(full(), num_blocks=5), by_rows) for by_rows in (False, True)]
    for sender in (whole, rows):
        sender.send(
            Part(news=News([0, 1], [4, 8], tokens("a" * 4 + "b" * 8)), admit=Admit([0, 1], cap=[9] * 2, flags=[0] * 2)),
            0,
        )
        grown = Facts([0, 1], [UNCHANGED] * 2, [1, 1], tokens("cc"), commit=[UNCHANGED] * 2, end=[0, 0])
        run = Run([0, 1], [0, 0], [9, 9], flags=[0, 0], victims=[0])
        outcome = sender.send(Part(facts=grown, run=run), 1)
        assert (outcome.granted, outcome.preempted) == ({1: 1}, [0])
        assert sender.replica.counters.granted_tokens == 13
    assert state_digest(whole.replica) == state_digest(rows.replica)


def test_copies_have_the_order_of_rows_in_both_forms_of_a_step():
    """Two rows with two groups each: the second row's copies follow all of the first row's."""
    groups, changes = MIXES["hits inside blocks"]
    for by_rows in (False, True):
        sender = Sender(replica_spec(*groups, **changes), by_rows)
        sender.send(Part(news=News([0], [5], tokens("aaaaa")), admit=Admit([0], cap=[100], flags=[0])), 0)
        both = News([1, 2], [5, 5], tokens("aaaaa" * 2))
        outcome = sender.send(Part(news=both, admit=Admit([1, 2], cap=[100] * 2, flags=[0, 0])), 1)
        assert [hit for _, hit, *_ in outcome.admitted.values()] == [4, 4]
        assert [group for group, _, _ in outcome.copies] == [0, 1, 0, 1]


# -- the order of the sections, one sentence each ----------------------------------------------------------------------


def test_an_end_frees_blocks_for_an_admission_in_the_same_step():
    sender = Sender(replica_spec(full(), num_blocks=4), by_rows=False)
    sender.send(Part(news=News([0, 1], [9, 9], tokens("a" * 9 + "b" * 9)), admit=Admit([0])), 0)
    ended = Facts([0], [UNCHANGED], [0], commit=[UNCHANGED], end=[int(End.FREE)])
    assert sender.send(Part(facts=ended, admit=Admit([1])), 1).admitted[1][0] == AdmitStatus.GRANTED


def test_a_slot_may_be_freed_and_reused_in_one_step():
    sender = Sender(replica_spec(full()), by_rows=False)
    sender.send(Part(news=News([0], [9], tokens("a" * 9)), admit=Admit([0])), 0)
    ended = Facts([0], end=[int(End.FREE)])
    again = Part(facts=ended, news=News([0], [6], tokens("a" * 6)), admit=Admit([0]))
    assert sender.send(again, 1).admitted[0] == (AdmitStatus.GRANTED, 4, 2, 0, 0)


def test_the_run_section_is_applied_before_the_admit_section():
    sender = Sender(replica_spec(full(), num_blocks=4), by_rows=False)
    sender.send(Part(news=News([0, 1], [8, 4], tokens("a" * 8 + "b" * 4)), admit=Admit([0])), 0)
    one_more = Facts([0], appended=[1], tokens=tokens("a"))
    outcome = sender.send(Part(facts=one_more, run=Run([0]), admit=Admit([1])), 1)
    assert outcome.granted == {0: 1}
    assert outcome.admitted[1][0] == AdmitStatus.REFUSED


def test_a_peek_finds_keys_registered_in_the_same_step():
    sender = Sender(replica_spec(full()), by_rows=False)
    news = News([0, 1], [9, 9], tokens("a" * 18))
    assert sender.send(Part(news=news, admit=Admit([0]), peek=Peek([1])), 0).peeked == [(8, 0)]


def test_a_state_committed_by_a_fact_can_be_hit_in_the_same_step():
    """Under the reference's rule a state of this step must wait for the next; one that a fact commits need not, whether
    or not the step's first part has passed.
    """
    for by_rows in (False, True):
        spec = replica_spec(state(), full(), commit=REFERENCE)
        sender = Sender(spec, by_rows)
        delayed = Admit([1], cap=[4], flags=[int(RowFlag.DELAY_CACHING)])
        sender.send(
            Part(news=News([0, 1], [3, 9], tokens("b" * 3 + "a" * 9)), admit=Admit([0], cap=[100], flags=[0])), 0
        )
        sender.replica.apply(Step(0, 2, [Part(admit=delayed)], executed_through=1))
        sender.seq = 2
        facts = Facts([0, 1], [UNCHANGED] * 2, [0, 0], commit=[UNCHANGED, 4], end=[0, 0])
        outcome = sender.send(
            Part(facts=facts, news=News([2], [9], tokens("a" * 9)), admit=Admit([2], cap=[100], flags=[0])), 2
        )
        assert outcome.admitted[2][:2] == (AdmitStatus.GRANTED, 4)
