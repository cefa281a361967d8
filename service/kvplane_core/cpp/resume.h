// Resumes requests of an earlier engine life with the blocks that they had: checks an image and applies it, see
// resume.py.
#pragma once

#include "busy.h"
#include "in_flight.h"
#include "managers/base.h"
#include "validate.h"

namespace kvplane {

// How the managers of groups accept the block tables of an image.
inline bool GroupManager::NormalizeTable(BlockList* blocks, const Progress& at) const {
    const Int read = FirstRead(at.computed), size = Size(*blocks);
    if (size < BlocksFor(at.computed)) return false;
    const auto behind = blocks->begin() + std::min(read, size);
    if (std::find(behind, blocks->end(), kNullBlock) != blocks->end()) return false;
    auto end = blocks->begin() + std::min(std::max<Int>(SkippedTokens(at.computed), 0) / block_size, size);
    for (auto one = end; one < behind; ++one) {
        if (*one == kNullBlock) end = one + 1;
    }
    std::fill(blocks->begin(), end, kNullBlock);
    return true;
}

inline Digest GroupManager::SealedPrefix(Int slot, Int index, const Progress&) const {
    const Digests& digests = requests.content[slot];
    const bool known = spec.is_cached() && (index + 1) * block_size <= digests.count() * hash_size;
    return known ? DigestOf(digests, index) : Digest();
}

inline void GroupManager::Resume(Int slot, BlockList blocks, const Progress& at, Int num_registered) {
    table[slot] = std::move(blocks);
    const BlockList& mine = table[slot];
    Int last = 0, first_bare = kForever;
    for (Int index = 0; index < Size(mine); ++index) {
        const Block block = mine[index];
        if (block == kNullBlock) continue;
        if (pool.HasKey(block) && !KeyFits(slot, index, at)) pool.DropKeys(block, kDropped);
        if (pool.HasKey(block) && pool.KeyTokens(block) == (index + 1) * block_size) {
            last = index + 1;
        } else {
            first_bare = std::min(first_bare, index);
        }
    }
    // A hit needs every block, and an eviction can leave one without a key.
    if (IsDownwardClosed()) last = std::min(last, first_bare);
    // Safe at any number, because a block with the key of its end is not registered twice.
    num_cached[slot] = num_registered == kNotTracked ? last : std::min(num_registered, Size(mine));
}

inline bool GroupManager::KeyFits(Int slot, Int index, const Progress&) const {
    const Block block = table[slot][index];
    const Int num_tokens = pool.KeyTokens(block), count = num_tokens / hash_size;
    const bool inside = index * block_size < num_tokens && num_tokens <= (index + 1) * block_size;
    const bool known = num_tokens % hash_size == 0 && count > 0 && count <= requests.content[slot].count();
    return spec.is_cached() && inside && known && pool.records[block].key == KeyOf(slot, count);
}

constexpr Int kLoadWrites = 1, kLoadOver = 2;  // values of Resume::loading

class Resumption {
  public:
    // `shown`: by block, the stamp that all ranks had when this engine life began.
    Resumption(Coordinator& coordinator, const Shown& shown)
        : blocks_(coordinator), requests_(coordinator.requests), pool_(coordinator.pool), shown_(shown) {}

    // Whether an image is accepted; else `refusal` says why it is not.
    bool Accepts(const Step& step) {
        const Part& part = step.parts.front();
        if (step.parts.size() > 1 || step.part != 0 || !step.last || !HasNothingElse(part))
            return Refuse("image alone", "parts", kNone);
        const Resume& image = *part.resume;
        if (!pool_.IsUnused() || requests_.num_running) return Refuse("image late", "resume.slot");
        if (static_cast<Int>(shown_.size) != pool_.num_blocks) return Refuse("no stamps", "resume.blocks");
        if (!AcceptsTables(image) || !AcceptsHeld(image) || !AcceptsStamps()) return false;
        const Block late = LeastBusyForOthers(image);
        if (late != kNullBlock) return Refuse("load may write", "resume.loading", 0, {late});
        if (pool_.split && !AcceptsSuperblocks()) return false;
        return !AnyKeyHasStamps() || Refuse("two stamps", "resume.blocks");
    }
    const Refusal& refusal() const { return refusal_; }

