// Reads the columns of a Python `Step`.
#pragma once

#include "answers.h"

namespace kvplane {

// An attribute of a Python object.
#define ATTRIBUTE(object, name) Owned(PyObject_GetAttr(object, NAME(name)))
#define COLUMN(object, section, field) ReadColumn(ATTRIBUTE(object, #field).get(), &(section).field)

inline bool IsTrue(PyObject* object) {
    const int truth = PyObject_IsTrue(object);
    Check(truth >= 0);
    return truth == 1;
}

inline Int Count(PyObject* object) {
    const Py_ssize_t count = PySequence_Size(object);
    Check(count >= 0);
    return count;
}

inline Int Number(PyObject* object) {
    Int value = 0;
    FromPy(object, &value);
    return value;
}

inline void ReadHashes(PyObject* object, Hashes* hashes) {
    char* data = nullptr;
    Py_ssize_t size = 0;
    Check(PyBytes_AsStringAndSize(object, &data, &size) == 0);
    *hashes = Hashes{reinterpret_cast<const uint8_t*>(data), static_cast<size_t>(size)};
}

// Reads token ids, counts them, and tells whether each is a u32.
inline void ReadTokens(PyObject* object, std::vector<uint8_t>* ids, Int* count, bool* fit) {
    *fit = true;
    *count = Count(object);
    if (*count == 0) return ids->clear();
    if (ReadArrayOfU32(object, ids)) return;  // each entry is an id
    Column tokens;
    ReadColumn(object, &tokens);
    *fit = std::all_of(tokens.begin(), tokens.end(), [](Int one) { return 0 <= one && one <= kUnlimited; });
    ids->resize(4 * tokens.size());
    for (size_t at = 0; at < tokens.size(); ++at) {
        const auto id = static_cast<uint32_t>(tokens[at]);
        std::memcpy(ids->data() + 4 * at, &id, sizeof id);
    }
}

inline void ReadFacts(PyObject* object, Facts* facts) {
    COLUMN(object, *facts, slot);
    COLUMN(object, *facts, computed);
    COLUMN(object, *facts, appended);
    COLUMN(object, *facts, num_hashes);
    COLUMN(object, *facts, commit);
    COLUMN(object, *facts, end);
    COLUMN(object, *facts, fence);
    COLUMN(object, *facts, release_skipped);
    COLUMN(object, *facts, hint);
    ReadTokens(ATTRIBUTE(object, "tokens").get(), &facts->tokens, &facts->num_tokens, &facts->tokens_fit);
    ReadHashes(ATTRIBUTE(object, "hashes").get(), &facts->hashes);
}

inline void ReadCache(PyObject* object, Cache* cache) {
    COLUMN(object, *cache, failed_steps);
    COLUMN(object, *cache, evicted);
    COLUMN(object, *cache, released);
    COLUMN(object, *cache, loads_over);
    cache->reset = IsTrue(ATTRIBUTE(object, "reset").get());
    COLUMN(object, *cache, jobs_done);
    COLUMN(object, *cache, jobs_failed);
    COLUMN(object, *cache, costs_ns);
    COLUMN(object, *cache, mismatched);
    cache->hits_checked = Number(ATTRIBUTE(object, "hits_checked").get());
    cache->jobs_before = Number(ATTRIBUTE(object, "jobs_before").get());
}

inline void ReadNews(PyObject* object, News* news) {
    COLUMN(object, *news, slot);
    if (news->slot.empty()) news->request_id.clear(), news->domain.clear();
    COLUMN(object, *news, num_tokens);
    COLUMN(object, *news, num_hashes);
    COLUMN(object, *news, skip_reading);
    COLUMN(object, *news, max_tokens);
    COLUMN(object, *news, hint);
    FromPy(ATTRIBUTE(object, "request_id").get(), &news->request_id);
    FromPy(ATTRIBUTE(object, "domain").get(), &news->domain);
    news->num_extra_keys = Count(ATTRIBUTE(object, "extra_keys").get());
    news->num_traceparents = Count(ATTRIBUTE(object, "traceparent").get());
    ReadTokens(ATTRIBUTE(object, "tokens").get(), &news->tokens, &news->num_token_ids, &news->tokens_fit);
    ReadHashes(ATTRIBUTE(object, "hashes").get(), &news->hashes);
}

inline void ReadRun(PyObject* object, Run* run) {
    COLUMN(object, *run, slot);
    COLUMN(object, *run, extra);
    COLUMN(object, *run, cap);
    COLUMN(object, *run, lookahead);
    COLUMN(object, *run, in_flight);
    COLUMN(object, *run, flags);
    COLUMN(object, *run, victims);
    COLUMN(object, *run, reserved);
    run->on_refusal = Number(ATTRIBUTE(object, "on_refusal").get());
}

inline void ReadAdmit(PyObject* object, Admit* admit) {
    COLUMN(object, *admit, slot);
    COLUMN(object, *admit, extra);
    COLUMN(object, *admit, cap);
    COLUMN(object, *admit, lookahead);
    COLUMN(object, *admit, external);
    COLUMN(object, *admit, expected_hit);
    COLUMN(object, *admit, encoder_tokens);
    COLUMN(object, *admit, reserved);
    COLUMN(object, *admit, watermark);
    COLUMN(object, *admit, flags);
    COLUMN(object, *admit, hit_limit);
    COLUMN(object, *admit, min_new);
    COLUMN(object, *admit, single_group_hit);
    FromPy(ATTRIBUTE(object, "skip_zero_groups").get(), &admit->skip_zero_groups);
    admit->max_running = Number(ATTRIBUTE(object, "max_running").get());
    admit->on_refusal = Number(ATTRIBUTE(object, "on_refusal").get());
    admit->only_if_no_preemption = IsTrue(ATTRIBUTE(object, "only_if_no_preemption").get());
}

inline void ReadPeek(PyObject* object, Peek* peek) {
    COLUMN(object, *peek, slot);
    COLUMN(object, *peek, limit);
    peek->with_blocks = IsTrue(ATTRIBUTE(object, "with_blocks").get());
}

inline void ReadPrefetch(PyObject* object, Prefetch* prefetch) {
    COLUMN(object, *prefetch, slot);
    COLUMN(object, *prefetch, num_hashes);
    COLUMN(object, *prefetch, within_ns);
    FromPy(ATTRIBUTE(object, "domain").get(), &prefetch->domain);
    ReadHashes(ATTRIBUTE(object, "hashes").get(), &prefetch->hashes);
}

inline void ReadRetain(PyObject* object, Retain* retain) {
    COLUMN(object, *retain, num_hashes);
    COLUMN(object, *retain, priority);
    COLUMN(object, *retain, until_ns);
    COLUMN(object, *retain, percent);
    COLUMN(object, *retain, now_ns);
    FromPy(ATTRIBUTE(object, "domain").get(), &retain->domain);
    FromPy(ATTRIBUTE(object, "owner").get(), &retain->owner);
    ReadHashes(ATTRIBUTE(object, "hashes").get(), &retain->hashes);
}

inline void ReadBudget(PyObject* object, Budget* budget) {
    budget->tokens = Number(ATTRIBUTE(object, "tokens").get());
    budget->input = Number(ATTRIBUTE(object, "input").get());
    budget->overhead = Number(ATTRIBUTE(object, "overhead").get());
}

// Reads a field of a part. One that the part lacks has its default (`kvplane.base.when_read`), and is not made.
template <typename T, typename Read>
void ReadField(const Owned& fields, PyObject* name, T* value, Read&& read) {
    PyObject* found = PyDict_GetItemWithError(fields.get(), name);
    if (found != nullptr) {
        const Owned field(Py_NewRef(found));
        read(field.get(), value);
    } else {
        Check(PyErr_Occurred() == nullptr);
        *value = T();
    }
}
#define FIELD(fields, section, name, read) ReadField(fields, NAME(#name), &(section).name, read)

// Reads the rows of a decode step, which are still the bytes of their message (`kvplane.base.decode_rows`).
inline void ReadRows(PyObject* object, Part* part) {
    Facts& facts = part->facts;
    Run& run = part->run;
    facts = Facts();
    run.cap.clear(), run.lookahead.clear(), run.in_flight.clear(), run.flags.clear();
    run.victims.clear(), run.reserved.clear();
    run.on_refusal = kPreempt;
    ReadColumn(ATTRIBUTE(object, "slots").get(), &run.slot);
    Hashes message;
    ReadHashes(ATTRIBUTE(object, "message").get(), &message);
    const auto num_tokens = static_cast<size_t>(Number(ATTRIBUTE(object, "num_tokens").get()));
    const auto tokens_at = static_cast<size_t>(Number(ATTRIBUTE(object, "tokens_at").get()));
    const auto num_extra = static_cast<size_t>(Number(ATTRIBUTE(object, "num_extra").get()));
    Check(tokens_at <= message.size && num_tokens <= (message.size - tokens_at) / 4 && num_extra <= message.size / 4);
    if (IsTrue(ATTRIBUTE(object, "appended").get())) {
        facts.slot = run.slot;
        facts.appended.assign(run.slot.size(), 1);
        facts.num_tokens = static_cast<Int>(num_tokens);
        facts.tokens.assign(message.data + tokens_at, message.data + tokens_at + 4 * num_tokens);
        COLUMN(object, facts, num_hashes);
        ReadHashes(ATTRIBUTE(object, "hashes").get(), &facts.hashes);
    }
    COLUMN(object, part->cache, jobs_done);
    run.extra.resize(num_extra);
    const uint8_t* const extra = message.data + message.size - 4 * num_extra;
    for (size_t row = 0; row < num_extra; ++row) {
        int32_t value = 0;
        std::memcpy(&value, extra + 4 * row, sizeof value);
        run.extra[row] = value;
    }
}

inline void ReadPart(PyObject* object, Part* part, bool* resumes) {
    Owned fields(PyObject_GenericGetDict(object, nullptr));
    PyObject* packed = PyDict_GetItemWithError(fields.get(), NAME("_packed"));
    Check(PyErr_Occurred() == nullptr);
    if (packed != nullptr && reinterpret_cast<PyObject*>(Py_TYPE(packed)) != answers.rows) {
        ATTRIBUTE(object, "facts");  // makes the fields
        packed = nullptr;
    }
    const auto read_flag = [](PyObject* field, bool* flag) { *flag = IsTrue(field); };
    if (packed == nullptr) FIELD(fields, *part, facts, ReadFacts);
    FIELD(fields, *part, cache, ReadCache);
    FIELD(fields, *part, news, ReadNews);
    if (packed == nullptr) FIELD(fields, *part, run, ReadRun);
    FIELD(fields, *part, admit, ReadAdmit);
    FIELD(fields, *part, peek, ReadPeek);
    FIELD(fields, *part, prefetch, ReadPrefetch);
    FIELD(fields, *part, retain, ReadRetain);
    FIELD(fields, *part, budget, ReadBudget);
    FIELD(fields, *part, with_hashes, read_flag);
    FIELD(fields, *part, with_tables, read_flag);
    bool resumed = false;
    ReadField(fields, NAME("resume"), &resumed, [](PyObject* field, bool* flag) { *flag = field != Py_None; });
    *resumes |= resumed;
    if (packed != nullptr) ReadRows(packed, part);
    part->facts_made.given = part->news_made.given = false;
}

inline void ReadStep(PyObject* object, Step* step, bool* resumes) {
    step->seq = Number(ATTRIBUTE(object, "seq").get());
    step->part = Number(ATTRIBUTE(object, "part").get());
    step->executed_through = Number(ATTRIBUTE(object, "executed_through").get());
    step->last = IsTrue(ATTRIBUTE(object, "last").get());
    const Owned parts = ATTRIBUTE(object, "parts");
    step->parts.resize(static_cast<size_t>(Count(parts.get())));
    size_t number = 0;
    ForEach(parts.get(), [&](PyObject* part) { ReadPart(part, &step->parts[number++], resumes); });
}

}  // namespace kvplane
