// Recurrent state that is not cached: a request has one block for its state, and one per draft token.
#pragma once

#include "base.h"

namespace kvplane {

class UncachedStateManager final : public GroupManager {
  public:
    using GroupManager::GroupManager;

    Int BlocksNeeded(const Need& need, const BlockList& hit) const override {
        Need with_drafts = need;
        with_drafts.num_slots += Drafts();
        return GroupManager::BlocksNeeded(with_drafts, hit);
    }
    Int BlocksToExtend(Int slot, Int num_slots, Int num_main) const override {
        return GroupManager::BlocksToExtend(slot, num_slots + Drafts(), num_main);
    }
    Int BlocksAlone(Int num_tokens, Int num_encoder) const override {
        return GroupManager::BlocksAlone(num_tokens, num_encoder) + spec.speculative_blocks;
    }
    void Allocate(Int slot, Int num_slots, Int num_main, Int num_encoder, BlockList* fresh) override {
        GroupManager::Allocate(slot, num_slots + Drafts(), num_main, num_encoder, fresh);
    }

    bool CanRewind(Int slot, Int num_computed) const override {
        return requests.computed[slot] - num_computed <= spec.speculative_blocks;
    }
    Int SkippedTokens(Int num_computed) const override { return num_computed - 1; }
    Int WindowBound(Int, Int num_processed) const override {
        return (std::max<Int>(num_processed - 1, 0) / block_size + 1) * block_size + 1;
    }

    Int AllocBound(Int slot) const override { return GroupManager::AllocBound(slot) - Drafts(); }
    Int RegisterBound(Int) const override { return kForever; }

  private:
    Int Drafts() const { return block_size * spec.speculative_blocks; }
};

}  // namespace kvplane
