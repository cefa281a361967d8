// Packs a step that was applied, and cache events, into bytes, as `decisions/packing.py` does, which specifies them.
#pragma once

#include "bind.h"

namespace kvplane {

class Frame {
  public:
    // With the memory that most frames need, or this one.
    explicit Frame(size_t num_bytes = 0) {
        heads_.reserve(96);
        body_.reserve(std::max<size_t>(num_bytes, 2048));
    }

    // Adds a column in the smallest type that has all numbers.
    template <typename T>
    void Add(uint32_t number, const std::vector<T>& values) {
        if (!values.empty()) AddColumn(number, values);
    }
    void Add(uint32_t number, const Hashes& hashes) {
        if (hashes.size) AddRaw(number, hashes.data, hashes.size);
    }
    void Add(uint32_t number, const std::vector<std::string>& texts) {
        if (!texts.empty()) AddJoined(number, texts, [](const std::string& one) {
            return Hashes{reinterpret_cast<const uint8_t*>(one.data()), one.size()};
        });
    }
    void Add(uint32_t number, const std::vector<Digest>& digests) {
        if (!digests.empty()) AddJoined(number, digests, [](const Digest& one) {
            return Hashes{one.bytes.data(), one.size};
        });
    }
    // The digests of a row are one value.
    void Add(uint32_t number, const Hashed& hashed) {
        if (hashed.num_hashes.empty()) return;
        AddLengths(number, hashed.num_hashes.size(), hashed.hashes.data(), hashed.hashes.size(), [&](size_t at) {
            return static_cast<size_t>(hashed.num_hashes[at]) * hashed.digest_size;
        });
    }

    void AddBits(uint32_t number, const Column& values) {
        const auto bits_at = [&](size_t at) { return static_cast<uint64_t>(values[at]); };
        if (!values.empty()) AddNumbers(number, values.size(), bits_at);
    }

    template <typename T>
    void AddColumn(uint32_t number, const std::vector<T>& values) {
        AddNumbers(number, values.size(), [&](size_t at) { return values[at]; });
    }

    // Adds a column of the numbers that `number_at` returns.
    template <typename NumberAt>
    void AddNumbers(uint32_t number, size_t count, NumberAt&& number_at) {
        using T = std::invoke_result_t<NumberAt, size_t>;
        uint64_t bits = 0;  // of all numbers; a negative one has the highest
        for (size_t at = 0; at < count; ++at) bits |= static_cast<uint64_t>(number_at(at));
        if (bits <= 0xff) return Store<uint8_t>('B', number, count, number_at);
        if (bits <= 0xffffffff) return Store<uint32_t>('I', number, count, number_at);
        if (!std::is_signed_v<T> || bits <= INT64_MAX) return Store<uint64_t>('Q', number, count, number_at);
        bool are_short = true;
        for (size_t at = 0; at < count; ++at) are_short &= std::in_range<int32_t>(number_at(at));
        if (are_short) return Store<int32_t>('i', number, count, number_at);
        Store<int64_t>('q', number, count, number_at);
    }

    void AddRaw(uint32_t number, const uint8_t* data, size_t size) {
        heads_.insert(heads_.end(), {number, 0, static_cast<uint32_t>(size)});
        body_.insert(body_.end(), data, data + size);
    }

    // Adds `count` byte strings, which follow each other from `data` on: their number, their lengths, their bytes.
    template <typename SizeOf>
    void AddLengths(uint32_t number, size_t count, const uint8_t* data, size_t size, SizeOf&& size_of) {
        const size_t begin = body_.size();
        body_.resize(begin + 4 * (1 + count) + size);
        uint8_t* into = body_.data() + begin;
        const auto add = [&](size_t value) {
            const auto word = static_cast<uint32_t>(value);
            std::memcpy(into, &word, sizeof word);
            into += sizeof word;
        };
        add(count);
        for (size_t at = 0; at < count; ++at) add(size_of(at));
        if (size) std::memcpy(into, data, size);
        heads_.insert(heads_.end(), {number, 0, static_cast<uint32_t>(body_.size() - begin)});
    }

    // Adds byte strings in the same way.
    template <typename Values, typename BytesOf>
    void AddJoined(uint32_t number, const Values& values, BytesOf&& bytes_of) {
        const size_t begin = body_.size(), count = values.size();
        size_t total = 0;
        for (const auto& value : values) total += bytes_of(value).size;
        Word(static_cast<uint32_t>(count));
        body_.resize(body_.size() + 4 * count + total);
        uint8_t* length_at = body_.data() + begin + 4;
        uint8_t* at = length_at + 4 * count;
        for (const auto& value : values) {
            const Hashes bytes = bytes_of(value);
            const auto size = static_cast<uint32_t>(bytes.size);
            std::memcpy(length_at, &size, sizeof size);
            if (size) std::memcpy(at, bytes.data, size);
            length_at += sizeof size;
            at += size;
        }
        heads_.insert(heads_.end(), {number, 0, static_cast<uint32_t>(body_.size() - begin)});
    }

