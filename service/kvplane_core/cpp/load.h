// Makes the state of a replica that was not used from an image of it, which others may have made: throws NoImage where
// that is damaged or another replica's.
#pragma once

#include "state.h"

namespace kvplane {

class LoadedState {
  public:
    // `terms`: what the image has of them is returned.
    LoadedState(ImageReader& one, Replica& into, ImageTerms& of)
        : image(one), replica(into), terms(of), fields(one, into), pool(into.blocks.pool) {}

    // `specs`: digests that its spec has.
    void Load(const std::vector<std::vector<uint8_t>>& specs) {
        Known(specs);
        image.Entry("replica", [&] { fields.Terms(terms); });
        image.Entry("pool", [&] { fields.Pool(); });
        const Int num_evictable = pool.num_evictable;
        image.Entry("requests", [&] { fields.OfRequests(); });
        OfBlocks("pool.references", pool.references, [&](auto& column) { image.Numbers(column); });
        Int num_first = 0;
        if (replica.spec.policy != kLru) image.Entry("eviction", [&] { fields.Eviction(num_first); });
        FreeBlocks(static_cast<size_t>(num_first));
        Keys();
        OfBlocks("pool.key_step", pool.key_step, [&](Column& column) { image.Words(column, kCount); });
        OfBlocks("pool.stamp", pool.stamp, [&](auto& column) { image.Words(column); });
        pool.num_evictable = num_evictable;
        pool.SetStampBase();
        if (image.CountOf("retained")) image.Entry("retained", [&] { Retained(); });
        image.Entry("tracker", [&] { fields.Tracker(); });
        auto manager = replica.blocks.managers.begin();
        image.Entry("manager", [&] { fields.Manager(**manager++); }, replica.blocks.managers.size());
        image.Entry("content", [&] { Content(); }, image.CountOf("content"));
        if (!replica.spec.tiers.empty())
            image.Entry("tiers", [&] { LoadedTiers(image, replica.spec, replica.blocks.tiers).Load(); });
        Statistics();
        replica.blocks.requests.InvalidateAllFastPaths();
        pool.ForgetStamped();
        if (image.CountOf("stamped")) image.Entry("stamped", [&] { Stamped(); });
    }

  private:
    // Whether it is the image of a replica with this spec, in the text of which the policy is not.
    void Known(const std::vector<std::vector<uint8_t>>& specs) {
        std::string policy = kPolicyNames[kLru];
        if (image.CountOf("eviction")) {
            image.Entry("eviction", [&] {
                image.Begin('L');
                image.Text(policy);
            });
        }
        const std::string mine = kPolicyNames[static_cast<size_t>(replica.spec.policy)];
        if (policy != mine)
            throw NoImage{"it is '" + mine + "', but the state is that of a pool with '" + policy + "'", "eviction"};
        image.Entry("spec", [&] { image.Bytes(terms.spec); });
        if (std::find(specs.begin(), specs.end(), terms.spec) == specs.end())
            throw NoImage{"the state is that of a pool with another spec"};
    }

    template <typename T, typename F>
    void OfBlocks(const char* name, std::vector<T>& column, F&& read) {
        std::vector<T> found;
        image.Entry(name, [&] { read(found); });
        image.Holds(found.size() == column.size(), "has another number of blocks");
        column = std::move(found);
    }

    void FreeBlocks(size_t num_first) {
        BlockList free;
        image.Entry("free", [&] { image.Words(free, fields.block); });
        std::vector<bool> seen(static_cast<size_t>(pool.num_blocks), false);
        seen[kNullBlock] = true;
        for (const Block block : free) {
            image.Holds(!seen[block], "has a block twice, or the null block");
            seen[block] = true;
        }
        image.Holds(num_first <= free.size());
        if (!pool.split) return pool.free.Rebuild(free, num_first);
        image.Entry("split", [&] {
            Int num_bare = 0, num_cached = 0;
            std::vector<uint8_t> has_state;
            image.Begin('L', 3);
            image.Number(num_bare, kCount), image.Number(num_cached, kCount), image.Bytes(has_state);
            image.Holds(pool.split->Load(free, num_bare, num_cached, has_state, pool.references),
                        "is not that of these free blocks");
        });
    }

    // -- keys --------------------------------------------------------------------------------------------------------

    void Keys() {
        const auto num_blocks = static_cast<size_t>(pool.num_blocks);
        std::vector<uint32_t> tokens;
        image.Entry("pool.key_tokens", [&] { image.Words(tokens); });
        image.Holds(tokens.size() == num_blocks, "has another number of blocks");
        size_t block = 0;
        image.Entry("keys", [&] { block = Run(block, tokens); }, image.CountOf("keys"));
        image.Holds(block == num_blocks, "has another number of blocks");
        image.Entry("more_keys", [&] { MoreKeys(); });
        image.Entry("shared", [&] {
            for (size_t left = image.Begin('L'); left > 0; --left) {
                Key key;
                BlockList blocks;
                image.Begin('t', 2);
                image.OfKey(key);
                image.Numbers(blocks, fields.block);
                Reorder(key, blocks);
            }
        });
    }

