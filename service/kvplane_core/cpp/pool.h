// The block pool: reference counts, keys and stamps of all blocks.
#pragma once

#include "cache_events.h"
#include "freelist.h"
#include "keys.h"
#include "policies.h"
#include "retained.h"
#include "split.h"

namespace kvplane {

struct Residency {
    std::array<Int, 65> lifetime{}, idle_before_evict{}, reuse_gap{};
};

class BlockPool : public PoolEvents {
  public:
    BlockPool(const Spec& spec)
        : PoolEvents(spec.groups.size(), spec.events),
          spec_(spec),
          num_blocks(spec.num_blocks),
          free(spec.blocks_per_state > 1 ? 1 : spec.num_blocks, static_cast<Policy>(spec.policy), !spec.tiers.empty()),
          references(spec.num_blocks),
          key_step(spec.num_blocks),
          stamp(spec.num_blocks),
          born(spec.num_blocks),
          used(spec.num_blocks),
          last_use_(spec.num_blocks),
          records(spec.num_blocks),
          index(static_cast<size_t>(spec.num_blocks)),
          keys_of_group(spec.groups.size()),
          evicted_keys(spec.groups.size()),
          is_stamped_(static_cast<size_t>(spec.num_blocks)) {
        if (spec.policy == kHazard) hazard = std::make_unique<HazardPolicy>(spec);
        if (spec.blocks_per_state == 1) return;
        split = std::make_unique<SplitList>(num_blocks, spec.blocks_per_state);
        for (Block block = 1; block < spec.blocks_per_state; ++block) {  // a launch may write the null state
            reserved.push_back(block);
            references[block] = 1;
        }
    }

    // -- blocks ------------------------------------------------------------------------------------------------------

    Int num_free() const { return split ? split->count() : free.count() + retained.num_free(); }
    bool HasKey(Block block) const { return records[block].key.pair != 0; }
    Int KeyTokens(Block block) const { return records[block].tokens; }

    // `after`: the last block of the same table.
    void Take(Int count, BlockList* into, Block after = kNullBlock) {
        const size_t first = into->size();
        if (split) {
            split->PopBehind(*this, count, after, into);
            return HandOut(into, first, first);
        }
        const Int others = std::min(count, free.count());
        if (hazard) hazard->PutBefore(free, others, [&](Block block) { return KeyTokens(block); });
        const Int before = free.Pop(others, into);
        if (others < count) retained.Pop(count - others, into);
        HandOut(into, first, first + (hazard ? 0 : static_cast<size_t>(before)));
    }

    // Does what `Take` does, for states.
    void TakeStates(Int count, BlockList* into) {
        if (!split) return Take(count, into);
        const size_t first = into->size();
        for (; count > 0; --count) into->push_back(split->PopWhole(*this));
        HandOut(into, first, first);
    }

    // Gives blocks that left the free list their first reference, those before `let_go` because the policy let them go.
    void HandOut(BlockList* into, size_t first, size_t let_go) {
        const Int now = age_base + step;
        uint64_t hashes[kRun];  // of the keys that are evicted
        for (size_t run = first; run < into->size(); run += kRun) {
            const auto blocks = std::span(*into).subspan(run, std::min(kRun, into->size() - run));
            for (const Block block : blocks) __builtin_prefetch(&records[block]);
            for (size_t i = 0; i < blocks.size(); ++i) {
                if (!HasKey(blocks[i])) continue;
                const Sought sought(records[blocks[i]].key);
                index.Prefetch(sought);
                hashes[i] = sought.hash;
            }
            for (size_t i = 0; i < blocks.size(); ++i) {
                const Block block = blocks[i];
                const auto reason = run + i < let_go ? kLeftWindow : kEvicted;
                if (HasKey(block)) Evict(block, Sought(records[block].key, hashes[i]), reason);
                Require(references[block] == 0, "a free block has references");
                references[block] = 1;
                if (born[block] > age_base) ++residency.lifetime[BitLength(now - born[block])];
                born[block] = used[block] = now;
                Restamp(block);
            }
        }
        FetchNext();
    }

    void Touch(Block block) {
        if (block == kNullBlock) return;
        const Int now = age_base + step;
        if (references[block] == 0) {
            split ? split->Remove(*this, block) : retained.LeaveFree(block);
            num_evictable -= HasKey(block);
        }
        ++references[block];
        ++residency.reuse_gap[BitLength(now - std::max(used[block], age_base))];
        used[block] = now;
    }

