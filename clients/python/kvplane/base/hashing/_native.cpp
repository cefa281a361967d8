// Hash a run of blocks without extra keys: the compiled twin of `hash_run` in algorithms.py, which specifies it. And
// read and write the messages of steps (messages.h, answers.h).
// Uses Python's stable interface of 3.11 alone, so one build serves all later versions. SHA-256 is written from
// FIPS 180-4: sections 4.1.2 and 6.2.2 (functions, rounds), 4.2.2 (constants), 5.1.1 (padding), 5.3.3 (initial state);
// XXH3 from its specification, for messages of more than 16 bytes.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <bit>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include "answers.h"
#include "messages.h"
#include "answers.h"

namespace {

constexpr size_t kSha256 = 32, kXxh3 = 16; // bytes of a digest
constexpr Py_ssize_t kMaxBlock = 8192;     // tokens; a longer block's pickle may have several frames
constexpr size_t kScratch = 7 * kMaxBlock + 256;
constexpr Py_ssize_t kHeldBytes = 1 << 16; // fewer bytes take less time than getting the interpreter back may

constexpr uint32_t kInitial[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

alignas(16) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

// -- SHA-256 -------------------------------------------------------------------

using Compress = void (*)(uint32_t* state, const uint8_t* data, size_t blocks);

void CompressPortable(uint32_t* state, const uint8_t* data, size_t blocks) {
    using std::rotr;
    for (; blocks > 0; --blocks, data += 64) {
        uint32_t w[64], v[8];
        for (int t = 0; t < 16; ++t) w[t] = __builtin_bswap32(Read<uint32_t>(data + 4 * t));
        for (int t = 16; t < 64; ++t) {
            const uint32_t s0 = rotr(w[t - 15], 7) ^ rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
            const uint32_t s1 = rotr(w[t - 2], 17) ^ rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
            w[t] = w[t - 16] + s0 + w[t - 7] + s1;
        }
        std::memcpy(v, state, sizeof v);
        for (int t = 0; t < 64; ++t) {
            const uint32_t sum1 = rotr(v[4], 6) ^ rotr(v[4], 11) ^ rotr(v[4], 25);
            const uint32_t t1 = v[7] + sum1 + ((v[4] & v[5]) ^ (~v[4] & v[6])) + kRound[t] + w[t];
            const uint32_t sum0 = rotr(v[0], 2) ^ rotr(v[0], 13) ^ rotr(v[0], 22);
            const uint32_t t2 = sum0 + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
            std::memmove(v + 1, v, 7 * sizeof v[0]);
            v[4] += t1;
            v[0] = t1 + t2;
        }
        for (int i = 0; i < 8; ++i) state[i] += v[i];
    }
}

#if defined(__x86_64__)
bool HasShaExtensions() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & (1u << 29))) return false;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 9)) && (c & (1u << 19));  // SSSE3, SSE4.1
}

// The instructions hold the state as two registers, {f, e, b, a} and {h, g, d, c} from the lowest word up.
__attribute__((target("sha,sse4.1,ssse3"))) void CompressExtensions(uint32_t* s, const uint8_t* data, size_t blocks) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i abef = _mm_set_epi32(s[0], s[1], s[4], s[5]), cdgh = _mm_set_epi32(s[2], s[3], s[6], s[7]);
    for (; blocks > 0; --blocks, data += 64) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];  // the last 16 words of the message schedule; unrolled, they are registers
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            if (i < 4) {
                w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i), big_endian);
            } else {
                const __m128i before = w[(i + 3) % 4], seven_back = _mm_alignr_epi8(before, w[(i + 2) % 4], 4);
                const __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]), seven_back);
                w[i % 4] = _mm_sha256msg2_epu32(sum, before);
            }
            const __m128i constants = _mm_load_si128(reinterpret_cast<const __m128i*>(kRound) + i);
            const __m128i sum = _mm_add_epi32(w[i % 4], constants);
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    const __m128i abef_up = _mm_shuffle_epi32(abef, 0x1b), cdgh_up = _mm_shuffle_epi32(cdgh, 0x1b);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(s), _mm_unpacklo_epi64(abef_up, cdgh_up));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(s) + 1, _mm_unpackhi_epi64(abef_up, cdgh_up));
}

const bool kAccelerated = HasShaExtensions();
const Compress kFastest = kAccelerated ? CompressExtensions : CompressPortable;
#else
const bool kAccelerated = false;
const Compress kFastest = CompressPortable;
#endif

