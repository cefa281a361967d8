// How much of a prompt each place has cached: the compiled twin of `kvplane_fleet.hits` and of
// `kvplane_core.face.hit_rules`, which specify it. Columns are runs of cached units, because there are few.
#pragma once

#include <algorithm>
#include <numeric>

#include "table.h"

namespace kvplane_fleet {

using Int = int64_t;

struct Run {
    Int begin, end;
};
using Runs = std::vector<Run>;  // ascending, apart

inline void Append(Runs* runs, Run run) {
    if (run.begin >= run.end) return;
    if (!runs->empty() && runs->back().end >= run.begin) {
        runs->back().end = std::max(runs->back().end, run.end);
    } else {
        runs->push_back(run);
    }
}

inline Runs Both(const Runs& one, const Runs& other) {
    Runs both;
    for (size_t a = 0, b = 0; a < one.size() && b < other.size();) {
        Append(&both, {std::max(one[a].begin, other[b].begin), std::min(one[a].end, other[b].end)});
        one[a].end < other[b].end ? ++a : ++b;
    }
    return both;
}

inline Runs Either(const Runs& one, const Runs& other) {
    Runs all(one.size() + other.size()), either;
    std::merge(one.begin(), one.end(), other.begin(), other.end(), all.begin(),
               [](const Run& a, const Run& b) { return a.begin < b.begin; });
    for (const Run& run : all) Append(&either, run);
    return either;
}

// Return the largest index below `end` that is in a run and equals `rest` modulo `step`; -1 if there is none.
inline Int LastAt(const Runs& runs, Int end, Int step, Int rest) {
    for (auto run = runs.rbegin(); run != runs.rend(); ++run) {
        const Int last = std::min(run->end, end) - 1;
        const Int at = last - ((last - rest) % step + step) % step;
        if (at >= run->begin && at >= 0) return at;
    }
    return -1;
}

enum Kind : Int { kFull, kWindow, kChunked, kState };

struct LookupClass {
    std::vector<size_t> groups;
    Int kind, block_size, window, chunk, drops_last_block;
};

struct Layout {
    Int hash_size, unit, partial_hits, safe, num_groups;
    std::vector<LookupClass> classes;
};

// The look-ups of one prompt at one place.
class Search {
  public:
    // `columns`: by class, the hash blocks that all its groups have.
    Search(const Layout& layout, const std::vector<Runs>& columns, Int num_units)
        : layout_(layout), columns_(columns), num_units_(num_units) {
        Restart();
    }

    Int Longest(Int most) {
        if (most <= 0 || layout_.classes.empty()) return 0;
        if (layout_.num_groups == 1) return Length(0, most, layout_.classes[0].drops_last_block != 0);
        Restart();
        const bool two_pass_enough = layout_.classes.size() == 2 && layout_.classes[0].kind == kFull;
        Int candidate = most, length = most;
        while (true) {
            length = candidate;
            for (size_t number = 0; number < layout_.classes.size(); ++number) length = Ask(number, length);
            if (length >= candidate) break;
            candidate = length;
            if (two_pass_enough) break;
        }
        return std::min(candidate, length);
    }

    // By group; -1 for groups that are never cached.
    std::vector<Int> Alone(Int most) {
        Restart();
        std::vector<Int> lengths(static_cast<size_t>(layout_.num_groups), -1);
        for (size_t number = 0; number < layout_.classes.size(); ++number) {
            const Int length = most > 0 ? Ask(number, most) : 0;
            for (const size_t group : layout_.classes[number].groups) lengths[group] = length;
        }
        return lengths;
    }

  private:
    void Restart() {
        lengths_.assign(layout_.classes.size(), -1);
        dropped_.assign(layout_.classes.size(), false);
    }

    Int Ask(size_t number, Int length) {
        const LookupClass& one = layout_.classes[number];
        if (one.kind == kFull && lengths_[number] >= 0) return std::min(length, lengths_[number]);
        const bool drop = one.drops_last_block && !dropped_[number];
        Int reach = length;
        if (drop) reach = std::min(length + Margin(one), num_units_ * layout_.hash_size);
        const Int found = Length(number, reach, drop);
        if (drop) {
            dropped_[number] = true;
        } else if (found < length) {
            std::fill(dropped_.begin(), dropped_.end(), false);
        }
        lengths_[number] = found;
        return std::min(found, length);
    }

    Int Margin(const LookupClass& one) const {
        if (one.kind == kState) return 0;
        if (one.kind == kFull && layout_.partial_hits) return std::min(layout_.hash_size, one.block_size);
        return one.block_size;
    }

    Int Length(size_t number, Int max_tokens, bool drop) const {
        const LookupClass& one = layout_.classes[number];
        const Runs& column = columns_[number];
        const Int limit = std::max<Int>(std::min(max_tokens, num_units_ * layout_.hash_size), 0);
        switch (one.kind) {
            case kFull: return Full(one, column, limit, drop);
            case kWindow: return Window(one, column, limit, drop);
            case kChunked: return Chunked(one, column, limit);
            default: return State(one, column, limit);
        }
    }

