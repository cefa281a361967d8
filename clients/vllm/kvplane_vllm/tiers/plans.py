"""What a step of vLLM says of its blocks, and the copies that follow from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from kvplane_vllm.tiers.messages import Copies

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput


def blocks_of(state: KVConnectorBlockState | None, name: str) -> Sequence[Sequence[int]]:
    """Return the blocks of a request of a step, by group."""
    found = state.get_block_ids(name) if state is not None else None
    assert found is not None, "vLLM gives the blocks of each request that it schedules"
    return found


def overwritten_by(output: SchedulerOutput, loads: dict[str, list[Copies] | None]) -> set[int]:
    """Return the blocks that a step may zero, copy into, load into or compute; further ones do no harm.

    What it computes is stored in blocks that it allocates, or behind the full blocks of a table, which no save reads.
    """
    rows = [one.block_ids for one in output.scheduled_new_reqs]
    rows += [row for row in output.scheduled_cached_reqs.new_block_ids if row is not None]
    found = set(chain.from_iterable(chain.from_iterable(rows)))
    found.update(output.new_block_ids_to_zero or ())
    found.update(copy.dst_block_id for copy in output.kv_cache_block_copies or ())
    found.update(block for copies in loads.values() for one in copies or () for block in one.device)
    return found


def copies_between(
    tables: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    between: tuple[int, int],
    sizes: Sequence[int],
    to_device: bool,
) -> list[Copies] | None:
    """Return the pairs of full blocks of two tables between these tokens, by group; None if what is written has a block
    that what is read lacks. `sizes`: tokens of a block of each group.
    """
    found = list[Copies]()
    for group, size in enumerate(sizes):
        at = slice(between[0] // size, between[1] // size)
        device, host = tables[group][at], ours[group][at]
        read, written = (host, device) if to_device else (device, host)
        if len(read) != len(written):
            return None
        pairs = [pair for pair, block in zip(zip(device, host, strict=True), written, strict=True) if block]
        if not all(map(all, pairs)):
            return None
        if pairs:
            found.append(Copies(group, *map(list, zip(*pairs, strict=True))))
    return found


def last_state(offered: Iterable[tuple[int, int, int]], num_groups: int, unit: int) -> tuple[int, dict[int, int]]:
    """Return the last end of a unit of tokens of which all groups with states have one, and their blocks by group; 0 if
    there is none. `offered`: group, block, tokens.
    """
    found: dict[int, dict[int, int]] = {0: {}}
    for group, block, at in offered:
        if not at % unit:
            found.setdefault(at, {})[group] = block
    last = max(at for at, blocks in found.items() if not at or len(blocks) == num_groups)
    return last, found[last]
