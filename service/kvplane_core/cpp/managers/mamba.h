// Recurrent state that is cached: a block holds one state, and a request needs only its last state.
#pragma once

#include "../checkpoints.h"
#include "base.h"

namespace kvplane {

constexpr Int kNoState = -1;

class AlignedStateManager final : public GroupManager {
  public:
    AlignedStateManager(Int number, const Spec& replica_spec, BlockPool& block_pool, Requests& all, Orders& step_orders)
        : GroupManager(number, replica_spec, block_pool, all, step_orders), rule_(replica_spec, spec) {}

    // -- tables ------------------------------------------------------------------------------------------------------

    void Grow(Int slot) override {
        GroupManager::Grow(slot);
        if (table.size() <= last_state.size()) return;
        last_state.resize(table.size(), kNoState);
        num_retired.resize(table.size(), 0);
        has_allocated.resize(table.size(), 0);
    }

    void TakeAll(Int slot, BlockList* into) override {
        last_state[slot] = kNoState;
        num_retired[slot] = 0;
        has_allocated[slot] = 0;
        stopped_at.erase(slot);
        last_checkpoints.erase(slot);
        GroupManager::TakeAll(slot, into);
    }

    void NewStep() override { registered_this_step.clear(); }

    // -- allocation --------------------------------------------------------------------------------------------------

    Int BlocksNeeded(const Need& need, const BlockList& hit) const override {
        const bool partial = EndsInsideBlock(hit, need.local_computed) || partial_hit.contains(need.slot);
        const bool has_external = need.total_computed > need.local_computed;
        const Int evictable = CountEvictable(hit);
        if (has_external && replica.safe) return NewStatesWithExternal(need, Size(hit), partial) + evictable;
        const bool checkpoints = Checkpoint(need.slot, need.total_computed, need.num_main) > 0;
        const Int fresh = NewStates(need.slot, need.num_main, Size(hit), partial, checkpoints);
        if (!has_external) return fresh + evictable;
        // vLLM's count can be too small: its allocation fails then. A replica with its rule refuses.
        const auto first = static_cast<size_t>(std::max<Int>(SkippedTokens(need.total_computed), 0) / block_size);
        const Int taken = NewStatesWithExternal(need, Size(hit), partial) + CountEvictable(hit, first);
        return std::max(fresh + evictable, taken);
    }

    Int BlocksToExtend(Int slot, Int, Int num_main) const override {
        const bool checkpoints = Checkpoint(slot, requests.computed[slot], num_main) > 0;
        return NewStates(slot, num_main, 0, partial_hit.contains(slot), checkpoints);
    }

    void Allocate(Int slot, Int, Int num_main, Int, BlockList* fresh) override {
        BlockList& blocks = table[slot];
        const Int drafts = spec.speculative_blocks, required = BlocksFor(num_main) + drafts, before = Size(blocks);
        const auto found = partial_hit.find(slot);
        const bool is_partial = found != partial_hit.end();
        std::pair<Int, Block> partial;
        if (is_partial) {
            partial = found->second;
            partial_hit.erase(found);
        }
        const Int position = Checkpoint(slot, requests.computed[slot], num_main);
        if (required <= before && !is_partial && !position) {
            has_allocated[slot] = 1;
            return;
        }
        RememberLastState(slot);
        Int gap_end = required - drafts - 1;
        if (position) {
            --gap_end;
            last_checkpoints[slot] = {position, gap_end, num_main};
            stopped_at[slot][gap_end] = position;
        }
        if (gap_end > before) blocks.resize(static_cast<size_t>(gap_end), kNullBlock);
        if (has_allocated[slot]) {
            for (Int index = before - drafts; index < std::min(before, gap_end); ++index) MoveDraftState(slot, index);
        }
        const Int missing = std::max<Int>(required - Size(blocks), 0) + is_partial;
        Require(missing <= MostNewBlocks(slot, is_partial + (position > 0)), "a chunk takes too many states");
        BlockList taken;
        Take(missing, &taken);
        if (is_partial) {
            if (SplitSharedState(slot, partial, taken.front())) fresh->push_back(taken.front());
            taken.erase(taken.begin());
        }
        fresh->insert(fresh->end(), blocks.begin() + before, blocks.end());
        fresh->insert(fresh->end(), taken.begin(), taken.end());
        blocks.insert(blocks.end(), taken.begin(), taken.end());
        has_allocated[slot] = 1;
    }

