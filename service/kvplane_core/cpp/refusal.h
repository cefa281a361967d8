// Why a step is refused, in the words of `reasons.py`, which has the texts; and the checks of single columns.
#pragma once

#include "ranges.h"

namespace kvplane {

constexpr Int kNone = -1;  // instead of the number of a part or a row
constexpr auto kWholeColumn = static_cast<size_t>(kNone);

struct Refusal {
    const char *reason = "", *column = "";
    Int part = kNone, row = kNone;
    Column values;
};

// A step, or a row of one, is refused.
struct Refused {
    Refusal refusal;
};

// Finds out whether slots are in range and each there once. Most steps name the slots of the step before.
class DistinctSlots {
  public:
    // `last`: slots that are; becomes these if they are.
    bool Are(const Column& slots, Column* last) {
        if (slots == *last) return true;
        ++mark_;
        for (const Int slot : slots) {
            if (slot < 0 || slot >= kMaxSlots || std::exchange(seen_[static_cast<size_t>(slot)], mark_) == mark_)
                return false;
        }
        *last = slots;
        return true;
    }

  private:
    std::vector<uint64_t> seen_ = std::vector<uint64_t>(kMaxSlots);  // by slot: mark_ when it was last named
    uint64_t mark_ = 0;
};

class ColumnChecks {
  public:
    explicit ColumnChecks(const Spec& spec) : spec_(spec) {}

    // Notes why a step, or a row, is refused; returns false.
    [[gnu::cold, gnu::noinline]] bool Refuse(const char* reason, const char* column, size_t row = kWholeColumn,
                                             Column values = {}) {
        refusal_ = {reason, column, part_, static_cast<Int>(row), std::move(values)};
        return false;
    }
    const Refusal& refusal() const { return refusal_; }

  protected:
    // Whether each field has one entry per row, or no entry.
    template <size_t N>
    bool Fit(const std::array<NumEntries, N>& fields, size_t rows) {
        for (const NumEntries& one : fields) {
            if (one.count && one.count != rows)
                return Refuse("count", one.name, kWholeColumn, {static_cast<Int>(rows)});
        }
        return true;
    }

    static bool Within(Int value, Int low, Int high) { return low <= value && value <= high; }
    bool Range(const Column& column, Int low, Int high, const char* name) {
        const auto fits = [&](Int one) { return Within(one, low, high); };
        return std::all_of(column.begin(), column.end(), fits) || Refuse("range", name, kWholeColumn, {low, high});
    }
    bool Range(Int value, Int low, Int high, const char* name) {
        return Within(value, low, high) || Refuse("range", name, kWholeColumn, {low, high});
    }
    template <typename Section>
    bool AreInRange(const Section& section) {
        return InRanges(section, spec_, [&](const auto& value, Int low, Int high, const char* name) {
            return Range(value, low, high, name);
        });
    }
    bool Bits(const Column& column, Int allowed, const char* name) {
        const auto fits = [&](Int one) { return (one & ~allowed) == 0; };
        return std::all_of(column.begin(), column.end(), fits) || Refuse("flags", name, kWholeColumn, {allowed});
    }
    bool Texts(bool fit, const char* name) { return fit || Refuse("text", name); }
    bool Hints(const Column& column, Int least, const char* name) {
        const Int most = std::max<Int>(1, spec_.hint_values) - 1;
        const auto fits = [&](Int one) { return Within(one, least, most); };
        return std::all_of(column.begin(), column.end(), fits) || Refuse("hints", name);
    }
    static Int Sum(const Column& column) {  // of any numbers: one that is too large is no number of ids
        uint64_t sum = 0;
        for (const Int one : column) sum += static_cast<uint64_t>(one);
        return static_cast<Int>(sum);
    }

    // Reads the bytes per digest, 0 if there are none.
    bool DigestSize(const Hashes& hashes, const Column& counts, const char* of_counts, const char* of_hashes,
                    size_t* size) {
        *size = 0;
        if (!Range(counts, 0, kMaxTokens, of_counts)) return false;
        const auto count = static_cast<size_t>(Sum(counts));
        if (count) *size = static_cast<size_t>(spec_.digest_size);
        return *size * count == hashes.size ||
               Refuse("hash bytes", of_hashes, kWholeColumn, {static_cast<Int>(count), static_cast<Int>(*size)});
    }

    const Spec& spec_;
    Int part_ = kNone;  // the part that is checked

  private:
    Refusal refusal_;  // of the last step that was not accepted
};

}  // namespace kvplane
