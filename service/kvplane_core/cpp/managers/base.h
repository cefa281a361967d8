// The base class of group managers: block tables, allocation, registration.
#pragma once

#include "../orders.h"
#include "../requests.h"
#include "../setup.h"
#include "../tiers/tiers.h"

namespace kvplane {

struct Need {
    Int slot, num_slots, num_main, total_computed, local_computed, num_encoder = 0;
    bool capped = false;
};

struct Query {
    const Digests* digests;
    uint32_t domain;
    const std::vector<Int>* groups;
    Int max_tokens;
    bool drops_last_block;
    Int horizon;
    const Tiers* tiers = nullptr;  // null: what only the tiers have is not found
};

using Rows = std::vector<BlockList>;

// How far a request is computed while none of its steps is in flight, see `questions.RequestProgress`.
struct Progress {
    Int computed, launch_end, num_prompt;
    bool loading;
};

class GroupManager;
using Divided = std::pair<BlockList, BlockList>;  // blocks that left a window, others
inline Divided SplitLeft(const GroupManager&, Int slot, const BlockList& indices, const BlockList& blocks);
inline void NoteCopied(GroupManager&, Int slot, Block source);

class GroupManager {
  public:
    GroupManager(Int number, const Spec& replica_spec, BlockPool& block_pool, Requests& all, Orders& step_orders)
        : group(number),
          replica(replica_spec),
          spec(replica_spec.groups[static_cast<size_t>(number)]),
          pool(block_pool),
          requests(all),
          orders(step_orders),
          block_size(spec.block_size),
          hash_size(replica_spec.hash_block_size),
          hashes_per_block_(block_size / hash_size) {
        for (const GroupSpec& one : replica.groups) {
            if (one.lookup_class == spec.lookup_class) drops_last_block |= one.drops_last_block != 0;
        }
        stores_empty_ranges = !replica.safe;
    }
    virtual ~GroupManager() = default;

    // -- tables ------------------------------------------------------------------------------------------------------

    virtual void Grow(Int slot) {
        if (static_cast<size_t>(slot) < table.size()) return;
        table.resize(static_cast<size_t>(slot) + 1);
        num_cached.resize(static_cast<size_t>(slot) + 1, kNotTracked);
    }

    // Empties the slot's table; appends its blocks in order, without leading null blocks.
    virtual void TakeAll(Int slot, BlockList* into) {
        BlockList& blocks = table[slot];
        const auto first = std::find_if(blocks.begin(), blocks.end(), [](Block block) { return block != kNullBlock; });
        into->insert(into->end(), first, blocks.end());
        blocks.clear();
        num_cached[slot] = kNotTracked;
        partial_hit.erase(slot);
    }

    // Clears what is recorded per step.
    virtual void NewStep() {}

    Int BlocksFor(Int num_tokens) const { return CeilDiv(num_tokens, block_size); }

    // Fetches what a decode row that touches blocks will read, in three stages with other work between them: the table;
    // its last entry and the one that leaves the window; what the pool knows of these blocks.
    void Fetch(Int slot, int stage, Int num_processed) const {
        const BlockList& blocks = table[slot];
        if (stage == 0) {
            __builtin_prefetch(&blocks);
            __builtin_prefetch(&num_cached[slot]);
            return;
        }
        if (blocks.empty()) return;
        const Int leaving = SkippedTokens(num_processed) / block_size - 1;
        const bool leaves = leaving >= 0 && leaving < Size(blocks);
        if (stage == 1) {
            __builtin_prefetch(&blocks.back());
            if (leaves) __builtin_prefetch(&blocks[leaving]);
        } else {
            pool.FetchRecord(blocks.back());
            if (leaves) pool.FetchRelease(blocks[leaving]);
        }
    }

    // -- allocation --------------------------------------------------------------------------------------------------

    virtual Int BlocksNeeded(const Need& need, const BlockList& hit) const {
        Int required = BlocksFor(need.num_slots);
        if (need.capped && spec.admission_cap_blocks) required = std::min(required, spec.admission_cap_blocks);
        const Int has = static_cast<Int>(table[need.slot].size());
        if (num_cached[need.slot] != kNotTracked) return std::max<Int>(required - has, 0);
        const Int skipped = std::max<Int>(SkippedTokens(need.total_computed), 0) / block_size;
        Int count = std::max<Int>(required - std::max(skipped, static_cast<Int>(hit.size()) + has), 0);
        count += EndsInsideBlock(hit, need.local_computed);
        return count + CountEvictable(hit, static_cast<size_t>(std::max<Int>(0, skipped - has)));
    }

