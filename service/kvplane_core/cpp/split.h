// Split pages: the free blocks of a pool in which a state takes several consecutive ones, see split.py.
#pragma once

#include "freelist.h"

namespace kvplane {

// Whole superblocks in the order of eviction, and the free blocks of all others. `pool` is the pool of these blocks.
class SplitList {
  public:
    SplitList(Int num_blocks, Int size)
        : size_(static_cast<Block>(size)),
          num_blocks_(num_blocks),
          whole_(num_blocks / size, kLru, false),
          bare_(num_blocks, kLru, false),
          cached_(num_blocks, kLru, false),
          place_(static_cast<size_t>(num_blocks), kNowhere),
          held_(static_cast<size_t>(num_blocks / size)),
          has_state_(held_.size()) {
        held_[0] = size - 1;  // under the null block
        bare_.Rebuild({}, 0);
        cached_.Rebuild({}, 0);
    }

    Int count() const { return bare_.count() + cached_.count() + whole_.count() * size_; }
    Int num_bare() const { return bare_.count(); }
    Int num_cached() const { return cached_.count(); }
    Int num_held() const { return num_held_; }
    const std::vector<uint8_t>& has_state() const { return has_state_; }
    void NameState(Block block) { has_state_[block / size_] = 1; }

    // -- blocks that are handed out ----------------------------------------------------------------------------------

    Int InBlocks(Int count, Int states) const { return count + (size_ - 1) * states; }

    // How many free blocks an allocation of `count` blocks takes, `states` of which are states; kForever if too few
    // superblocks are whole for these. `hit`: by group, the blocks of a hit that it adopts; null: none.
    template <typename Rows, typename IsState>
    Int Demand(Int count, Int states, const Rows* hit, IsState&& is_state) {
        std::set<Block> cut;
        for (size_t group = 0; states && hit && group < hit->size(); ++group) {
            if (is_state(group)) continue;
            for (const Block block : (*hit)[group]) {
                if (!held_[block / size_]) cut.insert(block / size_);
            }
        }
        if (states > whole_.count() - static_cast<Int>(cut.size())) return kForever;
        wanted_ = states;
        return InBlocks(count, states);
    }

    // Appends `count` blocks of attention to `into`, if possible each behind the one before, the first behind `after`.
    template <typename Pool>
    void PopBehind(Pool& pool, Int count, Block after, BlockList* into) {
        Require(count <= this->count(), "more blocks are taken than are free");
        for (; count > 0; --count) {
            after = Choose(pool, after + 1);
            into->push_back(after);
        }
    }

    // Takes a superblock for a state; returns its first block.
    template <typename Pool>
    Block PopWhole(Pool& pool) {
        const Block number = PopFirst(&whole_), first = number * size_;
        Empty(pool, first);
        if (!has_state_[number]) {  // otherwise no key was registered for the others since the last state
            for (Block block = first; block < first + size_; ++block) pool.Restamp(block);
            has_state_[number] = 1;
        }
        Hold(number);
        wanted_ = std::max<Int>(wanted_ - 1, 0);
        return first;
    }

    // -- blocks that are held again, or released ---------------------------------------------------------------------

    template <typename Pool>
    void Remove(const Pool& pool, Block block) {
        const Block number = block / size_, first = number * size_;
        if (!held_[number]) whole_.Remove(number);
        if (!has_state_[number]) {  // else the block is under a state of an earlier life, or is the state
            for (Block other = first; !held_[number] && other < first + size_; ++other) {
                if (other != block) Put(other, pool.HasKey(other) ? kCached : kBare);
            }
            if (held_[number]) RemoveLoose(block);
        }
        Hold(number);
    }

    // Releases blocks without a key; blocks[0] is evicted next.
    template <typename Pool>
    void Prepend(const Pool& pool, const BlockList& blocks) {
        for (auto at = blocks.rbegin(); at != blocks.rend(); ++at) Release(pool, *at, kBare);
    }
    // Releases blocks with a key; blocks[-1] is evicted last.
    template <typename Pool>
    void Append(const Pool& pool, const BlockList& blocks) {
        for (const Block block : blocks) Release(pool, block, kCached);
    }

    // A block loses its keys.
    void Forget(Block block) {
        if (place_[block] != kCached) return;
        RemoveLoose(block);
        Put(block, kBare);
    }

    // -- blocks of earlier engine lives ------------------------------------------------------------------------------

    // Prepares to hold these blocks, of which the first ones of superblocks may be states, see `hold_busy`.
    template <typename Pool>
    void PrepareBusy(Pool& pool, const std::set<Block>& fresh) {
        for (const Block block : fresh) {
            const Block number = block / size_, first = number * size_;
            if (!held_[number]) Make(pool, number, fresh.contains(first));
        }
    }

