// Keys that were verified against the stamps in the page memory, for a pool that is not in use.
#pragma once

#include "pool.h"

namespace kvplane {

// Columns of recovered keys, which others own.
struct RecoveredKeys {
    std::span<const uint32_t> pair, block;  // one row per key; a block has one row at most
    std::span<const uint8_t> digests;
    size_t digest_size = 0;
    std::span<const uint32_t> key_tokens;  // by block
    std::span<const uint64_t> stamp;       // by block
    std::span<const uint32_t> free;        // blocks in the order of eviction
    std::vector<std::pair<std::string, Int>> names;                      // domain and group, by number of a pair
    std::vector<std::pair<Block, std::pair<uint32_t, Digest>>> further;  // keys besides the first one of a block
};

inline constexpr uint32_t kNoPair = std::numeric_limits<uint32_t>::max();

// Builds a pool with these keys; needs no interpreter.
inline std::unique_ptr<BlockPool> MakeRecovered(const Spec& spec, const RecoveredKeys& found) {
    auto pool = std::make_unique<BlockPool>(spec);
    std::vector<uint32_t> pairs;
    for (const auto& [domain, group] : found.names) {
        const bool is_there = group >= 0 && group < static_cast<Int>(spec.groups.size());  // a key of no other is kept
        pairs.push_back(is_there ? pool->pairs.Of(pool->pairs.DomainOf(domain), group) : kNoPair);
    }
    const size_t size = found.digest_size;
    for (size_t row = 0; row < found.block.size(); ++row) {
        const Block block = found.block[row];
        Require(block < spec.num_blocks && found.pair[row] < pairs.size(), "a recovered key is beyond the pool");
        Require(pairs[found.pair[row]] != kNoPair, "a recovered key has no group");
        const Key key{pairs[found.pair[row]], Digest(found.digests.data() + row * size, size)};
        pool->AddKey(block, key, found.key_tokens[block]);
        if (pool->split && spec.groups[static_cast<size_t>(found.names[found.pair[row]].second)].is_state())
            pool->split->NameState(block);
    }
    for (const auto& [block, name] : found.further) {
        Require(block < spec.num_blocks && name.first < pairs.size(), "a recovered key is beyond the pool");
        Require(pairs[name.first] != kNoPair, "a recovered key has no group");
        pool->Register(block, Key{pairs[name.first], name.second}, 0);
    }
    pool->registered.clear();
    pool->stamp.assign(found.stamp.begin(), found.stamp.end());
    const BlockList order(found.free.begin(), found.free.end());
    std::vector<bool> is_free(static_cast<size_t>(spec.num_blocks));
    for (const Block at : order) {
        Require(at != kNullBlock && at < spec.num_blocks && !is_free[at], "a recovered block is free twice, or none");
        is_free[at] = true;
    }
    if (pool->split) {
        pool->split->Replace(order);
        return pool;
    }
    const auto first_keyed = std::find_if(order.begin(), order.end(), [&](Block one) { return pool->HasKey(one); });
    pool->free.Rebuild(order, static_cast<size_t>(first_keyed - order.begin()));
    return pool;
}

// Moves keys, stamps and the free list of a recovered pool into an unused one.
inline void Install(BlockPool& pool, BlockPool& recovered) {
    Require(pool.index.count() == 0, "only an unused pool can recover");
    for (const Block block : pool.reserved) recovered.stamp[block] = pool.stamp[block];
    pool.TakeKeys(recovered);
}

}  // namespace kvplane
