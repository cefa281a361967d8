// Blocks that loads of an earlier engine life may still write: they are held, so that they are not allocated.
#pragma once

#include "pool.h"

namespace kvplane {

// Holds blocks when an engine life begins, without their keys.
inline void HoldBusy(BlockPool& pool, const BlockList& blocks) {
    if (pool.split) {
        std::set<Block> fresh;
        for (const Block block : blocks) {
            if (block != kNullBlock && !pool.references[block]) fresh.insert(block);
        }
        for (const Block block : fresh) pool.DropKeys(block, kUnverified);
        pool.split->PrepareBusy(pool, fresh);
        for (const Block block : fresh) pool.Touch(block);
        pool.busy.insert(fresh.begin(), fresh.end());
        return pool.split->RestampAround(pool, pool.busy);
    }
    for (const Block block : blocks) {
        const bool is_reserved = std::find(pool.reserved.begin(), pool.reserved.end(), block) != pool.reserved.end();
        if (pool.busy.contains(block) || is_reserved) continue;
        pool.DropKeys(block, kUnverified);
        pool.Touch(block);
        pool.busy.insert(block);
    }
}

// Releases them: their loads have ended, or belong to a request of this engine life.
inline void ReleaseBusy(BlockPool& pool, const Column& blocks) {
    BlockList given;
    for (const Int block : blocks) {
        pool.busy.erase(static_cast<Block>(block));
        given.push_back(static_cast<Block>(block));
    }
    pool.Release(given);
}

}  // namespace kvplane
