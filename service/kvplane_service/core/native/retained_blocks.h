// What the lists of retained blocks ask of the pool and change in it. `pool.h` includes this.
#pragma once

#include "pool.h"

namespace kvplane {

inline void RetainedBlocks::LeaveFree(Block block) {
    if (places_.empty() || !Remove(block)) pool_.free.Remove(block);
}

inline void RetainedBlocks::Renew(BlockList blocks) {
    for (const Block block : blocks) LeaveFree(block);
    Enter(&blocks);
    pool_.free.Append(blocks);
}

inline Int RetainedBlocks::PriorityOf(Block block) const {
    if (!pool_.HasKey(block)) return -1;
    Int highest = PriorityOf(pool_.records[block].key);
    if (const auto further = pool_.more_keys.find(block); further != pool_.more_keys.end()) {
        for (const uint32_t record : further->second)
            highest = std::max(highest, PriorityOf(pool_.records[record].key));
    }
    return highest;
}

// A free one is evicted next: it cannot hit any more.
inline bool RetainedBlocks::HasRoomFor(const Retention& wanted) const {
    const auto before = Find(wanted);
    const Int named = num_named_ + static_cast<Int>(wanted.keys.size()) -
                      (before == each_.end() ? 0 : static_cast<Int>(before->second.keys.size()));
    const bool has_place = before != each_.end() || static_cast<Int>(each_.size()) < kMaxRetained;
    return has_place && named <= kMaxRetainedPerBlock * pool_.num_blocks;
}
inline void RetainedBlocks::NoteLost(Block block, std::span<const Key> keys) {
    for (const Key& key : keys) {
        if (of_key_.contains(key)) lost_.push_back(key);
    }
    if (Remove(block)) pool_.free.Prepend({block});
}

inline void RetainedBlocks::Suspend() {
    is_active_ = false;
    BlockList blocks;
    Pop(num_free(), &blocks);
    pool_.free.Append(blocks);
}

inline void RetainedBlocks::ForgetAbsent(const std::vector<Key>& keys) {
    for (const Key& key : keys) {
        const auto found = of_key_.find(key);
        if (found == of_key_.end() || pool_.Find(key, kInside) != kNullBlock) continue;
        const std::map<Int, Int> numbers = found->second;
        for (const auto& [number, position] : numbers) {
            ForgetKey(number, key);
            Retention& one = each_.at(number);
            one.keys.erase(position);
            if (one.keys.empty()) each_.erase(number);
        }
    }
}

// Puts the free blocks with these keys where they belong now: those that are not retained any more at the back of the
// free list, as if they were used now.
inline void RetainedBlocks::PlaceAgain(const std::vector<Key>& keys) {
    BlockList moved;
    for (const Key& key : keys) {
        for (const Block block : pool_.BlocksOf(key)) {
            if (pool_.references[block] > 0) continue;
            const auto place = places_.find(block);
            const Int is = place == places_.end() ? -1 : place->second.first, priority = PriorityOf(block);
            if (is == priority) continue;
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
