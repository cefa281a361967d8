// Makes the Python objects of an answer.
#pragma once

#include "convert.h"

namespace kvplane {

// The Python types of the objects in answers.
struct Answers {
    PyObject *step = nullptr, *part = nullptr, *blocks = nullptr, *orders = nullptr, *events = nullptr;
    PyObject *packed_ints = nullptr, *tier_events = nullptr, *declined = nullptr, *event = nullptr;
    PyObject *prefetched = nullptr, *retained = nullptr;
    PyObject* hashed = nullptr;
    PyObject *kinds = nullptr, *reasons = nullptr, *device = nullptr;  // values in events; of the first two by number
};
inline Answers answers;

constexpr size_t kShortColumn = 24;  // entries up to which a list is made in less time than an array

// A column of an answer of the numbers that `number_at` returns: a list, or an array of u32 or u64 that reads like one.
template <typename Stored, typename NumberAt>
PyObject* ColumnToPy(size_t count, NumberAt&& number_at, size_t short_column = kShortColumn) {
    if (count <= short_column) {
        Owned list(PyList_New(static_cast<Py_ssize_t>(count)));
        for (size_t at = 0; at < count; ++at)
            PyList_SetItem(list.get(), static_cast<Py_ssize_t>(at), ToPy(number_at(at)));
        return list.Release();
    }
    const Owned bytes(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count * sizeof(Stored))));
    auto* const into = reinterpret_cast<Stored*>(PyBytes_AsString(bytes.get()));
    for (size_t at = 0; at < count; ++at) into[at] = static_cast<Stored>(number_at(at));
    static PyObject* const codes[] = {PyUnicode_FromString("I"), PyUnicode_FromString("Q")};
    PyObject* const code = codes[sizeof(Stored) == 8];
    return NotNull(PyObject_CallFunctionObjArgs(answers.packed_ints, code, bytes.get(), nullptr));
}
template <typename Stored, typename T>
PyObject* ColumnToPy(const std::vector<T>& column, size_t short_column = kShortColumn) {
    return ColumnToPy<Stored>(column.size(), [&](size_t at) { return column[at]; }, short_column);
}

// Sets an attribute of a new object, without the checks of its class. Takes over the reference.
inline void SetAttribute(PyObject* object, PyObject* name, PyObject* value) {
    const Owned owned(value);
    Check(PyObject_GenericSetAttr(object, name, value) == 0);
}
#define SLOT(object, name, value) SetAttribute(object, NAME(#name), value)

inline PyObject* NewObject(PyObject* type) {
    return NotNull(PyType_GenericNew(reinterpret_cast<PyTypeObject*>(type), nullptr, nullptr));
}

constexpr size_t kFewBlocks = 4;  // up to which a client is faster with lists than with arrays

inline PyObject* ToPy(const BlockLists& lists) {
    PyObject* blocks = NewObject(answers.blocks);
    const size_t most = lists.row.size() > kFewBlocks ? 0 : kShortColumn;
    SLOT(blocks, row, ColumnToPy<uint32_t>(lists.row, most));
    SLOT(blocks, group, ColumnToPy<uint32_t>(lists.group, most));
    SLOT(blocks, count, ColumnToPy<uint32_t>(lists.count, most));
    SLOT(blocks, ids, ColumnToPy<uint32_t>(lists.ids, most));
    return blocks;
}

// Sets a column that has entries. One that is not set has none (`kvplane.base.when_read`).
template <typename Stored, typename T>
void SetColumn(PyObject* object, PyObject* name, const std::vector<T>& column) {
    if (!column.empty()) SetAttribute(object, name, ColumnToPy<Stored>(column));
}

// The Python string of the name of each column.
template <typename Section>
const std::vector<PyObject*>& NamesOf(const Section& section) {
    static const std::vector<PyObject*> names = [&] {
        std::vector<PyObject*> made;
        for (const auto& column : ColumnsOf(section)) made.push_back(PyUnicode_InternFromString(column.name));
        return made;
    }();
    return names;
}

// Sets the columns that have entries.
template <typename Section>
void SetColumns(PyObject* object, const Section& from) {
    const auto* name = NamesOf(from).data();
    for (const auto& column : ColumnsOf(from)) {
        const Column& entries = from.*column.of;
        if (column.is_wide()) {
            SetColumn<uint64_t>(object, *name, entries);
        } else {
            SetColumn<uint32_t>(object, *name, entries);
        }
        ++name;
    }
}

