"""Random engines that apply their steps row by row on both cores: each answer, error and state must be equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import product

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import MambaMode
from kvplane.base.step import PartResult
from kvplane_service.core import native, state
from kvplane_service.core.interface import INSIDE, Need
from kvplane_service.core.open_step import OpenStep
from kvplane_service.core.replica import Replica
from tests.core import test_open_step

SLOTS = range(10)  # of these engines
COLUMNS = [column.name for column in fields(PartResult)]


class PairedReplica(Replica):
    """A replica with a compiled core in the same state."""

    def __init__(self, spec):
        super().__init__(spec)
        self.second = native.NativeReplica(spec)

    def check_in_slices(self):
        yield from super().check_in_slices()
        yield from self.second.check_in_slices()


class PairedStep:
    """Applies each row to a step of the Python core, which answers, and to one of the compiled core."""

    def __init__(self, replica, executed_through):
        self.first = OpenStep(replica, executed_through)
        self.second = replica.second.open_step(executed_through, True)
        self.replica, self.recorded = replica, self.first.recorded
        assert self.first.seq == self.second.seq

    def __getattr__(self, name):
        answer = getattr(self.first, name)
        if not callable(answer):
            assert answer == getattr(self.second, name), name
            return answer

        def both(*row, **columns):
            (answer, error), (of_other, other_error) = (
                _outcome(getattr(step, name), row, columns) for step in (self.first, self.second)
            )
            if name in ("decode", "extend") and answer and not any(answer):
                answer = ()  # no new blocks
            assert answer == of_other, (name, row)
            assert _plain(error) == _plain(other_error), (name, row)
            assert [slot for slot in SLOTS if self.second.is_granted(slot)] == sorted(self.first.granted), (name, row)
            if error is not None:
                raise error
            return answer

        return both

    def close(self):
        result, other = self.first.close(), self.second.close()
        assert result.published_through == other.published_through
        for part, of_other in zip(result.parts, other.parts, strict=True):
            for name in COLUMNS:
                assert getattr(of_other, name) == getattr(part, name), name
        assert state.digest(self.replica) == state.digest(self.replica.second)
        assert self.second.recorded() == self.recorded()
        assert _reads(self.replica.second) == _reads(self.replica)
        return result


def _reads(replica):
    """What the adapter of vLLM reads of a replica."""
    blocks, requests, tracker = replica.coordinator, replica.requests, replica.tracker
    pool, live = blocks.pool, replica.requests.slots()
    digests = max([list(requests.hashes(slot)) for slot in live], key=len, default=[])
    found = [list(pool.free), pool.num_free, pool.epoch, pool.count_keys(), blocks.hits_end_in_prompt]
    for block in range(replica.spec.num_blocks):
        key = pool.key_of(block)
        found.append((key, pool.references[block], pool.stamp[block], pool.key_step[block], pool.key_tokens[block]))
        if key is not None:
            found.append((pool.blocks_of(key), pool.find("", [key[1]], key[2], INSIDE)))
    found.append(blocks.lookup.find_each(digests, "", 40, INSIDE))
    for slot in live:
        found += [requests.launch_end(slot), blocks.tables(slot), tracker.held.get(slot) if requests.held[slot] else 0]
    for manager, slot in product(blocks.managers, live):
        found += [manager.num_cached[slot], manager.table[slot], manager.partial_hit.get(slot, (0, 0))]
        has_table = manager.num_cached[slot] >= 0
        hit = [] if has_table else [block for block in range(1, 4) if not pool.references[block]]
        need = Need(slot, 21, 20, 9, 8 * (not has_table), 3, slot % 2 == 0)
        found += [manager.skipped_tokens(17), manager.blocks_needed(need, hit)]
        if manager.spec.mamba_mode is MambaMode.ALIGN:
            found += [manager.has_allocated[slot], manager.last_checkpoints.get(slot)]
    return found


def _outcome(call, row, columns):
    try:
        return call(*row, **columns), None
    except InvalidArgument as error:
        return None, error


def _plain(error):
    return error and (error.message, error.field, error.remedy)


@contextmanager
def paired() -> Iterator[None]:
    """Let the engines of `test_open_step` decide on both cores."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(test_open_step, "Replica", PairedReplica)
        patched.setattr(test_open_step, "OpenStep", PairedStep)
        patched.setattr(test_open_step.Engine, "lookaheads", (0, 0, 1, 3))
        yield