    // Freed blocks without a key join the front of the free list, those with a key its back, in the given order;
    // `left_window`: where the policy puts such blocks.
    template <typename Iterator>
    void Release(Iterator first, Iterator last, bool left_window = false) {
        unkeyed_.resize(static_cast<size_t>(last - first));
        keyed_.resize(unkeyed_.size());
        auto unkeyed = unkeyed_.begin(), keyed = keyed_.begin();
        for (; first != last; ++first) {
            const Block block = *first;
            if (block == kNullBlock) continue;
            Require(references[block] > 0, "a block without references is released");
            if (--references[block] == 0) *(HasKey(block) ? keyed : unkeyed)++ = block;
        }
        unkeyed_.erase(unkeyed, unkeyed_.end());
        keyed_.erase(keyed, keyed_.end());
        num_evictable += static_cast<Int>(keyed_.size());
        if (split) {
            split->Prepend(*this, unkeyed_);
            return split->Append(*this, keyed_);
        }
        if (!unkeyed_.empty()) free.Prepend(unkeyed_);
        if (keyed_.empty()) return;
        retained.Enter(&keyed_);
        left_window ? free.AppendLeftWindow(keyed_) : free.Append(keyed_);
    }
    void Release(const BlockList& blocks, bool left_window = false) {
        Release(blocks.begin(), blocks.end(), left_window);
    }

    void NoteUse(const BlockList& blocks, Int until) {
        if (until <= executed_through) return;
        for (const Block block : blocks)
            if (block != kNullBlock) last_use_[block] = std::max(last_use_[block], age_base + until);
    }

    template <typename Blocks>
    Int LastUse(const Blocks& blocks) const {
        Int latest = 0;
        const auto note = [&](Block block) { latest = std::max(latest, last_use_[block]); };
        for (const Block block : blocks) split ? split->ForEachOverlapping(block, note) : note(block);
        latest -= age_base;
        return latest > executed_through ? latest : 0;
    }

    bool IsUnused() const {
        if (split) return split->num_held() == static_cast<Int>(busy.size());
        return num_free() == num_blocks - 1 - static_cast<Int>(reserved.size()) - static_cast<Int>(busy.size());
    }

    // Up to `count` free blocks behind this one, or the first ones behind the null block, in eviction order.
    BlockList FreeBehind(Block block, size_t count) const {
        if (split) return split->Behind(block, count);
        return free.Behind(block ? block : free.Start(), count);
    }
    BlockList FreeOrder() const { return FreeBehind(kNullBlock, static_cast<size_t>(num_blocks)); }

    bool IsPrivate(Block block) const { return block != kNullBlock && references[block] == 1 && !HasKey(block); }

    // -- keys --------------------------------------------------------------------------------------------------------

    // Returns the first block registered under the key by a step up to `horizon`; the null block if there is none.
    Block Find(const Sought& key, Int horizon) const {
        const uint32_t last = index.Find(records, key);
        if (last == kNoRecord) return kNullBlock;
        uint32_t at = last;
        do {
            at = records[at].next;
            if (key_step[BlockOf(at)] <= horizon) return BlockOf(at);
        } while (at != last);
        return kNullBlock;
    }

    // Visits the blocks that have a key, in order of registration.
    template <typename F>
    void ForEachBlockOf(const Sought& key, F&& visit) const {
        const uint32_t last = index.Find(records, key);
        if (last == kNoRecord) return;
        uint32_t at = last;
        do {
            at = records[at].next;
            visit(BlockOf(at));
        } while (at != last);
    }

    BlockList BlocksOf(const Key& key) const {
        BlockList found;
        for (const uint32_t record : RecordsOf(key)) found.push_back(BlockOf(record));
        return found;
    }

    // The records of a key, in order of registration.
    std::vector<uint32_t> RecordsOf(const Key& key) const {
        std::vector<uint32_t> found;
        const uint32_t last = index.Find(records, key);
        if (last == kNoRecord) return found;
        for (uint32_t at = records[last].next; at != last; at = records[at].next) found.push_back(at);
        found.push_back(last);
        return found;
    }

    Block BlockOf(uint32_t record) const {
        return record < num_blocks ? record : further_blocks_[record - static_cast<uint32_t>(num_blocks)];
    }

    bool HasThisKey(Block block, const Key& key) const {
        if (records[block].key == key) return true;
        const auto further = more_keys.find(block);
        const auto is_this = [&](uint32_t one) { return records[one].key == key; };
        return further != more_keys.end() && std::any_of(further->second.begin(), further->second.end(), is_this);
    }

    void Register(Block block, const Sought& key, Int num_tokens) {
        if (HasKey(block) && HasThisKey(block, key.key)) return;
        AddKey(block, key, num_tokens);
        registered.emplace_back(block, key.key);
    }

