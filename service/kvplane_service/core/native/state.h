// The state of a core as dicts of Python values, and back. `transfer.py` makes the entries of the exported state of it.
#pragma once

#include <utility>

#include "loaded.h"
#include "read_step.h"

namespace kvplane {

// The state of all blocks besides their keys, for both directions.
template <typename Archive>
inline void VisitBlocks(const Archive& visit, BlockPool& pool) {
    visit.PerBlock("references", pool.references);
    visit.PerBlock("key_step", pool.key_step);
    visit.PerBlock("stamp", pool.stamp);
    visit.PerBlock("born", pool.born);
    visit.PerBlock("used", pool.used);
    visit.PerBlock("last_use", pool.last_use_);
}

// The other state, for both directions.
template <typename Archive>
inline void VisitState(const Archive& visit, Replica& replica) {
    BlockPool& pool = replica.blocks.pool;
    Requests& requests = replica.blocks.requests;
    InFlightTracker& tracker = replica.tracker;
    visit("seq", replica.seq);
    visit("generation", pool.generation);
    visit("epoch", pool.epoch);
    visit("counter", pool.counter);
    visit("step", pool.step);
    visit("executed_through", pool.executed_through);
    visit("num_evictable", pool.num_evictable);
    visit("age_base", pool.age_base);
    visit("reserved", pool.reserved);
    visit("busy", pool.busy);
    visit("evicted_keys", pool.evicted_keys);
    visit("lifetime", pool.residency.lifetime);
    visit("idle_before_evict", pool.residency.idle_before_evict);
    visit("reuse_gap", pool.residency.reuse_gap);
    visit("registered", pool.registered);
    for (auto& [name, flags] : requests.Flags()) visit.PerSlot(name, *flags, requests);
    for (auto& [name, numbers] : requests.Numbers()) visit.PerSlot(name, *numbers, requests);
    visit.PerSlot("request_id", requests.request_id, requests);
    visit.PerSlot("domain", requests.domain, requests);
    visit.PerSlot("content", requests.content, requests);
    visit("loading", requests.loading);
    visit("not_zeroed", requests.not_zeroed);
    visit("num_running", requests.num_running);
    visit("asked", requests.asked);
    visit("unserved", requests.unserved);
    visit("hit_end", requests.hit_end);
    visit("superseded", pool.free.superseded);
    visit("hints", requests.hints);
    visit("grants", tracker.grants);
    visit("tentative", tracker.tentative);
    visit("adoptions", tracker.adoptions);
    visit("waiting", tracker.waiting);
    visit("held", tracker.held);
    visit("filling", tracker.filling);
    visit("under_load", tracker.under_load);
    for (const auto& [name, count] : replica.counters.All()) visit(name, *count);
}

struct Dumper {
    PyObject* into;
    size_t first = 0, end = 0;  // blocks
    template <typename T>
    void operator()(const char* name, const T& value) const {
        Set(name, ToPy(value));
    }
    template <typename T>
    void PerSlot(const char* name, const std::vector<T>& column, const Requests& requests) const {
        Owned list(PyList_New(requests.size()));
        for (Int slot = 0; slot < requests.size(); ++slot)
            PyList_SetItem(list.get(), slot, ToPy(column[static_cast<size_t>(slot)]));
        Set(name, list.Release());
    }
    template <typename T>
    void PerBlock(const char* name, const std::vector<T>& column) const {
        Set(name, ToBytes(reinterpret_cast<const uint8_t*>(column.data() + first), (end - first) * sizeof(T)));
    }
    void Set(const char* name, PyObject* value) const {
        const Owned owned(value);
        if (PyDict_SetItemString(into, name, value) != 0) throw Raised();
    }
};

struct Loader {
    PyObject* from;
    template <typename T>
    void operator()(const char* name, T& value) const {
        FromPy(Get(name), &value);
    }
    template <typename T>
    void PerSlot(const char* name, std::vector<T>& column, Requests& requests) const {
        Int slot = 0;
        ForEach(Get(name), [&](PyObject* item) {
            requests.Grow(slot);
            FromPy(item, &column[static_cast<size_t>(slot++)]);
        });
    }
    template <typename T>
    void PerBlock(const char* name, std::vector<T>& column) const {
        const Buffer<T> given(Get(name));
        Check(given.size == column.size());
        std::copy_n(given.data, given.size, column.begin());
    }
    PyObject* Get(const char* name) const {
        PyObject* value = PyDict_GetItemString(from, name);
        Check(value != nullptr);
        return value;
    }
};

using NamedKey = std::pair<Key, Int>;  // a key and its tokens

// Further attributes of a group of cached states; None for other groups.
inline PyObject* DumpStates(const GroupManager& manager) {
    if (manager.spec.kind != kAlignedState) return Py_NewRef(Py_None);
    const auto* one = static_cast<const AlignedStateManager*>(&manager);
    return Tuple(ToPy(one->last_state), ToPy(one->num_retired), ToList(one->has_allocated), ToPy(one->stopped_at),
                 ToPy(one->last_checkpoints), ToPy(one->registered_this_step));
}

inline void LoadStates(PyObject* state, GroupManager& manager) {
    Check((manager.spec.kind == kAlignedState) == (state != Py_None));
    if (state == Py_None) return;
    auto* one = static_cast<AlignedStateManager*>(&manager);
    FromPy(At(state, 0), &one->last_state);
    FromPy(At(state, 1), &one->num_retired);
    Column has_allocated;
    FromPy(At(state, 2), &has_allocated);
    one->has_allocated.assign(has_allocated.begin(), has_allocated.end());
    FromPy(At(state, 3), &one->stopped_at);
    FromPy(At(state, 4), &one->last_checkpoints);
    FromPy(At(state, 5), &one->registered_this_step);
}

inline PyObject* DumpManagers(const Replica& replica) {
    Owned list(PyList_New(0));
    for (const auto& one : replica.blocks.managers) {
        Append(list, Tuple(ToPy(one->table), ToPy(one->num_cached), ToPy(one->partial_hit), ToPy(one->copies),
                           PyBool_FromLong(one->stores_empty_ranges), ToPy(one->allocated), ToPy(one->adopted),
                           DumpStates(*one)));
    }
    return list.Release();
}

inline void LoadManagers(PyObject* list, Replica& replica) {
    Check(Count(list) == static_cast<Int>(replica.blocks.managers.size()));
    size_t number = 0;
    ForEach(list, [&](PyObject* state) {
        GroupManager& one = *replica.blocks.managers[number++];
        FromPy(At(state, 0), &one.table);
        FromPy(At(state, 1), &one.num_cached);
        FromPy(At(state, 2), &one.partial_hit);
        FromPy(At(state, 3), &one.copies);
        one.stores_empty_ranges = IsTrue(At(state, 4));
        FromPy(At(state, 5), &one.allocated);
        FromPy(At(state, 6), &one.adopted);
        LoadStates(At(state, 7), one);
    });
}

inline std::vector<NamedKey> AllKeysOf(const BlockPool& pool, Block block) {
    std::vector<NamedKey> keys;
    if (!pool.HasKey(block)) return keys;
    keys.emplace_back(pool.records[block].key, pool.records[block].tokens);
    if (const auto further = pool.more_keys.find(block); further != pool.more_keys.end()) {
        for (const uint32_t at : further->second) keys.emplace_back(pool.records[at].key, pool.records[at].tokens);
    }
    return keys;
}

inline PyObject* BytesOf(const std::vector<uint32_t>& column) {
    return ToBytes(reinterpret_cast<const uint8_t*>(column.data()), column.size() * sizeof(uint32_t));
}

// The keys of the blocks: of the primary ones, by block, the number of its domain and group (0: no key) and its tokens,
// and the digests of the blocks that have one, with their sizes; the other keys; and the blocks of each key that has
// several, by the block that got it last.
inline void DumpKeys(const BlockPool& pool, const Dumper& dump) {
    std::vector<uint32_t> pairs, tokens;
    std::vector<uint8_t> digests, sizes;
    std::vector<std::pair<Block, std::vector<NamedKey>>> more;
    std::vector<std::pair<Key, BlockList>> shared;
    const auto note = [&](uint32_t at) {
        const KeyRecord& record = pool.records[at];
        if (record.next != at && pool.index.Find(pool.records, record.key) == at)
            shared.emplace_back(record.key, pool.BlocksOf(record.key));
    };
    for (auto block = static_cast<Block>(dump.first); block < dump.end; ++block) {
        const KeyRecord& record = pool.records[block];
        pairs.push_back(record.key.pair);
        tokens.push_back(record.tokens);
        if (!pool.HasKey(block)) continue;
        note(block);
        if (const auto further = pool.more_keys.find(block); further != pool.more_keys.end()) {
            for (const uint32_t at : further->second) note(at);
            more.emplace_back(block, AllKeysOf(pool, block));
            more.back().second.erase(more.back().second.begin());
        }
        sizes.push_back(record.key.digest.size);
        digests.insert(digests.end(), record.key.digest.bytes.begin(),
                       record.key.digest.bytes.begin() + record.key.digest.size);
    }
    dump.Set("key_pair", BytesOf(pairs));
    dump.Set("key_tokens", BytesOf(tokens));
    dump("digests", digests);
    dump("digest_sizes", sizes);
    dump("more_keys", more);
    dump("shared", shared);
}

inline void AddLoadedKey(BlockPool& pool, Block block, const Key& key, Int num_tokens) {
    Check(key.pair > 0 && pool.pairs.Domain(key.pair) < pool.pairs.Capacity());
    pool.AddKey(block, key, num_tokens);
}

// The stamps that the next part orders, in their order.
inline void LoadStamped(const Loader& load, BlockPool& pool) {
    BlockList stamped;
    load("stamped", stamped);
    pool.ForgetStamped();
    for (const Block block : stamped) {
        Check(block < pool.num_blocks);
        pool.NoteStamped(block);
    }
}

// Puts the blocks of a key, which all have it, into this order of registration.
inline void Reorder(BlockPool& pool, const Key& key, const BlockList& blocks) {
    const std::vector<uint32_t> ring = pool.RecordsOf(key);
    std::vector<uint32_t> wanted;
    for (const Block block : blocks) {
        const auto found =
            std::find_if(ring.begin(), ring.end(), [&](uint32_t one) { return pool.BlockOf(one) == block; });
        Require(found != ring.end(), "a block does not have a shared key");
        wanted.push_back(*found);
    }
    Require(wanted.size() == ring.size() && !ring.empty(), "a shared key has other blocks");
    pool.index.Replace(pool.records, ring.back(), wanted.back());
    for (size_t at = 0; at < wanted.size(); ++at) pool.records[wanted[at]].next = wanted[(at + 1) % wanted.size()];
}

// Adds the keys to an empty pool.
inline void LoadKeys(const Loader& load, Replica& replica) {
    BlockPool& pool = replica.blocks.pool;
    std::vector<std::pair<Block, std::vector<NamedKey>>> more;
    std::vector<std::pair<Key, BlockList>> shared;
    std::vector<std::string> domains;
    const Buffer<uint32_t> pairs(load.Get("key_pair")), tokens(load.Get("key_tokens")), order(load.Get("free"));
    const Buffer<uint8_t> digests(load.Get("digests")), sizes(load.Get("digest_sizes"));
    load("more_keys", more);
    load("shared", shared);
    load("domains", domains);
    const auto num_blocks = static_cast<size_t>(pool.num_blocks);
    Check(pairs.size == num_blocks && tokens.size == num_blocks && order.size < num_blocks);
    for (const std::string& name : domains) pool.pairs.DomainOf(name);
    LoadedState::CheckFree({order.data, order.size}, pool.num_blocks);
    Int num_first = 0;
    load("num_first", num_first);
    Check(num_first >= 0 && num_first <= static_cast<Int>(order.size));
    const BlockList free(order.data, order.data + order.size);
    if (pool.split) {
        PyObject* const split = load.Get("split");
        std::vector<uint8_t> has_state;
        FromPy(At(split, 2), &has_state);
        Check(pool.split->Load(free, Number(At(split, 0)), Number(At(split, 1)), has_state, pool.references));
    } else {
        pool.free.Rebuild(free, static_cast<size_t>(num_first));
    }
    const Int num_evictable = std::exchange(pool.num_evictable, 0);  // not checked yet: counting on could overflow
    const Column steps = pool.key_step;
    size_t row = 0, byte = 0;
    for (Block block = 0; block < num_blocks; ++block) {
        if (pairs.data[block] == 0) continue;
        Check(row < sizes.size && sizes.data[row] <= kDigestBytes && byte + sizes.data[row] <= digests.size);
        AddLoadedKey(pool, block, Key{pairs.data[block], Digest(digests.data + byte, sizes.data[row])},
                     tokens.data[block]);
        byte += sizes.data[row++];
    }
    for (const auto& [block, mine] : more) {
        Check(block < num_blocks && pool.HasKey(block));
        for (const auto& [key, count] : mine) AddLoadedKey(pool, block, key, count);
    }
    for (const auto& [key, blocks] : shared) Reorder(pool, key, blocks);
    pool.num_evictable = num_evictable;
    pool.key_step = steps;
    pool.SetStampBase();
}

// (retentions, (priority, block) of the free blocks in order of eviction)
inline PyObject* DumpRetained(const RetainedBlocks& retained) {
    Owned each(PyList_New(0));
    for (const auto& [number, one] : retained.each()) {
        Owned keys(PyList_New(0));
        for (const auto& [position, kept] : one.keys) Append(keys, Tuple(ToPy(kept.key), ToPy(kept.place)));
        Append(each, Tuple(ToPy(one.owner), ToPy(Int{one.domain}), ToPy(one.digest), ToPy(one.priority),
                           ToPy(one.until_ns), keys.Release()));
    }
    return Tuple(each.Release(), ToPy(retained.Lists()));
}

// Into a pool that has its keys and its free list.
inline void LoadRetained(PyObject* state, Replica& replica) {
    BlockPool& pool = replica.blocks.pool;
    ForEach(At(state, 0), [&](PyObject* one) {
        Retention retention;
        FromPy(At(one, 0), &retention.owner);
        FromPy(At(one, 1), &retention.domain);
        FromPy(At(one, 2), &retention.digest);
        FromPy(At(one, 3), &retention.priority);
        FromPy(At(one, 4), &retention.until_ns);
        Check(retention.domain < pool.pairs.Capacity() && !pool.retained.Has(retention));
        Check(retention.priority >= 0 && retention.priority <= kMaxPriority);
        Check(retention.until_ns >= 0 && retention.until_ns <= kMaxNs);
        std::set<Key> seen;
        ForEach(At(one, 5), [&](PyObject* given) {
            KeptKey kept{Key(), Number(At(given, 1))};
            FromPy(At(given, 0), &kept.key);
            const Key& key = kept.key;
            Check(key.pair > 0 && pool.pairs.Domain(key.pair) < pool.pairs.Capacity() && seen.insert(key).second);
            Check(kept.place >= kDevice && kept.place < pool.retained.num_places());
            retention.keys.emplace(static_cast<Int>(retention.keys.size()), kept);
        });
        Check(!retention.keys.empty());
        pool.retained.Enlist(std::move(retention));
    });
    std::vector<std::pair<Int, Block>> lists;
    FromPy(At(state, 1), &lists);
    const BlockList order = pool.free.Order();
    std::set<Block> free(order.begin(), order.end());
    for (const auto& [priority, block] : lists) {
        Check(priority >= 0 && priority <= kMaxPriority && block != kNullBlock && block < pool.num_blocks);
        Check(free.insert(block).second && pool.references[block] == 0);
        pool.retained.Put(priority, block);
    }
}

}  // namespace kvplane
