// Returns decisions and events, packed.
#pragma once

#include "bind.h"
#include "pack_layouts.h"

namespace kvplane {

// About how many bytes a part and its result take, packed.
inline size_t BytesToPack(const Part& part, const PartResult& result) {
    constexpr size_t kOthers = 1 << 10;
    const size_t of_events = result.answered ? 32 * result.answered->hashes.size() : 0;
    const size_t hashes = part.facts.hashes.size + part.news.hashes.size + part.prefetch.hashes.size +
                          part.peers.hashes.size + part.retain.hashes.size + result.hashed_facts.hashes.size() +
                          result.hashed_news.hashes.size() + of_events;
    const size_t blocks = result.new_blocks.ids.size() + result.tables.ids.size() + result.peek_blocks.ids.size();
    const size_t jobs = result.tiers ? sizeof(uint64_t) * result.tiers->orders.num_values() : 0;
    return hashes + 4 * blocks + jobs + kOthers;
}

// Whether the entries of all lists are known, of which only a step that was read from a message has those that are
// only counted.
inline bool HasEntries(const News& news) {
    return std::cmp_equal(news.num_extra_keys, news.extra_keys.size()) &&
           std::cmp_equal(news.num_traceparents, news.traceparent.size());
}

// pack_applied(core, step, at_ns, took_ns) -> the decision about the step that was applied last, packed; None if the
// core does not know all of it
inline PyObject* PackApplied(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    return Guarded([&]() -> PyObject* {
        Check(count == 4);
        const Core& core = CoreOf(arguments[0]);
        PyObject* const object = arguments[1];
        const Step& step = core.step;
        Require(core.applied == object, "another step was applied");
        if (!std::all_of(step.parts.begin(), step.parts.end(), [](const Part& part) { return HasEntries(part.news); }))
            Py_RETURN_NONE;
        std::vector<Frame> parts;
        for (size_t number = 0; number < step.parts.size(); ++number) {
            const PartResult& result = core.results[number];
            const size_t num_bytes = BytesToPack(step.parts[number], result);
            Frame frame = Packed(kPartScalars, kPartFields, step.parts[number], num_bytes);
            frame.AddFrame(kOfResult, Packed(kPartResultScalars, kPartResultFields, result, num_bytes));
            if (result.answered != nullptr) {
                EventColumns events;
                events.Add(*result.answered, kAllEvents);
                frame.AddFrame(kOfEvents, events.Packed());
            }
            if (const auto& image = step.parts[number].resume)
                frame.AddFrame(kOfResume, Packed(kResumeScalars, kResumeFields, *image, num_bytes));
            parts.push_back(std::move(frame));
        }
        std::string trace;
        FromPy(ATTRIBUTE(object, "traceparent").get(), &trace);
        std::vector<uint64_t> numbers = {static_cast<uint64_t>(Number(ATTRIBUTE(object, "epoch").get()))};
        for (const Int value : {step.seq, step.part, Int{step.last}, step.executed_through, step.seq, step.part,
                                core.replica.blocks.pool.executed_through, Number(arguments[2])})
            numbers.push_back(static_cast<uint64_t>(value));
        std::array<uint8_t, 8> head;
        Frame whole(std::accumulate(parts.begin(), parts.end(), size_t{256}, [](size_t sum, const Frame& one) {
            return sum + one.size();
        }));
        whole.AddColumn(0, numbers);
        whole.AddRaw(1, reinterpret_cast<const uint8_t*>(trace.data()), trace.size());
        whole.AddFrames(2, parts);
        auto took = static_cast<uint64_t>(Number(arguments[3]));
        for (size_t at = head.size(); at-- > 0; took >>= 8) head[at] = static_cast<uint8_t>(took);
        return whole.ToBytes(head.data(), head.size());
    });
}

// pack_events(head, [(events, share, medium)]) -> `head`, and those events behind it, packed
inline PyObject* PackEvents(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        std::vector<uint8_t> head;
        FromPy(At(arguments, 0), &head);
        EventColumns columns;
        ForEach(At(arguments, 1), [&](PyObject* one) {
            columns.Add(EventsOf(At(one, 0)), static_cast<Share>(Number(At(one, 1))), Number(At(one, 2)));
        });
        return columns.Packed().ToBytes(head.data(), head.size());
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
