// Removes the keys of many blocks of a pool, or keeps those that the stamps in the page memory confirm.
#pragma once

#include "pool.h"

namespace kvplane {

class KeyDropper {
  public:
    explicit KeyDropper(BlockPool& pool) : pool_(pool) {}

    // Drops the keys of `count` blocks from `first` on that are not confirmed, with one REMOVED event per domain and
    // group; returns the block to go on with, or the number of blocks.
    Int DropUnproven(Int first, Int count, const Shown& shown) {
        BlockList unproven;
        Int block = first;
        const Int end = std::min(pool_.num_blocks, first + count);
        for (; block < end; ++block) {
            if (!pool_.HasKey(static_cast<Block>(block))) continue;
            if (IsProven(static_cast<Block>(block), shown)) {
                pool_.key_step[block] = 0;
            } else {
                unproven.push_back(static_cast<Block>(block));
            }
        }
        Report(unproven);
        for (const Block one : unproven) pool_.Restamp(one);
        return block;
    }

    // Drops all keys of `count` blocks from `first` on, without events.
    Int DropAll(Int first, Int count) {
        std::vector<Key> unused;
        Int block = first;
        for (; block < pool_.num_blocks && block - first < count; ++block) {
            if (!pool_.Unregister(static_cast<Block>(block), &unused)) continue;
            unused.clear();
            pool_.Restamp(static_cast<Block>(block));
        }
        return block;
    }

  private:
    bool IsProven(Block block, const Shown& shown) const {
        if (block >= shown.size || pool_.key_step[block] > pool_.executed_through) return false;
        const uint64_t stamp = shown.stamps[block], reset = shown.stamps[kNullBlock];
        return stamp == pool_.stamp[block] && (reset == 0 || InTime(stamp) > InTime(reset));
    }

    void Report(const BlockList& blocks) {
        std::map<uint32_t, std::pair<std::vector<Key>, BlockList>> by_pair;
        std::vector<Key> keys;
        for (const Block block : blocks) {
            keys.clear();
            pool_.Unregister(block, &keys);
            for (const Key& key : keys) {
                auto& [of_pair, with] = by_pair[key.pair];
                of_pair.push_back(key);
                with.push_back(block);
            }
        }
        for (const auto& [pair, found] : by_pair) pool_.ReportAll(found.first, found.second, kUnverified);
    }

    BlockPool& pool_;
};

}  // namespace kvplane
