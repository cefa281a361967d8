// Converts values between Python and C++. A failed conversion throws Unreadable, with Python's error cleared; where
// Python is out of memory, it throws Raised.
#pragma once

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ranges>

#include "replica.h"

namespace kvplane {

struct Unreadable {};
struct Raised {};  // Python's error is set

// A reference to a Python object that ends with this value.
class Owned {
  public:
    explicit Owned(PyObject* object) : object_(object) {
        if (object == nullptr) Fail();
    }
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;
    ~Owned() { Py_XDECREF(object_); }
    PyObject* get() const { return object_; }
    PyObject* Release() { return std::exchange(object_, nullptr); }

    [[noreturn]] static void Fail() {
        if (PyErr_Occurred() != nullptr && PyErr_ExceptionMatches(PyExc_MemoryError)) throw Raised();
        PyErr_Clear();
        throw Unreadable();
    }

  private:
    PyObject* object_;
};

inline void Check(bool holds) {
    if (!holds) Owned::Fail();
}

// The Python string of a literal, which is made once.
#define NAME(literal)                                                          \
    [] {                                                                       \
        static PyObject* const interned = PyUnicode_InternFromString(literal); \
        return interned;                                                       \
    }()

// An object that Python has made; there is none when it is out of memory.
inline PyObject* NotNull(PyObject* object) {
    if (object == nullptr) throw Raised();
    return object;
}

// Declared before their use in each other: lookup by argument does not find them for types of the standard library.
PyObject* ToPy(const Key& key);
template <std::ranges::range Values>
PyObject* ToPy(const Values& values);
template <typename A, typename B>
PyObject* ToPy(const std::pair<A, B>& value);
template <typename... T>
PyObject* ToPy(const std::tuple<T...>& values);
template <typename T>
PyObject* ToPy(const std::optional<T>& value);
void FromPy(PyObject* object, Key* key);
template <typename T>
void FromPy(PyObject* object, std::vector<T>* values);
template <typename A, typename B>
void FromPy(PyObject* object, std::pair<A, B>* value);
template <typename... T>
void FromPy(PyObject* object, std::tuple<T...>* value);
template <typename K, typename V>
void FromPy(PyObject* object, std::map<K, V>* values);

// -- to Python -------------------------------------------------------------------------------------------------------

template <typename T>
    requires std::is_integral_v<T>
PyObject* ToPy(const T& value) {
    if constexpr (std::is_same_v<T, bool>) return PyBool_FromLong(value);
    if constexpr (std::is_same_v<T, uint64_t>) return NotNull(PyLong_FromUnsignedLongLong(value));
    return NotNull(PyLong_FromLongLong(static_cast<long long>(value)));
}
inline PyObject* ToPy(const std::string& text) {
    return NotNull(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogatepass"));
}
inline PyObject* ToBytes(const uint8_t* data, size_t size) {
    return NotNull(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(data), static_cast<Py_ssize_t>(size)));
}
inline PyObject* ToPy(const Digest& digest) { return ToBytes(digest.bytes.data(), digest.size); }
inline PyObject* ToPy(const std::vector<uint8_t>& bytes) { return ToBytes(bytes.data(), bytes.size()); }

// A list; of a map, one of pairs.
template <std::ranges::range Values>
PyObject* ToPy(const Values& values) {
    Owned list(PyList_New(static_cast<Py_ssize_t>(values.size())));
    Py_ssize_t at = 0;
    for (const auto& value : values) PyList_SetItem(list.get(), at++, ToPy(value));
    return list.Release();
}

// Steals the references.
template <typename... T>
PyObject* Tuple(T*... values) {
    PyObject* tuple = NotNull(PyTuple_New(sizeof...(values)));
    Py_ssize_t at = 0;
    (PyTuple_SetItem(tuple, at++, values), ...);
    return tuple;
}

// Steals the reference to the item.
inline void Append(const Owned& list, PyObject* item) {
    const Owned one(item);
    if (PyList_Append(list.get(), one.get()) != 0) throw Raised();
}

inline PyObject* ToPy(const Key& key) { return Tuple(ToPy(key.pair), ToPy(key.digest)); }

template <typename A, typename B>
PyObject* ToPy(const std::pair<A, B>& value) {
    return Tuple(ToPy(value.first), ToPy(value.second));
}
template <typename... T>
PyObject* ToPy(const std::tuple<T...>& values) {
    return std::apply([](const auto&... value) { return Tuple(ToPy(value)...); }, values);
}
template <typename T>
PyObject* ToPy(const std::optional<T>& value) {
    return value ? ToPy(*value) : Py_NewRef(Py_None);
}

// A capsule that owns the value.
template <typename T>
PyObject* Capsule(std::unique_ptr<T> value, const char* name, PyCapsule_Destructor destroy) {
    PyObject* capsule = NotNull(PyCapsule_New(value.get(), name, destroy));
    value.release();
    return capsule;
}

// -- from Python -----------------------------------------------------------------------------------------------------

template <typename T>
    requires std::is_integral_v<T>
void FromPy(PyObject* object, T* value) {
    if constexpr (std::is_same_v<T, uint64_t>) {
        *value = PyLong_AsUnsignedLongLong(object);
    } else {
        const long long number = PyLong_AsLongLong(object);
        *value = static_cast<T>(number);
        Check(static_cast<long long>(*value) == number);
    }
    if (PyErr_Occurred()) Owned::Fail();
}
inline void FromPy(PyObject* object, bool* flag) {
    const int truth = PyObject_IsTrue(object);
    Check(truth >= 0);
    *flag = truth == 1;
}
inline void FromPy(PyObject* object, std::string* text) {
    Check(PyUnicode_Check(object));
    const Owned encoded(PyUnicode_AsEncodedString(object, "utf-8", "surrogatepass"));
    char* data = nullptr;
    Py_ssize_t size = 0;
    Check(PyBytes_AsStringAndSize(encoded.get(), &data, &size) == 0);
    text->assign(data, static_cast<size_t>(size));
}
inline void FromPy(PyObject* object, std::vector<uint8_t>* bytes) {
    char* data = nullptr;
    Py_ssize_t size = 0;
    Check(PyBytes_AsStringAndSize(object, &data, &size) == 0);
    bytes->assign(data, data + size);
}
inline void FromPy(PyObject* object, Digest* digest) {
    std::vector<uint8_t> bytes;
    FromPy(object, &bytes);
    Check(bytes.size() <= kDigestBytes);
    *digest = Digest(bytes.data(), bytes.size());
}

template <typename F>
void ForEach(PyObject* sequence, F&& visit) {
    const Py_ssize_t count = PySequence_Size(sequence);
    Check(count >= 0);
    for (Py_ssize_t at = 0; at < count; ++at) {
        const Owned item(PySequence_GetItem(sequence, at));
        visit(item.get());
    }
}
template <typename T>
void FromPy(PyObject* object, std::vector<T>* values) {
    values->clear();
    ForEach(object, [&](PyObject* item) {
        values->emplace_back();
        FromPy(item, &values->back());
    });
}
inline PyObject* At(PyObject* tuple, Py_ssize_t at) {
    PyObject* item = PyTuple_GetItem(tuple, at);
    Check(item != nullptr);
    return item;
}
template <typename A, typename B>
void FromPy(PyObject* object, std::pair<A, B>* value) {
    FromPy(At(object, 0), &value->first);
    FromPy(At(object, 1), &value->second);
}
template <typename... T>
void FromPy(PyObject* object, std::tuple<T...>* value) {
    Py_ssize_t at = 0;
    std::apply([&](auto&... one) { (FromPy(At(object, at++), &one), ...); }, *value);
}
inline void FromPy(PyObject* object, Key* key) {
    FromPy(At(object, 0), &key->pair);
    FromPy(At(object, 1), &key->digest);
}
template <typename K, typename V>
void FromPy(PyObject* object, std::map<K, V>* values) {
    values->clear();
    ForEach(object, [&](PyObject* item) {
        std::pair<K, V> one;
        FromPy(item, &one);
        values->insert(std::move(one));
    });
}

// The entries of a buffer (bytes, array or memoryview) of values of this size, while this object exists.
template <typename T>
class Buffer {
  public:
    explicit Buffer(PyObject* object) {
        Check(PyObject_GetBuffer(object, &view_, PyBUF_C_CONTIGUOUS) == 0);
        if (view_.itemsize != sizeof(T)) {
            PyBuffer_Release(&view_);
            Owned::Fail();
        }
        data = static_cast<const T*>(view_.buf);
        size = static_cast<size_t>(view_.len) / sizeof(T);
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { PyBuffer_Release(&view_); }

    const T* data = nullptr;
    size_t size = 0;

  private:
    Py_buffer view_;
};

// A column of a step: a list, or an array or memoryview of u32, i32, u64 or i64.
inline bool ReadBuffer(PyObject* object, Column* column) {
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) {
        PyErr_Clear();
        return false;
    }
    const char code = view.format == nullptr ? 'B' : view.format[0];
    const auto count = static_cast<size_t>(view.len / view.itemsize);
    bool read = true;
    const auto copy = [&]<typename T>(const T* data) { column->assign(data, data + count); };
    if (code == 'I' && view.itemsize == 4) {
        copy(static_cast<const uint32_t*>(view.buf));
    } else if (code == 'i' && view.itemsize == 4) {
        copy(static_cast<const int32_t*>(view.buf));
    } else if ((code == 'q' || code == 'l') && view.itemsize == 8) {
        copy(static_cast<const int64_t*>(view.buf));
    } else if ((code == 'Q' || code == 'L') && view.itemsize == 8) {
        copy(static_cast<const int64_t*>(view.buf));  // 2^63 and above become negative, which no column permits
    } else {
        read = false;
    }
    PyBuffer_Release(&view);
    return read;
}

// Reads the bytes of an array or memoryview of u32; false for anything else.
inline bool ReadArrayOfU32(PyObject* object, std::vector<uint8_t>* bytes) {
    Py_buffer view;
    if (PyList_Check(object) || PyObject_GetBuffer(object, &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) {
        PyErr_Clear();
        return false;
    }
    const bool is_u32 = view.format != nullptr && view.format[0] == 'I' && view.itemsize == 4;
    const auto* const data = static_cast<const uint8_t*>(view.buf);
    if (is_u32) bytes->assign(data, data + view.len);
    PyBuffer_Release(&view);
    return is_u32;
}

// A number of a step. One beyond all limits of columns becomes the nearest that there is; Python's error may be set.
inline Int Nearest(PyObject* object) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow == 0) return value;
    return overflow > 0 ? std::numeric_limits<Int>::max() : std::numeric_limits<Int>::min();
}

inline void ReadColumn(PyObject* object, Column* column) {
    column->clear();
    if (PyList_Check(object)) {
        const Py_ssize_t count = PyList_Size(object);
        if (count == 0) return;
        column->resize(static_cast<size_t>(count));
        for (Py_ssize_t at = 0; at < count; ++at)
            (*column)[static_cast<size_t>(at)] = Nearest(PyList_GetItem(object, at));
        if (PyErr_Occurred()) Owned::Fail();
    } else if (!ReadBuffer(object, column)) {
        ForEach(object, [&](PyObject* item) {
            column->push_back(Nearest(item));
            if (PyErr_Occurred()) Owned::Fail();
        });
    }
}

}  // namespace kvplane
