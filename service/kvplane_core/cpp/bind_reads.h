// Functions of the module `_native` that read the state of a core.
#pragma once

#include "bind.h"
#include "column_view.h"

namespace kvplane {

using NamedKey = std::pair<Key, Int>;  // a key and its tokens

inline std::vector<NamedKey> AllKeysOf(const BlockPool& pool, Block block) {
    std::vector<NamedKey> keys;
    if (!pool.HasKey(block)) return keys;
    keys.emplace_back(pool.records[block].key, pool.records[block].tokens);
    if (const auto further = pool.more_keys.find(block); further != pool.more_keys.end()) {
        for (const uint32_t at : further->second) keys.emplace_back(pool.records[at].key, pool.records[at].tokens);
    }
    return keys;
}

constexpr Int kLongLookUp = 8192;  // hashes, about half a millisecond

// The hit that `find` finds; other threads run Python while a long look-up is made.
template <typename F>
PyObject* LookUp(Core& core, Int num_hashes, F&& find) {
    Hit hit;
    if (num_hashes > kLongLookUp) {
        WorkAlone(core, [&] { hit = find(); });
    } else {
        hit = find();
    }
    return Tuple(ToPy(hit.num_tokens), ToPy(hit.single_group_hit), ToPy(hit.blocks));
}

// The hashes of a row, which a Python sequence of bytes has. False if they have several sizes.
inline bool ReadDigests(PyObject* sequence, std::vector<uint8_t>* joined, size_t* digest_size, Int* count) {
    joined->clear();
    *digest_size = 0;
    *count = 0;
    bool equal = true;
    ForEach(sequence, [&](PyObject* one) {
        char* data = nullptr;
        Py_ssize_t size = 0;
        Check(PyBytes_AsStringAndSize(one, &data, &size) == 0);
        equal &= size > 0 && (*count == 0 || *digest_size == static_cast<size_t>(size));
        *digest_size = static_cast<size_t>(size);
        ++*count;
        joined->insert(joined->end(), data, data + size);
    });
    return equal;
}

// find(core, digests: joined or a sequence, size of one, domain, max_tokens, longest or -1) -> (tokens, single group
// hit, blocks per group), of keys that other clients may use; with a longest hit of those that the replica's own
// requests may use
inline PyObject* Find(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Core& core = CoreOf(At(arguments, 0));
        Digests digests;
        std::string domain;
        if (PyBytes_Check(At(arguments, 1))) {
            FromPy(At(arguments, 1), &digests.bytes);
            FromPy(At(arguments, 2), &digests.size);
        } else {
            Int count = 0;
            Check(ReadDigests(At(arguments, 1), &digests.bytes, &digests.size, &count));
        }
        FromPy(At(arguments, 3), &domain);
        Replica& replica = core.replica;
        uint32_t id = kUnknownDomain;
        replica.blocks.pool.pairs.Known(domain, &id);
        const Int most = Number(At(arguments, 4)), longest = Number(At(arguments, 5));
        const PrefixLookup& lookup = *replica.blocks.lookup;
        const auto find = [&] {
            return longest < 0 ? lookup.Find(digests, id, most, replica.Horizon())
                               : lookup.Find(digests, id, most, kInside, longest);
        };
        return LookUp(core, digests.count(), find);
    });
}

// column(core, name) -> a column of the requests
inline PyObject* ColumnOf(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Requests& requests = CoreOf(At(arguments, 0)).replica.blocks.requests;
        std::string wanted;
        FromPy(At(arguments, 1), &wanted);
        if (wanted == "hashed_outside") return NewColumnView(At(arguments, 0), &requests.hashed_outside, nullptr);
        for (auto& [name, flags] : requests.Flags()) {
            if (wanted == name) return NewColumnView(At(arguments, 0), flags, nullptr);
        }
        for (auto& [name, numbers] : requests.Numbers()) {
            if (wanted == name) return NewColumnView(At(arguments, 0), nullptr, numbers);
        }
        Owned::Fail();
    });
}

// live(core) -> the slots that have a request, ascending
inline PyObject* LiveSlots(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Requests& requests = CoreOf(At(arguments, 0)).replica.blocks.requests;
        Column slots;
        for (Int slot = 0; slot < requests.size(); ++slot) {
            if (requests.live[slot]) slots.push_back(slot);
        }
        return ToPy(slots);
    });
}