    // Fetches what a look-up or removal of the key will read.
    void Expect(const Sought& key) const { index.Prefetch(key); }
    // Fetches what the registration, and what the release of the block will read.
    void FetchRecord(Block block) const { __builtin_prefetch(&records[block]); }
    void FetchRelease(Block block) const {
        FetchRecord(block);
        __builtin_prefetch(&references[block]);
    }

    // Adds a key that the block does not have.
    void AddKey(Block block, const Sought& key, Int num_tokens) {
        uint32_t record = block;
        if (HasKey(block)) {
            record = NewRecord(block);
            more_keys[block].push_back(record);
        } else {
            Require(num_tokens > 0, "a primary key of 0 tokens");
            key_step[block] = step;
            num_evictable += references[block] == 0;
            free.VisitAgain(block);
        }
        records[record].key = key.key;
        records[record].tokens = static_cast<uint32_t>(num_tokens);
        Link(record, key);
    }

    // Removes all keys of a block and appends them to `keys`, the primary key first. Emits no event.
    bool Unregister(Block block, std::vector<Key>* keys) {
        if (!HasKey(block)) return false;
        Unregister(block, records[block].key, keys);
        return true;
    }
    // `primary`: the block's primary key.
    void Unregister(Block block, const Sought& primary, std::vector<Key>* keys) {
        const size_t first = keys->size();
        keys->push_back(primary.key);
        Unlink(block, primary);
        if (const auto further = more_keys.find(block); further != more_keys.end()) {
            for (const uint32_t record : further->second) {
                keys->push_back(records[record].key);
                Unlink(record, records[record].key);
                free_records_.push_back(record);
            }
            more_keys.erase(further);
        }
        split ? split->Forget(block) : free.Forget(block);
        if (!retained.empty()) retained.NoteLost(block, std::span(*keys).subspan(first));
        key_step[block] = 0;
        num_evictable -= references[block] == 0;
    }

    bool DropKeys(Block block, RemoveReason reason) {
        removed_.clear();
        if (!Unregister(block, &removed_)) return false;
        ReportRemoved(block, removed_, reason);
        Restamp(block);
        return true;
    }

    // Moves all keys of the source block to the target, which has none, and gives both a new stamp. Emits no event.
    std::vector<std::pair<Key, Int>> MoveKeys(Block source, Block target) {
        Require(!HasKey(target), "the target of a move has a key");
        std::vector<std::pair<Key, Int>> moved;
        if (HasKey(source)) {
            Column tokens{KeyTokens(source)};
            if (const auto further = more_keys.find(source); further != more_keys.end())
                for (const uint32_t record : further->second) tokens.push_back(records[record].tokens);
            removed_.clear();
            Unregister(source, &removed_);
            for (size_t at = 0; at < tokens.size(); ++at) moved.emplace_back(removed_[at], tokens[at]);
            for (const auto& [key, count] : moved) Register(target, key, count);
        }
        Restamp(source);
        Restamp(target);
        return moved;
    }

    bool Reset() {
        if (!IsUnused()) return false;
        retained.Clear();
        Clear();
        Restamp(kNullBlock);
        if (spec_.events) AddEvent({.kind = kCleared});
        return true;
    }


    // A version number that was never used in this page memory, nor in the slots of its tiers.
    uint64_t Draw() {
        if (counter == kMaxCounter) ++generation, counter = 0, SetStampBase();
        return stamp_base_ + ++counter;
    }

    void Restamp(Block block) {
        stamp[block] = Draw();
        NoteStamped(block);
    }
    void NoteStamped(Block block) {
        if (is_stamped_[block]) return;
        is_stamped_[block] = true;
        stamped.push_back(block);
    }

    // Begins an engine life: stamps contain its number from now on, and steps count from 1. Remaining keys count as
    // executed, since the stamps of their blocks were verified.
    void BeginEpoch(uint64_t number) {
        Require(number > epoch, "stamps would repeat");
        epoch = number;
        generation = counter = 0;
        SetStampBase();
        age_base += step;
        step = executed_through = 0;
        residency = {};
        ForgetStamped();
        if (split) split->ForgetStates(*this);
    }

    void Reserve(Int count) {
        Take(count, &reserved);
        ForgetStamped();
    }

    void SetStampBase() { stamp_base_ = (generation << (kCounterBits + kEpochBits)) | (epoch << kCounterBits); }

    void ForgetStamped() {
        BlockList unused;
        TakeStamped(&unused);
    }

    void TakeStamped(BlockList* blocks) {
        for (const Block block : stamped) is_stamped_[block] = false;
        blocks->swap(stamped);
        stamped.clear();
    }

