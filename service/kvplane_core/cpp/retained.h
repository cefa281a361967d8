// Retained prefixes: whose free blocks are evicted after all others, until when, and in which order.
#pragma once

#include "freelist.h"
#include "keys.h"

namespace kvplane {

class BlockPool;
class Tier;

constexpr Int kMaxRetained = 1024;     // prefixes of one replica
constexpr Int kMaxRetainedPerBlock = 8;  // their blocks, each counted once per prefix, per block of the pool
constexpr Int kMaxRetainedNs = Int{7} * 24 * 3600 * 1'000'000'000;
constexpr Int kMaxOwnerChars = 256;

constexpr Int kDevice = 0;  // the first place; the tiers that retain are 1 on

struct KeptKey {
    Key key;
    Int place;  // the first one where it is retained
};

struct Retention {
    std::string owner;
    uint32_t domain = 0;
    Digest digest;
    Int priority = 0, until_ns = 0;
    std::map<Int, KeptKey> keys;  // by position: of one group, the one at the end of the prefix first

    bool HasName(const Retention& other) const {
        return owner == other.owner && domain == other.domain && digest == other.digest;
    }
};

// Free blocks, or slots, that are retained: a list for each priority.
class PriorityLists {
  public:
    static constexpr Int kNone = -1;

    Int num_free() const { return static_cast<Int>(places_.size()); }
    // (priority, number of the place) -> block or slot, in order of eviction.
    const std::map<std::pair<Int, Int>, uint32_t>& order() const { return order_; }
    // The priority of one; kNone if it is in no list.
    Int PriorityAt(uint32_t one) const {
        const auto found = places_.find(one);
        return found == places_.end() ? kNone : found->second.first;
    }
    // Adds one at the end of a list.
    void Put(Int priority, uint32_t one) {
        const std::pair<Int, Int> place{priority, ++last_place_};
        order_.emplace(place, one);
        places_.emplace(one, place);
    }
    // Whether it was in a list.
    bool Remove(uint32_t one) {
        const auto found = places_.find(one);
        if (found == places_.end()) return false;
        order_.erase(found->second);
        places_.erase(found);
        return true;
    }
    Int First() const { return order_.empty() ? kNone : Int{order_.begin()->second}; }
    // The one that is evicted behind this one, which is in a list; kNone behind the last one.
    Int After(uint32_t one) const {
        const auto next = order_.upper_bound(places_.at(one));
        return next == order_.end() ? kNone : Int{next->second};
    }

  private:
    friend class PriorityCheck;

    Int last_place_ = 0;
    std::map<std::pair<Int, Int>, uint32_t> order_;
    std::unordered_map<uint32_t, std::pair<Int, Int>> places_;
};

class RetainedBlocks : public PriorityLists {
  public:
    explicit RetainedBlocks(BlockPool& pool) : pool_(pool) {}
    using PriorityLists::Remove;

    bool empty() const { return of_key_.empty(); }
    Int num_keys() const { return static_cast<Int>(of_key_.size()); }
    Int num_places() const { return static_cast<Int>(tiers.size()) + 1; }
    // The number of keys of an owner, by place.
    Column UsedBy(const std::string& owner) const {
        const auto found = used_.find(owner);
        return found == used_.end() ? Column(static_cast<size_t>(num_places())) : found->second;
    }
    // By number, in the order in which they were made or renewed.
    const std::map<Int, Retention>& each() const { return each_; }

    // -- free blocks -------------------------------------------------------------------------------------------------

