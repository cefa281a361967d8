// Counts of a core. They are read of one whose state is half changed too.
#pragma once

#include "bind.h"

namespace kvplane {

inline BlockPool& PoolOf(Replica& replica) { return replica.blocks.pool; }

// (free blocks, those with a key, blocks that no state can take)
inline std::tuple<Int, Int, Int> BlockCounts(Replica& replica) {
    const BlockPool& pool = PoolOf(replica);
    return {pool.num_free(), pool.num_evictable, pool.split ? pool.split->num_bare() : Int{0}};
}

// (prefixes, keys of blocks that they name)
inline std::pair<Int, Int> RetainedCounts(Replica& replica) {
    const auto& retained = PoolOf(replica).retained;
    return {static_cast<Int>(retained.each().size()), retained.num_keys()};
}

// The histograms of block lifetimes.
inline auto ResidencyOf(Replica& replica) {
    const Residency& found = PoolOf(replica).residency;
    return std::tuple(found.lifetime, found.idle_before_evict, found.reuse_gap);
}

inline Column CountersOf(Replica& replica) {
    Column counts;
    for (const auto& [name, count] : replica.counters.All()) counts.push_back(*count);
    return counts;
}

// Per group (keys, blocks that were allocated, and adopted).
inline std::vector<Column> GroupTotals(Replica& replica) {
    const BlockPool& pool = PoolOf(replica);
    std::vector<Column> totals;
    for (const auto& one : replica.blocks.managers)
        totals.push_back({pool.keys_of_group[static_cast<size_t>(one->group)], one->allocated, one->adopted});
    return totals;
}

// Per group (blocks in tables, blocks with a primary key, allocated, adopted, evicted keys).
inline std::vector<Column> CountByGroup(Replica& replica) {
    const BlockPool& pool = PoolOf(replica);
    std::vector<Column> counts;
    std::vector<uint8_t> seen(static_cast<size_t>(pool.num_blocks), 0);
    for (const auto& one : replica.blocks.managers) {
        Int used = 0;
        for (const BlockList& blocks : one->table) {
            for (const Block block : blocks) used += block != kNullBlock && !std::exchange(seen[block], 1);
        }
        for (const BlockList& blocks : one->table) {
            for (const Block block : blocks) seen[block] = 0;
        }
        counts.push_back({used, 0, one->allocated, one->adopted, pool.evicted_keys[static_cast<size_t>(one->group)]});
    }
    for (Block block = 0; block < pool.num_blocks; ++block) {
        if (pool.HasKey(block)) ++counts[static_cast<size_t>(pool.pairs.Group(pool.records[block].key.pair))][1];
    }
    return counts;
}

// The same, while other threads run Python.
inline PyObject* GroupCounters(Core& core) {
    std::vector<Column> counts;
    WorkAlone(core, [&] { counts = CountByGroup(core.replica); });
    return ToPy(counts);
}

// Per group the held and the cached blocks of each cell, then the other blocks in use; block b is in cell
// b * cells / num_blocks.
inline std::vector<Column> CountByCell(Replica& replica, Int cells) {
    const BlockPool& pool = PoolOf(replica);
    const size_t groups = replica.blocks.managers.size();
    std::vector<Column> map(2 * groups + 1, Column(static_cast<size_t>(cells), 0));
    std::vector<uint8_t> group_of(static_cast<size_t>(pool.num_blocks), static_cast<uint8_t>(groups));
    for (const auto& one : replica.blocks.managers) {
        for (const BlockList& blocks : one->table) {
            for (const Block block : blocks) group_of[block] = static_cast<uint8_t>(one->group);
        }
    }
    for (Int block = 1; block < pool.num_blocks; ++block) {
        const size_t at = static_cast<size_t>(block), cell = static_cast<size_t>(block * cells / pool.num_blocks);
        size_t group = group_of[at];
        if (group == groups && pool.HasKey(static_cast<Block>(block))) {
            group = static_cast<size_t>(pool.pairs.Group(pool.records[at].key.pair));
        }
        if (pool.references[at]) {
            ++map[group == groups ? 2 * groups : 2 * group][cell];
        } else if (group != groups) {
            ++map[2 * group + 1][cell];
        }
    }
    return map;
}

// The same, while other threads run Python.
inline PyObject* BlockMap(Core& core, Int cells) {
    Require(cells > 0 && cells <= PoolOf(core.replica).num_blocks, "as many cells as blocks at most");
    std::vector<Column> map;
    WorkAlone(core, [&] { map = CountByCell(core.replica, cells); });
    return ToPy(map);
}

// Per group, how many leading blocks are the same in the tables of all running requests.
inline Column CommonBlocks(Replica& replica) {
    const Coordinator& blocks = replica.blocks;
    Column common;
    for (const auto& one : blocks.managers) {
        const BlockList* first = nullptr;
        size_t count = 0;
        for (Int slot = 0; slot < blocks.requests.size(); ++slot) {
            if (!blocks.requests.running[slot]) continue;
            const BlockList& mine = one->table[slot];
            if (first == nullptr) {
                first = &mine;
                count = static_cast<size_t>(std::find(mine.begin(), mine.end(), kNullBlock) - mine.begin());
            }
            count = std::min(count, mine.size());
            count = static_cast<size_t>(
                std::mismatch(mine.begin(), mine.begin() + static_cast<std::ptrdiff_t>(count), first->begin())
                    .first -
                mine.begin());
        }
        common.push_back(static_cast<Int>(count));
    }
    return common;
}

}  // namespace kvplane
