// Retained prefixes: whose free blocks are evicted after all others, until when, and in which order.
#pragma once

#include "freelist.h"
#include "keys.h"

namespace kvplane {

class BlockPool;

constexpr Int kMaxRetained = 1024;     // prefixes of one replica
constexpr Int kMaxRetainedPerBlock = 8;  // their blocks, each counted once per prefix, per block of the pool
constexpr Int kMaxPriority = 100;
constexpr Int kMaxRetainedNs = Int{7} * 24 * 3600 * 1'000'000'000;
constexpr Int kMaxNs = (Int{1} << 62) - 1;
constexpr Int kMaxOwnerChars = 256;

struct Retention {
    std::string owner;
    uint32_t domain = 0;
    Digest digest;
    Int priority = 0, until_ns = 0;
    std::map<Int, Key> keys;  // by position: of one group, the one at the end of the prefix first

    bool HasName(const Retention& other) const {
        return owner == other.owner && domain == other.domain && digest == other.digest;
    }
};

class RetainedBlocks {
  public:
    explicit RetainedBlocks(BlockPool& pool) : pool_(pool) {}

    bool empty() const { return of_key_.empty(); }
    Int num_free() const { return static_cast<Int>(places_.size()); }
    Int num_keys() const { return static_cast<Int>(of_key_.size()); }
    Int CountKeysOf(const std::string& owner) const {
        const auto found = used_.find(owner);
        return found == used_.end() ? 0 : found->second;
    }
    // By number, in the order in which they were made or renewed.
    const std::map<Int, Retention>& each() const { return each_; }

    // -- free blocks -------------------------------------------------------------------------------------------------

    BlockList Order() const {
        BlockList order;
        for (const auto& [place, block] : order_) order.push_back(block);
        return order;
    }
    // (priority, block) of the blocks in order of eviction.
    std::vector<std::pair<Int, Block>> Lists() const {
        std::vector<std::pair<Int, Block>> lists;
        for (const auto& [place, block] : order_) lists.emplace_back(place.first, block);
        return lists;
    }
    void Pop(Int count, BlockList* into) {
        Require(count <= num_free(), "more retained blocks are taken than are free");
        for (; count > 0; --count) {
            into->push_back(order_.begin()->second);
            Remove(order_.begin()->second);
        }
    }
    // Whether the block was in a list.
    bool Remove(Block block) {
        const auto found = places_.find(block);
        if (found == places_.end()) return false;
        order_.erase(found->second);
        places_.erase(found);
        return true;
    }
    inline void LeaveFree(Block block);
    // Counts free blocks as used now.
    inline void Renew(BlockList blocks);
    // Takes those of these free blocks that are retained, the last one to be evicted last; leaves the others.
    void Enter(BlockList* blocks) {
        if (empty() || !is_active_) return;
        std::erase_if(*blocks, [&](Block block) {
            const Int priority = PriorityOf(block);
            if (priority >= 0) Put(priority, block);
            return priority >= 0;
        });
    }

    // -- retentions --------------------------------------------------------------------------------------------------

    // Adds a retention, instead of an earlier one with this name.
    void Add(Retention retention) {
        std::vector<Key> changed = RemoveNamed(retention);
        for (const auto& [position, key] : retention.keys) changed.push_back(key);
        Enlist(std::move(retention));
        PlaceAgain(changed);
    }
    // Whether the retention may be added: what all of them need is limited, since many owners can share blocks.
    inline bool HasRoomFor(const Retention& wanted) const;
    bool Has(const Retention& name) const { return Find(name) != each_.end(); }
    // Whether another owner retains the prefix.
    bool OthersHave(const Retention& name) const {
        return std::any_of(each_.begin(), each_.end(), [&](const auto& one) {
            return one.second.domain == name.domain && one.second.digest == name.digest;
        });
    }
    void Remove(const Retention& name) { PlaceAgain(RemoveNamed(name)); }
    void RemoveUntil(Int now_ns) {
        for (auto one = each_.begin(); one != each_.end();) {
            const auto ended = one++;
            if (ended->second.until_ns <= now_ns) PlaceAgain(Forget(ended));
        }
    }
    void Clear() { RemoveUntil(kForever); }

