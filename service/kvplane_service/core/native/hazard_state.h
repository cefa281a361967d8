// What the policy HAZARD has learnt, as Python values, and back: columns are bytes of 64-bit numbers.
#pragma once

#include "convert.h"

namespace kvplane {

class HazardState {
  public:
    explicit HazardState(HazardPolicy& policy)
        : policy_(policy), learner_(policy.learner), hazards_(learner_.hazards), history_(learner_.history) {}

    PyObject* Dump() const {
        std::vector<std::pair<Int, std::array<Int, 4>>> prompts;
        for (const auto& [slot, one] : policy_.prompts)
            prompts.push_back({slot, {one.number, one.num_tokens, one.many_end, one.seen_end}});
        const Duel& duel = learner_.duel;
        return Tuple(Words(policy_.owner, policy_.owner.size()), ToPy(prompts), DumpHazards(),
                     Tuple(ToPy(history_.now), Words(history_.node, Rows()), Words(history_.alive, Rows())),
                     DumpGhosts(),
                     Tuple(PyBool_FromLong(duel.leads), ToPy(duel.gain), ToPy(duel.spread), ToPy(duel.looked_up),
                           ToPy(duel.first)));
    }

    void Load(PyObject* state) {
        Read(At(state, 0), policy_.owner.size(), &policy_.owner);
        std::vector<std::pair<Int, std::array<Int, 4>>> prompts;
        FromPy(At(state, 1), &prompts);
        LoadHazards(At(state, 2));
        PyObject* const history = At(state, 3);
        FromPy(At(history, 0), &history_.now);
        Check(IsWithin(history_.now, 0, Int{1} << 60));
        Read(At(history, 1), Rows(), &history_.node);
        Read(At(history, 2), Rows(), &history_.alive);
        for (const Int node : history_.node) Check(IsWithin(node, 0, hazards_.count()));
        const Int end = (history_.now + 1) * kPieces;
        for (const Int owner : policy_.owner) Check(IsWithin(owner, 0, end));
        for (const auto& [slot, one] : prompts) {
            Check(IsWithin(slot, 0, kMaxSlots) && IsWithin(one[0], 0, history_.now + 1));
            for (const Int tokens : one) Check(IsWithin(tokens, 0, kMostCount) || &tokens == &one[0]);
            policy_.prompts[slot] = {one[0], one[1], one[2], one[3]};
        }
        LoadGhosts(At(state, 4), end);
        LoadDuel(At(state, 5));
    }

  private:
    static constexpr Int kMostCount = Int{1} << 42;

    static bool IsWithin(Int value, Int least, Int end) { return value >= least && value < end; }
    size_t Rows() const { return static_cast<size_t>(std::min(history_.now + 1, kHorizon) * kPieces); }
    size_t Cells() const { return static_cast<size_t>(hazards_.count()) * kAges.count(); }

    // The first `count` entries of a column.
    template <typename T>
    static PyObject* Words(const std::vector<T>& column, size_t count) {
        const Column words(column.begin(), column.begin() + static_cast<std::ptrdiff_t>(count));
        return ToBytes(reinterpret_cast<const uint8_t*>(words.data()), words.size() * sizeof(Int));
    }
    // Replaces the first entries of a column by `count` ones.
    template <typename T>
    static void Read(PyObject* object, size_t count, std::vector<T>* column) {
        const Buffer<uint8_t> raw(object);
        Check(raw.size == count * sizeof(Int) && count <= column->size());
        for (size_t at = 0; at < count; ++at) {
            Int word = 0;
            std::memcpy(&word, raw.data + at * sizeof word, sizeof word);
            (*column)[at] = static_cast<T>(word);
        }
    }

    PyObject* DumpHazards() const {
        return Tuple(ToPy(hazards_.names), ToPy(hazards_.next), Words(hazards_.used, Cells()),
                     Words(hazards_.waited, Cells()), Words(hazards_.index, Cells()),
                     Words(hazards_.parent, static_cast<size_t>(hazards_.count())));
    }

