// Cross attention: blocks hold the encoder's tokens; they are allocated once and never shared.
#pragma once

#include "base.h"

namespace kvplane {

class CrossAttentionManager final : public GroupManager {
  public:
    using GroupManager::GroupManager;

    Int BlocksNeeded(const Need& need, const BlockList&) const override {
        Need encoder = need;
        encoder.num_slots = encoder.num_main = need.num_encoder;
        encoder.total_computed = 0;
        return GroupManager::BlocksNeeded(encoder, {});
    }
    Int BlocksToExtend(Int, Int, Int) const override { return 0; }
    Int BlocksAlone(Int, Int num_encoder) const override { return BlocksFor(num_encoder); }

    void Adopt(Int, const BlockList& hit, Int, Int) override {
        Require(hit.empty(), "cross attention is never looked up");
    }
    void AllocateExternal(Int, Int, Int) override {}
    void Allocate(Int slot, Int, Int, Int num_encoder, BlockList* fresh) override {
        GroupManager::Allocate(slot, num_encoder, num_encoder, num_encoder, fresh);
    }

    // Of any length: the number of the encoder's tokens is not known.
    bool NormalizeTable(BlockList* blocks, const Progress&) const override {
        return std::find(blocks->begin(), blocks->end(), kNullBlock) == blocks->end();
    }

    Int AllocBound(Int) const override { return kForever; }
    Int RegisterBound(Int) const override { return kForever; }
};

}  // namespace kvplane
