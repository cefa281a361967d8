"""The free list: blocks are allocated from the front; the caller that frees a block chooses front or back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane_core.spec.freelist import FreeList
from kvplane_core.spec.invariants import check_free_list

pytestmark = pytest.mark.specification  # its free list


def order(free):
    is_free = bytearray(10)
    check_free_list(free, is_free)
    assert {block for block, flag in enumerate(is_free) if flag} == set(free)
    return list(free)


def test_free_list_starts_with_every_block_but_the_null_block_in_id_order():
    free = FreeList(5)
    assert order(free) == [1, 2, 3, 4]
    assert free.count == 4


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_pop_takes_from_the_front(count):
    free = FreeList(5)
    assert free.pop(count) == [1, 2, 3, 4][:count]
    assert order(free) == [1, 2, 3, 4][count:]


def test_pop_of_more_blocks_than_are_free_is_an_assertion():
    with pytest.raises(AssertionError, match="5 blocks requested, 4 free"):
        FreeList(5).pop(5)


def test_an_empty_free_list_can_be_refilled():
    free = FreeList(4)
    free.pop(3)
    assert order(free) == []
    free.append([2])
    free.prepend([3])
    assert order(free) == [3, 2]


@pytest.mark.parametrize(("block", "rest"), [(1, [2, 3, 4]), (3, [1, 2, 4]), (4, [1, 2, 3])])
def test_remove_takes_a_block_from_any_position(block, rest):
    free = FreeList(5)
    free.remove(block)
    assert order(free) == rest
    free.append([block])
    assert order(free) == [*rest, block]


def test_append_and_prepend_keep_the_order_of_their_blocks():
    free = FreeList(8)
    free.pop(7)
    free.append([4, 2])
    free.prepend([7, 1])
    free.append([3])
    assert order(free) == [7, 1, 4, 2, 3]


def test_append_and_prepend_of_no_blocks_change_nothing():
    free = FreeList(4)
    free.append([])
    free.prepend([])
    assert order(free) == [1, 2, 3]


def test_rebuild_sets_exactly_the_given_order():
    free = FreeList(5)
    free.rebuild([4, 2])
    assert order(free) == [4, 2]
    assert free.count == 2


MOVE = st.tuples(st.sampled_from(["pop", "remove", "append", "prepend"]), st.integers(0, 9), st.integers(0, 4))


@given(st.lists(MOVE, max_size=60))
def test_free_list_operations_equal_those_of_a_list(moves):
    free, model, out = FreeList(10), list(range(1, 10)), list[int]()
    for move, where, count in moves:
        if move == "pop":
            count = min(count, len(model))
            assert free.pop(count) == model[:count]
            out += model[:count]
            del model[:count]
        elif move == "remove" and model:
            block = model.pop(where % len(model))
            free.remove(block)
            out.append(block)
        elif move == "append":
            free.append(out[:count])
            model += out[:count]
            del out[:count]
        elif move == "prepend":
            free.prepend(out[:count])
            model[:0] = out[:count]
            del out[:count]
        assert order(free) == model
        assert free.count == len(model)
