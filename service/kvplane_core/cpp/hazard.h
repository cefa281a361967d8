// What the policy HAZARD learns, see hazard.py: hazards of classes of prompts, and whether to evict by them or by LRU.
#pragma once

#include "types.h"

namespace kvplane {

// The order in which numbered entries were last used, and which of them were used last: for the ghosts.
// A doubly linked list of entries, the least recently used first; the last `num_recent` ones are in the LRU ghost.
class Recency {
  public:
    Recency(size_t size, Int places)
        : places_(places),
          sentinel_(static_cast<uint32_t>(size)),
          next_(size + 1, kOut),
          previous_(size + 1),
          recent_(size) {
        next_[sentinel_] = previous_[sentinel_] = first_recent_ = sentinel_;
    }

    bool IsRecent(uint32_t entry) const { return recent_[entry]; }
    bool IsHeld(uint32_t entry) const { return next_[entry] == kOut; }
    Int num_recent() const { return num_recent_; }

    // Takes an entry, which is used next, out of the order; it keeps its place in the LRU ghost.
    void Hold(uint32_t entry) {
        if (entry == first_recent_) first_recent_ = next_[entry];
        next_[previous_[entry]] = next_[entry];
        previous_[next_[entry]] = previous_[entry];
        next_[entry] = kOut;
    }

    // Uses an entry that is not in the order.
    void Use(uint32_t entry) {
        Append(entry);
        if (first_recent_ == sentinel_) first_recent_ = entry;
        num_recent_ += !recent_[entry];
        recent_[entry] = 1;
        while (num_recent_ > places_) {
            Require(first_recent_ != sentinel_, "the LRU ghost is smaller than its count");
            recent_[first_recent_] = 0;
            first_recent_ = next_[first_recent_];
            --num_recent_;
        }
    }

    // Takes the entry that was used longest ago out of the order, and returns it.
    uint32_t TakeOldest() {
        const uint32_t entry = next_[sentinel_];
        Require(entry != sentinel_, "no entry is left");
        Hold(entry);
        num_recent_ -= recent_[entry];
        recent_[entry] = 0;
        return entry;
    }

    std::vector<uint32_t> Order() const {
        std::vector<uint32_t> order;
        for (uint32_t at = next_[sentinel_]; at != sentinel_; at = next_[at]) order.push_back(at);
        return order;
    }

    // Begins with the entries 0 to `count` - 1, the least recently used first.
    void Load(uint32_t count, Int num_recent) {
        Require(count <= sentinel_ && num_recent >= 0 && num_recent <= std::min<Int>(count, places_), "a bad order");
        *this = Recency(sentinel_, places_);
        for (uint32_t entry = 0; entry < count; ++entry) Append(entry);
        for (auto entry = static_cast<uint32_t>(count - num_recent); entry < count; ++entry) recent_[entry] = 1;
        num_recent_ = num_recent;
        if (num_recent) first_recent_ = static_cast<uint32_t>(count - num_recent);
    }

  private:
    friend class LearnerChecks;

    static constexpr uint32_t kOut = ~uint32_t{0};

    void Append(uint32_t entry) {
        Require(entry < sentinel_ && next_[entry] == kOut, "an entry is in the order already");
        const uint32_t last = previous_[sentinel_];
        next_[last] = entry;
        previous_[entry] = last;
        next_[entry] = sentinel_;
        previous_[sentinel_] = entry;
    }

