// What the retentions ask of tiers that retain, and change in them. `tier.h` includes this.
#pragma once

#include "tier.h"

namespace kvplane {

inline bool RetainedBlocks::HasRoomFor(const Retention& wanted) const {
    const auto before = Find(wanted);
    const Int named = num_named_ + static_cast<Int>(wanted.keys.size()) -
                      (before == each_.end() ? 0 : static_cast<Int>(before->second.keys.size()));
    const bool has_place = before != each_.end() || static_cast<Int>(each_.size()) < kMaxRetained;
    Int num_blocks = pool_.num_blocks;
    for (const Tier* tier : tiers) num_blocks += tier->num_slots;
    return has_place && named <= kMaxRetainedPerBlock * num_blocks;
}

inline void RetainedBlocks::ForgetAbsent(const std::vector<Key>& keys) {
    for (const Key& key : keys) {
        const auto found = of_key_.find(key);
        if (found == of_key_.end() || pool_.Find(key, kInside) != kNullBlock) continue;
        const auto has_key = [&](const Tier* one) { return one->HasOrWrites(key); };
        if (std::any_of(holders.begin(), holders.end(), has_key)) continue;
        const std::map<Int, Int> numbers = found->second;
        for (const auto& [number, position] : numbers) {
            Retention& one = each_.at(number);
            ForgetKey(number, one.keys.at(position));
            one.keys.erase(position);
            if (one.keys.empty()) each_.erase(number);
        }
    }
}

// Puts the free blocks and the slots with these keys where they belong now: those that are not retained any more at the
// back of the free list, as if they were used now.
inline void RetainedBlocks::PlaceAgain(const std::vector<Key>& keys) {
    BlockList moved;
    for (const Key& key : keys) {
        for (Tier* tier : tiers) tier->PlaceAgain(key);
        for (const Block block : pool_.BlocksOf(key)) {
            if (pool_.references[block] > 0) continue;
            const Int priority = PriorityOf(block);
            if (PriorityAt(block) == priority) continue;
            LeaveFree(block);
            if (priority < 0 || !is_active_) {
                moved.push_back(block);
            } else {
                Put(priority, block);
            }
        }
    }
    pool_.free.Append(moved);
}

}  // namespace kvplane
