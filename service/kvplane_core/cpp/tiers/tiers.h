// All tiers of a replica, the jobs of their movers, and the index that look-ups of the union use.
#pragma once

#include "../step.h"
#include "tier.h"

namespace kvplane {

constexpr int kJobBits = 32;  // a job is numbered by its engine life and a counter, as a stamp without generation
constexpr uint64_t kNoVersion = 1;  // no stamp and no version: those of the first epoch begin above
constexpr uint64_t kVersions = (uint64_t{1} << (kEpochBits + kCounterBits)) - 1;

// A slot of a tier, and the version that a reader expects in it.
struct Location {
    Int tier = 0, slot = kNoSlot, version = 0;
};

// One row of a load: a block that is filled from a slot, and the key that it has afterwards.
struct Filled {
    Block block;
    uint64_t stamp;  // of the block when the load was ordered
    Key key;
    Int num_tokens;  // of the key's prefix
    Digest parent;   // of the block before it; size 0: there is none
    Location source;
};

// A load in flight. It has one reference to each of its blocks, and a pin on each of its slots.
struct Load {
    Int request, serial, num_tokens, after;
    std::vector<Filled> rows;
};

// Jobs that write a slot, which has the key.
struct Save {
    Block block;
    uint64_t stamp;
    Int tier, slot;
};

struct Move {
    Location source;
    Int tier, slot;
};

struct TierCounters {
    Int saved = 0, moved = 0, discarded = 0, failed = 0, loaded = 0, loads = 0, loads_failed = 0, loaded_tokens = 0,
        waited = 0, given_up = 0, no_slot = 0, no_job = 0, too_slow = 0, device_host = 0, host_disk = 0,
        device_host_disk = 0, windows_alone = 0, states_alone = 0, prefetched = 0,
        prefetches_late = 0;

    std::vector<Int*> All() {
        return {&saved,         &moved,      &discarded,        &failed,        &loaded,       &loads,
                &loads_failed,  &loaded_tokens, &waited,        &given_up,      &no_slot,      &no_job,
                &too_slow,      &device_host,   &host_disk,     &device_host_disk, &windows_alone, &states_alone,
                &prefetched,    &prefetches_late};
    }
};

// Values by number, which are added in ascending order, and mostly removed in it.
template <typename T>
class InOrder {
  public:
    struct Entry {
        Int number;
        T value;
        bool is_there = true;
    };

    Int size() const { return size_; }
    bool IsNext(Int number) const { return entries_.empty() || entries_.back().number < number; }
    bool contains(Int number) const { return At(number) != entries_.size(); }
    void Add(Int number, const T& value) {
        Require(IsNext(number), "numbers of jobs ascend");
        const size_t kept = static_cast<size_t>(size_) + kMaxJobs / 8;
        if (2 * first_ > entries_.size() + kMaxJobs / 8 || entries_.size() - first_ > 2 * kept) Tidy();
        entries_.push_back({number, value});
        ++size_;
    }
    // The value that many behind the first one, if it is there; null if there is none.
    const T* Behind(size_t count) const {
        const size_t at = first_ + count;
        return at < entries_.size() ? &entries_[at].value : nullptr;
    }
    // Removes a value, which can be read until the next one is added; null if it is not there.
    const T* Take(Int number) {
        const size_t at = At(number);
        if (at == entries_.size()) return nullptr;
        entries_[at].is_there = false;
        --size_;
        while (first_ < entries_.size() && !entries_[first_].is_there) ++first_;
        return &entries_[at].value;
    }
    void clear() {
        entries_.clear();
        first_ = 0;
        size_ = 0;
    }

    // Visits (number, value) in order.
    template <typename F>
    void ForEach(F&& visit) const {
        for (size_t at = first_; at < entries_.size(); ++at) {
            if (entries_[at].is_there) visit(entries_[at].number, entries_[at].value);
        }
    }
    // Visits the values, which may be changed.
    template <typename F>
    void Update(F&& visit) {
        for (size_t at = first_; at < entries_.size(); ++at) {
            if (entries_[at].is_there) visit(entries_[at].value);
        }
    }

  private:
    void Tidy() {
        std::erase_if(entries_, [](const Entry& one) { return !one.is_there; });
        first_ = 0;
    }
    // Where the number is; the end if it is not there.
    size_t At(Int number) const {
        const size_t none = entries_.size();
        if (first_ == none || number < entries_[first_].number) return none;
        size_t at = first_;  // where it mostly is
        if (entries_[at].number != number) {
            const auto found = std::lower_bound(entries_.begin() + static_cast<std::ptrdiff_t>(first_), entries_.end(),
                                                number, [](const Entry& one, Int other) { return one.number < other; });
            at = static_cast<size_t>(found - entries_.begin());
        }
        return at < none && entries_[at].number == number && entries_[at].is_there ? at : none;
    }