    // `num_main`: the positions without lookahead.
    virtual Int BlocksToExtend(Int slot, Int num_slots, Int num_main) const {
        (void)num_main;
        return std::max<Int>(BlocksFor(num_slots) - static_cast<Int>(table[slot].size()), 0);
    }

    virtual void Adopt(Int slot, const BlockList& hit, Int local_computed, Int total_computed) {
        BlockList& blocks = table[slot];
        Require(blocks.empty(), "the slot already has blocks");
        const auto skipped = static_cast<size_t>(std::max<Int>(SkippedTokens(total_computed), 0) / block_size);
        blocks.assign(skipped, kNullBlock);
        for (size_t i = skipped; i < hit.size(); ++i) {
            pool.Touch(hit[i]);
            adopted += hit[i] != kNullBlock;
            blocks.push_back(hit[i]);
        }
        num_cached[slot] = static_cast<Int>(blocks.size());
        if (hit.size() > skipped && local_computed % block_size != 0) {
            const Int index = local_computed / block_size;
            partial_hit[slot] = {index, blocks.back()};
            num_cached[slot] = index;
        }
    }

    virtual void AllocateExternal(Int slot, Int local_computed, Int total_computed) {
        if (total_computed - std::max(local_computed, SkippedTokens(total_computed)) <= 0) return;
        const Int missing = BlocksFor(total_computed) - static_cast<Int>(table[slot].size());
        BlockList unused;
        Extend(slot, std::max<Int>(0, missing), &unused);
    }

    // Extends the table to `num_slots` token positions; appends the new blocks, targets of copies first.
    virtual void Allocate(Int slot, Int num_slots, Int num_main, Int num_encoder, BlockList* fresh) {
        (void)num_main, (void)num_encoder;
        RedirectPartialHit(slot, fresh);
        const Int missing = BlocksFor(num_slots) - static_cast<Int>(table[slot].size());
        if (missing > 0) Extend(slot, missing, fresh);
    }

    void ZeroUnloaded(Int slot, Int num_tokens) {
        if (!spec.zero_new_blocks) return;
        const BlockList& blocks = table[slot];
        for (size_t i = static_cast<size_t>(BlocksFor(num_tokens)); i < blocks.size(); ++i) {
            if (pool.IsPrivate(blocks[i])) OrderZero(blocks[i]);
        }
    }

    virtual Int BlocksAlone(Int num_tokens, Int num_encoder) const {
        (void)num_encoder;
        const Int need = BlocksFor(num_tokens);
        return spec.admission_cap_blocks ? std::min(need, spec.admission_cap_blocks) : need;
    }

    // -- window ------------------------------------------------------------------------------------------------------

    // Whether what a running request gives up was read by its attention, not overwritten.
    virtual bool HasWindow() const { return true; }

    virtual Int SkippedTokens(Int num_computed) const {
        (void)num_computed;
        return 0;
    }

    virtual void ReleaseSkipped(Int slot, Int num_processed) {
        const Int skipped = SkippedTokens(num_processed);
        if (skipped > 0) ReleaseRange(slot, 0, skipped / block_size);
    }

    // -- prefix cache ------------------------------------------------------------------------------------------------

    virtual void RegisterBlocks(Int slot, Int num_tokens, const Positions& boundaries) {
        const Int start = std::max<Int>(num_cached[slot], 0), hashed = requests.content[slot].count() * hash_size;
        const Int end = std::min(std::min(num_tokens, hashed) / block_size, static_cast<Int>(table[slot].size()));
        if (start >= end) return;
        const Int single = requests.single_group_hit[slot];
        Positions reachable = boundaries;
        if (single) {
            reachable.Add(single);
            if (drops_last_block) reachable.Add(single - block_size);
        }
        const bool masked = ReachableBlocks(start, end, reachable, &keep_);
        RegisterRange(slot, start, end, masked ? &keep_ : nullptr);
        num_cached[slot] = end;
    }

