// Checks the references to blocks: their counts against who holds the blocks.
#pragma once

#include "facts.h"

namespace kvplane {

class ReferenceChecks {
  public:
    explicit ReferenceChecks(CheckedFacts& facts)
        : facts_(facts), pool_(facts.replica.blocks.pool), holders_(facts.num_blocks) {}

    // Counts the references to each block.
    Slices Holders() {
        const InFlightTracker& tracker = facts_.replica.tracker;
        for (const auto& one : facts_.replica.blocks.managers) {
            for (size_t slot = 0; slot < one->table.size(); ++slot) {
                if (facts_.pace.Spend(Pace::kFar)) co_yield Pause();
                for (const Block block : one->table[slot]) {
                    Count(block, static_cast<Int>(slot));
                    if (facts_.pace.Spend(Pace::kFar)) co_yield Pause();
                }
            }
            for (const auto& [source, target] : one->copies) {
                Count(source);
                Count(target);
                if (facts_.pace.Spend(2 * Pace::kFar)) co_yield Pause();
            }
        }
        for (const auto& [job, load] : facts_.replica.blocks.tiers.jobs.loads) {
            for (const Filled& row : load.rows) Count(row.block);
            if (facts_.pace.Spend(Pace::kFar * static_cast<Int>(load.rows.size()))) co_yield Pause();
        }
        for (Slices part = OfRecord(pool_.reserved); part.Next();) co_yield Pause();
        for (Slices part = OfRecord(pool_.busy); part.Next();) co_yield Pause();
        for (const auto& [slot, blocks] : tracker.held)
            for (Slices part = OfRecord(blocks); part.Next();) co_yield Pause();
        for (const auto& [fence, blocks] : tracker.waiting)
            for (Slices part = OfRecord(blocks); part.Next();) co_yield Pause();
    }

    // Checks that reference counts equal the number of holders, and that exactly blocks without a holder are free.
    Slices Counts() {
        if (facts_.is_free[kNullBlock]) Fail(kReferences, "the null block is free");
        for (Block block = 1; block < facts_.num_blocks; ++block) {
            const uint32_t count = holders_[block];
            const bool is_free = facts_.is_free[block] != 0;
            if (pool_.references[block] != count)
                Fail(kReferences, "block ", block, ": ", pool_.references[block], " references, ", count, " holders");
            if (is_free == (count > 0))
                Fail(kReferences, "block ", block, ": ", count, " holders, free: ", is_free);
            if (facts_.pace.Spend(3 * Pace::kNear)) co_yield Pause();
        }
        for (const Block block : pool_.busy) {
            static constexpr const char* kUnder = " is under a load of an earlier epoch and has ";
            if (holders_[block] != 1)
                Fail("busy_blocks", "block ", block, kUnder, holders_[block], " holders");
            if (pool_.HasKey(block)) Fail("busy_blocks", "block ", block, kUnder, "a key");
            if (facts_.pace.Spend(Pace::kFar)) co_yield Pause();
        }
    }

  private:
    static constexpr const char* kReferences = "references";
    static constexpr Int kNoSlot = -1;

    template <typename Blocks>
    Slices OfRecord(const Blocks& blocks) {
        for (const Block block : blocks) {
            Count(block);
            if (facts_.pace.Spend(Pace::kFar)) co_yield Pause();
        }
    }

    void Count(Block block, Int slot = kNoSlot) {
        if (block >= facts_.num_blocks)
            Fail("tables", slot == kNoSlot ? "a record" : "slot " + Words(slot), ": a block outside the pool, ", block);
        if (block != kNullBlock) ++holders_[block];
    }

    CheckedFacts& facts_;
    const BlockPool& pool_;
    Zeros<uint32_t> holders_;
};

}  // namespace kvplane
