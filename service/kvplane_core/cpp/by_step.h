// Records of the steps in flight.
#pragma once

#include "types.h"

namespace kvplane {

// One use of a slot by a request, from its admission to its end or preemption.
using Stay = std::pair<Int, Int>;  // slot, serial

using NamedKeys = std::vector<std::pair<Block, Key>>;

// The tokens of one row in a step.
struct Grant {
    Stay stay;
    Int num_tokens;
};
using Grants = std::vector<Grant>;

// The keys that stays registered in one step.
class KeyBook {
  public:
    void Add(const Stay& stay, const NamedKeys& keys) {
        runs_.push_back({stay, keys_.size(), keys.size()});
        keys_.insert(keys_.end(), keys.begin(), keys.end());
    }
    // Removes the keys of a stay, and returns them in order.
    NamedKeys Pop(const Stay& stay) {
        NamedKeys found;
        for (Run& run : runs_) {
            if (run.stay != stay) continue;
            found.insert(found.end(), At(run), At(run) + static_cast<std::ptrdiff_t>(run.count));
            run.count = 0;
        }
        return found;
    }
    // Visits the stays that have keys, in the order in which they registered the first one.
    template <typename F>
    void ForEach(F&& visit) const {
        std::map<Stay, NamedKeys> by_stay;
        for (const Run& run : runs_) {
            if (run.count == 0) continue;
            NamedKeys& keys = by_stay[run.stay];
            keys.insert(keys.end(), At(run), At(run) + static_cast<std::ptrdiff_t>(run.count));
        }
        for (const Run& run : runs_) {
            const auto found = run.count ? by_stay.find(run.stay) : by_stay.end();
            if (found == by_stay.end()) continue;
            visit(found->first, found->second);
            by_stay.erase(found);
        }
    }
    void clear() {
        runs_.clear();
        keys_.clear();
    }
    size_t num_runs() const { return runs_.size(); }
    std::span<const std::pair<Block, Key>> KeysOf(size_t run) const {
        return std::span(keys_).subspan(runs_[run].first, runs_[run].count);
    }

  private:
    struct Run {
        Stay stay;
        size_t first, count;
    };
    NamedKeys::const_iterator At(const Run& run) const {
        return keys_.begin() + static_cast<std::ptrdiff_t>(run.first);
    }

    std::vector<Run> runs_;
    NamedKeys keys_;
};

// One value per step, ascending by step; a value that is removed gives its memory to a later one.
template <typename T>
class ByStep {
  public:
    T& operator[](Int step) {
        const auto at = lower_bound(step);
        if (at != entries_.end() && at->first == step) return at->second;
        T fresh;
        if (!spare_.empty()) {
            fresh = std::move(spare_.back());
            spare_.pop_back();
        }
        return entries_.emplace(at, step, std::move(fresh))->second;
    }
    auto find(Int step) { return Find(*this, step); }
    auto find(Int step) const { return Find(*this, step); }
    auto lower_bound(Int step) {
        return std::partition_point(entries_.begin(), entries_.end(),
                                    [&](const auto& one) { return one.first < step; });
    }
    auto begin() { return entries_.begin(); }
    auto begin() const { return entries_.begin(); }
    auto end() { return entries_.end(); }
    auto end() const { return entries_.end(); }
    bool empty() const { return entries_.empty(); }

    // Removes the values of all steps up to this one.
    void EraseThrough(Int step) {
        const auto last = lower_bound(step + 1);
        for (auto at = entries_.begin(); at != last; ++at) {
            at->second.clear();
            if (spare_.size() < kSpare) spare_.push_back(std::move(at->second));
        }
        entries_.erase(entries_.begin(), last);
    }
    void clear() { entries_.clear(); }

  private:
    static constexpr size_t kSpare = 4;

    template <typename Self>
    static auto Find(Self& self, Int step) {
        return std::find_if(self.entries_.begin(), self.entries_.end(),
                            [&](const auto& one) { return one.first == step; });
    }

    std::vector<std::pair<Int, T>> entries_;
    std::vector<T> spare_;
};

// Values by key, in order of insertion; a removed key that is added again comes last.
template <typename K, typename V>
class Ordered {
  public:
    V& operator[](const K& key) {
        const auto [at, is_new] = where_.try_emplace(key, entries_.size());
        if (is_new) entries_.emplace_back(key, V());
        return entries_[at->second].second;
    }
    const V* Find(const K& key) const {
        const auto found = where_.find(key);
        return found == where_.end() ? nullptr : &entries_[found->second].second;
    }
    V Pop(const K& key) {
        const auto found = where_.find(key);
        if (found == where_.end()) return V();
        V value = std::move(entries_[found->second].second);
        entries_[found->second].second = V();
        where_.erase(found);
        return value;
    }
    template <typename F>
    void ForEach(F&& visit) const {
        for (size_t at = 0; at < entries_.size(); ++at) {
            const auto found = where_.find(entries_[at].first);
            if (found != where_.end() && found->second == at) visit(entries_[at].first, entries_[at].second);
        }
    }
    void clear() {
        entries_.clear();
        where_.clear();
    }
    // All that were added; the value of a removed key is empty.
    const std::vector<std::pair<K, V>>& entries() const { return entries_; }

  private:
    std::vector<std::pair<K, V>> entries_;
    std::map<K, size_t> where_;
};

}  // namespace kvplane