    // Prepares to hold blocks that are states, or are not.
    template <typename Pool>
    void Assign(Pool& pool, const BlockList& blocks, bool is_state) {
        for (const Block block : blocks) {
            const Block number = block / size_, first = number * size_;
            if (block == kNullBlock || (has_state_[number] != 0) == is_state) continue;
            if (!held_[number]) {
                Make(pool, number, is_state);
                continue;
            }
            Require(!is_state, "a state is held as a block of attention");
            has_state_[number] = 0;  // it turned out that no state holds the superblock
            for (Block other = first + 1; other < first + size_; ++other) {
                if (!pool.references[other]) Put(other, pool.HasKey(other) ? kCached : kBare);
            }
        }
    }

    // Prepares to hold blocks of an image, each of which may be a state or not, see `SplitPool.assume`.
    template <typename Pool>
    void Assume(Pool& pool, const BlockList& blocks) {
        const std::set<Block> given(blocks.begin(), blocks.end());
        for (const Block block : given) {
            const Block first = block / size_ * size_;
            if (block == kNullBlock || pool.references[block] || (block == first && pool.HasKey(block))) continue;
            bool is_state = block == first;
            for (Block other = first + 1; other < first + size_; ++other)
                is_state &= !given.contains(other) && !pool.references[other] && !pool.HasKey(other);
            Assign(pool, {block}, is_state);
        }
    }

    // Gives all blocks without a key other stamps whose superblocks have one of these blocks.
    template <typename Pool>
    void RestampAround(Pool& pool, const std::set<Block>& blocks) {
        std::set<Block> numbers;
        for (const Block block : blocks) numbers.insert(block / size_);
        for (const Block number : numbers) {
            for (Block block = number * size_; block < (number + 1) * size_; ++block) {
                if (!pool.HasKey(block)) pool.Restamp(block);
            }
        }
    }

    // Forgets the states of which no proof is left, see `SplitPool.begin_epoch`.
    template <typename Pool>
    void ForgetStates(const Pool& pool) {
        for (size_t number = 0; number < held_.size(); ++number)
            has_state_[number] &= held_[number] || pool.HasKey(static_cast<Block>(number) * size_);
    }

    // Visits all blocks that have memory in common with this one.
    template <typename F>
    void ForEachOverlapping(Block block, F&& visit) const {
        const Block number = block / size_, first = number * size_;
        visit(first);
        visit(block);
        for (Block other = first; has_state_[number] && other < first + size_; ++other) visit(other);
    }

    // -- the whole list ----------------------------------------------------------------------------------------------

    // As in `FreeList`, of superblocks: of the other free blocks, those without a key always are the first ones.
    template <typename HasKey>
    bool PutUnkeyedFirst(bool begins, size_t count, HasKey&& has_key) {
        return whole_.PutUnkeyedFirst(begins, CeilDiv(static_cast<Int>(count), size_),
                                      [&](Block number) { return HasAnyKey(number * size_, has_key); });
    }

    // Replaces the list of a pool of which no block is held: superblocks in the order of their youngest block.
    void Replace(const BlockList& order) {
        BlockList numbers;
        std::vector<bool> seen(held_.size());
        for (auto at = order.rbegin(); at != order.rend(); ++at) {
            if (seen[*at / size_]) continue;
            seen[*at / size_] = true;
            numbers.push_back(*at / size_);
        }
        std::reverse(numbers.begin(), numbers.end());
        whole_.Rebuild(numbers, 0);
    }

    // Replaces the content of the list; false, if it is not one of such a pool. All of `order` are blocks, each once.
    template <typename References>
    bool Load(const BlockList& order, Int num_bare, Int num_cached, const std::vector<uint8_t>& has_state,
              const References& references) {
        const Int num_loose = num_bare + num_cached, num_free = static_cast<Int>(order.size());
        if (std::min(num_bare, num_cached) < 0 || std::max(num_bare, num_cached) > num_free || num_loose > num_free ||
            (num_free - num_loose) % size_ || has_state.size() != held_.size())
            return false;
        BlockList numbers;
        for (auto at = order.begin() + num_loose; at != order.end(); at += size_) {
            for (Block other = 0; other < size_; ++other) {
                if (at[other] != *at / size_ * size_ + other) return false;
            }
            numbers.push_back(*at / size_);
        }
        whole_.Rebuild(numbers, 0);
        std::fill(place_.begin(), place_.end(), kNowhere);
        for (Int at = 0; at < num_loose; ++at) Put(order[static_cast<size_t>(at)], at < num_bare ? kBare : kCached);
        has_state_ = has_state;
        std::fill(held_.begin(), held_.end(), 0);
        for (size_t block = 0; block < references.size(); ++block) held_[block / size_] += references[block] != 0;
        num_held_ = std::accumulate(held_.begin() + 1, held_.end(), Int{0});
        return true;
    }

