// Functions of the module `_native` that check the state of a core.
#pragma once

#include "bind_walk.h"
#include "check/check.h"

namespace kvplane {

struct CheckWalk : Walk {
    CheckWalk(PyObject* core_capsule, Core& core) : Walk(core_capsule, core), check(core.replica) {}

    PyObject* Next(Core&) override {
        try {
            return PyBool_FromLong(check.Next());
        } catch (const BrokenInvariant& broken) {
            return Tuple(ToPy(broken.name), ToPy(broken.text));
        }
    }

    StateCheck check;
};

// begin_check(core) -> a walk over its state
inline PyObject* BeginCheck(PyObject*, PyObject* capsule) {
    return Guarded([&]() -> PyObject* { return WalkToPy(std::make_unique<CheckWalk>(capsule, CoreOf(capsule))); });
}

}  // namespace kvplane
