// Makes the Python objects of an answer.
#pragma once

#include "convert.h"

namespace kvplane {

// The Python types of the objects in answers.
struct Answers {
    PyObject *part = nullptr, *blocks = nullptr, *orders = nullptr, *events = nullptr, *packed_ints = nullptr;
    PyObject* of_tiers = nullptr;  // names of the columns of orders that a core without tiers leaves empty
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

// Sets a slot of a new object. Takes over the reference.
inline void SetSlot(PyObject* object, PyObject* name, PyObject* value) {
    const Owned owned(value);
    Check(PyObject_SetAttr(object, name, value) == 0);
}
#define SLOT(object, name, value)                                            \
    SetSlot(object, [] {                                                     \
        static PyObject* const interned = PyUnicode_InternFromString(#name); \
        return interned;                                                     \
    }(), value)

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

inline PyObject* ToPy(const Orders& orders) {
    PyObject* made = NewObject(answers.orders);
    SLOT(made, stamp_block, ColumnToPy<uint32_t>(orders.stamp_block));
    SLOT(made, stamp, ColumnToPy<uint64_t>(orders.stamp));
    SLOT(made, copy_src, ColumnToPy<uint32_t>(orders.copy_src));
    SLOT(made, copy_dst, ColumnToPy<uint32_t>(orders.copy_dst));
    SLOT(made, copy_group, ColumnToPy<uint32_t>(orders.copy_group));
    SLOT(made, zero_block, ColumnToPy<uint32_t>(orders.zero_block));
    SLOT(made, zero_group, ColumnToPy<uint32_t>(orders.zero_group));
    for (Py_ssize_t at = 0, count = PyTuple_Size(answers.of_tiers); at < count; ++at)
        SetSlot(made, PyTuple_GetItem(answers.of_tiers, at), PyList_New(0));
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

// Takes the events out of the result. Slots that are not set stand for no entries.
inline PyObject* ToPy(PartResult& result) {
    PyObject* part = NewObject(answers.part);
    SLOT(part, granted, ColumnToPy<uint32_t>(result.granted));
    SLOT(part, preempted, ToPy(result.preempted));
    SLOT(part, admit_status, ColumnToPy<uint32_t>(result.admit_status));
    SLOT(part, admit_hit, ColumnToPy<uint32_t>(result.admit_hit));
    SLOT(part, admit_granted, ColumnToPy<uint32_t>(result.admit_granted));
    SLOT(part, admit_single_group_hit, ColumnToPy<uint32_t>(result.admit_single_group_hit));
    SLOT(part, admit_load_after, ColumnToPy<uint64_t>(result.admit_load_after));
    SLOT(part, peek_hit, ColumnToPy<uint32_t>(result.peek_hit));
    SLOT(part, peek_single_group_hit, ColumnToPy<uint32_t>(result.peek_single_group_hit));
    SLOT(part, num_hashes, ColumnToPy<uint32_t>(result.num_hashes));
    SLOT(part, reset_done, PyBool_FromLong(result.reset_done));
    SLOT(part, free_blocks, ToPy(result.free_blocks));
    SLOT(part, taken_back, ToPy(result.taken_back));
    SLOT(part, went_back, ToPy(result.went_back));
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
