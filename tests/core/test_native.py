"""The compiled core answers as the specification does: equal results, errors and state after each step."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from hashlib import sha256
from random import Random
from typing import TYPE_CHECKING

import pytest

import native_build
from kvplane.base import compiled
from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane.base.groups import AlignSpec, EvictionPolicy, MambaMode
from kvplane.base.step import (
    Admit,
    AdmitStatus,
    Budget,
    Cache,
    End,
    Facts,
    News,
    Part,
    Resume,
    RowFlag,
    Run,
    Step,
)
from kvplane.session.rows import AdmitRow, NewsRow, PeekRow, part_of
from kvplane_core import cpp
from kvplane_core.face import loader
from kvplane_core.face.entries import Entries, KeyRun
from kvplane_core.face.state import digest, export_state
from kvplane_core.spec.hazard import LEAST_REMEMBERED
from kvplane_core.spec.loading import load_state
from kvplane_core.spec.replica import Replica
from tests.core.builders import (
    REFUSED,
    Engine,
    chunked,
    fake_digest,
    full,
    new_replica,
    replica_spec,
    ring,
    state,
    window,
)
from tests.core.compared import ComparedCores, CoresDiffer
from tests.core.spec_campaign import played
from tests.core.spec_draws import draw_spec
from tests.core.test_split import split_spec, unused_pools

native = pytest.importorskip(
    "kvplane_core.face.native",
    reason="the core is not compiled: install g++ and install kvplane again",
    exc_type=ImportError,
)
if TYPE_CHECKING:
    from kvplane_core.face.native import NativeReplica
else:
    NativeReplica = native.NativeReplica


def test_the_library_is_compiled_from_the_sources_of_this_tree():
    assert native_build.digest_of_sources(native_build.CORE) == native.SOURCES, "run `make`: the library is stale"


def test_lookups_with_arguments_that_no_caller_validated_are_refused():
    replica = native.NativeReplica(replica_spec(full()))
    with pytest.raises(AssertionError, match="more than 32 bytes"):
        replica.lookup([bytes(64)], "", 100)
    for slot in (-1, 1 << 14):
        with pytest.raises(InvalidArgument, match="has no request"):
            replica.peek_slot(slot)


def test_chunks_that_end_inside_a_block():
    engine = Engine(chunked(6), full(lookup_class=5))
    engine.step(Part(news=News([0], [5], [97] * 5, max_tokens=[40]), admit=Admit([0]), budget=Budget(100)))
    for _ in range(20):
        engine.step(Part(facts=Facts([0], appended=[1], tokens=[97]), run=Run([0]), budget=Budget(100)))


def test_hits_that_end_before_what_is_looked_for():
    """In an earlier chunk that no block divides, before a block that is left out, behind less than is retained."""
    for groups, changes in (
        ((chunked(6),), {}),
        ((window(1000, drops_last_block=True),), {"scheduler_block_size": 8, "hash_block_size": 4}),
        ((full(), window(5, extra_retained_tokens=6)), {}),
    ):
        engine = Engine(*groups, **changes)
        blocks = engine.serve(0, "a" * 21).table[0]
        for number in (None, 4, 3):
            engine.cache(evicted=[] if number is None else [blocks[number]])
            hit = engine.admit(1, "a" * 21).hit
            engine.step(Part(facts=Facts([1], computed=[hit])))
            engine.end(1)


def test_a_limit_where_two_windows_leave_blocks_out():
    engine = Engine(*[window(size, 8, drops_last_block=True, lookup_class=0) for size in (7, 13)])
    tables = engine.serve(0, "a" * 57).table
    engine.cache(evicted=[*(tables[0][at] for at in (0, 3, 6)), *(tables[1][at] for at in (0, 4))])
    assert engine.admit(1, "a" * 57, hit_limit=[24]).hit == 24


def test_a_ring_without_room():
    engine = Engine(full(), ring(), num_blocks=3)
    news = News([0], [8], [97] * 8)
    (result,) = engine.step(Part(news=news, admit=Admit([0]), budget=Budget(100)))
    assert result.admit_status != [AdmitStatus.GRANTED]


def test_states_of_drafts_without_room():
    states = state(mamba_mode=MambaMode.NONE, speculative_blocks=1)
    engine = Engine(states, full(), num_blocks=10, enable_caching=False)
    news = News([0, 1], [8, 8], [97] * 16)
    (result,) = engine.step(Part(news=news, admit=Admit([0, 1]), budget=Budget(100)))
    assert [one == AdmitStatus.GRANTED for one in result.admit_status] == [True, False]


def test_a_victim_whose_positions_another_row_needs():
    engine = Engine(full(), num_blocks=5)
    news = News([0, 1, 2], [5, 4, 1], [97] * 10)
    engine.step(Part(news=news, admit=Admit([0, 1, 2]), budget=Budget(100)))
    facts = Facts([0, 1, 2], appended=[1, 1, 3], tokens=[97] * 5)
    (result,) = engine.step(Part(facts=facts, run=Run([0, 1, 2], victims=[0]), budget=Budget(100, 8, 2)))
    assert (result.preempted, result.granted) == ([0], [0, 1, 3])


def test_eviction_of_the_null_block():
    with pytest.raises(InvalidArgument) as caught:
        Engine(full()).step(Part(cache=Cache(evicted=[0])))
    assert caught.value.field.startswith("parts[0].cache.evicted")


def test_a_load_that_left_blocks_out():
    engine = Engine(full(zero_new_blocks=True))
    admit = Admit([0], external=[8], cap=[0], flags=[int(RowFlag.DELAY_CACHING)])
    engine.step(Part(news=News([0], [12], [97] * 12), admit=admit, budget=Budget(100)))
    (result,) = engine.step(Part(facts=Facts([0], computed=[4])))
    assert result.orders.zero_block


def test_a_shared_block_whose_last_user_released_it_first():
    """A load waits for the launches of both users, though the one that released the block last ran before the other."""
    engine = Engine(full(), num_blocks=7)
    engine.admit(0, "aaaabbbb")
    engine.executed = 1
    assert engine.admit(1, "aaaacccc").result.admit_hit == [4]
    engine.run(0, text="x")  # in step 3
    engine.end(0)
    engine.end(1)
    engine.admit(2, "e" * 20)  # leaves the shared block
    loaded = engine.admit(3, "zzzzy", external=4, cap=0, flags=RowFlag.DELAY_CACHING)
    assert loaded.result.admit_load_after == [3]


def test_turns_of_chats():
    """A prompt that another one continues, one that two leave, and one that is repeated."""
    align = AlignSpec(8, 4096, stop_at_tail=True)
    changes = {"hash_block_size": 2, "partial_hits": True, "align": align, "eviction": EvictionPolicy.TURN_TAIL}
    engine = Engine(full(8), state(8), num_blocks=60, **changes)
    for prompt in ("aaaabb?", "aaaabbccccdd?", "zzzzyy?", "zzzzyyxxxxxx?", "zzzzyywwwwww?", "ssss?", "ssss?", "ssss?"):
        engine.serve(0, prompt)
    assert engine.replica.counters.hit_tokens == 3 * 6 + 2 * 4
    for letter in "bcdefghijklmn":
        engine.serve(0, letter * 40 + "?")


def test_victims_by_what_is_learnt():
    changes = {"eviction": EvictionPolicy.HAZARD, "hint_values": 3}
    engine, rng = Engine(full(), window(6, lookup_class=1), num_blocks=60, **changes), Random(5)
    learner = engine.pool.free.learner
    learner.leads, learner._gain = True, (1 << 30) - 1
    for _ in range(150):
        document = rng.choice("defghijkl") * rng.choice((4, 12, 30))
        engine.serve(0, rng.choice("abc") * rng.choice((4, 8)) + document + "?")
    assert learner.leads
    assert len(learner._hazards.names) >= 9
    assert engine.replica.counters.hit_tokens > 1000


def test_prompts_whose_hashes_repeat():
    """An engine that sends hashes may send any."""
    engine = Engine(full(), num_blocks=30, eviction=EvictionPolicy.HAZARD)
    for number in (1, 2, 1):
        names = [bytes([name]) * 32 for name in (number, 9, number, 9, 8, 9)]
        news = News([0], [25], num_hashes=[6], hashes=b"".join(names))
        engine.step(Part(news=news, admit=Admit([0]), budget=Budget(100)))
        engine.end(0)
    assert len(engine.pool.free.learner._entry) == 4


def test_domains_of_many_tenants():
    engine = Engine(full(), window(6, lookup_class=1), num_blocks=60)
    engine.serve(0, "aaaabbbbccccd", news={"domain": "first"})
    for number in range(1300):
        assert engine.admit(1, "aaaabbbbccccd", news={"domain": str(number)}).hit == 0
        engine.end(1)
        if number % 4 == 0:
            assert engine.serve(0, "aaaabbbbccccd", news={"domain": "first"}).hit == 12


def test_keys_that_are_remembered_no_more():
    engine, rng = Engine(full(), num_blocks=1200, eviction=EvictionPolicy.HAZARD, max_model_len=5000), Random(6)
    texts = ["".join(rng.choices("abcdefgh", k=4001)) for _ in range(80)]
    for text in [*texts, *texts[-9::2]]:
        engine.serve(0, text)
    learner = engine.pool.free.learner
    assert len(learner._entry) == len(learner._key) < 80 * 1000


def test_a_request_alone_whose_hit_is_given_up():
    for engine, texts in unused_pools(split_spec(5), 3):
        for text in texts:
            assert engine.admit(0, text).status is not REFUSED
            engine.end(0)
            engine.idle()
            engine.idle()


def test_superblocks_of_earlier_lives():
    """Keys from a store, blocks under loads that may be states, and an image of held blocks alone."""
    spec = split_spec(12)
    shown = list(range(1 << 32, (1 << 32) + spec.num_blocks))
    rows = [(0, 8), (1, 12), (1, 13), (1, 17), (0, 20), (1, 28)]
    hashes = b"".join(fake_digest(block) for _, block in rows)
    blocks, runs = [block for _, block in rows], [KeyRun("", group, 1) for group, _ in rows]
    stored = Entries(32, runs, blocks, [shown[block] for block in blocks], [2] * 6, [6, 5, 4, 3, 2, 1], hashes)
    image = Resume(held_slot=[4], held_count=[2], held_blocks=[13, 40])
    cores = Replica(spec), native.NativeReplica(spec)
    outcomes = []
    for each in cores:
        each.recover(2, [shown], [stored], busy=[20, 24, 29])
        each.take_events()
        parts = [Part(resume=image)], [Part(cache=Cache(loads_over=[20, 24], released=[4]))]
        results = [each.apply(Step(2, seq, part)).parts[0] for seq, part in enumerate(parts, 1)]
        assert each.begin_epoch(3, [*shown[:16], *[0] * 32], busy=[29, 36]) > 0
        each.take_events()
        news = News([0, 1], [20, 16], [97] * 36)
        results += each.apply(Step(3, 1, [Part(news=news, admit=Admit([0, 1]), budget=Budget(100))])).parts
        outcomes.append((results, digest(each)))
    assert outcomes[0] == outcomes[1]
    assert {25, 26, 27} <= set(outcomes[0][0][0].orders.stamp_block)


def test_an_image_between_a_new_life_and_its_first_step_has_the_stamps_that_this_step_orders():
    """Blocks of a superblock under a load get other stamps: a replica that continues from the image orders them too."""
    spec = split_spec(12)
    shown = list(range(1 << 32, (1 << 32) + spec.num_blocks))
    stored = Entries(32, [KeyRun("", 0, 1)], [8], [shown[8]], [2], [1], fake_digest(8))
    image = Resume(held_slot=[4], held_count=[2], held_blocks=[13, 40])
    ordered = []
    for make, load in ((Replica, load_state), (native.NativeReplica, native.NativeReplica.load)):
        replica = make(spec)
        replica.recover(2, [shown], [stored], busy=[20, 24, 29])
        parts = [Part(resume=image)], [Part(cache=Cache(loads_over=[20, 24], released=[4]))]
        for seq, part in enumerate(parts, 1):
            replica.apply(Step(2, seq, part))
        replica.begin_epoch(3, [*shown[:16], *[0] * 32], busy=[29, 36])
        replica.take_events()
        continued = load(spec, export_state(replica))
        step = Step(3, 1, [Part()])
        orders = [each.apply(step).parts[0].orders for each in (replica, continued)]
        assert orders[0] == orders[1]
        ordered.append(orders[0].stamp_block)
    assert ordered[0] == ordered[1]
    assert ordered[0]


def one_request(spec, digests=(b"d" * 32,)):
    news = News([0], [spec.hash_block_size], num_hashes=[len(digests)], hashes=b"".join(digests))
    return Step(0, 1, [Part(news=news, admit=Admit([0]))])


def test_a_refused_step_changes_nothing_and_names_its_field():
    replica = native.NativeReplica(replica_spec(full()))
    before = export_state(replica)
    for part in (Part(run=Run([7])), Part(run=Run([0], cap=[1, 2])), Part(run=Run([-(1 << 70)]))):
        with pytest.raises(InvalidArgument) as caught:
            replica.apply(Step(0, 1, [part]))
        assert caught.value.field.startswith("parts[0].run.")
    assert export_state(replica) == before


WRONG = {
    "a row of no request": Part(run=Run([5])),
    "facts with too many hashes": Part(facts=Facts([0], appended=[1], num_hashes=[9], hashes=b"h" * 9 * 32)),
    "facts with hashes of another size": Part(facts=Facts([1], appended=[8], num_hashes=[1], hashes=b"h" * 16)),
    "hashes of a request with tokens": Part(facts=Facts([0], appended=[8], num_hashes=[1], hashes=b"h" * 32)),
    "more tokens than the limit": Part(facts=Facts([0], appended=[1 << 20])),
    "a slot that is in use": Part(news=News([0], [8], list(range(8)))),
    "a release of what is not held": Part(cache=Cache(released=[0])),
    "a step that never failed": Part(cache=Cache(failed_steps=[7])),
    "a part that is out of range": Part(run=Run([0], lookahead=[1 << 20])),
    "a hint that was not announced": Part(facts=Facts([0], hint=[1])),
    "a hint of a new request that was not announced": Part(news=News([2], [8], list(range(8)), hint=[1])),
    "more hints than rows": Part(facts=Facts([0], appended=[1], tokens=[5], hint=[0, 0])),
    "more hints than new requests": Part(news=News([2], [8], list(range(8)), hint=[0, 0])),
    "an end after an end": Part(facts=Facts([0, 0], end=[End.FREE, End.FREE])),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_refused_step_is_named_equally(name):
    spec = replica_spec(full())
    replicas = [Replica(spec), native.NativeReplica(spec)]
    with_hashes = News([1], [4], num_hashes=[1], hashes=b"g" * 32)
    for each in replicas:
        each.apply(Step(0, 1, [Part(news=News([0], [8], list(range(8))), admit=Admit([0]))]))
        each.apply(Step(0, 2, [Part(news=with_hashes)], executed_through=1))
    errors = []
    for each in replicas:
        with pytest.raises(InvalidArgument) as raised:
            each.apply(Step(0, 3, [WRONG[name]], executed_through=2))
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


def test_a_refused_image_leaves_the_compiled_core_as_it_was():
    replica = native.NativeReplica(replica_spec(full()))
    replica.apply(Step(0, 1, [Part(news=News([0], [8], list(range(8))), admit=Admit([0]))]))
    before = export_state(replica)
    with pytest.raises(InvalidArgument, match="an image must come first"):
        replica.apply(Step(0, 2, [Part(resume=Resume())], executed_through=1))
    assert export_state(replica) == before
    replica.apply(Step(0, 2, [Part(facts=Facts([0], end=[End.FREE]))], executed_through=1))
    assert not replica.requests.slots()


class Forgetful(NativeReplica):
    """A core that loses the events of each step."""

    def apply(self, step):
        result = super().apply(step)
        for part in result.parts:
            part.events = []
        return result


def test_a_difference_is_reported_with_the_steps_that_lead_to_it():
    spec = replica_spec(full())
    twins = ComparedCores(Replica(spec), Forgetful.load)
    with pytest.raises(CoresDiffer, match=r"parts\[0\].events") as caught:
        twins.apply(one_request(spec))
    assert [step.seq for step in caught.value.steps] == [1]
    assert caught.value.before == export_state(Replica(spec))


def test_the_variable_selects_the_core(monkeypatch):
    spec = replica_spec(full())
    kinds = {"": native.NativeReplica, "python": Replica, "native": native.NativeReplica}
    for choice, kind in kinds.items():
        monkeypatch.setenv(loader.VARIABLE, choice)
        assert isinstance(loader.new_replica(spec), kind)
        assert isinstance(loader.load_replica(spec, export_state(Replica(spec))), kind)
        assert loader.describe() == loader.core_of(loader.new_replica(spec)) == (choice or "native")
    monkeypatch.setenv(loader.VARIABLE, "fast")
    with pytest.raises(InvalidArgument) as caught:
        loader.new_replica(spec)
    assert caught.value.field == loader.VARIABLE


def long_step(replica):
    """A step that looks a waiting request of 4,096 blocks up repeatedly."""
    replica.apply(Step(0, 1, [part_of(NewsRow(0, tokens=list(range(4 * 4096))))]))
    return Step(0, 2, [part_of(*[PeekRow(0)] * 300)])


@pytest.fixture
def wide():
    return native.NativeReplica(replica_spec(full(), num_blocks=5000, max_model_len=1 << 20))


def applied_concurrently(replica, step):
    """Applies the step repeatedly."""
    return lambda number: replica.apply_concurrently(replace(step, seq=step.seq + number))


def looked_up(replica, step):
    """Looks a cached prompt of 10,000 blocks up repeatedly."""
    tokens = list(range(4 * 10_000))
    other = native.NativeReplica(replica_spec(full(), num_blocks=10_001, max_model_len=1 << 20))
    budget = Budget(tokens=len(tokens))
    other.apply(Step(0, 1, [replace(part_of(NewsRow(0, tokens=tokens), AdmitRow(0)), budget=budget)]))
    other.apply(Step(0, 2, [Part()], executed_through=1))
    digests = list(other.requests.hashes(0))
    assert other.lookup(digests, "", len(tokens) + 1).num_tokens == len(tokens)
    return lambda number: other.lookup(digests, "", len(tokens))


@pytest.mark.parametrize("prepared", [applied_concurrently, looked_up])
def test_other_threads_run_during_long_work(wide, prepared):
    """Only work that gives up the interpreter's lock lets another thread run before it ends."""
    step, begun, ran = long_step(wide), threading.Event(), threading.Event()
    work = prepared(wide, step)

    def run():
        begun.wait()
        ran.set()

    helper = threading.Thread(target=run)
    helper.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        begun.set()
        wide.apply(step)
        assert not ran.is_set()
        for number in range(1, 1000):
            work(number)
            if ran.is_set():
                break
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        helper.join()