    // Up to `count` blocks behind this one, or the first ones behind the null block, in the order in which they are
    // free: bare ones, cached ones, and those of whole superblocks.
    BlockList Behind(Block block, size_t count) const {
        BlockList found;
        bool is_behind = block == kNullBlock;
        for (const Place place : {kBare, kCached}) {
            const FreeList& list = place == kBare ? bare_ : cached_;
            const bool is_here = !is_behind && place_[block] == place;
            if (!is_behind && !is_here) continue;
            const BlockList more = list.Behind(is_here ? block : list.Start(), count - found.size());
            found.insert(found.end(), more.begin(), more.end());
            is_behind = true;
        }
        Block number = whole_.Start();
        if (!is_behind) {
            number = block / size_;
            while (++block % size_ && found.size() < count) found.push_back(block);
        }
        for (const Block one : whole_.Behind(number, (count - found.size() + size_ - 1) / size_)) {
            for (Block other = 0; other < size_ && found.size() < count; ++other) found.push_back(one * size_ + other);
        }
        return found;
    }

  private:
    friend class ListChecks;

    static constexpr Int kSlack = 32, kScarce = 8;
    enum Place : uint8_t { kNowhere, kBare, kCached };  // the list of cut superblocks in which a block is

    // Takes a block, if possible this one, which follows the last one in the same superblock.
    template <typename Pool>
    Block Choose(Pool& pool, Block following) {
        const Int whole = whole_.count();
        if (following % size_ && place_[following] == kBare) {
            bare_.Remove(following);
            return HoldLoose(following);
        }
        if (bare_.count() * kSlack > num_blocks_) return HoldLoose(PopFirst(&bare_));
        if (whole > wanted_ && whole * kScarce > static_cast<Int>(held_.size())) return Cut(pool);
        if (bare_.count()) return HoldLoose(PopFirst(&bare_));
        return cached_.count() ? HoldLoose(PopFirst(&cached_)) : Cut(pool);
    }

    template <typename Pool>
    Block Cut(Pool& pool) {
        const Block number = PopFirst(&whole_), first = number * size_;
        Empty(pool, first);
        has_state_[number] = 0;
        Hold(number);
        for (Block other = first + 1; other < first + size_; ++other) Put(other, kBare);
        return first;
    }

    // Evicts all keys of the superblock that begins with this block.
    template <typename Pool>
    void Empty(Pool& pool, Block first) const {
        for (Block block = first; block < first + size_; ++block) {
            if (!pool.HasKey(block)) continue;
            pool.Evict(block, pool.records[block].key, kEvicted);
            pool.Restamp(block);
        }
    }

    template <typename Pool>
    void Release(const Pool& pool, Block block, Place place) {
        const Block number = block / size_, first = number * size_;
        Require(held_[number] > 0, "a block of a whole superblock is released");
        if (place_[block] != kNowhere) RemoveLoose(block);  // it is released with the first block, which came before it
        --num_held_;
        if (--held_[number]) {
            if (!has_state_[number]) return Put(block, place);
            if (block != first) return;  // a load of an earlier life, and that of the first block wrote the same memory
            has_state_[number] = 0;
            for (Block other = first + 1; other < first + size_; ++other) {
                if (!pool.references[other]) Put(other, pool.HasKey(other) ? kCached : kBare);
            }
            return Put(block, place);
        }
        for (Block other = first; !has_state_[number] && other < first + size_; ++other) {
            if (other != block) RemoveLoose(other);
        }
        one_.assign(1, number);
        HasAnyKey(first, [&](Block other) { return pool.HasKey(other); }) ? whole_.Append(one_) : whole_.Prepend(one_);
    }

    template <typename HasKey>
    bool HasAnyKey(Block first, HasKey&& has_key) const {
        for (Block block = first; block < first + size_; ++block) {
            if (has_key(block)) return true;
        }
        return false;
    }

    // Lets a whole superblock have a state, or blocks of attention: what it cannot be any more has no key and no proof.
    template <typename Pool>
    void Make(Pool& pool, Block number, bool is_state) {
        if ((has_state_[number] != 0) == is_state) return;
        const Block first = number * size_;
        for (Block block = first; block < first + size_; ++block) {
            if (!pool.DropKeys(block, kDropped) && block != first) pool.Restamp(block);
        }
        has_state_[number] = is_state;
    }

    void Hold(Block number) {
        ++held_[number];
        ++num_held_;
    }
    Block HoldLoose(Block block) {
        place_[block] = kNowhere;
        Hold(block / size_);
        return block;
    }

    void Put(Block block, Place place) {
        one_.assign(1, block);
        (place == kBare ? bare_ : cached_).Append(one_);
        place_[block] = place;
    }
    void RemoveLoose(Block block) {
        Require(place_[block] != kNowhere, "a block is not free, or its superblock is whole");
        (place_[block] == kBare ? bare_ : cached_).Remove(block);
        place_[block] = kNowhere;
    }
    Block PopFirst(FreeList* list) {
        one_.clear();
        list->Pop(1, &one_);
        return one_[0];
    }

    Block size_;
    Int num_blocks_, wanted_ = 0, num_held_ = 0;  // held blocks behind the first superblock
    FreeList whole_;                              // superblocks, by number, of which no block is held
    FreeList bare_, cached_;                      // free blocks of all others, without a key and with one
    std::vector<Place> place_;
    Column held_;                     // by superblock, how many of its blocks are held; a state counts as one
    std::vector<uint8_t> has_state_;  // by superblock, whether a state took it last
    BlockList one_;
};

}  // namespace kvplane
