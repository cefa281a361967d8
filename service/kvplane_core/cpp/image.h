// Values as bytes, in the layout of `packed_values.py`, and back. The writer and the reader have the same functions, so
// that one list of fields (`state.h`) serves both: the writer writes what it is given, the reader replaces it.
#pragma once

#include <concepts>
#include <limits>

#include "keys.h"

namespace kvplane {

// Bytes that are no image of a replica with this spec. `field`: as in InvalidArgument.
struct NoImage {
    std::string problem;
    std::string field = "state";
};

// The numbers that a reader accepts.
struct Range {
    Int least = std::numeric_limits<Int>::min(), most = std::numeric_limits<Int>::max();

    template <typename T>
    bool Has(T number) const {
        return std::in_range<Int>(number) ? Int(number) >= least && Int(number) <= most
                                          : most == std::numeric_limits<Int>::max();
    }
};
constexpr Range kAny;
constexpr Range kCount{0, kForever / 4 - 1};  // a number of a step, or a count of which sums are made

class ImageWriter {
  public:
    static constexpr bool kReads = false;

    explicit ImageWriter(Pairs& domains) : domains_(domains) {}

    std::string bytes;  // since they were taken last

    void Holds(bool, const char* = nullptr) const {}
    void Kind(char kind) { bytes += kind; }
    // A list, tuple or dict with this number of values.
    void Begin(char kind, size_t count) {
        bytes += kind;
        Raw(static_cast<uint32_t>(count));
    }
    void Nothing() { bytes += 'N'; }
    // Of an entry, or of a field of a dict.
    void Name(std::string_view name) { Fixed(name); }
    void Fixed(std::string_view text) {
        Begin('s', text.size());
        bytes += text;
    }
    template <typename T>
    void Number(const T& number, Range = kAny) {
        bytes += 'i';
        Raw(static_cast<Int>(number));
    }
    template <typename T>
    void Flag(const T& flag) {
        bytes += flag ? 'T' : 'F';
    }
    void Text(const std::string& text) { Fixed(text); }
    void Bytes(std::span<const uint8_t> raw) {
        Begin('b', raw.size());
        Raw(raw);
    }
    void OfDigest(const Digest& digest) { Bytes(std::span(digest.bytes).first(digest.size)); }
    void Domain(uint32_t domain) { Text(domains_.NameOf(domain)); }
    void OfKey(const Key& key) {
        Begin('t', 3);
        Domain(domains_.Domain(key.pair));
        Number(domains_.Group(key.pair));
        OfDigest(key.digest);
    }

    void Keys(const std::set<Key>& keys) {
        std::vector<Key> sorted(keys.begin(), keys.end());
        std::sort(sorted.begin(), sorted.end(), [&](const Key& one, const Key& other) { return Before(one, other); });
        Each('S', sorted, [&](const Key& key) { OfKey(key); });
    }
    // The order of keys, which does not depend on the numbers of domains.
    bool Before(const Key& one, const Key& other) const {
        const auto place = [&](const Key& key) {
            return std::tuple<const std::string&, Int, const Digest&>(domains_.Name(key.pair), domains_.Group(key.pair),
                                                                      key.digest);
        };
        return place(one) < place(other);
    }

    // A list of numbers, by the smallest kind that has all.
    template <typename T>
    void Numbers(const std::vector<T>& numbers, Range = kAny) {
        const bool are_small =
            std::all_of(numbers.begin(), numbers.end(), [](T one) { return std::in_range<uint32_t>(one); });
        Begin(numbers.empty() ? 'L' : are_small ? 'U' : 'V', numbers.size());
        are_small ? Each<uint32_t>(numbers) : Each<Int>(numbers);
    }
    // An array of numbers of the size of T.
    template <typename T>
    void Words(const std::vector<T>& numbers, Range = kAny) {
        bytes += 'A';
        Begin(sizeof(T) == sizeof(uint32_t) ? 'I' : 'Q', numbers.size());
        Each<T>(numbers);
    }
    void Flags(const std::vector<uint8_t>& flags) {
        Begin(flags.empty() ? 'L' : 'B', flags.size());
        for (const uint8_t flag : flags) bytes += static_cast<char>(flag != 0);
    }
    // Digests, all bytes joined.
    void Digests(const std::vector<uint32_t>& sizes, std::span<const uint8_t> joined) {
        Begin(sizes.empty() ? 'L' : 'H', sizes.size());
        Each<uint32_t>(sizes);
        Raw(joined);
    }

    template <typename List, typename F>
    void Each(char kind, List& list, F&& visit) {
        Begin(kind, list.size());
        for (auto& one : list) visit(one);
    }
    template <typename T, typename F>
    void Set(const std::set<T>& values, F&& visit) {
        Begin('S', values.size());
        for (const T& value : values) visit(value);
    }
    // By number, ascending.
    template <typename Map, typename F>
    void Dict(Map& map, Range, F&& visit) {
        Begin('d', static_cast<size_t>(std::distance(map.begin(), map.end())));
        for (auto& [key, value] : map) {
            Number(key);
            visit(value);
        }
    }

