// Functions of the module `_native` that begin and end engine lives.
#pragma once

#include "bind.h"
#include "dropping.h"
#include "recovery.h"

namespace kvplane {

constexpr const char* kPool = "kvplane.pool";

inline void DestroyPool(PyObject* capsule) { delete static_cast<BlockPool*>(PyCapsule_GetPointer(capsule, kPool)); }

// abandon(core, begins, most requests, most blocks) -> whether requests are left to release
inline PyObject* Abandon(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Core& core = CoreOf(At(arguments, 0));
        const bool begins = IsTrue(At(arguments, 1));
        const Int most = Number(At(arguments, 2)), most_blocks = Number(At(arguments, 3));
        Check(most > 0 && most_blocks > 0);
        return Change(core, [&](Replica& replica) {
            if (begins) replica.tracker.NoteUnderLoad();
            const bool has_more = replica.tracker.AbandonSome(most, most_blocks);
            if (!has_more) replica.blocks.pool.retained.Suspend();
            return PyBool_FromLong(has_more);
        });
    });
}

// drop_keys(core, first, count, stamps of the memory or None) -> the block to go on with
inline PyObject* DropKeys(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Core& core = CoreOf(At(arguments, 0));
        const Int first = Number(At(arguments, 1)), count = Number(At(arguments, 2));
        Check(first >= 0 && first <= core.replica.spec.num_blocks && count > 0 && count <= kMaxTokens);
        std::optional<Buffer<uint64_t>> shown;
        if (At(arguments, 3) != Py_None) shown.emplace(At(arguments, 3));
        return Change(core, [&](Replica& replica) {
            KeyDropper dropper(replica.blocks.pool);
            return ToPy(shown ? dropper.DropUnproven(first, count, Shown{shown->data, shown->size})
                              : dropper.DropAll(first, count));
        });
    });
}

// put_unkeyed_first(core, begins, count) -> whether blocks are left
inline PyObject* PutUnkeyedFirst(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Core& core = CoreOf(At(arguments, 0));
        const bool begins = IsTrue(At(arguments, 1));
        const Int count = Number(At(arguments, 2));
        Check(count > 0);
        return Change(core, [&](Replica& replica) {
            BlockPool& pool = replica.blocks.pool;
            const auto has_key = [&](Block block) { return pool.HasKey(block); };
            const auto most = static_cast<size_t>(count);
            return PyBool_FromLong(pool.split ? pool.split->PutUnkeyedFirst(begins, most, has_key)
                                              : pool.free.PutUnkeyedFirst(begins, most, has_key));
        });
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
