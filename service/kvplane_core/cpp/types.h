// Types that all parts of the core share. The Python files of the same names are the specification.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "values.h"

namespace kvplane {

using Block = uint32_t;
using Int = int64_t;  // positions in tokens, counts, numbers of steps
using Column = std::vector<Int>;
using BlockList = std::vector<Block>;

// Whether tables begin small and grow, and domains are swept after each step, as they are in no other test.
#ifdef KVPLANE_SMALL_TABLES
constexpr bool kSmallTables = true;
#else
constexpr bool kSmallTables = false;
#endif

constexpr Block kNullBlock = 0;
constexpr Int kForever = Int{1} << 62;
constexpr Int kInside = Int{1} << 62;  // look-up horizon of the replica's own requests
constexpr Int kNotTracked = -1;
constexpr Int kMaxTokens = Int{1} << 30;
constexpr Int kMaxSlots = Int{1} << 14;
constexpr Int kMaxGroups = 64;
constexpr Int kMaxPriority = 100;
constexpr Int kMaxCostNs = 60'000'000'000;
constexpr size_t kDigestBytes = 32;

constexpr Int kReservedAlign = 1;  // a bit of flags that is ignored

enum SavePolicy : Int { kBehind = 0, kThrough = 1, kReuse = 2 };
enum Policy : Int { kLru = 0, kWindowTail = 1, kTurnTail = 2, kHazard = 3 };
enum Kind : Int {
    kFull = 0,
    kMla = 1,
    kWindow = 2,
    kWindowMla = 3,
    kChunked = 4,
    kAlignedState = 5,
    kCross = 6,
    kSinkFull = 7,
    kRetainedWindow = 8,
    kRing = 9,
    kUncachedState = 10
};

// A broken invariant of the core: a bug, never the fault of a caller. The module raises it as AssertionError.
struct Broken : std::logic_error {
    using std::logic_error::logic_error;
};

[[gnu::always_inline]] inline void Require(bool holds, const char* what) {
    if (!holds) [[unlikely]]
        throw Broken(what);
}

inline Int FloorDiv(Int a, Int b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }
inline Int CeilDiv(Int a, Int b) { return -FloorDiv(-a, b); }
inline size_t BitLength(Int value) { return static_cast<size_t>(std::bit_width(static_cast<uint64_t>(value))); }

// A hash of 16 or 32 bytes; the bytes behind its size are 0.
struct Digest {
    std::array<uint8_t, kDigestBytes> bytes{};
    uint8_t size = 0;

    Digest() = default;
    Digest(const uint8_t* data, size_t count) { Set(data, count); }
    [[gnu::always_inline]] void Set(const uint8_t* data, size_t count) {
        Require(count <= kDigestBytes, "a hash has more than 32 bytes");
        size = static_cast<uint8_t>(count);
        if (count == kDigestBytes) {
            std::memcpy(bytes.data(), data, kDigestBytes);
            return;
        }
        bytes.fill(0);
        if (count > 0) std::memcpy(bytes.data(), data, count);  // nothing may be at a null pointer
    }
    auto operator<=>(const Digest& other) const = default;
    bool operator==(const Digest& other) const {
        uint64_t mine[kDigestBytes / 8], others[kDigestBytes / 8];
        std::memcpy(mine, bytes.data(), kDigestBytes);
        std::memcpy(others, other.bytes.data(), kDigestBytes);
        return size == other.size && ((mine[0] ^ others[0]) | (mine[1] ^ others[1]) | (mine[2] ^ others[2]) |
                                      (mine[3] ^ others[3])) == 0;
    }
};

// The chained hashes of a request, of equal size.
struct Digests {
    std::vector<uint8_t> bytes;
    size_t size = 0;  // bytes of one; 0 while there are none

