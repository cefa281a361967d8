// The message with the answer to a step of one part, from the fields of its result: the compiled twin of
// `encode_result` in kvplane/wire/result.py, which specifies it.
#pragma once

#include <algorithm>
#include <iterator>

#include "answers.h"

namespace {

// A message that is written from its end to its front, so that the length of a field is known when its content is
// written, which is copied nowhere else. Once memory is out, `ok` is false and nothing more is added.
class Bytes {
   public:
    Bytes() = default;
    Bytes(const Bytes&) = delete;
    ~Bytes() { PyMem_Free(data_); }

    bool ok = true;
    size_t size() const { return size_; }
    const uint8_t* data() const { return data_ + room_ - size_; }

    // Room for `count` bytes before the others; nullptr without memory.
    uint8_t* More(size_t count) {
        if (size_ + count > room_) {
            const size_t room = 2 * (size_ + count) + kRoom;
            auto* const grown = ok ? static_cast<uint8_t*>(PyMem_Malloc(room)) : nullptr;
            ok = grown != nullptr;
            if (!ok) return nullptr;
            if (size_ > 0) std::memcpy(grown + room - size_, data(), size_);
            PyMem_Free(data_);
            data_ = grown;
            room_ = room;
        }
        size_ += count;
        return data_ + room_ - size_;
    }

    void Number(uint32_t field, uint64_t value) {
        if (value != 0) Head(field, 0, value);
    }

    // The bytes behind the first `end` ones from the end become a field.
    void EndField(uint32_t field, size_t end) { Head(field, 2, size_ - end); }

   private:
    static constexpr size_t kRoom = 4096;

    void Head(uint32_t field, uint32_t kind, uint64_t value) {
        uint8_t head[20];
        const auto count = static_cast<size_t>(Varint(Varint(head, field << 3 | kind), value) - head);
        uint8_t* const at = More(count);
        if (at != nullptr) std::memcpy(at, head, count);
    }

    uint8_t* data_ = nullptr;
    size_t size_ = 0, room_ = 0;
};

// Adds a field: a list, or an array of the same width. Returns false for anything else: Python names its fault.
bool AddColumn(Bytes* into, uint32_t field, size_t width, PyObject* column) {
    if (PyList_Check(column)) {
        const Py_ssize_t count = PyList_Size(column);
        if (count == 0) return true;
        const size_t end = into->size();
        uint8_t* at = into->More(static_cast<size_t>(count) * width);
        for (Py_ssize_t i = 0; at != nullptr && i < count; ++i) {
            const unsigned long long value = PyLong_AsUnsignedLongLong(PyList_GetItem(column, i));
            if (PyErr_Occurred() || (width == 4 && value > UINT32_MAX)) return false;
            at = width == 4 ? Write(at, static_cast<uint32_t>(value)) : Write(at, static_cast<uint64_t>(value));
        }
        into->EndField(field, end);
        return true;
    }
    Py_buffer view;
    if (PyObject_GetBuffer(column, &view, PyBUF_SIMPLE) < 0) return false;
    const bool fits = view.itemsize == static_cast<Py_ssize_t>(width);
    const auto size = static_cast<size_t>(view.len);
    if (fits && size > 0) {
        const size_t end = into->size();
        uint8_t* const at = into->More(size);
        if (at != nullptr) std::memcpy(at, view.buf, size);
        into->EndField(field, end);
    }
    PyBuffer_Release(&view);
    return fits;
}

PyObject* Interned(const char* name, PyObject** made) {
    if (*made == nullptr) *made = PyUnicode_InternFromString(name);
    return *made;
}

// Adds the columns of an object with these attributes.
bool AddObject(Bytes* into, uint32_t field, const Column* columns, size_t count, PyObject** names, PyObject* object) {
    const size_t end = into->size();
    for (size_t i = count; i-- > 0;) {
        PyObject* const column = PyObject_GetAttr(object, Interned(columns[i].name, &names[i]));
        const bool is_added = column != nullptr && AddColumn(into, columns[i].number, columns[i].width, column);
        Py_XDECREF(column);
        if (!is_added) return false;
    }
    if (into->size() > end) into->EndField(field, end);
    return true;
}

// Adds the columns that a dict has, of those whose numbers are above one and below another. Counts them in `known`.
// Returns false if it has any other that is not empty.
struct Range {
    uint32_t above, below;
};
bool AddColumns(Bytes* into, const Column* columns, size_t count, PyObject** names, PyObject* given, Range numbers,
                Py_ssize_t* known) {
    for (size_t i = count; i-- > 0;) {
        if (columns[i].number <= numbers.above || columns[i].number >= numbers.below) continue;
        PyObject* const column = PyDict_GetItemWithError(given, Interned(columns[i].name, &names[i]));
        if (column == nullptr && PyErr_Occurred()) return false;
        if (column == nullptr) continue;
        ++*known;
        if (!AddColumn(into, columns[i].number, columns[i].width, column)) return false;
    }
    return true;
}

// What a result has for the service alone.
constexpr const char* kKept[] = {"hashed_facts", "hashed_news", "taken_back", "went_back"};

bool IsNamed(PyObject* name, const char* other) { return PyUnicode_CompareWithASCIIString(name, other) == 0; }

// Whether all entries of a dict are empty or not sent, but these columns, and others that `is_other` knows by name.
template <typename F>
bool OthersAreEmpty(PyObject* given, const Column* columns, size_t count, F&& is_other) {
    PyObject *name, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(given, &at, &name, &value)) {
        bool is_known = is_other(name);
        for (size_t i = 0; i < count && !is_known; ++i) is_known = IsNamed(name, columns[i].name);
        if (!is_known && PyObject_IsTrue(value) != 0) return false;
    }
    return true;
}

