// The answer to a step of one part, and the block tables that it extends: the compiled twins of `decoded` in
// kvplane/wire/stream.py and of `BlockTables._append` in kvplane/session/tables.py, which specify them.
#pragma once

#include "columns.h"
#include "messages.h"

namespace {

struct Span {
    const uint8_t* at = nullptr;
    size_t size = 0;
};

// Reads the fields of a protobuf message in the order of their numbers, as encoders write them. `ok` is false after
// anything else: the caller then leaves the message to protobuf, which knows all that is valid, and what is wrong.
class Fields {
   public:
    explicit Fields(Span message) : at_(message.at), end_(message.at + message.size) {}

    bool ok = true;
    uint32_t number = 0;
    uint64_t value = 0;  // of a varint
    Span bytes;          // of a field with a length

    bool Next() {
        if (!ok || at_ == end_) return false;
        const uint64_t tag = Varint();
        const auto kind = tag & 7;
        ok = ok && (tag >> 3) > number && tag >> 3 <= 1000 && (kind == 0 || kind == 2);
        if (!ok) return false;
        number = static_cast<uint32_t>(tag >> 3);
        bytes = {};
        value = Varint();
        if (ok && kind == 2) {
            ok = value <= static_cast<uint64_t>(end_ - at_);
            bytes = {at_, ok ? static_cast<size_t>(value) : 0};
            at_ += bytes.size;
        }
        return ok;
    }

    // The varint of the field that was read last; not ok if it is a field with a length, or has more bits.
    uint64_t Number(int bits) {
        ok = ok && bytes.at == nullptr && (bits == 64 || value >> bits == 0);
        return value;
    }

    // The bytes of the field that was read last; not ok if it is a varint.
    Span Bytes() {
        ok = ok && bytes.at != nullptr;
        return bytes;
    }

   private:
    uint64_t Varint() {
        uint64_t read = 0;
        for (int shift = 0; shift < 64; shift += 7) {
            if (at_ == end_ || (shift == 63 && *at_ > 1)) break;
            read |= static_cast<uint64_t>(*at_ & 0x7f) << shift;
            if (*at_++ < 0x80) return read;
        }
        ok = false;
        return 0;
    }

    const uint8_t *at_, *end_;
};

// Whether each column has as many entries as the first one of its table, or none, and no value above its highest.
bool AreWhole(const Span* found, const Column* columns, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        const auto& [name, number, width, first, highest] = columns[i];
        const size_t entries = found[i].size / width;
        if (found[i].size % width) return false;
        if (entries && first != kAny && entries != found[first].size / columns[first].width) return false;
        for (size_t at = 0; highest && at < found[i].size; at += width) {
            if (Read<uint32_t>(found[i].at + at) > highest) return false;
        }
    }
    return true;
}

// Take the field that was read last as a column; false if none has its number.
bool Take(Fields* fields, const Column* columns, size_t count, Span* found) {
    for (size_t i = 0; i < count; ++i) {
        if (columns[i].number != fields->number) continue;
        found[i] = fields->Bytes();
        return true;
    }
    return false;
}

// Read the columns of a section. Returns false unless it has no other fields and each has its number of entries.
bool ReadColumns(Span section, const Column* columns, size_t count, Span* found) {
    Fields fields(section);
    while (fields.Next()) {
        if (!Take(&fields, columns, count, found)) return false;
    }
    return fields.ok && AreWhole(found, columns, count);
}

bool ReadBlocks(Span section, Span* found) {
    if (!ReadColumns(section, kBlocks, kNumBlocks, found)) return false;
    uint64_t ids = 0;
    for (size_t at = 0; at < found[2].size; at += 4) ids += Read<uint32_t>(found[2].at + at);
    return ids * 4 == found[3].size;
}

constexpr uint32_t kPreempted = 2;  // a column that is read to a list, which this does not do

struct Answer {
    uint64_t seq = 0, part = 0, published_through = 0, free_blocks = 0;
    Span columns[kNumPartResult], blocks[kNumBlocks], tables[kNumBlocks], orders[kNumOrders];
};

