// The state of the tiers as Python values, and back; a loaded one is checked as in `loaded.h`.
#pragma once

#include "../read_step.h"
#include "tiers.h"

namespace kvplane {

inline PyObject* ToPy(const Location& source) {
    return Tuple(ToPy(source.tier), ToPy(source.slot), ToPy(source.version));
}
inline void FromPy(PyObject* object, Location* source) {
    FromPy(At(object, 0), &source->tier);
    FromPy(At(object, 1), &source->slot);
    FromPy(At(object, 2), &source->version);
}

inline PyObject* ToPy(const Filled& row) {
    return Tuple(ToPy(row.block), ToPy(row.stamp), ToPy(row.key), ToPy(row.num_tokens), ToPy(row.parent),
                 ToPy(row.source));
}
inline void FromPy(PyObject* object, Filled* row) {
    FromPy(At(object, 0), &row->block);
    FromPy(At(object, 1), &row->stamp);
    FromPy(At(object, 2), &row->key);
    FromPy(At(object, 3), &row->num_tokens);
    FromPy(At(object, 4), &row->parent);
    FromPy(At(object, 5), &row->source);
}

// (key, slot, version) of up to `count` slots with a key, in the order of eviction, behind this one.
inline PyObject* KeysOfTier(const Tier& tier, Int after, Int count) {
    Owned list(PyList_New(0));
    for (Int slot = tier.Next(after); slot != kNoSlot && count > 0; slot = tier.Next(slot), --count)
        Append(list, Tuple(ToPy(tier.KeyOf(slot)), ToPy(slot), ToPy(tier.VersionOf(slot))));
    return list.Release();
}

inline PyObject* UsesOf(const Tier& tier) {
    std::vector<Column> uses;
    for (const GroupUse& one : tier.uses) uses.push_back({one.held, one.stored, one.loaded, one.evicted});
    return ToPy(uses);
}

// (policy, places that are wanted in order, their stamps or versions, keys that were computed before)
inline PyObject* DumpWanted(const Wanted& wanted) {
    const auto names = [](const std::set<uint64_t>& keys) {
        return ToPy(std::vector<uint64_t>(keys.begin(), keys.end()));
    };
    return Tuple(ToPy(wanted.policy), ToPy(wanted.Places()), ToPy(wanted.Versions()), names(wanted.recent),
                 names(wanted.before));
}

// Without its keys, which are read in slices.
inline PyObject* DumpTier(const Tier& tier) {
    return Tuple(ToPy(tier.num_slots), ToPy(tier.num_used()), ToPy(tier.free), ToPy(tier.num_shadows),
                 ToPy(tier.hit_tokens), UsesOf(tier), DumpWanted(tier.wanted));
}

inline const Key& KeyOf(const Tiers& tiers, Int tier, Int slot) {
    return tiers.each[static_cast<size_t>(tier)].KeyOf(slot);
}

inline PyObject* PlacesOf(const std::vector<bool>& marked) {
    Column places;
    for (size_t at = 0; at < marked.size(); ++at) {
        if (marked[at]) places.push_back(static_cast<Int>(at));
    }
    return ToPy(places);
}

// (numbers, costs, tiers, loads, saves, moves, loading, counters, (unknown blocks, stale slots of each tier))
inline PyObject* DumpTiers(Tiers& tiers) {
    Owned each(PyList_New(0)), loads(PyList_New(0)), saves(PyList_New(0)), moves(PyList_New(0));
    for (const Tier& one : tiers.each) Append(each, DumpTier(one));
    for (const auto& [job, load] : tiers.jobs.loads) {
        Append(loads, Tuple(ToPy(job), ToPy(load.request), ToPy(load.serial), ToPy(load.num_tokens), ToPy(load.after),
                            ToList(load.rows)));
    }
    tiers.jobs.saves.ForEach([&](Int job, const Save& save) {
        Append(saves,
               Tuple(ToPy(job), ToPy(KeyOf(tiers, save.tier, save.slot)), ToPy(save.block), ToPy(save.stamp),
                     ToPy(save.tier), ToPy(save.slot)));
    });
    tiers.jobs.moves.ForEach([&](Int job, const Move& move) {
        Append(moves, Tuple(ToPy(job), ToPy(KeyOf(tiers, move.tier, move.slot)), ToPy(move.source), ToPy(move.tier),
                            ToPy(move.slot)));
    });
    std::vector<std::pair<Int, std::pair<Int, Int>>> waits;  // when it was added, slot, job
    for (const auto& [slot, load] : tiers.loading) waits.push_back({load.second, {slot, load.first}});
    std::sort(waits.begin(), waits.end());
    std::vector<std::pair<Int, Int>> loading;
    for (const auto& [order, one] : waits) loading.push_back(one);
    Column counters;
    for (const Int* count : tiers.counters.All()) counters.push_back(*count);
    Owned places(PyList_New(0));
    Append(places, PlacesOf(tiers.unknown));
    for (const Tier& one : tiers.each) Append(places, PlacesOf(one.stale.marks()));
    return Tuple(ToPy(Column{tiers.last_job, tiers.demand, tiers.demand_now, tiers.waits_in}), ToPy(tiers.costs_ns),
                 each.Release(), loads.Release(), saves.Release(), moves.Release(), ToPy(loading), ToPy(counters),
                 places.Release());
}

// Loads what `DumpTiers` returns, with the keys of each tier (shadows, others) for their number, into unused tiers.
class LoadedTiers {
  public:
    explicit LoadedTiers(Replica& replica)
        : spec_(replica.spec), pool_(replica.blocks.pool), tiers_(replica.blocks.tiers) {}