    Int BlocksAlone(Int num_tokens, Int) const override {
        return std::min<Int>(BlocksFor(num_tokens), spec.checkpoint_alignment ? 4 : 3) + spec.speculative_blocks;
    }

    // -- window ------------------------------------------------------------------------------------------------------

    bool HasWindow() const override { return false; }
    Int SkippedTokens(Int num_computed) const override { return num_computed - 1; }

    void ReleaseSkipped(Int slot, Int num_processed) override {
        const Int last = std::min((num_processed - 1) / block_size, Size(table[slot]));
        if (num_processed > 1 && num_retired[slot] < last) {
            BlockList indices;
            for (Int index = last - 1; index >= num_retired[slot]; --index)
                indices.push_back(static_cast<Block>(index));
            GiveUp(slot, &indices);
            num_retired[slot] = last;
        }
        const Int index = last_state[slot];
        if (index == kNoState || index >= BlocksFor(num_processed) - 1) return;
        BlockList one{static_cast<Block>(index)};
        GiveUp(slot, &one);
    }

    Int WindowBound(Int slot, Int) const override {
        const Int next_retired = (num_retired[slot] + 1) * block_size + 1, index = last_state[slot];
        if (index == kNoState || table[slot][index] == kNullBlock) return next_retired;
        return std::min(next_retired, (index + 1) * block_size + 1);
    }

    Int AllocBound(Int slot) const override {
        return GroupManager::AllocBound(slot) - spec.speculative_blocks * block_size;
    }

    // -- prefix cache ------------------------------------------------------------------------------------------------

    Int FindPrefix(const Query& query, Rows* rows) const override {
        const Int unit = replica.hit_alignment(),
                  stride = unit < block_size && block_size % unit == 0 ? unit : block_size;
        rows->assign(query.groups->size(), {});
        BlockList blocks;
        for (Int count = FloorDiv(std::min(query.max_tokens, query.digests->count() * hash_size), stride); count > 0;
             --count) {
            const Int end = count * stride;
            if (end % unit != 0) continue;
            if (!FindInGroups(query, query.digests->at(end / hash_size - 1), &blocks)) continue;
            for (size_t row = 0; row < blocks.size(); ++row) {
                (*rows)[row].assign(static_cast<size_t>(BlocksFor(end) - 1), kNullBlock);
                (*rows)[row].push_back(blocks[row]);
            }
            return end;
        }
        return 0;
    }

    Int DropMargin() const override { return 0; }

    bool HitIsReady(const BlockList& hit, Int) const override {
        if (hit.empty() || hit.back() == kNullBlock) return true;
        if (replica.safe) return pool.key_step[hit.back()] <= pool.executed_through;
        return !registered_this_step.contains(pool.records[hit.back()].key);
    }

    void RegisterAgain(const std::set<Block>& blocks) override {
        GroupManager::RegisterAgain(blocks);
        std::erase_if(partial_hit, [&](const auto& entry) {
            return blocks.contains(entry.second.second) && has_allocated[entry.first];
        });
    }

    void NoteWritten(Int slot) override {
        for (const Block block : table[slot]) registered_this_step.erase(pool.records[block].key);
    }

    const std::set<Key>& RecordedKeys() const override { return registered_this_step; }

    // A block holds the state of one prefix.
    bool MayHaveKeys(size_t count) const override { return count <= 1; }

    // Recorded states are inside the table, released entries are null, the running and draft states have blocks, and no
    // state has more tokens than launches computed.
    bool IsSound(Int slot) const override {
        const Int size = Size(table[slot]), end = requests.LaunchEnd(slot), retired = num_retired[slot];
        if (last_state[slot] >= size || retired > size || HasBlock(slot, 0, retired)) return false;
        for (Int index = size - 1 - spec.speculative_blocks; has_allocated[slot] && index < size; ++index) {
            if (index >= 0 && table[slot][index] == kNullBlock) return false;
        }
        const auto left = stopped_at.find(slot);
        return left == stopped_at.end() || std::all_of(left->second.begin(), left->second.end(), [&](const auto& one) {
            return one.first >= 0 && one.first < size && one.second > 0 && one.second <= end;
        });
    }

    bool Releases(Int slot, Int num_processed) const override {
        const Int index = last_state[slot];
        const bool last_goes = index != kNoState && index < BlocksFor(num_processed) - 1;
        return (last_goes && table[slot][index] != kNullBlock) || GroupManager::Releases(slot, num_processed);
    }