    // Return the runs of a group's own blocks.
    Runs Blocks(const LookupClass& one, const Runs& column, Int limit) const {
        const Int step = one.block_size / layout_.hash_size, most = limit / one.block_size;
        Runs blocks;
        for (const Run& run : column) {
            const Int begin = (run.begin + step) / step - 1;
            Append(&blocks, {begin, std::min(run.end / step, most)});
        }
        return blocks;
    }

    static Int EndFrom(const Runs& blocks, Int first) {
        for (const Run& run : blocks) {
            if (run.begin <= first && first < run.end) return run.end;
        }
        return first;
    }

    Int Aligned(const LookupClass& one, Int blocks) const { return blocks - blocks % Stride(one); }
    Int Stride(const LookupClass& one) const { return layout_.unit / std::gcd(layout_.unit, one.block_size); }
    bool EndsInside(const LookupClass& one) const {
        return layout_.unit < one.block_size && one.block_size % layout_.unit == 0;
    }

    Int Full(const LookupClass& one, const Runs& column, Int limit, bool drop) const {
        const Int unit = layout_.unit, size = one.block_size;
        Int length = EndFrom(Blocks(one, column, limit), 0) * size;
        if (EndsInside(one)) {
            const Int end = std::min(length + size - unit, limit / unit * unit);
            const Int inside = (LastAt(column, end / unit, 1, 0) + 1) * unit;
            if (inside > length) length = inside;
        }
        if (drop && length > 0) length -= std::min(unit, size);
        return length - length % unit;
    }

    Int Window(const LookupClass& one, const Runs& column, Int limit, bool drop) const {
        const Int needed = std::max<Int>((one.window - 1 + one.block_size - 1) / one.block_size + drop, 1);
        const Runs blocks = Blocks(one, column, limit);
        const Int stride = Stride(one);
        Int end = 0;
        for (auto run = blocks.rbegin(); run != blocks.rend() && end == 0; ++run) {
            const Int first = run->begin == 0 ? 0 : run->begin + needed - 1, last = run->end - 1;
            const Int at = last - ((last + 1 - drop) % stride + stride) % stride;
            if (at >= first) end = at + 1;
        }
        if (end < needed && !layout_.safe) end = Aligned(one, end);
        if (drop && end > 0) end = Aligned(one, end - 1);
        return end * one.block_size;
    }

    Int Chunked(const LookupClass& one, const Runs& column, Int limit) const {
        const Runs blocks = Blocks(one, column, limit);
        const auto first_of = [&](Int end) { return end * one.block_size / one.chunk * one.chunk / one.block_size; };
        Int end = limit / one.block_size;
        while (true) {
            const Int first = first_of(end);
            end = std::min(end, EndFrom(blocks, first));
            if (first_of(end) == first) return end * one.block_size;
        }
    }

    Int State(const LookupClass& one, const Runs& column, Int limit) const {
        const Int stride = EndsInside(one) ? layout_.unit : std::lcm(one.block_size, layout_.unit);
        const Int step = stride / layout_.hash_size;
        return (LastAt(column, limit / stride * step, step, step - 1) + 1) / step * stride;
    }

    const Layout& layout_;
    const std::vector<Runs>& columns_;
    Int num_units_;
    std::vector<Int> lengths_;   // by class; -1: not asked
    std::vector<bool> dropped_;  // classes whose dropped block the candidate already excludes
};

// The runs of the cells that were asked for, read once for all places.
class Columns {
  public:
    Columns(const Table& table, const std::vector<Segment>& found, const std::vector<Number>& cells)
        : at_(table.cells(), -1), begins_(cells.size(), -1), runs_(cells.size()) {
        const size_t words = table.sets.words();
        std::vector<uint64_t> asked(words), before(words);
        for (const Number cell : cells) {
            if (at_[cell] < 0) at_[cell] = static_cast<Int>(next_++);
            asked[cell / 64] |= uint64_t{1} << (cell % 64);
        }
        for (const Segment& one : found) {
            const uint64_t* bits = table.sets.bits(one.set);
            for (size_t word = 0; word < words; ++word) {
                Change(word, before[word] ^ (bits[word] & asked[word]), one.begin);
            }
            for (size_t word = 0; word < words; ++word) before[word] = bits[word] & asked[word];
        }
        const Int end = found.empty() ? 0 : found.back().end;
        for (size_t word = 0; word < words; ++word) Change(word, before[word], end);
    }

    const Runs& Of(Number cell) const { return runs_[static_cast<size_t>(at_[cell])]; }

  private:
    void Change(size_t word, uint64_t changed, Int at) {
        for (; changed; changed &= changed - 1) {
            const auto column = static_cast<size_t>(at_[word * 64 + static_cast<size_t>(__builtin_ctzll(changed))]);
            Int& begin = begins_[column];
            if (begin < 0) {
                begin = at;
            } else {
                runs_[column].push_back({begin, at});
                begin = -1;
            }
        }
    }

    std::vector<Int> at_;      // by cell: its column
    std::vector<Int> begins_;  // by column: where its run began; -1 outside runs
    std::vector<Runs> runs_;
    size_t next_ = 0;
};

}  // namespace kvplane_fleet
