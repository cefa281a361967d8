// Functions of the module `_native` that begin and end engine lives.
#pragma once

#include "bind_walk.h"
#include "check/slices.h"
#include "dropping.h"
#include "recovery.h"

namespace kvplane {

constexpr const char* kPool = "kvplane.pool";

inline void DestroyPool(PyObject* capsule) { delete static_cast<BlockPool*>(PyCapsule_GetPointer(capsule, kPool)); }

constexpr Int kEndedRequests = 64;  // of one slice; one of a few hundred blocks takes about 50 us
constexpr Int kEndedSlots = 1024;   // of a tier

// Ends an engine life: releases all requests, and drops the keys that the page memory does not confirm. At each pause
// the invariants hold, and the work may begin again. `most`: blocks of a slice.
inline Slices EndLife(Replica& replica, Shown shown, Int most) {
    BlockPool& pool = replica.blocks.pool;
    Tiers& tiers = replica.blocks.tiers;
    replica.tracker.NoteUnderLoad();
    while (replica.tracker.AbandonSome(kEndedRequests, most)) co_yield Pause();
    pool.retained.Suspend();
    if (pool.index.count() > 0) {
        if (!shown.size && replica.keeps_keys) {
            replica.keeps_keys = false;
            tiers.Clear();  // the only event is that no key is left
            if (replica.spec.events) pool.AddEvent({.kind = kCleared});
        }
        KeyDropper dropper(pool);
        for (Int block = 0; block < pool.num_blocks;) {
            block = replica.keeps_keys ? dropper.DropUnproven(block, most, shown) : dropper.DropAll(block, most);
            co_yield Pause();
        }
        const auto has_key = [&](Block block) { return pool.HasKey(block); };
        const auto count = static_cast<size_t>(most);
        for (bool begins = true; pool.split ? pool.split->PutUnkeyedFirst(begins, count, has_key)
                                            : pool.free.PutUnkeyedFirst(begins, count, has_key);
             begins = false)
            co_yield Pause();
    }
    for (Tier& tier : tiers.each) {
        for (Int last = kNoSlot; tiers.EndEpoch(tier, &last, kEndedSlots, shown);) co_yield Pause();
    }
}

struct EndWalk : Walk {
    EndWalk(PyObject* core_capsule, Core& core, PyObject* stamps, Int most)
        : Walk(core_capsule, core), shown(stamps), work(EndLife(core.replica, Shown{shown.data, shown.size}, most)) {}

    PyObject* Next(Core& core) override {
        return Change(core, [&](Replica&) { return PyBool_FromLong(work.Next()); });
    }

    Buffer<uint64_t> shown;
    Slices work;
};

// begin_end(core, stamps of the memory, blocks of a slice) -> a walk that ends the engine life
inline PyObject* BeginEnd(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Int most = Number(At(arguments, 2));
        Check(most > 0 && most <= kMaxTokens);
        PyObject* const capsule = At(arguments, 0);
        return WalkToPy(std::make_unique<EndWalk>(capsule, CoreOf(capsule), At(arguments, 1), most));
    });
}

// enter_epoch(core, epoch, busy blocks, memory_is_new, stamps of the memory)
inline PyObject* EnterEpoch(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        BlockList busy;
        FromPy(At(arguments, 2), &busy);
        Core& core = CoreOf(At(arguments, 0));
        for (const Block block : busy) Check(block < core.replica.spec.num_blocks);
        const Int epoch = Number(At(arguments, 1));
        Check(epoch >= 0 && epoch < Int{1} << kEpochBits);
        Require(static_cast<uint64_t>(epoch) > core.replica.blocks.pool.epoch, "stamps would repeat");
        const bool memory_is_new = IsTrue(At(arguments, 3));
        const Buffer<uint64_t> shown(At(arguments, 4));
        return Change(core, [&](Replica& replica) {
            replica.EnterEpoch(epoch, busy, memory_is_new, Shown{shown.data, shown.size});
            core.held.Clear();
            return Py_NewRef(Py_None);
        });
    });
}

// prepare(core, (domain, group) by number, number by row, block by row, digests, size of one, key_tokens, stamp,
//         free blocks in the order of eviction, further keys) -> a pool for `install`; runs without the lock
inline PyObject* Prepare(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Spec& spec = CoreOf(At(arguments, 0)).replica.spec;
        const Buffer<uint32_t> pair(At(arguments, 2)), block(At(arguments, 3)), tokens(At(arguments, 6)),
            free(At(arguments, 8));
        const Buffer<uint8_t> digests(At(arguments, 4));
        const Buffer<uint64_t> stamp(At(arguments, 7));
        RecoveredKeys found{{pair.data, pair.size},
                            {block.data, block.size},
                            {digests.data, digests.size},
                            static_cast<size_t>(Number(At(arguments, 5))),
                            {tokens.data, tokens.size},
                            {stamp.data, stamp.size},
                            {free.data, free.size},
                            {},
                            {}};
        FromPy(At(arguments, 1), &found.names);
        FromPy(At(arguments, 9), &found.further);
        const auto num_blocks = static_cast<size_t>(spec.num_blocks);
        Check(pair.size == block.size && digests.size == block.size * found.digest_size &&
              found.digest_size <= kDigestBytes && tokens.size == num_blocks && stamp.size == num_blocks &&
              free.size <= num_blocks);
        std::unique_ptr<BlockPool> pool;
        WithoutLock([&] { pool = MakeRecovered(spec, found); });
        return Capsule(std::move(pool), kPool, DestroyPool);
    });
}

// install(core, pool of `prepare`)
inline PyObject* InstallPool(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        auto* prepared = static_cast<BlockPool*>(PyCapsule_GetPointer(At(arguments, 1), kPool));
        if (prepared == nullptr) Owned::Fail();
        Core& core = CoreOf(At(arguments, 0));
        Check(prepared->num_blocks == core.replica.spec.num_blocks &&
              prepared->keys_of_group.size() == core.replica.spec.groups.size());
        Require(core.replica.blocks.pool.index.count() == 0, "only an unused pool can recover");
        return Change(core, [&](Replica& replica) {
            Install(replica.blocks.pool, *prepared);
            return Py_NewRef(Py_None);
        });
    });
}

// take_events(core) -> the events since the last part, or None
inline PyObject* TakeEvents(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        return Change(CoreOf(At(arguments, 0)),
                      [](Replica& replica) { return EventsToPy(replica.blocks.pool.TakeEvents()); });
    });
}

// store_empty_ranges(core): registrations without a block emit events from now on
inline PyObject* StoreEmptyRanges(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        for (const auto& one : CoreOf(At(arguments, 0)).replica.blocks.managers) one->stores_empty_ranges = true;
        return Py_NewRef(Py_None);
    });
}

}  // namespace kvplane