    bool CanRewind(Int slot, Int num_computed) const override {
        if (requests.computed[slot] - num_computed > spec.speculative_blocks) return false;
        const BlockList& blocks = table[slot];
        for (Int index = num_computed / block_size; index < Size(blocks); ++index) {
            if (blocks[index] == kNullBlock) return false;
        }
        return true;
    }

    void Rewind(Int slot, Int num_computed) override {
        const BlockList& blocks = table[slot];
        for (Int index = num_computed / block_size; index < Size(blocks); ++index) {
            if (blocks[index] != kNullBlock) pool.DropKeys(blocks[index], kDropped);
        }
        partial_hit.erase(slot);
        num_cached[slot] = std::min(num_cached[slot], num_computed / block_size);
        const Int verified = std::min(num_computed, requests.num_tokens[slot]);
        if (const auto left = stopped_at.find(slot); left != stopped_at.end())
            std::erase_if(left->second, [&](const auto& entry) { return entry.second > verified; });
        last_checkpoints.erase(slot);
    }

    bool ReachableBlocks(Int start, Int end, const Positions& boundaries, std::vector<bool>* keep) const override {
        if (replica.dense()) return false;
        const Int unit = replica.hit_alignment(), per_segment = replica.kept_every / block_size;
        if (replica.kept_every && per_segment <= 1) return false;
        keep->assign(static_cast<size_t>(end - start), false);
        // Of a checkpoint: the next state after a multiple.
        if (end > start && replica.checkpoint_percent && end / per_segment > start / per_segment) keep->back() = true;
        if (per_segment) {
            for (Int index = (start + per_segment) / per_segment * per_segment - 1; index < end; index += per_segment)
                (*keep)[static_cast<size_t>(index - start)] = true;
        }
        for (const Int boundary : boundaries) {
            const Int index = FloorDiv(FloorDiv(boundary, unit) * unit, block_size) - 1;
            if (start <= index && index < end) (*keep)[static_cast<size_t>(index - start)] = true;
        }
        return true;
    }

    void RegisterBlocks(Int slot, Int num_tokens, const Positions& boundaries) override {
        const Int start = std::max<Int>(num_cached[slot], 0);
        GroupManager::RegisterBlocks(slot, num_tokens, boundaries);
        const Int end = std::min(std::max<Int>(num_cached[slot], 0), Size(table[slot]));
        const auto found = last_checkpoints.find(slot);
        if (found != last_checkpoints.end() && found->second[2] == requests.LaunchEnd(slot)) {
            RegisterCheckpoint(slot, found->second[0], table[slot][found->second[1]]);
        } else {
            RegisterChunkEnd(slot, num_tokens);
        }
        for (Int index = start; index < end; ++index) NoteRegistered(table[slot][index]);
    }

    // Only blocks whose state is that at the end of the block: a launch that went further left a later one.
    void RegisterRange(Int slot, Int start, Int end, const std::vector<bool>* keep) override {
        if (!replica.safe) return GroupManager::RegisterRange(slot, start, end, keep);
        Require(end * block_size <= requests.num_tokens[slot], "unverified drafts are registered");
        std::vector<bool> exact(static_cast<size_t>(end - start));
        for (Int index = start; index < end; ++index) {
            const auto at = static_cast<size_t>(index - start);
            exact[at] = EndsIn(slot, index) == (index + 1) * block_size && (keep == nullptr || (*keep)[at]);
        }
        GroupManager::RegisterRange(slot, start, end, &exact);
    }

    // -- images ------------------------------------------------------------------------------------------------------

    // A block that was moved to the end of its table may be listed at its old index too.
    bool NormalizeTable(BlockList* blocks, const Progress& at) const override {
        const Int first = (at.computed - 1) / block_size, running = RunningIndex(at), size = Size(*blocks);
        if (size < running + 1 + spec.speculative_blocks) return false;
        std::fill(blocks->begin(), blocks->begin() + first, kNullBlock);
        std::set<Block> behind;
        bool there = true;
        for (Int index = size - 1; index >= first; --index) {
            Block& block = (*blocks)[static_cast<size_t>(index)];
            if (!behind.insert(block).second) block = kNullBlock;
            there &= block != kNullBlock || (index < at.computed / block_size && index != running);
        }
        return there;
    }

