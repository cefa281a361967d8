// The list of the free blocks in eviction order: doubly linked, in two columns.
#pragma once

#include "types.h"

namespace kvplane {

class FreeList {
  public:
    explicit FreeList(Int num_blocks)
        : sentinel_(static_cast<Block>(num_blocks)), next_(num_blocks + 1), previous_(num_blocks + 1) {
        BlockList all(static_cast<size_t>(num_blocks - 1));
        for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<Block>(i + 1);
        Rebuild(all);
    }

    Int count() const { return count_; }

    // Removes and returns the first block.
    Block Pop() {
        const Block block = next_[sentinel_];
        Require(block != sentinel_, "the free list is empty");
        Remove(block);
        return block;
    }

    void Remove(Block block) {
        const Block before = previous_[block], after = next_[block];
        next_[before] = after;
        previous_[after] = before;
        --count_;
    }

    // blocks[0] is evicted next.
    void Prepend(const BlockList& blocks) { Insert(sentinel_, blocks); }
    // blocks[-1] is evicted last.
    void Append(const BlockList& blocks) { Insert(previous_[sentinel_], blocks); }

    void Rebuild(const BlockList& order) {
        next_[sentinel_] = previous_[sentinel_] = sentinel_;
        count_ = 0;
        Append(order);
    }

    // Moves all blocks without a key to the front of all blocks with a key; both keep their order. Looks at up to
    // `count` blocks and returns false when it is done; `begins` is true in the first of a sequence of calls.
    template <typename HasKey>
    bool PutUnkeyedFirst(bool begins, size_t count, HasKey&& has_key) {
        if (begins) {
            at_ = next_[sentinel_];
            first_keyed_ = sentinel_;
        }
        for (; at_ != sentinel_ && count > 0; --count) {
            const Block block = at_;
            at_ = next_[block];
            if (has_key(block)) {
                if (first_keyed_ == sentinel_) first_keyed_ = block;
            } else if (first_keyed_ != sentinel_) {
                Remove(block);
                Insert(previous_[first_keyed_], {block});
            }
        }
        return at_ != sentinel_;
    }

    // Whether the links are those of one ring of `count` blocks and the sentinel.
    bool IsSound() const {
        Int found = 0;
        Block block = sentinel_;
        do {
            if (next_[block] > sentinel_ || previous_[next_[block]] != block || found > count_) return false;
            block = next_[block];
            ++found;
        } while (block != sentinel_);
        return found == count_ + 1;
    }

    BlockList Order() const {
        BlockList order;
        order.reserve(static_cast<size_t>(count_));
        for (Block block = next_[sentinel_]; block != sentinel_; block = next_[block]) order.push_back(block);
        return order;
    }

  private:
    void Insert(Block before, const BlockList& blocks) {
        const Block after = next_[before];
        for (const Block block : blocks) {
            next_[before] = block;
            previous_[block] = before;
            before = block;
        }
        next_[before] = after;
        previous_[after] = before;
        count_ += static_cast<Int>(blocks.size());
    }

    Block sentinel_;
    BlockList next_, previous_;
    Int count_ = 0;
    Block at_ = 0, first_keyed_ = 0;  // between two calls of PutUnkeyedFirst
};

}  // namespace kvplane
