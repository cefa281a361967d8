"""What an engine reports to a service that decides: grants that were not used never become hits."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from kvplane.base.groups import GroupKind, GroupSpec, HashAlgorithm, ReplicaSpec
from kvplane.base.step import Admit, AdmitStatus, End, Orders, Run, Step
from kvplane_core.spec.replica import Replica
from kvplane_vllm.launch import PageOrders
from kvplane_vllm.remote.books import Books

BLOCK = 4


def request(name, num_tokens, first=0):
    """A request of vLLM, with hashes of its tokens; requests with the same `first` share all blocks."""
    hashes = [bytes([first, number]) * 16 for number in range(num_tokens // BLOCK)]
    return SimpleNamespace(
        request_id=name,
        num_tokens=num_tokens,
        num_prompt_tokens=num_tokens,
        num_computed_tokens=0,
        max_tokens=8,
        pooling_params=None,
        block_hashes=hashes,
        skip_reading_prefix_cache=False,
    )


class Engine:
    """The books of an engine, and the service's core."""

    def __init__(self, num_blocks=40):
        group = GroupSpec(GroupKind.FULL_ATTENTION, BLOCK)
        self.spec = ReplicaSpec(
            groups=(group,),
            num_blocks=num_blocks,
            max_model_len=128,
            hash_block_size=BLOCK,
            scheduler_block_size=BLOCK,
            max_in_flight_tokens=128,
            hash_algorithm=HashAlgorithm.SHA256,
            hash_seed="vllm",
        )
        self.replica, self.books, self.seq, self.done, self.sent = Replica(self.spec), Books(self.spec), 0, 0, []

    def send(self, run=(), admit=(), cap=None):
        """Send a program of these requests, and take the answer."""
        books = self.books
        rows, program = books.begin_facts()
        for one in run:
            books.report(books.entries[one.request_id], rows, program, one.num_computed_tokens)
        new = [one for one in admit if one.request_id not in books.entries]
        books.end_facts(rows, program, new)
        program.run = [books.entries[one.request_id] for one in run]
        program.admit = [books.entries[one.request_id] for one in admit]
        program.rows.run = Run([one.slot for one in program.run], cap=[cap] * len(run) if cap else [])
        program.rows.admit = Admit([one.slot for one in program.admit], cap=[cap] * len(admit) if cap else [])
        self.seq += 1
        step = Step(self.replica.coordinator.pool.epoch, self.seq, program.parts())
        step.executed_through = books.executed(self.done)
        self.sent.append(step)
        answer = self.replica.apply(step)
        return books.take(program, answer)

    def use(self, *requests):
        """Launch what was granted to these requests, and finish the launch."""
        books = self.books
        for one in requests:
            books.take_new(books.entries[one.request_id])
            admitted = books.admitted.pop(one.request_id, None)
            granted = books.grants.pop(one.request_id, 0)
            one.num_computed_tokens += granted if admitted is None else admitted.entry.hit + admitted.num_tokens
        books.drop_unused()
        self.done = self.seq

    def hit(self, one):
        """The hit of a request that the service does not know yet, in a step that reports no execution."""
        self.send(admit=[one])
        found = self.books.admitted[one.request_id].entry.hit
        self.use()
        return found


@pytest.fixture
def engine():
    return Engine()


def test_an_unused_admission_is_no_hit(engine):
    engine.send(admit=[request("a", 20)])
    assert engine.books.admitted["a"].num_tokens == 20
    engine.use()
    assert engine.hit(request("b", 20)) == 0
    assert engine.sent[-1].parts[0].facts.end == [End.PREEMPTED]
    assert engine.sent[-1].executed_through == 0, "the step of the unused grant is reported one message later"
    engine.send()
    assert engine.sent[-1].executed_through == 1
    assert engine.replica.coordinator.pool.count_keys() == 0


def test_an_unused_chunk_is_no_hit_and_is_granted_again(engine):
    a = request("a", 24)
    engine.send(admit=[a], cap=8)
    engine.use(a)
    engine.send(run=[a], cap=8)
    assert engine.books.grants == {"a": 8}
    engine.use()
    assert a.num_computed_tokens == 8
    engine.send(run=[a], cap=4)
    assert engine.sent[-1].executed_through == 1
    assert engine.books.grants == {"a": 4}
    engine.use(a)
    assert engine.hit(request("b", 24)) == 12


def test_an_unused_chunk_that_is_not_taken_back_is_noticed(engine, monkeypatch):
    """This fault shows in no token: requests that vLLM aborts end, and those that run use their grants."""
    report = Books.report

    def not_lowered(self, entry, rows, program, computed):
        report(self, entry, rows, program, max(computed, entry.computed))

    monkeypatch.setattr(Books, "report", not_lowered)
    with pytest.raises(AssertionError):
        test_an_unused_chunk_is_no_hit_and_is_granted_again(engine)


def test_a_chunk_that_is_used_in_part_is_a_hit_in_part(engine):
    a = request("a", 24)
    engine.send(admit=[a])
    entry = engine.books.admitted["a"].entry
    engine.books.evict_unwritten(entry, 10)
    assert engine.books.in_doubt
    engine.use(a)
    a.num_computed_tokens = 10
    assert engine.hit(request("b", 24)) == 8
    engine.send(run=[a])
    assert engine.books.grants == {"a": 14}


def test_a_request_that_ends_with_an_unused_grant_leaves_only_what_was_written(engine):
    a = request("a", 24)
    engine.send(admit=[a], cap=8)
    engine.use(a)
    engine.send(run=[a])
    engine.books.free(a, End.FREE)
    assert engine.books.in_doubt
    engine.use()
    assert engine.hit(request("b", 24)) == 8


