"""All groups of a replica together: one allocation touches every group or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvplane.base.groups import CommitRule, ReplicaSpec
from kvplane.base.step import Orders
from kvplane_service.core.lookup import Hit, PrefixLookup
from kvplane_service.core.managers import GroupManager, GroupSetup, make_manager
from kvplane_service.core.managers.base import FOREVER, Need
from kvplane_service.core.pool import INSIDE, BlockPool
from kvplane_service.core.requests import Requests
from kvplane_service.core.setup import states_for_drafts


@dataclass(frozen=True, slots=True)
class Admission:
    """A waiting request's wish for its first blocks.

    Attributes:
        slot: the request.
        num_new: tokens to be computed.
        hit: the prefix that it adopts.
        num_external: tokens behind the hit that come from outside.
        lookahead: more slots for drafts to come.
        num_encoder: encoder tokens.
        delay_caching: register no keys now.
        full_fit: the whole sequence must fit.
        leave_free: blocks that must remain after the allocation, beside the watermark.
        watermark: blocks that must remain besides.
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
    """Asks each group's manager, and acts only when all agree.

    Args:
        spec: the replica.
        requests: its requests.
        orders: where managers put what ranks must do; swapped by `take_orders`.
    """

    def __init__(self, spec: ReplicaSpec, requests: Requests) -> None:
        self.spec = spec
        self.requests = requests
        self.pool = BlockPool(spec.num_blocks, len(spec.groups), spec.enable_caching, spec.events)
        self._orders = Orders()
        dropping = {group.lookup_class for group in spec.groups if group.drops_last_block}
        self.managers: tuple[GroupManager, ...] = tuple(
            make_manager(
                GroupSetup(
                    number,
                    group,
                    spec,
                    self.pool,
                    requests,
                    self._orders,
                    group.lookup_class in dropping,
                    bool(dropping),
                )
            )
            for number, group in enumerate(spec.groups)
        )
        self.lookup = PrefixLookup(spec, self.managers)
        self.has_states = states_for_drafts(spec) is not None
        self._drops = any(manager.drops for manager in self.managers)
        self._cache_unit = self._find_cache_unit()
        self._unfinalized = max(0, spec.prefill_lookahead - 1)

    def _find_cache_unit(self) -> int:
        """Tokens in whose multiples keys become registrable; 1 when groups have boundaries of their own."""
        if len(self.managers) == 1 or self.spec.partial_hits or self._drops:
            return 1
        return self.spec.scheduler_block_size

    # -- look-up -----------------------------------------------------------------------------------------------------

    def find_hit(self, slot: int) -> Hit:
        """The request's longest cached prefix, at most its tokens - 1: the last one is computed for its logits."""
        requests = self.requests
        limit = 0 if requests.skip_reading[slot] else requests.num_tokens[slot] - 1
        return self.lookup.find(requests.content[slot].digests, requests.domain[slot], limit, INSIDE)

    def hit_is_ready(self, hit: Hit) -> bool:
        """Whether every group can adopt its part of the hit in this step."""
        return all(manager.hit_is_ready(hit.blocks[manager.group], hit.num_tokens) for manager in self.managers)

    def can_rewind(self, slot: int, num_computed: int) -> bool:
        """Whether every group still holds what the tokens from `num_computed` on attend to."""
        return all(manager.can_rewind(slot, num_computed) for manager in self.managers)

    def rewind(self, slot: int, num_computed: int) -> None:
        """Tokens from `num_computed` on will be computed again: pages that this overwrites lose their keys."""
        for manager in self.managers:
            manager.rewind(slot, num_computed)

    # -- allocation --------------------------------------------------------------------------------------------------

    def free_wanted(self, wish: Admission) -> int:
        """Blocks that must be free for an admission, the watermark among them."""
        total = self._known(wish)
        num_main = total + wish.num_new
        num_slots = min(num_main + wish.lookahead, self.spec.max_model_len)
        need = Need(wish.slot, num_slots, num_main, total, wish.hit.num_tokens, wish.num_encoder)
        wanted = self._count(need, wish.hit) + wish.leave_free
        if wish.full_fit:
            wanted = max(wanted, self._blocks_of_all(wish, total))
        return wanted + wish.watermark

    def _known(self, wish: Admission) -> int:
        """Tokens that need not be computed."""
        return min(wish.hit.num_tokens + wish.num_external, self.spec.max_model_len)

    def admit(self, wish: Admission) -> list[list[int]]:
        """Let a request adopt its hit and give it its first blocks: the new ones per group. `free_wanted` are free."""
        slot, spec = wish.slot, self.spec
        local, total = wish.hit.num_tokens, self._known(wish)
        num_main = total + wish.num_new
        num_slots = min(num_main + wish.lookahead, spec.max_model_len)
        zeroes = len(self._orders.zero_block)
        self._adopt(wish, local, total)
        new = [manager.allocate(slot, num_slots, num_main, wish.num_encoder) for manager in self.managers]
        if wish.num_external and wish.delay_caching and spec.commit is CommitRule.SAFE:
            self._leave_to_load(slot, local, total, zeroes)
        self.requests.ends_at[slot] = num_main
        if not wish.delay_caching:
            self.register(slot, min(num_main, self.requests.num_tokens[slot]))
        self.requests.wake(slot)  # what the hit brought beyond a window is released at the next call
        return new

    def extend(
        self, slot: int, num_new: int, lookahead: int, in_flight: int, delay_caching: bool
    ) -> Sequence[list[int]] | None:
        """Give a running request blocks for `num_new` more tokens: the new ones per group, or None: too few.

        A refusal allocates nothing; blocks that left the window are released all the same, as in vLLM, since they are
        needed by nobody.

        Args:
            slot: the request.
            num_new: tokens to be computed.
            lookahead: more slots for drafts to come.
            in_flight: tokens whose step has not been executed; what they attend to stays.
            delay_caching: register no keys now.
        """
        requests, computed = self.requests, self.requests.computed[slot]
        num_main = computed + num_new
        num_slots = min(num_main + lookahead, self.spec.max_model_len)
        processed = max(0, computed - in_flight)
        new: Sequence[list[int]] | None = ()
        grows = num_slots > requests.blocks_until[slot] or processed >= requests.window_until[slot]
        if grows:
            new = self._grow_tables(slot, num_slots, num_main, processed)
            if new is None:
                requests.wake(slot)
                return None
        requests.ends_at[slot] = num_main
        known = min(num_main, requests.num_tokens[slot])
        registers = known >= requests.keys_from[slot] and not delay_caching
        if registers:
            self.register(slot, known)
        if grows or registers:
            self._find_quiet_zone(slot, processed, num_main)
        return new

    def _grow_tables(self, slot: int, num_slots: int, num_main: int, processed: int) -> list[list[int]] | None:
        need = 0
        for manager in self.managers:
            manager.release_skipped(slot, processed)
            need += manager.blocks_to_extend(slot, num_slots, num_main)
        if need > self.pool.num_free:
            return None
        return [manager.allocate(slot, num_slots, num_main, 0) for manager in self.managers]

    def _blocks_of_all(self, wish: Admission, total: int) -> int:
        """Blocks that the whole sequence needs."""
        num_tokens = min(self.requests.num_tokens[wish.slot], self.spec.max_model_len)
        need = Need(wish.slot, num_tokens, num_tokens, total, wish.hit.num_tokens, wish.num_encoder, capped=True)
        return self._count(need, wish.hit)

    def _count(self, need: Need, hit: Hit) -> int:
        return sum(manager.blocks_needed(need, hit.blocks[manager.group]) for manager in self.managers)

    def _adopt(self, wish: Admission, local: int, total: int) -> None:
        """First every group's hit, then every group's external blocks: none may evict another's hit (vLLM #33775)."""
        if not (any(wish.hit.blocks) or wish.num_external):
            return
        for manager in self.managers:
            manager.adopt(wish.slot, wish.hit.blocks[manager.group], local, total)
        if wish.num_external:
            for manager in self.managers:
                manager.allocate_external(wish.slot, local, total)

    def _leave_to_load(self, slot: int, local: int, total: int, first_zero: int) -> None:
        """Take blocks that a transfer fills out of the zero orders from `first_zero` on: the load writes them whole."""
        loaded = {block for manager in self.managers for block in manager.blocks_between(slot, local, total)}
        orders = self._orders
        rows = list(zip(orders.zero_block[first_zero:], orders.zero_group[first_zero:], strict=True))
        orders.zero_block[first_zero:] = [block for block, _ in rows if block not in loaded]
        orders.zero_group[first_zero:] = [group for block, group in rows if block not in loaded]

    def zero_unloaded(self, slot: int, num_tokens: int) -> None:
        """A load brought no more than these tokens: what it left unwritten is zeroed now, if new blocks are."""
        for manager in self.managers:
            manager.zero_unloaded(slot, num_tokens)

    def blocks_when_alone(self, num_tokens: int, num_encoder: int = 0) -> int:
        """Most blocks that a request of so many tokens holds at once; above the pool's size it can never run."""
        return sum(manager.blocks_alone(num_tokens, num_encoder) for manager in self.managers)

    def _find_quiet_zone(self, slot: int, processed: int, num_main: int) -> None:
        """Remember until where this request needs no manager; prefill stays outside, its boundaries matter."""
        requests = self.requests
        if num_main < requests.num_prompt[slot]:
            requests.wake(slot)
            return
        blocks = window = keys = FOREVER
        for manager in self.managers:
            blocks = min(blocks, manager.quiet_slots(slot))
            window = min(window, manager.quiet_window(slot, processed))
            keys = min(keys, manager.quiet_cache(slot))
        if self.spec.enable_caching:
            keys = -(-keys // self._cache_unit) * self._cache_unit
        else:
            keys = FOREVER
        requests.blocks_until[slot] = blocks
        requests.keys_from[slot] = keys
        requests.window_until[slot] = window
        requests.quiet_until[slot] = min(blocks, window, keys - 1)

    # -- prefix cache ------------------------------------------------------------------------------------------------

    def register(self, slot: int, num_tokens: int) -> None:
        """Register what is full among the request's first `num_tokens` tokens."""
        if not self.spec.enable_caching:
            return
        boundaries = _replay_boundaries(
            self.requests.num_prompt[slot],
            self.spec.scheduler_block_size,
            self._drops,
            self.spec.keep_divergence_boundary,
        )
        for manager in self.managers:
            if manager.cacheable:
                manager.register_blocks(slot, self._share(manager, num_tokens), boundaries)

    def unsettle(self, blocks: Sequence[int]) -> None:
        """Let requests that count these blocks as computed register them again; the reference never does."""
        if self.spec.commit is CommitRule.SAFE:
            for manager in self.managers:
                manager.unsettle(frozenset(blocks))

    def commit(self, slot: int, num_tokens: int) -> None:
        """Register what earlier steps have written: for this step it is as if it had been there before."""
        self.register(slot, num_tokens)
        for manager in self.managers:
            manager.note_written(slot)

    def _share(self, manager: GroupManager, num_tokens: int) -> int:
        """Tokens of which this group may register blocks: a hit can only end at an aligned length.

        A group that drops its last block looks one block further, so it registers one more. Tokens that a multi-module
        drafter will compute again are not final yet.
        """
        final = max(0, num_tokens - self._unfinalized)
        if len(self.managers) == 1:
            return final
        aligned = self._align(num_tokens)
        if manager.drops and aligned > 0:
            return min(final, self._align(final) + manager.block_size)
        return aligned

    def _align(self, num_tokens: int) -> int:
        if self.spec.partial_hits:
            return num_tokens
        return num_tokens // self.spec.scheduler_block_size * self.spec.scheduler_block_size

    # -- release -----------------------------------------------------------------------------------------------------

    def free(self, slot: int) -> None:
        """Give back all blocks of a request: group by group, tail first, so that prefixes outlive what follows them."""
        for manager in self.managers:
            self.pool.release(reversed(manager.take_all(slot)))

    def take_all(self, slot: int) -> list[int]:
        """Empty the tables; the blocks of all groups in order, references with the caller (see `release_later`)."""
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
        """End of a step: the blocks held for its copies, source and target in turn, references with the caller."""
        held = [block for manager in self.managers for pair in manager.copies for block in pair]
        for manager in self.managers:
            manager.copies.clear()
        return held

    def take_orders(self) -> Orders:
        """What ranks must do because of the operations since the last call."""
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
def _replay_boundaries(num_prompt: int, unit: int, drops: bool, keep_divergence: bool) -> tuple[int, ...]:
    """Positions at which a later request that replays this prompt can resume.

    An identical prompt resumes at most at its last token but one, a longer one at the prompt's end. With a draft group
    both lie one block lower, since the last matched block is dropped. `keep_divergence` adds the boundary one unit
    lower, for prompts that diverge inside their last block (vLLM #57610).
    """
    if not drops:
        boundaries = {num_prompt - 1}
    else:
        resend = (num_prompt - 1) // unit * unit
        extension = num_prompt // unit * unit
        boundaries = {max(resend - unit, 0), max(extension - unit, 0)}
    if keep_divergence:
        boundaries |= {max(boundary // unit * unit - unit, 0) for boundary in boundaries}
    return tuple(sorted(boundaries))