    template <std::integral T>
    void Raw(const T& value) {
        bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
    }
    void Raw(std::span<const uint8_t> raw) { bytes.append(reinterpret_cast<const char*>(raw.data()), raw.size()); }

  private:
    template <typename To, typename T>
    void Each(const std::vector<T>& numbers) {
        const size_t before = bytes.size();
        bytes.resize(before + numbers.size() * sizeof(To));
        char* at = bytes.data() + before;
        if constexpr (sizeof(To) == sizeof(T)) {
            if (!numbers.empty()) std::memcpy(at, numbers.data(), numbers.size() * sizeof(T));
        } else {
            for (const T number : numbers) {
                const To one = static_cast<To>(number);
                std::memcpy(at, &one, sizeof one);
                at += sizeof one;
            }
        }
    }

    Pairs& domains_;
};

// Reads an image that others may have made: no count is trusted before its bytes are there.
class ImageReader {
  public:
    static constexpr bool kReads = true;

    ImageReader(std::span<const uint8_t> raw, std::string_view magic, Pairs& domains) : raw_(raw), domains_(domains) {
        Require(raw.size() >= magic.size() && std::memcmp(raw.data(), magic.data(), magic.size()) == 0,
                "the bytes are not an exported state of this version");
        at_ = magic.size();
        while (at_ < raw_.size()) {
            std::string name;
            Text(name);
            entries_[name].push_back(at_);
            Skip();
        }
    }

    // -- entries -----------------------------------------------------------------------------------------------------

    size_t CountOf(const std::string& name) const {
        const auto found = entries_.find(name);
        return found == entries_.end() ? 0 : found->second.size();
    }
    // Reads all entries of this name, `count` of them.
    template <typename F>
    void Entry(const char* name, F&& read, size_t count = 1) {
        entry_ = name;
        field_ = "";
        Holds(CountOf(name) == count, CountOf(name) < count ? "is missing" : "is there too often");
        for (size_t number = 0; number < count; ++number) {
            field_ = "";
            at_ = entries_[name][number];
            read();
        }
    }
    void Holds(bool holds, const char* problem = "has a number out of range") const {
        if (!holds) throw NoImage{"the state is damaged: " + entry_ + field_ + " " + problem};
    }

    // -- values ------------------------------------------------------------------------------------------------------

    void Begin(char kind, size_t count) { Holds(Begin(kind) == count, "has another number of values"); }
    size_t Begin(char kind) {
        Holds(Next() == kind, "has a value of another kind");
        return Count();
    }
    void Name(const char* name) {
        field_ = "";
        Fixed(name);
        field_ = std::string(".") + name;
    }
    // A text that is always the same.
    void Fixed(std::string_view text) {
        std::string found;
        Text(found);
        Holds(found == text, "has another text or field");
    }
    template <typename T>
    void Number(T& number, Range range = kAny) {
        Holds(Next() == 'i', "is no number");
        Set(number, Raw<Int>(), range);
    }
    template <typename T>
    void Flag(T& flag) {
        const char kind = Next();
        Holds(kind == 'T' || kind == 'F', "is neither true nor false");
        flag = kind == 'T';
    }
    void Text(std::string& text) {
        const std::span<const uint8_t> raw = Take(Begin('s'));
        Holds(IsUtf8(raw), "has a text that is not UTF-8");
        text.assign(reinterpret_cast<const char*>(raw.data()), raw.size());
    }
    void Bytes(std::vector<uint8_t>& bytes) {
        const std::span<const uint8_t> raw = Take(Begin('b'));
        bytes.assign(raw.begin(), raw.end());
    }
    void OfDigest(Digest& digest) {
        const std::span<const uint8_t> raw = Take(Begin('b'));
        Holds(raw.size() <= kDigestBytes, "has a hash of more than 32 bytes");
        digest = Digest(raw.data(), raw.size());
    }
    void Domain(uint32_t& domain) {
        std::string name;
        Text(name);
        domain = DomainOf(name);
    }
    uint32_t DomainOf(const std::string& name) {
        const uint32_t domain = domains_.DomainOf(name);
        Holds(domain < kUnknownDomain, "has too many domains");
        return domain;
    }
    void Keys(std::set<Key>& keys) {
        Set(keys, [&](Key& key) { OfKey(key); });
    }
    uint32_t Pair() {
        uint32_t domain = 0;
        Int group = 0;
        Domain(domain);
        Number(group, {0, domains_.num_groups() - 1});
        return domains_.Of(domain, group);
    }
    void OfKey(Key& key) {
        Begin('t', 3);
        key.pair = Pair();
        OfDigest(key.digest);
    }

