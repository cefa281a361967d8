"""The coordinator allocates blocks for a request in all KV cache groups of a replica, or in none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvplane.base.checkpoints import CheckpointRule
from kvplane.base.groups import CommitRule, EvictionPolicy, GroupKind, GroupSpec, MambaMode, ReplicaSpec
from kvplane.base.step import ALL_GROUPS, Orders, RemoveReason
from kvplane_core.face.interface import INSIDE, Hit, Need
from kvplane_core.face.keys import NULL_BLOCK
from kvplane_core.face.setup import hits_end_in_prompt, replay_boundaries, states_for_drafts
from kvplane_core.spec.lookup import PrefixLookup
from kvplane_core.spec.managers import GroupManager, GroupSetup, make_manager
from kvplane_core.spec.managers.base import FOREVER
from kvplane_core.spec.policies import make_pool, note_admitted
from kvplane_core.spec.requests import Requests
from kvplane_core.spec.tiers.tiers import Tiers

NO_HIT = Hit(0, 0, ())


@dataclass(frozen=True, slots=True)
class Admission:
    """Arguments of the first allocation for a waiting request.

    Attributes:
        slot: slot of the request.
        num_new: tokens to compute in this step.
        hit: the cached prefix; the request takes references to the blocks of this prefix.
        num_external: tokens behind the hit whose KV is loaded instead of computed.
        lookahead: further token positions to allocate, for draft tokens.
        num_encoder: encoder tokens, for cross-attention groups.
        delay_caching: register no keys yet, because the tokens are still being loaded.
        full_fit: require free blocks for the whole sequence, not only for the tokens of this step.
        leave_free: number of blocks that must stay free, in addition to `watermark`.
        watermark: number of blocks that every admission must leave free.
        loaded_groups: the groups (bit = number of the group) whose external tokens a late load writes; their blocks
            are not zeroed.
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
    loaded_groups: int = ALL_GROUPS


class Growth(NamedTuple):
    """Arguments of a further allocation for a running request.

    Attributes:
        num_new: tokens to compute in this step.
        lookahead: further token positions to allocate, for draft tokens.
        in_flight: computed tokens whose step is not executed yet; the blocks that these tokens attend to are kept.
        delay_caching: register no keys yet.
        leave_free: number of blocks that must stay free.
        full_fit: require free blocks for the whole sequence, not only for the tokens of this step.
    """

    num_new: int
    lookahead: int
    in_flight: int
    delay_caching: bool = False
    leave_free: int = 0
    full_fit: bool = False


