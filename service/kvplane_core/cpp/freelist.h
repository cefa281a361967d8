// The list of the free blocks in eviction order: doubly linked, in two columns.
//
// The lists of the policies (eviction.py) are this class: that of LRU has no divider, that of WINDOW_TAIL has one, and
// that of TURN_TAIL also has superseded blocks.
#pragma once

#include "seen.h"

namespace kvplane {

class FreeList {
  public:
    // `is_visited`: whether `VisitNew` is called.
    FreeList(Int num_blocks, Policy policy, bool is_visited)
        : sentinel_(static_cast<Block>(num_blocks)),
          divider_(sentinel_ + 1),
          is_divided_(policy != kLru),
          next_(num_blocks + 2),
          previous_(num_blocks + 2),
          place_(policy == kHazard ? num_blocks : 0) {
        if (is_visited) seen_.Resize(next_.size());
        BlockList all(static_cast<size_t>(num_blocks - 1));
        for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<Block>(i + 1);
        Rebuild(all, all.size());
    }

    Int count() const { return count_; }

    // Removes the first `count` blocks and appends them to `into`; returns how many of them were before the divider.
    Int Pop(Int count, BlockList* into) {
        Require(count <= count_, "more blocks are taken than are free");
        Block block = next_[sentinel_];
        Int taken = 0, before = is_divided_ ? count : 0;
        into->resize(into->size() + static_cast<size_t>(count));
        const auto popped = std::span(*into).last(static_cast<size_t>(count));
        for (; taken < count; block = next_[block]) {
            Require(block != sentinel_, "the free list is shorter than its count");
            if (block == divider_) {
                before = taken;
            } else {
                popped[static_cast<size_t>(taken++)] = block;
            }
        }
        const bool is_passed = is_divided_ && before < count;
        if (is_passed) Join(sentinel_, divider_);
        Join(is_passed ? divider_ : sentinel_, block);
        count_ -= count;
        if (seen_.count()) {
            for (const Block one : popped) seen_.Remove(one, sentinel_);
        }
        Mark(popped, kHeld);
        return before;
    }

    void Remove(Block block) {
        if (seen_.count()) seen_.Remove(block, Preceding(block));
        Join(previous_[block], next_[block]);
        --count_;
        if (!place_.empty()) place_[block] = kHeld;
    }

    // Blocks without a key; blocks[0] is evicted next.
    void Prepend(const BlockList& blocks) {
        Insert(sentinel_, blocks);
        seen_.EnterFirst(blocks);
        Mark(blocks, kBefore);
    }
    // Puts blocks at the back, those that are superseded before the divider; blocks[-1] is evicted last.
    void Append(const BlockList& blocks) {
        Mark(blocks, kBehind);
        if (superseded.empty()) return Insert(previous_[sentinel_], blocks);
        BlockList first, rest;
        for (const Block block : blocks) {
            const auto found = superseded.find(block);
            (found != superseded.end() && found->second ? first : rest).push_back(block);
        }
        AppendLeftWindow(first);
        Insert(previous_[sentinel_], rest);
    }
    // Puts blocks that left the window of a running request before the divider; blocks[-1] is evicted last of them.
    void AppendLeftWindow(const BlockList& blocks) {
        Insert(previous_[is_divided_ ? divider_ : sentinel_], blocks);
        if (is_divided_) seen_.EnterMiddle(blocks);
        Mark(blocks, kBefore);
    }

    // Fetches which block is behind this one.
    void Fetch(Block block) const { __builtin_prefetch(&next_[block]); }

    // Whether HAZARD may put this block before the divider.
    bool IsBehind(Block block) const { return place_[block] == kBehind; }

    // Records that a longer prompt has copied a block: only the first one makes it superseded.
    void NoteCopied(Block block) {
        const bool is_first = !superseded.contains(block);
        superseded[block] = is_first;
    }
    // A block loses its keys.
    void Forget(Block block) {
        if (!superseded.empty()) superseded.erase(block);
    }

    // Replaces the content of the list, with the divider behind `num_first` blocks.
    void Rebuild(const BlockList& order, size_t num_first) {
        Require(num_first <= order.size(), "the divider is behind the free list");
        next_[sentinel_] = previous_[sentinel_] = sentinel_;
        count_ = 0;
        seen_.Clear();
        Insert(sentinel_, order);
        if (is_divided_) PutDivider(num_first == order.size() ? sentinel_ : order[num_first]);
        std::fill(place_.begin(), place_.end(), kHeld);
        Mark(order, kBehind);
        Mark(std::span(order).first(num_first), kBefore);
    }

