// Reads the columns of a Python `Step`.
#pragma once

#include "answers.h"
#include "wire.h"

namespace kvplane {

// An attribute of a Python object.
#define ATTRIBUTE(object, name) Owned(PyObject_GetAttr(object, NAME(name)))

inline bool IsTrue(PyObject* object) {
    bool flag = false;
    FromPy(object, &flag);
    return flag;
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
inline void ReadTokens(PyObject* object, TokenIds* tokens) {
    tokens->fit = true;
    tokens->count = Count(object);
    if (tokens->count == 0) return tokens->ids.clear();
    if (ReadArrayOfU32(object, &tokens->ids)) return;  // each entry is an id
    Column ids;
    ReadColumn(object, &ids);
    tokens->fit = std::all_of(ids.begin(), ids.end(), [](Int one) { return 0 <= one && one <= kUnlimited; });
    tokens->ids.resize(4 * ids.size());
    for (size_t at = 0; at < ids.size(); ++at) {
        const auto id = static_cast<uint32_t>(ids[at]);
        std::memcpy(tokens->ids.data() + 4 * at, &id, sizeof id);
    }
}

// Read a list of texts, or a column of 64 bits each; return whether each entry is one.
template <typename T>
bool ReadEntries(PyObject* object, std::vector<T>* entries) {
    bool fit = true;
    entries->clear();
    ForEach(object, [&](PyObject* item) {
        entries->emplace_back();
        try {
            FromPy(item, &entries->back());
        } catch (const Unreadable&) {
            fit = false;
        }
    });
    return fit;
}
inline bool ReadBits(PyObject* object, Column* column) {
    std::vector<uint64_t> bits;
    const bool fit = ReadEntries(object, &bits);
    column->assign(bits.begin(), bits.end());
    return fit;
}

// A number of a step; one that no range has for what is no number.
inline Int NumberOfStep(PyObject* object) {
    const Int value = Nearest(object);
    if (value != -1 || !PyErr_Occurred()) return value;
    PyErr_Clear();
    return std::numeric_limits<Int>::min();
}

inline void ReadValue(PyObject* object, Hashes* hashes) { ReadHashes(object, hashes); }
inline void ReadValue(PyObject* object, TokenIds* tokens) { ReadTokens(object, tokens); }
inline void ReadValue(PyObject* object, bool* flag) { *flag = IsTrue(object); }
inline void ReadValue(PyObject* object, SingleNumber number) { *number.value = NumberOfStep(object); }
inline void ReadValue(PyObject* object, SingleChoice choice) { *choice.value = NumberOfStep(object); }
inline void ReadValue(PyObject* object, Texts texts) { *texts.fit = ReadEntries(object, texts.entries); }
inline void ReadValue(PyObject* object, Counted list) {
    list.entries->clear();  // which a step that was read from a message may have left
    *list.count = Count(object);
}

template <typename Section>
void ReadSection(PyObject* object, Section* section) {
    if constexpr (HasColumns<Section>) {
        const auto* name = NamesOf(*section).data();
        for (const auto& column : ColumnsOf(*section)) {
            const Owned entries(PyObject_GetAttr(object, *name++));
            if (column.is_bits()) {
                section->*column.fit = ReadBits(entries.get(), &(section->*column.of));
            } else {
                ReadColumn(entries.get(), &(section->*column.of));
            }
        }
    }
    EachOther(*section, [&](const OtherField& other, auto value) {
        ReadValue(Owned(PyObject_GetAttrString(object, other.name)).get(), value);
    });
}

inline void ReadSection(PyObject* object, bool* flag) { *flag = IsTrue(object); }
inline void ReadSection(PyObject* object, std::optional<Resume>* image) {
    if (object != Py_None) ReadSection(object, &image->emplace());
}

// The Python string of the name of each section.
inline const std::vector<PyObject*>& NamesOfSections(Part& part) {
    static const std::vector<PyObject*> names = [&] {
        std::vector<PyObject*> made;
        EachSection(part, [&](const OtherField& one, auto&) { made.push_back(PyUnicode_InternFromString(one.name)); });
        return made;
    }();
    return names;
}

inline void ReadPart(PyObject* object, Part* part) {
    Owned fields(PyObject_GenericGetDict(object, nullptr));
    if (PyDict_GetItemWithError(fields.get(), NAME("_packed")) != nullptr) ATTRIBUTE(object, "facts");  // makes all
    const auto* name = NamesOfSections(*part).data();
    EachSection(*part, [&](const OtherField&, auto& section) {
        // A section that the part lacks has its default (`kvplane.base.when_read`), and is not made.
        Reset(&section);
        PyObject* found = PyDict_GetItemWithError(fields.get(), *name++);
        if (found == nullptr) return Check(PyErr_Occurred() == nullptr);
        const Owned field(Py_NewRef(found));
        ReadSection(field.get(), &section);
    });
    part->facts_made.given = part->news_made.given = false;
}

inline void ReadParts(PyObject* list, std::vector<Part>* parts) {
    parts->resize(static_cast<size_t>(Count(list)));
    size_t number = 0;
    ForEach(list, [&](PyObject* part) { ReadPart(part, &(*parts)[number++]); });
}

inline void ReadStep(PyObject* object, Step* step) {
    step->seq = NumberOfStep(ATTRIBUTE(object, "seq").get());
    step->part = NumberOfStep(ATTRIBUTE(object, "part").get());
    step->executed_through = NumberOfStep(ATTRIBUTE(object, "executed_through").get());
    step->last = IsTrue(ATTRIBUTE(object, "last").get());
    ReadParts(ATTRIBUTE(object, "parts").get(), &step->parts);
}

}  // namespace kvplane
