// The Python module `_native`: an index and the layouts of places behind capsules. `kvplane_fleet.native` is its only
// user. Uses Python's stable interface of 3.11 alone, so one build serves all later versions.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <map>
#include <stdexcept>
#include <utility>

#include "hits.h"

namespace kvplane_fleet {
namespace {

constexpr char kTable[] = "kvplane_fleet.table", kLayout[] = "kvplane_fleet.layout";

// A Python exception is set.
struct Failed {};

// A function of Python that returns what this one returns, or None.
template <auto kFunction>
PyObject* Method(PyObject*, PyObject* arguments) {
    try {
        if constexpr (std::is_void_v<decltype(kFunction(arguments))>) {
            kFunction(arguments);
            return Py_NewRef(Py_None);
        } else {
            return kFunction(arguments);
        }
    } catch (const Failed&) {
    } catch (const std::exception& broken) {
        PyErr_SetString(PyExc_AssertionError, broken.what());
    }
    return nullptr;
}

void Check(bool is_true) {
    if (is_true) return;
    PyErr_SetString(PyExc_ValueError, "an argument has another type or range than the index reads");
    throw Failed{};
}

class Owned {
  public:
    explicit Owned(PyObject* object) : object_(object) {
        if (object == nullptr) throw Failed{};
    }
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;
    ~Owned() { Py_XDECREF(object_); }
    PyObject* get() const { return object_; }
    PyObject* Release() { return std::exchange(object_, nullptr); }

  private:
    PyObject* object_;
};

template <typename Value>
Value& In(PyObject* capsule, const char* name) {
    void* const pointer = PyCapsule_GetPointer(capsule, name);
    if (pointer == nullptr) throw Failed{};
    return *static_cast<Value*>(pointer);
}

template <typename Value>
void Destroy(PyObject* capsule) {
    delete static_cast<Value*>(PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule)));
}

PyObject* At(PyObject* tuple, Py_ssize_t at) {
    PyObject* const item = PyTuple_GetItem(tuple, at);
    if (item == nullptr) throw Failed{};
    return item;
}

Int ReadInt(PyObject* number) {
    const long long value = PyLong_AsLongLong(number);
    if (value == -1 && PyErr_Occurred()) throw Failed{};
    return value;
}

uint64_t ReadWord(PyObject* number) {
    const unsigned long long word = PyLong_AsUnsignedLongLong(number);
    if (word == ~0ULL && PyErr_Occurred()) throw Failed{};
    return word;
}

// How keys of 128 bits are taken apart and put together.
class Halves {
  public:
    Halves() : bits_(PyLong_FromLong(64)) {}

    Key Of(PyObject* number) const {
        const Owned high(PyNumber_Rshift(number, bits_.get()));
        const uint64_t low = PyLong_AsUnsignedLongLongMask(number);
        return {low, ReadWord(high.get())};
    }

    PyObject* Joined(Key key) const {
        Owned low(PyLong_FromUnsignedLongLong(key.low));
        if (key.high == 0) return low.Release();
        const Owned high(PyLong_FromUnsignedLongLong(key.high)), shifted(PyNumber_Lshift(high.get(), bits_.get()));
        return Owned(PyNumber_Or(shifted.get(), low.get())).Release();
    }

  private:
    Owned bits_;
};

// Call `take` for each item of a list or tuple.
template <typename Take>
void ForEach(PyObject* items, Take take) {
    const bool is_list = PyList_Check(items);
    Check(is_list || PyTuple_Check(items));
    const Py_ssize_t count = is_list ? PyList_Size(items) : PyTuple_Size(items);
    for (Py_ssize_t at = 0; at < count; ++at) take(is_list ? PyList_GetItem(items, at) : PyTuple_GetItem(items, at));
}

std::vector<Key> ReadKeys(PyObject* given) {
    const Halves halves;
    std::vector<Key> keys;
    bool is_wide = false;  // keys are mostly of one width
    ForEach(given, [&](PyObject* one) {
        Check(PyLong_Check(one));
        if (!is_wide) {
            const unsigned long long low = PyLong_AsUnsignedLongLong(one);
            if (low != ~0ULL || !PyErr_Occurred()) {
                keys.push_back({low, 0});
                return;
            }
            PyErr_Clear();
            is_wide = true;
        }
        keys.push_back(halves.Of(one));
    });
    return keys;
}