bool ReadPart(Span message, Answer* answer) {
    Fields fields(message);
    while (fields.Next()) {
        bool is_read = true;
        switch (fields.number) {
            case 7: is_read = ReadBlocks(fields.Bytes(), answer->blocks); break;
            case 8: is_read = ReadBlocks(fields.Bytes(), answer->tables); break;
            case 15: is_read = ReadColumns(fields.Bytes(), kOrders, kNumOrders, answer->orders); break;
            case 16: answer->free_blocks = fields.Number(32); break;
            case kPreempted: return false;
            default: is_read = Take(&fields, kPartResult, kNumPartResult, answer->columns);
        }
        if (!is_read) return false;
    }
    return fields.ok && AreWhole(answer->columns, kPartResult, kNumPartResult);
}

// Read the result of a step of one part, which has nothing but grants, admissions, blocks and orders.
bool ReadResult(Span message, Answer* answer) {
    Fields outer(message);
    if (!outer.Next() || outer.number != 2) return false;
    Fields fields(outer.Bytes());
    bool has_part = false;
    while (fields.Next()) {
        if (fields.number == 1) answer->seq = fields.Number(64);
        if (fields.number == 2) answer->part = fields.Number(32);
        if (fields.number == 3) {
            has_part = ReadPart(fields.Bytes(), answer);
            if (!has_part) return false;
        }
        if (fields.number == 4) answer->published_through = fields.Number(64);
        if (fields.number > 4) return false;
    }
    return has_part && fields.ok && outer.ok && !outer.Next() && outer.ok;
}

// Return an array of the column's elements, made by `type`; None without any.
PyObject* ArrayOf(PyObject* type, Span column, size_t width) {
    if (column.size == 0) Py_RETURN_NONE;
    return PyObject_CallFunction(type, "sy#", width == 4 ? "I" : "Q", reinterpret_cast<const char*>(column.at),
                                 static_cast<Py_ssize_t>(column.size));
}

bool PutNew(PyObject* dict, const char* name, PyObject* value) {
    const bool is_put = value != nullptr && PyDict_SetItemString(dict, name, value) == 0;
    Py_XDECREF(value);
    return is_put;
}

// Return the columns that have entries, as a dict by name.
PyObject* ColumnsOf(PyObject* type, const Span* found, const Column* columns, size_t count) {
    PyObject* made = PyDict_New();
    for (size_t i = 0; made != nullptr && i < count; ++i) {
        if (found[i].size == 0 || PutNew(made, columns[i].name, ArrayOf(type, found[i], columns[i].width))) continue;
        Py_CLEAR(made);
    }
    return made;
}

// read_answer(message, type of arrays) -> (seq, part, published_through, fields of the part, of its new blocks, of its
// tables, of its orders), or None
PyObject* ReadAnswer(PyObject*, PyObject* arguments) {
    const char* raw;
    Py_ssize_t size;
    PyObject* type;
    if (!PyArg_ParseTuple(arguments, "y#O:read_answer", &raw, &size, &type)) return nullptr;
    Answer answer;
    if (!ReadResult({reinterpret_cast<const uint8_t*>(raw), static_cast<size_t>(size)}, &answer)) Py_RETURN_NONE;
    PyObject* made[] = {
        ColumnsOf(type, answer.columns, kPartResult, kNumPartResult),
        ColumnsOf(type, answer.blocks, kBlocks, kNumBlocks),
        ColumnsOf(type, answer.tables, kBlocks, kNumBlocks),
        ColumnsOf(type, answer.orders, kOrders, kNumOrders),
    };
    bool is_made = made[0] != nullptr &&
                   PutNew(made[0], "free_blocks", PyLong_FromUnsignedLongLong(answer.free_blocks));
    for (PyObject* each : made) is_made = is_made && each != nullptr;
    if (!is_made) {
        for (PyObject* each : made) Py_XDECREF(each);
        return nullptr;
    }
    return Py_BuildValue("KKKNNNN", static_cast<unsigned long long>(answer.seq),
                         static_cast<unsigned long long>(answer.part),
                         static_cast<unsigned long long>(answer.published_through), made[0], made[1], made[2],
                         made[3]);
}

// -- Block tables ----------------------------------------------------------------

// A column of u32 whose memory is held.
class Held {
   public:
    explicit Held(PyObject* column) {
        is_held_ = PyObject_GetBuffer(column, &view_, PyBUF_SIMPLE) == 0;
        if (is_held_ && view_.itemsize != 4) PyErr_SetString(PyExc_TypeError, "a column is an array of u32");
    }
    Held(const Held&) = delete;
    ~Held() {
        if (is_held_) PyBuffer_Release(&view_);
    }

