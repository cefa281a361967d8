// Damages a compiled core. `native_damage.py` compiles this into a private library, without the checks of access to
// members.
#pragma once

#include "bind.h"

namespace kvplane {

using Damages = std::map<std::string, void (*)(Replica&)>;

// The place of the index that leads to a record.
inline uint32_t& EntryOf(BlockPool& pool, uint32_t record) {
    for (uint32_t& entry : pool.index.entries_) {
        if (entry != kNoRecord && pool.index.RecordOf(entry) == record) return entry;
    }
    throw Broken("the index does not lead to this record");
}

// A block whose key another block has too.
inline uint32_t Shared(const BlockPool& pool) {
    for (uint32_t record = 0; record < pool.records.size(); ++record) {
        if (pool.records[record].key.pair && pool.records[record].next != record) return record;
    }
    throw Broken("no key is shared");
}

inline uint32_t FirstKeyed(const BlockPool& pool) {
    for (uint32_t record = 0; record < pool.records.size(); ++record) {
        if (pool.records[record].key.pair) return record;
    }
    throw Broken("no block has a key");
}

inline Tier& FirstTier(Replica& replica) { return replica.blocks.tiers.each[0]; }

inline Int FirstKept(Tier& tier) { return tier.Next(kNoSlot); }

inline AlignedStateManager& States(Replica& replica) {
    return static_cast<AlignedStateManager&>(*replica.blocks.managers[0]);
}

inline const Damages kOfLists{
    {"a block is twice in the list", [](Replica& r) { r.blocks.pool.free.Insert(r.blocks.pool.free.sentinel_, {6}); }},
    {"a block is lost", [](Replica& r) { r.blocks.pool.free.Remove(6); }},
    {"a link back is wrong", [](Replica& r) { r.blocks.pool.free.previous_[6] = 5; }},
    {"a link leads out of the list", [](Replica& r) { r.blocks.pool.free.next_[6] = 1 << 20; }},
    {"a link leaves blocks out", [](Replica& r) { r.blocks.pool.free.next_[r.blocks.pool.free.sentinel_] = 6; }},
    {"free blocks are miscounted", [](Replica& r) { ++r.blocks.pool.free.count_; }},
    {"the divider is lost", [](Replica& r) {
         FreeList& list = r.blocks.pool.free;
         list.Join(list.previous_[list.divider_], list.next_[list.divider_]);
     }},
    {"a block is on the wrong side of the divider", [](Replica& r) {
         FreeList& list = r.blocks.pool.free;
         list.place_[list.previous_[list.sentinel_]] = FreeList::kBefore;
     }},
    {"a held block has a place in the list", [](Replica& r) { r.blocks.pool.free.place_[1] = FreeList::kBehind; }},
    {"a block without a key was copied", [](Replica& r) { r.blocks.pool.free.superseded[11] = true; }},
    {"a seen block is forgotten", [](Replica& r) {
         FreeList& list = r.blocks.pool.free;
         list.seen_.number_[list.First()] = 0;
     }},
    {"the last seen block is wrong", [](Replica& r) { ++r.blocks.pool.free.seen_.last_; }},
    {"seen blocks are miscounted", [](Replica& r) { --r.blocks.pool.free.seen_.count_; }},
    {"a block that is not seen changed", [](Replica& r) { r.blocks.pool.free.seen_.changed_.insert({5, 1}); }},
    {"an owner's retained keys are forgotten", [](Replica& r) { r.blocks.pool.retained.used_.clear(); }},
    {"a retained key does not lead to its name", [](Replica& r) { r.blocks.pool.retained.of_key_.clear(); }},
    {"a retained block is in no list", [](Replica& r) { r.blocks.pool.retained.PriorityLists::Remove(5); }},
    {"a retained block is lost to the others", [](Replica& r) {
         r.blocks.pool.retained.PriorityLists::Remove(5);
         r.blocks.pool.free.Append({5});
     }},
    {"a retained block has another priority", [](Replica& r) {
         r.blocks.pool.retained.PriorityLists::Remove(5);
         r.blocks.pool.retained.Put(99, 5);
     }},
    {"a retained block leads to another place", [](Replica& r) { ++r.blocks.pool.retained.places_.at(5).second; }},
    {"retained keys are miscounted", [](Replica& r) { ++r.blocks.pool.retained.num_named_; }},
    {"a key that is nowhere is retained", [](Replica& r) {
         for (auto& [position, kept] : r.blocks.pool.retained.each_.begin()->second.keys) {
             auto moved = r.blocks.pool.retained.of_key_.extract(kept.key);
             kept.key.digest.bytes[0] ^= 1;
             moved.key() = kept.key;
             r.blocks.pool.retained.of_key_.insert(std::move(moved));
         }
         for (const Block block : {5, 6}) r.blocks.pool.retained.PriorityLists::Remove(block);
         r.blocks.pool.free.Append({5, 6});
     }},
    {"held blocks of a superblock are miscounted", [](Replica& r) { r.blocks.pool.split->held_[2] = 3; }},
    {"held blocks of all superblocks are miscounted", [](Replica& r) { ++r.blocks.pool.split->num_held_; }},
    {"a superblock has a state that it has not", [](Replica& r) { r.blocks.pool.split->has_state_[2] = 1; }},
    {"a block is recorded in another list", [](Replica& r) {
         r.blocks.pool.split->place_[10] = SplitList::kCached;
     }},
    {"a whole superblock is lost", [](Replica& r) {
         BlockList taken;
         r.blocks.pool.split->whole_.Pop(1, &taken);
     }},
    {"the order of use does not lead back", [](Replica& r) {
         Recency& order = r.blocks.pool.hazard->learner.recency;
         ++order.previous_[order.next_[order.sentinel_]];
     }},
    {"the ghost is miscounted", [](Replica& r) { ++r.blocks.pool.hazard->learner.recency.num_recent_; }},
    {"resident keys are miscounted", [](Replica& r) { ++r.blocks.pool.hazard->learner.num_resident; }},
    {"unused keys are miscounted", [](Replica& r) { ++r.blocks.pool.hazard->learner.history.alive[0]; }},
    {"a followed key leads to another entry", [](Replica& r) { r.blocks.pool.hazard->learner.key[0] ^= 1; }},
};

inline const Damages kOfKeys{
    {"a reference has no holder", [](Replica& r) { ++r.blocks.pool.references[3]; }},
    {"a holder has no reference", [](Replica& r) { --r.blocks.pool.references[3]; }},
    {"a key is lost to the index", [](Replica& r) {
         BlockPool& pool = r.blocks.pool;
         const uint32_t record = FirstKeyed(pool);
         --pool.keys_of_group[static_cast<size_t>(pool.pairs.Group(pool.records[record].key.pair))];
         EntryOf(pool, record) = kNoRecord;
         --pool.index.count_;
     }},
    {"an entry is not written", [](Replica& r) { EntryOf(r.blocks.pool, FirstKeyed(r.blocks.pool)) = kNoRecord; }},
    {"a tag is stale", [](Replica& r) { EntryOf(r.blocks.pool, FirstKeyed(r.blocks.pool)) ^= uint32_t{1} << 31; }},
    {"a distance is wrong", [](Replica& r) {
         EntryOf(r.blocks.pool, FirstKeyed(r.blocks.pool)) ^= uint32_t{1} << r.blocks.pool.index.bits_;
     }},
    {"two entries are swapped", [](Replica& r) {
         BlockPool& pool = r.blocks.pool;
         std::swap(EntryOf(pool, 1), EntryOf(pool, 2));
     }},
    {"an entry leads to a record without a key", [](Replica& r) {
         BlockPool& pool = r.blocks.pool;
         EntryOf(pool, FirstKeyed(pool)) += 11 - FirstKeyed(pool);
     }},
    {"entries are miscounted", [](Replica& r) { ++r.blocks.pool.index.count_; }},
    {"distinct keys are miscounted", [](Replica& r) { ++r.blocks.pool.keys_of_group[0]; }},
    {"a ring leaves a block out", [](Replica& r) {
         KeyRecord& one = r.blocks.pool.records[Shared(r.blocks.pool)];
         one.next = r.blocks.pool.records[one.next].next;
     }},
    {"a ring leads to another key", [](Replica& r) {
         BlockPool& pool = r.blocks.pool;
         pool.records[Shared(pool)].next = FirstKeyed(pool);
     }},
    {"a ring leads out of the records", [](Replica& r) {
         r.blocks.pool.records[Shared(r.blocks.pool)].next = 1 << 20;
     }},
    {"a ring does not close", [](Replica& r) {
         BlockPool& pool = r.blocks.pool;
         const uint32_t other = pool.records[Shared(pool)].next;
         pool.records[other].next = other;
     }},
    {"a bit of a key flips", [](Replica& r) {
         r.blocks.pool.records[FirstKeyed(r.blocks.pool)].key.digest.bytes[7] ^= 4;
     }},
    {"a key stays on a block that lost it", [](Replica& r) {
         r.blocks.pool.records[11].key = r.blocks.pool.records[FirstKeyed(r.blocks.pool)].key;
     }},
    {"the null block has a key", [](Replica& r) {
         r.blocks.pool.records[0].key = r.blocks.pool.records[FirstKeyed(r.blocks.pool)].key;
     }},
    {"a key has no tokens", [](Replica& r) { r.blocks.pool.records[FirstKeyed(r.blocks.pool)].tokens = 0; }},
    {"two stamps are equal", [](Replica& r) { r.blocks.pool.stamp[7] = r.blocks.pool.stamp[1]; }},
    {"a key has no stamp", [](Replica& r) { r.blocks.pool.stamp[FirstKeyed(r.blocks.pool)] = 0; }},
    {"a stamp to order is not marked", [](Replica& r) { r.blocks.pool.stamped.push_back(4); }},
    {"a marked stamp is not ordered", [](Replica& r) { r.blocks.pool.is_stamped_[4] = true; }},
    {"evictable blocks are miscounted", [](Replica& r) { ++r.blocks.pool.num_evictable; }},
    {"further keys have no primary one", [](Replica& r) {
         auto moved = r.blocks.pool.more_keys.extract(r.blocks.pool.more_keys.begin());
         moved.key() = 11;
         r.blocks.pool.more_keys.insert(std::move(moved));
     }},
    {"a further key is lost to its block", [](Replica& r) { r.blocks.pool.more_keys.clear(); }},
    {"a further key is of another block", [](Replica& r) { r.blocks.pool.further_blocks_[0] = 5; }},
    {"the record of a further key is free", [](Replica& r) {
         r.blocks.pool.free_records_.push_back(static_cast<uint32_t>(r.blocks.pool.num_blocks));
     }},
    {"a state has two keys", [](Replica& r) {
         BlockPool& pool = r.blocks.pool;
         for (Block block = 1; block < pool.num_blocks; ++block) {
             if (!pool.HasKey(block) || pool.pairs.Group(pool.records[block].key.pair)) continue;
             Key key = pool.records[block].key;
             key.digest.bytes[0] ^= 1;
             return pool.AddKey(block, key, 2);
         }
     }},
    {"a domain has lost its name", [](Replica& r) { r.blocks.pool.pairs.ids_.clear(); }},
    {"a domain has another's number", [](Replica& r) { r.blocks.pool.pairs.names_[0] = "other"; }},
    {"a domain in use is free", [](Replica& r) { r.blocks.pool.pairs.free_.push_back(0); }},
    {"a request is of a swept domain", [](Replica& r) { r.blocks.requests.domain[0] = 9; }},
    {"a block under load has a key", [](Replica& r) {
         r.blocks.managers[0]->table[0].erase(r.blocks.managers[0]->table[0].begin());  // block 1
         r.blocks.pool.busy.insert(1);
     }},
    {"a key waits for a step without a record", [](Replica& r) { r.tracker.tentative.clear(); }},
};

inline const Damages kOfRequests{
    {"a table has a block that is none", [](Replica& r) { r.blocks.managers[0]->table[0].push_back(1 << 20); }},
    {"a table lacks a block", [](Replica& r) {
         BlockList& table = r.blocks.managers[0]->table[0];
         r.blocks.pool.Release({table.back()});
         table.back() = kNullBlock;
     }},
    {"a stopped request has blocks", [](Replica& r) {
         r.blocks.requests.running[0] = 0;
         --r.blocks.requests.num_running;
     }},
    {"more blocks are registered than there are", [](Replica& r) { r.blocks.managers[0]->num_cached[0] = 40; }},
    {"running requests are miscounted", [](Replica& r) { ++r.blocks.requests.num_running; }},
    {"requests hashed elsewhere are miscounted", [](Replica& r) { ++r.blocks.requests.num_outside; }},
    {"a shared block is not in the table", [](Replica& r) { r.blocks.managers[0]->partial_hit[0] = {9, 3}; }},
    {"states are retired that are there", [](Replica& r) { States(r).num_retired[0] = 9; }},
    {"the last state is behind the table", [](Replica& r) { States(r).last_state[0] = 40; }},
    {"a state has more tokens than were computed", [](Replica& r) { States(r).stopped_at[0][1] = 4000; }},
    {"a load goes into no request", [](Replica& r) { r.blocks.requests.loading.insert(7); }},
    {"a load is zeroed", [](Replica& r) { r.blocks.requests.not_zeroed.clear(); }},
    {"a load waits for a step to come", [](Replica& r) { r.blocks.requests.load_after[0] = 9; }},
    {"blocks of a transfer are not held", [](Replica& r) { r.blocks.requests.held[1] = 0; }},
    {"tokens in flight are miscounted", [](Replica& r) { r.blocks.requests.in_flight[0] = 3; }},
    {"a grant is of a later step", [](Replica& r) { r.blocks.requests.granted_step[0] = 9; }},
    {"a grant has no record", [](Replica& r) { r.blocks.requests.granted_step[0] = 2; }},
    {"a record is of a later step", [](Replica& r) { r.tracker.adoptions[9]; }},
    {"a record is of an executed step", [](Replica& r) { r.tracker.filling[1]; }},
    {"an adoption is not noted", [](Replica& r) { r.blocks.requests.adopted_step[1] = 0; }},
    {"an adopted key has no record", [](Replica& r) {
         auto& book = r.tracker.adoptions.begin()->second;
         const std::vector<Stay> stays = book.entries().front().second;
         book[9] = stays;
     }},
    {"blocks wait for a step to come", [](Replica& r) { r.tracker.waiting.emplace_back(9, BlockList()); }},
    {"the fast path is too long", [](Replica& r) { r.blocks.requests.fast_path_until[0] = 400; }},
    {"the bound of blocks is wrong", [](Replica& r) {
         r.blocks.requests.InvalidateRegisterBound(0);
         r.blocks.requests.alloc_bound[0] = 400;
     }},
    {"the bound of keys is wrong", [](Replica& r) {
         Requests& all = r.blocks.requests;
         all.register_bound[0] -= 4;
         all.fast_path_until[0] = std::min({all.alloc_bound[0], all.window_bound[0], all.register_bound[0] - 1});
     }},
    {"the bound of a window is wrong", [](Replica& r) {
         Requests& all = r.blocks.requests;
         all.window_bound[0] += 4;
         all.fast_path_until[0] = std::min({all.alloc_bound[0], all.window_bound[0], all.register_bound[0] - 1});
     }},
    {"a stopped request has a bound", [](Replica& r) { r.blocks.requests.window_bound[1] = 8; }},
};

inline const Damages kOfTiers{
    {"a slot is free and has a key", [](Replica& r) {
         Tier& tier = FirstTier(r);
         tier.free.push_back(static_cast<uint32_t>(FirstKept(tier)));
     }},
    {"a slot has no state", [](Replica& r) { FirstTier(r).AddSlot(); }},
    {"a slot is written by no job", [](Replica& r) {
         Tier& tier = FirstTier(r);
         tier.AddSlot();
         tier.state.back() = SlotState::kWritten;
     }},
    {"slots with a key are miscounted", [](Replica& r) { ++FirstTier(r).num_held_; }},
    {"shadows are miscounted", [](Replica& r) { ++FirstTier(r).num_shadows; }},
    {"the blocks of a group are miscounted", [](Replica& r) { ++FirstTier(r).uses[0].held; }},
    {"a slot has a version to come", [](Replica& r) { FirstTier(r).version[FirstKept(FirstTier(r))] = Int{1} << 40; }},
    {"a slot has another key's record", [](Replica& r) {
         Tier& tier = FirstTier(r);
         const Int first = FirstKept(tier), second = tier.Next(first);
         std::swap(tier.record_[first], tier.record_[second]);
     }},
    {"the record of a key has another slot", [](Replica& r) {
         Tier& tier = FirstTier(r);
         ++r.blocks.tiers.directory.records_[tier.RecordOf(FirstKept(tier))].slot[0];
     }},
    {"a key of a tier is not in its index", [](Replica& r) {
         Directory& directory = r.blocks.tiers.directory;
         for (uint32_t& entry : directory.index_.entries_) {
             if (std::exchange(entry, kNoRecord) != kNoRecord) return;
         }
     }},
    {"a record that is unused has a key", [](Replica& r) {
         r.blocks.tiers.directory.free_.push_back(FirstTier(r).RecordOf(FirstKept(FirstTier(r))));
     }},
    {"a link of a tier does not lead back", [](Replica& r) {
         Tier& tier = FirstTier(r);
         ++tier.links_[Tier::kFirstLink + FirstKept(tier)].previous;
     }},
    {"pins of a load are lost", [](Replica& r) { for (uint32_t& pins : FirstTier(r).pins) pins = 0; }},
    {"blocks that are loaded are miscounted", [](Replica& r) { ++r.blocks.tiers.num_loading[0]; }},
    {"a request waits for another load", [](Replica& r) { r.blocks.tiers.loading[3] = {1, 0}; }},
    {"a block that is loaded has a key", [](Replica& r) {
         const Filled& row = r.blocks.tiers.jobs.loads.begin()->second.rows.front();
         r.blocks.pool.AddKey(row.block, row.key, row.num_tokens);
         r.blocks.pool.key_step[row.block] = 0;
         r.blocks.pool.num_evictable -= r.blocks.pool.references[row.block] == 0;
     }},
    {"a job is numbered above the last", [](Replica& r) { r.blocks.tiers.last_job -= 1; }},
    {"something is wanted that is no place", [](Replica& r) { FirstTier(r).wanted.Add(5000, 1); }},
    {"something is wanted early by no policy", [](Replica& r) { FirstTier(r).wanted.recent.insert(5); }},
    {"a retained slot is in another list", [](Replica& r) {
         Tier& tier = FirstTier(r);
         const auto slot = static_cast<uint32_t>(tier.retained.First());
         tier.retained.Remove(slot);
         tier.retained.Put(100, slot);
     }},
    {"an owner retains too much", [](Replica& r) {
         Column& used = r.blocks.pool.retained.used_.begin()->second;
         used.back() = 5000;
     }},
    {"a block is noted that no tier has", [](Replica& r) {
         BlockPool& pool = r.blocks.pool;
         Directory& directory = r.blocks.tiers.directory;
         for (Block block = 1; block < pool.num_blocks; ++block) {
             if (pool.HasKey(block) && directory.Find(pool.records[block].key) != kNoRecord) continue;
             return directory.Note(block);
         }
         throw Broken("a tier has every key");
     }},
};

// damage(core, name): plants it
inline PyObject* Damage(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        std::string name;
        FromPy(At(arguments, 1), &name);
        for (const Damages* all : {&kOfLists, &kOfKeys, &kOfRequests, &kOfTiers}) {
            const auto found = all->find(name);
            if (found == all->end()) continue;
            found->second(CoreOf(At(arguments, 0)).replica);
            Py_RETURN_NONE;
        }
        Owned::Fail();
    });
}

}  // namespace kvplane
