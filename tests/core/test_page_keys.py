"""A key is registered only for a page with exactly the content of the key: sequences that once led to a wrong hit.

Copies run before the launch, states are overwritten in place, and what a step writes is there when the step has run.
"""

from __future__ import annotations

from kvplane.base.groups import AlignSpec, GroupKind, GroupSpec, MambaMode, ReplicaSpec
from kvplane.base.step import Admit, AdmitStatus, End, Facts, News, Part, PartResult, RowFlag, Run, Step
from kvplane_core.face import inspect
from kvplane_core.spec.replica import Replica
from tests.core.builders import new_replica

TOKENS = list(range(100, 200))
FULL, STATE = GroupKind.FULL_ATTENTION, GroupKind.MAMBA


def replica(*groups: GroupSpec, **options) -> Replica:
    sizes = {"num_blocks": 40, "max_model_len": 64, "max_in_flight_tokens": 256}
    made = new_replica(ReplicaSpec(groups, **{**sizes, **options}))
    made.begin_epoch(1)
    return made


def apply(made: Replica, seq: int, executed: int | None = None, **sections) -> PartResult:
    done = seq - 1 if executed is None else executed
    result = made.apply(Step(1, seq, [Part(**sections)], executed_through=done)).parts[0]
    inspect.check(made)
    return result


def states(made: Replica, group: int) -> list[tuple[int, int]]:
    """(block, tokens) of each key of the group."""
    return [(one.block, one.num_tokens) for one in inspect.take_snapshot(made).keys if one.group == group]


def with_states(block_size: int, **options) -> Replica:
    state = GroupSpec(STATE, block_size, mamba_mode=MambaMode.ALIGN, lookup_class=1)
    sizes = {"hash_block_size": 4, "scheduler_block_size": block_size, "retention_interval": -1, **options}
    return replica(GroupSpec(FULL, 4), state, **sizes)


def news(slot: int, tokens: list[int]) -> News:
    return News(slot=[slot], num_tokens=[len(tokens)], tokens=tokens)


def test_a_page_is_not_copied_in_the_step_that_writes_it():
    made = replica(
        GroupSpec(FULL, 8),
        GroupSpec(FULL, 4, lookup_class=1),
        hash_block_size=2,
        scheduler_block_size=8,
        partial_hits=True,
    )
    first, second = TOKENS[:14], [*TOKENS[:12], 1, 2]
    both = News(slot=[0, 1], num_tokens=[14, 14], tokens=first + second)
    result = apply(made, 1, news=both, admit=Admit(slot=[0, 1]))
    assert result.admit_status == [AdmitStatus.GRANTED, AdmitStatus.DEFERRED]
    assert result.orders.copy_src == []
    later = apply(made, 2, executed=0, admit=Admit(slot=[1]))
    assert later.admit_hit == [12], "a step later the page is written before the copy, though not yet executed"
    assert len(later.orders.copy_src) == 1


def test_a_chunk_past_a_boundary_registers_no_state_at_that_boundary():
    made = with_states(8)
    apply(made, 1, news=news(0, TOKENS[:20]), admit=Admit(slot=[0], cap=[5]))
    apply(made, 2, run=Run(slot=[0], cap=[7]))
    assert states(made, 1) == [], "the states are those of 5 and 12 tokens, not of 8"
    aligned = with_states(8)
    apply(aligned, 1, news=news(0, TOKENS[:20]), admit=Admit(slot=[0], cap=[8]))
    assert [tokens for _, tokens in states(aligned, 1)] == [8]


def test_a_second_row_of_a_request_in_one_step_is_granted_nothing():
    """Two grants would register two states, and one launch leaves only the last."""
    made = with_states(8)
    row = Run(slot=[0], cap=[8])
    parts = [Part(news=news(0, TOKENS[:40]), admit=Admit(slot=[0], cap=[8])), Part(run=row)]
    results = made.apply(Step(1, 1, parts)).parts
    inspect.check(made)
    assert results[1].granted == [0]
    assert apply(made, 2, run=row).granted == [8]