    std::vector<Entry> entries_;
    size_t first_ = 0;  // those before it are gone
    Int size_ = 0;
};

// The jobs in flight, by number.
struct Jobs {
    std::map<Int, Load> loads;
    InOrder<Save> saves;
    InOrder<Move> moves;

    Int size() const { return static_cast<Int>(loads.size()) + saves.size() + moves.size(); }
};

class Tiers {
  public:
    Tiers(const Spec& spec, BlockPool& block_pool)
        : directory(spec, block_pool), most_loading(spec.num_blocks / 4), pool_(block_pool) {
        Int first = spec.num_blocks;
        each.reserve(spec.tiers.size());
        for (const TierSpec& one : spec.tiers) {
            Tier* nearer = each.empty() || one.medium == kPeers ? nullptr : &each.back();
            each.emplace_back(static_cast<Int>(each.size()), one, spec, directory, nearer);
            firsts_.push_back(first);
            first += one.num_slots;
        }
        RetainedBlocks& retained = block_pool.retained;
        for (Tier& one : each) {
            if (!retained.tiers.empty()) retained.holders.push_back(&one);
        }
        depth = static_cast<Int>(each.size());
        num_loading.resize(each.size());
    }

    // -- index -------------------------------------------------------------------------------------------------------

    // The id of the slot of the nearest tier that has the key; the null block if none has.
    Block FindInTiers(const Sought& key) const {
        const uint32_t record = directory.Find(key);
        if (record == kNoRecord) return kNullBlock;
        for (size_t number = 0; number < static_cast<size_t>(depth); ++number) {
            const Int slot = each[number].SlotWith(directory[record]);
            if (slot != kNoSlot) return static_cast<Block>(firsts_[number] + slot);
        }
        return kNullBlock;
    }

    // The slot that an id of a hit stands for; kNoSlot for a block of the device.
    Location LocationOf(Block block) const {
        for (size_t number = each.size(); number-- > 0;) {
            const Int slot = Int{block} - firsts_[number];
            if (slot >= 0) return {static_cast<Int>(number), slot, each[number].VersionOf(slot)};
        }
        return {};
    }

    bool HasKeys() const {
        return std::any_of(each.begin(), each.end(), [](const Tier& one) { return one.num_held() > 0; });
    }
    // Whether the slot has had this version without interruption.
    bool IsIntact(const Location& source) const {
        return each[static_cast<size_t>(source.tier)].VersionOf(source.slot) == source.version;
    }

    // Forgets all keys, without events.
    void Clear() {
        for (Tier& one : each) {
            one.Clear();
            one.events.Take();
        }
    }

    // Forgets a key whose content is not trusted any more. Loads of it fail.
    void Drop(const Key& key) {
        for (Tier& one : each) one.Drop(key);
    }
    // Forgets what a load that failed read in the farthest of its tiers. See `Tiers.drop_farthest`.
    void DropFarthest(const std::vector<Filled>& rows) {
        Int farthest = 0;
        for (const Filled& row : rows) farthest = std::max(farthest, row.source.tier);
        Tier& tier = each[static_cast<size_t>(farthest)];
        for (const Filled& row : rows) {
            if (row.source.tier == farthest && IsIntact(row.source)) tier.DropSlot(row.source.slot, kDropped);
        }
    }
    // Drops permanently what an evicted block holds, its key; every key if only a store could tell which one. See
    // `Tiers.revoke`.
    void Revoke(Block block) {
        if (pool_.HasKey(block)) {
            Drop(Key(pool_.records[block].key));
        } else if (!unknown.empty() && unknown[block] && pool_.stamp[block] == 0) {
            for (Tier& one : each) one.DropAll(kDropped);
        }
        for (Tier& one : each) GiveOtherVersions(one);
    }

    // Forgets all keys permanently: every rank writes the stamp of a reset.
    void Reset() {
        Clear();
        unknown.clear();
        for (Tier& one : each) one.stale.Resize(one.stale.marks().size());
    }

    // Visits the keys of slots, and those that jobs will give to blocks or slots.
    template <typename F>
    void ForEachKey(F&& visit) const {
        directory.ForEachKey(visit);
        for (const auto& [job, load] : jobs.loads) {
            for (const Filled& row : load.rows) visit(row.key);
        }
    }

    // -- jobs --------------------------------------------------------------------------------------------------------

    Int NextJob() {
        // A reset of the cache draws its stamp from the same numbers: older versions count no more.
        last_job = std::max(last_job + 1, static_cast<Int>(pool_.Draw() & kVersions));
        return last_job;
    }

    void AddLoad(Int job, Load load) {
        for (const Filled& row : load.rows) ++num_loading[static_cast<size_t>(row.source.tier)];
        jobs.loads.emplace(job, std::move(load));
    }

