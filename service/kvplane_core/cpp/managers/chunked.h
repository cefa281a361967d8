// Chunked local attention: a token attends only to its own chunk.
#pragma once

#include "base.h"

namespace kvplane {

class ChunkedLocalManager final : public GroupManager {
  public:
    using GroupManager::GroupManager;

    Int SkippedTokens(Int num_computed) const override { return FloorDiv(num_computed, spec.chunk) * spec.chunk; }
    Int WindowBound(Int, Int num_processed) const override { return (num_processed / spec.chunk + 1) * spec.chunk; }

    Int FindPrefix(const Query& query, Rows* rows) const override {
        Int end = FloorDiv(std::min(query.max_tokens, query.digests->count() * hash_size), block_size);
        BlockList blocks;
        while (true) {
            const Int first = std::max<Int>(SkippedTokens(end * block_size), 0) / block_size;
            rows->assign(query.groups->size(), BlockList(static_cast<size_t>(first), kNullBlock));
            for (Int index = first; index < end; ++index) {
                if (!FindInGroups(query, DigestOf(*query.digests, index), &blocks)) break;
                for (size_t row = 0; row < blocks.size(); ++row) (*rows)[row].push_back(blocks[row]);
            }
            end = static_cast<Int>(rows->front().size());
            if (SkippedTokens(end * block_size) / block_size == first) return end * block_size;
        }
    }
};

}  // namespace kvplane
