"""A step that is applied row by row on both cores, as `compared` does with whole steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from kvplane.base.errors import KvplaneError
from kvplane.base.groups import MambaMode
from kvplane.base.step import Step, StepResult
from kvplane_core.face.interface import INSIDE, Need
from kvplane_core.face.part_rows import Update
from kvplane_core.spec.open_step import RUN, OpenStep

if TYPE_CHECKING:
    from tests.core.compared import ComparedCores

SLOTS = range(10)  # whose grants are compared


class ComparedStep:
    """Applies each row to a step of the specification, which answers, and to one of the compiled core."""

    def __init__(self, both: ComparedCores, executed_through: int) -> None:
        self.both, second = both, both.second
        self.first = OpenStep(both.first, executed_through)
        self.second = second.open_step(executed_through, True)  # type: ignore[attr-defined]
        self.recorded = self.second.recorded
        both.require("seq", self.first.seq, self.second.seq)

    def __getattr__(self, name: str) -> Any:
        answer = getattr(self.first, name)
        if name.startswith("_"):
            return answer
        if not callable(answer):
            self.both.require(name, answer, getattr(self.second, name))
            return answer

        def ask_both(*row: object, **columns: object) -> Any:
            (answer, error), (of_other, other_error) = (
                _outcome(getattr(step, name), row, columns) for step in (self.first, self.second)
            )
            if name == "extend" and answer and not any(answer):
                answer = ()  # no new blocks
            self.both.require(name, (answer, _plain(error)), (of_other, _plain(other_error)))
            self._compare_granted()
            if error is not None:
                raise error
            return answer

        return ask_both

    def decode(
        self, slot: int, num_tokens: int, digests: Sequence[bytes], num_new: int, lookahead: int, in_flight: int
    ) -> Any:
        """Give the specification the two rows for which the row stands, unless the compiled core leaves it to them."""
        new = self.second.decode(slot, num_tokens, digests, num_new, lookahead, in_flight)
        if new is False:
            return new
        self.first._enter(RUN)  # the growth is recorded with the run row
        gained = num_tokens - self.both.first.requests.num_tokens[slot]
        if gained or digests:
            self.first.update(Update(slot, appended=gained, digests=digests))
        answer = self.first.extend(slot, num_new, lookahead, in_flight)
        self.both.require("decode", answer if answer is None or any(answer) else (), new)
        self._compare_granted()
        return new

    def _compare_granted(self) -> None:
        granted = [slot for slot in SLOTS if self.second.is_granted(slot)]
        self.both.require("granted", [slot for slot in SLOTS if slot in self.first.granted], granted)

    def close(self) -> StepResult:
        """End the step on both cores."""
        result, other = self.first.close(), self.second.close()
        sent = self.first.recorded()
        self.both.compare(sent, result, other)
        self.both.require("recorded", _without_flying(sent), _without_flying(self.second.recorded()))
        self.both.compare_states()
        if self.both.spec.num_blocks < 50:
            self.both.require("reads", reads(self.both.first), reads(self.both.second))
        return result


def reads(replica: Any) -> list[object]:
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
    found += [requests.slot_named(name) for name in ("", "none", *(requests.request_id[slot] for slot in live))]
    for slot in live:
        end = requests.running[slot] and requests.launch_end(slot)
        found += [end, blocks.tables(slot), tracker.held.get(slot) if requests.held[slot] else 0]
    for manager, slot in product(blocks.managers, live):
        found += [manager.num_cached[slot], manager.table[slot], manager.partial_hit.get(slot, (0, 0))]
        has_table = manager.num_cached[slot] >= 0
        hit = [] if has_table else [block for block in range(1, 4) if not pool.references[block]]
        need = Need(slot, 21, 20, 9, 8 * (not has_table), 3, slot % 2 == 0)
        found += [manager.skipped_tokens(17), manager.blocks_needed(need, hit)]
        if manager.spec.mamba_mode is MambaMode.ALIGN:
            found += [manager.has_allocated[slot], manager.last_checkpoints.get(slot)]
    return found


def _without_flying(step: Step) -> Step:
    """The step without its column `in_flight`: the compiled core leaves it out of rows that release no block."""
    return replace(step, parts=[replace(part, run=replace(part.run, in_flight=[])) for part in step.parts])


def _outcome(call: Any, row: tuple[object, ...], columns: dict[str, object]) -> tuple[Any, KvplaneError | None]:
    try:
        return call(*row, **columns), None
    except KvplaneError as error:
        return None, error


def _plain(error: KvplaneError | None) -> object:
    return error and (error.message, error.field, error.remedy)
