// What the eviction policies WINDOW_TAIL and TURN_TAIL ask of a group of layers.
#pragma once

#include "checkpoints.h"
#include "managers/base.h"

namespace kvplane {

// Ranges of indices in a table.
class KeptIndices {
  public:
    // Of the blocks that are treated as any other when they leave the window, see `kept_indices`.
    KeptIndices(const GroupManager& manager, Int slot) {
        const Spec& spec = manager.replica;
        const Requests& requests = manager.requests;
        for (const Int at : ReplayBoundaries(spec, requests.num_prompt[slot])) Add(manager, at);
        Add(manager, requests.single_group_hit[slot]);
        Add(manager, requests.HitEnd(slot));
    }

    bool Contains(Int index) const {
        return std::any_of(ranges_.begin(), ranges_.end(),
                           [&](const auto& range) { return range.first <= index && index < range.second; });
    }

  private:
    // Adds the blocks of a hit that ends at this position, or one alignment unit before it.
    void Add(const GroupManager& manager, Int position) {
        const Int unit = manager.replica.hit_alignment(), end = FloorDiv(position, unit) * unit;
        if (end == 0) return;
        const Int skipped = std::max<Int>(manager.SkippedTokens(std::max<Int>(end - unit, 0)), 0);
        ranges_.emplace_back(skipped / manager.block_size,
                             CeilDiv(end, manager.block_size) + Int{manager.drops_last_block});
    }

    std::vector<std::pair<Int, Int>> ranges_;
};

// The tokens of the last prefix of the prompt at which another request can continue.
inline Int LastState(const GroupManager& manager, Int slot) {
    const CheckpointRule rule(manager.replica, manager.spec);
    return rule.LastBoundary(manager.requests.num_prompt[slot], manager.hash_size);
}

// Divides blocks that a running request gives up, which are at these indices of its table.
inline Divided SplitLeft(const GroupManager& manager, Int slot, const BlockList& indices, const BlockList& blocks) {
    Divided divided;
    auto& [left, rest] = divided;
    if (manager.pool.hazard)
        manager.pool.hazard->NoteOwners(slot, blocks, manager.block_size, [&](size_t at) { return Int{indices[at]}; });
    const Requests& requests = manager.requests;
    if (manager.HasWindow()) {
        const KeptIndices kept(manager, slot);
        for (size_t at = 0; at < blocks.size(); ++at) (kept.Contains(indices[at]) ? rest : left).push_back(blocks[at]);
    } else if (manager.replica.policy == kTurnTail && manager.replica.partial_hits) {
        const std::array<Int, 3> ends{requests.single_group_hit[slot], requests.HitEnd(slot),
                                      LastState(manager, slot)};
        for (const Block block : blocks) {
            const bool is_end = std::find(ends.begin(), ends.end(), manager.pool.KeyTokens(block)) != ends.end();
            (is_end ? rest : left).push_back(block);
        }
    } else {
        rest = blocks;
    }
    return divided;
}

inline void NoteCopied(GroupManager& manager, Int slot, Block source) {
    if (manager.replica.policy != kTurnTail) return;
    const Int end = manager.requests.HitEnd(slot);
    if (manager.pool.KeyTokens(source) == end && end < LastState(manager, slot)) manager.pool.free.NoteCopied(source);
}

// Counts the states at the end of the request's prompt as used now, if they are free.
inline void RenewStates(const std::vector<std::unique_ptr<GroupManager>>& managers, Int slot) {
    for (const auto& one : managers) {
        const Int count = LastState(*one, slot) / one->hash_size;
        if (one->HasWindow() || count <= 0 || count > one->requests.content[slot].count()) continue;
        BlockList resting = one->pool.BlocksOf(one->KeyOf(slot, count));
        std::erase_if(resting, [&](Block block) { return one->pool.references[block] > 0; });
        BlockPool& pool = one->pool;
        if (!pool.split) {
            pool.retained.Renew(resting);
            continue;
        }
        for (const Block block : resting) pool.split->Remove(pool, block);
        pool.split->Append(pool, resting);
    }
}

}  // namespace kvplane
