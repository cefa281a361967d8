// Checks what the policy HAZARD has learnt: the order of its ghosts, and its counts.
#pragma once

#include "facts.h"

namespace kvplane {

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

}  // namespace kvplane
