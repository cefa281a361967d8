"""`tier_world` with recurrent states instead of a window, as vLLM's mode "align" keeps them.

One block has the state behind the tokens so far, which the next step reads and may change in place. Chunks of a prompt
end between blocks. Where a step ends there the engine offers the state to the tiers, except at random, since vLLM does
not cache every state.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kvplane.base.groups import GroupKind, GroupSpec, MambaMode, ReplicaSpec
from tests.vllm.tier_world import BLOCK, Request, World

OFFERED = 0.8  # of the states behind full blocks


class StateWorld(World):
    """A world whose second group has a state."""

    def engine(self, max_in_flight_tokens: int) -> ReplicaSpec:
        """The engine's allocator, which keeps few states."""
        states = GroupSpec(GroupKind.MAMBA, BLOCK, mamba_mode=MambaMode.ALIGN)
        spec = super().engine(max_in_flight_tokens)
        return replace(spec, groups=(spec.groups[0], states), retention_interval=0)

    def chunk(self, one: Request, count: int) -> int:
        """Return how many of these tokens a step computes: a chunk that ends in a prompt ends between blocks."""
        start, end = one.computed, one.computed + count
        prefill_end = max(one.num_prompt_tokens, one.num_tokens - 1)
        if start >= prefill_end:
            return count
        if end < prefill_end:
            end -= end % BLOCK
        last = (one.num_tokens - 1) // BLOCK * BLOCK
        stops = [last, *([start - start % BLOCK + BLOCK] if start % BLOCK else [])]
        return max(0, min([end, *(stop for stop in stops if start < stop < end)]) - start)

    def allocate(self, one: Request, end: int) -> bool:
        """Give a request the blocks for its tokens up to `end`; states before the last one are freed first."""
        full, states = one.tables
        last, kept = -(-end // BLOCK) - 1, max(0, one.computed - 1) // BLOCK
        self.release([block for block in states[:kept] if block])
        states[:kept] = [0] * min(kept, len(states))
        if max(0, last + 1 - len(full)) + (len(states) <= last) > len(self.free):
            return False
        states.extend([0] * (last - len(states)))
        for table in one.tables:
            while len(table) <= last:
                table.append(self.take())
                one.fresh.append(table[-1])
        return True

    def offers(self, tokens: dict[str, int]) -> dict[str, list[tuple[int, int, int]]]:
        """The states that a step leaves behind full blocks, by request: group, block, tokens."""
        ends = {name: self.requests[name].computed for name in tokens}
        return {
            name: [(1, self.requests[name].tables[1][end // BLOCK - 1], end)]
            for name, end in ends.items()
            if end % BLOCK == 0 and self.rng.random() < OFFERED
        }

    def check(self, tokens: list[int], tables: list[list[int]], computed: int) -> None:
        """Compare the pages that a step reads with what they should hold: of states the last one."""
        last, states = (computed - 1) // BLOCK, tables[1]
        super().check(tokens, tables[:1], computed)
        if computed:
            self.checked += 1
            self.wrong += not torch.equal(self.memory[states[last]], self.page(tokens[:computed], 1))