    // A slot for the content of a key, or of that of a record, that a job will write; kNoSlot, counted, if there is
    // none.
    template <typename K>
    Int BeginWrite(Tier& tier, const K& key) {
        const Int slot = tier.BeginWrite(key);
        counters.no_slot += slot == kNoSlot;
        return slot;
    }

    // Orders a copy of a slot that has a key into another tier; returns false if that has no slot for it.
    [[gnu::flatten]] bool OrderMove(Tier& tier, Int slot, Tier& target) {
        const Location source{tier.number, slot, tier.VersionOf(slot)};
        const Int to = BeginWrite(target, tier.RecordOf(slot));
        if (to == kNoSlot) return false;
        const Int job = NextJob();
        jobs.moves.Add(job, Move{source, target.number, to});
        orders.move.push_back({job, source.tier, slot, source.version, target.number, to,
                               static_cast<Int>(pool_.pairs.SealKey(tier.KeyOf(slot)))});
        return true;
    }

    // The end of a job that wrote a slot: the slot has the key, or is free. `is_save`: from the device.
    [[gnu::flatten]] void EndWrite(Int job, Int number, Int slot, bool is_good, bool is_save) {
        Tier& tier = each[static_cast<size_t>(number)];
        tier.EndWrite(slot, is_good, job);
        if (!is_good) return;
        if (is_save && tier.wanted.IsEarly()) tier.NoteOnDevice(tier.RecordOf(slot));
        Tier* const next = Behind(number);
        if (next != nullptr && next->wanted.policy == kThrough) next->wanted.Add(slot, static_cast<uint64_t>(job));
    }

    // -- what is wanted early ----------------------------------------------------------------------------------------

    void NoteComputed(const std::vector<std::pair<Block, Key>>& registered, const Spec& spec) {
        if (each.empty() || !each[0].wanted.IsEarly()) return;
        for (const auto& [block, key] : registered) {
            const Int size = spec.groups[static_cast<size_t>(pool_.pairs.Group(key.pair))].block_size;
            if (pool_.KeyTokens(block) % size == 0 && pool_.records[block].key == key)
                each[0].wanted.NoteComputed(block, pool_.stamp[block], key, pool_.pairs);
        }
    }
    void NoteHit(const std::vector<BlockList>& hit) {
        if (each.empty() || each[0].wanted.policy != kReuse) return;
        for (const BlockList& row : hit) {
            for (const Block block : row) {
                if (block != kNullBlock) each[0].wanted.NoteUsed(block, pool_.stamp[block]);
            }
        }
    }
    void NoteLoaded(const Load& load) {
        for (const Filled& row : load.rows) {
            Tier* const next = Behind(row.source.tier);
            if (next != nullptr) next->wanted.NoteUsed(row.source.slot, static_cast<uint64_t>(row.source.version));
        }
    }

    // Moves what was ordered, and what happened to keys, since the last call into an answer.
    void Give(PartResult* result) {
        if (!orders.empty()) {
            const auto append = [](auto* column, const auto& further) {
                column->insert(column->end(), further.begin(), further.end());
            };
            append(&result->orders.stamp_block, orders.stamp_block);
            append(&result->orders.stamp, orders.stamp);
            JobOrders& given = result->OfTiers().orders;
            if (given.empty()) {
                given = orders.Take();
            } else {
                given.Append(orders);
                orders = JobOrders();
            }
        }
        for (Tier& one : each) {
            if (!one.events.empty()) result->OfTiers().events.emplace_back(one.medium, one.events.Take());
        }
    }

    // Of a load that has ended.
    void Unpin(const Load& load) {
        for (const Filled& row : load.rows) {
            const auto number = static_cast<size_t>(row.source.tier);
            each[number].Unpin(row.source.slot);
            --num_loading[number];
        }
    }

    // The load that fills blocks of the present hit of the slot's request, if it runs; null if there is none.
    const Load* LoadOf(Int slot) const {
        const auto found = loading.find(slot);
        return found == loading.end() ? nullptr : &jobs.loads.at(found->second.first);
    }
    void BeginLoad(Int slot, Int job) {
        const auto [at, is_new] = loading.try_emplace(slot, job, next_order_);
        if (is_new) {
            ++next_order_;
        } else {
            at->second.first = job;
        }
    }

    // -- engine lives ------------------------------------------------------------------------------------------------

    // Forgets all loads, whose engine life has ended; returns their blocks, of which the caller has one reference each.
    BlockList AbandonLoads() {
        BlockList blocks;
        for (const auto& [job, load] : jobs.loads) {
            Unpin(load);
            for (const Filled& row : load.rows) blocks.push_back(row.block);
        }
        jobs.loads.clear();
        loading.clear();
        return blocks;
    }