    bool IsThere() const { return is_held_ && view_.itemsize == 4; }
    Py_ssize_t size() const { return view_.len / 4; }
    const char* At(Py_ssize_t entry) const { return static_cast<const char*>(view_.buf) + 4 * entry; }
    uint32_t operator[](Py_ssize_t entry) const { return Read<uint32_t>(reinterpret_cast<const uint8_t*>(At(entry))); }

   private:
    Py_buffer view_{};
    bool is_held_;
};

// Names of the methods of arrays, made once.
PyObject* NameOf(bool is_one) {
    static PyObject* const names[] = {PyUnicode_InternFromString("frombytes"), PyUnicode_InternFromString("append")};
    return names[is_one];
}

// Append block ids to the table of a group: one, or bytes. Memory of which a view exists cannot grow: the table moves.
bool Extend(PyObject* groups, Py_ssize_t group, PyObject* ids, bool is_one) {
    PyObject* table = PyList_GetItem(groups, group);  // borrowed
    if (table == nullptr) return false;
    PyObject* done = PyObject_CallMethodObjArgs(table, NameOf(is_one), ids, nullptr);
    if (done == nullptr && PyErr_ExceptionMatches(PyExc_BufferError)) {
        PyErr_Clear();
        PyObject* moved = PyObject_CallFunction(reinterpret_cast<PyObject*>(Py_TYPE(table)), "sO", "I", table);
        if (moved == nullptr) return false;
        done = PyObject_CallMethodObjArgs(moved, NameOf(is_one), ids, nullptr);
        if (done == nullptr) {
            Py_DECREF(moved);
        } else if (PyList_SetItem(groups, group, moved) < 0) {  // which takes the reference
            Py_CLEAR(done);
        }
    }
    Py_XDECREF(done);
    return done != nullptr;
}

// Append the ids of one entry: those of a group of the request in a slot.
bool AppendEntry(PyObject* tables, uint32_t slot, uint32_t group, PyObject* ids, bool is_one) {
    PyObject* key = PyLong_FromUnsignedLong(slot);
    if (key == nullptr) return false;
    PyObject* groups = PyDict_GetItemWithError(tables, key);  // borrowed
    if (groups == nullptr && !PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, key);
    Py_DECREF(key);
    return groups != nullptr && Extend(groups, static_cast<Py_ssize_t>(group), ids, is_one);
}

// append_blocks(tables by slot, slots of the rows, row, group, count, ids)
PyObject* AppendBlocks(PyObject*, PyObject* arguments) {
    PyObject *tables, *columns[5];
    if (!PyArg_ParseTuple(arguments, "O!OOOOO:append_blocks", &PyDict_Type, &tables, &columns[0], &columns[1],
                          &columns[2], &columns[3], &columns[4])) {
        return nullptr;
    }
    const Held slots(columns[0]), row(columns[1]), group(columns[2]), count(columns[3]), ids(columns[4]);
    const Held* const all[] = {&slots, &row, &group, &count, &ids};
    for (const Held* each : all) {
        if (!each->IsThere()) return nullptr;
    }
    if (row.size() != group.size() || row.size() != count.size()) {
        PyErr_SetString(PyExc_ValueError, "row, group and count have different lengths");
        return nullptr;
    }
    Py_ssize_t at = 0;
    for (Py_ssize_t i = 0; i < row.size(); ++i) {
        const auto size = static_cast<Py_ssize_t>(count[i]);
        if (row[i] >= slots.size() || size > ids.size() - at) {
            PyErr_SetString(PyExc_IndexError, "a row without a slot, or too few ids");
            return nullptr;
        }
        PyObject* raw = size == 1 ? PyLong_FromUnsignedLong(ids[at]) : PyBytes_FromStringAndSize(ids.At(at), 4 * size);
        if (raw == nullptr) return nullptr;
        const bool is_done = AppendEntry(tables, slots[row[i]], group[i], raw, size == 1);
        Py_DECREF(raw);
        if (!is_done) return nullptr;
        at += size;
    }
    Py_RETURN_NONE;
}

}  // namespace