    // Applies an image that was accepted.
    void Apply(const Resume& image, InFlightTracker& tracker) {
        ForEachRow(image, [&](const Row& row) {
            Continue(row);
            return true;
        });
        ForEachHeld(image, [&](Int slot, const BlockList& blocks, bool loading) {
            Hold(slot, blocks, loading);
            tracker.held[slot] = blocks;
            return true;
        });
        ForgetOthers();
    }

  private:
    // One running request of the image.
    struct Row {
        Int slot;
        Progress at;
        Int single_group_hit;
        bool is_zeroed;  // its new blocks were zeroed, or written by a load or a launch
        std::vector<BlockList> tables;
        Column num_registered;
    };

    // Names the content of a block: equal names are equal content. `digest` of size 0: of no other entry.
    struct Name {
        Digest digest;
        Int group, owner, index;  // owner: the domain of a shared block, the slot of another one
        bool operator==(const Name&) const = default;
    };

    bool Refuse(const char* reason, const char* column, Int part = 0, Column values = {}) {
        refusal_ = {reason, column, part, kNone, std::move(values)};
        return false;
    }

    // Of sections without rows, which the validator has accepted: they have no other columns.
    static bool HasNothingElse(const Part& part) {
        const Cache& cache = part.cache;
        for (const auto& column : ColumnsOf(cache)) {
            if (!(cache.*column.of).empty()) return false;
        }
        const Budget& budget = part.budget;
        return part.facts.slot.empty() && !cache.reset && !cache.jobs_before && !cache.hits_checked &&
               part.news.slot.empty() && part.run.slot.empty() && part.run.victims.empty() &&
               part.run.on_refusal == kPreempt && part.admit.slot.empty() && part.admit.max_running == kUnlimited &&
               part.admit.on_refusal == kStop && !part.admit.only_if_no_preemption && part.peek.slot.empty() &&
               !part.peek.with_blocks && part.prefetch.slot.empty() && part.peers.gone.empty() &&
               part.peers.slot.empty() && part.retain.empty() && !part.with_hashes &&
               !part.with_tables && budget.tokens == kUnlimited && budget.input == kUnlimited && !budget.overhead;
    }

    // -- columns -----------------------------------------------------------------------------------------------------

    static Int Size(const Column& column) { return static_cast<Int>(column.size()); }
    static bool AreCounts(const Column& column) {
        return std::all_of(column.begin(), column.end(), [](Int one) { return one >= 0; });
    }
    static Int Total(const Column& counts) {  // a number that no column has where entries are too large
        Int total = 0;
        for (const Int one : counts) total = std::min(total + std::min(one, kForever / 2), kForever / 2);
        return total;
    }
    static bool AreDistinct(Column values) {
        std::sort(values.begin(), values.end());
        return std::adjacent_find(values.begin(), values.end()) == values.end();
    }
    // A block of the image; one that no pool has for a number that is none.
    static Block BlockOf(Int number) {
        return static_cast<Block>(number >= 0 && number <= kUnlimited ? number : kUnlimited);
    }
    static BlockList Slice(const Column& column, Int first, Int count) {
        BlockList found;
        for (Int at = first; at < first + count; ++at) found.push_back(BlockOf(column[static_cast<size_t>(at)]));
        return found;
    }

    bool AcceptsColumns(const Resume& image) {
        const Int rows = Size(image.slot), groups = static_cast<Int>(blocks_.managers.size());
        if (!AreDistinct(image.slot)) return Refuse("slot twice", "resume.slot");
        const std::pair<const char*, const Column*> columns[] = {{"resume.computed", &image.computed},
                                                                 {"resume.launch_end", &image.launch_end},
                                                                 {"resume.num_prompt", &image.num_prompt},
                                                                 {"resume.single_group_hit", &image.single_group_hit},
                                                                 {"resume.loading", &image.loading}};
        for (const auto& [name, column] : columns) {
            const bool given = Size(*column) == rows || (column->empty() && column != &image.computed);
            if (!given) return Refuse("row count", name, 0, {Size(*column), rows});
        }
        const auto is_known = [](Int one) { return one >= 0 && one <= kLoadOver; };
        if (!std::all_of(image.loading.begin(), image.loading.end(), is_known))
            return Refuse("loading value", "resume.loading");
        if (Size(image.num_blocks) != rows * groups || !AreCounts(image.num_blocks))
            return Refuse("table count", "resume.num_blocks", 0, {Size(image.num_blocks)});
        const Column& registered = image.num_cached_blocks;
        if ((!registered.empty() && registered.size() != image.num_blocks.size()) || !AreCounts(registered))
            return Refuse("table count", "resume.num_cached_blocks", 0, {Size(registered)});
        const Int total = Total(image.num_blocks);
        if (total != Size(image.blocks)) return Refuse("block count", "resume.blocks", 0, {Size(image.blocks), total});
        for (const Int slot : image.slot) {
            if (!requests_.IsLive(slot) || requests_.held[slot] || !requests_.num_tokens[slot])
                return Refuse("not waiting", "resume.slot", 0, {slot});
        }
        return ForEachRow(image, [&](const Row& row) { return AcceptsProgress(row); });
    }