    // Moves all blocks without a key to the front of all blocks with a key; both keep their order. Looks at up to
    // `count` blocks and returns false when it is done; `begins` is true in the first of a sequence of calls. Meanwhile
    // the divider is at the front, then before the first block with a key.
    template <typename HasKey>
    bool PutUnkeyedFirst(bool begins, size_t count, HasKey&& has_key) {
        if (begins) {
            seen_.Clear();
            MoveDivider(next_[sentinel_]);
            std::replace(place_.begin(), place_.end(), uint8_t{kBefore}, uint8_t{kBehind});
            at_ = next_[is_divided_ ? divider_ : sentinel_];
            first_keyed_ = sentinel_;
        }
        for (; at_ != sentinel_ && count > 0; --count) {
            const Block block = at_;
            at_ = next_[block];
            if (has_key(block)) {
                if (first_keyed_ == sentinel_) first_keyed_ = block;
            } else if (first_keyed_ != sentinel_) {
                Join(previous_[block], next_[block]);
                Join(previous_[first_keyed_], block);
                Join(block, first_keyed_);
            }
        }
        if (at_ != sentinel_) return true;
        MoveDivider(first_keyed_);
        return false;
    }

    // Whether the links are those of one ring of `count` blocks, the sentinel and the divider.
    bool IsSound() const {
        const Int most = count_ + is_divided_;
        Int found = 0;
        bool has_divider = false;
        Block block = sentinel_;
        do {
            if (next_[block] > divider_ || previous_[next_[block]] != block || found > most) return false;
            block = next_[block];
            has_divider |= block == divider_;
            ++found;
        } while (block != sentinel_);
        return found == most + 1 && has_divider == is_divided_;
    }

    // Visits the first `most` blocks, as `Seen::Visit` does; those that `Prepend` puts before seen ones are seen.
    template <typename F, typename Fetch, typename Expect>
    void VisitNew(Int most, F&& visit, Fetch&& fetch, Expect&& expect) {
        seen_.Visit(*this, most, visit, fetch, expect);
    }
    void VisitAgain(Block block) { seen_.Change(block); }

    BlockList Order() const { return Behind(sentinel_, static_cast<size_t>(count_)); }
    Block Start() const { return sentinel_; }
    // The block behind this one, or behind `Start`; the null block if there is none.
    Block After(Block block) const { return Following(block) == sentinel_ ? kNullBlock : Following(block); }

    // Up to `count` blocks behind this one, or behind `Start`.
    BlockList Behind(Block block, size_t count) const {
        BlockList order;
        order.reserve(count);
        while ((block = next_[block]) != sentinel_ && order.size() < count) {
            if (block != divider_) order.push_back(block);
        }
        return order;
    }

    // Number of blocks before the divider, at most `most`.
    Int CountFirst(Int most = kForever) const {
        Int count = 0;
        Block block = next_[sentinel_];
        for (; is_divided_ && block != divider_ && count < most; block = next_[block]) ++count;
        return count;
    }

    std::map<Block, bool> superseded;  // blocks with a key that longer prompts copied: true after one copy

  private:
    friend class Seen;
    friend class SeenCheck;
    friend class ListChecks;

    enum Place : uint8_t { kHeld, kBefore, kBehind };  // not in the list, before the divider, behind it

    void Mark(std::span<const Block> blocks, Place place) {
        if (place_.empty()) return;
        for (const Block block : blocks) place_[block] = place;
    }

    // The list as `Seen` reads it: without the divider, which ends the first part.
    Block First() const { return Following(sentinel_); }
    Block End() const { return sentinel_; }
    Block Following(Block block) const { return next_[block] == divider_ ? next_[divider_] : next_[block]; }
    Block Preceding(Block block) const {
        return previous_[block] == divider_ ? previous_[divider_] : previous_[block];
    }
    bool IsInFirstPart(Block block, bool is_previous) const {
        return is_divided_ && previous_[block] != divider_ && (previous_[block] == sentinel_ || is_previous);
    }

    void Join(Block before, Block after) {
        next_[before] = after;
        previous_[after] = before;
    }

    void Insert(Block before, const BlockList& blocks) {
        const Block after = next_[before];
        for (const Block block : blocks) {
            Join(before, block);
            before = block;
        }
        Join(before, after);
        count_ += static_cast<Int>(blocks.size());
    }

    void MoveDivider(Block after) {
        if (!is_divided_ || after == divider_) return;
        Join(previous_[divider_], next_[divider_]);
        PutDivider(after);
    }
    void PutDivider(Block after) {
        Join(previous_[after], divider_);
        Join(divider_, after);
    }

    Block sentinel_, divider_;
    bool is_divided_;
    BlockList next_, previous_;
    std::vector<uint8_t> place_;  // by block; only with HAZARD
    Int count_ = 0;
    Seen seen_;
    Block at_ = 0, first_keyed_ = 0;  // between two calls of PutUnkeyedFirst
};

}  // namespace kvplane
