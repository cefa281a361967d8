// What a tier copies from the place before it early, before that evicts it: by the policies `through` and `reuse`.
#pragma once

#include "../keys.h"

namespace kvplane {

class Wanted {
  public:
    Wanted(Int save_policy, Int most_seen) : policy(save_policy), most_seen_(static_cast<size_t>(most_seen)) {}

    bool IsEarly() const { return policy != kBehind; }
    bool empty() const { return order_.empty(); }

    // Wants the content of a place, behind all that is wanted already.
    void Add(Int place, uint64_t version) {
        const auto at = static_cast<size_t>(place);
        if (at >= version_.size()) version_.resize(at + 1, kNotWanted);
        if (version_[at] == kNotWanted) order_.push_back(place);
        version_[at] = version;
    }
    void NoteComputed(Int place, uint64_t version, const Key& key, const Pairs& pairs) {
        if (policy == kThrough || (policy == kReuse && WasSeen(key, pairs))) Add(place, version);
    }
    void NoteUsed(Int place, uint64_t version) {
        if (policy == kReuse) Add(place, version);
    }

    // The place, with its version, that was wanted first.
    std::pair<Int, uint64_t> First() const { return {order_.front(), version_[static_cast<size_t>(order_.front())]}; }
    void RemoveFirst() {
        version_[static_cast<size_t>(order_.front())] = kNotWanted;
        order_.pop_front();
    }
    void Clear() {
        order_.clear();
        version_.clear();
        recent.clear();
        before.clear();
    }

    Column Places() const { return Column(order_.begin(), order_.end()); }
    std::vector<uint64_t> Versions() const {
        std::vector<uint64_t> versions;
        for (const Int place : order_) versions.push_back(version_[static_cast<size_t>(place)]);
        return versions;
    }

    const Int policy;
    std::set<uint64_t> recent, before;  // ordered: clients choose digests, and must not choose where they collide

  private:
    friend class TierChecks;

    static constexpr uint64_t kNotWanted = 0;  // no version

    bool WasSeen(const Key& key, const Pairs& pairs) {
        const uint64_t name = NameOf(key, pairs);
        const bool was_seen = recent.contains(name) || before.contains(name);
        recent.insert(name);
        if (recent.size() >= most_seen_) {
            before = std::move(recent);
            recent.clear();
        }
        return was_seen;
    }

    // 64 bits of a key: its digest, and the FNV-1a of domain and group.
    static uint64_t NameOf(const Key& key, const Pairs& pairs) {
        uint64_t salt = 0xCBF29CE484222325, head = 0;
        const auto mix = [&salt](uint8_t byte) { salt = (salt ^ byte) * 0x100000001B3; };
        for (const char byte : pairs.Name(key.pair)) mix(static_cast<uint8_t>(byte));
        mix(static_cast<uint8_t>(pairs.Group(key.pair)));
        std::memcpy(&head, key.digest.bytes.data(), sizeof head);
        return head ^ salt;
    }

    const size_t most_seen_;
    std::deque<Int> order_;          // the places, the one that was wanted first first
    std::vector<uint64_t> version_;  // by place
};

}  // namespace kvplane
