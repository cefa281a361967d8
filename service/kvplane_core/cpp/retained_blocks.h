// What the lists of retained blocks ask of the pool and change in it. `pool.h` includes this.
#pragma once

#include "pool.h"

namespace kvplane {

inline void RetainedBlocks::LeaveFree(Block block) {
    if (num_free() == 0 || !Remove(block)) pool_.free.Remove(block);
}

inline void RetainedBlocks::Renew(BlockList blocks) {
    for (const Block block : blocks) LeaveFree(block);
    Enter(&blocks);
    pool_.free.Append(blocks);
}

inline Int RetainedBlocks::PriorityOf(Block block) const {
    if (!pool_.HasKey(block)) return -1;
    Int highest = PriorityOf(pool_.records[block].key, kDevice);
    if (const auto further = pool_.more_keys.find(block); further != pool_.more_keys.end()) {
        for (const uint32_t record : further->second)
            highest = std::max(highest, PriorityOf(pool_.records[record].key, kDevice));
    }
    return highest;
}

// A free one is evicted next: it cannot hit any more.
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

}  // namespace kvplane
