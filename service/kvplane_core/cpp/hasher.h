// Hashes the tokens of requests, as `RequestHasher` does for a request without extra keys.
#pragma once

#include "requests.h"
#include "step.h"

namespace kvplane {

class TokenHasher {
  public:
    // Hashes whole blocks of u32 tokens, of which `parent` has the digest before them: in `hashing/_native.cpp`.
    using Run = void (*)(int form, const uint8_t* parent, const uint8_t* tokens, size_t blocks, size_t block_size,
                         uint8_t* out);

    Run run = nullptr;  // null: Python hashes
    int form = 0;
    Digest none_hash;  // the parent of a first block
    size_t block_size = 1;

    // Appends `count` tokens to a request, and the hashes of the blocks that they fill to `made`.
    void Append(Requests& requests, Int slot, const uint8_t* tokens, size_t count, std::vector<uint8_t>* made) const {
        uint8_t* const pending = requests.PendingOf(slot);
        uint32_t& kept = requests.num_pending[slot];
        const size_t stride = 4 * block_size;
        size_t left = 4 * count;
        const auto keep = [&](size_t size) {
            std::memcpy(pending + kept, tokens, size);
            kept += static_cast<uint32_t>(size);
            tokens += size;
            left -= size;
        };
        if (kept + left < stride) return keep(left);
        const Digests& known = requests.content[slot];
        Digest parent = known.count() ? known.at(known.count() - 1) : none_hash;
        if (kept) {
            keep(stride - kept);
            parent = Hash(parent, pending, 1, made);
            kept = 0;
        }
        const size_t blocks = left / stride;
        if (blocks) Hash(parent, tokens, blocks, made);
        tokens += blocks * stride;
        left -= blocks * stride;
        keep(left);
    }

  private:
    // Returns the last digest.
    Digest Hash(const Digest& parent, const uint8_t* tokens, size_t blocks, std::vector<uint8_t>* made) const {
        const size_t before = made->size(), size = none_hash.size;
        made->resize(before + blocks * size);
        run(form, parent.bytes.data(), tokens, blocks, block_size, made->data() + before);
        return Digest(made->data() + made->size() - size, size);
    }
};

// The hashes of the rows of a section, in order, as the engine gives them.
class GivenHashes {
  public:
    size_t digest_size = 0;

    void Begin(const Column& counts, const Hashes& hashes) {
        Int total = 0;
        for (const Int count : counts) total += count;
        digest_size = total ? hashes.size / static_cast<size_t>(total) : 0;
        counts_ = &counts;
        at_ = hashes.data;
    }
    Hashes Of(size_t row) {
        const size_t size = counts_->empty() ? 0 : static_cast<size_t>((*counts_)[row]) * digest_size;
        return {size ? std::exchange(at_, at_ + size) : at_, size};
    }

  private:
    const Column* counts_ = nullptr;
    const uint8_t* at_ = nullptr;
};

// The hashes of the rows of a section, in order, which are made of its tokens.
class MadeHashes {
  public:
    // `made`: what Python hashed. The hashes of all rows with tokens are added to `hashed`.
    MadeHashes(const std::vector<uint8_t>& tokens, const Made& made, const TokenHasher& hasher, Hashed* hashed)
        : hasher_(hasher), made_(made), tokens_(tokens.data()), at_(made.hashes.data), hashed_(*hashed) {
        hashed->digest_size = hasher.none_hash.size;
    }

    // `count`: tokens of the row.
    Hashes Of(Requests& requests, Int slot, size_t row, Int count) {
        if (count == 0) return Hashes();
        std::vector<uint8_t>& all = hashed_.hashes;
        const size_t before = all.size(), digest_size = hasher_.none_hash.size;
        const uint8_t* const tokens = std::exchange(tokens_, tokens_ + 4 * count);
        if (IsGiven(row)) {
            const size_t size = static_cast<size_t>(made_.num_hashes[row]) * digest_size;
            all.insert(all.end(), at_, at_ + size);
            at_ += size;
        } else {
            Require(hasher_.run != nullptr, "there is no hash function");
            hasher_.Append(requests, slot, tokens, static_cast<size_t>(count), &all);
        }
        hashed_.num_hashes.push_back(static_cast<Int>((all.size() - before) / digest_size));
        return {all.data() + before, all.size() - before};
    }
    // Fetches what the next call for a request reads.
    static void Expect(const Requests& requests, Int slot) {
        __builtin_prefetch(requests.pending.data() + static_cast<size_t>(slot) * requests.hash_block_bytes, 1);
    }
    bool IsGiven(size_t row) const { return made_.given && made_.num_hashes[row] != kHashedHere; }

  private:
    const TokenHasher& hasher_;
    const Made& made_;
    const uint8_t *tokens_, *at_;
    Hashed& hashed_;
};

}  // namespace kvplane