    // Adds a chunk of a known size, which `write` writes.
    template <typename Write>
    void AddWritten(uint32_t number, size_t size, Write&& write) {
        const size_t begin = body_.size();
        body_.resize(begin + size);
        heads_.insert(heads_.end(), {number, 0, static_cast<uint32_t>(size)});
        write(body_.data() + begin);
    }

    void AddFrame(uint32_t number, const Frame& frame) {
        heads_.insert(heads_.end(), {number, 0, static_cast<uint32_t>(frame.size())});
        const size_t begin = body_.size();
        body_.resize(begin + frame.size());
        frame.WriteTo(body_.data() + begin);
    }

    // Adds frames as byte strings.
    void AddFrames(uint32_t number, const std::vector<Frame>& frames) {
        const size_t begin = body_.size();
        Word(static_cast<uint32_t>(frames.size()));
        for (const Frame& frame : frames) Word(static_cast<uint32_t>(frame.size()));
        for (const Frame& frame : frames) {
            const size_t at = body_.size();
            body_.resize(at + frame.size());
            frame.WriteTo(body_.data() + at);
        }
        heads_.insert(heads_.end(), {number, 0, static_cast<uint32_t>(body_.size() - begin)});
    }

    // The frame as bytes, behind others.
    PyObject* ToBytes(const uint8_t* head, size_t head_size) const {
        Owned bytes(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(head_size + size())));
        auto* const into = reinterpret_cast<uint8_t*>(PyBytes_AsString(bytes.get()));
        if (head_size) std::memcpy(into, head, head_size);
        WriteTo(into + head_size);
        return bytes.Release();
    }

    size_t size() const { return 4 + 4 * heads_.size() + body_.size(); }

  private:
    // Writes `size()` bytes.
    void WriteTo(uint8_t* into) const {
        const auto count = static_cast<uint32_t>(heads_.size() / 3);
        const auto write = [&](const void* data, size_t num_bytes) {
            if (num_bytes) std::memcpy(into, data, num_bytes);
            into += num_bytes;
        };
        write(&count, sizeof count);
        write(heads_.data(), 4 * heads_.size());
        write(body_.data(), body_.size());
    }

    void Word(uint32_t value) {
        const auto* const bytes = reinterpret_cast<const uint8_t*>(&value);
        body_.insert(body_.end(), bytes, bytes + sizeof value);
    }

    template <typename Stored, typename NumberAt>
    void Store(char code, uint32_t number, size_t count, NumberAt&& number_at) {
        const size_t begin = body_.size(), size = count * sizeof(Stored);
        heads_.insert(heads_.end(), {number, static_cast<uint32_t>(code), static_cast<uint32_t>(size)});
        body_.resize(begin + size);
        uint8_t* into = body_.data() + begin;
        for (size_t at = 0; at < count; ++at) {
            const auto stored = static_cast<Stored>(number_at(at));
            std::memcpy(into, &stored, sizeof stored);
            into += sizeof stored;
        }
    }

    std::vector<uint32_t> heads_;  // number, code and length of each chunk
    std::vector<uint8_t> body_;
};

// Numbers of chunks, as in `packing.py`: those of a part's result, its events and its image, and what is added to the
// number of a list in events for all its entries.
constexpr uint32_t kOfResult = 1001, kOfEvents = 1002, kOfResume = 1003, kFlat = 100;

template <typename Of>
using PackedField = void (*)(const Of&, uint32_t, Frame&);
template <typename Of>
using Scalar = Int (*)(const Of&);

// The single numbers are the first chunk; fields have the numbers behind.
template <typename Of, size_t N, size_t M>
Frame Packed(const std::array<Scalar<Of>, N>& scalars, const std::array<PackedField<Of>, M>& fields, const Of& value,
             size_t num_bytes) {
    Frame frame(num_bytes);
    if constexpr (N > 0) frame.AddNumbers(0, N, [&](size_t at) { return scalars[at](value); });
    uint32_t number = 0;
    for (const auto& add : fields) add(value, ++number, frame);
    return frame;
}

// How a field of a part or result is packed: `PACK_TIERS` one that there is only with tiers, `PACK_JOBS` one of rows.
#define PACK_SCALAR(of, path) [](const of& from) { return static_cast<Int>(from.path); }
#define PACK_FIELD(of, path) [](const of& from, uint32_t number, Frame& frame) { frame.Add(number, from.path); }
#define PACK_BITS(of, path) [](const of& from, uint32_t number, Frame& frame) { frame.AddBits(number, from.path); }
#define PACK_TIERS(path)                                                \
    [](const PartResult& from, uint32_t number, Frame& frame) {         \
        if (from.tiers != nullptr) frame.Add(number, from.tiers->path); \
    }
#define PACK_JOBS(kind, column)                                                               \
    [](const PartResult& from, uint32_t number, Frame& frame) {                               \
        if (from.tiers == nullptr || from.tiers->orders.kind.empty()) return;                 \
        const auto& rows = from.tiers->orders.kind;                                           \
        frame.AddNumbers(number, rows.size(),                                                 \
                         [&](size_t at) { return static_cast<uint64_t>(rows[at][column]); }); \
    }