// An object with the columns of a table.
template <typename Table>
PyObject* TableToPy(PyObject* type, const Table& table) {
    PyObject* const made = NewObject(type);
    const auto* name = NamesOf(table).data();
    for (const auto& column : ColumnsOf(table)) SetAttribute(made, *name++, ColumnToPy<uint64_t>(table.*column.of));
    return made;
}

// Sets the columns of jobs, which the core keeps as rows.
template <const auto& kColumns, size_t N>
void SetJobs(PyObject* object, const JobOrders::Rows<N>& rows) {
    static_assert(N == std::size(kColumns));
    static const std::vector<PyObject*> names = [] {
        std::vector<PyObject*> interned;
        for (const JobColumn& one : kColumns) interned.push_back(PyUnicode_InternFromString(one.name));
        return interned;
    }();
    for (size_t column = 0; column < N && !rows.empty(); ++column) {
        const auto number_at = [&](size_t row) { return static_cast<uint64_t>(rows[row][column]); };
        const bool is_wide = kColumns[column].is_wide;
        SetAttribute(object, names[column], is_wide ? ColumnToPy<uint64_t>(rows.size(), number_at)
                                                    : ColumnToPy<uint32_t>(rows.size(), number_at));
    }
}

// `tiers`: has the orders for movers; null = none.
inline PyObject* ToPy(const Orders& orders, const TierAnswer* tiers) {
    PyObject* made = NewObject(answers.orders);
    static const std::vector<PyObject*> names = [&] {
        std::vector<PyObject*> interned;
        EachColumn(orders, [&](const char* one, const auto&) { interned.push_back(PyUnicode_InternFromString(one)); });
        return interned;
    }();
    const auto* name = names.data();
    EachColumn(orders, [&]<typename T>(const char*, const std::vector<T>& column) {
        SetColumn<T>(made, *name++, column);
    });
    if (tiers != nullptr) {
        SetJobs<kLoadColumns>(made, tiers->orders.load);
        SetJobs<kSaveColumns>(made, tiers->orders.save);
        SetJobs<kMoveColumns>(made, tiers->orders.move);
    }
    return made;
}

// A tuple of `count` values, which `make` makes one after another.
template <typename Make>
PyObject* ToTuple(size_t count, Make&& make) {
    Owned tuple(PyTuple_New(static_cast<Py_ssize_t>(count)));
    for (size_t at = 0; at < count; ++at) PyTuple_SetItem(tuple.get(), static_cast<Py_ssize_t>(at), make());
    return tuple.Release();
}

// A list of `CacheEvent`.
inline PyObject* ToPy(const CacheEvents& events) {
    Owned list(PyList_New(static_cast<Py_ssize_t>(events.rows.size())));
    auto hash = events.hashes.begin();
    auto block = events.blocks.begin();
    auto start = events.starts.begin();
    Py_ssize_t at = 0;
    for (const CacheEvents::Row& row : events.rows) {
        // Events of tiers have no positions.
        const size_t starts = row.kind == kStored && !events.starts.empty() ? row.count : 0;
        PyObject* const event = NewObject(answers.event);
        PyList_SetItem(list.get(), at++, event);
        SLOT(event, kind, Py_NewRef(At(answers.kinds, row.kind)));
        SLOT(event, group, ToPy(row.group));
        SLOT(event, parent, row.parent_size ? ToBytes((hash++)->data(), row.parent_size) : ToBytes(nullptr, 0));
        SLOT(event, hashes, ToTuple(row.count, [&] { return ToBytes((hash++)->data(), row.hash_size); }));
        SLOT(event, blocks, ToTuple(row.count, [&] { return ToPy(*block++); }));
        SLOT(event, domain, ToPy(row.kind == kCleared ? std::string() : events.names[row.name]));
        SLOT(event, block_size, ToPy(row.block_size));
        SLOT(event, slot, ToPy(row.slot));
        SLOT(event, start, ToPy(row.start));
        SLOT(event, end, ToPy(row.end));
        SLOT(event, block_starts, ToTuple(starts, [&] { return ToPy(*start++); }));
        SLOT(event, reason, Py_NewRef(At(answers.reasons, row.reason)));
        SLOT(event, tier, Py_NewRef(answers.device));
    }
    return list.Release();
}

constexpr const char* kEvents = "kvplane.events";

using Told = std::shared_ptr<const CacheEvents>;

inline void DestroyEvents(PyObject* capsule) { delete static_cast<Told*>(PyCapsule_GetPointer(capsule, kEvents)); }

