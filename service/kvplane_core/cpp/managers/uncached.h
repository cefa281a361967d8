// Blocks that are never cached: the encoder's tokens, ring buffers and, without a cache of them, recurrent states.
#pragma once

#include "base.h"

namespace kvplane {

// Cross attention: blocks hold the encoder's tokens; they are allocated once and never shared.
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

// A ring buffer: each request has one block, which is overwritten in place.
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

// Recurrent state: a request has one block for its state, and one per draft token.
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
