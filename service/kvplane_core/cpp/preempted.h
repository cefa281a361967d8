// What a preempted request leaves behind, so that it continues from where it was when it comes back.
#pragma once

#include "coordinator.h"

namespace kvplane {

// Registers what the longest hit needs that the blocks of a running request can give, in all groups or in none.
inline void LeaveHit(Coordinator& blocks, Int slot) {
    struct Left {
        GroupManager* manager;
        Int first, stop;
        std::vector<bool> keep;
    };
    const Requests& requests = blocks.requests;
    Int end = requests.computed[slot];
    for (const GroupManager* one : blocks.caching())
        end = std::min(end, (one->num_cached[slot] - one->drops_last_block) * one->block_size);
    end -= end % blocks.spec.scheduler_block_size;
    // A running state is that of its last token only.
    if (end <= 0 || (blocks.has_states && requests.ends_at[slot] != end)) return;
    std::vector<Left> left;
    for (GroupManager* one : blocks.caching()) {
        Left of{one, std::max<Int>(one->SkippedTokens(end), 0) / one->block_size, one->num_cached[slot], {}};
        Positions at;
        at.Add(end);
        if (of.first >= of.stop || !one->ReachableBlocks(of.first, of.stop, at, &of.keep)) continue;
        for (Int index = of.first; index < of.stop; ++index) {
            if (of.keep[static_cast<size_t>(index - of.first)] && one->table[slot][index] == kNullBlock) return;
        }
        left.push_back(std::move(of));
    }
    for (const Left& of : left) of.manager->RegisterRange(slot, of.first, of.stop, &of.keep);
}

}  // namespace kvplane