Table& TableOf(PyObject* arguments) { return In<Table>(At(arguments, 0), kTable); }

Number ReadCell(const Table& table, PyObject* number) {
    const Int cell = ReadInt(number);
    Check(cell >= 0 && static_cast<size_t>(cell) < table.cells());
    return static_cast<Number>(cell);
}

Number CellOf(const Table& table, PyObject* arguments) { return ReadCell(table, At(arguments, 1)); }

// new(sweep_at) -> index
PyObject* New(PyObject* arguments) {
    const Int sweep_at = ReadInt(At(arguments, 0));
    Check(sweep_at >= 0);
    return PyCapsule_New(new Table(static_cast<size_t>(sweep_at)), kTable, Destroy<Table>);
}

// new_cell(index) -> cell
PyObject* NewCell(PyObject* arguments) { return PyLong_FromSize_t(TableOf(arguments).NewCell()); }

// clear(index, cell)
void Clear(PyObject* arguments) {
    Table& table = TableOf(arguments);
    table.Clear(CellOf(table, arguments));
}

// release(index, cell)
void Release(PyObject* arguments) {
    Table& table = TableOf(arguments);
    table.Release(CellOf(table, arguments));
}

// size(index, cell) -> number of its keys
PyObject* Size(PyObject* arguments) {
    const Table& table = TableOf(arguments);
    return PyLong_FromSize_t(table.Size(CellOf(table, arguments)));
}

// digest(index, cell) -> (number of its keys, their sum), each as often as it has copies
PyObject* Digest(PyObject* arguments) {
    const Table& table = TableOf(arguments);
    const Sum& sum = table.Digest(CellOf(table, arguments));
    const auto low = static_cast<uint64_t>(sum.total), high = static_cast<uint64_t>(sum.total >> 64);
    const Owned number(PyLong_FromUnsignedLongLong(sum.number)), total(Halves().Joined({low, high}));
    return PyTuple_Pack(2, number.get(), total.get());
}

// num_keys(index) -> keys in the table, swept or not
PyObject* NumKeys(PyObject* arguments) { return PyLong_FromSize_t(TableOf(arguments).NumKeys()); }

// add(index, cell, keys)
void Add(PyObject* arguments) {
    Table& table = TableOf(arguments);
    const std::vector<Key> keys = ReadKeys(At(arguments, 2));
    table.Add(CellOf(table, arguments), keys);
}

// remove(index, cell, keys) -> how many of them it did not have
PyObject* Remove(PyObject* arguments) {
    Table& table = TableOf(arguments);
    const std::vector<Key> keys = ReadKeys(At(arguments, 2));
    return PyLong_FromSize_t(table.Remove(CellOf(table, arguments), keys));
}

// packed_keys(index, cell, words, first, end) -> the keys of a cell in some parts of the table, each as often as it has
// copies, as big-endian words of 64 bits: the last one, or both
PyObject* PackedKeys(PyObject* arguments) {
    const Table& table = TableOf(arguments);
    const Int words = ReadInt(At(arguments, 2));
    const Int first = ReadInt(At(arguments, 3)), end = ReadInt(At(arguments, 4));
    Check(words == 1 || words == 2);
    Check(0 <= first && first <= end && end <= static_cast<Int>(kShards));
    std::string packed;
    const auto take = [&](Key key, uint64_t copies) {
        const uint64_t both[] = {__builtin_bswap64(key.high), __builtin_bswap64(key.low)};
        const char* const last = reinterpret_cast<const char*>(both + 2);
        for (; copies > 0; --copies) packed.append(last - 8 * words, static_cast<size_t>(8 * words));
    };
    table.ForEach(CellOf(table, arguments), take, static_cast<size_t>(first), static_cast<size_t>(end));
    return PyBytes_FromStringAndSize(packed.data(), static_cast<Py_ssize_t>(packed.size()));
}

