// What the checks of a core's state have found so far, for those behind them.
#pragma once

#include <unordered_set>

#include "../replica.h"
#include "slices.h"

namespace kvplane {

struct CheckedFacts {
    explicit CheckedFacts(const Replica& checked)
        : replica(checked), num_blocks(static_cast<size_t>(checked.spec.num_blocks)), is_free(num_blocks) {}

    const Replica& replica;
    const size_t num_blocks;
    Pace pace;
    Zeros<uint8_t> is_free;             // by block
    std::vector<bool> is_live;          // by number of a domain
    std::unordered_set<uint64_t> steps;  // the keys that steps in flight registered, see `NameOf`

    // A key that a step registered, which is in flight.
    static uint64_t NameOf(Int step, Block block) { return static_cast<uint64_t>(step) << 32 ^ block; }
    bool IsRecorded(Int step, Block block) const { return steps.contains(NameOf(step, block)); }

    // Fails unless the key has a name that is in use.
    void CheckName(const Key& key, const char* invariant) const {
        const Pairs& pairs = replica.blocks.pool.pairs;
        if (key.pair == 0) Fail(invariant, "an entry without a key");
        const uint32_t domain = pairs.Domain(key.pair);
        if (domain >= is_live.size() || !is_live[domain])
            Fail("domains", "key ", Hex(key.digest), " is of domain ", domain, ", which has no name");
    }
};

}  // namespace kvplane