inline PyObject* EventsToPy(const Told& events) {
    return Capsule(std::make_unique<Told>(events), kEvents, DestroyEvents);
}

// None, or a capsule.
inline PyObject* EventsToPy(CacheEvents events) {
    if (events.empty()) return Py_NewRef(Py_None);
    return EventsToPy(std::make_shared<const CacheEvents>(std::move(events)));
}

inline const CacheEvents& EventsOf(PyObject* capsule) {
    const auto* events = static_cast<Told*>(PyCapsule_GetPointer(capsule, kEvents));
    if (events == nullptr) Owned::Fail();
    return **events;
}

// The events of a part, which are taken out of its result; an empty tuple if there are none.
inline PyObject* DeviceEventsToPy(PartResult& result) {
    if (result.events.empty()) return PyTuple_New(0);
    result.answered = std::make_shared<const CacheEvents>(std::move(result.events));
    result.events = CacheEvents();
    const CacheEvents& given = *result.answered;
    PyObject* events = NewObject(answers.events);
    SLOT(events, _packed, EventsToPy(result.answered));
    SLOT(events, marks, ToPy(Int{given.has_stored} | Int{given.has_others} << 1 | Int{given.needs_hold} << 2));
    return events;
}
inline PyObject* TierEventsToPy(PartResult& result) {
    if (result.tiers == nullptr || result.tiers->events.empty()) return PyTuple_New(0);
    Owned runs(PyList_New(0));
    for (auto& [medium, events] : result.tiers->events)
        Append(runs, Tuple(ToPy(medium), EventsToPy(std::move(events))));
    PyObject* packed = NewObject(answers.tier_events);
    SLOT(packed, _runs, runs.Release());
    return packed;
}

inline void SetTiers(PyObject* part, const TierAnswer& tiers) {
    if (!tiers.declined.row.empty()) SLOT(part, declined, TableToPy(answers.declined, tiers.declined));
    if (!tiers.prefetched.hit.empty()) SLOT(part, prefetched, TableToPy(answers.prefetched, tiers.prefetched));
    if (!tiers.retained.hit.empty() || !tiers.retained.next_end_ns.empty())
        SLOT(part, retained, TableToPy(answers.retained, tiers.retained));
}

inline PyObject* ToPy(const Hashed& hashed) {
    PyObject* made = NewObject(answers.hashed);
    SLOT(made, counts, ColumnToPy<uint32_t>(hashed.num_hashes));
    SLOT(made, joined, ToPy(hashed.hashes));
    SLOT(made, size, ToPy(hashed.digest_size));
    return made;
}

// Takes the events out of the result.
inline PyObject* ToPy(PartResult& result) {
    PyObject* part = NewObject(answers.part);
    SetColumns(part, result);
    if (!result.preempted.empty()) SLOT(part, preempted, ToPy(result.preempted));  // a queue: always a list
    if (result.reset_done) SLOT(part, reset_done, Py_NewRef(Py_True));
    SLOT(part, free_blocks, ToPy(result.free_blocks));
    if (result.taken_back) SLOT(part, taken_back, ToPy(result.taken_back));
    if (result.went_back) SLOT(part, went_back, ToPy(result.went_back));
    if (!result.last_hash.empty()) SLOT(part, last_hash, ToPy(result.last_hash));
    if (!result.new_blocks.row.empty()) SLOT(part, new_blocks, ToPy(result.new_blocks));
    if (!result.tables.row.empty()) SLOT(part, tables, ToPy(result.tables));
    if (!result.peek_blocks.row.empty()) SLOT(part, peek_blocks, ToPy(result.peek_blocks));
    const bool has_jobs = result.tiers != nullptr && !result.tiers->orders.empty();
    if (has_jobs || !result.orders.empty()) SLOT(part, orders, ToPy(result.orders, result.tiers.get()));
    if (result.tiers != nullptr) SetTiers(part, *result.tiers);
    const Hashed &of_facts = result.hashed_facts, &of_news = result.hashed_news;
    if (!of_facts.num_hashes.empty()) SLOT(part, hashed_facts, ToPy(of_facts));
    if (!of_news.num_hashes.empty()) SLOT(part, hashed_news, ToPy(of_news));
    if (result.tiers != nullptr && !result.tiers->events.empty()) SLOT(part, tier_events, TierEventsToPy(result));
    if (!result.events.empty()) SLOT(part, events, DeviceEventsToPy(result));
    return part;
}

}  // namespace kvplane
