"""Functions over whole stamp tables give the same as over single stamps."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.base import stamps as base
from kvplane.base.groups import TierKind, TierSpec
from kvplane.base.stamp_table import StampReading, agreed_stamps
from kvplane_service.replicas import stamps
from kvplane_service.replicas.stamps import Contents, shown_of
from kvplane_service.rpc.claims import _proven
from tests.core.builders import full, replica_spec

tables = st.lists(st.integers(0, 3).map(lambda number: number << 56 | number << 32 | number), min_size=6, max_size=6)
readings = st.builds(StampReading, st.just(1), st.one_of(tables, st.just([1, 2])))


@given(st.lists(st.integers(0, (1 << 64) - 1)))
def test_newest_epoch_equals_the_base_function(values):
    assert stamps.newest_epoch(values) == stamps.newest_epoch(array("Q", values)) == base.newest_epoch(values)


def test_newest_epoch_reads_every_piece_of_a_large_table(monkeypatch):
    monkeypatch.setattr(stamps, "_PIECE", 2)
    assert stamps.newest_epoch([1 << 32, 2 << 32, 3 << 32, 1 << 32, 7 << 32]) == 7
    assert list(stamps.confirmed([1, 2, 3, 4, 5], StampReading(1, [1, 0, 3, 4, 6]))) == [1, 0, 3, 4, 0]


@given(tables, st.lists(readings, min_size=1, max_size=3))
async def test_confirmed_stamps_equal_agreed_stamps(shown, read):
    if len({len(one.stamps) for one in read}) > 1 or len(read[0].stamps) != len(shown):
        assert not any((await _proven(array("Q", shown), read))[1:])
    else:
        agreed = agreed_stamps([StampReading(1, shown), *read])
        assert tuple(await _proven(array("Q", shown), read)) == agreed


PAGES, DISKS = (
    Contents(5, 50),
    replica_spec(full(16), num_blocks=4, tiers=(TierSpec(TierKind.HOST, 2), TierSpec(TierKind.DISK, 3))),
)
SHOWN = (0, 1, 2, 3, 11, 12, 21, 22, 23)


@pytest.mark.parametrize(
    ("now", "proven"),
    [
        (Contents(5, 50), SHOWN),
        (Contents(5, 0), SHOWN),
        (Contents(0, 0), SHOWN),
        (Contents(6, 50), (0, 0, 0, 0, 0, 0, 21, 22, 23)),
        (Contents(6, 51), ()),
        (Contents(6, 0), ()),
    ],
)
def test_stamps_prove_keys_of_their_memory_and_of_their_disks(now, proven):
    assert tuple(shown_of(SHOWN, DISKS, now, PAGES)) == proven
    assert tuple(shown_of(SHOWN, DISKS, now, Contents())) == SHOWN, "nothing was stated before"


def test_disks_that_are_not_stated_are_known_as_long_as_the_memory_is():
    assert Contents().after(PAGES) == Contents(5, 0).after(PAGES) == PAGES
    assert Contents(6, 0).after(PAGES) == Contents(6, 0)
    assert Contents(6, 51).after(PAGES) == Contents(6, 51)


async def test_confirmed_without_a_table_or_reading_is_empty():
    assert await _proven((), [StampReading(1, (5,))]) == ()
    assert await _proven((5,), []) == (5,)