// within(keys, end) -> those of the keys that are in the first parts of the table, before `end`
PyObject* Within(PyObject* arguments) {
    PyObject* const given = At(arguments, 0);
    const auto end = static_cast<size_t>(ReadInt(At(arguments, 1)));
    const std::vector<Key> keys = ReadKeys(given);
    Owned found(PyList_New(0));
    for (size_t at = 0; at < keys.size(); ++at) {
        if (Table::PartOf(keys[at]) >= end) continue;
        const Owned key(PySequence_GetItem(given, static_cast<Py_ssize_t>(at)));
        if (PyList_Append(found.get(), key.get()) < 0) throw Failed{};
    }
    return found.Release();
}

// layout((hash_size, unit, partial_hits, safe, num_groups), [(groups, kind, block_size, window, chunk, drops), ...])
PyObject* MakeLayout(PyObject* arguments) {
    PyObject* const head = At(arguments, 0);
    Layout layout{ReadInt(At(head, 0)), ReadInt(At(head, 1)), ReadInt(At(head, 2)), ReadInt(At(head, 3)),
                  ReadInt(At(head, 4)), {}};
    Check(layout.hash_size > 0 && layout.unit > 0 && layout.num_groups > 0);
    ForEach(At(arguments, 1), [&](PyObject* given) {
        LookupClass one{{}, ReadInt(At(given, 1)), ReadInt(At(given, 2)), ReadInt(At(given, 3)),
                        ReadInt(At(given, 4)), ReadInt(At(given, 5))};
        ForEach(At(given, 0), [&](PyObject* number) {
            const Int group = ReadInt(number);
            Check(group >= 0 && group < layout.num_groups);
            one.groups.push_back(static_cast<size_t>(group));
        });
        Check(one.kind >= kFull && one.kind <= kState && one.block_size > 0 && !one.groups.empty());
        Check(one.block_size % layout.hash_size == 0 && (one.kind != kChunked || one.chunk > 0));
        layout.classes.push_back(std::move(one));
    });
    return PyCapsule_New(new Layout(std::move(layout)), kLayout, Destroy<Layout>);
}

// A place whose hit is asked for.
struct Asked {
    const Layout* layout;
    std::vector<Number> cells, others;  // by group of the layout; `others`, several for each, may have a key instead
    Int shared;                         // which of `AllAsked::shared` may have it too; -1: none
};

// All places that are asked for, and what some of them share: cells, and the number of groups that they are for.
struct AllAsked {
    std::vector<Asked> places;
    std::vector<std::pair<std::vector<Number>, size_t>> shared;
};

std::vector<Number> ReadCells(const Table& table, PyObject* given, const Layout& layout) {
    std::vector<Number> cells;
    ForEach(given, [&](PyObject* cell) { cells.push_back(ReadCell(table, cell)); });
    Check(cells.size() % static_cast<size_t>(layout.num_groups) == 0);
    return cells;
}

AllAsked ReadAsked(const Table& table, PyObject* given) {
    AllAsked all;
    std::map<std::pair<PyObject*, Int>, Int> known;  // an object keeps its address while `given` holds it
    ForEach(given, [&](PyObject* place) {
        const Layout& layout = In<Layout>(At(place, 0), kLayout);
        Asked one{&layout, ReadCells(table, At(place, 1), layout), ReadCells(table, At(place, 2), layout), -1};
        Check(one.cells.size() == static_cast<size_t>(layout.num_groups));
        if (PyObject* const shared = At(place, 3); PySequence_Size(shared) != 0) {
            const auto next = static_cast<Int>(all.shared.size());
            const auto [at, is_new] = known.emplace(std::pair{shared, layout.num_groups}, next);
            if (is_new) all.shared.emplace_back(ReadCells(table, shared, layout), layout.num_groups);
            one.shared = at->second;
        }
        all.places.push_back(std::move(one));
    });
    return all;
}

