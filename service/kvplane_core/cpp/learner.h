// Follows admissions for the policy HAZARD, see `hazard.Learner`: the history, and two ghost pools of sampled keys.
#pragma once

#include "hazard.h"
#include "types.h"

namespace kvplane {

// The index from a key that hazard follows to its entry.
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

constexpr Int kDuelPools = 8, kFirstPools = 3, kWins = 1000;

// Whether HAZARD hits more than LRU, by what the ghosts hit.
struct Duel {
    bool leads = false;
    Int gain = 0, spread = 0, looked_up = 0, first;  // look-ups before it can lead

    void Compare(Int num_keys, Int difference, Int pool) {
        const Int remembered = kDuelPools * pool, forgotten = std::min(num_keys, remembered);
        gain += difference * kUnit - FloorDiv(gain * forgotten, remembered);
        looked_up += num_keys * kUnit - looked_up * forgotten / remembered;
        for (int i = 0; i < 2; ++i) spread -= spread * forgotten / remembered;  // as the square of the gain
        spread += difference * difference * kUnit;
        first = std::max<Int>(0, first - num_keys);
        const bool is_clear = gain > 0 && 4 * gain * gain > 3 * spread * kUnit;
        if (first == 0 && is_clear && gain * kWins > looked_up) {
            leads = true;
        } else if (gain < 0) {
            leads = false;
        }
    }
};

// A key of a prompt that is followed, and how many tokens end with it.
struct Sampled {
    uint64_t key;
    Int depth;
};

class Learner {
  public:
    Learner(Int num_hash_blocks, Int hash_block_size)
        : shift(ShiftOf(num_hash_blocks)),
          pool(std::max<Int>(1, num_hash_blocks >> shift)),
          hazards(kShrinkTokens / hash_block_size >> shift),
          history(hazards),
          duel{.first = kFirstPools * pool},
          most(static_cast<size_t>(std::max(kGhostPools * pool, kLeastRemembered))),
          recency(most, pool),
          key(most),
          owner(most),
          depth(most),
          uses(most),
          resident(most + sizeof(uint64_t)),
          size_(hash_block_size) {}

    // Follows an admission; `num_hit`: tokens of its hit, which were seen.
    Prompt Admit(const Digests& digests, uint64_t salt, Int num_tokens, Int num_hit, Int hint) {
        FindSampled(digests, salt);
        const size_t known = RunOf([](uint32_t entry) { return entry != kNoEntry; });
        size_t many = 0;
        for (size_t at = 0; at < known; ++at) many += uses[entries_[at]] >= kManyUses - 1;
        const Int many_end = many ? sampled_[many - 1].depth : 0;
        const Int seen_end = std::max(num_hit, known ? sampled_[known - 1].depth : 0);
        Compare(known);
        const Prompt prompt{history.Begin(), num_tokens, many_end, seen_end};
        for (const uint32_t entry : entries_) {
            if (entry != kNoEntry) history.Use(owner[entry]);
        }
        Describe(prompt, hint);
        Touch(prompt.number, many, known);
        if (prompt.number % kDecayEvery == 0) hazards.Decay();
        if (prompt.number % kRefreshEvery == 0) hazards.Refresh();
        Shrink();
        return prompt;
    }

    // Gives the pieces of a prompt their classes.
    void Describe(const Prompt& prompt, Int hint) {
        if (prompt.number <= history.now - kHorizon) return;  // its row is that of a later prompt
        const auto bits = [](Int tokens) { return static_cast<Int>(BitLength(tokens >> 9)); };
        const Int fresh = prompt.num_tokens - prompt.seen_end;
        const Int fresh_bits = fresh >= 0 ? bits(fresh) : bits(-(fresh >> 9) << 9);
        for (Int piece = 0; piece < kPieces; ++piece) {
            const std::array<Int, 3> name = hint ? std::array<Int, 3>{piece, kHintMark | hint, fresh_bits}
                                                 : std::array<Int, 3>{piece, fresh_bits, bits(prompt.num_tokens)};
            history.node[History::CellOf(prompt.number * kPieces + piece)] = hazards.Node(name);
        }
    }

    // The numbers of the victims that the ghost of HAZARD has still to evict, with the owners that they had.
    std::vector<std::pair<uint32_t, Int>> VictimsLeft() const {
        std::vector<std::pair<uint32_t, Int>> left;
        for (size_t at = first_victim_; at < victims.size(); ++at) {
            if (Stays(victims[at])) left.push_back(victims[at]);
        }
        return left;
    }

    const Int shift, pool;
    Hazards hazards;
    History history;
    Duel duel;
    const size_t most;
    Recency recency;
    std::vector<uint64_t> key;
    Column owner, depth, uses;
    std::vector<uint8_t> resident;
    Int num_resident = 0;
    EntryIndex entry_of;
    std::vector<std::pair<uint32_t, Int>> victims;

  private:
    static Int ShiftOf(Int num_hash_blocks) {
        return static_cast<Int>(BitLength(std::max<Int>(0, CeilDiv(num_hash_blocks, kMostSampled) - 1)));
    }

