// Checks the state of a core: the structures that steps and look-ups use, in slices, without a change.
//
// The invariants are those of `invariants.py`, with their names, and what only these
// structures have: places and tags in the index, rings of shared keys, what readers of lists have seen.
#pragma once

#include "in_flight.h"
#include "keys.h"
#include "learner.h"
#include "lists.h"
#include "references.h"
#include "requests.h"
#include "tiers.h"

namespace kvplane {

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
