// A column of the requests as a sequence of Python.
#pragma once

#include "bind.h"

namespace kvplane {

// Keeps the core alive, and waits, entry by entry, while a step is applied without the interpreter's lock.
struct ColumnView {
    PyObject_HEAD PyObject* core;
    PyObject* (*entry)(const void* column, size_t slot);
    const void* column;
};

inline Py_ssize_t ColumnLength(PyObject*) { return kMaxSlots; }

inline PyObject* ColumnEntry(PyObject* self, Py_ssize_t slot) {
    if (slot < 0 || slot >= kMaxSlots) {
        PyErr_SetString(PyExc_IndexError, "the slot is beyond the last one");
        return nullptr;
    }
    return Guarded([&]() -> PyObject* {
        const auto& view = *reinterpret_cast<const ColumnView*>(self);
        CoreOf(view.core);
        return view.entry(view.column, static_cast<size_t>(slot));
    });
}

inline void DestroyColumn(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    Py_DECREF(reinterpret_cast<ColumnView*>(self)->core);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

// Entries of bytes are flags.
template <typename T>
PyObject* NewColumnView(PyObject* core, const std::vector<T>* column) {
    using Entry = std::conditional_t<std::is_same_v<T, uint8_t>, bool, T>;
    const auto entry = [](const void* of, size_t slot) {
        return ToPy(static_cast<Entry>((*static_cast<const std::vector<T>*>(of))[slot]));
    };
    static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(DestroyColumn)},
                                  {Py_sq_length, reinterpret_cast<void*>(ColumnLength)},
                                  {Py_sq_item, reinterpret_cast<void*>(ColumnEntry)},
                                  {0, nullptr}};
    static PyType_Spec spec = {"_native.Column", sizeof(ColumnView), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
    static auto* const type = reinterpret_cast<PyTypeObject*>(NotNull(PyType_FromSpec(&spec)));
    PyObject* made = NotNull(PyType_GenericAlloc(type, 0));
    auto* view = reinterpret_cast<ColumnView*>(made);
    view->core = Py_NewRef(core);
    view->entry = entry;
    view->column = column;
    return made;
}

}  // namespace kvplane
