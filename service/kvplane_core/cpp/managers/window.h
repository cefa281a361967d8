// Sliding windows: with a window of w tokens, token t attends to t - w + 1 .. t. Chunks: it attends to its own chunk.
#pragma once

#include "base.h"

namespace kvplane {

class SlidingWindowManager final : public GroupManager {
  public:
    SlidingWindowManager(Int number, const Spec& replica_spec, BlockPool& block_pool, Requests& all,
                         Orders& step_orders)
        : GroupManager(number, replica_spec, block_pool, all, step_orders),
          margin_(spec.window - 1 + spec.extra_retained_tokens) {}

    Int SkippedTokens(Int num_computed) const override { return std::max<Int>(0, num_computed - margin_); }
    Int FirstRead(Int num_computed) const override {
        return std::max<Int>(0, num_computed - spec.window + 1) / block_size;
    }

    Int WindowBound(Int, Int num_processed) const override {
        return (SkippedTokens(num_processed) / block_size + 1) * block_size + margin_;
    }

    Int FindPrefix(const Query& query, Rows* rows) const override {
        Int start = 0, end = 0;
        rows->assign(query.groups->size(), {});
        std::map<Int, BlockList> found;
        FindRun(query, &found, &start, &end);
        if (query.drops_last_block && end > 0) end = Align(end - 1);
        start = std::min(start, end);
        for (size_t row = 0; row < rows->size(); ++row) {
            BlockList& blocks = (*rows)[row];
            blocks.assign(static_cast<size_t>(start), kNullBlock);
            for (Int index = start; index < end; ++index) blocks.push_back(found.at(index)[row]);
        }
        return end * block_size;
    }

    bool ReachableBlocks(Int start, Int end, const Positions& boundaries, std::vector<bool>* keep) const override {
        const Int unit = replica.hit_alignment();
        if (unit % block_size != 0) return false;
        const Int needed = RunLength(drops_last_block), shift = drops_last_block;
        const Int segment = replica.dense() ? unit : replica.kept_every;
        const Int per_segment = segment / block_size;
        if (segment && needed >= per_segment) return false;
        keep->assign(static_cast<size_t>(end - start), false);
        if (segment) {
            for (Int index = std::max(start, shift); index < end; ++index) {
                if ((index - shift) % per_segment >= per_segment - needed)
                    (*keep)[static_cast<size_t>(index - start)] = true;
            }
        }
        if (replica.dense()) return true;
        for (const Int boundary : boundaries) {
            const Int stop = FloorDiv(FloorDiv(boundary, unit) * unit, block_size) + shift;
            for (Int index = std::max(start, stop - needed); index < std::min(end, stop); ++index) {
                (*keep)[static_cast<size_t>(index - start)] = true;
            }
        }
        return true;
    }

  private:
    Int RunLength(bool drops) const { return BlocksFor(spec.window - 1) + drops; }

    void FindRun(const Query& query, std::map<Int, BlockList>* found, Int* start, Int* end) const {
        const Int unit = replica.hit_alignment(), needed = RunLength(query.drops_last_block);
        const Int limit = FloorDiv(std::min(query.max_tokens, query.digests->count() * hash_size), block_size);
        Int run = 0;
        BlockList blocks;
        for (Int index = limit - 1; index >= 0; --index) {
            if (!FindInGroups(query, DigestOf(*query.digests, index), &blocks)) {
                run = 0;
                continue;
            }
            const Int hit_end = query.drops_last_block ? index : index + 1;
            if (run == 0 && hit_end * block_size % unit != 0) continue;
            (*found)[index] = blocks;
            if (++run >= needed) {
                *start = index;
                *end = index + run;
                return;
            }
        }
        *start = 0;
        *end = replica.safe ? run : Align(run);
    }

    Int Align(Int num_blocks) const {
        while (num_blocks * block_size % replica.hit_alignment() != 0) --num_blocks;
        return num_blocks;
    }

    Int margin_;
};

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