// Write the SHA-256 of the message from `begin` to `end` to `out`. The padding is written after `end`: up to 72 bytes.
void Digest(Compress compress, uint8_t* begin, uint8_t* end, uint8_t* out) {
    const uint64_t bits = static_cast<uint64_t>(end - begin) * 8;
    *end++ = 0x80;
    const size_t zeros = (56 - static_cast<size_t>(end - begin)) % 64;
    std::memset(end, 0, zeros);
    end = Write(end + zeros, __builtin_bswap64(bits));
    uint32_t state[8];
    std::memcpy(state, kInitial, sizeof state);
    compress(state, begin, static_cast<size_t>(end - begin) / 64);
    for (uint32_t& word : state) word = __builtin_bswap32(word);
    std::memcpy(out, state, sizeof state);  // at once: the next block reads it in wide pieces
}

// -- XXH3, 128 bits, seed 0 -----------------------------------------------------

alignas(8) constexpr uint8_t kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

constexpr uint64_t kPrime32[3] = {0x9e3779b1, 0x85ebca77, 0xc2b2ae3d};
constexpr uint64_t kPrime64[5] = {0x9e3779b185ebca87, 0xc2b2ae3d27d4eb4f, 0x165667b19e3779f9, 0x85ebca77c2b2ae63,
                                  0x27d4eb2f165667c5};
constexpr size_t kStripe = 64, kStripes = 16;  // bytes of a stripe, stripes of a block
constexpr size_t kLongMessage = 240;           // longer ones are hashed in stripes

uint64_t Folded(uint64_t a, uint64_t b) {
    const auto product = static_cast<__uint128_t>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t Avalanche(uint64_t value) {
    value = (value ^ (value >> 37)) * 0x165667919e3779f9;
    return value ^ (value >> 32);
}

uint64_t Mixed(const uint8_t* data, const uint8_t* secret) {
    return Folded(Read<uint64_t>(data) ^ Read<uint64_t>(secret), Read<uint64_t>(data + 8) ^ Read<uint64_t>(secret + 8));
}

struct Halves {
    uint64_t low, high;

    void Mix(const uint8_t* first, const uint8_t* second, const uint8_t* secret) {
        low = (low + Mixed(first, secret)) ^ (Read<uint64_t>(second) + Read<uint64_t>(second + 8));
        high = (high + Mixed(second, secret + 16)) ^ (Read<uint64_t>(first) + Read<uint64_t>(first + 8));
    }

    Halves Finished(uint64_t size) const {
        const uint64_t other = low * kPrime64[0] + high * kPrime64[3] + size * kPrime64[1];
        return {Avalanche(low + high), 0 - Avalanche(other)};
    }
};

// A message of 17 to 240 bytes.
Halves ShortHash(const uint8_t* data, size_t size) {
    Halves sum{size * kPrime64[0], 0};
    if (size <= 128) {
        for (size_t at = (size - 1) / 32 * 16 + 16; at > 0; at -= 16) {
            sum.Mix(data + at - 16, data + size - at, kSecret + 2 * (at - 16));
        }
        return sum.Finished(size);
    }
    for (size_t at = 0; at < 128; at += 32) sum.Mix(data + at, data + at + 16, kSecret + at);
    sum = {Avalanche(sum.low), Avalanche(sum.high)};
    for (size_t at = 128; at + 32 <= size; at += 32) sum.Mix(data + at, data + at + 16, kSecret + 3 + at - 128);
    sum.Mix(data + size - 16, data + size - 32, kSecret + 103);
    return sum.Finished(size);
}

void Accumulate(uint64_t* sums, const uint8_t* stripe, const uint8_t* secret) {
    for (size_t i = 0; i < 8; ++i) {
        const uint64_t value = Read<uint64_t>(stripe + 8 * i), keyed = value ^ Read<uint64_t>(secret + 8 * i);
        sums[i ^ 1] += value;
        sums[i] += (keyed & 0xffffffff) * (keyed >> 32);
    }
}

uint64_t Merged(const uint64_t* sums, const uint8_t* secret, uint64_t result) {
    for (size_t i = 0; i < 8; i += 2) {
        result += Folded(sums[i] ^ Read<uint64_t>(secret + 8 * i), sums[i + 1] ^ Read<uint64_t>(secret + 8 * i + 8));
    }
    return Avalanche(result);
}

Halves LongHash(const uint8_t* data, size_t size) {
    uint64_t sums[8] = {kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2],
                        kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]};
    const size_t whole = (size - 1) / kStripe;  // the last stripe overlaps the one before it
    for (size_t stripe = 0; stripe < whole; ++stripe) {
        Accumulate(sums, data + kStripe * stripe, kSecret + 8 * (stripe % kStripes));
        if (stripe % kStripes < kStripes - 1) continue;
        for (size_t i = 0; i < 8; ++i) {
            sums[i] = (sums[i] ^ (sums[i] >> 47) ^ Read<uint64_t>(kSecret + 128 + 8 * i)) * kPrime32[0];
        }
    }
    Accumulate(sums, data + size - kStripe, kSecret + 121);
    return {Merged(sums, kSecret + 11, size * kPrime64[0]), Merged(sums, kSecret + 117, ~(size * kPrime64[1]))};
}

