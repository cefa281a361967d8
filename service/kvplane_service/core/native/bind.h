// A replica's core behind a capsule, and what all functions of the module `_native` need.
#pragma once

#include "read_step.h"
#include "replica.h"

namespace kvplane {

constexpr const char* kName = "kvplane.core";

struct Core {
    explicit Core(Spec spec) : replica(std::move(spec)) {}
    Replica replica;
    Step step;  // the last one that was read
    bool has_step = false;
};

inline Core& CoreOf(PyObject* capsule) {
    void* core = PyCapsule_GetPointer(capsule, kName);
    if (core == nullptr) Owned::Fail();
    return *static_cast<Core*>(core);
}

// Runs `body`; a C++ exception becomes a Python one.
template <typename F>
PyObject* Guarded(F&& body) {
    try {
        return body();
    } catch (const Unreadable&) {
        PyErr_SetString(PyExc_ValueError, "a value has another type or range than the core reads");
    } catch (const std::exception& broken) {
        PyErr_SetString(PyExc_AssertionError, broken.what());
    }
    return nullptr;
}

inline void Destroy(PyObject* capsule) { delete static_cast<Core*>(PyCapsule_GetPointer(capsule, kName)); }

}  // namespace kvplane