    Int places_, num_recent_ = 0;
    uint32_t sentinel_, first_recent_ = 0;
    std::vector<uint32_t> next_, previous_;
    std::vector<uint8_t> recent_;
};

constexpr Int kPieces = 3, kNew = 0, kSeen = 1, kMany = 2, kManyUses = 24;
constexpr Int kHorizon = 1 << 14, kMostSampled = 1 << 14, kGhostPools = 4, kLeastRemembered = 1 << 16;
constexpr Int kBatches = 64, kNodes = 1 << 11, kHintMark = 1 << 7;
constexpr Int kOne = 1 << 20, kAlive = 1 << 30, kUnit = 1 << 10, kPrior = kOne / 50, kShrinkTokens = 1 << 18;
constexpr Int kDecayEvery = 128, kDecayShift = 7, kRefreshEvery = 32, kRefreshed = 256;

// The ages in admissions: bin k has those from at[k] to at[k + 1] - 1.
struct Ages {
    Ages() {
        at.push_back(1);
        while (at.back() < kHorizon) at.push_back(std::max(at.back() + 1, at.back() * 5 / 4));
        at.back() = kHorizon;
        bin.assign(1, 0);
        for (size_t k = 0; k < count(); ++k) bin.insert(bin.end(), static_cast<size_t>(width(k)), k);
    }
    size_t count() const { return at.size() - 1; }
    Int width(size_t k) const { return at[k + 1] - at[k]; }
    size_t BinOf(Int age) const { return bin.at(static_cast<size_t>(age)); }
    Column at;
    std::vector<size_t> bin;
};
inline const Ages kAges;

// An admitted prompt: its number, its tokens, and where its content stops to be seen many times and to be seen.
struct Prompt {
    Int number, num_tokens, many_end, seen_end;
    Int PieceOf(Int end) const { return Int{end <= seen_end} + Int{end <= many_end}; }
};

// The hazards of all classes, and the index (worth) by class and age bin that follows from them.
class Hazards {
  public:
    explicit Hazards(Int shrink)
        : used(Size()),
          waited(Size()),
          index(Size()),
          parent(kNodes),
          shrink_(std::max<Int>(1, shrink) * kUnit),
          hazard_(Size()),
          pass_of_(kNodes) {
        Compute(0, 1);
    }

    static size_t Cell(Int node, size_t age) { return static_cast<size_t>(node) * kAges.count() + age; }
    Int count() const { return static_cast<Int>(names.size()) + 1; }

    // The class with these features, the coarsest first; that of the features before if there are too many classes.
    Int Node(const std::array<Int, 3>& name) {
        Int node = 0;
        uint64_t key = 1;
        for (const Int feature : name) {
            key = key << 8 | static_cast<uint64_t>(feature);
            const auto found = names.find(key);
            if (found == names.end()) {
                if (count() == kNodes) return node;
                const Int made = count();
                names[key] = made;
                parent[static_cast<size_t>(made)] = node;
                std::copy_n(index.begin() + Offset(node), kAges.count(), index.begin() + Offset(made));
                node = made;
            } else {
                node = found->second;
            }
        }
        return node;
    }

    // Adds keys of a class and all above it: how many waited through the age, and how many were used at it.
    void Add(Int node, size_t age, Int uses, Int waits) {
        for (;; node = parent[static_cast<size_t>(node)]) {
            if (uses) used[Cell(node, age)] += uses;
            waited[Cell(node, age)] += waits;
            if (node == 0) return;
        }
    }

    // Lets earlier data weigh less.
    void Decay() {
        for (Column* table : {&used, &waited}) {
            for (Int& one : std::span(*table).first(Cell(count(), 0))) one -= one >> kDecayShift;
        }
    }

    // Computes the index of some classes, in turn.
    void Refresh() {
        const Int first = next;
        next = count() > kRefreshed ? (next + kRefreshed) % count() : 0;
        Compute(first, std::min(first + kRefreshed, count()));
    }

    Column used, waited, index, parent;
    std::map<uint64_t, Int> names;
    Int next = 0;

  private:
    static size_t Size() { return static_cast<size_t>(kNodes) * kAges.count(); }
    static std::ptrdiff_t Offset(Int node) { return static_cast<std::ptrdiff_t>(Cell(node, 0)); }

    void Compute(Int first, Int end) {
        const size_t num_ages = kAges.count();
        Column uses(num_ages + 1), held(num_ages + 1);
        ++pass_;
        for (Int node = first; node < end; ++node) {
            const Int* const hazard = HazardOf(node);
            Int alive = kAlive;
            for (size_t age = 0; age < num_ages; ++age) {
                uses[age + 1] = uses[age] + alive * hazard[age] / kOne;
                held[age + 1] = held[age] + alive * (2 * kOne - hazard[age]) / (2 * kOne) * kAges.width(age);
                alive = std::max(alive * (kOne - hazard[age]) / kOne, kOne >> 10);
            }
            FindSlopes(uses, held, &index[Cell(node, 0)]);
        }
    }

