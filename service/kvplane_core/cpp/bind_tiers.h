// Functions of the module `_native` that read tiers, and that begin and end engine lives of tiers.
#pragma once

#include "bind.h"

namespace kvplane {

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

inline Tiers& TiersIn(PyObject* arguments) { return CoreOf(At(arguments, 0)).replica.blocks.tiers; }

inline Tier& TierIn(Tiers& tiers, Int at) {
    Check(at >= 0 && at < static_cast<Int>(tiers.each.size()));
    return tiers.each[static_cast<size_t>(at)];
}

// tiers(core) -> ((slots with a key, shadows, free, retained, stale ones, hit tokens, uses by group) per tier,
// counters, jobs in flight: loads, saves, moves; the last job)
inline PyObject* TiersOf(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Tiers& tiers = AnyCoreOf(At(arguments, 0)).replica.blocks.tiers;
        Owned each(PyList_New(0));
        for (const Tier& one : tiers.each) {
            Append(each, Tuple(ToPy(one.num_held()), ToPy(one.num_shadows), ToPy(one.num_free()),
                               ToPy(one.retained.num_free()), ToPy(one.stale.count()), ToPy(one.hit_tokens),
                               UsesOf(one)));
        }
        Column counters;
        for (const Int* count : tiers.counters.All()) counters.push_back(*count);
        const Jobs& jobs = tiers.jobs;
        return Tuple(each.Release(), ToPy(counters),
                     ToPy(Column{static_cast<Int>(jobs.loads.size()), jobs.saves.size(), jobs.moves.size()}),
                     ToPy(tiers.last_job));
    });
}

// tier_of(core, domain, group, digest) -> the number of the nearest tier that has the key; None: none has
inline PyObject* TierOf(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Coordinator& blocks = CoreOf(At(arguments, 0)).replica.blocks;
        std::string domain;
        Digest digest;
        uint32_t id = kUnknownDomain;
        FromPy(At(arguments, 1), &domain);
        const Int group = Number(At(arguments, 2));
        FromPy(At(arguments, 3), &digest);
        Check(group >= 0 && group < static_cast<Int>(blocks.spec.groups.size()));
        blocks.pool.pairs.Known(domain, &id);
        const Block found = blocks.tiers.FindInTiers(Key{blocks.pool.pairs.Of(id, group), digest});
        return found == kNullBlock ? Py_NewRef(Py_None) : ToPy(blocks.tiers.LocationOf(found).tier);
    });
}

// tier_keys(core, number, after, count) -> (key, slot, version) of up to `count` slots with a key, in the order of
// eviction, behind this one; -1: the first ones
inline PyObject* TierKeys(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Tier& tier = TierIn(TiersIn(arguments), Number(At(arguments, 1)));
        const Int after = Number(At(arguments, 2));
        Check(after == kNoSlot || (after >= 0 && after < tier.num_used() && tier.HasKey(after)));
        return KeysOfTier(tier, after, Number(At(arguments, 3)));
    });
}

// take_tier_events(core) -> (medium, events) of the tiers that have events which no answer has
inline PyObject* TakeTierEvents(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        return Change(CoreOf(At(arguments, 0)), [](Replica& replica) {
            Owned list(PyList_New(0));
            for (Tier& one : replica.blocks.tiers.each) {
                if (!one.events.empty()) Append(list, Tuple(ToPy(one.medium), EventsToPy(one.events.Take())));
            }
            return list.Release();
        });
    });
}

// install_slots(core, [(id, domain, group, digest, version)]): the one to evict first first
inline PyObject* InstallSlots(PyObject*, PyObject* arguments) {
    struct Row {
        Location at;
        std::string domain;
        Int group = 0;
        Digest digest;
    };
    return Guarded([&]() -> PyObject* {
        Core& core = CoreOf(At(arguments, 0));
        std::vector<Row> rows;
        ForEach(At(arguments, 1), [&](PyObject* given) {
            const Int id = Number(At(given, 0));
            Check(id >= 0 && id < kUnlimited);
            Row row{core.replica.blocks.tiers.LocationOf(static_cast<Block>(id)), {}, Number(At(given, 2)), {}};
            row.at.version = Number(At(given, 4));
            FromPy(At(given, 1), &row.domain);
            FromPy(At(given, 3), &row.digest);
            Check(row.at.slot != kNoSlot && row.at.slot < TierIn(core.replica.blocks.tiers, row.at.tier).num_slots);
            Check(row.group >= 0 && row.group < static_cast<Int>(core.replica.spec.groups.size()));
            Check(row.at.version > 0 && row.at.version <= static_cast<Int>(kVersions));
            rows.push_back(std::move(row));
        });
        return Change(core, [&](Replica& replica) {
            Tiers& tiers = replica.blocks.tiers;
            Pairs& pairs = replica.blocks.pool.pairs;
            for (const Row& row : rows) {
                const Key key{pairs.Of(pairs.DomainOf(row.domain), row.group), row.digest};
                tiers.each[static_cast<size_t>(row.at.tier)].Install(row.at.slot, key, row.at.version);
                tiers.last_job = std::max(tiers.last_job, row.at.version);
            }
            for (Tier& one : tiers.each) one.EndInstall();
            return Py_NewRef(Py_None);
        });
    });
}

}  // namespace kvplane
