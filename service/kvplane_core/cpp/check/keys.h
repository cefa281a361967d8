// Checks the keys of blocks: the index as look-ups read it, the rings of shared keys, and the columns.
#pragma once

#include "facts.h"

namespace kvplane {

// Whether a look-up finds each entry of an index where it is.
class IndexCheck {
  public:
    // `facts`: how far names were checked.
    template <typename Records>
    static Slices Run(const Index& index, const Records& records, const char* invariant, CheckedFacts& facts) {
        size_t count = 0;
        for (const uint32_t entry : index.entries_) {
            if (facts.pace.Spend(Pace::kNear)) co_yield Pause();
            if (entry == kNoRecord) continue;
            ++count;
            if (index.RecordOf(entry) >= records.size()) Fail(invariant, "an entry is beyond the records");
            facts.CheckName(records[index.RecordOf(entry)].key, invariant);
            if (facts.pace.Spend(Pace::kFar)) co_yield Pause();
        }
        if (count != index.count_ || 2 * count > index.entries_.size())
            Fail(invariant, "the index has ", count, " entries, the count says ", index.count_);
        for (size_t at = 0; at < index.entries_.size(); ++at) {
            if (facts.pace.Spend(Pace::kNear)) co_yield Pause();
            const uint32_t entry = index.entries_[at];
            if (entry == kNoRecord) continue;
            const Key& key = records[index.RecordOf(entry)].key;
            // A look-up passes entries with another distance or tag: one of these that is wrong is not found.
            if (index.Locate(records, key).at != at)
                Fail(invariant, "key ", Hex(key.digest), ": a look-up does not find entry ", at, " with this key");
            if (facts.pace.Spend(Pace::kLookUp)) co_yield Pause();
        }
    }

    // Visits the records of the entries.
    template <typename F>
    static void At(const Index& index, size_t at, F&& visit) {
        if (index.entries_[at] != kNoRecord) visit(index.RecordOf(index.entries_[at]));
    }
    static size_t Size(const Index& index) { return index.entries_.size(); }
};

class KeyChecks {
  public:
    explicit KeyChecks(CheckedFacts& facts)
        : facts_(facts), pool_(facts.replica.blocks.pool), in_ring_(pool_.records.size()) {}

    // Checks that each number of a domain has one name or is free.
    Slices Domains() {
        const Pairs& pairs = pool_.pairs;
        facts_.is_live.assign(pairs.names_.size(), false);
        for (const auto& [name, id] : pairs.ids_) {
            if (id >= pairs.names_.size() || facts_.is_live[id] || pairs.names_[id] != name)
                Fail("domains", "domain '", name, "' has number ", id, ", which is of another one");
            facts_.is_live[id] = true;
            if (facts_.pace.Spend(Pace::kLookUp)) co_yield Pause();
        }
        std::set<uint32_t> unused;
        for (const uint32_t id : pairs.free_) {
            if (id >= pairs.names_.size() || facts_.is_live[id] || !unused.insert(id).second)
                Fail("domains", "number ", id, " of a domain is free twice, or in use");
            if (facts_.pace.Spend(Pace::kLookUp)) co_yield Pause();
        }
        if (pairs.ids_.size() + unused.size() != pairs.names_.size())
            Fail("domains", pairs.names_.size(), " numbers, ", pairs.ids_.size(), " in use, ", unused.size(), " free");
    }

    // Checks that the index has every key with its blocks, and no other entries.
    Slices KeyIndex() {
        if (pool_.HasKey(kNullBlock)) Fail("keys", "the null block has a key");
        if (pool_.records.size() != facts_.num_blocks + pool_.further_blocks_.size())
            Fail(kIndex, pool_.records.size(), " records, for ", pool_.further_blocks_.size(), " further keys");
        for (Slices part = IndexCheck::Run(pool_.index, pool_.records, kIndex, facts_); part.Next();) co_yield Pause();
        for (Slices part = Rings(); part.Next();) co_yield Pause();
        for (uint32_t record = 0; record < pool_.records.size(); ++record) {
            const Key& key = pool_.records[record].key;
            if (key.pair && !in_ring_[record])
                Fail(kIndex, "key ", Hex(key.digest), " of block ", pool_.BlockOf(record), " is not in the index");
            if (facts_.pace.Spend(3 * Pace::kNear)) co_yield Pause();
        }
        if (pool_.index.count() && !facts_.replica.spec.enable_caching)
            Fail(kIndex, "the index has keys although prefix caching is off");
    }

    // Checks that only blocks with a primary key have further keys, and that a block of recurrent state has none.
    Slices FurtherKeys() {
        std::vector<bool> is_used(pool_.further_blocks_.size(), false);
        size_t count = 0;
        const auto use = [&](uint32_t record) {
            const size_t at = record - facts_.num_blocks;
            if (record < facts_.num_blocks || at >= is_used.size() || is_used[at])
                Fail("keys", "record ", record, " of a further key is used twice, or is none");
            is_used[at] = true;
            ++count;
        };
        for (const auto& [block, more] : pool_.more_keys) {
            if (block >= facts_.num_blocks || !pool_.HasKey(block) || more.empty())
                Fail("keys", "block ", block, ": ", more.size(), " further keys without a primary one");
            for (const uint32_t record : more) {
                use(record);
                const Key& key = pool_.records[record].key;
                if (key.pair == 0 || pool_.BlockOf(record) != block)
                    Fail("keys", "block ", block, ": record ", record, " has no further key of it");
                if (facts_.pace.Spend(2 * Pace::kFar)) co_yield Pause();
            }
            CheckKeysOf(block, more);
        }
        for (const uint32_t record : pool_.free_records_) {
            use(record);
            if (pool_.records[record].key.pair) Fail("keys", "record ", record, " is free and has a key");
            if (facts_.pace.Spend(Pace::kFar)) co_yield Pause();
        }
        if (count != is_used.size())
            Fail("keys", is_used.size(), " records of further keys, ", count, " are used or free");
    }