    // That of the class above, the more so the less data the class has; computed once in a pass.
    const Int* HazardOf(Int node) {
        Int* const hazard = &hazard_[Cell(node, 0)];
        uint64_t& pass = pass_of_[static_cast<size_t>(node)];
        if (pass == pass_) return hazard;
        pass = pass_;
        if (node == 0) {
            std::fill_n(hazard, kAges.count(), kPrior);
        } else {
            std::copy_n(HazardOf(parent[static_cast<size_t>(node)]), kAges.count(), hazard);
        }
        for (size_t age = 0; age < kAges.count(); ++age) {
            const size_t at = Cell(node, age);
            if ((used[at] | waited[at]) == 0) continue;  // that of the class above
            const Int shrunk = (used[at] * kOne + shrink_ * hazard[age]) / (waited[at] + shrink_);
            hazard[age] = std::min(shrunk, kOne - (kOne >> 5));
        }
        return hazard;
    }

    // The greatest slope from each point (held, uses) to a later one: that to the next corner of their upper hull.
    void FindSlopes(const Column& uses, const Column& held, Int* slopes) {
        hull_.assign(1, uses.size() - 1);
        const auto rises_more = [&](size_t from, size_t a, size_t b) {  // to a, than from a to b
            const __int128 first = static_cast<__int128>(uses[a] - uses[from]) * (held[b] - held[a]);
            return first > static_cast<__int128>(uses[b] - uses[a]) * (held[a] - held[from]);
        };
        for (size_t at = uses.size() - 1; at-- > 0;) {
            while (hull_.size() > 1 && !rises_more(at, hull_.back(), hull_[hull_.size() - 2])) hull_.pop_back();
            const size_t to = hull_.back();
            slopes[at] = ((uses[to] - uses[at]) << 32) / (held[to] - held[at]);
            hull_.push_back(at);
        }
    }

    Int shrink_;
    Column hazard_;
    std::vector<uint64_t> pass_of_;  // by class: the last pass in which its hazards were computed
    uint64_t pass_ = 0;
    std::vector<size_t> hull_;
};

// The last kHorizon admissions: the class of each piece, and how many of its sampled keys were not used since.
class History {
  public:
    explicit History(Hazards& hazards)
        : node(kHorizon * kPieces),
          alive(kHorizon * kPieces),
          hazards_(hazards),
          place_(node.size()),
          worth_(node.size()),
          row_pass_(kHorizon) {}

    static size_t CellOf(Int owner) { return static_cast<size_t>(owner % (kHorizon * kPieces)); }
    bool IsRecent(Int owner) const { return owner / kPieces > now - kHorizon; }

    // Begins the next admission; what is unused at the end of an age bin has waited through it. Returns its number.
    Int Begin() {
        ++now;
        for (size_t age = 0; age < kAges.count(); ++age) {
            const Int born = now - kAges.at[age + 1];
            if (born <= 0) break;
            for (Int piece = 0; piece < kPieces; ++piece) {
                const size_t cell = CellOf(born * kPieces + piece);
                if (alive[cell]) hazards_.Add(node[cell], age, 0, alive[cell] * kUnit);
            }
        }
        for (Int piece = 0; piece < kPieces; ++piece) alive[CellOf(now * kPieces + piece)] = 0;
        return now;
    }

    // A key is used that this piece used last.
    void Use(Int owner) {
        if (!IsRecent(owner)) return;
        hazards_.Add(node[CellOf(owner)], kAges.BinOf(now - owner / kPieces), kUnit, kUnit);
        --alive[CellOf(owner)];
    }

    // A key that this piece used last is not followed any more.
    void Lose(Int owner) {
        if (IsRecent(owner)) --alive[CellOf(owner)];
    }