def test_a_commit_below_the_computed_tokens_registers_no_overwritten_state():
    state = GroupSpec(STATE, 8, mamba_mode=MambaMode.ALIGN, lookup_class=1)
    made = replica(
        GroupSpec(FULL, 8),
        state,
        hash_block_size=2,
        scheduler_block_size=8,
        retention_interval=-1,
        partial_hits=True,
        align=AlignSpec(8, 1000, True),
    )
    assert apply(made, 1, news=news(0, TOKENS[:7]), admit=Admit(slot=[0])).admit_granted == [6]
    moved = apply(made, 2, run=Run(slot=[0]))
    (copy,) = moved.orders.copy_dst
    apply(made, 3, facts=Facts(slot=[0], commit=[6]))
    assert states(made, 1) == [(copy, 6)], "the request's own block holds the state of 7 tokens by now"


def test_lowering_computed_below_a_state_preempts_the_request():
    made = with_states(8)
    apply(made, 1, news=news(0, TOKENS[:9]), admit=Admit(slot=[0], cap=[8]))
    result = apply(made, 2, facts=Facts(slot=[0], computed=[3]), run=Run(slot=[0], cap=[2]))
    assert (result.preempted, result.granted) == ([0], [0])


def test_lowering_computed_below_a_freed_window_preempts_the_request():
    made = replica(GroupSpec(GroupKind.SLIDING_WINDOW, 4, window=6), hash_block_size=4, scheduler_block_size=4)
    apply(made, 1, news=news(0, TOKENS[:20]), admit=Admit(slot=[0]))
    apply(made, 2, facts=Facts(slot=[0], appended=[1], tokens=[7]), run=Run(slot=[0]))
    assert apply(made, 3, facts=Facts(slot=[0], computed=[20])).preempted == [], "rejected drafts are within reach"
    assert apply(made, 4, facts=Facts(slot=[0], computed=[9])).preempted == [0]


def test_an_admission_counts_the_blocks_of_external_states():
    made = with_states(4, num_blocks=4)
    result = apply(made, 1, news=news(0, TOKENS[:6]), admit=Admit(slot=[0], external=[1]))
    assert result.admit_status == [AdmitStatus.NEVER_FITS] or result.admit_status == [AdmitStatus.REFUSED]


def test_a_fence_holds_the_blocks_of_a_preempted_request():
    made = replica(GroupSpec(FULL, 4), hash_block_size=4, scheduler_block_size=4)
    apply(made, 1, news=news(0, TOKENS[:9]), admit=Admit(slot=[0]))
    free = made.free_blocks
    apply(made, 2, executed=0, facts=Facts(slot=[0], end=[int(End.PREEMPTED)], fence=[1]))
    assert made.free_blocks == free
    apply(made, 3, executed=1)
    assert made.free_blocks == free + 3


def test_lowering_computed_to_0_with_a_freed_window_preempts_the_request():
    """From the start nothing is attended to, but the blocks that would be written are gone."""
    made = replica(GroupSpec(GroupKind.CHUNKED_LOCAL, 4, chunk=4), hash_block_size=4, scheduler_block_size=4)
    apply(made, 1, news=news(0, TOKENS[:9]), admit=Admit(slot=[0]))
    apply(made, 2, facts=Facts(slot=[0], appended=[1], tokens=[7]), run=Run(slot=[0]))
    assert made.coordinator.tables(0)[0][:2] == [0, 0]
    assert apply(made, 3, facts=Facts(slot=[0], computed=[0]), run=Run(slot=[0])).preempted == [0]


def test_rejected_drafts_behind_a_freed_gap_do_not_preempt_the_request():
    kept = replica(GroupSpec(GroupKind.R_SWA, 4, window=4), hash_block_size=4, scheduler_block_size=4)
    apply(kept, 1, news=news(0, TOKENS[:4]), admit=Admit(slot=[0]))
    grown = Facts(slot=[0], appended=[16], tokens=TOKENS[4:20])
    apply(kept, 2, facts=grown, run=Run(slot=[0]))
    apply(kept, 3, facts=Facts(slot=[0], appended=[1], tokens=[7]), run=Run(slot=[0], extra=[2]))
    assert 0 in kept.coordinator.tables(0)[0]
    assert apply(kept, 4, facts=Facts(slot=[0], computed=[21])).preempted == [], "the window is there"
    assert apply(kept, 5, facts=Facts(slot=[0], computed=[10])).preempted == [0], "it would be in the gap"


