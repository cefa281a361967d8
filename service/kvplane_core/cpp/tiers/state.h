// The tiers of a replica in an image of it, see `spec/tiers/state.py`.
#pragma once

#include "../check/slices.h"
#include "../image.h"
#include "tiers.h"

namespace kvplane {

constexpr std::array<const char*, 3> kSaveNames{"behind", "through", "reuse"};

template <typename Image>
class TierFields {
  public:
    TierFields(Image& one, const Spec& spec, Tiers& of) : image(one), spec_(spec), tiers_(of) {}

    void Numbers() {
        const Range small{0, static_cast<Int>(kVersions)};
        image.Begin('L', 5);
        image.Number(tiers_.last_job, small);
        image.Number(tiers_.demand, small);
        image.Number(tiers_.demand_now, small);
        image.Numbers(tiers_.costs_ns, {0, kMaxCostNs});
        image.Holds(tiers_.costs_ns.empty() || tiers_.costs_ns.size() == 1 + tiers_.each.size(), "has other costs");
        image.Number(tiers_.waits_in, small);
    }

    // A key with its slot and version.
    void Row(Key& key, Int& slot, Int& version) {
        image.Begin('t', 3);
        image.OfKey(key);
        image.Number(slot, kCount);
        image.Number(version, {1, static_cast<Int>(kVersions)});
    }

    // Of a tier that copies early.
    void OfWanted(Tier& tier) {
        Wanted& wanted = tier.wanted;
        const Int num_places =
            tier.number ? tiers_.each[static_cast<size_t>(tier.number - 1)].num_slots : spec_.num_blocks;
        Column places = wanted.Places();
        std::vector<uint64_t> versions = wanted.Versions();
        image.Begin('L', 5);
        image.Fixed(kSaveNames[static_cast<size_t>(wanted.policy)]);
        image.Numbers(places, {0, num_places - 1});
        image.Words(versions, {1});
        image.Holds(places.size() == versions.size(), "has places without a version");
        if constexpr (Image::kReads) {
            for (size_t row = 0; row < places.size(); ++row) wanted.Add(places[row], versions[row]);
        }
        for (std::set<uint64_t>* names : {&wanted.recent, &wanted.before}) {
            std::vector<uint64_t> sorted(names->begin(), names->end());
            image.Words(sorted);
            if constexpr (Image::kReads) *names = {sorted.begin(), sorted.end()};
        }
    }

    void OfLoad(Int& job, Load& load) {
        image.Begin('t', 6);
        image.Number(job, kCount);
        image.Number(load.request, {0, kMaxSlots - 1});
        image.Number(load.serial, kCount);
        image.Number(load.num_tokens, {0, spec_.max_model_len});
        image.Number(load.after, kCount);
        image.Each('L', load.rows, [&](Filled& row) {
            image.Begin('t', 6);
            image.Number(row.block, {0, spec_.num_blocks - 1});
            Stamp(row.stamp);
            image.OfKey(row.key);
            image.Number(row.num_tokens, {1, spec_.max_model_len});
            image.OfDigest(row.parent);
            image.Begin('t', 3);
            Source(row.source);
        });
    }
    void OfSave(Int& job, Key& key, Save& save) {
        image.Begin('t', 6);
        image.Number(job, kCount);
        image.OfKey(key);
        image.Number(save.block, {0, spec_.num_blocks - 1});
        Stamp(save.stamp);
        Target(save.tier, save.slot);
    }
    void OfMove(Int& job, Key& key, Move& move) {
        image.Begin('t', 7);
        image.Number(job, kCount);
        image.OfKey(key);
        Source(move.source);
        Target(move.tier, move.slot);
    }
    void Loading(std::vector<std::pair<Int, Int>>& loading) {
        image.Each('L', loading, [&](auto& one) {
            image.Begin('t', 2);
            image.Number(one.first, {0, kMaxSlots - 1});
            image.Number(one.second, kCount);
        });
    }

    void Counters() {
        image.Begin('L', 1 + tiers_.each.size());
        Counts(tiers_.counters.All());
        for (Tier& tier : tiers_.each) {
            std::vector<Int*> counts{&tier.hit_tokens};
            for (GroupUse& use : tier.uses) counts.insert(counts.end(), {&use.stored, &use.loaded, &use.evicted});
            Counts(counts);
        }
    }

  private:
    Range NumTiers() const { return {0, static_cast<Int>(tiers_.each.size()) - 1}; }
    void Stamp(uint64_t& stamp) {
        Int word = static_cast<Int>(stamp);
        image.Number(word);
        stamp = static_cast<uint64_t>(word);
    }
    void Source(Location& source) {
        image.Number(source.tier, NumTiers());
        image.Number(source.slot, kCount);
        image.Number(source.version, {1});
    }
    void Target(Int& tier, Int& slot) {
        image.Number(tier, NumTiers());
        image.Number(slot, kCount);
    }
    void Counts(const std::vector<Int*>& counts) {
        Column values;
        for (const Int* one : counts) values.push_back(*one);
        image.Numbers(values, kCount);
        image.Holds(values.size() == counts.size(), "has another number of counts");
        for (size_t at = 0; at < counts.size(); ++at) *counts[at] = values[at];
    }

