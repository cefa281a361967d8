// The index from a key that hazard follows to its entry.
#pragma once

#include "types.h"

namespace kvplane {

constexpr uint32_t kNoEntry = ~uint32_t{0};

// Open addressing with linear probing and deletion by shifting back. Engines choose keys, and must not choose where
// they collide: a place depends on secrets of this index.
class EntryIndex {
  public:
    EntryIndex() {
        std::random_device random;
        for (uint64_t& one : secrets_) one = uint64_t{random()} << 32 | random();
    }

    size_t count() const { return count_; }
    uint32_t Find(uint64_t key) const { return slots_[Locate(key)].entry; }

    // Adds a key that it does not have.
    void Add(uint64_t key, uint32_t entry) {
        if (++count_ * 2 > slots_.size()) {
            std::vector<Slot> before(slots_.size() * 2);
            before.swap(slots_);
            for (const Slot& one : before) {
                if (one.entry != kNoEntry) slots_[Locate(one.key)] = one;
            }
        }
        slots_[Locate(key)] = {key, entry};
    }

    void Remove(uint64_t key) {
        size_t hole = Locate(key);
        Require(slots_[hole].entry != kNoEntry, "a key has no entry");
        for (size_t at = Next(hole); slots_[at].entry != kNoEntry; at = Next(at)) {
            if (((at - Place(slots_[at].key)) & Mask()) < ((at - hole) & Mask())) continue;
            slots_[hole] = slots_[at];
            hole = at;
        }
        slots_[hole] = {};
        --count_;
    }

  private:
    struct Slot {
        uint64_t key = 0;
        uint32_t entry = kNoEntry;
    };

    size_t Mask() const { return slots_.size() - 1; }
    size_t Next(size_t at) const { return (at + 1) & Mask(); }
    size_t Place(uint64_t key) const {
        const unsigned __int128 product = static_cast<unsigned __int128>(key ^ secrets_[0]) * (secrets_[1] | 1);
        return static_cast<size_t>(static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64)) & Mask();
    }
    // Where the key is, or would be added.
    size_t Locate(uint64_t key) const {
        size_t at = Place(key);
        while (slots_[at].entry != kNoEntry && slots_[at].key != key) at = Next(at);
        return at;
    }

    std::vector<Slot> slots_ = std::vector<Slot>(kSmallTables ? 2 : 1 << 10);
    size_t count_ = 0;
    std::array<uint64_t, 2> secrets_;
};

}  // namespace kvplane