def test_a_request_that_ends_before_its_answer_counts_as_unused(engine):
    a = request("a", 24)
    engine.send(admit=[a], cap=8)
    engine.use(a)
    books = engine.books
    rows, program = books.begin_facts()
    books.end_facts(rows, program, [])
    entry = books.entries["a"]
    program.run, program.rows.run = [entry], Run([entry.slot])
    books.free(a, End.FREE)
    engine.seq += 1
    epoch = engine.replica.coordinator.pool.epoch
    answer = engine.replica.apply(Step(epoch, engine.seq, program.parts(), executed_through=1))
    assert books.take(program, answer) == 16
    assert not books.grants
    assert books.num_unused == 1
    assert engine.hit(request("b", 24)) == 8


def test_victims_are_those_of_the_service_and_lose_their_tables():
    engine = Engine(num_blocks=9)
    a, b = request("a", 16), request("b", 16, first=1)
    for one in (a, b):
        engine.send(admit=[one])
        engine.use(one)
    a.num_tokens += 1
    b.num_tokens += 1
    engine.send(run=[a, b])
    books = engine.books
    assert [entry.request for entry in books.victims] == [b]
    assert books.grants == {"a": 1}
    books.free(b, End.PREEMPTED)
    assert not books.victims
    assert books.entries["b"].tables == [[]]
    engine.use(a)
    engine.send(run=[a], admit=[b])
    assert engine.sent[-1].parts[0].facts.end == [], "the service has preempted it"
    assert books.refused["b"][1] == AdmitStatus.REFUSED


def test_a_new_session_knows_nothing():
    engine = Engine()
    a, b = request("a", 16), request("b", 16, first=1)
    engine.send(admit=[a, b])
    engine.use(a, b)
    engine.books.forget([a, b])
    assert engine.books.lost == [b, a], "the last one returns to the queue first"
    assert not engine.books.entries
    assert engine.books.begin_facts()[1].is_empty


@pytest.mark.parametrize("is_answered", [True, False])
def test_removals_without_an_answer_are_sent_again_in_a_new_session(is_answered):
    engine, books = Engine(), Engine().books
    books.evict([3])
    books.reset()
    if is_answered:
        engine.books = books
        engine.send()
    else:
        books.end_facts(*books.begin_facts(), [])  # the message, or its answer, is lost
    books.evict([5])
    books.forget([])
    rows, program = books.begin_facts()
    books.end_facts(rows, program, [])
    cache = program.parts()[0].cache
    assert (cache.evicted, cache.reset) == (([5], False) if is_answered else ([3, 5], True))


def test_copies_without_a_launch_are_taken_back_with_the_keys_of_their_targets(engine):
    books = engine.books
    books.page_orders.add(Orders(copy_src=[3], copy_dst=[6], copy_group=[0]))
    books.give_up_copies()
    assert books.page_orders.take_copies() == []
    assert books.in_doubt
    engine.send()
    assert engine.sent[-1].parts[0].cache.evicted == [6]


def test_requests_hold_blocks_until_they_leave(engine):
    a = request("a", 16)
    assert not engine.books.is_held
    engine.send(admit=[a])
    engine.use(a)
    assert engine.books.is_held
    engine.books.free(a, End.FREE)
    assert not engine.books.is_held


def test_the_hold_begins_at_the_first_grant_that_was_not_used(engine):
    """Two answers granted tokens to one request, and no launch used them: the first one is not executed either."""
    a = request("a", 24)
    engine.send(admit=[a], cap=8)
    engine.use(a)
    for _ in range(2):
        books = engine.books
        rows, program = books.begin_facts()
        books.end_facts(rows, program, [])
        entry = books.entries["a"]
        program.run, program.rows.run = [entry], Run([entry.slot], cap=[4])
        engine.seq += 1
        step = Step(engine.replica.coordinator.pool.epoch, engine.seq, program.parts(), executed_through=1)
        books.take(program, engine.replica.apply(step))
    engine.use()
    engine.send(run=[a])
    assert engine.sent[-1].executed_through == 1


def test_orders_of_several_steps_end_as_if_carried_out_one_after_the_other():
    """A launch zeroes first and reads all sources before it writes a target, so a copy of a copy reads its origin."""
    rng = random.Random(1)
    for _ in range(300):
        wanted = {block: f"content {block}" for block in range(12)}
        merged, read = PageOrders(), set[int]()
        pages = dict(wanted)
        for _ in range(rng.randint(1, 4)):
            orders = Orders()
            for block in rng.sample(sorted(set(wanted) - read), 2):
                orders.zero_block.append(block)
                orders.zero_group.append(0)
                wanted[block] = "zero"
            for _ in range(rng.randint(0, 2)):
                source, target = rng.sample(range(12), 2)
                orders.copy_src.append(source)
                orders.copy_dst.append(target)
                orders.copy_group.append(0)
                wanted[target] = wanted[source]
                read |= {source, target}  # a copy holds its blocks until a launch has carried it out
            merged.add(orders)
        pages |= dict.fromkeys(merged.take_zeroes(), "zero")
        pages |= {target: pages[source] for source, target in merged.take_copies()}
        assert pages == wanted


def test_a_page_that_is_zeroed_before_its_copy_is_noticed():
    orders = PageOrders()
    orders.add(Orders(copy_src=[3], copy_dst=[6], copy_group=[0]))
    with pytest.raises(AssertionError, match="zeroed before a launch has copied"):
        orders.add(Orders(zero_block=[3], zero_group=[0]))