    Image& image;
    const Spec& spec_;
    Tiers& tiers_;
};

// Writes the entry `tiers`.
inline Slices SaveTiers(ImageWriter& image, const Spec& spec, Tiers& tiers) {
    TierFields fields(image, spec, tiers);
    Pace pace;
    image.Begin('L', 7);
    fields.Numbers();
    image.Begin('L', tiers.each.size());
    for (Tier& tier : tiers.each) {
        image.Begin('L', tier.wanted.IsEarly() ? 6 : 5);
        image.Number(tier.num_slots);
        image.Number(tier.num_used());
        image.Numbers(tier.free);
        Int slot = tier.Next(kNoSlot);
        for (const Int end : {tier.num_shadows, tier.num_held() - tier.num_shadows}) {
            image.Begin('L', static_cast<size_t>(end));
            for (Int left = end; left > 0; --left) {
                Key key = tier.KeyOf(slot);
                Int version = tier.VersionOf(slot);
                fields.Row(key, slot, version);
                slot = tier.Next(slot);
                if (pace.Spend(Pace::kLookUp)) co_yield Pause();
            }
        }
        if (tier.wanted.IsEarly()) fields.OfWanted(tier);
    }
    image.Each('L', tiers.jobs.loads, [&](auto& one) {
        Int job = one.first;
        fields.OfLoad(job, one.second);
    });
    const auto key_of = [&](const auto& job) { return tiers.each[static_cast<size_t>(job.tier)].KeyOf(job.slot); };
    image.Begin('L', static_cast<size_t>(tiers.jobs.saves.size()));
    tiers.jobs.saves.ForEach([&](Int job, Save save) {
        Key key = key_of(save);
        fields.OfSave(job, key, save);
    });
    image.Begin('L', static_cast<size_t>(tiers.jobs.moves.size()));
    tiers.jobs.moves.ForEach([&](Int job, Move move) {
        Key key = key_of(move);
        fields.OfMove(job, key, move);
    });
    std::vector<std::pair<Int, std::pair<Int, Int>>> waits;  // when it was added, slot, job
    for (const auto& [waiting, load] : tiers.loading) waits.push_back({load.second, {waiting, load.first}});
    std::sort(waits.begin(), waits.end());
    std::vector<std::pair<Int, Int>> loading;
    for (const auto& [order, one] : waits) loading.push_back(one);
    fields.Loading(loading);
    image.Begin('L', 1 + tiers.each.size());
    for (size_t number = 0; number <= tiers.each.size(); ++number) {
        const std::vector<bool>& marked = number ? tiers.each[number - 1].stale.marks() : tiers.unknown;
        Column places;
        for (size_t at = 0; at < marked.size(); ++at) {
            if (marked[at]) places.push_back(static_cast<Int>(at));
            if (pace.Spend(Pace::kNear)) co_yield Pause();
        }
        image.Numbers(places);
    }
}

// Reads the entry `tiers` into tiers that were not used.
class LoadedTiers {
  public:
    LoadedTiers(ImageReader& one, const Spec& spec, Tiers& tiers)
        : image(one), spec_(spec), tiers_(tiers), fields_(one, spec, tiers) {}

    void Load() {
        const size_t count = image.Begin('L');
        image.Holds(count == 6 || count == 7, "has another number of values");
        fields_.Numbers();
        image.Begin('L', tiers_.each.size());
        for (Tier& tier : tiers_.each) LoadTier(tier);
        LoadJobs();
        std::vector<std::pair<Int, Int>> loading;
        fields_.Loading(loading);
        for (const auto& [slot, job] : loading) {
            const auto load = tiers_.jobs.loads.find(job);
            const bool waits = load != tiers_.jobs.loads.end() && load->second.request == slot;
            image.Holds(waits && !tiers_.loading.contains(slot), "has a request that waits for no load");
            tiers_.BeginLoad(slot, job);
        }
        if (count == 7) LoadPlaces();  // before core version 5 there was no such value
    }

  private:
    struct Row {
        Key key;
        Int slot = 0, version = 0;
    };

