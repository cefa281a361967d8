// A ring buffer: each request has one block, which is overwritten in place and never cached.
#pragma once

#include "base.h"

namespace kvplane {

class RingManager final : public GroupManager {
  public:
    using GroupManager::GroupManager;

    Int BlocksNeeded(const Need& need, const BlockList&) const override { return table[need.slot].empty(); }
    Int BlocksToExtend(Int slot, Int, Int) const override { return table[slot].empty(); }
    Int BlocksAlone(Int, Int) const override { return 1; }

    void Adopt(Int, const BlockList& hit, Int, Int) override { Require(hit.empty(), "a ring is never looked up"); }
    void AllocateExternal(Int slot, Int, Int) override {
        BlockList unused;
        Allocate(slot, 0, 0, 0, &unused);
    }
    void Allocate(Int slot, Int, Int, Int, BlockList* fresh) override {
        if (table[slot].empty()) Extend(slot, 1, fresh);
    }

    bool NormalizeTable(BlockList* blocks, const Progress&) const override {
        return blocks->size() == 1 && blocks->front() != kNullBlock;
    }

    Int AllocBound(Int slot) const override { return table[slot].empty() ? 0 : kForever; }
    Int RegisterBound(Int) const override { return kForever; }
};

}  // namespace kvplane
