// Stamps: version numbers of the contents of blocks, see `kvplane.base.stamps`.
#pragma once

#include "types.h"

namespace kvplane {

constexpr int kCounterBits = 32, kEpochBits = 24;
constexpr uint64_t kMaxCounter = (uint64_t{1} << kCounterBits) - 1;

// The order in which stamps are issued: epoch, generation, counter.
inline uint64_t EpochOf(uint64_t stamp) { return stamp >> kCounterBits & ((uint64_t{1} << kEpochBits) - 1); }
inline uint64_t InTime(uint64_t stamp) {
    const uint64_t epoch = EpochOf(stamp);
    const uint64_t generation = stamp >> (kCounterBits + kEpochBits);
    return epoch << (64 - kEpochBits) | generation << kCounterBits | (stamp & kMaxCounter);
}

// The stamps that a memory has, by block, then by slot of the tiers; none: no key is confirmed.
struct Shown {
    const uint64_t* stamps = nullptr;
    size_t size = 0;
};

}  // namespace kvplane