def with_draft_states() -> Replica:
    states = GroupSpec(STATE, 4, mamba_mode=MambaMode.ALIGN, lookup_class=1, speculative_blocks=2)
    sizes = {"hash_block_size": 4, "scheduler_block_size": 4, "retention_interval": -1}
    return replica(GroupSpec(FULL, 4), states, **sizes)


def test_a_rejected_draft_registers_no_state_at_the_boundary():
    """The launch left the state of 9 tokens; that of 8 is next to it, not in the block of tokens 4 to 8."""
    made = with_draft_states()
    apply(made, 1, news=news(0, TOKENS[:7]), admit=Admit(slot=[0]))
    grown = Facts(slot=[0], appended=[1], tokens=[TOKENS[7]])
    apply(made, 2, facts=grown, run=Run(slot=[0], extra=[1], flags=[int(RowFlag.DELAY_CACHING)]))
    apply(made, 3, facts=Facts(slot=[0], computed=[8], commit=[8]))
    assert states(made, 1) == []


def test_lowering_computed_to_a_state_that_was_not_written_preempts_the_request():
    """One launch from 4 to 13 tokens, the last two drafts: blocks between hold no state, so 11 has none to write."""
    made = with_draft_states()
    apply(made, 1, news=news(0, TOKENS[:11]), admit=Admit(slot=[0], cap=[4]))
    apply(made, 2, run=Run(slot=[0], extra=[2]))
    assert made.coordinator.tables(0)[1][2] == 0
    assert apply(made, 3, facts=Facts(slot=[0], computed=[11]), run=Run(slot=[0])).preempted == [0]


def test_end_held_is_accepted_with_a_freed_window():
    window = GroupSpec(GroupKind.SLIDING_WINDOW, 4, window=4, lookup_class=1)
    made = replica(GroupSpec(FULL, 4), window, hash_block_size=4, scheduler_block_size=4)
    apply(made, 1, news=news(0, TOKENS[:20]), admit=Admit(slot=[0]))
    apply(made, 2, facts=Facts(slot=[0], appended=[1], tokens=[7]), run=Run(slot=[0]))
    free = made.free_blocks
    ended = apply(made, 3, facts=Facts(slot=[0], computed=[9], end=[int(End.HELD)]))
    assert (ended.preempted, made.free_blocks) == ([], free)


def with_drafts(executed: int) -> tuple[Replica, list[tuple[int, int]]]:
    """Step 2 computes a draft, step 3 is planned behind it, and the draft is rejected; what is named of "abcD" then.

    Step 4 says that steps up to `executed` have run.
    """
    state = GroupSpec(STATE, 4, mamba_mode=MambaMode.ALIGN, lookup_class=1, speculative_blocks=2)
    made = replica(GroupSpec(FULL, 4), state, hash_block_size=4, scheduler_block_size=4, retention_interval=-1)
    apply(made, 1, news=news(0, TOKENS[:2]), admit=Admit(slot=[0]))
    grown = Facts(slot=[0], appended=[1], tokens=TOKENS[2:3])
    assert apply(made, 2, facts=grown, run=Run(slot=[0], extra=[1])).granted == [2]
    assert apply(made, 3, executed=1, run=Run(slot=[0], extra=[3])).granted == [2], "planned at 4, where a draft ends"
    rejected = Facts(slot=[0], computed=[5], appended=[1], tokens=TOKENS[3:4], commit=[4])
    apply(made, 4, executed=executed, facts=rejected, run=Run(slot=[0], extra=[2]))
    return made, states(made, 1)


def test_a_state_behind_a_rejected_draft_is_not_registered():
    assert with_drafts(executed=2)[1] == []


def test_a_state_behind_a_rejected_draft_is_not_registered_after_the_next_step():
    assert with_drafts(executed=3)[1] == []
