// Where a launch writes a recurrent state inside its chunk, see `kvplane.base.checkpoints`.
#pragma once

#include "types.h"

namespace kvplane {

class CheckpointRule {
  public:
    CheckpointRule(const Spec& spec, const GroupSpec& group)
        : alignment_(group.checkpoint_alignment),
          block_size_(group.block_size),
          hash_block_size_(spec.hash_block_size),
          hit_alignment_(spec.hit_alignment()),
          tokens_after_(std::max<Int>(1, spec.hash_lookahead_tokens)),
          drops_last_block_(spec.drops_last_block()) {}

    // The last multiple of `unit` at which a request that repeats these tokens can continue.
    Int LastBoundary(Int num_tokens, Int unit) const {
        if (drops_last_block_) return std::max<Int>(num_tokens / unit * unit - unit, 0);
        return std::max<Int>(FloorDiv(num_tokens - tokens_after_, unit) * unit, 0);
    }

    // After how many tokens the launch of the chunk [start, end) writes a checkpoint; 0: it writes none.
    Int Position(Int start, Int end) const {
        if (alignment_ == 0) return 0;
        const Int position = LastBoundary(end, hit_alignment_);
        return CanWrite(start, end, position) ? position : 0;
    }

    bool CanWrite(Int start, Int end, Int position) const {
        const Int index = Index(end);
        return alignment_ > 0 && start % hash_block_size_ == 0 && index > FloorDiv(start - 1, block_size_) &&
               index >= 0 && start + hash_block_size_ <= position && position < end &&
               (position - start) % alignment_ == 0;
    }

    // The index in the table of the checkpoint of a chunk that ends after `end` tokens.
    Int Index(Int end) const { return CeilDiv(end, block_size_) - 2; }

  private:
    Int alignment_, block_size_, hash_block_size_, hit_alignment_, tokens_after_;
    bool drops_last_block_;
};

}  // namespace kvplane
