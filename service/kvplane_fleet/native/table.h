// Which keys are cached in which cells: the compiled twin of `kvplane_fleet.index`, which specifies it.
//
//     shard: key -> number of a set        sets: number -> bits of cells, and how many keys have it
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <random>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace kvplane_fleet {

// The end of an engine's hash: 128 bits, or 64 with `high` 0.
struct Key {
    uint64_t low, high;
    bool operator==(const Key& other) const { return low == other.low && high == other.high; }
};
using Number = uint32_t;  // of a set or a cell

constexpr Number kEmpty = 0;  // the set without cells
constexpr size_t kShards = 256;
constexpr size_t kAhead = 12;  // keys whose slots are fetched before they are read

// The secrets of this process, so that no engine can choose keys that share a slot.
inline const std::array<uint64_t, 2> kSecrets = [] {
    std::random_device device;
    const auto word = [&device] { return uint64_t{device()} << 32 | device(); };
    return std::array<uint64_t, 2>{word(), word() | 1};
}();

inline uint64_t Mixed(uint64_t word) {
    const unsigned __int128 product = static_cast<unsigned __int128>(word ^ kSecrets[0]) * kSecrets[1];
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t Mixed(Key key) { return Mixed(key.high ? key.low ^ Mixed(key.high) : key.low); }

struct KeyHash {
    size_t operator()(Key key) const { return Mixed(key); }
};

// Interned sets of cells. Sets that become equal by `Without` keep their numbers; new keys take one of them.
class Sets {
  public:
    Sets() : known_(8, Hash{this}, Equal{this}) { Make(std::vector<uint64_t>(1)); }
    Sets(const Sets&) = delete;
    Sets& operator=(const Sets&) = delete;

    size_t words() const { return words_; }
    size_t numbers() const { return keys_.size(); }
    size_t keys(Number set) const { return keys_[set]; }
    const uint64_t* bits(Number set) const { return &bits_[set * words_]; }
    bool Has(Number set, Number cell) const { return bits(set)[cell / 64] >> (cell % 64) & 1; }

    bool IsEmpty(Number set) const {
        for (size_t word = 0; word < words_; ++word) {
            if (bits(set)[word]) return false;
        }
        return true;
    }

    // Make room for cells up to this one.
    void Reach(Number cell) {
        size_t words = words_;
        while (cell >= words * 64) words *= 2;
        if (words == words_) return;
        known_.clear();
        std::vector<uint64_t> wider(keys_.size() * words);
        for (size_t set = 0; set < keys_.size(); ++set) {
            std::copy_n(&bits_[set * words_], words_, &wider[set * words]);
        }
        bits_.swap(wider);
        words_ = words;
        for (Number set = 0; set < keys_.size(); ++set) {
            if (is_known_[set]) known_.insert(set);
        }
    }

    // Return the set with a cell added or removed.
    Number Flipped(Number set, Number cell) {
        Step& step = steps_[(set * 0x9e3779b1u ^ cell * 0x85ebca77u) % steps_.size()];
        if (step.cell == cell && step.from == set && step.from_life == lives_[set] && step.to_life == lives_[step.to]) {
            return step.to;
        }
        std::vector<uint64_t> wanted(bits(set), bits(set) + words_);
        wanted[cell / 64] ^= uint64_t{1} << (cell % 64);
        const auto known = known_.find(wanted.data());
        const Number to = known != known_.end() ? *known : Make(wanted);
        step = {set, to, cell, lives_[set], lives_[to]};
        return to;
    }

    // A key went from one set to another.
    void Move(Number from, Number to) {
        ++keys_[to];
        --keys_[from];
        if (from != kEmpty && keys_[from] == 0) Drop(from);
    }

    // Remove a cell from every set.
    void Without(Number cell) {
        for (Number set = 1; set < keys_.size(); ++set) {
            if (keys_[set] == 0 || !Has(set, cell)) continue;
            if (is_known_[set]) known_.erase(set);
            bits_[set * words_ + cell / 64] &= ~(uint64_t{1} << (cell % 64));
            ++lives_[set];
            is_known_[set] = known_.insert(set).second;
        }
    }

    // The keys of a set are gone.
    void Drop(Number set) {
        if (is_known_[set]) known_.erase(set);
        is_known_[set] = false;
        keys_[set] = 0;
        ++lives_[set];
        unused_.push_back(set);
    }

  private:
    struct Hash {
        using is_transparent = void;
        const Sets* sets;
        size_t operator()(const uint64_t* bits) const {
            uint64_t sum = 0;
            for (size_t word = 0; word < sets->words_; ++word) sum = Mixed(sum ^ bits[word]);
            return sum;
        }
        size_t operator()(Number set) const { return (*this)(sets->bits(set)); }
    };
    struct Equal {
        using is_transparent = void;
        const Sets* sets;
        bool operator()(const uint64_t* one, const uint64_t* other) const {
            return std::equal(one, one + sets->words_, other);
        }
        bool operator()(Number one, const uint64_t* other) const { return (*this)(sets->bits(one), other); }
        bool operator()(const uint64_t* one, Number other) const { return (*this)(one, sets->bits(other)); }
        bool operator()(Number one, Number other) const { return (*this)(sets->bits(one), sets->bits(other)); }
    };
    // What `Flipped` found, as long as both sets live.
    struct Step {
        Number from = 0, to = 0, cell = ~Number{0};
        uint32_t from_life = 0, to_life = 0;
    };

    Number Make(const std::vector<uint64_t>& wanted) {
        Number set;
        if (unused_.empty()) {
            set = static_cast<Number>(keys_.size());
            keys_.push_back(0);
            lives_.push_back(0);
            is_known_.push_back(false);
            bits_.resize(bits_.size() + words_);
        } else {
            set = unused_.back();
            unused_.pop_back();
        }
        std::copy_n(wanted.begin(), words_, &bits_[set * words_]);
        is_known_[set] = known_.insert(set).second;
        return set;
    }

    size_t words_ = 1;
    std::vector<uint64_t> bits_;
    std::vector<size_t> keys_;
    std::vector<uint32_t> lives_;
    std::vector<bool> is_known_;
    std::vector<Number> unused_;
    std::unordered_set<Number, Hash, Equal> known_;
    std::array<Step, 1 << 13> steps_;
};

// Open addressing with linear probes. A slot without a set is free; a removal moves later slots up.
class Shard {
  public:
    size_t size() const { return size_; }
    size_t slots() const { return keys_.size(); }
    Key key(size_t slot) const { return keys_[slot]; }
    Number& set(size_t slot) { return sets_[slot]; }
    Number set(size_t slot) const { return sets_[slot]; }

    void Fetch(uint64_t mixed) const {
        if (keys_.empty()) return;
        __builtin_prefetch(&keys_[Home(mixed)]);
        __builtin_prefetch(&sets_[Home(mixed)]);
    }

    // Return the slot of a key, or the free one where it belongs. There must be a slot.
    size_t Find(Key key, uint64_t mixed) const {
        size_t slot = Home(mixed);
        while (sets_[slot] != kEmpty && !(keys_[slot] == key)) slot = (slot + 1) & (keys_.size() - 1);
        return slot;
    }

    Number SetOf(Key key, uint64_t mixed) const { return keys_.empty() ? kEmpty : sets_[Find(key, mixed)]; }

    // Make room for one more key.
    void Reserve() {
        if (4 * (size_ + 1) <= 3 * keys_.size()) return;
        std::vector<Key> keys(std::max<size_t>(2 * keys_.size(), 16));
        std::vector<Number> sets(keys.size());
        keys.swap(keys_);
        sets.swap(sets_);
        for (size_t slot = 0; slot < keys.size(); ++slot) {
            if (sets[slot] == kEmpty) continue;
            const size_t at = Find(keys[slot], Mixed(keys[slot]));
            keys_[at] = keys[slot];
            sets_[at] = sets[slot];
        }
    }

    void Insert(size_t slot, Key key, Number set) {
        keys_[slot] = key;
        sets_[slot] = set;
        ++size_;
    }

    void Erase(size_t slot) {
        const size_t mask = keys_.size() - 1;
        for (size_t next = (slot + 1) & mask; sets_[next] != kEmpty; next = (next + 1) & mask) {
            if (((next - Home(Mixed(keys_[next]))) & mask) < ((next - slot) & mask)) continue;
            keys_[slot] = keys_[next];
            sets_[slot] = sets_[next];
            slot = next;
        }
        sets_[slot] = kEmpty;
        --size_;
    }

  private:
    size_t Home(uint64_t mixed) const { return (mixed >> 8) & (keys_.size() - 1); }

    std::vector<Key> keys_;
    std::vector<Number> sets_;
    size_t size_ = 0;
};

// A run of keys of a prompt that have one set.
struct Segment {
    uint32_t begin, end;
    Number set;
};

// The number of keys of a cell and their sum, each as often as it has copies.
struct Sum {
    uint64_t number = 0;
    unsigned __int128 total = 0;

    static unsigned __int128 Of(Key key) { return static_cast<unsigned __int128>(key.high) << 64 | key.low; }
    void Add(Key key) { ++number, total += Of(key); }
    void Subtract(Key key) { --number, total -= Of(key); }
};

class Table {
  public:
    explicit Table(size_t sweep_at) : sweep_at_(sweep_at) {}

    Number NewCell() {
        Number cell = static_cast<Number>(sizes_.size());
        if (free_.empty()) {
            sizes_.push_back(0);
            sums_.push_back({});
            copies_.emplace_back();
            sets.Reach(cell);
        } else {
            cell = free_.back();
            free_.pop_back();
        }
        return cell;
    }

    void Clear(Number cell) {
        if (sizes_[cell] == 0) return;
        sets.Without(cell);
        sizes_[cell] = 0;
        sums_[cell] = {};
        copies_[cell].clear();
        Sweep();
    }

    void Release(Number cell) {
        Clear(cell);
        free_.push_back(cell);
    }

    void Add(Number cell, const std::vector<Key>& keys) {
        for (size_t at = 0; at < keys.size(); ++at) {
            if (at + kAhead < keys.size()) Fetch(keys[at + kAhead]);
            const uint64_t mixed = Mixed(keys[at]);
            Shard& shard = shards_[mixed % kShards];
            sums_[cell].Add(keys[at]);
            shard.Reserve();
            const size_t slot = shard.Find(keys[at], mixed);
            const Number before = shard.set(slot);
            if (before != kEmpty && sets.Has(before, cell)) {
                ++copies_[cell][keys[at]];
                continue;
            }
            const Number after = sets.Flipped(before, cell);
            if (before == kEmpty) {
                shard.Insert(slot, keys[at], after);
            } else {
                shard.set(slot) = after;
            }
            sets.Move(before, after);
            ++sizes_[cell];
        }
    }

    // Return how many of the keys the cell did not have.
    size_t Remove(Number cell, const std::vector<Key>& keys) {
        size_t unknown = 0;
        auto& copies = copies_[cell];
        for (size_t at = 0; at < keys.size(); ++at) {
            if (at + kAhead < keys.size()) Fetch(keys[at + kAhead]);
            const uint64_t mixed = Mixed(keys[at]);
            Shard& shard = shards_[mixed % kShards];
            const Number before = shard.SetOf(keys[at], mixed);
            if (before == kEmpty || !sets.Has(before, cell)) {
                ++unknown;
                continue;
            }
            sums_[cell].Subtract(keys[at]);
            const auto copy = copies.empty() ? copies.end() : copies.find(keys[at]);
            if (copy != copies.end()) {
                if (--copy->second == 0) copies.erase(copy);
                continue;
            }
            --sizes_[cell];
            const size_t slot = shard.Find(keys[at], mixed);
            Number after = sets.Flipped(before, cell);
            if (sets.IsEmpty(after)) {
                after = kEmpty;
                shard.Erase(slot);
            } else {
                shard.set(slot) = after;
            }
            sets.Move(before, after);
        }
        return unknown;
    }

    std::vector<Segment> Find(const std::vector<Key>& keys) const {
        std::vector<Segment> found;
        for (size_t at = 0; at < keys.size(); ++at) {
            if (at + kAhead < keys.size()) Fetch(keys[at + kAhead]);
            const uint64_t mixed = Mixed(keys[at]);
            const Number set = shards_[mixed % kShards].SetOf(keys[at], mixed);
            if (!found.empty() && found.back().set == set) {
                ++found.back().end;
            } else {
                found.push_back({static_cast<uint32_t>(at), static_cast<uint32_t>(at) + 1, set});
            }
        }
        return found;
    }

    // In which part of the table a key is, of kShards.
    static size_t PartOf(Key key) { return Mixed(key) % kShards; }

    // Call `take(key, copies)` for each key of a cell in parts of the table, from `first` to before `end`.
    template <typename Take>
    void ForEach(Number cell, Take take, size_t first = 0, size_t end = kShards) const {
        for (size_t part = first; part < end; ++part) {
            const Shard& shard = shards_[part];
            for (size_t slot = 0; slot < shard.slots(); ++slot) {
                if (shard.set(slot) == kEmpty || !sets.Has(shard.set(slot), cell)) continue;
                const auto copy = copies_[cell].find(shard.key(slot));
                take(shard.key(slot), copy == copies_[cell].end() ? 1 : 1 + copy->second);
            }
        }
    }

    size_t Size(Number cell) const { return sizes_[cell]; }
    const Sum& Digest(Number cell) const { return sums_[cell]; }
    size_t cells() const { return sizes_.size(); }

    size_t NumKeys() const {
        size_t sum = 0;
        for (const Shard& shard : shards_) sum += shard.size();
        return sum;
    }

    Sets sets;

  private:
    void Fetch(Key key) const {
        const uint64_t mixed = Mixed(key);
        shards_[mixed % kShards].Fetch(mixed);
    }

    // Delete the keys whose set has become empty, when they are many.
    void Sweep() {
        std::vector<bool> is_gone(sets.numbers());
        size_t gone = 0;
        for (Number set = 1; set < sets.numbers(); ++set) {
            if (sets.keys(set) == 0 || !sets.IsEmpty(set)) continue;
            is_gone[set] = true;
            gone += sets.keys(set);
        }
        if (gone < std::max(sweep_at_, NumKeys() / 2)) return;
        for (Shard& shard : shards_) {
            Shard kept;
            for (size_t slot = 0; slot < shard.slots(); ++slot) {
                const Number set = shard.set(slot);
                if (set == kEmpty || is_gone[set]) continue;
                kept.Reserve();
                kept.Insert(kept.Find(shard.key(slot), Mixed(shard.key(slot))), shard.key(slot), set);
            }
            shard = std::move(kept);
        }
        for (Number set = 1; set < is_gone.size(); ++set) {
            if (is_gone[set]) sets.Drop(set);
        }
    }

    size_t sweep_at_;
    std::array<Shard, kShards> shards_;
    std::vector<size_t> sizes_;                              // by cell
    std::vector<Sum> sums_;                                  // by cell
    std::vector<std::unordered_map<Key, uint32_t, KeyHash>> copies_;  // by cell: copies after the first
    std::vector<Number> free_;
};

}  // namespace kvplane_fleet
