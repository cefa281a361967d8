// Returns decisions and events, packed.
#pragma once

#include "bind_bytes.h"

namespace kvplane {

// Whether the entries of all lists are known, of which only a step that was read from a message has those that are
// only counted.
inline bool HasEntries(const News& news) {
    return std::cmp_equal(news.num_extra_keys, news.extra_keys.size()) &&
           std::cmp_equal(news.num_traceparents, news.traceparent.size());
}

// What a decision has besides its step and result.
inline void Write(const PartResult& result, Backward* into) {
    into->Number(4, static_cast<uint64_t>(result.went_back));
    into->Number(3, static_cast<uint64_t>(result.taken_back));
    WriteRows(result.hashed_news, into, 2);
    WriteRows(result.hashed_facts, into, 1);
}

// The message of a step, without its tokens. `object`: the step as Python has it.
inline void WriteStep(const Step& step, PyObject* object, Backward* into) {
    const size_t end = into->size();
    std::string trace;
    FromPy(ATTRIBUTE(object, "traceparent").get(), &trace);
    if (!trace.empty()) into->Bytes(7, trace.data(), trace.size());
    for (size_t number = step.parts.size(); number-- > 0;) WriteWhole(step.parts[number], into, 6);
    into->Number(5, static_cast<uint64_t>(step.executed_through));
    into->Number(4, static_cast<uint64_t>(!step.last));
    into->Number(3, static_cast<uint64_t>(step.part));
    into->Number(2, static_cast<uint64_t>(step.seq));
    into->Number(1, static_cast<uint64_t>(Number(ATTRIBUTE(object, "epoch").get())));
    into->EndMessage(1, end);
}

// Bytes of a message behind others.
inline PyObject* Behind(const std::vector<uint8_t>& head, const Backward& message) {
    Owned bytes(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(head.size() + message.size())));
    auto* const into = reinterpret_cast<uint8_t*>(PyBytes_AsString(bytes.get()));
    if (!head.empty()) std::memcpy(into, head.data(), head.size());
    if (message.size()) std::memcpy(into + head.size(), message.data(), message.size());
    return bytes.Release();
}

// pack_applied(head, core, step) -> `head`, and the `Decision` about the step that was applied last behind it; None if
// the core does not know all of it
inline PyObject* PackApplied(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    return Guarded([&]() -> PyObject* {
        Check(count == 3);
        std::vector<uint8_t> head;
        FromPy(arguments[0], &head);
        Core& core = CoreOf(arguments[1]);
        const Step& step = core.step;
        Require(core.applied == arguments[2], "another step was applied");
        if (!std::all_of(step.parts.begin(), step.parts.end(), [](const Part& part) { return HasEntries(part.news); }))
            Py_RETURN_NONE;
        Backward& into = core.answer;
        into.Clear();
        for (size_t number = core.results.size(); number-- > 0;) WriteWhole(core.results[number], &into, 3);
        WriteResult(core, kOfRecord, &into);
        WriteStep(step, arguments[2], &into);
        return Behind(head, into);
    });
}

// pack_events(head, [(events, share, medium)]) -> `head`, and those events behind it, as `SubscribeResponse` has them
inline PyObject* PackEvents(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        constexpr uint32_t kOfBatch = 3;
        std::vector<uint8_t> head;
        FromPy(At(arguments, 0), &head);
        Backward into;
        std::vector<PyObject*> shares;
        ForEach(At(arguments, 1), [&](PyObject* one) { shares.push_back(one); });
        for (auto one = shares.rbegin(); one != shares.rend(); ++one) {
            const auto share = static_cast<Share>(Number(At(*one, 1)));
            WriteEvents(EventsOf(At(*one, 0)), share, Number(At(*one, 2)), &into, kOfBatch);
        }
        return Behind(head, into);
    });
}

// removals(events) -> removed keys by the number of the reason
inline PyObject* Removals(PyObject*, PyObject* events) {
    return Guarded([&]() -> PyObject* {
        Column counts(kLeftWindow + 1, 0);
        for (const CacheEvents::Row& row : EventsOf(events).rows) {
            if (row.kind == kRemoved) counts[static_cast<size_t>(row.reason)] += static_cast<Int>(row.count);
        }
        return ToPy(counts);
    });
}

}  // namespace kvplane