    // Returns the block behind the last one.
    size_t Run(size_t block, const std::vector<uint32_t>& tokens) {
        Int first = 0;
        std::vector<uint32_t> pairs{0}, numbers, sizes;
        image.Begin('L', 4);
        image.Number(first, {static_cast<Int>(block), static_cast<Int>(block)});
        for (size_t left = image.Begin('L'); left > 0; --left) {
            image.Begin('t', 2);
            pairs.push_back(image.Pair());
        }
        image.Numbers(numbers, {0, static_cast<Int>(pairs.size()) - 1});
        image.Holds(numbers.size() <= tokens.size() - block, "has another number of blocks");
        const std::span<const uint8_t> digests = image.Digests(sizes);
        size_t row = 0, at = 0;
        for (const uint32_t number : numbers) {
            if (number) {
                image.Holds(row < sizes.size() && tokens[block] > 0, "has a key without a hash or tokens");
                pool.AddKey(static_cast<Block>(block), Key{pairs[number], Digest(digests.data() + at, sizes[row])},
                            tokens[block]);
                at += sizes[row++];
            }
            ++block;
        }
        image.Holds(row == sizes.size(), "has hashes of no block");
        return block;
    }

    void MoreKeys() {
        using Further = std::vector<std::pair<Key, uint32_t>>;
        std::map<Block, Further> more;
        image.Dict(more, fields.block, [&](Further& further) {
            image.Each('L', further, [&](auto& one) {
                image.Begin('t', 2);
                image.OfKey(one.first);
                image.Number(one.second);
            });
        });
        for (const auto& [block, further] : more) {
            for (const auto& [key, tokens] : further) {
                image.Holds(pool.HasKey(block) && !pool.HasThisKey(block, key), "has a key twice, or no first one");
                pool.AddKey(block, key, tokens);
            }
        }
    }

    // Puts the blocks of a key, which all have it, into this order of registration.
    void Reorder(const Key& key, const BlockList& blocks) {
        const std::vector<uint32_t> ring = pool.RecordsOf(key);
        std::map<Block, uint32_t> records;
        for (const uint32_t record : ring) records.emplace(pool.BlockOf(record), record);
        std::vector<uint32_t> wanted;
        for (const Block block : blocks) {
            const auto found = records.find(block);
            image.Holds(found != records.end(), "has a block without the key, or twice");
            wanted.push_back(found->second);
            records.erase(found);
        }
        image.Holds(records.empty() && !wanted.empty(), "has other blocks than the key");
        pool.index.Replace(pool.records, ring.back(), wanted.back());
        for (size_t at = 0; at < wanted.size(); ++at) pool.records[wanted[at]].next = wanted[(at + 1) % wanted.size()];
    }

    // Into a pool that has its keys and its free list.
    void Retained() {
        std::vector<Retention> each;
        std::map<Int, BlockList> lists;
        fields.Retained(each, lists);
        for (Retention& one : each) {
            std::set<Key> keys;
            for (const auto& [position, kept] : one.keys) keys.insert(kept.key);
            image.Holds(!one.keys.empty() && keys.size() == one.keys.size() && !pool.retained.Has(one),
                        "has a prefix or a key of one twice");
            pool.retained.Enlist(std::move(one));
        }
        const BlockList order = pool.free.Order();
        std::vector<bool> free(static_cast<size_t>(pool.num_blocks), false);
        for (const Block block : order) free[block] = true;
        for (const auto& [priority, blocks] : lists) {
            for (const Block block : blocks) {
                image.Holds(block != kNullBlock && !free[block] && pool.references[block] == 0, "has a block in use");
                free[block] = true;
                pool.retained.Put(priority, block);
            }
        }
    }

    void Stamped() {
        BlockList blocks;
        image.Numbers(blocks, fields.block);
        for (const Block block : blocks) pool.NoteStamped(block);
    }

    // -- requests ----------------------------------------------------------------------------------------------------

    void Content() {
        Int slot = 0;
        std::vector<uint32_t> sizes;
        image.Begin('L', 3);
        image.Number(slot, {0, fields.requests.size() - 1});
        const std::span<const uint8_t> joined = image.Digests(sizes);
        Digests& content = fields.requests.content[slot];
        image.Holds(fields.requests.live[slot] && content.bytes.empty(), "has a request twice, or one that ended");
        for (const uint32_t size : sizes) image.Holds(size == sizes[0] && size > 0, "has hashes of several sizes");
        content.add(joined.data(), joined.size(), sizes.empty() ? 0 : sizes[0]);
        const std::span<const uint8_t> hasher = image.Skip();
        if (hasher.size() > 1) terms.hashers[slot] = {hasher.begin(), hasher.end()};
    }

    void Statistics() {
        image.Entry("counters", [&] { fields.Counters(); });
        image.Entry("residency", [&] { fields.Ages(); });
        image.Entry("pool_counters", [&] { fields.PoolCounters(); });
        image.Entry("group_counters", [&] { fields.GroupCounters(); });
        const auto numbers = [&](Column& column) { image.Numbers(column, kCount); };
        OfBlocks("pool._born", pool.born, numbers);
        OfBlocks("pool._used", pool.used, numbers);
        OfBlocks("pool._last_use", pool.last_use_, numbers);
        if (!replica.spec.tiers.empty())
            image.Entry("tier_counters", [&] { TierFields(image, replica.spec, replica.blocks.tiers).Counters(); });
    }

    ImageReader& image;
    Replica& replica;
    ImageTerms& terms;
    StateFields<ImageReader> fields;
    BlockPool& pool;
};

}  // namespace kvplane