    void LoadHazards(PyObject* state) {
        FromPy(At(state, 0), &hazards_.names);
        FromPy(At(state, 1), &hazards_.next);
        Check(hazards_.count() <= kNodes && IsWithin(hazards_.next, 0, hazards_.count()));
        std::vector<bool> seen(static_cast<size_t>(hazards_.count()), false);
        for (const auto& [name, node] : hazards_.names) {
            Check(IsWithin(node, 1, hazards_.count()) && !seen[static_cast<size_t>(node)]);
            seen[static_cast<size_t>(node)] = true;
        }
        Read(At(state, 2), Cells(), &hazards_.used);
        Read(At(state, 3), Cells(), &hazards_.waited);
        Read(At(state, 4), Cells(), &hazards_.index);
        Read(At(state, 5), static_cast<size_t>(hazards_.count()), &hazards_.parent);
        for (const Column* table : {&hazards_.used, &hazards_.waited}) {
            for (const Int count : *table) Check(IsWithin(count, 0, kMostCount));
        }
        for (Int node = 0; node < hazards_.count(); ++node)
            Check(IsWithin(hazards_.parent[static_cast<size_t>(node)], 0, std::max<Int>(node, 1)));
    }

    // Entries are numbered by the last use of their keys.
    PyObject* DumpGhosts() const {
        const std::vector<uint32_t> order = learner_.recency.Order();
        std::vector<Int> number(learner_.most);
        const auto column = [&](const auto& of) {
            Column words;
            for (const uint32_t entry : order) words.push_back(static_cast<Int>(of[entry]));
            return Words(words, words.size());
        };
        for (size_t at = 0; at < order.size(); ++at) number[order[at]] = static_cast<Int>(at);
        Column victims, owners;
        for (const auto& [entry, owner] : learner_.VictimsLeft()) {
            victims.push_back(number[entry]);
            owners.push_back(owner);
        }
        return Tuple(column(learner_.key), column(learner_.owner), column(learner_.depth), column(learner_.uses),
                     column(learner_.resident), ToPy(learner_.recency.num_recent()), Words(victims, victims.size()),
                     Words(owners, owners.size()));
    }

    void LoadGhosts(PyObject* state, Int end) {
        const size_t count = Buffer<uint8_t>(At(state, 0)).size / sizeof(Int);
        Int num_recent = 0;
        Read(At(state, 0), count, &learner_.key);
        Read(At(state, 1), count, &learner_.owner);
        Read(At(state, 2), count, &learner_.depth);
        Read(At(state, 3), count, &learner_.uses);
        Column resident(count);
        Read(At(state, 4), count, &resident);
        FromPy(At(state, 5), &num_recent);
        Check(IsWithin(num_recent, 0, std::min<Int>(static_cast<Int>(count), learner_.pool) + 1));
        learner_.recency.Load(static_cast<uint32_t>(count), num_recent);
        Column alive(history_.alive.size());
        for (uint32_t entry = 0; entry < count; ++entry) {
            Check(learner_.entry_of.Find(learner_.key[entry]) == kNoEntry);
            learner_.entry_of.Add(learner_.key[entry], entry);
            Check(IsWithin(learner_.owner[entry], 0, end) && IsWithin(learner_.depth[entry], 0, kMostCount) &&
                  IsWithin(learner_.uses[entry], 0, kMostCount));
            learner_.num_resident += learner_.resident[entry] = resident[entry] != 0;
            if (history_.IsRecent(learner_.owner[entry])) ++alive[History::CellOf(learner_.owner[entry])];
        }
        Check(alive == history_.alive);
        LoadVictims(At(state, 6), At(state, 7), static_cast<Int>(count));
    }

    void LoadVictims(PyObject* numbers, PyObject* owners, Int end) {
        const size_t count = Buffer<uint8_t>(numbers).size / sizeof(Int);
        Column entry(count), owner(count);
        Read(numbers, count, &entry);
        Read(owners, count, &owner);
        for (size_t at = 0; at < count; ++at) {
            Check(IsWithin(entry[at], 0, end));
            learner_.victims.emplace_back(static_cast<uint32_t>(entry[at]), owner[at]);
        }
    }

    void LoadDuel(PyObject* state) {
        Duel& duel = learner_.duel;
        duel.leads = IsTrue(At(state, 0));
        FromPy(At(state, 1), &duel.gain);
        FromPy(At(state, 2), &duel.spread);
        FromPy(At(state, 3), &duel.looked_up);
        FromPy(At(state, 4), &duel.first);
        Check(IsWithin(duel.gain, -(Int{1} << 30) + 1, Int{1} << 30) && IsWithin(duel.spread, 0, Int{1} << 44) &&
              IsWithin(duel.looked_up, 0, Int{1} << 30) &&
              IsWithin(duel.first, 0, kFirstPools * learner_.pool + 1));
    }

    HazardPolicy& policy_;
    Learner& learner_;
    Hazards& hazards_;
    History& history_;
};

}  // namespace kvplane
