// What changes a core next to whole steps, by `change(core, name, ...)`: engine lives, and steps that are applied row
// by row.
#pragma once

#include "bind_reads.h"
#include "bind_rows.h"
#include "recovery.h"

namespace kvplane {

constexpr const char* kPool = "kvplane.pool";

inline void EnterEpoch(Core& core, Int epoch, const BlockList& busy, bool memory_is_new,
                       const Buffer<uint64_t>& shown) {
    for (const Block block : busy) Check(block < core.replica.spec.num_blocks);
    Check(epoch >= 0 && epoch < Int{1} << kEpochBits);
    Require(static_cast<uint64_t>(epoch) > core.replica.blocks.pool.epoch, "stamps would repeat");
    Change(core, [&](Replica& replica) {
        replica.EnterEpoch(epoch, busy, memory_is_new, Shown{shown.data, shown.size});
        core.held.Clear();
    });
}

// A pool for `install` of keys (number of a pair, block, digest of `size` bytes) with `names`, (domain, group) by the
// number of a pair; `free`: blocks in the order of eviction, `further`: keys besides the first one of a block. Runs
// without the interpreter's lock.
inline PyObject* Prepare(Replica& replica, const std::vector<std::pair<std::string, Int>>& names,
                         const Buffer<uint32_t>& pair, const Buffer<uint32_t>& block, const Buffer<uint8_t>& digests,
                         size_t size, const Buffer<uint32_t>& tokens, const Buffer<uint64_t>& stamp,
                         const Buffer<uint32_t>& free,
                         const std::vector<std::pair<Block, std::pair<uint32_t, Digest>>>& further) {
    const auto num_blocks = static_cast<size_t>(replica.spec.num_blocks);
    Check(pair.size == block.size && digests.size == block.size * size && size <= kDigestBytes &&
          tokens.size == num_blocks && stamp.size == num_blocks && free.size <= num_blocks);
    const RecoveredKeys found{{pair.data, pair.size},
                              {block.data, block.size},
                              {digests.data, digests.size},
                              size,
                              {tokens.data, tokens.size},
                              {stamp.data, stamp.size},
                              {free.data, free.size},
                              names,
                              further};
    std::unique_ptr<BlockPool> pool;
    WithoutLock([&] { pool = MakeRecovered(replica.spec, found); });
    const auto destroy = [](PyObject* one) { delete static_cast<BlockPool*>(PyCapsule_GetPointer(one, kPool)); };
    return Capsule(std::move(pool), kPool, destroy);
}

// A slot of a tier with a recovered key: id, domain, group, digest, version.
using RecoveredSlot = std::tuple<Int, std::string, Int, Digest, Int>;

// Installs the keys of a pool that `prepare` made, and of slots, the one to evict first first.
inline void InstallKeys(Core& core, PyObject* pool, const std::vector<RecoveredSlot>& slots) {
    auto* const prepared = static_cast<BlockPool*>(PyCapsule_GetPointer(pool, kPool));
    if (prepared == nullptr) Owned::Fail();
    const Spec& spec = core.replica.spec;
    const Tiers& before = core.replica.blocks.tiers;
    Check(prepared->num_blocks == spec.num_blocks && prepared->keys_of_group.size() == spec.groups.size());
    for (const auto& [id, domain, group, digest, version] : slots) {
        Check(id >= 0 && id < kUnlimited && IsGroup(core.replica, group));
        const Location at = before.LocationOf(static_cast<Block>(id));
        Check(at.slot != kNoSlot && at.slot < before.each[static_cast<size_t>(at.tier)].num_slots);
        Check(version > 0 && version <= static_cast<Int>(kVersions));
    }
    Require(core.replica.blocks.pool.index.count() == 0, "only an unused pool can recover");
    Change(core, [&](Replica& replica) {
        Tiers& tiers = replica.blocks.tiers;
        Pairs& pairs = replica.blocks.pool.pairs;
        Install(replica.blocks.pool, *prepared);
        for (const auto& [id, domain, group, digest, version] : slots) {
            const Location at = tiers.LocationOf(static_cast<Block>(id));
            const Key key{pairs.Of(pairs.DomainOf(domain), group), digest};
            tiers.each[static_cast<size_t>(at.tier)].Install(at.slot, key, version);
            tiers.last_job = std::max(tiers.last_job, version);
        }
        for (Tier& one : tiers.each) one.EndInstall();
    });
}

// The events since the last part; None: there are none.
inline PyObject* TakeEvents(Core& core) {
    return Change(core, [](Replica& replica) { return EventsToPy(PoolOf(replica).TakeEvents()); });
}

// (medium, events) of the tiers that have events which no answer has.
inline PyObject* TakeTierEvents(Core& core) {
    return Change(core, [](Replica& replica) {
        Owned list(PyList_New(0));
        for (Tier& one : replica.blocks.tiers.each) {
            if (!one.events.empty()) Append(list, Tuple(ToPy(one.medium), EventsToPy(one.events.Take())));
        }
        return list.Release();
    });
}

// Registrations without a block emit events from now on.
inline void StoreEmptyRanges(Replica& replica) {
    for (const auto& one : replica.blocks.managers) one->stores_empty_ranges = true;
}

// Sets the tokens of a request that no hash covers; None: Python hashes them.
inline void SetHashTail(Replica& replica, Int slot, PyObject* tail) {
    Requests& requests = replica.blocks.requests;
    Check(requests.IsLive(slot));
    std::vector<uint8_t> pending;
    if (tail != Py_None) FromPy(tail, &pending);
    Check(pending.size() % 4 == 0 && pending.size() < requests.hash_block_bytes);
    requests.HashOutside(slot, tail == Py_None);
    std::copy(pending.begin(), pending.end(), requests.PendingOf(slot));
    requests.num_pending[slot] = static_cast<uint32_t>(pending.size());
}

// Free blocks, which belong to no request from now on.
inline BlockList TakeBlocks(Core& core, Int count) {
    return Change(core, [&](Replica& replica) {
        BlockList taken;
        PoolOf(replica).Take(count, &taken);
        return taken;
    });
}

// Adds a reference to each block.
inline void TouchBlocks(Core& core, const BlockList& blocks) {
    Change(core, [&](Replica& replica) {
        for (const Block block : blocks) Require(block < replica.spec.num_blocks, "no such block");
        for (const Block block : blocks) PoolOf(replica).Touch(block);
    });
}

inline const Functions& Changes() {
    static const Functions changes{
        Named<EnterEpoch>("enter_epoch"),
        Named<Prepare>("prepare"),
        Named<InstallKeys>("install"),
        Named<LoadImage>("load"),
        Named<TakeEvents>("take_events"),
        Named<TakeTierEvents>("take_tier_events"),
        Named<StoreEmptyRanges>("store_empty_ranges"),
        Named<SetHashTail>("set_hash_tail"),
        Named<TakeBlocks>("take_blocks"),
        Named<TouchBlocks>("touch_blocks"),
        Named<OpenRows>("open"),
        Named<CloseRows>("close"),
        Named<FlushRows>("flush"),
        Named<ExtendRow>("extend"),
        Named<UpdateRow>("update"),
        Named<CacheRow>("change_cache"),
        Named<AddNews>("add"),
        Named<AdmitOneRow>("admit"),
    };
    return changes;
}

}  // namespace kvplane