    Int count() const {
        if (size == kDigestBytes) return static_cast<Int>(bytes.size() / kDigestBytes);  // a shift
        return size == 0 ? 0 : static_cast<Int>(bytes.size() / size);
    }
    Digest at(Int index) const {
        Digest digest;
        CopyTo(index, &digest);
        return digest;
    }
    // Writes a hash where it is needed: `at` writes it twice, and a copy is read before it is stored.
    [[gnu::always_inline]] void CopyTo(Int index, Digest* into) const {
        Require(index >= 0 && (static_cast<size_t>(index) + 1) * size <= bytes.size(), "digest out of range");
        into->Set(bytes.data() + static_cast<size_t>(index) * size, size);
    }
    void add(const uint8_t* data, size_t num_bytes, size_t digest_size) {
        if (num_bytes == 0) return;
        Require(size == 0 || size == digest_size, "hashes of two sizes");
        size = digest_size;
        bytes.insert(bytes.end(), data, data + num_bytes);
    }
};

// A name of a block's content. `pair` is the number of (domain, group), from 1 on.
struct Key {
    uint32_t pair = 0;
    Digest digest;
    auto operator<=>(const Key& other) const = default;
};

struct GroupSpec {
    Int kind, block_size, window, chunk, is_draft, drops_last_block, admission_cap_blocks, zero_new_blocks;
    Int lookup_class, extra_retained_tokens, speculative_blocks, checkpoint_alignment, checkpoints_single_group_hits,
        sink_blocks;

    bool is_cached() const { return kind != kCross && kind != kRing && kind != kUncachedState; }
    bool is_state() const { return kind == kAlignedState || kind == kUncachedState; }
};

struct TierSpec {
    Int medium, num_slots, save;  // save: its SavePolicy
    Int most_retained;            // keys of one owner
};

struct Spec {
    Int num_blocks, max_model_len, hash_block_size, scheduler_block_size, enable_caching, kept_every;
    Int partial_hits, watermark_blocks, safe, prefill_lookahead, keep_divergence_boundary, events, digest_size;
    Int hash_lookahead_tokens, align_block_size, align_chunk_limit, align_stop_at_tail, policy, hint_values;
    Int most_ahead;  // blocks that are looked at for saves
    Int checkpoint_percent;
    Int blocks_per_state;
    std::vector<GroupSpec> groups;
    std::vector<TierSpec> tiers;

    Int hit_alignment() const { return partial_hits ? hash_block_size : scheduler_block_size; }
    bool dense() const { return kept_every == -1; }
    bool drops_last_block() const {
        return std::any_of(groups.begin(), groups.end(), [](const GroupSpec& one) { return one.drops_last_block; });
    }
};

// Whether bytes are UTF-8, without surrogates and in the shortest form.
inline bool IsUtf8(std::span<const uint8_t> text) {
    constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
    const uint8_t* at = text.data();
    const uint8_t* const end = at + text.size();
    while (at != end) {
        const uint8_t first = *at++;
        if (first < 0x80) continue;
        const int size = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
        if (first < 0xc2 || first > 0xf4 || end - at < size - 1) return false;
        uint32_t letter = first & (0x7fu >> size);
        for (int more = 1; more < size; ++more, ++at) {
            if (*at >> 6 != 2) return false;
            letter = letter << 6 | (*at & 0x3f);
        }
        if (letter < kLeast[size] || letter > 0x10ffff || (letter >= 0xd800 && letter < 0xe000)) return false;
    }
    return true;
}

// -- stamps: version numbers of the contents of blocks, see `kvplane.base.stamps` -------------------------------------

constexpr int kCounterBits = 32, kEpochBits = 24;
constexpr uint64_t kMaxCounter = (uint64_t{1} << kCounterBits) - 1;

// The order in which stamps are issued: epoch, generation, counter.
inline uint64_t EpochOf(uint64_t stamp) { return stamp >> kCounterBits & ((uint64_t{1} << kEpochBits) - 1); }
inline uint64_t InTime(uint64_t stamp) {
    const uint64_t epoch = EpochOf(stamp);
    const uint64_t generation = stamp >> (kCounterBits + kEpochBits);
    return epoch << (64 - kEpochBits) | generation << kCounterBits | (stamp & kMaxCounter);
}

// The stamps that a memory has, by block, then by slot of the tiers; none: no key is confirmed.
struct Shown {
    const uint64_t* stamps = nullptr;
    size_t size = 0;
};

}  // namespace kvplane