    bool AcceptsProgress(const Row& row) {
        const Int longest = blocks_.spec.max_model_len, known = requests_.num_tokens[row.slot];
        const auto& [computed, launch_end, num_prompt, loading] = row.at;
        if (computed < 1 || computed > longest)
            return Refuse("image computed", "resume.computed", 0, {computed, longest});
        if (launch_end < computed || launch_end > longest)
            return Refuse("image launch", "resume.launch_end", 0, {launch_end, computed, longest});
        if (num_prompt < 1 || num_prompt > known)
            return Refuse("image prompt", "resume.num_prompt", 0, {num_prompt, known});
        const Int single = row.single_group_hit;
        if (single >= 0 && single <= longest) return true;
        return Refuse("image single", "resume.single_group_hit", 0, {single, longest});
    }

    // -- tables ------------------------------------------------------------------------------------------------------

    bool AcceptsTables(const Resume& image) {
        if (!AcceptsColumns(image)) return false;
        const bool fit = ForEachRow(image, [&](const Row& row) {
            for (size_t group = 0; group < row.tables.size(); ++group) {
                if (!AcceptsTable(row, group)) return false;
            }
            return true;
        });
        return fit && AreBlocks("resume.blocks", names_);
    }

    bool AcceptsTable(const Row& row, size_t group) {
        const GroupManager& manager = *blocks_.managers[group];
        BlockList table = row.tables[group];
        const auto number = static_cast<Int>(group);
        if (!manager.NormalizeTable(&table, row.at))
            return Refuse("image lacks", "resume.blocks", 0, {row.slot, number, row.at.computed});
        std::set<Block> seen;
        for (const Block block : table) {
            if (block != kNullBlock && !seen.insert(block).second)
                return Refuse("block twice", "resume.blocks", 0, {row.slot, number});
        }
        for (size_t index = 0; index < table.size(); ++index) {
            if (table[index] == kNullBlock) continue;
            const Digest digest = manager.SealedPrefix(row.slot, static_cast<Int>(index), row.at);
            const Name name = digest.size ? Name{digest, number, requests_.domain[row.slot], 0}
                                          : Name{digest, number, row.slot, static_cast<Int>(index)};
            if (names_.try_emplace(table[index], name).first->second != name)
                return Refuse("other content", "resume.blocks", 0, {table[index], row.slot, number});
        }
        return true;
    }

    bool AcceptsHeld(const Resume& image) {
        const Int slots = Size(image.held_slot);
        const std::set<Int> taken(image.slot.begin(), image.slot.end());
        const auto is_taken = [&](Int slot) { return taken.contains(slot); };
        if (!AreDistinct(image.held_slot) || std::any_of(image.held_slot.begin(), image.held_slot.end(), is_taken))
            return Refuse("slot twice", "resume.held_slot");
        if (Size(image.held_count) != slots)
            return Refuse("held count", "resume.held_count", 0, {Size(image.held_count), slots});
        if (!image.held_loading.empty() && Size(image.held_loading) != slots)
            return Refuse("held count", "resume.held_loading", 0, {Size(image.held_loading), slots});
        const Int total = Total(image.held_count);
        if (total != Size(image.held_blocks) || !AreCounts(image.held_count))
            return Refuse("held sum", "resume.held_blocks", 0, {Size(image.held_blocks), total});
        const bool fit = ForEachHeld(image, [&](Int slot, const BlockList& blocks, bool) {
            if (slot < 0 || slot >= kMaxSlots) return Refuse("no slot", "resume.held_slot", 0, {slot});
            if (std::set<Block>(blocks.begin(), blocks.end()).size() != blocks.size())
                return Refuse("held twice", "resume.held_blocks", 0, {slot});
            for (const Block block : blocks) {
                const auto name = names_.find(block);
                if (name != names_.end() && !name->second.digest.size)
                    return Refuse("written", "resume.held_blocks", 0, {block});
            }
            held_.insert(blocks.begin(), blocks.end());
            return true;
        });
        return fit && AreBlocks("resume.held_blocks", held_);
    }

