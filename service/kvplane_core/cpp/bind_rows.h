// Steps that are applied row by row. A row that is not valid raises Refused, and changes nothing.
#pragma once

#include "bind_reads.h"

namespace kvplane {

inline PyObject* TakeParts(OpenStep& rows) {
    Owned list(PyList_New(static_cast<Py_ssize_t>(rows.finished.size())));
    Py_ssize_t at = 0;
    for (PartResult& part : rows.finished) PyList_SetItem(list.get(), at++, ToPy(part));
    rows.finished.clear();
    return list.Release();
}

// Changes the open step. Throws Refused where `change` returns false.
template <typename F>
void ChangeRows(Core& core, F&& change) {
    if (!Change(core, [&](Replica&) { return change(RowsOf(core)); })) throw Refused{core.rows->refusal()};
}

// Begins a step; returns its number. `records`: `close` returns its rows.
inline Int OpenRows(Core& core, Int executed_through, bool records) {
    if (core.rows == nullptr) core.rows = std::make_unique<OpenStep>(core.replica);
    return Change(core, [&](Replica&) {
        core.rows->Begin(executed_through, records);
        return core.rows->seq();
    });
}

// The columns of a recorded section by name, but those of which every entry is the default.
template <typename Section>
PyObject* ColumnsToPy(const Section& section) {
    Owned columns(PyDict_New());
    for (const auto& column : ColumnsOf(section)) {
        Column entries = section.*column.of;
        if (std::all_of(entries.begin(), entries.end(), [&](Int one) { return one == column.otherwise; })) continue;
        if (column.is_by_row) entries.resize(section.slot.size(), column.otherwise.value_or(0));
        const auto bits = [&] { return ToPy(std::vector<uint64_t>(entries.begin(), entries.end())); };
        const Owned made(column.is_bits() ? bits() : ToPy(entries));
        if (PyDict_SetItemString(columns.get(), column.name, made.get()) != 0) throw Raised();
    }
    return columns.Release();
}

using Recorded = std::vector<RecordedRows>;  // of a closed step, by part
constexpr const char* kRecorded = "kvplane.recorded";

// recorded_rows(recorded): by part, the sections facts, run and admit, and the hashes of the facts. No core is read.
inline PyObject* RecordedToPy(PyObject*, PyObject* capsule) {
    return Guarded([&]() -> PyObject* {
        const auto* recorded = static_cast<Recorded*>(PyCapsule_GetPointer(capsule, kRecorded));
        if (recorded == nullptr) Owned::Fail();
        Owned parts(PyList_New(0));
        for (const auto& [facts, run, admit, hashes] : *recorded)
            Append(parts, Tuple(ColumnsToPy(facts), ColumnsToPy(run), ColumnsToPy(admit), ToPy(hashes)));
        return parts.Release();
    });
}

// (answers that `flush` has not returned, executed_through, what `recorded_rows` takes if rows are recorded, else None)
inline PyObject* CloseRows(Core& core) {
    return Change(core, [&](Replica& replica) {
        OpenStep& rows = RowsOf(core);
        rows.Close();
        PyObject* parts = TakeParts(rows);
        const auto destroy = [](PyObject* one) { delete static_cast<Recorded*>(PyCapsule_GetPointer(one, kRecorded)); };
        PyObject* const recorded =
            rows.recorded.empty()
                ? Py_NewRef(Py_None)
                : Capsule(std::make_unique<Recorded>(std::exchange(rows.recorded, Recorded())), kRecorded, destroy);
        return Tuple(parts, ToPy(PoolOf(replica).executed_through), recorded);
    });
}

// Answers of complete parts that it has not returned before.
inline PyObject* FlushRows(Core& core) {
    return Change(core, [&](Replica&) {
        RowsOf(core).Flush();
        return TakeParts(RowsOf(core));
    });
}

// The answer to a row of a running request: False where it was not applied, None where it was refused, else new blocks.
inline PyObject* GrantedToPy(Granted granted, const OpenStep& rows) {
    switch (granted) {
        case Granted::kLeft:
            return Py_NewRef(Py_False);
        case Granted::kRefused:
            return Py_NewRef(Py_None);
        case Granted::kQuiet:
            return NotNull(PyTuple_New(0));
        default:
            const auto is_empty = [](const BlockList& row) { return row.empty(); };
            const bool none = std::all_of(rows.fresh.begin(), rows.fresh.end(), is_empty);
            return none ? NotNull(PyTuple_New(0)) : ToPy(rows.fresh);
    }
}

// decode_row(core, slot, num_tokens, digests, num_new, lookahead, in_flight): `update` and `extend` of the usual row
inline PyObject* DecodeRow(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    return Guarded([&]() -> PyObject* {
        Check(count == 7);
        const Int slot = Number(arguments[1]), num_tokens = Number(arguments[2]);
        const Growth growth{Number(arguments[4]), Number(arguments[5]), Number(arguments[6])};
        std::vector<uint8_t> joined;
        size_t digest_size = 0;
        Int num_digests = 0;
        if (!ReadDigests(arguments[3], &joined, &digest_size, &num_digests)) Py_RETURN_FALSE;
        const Hashes hashes{joined.data(), joined.size()};
        Core& core = CoreOf(arguments[0]);
        return Change(core, [&](Replica&) {
            OpenStep& rows = RowsOf(core);
            return GrantedToPy(rows.Decode(slot, num_tokens, hashes, digest_size, growth), rows);
        });
    });
}

// Grants tokens to a running request.
inline PyObject* ExtendRow(Core& core, Int slot, Int num_new, Int lookahead, Int in_flight, Int flags, Int reserved) {
    Growth growth{num_new, lookahead, in_flight};
    growth.leave_free = reserved;
    Granted granted = Granted::kLeft;
    ChangeRows(core, [&](OpenStep& rows) {
        granted = rows.Extend(slot, growth, flags);
        return granted != Granted::kLeft;
    });
    return GrantedToPy(granted, *core.rows);
}

// Applies a row of facts; returns the slots that are preempted.
inline Column UpdateRow(Core& core, Int slot, Int computed, Int appended, PyObject* digests, Int commit,
                        Int release_skipped, Int end, Int fence, Int hint) {
    const auto column = [](Int value, Int otherwise) { return value == otherwise ? Column() : Column{value}; };
    Part part;
    std::vector<uint8_t> joined;
    size_t digest_size = 0;
    Int count = 0;
    ReadDigests(digests, &joined, &digest_size, &count);
    part.facts.slot = {slot};
    part.facts.computed = column(computed, kUnchanged);
    part.facts.appended = column(appended, 0);
    if (count) part.facts.num_hashes = {count};
    part.facts.hashes = Hashes{joined.data(), joined.size()};
    part.facts.commit = column(commit, kUnchanged);
    part.facts.release_skipped = column(release_skipped, kUnchanged);
    part.facts.end = column(end, kEndNone);
    part.facts.fence = column(fence, 0);
    part.facts.hint = column(hint, kUnchanged);
    Column preempted;
    ChangeRows(core, [&](OpenStep& rows) { return rows.Update(part, &preempted); });
    return preempted;
}

// Applies a `Cache`; returns (slots that are preempted, reset_done, number of the row's part).
inline std::tuple<Column, bool, Int> CacheRow(Core& core, PyObject* cache) {
    Part part;
    ReadSection(cache, &part.cache);
    Column preempted;
    ChangeRows(core, [&](OpenStep& rows) { return rows.ChangeCache(part, &preempted); });
    return {preempted, core.rows->reset_done(), core.rows->number_of_part()};
}

// Puts a new request into a slot; returns the number of the row's part.
inline Int AddNews(Core& core, PyObject* news) {
    Part part;
    ReadSection(news, &part.news);
    Check(part.news.slot.size() == 1);
    ChangeRows(core, [&](OpenStep& rows) { return rows.Add(part); });
    return core.rows->number_of_part();
}

// Admits a waiting request with the terms of an `AdmitRow`; returns (status, new blocks per group or None).
inline PyObject* AdmitOneRow(Core& core, Int slot, Int num_hit, Int num_new, PyObject* terms) {
    Part part;
    Py_ssize_t at = 0;
    for (const auto& column : ColumnsOf(part.admit)) {
        PyObject* const entry = At(terms, at++);
        uint64_t bits = 0;
        if (column.is_bits()) FromPy(entry, &bits);
        (part.admit.*column.of) = {column.is_bits() ? static_cast<Int>(bits) : Number(entry)};
    }
    part.admit.slot = {slot};
    part.admit.expected_hit = {num_hit};
    part.admit.min_new = {0};
    part.admit.on_refusal = kSkip;
    Int status = 0;
    ChangeRows(core, [&](OpenStep& rows) { return (status = rows.Admit(&part, num_new)) >= 0; });
    return Tuple(ToPy(status), status == kGranted ? ToPy(core.rows->AdmittedBlocks()) : Py_NewRef(Py_None));
}

}  // namespace kvplane
