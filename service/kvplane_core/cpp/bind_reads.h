// What is read of a core, by `read(core, question, ...)`.
#pragma once

#include "bind.h"
#include "bind_bytes.h"
#include "bind_counts.h"
#include "bind_walks.h"

namespace kvplane {

// A column of the requests as a sequence of Python.
// Keeps the core alive, and waits, entry by entry, while a step is applied without the interpreter's lock.
struct ColumnView {
    PyObject_HEAD PyObject* core;
    PyObject* (*entry)(const void* column, size_t slot);
    const void* column;
};

inline Py_ssize_t ColumnLength(PyObject*) { return kMaxSlots; }

inline PyObject* ColumnEntry(PyObject* self, Py_ssize_t slot) {
    if (slot < 0 || slot >= kMaxSlots) {
        PyErr_SetString(PyExc_IndexError, "the slot is beyond the last one");
        return nullptr;
    }
    return Guarded([&]() -> PyObject* {
        const auto& view = *reinterpret_cast<const ColumnView*>(self);
        CoreOf(view.core);
        return view.entry(view.column, static_cast<size_t>(slot));
    });
}

inline void DestroyColumn(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    Py_DECREF(reinterpret_cast<ColumnView*>(self)->core);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

// Entries of bytes are flags.
template <typename T>
PyObject* NewColumnView(PyObject* core, const std::vector<T>* column) {
    using Entry = std::conditional_t<std::is_same_v<T, uint8_t>, bool, T>;
    const auto entry = [](const void* of, size_t slot) {
        return ToPy(static_cast<Entry>((*static_cast<const std::vector<T>*>(of))[slot]));
    };
    static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(DestroyColumn)},
                                  {Py_sq_length, reinterpret_cast<void*>(ColumnLength)},
                                  {Py_sq_item, reinterpret_cast<void*>(ColumnEntry)},
                                  {0, nullptr}};
    static PyType_Spec spec = {"_native.Column", sizeof(ColumnView), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
    static auto* const type = reinterpret_cast<PyTypeObject*>(NotNull(PyType_FromSpec(&spec)));
    PyObject* made = NotNull(PyType_GenericAlloc(type, 0));
    auto* view = reinterpret_cast<ColumnView*>(made);
    view->core = Py_NewRef(core);
    view->entry = entry;
    view->column = column;
    return made;
}

inline bool IsGroup(const Replica& replica, Int group) {
    return group >= 0 && group < static_cast<Int>(replica.spec.groups.size());
}

// The number of a domain, which no block need know.
inline uint32_t DomainOf(const Replica& replica, const std::string& domain) {
    uint32_t id = kUnknownDomain;
    replica.blocks.pool.pairs.Known(domain, &id);
    return id;
}

inline Key NamedKey(const Replica& replica, const std::string& domain, Int group, const Digest& digest) {
    Check(IsGroup(replica, group));
    return Key{replica.blocks.pool.pairs.Of(DomainOf(replica, domain), group), digest};
}

// -- look-ups -------------------------------------------------------------------------------------------------------

constexpr Int kLongLookUp = 8192;  // hashes, about half a millisecond

// (tokens, single group hit, blocks per group) of the hit that `find` finds; other threads run Python while a long
// look-up is made.
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
inline void FromPy(PyObject* sequence, Digests* digests) {
    Int count = 0;
    Check(ReadDigests(sequence, &digests->bytes, &digests->size, &count));
}

// The hit that other clients may use.
inline PyObject* Find(Core& core, const std::vector<uint8_t>& joined, size_t size, const std::string& domain,
                      Int max_tokens) {
    Digests digests;
    digests.bytes = joined;
    digests.size = size;
    const uint32_t id = DomainOf(core.replica, domain);
    return LookUp(core, digests.count(), [&] {
        return core.replica.blocks.lookup->Find(digests, id, max_tokens, core.replica.Horizon());
    });
}

// The hit of at most `longest` tokens that the replica's own requests may use, of keys without a domain.
inline PyObject* FindInside(Core& core, const Digests& digests, Int max_tokens, Int longest) {
    const uint32_t id = DomainOf(core.replica, "");
    return LookUp(core, digests.count(), [&] {
        return core.replica.blocks.lookup->Find(digests, id, max_tokens, kInside, longest);
    });
}

// The same of each group by itself: blocks, and lengths in tokens.
inline auto FindEach(Replica& replica, const Digests& digests, Int max_tokens) {
    return replica.blocks.lookup->FindEach(digests, DomainOf(replica, ""), max_tokens);
}

// The hit of at most `limit` tokens of a request; None: the slot has none.
inline PyObject* LookUpSlot(Core& core, Int slot, Int limit) {
    const Coordinator& blocks = core.replica.blocks;
    if (!blocks.requests.IsLive(slot)) return Py_NewRef(Py_None);
    return LookUp(core, blocks.requests.content[slot].count(), [&] { return blocks.FindHit(slot, limit); });
}

// -- keys -----------------------------------------------------------------------------------------------------------

// Per block (stamp, key_step, [((pair, digest), tokens), ...], references), the primary key first; of a slot of a tier
// its version and its key, with 0 tokens.
inline PyObject* KeysOf(Replica& replica, const BlockList& blocks) {
    const BlockPool& pool = PoolOf(replica);
    const Tiers& tiers = replica.blocks.tiers;
    Owned list(PyList_New(static_cast<Py_ssize_t>(blocks.size())));
    Py_ssize_t at = 0;
    for (const Block block : blocks) {
        std::vector<std::pair<Key, Int>> keys;
        if (block >= pool.num_blocks) {
            const Location slot = tiers.LocationOf(block);
            Require(slot.slot != kNoSlot && slot.slot < tiers.each[static_cast<size_t>(slot.tier)].num_slots,
                    "a block is beyond the pool and the tiers");
            if (slot.version) keys.emplace_back(tiers.each[static_cast<size_t>(slot.tier)].KeyOf(slot.slot), 0);
            PyList_SetItem(list.get(), at++, Tuple(ToPy(slot.version), ToPy(Int{0}), ToPy(keys), ToPy(Int{0})));
            continue;
        }
        const auto add = [&](uint32_t record) {
            keys.emplace_back(pool.records[record].key, pool.records[record].tokens);
        };
        if (pool.HasKey(block)) {
            add(block);
            if (const auto further = pool.more_keys.find(block); further != pool.more_keys.end())
                std::for_each(further->second.begin(), further->second.end(), add);
        }
        PyList_SetItem(list.get(), at++, Tuple(ToPy(pool.stamp[block]), ToPy(pool.key_step[block]), ToPy(keys),
                                               ToPy(pool.references[block])));
    }
    return list.Release();
}

// All blocks that have a key, published or not.
inline BlockList BlocksOf(Replica& replica, const std::string& domain, Int group, const Digest& digest) {
    return PoolOf(replica).BlocksOf(NamedKey(replica, domain, group, digest));
}

// The step that registered a key; None if no block has it.
inline std::optional<Int> KeyStep(Replica& replica, const std::string& domain, Int group, const Digest& digest) {
    const BlockList blocks = BlocksOf(replica, domain, group, digest);
    return blocks.empty() ? std::nullopt : std::optional<Int>(PoolOf(replica).key_step[blocks.front()]);
}

// The first block of each group under the digest; None if a group has none.
inline std::optional<BlockList> FirstBlocks(Replica& replica, const std::string& domain, const Column& groups,
                                            const Digest& digest, Int horizon) {
    BlockList found;
    for (const Int group : groups) Check(IsGroup(replica, group));
    for (const Int group : groups) {
        const Block block = PoolOf(replica).Find(NamedKey(replica, domain, group, digest), horizon);
        if (block == kNullBlock) return std::nullopt;
        found.push_back(block);
    }
    return found;
}

// The free blocks in the order of eviction.
inline BlockList FreeOrder(Replica& replica) {
    BlockList order = PoolOf(replica).FreeOrder();
    const BlockList retained = PoolOf(replica).retained.Order();
    order.insert(order.end(), retained.begin(), retained.end());
    return order;
}

// -- requests -------------------------------------------------------------------------------------------------------

// A column of the requests.
inline PyObject* ColumnOf(Core& core, const std::string& wanted) {
    Requests& requests = core.replica.blocks.requests;
    if (wanted == "hashed_outside") return NewColumnView(core.capsule, &requests.hashed_outside);
    if (wanted == "request_id") return NewColumnView(core.capsule, &requests.request_id);
    for (auto& [name, flags] : requests.Flags()) {
        if (wanted == name) return NewColumnView(core.capsule, flags);
    }
    for (auto& [name, numbers] : requests.Numbers()) {
        if (wanted == name) return NewColumnView(core.capsule, numbers);
    }
    Owned::Fail();
}

// The slots that have a request, ascending.
inline Column LiveSlots(Replica& replica) {
    const Requests& requests = replica.blocks.requests;
    Column slots;
    for (Int slot = 0; slot < requests.size(); ++slot) {
        if (requests.live[slot]) slots.push_back(slot);
    }
    return slots;
}

// The live slot of the first request with this name; None if no request has it.
inline std::optional<Int> SlotNamed(Replica& replica, const std::string& name) {
    const Requests& requests = replica.blocks.requests;
    for (Int slot = 0; slot < requests.size(); ++slot) {
        if (requests.live[slot] && requests.request_id[slot] == name) return slot;
    }
    return std::nullopt;
}

inline bool HasSlot(const Replica& replica, Int slot) { return slot >= 0 && slot < replica.blocks.requests.size(); }

// The hashes of a request, joined, and the size of one.
inline std::pair<std::vector<uint8_t>, size_t> HashesOf(Replica& replica, Int slot) {
    Check(HasSlot(replica, slot));
    const Requests& requests = replica.blocks.requests;
    if (!requests.IsLive(slot)) return {};
    return {requests.content[slot].bytes, requests.content[slot].size};
}

// The blocks that a transfer of an ended request reads, in the order of their release.
inline BlockList HeldBlocksOf(Replica& replica, Int slot) {
    const auto held = replica.tracker.held.find(slot);
    return held == replica.tracker.held.end() ? BlockList() : held->second;
}

// The blocks of a request by group.
inline std::vector<BlockList> TablesOf(Replica& replica, Int slot) {
    Check(HasSlot(replica, slot));
    std::vector<BlockList> tables;
    for (const auto& one : replica.blocks.managers) tables.push_back(one->table[slot]);
    return tables;
}

// Tokens of a chunk that ends where a state can be cached.
inline Int ShortenChunk(Replica& replica, Int slot, Position start, Position wanted) {
    Check(replica.blocks.requests.IsLive(slot));
    return AlignChunk(replica.blocks, slot, start.tokens, wanted.tokens);
}

// Raises Refused if a replica without requests could not apply the part.
inline void CheckAlone(Core& core, PyObject* given) {
    static const Requests kNobody;
    if (!core.of_nobody)
        core.of_nobody = std::make_unique<StepValidator>(core.replica.spec, kNobody, nullptr, nullptr);
    Step step{.seq = 1, .parts = std::vector<Part>(1)};
    ReadPart(given, &step.parts[0]);
    if (!core.of_nobody->Accepts(step)) throw Refused{core.of_nobody->refusal()};
}

// What a step takes, or one that `read_step` read, in units.
inline Int EffortOf(Replica& replica, PyObject* given) {
    if (!PyCapsule_IsValid(given, kSent)) {
        Step step;
        ReadStep(given, &step);
        return Effort(replica).Of(step);
    }
    const SentStep& sent = SentOf(given);
    Check(!sent.is_applied);
    return Effort(replica).Of(sent.step);
}
inline Int LookUpEffort(Replica& replica, Int num_tokens) { return Effort(replica).OfLookUp(num_tokens); }

inline OpenStep& RowsOf(Core& core) {
    Require(core.rows != nullptr, "no step is open");
    return *core.rows;
}

// Whether the slot runs in the open step; -1: whether any does.
inline bool IsGranted(Core& core, Int slot) {
    return slot < 0 ? RowsOf(core).num_granted() > 0 : RowsOf(core).HasGranted(slot);
}

// -- managers: for an engine in this process ------------------------------------------------------------------------

inline const GroupManager& ManagerOf(const Replica& replica, Int group) {
    Check(IsGroup(replica, group));
    return *replica.blocks.managers[static_cast<size_t>(group)];
}

// (registered blocks, (index, block) of a state or hit that is copied before a write, whether a state was allocated,
// (length, index, end) of the state inside the last chunk) of a request; None where there is none.
inline auto InGroup(Replica& replica, Int group, Int slot) {
    const GroupManager& manager = ManagerOf(replica, group);
    Check(HasSlot(replica, slot));
    const auto entry = [&](const auto& map) {
        const auto found = map.find(slot);
        return found == map.end() ? std::nullopt : std::optional(found->second);
    };
    const bool has_states = manager.spec.kind == kAlignedState;
    const auto* const states = has_states ? static_cast<const AlignedStateManager*>(&manager) : nullptr;
    return std::tuple(manager.num_cached[slot], entry(manager.partial_hit), states && states->has_allocated[slot],
                      states ? entry(states->last_checkpoints) : std::nullopt);
}

// Leading tokens to which the token behind `computed` ones does not attend.
inline Int SkippedOf(Replica& replica, Int group, Position computed) {
    return ManagerOf(replica, group).SkippedTokens(computed.tokens);
}

// Free blocks that an allocation takes, see `GroupManager.blocks_needed`; the numbers are those of a `Need`.
inline Int NeededOf(Replica& replica, Int group, const std::vector<Position>& need, bool capped, const BlockList& hit) {
    const GroupManager& manager = ManagerOf(replica, group);
    Check(need.size() == 6 && need[0].tokens < static_cast<Int>(manager.table.size()));
    for (const Block block : hit) Check(block < manager.pool.num_blocks);
    Need wanted{need[0].tokens, need[1].tokens, need[2].tokens, need[3].tokens, need[4].tokens, need[5].tokens};
    wanted.capped = capped;
    return manager.BlocksNeeded(wanted, hit);
}

// -- tiers ----------------------------------------------------------------------------------------------------------

// Per tier (slots with a key, shadows, free, retained, hit tokens, uses by group).
inline PyObject* TiersOf(Replica& replica) {
    Owned each(PyList_New(0));
    for (const Tier& one : replica.blocks.tiers.each) {
        std::vector<Column> uses;
        for (const GroupUse& use : one.uses) uses.push_back({use.held, use.stored, use.loaded, use.evicted});
        Append(each, Tuple(ToPy(one.num_held()), ToPy(one.num_shadows), ToPy(one.num_free()),
                           ToPy(one.retained.num_free()), ToPy(one.hit_tokens), ToPy(uses)));
    }
    return each.Release();
}

inline Column TierCountersOf(Replica& replica) {
    Column counters;
    for (const Int* count : replica.blocks.tiers.counters.All()) counters.push_back(*count);
    return counters;
}

// Loads, saves and moves in flight.
inline Column OpenJobs(Replica& replica) {
    const Jobs& jobs = replica.blocks.tiers.jobs;
    return {static_cast<Int>(jobs.loads.size()), jobs.saves.size(), jobs.moves.size()};
}

// The number of the nearest tier that has the key; None: none has.
inline std::optional<Int> TierOf(Replica& replica, const std::string& domain, Int group, const Digest& digest) {
    const Tiers& tiers = replica.blocks.tiers;
    const Block found = tiers.FindInTiers(NamedKey(replica, domain, group, digest));
    return found == kNullBlock ? std::nullopt : std::optional<Int>(tiers.LocationOf(found).tier);
}

// (key, slot, version) of up to `count` slots of a tier with a key, in the order of eviction, behind this one; -1: the
// first ones.
inline PyObject* TierKeys(Replica& replica, Int number, Int after, Int count) {
    const Tiers& tiers = replica.blocks.tiers;
    Check(number >= 0 && number < static_cast<Int>(tiers.each.size()));
    const Tier& tier = tiers.each[static_cast<size_t>(number)];
    Check(after == kNoSlot || (after >= 0 && after < tier.num_used() && tier.HasKey(after)));
    Owned list(PyList_New(0));
    for (Int slot = tier.Next(after); slot != kNoSlot && count > 0; slot = tier.Next(slot), --count)
        Append(list, Tuple(ToPy(tier.KeyOf(slot)), ToPy(slot), ToPy(tier.VersionOf(slot))));
    return list.Release();
}

// -- the table ------------------------------------------------------------------------------------------------------

constexpr bool kOfAny = true;  // also of a core whose state is half changed: counts

inline const Functions& Questions() {
    static const Functions questions{
        Named<[](Replica& of) { return of.seq; }>("seq", kOfAny),
        Named<[](Replica& of) { return PoolOf(of).epoch; }>("epoch", kOfAny),
        Named<[](Replica& of) { return PoolOf(of).executed_through; }>("executed_through", kOfAny),
        Named<[](Replica& of) { return PoolOf(of).num_free(); }>("free_blocks", kOfAny),
        Named<[](Replica& of) { return of.blocks.requests.num_running; }>("num_running", kOfAny),
        Named<[](Replica& of) { return !PoolOf(of).events.rows.empty(); }>("has_events", kOfAny),
        Named<[](Replica& of) { return PoolOf(of).busy; }>("busy_blocks", kOfAny),
        Named<[](Replica& of) { return PoolOf(of).pairs.Names(); }>("domains", kOfAny),
        Named<[](Replica& of) { return of.blocks.requests.loading; }>("loading", kOfAny),
        Named<ResidencyOf>("residency", kOfAny),
        Named<BlockCounts>("block_counts", kOfAny),
        Named<RetainedCounts>("retained_counts", kOfAny),
        Named<CountersOf>("counters", kOfAny),
        Named<GroupTotals>("group_totals", kOfAny),
        Named<GroupCounters>("group_counters", kOfAny),
        Named<BlockMap>("block_map", kOfAny),
        Named<CommonBlocks>("common_prefix_blocks", kOfAny),
        Named<TiersOf>("tiers", kOfAny),
        Named<TierCountersOf>("tier_counters", kOfAny),
        Named<OpenJobs>("open_jobs", kOfAny),
        Named<Find>("find"),
        Named<FindInside>("find_inside"),
        Named<FindEach>("find_each"),
        Named<LookUpSlot>("look_up"),
        Named<KeysOf>("keys"),
        Named<BlocksOf>("blocks_of"),
        Named<KeyStep>("key_step"),
        Named<FirstBlocks>("first_blocks"),
        Named<FreeOrder>("free_order"),
        Named<ColumnOf>("column"),
        Named<LiveSlots>("slots"),
        Named<SlotNamed>("slot_named"),
        Named<HashesOf>("hashes"),
        Named<HeldBlocksOf>("held"),
        Named<TablesOf>("tables"),
        Named<ShortenChunk>("shorten_chunk"),
        Named<CheckAlone>("check_alone"),
        Named<EffortOf>("effort"),
        Named<LookUpEffort>("look_up_effort"),
        Named<InGroup>("in_group"),
        Named<SkippedOf>("skipped"),
        Named<NeededOf>("needed"),
        Named<TierOf>("tier_of"),
        Named<TierKeys>("tier_keys"),
        Named<IsGranted>("is_granted"),
        Named<BeginCheck>("check"),
        Named<BeginSave>("image"),
        Named<BeginEnd>("end_epoch"),
    };
    return questions;
}

}  // namespace kvplane