    static Block IdOf(Block block) { return block; }
    static Block IdOf(const std::pair<const Block, Name>& entry) { return entry.first; }

    template <typename Blocks>
    bool AreBlocks(const char* column, const Blocks& blocks) {
        for (const auto& one : blocks) {
            const Block block = IdOf(one);
            const auto& kept = pool_.reserved;
            const bool is_kept = std::find(kept.begin(), kept.end(), block) != kept.end();
            if (block == kNullBlock || block >= pool_.num_blocks || is_kept) return Refuse("no block", column);
        }
        return true;
    }

    // Each block must have, on all ranks, the same stamp of an earlier engine life, and no other block may have it.
    bool AcceptsStamps() {
        all_ = held_;
        for (const auto& [block, name] : names_) all_.insert(block);
        for (const Block block : all_) stamps_.insert(shown_.stamps[block]);
        const auto is_proven = [&](uint64_t stamp) { return stamp && EpochOf(stamp) < pool_.epoch; };
        if (!std::all_of(stamps_.begin(), stamps_.end(), is_proven)) return Refuse("unproven", "resume.blocks");
        return stamps_.size() == all_.size() || Refuse("two stamps", "resume.blocks");
    }

    bool AnyKeyHasStamps() const {
        for (Block block = 0; !stamps_.empty() && block < pool_.num_blocks; ++block) {
            if (pool_.HasKey(block) && stamps_.contains(pool_.stamp[block]) && !all_.contains(block)) return true;
        }
        return false;
    }

    // States begin their superblocks, and no other block of these is in use.
    bool AcceptsSuperblocks() {
        const auto size = static_cast<Block>(blocks_.spec.blocks_per_state);
        std::set<Block> states, others;
        for (const auto& [block, name] : names_) {
            if (blocks_.managers[static_cast<size_t>(name.group)]->spec.is_state()) states.insert(block);
        }
        for (const Block block : states) {
            if (block % size) return Refuse("state inside", "resume.blocks", 0, {size});
        }
        for (const auto* blocks : {&all_, &pool_.busy}) {
            for (const Block block : *blocks) {
                if (!states.contains(block)) others.insert(block / size);
            }
        }
        for (const Block block : states) {
            if (others.contains(block / size)) return Refuse("state shared", "resume.blocks", 0, {block});
        }
        return true;
    }

    // The least block that a load of an earlier life may write, though the image does not mark its request as loading.
    Block LeastBusyForOthers(const Resume& image) {
        std::set<Block> found;
        const auto note = [&](const BlockList& blocks) {
            for (const Block block : blocks) {
                if (pool_.busy.contains(block)) found.insert(block);
            }
            return true;
        };
        if (pool_.busy.empty()) return kNullBlock;
        ForEachRow(image, [&](const Row& row) {
            for (size_t group = 0; !row.at.loading && group < row.tables.size(); ++group) {
                BlockList table = row.tables[group];
                blocks_.managers[group]->NormalizeTable(&table, row.at);
                note(table);
            }
            return true;
        });
        ForEachHeld(image, [&](Int slot, const BlockList& blocks, bool loading) {
            return loading || requests_.IsLive(slot) || note(blocks);
        });
        return found.empty() ? kNullBlock : *found.begin();
    }

