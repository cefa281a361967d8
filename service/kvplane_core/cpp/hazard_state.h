// What the policy HAZARD has learnt, in an image of a replica, see `HazardList.state`.
#pragma once

#include "image.h"
#include "policies.h"

namespace kvplane {

template <typename Image>
class HazardState {
  public:
    HazardState(Image& one, HazardPolicy& policy)
        : image(one),
          policy_(policy),
          learner_(policy.learner),
          hazards_(learner_.hazards),
          history_(learner_.history) {}

    void Visit() {
        Column owner = policy_.owner;
        if (!owner.empty()) owner[kNullBlock] = 0;  // decides nothing
        First(owner, owner.size(), {0, kForever});
        image.Dict(policy_.prompts, Range{0, kMaxSlots - 1}, [&](Prompt& one) {
            Column numbers{one.number, one.num_tokens, one.many_end, one.seen_end};
            image.Numbers(numbers, {0, kForever});
            image.Holds(numbers.size() == 4, "has a prompt of other numbers");
            one = {numbers[0], numbers[1], numbers[2], numbers[3]};
        });
        image.Begin('L', 4);
        OfHazards();
        OfHistory();
        OfGhosts();
        OfDuel();
        const Int end = (history_.now + 1) * kPieces;
        for (const Int one : owner) image.Holds(one < end);
        if constexpr (Image::kReads) policy_.owner = std::move(owner);
        for (const auto& [slot, one] : policy_.prompts)
            image.Holds(one.number <= history_.now &&
                        std::max({one.num_tokens, one.many_end, one.seen_end}) < kMostCount);
    }

  private:
    static constexpr Int kMostCount = Int{1} << 42;
    static constexpr Range kCounts{0, kMostCount - 1};

    size_t Cells() const { return static_cast<size_t>(hazards_.count()) * kAges.count(); }

    // The first `count` entries of a column, as words.
    template <typename T>
    void First(std::vector<T>& column, size_t count, Range range) {
        Column words(column.begin(), column.begin() + static_cast<std::ptrdiff_t>(std::min(count, column.size())));
        image.Words(words, range);
        image.Holds(words.size() == count && count <= column.size(), "has another number of entries");
        std::transform(words.begin(), words.end(), column.begin(), [](Int word) { return static_cast<T>(word); });
    }

    void OfHazards() {
        image.Begin('L', 6);
        image.Dict(hazards_.names, Range{0, kForever}, [&](Int& node) { image.Number(node, {1, kNodes - 1}); });
        image.Holds(hazards_.count() <= kNodes, "has too many classes");
        std::vector<bool> seen(static_cast<size_t>(hazards_.count()), false);
        for (const auto& [name, node] : hazards_.names) {
            image.Holds(node < hazards_.count() && !seen[static_cast<size_t>(node)], "has a class twice");
            seen[static_cast<size_t>(node)] = true;
        }
        image.Number(hazards_.next, {0, hazards_.count() - 1});
        First(hazards_.used, Cells(), kCounts);
        First(hazards_.waited, Cells(), kCounts);
        First(hazards_.index, Cells(), kAny);
        First(hazards_.parent, static_cast<size_t>(hazards_.count()), {0, kNodes - 1});
        for (Int node = 0; node < hazards_.count(); ++node)
            image.Holds(hazards_.parent[static_cast<size_t>(node)] <= std::max<Int>(node - 1, 0));
    }

    void OfHistory() {
        image.Begin('L', 3);
        image.Number(history_.now, {0, (Int{1} << 60) - 1});
        const auto rows = static_cast<size_t>(std::min(history_.now + 1, kHorizon) * kPieces);
        First(history_.node, rows, {0, hazards_.count() - 1});
        First(history_.alive, rows, kAny);
    }

