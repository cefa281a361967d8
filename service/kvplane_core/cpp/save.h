// Writes the image of a replica, see `state.py`.
#pragma once

#include "state.h"

namespace kvplane {

// The keys of the blocks: entries of the primary ones, then the others, and the blocks of each key that several have.
class KeysToSave {
  public:
    KeysToSave(ImageWriter& one, const BlockPool& of) : image(one), pool(of) {}

    // The entry of `count` blocks from `first` on.
    void Run(size_t first, size_t count) {
        std::vector<uint32_t> numbers, sizes;
        std::vector<uint8_t> digests;
        for (size_t block = first; block < first + count; ++block) {
            const Key& key = pool.records[block].key;
            numbers.push_back(key.pair ? NumberOf(key.pair) : 0);
            if (!key.pair) continue;
            sizes.push_back(key.digest.size);
            digests.insert(digests.end(), key.digest.bytes.begin(), key.digest.bytes.begin() + key.digest.size);
            NoteShared(static_cast<uint32_t>(block));
            const auto further = pool.more_keys.find(static_cast<Block>(block));
            if (further == pool.more_keys.end()) continue;
            more_.push_back(static_cast<Block>(block));
            for (const uint32_t record : further->second) NoteShared(record);
        }
        image.Begin('L', 4);
        image.Number(first);
        image.Each('L', pairs_, [&](uint32_t pair) {
            image.Begin('t', 2);
            image.Domain(pool.pairs.Domain(pair));
            image.Number(pool.pairs.Group(pair));
        });
        image.Numbers(numbers);
        image.Digests(sizes, digests);
    }

    void More() {
        image.Begin('d', more_.size());
        for (const Block block : more_) {
            image.Number(block);
            image.Each('L', pool.more_keys.at(block), [&](uint32_t record) {
                image.Begin('t', 2);
                image.OfKey(pool.records[record].key);
                image.Number(pool.records[record].tokens);
            });
        }
    }

    void Shared() {
        std::sort(shared_.begin(), shared_.end(), [&](uint32_t one, uint32_t other) {
            return image.Before(pool.records[one].key, pool.records[other].key);
        });
        image.Each('L', shared_, [&](uint32_t record) {
            image.Begin('t', 2);
            image.OfKey(pool.records[record].key);
            image.Numbers(pool.BlocksOf(pool.records[record].key));
        });
    }

  private:
    uint32_t NumberOf(uint32_t pair) {
        const auto [found, is_new] = numbers_.try_emplace(pair, static_cast<uint32_t>(pairs_.size() + 1));
        if (is_new) pairs_.push_back(pair);
        return found->second;
    }
    // Notes each key of several blocks once.
    void NoteShared(uint32_t record) {
        const KeyRecord& one = pool.records[record];
        if (one.next != record && pool.index.Find(pool.records, one.key) == record) shared_.push_back(record);
    }

