// Calls of a core by name: `read(core, name, ...)` answers a question, `change(core, name, ...)` changes the core. A
// name stands for a C++ function, whose arguments and answer are converted by their types.
#pragma once

#include <tuple>
#include <unordered_map>

#include "bind.h"

namespace kvplane {

// An argument of a function that takes a T.
template <typename T>
struct Given {
    explicit Given(PyObject* object) { FromPy(object, &value); }
    T value{};
};
template <>
struct Given<PyObject*> {
    explicit Given(PyObject* object) : value(object) {}
    PyObject* value;
};
template <typename T>
struct Given<Buffer<T>> {
    explicit Given(PyObject* object) : value(object) {}
    Buffer<T> value;
};

// A number of tokens of a request.
struct Position {
    Int tokens = 0;
};
inline bool IsPosition(Int tokens) { return tokens >= 0 && tokens <= kMaxTokens; }
inline void FromPy(PyObject* object, Position* position) {
    FromPy(object, &position->tokens);
    Check(IsPosition(position->tokens));
}

// A function that takes a core, or the replica in it, and arguments of Python.
template <typename F>
struct Call;
template <typename Answer, typename Of, typename... T>
struct Call<Answer (*)(Of, T...)> {
    static constexpr Py_ssize_t kCount = sizeof...(T);

    template <auto kFunction>
    static PyObject* Run(PyObject* capsule, bool of_any, PyObject* const* given) {
        return With<kFunction>(capsule, of_any, given, std::index_sequence_for<T...>());
    }

  private:
    template <auto kFunction, size_t... kAt>
    static PyObject* With(PyObject* capsule, bool of_any, [[maybe_unused]] PyObject* const* given,
                          std::index_sequence<kAt...>) {
        // To convert an argument may run Python, and so another thread, which may begin a step: the core comes after.
        std::tuple<Given<std::remove_cvref_t<T>>...> values(given[kAt]...);
        Core& core = of_any ? AnyCoreOf(capsule) : CoreOf(capsule);
        const auto call = [&]() -> Answer {
            if constexpr (std::is_same_v<Of, Core&>) {
                return kFunction(core, std::get<kAt>(values).value...);
            } else {
                return kFunction(core.replica, std::get<kAt>(values).value...);
            }
        };
        if constexpr (std::is_void_v<Answer>) {
            call();
            return Py_NewRef(Py_None);
        } else if constexpr (std::is_same_v<Answer, PyObject*>) {
            return call();
        } else {
            return ToPy(call());
        }
    }
};

// The functions of one table, by name.
class Functions {
  public:
    struct Row {
        const char* name;
        Py_ssize_t count;
        PyObject* (*run)(PyObject*, bool, PyObject* const*);
        bool of_any;  // also of a core whose state is half changed
    };

    Functions(std::initializer_list<Row> rows) {
        for (const Row& row : rows) by_name_.emplace(NotNull(PyUnicode_InternFromString(row.name)), row);
    }

    PyObject* Run(PyObject* const* arguments, Py_ssize_t count) const {
        Check(count >= 2);
        const auto found = by_name_.find(arguments[1]);  // Python interns the names in its code
        Check(found != by_name_.end() && count == found->second.count + 2);
        return found->second.run(arguments[0], found->second.of_any, arguments + 2);
    }

  private:
    std::unordered_map<PyObject*, Row> by_name_;
};

template <auto kFunction>
constexpr Functions::Row Named(const char* name, bool of_any = false) {
    using Of = Call<decltype(+kFunction)>;
    return {name, Of::kCount, Of::template Run<kFunction>, of_any};
}

}  // namespace kvplane
