// Full attention and MLA: every block is kept until the request ends.
#pragma once

#include "base.h"

namespace kvplane {

class FullAttentionManager : public GroupManager {
  public:
    using GroupManager::GroupManager;

    Int FindPrefix(const Query& query, Rows* rows) const override {
        const Int unit = replica.hit_alignment();
        rows->assign(query.groups->size(), {});
        const Int limit = std::min(query.max_tokens, query.digests->count() * hash_size);
        BlockList blocks;
        Int length = 0;
        for (Int index = 0; index < limit / block_size; ++index) {
            if (!FindInGroups(query, DigestOf(*query.digests, index), &blocks)) break;
            for (size_t row = 0; row < blocks.size(); ++row) (*rows)[row].push_back(blocks[row]);
            length += block_size;
        }
        if (unit < block_size && block_size % unit == 0) length = FindInsideNextBlock(query, limit, length, rows);
        if (query.drops_last_block && length > 0) length -= std::min(unit, block_size);
        length -= length % unit;
        for (BlockList& row : *rows) {
            if (static_cast<Int>(row.size()) > BlocksFor(length)) row.resize(static_cast<size_t>(BlocksFor(length)));
        }
        return length;
    }

    bool IsDownwardClosed() const override { return true; }
    bool CanRewind(Int, Int) const override { return true; }
    Int DropMargin() const override { return replica.partial_hits ? std::min(hash_size, block_size) : block_size; }

    void RegisterBlocks(Int slot, Int num_tokens, const Positions& boundaries) override {
        GroupManager::RegisterBlocks(slot, num_tokens, boundaries);
        if (block_size == hash_size) return;
        const auto [boundary, block] = PromptTail(slot);
        if (block != kNullBlock && boundary <= num_tokens) RegisterInsideBlock(slot, block, boundary);
    }

    Int RegisterBound(Int slot) const override {
        return AwaitsPromptTail(slot) ? 0 : GroupManager::RegisterBound(slot);
    }

  private:
    Int FindInsideNextBlock(const Query& query, Int limit, Int length, Rows* rows) const {
        const Int unit = replica.hit_alignment();
        const Int longest = std::min(length + block_size - unit, FloorDiv(limit, unit) * unit);
        BlockList blocks;
        for (Int end = longest; end > length; end -= unit) {
            if (!FindInGroups(query, query.digests->at(end / unit - 1), &blocks)) continue;
            for (size_t row = 0; row < blocks.size(); ++row) (*rows)[row].push_back(blocks[row]);
            return end;
        }
        return length;
    }

    // The last hash boundary of the prompt whose hash is known, and the block that contains it, if it is inside one.
    std::pair<Int, Block> PromptTail(Int slot) const {
        const Int boundary = std::min(PromptLimit(slot) / hash_size, requests.content[slot].count()) * hash_size;
        const Int index = boundary / block_size;
        const bool inside = boundary % block_size != 0 && index < static_cast<Int>(table[slot].size());
        return {boundary, inside ? table[slot][index] : kNullBlock};
    }

    Int PromptLimit(Int slot) const { return requests.num_prompt[slot] - (drops_last_block ? 0 : 1); }

    bool AwaitsPromptTail(Int slot) const {
        if (block_size == hash_size) return false;
        if (requests.content[slot].count() < PromptLimit(slot) / hash_size) return true;
        const auto [boundary, block] = PromptTail(slot);
        return block != kNullBlock && !pool.HasThisKey(block, KeyOf(slot, boundary / hash_size));
    }
};

// Retained sliding windows (R-SWA): a request keeps its prompt and the last `window` tokens; the gap is released.
class RetainedWindowManager final : public FullAttentionManager {
  public:
    using FullAttentionManager::FullAttentionManager;

    // Only blocks of the prompt: the page of a later token depends on where the prompt ends, which no key states.
    void RegisterBlocks(Int slot, Int num_tokens, const Positions& boundaries) override {
        const Int known = replica.safe ? std::min(num_tokens, requests.num_prompt[slot]) : num_tokens;
        FullAttentionManager::RegisterBlocks(slot, known, boundaries);
    }

    void ReleaseSkipped(Int slot, Int num_processed) override {
        ReleaseRange(slot, BlocksFor(requests.num_prompt[slot]), WindowStart(slot, num_processed) / block_size);
    }

    // A load writes blocks in the gap too. In groups of other kinds a load has no block that no token attends to.
    bool NormalizeTable(BlockList* blocks, const Progress& at) const override {
        const Int size = Size(*blocks), start = std::min(BlocksFor(at.num_prompt), size);
        const Int gap = at.loading ? 0 : std::max(at.num_prompt, at.computed - spec.window) / block_size;
        for (Int index = 0; index < size; ++index) {
            Block& block = (*blocks)[static_cast<size_t>(index)];
            if (index >= start && index < gap) {
                block = kNullBlock;
            } else if (block == kNullBlock) {
                return false;
            }
        }
        return size >= BlocksFor(at.computed);
    }

    bool CanRewind(Int slot, Int num_computed) const override {
        const auto first = static_cast<size_t>(WindowStart(slot, num_computed) / block_size);
        const BlockList& blocks = table[slot];
        return first >= blocks.size() ||
               std::find(blocks.begin() + static_cast<std::ptrdiff_t>(first), blocks.end(), kNullBlock) == blocks.end();
    }

    bool Releases(Int slot, Int num_processed) const override {
        const Int first = BlocksFor(requests.num_prompt[slot]);
        return HasBlock(slot, first, WindowStart(slot, num_processed) / block_size);
    }

    Int WindowBound(Int slot, Int num_processed) const override {
        return (WindowStart(slot, num_processed) / block_size + 1) * block_size + spec.window;
    }

  private:
    Int WindowStart(Int slot, Int num_tokens) const {
        return std::max(requests.num_prompt[slot], num_tokens - spec.window);
    }
};

}  // namespace kvplane
