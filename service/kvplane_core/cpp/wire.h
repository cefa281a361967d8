// Reads and writes messages of protobuf, by what `sections.h` says of each section.
#pragma once

#include "step.h"

namespace kvplane {

// One field of a message.
struct Field {
    uint32_t number = 0, kind = 0;  // kind: that of its encoding
    uint64_t value = 0;             // of a number
    Hashes bytes;                   // of a field with a length
};

constexpr uint32_t kVarint = 0, kFixed64 = 1, kLength = 2, kFixed32 = 5;

// The fields of a message, one after the other. `ok` is false after what is no message.
class Fields {
  public:
    explicit Fields(Hashes message) : at_(message.data), end_(message.data + message.size) {}

    bool ok = true;

    bool Next(Field* field) {
        if (!ok || at_ == end_) return false;
        const uint64_t tag = Varint();
        field->number = static_cast<uint32_t>(tag >> 3);
        field->kind = tag & 7;
        ok = ok && tag >> 3 > 0 && tag >> 32 == 0;
        if (field->kind == kVarint) {
            field->value = Varint();
        } else if (field->kind == kLength) {
            field->bytes.size = Varint();
            field->bytes.data = at_;
            Skip(field->bytes.size);
        } else if (field->kind == kFixed64 || field->kind == kFixed32) {
            Skip(field->kind == kFixed64 ? 8 : 4);
        } else {
            ok = false;
        }
        return ok;
    }

  private:
    uint64_t Varint() {
        uint64_t read = 0;
        for (int shift = 0; shift < 64 && at_ != end_; shift += 7) {
            if (shift == 63 && *at_ > 1) break;
            read |= static_cast<uint64_t>(*at_ & 0x7f) << shift;
            if (*at_++ < 0x80) return read;
        }
        ok = false;
        return 0;
    }

    void Skip(size_t size) {
        ok = ok && size <= static_cast<size_t>(end_ - at_);
        if (ok) at_ += size;
    }

