// How the managers of groups accept the block tables of an image.
#pragma once

#include "base.h"

namespace kvplane {

inline bool GroupManager::NormalizeTable(BlockList* blocks, const Progress& at) const {
    const Int read = FirstRead(at.computed), size = Size(*blocks);
    if (size < BlocksFor(at.computed)) return false;
    const auto behind = blocks->begin() + std::min(read, size);
    if (std::find(behind, blocks->end(), kNullBlock) != blocks->end()) return false;
    auto end = blocks->begin() + std::min(std::max<Int>(SkippedTokens(at.computed), 0) / block_size, size);
    for (auto one = end; one < behind; ++one) {
        if (*one == kNullBlock) end = one + 1;
    }
    std::fill(blocks->begin(), end, kNullBlock);
    return true;
}

inline Digest GroupManager::SealedPrefix(Int slot, Int index, const Progress&) const {
    const Digests& digests = requests.content[slot];
    const bool known = spec.is_cached() && (index + 1) * block_size <= digests.count() * hash_size;
    return known ? DigestOf(digests, index) : Digest();
}

inline void GroupManager::Resume(Int slot, BlockList blocks, const Progress& at, Int num_registered) {
    table[slot] = std::move(blocks);
    const BlockList& mine = table[slot];
    Int last = 0, first_bare = kForever;
    for (Int index = 0; index < Size(mine); ++index) {
        const Block block = mine[index];
        if (block == kNullBlock) continue;
        if (pool.HasKey(block) && !KeyFits(slot, index, at)) pool.DropKeys(block, kDropped);
        if (pool.HasKey(block) && pool.KeyTokens(block) == (index + 1) * block_size) {
            last = index + 1;
        } else {
            first_bare = std::min(first_bare, index);
        }
    }
    // A hit needs every block, and an eviction can leave one without a key.
    if (IsDownwardClosed()) last = std::min(last, first_bare);
    // Safe at any number, because a block with the key of its end is not registered twice.
    num_cached[slot] = num_registered == kNotTracked ? last : std::min(num_registered, Size(mine));
}

inline bool GroupManager::KeyFits(Int slot, Int index, const Progress&) const {
    const Block block = table[slot][index];
    const Int num_tokens = pool.KeyTokens(block), count = num_tokens / hash_size;
    const bool inside = index * block_size < num_tokens && num_tokens <= (index + 1) * block_size;
    const bool known = num_tokens % hash_size == 0 && count > 0 && count <= requests.content[slot].count();
    return spec.is_cached() && inside && known && pool.records[block].key == KeyOf(slot, count);
}

}  // namespace kvplane
