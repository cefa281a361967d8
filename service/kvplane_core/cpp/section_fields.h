// What sections of a step consist of: the types of their fields, and what is said of each in `sections.h`.
#pragma once

#include "types.h"

namespace kvplane {

// Digests, joined; or other bytes.
struct Hashes {
    const uint8_t* data = nullptr;
    size_t size = 0;

    operator std::span<const uint8_t>() const { return {data, size}; }
};

// Token ids.
struct TokenIds {
    Int count = 0;
    bool fit = true;           // each is a u32
    std::vector<uint8_t> ids;  // u32, if they fit
};

enum ColumnType { kU32, kI32, kU64, kBits };  // the last one: 64 bits, of which the Int has the same
constexpr Int kAnyValue = std::numeric_limits<Int>::max();

// A column of a section.
template <typename Section>
struct SectionColumn {
    const char* name;
    Column Section::*of;
    uint32_t number;  // of its field
    ColumnType type;
    bool is_by_row;                 // it has an entry for each row, or none
    std::optional<Int> otherwise{};  // what each row has in an empty one
    Int highest = kAnyValue;
    bool Section::*fit = nullptr;  // whether each entry has 64 bits

    bool is_wide() const { return type == kU64 || type == kBits; }
    bool is_bits() const { return type == kBits; }
};

// A field of a section that is no column; with it `EachOther` gives what it is: its place, or one of these.
struct OtherField {
    const char* name;
    uint32_t number;
};
struct Texts {
    std::vector<std::string>* entries;
    bool* fit;
};
struct Counted {  // a list whose entries the core does not read, texts or messages
    std::vector<std::string>* entries;
    Int* count;
    bool are_texts;
};
struct SingleChoice {
    Int* value;
    Int otherwise, highest;
};
struct SingleNumber {
    Int* value;
    Int otherwise;
    int bits;
};

// The name of a field that has an entry for each row, or none; and how many it has.
struct NumEntries {
    const char* name;
    size_t count;
};

}  // namespace kvplane