    const uint8_t *at_, *end_;
};

// -- Values of fields: each returns whether the field has one --------------------------------------------------------

inline bool ReadValue(const Field& field, Hashes* bytes) {
    *bytes = field.bytes;
    return field.kind == kLength;
}

inline bool ReadValue(const Field& field, TokenIds* tokens) {
    if (field.kind != kLength || field.bytes.size % 4) return false;
    tokens->count = static_cast<Int>(field.bytes.size / 4);
    tokens->ids.assign(field.bytes.data, field.bytes.data + field.bytes.size);
    return true;
}

inline bool ReadValue(const Field& field, bool* flag) {
    *flag = field.value == 1;
    return field.kind == kVarint && field.value <= 1;
}

// What is above all numbers of the core becomes its highest one.
inline bool ReadValue(const Field& field, SingleNumber number) {
    *number.value = static_cast<Int>(std::min<uint64_t>(field.value, kAnyValue));
    return field.kind == kVarint && (number.bits == 64 || field.value >> number.bits == 0);
}

// A value of an enumeration, whose 0 is the default.
inline bool ReadValue(const Field& field, SingleChoice choice) {
    *choice.value = field.value == 0 ? choice.otherwise : static_cast<Int>(field.value) - 1;
    return field.kind == kVarint && field.value <= static_cast<uint64_t>(choice.highest);
}

inline bool ReadValue(const Field& field, Texts texts) {
    if (field.kind != kLength || !IsUtf8(field.bytes)) return false;
    texts.entries->emplace_back(reinterpret_cast<const char*>(field.bytes.data), field.bytes.size);
    return true;
}
inline bool ReadValue(const Field& field, Counted list) {
    if (field.kind != kLength || (list.are_texts && !IsUtf8(field.bytes))) return false;
    list.entries->emplace_back(reinterpret_cast<const char*>(field.bytes.data), field.bytes.size);
    *list.count = static_cast<Int>(list.entries->size());
    return true;
}

// A column of these values, none of them above the highest one.
template <typename Stored>
bool ReadPacked(const Field& field, Column* column, Int highest) {
    const auto [data, size] = field.bytes;
    if (field.kind != kLength || size % sizeof(Stored)) return false;
    column->resize(size / sizeof(Stored));
    Int most = 0;
    for (size_t at = 0; at < column->size(); ++at) {
        Stored value;
        std::memcpy(&value, data + at * sizeof value, sizeof value);
        (*column)[at] = static_cast<Int>(value);  // 2^63 and above become negative, which no column permits
        most = std::max(most, (*column)[at]);
    }
    return most <= highest;
}

// -- Sections --------------------------------------------------------------------------------------------------------

inline void ResetValue(Hashes* bytes) { *bytes = Hashes(); }
inline void ResetValue(TokenIds* tokens) {
    tokens->count = 0;
    tokens->fit = true;
    tokens->ids.clear();
}
inline void ResetValue(bool* flag) { *flag = false; }
inline void ResetValue(SingleNumber number) { *number.value = number.otherwise; }
inline void ResetValue(SingleChoice choice) { *choice.value = choice.otherwise; }
inline void ResetValue(Texts texts) {
    texts.entries->clear();
    *texts.fit = true;
}
inline void ResetValue(Counted list) {
    list.entries->clear();
    *list.count = 0;
}

template <typename Section>
concept HasColumns = requires(const Section& section) { ColumnsOf(section); };

// Empties a section, and keeps the memory of its columns.
template <typename Section>
void Reset(Section* section) {
    if constexpr (HasColumns<Section>) {
        for (const auto& column : ColumnsOf(*section)) {
            (section->*column.of).clear();
            if (column.fit != nullptr) section->*column.fit = true;
        }
    }
    EachOther(*section, [](const OtherField&, auto value) { ResetValue(value); });
}

inline void Reset(bool* flag) { *flag = false; }
inline void Reset(std::optional<Resume>* image) { image->reset(); }

// Columns that say how many tokens each row has.
inline const Column& TokensOfRows(const Facts& facts) { return facts.appended; }
inline const Column& TokensOfRows(const News& news) { return news.num_tokens; }

inline bool AddUp(const Column& column, uint64_t each, uint64_t total) {
    return std::accumulate(column.begin(), column.end(), uint64_t{0}) * each == total;
}

// Whether columns by row have as many entries as the first one, or none, and there are as many hashes and tokens as
// the columns say.
template <typename Section>
bool IsWhole(const Section& section, size_t digest_size) {
    if constexpr (requires { NumEntriesOf(section); }) {
        const size_t rows = (section.*ColumnsOf(section)[0].of).size();
        for (const NumEntries& one : NumEntriesOf(section)) {
            if (one.count != 0 && one.count != rows) return false;
        }
    }
    if constexpr (requires { section.gone; }) {
        return section.hashes.size == section.slot.size() * digest_size;
    } else if constexpr (requires { section.hashes; }) {
        if (!AddUp(section.num_hashes, digest_size, section.hashes.size)) return false;
    }
    if constexpr (requires { section.tokens.count; }) {
        const auto count = static_cast<uint64_t>(section.tokens.count);
        return count == 0 || AddUp(TokensOfRows(section), 1, count);
    }
    return true;
}

template <typename Section>
bool ReadColumn(const Field& field, const SectionColumn<Section>& column, Column* into) {
    switch (column.type) {
        case kU32: return ReadPacked<uint32_t>(field, into, column.highest);
        case kI32: return ReadPacked<int32_t>(field, into, column.highest);
        default: return ReadPacked<uint64_t>(field, into, column.highest);
    }
}

// Reads a section, which is empty; false for what Python refuses, and names.
template <typename Section>
bool ReadSection(Hashes message, size_t digest_size, Section* section) {
    Fields fields(message);
    for (Field field; fields.Next(&field);) {
        bool is_read = true;
        if constexpr (HasColumns<Section>) {
            for (const auto& column : ColumnsOf(*section)) {
                if (column.number == field.number) is_read = ReadColumn(field, column, &(section->*column.of));
            }
        }
        EachOther(*section, [&](const OtherField& other, auto value) {
            if (other.number == field.number) is_read = ReadValue(field, value);
        });
        if (!is_read) return false;
    }
    return fields.ok && IsWhole(*section, digest_size);
}

// -- Writing ---------------------------------------------------------------------------------------------------------

// A message that is written from its end to its front, so that the length of a field is known when its content is
// written, which is copied nowhere else.
class Backward {
  public:
    // Empties it, and keeps the memory of a usual message.
    void Clear() {
        constexpr size_t kMostKept = 1 << 20;
        size_ = 0;
        if (memory_.size() > kMostKept) memory_ = {};
    }
    size_t size() const { return size_; }
    const uint8_t* data() const { return memory_.data() + memory_.size() - size_; }

