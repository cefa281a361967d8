// Functions of the module `_native` that check the state of a core.
#pragma once

#include "bind.h"
#include "check/check.h"

namespace kvplane {

constexpr const char* kWalk = "kvplane.check";

struct Walk {
    Owned capsule;  // of the core
    uint64_t changes;
    StateCheck check;
};

// begin_check(core) -> a walk over its state
inline PyObject* BeginCheck(PyObject*, PyObject* capsule) {
    return Guarded([&]() -> PyObject* {
        const Core& core = CoreOf(capsule);
        const auto destroy = [](PyObject* one) { delete static_cast<Walk*>(PyCapsule_GetPointer(one, kWalk)); };
        std::unique_ptr<Walk> walk(new Walk{Owned(Py_NewRef(capsule)), core.changes, StateCheck(core.replica)});
        return Capsule(std::move(walk), kWalk, destroy);
    });
}

// check(walk) -> whether work is left, after a slice of it, or (violated invariant, what contradicts it)
// The interpreter's lock is kept: to get it back can take longer than a slice.
inline PyObject* CheckSlice(PyObject*, PyObject* capsule) {
    return Guarded([&]() -> PyObject* {
        auto* const walk = static_cast<Walk*>(PyCapsule_GetPointer(capsule, kWalk));
        if (walk == nullptr) Owned::Fail();
        // What changes may have freed is not read.
        Require(CoreOf(walk->capsule.get()).changes == walk->changes, "the state changed during a check of it");
        try {
            return PyBool_FromLong(walk->check.Next());
        } catch (const BrokenInvariant& broken) {
            return Tuple(ToPy(broken.name), ToPy(broken.text));
        }
    });
}

}  // namespace kvplane
