// The keys of all blocks, and the index from a key to the blocks that have it.
#pragma once

#include "types.h"

namespace kvplane {

// Numbers of (domain, group), so that a key has a fixed size.
class Pairs {
  public:
    explicit Pairs(size_t num_groups) : num_groups_(num_groups), inverse_(~uint64_t{0} / num_groups + 1) {}

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
    // The remainder of a division by the number of groups, by two products, which take less time (Lemire et al. 2019,
    // "Faster remainder by direct computation"). It is exact for all numbers of 32 bits.
    Int Group(uint32_t pair) const {
        const unsigned __int128 fraction = inverse_ * (pair - 1);
        return static_cast<Int>(fraction * num_groups_ >> 64);
    }
    const std::string& Name(uint32_t pair) const { return names_[Domain(pair)]; }
    // A key as seals have it, see `Orders.load_key`.
    uint64_t SealKey(const Key& key) const {
        const std::string& name = Name(key.pair);
        uint64_t mask = name.empty() ? 0 : 0xcbf29ce484222325, end = 0;
        for (const char one : name) mask = (mask ^ static_cast<uint8_t>(one)) * 0x100000001b3;
        for (uint8_t at = key.digest.size < 8 ? 0 : key.digest.size - 8; at < key.digest.size; ++at)
            end = end << 8 | key.digest.bytes[at];
        return end ^ mask;
    }
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
    Int num_groups() const { return static_cast<Int>(num_groups_); }
    const std::vector<std::string>& Names() const { return names_; }

  private:
    friend class KeyChecks;

    size_t num_groups_;
    uint64_t inverse_;  // 2^64 / num_groups_, rounded up; 0 for one group
    std::vector<std::string> names_;
    std::unordered_map<std::string, uint32_t> ids_;
    std::vector<uint32_t> free_;
};

constexpr uint32_t kUnknownDomain = 0x00FFFFFF;  // no key has it
constexpr uint32_t kNoRecord = 0xFFFFFFFF;
constexpr size_t kAhead = 8;  // keys whose index entries are fetched while others are worked on
// Blocks whose keys are hashed, and whose index entries are fetched, before they are worked on.
constexpr size_t kRun = kSmallTables ? 2 : 64;

// One key of one block. Records of one key are a ring in order of registration: the first one follows the last one.
struct KeyRecord {
    Key key;  // pair 0: no key
    uint32_t next = kNoRecord;
    uint32_t tokens = 0;

    // Makes it a record of no key. In place, since a copy of a new one would be read before it is stored.
    void Clear() {
        key.pair = 0;
        next = kNoRecord;
        tokens = 0;
    }
};

// A key with its hash, so that several look-ups compute it once. Exists while the key does.
class Sought {
  public:
    Sought(const Key& of) : key(of), hash(HashOf(of)) {}
    // `of_key`: its hash.
    Sought(const Key& of, uint64_t of_key) : key(of), hash(of_key) {}

    const Key& key;
    const uint64_t hash;

  private:
    // Clients choose digests, and must not choose where they collide: every bit depends on all bytes and on secrets of
    // this process.
    static uint64_t HashOf(const Key& key) {
        uint64_t word[kDigestBytes / sizeof(uint64_t)];
        std::memcpy(word, key.digest.bytes.data(), sizeof word);
        const uint64_t mixed = Fold(word[0] ^ secrets_[0], word[1] ^ secrets_[1]) ^
                               Fold(word[2] ^ secrets_[2], word[3] ^ secrets_[3]);
        return Fold(mixed ^ secrets_[4], key.pair ^ secrets_[5]);
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

    static inline const std::array<uint64_t, 6> secrets_ = NewSecrets();
};

// Open addressing over the last records of all rings, with linear probing and deletion by shifting back. An entry is a
// record and, in the bits that numbers of records leave, how far the entry is from the place of its key, and above that
// some bits of the key's hash, its tag, so that hardly any look-up or removal reads the records of other keys.
// `records`: always the same vector, whose elements have a `key`.
class Index {
  public:
    explicit Index(size_t num_keys)
        : entries_(kSmallTables ? 2 : std::bit_ceil(std::max<size_t>(num_keys * 2, 16)), kNoRecord),
          bits_(kSmallTables ? 1 : BitsOf(num_keys * 2)) {}

