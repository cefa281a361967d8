// Steps and answers as bytes: a step is read from the message of a session, and its answer is written as one.
#pragma once

#include "bind.h"
#include "effort.h"

namespace kvplane {

// A step that was read from a message, and its numbers that the core has not. It names bytes of the message, which its
// owner keeps.
struct SentStep {
    Step step;
    uint64_t epoch = 0, executed_through = 0, seq = 0;
    Hashes traceparent;
    size_t num_bytes = 0;
    bool is_applied = false;
};

// What is in a step, as bits.
enum SentKind : Int { kSchedules = 1, kBegins = 2, kResumes = 4, kHasKeys = 8 };

inline void Reset(Part* part) {
    EachSection(*part, [](const OtherField&, auto& section) { Reset(&section); });
    part->facts_made.given = part->news_made.given = false;
}

template <typename Section>
bool ReadSection(const Field& field, size_t digest_size, Section* section) {
    return field.kind == kLength && ReadSection(field.bytes, digest_size, section);
}
inline bool ReadSection(const Field& field, size_t, bool* flag) { return ReadValue(field, flag); }
inline bool ReadSection(const Field& field, size_t digest_size, std::optional<Resume>* image) {
    return ReadSection(field, digest_size, &image->emplace());
}

// Reads a part; false for what Python refuses, and names, and for a section that comes twice.
inline bool ReadPart(Hashes message, size_t digest_size, Part* part) {
    Reset(part);
    Fields fields(message);
    uint32_t found = 0;
    for (Field field; fields.Next(&field);) {
        if (field.number > kNumSections) continue;
        if (found & 1u << field.number) return false;
        found |= 1u << field.number;
        bool is_read = true;
        EachSection(*part, [&](const OtherField& one, auto& section) {
            if (one.number == field.number) is_read = ReadSection(field, digest_size, &section);
        });
        if (!is_read) return false;
    }
    return fields.ok;
}

// A part takes two bytes of a message and about 2 KiB here: a step of more parts is read by Python.
constexpr size_t kMostParts = 4096;

inline bool ReadStep(Hashes message, size_t digest_size, SentStep* sent) {
    Step& step = sent->step;
    Fields fields(message);
    size_t num_parts = 0;
    bool more = false;
    Int epoch = 0;
    const auto read = [](const Field& field, Int* number, uint64_t* whole) {
        *whole = field.value;
        return ReadValue(field, SingleNumber{number, 0, 64});
    };
    step.seq = step.part = step.executed_through = 0;
    sent->epoch = sent->seq = sent->executed_through = 0;
    sent->traceparent = Hashes();
    for (Field field; fields.Next(&field);) {
        bool is_read = true;
        switch (field.number) {
            case 1: is_read = read(field, &epoch, &sent->epoch); break;
            case 2: is_read = read(field, &step.seq, &sent->seq); break;
            case 3: is_read = ReadValue(field, SingleNumber{&step.part, 0, 32}); break;
            case 4: is_read = ReadValue(field, &more); break;
            case 5: is_read = read(field, &step.executed_through, &sent->executed_through); break;
            case 6:
                if (num_parts == kMostParts) return false;
                if (num_parts == step.parts.size()) step.parts.emplace_back();
                is_read = field.kind == kLength && ReadPart(field.bytes, digest_size, &step.parts[num_parts++]);
                break;
            case 7: is_read = ReadValue(field, &sent->traceparent) && IsUtf8(field.bytes); break;
        }
        if (!is_read) return false;
    }
    step.parts.resize(num_parts);
    step.last = !more;
    return fields.ok && num_parts > 0;
}

// Reads the message of a session if it has a step and nothing else.
inline bool ReadSent(Hashes message, size_t digest_size, SentStep* sent) {
    constexpr uint32_t kStep = 2;
    Fields fields(message);
    Field field, other;
    if (!fields.Next(&field) || field.number != kStep || field.kind != kLength) return false;
    return !fields.Next(&other) && fields.ok && ReadStep(field.bytes, digest_size, sent);
}

// Rows of a part: entries of columns that have one for each row.
inline Int NumRows(const Part& part) {
    size_t rows = part.facts.slot.size() + part.news.slot.size() + part.run.slot.size() + part.admit.slot.size() +
                  part.peek.slot.size() + part.prefetch.slot.size() + part.run.victims.size() +
                  part.cache.failed_steps.size() + part.cache.evicted.size() + part.cache.released.size() +
                  part.retain.num_hashes.size() + part.peers.gone.size() + part.peers.slot.size();
    if (part.resume) rows += part.resume->slot.size() + part.resume->held_slot.size();
    return static_cast<Int>(std::max<size_t>(1, rows));
}

inline Int KindsOf(const Part& part) {
    return (part.run.slot.empty() && part.admit.slot.empty() ? 0 : kSchedules) |
           (part.news.slot.empty() ? 0 : kBegins) | (part.resume ? kResumes : 0) |
           (part.news.extra_keys.empty() ? 0 : kHasKeys);
}

inline bool RetainsNothing(const Retain& retain) {
    return retain.empty() && !retain.hashes.size && retain.domain.empty() && retain.owner.empty() &&
           retain.priority.empty() && retain.until_ns.empty() && retain.percent.empty();
}

inline bool HasPeers(const Peers& peers) {
    return !peers.slot.empty() || !peers.gone.empty() || !peers.version.empty() || !peers.group.empty() ||
           peers.hashes.size || !peers.domain.empty();
}

// ((number of a part with new requests, their domains), ...)
inline PyObject* DomainsToPy(const Step& step) {
    Owned found(PyList_New(0));
    for (size_t number = 0; number < step.parts.size(); ++number) {
        const News& news = step.parts[number].news;
        if (news.slot.empty()) continue;
        std::set<std::string> domains(news.domain.begin(), news.domain.end());
        if (domains.empty()) domains.emplace();
        Append(found, Tuple(ToPy(static_cast<Int>(number)), ToPy(domains)));
    }
    return found.Release();
}

constexpr const char* kSent = "kvplane.step";

// Steps whose memory is used again.
inline std::vector<std::unique_ptr<SentStep>> spare_steps;

constexpr size_t kMostSpare = 4;

inline void DestroySent(PyObject* capsule) {
    constexpr size_t kMostBytes = 1 << 16, kFewParts = 64;
    std::unique_ptr<SentStep> sent(static_cast<SentStep*>(PyCapsule_GetPointer(capsule, kSent)));
    const bool is_small = sent->num_bytes <= kMostBytes && sent->step.parts.capacity() <= kFewParts;
    if (spare_steps.size() < kMostSpare && is_small) spare_steps.push_back(std::move(sent));
}

inline SentStep& SentOf(PyObject* capsule) {
    void* found = PyCapsule_GetPointer(capsule, kSent);
    if (found == nullptr) Owned::Fail();
    return *static_cast<SentStep*>(found);
}

// read_step(message, digest size) -> (step, epoch, seq, part, whether it is the last, executed_through, traceparent,
// number of parts, rows, token ids, kinds, first part with sections of the service or -1, domains), or None for a
// message that has anything else than a step, or what Python refuses
inline PyObject* ReadSentStep(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    return Guarded([&]() -> PyObject* {
        Check(count == 2);
        constexpr size_t kLong = 1 << 18;
        Hashes message;
        ReadHashes(arguments[0], &message);
        const auto digest_size = static_cast<size_t>(Number(arguments[1]));
        std::unique_ptr<SentStep> sent;
        spare_steps.reserve(kMostSpare);
        if (spare_steps.empty()) {
            sent = std::make_unique<SentStep>();
        } else {
            sent = std::move(spare_steps.back());
            spare_steps.pop_back();
        }
        sent->num_bytes = message.size;
        sent->is_applied = false;
        bool is_read = false;
        const auto read = [&] { is_read = ReadSent(message, digest_size, sent.get()); };
        if (message.size > kLong) {
            WithoutLock(read);
        } else {
            read();
        }
        if (!is_read) return Py_NewRef(Py_None);
        const SentStep& one = *sent;
        const Step& step = one.step;
        Int rows = 0, tokens = 0, kinds = 0, of_service = kNone;
        for (size_t number = step.parts.size(); number-- > 0;) {
            const Part& part = step.parts[number];
            rows += NumRows(part);
            tokens += part.facts.tokens.count + part.news.tokens.count;
            kinds |= KindsOf(part);
            if (!RetainsNothing(part.retain) || HasPeers(part.peers)) of_service = static_cast<Int>(number);
        }
        const Owned capsule(Capsule(std::move(sent), kSent, DestroySent));
        return Tuple(Py_NewRef(capsule.get()), ToPy(one.epoch), ToPy(one.seq), ToPy(step.part),
                     PyBool_FromLong(step.last), ToPy(one.executed_through),
                     ToPy(std::string(reinterpret_cast<const char*>(one.traceparent.data), one.traceparent.size)),
                     ToPy(static_cast<Int>(step.parts.size())), ToPy(rows), ToPy(tokens), ToPy(kinds), ToPy(of_service),
                     DomainsToPy(step));
    });
}

// Whether the counters of the decision log must read the answer to a part.
inline bool IsCounted(const Part& part, const PartResult& result) {
    const auto is_refused = [](Int status) { return status >= kRefused && status <= kNeverFits; };
    return !result.preempted.empty() || std::count(part.facts.end.begin(), part.facts.end.end(), kEndPreempted) ||
           std::any_of(result.admit_status.begin(), result.admit_status.end(), is_refused) ||
           part.cache.hits_checked || !part.cache.mismatched.empty() ||
           (result.tiers != nullptr && !result.tiers->retained.hit.empty());
}

// Writes the result of the last step, as a session's answer and a decision have it.
inline void WriteResult(const Core& core, WrittenEvents events, Backward* into) {
    const size_t end = into->size();
    into->Number(4, static_cast<uint64_t>(core.replica.blocks.pool.executed_through));
    for (size_t number = core.results.size(); number-- > 0;) {
        const size_t behind = into->size();
        Write(core.results[number], into, events);
        into->EndMessage(3, behind);
    }
    into->Number(2, static_cast<uint64_t>(core.step.part));
    into->Number(1, static_cast<uint64_t>(core.step.seq));
    into->EndMessage(2, end);
}

// Writes the answer, and takes the events out of the results: (message, per part its events, per part those of tiers,
// whether counters must read it, last published step).
inline PyObject* AnswerToBytes(Core& core, bool with_events) {
    const Step& step = core.step;
    Backward& into = core.answer;
    into.Clear();
    WriteResult(core, with_events ? kOfAnswer : kNoEvents, &into);
    core.held.Release(step.executed_through);
    const auto num_parts = static_cast<Py_ssize_t>(core.results.size());
    const Owned events(PyTuple_New(num_parts)), of_tiers(PyTuple_New(num_parts));
    bool is_counted = false;
    for (Py_ssize_t number = 0; number < num_parts; ++number) {
        PartResult& result = core.results[static_cast<size_t>(number)];
        core.held.Add(step.seq, &result.events);
        is_counted |= IsCounted(step.parts[static_cast<size_t>(number)], result);
        PyTuple_SetItem(events.get(), number, DeviceEventsToPy(result));
        PyTuple_SetItem(of_tiers.get(), number, TierEventsToPy(result));
    }
    return Tuple(ToBytes(into.data(), into.size()), Py_NewRef(events.get()), Py_NewRef(of_tiers.get()),
                 PyBool_FromLong(is_counted),
                 ToPy(core.replica.blocks.pool.executed_through));
}

}  // namespace kvplane