    virtual void RegisterAgain(const std::set<Block>& blocks) {
        for (size_t slot = 0; slot < table.size(); ++slot) {
            Int first = 0;
            const Int count = static_cast<Int>(table[slot].size());
            while (first < count && !blocks.contains(table[slot][first])) ++first;
            if (first < count) num_cached[slot] = std::min(num_cached[slot], first);
        }
    }

    // Registers the blocks with indices [start, end) that are in the mask; nullptr: all of them.
    virtual void RegisterRange(Int slot, Int start, Int end, const std::vector<bool>* keep) {
        const Digests& digests = requests.content[slot];
        const BlockList& blocks = table[slot];
        const uint32_t pair = pool.pairs.Of(requests.domain[slot], group);
        registered_.clear();
        for (Int index = start; index < end; ++index) {
            const Block block = blocks[index];
            if (block == kNullBlock || (keep != nullptr && !(*keep)[static_cast<size_t>(index - start)])) continue;
            if (pool.KeyTokens(block) != (index + 1) * block_size) registered_.push_back(index);
        }
        keys_.resize(registered_.size());
        hashes_.resize(registered_.size());
        for (size_t at = 0; at < registered_.size(); ++at) {
            keys_[at].pair = pair;
            digests.CopyTo((registered_[at] + 1) * hashes_per_block_ - 1, &keys_[at].digest);
        }
        for (size_t at = 0; at < registered_.size(); ++at) hashes_[at] = Sought(keys_[at]).hash;
        const auto sought = [&](size_t at) { return Sought(keys_[at], hashes_[at]); };
        pool.registered.reserve(pool.registered.size() + registered_.size());
        for (size_t at = 0; at < registered_.size(); ++at) {
            if (at + kAhead < registered_.size()) pool.Expect(sought(at + kAhead));
            const Int index = registered_[at], num_tokens = (index + 1) * block_size;
            Promote(blocks[index], num_tokens);
            pool.Register(blocks[index], sought(at), num_tokens);
        }
        if (!replica.events || (registered_.empty() && !stores_empty_ranges)) return;
        AddStored(slot, block_size, start * block_size, end * block_size,
                  start ? DigestOf(digests, start - 1) : Digest());
        pool.events.AddKeys(keys_, [&](size_t at) { return blocks[registered_[at]]; },
                            [&](size_t at) { return registered_[at] * block_size; });
    }

    // Returns false if all blocks are reachable; else fills the mask of the blocks with indices [start, end).
    virtual bool ReachableBlocks(Int start, Int end, const Positions& boundaries, std::vector<bool>* keep) const {
        (void)start, (void)end, (void)boundaries, (void)keep;
        return false;
    }

    // Finds the longest cached prefix; fills the blocks per group, and returns its length in tokens. Groups that are
    // never cached are not asked.
    virtual Int FindPrefix(const Query&, Rows*) const { throw Broken("no block of the group is cached"); }
    virtual bool IsDownwardClosed() const { return false; }
    virtual Int DropMargin() const { return block_size; }

    virtual bool HitIsReady(const BlockList& hit, Int num_tokens) const {
        if (!replica.safe || !EndsInsideBlock(hit, num_tokens)) return true;
        return hit.back() == kNullBlock || pool.key_step[hit.back()] < pool.step;
    }

    virtual Int FirstRead(Int num_computed) const { return std::max<Int>(SkippedTokens(num_computed), 0) / block_size; }
    virtual bool CanRewind(Int slot, Int num_computed) const {
        const Int first = FirstRead(num_computed);
        const BlockList& blocks = table[slot];
        for (size_t i = static_cast<size_t>(first); i < blocks.size(); ++i) {
            if (blocks[i] == kNullBlock) return false;
        }
        return true;
    }

    virtual void Rewind(Int slot, Int num_computed) { (void)slot, (void)num_computed; }
    // Steps before the present one wrote the blocks that the request registered.
    virtual void NoteWritten(Int slot) { (void)slot; }

    // -- images (resume.h) --------------------------------------------------------------------------------------------

    // Puts null blocks where no block of a table is needed any more; false if a needed block is missing.
    virtual bool NormalizeTable(BlockList* blocks, const Progress& at) const;
    // The digest of the prefix that ends with the block at this index; none if the request may write other content into
    // it, or no key can name it.
    virtual Digest SealedPrefix(Int slot, Int index, const Progress& at) const;
    // Continues a request with a normalized table, whose blocks it has; keys that do not fit them are removed.
    // `num_registered`: leading blocks that need no further registration; kNotTracked: up to the last one with a key.
    virtual void Resume(Int slot, BlockList blocks, const Progress& at, Int num_registered);

