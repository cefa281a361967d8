"""Recurrent state that is cached (mode "align"): a block holds one state, and a request needs only its last state.

A prefill chunk writes its end state into the block of its last token; blocks in between stay null. The
running state is in the last 1 + speculative blocks of the table:

    tokens   0..B-1   B..2B-1   2B..3B-1   3B..          (a chunk that ended in the fourth block)
    table     s0       null       null      run  spec spec

If the spec has a `checkpoint_alignment`, a chunk can also leave a state before its end, in the block before that of the
running state (see `kvplane.base.checkpoints`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvplane.base.checkpoints import CheckpointRule
from kvplane.base.step import RemoveReason
from kvplane_core.face.interface import Need
from kvplane_core.face.keys import NULL_BLOCK, Key
from kvplane_core.spec.managers.base import GroupManager
from kvplane_core.spec.managers.full import register_inside_block, report_stored_inside
from kvplane_core.spec.managers.questions import GroupSetup, Query, RequestProgress

NO_STATE = -1


class AlignedStateManager(GroupManager):
    """Manages states in mode "align": states at block ends are cached, and the request continues in new blocks."""

    has_window, takes_states = False, True
    STATE = (
        *GroupManager.STATE,
        "last_state", "num_retired", "has_allocated", "_stopped_at", "last_checkpoints", "_registered_this_step",
    )  # fmt: skip

    def __init__(self, setup: GroupSetup) -> None:
        super().__init__(setup)
        self.last_state: list[int] = []  # index of the state from which the last allocated block continues
        self.num_retired: list[int] = []  # leading entries of the table that are released
        self.has_allocated: list[bool] = []
        # slot -> index -> tokens of the state that a launch left there. Ends beyond the known tokens depend on drafts
        # that are unverified: no key is registered for them before the tokens are known, and `rewind` removes them.
        self._stopped_at: dict[int, dict[int, int]] = {}
        # Draft models have no recurrent layers: look-ups here never drop a block. Those of other groups may, so that a
        # repeat of a prompt resumes one hash block lower.
        self._rule = CheckpointRule.of(setup.replica, setup.spec)
        # slot -> state inside the chunk of its last launch: length in tokens, index in the table, end of the chunk
        self.last_checkpoints: dict[int, tuple[int, int, int]] = {}
        self._registered_this_step: set[Key] = set()  # keys of states that this step's launch writes

    # -- tables ------------------------------------------------------------------------------------------------------

    def grow(self, slot: int) -> None:
        """Extend the columns so that they have an entry for this slot."""
        super().grow(slot)
        missing = slot + 1 - len(self.last_state)
        self.last_state.extend([NO_STATE] * missing)
        self.num_retired.extend([0] * missing)
        self.has_allocated.extend([False] * missing)

    def take_all(self, slot: int) -> list[int]:
        """Empty the slot's table and return its blocks in order; the references pass to the caller."""
        self.last_state[slot] = NO_STATE
        self.num_retired[slot] = 0
        self.has_allocated[slot] = False
        self._stopped_at.pop(slot, None)
        self.last_checkpoints.pop(slot, None)
        return super().take_all(slot)

    def new_step(self) -> None:
        """Clear the set of keys that the previous step registered."""
        self._registered_this_step.clear()

    # -- allocation --------------------------------------------------------------------------------------------------

    def blocks_needed(self, need: Need, hit: Sequence[int]) -> int:
        """Return how many free blocks the allocation takes: a state, a copy's target, and at first the draft states."""
        partial = self._ends_inside_block(hit, need.local_computed) or need.slot in self.partial_hit
        has_external, evictable = need.total_computed > need.local_computed, self.pool.count_evictable(hit)
        if has_external and self._safe:
            return self._new_states_with_external(need, len(hit), partial) + evictable
        checkpoints = int(self._checkpoint(need.slot, need.total_computed, need.num_main) > 0)
        new = self._new_states(need.slot, need.num_main, len(hit), int(partial), checkpoints)
        if not has_external:
            return new + evictable
        # vLLM's count can be too small: its allocation fails then. A replica with its rule refuses.
        adopted = hit[max(self.skipped_tokens(need.total_computed), 0) // self.block_size :]
        taken = self._new_states_with_external(need, len(hit), partial) + self.pool.count_evictable(adopted)
        return max(new + evictable, taken)

    def _new_states_with_external(self, need: Need, num_hit: int, partial: bool) -> int:
        """Return how many states `adopt`, `allocate_external` and `allocate` take in total; vLLM counts one too few."""
        length = max(max(need.total_computed - 1, 0) // self.block_size, num_hit)
        external = max(self._blocks_for(need.total_computed) - length, 0)
        running = self._blocks_for(need.num_main)
        checkpoints = int(self._checkpoint(need.slot, need.total_computed, need.num_main) > 0)
        filled = max(length + external, running - 1 - checkpoints)
        return external + max(running + self.spec.speculative_blocks - filled, 0) + int(partial)

    def blocks_to_extend(self, slot: int, num_slots: int, num_main: int) -> int:
        """Return the number of new states that a running request needs to compute up to `num_main` tokens."""
        partial = int(slot in self.partial_hit)
        checkpoints = int(self._checkpoint(slot, self.requests.computed[slot], num_main) > 0)
        return self._new_states(slot, num_main, 0, partial, checkpoints)

    def _new_states(self, slot: int, num_main: int, num_hit: int, partial: int, checkpoints: int) -> int:
        new = self._blocks_for(num_main) + self.spec.speculative_blocks - num_hit - len(self.table[slot])
        if partial:
            new = max(new, 0) + 1
        return max(min(new, self._most_new_blocks(slot, partial + checkpoints)), 0)

    def _most_new_blocks(self, slot: int, others: int) -> int:
        """Return the most blocks of one allocation: the running state, the draft states at first, and the `others`."""
        return 1 + others + (0 if self.has_allocated[slot] else self.spec.speculative_blocks)

    def _checkpoint(self, slot: int, start: int, end: int) -> int:
        """Return the position of the checkpoint for which the chunk [start, end) needs a block; 0: none.

        Every chunk has such a position, but with retention_interval 0 only that of the prompt's end is kept. A draft
        state at this index is kept where it is: ranks would write the checkpoint there, because tables are
        append-only, also if the state was moved.
        """
        position = self._rule.position(start, end)
        if position == 0:
            return 0
        table, index = self.table[slot], self._rule.index(end)
        is_draft = self.has_allocated[slot] and len(table) - self.spec.speculative_blocks <= index < len(table)
        if is_draft and self._safe:
            return position
        prefill_end = max(self.requests.num_prompt[slot], self.requests.num_tokens[slot] - 1)
        is_free = index >= len(table) or table[index] == NULL_BLOCK or is_draft
        return position if is_free and (self.replica.retention_interval or end >= prefill_end) else 0

    def allocate(self, slot: int, num_slots: int, num_main: int, num_encoder: int) -> list[int]:
        """Append a block for the state after `num_main` tokens, with null blocks before; returns the new entries."""
        table = self.table[slot]
        drafts = self.spec.speculative_blocks
        required = self._blocks_for(num_main) + drafts
        partial = self.partial_hit.pop(slot, None)
        position = self._checkpoint(slot, self.requests.computed[slot], num_main)
        if required <= len(table) and partial is None and not position:
            self.has_allocated[slot] = True
            return []
        before = len(table)
        self._remember_last_state(slot)
        gap_end = required - drafts - 1
        if position:
            gap_end -= 1
            self.last_checkpoints[slot] = (position, gap_end, num_main)
            self._stopped_at.setdefault(slot, {})[gap_end] = position
        table.extend([NULL_BLOCK] * (gap_end - before))
        if self.has_allocated[slot]:
            for index in range(before - drafts, min(before, gap_end)):
                self._move_draft_state(table, index)
        missing = max(required - len(table), 0) + int(partial is not None)
        most = self._most_new_blocks(slot, int(partial is not None) + int(position > 0))
        assert missing <= most, f"slot {slot} takes {missing} states"
        blocks = self._take(missing)
        copied = [] if partial is None else self._split_shared_state(slot, partial, blocks.pop(0))
        entries = copied + table[before:] + blocks
        table.extend(blocks)
        self.has_allocated[slot] = True
        return entries

    def _remember_last_state(self, slot: int) -> None:
        if self.has_allocated[slot]:
            self.last_state[slot] = len(self.table[slot]) - 1 - self.spec.speculative_blocks
            self._stopped_at.setdefault(slot, {})[self.last_state[slot]] = self.requests.computed[slot]
        elif self.table[slot]:
            self.last_state[slot] = len(self.table[slot]) - 1

    def _move_draft_state(self, table: list[int], index: int) -> None:
        """Move a draft state that precedes the running state to the table's end: no other request uses its block."""
        block = table[index]
        assert self.pool.is_private(block), f"draft state {block} is shared or keyed"
        table.append(block)
        table[index] = NULL_BLOCK

    def _split_shared_state(self, slot: int, partial: tuple[int, int], target: int) -> list[int]:
        """Separate a cached state from the running state of the request, which would overwrite it; returns the new
        table entries.

        A new request continues in a private copy. A running request keeps its block, since block tables are
        append-only, and the keys of this block move to the copy. Both are safe because ranks copy before the launch.
        """
        index, source = partial
        if not self.has_allocated[slot]:
            self._copy_into_table(slot, index, source, target)
            return [target]
        assert self.table[slot][index] == source, f"slot {slot}: state {source} is not at {index}"
        moved = self.pool.move_keys(source, target)
        if self._safe:  # the reference emits no event for a move
            self.pool.report_removed([key for key, _ in moved], source, RemoveReason.MOVED)
            for key, num_tokens in moved:
                report_stored_inside(self, slot, target, key, num_tokens)
        self._order_copy(source, target)
        self.pool.touch([source])
        self._note_registered([target])
        return []

    def blocks_alone(self, num_tokens: int, num_encoder: int) -> int:
        """Return the most blocks held at one time: previous state, running state, copy target, checkpoint and draft
        states.
        """
        most = 4 if self.spec.checkpoint_alignment else 3
        return min(self._blocks_for(num_tokens), most) + self.spec.speculative_blocks

    # -- image -------------------------------------------------------------------------------------------------------

    def normalize_table(self, table: list[int], at: RequestProgress) -> list[int] | None:
        """Return the table with null blocks where no state is needed any more; None if a needed state is missing.

        The given table may still list a block that was moved to its end at the old index too.
        """
        first, running = (at.computed - 1) // self.block_size, self._running_index(at)
        if len(table) < running + 1 + self.spec.speculative_blocks:
            return None
        normalized = [NULL_BLOCK] * first
        for index in range(first, len(table)):
            moved = table[index] in table[index + 1 :]
            normalized.append(NULL_BLOCK if moved else table[index])
        there = NULL_BLOCK not in normalized[at.computed // self.block_size :] and normalized[running] != NULL_BLOCK
        return normalized if there else None

    def sealed_prefix(self, slot: int, index: int, at: RequestProgress) -> bytes:
        """Return the digest of the prefix that ends with this block; b"" if the next launch may write the block."""
        ends = (index + 1) * self.block_size <= at.computed
        stays = ends and (index < self._running_index(at) or at.launch_end == at.computed)
        return super().sealed_prefix(slot, index, at) if stays else b""

    def resume(self, slot: int, table: list[int], at: RequestProgress, num_cached_blocks: int | None) -> None:
        """Continue a request with a table from `normalize_table`; finds the block of its running state."""
        super().resume(slot, table, at, num_cached_blocks)
        first, running = (at.computed - 1) // self.block_size, self._running_index(at)
        self.has_allocated[slot] = True
        self.num_retired[slot] = first
        before = [index for index in range(first, running) if table[index] != NULL_BLOCK]
        self.last_state[slot] = before[-1] if before else NO_STATE
        inside = self.pool.key[table[running]] is not None and at.launch_end % self.block_size
        if inside:  # the next launch would overwrite a state with a key: it is copied before that
            self.partial_hit[slot] = (running, table[running])
            self.num_cached[slot] = min(self.num_cached[slot], running)
        # A store may have a key of this state that recovery has not seen, and prove it by the stamp after the state is
        # overwritten: a new stamp prevents that.
        for block in table[running:]:
            if block != NULL_BLOCK and self.pool.key[block] is None:
                self.pool.restamp(block)

    def _key_fits(self, slot: int, index: int, at: RequestProgress) -> bool:
        """Whether the block's key names the state in the block.

        It does if the last launch ended at the prefix of the key, or if the block is before the running state.
        """
        end, running = self.pool.key_tokens[self.table[slot][index]], self._running_index(at)
        stays = end <= at.computed if index < running else index == running and end == at.computed == at.launch_end
        return stays and super()._key_fits(slot, index, at)

    def _running_index(self, at: RequestProgress) -> int:
        return self._blocks_for(at.launch_end) - 1

    # -- window ------------------------------------------------------------------------------------------------------

    def skipped_tokens(self, num_computed: int) -> int:
        """Return the number of computed tokens less one: only the state of the last token is needed."""
        return num_computed - 1

    def release_skipped(self, slot: int, num_processed: int) -> None:
        """Release all states before the last one; the state from which the running state continues is released one step
        later.
        """
        super().release_skipped(slot, num_processed)
        index = self.last_state[slot]
        if index != NO_STATE and index < self._blocks_for(num_processed) - 1:
            self._give_up(slot, [index])

    def _release_range(self, slot: int, first: int, last: int) -> None:
        first = max(first, self.num_retired[slot])
        if first >= last:
            return
        self._give_up(slot, range(last - 1, first - 1, -1))
        self.num_retired[slot] = last

    # -- prefix cache ------------------------------------------------------------------------------------------------

    def find(self, query: Query) -> tuple[list[list[int]], int]:
        """Find the last cached state at an aligned boundary; returns, per group, null blocks and then its block."""
        unit, size = self.replica.hit_alignment, self.block_size
        fine = unit < size and size % unit == 0
        stride = unit if fine else size
        limit = min(query.max_tokens, len(query.digests) * self.hash_size) // stride
        for count in range(limit, 0, -1):
            end = count * stride
            if end % unit != 0:
                continue
            blocks = query.find(query.digests[end // self.hash_size - 1])
            if blocks is not None:
                return [[NULL_BLOCK] * (self._blocks_for(end) - 1) + [block] for block in blocks], end
        return [[] for _ in query.groups], 0

    def drop_margin(self) -> int:
        """Return 0: look-ups of states drop no block."""
        return 0

    def may_have_keys(self, count: int) -> bool:
        """Whether a block can have `count` keys: at most one, since a block holds the state of one prefix."""
        return count <= 1

    def hit_is_ready(self, hit: Sequence[int], num_tokens: int) -> bool:
        """Whether the step that writes the hit's state is executed; otherwise the caller defers the admission."""
        if not hit or hit[-1] == NULL_BLOCK:
            return True
        if self._safe:
            return self.pool.key_step[hit[-1]] <= self.pool.executed_through
        return self.pool.key[hit[-1]] not in self._registered_this_step

    def register_again(self, blocks: Collection[int]) -> None:
        """Let requests that hold these blocks register them again; a running state without a key needs no copy."""
        super().register_again(blocks)
        for slot in [slot for slot, (_, block) in self.partial_hit.items() if block in blocks]:
            if self.has_allocated[slot]:
                del self.partial_hit[slot]

    def note_written(self, slot: int) -> None:
        """Record that steps before the current one wrote the states that the request registered."""
        self._registered_this_step -= {self.pool.key[block] for block in self.table[slot]}

    def _note_registered(self, blocks: Sequence[int]) -> None:
        keys = (self.pool.key[block] for block in blocks)
        self._registered_this_step.update(key for key in keys if key is not None)

    def is_sound(self, slot: int) -> bool:
        """Whether the manager's record of the request is consistent with its table.

        Recorded states are inside the table, released entries are null, the running and draft states have blocks, and
        no state has more tokens than launches computed.
        """
        table, size, end = self.table[slot], len(self.table[slot]), self.requests.launch_end(slot)
        ends = self._stopped_at.get(slot, {})
        inside = all(0 <= index < size and 0 < length <= end for index, length in ends.items())
        released = table[: self.num_retired[slot]]
        kept = table[-1 - self.spec.speculative_blocks :] if self.has_allocated[slot] else []
        whole = self.num_retired[slot] <= size and not any(released) and NULL_BLOCK not in kept
        return inside and whole and self.last_state[slot] < size

    def can_rewind(self, slot: int, num_computed: int) -> bool:
        """Whether at most as many tokens are computed again as there are draft states, and their blocks exist."""
        back = self.requests.computed[slot] - num_computed
        there = NULL_BLOCK not in self.table[slot][num_computed // self.block_size :]
        return back <= self.spec.speculative_blocks and there

    def rewind(self, slot: int, num_computed: int) -> None:
        """Remove the keys of states after more than `num_computed` tokens, because these will be overwritten."""
        for block in self.table[slot][num_computed // self.block_size :]:
            if block != NULL_BLOCK:
                self.pool.drop_keys(block, RemoveReason.DROPPED)
        self.partial_hit.pop(slot, None)
        self.num_cached[slot] = min(self.num_cached[slot], num_computed // self.block_size)
        # Drafts were rejected. Launches in flight were planned behind them and end earlier than planned, so no launch
        # left a state at an end beyond the tokens that were known before this fact.
        verified = min(num_computed, self.requests.num_tokens[slot])
        left = self._stopped_at.get(slot, {})
        for index in [index for index, end in left.items() if end > verified]:
            del left[index]
        self.last_checkpoints.pop(slot, None)

    def register_range(self, slot: int, start: int, end: int, keep: list[bool] | None) -> None:
        """Register only blocks whose state is that at the end of the block: a launch that went further left a later
        state in it.

        Safe with drafts: all tokens up to `end` are known, so no unverified draft token is among them.
        """
        if self._safe:
            assert end * self.block_size <= self.requests.num_tokens[slot], f"slot {slot}: registers unverified drafts"
            exact = [self._ends_in(slot, index) == (index + 1) * self.block_size for index in range(start, end)]
            keep = exact if keep is None else [one and other for one, other in zip(keep, exact, strict=True)]
        super().register_range(slot, start, end, keep)

    def _ends_in(self, slot: int, index: int) -> int:
        """Return after how many tokens of the request the state in this block is, once all launches so far have run; 0
        if unknown.
        """
        ends_at = self.requests.ends_at[slot]
        if index == self._blocks_for(ends_at) - 1:
            return ends_at
        return self._stopped_at.get(slot, {}).get(index, 0)

    def reachable_blocks(self, start: int, end: int, boundaries: Sequence[int]) -> list[bool] | None:
        """Return a mask: one state per interval (of a checkpoint: the next one), those at `boundaries`; None: all."""
        if self._dense:
            return None
        unit, size, every = self.replica.hit_alignment, self.block_size, self.replica.kept_every
        per_segment, keep = every // size, [False] * (end - start)
        if every and per_segment <= 1:
            return None
        if keep and self.replica.checkpoint_percent and end // per_segment > start // per_segment:
            keep[-1] = True
        if per_segment:
            for index in range((start + per_segment) // per_segment * per_segment - 1, end, per_segment):
                keep[index - start] = True
        for boundary in boundaries:
            index = boundary // unit * unit // size - 1
            if start <= index < end:
                keep[index - start] = True
        return keep

    def register_blocks(self, slot: int, num_tokens: int, boundaries: Sequence[int]) -> None:
        """Register the states inside the first `num_tokens` tokens, and the state from which a repeat of the prompt
        continues.
        """
        start = max(self.num_cached[slot], 0)
        super().register_blocks(slot, num_tokens, boundaries)
        end = max(self.num_cached[slot], 0)
        checkpoint = self.last_checkpoints.get(slot)
        if checkpoint is not None and checkpoint[2] == self.requests.launch_end(slot):
            self._register_checkpoint(slot, checkpoint[0], self.table[slot][checkpoint[1]])
        else:
            self._register_chunk_end(slot, num_tokens)
        self._note_registered(self.table[slot][start:end])

    def _register_checkpoint(self, slot: int, position: int, block: int) -> None:
        """Register the state inside the chunk, if a later request can need it; its block has no other key."""
        if block == NULL_BLOCK:
            return  # released: the launch is executed
        if not (self._has_hash(slot, position) and self._is_kept(slot, position)):
            self.pool.drop_keys(block, RemoveReason.PROMOTED)
        elif self.pool.key_tokens[block] != position:
            self.pool.drop_keys(block, RemoveReason.PROMOTED)  # with commit=reference: of the end of the block
            self._registered_this_step.add(register_inside_block(self, slot, block, position))

    def _is_kept(self, slot: int, position: int) -> bool:
        if position in (self._prompt_boundary(slot, self.replica.hit_alignment), self.requests.single_group_hit[slot]):
            return True
        index, inside = divmod(position, self.block_size)
        return not inside and (self.reachable_blocks(index - 1, index, ()) or [True])[0]

    def _has_hash(self, slot: int, num_tokens: int) -> bool:
        """Whether these tokens are known, none a draft, and the engine has sent the hash of the last ones."""
        known = min(self.requests.num_tokens[slot], len(self.requests.content[slot].digests) * self.hash_size)
        return num_tokens <= known

    def _register_chunk_end(self, slot: int, num_tokens: int) -> None:
        if num_tokens <= 0 or num_tokens % self.hash_size != 0 or not self._continues_at(slot, num_tokens):
            return
        if self._safe and self.requests.ends_at[slot] != num_tokens:
            return
        if num_tokens // self.hash_size > len(self.requests.content[slot].digests):
            return  # the engine has not sent the hash
        index = self._blocks_for(num_tokens) - 1
        if index >= len(self.table[slot]):
            return
        block = self.table[slot][index]
        # A block with a key of this length was adopted or registered before, not written by this step.
        if block == NULL_BLOCK or self.pool.key_tokens[block] == num_tokens:
            return
        self._registered_this_step.add(register_inside_block(self, slot, block, num_tokens))
        if num_tokens % self.block_size:
            self.partial_hit[slot] = (index, block)
            self.num_cached[slot] = index

    def _continues_at(self, slot: int, num_tokens: int) -> bool:
        """Whether another request can continue at this end of a chunk, though it may be inside a block.

        The running state at the single-group hit is kept only by the chunk of the prompt that ends there: decode steps
        change it.
        """
        if num_tokens == self._prompt_boundary(slot, self.hash_size):
            return True
        if not self.spec.checkpoints_single_group_hits or num_tokens != self.requests.single_group_hit[slot]:
            return False
        return self.requests.computed[slot] < num_tokens <= self.requests.num_prompt[slot]

    def _prompt_boundary(self, slot: int, unit: int) -> int:
        """Return the last multiple of `unit` at which another request with the same prompt continues."""
        return self._rule.last_boundary(self.requests.num_prompt[slot], unit)