    // Drops the keys of a tier whose slots do not have the same version on all ranks: of `count` slots behind this one
    // in order of eviction, which becomes the last one that is kept. Returns whether slots are left.
    bool EndEpoch(Tier& tier, Int* last, Int count, const Shown& shown) {
        const uint64_t last_reset = shown.size ? InTime(shown.stamps[kNullBlock]) : 0;
        Int next = tier.Next(*last);
        for (; next != kNoSlot && count > 0; --count) {
            const Int one = std::exchange(next, tier.Next(next));
            const auto at = static_cast<size_t>(firsts_[static_cast<size_t>(tier.number)] + one);
            const uint64_t version = at < shown.size && !tier.is_of_peers ? shown.stamps[at] : 0;
            if (version == static_cast<uint64_t>(tier.VersionOf(one)) && InTime(version) > last_reset) {
                *last = one;
            } else {
                tier.DropSlot(one, kUnverified);
            }
        }
        return next != kNoSlot;
    }

    // Jobs that write slots stay in flight until their end is reported, unless the memory is new.
    void BeginEpoch(Int epoch, bool memory_is_new, const Shown& shown) {
        NoteUnknown(shown);
        last_job = std::max(last_job, epoch << kJobBits);
        waits_in = 0;
        if (!memory_is_new) return;
        jobs.saves.ForEach([&](Int, const Save& save) { EndWrite(0, save.tier, save.slot, false, true); });
        jobs.moves.ForEach([&](Int, const Move& move) { EndWrite(0, move.tier, move.slot, false, false); });
        jobs.saves.clear();
        jobs.moves.clear();
    }

    Directory directory;
    std::vector<Tier> each;  // the nearest first; none moves, since they refer to each other
    Jobs jobs;
    JobOrders orders;  // that no answer has
    // By block, empty if none: this core has given it no stamp yet, and the memory shows one; a store may know its key.
    std::vector<bool> unknown;
    TierCounters counters;
    Int last_job = 0;
    std::map<Int, std::pair<Int, Int>> loading;  // by slot of a request: the load into its blocks; when it was added
    Column num_loading;                          // by tier: blocks that loads in flight fill from it
    Column costs_ns;                             // of a token, and of a block of each tier; empty = unknown
    Int depth = 0;                               // number of tiers that a look-up searches
    Int demand = 0, demand_now = 0;  // blocks that a step takes: at most, in the recent past; of the present step
    Int waits_in = 0;                // the last step of this life in which an admission waited for room to load
    const Int most_loading;          // blocks that several loads fill at one time

  private:
    // Every rank writes another version for all slots of a tier that hold what no key here names. What is being written
    // into such a slot does not count.
    void GiveOtherVersions(Tier& tier) {
        if (tier.stale.count() == 0) return;  // each evicted block asks
        const std::vector<bool>& marks = tier.stale.marks();
        for (size_t slot = 0; slot < marks.size(); ++slot) {
            if (!marks[slot]) continue;
            orders.stamp_block.push_back(static_cast<Block>(firsts_[static_cast<size_t>(tier.number)]) +
                                         static_cast<Block>(slot));
            orders.stamp.push_back(pool_.Draw());
        }
        const auto is_stale = [&](const auto& write) {
            return write.tier == tier.number && marks[static_cast<size_t>(write.slot)];
        };
        jobs.saves.Update([&](Save& save) {
            if (is_stale(save)) save.stamp = kNoVersion;
        });
        jobs.moves.Update([&](Move& move) {
            if (is_stale(move)) move.source.version = kNoVersion;
        });
        tier.stale.Resize(marks.size());
    }

    // For which blocks and slots the memory shows what this core does not know.
    void NoteUnknown(const Shown& shown) {
        if (each.empty() || shown.size < static_cast<size_t>(firsts_.back() + each.back().num_slots)) return;
        unknown.assign(pool_.stamp.size(), false);
        for (size_t block = kNullBlock + 1; block < unknown.size(); ++block)
            unknown[block] = shown.stamps[block] != 0 && pool_.stamp[block] == 0;
        for (Tier& one : each) {
            if (one.is_of_peers) continue;
            const uint64_t* const versions = shown.stamps + firsts_[static_cast<size_t>(one.number)];
            for (Int slot = 0; slot < one.num_slots; ++slot)
                one.stale.Set(static_cast<size_t>(slot),
                              versions[slot] != 0 && (slot >= one.num_used() || !one.HasKey(slot)));
        }
    }

    // The tier behind this one; null if it is the last one.
    Tier* Behind(Int number) {
        const auto next = static_cast<size_t>(number) + 1;
        return next < each.size() ? &each[next] : nullptr;
    }

    BlockPool& pool_;
    Column firsts_;  // by tier: the id of its slot 0 in the blocks of a hit, and its place in a stamp table
    Int next_order_ = 0;
};

}  // namespace kvplane