    // The sampled keys of a chain of digests, each once, with their entries; those are taken out of the order of use.
    void FindSampled(const Digests& digests, uint64_t salt) {
        const uint64_t mask = (uint64_t{1} << shift) - 1;
        sampled_.clear();
        entries_.clear();
        fresh_.clear();
        size_t taken = 0;
        for (Int at = 0; at < digests.count() && taken < most / 2; ++at) {
            uint64_t head = 0;
            std::memcpy(&head, digests.bytes.data() + static_cast<size_t>(at) * digests.size,
                        std::min(digests.size, sizeof head));
            if (head & mask) continue;
            ++taken;
            const uint32_t entry = entry_of.Find(head ^ salt);
            if (entry == kNoEntry) {
                fresh_.push_back(head ^ salt);
            } else if (recency.IsHeld(entry)) {
                continue;  // the chain has this key twice
            } else {
                recency.Hold(entry);
            }
            sampled_.push_back({head ^ salt, (at + 1) * size_});
            entries_.push_back(entry);
        }
        std::sort(fresh_.begin(), fresh_.end());
        if (std::adjacent_find(fresh_.begin(), fresh_.end()) != fresh_.end()) [[unlikely]]
            LeaveOutRepeated();
    }

    void LeaveOutRepeated() {
        std::set<uint64_t> seen;
        size_t kept = 0;
        for (size_t at = 0; at < sampled_.size(); ++at) {
            if (entries_[at] == kNoEntry && !seen.insert(sampled_[at].key).second) continue;
            sampled_[kept] = sampled_[at];
            entries_[kept++] = entries_[at];
        }
        sampled_.resize(kept);
        entries_.resize(kept);
    }

    template <typename F>
    size_t RunOf(F&& holds) const {
        return static_cast<size_t>(std::find_if_not(entries_.begin(), entries_.end(), holds) - entries_.begin());
    }

    // Compares what the ghosts hit of a prompt.
    void Compare(size_t known) {
        const auto is_known = entries_.begin() + static_cast<std::ptrdiff_t>(known);
        const auto run = [&](auto&& holds) {
            return std::find_if_not(entries_.begin(), is_known, holds) - entries_.begin();
        };
        const Int lru = run([&](uint32_t one) { return recency.IsRecent(one); });
        const Int hazard = run([&](uint32_t one) { return resident[one] != 0; });
        duel.Compare(static_cast<Int>(sampled_.size()), hazard - lru, pool);
    }

    void Touch(Int number, size_t many, size_t known) {
        for (size_t at = 0; at < entries_.size(); ++at) {
            if (entries_[at] == kNoEntry) entries_[at] = NewEntry(sampled_[at].key);
        }
        for (size_t at = 0; at < entries_.size(); ++at) {
            const uint32_t entry = entries_[at];
            const Int mine = number * kPieces + (at < many ? kMany : at < known ? kSeen : kNew);
            ++history.alive[History::CellOf(mine)];
            owner[entry] = mine;
            depth[entry] = sampled_[at].depth;
            ++uses[entry];
            num_resident += !resident[entry];
            resident[entry] = 1;
        }
        for (size_t at = entries_.size(); at-- > 0;) recency.Use(entries_[at]);
    }

    // An entry for a key; that of the key that was used longest ago where all are taken.
    uint32_t NewEntry(uint64_t new_key) {
        auto entry = static_cast<uint32_t>(entry_of.count());
        if (entry == most) {
            entry = recency.TakeOldest();
            entry_of.Remove(key[entry]);
            history.Lose(owner[entry]);
            num_resident -= resident[entry];
            resident[entry] = 0;
            uses[entry] = 0;
        }
        key[entry] = new_key;
        entry_of.Add(new_key, entry);
        return entry;
    }

    bool Stays(const std::pair<uint32_t, Int>& victim) const {
        return resident[victim.first] && owner[victim.first] == victim.second;
    }

    // Evicts from the ghost of HAZARD what does not fit.
    void Shrink() {
        while (num_resident > pool) {
            if (first_victim_ == victims.size() && !FindVictims()) return;  // a request is longer than the pool
            const auto victim = victims[first_victim_++];
            if (!Stays(victim)) continue;
            resident[victim.first] = 0;
            --num_resident;
        }
    }

    bool FindVictims() {
        victims.clear();
        first_victim_ = 0;
        const Int end_of_others = history.now * kPieces;  // a request holds its blocks
        const auto for_each = [&](auto&& visit) {
            uint64_t flags = 0;
            for (uint32_t first = 0; first < entry_of.count(); first += sizeof flags) {
                std::memcpy(&flags, &resident[first], sizeof flags);  // entries without a key have none
                for (; flags; flags &= flags - 1) {
                    const uint32_t entry = first + static_cast<uint32_t>(std::countr_zero(flags)) / 8;
                    if (owner[entry] < end_of_others) visit(entry, owner[entry]);
                }
            }
        };
        const auto count_of = [&](size_t) { return std::max<Int>({num_resident - pool, pool / kBatches, 1}); };
        for (const auto& one : history.Least(for_each, count_of, [&](uint32_t entry) { return depth[entry]; }))
            victims.emplace_back(one.number, owner[one.number]);
        return !victims.empty();
    }

    std::vector<Sampled> sampled_;
    Int size_;
    size_t first_victim_ = 0;  // of `victims`: those before it are done
    std::vector<uint32_t> entries_;
    std::vector<uint64_t> fresh_;  // the sampled keys that have no entry
};

}  // namespace kvplane