    void LoadTier(Tier& tier) {
        const bool is_early = tier.wanted.IsEarly();
        Int num_slots = 0, num_used = 0;
        image.Begin('L', is_early ? 6 : 5);
        image.Number(num_slots, {tier.num_slots, tier.num_slots});
        image.Number(num_used, {0, tier.num_slots});
        image.Numbers(tier.free, {0, num_used - 1});
        std::array<std::vector<Row>, 2> queues;
        for (auto& rows : queues) {
            image.Each('L', rows, [&](Row& row) { fields_.Row(row.key, row.slot, row.version); });
        }
        // All other slots that were used are those that jobs write, or into one block each read.
        const size_t known = tier.free.size() + queues[0].size() + queues[1].size();
        image.Holds(num_used <= static_cast<Int>(known) + kMaxJobs + spec_.num_blocks || tier.is_of_peers,
                    "has more used slots than rows");
        image.Holds(!tier.is_of_peers || tier.free.empty(), "has free slots of peers");
        while (tier.num_used() < num_used) tier.AddSlot();
        for (size_t queue = 0; queue < queues.size(); ++queue) {
            for (const Row& row : queues[queue]) {
                image.Holds(row.slot < num_used && !tier.HasKey(row.slot) && tier.Find(row.key) == kNoSlot,
                            "has a slot or key twice");
                tier.Hold(row.slot, row.key, row.version, queue ? SlotState::kRecent : SlotState::kShadow);
            }
        }
        std::vector<bool> seen(static_cast<size_t>(num_used), false);
        for (const uint32_t slot : tier.free) {
            image.Holds(!seen[slot] && !tier.HasKey(slot), "has a free slot twice, or with a key");
            seen[slot] = true;
        }
        if (is_early) fields_.OfWanted(tier);
    }

    void LoadJobs() {
        for (size_t left = image.Begin('L'); left > 0; --left) {
            Int job = 0;
            kvplane::Load load{};
            fields_.OfLoad(job, load);
            IsNew(job);
            image.Holds(!load.rows.empty(), "has a load of nothing");
            for (const Filled& row : load.rows) {
                Source(row.source);
                ++tiers_.each[static_cast<size_t>(row.source.tier)].pins[static_cast<size_t>(row.source.slot)];
            }
            tiers_.AddLoad(job, std::move(load));
        }
        for (size_t left = image.Begin('L'); left > 0; --left) {
            Int job = 0;
            Key key;
            Save save{};
            fields_.OfSave(job, key, save);
            IsNew(job);
            Write(save.tier, save.slot, key);
            image.Holds(tiers_.jobs.saves.IsNext(job), "has jobs in another order");
            tiers_.jobs.saves.Add(job, save);
        }
        for (size_t left = image.Begin('L'); left > 0; --left) {
            Int job = 0;
            Key key;
            Move move{};
            fields_.OfMove(job, key, move);
            IsNew(job);
            Source(move.source);
            Write(move.tier, move.slot, key);
            image.Holds(tiers_.jobs.moves.IsNext(job), "has jobs in another order");
            tiers_.jobs.moves.Add(job, move);
        }
    }
    void IsNew(Int job) const {
        const Jobs& jobs = tiers_.jobs;
        image.Holds(job > 0 && job <= tiers_.last_job && !jobs.loads.contains(job) && !jobs.saves.contains(job) &&
                        !jobs.moves.contains(job) && jobs.size() < kMaxJobs,
                    "has a job twice, or one that never began");
    }
    void Source(const Location& source) const {
        image.Holds(source.slot < tiers_.each[static_cast<size_t>(source.tier)].num_used());
    }
    // A slot without a key, that is not free and that no job writes.
    void Write(Int number, Int slot, const Key& key) const {
        Tier& tier = tiers_.each[static_cast<size_t>(number)];
        image.Holds(slot < tier.num_used() && tier.state[static_cast<size_t>(slot)] == SlotState::kNoKey &&
                        std::find(tier.free.begin(), tier.free.end(), static_cast<uint32_t>(slot)) == tier.free.end(),
                    "has a job that writes a slot in use");
        const uint32_t record = tiers_.directory.Find(key);
        image.Holds(record == kNoRecord || !tier.HasOrWrites(tiers_.directory[record]), "has a key twice");
        tier.MarkWritten(slot, Sought(key));
    }

    // The unknown blocks, and the stale slots of each tier.
    void LoadPlaces() {
        image.Begin('L', 1 + tiers_.each.size());
        for (size_t number = 0; number <= tiers_.each.size(); ++number) {
            Tier* const tier = number ? &tiers_.each[number - 1] : nullptr;
            const Int most = tier ? tier->num_slots : spec_.num_blocks;
            if (!tier) tiers_.unknown.assign(static_cast<size_t>(most), false);
            Column places;
            image.Numbers(places, {0, most - 1});
            for (const Int place : places) {
                image.Holds(!tier || place >= tier->num_used() || !tier->HasKey(place), "has a stale slot with a key");
                if (!tier) tiers_.unknown[static_cast<size_t>(place)] = true;
                if (tier) tier->stale.Set(static_cast<size_t>(place), true);
            }
        }
    }

    ImageReader& image;
    const Spec& spec_;
    Tiers& tiers_;
    TierFields<ImageReader> fields_;
};

}  // namespace kvplane