// Write the XXH3 of the message from `begin` to `end` to `out`. The message has more than 16 bytes: a parent and more.
void Xxh3(const uint8_t* begin, const uint8_t* end, uint8_t* out) {
    const auto size = static_cast<size_t>(end - begin);
    const Halves hash = size > kLongMessage ? LongHash(begin, size) : ShortHash(begin, size);
    Write(Write(out, __builtin_bswap64(hash.high)), __builtin_bswap64(hash.low));
}

// -- The bytes of a block ------------------------------------------------------

// The digest of the block before.
struct Parent {
    const uint8_t* digest;
    size_t size;
};

using Form = uint8_t* (*)(uint8_t* at, Parent parent, const uint8_t* tokens, size_t count);

uint8_t* ChainForm(uint8_t* at, Parent parent, const uint8_t* tokens, size_t count) {
    return Append(Append(at, parent.digest, parent.size), tokens, 4 * count);
}

uint8_t* PackedForm(uint8_t* at, Parent parent, const uint8_t* tokens, size_t count) {
    at = Write(Append(at, "kvb1", 4), static_cast<uint32_t>(count));
    at = Append(Write(at, uint32_t{0}), parent.digest, parent.size);
    return Append(at, tokens, 4 * count);
}

// Numbers have no pattern that a processor could predict, so their lengths are computed without branches; the bytes
// that are written after a short one are overwritten by what follows.
uint8_t* PickledInt(uint8_t* at, uint32_t value) {
    if (value >= 1u << 31) return Write(Write(Append(at, "\x8a\x05", 2), value), uint8_t{0});
    const int size = 1 + (value >= 1u << 8) + 2 * (value >= 1u << 16);
    *at = static_cast<uint8_t>("KM J"[size - 1]);
    Write(at + 1, value);
    return at + 1 + size;
}

// pickle.dumps((parent, tuple(tokens), None), protocol=5): one frame, every value but numbers and None remembered.
uint8_t* PickleForm(uint8_t* at, Parent parent, const uint8_t* tokens, size_t count) {
    uint8_t* const size = Append(at, "\x80\x05\x95", 3);
    uint8_t* const frame = size + 8;
    at = Write(Append(frame, "C", 1), static_cast<uint8_t>(parent.size));
    at = Append(Append(at, parent.digest, parent.size), "\x94", 1);
    if (count > 3) at = Append(at, "(", 1);
    for (size_t i = 0; i < count; ++i) at = PickledInt(at, Read<uint32_t>(tokens + 4 * i));
    *at++ = count > 3 ? 't' : static_cast<uint8_t>(0x84 + count);
    at = Append(at, "\x94N\x87\x94.", 5);
    Write(size, static_cast<uint64_t>(at - frame));
    return at;
}

uint8_t* CborHead(uint8_t* at, uint8_t major, uint32_t value) {
    const int longer = (value >= 24) + (value >= 1u << 8) + (value >= 1u << 16);
    const int size = (1 << longer) >> 1;  // 0, 1, 2 or 4 bytes after the first
    *at = static_cast<uint8_t>(major | (longer ? 23u + static_cast<unsigned>(longer) : value));
    Write(at + 1, __builtin_bswap32(static_cast<uint32_t>(uint64_t{value} << (32 - 8 * size))));
    return at + 1 + size;
}

// The canonical CBOR of [parent, tokens, null].
uint8_t* CborForm(uint8_t* at, Parent parent, const uint8_t* tokens, size_t count) {
    at = CborHead(Append(at, "\x83", 1), 0x40, static_cast<uint32_t>(parent.size));
    at = CborHead(Append(at, parent.digest, parent.size), 0x80, static_cast<uint32_t>(count));
    for (size_t i = 0; i < count; ++i) at = CborHead(at, 0x00, Read<uint32_t>(tokens + 4 * i));
    return Append(at, "\xf6", 1);
}

struct Algorithm {
    Form form;
    size_t digest;  // bytes
};

constexpr Algorithm kAlgorithms[] = {
    {PackedForm, kSha256}, {PickleForm, kSha256}, {CborForm, kSha256},
    {PickleForm, kXxh3},   {CborForm, kXxh3},     {ChainForm, kSha256},
};
constexpr int kNumForms = sizeof kAlgorithms / sizeof kAlgorithms[0];

// -- Python --------------------------------------------------------------------

struct Run {
    int form, portable;
    const char *parent, *packed;
    Py_ssize_t parent_size, packed_size, block_size;
};

