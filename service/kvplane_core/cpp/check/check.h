// Checks the state of a core: the structures that steps and look-ups use, in slices, without a change.
//
// The invariants are those of `invariants.py`, with their names, and what only these structures have: places
// and tags in the index, rings of shared keys, what readers of lists have seen.
#pragma once

#include "facts.h"
#include "in_flight.h"
#include "keys.h"
#include "lists.h"
#include "requests.h"
#include "tiers.h"

namespace kvplane {

// Checks the references to blocks: their counts against who holds the blocks.
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

// Checks what the policy HAZARD has learnt: the order of its ghosts, and its counts.
class LearnerChecks {
  public:
    explicit LearnerChecks(CheckedFacts& facts) : facts_(facts), hazard_(facts.replica.blocks.pool.hazard.get()) {}

    Slices Ghosts() {
        if (hazard_ == nullptr) co_return;
        const Learner& learner = hazard_->learner;
        const size_t count = learner.entry_of.count();
        if (count > learner.most) Fail(kHazard, count, " keys are followed, at most ", learner.most);
        for (Slices part = Order(learner.recency, count); part.Next();) co_yield Pause();
        Column alive(learner.history.alive.size(), 0);
        Int resident = 0;
        for (uint32_t entry = 0; entry < count; ++entry) {
            if (learner.entry_of.Find(learner.key[entry]) != entry)
                Fail(kHazard, "entry ", entry, " has a key that leads to another one");
            resident += learner.resident[entry];
            const Int owner = learner.owner[entry];
            if (learner.history.IsRecent(owner)) ++alive[History::CellOf(owner)];
            if (facts_.pace.Spend(Pace::kLookUp)) co_yield Pause();
        }
        if (resident != learner.num_resident)
            Fail(kHazard, resident, " keys are resident, the count says ", learner.num_resident);
        if (alive != learner.history.alive) Fail(kHazard, "the unused keys of admissions are not counted");
    }

  private:
    static constexpr const char* kHazard = "hazard";

    // Checks the links in both directions, and that the last entries are in the ghost of LRU.
    Slices Order(const Recency& order, size_t expected) {
        size_t count = 0;
        Int recent = 0;
        uint32_t first = order.sentinel_;
        for (uint32_t before = order.sentinel_, entry = 0; entry != order.sentinel_; before = entry) {
            entry = order.next_[before];
            if (entry > order.sentinel_ || count > expected || order.previous_[entry] != before)
                Fail(kHazard, "entry ", entry, " of the order of use does not point back to ", before);
            if (entry == order.sentinel_) break;
            ++count;
            if (recent && !order.recent_[entry]) Fail(kHazard, "entry ", entry, " left the ghost out of turn");
            if (order.recent_[entry] && recent++ == 0) first = entry;
            if (facts_.pace.Spend(Pace::kFar)) co_yield Pause();
        }
        if (count != expected) Fail(kHazard, count, " keys are in the order of use, of ", expected);
        if (recent != order.num_recent_)
            Fail(kHazard, recent, " keys are in the ghost, the count says ", order.num_recent_);
        if (first != order.first_recent_) Fail(kHazard, "the ghost begins with ", order.first_recent_, ", not ", first);
    }

    CheckedFacts& facts_;
    const HazardPolicy* hazard_;
};

// One walk over a state, which must not change before its end.
class StateCheck {
  public:
    explicit StateCheck(const Replica& replica)
        : facts_(replica),
          lists_(facts_),
          references_(facts_),
          keys_(facts_),
          requests_(facts_),
          in_flight_(facts_),
          learner_(facts_),
          tiers_(facts_) {
        // Each part relies on what those before it have checked: they end where a number is none.
        parts_.push_back(lists_.Free());
        parts_.push_back(lists_.RetainedFree());
        parts_.push_back(references_.Holders());
        parts_.push_back(references_.Counts());
        parts_.push_back(keys_.Domains());
        parts_.push_back(keys_.KeyIndex());
        parts_.push_back(keys_.FurtherKeys());
        parts_.push_back(lists_.Policy());
        parts_.push_back(in_flight_.Records());
        parts_.push_back(keys_.Columns());
        parts_.push_back(keys_.Stamps());
        parts_.push_back(requests_.Tables());
        parts_.push_back(in_flight_.Grants());
        parts_.push_back(in_flight_.Adoptions());
        parts_.push_back(requests_.FastPaths());
        parts_.push_back(lists_.Retained());
        parts_.push_back(tiers_.All());
        parts_.push_back(lists_.RetainedAreThere());
        parts_.push_back(learner_.Ghosts());
    }

    // Does a slice of the work, of about a millisecond; returns whether more is left. Throws BrokenInvariant.
    bool Next() {
        for (; at_ < parts_.size(); ++at_) {
            if (parts_[at_].Next()) return true;
        }
        return false;
    }

  private:
    CheckedFacts facts_;
    ListChecks lists_;
    ReferenceChecks references_;
    KeyChecks keys_;
    RequestChecks requests_;
    InFlightChecks in_flight_;
    LearnerChecks learner_;
    TierChecks tiers_;
    std::vector<Slices> parts_;
    size_t at_ = 0;
};

}  // namespace kvplane