    // Checks that a block with a key has a prefix length and a stamp (version number of its content), and that a key
    // whose step is not executed is in the record of this step.
    Slices Columns() {
        Int num_evictable = 0;
        for (Block block = 1; block < facts_.num_blocks; ++block) {
            if (facts_.pace.Spend(4 * Pace::kNear)) co_yield Pause();
            const bool is_keyed = pool_.HasKey(block);
            if ((pool_.KeyTokens(block) > 0) != is_keyed)
                Fail("keys", "block ", block, ": tokens without a key, or a key without tokens");
            if (!is_keyed) continue;
            num_evictable += facts_.is_free[block] != 0;
            if (!pool_.stamp[block]) Fail("stamps", "block ", block, " has a key and no stamp");
            const Int step = pool_.key_step[block];
            if (facts_.replica.spec.safe && step > pool_.executed_through && !facts_.IsRecorded(step, block))
                Fail("tentative_keys", "block ", block, ": its key waits for step ", step,
                     ", which has no record of it");
        }
        if (pool_.num_evictable != num_evictable)
            Fail("evictable_count", num_evictable, " free blocks carry a key, the count says ", pool_.num_evictable);
    }

    // Checks that no two blocks have the same stamp, and that those which no answer has are listed once.
    Slices Stamps() {
        Zeros<uint32_t> behind(std::bit_ceil(2 * facts_.num_blocks));  // by stamp, with linear probing: a block + 1
        const size_t mask = behind.size() - 1;
        for (size_t at = 0; at < behind.size(); at += 1024) {  // else the first slices would get all pages of memory
            behind[at] = 0;
            if (facts_.pace.Spend(64 * Pace::kFar)) co_yield Pause();
        }
        for (Block block = 0; block < facts_.num_blocks; ++block) {
            if (facts_.pace.Spend(2 * Pace::kFar)) co_yield Pause();
            const uint64_t stamp = pool_.stamp[block];
            if (stamp == 0) continue;
            size_t at = static_cast<size_t>(stamp * 0x9E3779B97F4A7C15 >> 20) & mask;
            for (; behind[at]; at = (at + 1) & mask) {
                const Block other = behind[at] - 1;
                if (pool_.stamp[other] == stamp)
                    Fail("stamps", "blocks ", other, " and ", block, " have the same stamp");
            }
            behind[at] = block + 1;
        }
        size_t marked = 0;
        for (const bool is_stamped : pool_.is_stamped_) {
            marked += is_stamped;
            if (facts_.pace.Spend(Pace::kNear)) co_yield Pause();
        }
        for (const Block block : pool_.stamped) {
            if (block >= facts_.num_blocks || !pool_.is_stamped_[block])
                Fail("stamps", "block ", block, " has a stamp to order, and is not marked");
            if (facts_.pace.Spend(Pace::kFar)) co_yield Pause();
        }
        if (marked != pool_.stamped.size())
            Fail("stamps", pool_.stamped.size(), " blocks have a stamp to order, ", marked, " are marked");
    }

  private:
    static constexpr const char* kIndex = "key_index";

    // Checks that the records of a key are one ring, which has no other records.
    Slices Rings() {
        std::vector<Int> distinct(pool_.keys_of_group.size(), 0);
        for (size_t entry = 0; entry < IndexCheck::Size(pool_.index); ++entry) {
            if (facts_.pace.Spend(Pace::kNear)) co_yield Pause();
            uint32_t last = kNoRecord;
            IndexCheck::At(pool_.index, entry, [&](uint32_t record) { last = record; });
            if (last == kNoRecord) continue;
            const Key& key = pool_.records[last].key;
            ++distinct[static_cast<size_t>(pool_.pairs.Group(key.pair))];
            uint32_t at = last;
            do {
                at = pool_.records[at].next;
                if (at >= pool_.records.size() || in_ring_[at] || pool_.records[at].key != key)
                    Fail(kIndex, "key ", Hex(key.digest), " is not on record ", at, ", to which its ring leads");
                in_ring_[at] = true;
                if (facts_.pace.Spend(2 * Pace::kFar)) co_yield Pause();
            } while (at != last);
        }
        if (distinct != pool_.keys_of_group)
            Fail(kIndex, "the groups have ", distinct, " keys, counted ", pool_.keys_of_group);
    }

    void CheckKeysOf(Block block, const std::vector<uint32_t>& more) const {
        std::set<Key> keys{pool_.records[block].key};
        for (const uint32_t record : more) keys.insert(pool_.records[record].key);
        if (keys.size() != 1 + more.size()) Fail("keys", "block ", block, " has a key twice");
        const auto group = static_cast<size_t>(pool_.pairs.Group(pool_.records[block].key.pair));
        if (facts_.replica.spec.safe && !facts_.replica.blocks.managers[group]->MayHaveKeys(keys.size()))
            Fail("state_keys", "block ", block, " holds one state and has ", keys.size(), " keys");
    }

    CheckedFacts& facts_;
    const BlockPool& pool_;
    Zeros<uint8_t> in_ring_;  // by record
};

}  // namespace kvplane
