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
        InFlightTracker& tracker = CoreOf(At(arguments, 0)).replica.tracker;
        if (IsTrue(At(arguments, 1))) tracker.NoteUnderLoad();
        return PyBool_FromLong(tracker.AbandonSome(Number(At(arguments, 2)), Number(At(arguments, 3))));
    });
}

// drop_keys(core, first, count, stamps of the memory or None) -> the block to go on with
inline PyObject* DropKeys(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        KeyDropper dropper(CoreOf(At(arguments, 0)).replica.blocks.pool);
        const Int first = Number(At(arguments, 1)), count = Number(At(arguments, 2));
        if (At(arguments, 3) == Py_None) return ToPy(dropper.DropAll(first, count));
        const Buffer<uint64_t> shown(At(arguments, 3));
        return ToPy(dropper.DropUnproven(first, count, Shown{shown.data, shown.size}));
    });
}

// put_unkeyed_first(core, begins, count) -> whether blocks are left
inline PyObject* PutUnkeyedFirst(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        BlockPool& pool = CoreOf(At(arguments, 0)).replica.blocks.pool;
        const auto has_key = [&](Block block) { return pool.HasKey(block); };
        const auto count = static_cast<size_t>(Number(At(arguments, 2)));
        return PyBool_FromLong(pool.free.PutUnkeyedFirst(IsTrue(At(arguments, 1)), count, has_key));
    });
}

// enter_epoch(core, epoch, busy blocks, memory_is_new)
inline PyObject* EnterEpoch(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        BlockList busy;
        FromPy(At(arguments, 2), &busy);
        Replica& replica = CoreOf(At(arguments, 0)).replica;
        for (const Block block : busy) Check(block < replica.spec.num_blocks);
        replica.EnterEpoch(Number(At(arguments, 1)), busy, IsTrue(At(arguments, 3)));
        Py_RETURN_NONE;
    });
}

// prepare(core, (domain, group) by number, number by row, block by row, digests, size of one, key_tokens, stamp,
//         following blocks in the free list, further keys) -> a pool for `install`; runs without the interpreter's lock
inline PyObject* Prepare(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Spec& spec = CoreOf(At(arguments, 0)).replica.spec;
        const Buffer<uint32_t> pair(At(arguments, 2)), block(At(arguments, 3)), tokens(At(arguments, 6)),
            following(At(arguments, 8));
        const Buffer<uint8_t> digests(At(arguments, 4));
        const Buffer<uint64_t> stamp(At(arguments, 7));
        RecoveredKeys found{{pair.data, pair.size},
                            {block.data, block.size},
                            {digests.data, digests.size},
                            static_cast<size_t>(Number(At(arguments, 5))),
                            {tokens.data, tokens.size},
                            {stamp.data, stamp.size},
                            {following.data, following.size},
                            {},
                            {}};
        FromPy(At(arguments, 1), &found.names);
        FromPy(At(arguments, 9), &found.further);
        const auto num_blocks = static_cast<size_t>(spec.num_blocks);
        Check(pair.size == block.size && digests.size == block.size * found.digest_size &&
              found.digest_size <= kDigestBytes && tokens.size == num_blocks && stamp.size == num_blocks &&
              following.size == num_blocks + 1);
        PyThreadState* const thread = PyEval_SaveThread();
        std::unique_ptr<BlockPool> pool;
        std::string fault;
        try {
            pool = MakeRecovered(spec, found);
        } catch (const std::exception& broken) {
            fault = broken.what();
        }
        PyEval_RestoreThread(thread);
        Require(pool != nullptr, fault.c_str());
        return PyCapsule_New(pool.release(), kPool, DestroyPool);
    });
}

// install(core, pool of `prepare`)
inline PyObject* InstallPool(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        auto* prepared = static_cast<BlockPool*>(PyCapsule_GetPointer(At(arguments, 1), kPool));
        if (prepared == nullptr) Owned::Fail();
        Install(CoreOf(At(arguments, 0)).replica.blocks.pool, *prepared);
        Py_RETURN_NONE;
    });
}

// take_events(core) -> the events since the last part, or None
inline PyObject* TakeEvents(PyObject*, PyObject* arguments) {
    return Guarded(
        [&]() -> PyObject* { return EventsToPy(CoreOf(At(arguments, 0)).replica.blocks.pool.TakeEvents()); });
}

// add_cleared(core): appends the event that no key is left
inline PyObject* AddCleared(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        CoreOf(At(arguments, 0)).replica.blocks.pool.AddEvent({.kind = kCleared});
        Py_RETURN_NONE;
    });
}

// store_empty_ranges(core): registrations without a block emit events from now on
inline PyObject* StoreEmptyRanges(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        for (const auto& one : CoreOf(At(arguments, 0)).replica.blocks.managers) one->stores_empty_ranges = true;
        Py_RETURN_NONE;
    });
}

}  // namespace kvplane