    // -- what the check of invariants asks ---------------------------------------------------------------------------

    // Whether one block can have so many keys, each of a prefix that ends at another position inside the block.
    virtual bool MayHaveKeys(size_t count) const {
        (void)count;
        return true;
    }
    // Whether the manager's record of the request is consistent with its table.
    virtual bool IsSound(Int slot) const {
        (void)slot;
        return true;
    }
    // Whether `ReleaseSkipped` would release a block.
    virtual bool Releases(Int slot, Int num_processed) const {
        return HasBlock(slot, 0, std::max<Int>(SkippedTokens(num_processed), 0) / block_size);
    }

    // Keys that the manager has records of, besides those in the pool.
    virtual const std::set<Key>& RecordedKeys() const {
        static const std::set<Key> none;
        return none;
    }

    // -- fast path ---------------------------------------------------------------------------------------------------

    virtual Int AllocBound(Int slot) const {
        return partial_hit.contains(slot) ? 0 : static_cast<Int>(table[slot].size()) * block_size;
    }
    virtual Int WindowBound(Int slot, Int num_processed) const {
        (void)slot, (void)num_processed;
        return kForever;
    }
    virtual Int RegisterBound(Int slot) const {
        const Int end = (std::max<Int>(num_cached[slot], 0) + 1) * block_size;
        return end <= requests.content[slot].count() * hash_size ? end : kForever;
    }

    Key KeyOf(Int slot, Int num_hashes) const {
        return Key{pool.pairs.Of(requests.domain[slot], group), requests.content[slot].at(num_hashes - 1)};
    }

    const Int group;
    const Spec& replica;
    const GroupSpec& spec;
    BlockPool& pool;
    Requests& requests;
    Orders& orders;
    const Int block_size, hash_size;
    bool drops_last_block = false, stores_empty_ranges = false;
    std::vector<BlockList> table;
    Column num_cached;
    std::map<Int, std::pair<Int, Block>> partial_hit;
    std::vector<std::pair<Block, Block>> copies;
    Int allocated = 0, adopted = 0;

  protected:
    std::vector<bool> keep_;  // of RegisterBlocks

    // Whether the primary key of the block at this index names what the request has at this position.
    virtual bool KeyFits(Int slot, Int index, const Progress& at) const;

    bool EndsInsideBlock(const BlockList& hit, Int num_tokens) const {
        return !hit.empty() && num_tokens % block_size != 0;
    }

    // Whether the table has a block from one index to before another.
    bool HasBlock(Int slot, Int first, Int last) const {
        const BlockList& blocks = table[slot];
        const auto held = [](Block block) { return block != kNullBlock; };
        last = std::min(last, Size(blocks));
        return first < last && std::any_of(blocks.begin() + first, blocks.begin() + last, held);
    }

    static Int Size(const BlockList& blocks) { return static_cast<Int>(blocks.size()); }

    // Counts the free blocks of a hit from an index on: `num_free` falls by this number if they are adopted.
    Int CountEvictable(const BlockList& hit, size_t first = 0) const {
        Int count = 0;
        for (size_t i = first; i < hit.size(); ++i) count += hit[i] != kNullBlock && pool.references[hit[i]] == 0;
        return count;
    }

    void ReleaseRange(Int slot, Int first, Int last) {
        const BlockList& blocks = table[slot];
        freed_.clear();
        for (Int index = std::min(last, Size(blocks)) - 1; index >= first && blocks[index] != kNullBlock; --index)
            freed_.push_back(static_cast<Block>(index));
        if (!freed_.empty()) GiveUp(slot, &freed_);
    }

    // Releases the blocks at these indices, which are overwritten, as launches in flight may still read them.
    void GiveUp(Int slot, BlockList* indices) {
        const BlockList places = replica.policy == kLru ? BlockList() : *indices;
        for (Block& one : *indices) one = std::exchange(table[slot][one], kNullBlock);
        pool.NoteUse(*indices, std::min(requests.granted_step[slot], pool.step - 1));
        if (replica.policy == kLru) return pool.Release(*indices);
        const auto [left, rest] = SplitLeft(*this, slot, places, *indices);
        pool.Release(left, true);
        pool.Release(rest);
    }