    // Entries are numbered by the last use of their keys.
    void OfGhosts() {
        const std::vector<uint32_t> order = learner_.recency.Order();
        const Int end = (history_.now + 1) * kPieces;
        image.Begin('L', 4);
        std::vector<uint64_t> keys = InOrder(learner_.key, order);
        Column owner = InOrder(learner_.owner, order), depth = InOrder(learner_.depth, order),
               uses = InOrder(learner_.uses, order), resident = InOrder(learner_.resident, order);
        image.Words(keys);
        image.Holds(keys.size() <= learner_.most, "has too many keys");
        image.Begin('L', 4);
        First(owner, keys.size(), {0, end - 1}, keys.size());
        First(depth, keys.size(), kCounts, keys.size());
        First(uses, keys.size(), kCounts, keys.size());
        First(resident, keys.size(), kAny, keys.size());
        Int num_recent = learner_.recency.num_recent();
        image.Number(num_recent, {0, std::min<Int>(static_cast<Int>(keys.size()), learner_.pool)});
        Column victims, owners;
        Victims(order, victims, owners);
        image.Begin('L', 2);
        image.Words(victims, {0, static_cast<Int>(keys.size()) - 1});
        image.Words(owners);
        image.Holds(victims.size() == owners.size(), "has other numbers of victims and owners");
        if constexpr (Image::kReads) {
            std::copy(keys.begin(), keys.end(), learner_.key.begin());
            std::copy(owner.begin(), owner.end(), learner_.owner.begin());
            std::copy(depth.begin(), depth.end(), learner_.depth.begin());
            std::copy(uses.begin(), uses.end(), learner_.uses.begin());
            Follow(resident, num_recent);
            for (size_t at = 0; at < victims.size(); ++at)
                learner_.victims.emplace_back(static_cast<uint32_t>(victims[at]), owners[at]);
        }
    }
    // A column of another size than the core's.
    void First(Column& column, size_t count, Range range, size_t size) {
        column.resize(size);
        First(column, count, range);
    }
    template <typename T>
    static auto InOrder(const std::vector<T>& column, const std::vector<uint32_t>& order) {
        std::vector<std::conditional_t<sizeof(T) == sizeof(Int), T, Int>> found;
        for (const uint32_t entry : order) found.push_back(column[entry]);
        return found;
    }
    void Victims(const std::vector<uint32_t>& order, Column& victims, Column& owners) const {
        std::vector<Int> number(learner_.most);
        for (size_t at = 0; at < order.size(); ++at) number[order[at]] = static_cast<Int>(at);
        for (const auto& [entry, owner] : learner_.VictimsLeft()) {
            victims.push_back(number[entry]);
            owners.push_back(owner);
        }
    }
    // The keys were read: makes what follows from them.
    void Follow(const Column& resident, Int num_recent) {
        learner_.recency.Load(static_cast<uint32_t>(resident.size()), num_recent);
        Column alive(history_.alive.size());
        for (uint32_t entry = 0; entry < resident.size(); ++entry) {
            image.Holds(learner_.entry_of.Find(learner_.key[entry]) == kNoEntry, "has a key twice");
            learner_.entry_of.Add(learner_.key[entry], entry);
            learner_.num_resident += learner_.resident[entry] = resident[entry] != 0;
            if (history_.IsRecent(learner_.owner[entry])) ++alive[History::CellOf(learner_.owner[entry])];
        }
        image.Holds(alive == history_.alive, "has other unused keys");
    }

    void OfDuel() {
        Duel& duel = learner_.duel;
        image.Begin('L', 5);
        image.Flag(duel.leads);
        image.Number(duel.gain, {-(Int{1} << 30) + 1, (Int{1} << 30) - 1});
        image.Number(duel.spread, {0, (Int{1} << 44) - 1});
        image.Number(duel.looked_up, {0, (Int{1} << 30) - 1});
        image.Number(duel.first, {0, kFirstPools * learner_.pool});
    }

    Image& image;
    HazardPolicy& policy_;
    Learner& learner_;
    Hazards& hazards_;
    History& history_;
};

}  // namespace kvplane