bool AddOrders(Bytes* part, PyObject* orders) {
    static PyObject* names[kNumOrders];
    const size_t end = part->size();
    Py_ssize_t count = 0;
    PyObject* const given = PyObject_GenericGetDict(orders, nullptr);
    const bool is_added =
        given != nullptr && AddColumns(part, kOrders, kNumOrders, names, given, {0, UINT32_MAX}, &count);
    const bool is_all = is_added && (PyDict_Size(given) == count ||
                                     OthersAreEmpty(given, kOrders, kNumOrders, [](PyObject*) { return false; }));
    Py_XDECREF(given);
    if (is_all && part->size() > end) part->EndField(15, end);
    return is_all;
}

// Adds the fields in the order of their numbers, the last one first.
bool AddPart(Bytes* part, PyObject* given) {
    static PyObject *of_part[kNumPartResult], *of_blocks[kNumBlocks], *others[4];
    Py_ssize_t count = 0;
    const auto add_columns = [&](uint32_t above, uint32_t below) {
        return AddColumns(part, kPartResult, kNumPartResult, of_part, given, {above, below}, &count);
    };
    if (!add_columns(16, UINT32_MAX)) return false;
    PyObject* const free_blocks = PyDict_GetItemWithError(given, Interned("free_blocks", &others[3]));
    if (free_blocks != nullptr) part->Number(16, PyLong_AsUnsignedLong(free_blocks));
    PyObject* const orders = PyDict_GetItemWithError(given, Interned("orders", &others[2]));
    if (orders != nullptr && !AddOrders(part, orders)) return false;
    if (!add_columns(8, 15)) return false;
    PyObject* const tables = PyDict_GetItemWithError(given, Interned("tables", &others[1]));
    if (tables != nullptr && !AddObject(part, 8, kBlocks, kNumBlocks, of_blocks, tables)) return false;
    PyObject* const blocks = PyDict_GetItemWithError(given, Interned("new_blocks", &others[0]));
    if (blocks != nullptr && !AddObject(part, 7, kBlocks, kNumBlocks, of_blocks, blocks)) return false;
    if (!add_columns(0, 7)) return false;
    count += (blocks != nullptr) + (tables != nullptr) + (orders != nullptr) + (free_blocks != nullptr);
    if (PyErr_Occurred()) return false;
    return PyDict_Size(given) == count || OthersAreEmpty(given, kPartResult, kNumPartResult, [](PyObject* name) {
        static const char* const known[] = {"new_blocks", "tables", "orders", "free_blocks"};
        const auto is_name = [&](const char* one) { return IsNamed(name, one); };
        return std::any_of(std::begin(known), std::end(known), is_name) ||
               std::any_of(std::begin(kKept), std::end(kKept), is_name);
    });
}

// write_answer(seq, part, published_through, fields of the part by name) -> the message, or None for a part that has
// anything else
PyObject* WriteAnswer(PyObject*, PyObject* arguments) {
    unsigned long long seq, number, published_through;
    PyObject* given;
    if (!PyArg_ParseTuple(arguments, "KKKO!:write_answer", &seq, &number, &published_through, &PyDict_Type, &given))
        return nullptr;
    Bytes message;
    message.Number(4, published_through);
    const size_t end = message.size();
    if (!AddPart(&message, given)) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    message.EndField(3, end);
    message.Number(2, number);
    message.Number(1, seq);
    message.EndField(2, 0);
    if (!message.ok) return PyErr_NoMemory();
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(message.data()),
                                     static_cast<Py_ssize_t>(message.size()));
}

}  // namespace