    void Number(uint32_t field, uint64_t value) {
        if (value != 0) Head(field, kVarint, value);
    }
    // Also 0, where that is not the default.
    void NumberUnless(Int otherwise, uint32_t field, Int value) {
        if (value != otherwise) Head(field, kVarint, static_cast<uint64_t>(value));
    }
    void Bytes(uint32_t field, const void* data, size_t size) {
        if (size) std::memcpy(More(size), data, size);
        Head(field, kLength, size);
    }
    // The bytes behind the first `end` ones from the end become a field.
    void EndMessage(uint32_t field, size_t end) { Head(field, kLength, size_ - end); }
    // A column of the numbers that `number_at` returns; without any it is no field.
    template <typename Stored, typename NumberAt>
    void Packed(uint32_t field, size_t count, NumberAt&& number_at) {
        if (count == 0) return;
        uint8_t* into = More(count * sizeof(Stored));
        for (size_t at = 0; at < count; ++at, into += sizeof(Stored)) {
            const auto stored = static_cast<Stored>(number_at(at));
            std::memcpy(into, &stored, sizeof stored);
        }
        Head(field, kLength, count * sizeof(Stored));
    }
    template <typename Stored, typename T>
    void Packed(uint32_t field, const std::vector<T>& column) {
        Packed<Stored>(field, column.size(), [&](size_t at) { return column[at]; });
    }

  private:
    // Room for `count` bytes before the others.
    uint8_t* More(size_t count) {
        if (size_ + count > memory_.size()) {
            std::vector<uint8_t> grown(2 * (size_ + count) + 4096);
            if (size_) std::memcpy(grown.data() + grown.size() - size_, data(), size_);
            memory_ = std::move(grown);
        }
        size_ += count;
        return memory_.data() + memory_.size() - size_;
    }

    void Head(uint32_t field, uint32_t kind, uint64_t value) {
        uint8_t head[20];
        uint8_t* at = head;
        for (const uint64_t number : {uint64_t{field} << 3 | kind, value}) {
            uint64_t rest = number;
            for (; rest > 0x7f; rest >>= 7) *at++ = static_cast<uint8_t>(rest | 0x80);
            *at++ = static_cast<uint8_t>(rest);
        }
        const auto count = static_cast<size_t>(at - head);
        std::memcpy(More(count), head, count);
    }

