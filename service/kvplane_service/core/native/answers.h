// Makes the Python objects of an answer.
#pragma once

#include "convert.h"

namespace kvplane {

// The Python types of the objects in answers.
struct Answers {
    PyObject *part = nullptr, *blocks = nullptr, *orders = nullptr, *events = nullptr, *packed_ints = nullptr;
};
inline Answers answers;

constexpr size_t kShortColumn = 24;  // entries up to which a list is made in less time than an array

// A column of an answer: a list, or an array of u32 or u64 that reads like one.
template <typename Stored, typename T>
PyObject* ColumnToPy(const std::vector<T>& column) {
    if (column.size() <= kShortColumn) return ToPy(column);
    const Owned bytes(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(column.size() * sizeof(Stored))));
    auto* into = reinterpret_cast<Stored*>(PyBytes_AsString(bytes.get()));
    std::transform(column.begin(), column.end(), into, [](T value) { return static_cast<Stored>(value); });
    static PyObject* const codes[] = {PyUnicode_FromString("I"), PyUnicode_FromString("Q")};
    PyObject* const code = codes[sizeof(Stored) == 8];
    return NotNull(PyObject_CallFunctionObjArgs(answers.packed_ints, code, bytes.get(), nullptr));
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

inline PyObject* ToPy(const BlockLists& lists) {
    PyObject* blocks = NewObject(answers.blocks);
    SLOT(blocks, row, ColumnToPy<uint32_t>(lists.row));
    SLOT(blocks, group, ColumnToPy<uint32_t>(lists.group));
    SLOT(blocks, count, ColumnToPy<uint32_t>(lists.count));
    SLOT(blocks, ids, ColumnToPy<uint32_t>(lists.ids));
    return blocks;
}

// Sets a column that has entries. One that is not set has none (`kvplane.base.when_read`).
template <typename Stored, typename T>
void SetColumn(PyObject* object, PyObject* name, const std::vector<T>& column) {
    if (!column.empty()) SetAttribute(object, name, ColumnToPy<Stored>(column));
}
#define ENTRIES(object, from, name) SetColumn<uint32_t>(object, NAME(#name), (from).name)

inline PyObject* ToPy(const Orders& orders) {
    PyObject* made = NewObject(answers.orders);
    ENTRIES(made, orders, stamp_block);
    SetColumn<uint64_t>(made, NAME("stamp"), orders.stamp);
    ENTRIES(made, orders, copy_src);
    ENTRIES(made, orders, copy_dst);
    ENTRIES(made, orders, copy_group);
    ENTRIES(made, orders, zero_block);
    ENTRIES(made, orders, zero_group);
    return made;
}

// A list with a tuple per event.
inline PyObject* ToPy(const CacheEvents& events) {
    Owned list(PyList_New(static_cast<Py_ssize_t>(events.rows.size())));
    const uint8_t* byte = events.bytes.data();
    auto block = events.blocks.begin();
    auto start = events.starts.begin();
    Py_ssize_t at = 0;
    for (const CacheEvents::Row& row : events.rows) {
        const auto count = static_cast<std::ptrdiff_t>(row.count), starts = row.kind == kStored ? count : 0;
        PyObject* parent = ToBytes(byte, row.parent_size);
        PyObject* hashes = ToBytes(byte + row.parent_size, row.count * row.hash_size);
        PyList_SetItem(
            list.get(), at++,
            Tuple(ToPy(Int{row.kind}), ToPy(row.group), hashes, ToPy(row.hash_size),
                  ToPy(BlockList(block, block + count)),
                  ToPy(row.kind == kCleared ? std::string() : events.names[row.name]), parent, ToPy(row.block_size),
                  ToPy(row.slot), ToPy(row.start), ToPy(row.end), ToPy(Column(start, start + starts)),
                  ToPy(Int{row.reason})));
        byte += row.parent_size + row.count * row.hash_size;
        block += count;
        start += starts;
    }
    return list.Release();
}

constexpr const char* kEvents = "kvplane.events";

inline void DestroyEvents(PyObject* capsule) {
    delete static_cast<CacheEvents*>(PyCapsule_GetPointer(capsule, kEvents));
}

// None, or a capsule.
inline PyObject* EventsToPy(CacheEvents events) {
    if (events.empty()) return Py_NewRef(Py_None);
    return Capsule(std::make_unique<CacheEvents>(std::move(events)), kEvents, DestroyEvents);
}

// Takes the events out of the result.
inline PyObject* ToPy(PartResult& result) {
    PyObject* part = NewObject(answers.part);
    ENTRIES(part, result, granted);
    if (!result.preempted.empty()) SLOT(part, preempted, ToPy(result.preempted));
    ENTRIES(part, result, admit_status);
    ENTRIES(part, result, admit_hit);
    ENTRIES(part, result, admit_granted);
    ENTRIES(part, result, admit_single_group_hit);
    SetColumn<uint64_t>(part, NAME("admit_load_after"), result.admit_load_after);
    ENTRIES(part, result, peek_hit);
    ENTRIES(part, result, peek_single_group_hit);
    ENTRIES(part, result, num_hashes);
    if (result.reset_done) SLOT(part, reset_done, Py_NewRef(Py_True));
    SLOT(part, free_blocks, ToPy(result.free_blocks));
    if (result.taken_back) SLOT(part, taken_back, ToPy(result.taken_back));
    if (result.went_back) SLOT(part, went_back, ToPy(result.went_back));
    if (!result.last_hash.empty()) SLOT(part, last_hash, ToPy(result.last_hash));
    if (!result.new_blocks.row.empty()) SLOT(part, new_blocks, ToPy(result.new_blocks));
    if (!result.tables.row.empty()) SLOT(part, tables, ToPy(result.tables));
    if (!result.peek_blocks.row.empty()) SLOT(part, peek_blocks, ToPy(result.peek_blocks));
    if (!result.orders.empty()) SLOT(part, orders, ToPy(result.orders));
    if (!result.events.empty()) {
        PyObject* events = NewObject(answers.events);
        SLOT(events, _packed, EventsToPy(std::move(result.events)));
        SLOT(part, events, events);
    }
    return part;
}

}  // namespace kvplane
