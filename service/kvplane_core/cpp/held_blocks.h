// The blocks whose STORED events the service holds, since the step that stored them is not executed: what
// `PublicationHold.step_packed` (replicas/events.py) must know. It may name too many blocks, and none too few.
#pragma once

#include "step.h"

namespace kvplane {

class HeldBlocks {
  public:
    static constexpr size_t kMostHashes = 4096;  // of a part's events; more are packed in pieces, by Python

    explicit HeldBlocks(Int num_blocks) : num_blocks_(num_blocks) {}

    void Clear() {
        for (const auto& [step, blocks] : steps_) Mark(blocks, false);
        steps_.clear();
    }

    // Releases what executed steps have stored.
    void Release(Int executed_through) {
        bool released = false;
        for (; !steps_.empty() && steps_.front().first <= executed_through; steps_.pop_front()) {
            Mark(steps_.front().second, false);
            released = true;
        }
        for (auto one = steps_.begin(); released && one != steps_.end(); ++one) Mark(one->second, true);
    }

    // Takes the events of a part in their order, and notes what they need.
    void Add(Int step, CacheEvents* events) {
        if (events->empty()) return;
        if (is_held_.empty()) is_held_.resize(static_cast<size_t>(num_blocks_), false);
        BlockList stored;
        auto at = events->blocks.begin();
        for (const CacheEvents::Row& row : events->rows) {
            const auto end = at + static_cast<std::ptrdiff_t>(row.count);
            if (row.kind == kStored) {
                events->has_stored = true;
                stored.insert(stored.end(), at, end);
                for (; at != end; ++at) is_held_[*at] = true;
            } else {
                events->has_others = true;
                events->needs_hold |= row.kind == kCleared;
                for (; at != end; ++at) events->needs_hold |= is_held_[*at];
            }
        }
        events->needs_hold |= events->hashes.size() > kMostHashes;
        if (!stored.empty()) steps_.emplace_back(step, std::move(stored));
    }

  private:
    void Mark(const BlockList& blocks, bool held) {
        for (const Block block : blocks) is_held_[block] = held;
    }

    const Int num_blocks_;
    std::vector<bool> is_held_;
    std::deque<std::pair<Int, BlockList>> steps_;
};

}  // namespace kvplane