// keys(core, blocks) -> per block (stamp, key_step, [((pair, digest), tokens), ...], references), the primary key
// first; of a slot of a tier its version and its key, with 0 tokens
inline PyObject* KeysOf(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Coordinator& core = CoreOf(At(arguments, 0)).replica.blocks;
        const BlockPool& pool = core.pool;
        BlockList blocks;
        FromPy(At(arguments, 1), &blocks);
        Owned list(PyList_New(static_cast<Py_ssize_t>(blocks.size())));
        Py_ssize_t at = 0;
        for (const Block block : blocks) {
            if (block >= pool.num_blocks) {
                const Location slot = core.tiers.LocationOf(block);
                Require(slot.slot != kNoSlot && slot.slot < core.tiers.each[static_cast<size_t>(slot.tier)].num_slots,
                        "a block is beyond the pool and the tiers");
                std::vector<NamedKey> keys;
                if (slot.version)
                    keys.emplace_back(core.tiers.each[static_cast<size_t>(slot.tier)].KeyOf(slot.slot), 0);
                PyList_SetItem(list.get(), at++, Tuple(ToPy(slot.version), ToPy(Int{0}), ToPy(keys), ToPy(Int{0})));
                continue;
            }
            PyList_SetItem(list.get(), at++,
                           Tuple(ToPy(pool.stamp[block]), ToPy(pool.key_step[block]), ToPy(AllKeysOf(pool, block)),
                                 ToPy(pool.references[block])));
        }
        return list.Release();
    });
}

inline bool IsGroup(const BlockPool& pool, Int group) {
    return group >= 0 && group < static_cast<Int>(pool.keys_of_group.size());
}

// blocks(core, domain, group, digest) -> (blocks that have the key, step that registered it at the first)
inline PyObject* BlocksOf(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const BlockPool& pool = CoreOf(At(arguments, 0)).replica.blocks.pool;
        std::string domain;
        Digest digest;
        uint32_t id = kUnknownDomain;
        FromPy(At(arguments, 1), &domain);
        FromPy(At(arguments, 3), &digest);
        const Int group = Number(At(arguments, 2));
        Check(IsGroup(pool, group));
        pool.pairs.Known(domain, &id);
        const BlockList blocks = pool.BlocksOf(Key{pool.pairs.Of(id, group), digest});
        return Tuple(ToPy(blocks), ToPy(blocks.empty() ? Int{0} : pool.key_step[blocks.front()]));
    });
}

// first_blocks(core, domain, groups, digest, horizon) -> the first block of each group under the digest, or None
inline PyObject* FirstBlocks(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const BlockPool& pool = CoreOf(At(arguments, 0)).replica.blocks.pool;
        std::string domain;
        Column groups;
        Digest digest;
        uint32_t id = kUnknownDomain;
        FromPy(At(arguments, 1), &domain);
        FromPy(At(arguments, 2), &groups);
        FromPy(At(arguments, 3), &digest);
        const Int horizon = Number(At(arguments, 4));
        pool.pairs.Known(domain, &id);
        BlockList found;
        for (const Int group : groups) Check(IsGroup(pool, group));
        for (const Int group : groups) {
            const Block block = pool.Find(Key{pool.pairs.Of(id, group), digest}, horizon);
            if (block == kNullBlock) return Py_NewRef(Py_None);
            found.push_back(block);
        }
        return ToPy(found);
    });
}

inline bool IsPosition(Int tokens) { return tokens >= 0 && tokens <= kMaxTokens; }

// can_rewind(core, slot, computed)
inline PyObject* CanRewind(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Coordinator& blocks = CoreOf(At(arguments, 0)).replica.blocks;
        const Int slot = Number(At(arguments, 1)), computed = Number(At(arguments, 2));
        Check(IsPosition(computed));
        return PyBool_FromLong(blocks.requests.IsLive(slot) && blocks.CanRewind(slot, computed));
    });
}

// align_chunk(core, slot, start, wanted) -> tokens of the chunk
inline PyObject* AlignChunkOf(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Coordinator& blocks = CoreOf(At(arguments, 0)).replica.blocks;
        const Int slot = Number(At(arguments, 1));
        const Int start = Number(At(arguments, 2)), wanted = Number(At(arguments, 3));
        Check(blocks.requests.IsLive(slot) && IsPosition(start) && IsPosition(wanted));
        return ToPy(AlignChunk(blocks, slot, start, wanted));
    });
}

