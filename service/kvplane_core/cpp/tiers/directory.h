// The keys of the tiers: one record per key, whichever slots have it or are written with it.
#pragma once

#include "../pool.h"

namespace kvplane {

constexpr size_t kMostTiers = 2;  // one of each kind

// A key that a tier has, or that a job writes into one: the cache line that a look-up in all tiers reads.
struct alignas(64) InTiers {
    Key key;                            // pair 0: an unused record
    std::array<uint32_t, kMostTiers> slot{kNoRecord, kNoRecord};  // by tier
    Block block = kNullBlock;  // of the device: the one with this key that `Directory::Note` noted
    uint32_t hash = 0;         // of the key: the lower half
    uint64_t stamp = 0;        // of that block then; 0: none is noted; `Directory::kSeveral`: several are
};

// It also notes which blocks of the device have a key that a tier has, not as a shadow, or that a job writes into one:
// what `SaveBehind` has found once, so that it need not search again. A block whose key changes gets another stamp, so
// that it is not noted any more.
class Directory {
  public:
    Directory(const Spec& spec, BlockPool& block_pool)
        : pool(block_pool),
          has_others_(!spec.tiers.empty() && spec.tiers[0].save == kReuse),
          noted_(spec.tiers.empty() ? 0 : static_cast<size_t>(spec.num_blocks), kUnknown),
          index_(NumSlots(spec)) {
        Require(spec.tiers.size() <= kMostTiers, "a replica has more tiers than a record");
        records_.reserve(NumSlots(spec));  // pages of memory that no record has used are not in use either
    }

    // -- keys --------------------------------------------------------------------------------------------------------

    // The record of a key; kNoRecord if no tier has it, and no job writes it into one.
    uint32_t Find(const Sought& key) const { return index_.Find(records_, key); }
    const InTiers& operator[](uint32_t record) const { return records_[record]; }

    // Visits the keys of all records.
    template <typename F>
    void ForEachKey(F&& visit) const {
        for (const InTiers& one : records_) {
            if (one.key.pair) visit(one.key);
        }
    }

    // A slot gets a key, or will be written with it; returns the record.
    uint32_t Enter(size_t tier, uint32_t slot, const Sought& key) {
        const uint32_t fresh = NewRecord();
        records_[fresh].key = key.key;
        records_[fresh].hash = static_cast<uint32_t>(key.hash);
        const uint32_t known = index_.FindOrAdd(records_, fresh, key);
        if (known == kNoRecord) return Enter(tier, slot, fresh);
        Free(fresh);
        return Enter(tier, slot, known);
    }
    uint32_t Enter(size_t tier, uint32_t slot, uint32_t record) {
        uint32_t& there = records_[record].slot[tier];
        Require(there == kNoRecord, "a tier has the key in two slots, or a job writes it into one");
        there = slot;
        return record;
    }
    // The slot of a tier does not have the key any more; frees the record if it was the last one.
    void Leave(size_t tier, uint32_t record) {
        InTiers& one = records_[record];
        one.slot[tier] = kNoRecord;
        if (!IsUnused(one)) return;
        index_.RemoveAt(records_, record, one.hash);
        Free(record);
    }

    // Fetches what a look-up of the key will read.
    void Expect(const Sought& key) const { index_.Prefetch(key); }
    void Fetch(uint32_t record) const { __builtin_prefetch(&records_[record]); }
    // Fetches what it takes to free a record, which was fetched.
    void ExpectLeave(size_t tier, uint32_t record) const {
        const InTiers& one = records_[record];
        __builtin_prefetch(&pool.stamp[one.block]);
        for (size_t other = 0; other < kMostTiers; ++other) {
            if (other != tier && one.slot[other] != kNoRecord) return;
        }
        index_.PrefetchAt(one.hash);
    }

    // -- blocks of the device ----------------------------------------------------------------------------------------

    bool IsNoted(Block block) const { return noted_[block] == pool.stamp[block]; }
    // Notes a block that has the key of a record.
    void Note(Block block, uint32_t record) {
        InTiers& one = records_[record];
        const bool is_other = one.stamp != 0 && one.block != block && pool.stamp[one.block] == one.stamp;
        if (is_other || one.stamp == kSeveral) {
            one.stamp = kSeveral;
        } else {
            one.block = block;
            one.stamp = pool.stamp[block];
        }
        Note(block);
    }
    // Notes a block with a key that no tier has, and that `SaveBehind` does not save: only where `has_others_`.
    void Note(Block block) { noted_[block] = pool.stamp[block]; }
    // What was noted of blocks with this key does not hold any more.
    void Forget(uint32_t record) {
        InTiers& one = records_[record];
        if (has_others_ || one.stamp == kSeveral) {
            pool.ForEachBlockOf(one.key, [&](Block block) { VisitAgain(block); });
        } else if (one.stamp != 0 && pool.stamp[one.block] == one.stamp) {
            VisitAgain(one.block);
        }
        one.block = kNullBlock;
        one.stamp = 0;
    }
    void FetchBlock(Block block) const {
        __builtin_prefetch(&pool.records[block]);
        __builtin_prefetch(&noted_[block]);
        __builtin_prefetch(&pool.stamp[block]);
    }

    BlockPool& pool;

  private:
    friend class TierChecks;

    static constexpr uint64_t kUnknown = ~uint64_t{0}, kSeveral = kUnknown - 1;  // no stamps

    static size_t NumSlots(const Spec& spec) {
        return std::accumulate(spec.tiers.begin(), spec.tiers.end(), size_t{0}, [](size_t sum, const TierSpec& one) {
            return sum + static_cast<size_t>(one.num_slots);
        });
    }
    static bool IsUnused(const InTiers& one) {
        return std::all_of(one.slot.begin(), one.slot.end(), [](uint32_t slot) { return slot == kNoRecord; });
    }

    uint32_t NewRecord() {
        if (free_.empty()) {
            records_.emplace_back();
            return static_cast<uint32_t>(records_.size() - 1);
        }
        const uint32_t record = free_.back();
        free_.pop_back();
        return record;
    }
    // A record without slots, and without a noted block.
    void Free(uint32_t record) {
        records_[record].key.pair = 0;
        free_.push_back(record);
    }
    void VisitAgain(Block block) {
        noted_[block] = kUnknown;
        pool.free.VisitAgain(block);
    }

    const bool has_others_;
    std::vector<uint64_t> noted_;  // by block: its stamp when it was noted
    std::vector<InTiers> records_;
    std::vector<uint32_t> free_;  // unused records
    Index index_;                 // from keys to records
};

}  // namespace kvplane
