// The order in which numbered entries were last used, and which of them were used last: for the ghosts of hazard.h.
#pragma once

#include "types.h"

namespace kvplane {

// A doubly linked list of entries, the least recently used first; the last `num_recent` ones are in the LRU ghost.
class Recency {
  public:
    Recency(size_t size, Int places)
        : places_(places),
          sentinel_(static_cast<uint32_t>(size)),
          next_(size + 1, kOut),
          previous_(size + 1),
          recent_(size) {
        next_[sentinel_] = previous_[sentinel_] = first_recent_ = sentinel_;
    }

    bool IsRecent(uint32_t entry) const { return recent_[entry]; }
    bool IsHeld(uint32_t entry) const { return next_[entry] == kOut; }
    Int num_recent() const { return num_recent_; }

    // Takes an entry, which is used next, out of the order; it keeps its place in the LRU ghost.
    void Hold(uint32_t entry) {
        if (entry == first_recent_) first_recent_ = next_[entry];
        next_[previous_[entry]] = next_[entry];
        previous_[next_[entry]] = previous_[entry];
        next_[entry] = kOut;
    }

    // Uses an entry that is not in the order.
    void Use(uint32_t entry) {
        Append(entry);
        if (first_recent_ == sentinel_) first_recent_ = entry;
        num_recent_ += !recent_[entry];
        recent_[entry] = 1;
        while (num_recent_ > places_) {
            Require(first_recent_ != sentinel_, "the LRU ghost is smaller than its count");
            recent_[first_recent_] = 0;
            first_recent_ = next_[first_recent_];
            --num_recent_;
        }
    }

    // Takes the entry that was used longest ago out of the order, and returns it.
    uint32_t TakeOldest() {
        const uint32_t entry = next_[sentinel_];
        Require(entry != sentinel_, "no entry is left");
        Hold(entry);
        num_recent_ -= recent_[entry];
        recent_[entry] = 0;
        return entry;
    }

    std::vector<uint32_t> Order() const {
        std::vector<uint32_t> order;
        for (uint32_t at = next_[sentinel_]; at != sentinel_; at = next_[at]) order.push_back(at);
        return order;
    }

    // Begins with the entries 0 to `count` - 1, the least recently used first.
    void Load(uint32_t count, Int num_recent) {
        Require(count <= sentinel_ && num_recent >= 0 && num_recent <= std::min<Int>(count, places_), "a bad order");
        *this = Recency(sentinel_, places_);
        for (uint32_t entry = 0; entry < count; ++entry) Append(entry);
        for (auto entry = static_cast<uint32_t>(count - num_recent); entry < count; ++entry) recent_[entry] = 1;
        num_recent_ = num_recent;
        if (num_recent) first_recent_ = static_cast<uint32_t>(count - num_recent);
    }

  private:
    friend class LearnerChecks;

    static constexpr uint32_t kOut = ~uint32_t{0};

    void Append(uint32_t entry) {
        Require(entry < sentinel_ && next_[entry] == kOut, "an entry is in the order already");
        const uint32_t last = previous_[sentinel_];
        next_[last] = entry;
        previous_[entry] = last;
        next_[entry] = sentinel_;
        previous_[sentinel_] = entry;
    }

    Int places_, num_recent_ = 0;
    uint32_t sentinel_, first_recent_ = 0;
    std::vector<uint32_t> next_, previous_;
    std::vector<uint8_t> recent_;
};

}  // namespace kvplane