Py_ssize_t DigestSize(const Run& run) { return static_cast<Py_ssize_t>(kAlgorithms[run.form].digest); }

const char* Fault(const Run& run) {
    if (run.form < 0 || run.form >= kNumForms) return "form must be from 0 to 5";
    const bool is_first = kAlgorithms[run.form].form == ChainForm && run.parent_size == 0;
    if (run.parent_size != DigestSize(run) && !is_first) return "parent must be a digest of the form";
    if (run.block_size < 1 || run.block_size > kMaxBlock) return "block_size must be from 1 to MAX_BLOCK";
    if (run.packed_size % (4 * run.block_size)) return "packed must be whole blocks";
    return nullptr;
}

void HashAll(const Run& run, uint8_t* out) {
    uint8_t scratch[kScratch];
    const Compress compress = run.portable ? CompressPortable : kFastest;
    const Algorithm& algorithm = kAlgorithms[run.form];
    Parent parent{reinterpret_cast<const uint8_t*>(run.parent), static_cast<size_t>(run.parent_size)};
    const auto* tokens = reinterpret_cast<const uint8_t*>(run.packed);
    const auto* const end = tokens + run.packed_size;
    const auto count = static_cast<size_t>(run.block_size);
    for (; tokens < end; tokens += 4 * count, out += algorithm.digest) {
        uint8_t* const stop = algorithm.form(scratch, parent, tokens, count);
        if (algorithm.digest == kXxh3) {
            Xxh3(scratch, stop, out);
        } else {
            Digest(compress, scratch, stop, out);
        }
        parent = {out, algorithm.digest};
    }
}

// What the capsule HASHER has, for other compiled modules: hashes `blocks` whole blocks of u32 tokens, of at most
// kMaxBlock tokens each. `parent` has the digest before them, and `out` room for theirs.
void HashBlocks(int form, const uint8_t* parent, const uint8_t* tokens, size_t blocks, size_t block_size,
                uint8_t* out) {
    const auto packed_size = static_cast<Py_ssize_t>(4 * blocks * block_size);
    HashAll({form, 0, reinterpret_cast<const char*>(parent), reinterpret_cast<const char*>(tokens),
             static_cast<Py_ssize_t>(kAlgorithms[form].digest), packed_size, static_cast<Py_ssize_t>(block_size)},
            out);
}

PyObject* HashRun(PyObject*, PyObject* arguments) {
    Run run{};
    if (!PyArg_ParseTuple(arguments, "iy#y#n|p:hash_run", &run.form, &run.parent, &run.parent_size, &run.packed,
                          &run.packed_size, &run.block_size, &run.portable)) {
        return nullptr;
    }
    if (const char* fault = Fault(run)) {
        PyErr_SetString(PyExc_ValueError, fault);
        return nullptr;
    }
    const Py_ssize_t blocks = run.packed_size / (4 * run.block_size);
    PyObject* result = PyBytes_FromStringAndSize(nullptr, blocks * DigestSize(run));
    if (result == nullptr) return nullptr;
    auto* out = reinterpret_cast<uint8_t*>(PyBytes_AsString(result));
    if (run.packed_size <= kHeldBytes) {
        HashAll(run, out);
    } else {
        Py_BEGIN_ALLOW_THREADS
        HashAll(run, out);
        Py_END_ALLOW_THREADS
    }
    return result;
}

PyMethodDef kMethods[] = {
    {"hash_run", HashRun, METH_VARARGS, "Return the digests of consecutive whole blocks."},
    {"pack_ids", PackIds, METH_O, "Return the u32 values of a list of token ids, None for anything else."},
    {"unpack_varints", UnpackVarints, METH_O, "Return packed varints as little-endian u32 values."},
    {"step_message", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(StepMessage)), METH_FASTCALL,
     "Return the bytes of the message with a step of one part."},
    {"read_answer", ReadAnswer, METH_VARARGS, "Return the columns of an answer, None for a message that has more."},
    {"append_blocks", AppendBlocks, METH_VARARGS, "Append new blocks to block tables."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
    PyObject* module = PyModule_Create(&kModule);
    if (module == nullptr) return nullptr;
    PyObject* const hasher = PyCapsule_New(reinterpret_cast<void*>(HashBlocks), "kvplane.hasher", nullptr);
    if (PyModule_AddObjectRef(module, "HASHER", hasher) < 0 ||
        PyModule_AddStringConstant(module, "SOURCES", KVPLANE_SOURCES) < 0 ||
        PyModule_AddIntConstant(module, "MAX_BLOCK", kMaxBlock) < 0 ||
        PyModule_AddObjectRef(module, "ACCELERATED", kAccelerated ? Py_True : Py_False) < 0) {
        Py_CLEAR(module);
    }
    Py_XDECREF(hasher);
    return module;
}