    std::vector<uint8_t> memory_;
    size_t size_ = 0;
};

template <typename Section, typename... More>
void WriteMessage(const Section& section, Backward* into, uint32_t field, const More&... more) {
    const size_t end = into->size();
    Write(section, into, more...);
    if (into->size() > end) into->EndMessage(field, end);
}

// Also one without any field.
template <typename Section>
void WriteWhole(const Section& section, Backward* into, uint32_t field) {
    const size_t end = into->size();
    Write(section, into);
    into->EndMessage(field, end);
}

inline void WriteTexts(const std::vector<std::string>& texts, Backward* into, uint32_t field) {
    for (size_t at = texts.size(); at-- > 0;) into->Bytes(field, texts[at].data(), texts[at].size());
}

// The digests of each row are one value.
inline void WriteRows(const Hashed& hashed, Backward* into, uint32_t field) {
    const uint8_t* end = hashed.hashes.data() + hashed.hashes.size();
    for (size_t row = hashed.num_hashes.size(); row-- > 0;) {
        const size_t size = static_cast<size_t>(hashed.num_hashes[row]) * hashed.digest_size;
        end -= size;
        into->Bytes(field, end, size);
    }
}

inline void WriteDigests(const std::vector<Digest>& digests, Backward* into, uint32_t field) {
    for (size_t at = digests.size(); at-- > 0;) into->Bytes(field, digests[at].bytes.data(), digests[at].size);
}

// A column of the rows of jobs. `tiers`: has them; null = none.
template <typename Stored, auto kRows>
void WriteJobs(const TierAnswer* tiers, Backward* into, uint32_t field, size_t column) {
    if (tiers == nullptr) return;
    const auto& rows = tiers->orders.*kRows;
    into->Packed<Stored>(field, rows.size(), [&](size_t row) { return rows[row][column]; });
}

// Which events are written: all, as an answer has them, where each REMOVED event of the device has one key; or in runs
// of keys, all or some.
enum Share : Int { kAllEvents = 0, kStoredEvents = 1, kOtherEvents = 2, kEachKey = 3 };

// Writes events as `CacheEvent` messages, the last one first. `medium`: of their tier; 0 = the device.
inline void WriteEvents(const CacheEvents& events, Share share, Int medium, Backward* into, uint32_t field) {
    size_t hash = events.hashes.size(), block = events.blocks.size(), start = events.starts.size();
    for (size_t at = events.rows.size(); at-- > 0;) {
        const CacheEvents::Row& row = events.rows[at];
        const bool has_starts = row.kind == kStored && !events.starts.empty();
        hash -= row.count;
        block -= row.count;
        start -= has_starts ? row.count : 0;
        const size_t keys_at = hash;
        hash -= row.parent_size != 0;
        if (share == (row.kind == kStored ? kOtherEvents : kStoredEvents)) continue;
        const auto write = [&](size_t first, size_t count) {
            const size_t end = into->size();
            into->Number(13, static_cast<uint64_t>(medium));
            into->Number(12, static_cast<uint64_t>(row.reason));
            if (has_starts) into->Packed<uint32_t>(11, count, [&](size_t key) { return events.starts[start + key]; });
            into->Number(10, static_cast<uint64_t>(row.end));
            into->Number(9, static_cast<uint64_t>(row.start));
            into->Number(8, static_cast<uint64_t>(row.slot));
            into->Number(7, static_cast<uint64_t>(row.block_size));
            if (row.parent_size) into->Bytes(6, events.hashes[hash].data(), row.parent_size);
            if (row.kind != kCleared && !events.names[row.name].empty())
                into->Bytes(5, events.names[row.name].data(), events.names[row.name].size());
            into->Packed<uint32_t>(4, count, [&](size_t key) { return events.blocks[block + first + key]; });
            for (size_t key = count; key-- > 0;)
                into->Bytes(3, events.hashes[keys_at + first + key].data(), row.hash_size);
            into->Number(2, static_cast<uint64_t>(row.group));
            into->Number(1, static_cast<uint64_t>(row.kind));
            into->EndMessage(field, end);
        };
        if (share != kEachKey || row.kind != kRemoved || medium != 0) {
            write(0, row.count);
        } else {
            for (size_t key = row.count; key-- > 0;) write(key, 1);
        }
    }
}

// The events with which a part is written: those of an answer, where the ones of the device are before those of the
// tiers; or of a record, which has none of tiers.
enum WrittenEvents { kNoEvents, kOfAnswer, kOfRecord };

inline void WriteEvents(const PartResult& part, WrittenEvents events, Backward* into, uint32_t field) {
    if (events == kOfRecord && part.answered != nullptr) WriteEvents(*part.answered, kAllEvents, 0, into, field);
    if (events != kOfAnswer) return;
    if (part.tiers != nullptr) {
        const auto& of_tiers = part.tiers->events;
        for (auto one = of_tiers.rbegin(); one != of_tiers.rend(); ++one)
            WriteEvents(one->second, kEachKey, one->first, into, field);
    }
    WriteEvents(part.events, kEachKey, 0, into, field);
}

}  // namespace kvplane