    Digest SealedPrefix(Int slot, Int index, const Progress& at) const override {
        const bool ends = (index + 1) * block_size <= at.computed;  // the next launch may write the block otherwise
        const bool stays = ends && (index < RunningIndex(at) || at.launch_end == at.computed);
        return stays ? GroupManager::SealedPrefix(slot, index, at) : Digest();
    }

    void Resume(Int slot, BlockList blocks, const Progress& at, Int num_registered) override {
        GroupManager::Resume(slot, std::move(blocks), at, num_registered);
        const Int first = (at.computed - 1) / block_size, running = RunningIndex(at);
        const BlockList& mine = table[slot];
        has_allocated[slot] = 1;
        num_retired[slot] = first;
        last_state[slot] = kNoState;
        for (Int index = first; index < running; ++index) {
            if (mine[index] != kNullBlock) last_state[slot] = index;
        }
        if (pool.HasKey(mine[running]) && at.launch_end % block_size) {  // copied before the next launch overwrites it
            partial_hit[slot] = {running, mine[running]};
            num_cached[slot] = std::min(num_cached[slot], running);
        }
        // A store may have a key of this state that recovery has not seen, and prove it by the stamp after the state is
        // overwritten: a new stamp prevents that.
        for (Int index = running; index < Size(mine); ++index) {
            if (mine[index] != kNullBlock && !pool.HasKey(mine[index])) pool.Restamp(mine[index]);
        }
    }

    Column last_state;   // by slot: index of the state from which the last allocated block continues
    Column num_retired;  // by slot: leading entries of the table that are released
    std::vector<uint8_t> has_allocated;
    std::map<Int, std::map<Int, Int>> stopped_at;  // slot -> index -> tokens of the state that a launch left there
    std::map<Int, std::array<Int, 3>> last_checkpoints;  // slot -> position, index, end of the chunk
    std::set<Key> registered_this_step;                  // keys of states that this step's launch writes

  private:
    Int RunningIndex(const Progress& at) const { return BlocksFor(at.launch_end) - 1; }

    // The last launch ended at the prefix of the key, or the block is before the running state.
    bool KeyFits(Int slot, Int index, const Progress& at) const override {
        const Int end = pool.KeyTokens(table[slot][index]), running = RunningIndex(at);
        const bool is_last = index == running && end == at.computed && end == at.launch_end;
        return (index < running ? end <= at.computed : is_last) && GroupManager::KeyFits(slot, index, at);
    }

    Int NewStatesWithExternal(const Need& need, Int num_hit, bool partial) const {
        const Int length = std::max(std::max<Int>(need.total_computed - 1, 0) / block_size, num_hit);
        const Int external = std::max<Int>(BlocksFor(need.total_computed) - length, 0),
                  running = BlocksFor(need.num_main);
        const Int checkpoints = Checkpoint(need.slot, need.total_computed, need.num_main) > 0;
        const Int filled = std::max(length + external, running - 1 - checkpoints);
        return external + std::max<Int>(running + spec.speculative_blocks - filled, 0) + partial;
    }

    Int NewStates(Int slot, Int num_main, Int num_hit, bool partial, bool checkpoints) const {
        Int count = BlocksFor(num_main) + spec.speculative_blocks - num_hit - Size(table[slot]);
        if (partial) count = std::max<Int>(count, 0) + 1;
        return std::max<Int>(std::min(count, MostNewBlocks(slot, partial + checkpoints)), 0);
    }

    Int MostNewBlocks(Int slot, Int others) const {
        return 1 + others + (has_allocated[slot] ? 0 : spec.speculative_blocks);
    }

    // The position of the checkpoint for which the chunk [start, end) needs a block; 0: none.
    Int Checkpoint(Int slot, Int start, Int end) const {
        const Int position = rule_.Position(start, end);
        if (position == 0) return 0;
        const BlockList& blocks = table[slot];
        const Int index = rule_.Index(end), size = Size(blocks);
        const bool is_draft = has_allocated[slot] && size - spec.speculative_blocks <= index && index < size;
        if (is_draft && replica.safe) return position;
        const Int prefill_end = std::max(requests.num_prompt[slot], requests.num_tokens[slot] - 1);
        const bool is_free = index >= size || blocks[index] == kNullBlock || is_draft;
        const bool retains = replica.kept_every && !replica.checkpoint_percent;
        return is_free && (retains || end >= prefill_end) ? position : 0;
    }