    BlockList Order() const {
        BlockList list;
        for (const auto& [place, block] : order()) list.push_back(block);
        return list;
    }
    // (priority, block) of the blocks in order of eviction.
    std::vector<std::pair<Int, Block>> Lists() const {
        std::vector<std::pair<Int, Block>> lists;
        for (const auto& [place, block] : order()) lists.emplace_back(place.first, block);
        return lists;
    }
    void Pop(Int count, BlockList* into) {
        Require(count <= num_free(), "more retained blocks are taken than are free");
        for (; count > 0; --count) {
            into->push_back(static_cast<Block>(First()));
            Remove(into->back());
        }
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

    bool HasKey(const Key& key) const { return of_key_.contains(key); }
    // The highest priority that a key has in a place; kNone if it is not retained there.
    Int PriorityOf(const Key& key, Int place) const {
        Int highest = kNone;
        if (const auto found = of_key_.find(key); found != of_key_.end()) {
            for (const auto& [number, position] : found->second) {
                const Retention& one = each_.at(number);
                if (one.keys.at(position).place <= place) highest = std::max(highest, one.priority);
            }
        }
        return highest;
    }
    // Adds a retention, instead of an earlier one with this name.
    void Add(Retention retention) {
        std::vector<Key> changed = RemoveNamed(retention);
        for (const auto& [position, one] : retention.keys) changed.push_back(one.key);
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

    // How many keys the owner would have, by place, with these instead of those of the retention with this name.
    Column CountNew(const Retention& wanted) const {
        const auto before = Find(wanted);
        const Int without = before == each_.end() ? -1 : before->first;
        Column used = UsedBy(wanted.owner);
        const auto count = [&](const std::map<Int, KeptKey>& keys, Int sign) {
            for (const auto& [position, one] : keys) AddFrom(one, wanted.owner, without, sign, &used);
        };
        if (before != each_.end()) count(before->second.keys, -1);
        count(wanted.keys, 1);
        return used;
    }

    // -- loss --------------------------------------------------------------------------------------------------------

    // A block lost these keys.
    inline void NoteLost(Block block, std::span<const Key> keys);
    // A slot lost its key, or gets none of a job.
    void NoteLost(const Key& key) {
        if (of_key_.contains(key)) lost_.push_back(key);
    }
    // Ends the retention of the lost keys that no block and no tier has any more.
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
            for (const auto& [position, kept] : one.keys) keys.push_back(kept.key);
        }
        PlaceAgain(keys);
    }

    // -- state -------------------------------------------------------------------------------------------------------

    void Enlist(Retention retention) {
        const Int number = ++last_number_;
        Column& used = used_.try_emplace(retention.owner, UsedBy(retention.owner)).first->second;
        for (const auto& [position, one] : retention.keys) {
            AddFrom(one, retention.owner, -1, 1, &used);
            of_key_[one.key].emplace(number, position);
        }
        num_named_ += static_cast<Int>(retention.keys.size());
        each_[number] = std::move(retention);
    }

    std::vector<Tier*> tiers;    // those that retain, the nearest first
    std::vector<Tier*> holders;  // all tiers, if one of them retains: what any of them has may move to that

  private:
    friend class ListChecks;
    friend class TierChecks;

    using Each = std::map<Int, Retention>;

    Each::const_iterator Find(const Retention& name) const {
        return std::find_if(each_.begin(), each_.end(), [&](const auto& one) { return one.second.HasName(name); });
    }
    // The highest priority of the keys of a block; -1 if none is retained.
    inline Int PriorityOf(Block block) const;
    // The first place where the owner retains a key, except by one retention; `num_places` if nowhere.
    Int FirstPlace(const std::string& owner, const Key& key, Int without) const {
        Int first = num_places();
        if (const auto found = of_key_.find(key); found != of_key_.end()) {
            for (const auto& [number, position] : found->second) {
                const Retention& one = each_.at(number);
                if (number != without && one.owner == owner) first = std::min(first, one.keys.at(position).place);
            }
        }
        return first;
    }
    // Counts a key in each place where no other retention of the owner than this one has it.
    void AddFrom(const KeptKey& one, const std::string& owner, Int without, Int sign, Column* used) const {
        const Int end = FirstPlace(owner, one.key, without);
        for (Int place = one.place; place < end; ++place) (*used)[static_cast<size_t>(place)] += sign;
    }
    std::vector<Key> RemoveNamed(const Retention& name) {
        const auto found = Find(name);
        return found == each_.end() ? std::vector<Key>() : Forget(found);
    }
    // Returns the keys of the retention, which ends.
    std::vector<Key> Forget(Each::const_iterator one) {
        std::vector<Key> keys;
        for (const auto& [position, kept] : one->second.keys) {
            ForgetKey(one->first, kept);
            keys.push_back(kept.key);
        }
        each_.erase(one);
        return keys;
    }
    void ForgetKey(Int number, const KeptKey& kept) {
        const std::string& owner = each_.at(number).owner;
        const auto used = used_.find(owner);
        AddFrom(kept, owner, number, -1, &used->second);
        if (std::all_of(used->second.begin(), used->second.end(), [](Int count) { return count == 0; }))
            used_.erase(used);
        auto& numbers = of_key_.at(kept.key);
        numbers.erase(number);
        --num_named_;
        if (numbers.empty()) of_key_.erase(kept.key);
    }
    inline void ForgetAbsent(const std::vector<Key>& keys);
    inline void PlaceAgain(const std::vector<Key>& keys);

    BlockPool& pool_;
    Each each_;
    std::map<Key, std::map<Int, Int>> of_key_;  // by key: the numbers of its retentions, and its position in each
    std::map<std::string, Column> used_;        // number of keys by owner and place
    std::vector<Key> lost_;
    bool is_active_ = true;
    Int last_number_ = 0;
    Int num_named_ = 0;  // keys, counted once per retention
};

}  // namespace kvplane