    struct Entry {
        Int worth, admission, minus_depth;
        uint32_t number;
        auto operator<=>(const Entry&) const = default;
    };
    // The `count_of(all)` entries of least worth, the least first: of equal ones the oldest first, of one request the
    // deepest first, of one depth the least number first. No key is worth less than one behind it in its request.
    // `for_each` visits the number and the owner of each entry. All entries of an owner have the same worth: the owners
    // are ordered, and only the entries of the first ones.
    template <typename ForEach, typename CountOf, typename DepthOf>
    const std::vector<Entry>& Least(ForEach&& for_each, CountOf&& count_of, DepthOf&& depth_of) {
        const Int first_recent = (now - kHorizon + 1) * kPieces;
        ++pass_;
        seen_.clear();
        owners_.clear();
        least_.clear();
        for_each([&](uint32_t number, Int owner) {
            Place& place = place_[CellOf(owner)];
            if (place.pass != pass_) place = {pass_, kNowhere};
            if (owner < first_recent) {  // worth 0, and the oldest
                least_.push_back({0, owner / kPieces, -depth_of(number), number});
                return;
            }
            if (place.owner == kNowhere) {
                place.owner = static_cast<uint32_t>(owners_.size());
                owners_.push_back({0, owner, 0, false});
            }
            ++owners_[place.owner].count;
            seen_.emplace_back(number, place.owner);
        });
        const size_t all = seen_.size() + least_.size(), count = std::min<size_t>(all, count_of(all));
        ChooseOwners(static_cast<Int>(count) - static_cast<Int>(least_.size()));
        for (const auto& [number, at] : seen_) {
            const Owner& one = owners_[at];
            if (one.is_chosen) least_.push_back({one.worth, one.owner / kPieces, -depth_of(number), number});
        }
        std::sort(least_.begin(), least_.end());
        least_.resize(count);
        return least_;
    }

    Int now = 0;
    Column node, alive;

  private:
    struct Owner {
        Int worth, owner, count;
        bool is_chosen;
    };
    struct Place {
        uint64_t pass = 0;  // the last one in which an entry had this cell
        uint32_t owner = 0;
    };
    static constexpr uint32_t kNowhere = ~uint32_t{0};

    // Chooses owners of least worth that have `count` entries, and the pieces of equal worth of the last one's request.
    void ChooseOwners(Int count) {
        ranked_.clear();
        for (Owner& one : owners_) {
            one.worth = WorthOf(one.owner);
            ranked_.emplace_back(one.worth, one.owner, &one);
        }
        std::make_heap(ranked_.begin(), ranked_.end(), std::greater<>());
        for (std::pair<Int, Int> last{-1, 0}; !ranked_.empty(); ranked_.pop_back()) {
            const auto [worth, owner, one] = ranked_.front();
            const std::pair<Int, Int> rank{worth, owner / kPieces};
            if (count <= 0 && rank != last) return;
            one->is_chosen = true;
            count -= one->count;
            last = rank;
            std::pop_heap(ranked_.begin(), ranked_.end(), std::greater<>());
        }
    }

    Int WorthOf(Int owner) {
        const Int row = owner / kPieces % kHorizon;
        if (row_pass_[static_cast<size_t>(row)] != pass_) {
            row_pass_[static_cast<size_t>(row)] = pass_;
            const size_t age = kAges.BinOf(((now - row) % kHorizon + kHorizon) % kHorizon);
            Int most = 0;
            for (Int piece = 0; piece < kPieces; ++piece) {
                const size_t cell = static_cast<size_t>(row * kPieces + piece);
                const Int mine = place_[cell].pass == pass_ ? hazards_.index[Hazards::Cell(node[cell], age)] : 0;
                most = worth_[cell] = piece ? std::max(most, mine) : mine;
            }
        }
        return worth_[CellOf(owner)];
    }

    Hazards& hazards_;
    std::vector<Place> place_;  // by cell: where `owners_` has it
    std::vector<Owner> owners_;
    std::vector<std::tuple<Int, Int, Owner*>> ranked_;    // worth and owner, as a heap
    std::vector<std::pair<uint32_t, uint32_t>> seen_;     // number of an entry, place of its owner
    std::vector<Entry> least_;
    Column worth_;
    std::vector<uint64_t> row_pass_;
    uint64_t pass_ = 0;
};

}  // namespace kvplane