    void Load(PyObject* state) {
        Column numbers, counters;
        FromPy(At(state, 0), &numbers);
        FromPy(At(state, 1), &tiers_.costs_ns);
        FromPy(At(state, 7), &counters);
        const std::vector<Int*> counts = tiers_.counters.All();
        Check(numbers.size() == 4 && counters.size() == counts.size());
        Check(tiers_.costs_ns.empty() || tiers_.costs_ns.size() == 1 + tiers_.each.size());
        for (const Int cost : tiers_.costs_ns) Check(cost >= 0 && cost <= kMaxCostNs);
        for (const Int number : numbers) Check(number >= 0 && number <= static_cast<Int>(kVersions));
        for (size_t at = 0; at < counts.size(); ++at) *counts[at] = Count(counters[at]);
        tiers_.last_job = numbers[0];
        tiers_.demand = numbers[1];
        tiers_.demand_now = numbers[2];
        tiers_.waits_in = numbers[3];
        Check(kvplane::Count(At(state, 2)) == static_cast<Int>(tiers_.each.size()));
        size_t number = 0;
        ForEach(At(state, 2), [&](PyObject* one) { LoadTier(one, tiers_.each[number++]); });
        ForEach(At(state, 3), [&](PyObject* one) { LoadLoad(one); });
        ForEach(At(state, 4), [&](PyObject* one) { LoadSave(one); });
        ForEach(At(state, 5), [&](PyObject* one) { LoadMove(one); });
        LoadLoading(At(state, 6));
        LoadPlaces(At(state, 8));
    }

  private:
    static Int Count(Int number) {
        Check(number >= 0 && number < kForever / 4);
        return number;
    }
    static Int NumberAt(PyObject* tuple, Py_ssize_t at) { return Number(At(tuple, at)); }

    Key KeyAt(PyObject* tuple, Py_ssize_t at) const {
        Key key;
        FromPy(At(tuple, at), &key);
        Named(key);
        return key;
    }
    void Named(const Key& key) const { Check(key.pair > 0 && pool_.pairs.Domain(key.pair) < pool_.pairs.Capacity()); }
    Int JobAt(PyObject* tuple) const {
        const Int job = NumberAt(tuple, 0);
        const Jobs& jobs = tiers_.jobs;
        Check(job > 0 && job <= tiers_.last_job);
        Check(!jobs.loads.contains(job) && !jobs.saves.contains(job) && !jobs.moves.contains(job));
        return job;
    }
    Tier& TierAt(Int number) const {
        Check(number >= 0 && number < static_cast<Int>(tiers_.each.size()));
        return tiers_.each[static_cast<size_t>(number)];
    }
    // A slot without a key, that is not free and that no job writes.
    void Write(Tier& tier, Int slot, const Key& key) const {
        Check(slot >= 0 && slot < tier.num_used() && tier.state[static_cast<size_t>(slot)] == SlotState::kNoKey);
        Check(std::find(tier.free.begin(), tier.free.end(), static_cast<uint32_t>(slot)) == tier.free.end());
        const uint32_t record = tiers_.directory.Find(key);
        Check(record == kNoRecord || !tier.HasOrWrites(tiers_.directory[record]));
        tier.MarkWritten(slot, Sought(key));
    }
    void Source(const Location& source) const {
        Check(source.slot >= 0 && source.slot < TierAt(source.tier).num_used() && source.version > 0);
    }

    void LoadTier(PyObject* state, Tier& tier) {
        const Int num_used = NumberAt(state, 1);
        Check(NumberAt(state, 0) == tier.num_slots && num_used >= 0 && num_used <= tier.num_slots);
        while (tier.num_used() < num_used) tier.AddSlot();
        LoadKeys(At(state, 3), tier, SlotState::kShadow);
        LoadKeys(At(state, 4), tier, SlotState::kRecent);
        FromPy(At(state, 2), &tier.free);
        std::vector<bool> seen(static_cast<size_t>(num_used), false);
        for (const uint32_t slot : tier.free) {
            Check(slot < num_used && !seen[slot] && !tier.HasKey(slot));
            seen[slot] = true;
        }
        tier.hit_tokens = Count(NumberAt(state, 5));
        std::vector<Column> uses;
        FromPy(At(state, 6), &uses);
        Check(uses.size() == tier.uses.size());
        for (size_t group = 0; group < uses.size(); ++group) {
            const Column& use = uses[group];
            Check(use.size() == 4);
            tier.uses[group] = {tier.uses[group].held, Count(use[1]), Count(use[2]), Count(use[3])};
        }
        LoadWanted(At(state, 7), tier);
    }

