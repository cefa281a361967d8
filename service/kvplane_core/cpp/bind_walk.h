// Work on the state of a core in slices, for the module `_native`: checks, images and ends of engine lives.
#pragma once

#include "bind.h"

namespace kvplane {

constexpr const char* kWalk = "kvplane.walk";

struct Walk {
    Walk(PyObject* core_capsule, Core& core) : capsule(Py_NewRef(core_capsule)), changes(core.changes) {}
    virtual ~Walk() = default;
    virtual PyObject* Next(Core& core) = 0;

    Owned capsule;  // of the core
    uint64_t changes;
};

inline PyObject* WalkToPy(std::unique_ptr<Walk> walk) {
    const auto destroy = [](PyObject* one) { delete static_cast<Walk*>(PyCapsule_GetPointer(one, kWalk)); };
    return Capsule(std::move(walk), kWalk, destroy);
}

// advance(walk) -> of an image its next bytes, None behind the last ones; of other walks whether work is left, or of a
// check (violated invariant, what contradicts it)
// The interpreter's lock is kept: to get it back can take longer than a slice.
inline PyObject* Advance(PyObject*, PyObject* capsule) {
    return Guarded([&]() -> PyObject* {
        auto* const walk = static_cast<Walk*>(PyCapsule_GetPointer(capsule, kWalk));
        if (walk == nullptr) Owned::Fail();
        Core& core = CoreOf(walk->capsule.get());
        // What changes may have freed is not read.
        Require(core.changes == walk->changes, "the state changed during a walk over it");
        PyObject* const found = walk->Next(core);
        walk->changes = core.changes;
        return found;
    });
}

}  // namespace kvplane