// numbers(core) -> (seq, epoch, executed_through, num_free, num_evictable, num_running, blocks that are slack, retained
// prefixes, retained keys, events that no answer has)
inline PyObject* Numbers(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Replica& replica = AnyCoreOf(At(arguments, 0)).replica;
        const BlockPool& pool = replica.blocks.pool;
        return Tuple(ToPy(replica.seq), ToPy(pool.epoch), ToPy(pool.executed_through), ToPy(pool.num_free()),
                     ToPy(pool.num_evictable), ToPy(replica.blocks.requests.num_running),
                     ToPy(pool.split ? pool.split->num_bare() : Int{0}),
                     ToPy(static_cast<Int>(pool.retained.each().size())), ToPy(pool.retained.num_keys()),
                     ToPy(static_cast<Int>(pool.events.rows.size())));
    });
}

// books(core) -> (busy blocks, keys per group, (allocated, adopted) per group, (granting step, rows) per step in
// flight, counters, slots that load, names of domains by number)
inline PyObject* Books(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Replica& replica = AnyCoreOf(At(arguments, 0)).replica;
        std::vector<std::pair<Int, Int>> groups, granted;
        for (const auto& one : replica.blocks.managers) groups.emplace_back(one->allocated, one->adopted);
        for (const auto& [step, grants] : replica.tracker.grants)
            granted.emplace_back(step, static_cast<Int>(grants.size()));
        Column counts;
        for (const auto& [name, count] : replica.counters.All()) counts.push_back(*count);
        const BlockPool& pool = replica.blocks.pool;
        return Tuple(ToPy(pool.busy), ToPy(pool.keys_of_group), ToPy(groups), ToPy(granted), ToPy(counts),
                     ToPy(replica.blocks.requests.loading), ToPy(pool.pairs.Names()));
    });
}

// counts(core) -> per group (blocks in tables, blocks with a primary key, evicted keys)
inline PyObject* Counts(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Replica& replica = AnyCoreOf(At(arguments, 0)).replica;
        const BlockPool& pool = replica.blocks.pool;
        std::vector<Column> counts(replica.blocks.managers.size(), Column(3, 0));
        std::vector<uint8_t> seen(static_cast<size_t>(pool.num_blocks), 0);
        for (const auto& one : replica.blocks.managers) {
            Column& mine = counts[static_cast<size_t>(one->group)];
            for (const BlockList& blocks : one->table) {
                for (const Block block : blocks) mine[0] += block != kNullBlock && !std::exchange(seen[block], 1);
            }
            for (const BlockList& blocks : one->table) {
                for (const Block block : blocks) seen[block] = 0;
            }
            mine[2] = pool.evicted_keys[static_cast<size_t>(one->group)];
        }
        for (Block block = 0; block < pool.num_blocks; ++block) {
            if (pool.HasKey(block)) ++counts[static_cast<size_t>(pool.pairs.Group(pool.records[block].key.pair))][1];
        }
        return ToPy(counts);
    });
}

// block_map(core, cells) -> per group the held and the cached blocks of each cell, then the other blocks in use; block
// b is in cell b * cells / num_blocks
inline PyObject* BlockMap(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Replica& replica = AnyCoreOf(At(arguments, 0)).replica;
        const Int cells = Number(At(arguments, 1));
        const BlockPool& pool = replica.blocks.pool;
        Require(cells > 0 && cells <= pool.num_blocks, "as many cells as blocks at most");
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
        return ToPy(map);
    });
}

// residency(core) -> the three histograms
inline PyObject* ResidencyOf(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Residency& found = AnyCoreOf(At(arguments, 0)).replica.blocks.pool.residency;
        return Tuple(ToPy(found.lifetime), ToPy(found.idle_before_evict), ToPy(found.reuse_gap));
    });
}

// common_blocks(core) -> per group, how many leading blocks are the same in the tables of all running requests
inline PyObject* CommonBlocks(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Coordinator& blocks = AnyCoreOf(At(arguments, 0)).replica.blocks;
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
        return ToPy(common);
    });
}

// free_order(core) -> the free blocks in the order of eviction
inline PyObject* FreeOrder(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const BlockPool& pool = CoreOf(At(arguments, 0)).replica.blocks.pool;
        BlockList order = pool.FreeOrder();
        const BlockList retained = pool.retained.Order();
        order.insert(order.end(), retained.begin(), retained.end());
        return ToPy(order);
    });
}

}  // namespace kvplane