    // How many keys the owner would have, with these instead of those of the retention with this name.
    Int CountNew(const Retention& wanted) const {
        const auto before = Find(wanted);
        const Int without = before == each_.end() ? -1 : before->first;
        Int count = CountKeysOf(wanted.owner);
        if (before != each_.end()) {
            for (const auto& [position, key] : before->second.keys) count -= !IsOf(wanted.owner, key, without);
        }
        for (const auto& [position, key] : wanted.keys) count += !IsOf(wanted.owner, key, without);
        return count;
    }

    // -- loss --------------------------------------------------------------------------------------------------------

    // A block lost these keys.
    inline void NoteLost(Block block, std::span<const Key> keys);
    // Ends the retention of the lost keys that no block has any more.
    void ForgetLost() {
        if (lost_.empty()) return;
        const std::vector<Key> lost = std::move(lost_);
        lost_.clear();
        ForgetAbsent(lost);
    }
    // An engine life ends, and its keys are verified.
    inline void Suspend();
    void Resume() {
        is_active_ = true;
        lost_.clear();
        std::vector<Key> keys;
        for (const auto& [key, names] : of_key_) keys.push_back(key);
        ForgetAbsent(keys);
        keys.clear();
        for (const auto& [number, one] : each_) {
            for (const auto& [position, key] : one.keys) keys.push_back(key);
        }
        PlaceAgain(keys);
    }

    // -- state -------------------------------------------------------------------------------------------------------

    void Enlist(Retention retention) {
        const Int number = ++last_number_;
        for (const auto& [position, key] : retention.keys) {
            used_[retention.owner] += !IsOf(retention.owner, key, -1);
            of_key_[key].emplace(number, position);
        }
        num_named_ += static_cast<Int>(retention.keys.size());
        each_[number] = std::move(retention);
    }
    // Puts a free block at the end of a list.
    void Put(Int priority, Block block) {
        const std::pair<Int, Int> place{priority, ++last_place_};
        order_.emplace(place, block);
        places_.emplace(block, place);
    }

  private:
    using Each = std::map<Int, Retention>;

    Each::const_iterator Find(const Retention& name) const {
        return std::find_if(each_.begin(), each_.end(), [&](const auto& one) { return one.second.HasName(name); });
    }
    // The highest priority of the keys of a block; -1 if none is retained.
    inline Int PriorityOf(Block block) const;
    Int PriorityOf(const Key& key) const {
        Int highest = -1;
        if (const auto found = of_key_.find(key); found != of_key_.end()) {
            for (const auto& [number, position] : found->second)
                highest = std::max(highest, each_.at(number).priority);
        }
        return highest;
    }
    // Whether another retention of the owner than this one has the key.
    bool IsOf(const std::string& owner, const Key& key, Int without) const {
        const auto found = of_key_.find(key);
        return found != of_key_.end() && std::any_of(found->second.begin(), found->second.end(), [&](const auto& one) {
            return one.first != without && each_.at(one.first).owner == owner;
        });
    }
    std::vector<Key> RemoveNamed(const Retention& name) {
        const auto found = Find(name);
        return found == each_.end() ? std::vector<Key>() : Forget(found);
    }
    // Returns the keys of the retention, which ends.
    std::vector<Key> Forget(Each::const_iterator one) {
        std::vector<Key> keys;
        for (const auto& [position, key] : one->second.keys) {
            ForgetKey(one->first, key);
            keys.push_back(key);
        }
        each_.erase(one);
        return keys;
    }
    void ForgetKey(Int number, const Key& key) {
        const std::string& owner = each_.at(number).owner;
        if (!IsOf(owner, key, number) && --used_[owner] == 0) used_.erase(owner);
        auto& numbers = of_key_.at(key);
        numbers.erase(number);
        --num_named_;
        if (numbers.empty()) of_key_.erase(key);
    }
    inline void ForgetAbsent(const std::vector<Key>& keys);
    inline void PlaceAgain(const std::vector<Key>& keys);

    BlockPool& pool_;
    Each each_;
    std::map<Key, std::map<Int, Int>> of_key_;  // by key: the numbers of its retentions, and its position in each
    std::map<std::string, Int> used_;           // number of keys by owner
    std::vector<Key> lost_;
    bool is_active_ = true;
    Int last_number_ = 0, last_place_ = 0;
    Int num_named_ = 0;  // keys, counted once per retention
    std::map<std::pair<Int, Int>, Block> order_;  // (priority, number of the place) -> block
    std::unordered_map<Block, std::pair<Int, Int>> places_;
};

}  // namespace kvplane