    void RememberLastState(Int slot) {
        const Int size = Size(table[slot]);
        if (has_allocated[slot]) {
            last_state[slot] = size - 1 - spec.speculative_blocks;
            stopped_at[slot][last_state[slot]] = requests.computed[slot];
        } else if (size) {
            last_state[slot] = size - 1;
        }
    }

    void MoveDraftState(Int slot, Int index) {
        BlockList& blocks = table[slot];
        const Block block = blocks[index];
        Require(pool.IsPrivate(block), "a draft state is shared or has a key");
        blocks.push_back(block);
        blocks[index] = kNullBlock;
    }

    // Separates a cached state from the running state of the request; whether the target is a new entry of the table.
    bool SplitSharedState(Int slot, const std::pair<Int, Block>& partial, Block target) {
        const auto [index, source] = partial;
        if (!has_allocated[slot]) {
            CopyIntoTable(slot, index, source, target);
            return true;
        }
        Require(table[slot][index] == source, "a shared state is not in the table");
        const auto moved = pool.MoveKeys(source, target);
        if (replica.safe) {
            std::vector<Key> keys;
            for (const auto& [key, count] : moved) keys.push_back(key);
            pool.ReportRemoved(source, keys, kMoved);
            for (const auto& [key, count] : moved) ReportStoredInside(slot, target, key, count);
        }
        OrderCopy(source, target);
        pool.Touch(source);
        NoteRegistered(target);
        return false;
    }

    void NoteRegistered(Block block) {
        if (block != kNullBlock && pool.HasKey(block)) registered_this_step.insert(pool.records[block].key);
    }

    Int EndsIn(Int slot, Int index) const {
        const Int ends_at = requests.ends_at[slot];
        if (index == BlocksFor(ends_at) - 1) return ends_at;
        const auto left = stopped_at.find(slot);
        if (left == stopped_at.end()) return 0;
        const auto found = left->second.find(index);
        return found == left->second.end() ? 0 : found->second;
    }

    void RegisterCheckpoint(Int slot, Int position, Block block) {
        if (block == kNullBlock) return;
        if (!(HasHash(slot, position) && IsKept(slot, position))) {
            pool.DropKeys(block, kPromoted);
        } else if (pool.KeyTokens(block) != position) {
            pool.DropKeys(block, kPromoted);
            registered_this_step.insert(RegisterInsideBlock(slot, block, position));
        }
    }

    bool IsKept(Int slot, Int position) const {
        if (position == PromptBoundary(slot, replica.hit_alignment()) || position == requests.single_group_hit[slot])
            return true;
        if (position % block_size) return false;
        const Int index = position / block_size;
        std::vector<bool> keep;
        return !ReachableBlocks(index - 1, index, {}, &keep) || keep[0];
    }

    bool HasHash(Int slot, Int num_tokens) const {
        return num_tokens <= std::min(requests.num_tokens[slot], requests.content[slot].count() * hash_size);
    }

    void RegisterChunkEnd(Int slot, Int num_tokens) {
        if (num_tokens <= 0 || num_tokens % hash_size != 0 || !ContinuesAt(slot, num_tokens)) return;
        if (replica.safe && requests.ends_at[slot] != num_tokens) return;
        if (num_tokens / hash_size > requests.content[slot].count()) return;
        const Int index = BlocksFor(num_tokens) - 1;
        if (index >= Size(table[slot])) return;
        const Block block = table[slot][index];
        if (block == kNullBlock || pool.KeyTokens(block) == num_tokens) return;
        registered_this_step.insert(RegisterInsideBlock(slot, block, num_tokens));
        if (num_tokens % block_size) {
            partial_hit[slot] = {index, block};
            num_cached[slot] = index;
        }
    }

    bool ContinuesAt(Int slot, Int num_tokens) const {
        if (num_tokens == PromptBoundary(slot, hash_size)) return true;
        if (!spec.checkpoints_single_group_hits || num_tokens != requests.single_group_hit[slot]) return false;
        return requests.computed[slot] < num_tokens && num_tokens <= requests.num_prompt[slot];
    }

    Int PromptBoundary(Int slot, Int unit) const { return rule_.LastBoundary(requests.num_prompt[slot], unit); }

    const CheckpointRule rule_;
};

}  // namespace kvplane
