// Work in slices, and what the checks of a state tell.
#pragma once

#include <concepts>
#include <coroutine>

#include "../types.h"

namespace kvplane {

struct Pause {};

// Work that pauses at each `co_yield Pause()`, so that its caller can do other things. What it reads must not change
// meanwhile: it may have kept addresses of it.
class Slices {
  public:
    struct promise_type {
        std::exception_ptr error;

        Slices get_return_object() { return Slices(std::coroutine_handle<promise_type>::from_promise(*this)); }
        std::suspend_always initial_suspend() noexcept { return {}; }
        std::suspend_always final_suspend() noexcept { return {}; }
        std::suspend_always yield_value(Pause) noexcept { return {}; }
        void return_void() noexcept {}
        void unhandled_exception() noexcept { error = std::current_exception(); }
    };

    explicit Slices(std::coroutine_handle<promise_type> work) : work_(work) {}
    Slices(Slices&& other) noexcept : work_(std::exchange(other.work_, nullptr)) {}
    Slices& operator=(Slices&&) = delete;
    ~Slices() {
        if (work_) work_.destroy();
    }

    // Works until the next pause; returns whether work is left. Throws what the work throws.
    bool Next() {
        if (work_.done()) return false;
        work_.resume();
        if (work_.promise().error) std::rethrow_exception(std::exchange(work_.promise().error, nullptr));
        return !work_.done();
    }

  private:
    std::coroutine_handle<promise_type> work_;
};

// Divides work into slices of about a millisecond, by what its parts take.
class Pace {
  public:
    // What the next entry of a column takes, one anywhere in memory, and a look-up of a key.
    static constexpr Int kNear = 1, kFar = 8, kLookUp = 24;

    // Whether it is time for a pause.
    bool Spend(Int units) {
        left_ -= units;
        if (left_ > 0) return false;
        left_ = kSlice;
        return true;
    }

  private:
    static constexpr Int kSlice = kSmallTables ? 64 : 1 << 17;
    Int left_ = kSlice;
};

// A state contradicts itself: a bug, or damaged memory. `name`: of the invariant, as in `invariants.py`.
struct BrokenInvariant {
    std::string name, text;
};

inline std::string Hex(const Digest& digest) {
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    for (size_t at = 0; at < digest.size; ++at) {
        text += kDigits[digest.bytes[at] >> 4];
        text += kDigits[digest.bytes[at] & 15];
    }
    return text;
}

inline std::string Words(const std::string& text) { return text; }
inline std::string Words(const char* text) { return text; }
inline std::string Words(bool value) { return value ? "True" : "False"; }
template <std::integral T>
std::string Words(T number) {
    return std::to_string(number);
}
// The first of some values.
template <typename T>
std::string Words(const std::vector<T>& values) {
    std::string text;
    for (size_t at = 0; at < std::min<size_t>(values.size(), 9); ++at) text += (at ? ", " : "") + Words(values[at]);
    return "[" + text + "]";
}

template <typename... Parts>
[[noreturn]] void Fail(const char* name, const Parts&... parts) {
    throw BrokenInvariant{name, (Words(parts) + ...)};
}

// A column of zeros, which takes no time to make: its memory is used where it is written.
template <typename T>
class Zeros {
  public:
    explicit Zeros(size_t size) : size_(size), data_(static_cast<T*>(std::calloc(size, sizeof(T)))) {
        if (data_ == nullptr) throw std::bad_alloc();
    }
    Zeros(const Zeros&) = delete;
    Zeros& operator=(const Zeros&) = delete;
    ~Zeros() { std::free(data_); }

    size_t size() const { return size_; }
    T& operator[](size_t at) { return data_[at]; }
    const T& operator[](size_t at) const { return data_[at]; }

  private:
    size_t size_;
    T* data_;
};

}  // namespace kvplane