// What any of several cells of each group has, one of `size` groups.
std::vector<Runs> AnyOf(const Columns& columns, const std::vector<Number>& cells, size_t size) {
    std::vector<Runs> any(size);
    for (size_t at = 0; at < cells.size(); ++at) any[at % size] = Either(any[at % size], columns.Of(cells[at]));
    return any;
}

// claims(index, keys, num_tokens, [(layout, cells, others, shared), ...]) -> [(tokens, (alone, ...)), ...]
PyObject* Claims(PyObject* arguments) {
    const Table& table = TableOf(arguments);
    const std::vector<Key> keys = ReadKeys(At(arguments, 1));
    const Int most = ReadInt(At(arguments, 2)) - 1;
    const AllAsked asked = ReadAsked(table, At(arguments, 3));
    std::vector<Number> cells;
    const auto add = [&](const std::vector<Number>& more) { cells.insert(cells.end(), more.begin(), more.end()); };
    for (const Asked& one : asked.places) add(one.cells), add(one.others);
    for (const auto& [numbers, size] : asked.shared) add(numbers);
    const Columns columns(table, table.Find(keys), cells);
    std::vector<std::vector<Runs>> shared;
    for (const auto& [numbers, size] : asked.shared) shared.push_back(AnyOf(columns, numbers, size));
    Owned claims(PyList_New(0));
    for (const Asked& one : asked.places) {
        std::vector<Runs> own = AnyOf(columns, one.cells, one.cells.size());
        const std::vector<Runs> others = AnyOf(columns, one.others, own.size());
        for (size_t group = 0; group < own.size(); ++group) {
            own[group] = Either(own[group], others[group]);
            if (one.shared >= 0) own[group] = Either(own[group], shared[static_cast<size_t>(one.shared)][group]);
        }
        std::vector<Runs> of_class;
        for (const LookupClass& group : one.layout->classes) {
            Runs all = own[group.groups[0]];
            for (size_t at = 1; at < group.groups.size(); ++at) all = Both(all, own[group.groups[at]]);
            of_class.push_back(std::move(all));
        }
        Search search(*one.layout, of_class, static_cast<Int>(keys.size()));
        const Int tokens = search.Longest(most);
        const std::vector<Int> lengths = search.Alone(most);
        Owned alone(PyTuple_New(static_cast<Py_ssize_t>(lengths.size())));
        for (size_t at = 0; at < lengths.size(); ++at) {
            Owned length(PyLong_FromLongLong(lengths[at]));
            PyTuple_SetItem(alone.get(), static_cast<Py_ssize_t>(at), length.Release());
        }
        const Owned claim(Py_BuildValue("(LO)", static_cast<long long>(tokens), alone.get()));
        if (PyList_Append(claims.get(), claim.get()) < 0) throw Failed{};
    }
    return claims.Release();
}

PyMethodDef kMethods[] = {
    {"new", Method<New>, METH_VARARGS, nullptr},             {"new_cell", Method<NewCell>, METH_VARARGS, nullptr},
    {"clear", Method<Clear>, METH_VARARGS, nullptr},         {"release", Method<Release>, METH_VARARGS, nullptr},
    {"digest", Method<Digest>, METH_VARARGS, nullptr},       {"size", Method<Size>, METH_VARARGS, nullptr},
    {"num_keys", Method<NumKeys>, METH_VARARGS, nullptr},    {"add", Method<Add>, METH_VARARGS, nullptr},
    {"remove", Method<Remove>, METH_VARARGS, nullptr},       {"packed_keys", Method<PackedKeys>, METH_VARARGS, nullptr},
    {"within", Method<Within>, METH_VARARGS, nullptr},       {"layout", Method<MakeLayout>, METH_VARARGS, nullptr},
    {"claims", Method<Claims>, METH_VARARGS, nullptr},       {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace kvplane_fleet

PyMODINIT_FUNC PyInit__native() {
    PyObject* module = PyModule_Create(&kvplane_fleet::kModule);
    if (module == nullptr || PyModule_AddStringConstant(module, "SOURCES", KVPLANE_SOURCES) < 0) return nullptr;
    if (PyModule_AddIntConstant(module, "PARTS", kvplane_fleet::kShards) < 0) return nullptr;
    return module;
}