    void LoadWanted(PyObject* state, Tier& tier) const {
        Wanted& wanted = tier.wanted;
        const Int num_places = tier.number ? tiers_.each[static_cast<size_t>(tier.number - 1)].num_slots
                                           : static_cast<Int>(spec_.num_blocks);
        Column places;
        std::vector<uint64_t> versions;
        FromPy(At(state, 1), &places);
        FromPy(At(state, 2), &versions);
        Check(NumberAt(state, 0) == wanted.policy && (wanted.IsEarly() || places.empty()));
        Check(places.size() == versions.size());
        for (size_t row = 0; row < places.size(); ++row) {
            Check(places[row] >= 0 && places[row] < num_places && versions[row] > 0);
            wanted.Add(places[row], versions[row]);
        }
        Py_ssize_t at = 3;
        for (std::set<uint64_t>* names : {&wanted.recent, &wanted.before}) {
            std::vector<uint64_t> found;
            FromPy(At(state, at++), &found);
            names->insert(found.begin(), found.end());
        }
    }

    void LoadKeys(PyObject* rows, Tier& tier, SlotState queue) const {
        ForEach(rows, [&](PyObject* row) {
            const Key key = KeyAt(row, 0);
            const Int slot = NumberAt(row, 1), version = NumberAt(row, 2);
            Check(slot >= 0 && slot < tier.num_used() && !tier.HasKey(slot) && tier.Find(key) == kNoSlot);
            Check(version > 0 && version <= static_cast<Int>(kVersions));
            tier.Hold(slot, key, version, queue);
        });
    }

    void LoadLoad(PyObject* state) {
        const Int job = JobAt(state);
        kvplane::Load load{
            NumberAt(state, 1), Count(NumberAt(state, 2)), NumberAt(state, 3), Count(NumberAt(state, 4)), {}};
        Check(load.request >= 0 && load.request < kMaxSlots);
        Check(load.num_tokens >= 0 && load.num_tokens <= spec_.max_model_len);
        FromPy(At(state, 5), &load.rows);
        Check(!load.rows.empty());
        for (const Filled& row : load.rows) {
            Check(row.block < spec_.num_blocks && row.num_tokens > 0 && row.num_tokens <= spec_.max_model_len);
            Named(row.key);
            Source(row.source);
            ++TierAt(row.source.tier).pins[static_cast<size_t>(row.source.slot)];
        }
        tiers_.AddLoad(job, std::move(load));
    }

    void LoadSave(PyObject* state) {
        const Int job = JobAt(state);
        Save save{0, 0, NumberAt(state, 4), NumberAt(state, 5)};
        FromPy(At(state, 2), &save.block);
        FromPy(At(state, 3), &save.stamp);
        Check(save.block < spec_.num_blocks);
        Write(TierAt(save.tier), save.slot, KeyAt(state, 1));
        Check(tiers_.jobs.saves.IsNext(job));
        tiers_.jobs.saves.Add(job, save);
    }

    void LoadMove(PyObject* state) {
        const Int job = JobAt(state);
        Move move{{}, NumberAt(state, 3), NumberAt(state, 4)};
        FromPy(At(state, 2), &move.source);
        Source(move.source);
        Write(TierAt(move.tier), move.slot, KeyAt(state, 1));
        Check(tiers_.jobs.moves.IsNext(job));
        tiers_.jobs.moves.Add(job, move);
    }

    // The unknown blocks, and the stale slots of each tier.
    void LoadPlaces(PyObject* each) {
        Check(kvplane::Count(each) == static_cast<Int>(1 + tiers_.each.size()));
        Py_ssize_t number = 0;
        ForEach(each, [&](PyObject* given) {
            const auto at = static_cast<size_t>(number++);
            Tier* const tier = at ? &tiers_.each[at - 1] : nullptr;
            const Int most = tier ? tier->num_slots : spec_.num_blocks;
            if (!tier) tiers_.unknown.assign(static_cast<size_t>(most), false);
            Column places;
            FromPy(given, &places);
            for (const Int place : places) {
                Check(place >= 0 && place < most);
                if (!tier) {
                    tiers_.unknown[static_cast<size_t>(place)] = true;
                    continue;
                }
                Check(place >= tier->num_used() || !tier->HasKey(place));
                tier->stale.Set(static_cast<size_t>(place), true);
            }
        });
    }

    void LoadLoading(PyObject* rows) {
        std::vector<std::pair<Int, Int>> loading;
        FromPy(rows, &loading);
        for (const auto& [slot, job] : loading) {
            const auto load = tiers_.jobs.loads.find(job);
            Check(load != tiers_.jobs.loads.end() && load->second.request == slot && !tiers_.loading.contains(slot));
            tiers_.BeginLoad(slot, job);
        }
    }

    const Spec& spec_;
    const BlockPool& pool_;
    Tiers& tiers_;
};

}  // namespace kvplane