class Coordinator:
    """Allocates, registers and releases blocks through one manager per group.

    An allocation changes nothing unless the pool has enough free blocks for all groups.

    Args:
        spec: specification of the replica.
        requests: state of the requests of the replica.
    """

    def __init__(self, spec: ReplicaSpec, requests: Requests) -> None:
        self.spec = spec
        self.requests = requests
        self.pool = make_pool(spec)
        self._orders = Orders()
        self.managers: tuple[GroupManager, ...] = tuple(
            make_manager(GroupSetup(number, group, spec, self.pool, requests, self._orders))
            for number, group in enumerate(spec.groups)
        )
        self.lookup = PrefixLookup(spec, self.managers, self.pool)
        self.tiers = Tiers(spec, self.pool)
        self.union = PrefixLookup(spec, self.managers, self.tiers)
        self.has_states = states_for_drafts(spec) is not None
        self.boundaries = CheckpointRule.of(spec, spec.groups[0])  # of any group: only `last_boundary` is used
        self._checkpoints = tuple(CheckpointRule.of(spec, group) for group in spec.groups if _has_aligned_states(group))
        self.checkpoints_single_group_hits = any(group.checkpoints_single_group_hits for group in spec.groups)
        self.caching = tuple(manager for manager in self.managers if manager.spec.is_cached)
        self._drops_last_block = any(manager.drops_last_block for manager in self.managers)
        self.hits_end_in_prompt = hits_end_in_prompt(spec)
        self._unfinalized = max(0, spec.prefill_lookahead - 1)

    # -- look-up -----------------------------------------------------------------------------------------------------

    def find_hit(self, slot: int, limit: int = FOREVER) -> Hit:
        """Find the request's longest prefix of at most `limit` tokens that the device has. Changes nothing."""
        digests, domain = self.requests.content[slot].digests, self.requests.domain[slot]
        return self.lookup.find(digests, domain, self.most_hit(slot), INSIDE, limit)

    def most_hit(self, slot: int) -> int:
        """Return how many tokens of a request a hit may have: never the last one of the prompt, which must be computed
        for its logits.
        """
        requests = self.requests
        most = 0 if requests.skip_reading[slot] else requests.num_tokens[slot] - 1
        return min(most, requests.num_prompt[slot]) if self.hits_end_in_prompt else most

    def hit_is_ready(self, hit: Hit) -> bool:
        """Whether the request may take references to the blocks of the hit, in every group, in this step; otherwise the
        caller defers the admission to a later step.
        """
        return all(manager.hit_is_ready(hit.blocks[manager.group], hit.num_tokens) for manager in self.managers)

    def can_rewind(self, slot: int, num_computed: int, appended: int = 0) -> bool:
        """Whether all groups have the blocks, and the state, to go back by a row of facts that appends some tokens."""
        lacks_state = self.has_states and num_computed < self.requests.shortest_state(slot, appended)
        return not lacks_state and all(manager.can_rewind(slot, num_computed) for manager in self.managers)

    def rewind(self, slot: int, num_computed: int) -> None:
        """Prepare to compute the tokens after the first `num_computed` again: remove the keys of states that will be
        overwritten.
        """
        for manager in self.managers:
            manager.rewind(slot, num_computed)

    def writes_checkpoints(self, start: int, end: int, prefill_end: int) -> bool:
        """Whether the launch of the chunk [start, end) also writes the states from which a repeat of the first
        `prefill_end` tokens continues, in all groups of states.
        """
        position = self.boundaries.last_boundary(prefill_end, self.spec.hit_alignment)
        rules = self._checkpoints
        return bool(rules) and all(rule.can_write(start, end, position) for rule in rules)

    # -- allocation --------------------------------------------------------------------------------------------------

    def free_wanted(self, admission: Admission) -> int:
        """Return how many free blocks the pool must have for this admission, including the blocks that must
        stay free.
        """
        total = self._known(admission)
        num_main = total + admission.num_new
        num_slots = min(num_main + admission.lookahead, self.spec.max_model_len)
        need = Need(admission.slot, num_slots, num_main, total, admission.hit.num_tokens, admission.num_encoder)
        slot, hit, encoder = admission.slot, admission.hit, admission.num_encoder
        wanted = self._blocks_of_all(slot, total, hit.num_tokens, hit, encoder) if admission.full_fit else 0
        return max(wanted, self._count(need, hit) + admission.leave_free) + admission.watermark

    def give_up(self, hit: Hit) -> bool:
        """Remove the keys of a hit's blocks, whose superblocks a request needs whole for its states; False if none.

        Without this a request that runs alone could have a hit that keeps it from ever being admitted.
        """
        blocks = [block for of_group in hit.blocks for block in of_group if block != NULL_BLOCK]
        dropped = [self.pool.drop_keys(block, RemoveReason.DROPPED) for block in blocks]
        return any(dropped)

    def _known(self, admission: Admission) -> int:
        """Return the number of tokens that need not be computed: the tokens of the hit and the external tokens."""
        return min(admission.hit.num_tokens + admission.num_external, self.spec.max_model_len)

    def admit(self, admission: Admission) -> list[list[int]]:
        """Adopt the hit and allocate the first blocks of a request; returns the new blocks per group.

        The caller has checked that `free_wanted` blocks are free.
        """
        slot, spec = admission.slot, self.spec
        local, total = admission.hit.num_tokens, self._known(admission)
        num_main = total + admission.num_new
        num_slots = min(num_main + admission.lookahead, spec.max_model_len)
        zeroes = len(self._orders.zero_block)
        self.requests.computed[slot] = total  # where the first chunk starts
        if spec.eviction is not EvictionPolicy.LRU:
            self.requests.hit_end[slot] = local
            note_admitted(self.pool, self.requests, slot, local)
        self._adopt(admission, local, total)
        new = [manager.allocate(slot, num_slots, num_main, admission.num_encoder) for manager in self.managers]
        if admission.num_external and admission.delay_caching and spec.commit is CommitRule.SAFE:
            self._leave_to_load(admission, local, total, zeroes)
        self.requests.ends_at[slot] = num_main
        if not admission.delay_caching:
            self.register(slot, min(num_main, self.requests.num_tokens[slot]))
        return new

    def extend(self, slot: int, growth: Growth) -> Sequence[list[int]] | int:
        """Allocate blocks for more tokens of a running request; returns the new blocks per group.

        If too few blocks are free, allocates nothing, and returns how many had to be. Blocks that left the attention
        window are released in both cases, as in vLLM: the request never reads these blocks again.
        """
        num_new, lookahead, in_flight, delay_caching, leave_free, full_fit = growth
        requests, computed = self.requests, self.requests.computed[slot]
        if full_fit and (wanted := self._blocks_of_all(slot, computed, computed)) > self.pool.num_free:
            return wanted
        num_main = computed + num_new
        num_slots = min(num_main + lookahead, self.spec.max_model_len)
        counts = []
        for manager in self.managers:
            manager.release_skipped(slot, max(0, computed - in_flight))
            counts.append(manager.blocks_to_extend(slot, num_slots, num_main))
        if (wanted := self.pool.demand(counts) + leave_free) > self.pool.num_free:
            return wanted
        new = [manager.allocate(slot, num_slots, num_main, 0) for manager in self.managers]
        requests.ends_at[slot] = num_main
        if not delay_caching:
            self.register(slot, min(num_main, requests.num_tokens[slot]))
        return new

    def release_skipped(self, slot: int, num_processed: int) -> None:
        """Release the blocks outside the attention window of the token after the first `num_processed` tokens.

        `num_processed` tokens are computed, and their steps executed. Blocks that steps in flight may read are kept.
        """
        requests = self.requests
        if slot in requests.loading:
            return  # the load still writes blocks of tokens that count as computed
        processed = min(num_processed, requests.computed[slot] - requests.in_flight[slot])
        for manager in self.managers:
            manager.release_skipped(slot, max(0, processed))

    def _blocks_of_all(self, slot: int, total: int, local: int, hit: Hit = NO_HIT, num_encoder: int = 0) -> int:
        """Return how many more blocks the whole sequence of the request needs.

        `total`: tokens that need not be computed (hit and external tokens). `local`: tokens of the hit.
        """
        num_tokens = min(self.requests.num_tokens[slot], self.spec.max_model_len)
        return self._count(Need(slot, num_tokens, num_tokens, total, local, num_encoder, capped=True), hit)

    def _count(self, need: Need, hit: Hit) -> int:
        blocks = hit.blocks or [()] * len(self.managers)
        counts = [manager.blocks_needed(need, blocks[manager.group]) for manager in self.managers]
        return self.pool.demand(counts, blocks)

    def _adopt(self, admission: Admission, local: int, total: int) -> None:
        """Adopt the hit in all groups (take references to its blocks), then allocate the blocks of the external tokens.

        The allocation must be second: it could otherwise evict blocks of the hit that no request holds yet (vLLM
        #33775).
        """
        if not (any(admission.hit.blocks) or admission.num_external):
            return
        for manager in self.managers:
            manager.adopt(admission.slot, admission.hit.blocks[manager.group], local, total)
        if admission.num_external:
            for manager in self.managers:
                manager.allocate_external(admission.slot, local, total)

    def _leave_to_load(self, admission: Admission, local: int, total: int, first_zero: int) -> None:
        """Remove blocks that a load will fill from the orders to zero blocks, beginning with order `first_zero`.

        The load writes whole pages, so these blocks need no zeroing before.
        """
        managers = [manager for manager in self.managers if admission.loaded_groups >> manager.group & 1]
        loaded = {block for manager in managers for block in manager.blocks_between(admission.slot, local, total)}
        orders = self._orders
        rows = list(zip(orders.zero_block[first_zero:], orders.zero_group[first_zero:], strict=True))
        orders.zero_block[first_zero:] = [block for block, _ in rows if block not in loaded]
        orders.zero_group[first_zero:] = [group for block, group in rows if block not in loaded]

    def zero_unloaded(self, slot: int, num_tokens: int) -> None:
        """Order the zeroing of blocks that a load left unwritten, because the load provided only the first `num_tokens`
        tokens.
        """
        for manager in self.managers:
            manager.zero_unloaded(slot, num_tokens)

    def blocks_when_alone(self, num_tokens: int, num_encoder: int = 0) -> int:
        """Return the largest number of blocks that a request of `num_tokens` tokens holds at one time.

        The request can never run in a pool with fewer blocks.
        """
        return self.pool.in_blocks([manager.blocks_alone(num_tokens, num_encoder) for manager in self.managers])

    # -- prefix cache ------------------------------------------------------------------------------------------------

    def register(self, slot: int, num_tokens: int) -> None:
        """Register the full blocks of the request's first `num_tokens` tokens, so that look-ups find them."""
        if not self.spec.enable_caching:
            return
        boundaries = replay_boundaries(
            self.requests.num_prompt[slot],
            self.spec.scheduler_block_size,
            self._drops_last_block,
            self.spec.keep_divergence_boundary,
        )
        for manager in self.caching:
            manager.register_blocks(slot, self._share(manager, num_tokens), boundaries)

    def register_again(self, blocks: Sequence[int]) -> None:
        """Let the requests that hold these blocks register keys for them again, after the keys were dropped.

        With commit=reference (the replica behaves as vLLM) this does nothing.
        """
        if self.spec.commit is CommitRule.SAFE:
            for manager in self.managers:
                manager.register_again(frozenset(blocks))

    def commit(self, slot: int, num_tokens: int) -> None:
        """Register the blocks of the first `num_tokens` tokens, which earlier steps wrote, so that look-ups of this
        step find them.
        """
        self.register(slot, num_tokens)
        for manager in self.managers:
            manager.note_written(slot)

    def _share(self, manager: GroupManager, num_tokens: int) -> int:
        """Return the number of leading tokens whose blocks this group may register.

        With several groups the number is rounded down to a length at which a hit can end. If look-ups leave out the
        last matched block, a hit needs one block more, so one more block is registered. Tokens that a drafter of
        several modules will compute again are not counted, because their pages still change.
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
        """Release all blocks of a request, group by group, the request's last block first: so its tail is evicted
        before its prefix.
        """
        for manager in self.managers:
            self.pool.release(reversed(manager.take_all(slot)))

    def take_all(self, slot: int) -> list[int]:
        """Empty the request's block tables and return the blocks of all groups. The caller must release
        the references.
        """
        return [block for manager in self.managers for block in manager.take_all(slot)]

    # -- steps -------------------------------------------------------------------------------------------------------

    def grow(self, slot: int) -> None:
        """Extend the managers' columns so that they have an entry for this slot."""
        for manager in self.managers:
            manager.grow(slot)

    def new_step(self) -> None:
        """Clear what the managers record per step; call this before the first allocation of a step."""
        for manager in self.managers:
            manager.new_step()

    def take_copies(self) -> list[int]:
        """Return and clear the source and target blocks of the copies that this step orders.

        The caller must release the references that kept these blocks until the copies ran.
        """
        held: list[int] = []
        for manager in self.managers:
            if manager.copies:
                held += [block for pair in manager.copies for block in pair]
                manager.copies.clear()
        return held

    def take_orders(self) -> Orders:
        """Return and clear the orders (copy or zero blocks, write stamps) that ranks must carry out, collected since
        the last call.
        """
        orders, taken, pool = self._orders, Orders(), self.pool
        if orders.copy_src or orders.zero_block:
            for name in ("copy_src", "copy_dst", "copy_group", "zero_block", "zero_group"):
                column = getattr(orders, name)
                setattr(taken, name, column[:])
                column.clear()
        if pool.stamped:
            taken.stamp_block = list(pool.stamped)
            taken.stamp = [pool.stamp[block] for block in taken.stamp_block]
            pool.stamped.clear()
        self.tiers.give_orders(taken)
        return taken

    def tables(self, slot: int) -> list[list[int]]:
        """Return copies of the request's block tables, one per group."""
        return [list(manager.table[slot]) for manager in self.managers]


def _has_aligned_states(group: GroupSpec) -> bool:
    return group.kind is GroupKind.MAMBA and group.mamba_mode is MambaMode.ALIGN
