// Which of the first entries of a list a reader has seen, so that it visits only those that are new or have changed.
//
//     seen ... seen last | not seen ...         entries that are removed, or enter between these, keep them together
//
// The list has two parts, e.g. before and behind its divider. Entries enter at its front, at the end of its first part,
// or at its back. A seen entry has a number by which seen entries are sorted: negative in the first part.
#pragma once

#include "types.h"

namespace kvplane {

enum class Visited : uint8_t { kSeen, kAgain, kStop };  // kAgain: visit it next time too; kStop: it is not seen

class Seen {
  public:
    // Without entries nothing is ever seen, and the list costs what it costs without a reader.
    void Resize(size_t num_entries) { number_.resize(num_entries, 0); }

    // Sees nothing any more.
    void Clear() {
        std::fill(number_.begin(), number_.end(), 0);
        changed_.clear();
        count_ = 0;
    }

    Int count() const { return count_; }

    // Visit a seen entry again.
    void Change(uint32_t entry) {
        if (Has(entry)) changed_.insert({number_[entry], entry});
    }

    // Entries that need no visit.
    void EnterFirst(std::span<const uint32_t> entries) {
        if (count_ == 0) return;
        front_ -= static_cast<Int>(entries.size());
        for (size_t at = 0; at < entries.size(); ++at) number_[entries[at]] = front_ + static_cast<Int>(at);
        count_ += static_cast<Int>(entries.size());
    }
    // At the end of the first part.
    void EnterMiddle(std::span<const uint32_t> entries) {
        if (count_ == 0 || number_[last_] < 0) return;
        for (const uint32_t entry : entries) Enter(entry, middle_++);
    }
    // `before`: the entry before this one, if there is one.
    void Remove(uint32_t entry, uint32_t before) {
        if (!Has(entry)) return;
        if (!changed_.empty()) changed_.erase({number_[entry], entry});
        number_[entry] = 0;
        --count_;
        if (entry == last_) last_ = before;
    }

    // Visits, of the first `most` entries of the list, those that are not seen and those that have changed, in order,
    // until a visit returns kStop. What a visit changes before its own entry is visited the next time.
    // `fetch` and `expect` load what the visit of an entry reads, kFetched and half as many entries before it.
    template <typename List, typename F, typename Fetch, typename Expect>
    void Visit(const List& list, Int most, F&& visit, Fetch&& fetch, Expect&& expect) {
        if (count_ >= most && changed_.empty()) return;  // those behind are not visited, whether they are seen or not
        while (count_ > std::max<Int>(most, 0)) Remove(last_, list.Preceding(last_));
        for (auto next = changed_.begin(); next != changed_.end();) {
            const auto one = *next;
            const Visited visited = visit(one.second);
            if (visited == Visited::kStop) return;
            next = visited == Visited::kSeen ? changed_.erase(changed_.find(one)) : changed_.upper_bound(one);
        }
        std::array<uint32_t, kFetched> next;  // the entries from the next one on, as a ring
        uint32_t ahead = count_ ? list.Following(last_) : list.First();
        size_t at = 0;
        for (size_t fetched = 0; count_ < most; ++at) {
            for (; fetched < at + kFetched && ahead != list.End(); ++fetched) {
                __builtin_prefetch(&number_[ahead], 1);
                fetch(next[fetched % kFetched] = ahead);
                ahead = list.Following(ahead);
            }
            if (at == fetched) return;
            if (at + kFetched / 2 < fetched) expect(next[(at + kFetched / 2) % kFetched]);
            const uint32_t entry = next[at % kFetched];
            const Visited visited = visit(entry);
            if (visited == Visited::kStop) return;
            const bool is_first = list.IsInFirstPart(entry, count_ > 0 && number_[last_] < 0);
            number_[entry] = is_first ? middle_++ : back_++;
            last_ = entry;
            ++count_;
            if (visited == Visited::kAgain) Change(entry);
        }
    }

  private:
    friend class SeenCheck;

    static constexpr Int kMiddle = -(Int{1} << 61);
    static constexpr size_t kFetched = 8;

    bool Has(uint32_t entry) const { return !number_.empty() && number_[entry]; }

    void Enter(uint32_t entry, Int number) {
        number_[entry] = number;
        ++count_;
        Change(entry);
    }

    Column number_;  // by entry: 0 = not seen
    std::set<std::pair<Int, uint32_t>> changed_;
    uint32_t last_ = 0;  // the last one that is seen, if one is
    Int count_ = 0, front_ = kMiddle, middle_ = kMiddle, back_ = 1;
};

}  // namespace kvplane
