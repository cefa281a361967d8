// A replica's core behind a capsule, and what all functions of the module `_native` need.
#pragma once

#include <atomic>

#include "answers.h"
#include "read_step.h"
#include "replica.h"

namespace kvplane {

constexpr const char* kName = "kvplane.core";

struct Core {
    explicit Core(Spec spec) : replica(std::move(spec)) {}
    Replica replica;
    Step step;  // the last one that was read
    std::vector<PartResult> results;
    bool has_step = false;
    std::atomic<bool> works_alone = false;  // a thread without the interpreter's lock changes the state
};

// The core of a capsule, once no thread changes it. The interpreter's lock, which the caller has until it returns to
// Python, then keeps other threads from the core.
inline Core& CoreOf(PyObject* capsule) {
    void* found = PyCapsule_GetPointer(capsule, kName);
    if (found == nullptr) Owned::Fail();
    Core& core = *static_cast<Core*>(found);
    while (core.works_alone) {
        PyThreadState* const thread = PyEval_SaveThread();
        core.works_alone.wait(true);
        PyEval_RestoreThread(thread);
    }
    return core;
}

// Runs `work` on the core without the interpreter's lock, and raises what it raises with the lock. `work` touches
// nothing of Python.
template <typename F>
void WorkAlone(Core& core, F&& work) {
    std::exception_ptr error;
    core.works_alone = true;
    PyThreadState* const thread = PyEval_SaveThread();
    try {
        work();
    } catch (...) {
        error = std::current_exception();
    }
    core.works_alone = false;
    core.works_alone.notify_all();
    PyEval_RestoreThread(thread);
    if (error) std::rethrow_exception(error);
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
