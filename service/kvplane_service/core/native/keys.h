// The keys of all blocks, and the index from a key to the blocks that have it.
#pragma once

#include "types.h"

namespace kvplane {

// Numbers of (domain, group), so that a key has a fixed size.
class Pairs {
  public:
    explicit Pairs(size_t num_groups) : num_groups_(num_groups) {}

    uint32_t DomainOf(const std::string& name) {
        const auto found = ids_.find(name);
        if (found != ids_.end()) return found->second;
        uint32_t id = static_cast<uint32_t>(names_.size());
        if (free_.empty()) {
            names_.push_back(name);
        } else {
            id = free_.back();
            free_.pop_back();
            names_[id] = name;
        }
        ids_.emplace(name, id);
        return id;
    }
    bool Known(const std::string& name, uint32_t* id) const {
        const auto found = ids_.find(name);
        if (found == ids_.end()) return false;
        *id = found->second;
        return true;
    }
    uint32_t Of(uint32_t domain, Int group) const {
        return domain * static_cast<uint32_t>(num_groups_) + static_cast<uint32_t>(group) + 1;
    }
    uint32_t Domain(uint32_t pair) const { return (pair - 1) / static_cast<uint32_t>(num_groups_); }
    Int Group(uint32_t pair) const { return (pair - 1) % static_cast<uint32_t>(num_groups_); }
    const std::string& Name(uint32_t pair) const { return names_[Domain(pair)]; }
    const std::string& NameOf(uint32_t domain) const { return names_[domain]; }
    size_t Live() const { return ids_.size(); }
    // Frees the numbers of domains that nothing uses: used[id] is false.
    void Sweep(const std::vector<bool>& used) {
        for (auto one = ids_.begin(); one != ids_.end();) {
            if (used[one->second]) {
                ++one;
            } else {
                free_.push_back(one->second);
                one = ids_.erase(one);
            }
        }
    }
    size_t Capacity() const { return names_.size(); }
    const std::vector<std::string>& Names() const { return names_; }

  private:
    size_t num_groups_;
    std::vector<std::string> names_;
    std::unordered_map<std::string, uint32_t> ids_;
    std::vector<uint32_t> free_;
};

constexpr uint32_t kUnknownDomain = 0x00FFFFFF;  // no key has it
constexpr uint32_t kNoRecord = 0xFFFFFFFF;

// One key of one block. Records of one key are a ring in order of registration: the first one follows the last one.
struct KeyRecord {
    Key key;  // pair 0: no key
    uint32_t next = kNoRecord;
    uint32_t tokens = 0;
};

// Open addressing over the last records of all rings, with linear probing and deletion by shifting back.
class Index {
  public:
    explicit Index(size_t num_keys) : slots_(std::bit_ceil(std::max<size_t>(num_keys * 2, 16)), kNoRecord) {}

    uint32_t Find(const std::vector<KeyRecord>& records, const Key& key) const {
        for (size_t at = Place(key);; at = (at + 1) & Mask()) {
            const uint32_t record = slots_[at];
            if (record == kNoRecord || records[record].key == key) return record;
        }
    }
    void Add(const std::vector<KeyRecord>& records, uint32_t record) {
        if ((count_ + 1) * 2 > slots_.size()) Grow(records);
        Put(records, record);
        ++count_;
    }
    void Replace(const std::vector<KeyRecord>& records, uint32_t before, uint32_t after) {
        slots_[At(records, before)] = after;
    }
    void Remove(const std::vector<KeyRecord>& records, uint32_t record) {
        size_t hole = At(records, record);
        for (size_t at = (hole + 1) & Mask(); slots_[at] != kNoRecord; at = (at + 1) & Mask()) {
            const size_t home = Place(records[slots_[at]].key);
            if (((at - home) & Mask()) >= ((at - hole) & Mask())) {
                slots_[hole] = slots_[at];
                hole = at;
            }
        }
        slots_[hole] = kNoRecord;
        --count_;
    }
    size_t count() const { return count_; }

  private:
    size_t Mask() const { return slots_.size() - 1; }
    // Clients choose digests, and must not choose where they collide: every bit of the place depends on all bytes and
    // on secrets of this index.
    size_t Place(const Key& key) const {
        uint64_t word[kDigestBytes / sizeof(uint64_t)];
        std::memcpy(word, key.digest.bytes.data(), sizeof word);
        const uint64_t mixed = Fold(word[0] ^ secrets_[0], word[1] ^ secrets_[1]) ^
                               Fold(word[2] ^ secrets_[2], word[3] ^ secrets_[3]);
        return static_cast<size_t>(Fold(mixed ^ secrets_[4], key.pair ^ secrets_[5])) & Mask();
    }
    // The two halves of the product, as one number.
    static uint64_t Fold(uint64_t a, uint64_t b) {
        const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
        return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    }
    static std::array<uint64_t, 6> NewSecrets() {
        std::random_device random;
        std::array<uint64_t, 6> secrets;
        for (uint64_t& one : secrets) one = uint64_t{random()} << 32 | random();
        return secrets;
    }
    size_t At(const std::vector<KeyRecord>& records, uint32_t record) const {
        size_t at = Place(records[record].key);
        while (slots_[at] != record) {
            Require(slots_[at] != kNoRecord, "a key is not in the index");
            at = (at + 1) & Mask();
        }
        return at;
    }
    void Put(const std::vector<KeyRecord>& records, uint32_t record) {
        size_t at = Place(records[record].key);
        while (slots_[at] != kNoRecord) at = (at + 1) & Mask();
        slots_[at] = record;
    }
    void Grow(const std::vector<KeyRecord>& records) {
        std::vector<uint32_t> before(slots_.size() * 2, kNoRecord);
        before.swap(slots_);
        for (const uint32_t record : before) {
            if (record != kNoRecord) Put(records, record);
        }
    }

    std::vector<uint32_t> slots_;
    size_t count_ = 0;
    std::array<uint64_t, 6> secrets_ = NewSecrets();
};

}  // namespace kvplane