    template <typename T>
    void Numbers(std::vector<T>& numbers, Range range = kAny) {
        const char kind = Next();
        Holds(kind == 'U' || kind == 'V' || kind == 'L', "is no list of numbers");
        const size_t count = Count();
        Holds(kind != 'L' || count == 0, "is no list of numbers");
        kind == 'U' ? Each<uint32_t>(numbers, count, range) : Each<Int>(numbers, count, range);
    }
    template <typename T>
    void Words(std::vector<T>& numbers, Range range = kAny) {
        Holds(Next() == 'A' && Next() == (sizeof(T) == sizeof(uint32_t) ? 'I' : 'Q'), "is an array of another type");
        Each<T>(numbers, Count(), range);
    }
    void Flags(std::vector<uint8_t>& flags) {
        const char kind = Next();
        const size_t count = Count();
        Holds(kind == 'B' || (kind == 'L' && count == 0), "is no list of flags");
        const std::span<const uint8_t> raw = Take(count);
        flags.assign(raw.begin(), raw.end());
        for (uint8_t& flag : flags) flag = flag != 0;
    }
    // Returns all bytes, joined.
    std::span<const uint8_t> Digests(std::vector<uint32_t>& sizes) {
        const char kind = Next();
        const size_t count = Count();
        Holds(kind == 'H' || (kind == 'L' && count == 0), "is no list of hashes");
        Each<uint32_t>(sizes, count, {0, kDigestBytes});
        return Take(std::accumulate(sizes.begin(), sizes.end(), size_t{0}));
    }

    template <typename List, typename F>
    void Each(char kind, List& list, F&& visit) {
        list.clear();
        for (size_t left = Begin(kind); left > 0; --left) {
            list.emplace_back();
            visit(list.back());
        }
    }
    template <typename T, typename F>
    void Set(std::set<T>& values, F&& visit) {
        values.clear();
        for (size_t left = Begin('S'); left > 0; --left) {
            T value{};
            visit(value);
            values.insert(value);
        }
    }
    // `range`: of the keys.
    template <typename Map, typename F>
    void Dict(Map& map, Range range, F&& visit) {
        map.clear();
        for (size_t left = Begin('d'); left > 0; --left) {
            KeyOf<Map> key{};
            Number(key, range);
            visit(map[key]);
        }
    }

    // Skips a value; returns its bytes.
    std::span<const uint8_t> Skip(int depth = 0) {
        constexpr int kMostDepth = 16;
        const size_t begin = at_;
        const char kind = Next();
        Holds(depth < kMostDepth, "has values in values without end");
        size_t each = 0, values = 0;
        switch (kind) {
            case 'N': case 'T': case 'F': break;
            case 'i': Take(sizeof(Int)); break;
            case 's': case 'b': case 'B': each = 1; break;
            case 'U': each = sizeof(uint32_t); break;
            case 'V': each = sizeof(Int); break;
            case 'A': each = Next() == 'I' ? sizeof(uint32_t) : sizeof(Int); break;
            case 'H': {
                std::vector<uint32_t> sizes;
                Each<uint32_t>(sizes, Count(), kAny);
                Take(std::accumulate(sizes.begin(), sizes.end(), size_t{0}));
                break;
            }
            case 'L': case 'Q': case 't': case 'S': values = 1; break;
            case 'd': values = 2; break;
            default: Holds(false, "has a value of no kind");
        }
        if (each) Take(Count() * each);
        if (values) {
            for (size_t left = Count() * values; left > 0; --left) Skip(depth + 1);
        }
        return raw_.subspan(begin, at_ - begin);
    }

  private:
    template <typename Map>
    using KeyOf = std::remove_cvref_t<decltype(std::declval<Map>().begin()->first)>;

    static void Require(bool holds, const char* problem) {
        if (!holds) throw NoImage{problem};
    }

    std::span<const uint8_t> Take(size_t count) {
        Holds(count <= raw_.size() - at_, "ends before its last byte");
        at_ += count;
        return raw_.subspan(at_ - count, count);
    }
    char Next() { return static_cast<char>(Take(1)[0]); }
    template <typename T>
    T Raw() {
        T value;
        std::memcpy(&value, Take(sizeof value).data(), sizeof value);
        return value;
    }
    size_t Count() { return Raw<uint32_t>(); }
    template <typename T, typename From>
    void Set(T& number, From found, Range range) const {
        Holds(range.Has(found) && std::in_range<T>(found));
        number = static_cast<T>(found);
    }
    template <typename From, typename T>
    void Each(std::vector<T>& numbers, size_t count, Range range) {
        const std::span<const uint8_t> raw = Take(count * sizeof(From));
        numbers.resize(count);
        for (size_t at = 0; at < count; ++at) {
            From found;
            std::memcpy(&found, raw.data() + at * sizeof found, sizeof found);
            Set(numbers[at], found, range);
        }
    }

    std::span<const uint8_t> raw_;
    Pairs& domains_;
    size_t at_ = 0;
    std::string entry_ = "it", field_;  // what is read, for a refusal
    std::map<std::string, std::vector<size_t>> entries_;  // where the values of each begin
};

}  // namespace kvplane