    // Takes over the keys, the stamps and the free list of a pool of the same size that has no requests.
    void TakeKeys(BlockPool& other) {
        std::swap(records, other.records);
        std::swap(pairs, other.pairs);
        std::swap(index, other.index);
        std::swap(more_keys, other.more_keys);
        std::swap(keys_of_group, other.keys_of_group);
        std::swap(free_records_, other.free_records_);
        std::swap(further_blocks_, other.further_blocks_);
        std::swap(stamp, other.stamp);
        std::swap(free, other.free);
        std::swap(split, other.split);
        num_evictable = other.num_evictable;
    }

  private:
    const Spec& spec_;

  public:
    Int num_blocks;
    FreeList free;
    RetainedBlocks retained{*this};  // the free blocks that are evicted after those of `free`
    std::unique_ptr<HazardPolicy> hazard;  // only with HAZARD
    std::unique_ptr<SplitList> split;      // only with split pages, instead of `free`
    std::vector<uint32_t> references;
    Column key_step;
    std::vector<uint64_t> stamp;
    Column born, used, last_use_;
    std::vector<KeyRecord> records;  // by block: its primary key; behind them further keys
    Index index;
    std::unordered_map<Block, std::vector<uint32_t>> more_keys;  // records of further keys, in order of registration
    std::vector<Int> keys_of_group;                              // distinct keys
    uint64_t generation = 0, epoch = 0, counter = 0;
    Int step = 0, executed_through = 0;
    std::vector<std::pair<Block, Key>> registered;
    BlockList reserved;
    std::set<Block> busy;
    Int num_evictable = 0, age_base = 0;
    std::vector<Int> evicted_keys;
    Residency residency;
    BlockList stamped;

  private:
    friend class SplitList;
    friend class KeyChecks;

    // Fetches what the next `Take` of a block will read, most of which the `Take` before it has fetched.
    void FetchNext() const {
        const Block next = free.After(free.Start());
        if (HasKey(next)) Expect(records[next].key);
        const Block later = free.After(next ? next : free.Start());
        FetchRelease(later);
        __builtin_prefetch(&born[later]);
        __builtin_prefetch(&used[later]);
        free.Fetch(later);
    }

    void Evict(Block block, const Sought& primary, RemoveReason reason) {
        removed_.clear();
        Unregister(block, primary, &removed_);
        for (const Key& key : removed_) ++evicted_keys[static_cast<size_t>(pairs.Group(key.pair))];
        ++residency.idle_before_evict[BitLength(age_base + step - std::max(used[block], age_base))];
        ReportRemoved(block, removed_, reason);
    }

    void Clear() {
        for (Int block = 1; block < num_blocks; ++block) {
            removed_.clear();
            if (Unregister(static_cast<Block>(block), &removed_)) Restamp(static_cast<Block>(block));
        }
    }

    uint32_t NewRecord(Block block) {
        uint32_t record = static_cast<uint32_t>(records.size());
        if (free_records_.empty()) {
            records.emplace_back();
            further_blocks_.push_back(block);
        } else {
            record = free_records_.back();
            free_records_.pop_back();
            further_blocks_[record - static_cast<uint32_t>(num_blocks)] = block;
        }
        return record;
    }

    // Makes the record the last one of its key.
    void Link(uint32_t record, const Sought& key) {
        const uint32_t last = index.FindOrAdd(records, record, key);
        if (last == kNoRecord) {
            records[record].next = record;
            ++keys_of_group[static_cast<size_t>(pairs.Group(key.key.pair))];
        } else {
            records[record].next = std::exchange(records[last].next, record);
            index.Replace(records, last, record);
        }
    }

    // `sought`: its key.
    void Unlink(uint32_t record, const Sought& sought) {
        KeyRecord& gone = records[record];
        if (gone.next == record) {
            index.Remove(records, record, sought);
            --keys_of_group[static_cast<size_t>(pairs.Group(gone.key.pair))];
        } else {
            const uint32_t last = index.Find(records, sought);
            Require(last != kNoRecord, "a key is not in the index");
            uint32_t before = last;
            while (records[before].next != record) before = records[before].next;
            records[before].next = gone.next;
            if (record == last) index.Replace(records, record, before);
        }
        gone.Clear();
    }

    uint64_t stamp_base_ = 0;
    std::vector<bool> is_stamped_;
    std::vector<uint32_t> free_records_;
    BlockList further_blocks_;  // of the records behind those of the primary keys
    BlockList unkeyed_, keyed_;
    std::vector<Key> removed_;
};

}  // namespace kvplane

#include "retained_blocks.h"