    // `after`: the last block of the same table.
    void Take(Int count, BlockList* into, Block after = kNullBlock) {
        allocated += count;
        spec.is_state() ? pool.TakeStates(count, into) : pool.Take(count, into, after);
    }

    void CopyIntoTable(Int slot, Int index, Block source, Block target) {
        Require(table[slot][index] == source, "a partial hit is not in the table");
        table[slot][index] = target;
        OrderCopy(source, target);
        pool.Touch(target);
        NoteCopied(*this, slot, source);
    }

    void OrderCopy(Block source, Block target) {
        copies.emplace_back(source, target);
        orders.copy_src.push_back(source);
        orders.copy_dst.push_back(target);
        orders.copy_group.push_back(group);
    }

    // Registers the key of a prefix that ends inside the block; a key of a shorter prefix is removed.
    Key RegisterInsideBlock(Int slot, Block block, Int num_tokens) {
        const Key key = KeyOf(slot, num_tokens / hash_size);
        if (pool.HasThisKey(block, key)) return key;
        if (pool.HasKey(block) && pool.KeyTokens(block) < num_tokens) Promote(block, num_tokens);
        pool.Register(block, key, num_tokens);
        ReportStoredInside(slot, block, key, num_tokens);
        return key;
    }

    void ReportStoredInside(Int slot, Block block, const Key& key, Int num_tokens) {
        if (!replica.events) return;
        const Int start = num_tokens - hash_size, count = num_tokens / hash_size;
        AddStored(slot, hash_size, start, num_tokens, count > 1 ? requests.content[slot].at(count - 2) : Digest());
        pool.events.AddKey(key.digest, block, start);
    }

    Digest DigestOf(const Digests& digests, Int index) const {
        return digests.at((index + 1) * hashes_per_block_ - 1);
    }

    // Looks a digest up in all groups of the query; appends the blocks, one per group. False if some group has none.
    bool FindInGroups(const Query& query, const Digest& digest, BlockList* found) const {
        found->clear();
        for (const Int one : *query.groups) {
            const Key key{pool.pairs.Of(query.domain, one), digest};
            const Sought sought(key);
            Block block = pool.Find(sought, query.horizon);
            if (block == kNullBlock && query.tiers != nullptr) block = query.tiers->FindInTiers(sought);
            if (block == kNullBlock) return false;
            found->push_back(block);
        }
        return true;
    }

    void Promote(Block block, Int num_tokens) {
        if (!pool.HasKey(block)) return;
        Require(pool.KeyTokens(block) < num_tokens, "a block has a key of as many tokens or more");
        pool.DropKeys(block, kPromoted);
    }

    void OrderZero(Block block) {
        orders.zero_block.push_back(block);
        orders.zero_group.push_back(group);
    }

    void Extend(Int slot, Int count, BlockList* fresh) {
        const size_t first = fresh->size();
        Take(count, fresh, table[slot].empty() ? kNullBlock : table[slot].back());
        table[slot].insert(table[slot].end(), fresh->begin() + static_cast<std::ptrdiff_t>(first), fresh->end());
        if (spec.zero_new_blocks) {
            for (size_t i = first; i < fresh->size(); ++i) OrderZero((*fresh)[i]);
        }
    }

    void RedirectPartialHit(Int slot, BlockList* fresh) {
        const auto found = partial_hit.find(slot);
        if (found == partial_hit.end()) return;
        const auto [index, source] = found->second;
        partial_hit.erase(found);
        Take(1, fresh);
        const Block target = fresh->back();
        CopyIntoTable(slot, index, source, target);
        OrderZero(target);
    }

  private:
    const Int hashes_per_block_;

    void AddStored(Int slot, Int tokens_per_hash, Int start, Int end, const Digest& parent) {
        const CacheEvents::Row event{
            .kind = kStored, .group = group, .block_size = tokens_per_hash, .slot = slot, .start = start, .end = end};
        pool.AddStored(event, requests.domain[slot], parent);
    }

    BlockList freed_;
    Column registered_;  // indices in the table
    std::vector<Key> keys_;         // of these
    std::vector<uint64_t> hashes_;  // of the keys
};

}  // namespace kvplane
