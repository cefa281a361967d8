// Token ids of a list and of a protobuf message, and the message of a decode step.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <bit>
#include <cstdint>
#include <cstring>

namespace {

static_assert(std::endian::native == std::endian::little, "values are stored as they are in memory");

template <typename Value>
Value Read(const uint8_t* at) {
    Value value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

template <typename Value>
uint8_t* Write(uint8_t* at, Value value) {
    std::memcpy(at, &value, sizeof value);
    return at + sizeof value;
}

uint8_t* Append(uint8_t* at, const void* bytes, size_t size) {
    std::memcpy(at, bytes, size);
    return at + size;
}

// -- Token ids of a protobuf message -------------------------------------------

// Decode varints to u32 values. Returns false for bytes that are none, and for a number of more than 32 bits.
bool DecodeVarints(const uint8_t* at, const uint8_t* end, uint8_t* out) {
    while (at < end) {
        uint32_t value = 0;
        for (int shift = 0;; shift += 7) {
            if (at == end || (shift == 28 && *at > 0x0f)) return false;
            value |= static_cast<uint32_t>(*at & 0x7f) << shift;
            if (*at++ < 0x80) break;
        }
        out = Write(out, value);
    }
    return true;
}

// pack_ids(ids) -> the u32 values of a list of ids; None for anything else, and for what is no id
PyObject* PackIds(PyObject*, PyObject* ids) {
    if (!PyList_CheckExact(ids)) Py_RETURN_NONE;
    const Py_ssize_t count = PyList_Size(ids);
    PyObject* const result = PyBytes_FromStringAndSize(nullptr, 4 * count);
    if (result == nullptr) return nullptr;
    auto* out = reinterpret_cast<uint8_t*>(PyBytes_AsString(result));
    for (Py_ssize_t at = 0; at < count; ++at) {  // runs no Python code, which could change the list
        PyObject* const id = PyList_GetItem(ids, at);
        const long value = PyLong_CheckExact(id) ? PyLong_AsLong(id) : -1;
        if (value < 0 || value > UINT32_MAX) {
            PyErr_Clear();
            Py_DECREF(result);
            Py_RETURN_NONE;
        }
        out = Write(out, static_cast<uint32_t>(value));
    }
    return result;
}

PyObject* UnpackVarints(PyObject*, PyObject* argument) {
    Py_buffer packed;
    if (PyObject_GetBuffer(argument, &packed, PyBUF_SIMPLE) < 0) return nullptr;
    const auto* begin = static_cast<const uint8_t*>(packed.buf);
    const auto* const end = begin + packed.len;
    Py_ssize_t count = 0;
    Py_BEGIN_ALLOW_THREADS
    for (const auto* at = begin; at < end; ++at) count += *at < 0x80;
    Py_END_ALLOW_THREADS
    PyObject* result = PyBytes_FromStringAndSize(nullptr, 4 * count);
    bool is_valid = false;
    if (result != nullptr) {
        auto* out = reinterpret_cast<uint8_t*>(PyBytes_AsString(result));
        Py_BEGIN_ALLOW_THREADS
        is_valid = DecodeVarints(begin, end, out);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&packed);
    if (result != nullptr && !is_valid) {
        Py_DECREF(result);
        PyErr_SetString(PyExc_ValueError, "packed must be varints of at most 32 bits");
        return nullptr;
    }
    return result;
}

// -- The message of a decode step -----------------------------------------------

// The compiled twin of `step_bytes` in kvplane/wire/packed_step.py for a part that is written already. The numbers are
// the fields 1 to 5 of Step, the part is field 6, and the step is field 2 of the message.
uint8_t* Varint(uint8_t* at, uint64_t value) {
    for (; value > 0x7f; value >>= 7) *at++ = static_cast<uint8_t>(value | 0x80);
    *at++ = static_cast<uint8_t>(value);
    return at;
}

PyObject* StepMessage(PyObject*, PyObject* const* given, Py_ssize_t count) {
    constexpr Py_ssize_t kNumbers = 5;
    uint8_t head[kNumbers * 11 + 11], outer[11];
    uint8_t* at = head;
    if (count != kNumbers + 1 || !PyBytes_Check(given[kNumbers])) {
        PyErr_SetString(PyExc_TypeError, "step_message takes 5 numbers and the bytes of a part");
        return nullptr;
    }
    for (Py_ssize_t i = 0; i < kNumbers; ++i) {
        const uint64_t value = PyLong_AsUnsignedLongLong(given[i]);
        if (value == UINT64_MAX && PyErr_Occurred()) return nullptr;
        if (value == 0) continue;
        *at++ = static_cast<uint8_t>((i + 1) << 3);
        at = Varint(at, value);
    }
    const auto size = static_cast<size_t>(PyBytes_Size(given[kNumbers]));
    *at++ = 6 << 3 | 2;
    at = Varint(at, size);
    const auto numbers = static_cast<size_t>(at - head);
    uint8_t* end = outer;
    *end++ = 2 << 3 | 2;
    end = Varint(end, numbers + size);
    const auto begin = static_cast<size_t>(end - outer);
    PyObject* result = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(begin + numbers + size));
    if (result == nullptr) return nullptr;
    auto* out = reinterpret_cast<uint8_t*>(PyBytes_AsString(result));
    Append(Append(Append(out, outer, begin), head, numbers), PyBytes_AsString(given[kNumbers]), size);
    return result;
}

}  // namespace