    ImageWriter& image;
    const BlockPool& pool;
    std::map<uint32_t, uint32_t> numbers_;  // of pairs, from 1 on
    std::vector<uint32_t> pairs_, shared_;
    BlockList more_;
};

// The state of the hasher of a request, as `RequestHasher` has it; N if the engine hashes its tokens.
inline void SaveHasher(ImageWriter& image, Replica& replica, const ImageTerms& terms, Int slot) {
    Requests& requests = replica.blocks.requests;
    if (terms.hashed || !requests.by_service[slot]) return image.Nothing();
    if (requests.hashed_outside[slot]) {
        const auto found = terms.hashers.find(slot);
        return found == terms.hashers.end() ? image.Nothing() : image.Raw(found->second);
    }
    const Digests& known = requests.content[slot];
    image.Begin('L', 7);
    image.Number(known.count());
    image.OfDigest(known.count() ? known.at(known.count() - 1) : replica.facts.hasher.none_hash);
    image.Bytes({requests.PendingOf(slot), requests.num_pending[slot]});
    image.Nothing();  // no extra keys
    image.Text("");
    image.Begin('L', 0);
    image.Begin('L', 0);
}

// Writes everything before the keys.
inline Slices SavePool(StateFields<ImageWriter>& fields, ImageTerms& terms) {
    ImageWriter& image = fields.image;
    Replica& replica = fields.replica;
    BlockPool& pool = fields.pool;
    const auto num_blocks = static_cast<size_t>(pool.num_blocks);
    image.Name("spec"), image.Bytes(terms.spec);
    image.Name("replica"), fields.Terms(terms);
    image.Name("pool"), fields.Pool();
    image.Name("pool.references"), image.Numbers(pool.references);
    co_yield Pause();
    image.Name("pool.key_tokens"), image.Kind('A'), image.Begin('I', num_blocks);
    for (size_t block = 0; block < num_blocks; ++block) image.Raw(pool.records[block].tokens);
    co_yield Pause();
    image.Name("pool.key_step"), image.Words(pool.key_step);
    co_yield Pause();
    image.Name("pool.stamp"), image.Words(pool.stamp);
    co_yield Pause();
    if (!replica.spec.tiers.empty()) {
        image.Name("tiers");
        for (Slices work = SaveTiers(image, replica.spec, replica.blocks.tiers); work.Next();) co_yield Pause();
    }
    if (pool.split) {
        image.Name("split"), image.Begin('L', 3);
        image.Number(pool.split->num_bare()), image.Number(pool.split->num_cached());
        image.Bytes(pool.split->has_state());
    }
    if (!pool.retained.each().empty()) {
        std::vector<Retention> each;
        std::map<Int, BlockList> lists;
        for (const auto& [number, one] : pool.retained.each()) each.push_back(one);
        for (const auto& [priority, block] : pool.retained.Lists()) lists[priority].push_back(block);
        image.Name("retained"), fields.Retained(each, lists);
    }
    if (!pool.stamped.empty()) image.Name("stamped"), image.Numbers(pool.stamped);
    const auto num_free = static_cast<size_t>(pool.split ? pool.split->count() : pool.free.count());
    image.Name("free"), image.Kind('A'), image.Begin('I', num_free);
    BlockList piece{kNullBlock};
    for (size_t left = num_free; left > 0; left -= piece.size()) {
        piece = pool.FreeBehind(piece.back(), std::min(left, terms.run));
        Require(!piece.empty(), "the free list is shorter than its count");
        for (const Block block : piece) image.Raw(block);
        co_yield Pause();
    }
    if (replica.spec.policy != kLru) {
        Int num_first = pool.free.CountFirst();
        image.Name("eviction"), fields.Eviction(num_first);
        co_yield Pause();
    }
}

inline Slices SaveState(ImageWriter& image, Replica& replica, ImageTerms& terms) {
    StateFields fields(image, replica);
    BlockPool& pool = fields.pool;
    Requests& requests = fields.requests;
    const auto num_blocks = static_cast<size_t>(pool.num_blocks);
    image.bytes = kMagic;
    for (Slices work = SavePool(fields, terms); work.Next();) co_yield Pause();
    KeysToSave keys(image, pool);
    for (size_t first = 0; first < num_blocks; first += terms.run) {
        image.Name("keys"), keys.Run(first, std::min(terms.run, num_blocks - first));
        co_yield Pause();
    }
    image.Name("more_keys"), keys.More();
    image.Name("shared"), keys.Shared();
    fields.hides_hashers = terms.hashed;
    image.Name("requests"), fields.OfRequests();
    image.Name("tracker"), fields.Tracker();
    for (const auto& one : replica.blocks.managers) {
        image.Name("manager"), fields.Manager(*one);
        co_yield Pause();
    }
    for (Int slot = 0; slot < requests.size(); ++slot) {
        if (!requests.live[slot]) continue;
        const Digests& known = requests.content[slot];
        const std::vector<uint32_t> sizes(static_cast<size_t>(known.count()), static_cast<uint32_t>(known.size));
        image.Name("content"), image.Begin('L', 3);
        image.Number(slot), image.Digests(sizes, known.bytes);
        SaveHasher(image, replica, terms, slot);
        co_yield Pause();
    }
    if (!terms.with_statistics) co_return;
    image.Name("counters"), fields.Counters();
    image.Name("residency"), fields.Ages();
    image.Name("pool_counters"), fields.PoolCounters();
    image.Name("group_counters"), fields.GroupCounters();
    image.Name("pool._born"), image.Numbers(pool.born);
    co_yield Pause();
    image.Name("pool._used"), image.Numbers(pool.used);
    co_yield Pause();
    image.Name("pool._last_use"), image.Numbers(pool.last_use_);
    if (!replica.spec.tiers.empty())
        image.Name("tier_counters"), TierFields(image, replica.spec, replica.blocks.tiers).Counters();
}

}  // namespace kvplane
