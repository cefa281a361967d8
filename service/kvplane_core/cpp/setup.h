// Positions that follow from the spec of a replica.
#pragma once

#include "types.h"

namespace kvplane {

// A few positions in a request.
class Positions {
  public:
    void Add(Int position) {
        Require(size_ < at_.size(), "more positions than there are kinds of");
        at_[size_++] = position;
    }
    const Int* begin() const { return at_.data(); }
    const Int* end() const { return at_.data() + size_; }

  private:
    std::array<Int, 6> at_{};
    size_t size_ = 0;
};

// Positions at which the computation of a later request that repeats this prompt can begin.
inline Positions ReplayBoundaries(const Spec& spec, Int num_prompt) {
    const Int unit = spec.scheduler_block_size;
    Positions found;
    if (!spec.drops_last_block()) {
        found.Add(num_prompt - 1);
    } else {
        found.Add(std::max<Int>((num_prompt - 1) / unit * unit - unit, 0));
        found.Add(std::max<Int>(num_prompt / unit * unit - unit, 0));
    }
    if (spec.keep_divergence_boundary) {
        for (const Int boundary : Positions(found)) found.Add(std::max<Int>(boundary / unit * unit - unit, 0));
    }
    return found;
}

}  // namespace kvplane
