// Checks the records of steps in flight.
#pragma once

#include "facts.h"

namespace kvplane {

class InFlightChecks {
  public:
    explicit InFlightChecks(CheckedFacts& facts)
        : facts_(facts),
          replica_(facts.replica),
          tracker_(facts.replica.tracker),
          requests_(facts.replica.blocks.requests) {}

    // Checks that steps with a record are in flight, and that the step numbers for which blocks wait are in order;
    // notes the keys that steps in flight registered.
    Slices Records() {
        CheckSteps("grants", tracker_.grants);
        CheckSteps("tentative", tracker_.tentative);
        CheckSteps("adoptions", tracker_.adoptions);
        CheckSteps("filling", tracker_.filling);
        for (const auto& [step, book] : tracker_.tentative) {
            for (size_t run = 0; run < book.num_runs(); ++run) {
                for (const auto& [block, key] : book.KeysOf(run)) {
                    facts_.steps.insert(CheckedFacts::NameOf(step, block));
                    if (facts_.pace.Spend(Pace::kLookUp)) co_yield Pause();
                }
            }
        }
        // Releases are in order: one behind a later fence waits for that, which is safe and bounded by the last step.
        Column fences;
        for (const auto& [fence, blocks] : tracker_.waiting) fences.push_back(fence);
        const Int executed = replica_.blocks.pool.executed_through;
        if (!fences.empty() &&
            (fences.front() <= executed || *std::max_element(fences.begin(), fences.end()) > replica_.seq))
            Fail("fences", "fences ", fences, ", ", executed, " executed");
    }

    // Checks that each request's tokens in flight and last step in flight are those of the recorded grants.
    Slices Grants() {
        const auto num_slots = static_cast<size_t>(requests_.size());
        Column granted(num_slots, 0), last(num_slots, 0);
        for (const auto& [step, grants] : tracker_.grants) {
            for (const Grant& one : grants) {
                const auto [slot, serial] = one.stay;
                if (slot < 0 || slot >= requests_.size())
                    Fail(kGrants, "a grant of slot ", slot, ", which was never used");
                if (requests_.serial[slot] == serial) {
                    granted[static_cast<size_t>(slot)] += one.num_tokens;
                    last[static_cast<size_t>(slot)] = step;
                }
                if (facts_.pace.Spend(Pace::kFar)) co_yield Pause();
            }
        }
        for (Int slot = 0; slot < requests_.size(); ++slot) {
            if (facts_.pace.Spend(Pace::kFar)) co_yield Pause();
            if (!requests_.live[slot]) continue;
            const bool runs = requests_.running[slot] != 0;
            const Int step = requests_.granted_step[slot], expected = runs ? granted[static_cast<size_t>(slot)] : 0;
            if (requests_.in_flight[slot] != expected)
                Fail(kGrants, "slot ", slot, ": ", requests_.in_flight[slot], " tokens in flight, grants say ",
                     expected);
            if (step > replica_.seq)
                Fail(kGrants, "slot ", slot, ": a later grant, of step ", step, " after ", replica_.seq);
            if (runs && step > replica_.blocks.pool.executed_through && last[static_cast<size_t>(slot)] != step)
                Fail(kGrants, "slot ", slot, ": no record of its grant in step ", step);
        }
    }

    // Checks that adopted keys have a record.
    Slices Adoptions() {
        for (const auto& [step, adoptions] : tracker_.adoptions) {
            for (const auto& [block, stays] : adoptions.entries()) {
                for (const auto& [slot, serial] : stays) CheckAdoption(step, block, slot, serial);
                if (facts_.pace.Spend(Pace::kLookUp * (1 + static_cast<Int>(stays.size())))) co_yield Pause();
            }
        }
    }

  private:
    static constexpr const char* kGrants = "grants";

    template <typename T>
    void CheckSteps(const char* name, const ByStep<T>& steps) const {
        Int before = replica_.blocks.pool.executed_through;
        for (const auto& [step, value] : steps) {
            if (step <= replica_.blocks.pool.executed_through)
                Fail("records", name, " of step ", step, ", ", before, " is executed");
            if (step > replica_.seq) Fail("records", name, " of step ", step, ", the last is ", replica_.seq);
            if (step <= before) Fail("records", name, " of step ", step, " behind ", before);
            before = step;
        }
    }

    void CheckAdoption(Int step, Block block, Int slot, Int serial) const {
        if (slot < 0 || slot >= requests_.size()) Fail("adoptions", "slot ", slot, " was never used");
        if (!requests_.running[slot] || requests_.serial[slot] != serial) return;
        if (requests_.adopted_step[slot] < step)
            Fail("adoptions", "slot ", slot, " adopted a key of step ", step, ", the last recorded is ",
                 requests_.adopted_step[slot]);
        if (!facts_.IsRecorded(step, block))
            Fail("adoptions", "slot ", slot, " adopted block ", block, " of step ", step,
                 ", which has no record of its key");
    }

    CheckedFacts& facts_;
    const Replica& replica_;
    const InFlightTracker& tracker_;
    const Requests& requests_;
};

}  // namespace kvplane