    uint32_t Find(const auto& records, const Sought& key) const {
        const uint32_t entry = entries_[Locate(records, key).at];
        return entry == kNoRecord ? kNoRecord : RecordOf(entry);
    }
    // Returns the record that has the key of this one; if there is none, adds this one and returns kNoRecord.
    uint32_t FindOrAdd(const auto& records, uint32_t record) {
        return FindOrAdd(records, record, records[record].key);
    }
    uint32_t FindOrAdd(const auto& records, uint32_t record, const Sought& key) {
        MakeRoom(records, record);
        const Spot spot = Locate(records, key);
        const uint32_t entry = entries_[spot.at];
        if (entry != kNoRecord) return RecordOf(entry);
        entries_[spot.at] = EntryOf(record, spot);
        ++count_;
        return kNoRecord;
    }
    void Replace(const auto& records, uint32_t before, uint32_t after) {
        MakeRoom(records, after);
        Spot spot = At(before, Sought(records[before].key).hash);
        spot.tag = TagOf(entries_[spot.at]);
        entries_[spot.at] = EntryOf(after, spot);
    }
    void Remove(const auto& records, uint32_t record) {
        Remove(records, record, records[record].key);
    }
    void Remove(const auto& records, uint32_t record, const Sought& key) { RemoveAt(records, record, key.hash); }
    // `hash`: the lower half of that of its key, since no table has more entries than numbers of 32 bits.
    void RemoveAt(const auto& records, uint32_t record, uint64_t hash) {
        size_t hole = At(record, hash).at;
        for (size_t at = (hole + 1) & Mask(); entries_[at] != kNoRecord; at = (at + 1) & Mask()) {
            const size_t distance = DistanceOf(records, at), gap = (at - hole) & Mask();
            if (distance >= gap) {
                entries_[hole] = EntryOf(RecordOf(entries_[at]), {hole, distance - gap, TagOf(entries_[at])});
                hole = at;
            }
        }
        entries_[hole] = kNoRecord;
        --count_;
    }
    // Fetches what a look-up of the key will read.
    void Prefetch(const Sought& key) const { PrefetchAt(key.hash); }
    void PrefetchAt(uint64_t hash) const { __builtin_prefetch(&entries_[static_cast<size_t>(hash) & Mask()]); }
    size_t count() const { return count_; }

  private:
    friend class IndexCheck;

    size_t Mask() const { return entries_.size() - 1; }
    size_t Place(const Sought& key) const { return static_cast<size_t>(key.hash) & Mask(); }

    struct Spot {
        size_t at, distance;
        uint32_t tag;
    };
    Spot Begin(const Sought& key) const {
        const uint64_t tags = uint64_t{kNoRecord} >> TagAt();
        return {Place(key), 0, static_cast<uint32_t>(key.hash >> 32 & tags)};
    }
    // Where the key is; where it would be added if it is nowhere.
    Spot Locate(const auto& records, const Sought& key) const {
        Spot spot = Begin(key);
        for (uint32_t entry; (entry = entries_[spot.at]) != kNoRecord; Next(&spot)) {
            if (EntryOf(RecordOf(entry), spot) == entry && records[RecordOf(entry)].key == key.key) break;
        }
        return spot;
    }
    // Without the tag.
    Spot At(uint32_t record, uint64_t hash) const {
        Spot spot{static_cast<size_t>(hash) & Mask(), 0, 0};
        for (; entries_[spot.at] == kNoRecord || RecordOf(entries_[spot.at]) != record; Next(&spot))
            Require(entries_[spot.at] != kNoRecord, "a key is not in the index");
        return spot;
    }
    void Next(Spot* spot) const {
        spot->at = (spot->at + 1) & Mask();
        ++spot->distance;
    }
    size_t DistanceOf(const auto& records, size_t at) const {
        const size_t kept = entries_[at] >> bits_ & Longest();
        return kept < Longest() ? kept : (at - Place(records[RecordOf(entries_[at])].key)) & Mask();
    }

    static uint32_t BitsOf(size_t num_records) { return static_cast<uint32_t>(std::bit_width(num_records)); }
    // Where the tag of an entry begins, if it has one.
    uint32_t TagAt() const { return std::min(bits_ + kDistanceBits, kEntryBits); }
    // The longest distance that entries have; it stands for longer ones too.
    size_t Longest() const { return (size_t{1} << (TagAt() - bits_)) - 1; }
    uint32_t RecordOf(uint32_t entry) const { return entry & ((uint32_t{1} << bits_) - 1); }
    uint32_t TagOf(uint32_t entry) const { return static_cast<uint32_t>(uint64_t{entry} >> TagAt()); }
    uint32_t EntryOf(uint32_t record, const Spot& spot) const {
        const auto distance = static_cast<uint32_t>(std::min(spot.distance, Longest()));
        return static_cast<uint32_t>(uint64_t{spot.tag} << TagAt()) | distance << bits_ | record;
    }

    // Grows where one more key would fill half of the table, or the record has more bits than entries have for it.
    void MakeRoom(const auto& records, uint32_t record) {
        const bool fits = RecordOf(kNoRecord) > record;
        const bool has_room = (count_ + 1) * 2 <= entries_.size();
        if (fits && has_room) [[likely]]
            return;
        const uint32_t bits = fits ? bits_ : BitsOf(size_t{record} * 2);
        std::vector<uint32_t> before(entries_.size() * (has_room ? 1 : 2), kNoRecord);
        before.swap(entries_);
        const uint32_t mask = RecordOf(kNoRecord);
        bits_ = bits;
        for (const uint32_t entry : before) {
            if (entry == kNoRecord) continue;
            const Spot spot = Locate(records, records[entry & mask].key);
            entries_[spot.at] = EntryOf(entry & mask, spot);
        }
    }

    static constexpr uint32_t kEntryBits = 32, kDistanceBits = 4;

    std::vector<uint32_t> entries_;
    uint32_t bits_;  // of a record in an entry
    size_t count_ = 0;
};

}  // namespace kvplane