def test_a_read_waits_for_a_step_that_is_applied_concurrently(wide):
    step, seen, done = long_step(wide), [], threading.Event()

    def read():
        while not done.is_set():
            seen.append((wide.seq, wide.free_blocks, wide.count_keys()))

    reader = threading.Thread(target=read)
    reader.start()
    steps = [replace(step, seq=seq) for seq in range(2, 22)]
    hits = [wide.apply_concurrently(step).parts[0].peek_hit for step in steps]
    done.set()
    reader.join()
    assert hits == [[0] * 300] * len(steps)
    assert {one[1:] for one in seen} == {(4999, 0)}
    assert [one[0] for one in seen] == sorted(one[0] for one in seen)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(loader, "problem", lambda: "the compiled core is not installed")
    monkeypatch.setenv(loader.VARIABLE, "native")
    with pytest.raises(FailedPrecondition, match="not installed"):
        loader.new_replica(replica_spec(full()))
    monkeypatch.setenv(loader.VARIABLE, "")
    assert isinstance(loader.new_replica(replica_spec(full())), Replica)
    assert "not installed" in loader.describe()


def test_a_library_of_other_sources_is_named_and_not_used(tmp_path, monkeypatch):
    """Its functions can lack what the Python files of this tree call."""
    (tmp_path / "module.cpp").write_bytes(b"// of a later commit")
    library = tmp_path / "_native.abi3.so"
    library.write_bytes(b"of an earlier one")
    monkeypatch.setattr(cpp, "__path__", [str(tmp_path)])
    known = sys.modules["kvplane_core.cpp._native"]
    monkeypatch.delitem(sys.modules, "kvplane_core.cpp._native")
    monkeypatch.setattr(loader, "load", compiled.load.__wrapped__)
    monkeypatch.setenv(loader.VARIABLE, "native")
    with pytest.raises(FailedPrecondition, match="compiled from other sources: run make"):
        loader.new_replica(replica_spec(full()))
    monkeypatch.setenv(loader.VARIABLE, "")
    assert isinstance(loader.new_replica(replica_spec(full())), Replica)
    assert loader.describe() == "python (the compiled core was compiled from other sources: run make)"
    monkeypatch.setitem(sys.modules, "kvplane_core.cpp._native", known)
    assert loader.describe() == "native"


def test_both_cores_forget_the_same_keys_of_hazard():
    """More keys than are remembered; some prompts come again, also after they were forgotten."""
    spec = replica_spec(
        full(), num_blocks=3001, max_model_len=8192, max_in_flight_tokens=8192, eviction=EvictionPolicy.HAZARD
    )
    twin, before, rng, hits = new_replica(spec), Facts(), Random(1), 0
    twin.begin_epoch(1)
    for number in range(100):
        name, length = rng.randrange(number) if number % 4 == 3 else number, rng.randint(750, 1500)
        hashes = b"".join(sha256(b"%d %d" % (name, at)).digest() for at in range(length))
        news = News([0], [length * 4 + 1], num_hashes=[length], hashes=hashes)
        part = Part(facts=before, news=news, admit=Admit([0]))
        hits += twin.apply(Step(1, number + 1, [part], executed_through=number)).parts[0].admit_hit[0]
        before = Facts([0], end=[int(End.FREE)])
    assert hits > 0
    assert twin.coordinator.pool.free.learner._recency.order().size == LEAST_REMEMBERED  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", [3864])
def test_random_specs_that_showed_a_difference(seed):
    played(draw_spec(seed), seed)
