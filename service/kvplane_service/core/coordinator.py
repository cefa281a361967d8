"""All groups of a replica together: an allocation is made in every group or in none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvplane.base.groups import CommitRule, ReplicaSpec
from kvplane.base.step import Orders
from kvplane_service.core.lookup import Hit, PrefixLookup
from kvplane_service.core.managers import GroupManager, GroupSetup, make_manager
from kvplane_service.core.managers.base import FOREVER
from kvplane_service.core.managers.questions import Need
from kvplane_service.core.pool import INSIDE, BlockPool
from kvplane_service.core.requests import Requests
from kvplane_service.core.setup import is_cached, states_for_drafts


@dataclass(frozen=True, slots=True)
class Admission:
    """The first allocation of a waiting request.

    Attributes:
        slot: the request.
        num_new: tokens to compute.
        hit: the cached prefix that it adopts.
        num_external: tokens behind the hit that an external source provides.
        lookahead: further slots, for drafts.
        num_encoder: encoder tokens.
        delay_caching: register no keys yet.
        full_fit: the whole sequence must fit.
        leave_free: blocks that must stay free, in addition to the watermark.
        watermark: blocks that must stay free.
    """

    slot: int
    num_new: int
    hit: Hit
    num_external: int = 0
    lookahead: int = 0
    num_encoder: int = 0
    delay_caching: bool = False
    full_fit: bool = False
    leave_free: int = 0
    watermark: int = 0


class Coordinator:
    """Calls each group's manager, and allocates only when all groups fit.

    Args:
        spec: the replica.
        requests: its requests.
    """

    def __init__(self, spec: ReplicaSpec, requests: Requests) -> None:
        self.spec = spec
        self.requests = requests
        self.pool = BlockPool(spec.num_blocks, len(spec.groups), spec.enable_caching, spec.events)
        self._orders = Orders()
        self.managers: tuple[GroupManager, ...] = tuple(
            make_manager(GroupSetup(number, group, spec, self.pool, requests, self._orders))
            for number, group in enumerate(spec.groups)
        )
        self.lookup = PrefixLookup(spec, self.managers)
        self.has_states = states_for_drafts(spec) is not None
        self._caching = tuple(manager for manager in self.managers if is_cached(manager.spec))
        self._drops_last_block = any(manager.drops_last_block for manager in self.managers)
        self._cache_unit = self._find_cache_unit()
        self._unfinalized = max(0, spec.prefill_lookahead - 1)

    def _find_cache_unit(self) -> int:
        """Tokens in whose multiples keys become registrable; 1 when groups have boundaries of their own."""
        if len(self.managers) == 1 or self.spec.partial_hits or self._drops_last_block:
            return 1
        return self.spec.scheduler_block_size

    # -- look-up -----------------------------------------------------------------------------------------------------

    def find_hit(self, slot: int) -> Hit:
        """The longest cached prefix, at most the request's tokens - 1: the last is computed for its logits."""
        requests = self.requests
        limit = 0 if requests.skip_reading[slot] else requests.num_tokens[slot] - 1
        return self.lookup.find(requests.content[slot].digests, requests.domain[slot], limit, INSIDE)

    def hit_is_ready(self, hit: Hit) -> bool:
        """Whether every group can adopt its part of the hit in this step."""
        return all(manager.hit_is_ready(hit.blocks[manager.group], hit.num_tokens) for manager in self.managers)

    def can_rewind(self, slot: int, num_computed: int) -> bool:
        """Whether every group still has the blocks that computing from `num_computed` on reads or writes."""
        return all(manager.can_rewind(slot, num_computed) for manager in self.managers)

    def rewind(self, slot: int, num_computed: int) -> None:
        """Tokens from `num_computed` on will be computed again: states that this overwrites lose their keys."""
        for manager in self.managers:
            manager.rewind(slot, num_computed)

    # -- allocation --------------------------------------------------------------------------------------------------

    def free_wanted(self, admission: Admission) -> int:
        """Blocks that must be free for an admission, the watermark included."""
        total = self._known(admission)
        num_main = total + admission.num_new
        num_slots = min(num_main + admission.lookahead, self.spec.max_model_len)
        need = Need(admission.slot, num_slots, num_main, total, admission.hit.num_tokens, admission.num_encoder)
        wanted = self._count(need, admission.hit) + admission.leave_free
        if admission.full_fit:
            wanted = max(wanted, self._blocks_of_all(admission, total))
        return wanted + admission.watermark

    def _known(self, admission: Admission) -> int:
        """Tokens that need not be computed."""
        return min(admission.hit.num_tokens + admission.num_external, self.spec.max_model_len)

    def admit(self, admission: Admission) -> list[list[int]]:
        """Adopt the hit and allocate the first blocks; the new ones per group. `free_wanted` blocks are free."""
        slot, spec = admission.slot, self.spec
        local, total = admission.hit.num_tokens, self._known(admission)
        num_main = total + admission.num_new
        num_slots = min(num_main + admission.lookahead, spec.max_model_len)
        zeroes = len(self._orders.zero_block)
        self._adopt(admission, local, total)
        new = [manager.allocate(slot, num_slots, num_main, admission.num_encoder) for manager in self.managers]
        if admission.num_external and admission.delay_caching and spec.commit is CommitRule.SAFE:
            self._leave_to_load(slot, local, total, zeroes)
        self.requests.ends_at[slot] = num_main
        if not admission.delay_caching:
            self.register(slot, min(num_main, self.requests.num_tokens[slot]))
        self.requests.invalidate_fast_path(slot)  # the next row releases blocks of the hit that are outside a window
        return new

    def extend(
        self, slot: int, num_new: int, lookahead: int, in_flight: int, delay_caching: bool
    ) -> Sequence[list[int]] | None:
        """Allocate blocks for `num_new` more tokens of a running request; returns the new ones per group.

        None: too few blocks are free, and nothing was allocated. Blocks that left a window are released even then, as
        in vLLM, since no request needs them.

        Args:
            slot: the request.
            num_new: tokens to compute.
            lookahead: further slots, for drafts.
            in_flight: tokens whose step is not executed; blocks that they attend to are kept.
            delay_caching: register no keys yet.
        """
        requests, computed = self.requests, self.requests.computed[slot]
        num_main = computed + num_new
        num_slots = min(num_main + lookahead, self.spec.max_model_len)
        processed = max(0, computed - in_flight)
        new: Sequence[list[int]] | None = ()
        grows = num_slots > requests.alloc_bound[slot] or processed >= requests.window_bound[slot]
        if grows:
            new = self._grow_tables(slot, num_slots, num_main, processed)
            if new is None:
                requests.invalidate_fast_path(slot)
                return None
        requests.ends_at[slot] = num_main
        known = min(num_main, requests.num_tokens[slot])
        registers = known >= requests.register_bound[slot] and not delay_caching
        if registers:
            self.register(slot, known)
        if grows or registers:
            self._find_fast_path(slot, processed, num_main)
        return new

    def _grow_tables(self, slot: int, num_slots: int, num_main: int, processed: int) -> list[list[int]] | None:
        need = 0
        for manager in self.managers:
            manager.release_skipped(slot, processed)
            need += manager.blocks_to_extend(slot, num_slots, num_main)
        if need > self.pool.num_free:
            return None
        return [manager.allocate(slot, num_slots, num_main, 0) for manager in self.managers]

    def _blocks_of_all(self, admission: Admission, total: int) -> int:
        """Blocks that the whole sequence needs."""
        num_tokens = min(self.requests.num_tokens[admission.slot], self.spec.max_model_len)
        need = Need(
            admission.slot, num_tokens, num_tokens, total, admission.hit.num_tokens, admission.num_encoder, capped=True
        )
        return self._count(need, admission.hit)

    def _count(self, need: Need, hit: Hit) -> int:
        return sum(manager.blocks_needed(need, hit.blocks[manager.group]) for manager in self.managers)

    def _adopt(self, admission: Admission, local: int, total: int) -> None:
        """Adopt in all groups before allocating external blocks, which could evict an unadopted hit (vLLM #33775)."""
        if not (any(admission.hit.blocks) or admission.num_external):
            return
        for manager in self.managers:
            manager.adopt(admission.slot, admission.hit.blocks[manager.group], local, total)
        if admission.num_external:
            for manager in self.managers:
                manager.allocate_external(admission.slot, local, total)

    def _leave_to_load(self, slot: int, local: int, total: int, first_zero: int) -> None:
        """Remove blocks that a transfer fills from the zero orders since `first_zero`: the load writes whole pages."""
        loaded = {block for manager in self.managers for block in manager.blocks_between(slot, local, total)}
        orders = self._orders
        rows = list(zip(orders.zero_block[first_zero:], orders.zero_group[first_zero:], strict=True))
        orders.zero_block[first_zero:] = [block for block, _ in rows if block not in loaded]
        orders.zero_group[first_zero:] = [group for block, group in rows if block not in loaded]

    def zero_unloaded(self, slot: int, num_tokens: int) -> None:
        """A load provided only these tokens: order zeroes for the blocks that it did not write."""
        for manager in self.managers:
            manager.zero_unloaded(slot, num_tokens)

    def blocks_when_alone(self, num_tokens: int, num_encoder: int = 0) -> int:
        """Most blocks that a request of `num_tokens` tokens holds at once; more than the pool has: it can never run."""
        return sum(manager.blocks_alone(num_tokens, num_encoder) for manager in self.managers)

    def _find_fast_path(self, slot: int, processed: int, num_main: int) -> None:
        """Compute the bounds of the fast path; none in prefill, where chunks register at boundaries of their own."""
        requests = self.requests
        if num_main < requests.num_prompt[slot]:
            requests.invalidate_fast_path(slot)
            return
        blocks = window = keys = FOREVER
        for manager in self.managers:
            blocks = min(blocks, manager.alloc_bound(slot))
            window = min(window, manager.window_bound(slot, processed))
            keys = min(keys, manager.register_bound(slot))
        if self.spec.enable_caching:
            keys = -(-keys // self._cache_unit) * self._cache_unit
        else:
            keys = FOREVER
        requests.alloc_bound[slot] = blocks
        requests.register_bound[slot] = keys
        requests.window_bound[slot] = window
        requests.fast_path_until[slot] = min(blocks, window, keys - 1)

    # -- prefix cache ------------------------------------------------------------------------------------------------

    def register(self, slot: int, num_tokens: int) -> None:
        """Register the full blocks of the request's first `num_tokens` tokens."""
        if not self.spec.enable_caching:
            return
        boundaries = _replay_boundaries(
            self.requests.num_prompt[slot],
            self.spec.scheduler_block_size,
            self._drops_last_block,
            self.spec.keep_divergence_boundary,
        )
        for manager in self._caching:
            manager.register_blocks(slot, self._share(manager, num_tokens), boundaries)

    def register_again(self, blocks: Sequence[int]) -> None:
        """Let requests that have these blocks register them again; the reference does not."""
        if self.spec.commit is CommitRule.SAFE:
            for manager in self.managers:
                manager.register_again(frozenset(blocks))

    def commit(self, slot: int, num_tokens: int) -> None:
        """Register blocks that earlier steps wrote, so that rows of this step can hit them."""
        self.register(slot, num_tokens)
        for manager in self.managers:
            manager.note_written(slot)

    def _share(self, manager: GroupManager, num_tokens: int) -> int:
        """Tokens of which this group may register blocks: a hit can only end at an aligned length.

        Look-ups that drop the last block read one block more, so one more is registered. Tokens that a multi-module
        drafter will compute again are not final and are left out.
        """
        final = max(0, num_tokens - self._unfinalized)
        if len(self.managers) == 1:
            return final
        aligned = self._align(num_tokens)
        if manager.drops_last_block and aligned > 0:
            return min(final, self._align(final) + manager.block_size)
        return aligned

    def _align(self, num_tokens: int) -> int:
        if self.spec.partial_hits:
            return num_tokens
        return num_tokens // self.spec.scheduler_block_size * self.spec.scheduler_block_size

    # -- release -----------------------------------------------------------------------------------------------------

    def free(self, slot: int) -> None:
        """Release all blocks of a request, group by group, tail first: the tail is evicted before the prefix."""
        for manager in self.managers:
            self.pool.release(reversed(manager.take_all(slot)))

    def take_all(self, slot: int) -> list[int]:
        """Empty the tables; the blocks of all groups in order, whose references the caller now owns."""
        return [block for manager in self.managers for block in manager.take_all(slot)]

    # -- steps -------------------------------------------------------------------------------------------------------

    def grow(self, slot: int) -> None:
        """Make room for the slot."""
        for manager in self.managers:
            manager.grow(slot)

    def new_step(self) -> None:
        """A step begins to allocate."""
        for manager in self.managers:
            manager.new_step()

    def take_copies(self) -> list[int]:
        """End of a step: the blocks held for its copies, sources and targets. The caller owns the references."""
        held = [block for manager in self.managers for pair in manager.copies for block in pair]
        for manager in self.managers:
            manager.copies.clear()
        return held

    def take_orders(self) -> Orders:
        """Return and clear the orders for ranks since the last call."""
        orders, taken = self._orders, Orders()
        for name in ("copy_src", "copy_dst", "copy_group", "zero_block", "zero_group"):
            column = getattr(orders, name)
            setattr(taken, name, column[:])
            column.clear()
        taken.stamp_block = list(self.pool.stamped)
        taken.stamp = [self.pool.stamp[block] for block in taken.stamp_block]
        self.pool.stamped.clear()
        return taken

    def tables(self, slot: int) -> list[list[int]]:
        """Block table per group; fresh lists."""
        return [list(manager.table[slot]) for manager in self.managers]


@lru_cache(maxsize=4096)
def _replay_boundaries(num_prompt: int, unit: int, drops_last_block: bool, keep_divergence: bool) -> tuple[int, ...]:
    """Positions at which a later request that replays this prompt can resume.

    An identical prompt resumes at its last token at most, a longer one at the prompt's end. Where look-ups drop the
    last matched block both are one block lower. `keep_divergence` adds the boundary one unit lower, for prompts that
    diverge inside their last block (vLLM #57610).
    """
    if not drops_last_block:
        boundaries = {num_prompt - 1}
    else:
        resend = (num_prompt - 1) // unit * unit
        extension = num_prompt // unit * unit
        boundaries = {max(resend - unit, 0), max(extension - unit, 0)}
    if keep_divergence:
        boundaries |= {max(boundary // unit * unit - unit, 0) for boundary in boundaries}
    return tuple(sorted(boundaries))