    // Visits the rows until `visit` returns false; returns what it returned last.
    template <typename F>
    bool ForEachRow(const Resume& image, F&& visit) const {
        const size_t groups = blocks_.managers.size();
        Int start = 0;
        for (size_t number = 0; number < image.slot.size(); ++number) {
            const Int slot = image.slot[number], computed = image.computed[number];
            const Int loading = Entry(image.loading, number, 0);
            Row row{slot,
                    {computed, Entry(image.launch_end, number, computed),
                     Entry(image.num_prompt, number, requests_.num_tokens[slot]), loading == kLoadWrites},
                    Entry(image.single_group_hit, number, 0),
                    loading == 0,
                    {},
                    {}};
            for (size_t at = number * groups; at < (number + 1) * groups; ++at) {
                row.tables.push_back(Slice(image.blocks, start, image.num_blocks[at]));
                row.num_registered.push_back(Entry(image.num_cached_blocks, at, kNotTracked));
                start += image.num_blocks[at];
            }
            if (!visit(row)) return false;
        }
        return true;
    }
    template <typename F>
    static bool ForEachHeld(const Resume& image, F&& visit) {
        Int start = 0;
        for (size_t number = 0; number < image.held_slot.size(); ++number) {
            const Int count = image.held_count[number];
            const BlockList blocks = Slice(image.held_blocks, start, count);
            if (!visit(image.held_slot[number], blocks, Entry(image.held_loading, number, 0) != 0)) return false;
            start += count;
        }
        return true;
    }

    // -- apply -------------------------------------------------------------------------------------------------------

    void Continue(const Row& row) {
        const Int slot = row.slot;
        requests_.Start(slot);
        requests_.computed[slot] = row.at.computed;
        requests_.ends_at[slot] = row.at.launch_end;
        requests_.num_prompt[slot] = row.at.num_prompt;
        requests_.single_group_hit[slot] = row.single_group_hit;
        if (row.at.loading) requests_.loading.insert(slot);
        if (!row.is_zeroed) requests_.not_zeroed.insert(slot);
        for (size_t group = 0; group < row.tables.size(); ++group) {
            GroupManager& manager = *blocks_.managers[group];
            BlockList table = row.tables[group];
            Require(manager.NormalizeTable(&table, row.at), "an image was not checked");
            if (pool_.split) pool_.split->Assign(pool_, table, manager.spec.is_state());
            Take(table);
            manager.Resume(slot, std::move(table), row.at, row.num_registered[group]);
        }
        requests_.InvalidateFastPath(slot);
    }

    void Hold(Int slot, const BlockList& blocks, bool loading) {
        if (!requests_.IsLive(slot)) {
            requests_.Add(slot, 0, 0);
            requests_.domain[slot] = pool_.pairs.DomainOf(std::string());
            blocks_.Grow(slot);
            requests_.held[slot] = 1;
        }
        if (loading || !requests_.held[slot]) requests_.loading.insert(slot);
        if (pool_.split) pool_.split->Assume(pool_, blocks);
        Take(blocks);
    }

    void Take(const BlockList& blocks) {
        Column ours;  // busy blocks: this request's load may write them
        for (const Block block : blocks) {
            pool_.Touch(block);
            if (pool_.busy.contains(block)) ours.push_back(block);
        }
        std::sort(ours.begin(), ours.end());
        ReleaseBusy(pool_, ours);
        for (const Block block : blocks) {
            if (block == kNullBlock) continue;
            all_.insert(block);
            stamps_.insert(shown_.stamps[block]);
            if (EpochOf(pool_.stamp[block]) != pool_.epoch) pool_.stamp[block] = shown_.stamps[block];  // not restamped
        }
    }

    // Removes the stamps of the image from all other blocks, which have no keys. Two services may have begun one epoch,
    // and the memory obeyed the other one: a stamp that this pool gave to one block is then that of another there.
    void ForgetOthers() {
        for (Block block = kNullBlock + 1; block < pool_.num_blocks; ++block) {
            if (stamps_.contains(pool_.stamp[block]) && !all_.contains(block)) pool_.stamp[block] = 0;
        }
    }

    Coordinator& blocks_;
    Requests& requests_;
    BlockPool& pool_;
    const Shown& shown_;
    Refusal refusal_;
    std::map<Block, Name> names_;    // of the blocks in tables
    std::set<Block> held_, all_;     // blocks of held slots, of the image: what is checked, or what was applied
    std::set<uint64_t> stamps_;      // that the memory has of all
};

}  // namespace kvplane