// Which events of a part are packed.
enum Share : Int { kAllEvents = 0, kStoredEvents = 1, kOtherEvents = 2 };

// The columns of events, in the order of the fields of `CacheEvent`.
class EventColumns {
  public:
    // `medium`: that of the tier; 0 = the device. The events must outlive this object.
    void Add(const CacheEvents& events, Share share, Int medium = 0) {
        const auto* hash = events.hashes.data();
        const Block* block = events.blocks.data();
        const Int* start = events.starts.data();
        taken_.reserve(taken_.size() + events.rows.size());
        blocks_.reserve(blocks_.size() + events.blocks.size());
        for (const CacheEvents::Row& row : events.rows) {
            const bool has_starts = row.kind == kStored && !events.starts.empty();
            const auto* const parent = hash;
            hash += row.parent_size != 0;
            if (share == kAllEvents || (row.kind == kStored) == (share == kStoredEvents)) {
                taken_.push_back({&row, &events, parent, hash, medium, has_starts});
                hash_bytes_ += row.count * row.hash_size;
                blocks_.insert(blocks_.end(), block, block + row.count);
                if (has_starts) starts_.insert(starts_.end(), start, start + row.count);
            }
            hash += row.count;
            block += row.count;
            start += has_starts ? row.count : 0;
        }
    }

    Frame Packed() const {
        constexpr size_t kEach = 32;
        Frame frame(kEach * (1 + taken_.size()) + hash_bytes_ +
                    sizeof(uint32_t) * (2 * blocks_.size() + starts_.size()));
        const auto numbers = [&](uint32_t number, auto&& of) {
            frame.AddNumbers(number, taken_.size(), [&](size_t at) { return static_cast<Int>(of(taken_[at])); });
        };
        const auto scalar = [&](uint32_t number, auto&& of) {
            if (Any([&](const Taken& one) { return of(one) != 0; })) numbers(number, of);
        };
        const auto count = [](const Taken& one) { return one.row->count; };
        scalar(0, [](const Taken& one) { return one.row->kind; });
        scalar(1, [](const Taken& one) { return one.row->group; });
        if (!blocks_.empty()) {
            numbers(2, count);
            const size_t num_bytes = sizeof(uint32_t) * (1 + blocks_.size()) + hash_bytes_;
            frame.AddWritten(2 + kFlat, num_bytes, [&](uint8_t* into) { WriteHashes(into); });
            numbers(3, count);
            frame.Add(3 + kFlat, blocks_);
        }
        if (Any([](const Taken& one) { return one.domain().size != 0; }))
            frame.AddJoined(4, taken_, [](const Taken& one) { return one.domain(); });
        if (Any([](const Taken& one) { return one.row->parent_size != 0; }))
            frame.AddJoined(5, taken_, [](const Taken& one) { return one.parent_digest(); });
        scalar(6, [](const Taken& one) { return one.row->block_size; });
        scalar(7, [](const Taken& one) { return one.row->slot; });
        scalar(8, [](const Taken& one) { return one.row->start; });
        scalar(9, [](const Taken& one) { return one.row->end; });
        if (!starts_.empty()) {
            numbers(10, [](const Taken& one) { return one.has_starts ? one.row->count : 0; });
            frame.Add(10 + kFlat, starts_);
        }
        scalar(11, [](const Taken& one) { return one.row->reason; });
        scalar(12, [](const Taken& one) { return one.medium; });
        return frame;
    }

  private:
    struct Taken {
        const CacheEvents::Row* row;
        const CacheEvents* events;
        const decltype(Digest::bytes)*parent, *hashes;  // the first one of `parent_size` bytes
        Int medium;
        bool has_starts;

        Hashes parent_digest() const {
            return row->parent_size ? Hashes{parent->data(), row->parent_size} : Hashes();
        }
        Hashes domain() const {
            if (row->kind == kCleared) return {};
            const std::string& name = events->names[row->name];
            return {reinterpret_cast<const uint8_t*>(name.data()), name.size()};
        }
    };

    template <typename Is>
    bool Any(Is&& is) const {
        return std::any_of(taken_.begin(), taken_.end(), is);
    }

    // Their number, the length of each, their bytes.
    void WriteHashes(uint8_t* into) const {
        const auto word = [&](size_t value) {
            const auto stored = static_cast<uint32_t>(value);
            std::memcpy(into, &stored, sizeof stored);
            into += sizeof stored;
        };
        word(blocks_.size());  // each event has a block for each hash
        for (const Taken& one : taken_) {
            for (size_t at = 0; at < one.row->count; ++at) word(one.row->hash_size);
        }
        for (const Taken& one : taken_) {
            const size_t size = one.row->hash_size;
            if (size == kDigestBytes) {  // they follow each other
                if (one.row->count) std::memcpy(into, one.hashes, one.row->count * size);
                into += one.row->count * size;
                continue;
            }
            for (size_t at = 0; at < one.row->count; ++at, into += size) std::memcpy(into, one.hashes[at].data(), size);
        }
    }

    std::vector<Taken> taken_;
    size_t hash_bytes_ = 0;
    BlockList blocks_;
    Column starts_;
};

}  // namespace kvplane
