// A replica's core behind a capsule, and what all functions of the module `_native` need.
#pragma once

#include <atomic>
#include <thread>

#include "answers.h"
#include "open_step.h"
#include "read_step.h"
#include "step.h"
#include "wire_messages.h"

namespace kvplane {

// The blocks whose STORED events the service holds, since the step that stored them is not executed: what
// `PublicationHold.step_packed` (replicas/events.py) must know. It may name too many blocks, and none too few.
class HeldBlocks {
  public:
    static constexpr size_t kMostHashes = 4096;  // of a part's events; more are packed in pieces, by Python

    explicit HeldBlocks(Int num_blocks) : num_blocks_(num_blocks) {}

    void Clear() {
        for (const auto& [step, blocks] : steps_) Mark(blocks, false);
        steps_.clear();
    }

    // Releases what executed steps have stored.
    void Release(Int executed_through) {
        bool released = false;
        for (; !steps_.empty() && steps_.front().first <= executed_through; steps_.pop_front()) {
            Mark(steps_.front().second, false);
            released = true;
        }
        for (auto one = steps_.begin(); released && one != steps_.end(); ++one) Mark(one->second, true);
    }

    // Takes the events of a part in their order, and notes what they need.
    void Add(Int step, CacheEvents* events) {
        if (events->empty()) return;
        if (is_held_.empty()) is_held_.resize(static_cast<size_t>(num_blocks_), false);
        BlockList stored;
        auto at = events->blocks.begin();
        for (const CacheEvents::Row& row : events->rows) {
            const auto end = at + static_cast<std::ptrdiff_t>(row.count);
            if (row.kind == kStored) {
                events->has_stored = true;
                stored.insert(stored.end(), at, end);
                for (; at != end; ++at) is_held_[*at] = true;
            } else {
                events->has_others = true;
                events->needs_hold |= row.kind == kCleared;
                for (; at != end; ++at) events->needs_hold |= is_held_[*at];
            }
        }
        events->needs_hold |= events->hashes.size() > kMostHashes;
        if (!stored.empty()) steps_.emplace_back(step, std::move(stored));
    }

  private:
    void Mark(const BlockList& blocks, bool held) {
        for (const Block block : blocks) is_held_[block] = held;
    }

    const Int num_blocks_;
    std::vector<bool> is_held_;
    std::deque<std::pair<Int, BlockList>> steps_;
};

constexpr const char* kName = "kvplane.core";

struct Core {
    explicit Core(Spec spec) : replica(std::move(spec)), held(replica.spec.num_blocks) {}
    Replica replica;
    PyObject* capsule = nullptr;     // which owns this
    std::unique_ptr<OpenStep> rows;  // of an engine that applies its steps row by row
    Step step;                       // the last one that was read
    std::vector<PartResult> results;
    PyObject* applied = nullptr;               // the Python step of `step` and `results`; not owned
    bool is_message = false;                   // `step` was read from a message
    Backward answer;                           // the memory in which answers are written
    std::unique_ptr<StepValidator> of_nobody;  // checks parts for a replica without requests
    HeldBlocks held;
    bool is_broken = false;  // a change has failed in its middle
    uint64_t changes = 0;    // number of changes that began
    std::atomic<bool> works_alone = false;  // a thread without the interpreter's lock changes the state
};

struct HalfChanged {};

inline PyObject* refused_type = nullptr;  // a Python exception, with the values of `reasons.Refusal`

// The core of a capsule, once no thread changes it. The interpreter's lock, which the caller has until it returns to
// Python, then keeps other threads from the core. The state may be half changed: counts of it may be read, no more.
inline Core& AnyCoreOf(PyObject* capsule) {
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

// As AnyCoreOf, of a core whose state is whole.
inline Core& CoreOf(PyObject* capsule) {
    Core& core = AnyCoreOf(capsule);
    if (core.is_broken) throw HalfChanged();
    return core;
}

// Changes a core, and returns an answer. Where that fails, the core has a state that no step leaves, and is not used
// any more.
template <typename F>
auto Change(Core& core, F&& change) {
    ++core.changes;
    try {
        return change(core.replica);
    } catch (...) {
        core.is_broken = true;
        throw;
    }
}

// Runs `work`, which touches nothing of Python, without the interpreter's lock. Raises what it raises, with the lock.
template <typename F>
void WithoutLock(F&& work) {
    std::exception_ptr error;
    PyThreadState* const thread = PyEval_SaveThread();
    try {
        work();
    } catch (...) {
        error = std::current_exception();
    }
    PyEval_RestoreThread(thread);
    if (error) std::rethrow_exception(error);
}

// Does that with `work` on a core, which other threads wait for.
template <typename F>
void WorkAlone(Core& core, F&& work) {
    struct Alone {
        explicit Alone(Core& one) : core(one) { core.works_alone = true; }
        ~Alone() {
            core.works_alone = false;
            core.works_alone.notify_all();
        }
        Core& core;
    } const alone(core);
    WithoutLock(work);
}

inline void RaiseHalfChanged() {
    try {
        const Owned errors(PyImport_ImportModule("kvplane.base.errors"));
        const Owned type(PyObject_GetAttrString(errors.get(), "InternalError"));
        const std::string what = "an earlier call failed in the middle of a change of the replica";
        const Owned arguments(Tuple(ToPy(what)));
        const Owned named(PyDict_New()), remedy(ToPy(std::string("register the replica again, or load its state")));
        Check(PyDict_SetItemString(named.get(), "remedy", remedy.get()) == 0);
        const Owned error(PyObject_Call(type.get(), arguments.get(), named.get()));
        PyErr_SetObject(type.get(), error.get());
    } catch (const Unreadable&) {
        PyErr_SetString(PyExc_AssertionError, "the state is half changed");
    } catch (const Raised&) {
    }
}

inline void RaiseRefused(const Refusal& refusal) {
    const Owned values(Tuple(ToPy(std::string(refusal.reason)), ToPy(refusal.part), ToPy(std::string(refusal.column)),
                             ToPy(refusal.row), ToPy(refusal.values)));
    PyErr_SetObject(refused_type, values.get());
}

// Runs `body`; a C++ exception becomes a Python one.
template <typename F>
PyObject* Guarded(F&& body) {
    try {
        return body();
    } catch (const Raised&) {
    } catch (const Unreadable&) {
        PyErr_SetString(PyExc_ValueError, "a value has another type or range than the core reads");
    } catch (const Refused& refused) {
        RaiseRefused(refused.refusal);
    } catch (const HalfChanged&) {
        RaiseHalfChanged();
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::exception& broken) {
        PyErr_SetString(PyExc_AssertionError, broken.what());
    }
    return nullptr;
}

constexpr Int kManyBlocks = 1 << 16;  // whose memory takes more than a millisecond to return

// Deletes the core of a capsule whose last reference is gone, a large one on a thread: it refers to no Python object.
inline void Destroy(PyObject* capsule) {
    auto* const core = static_cast<Core*>(PyCapsule_GetPointer(capsule, kName));
    if (core->replica.spec.num_blocks < kManyBlocks) return delete core;
    try {
        std::thread([core] { delete core; }).detach();
    } catch (const std::system_error&) {  // there can be no more threads
        delete core;
    }
}

}  // namespace kvplane
