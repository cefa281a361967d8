// Checks the lists of free blocks: their links, and what their readers and policies recorded.
#pragma once

#include "facts.h"

namespace kvplane {

// Whether exactly the first entries of a list are seen, in the order of their numbers.
class SeenCheck {
  public:
    // `list`: its links were checked.
    template <typename List>
    static Slices Run(const Seen& seen, const List& list, const char* invariant, Pace& pace) {
        uint32_t entry = 0;
        Int before = std::numeric_limits<Int>::min();
        for (Int count = 0; count < seen.count_; ++count) {
            entry = count ? list.Following(entry) : list.First();
            if (entry == list.End() || !seen.Has(entry) || seen.number_[entry] <= before)
                Fail(invariant, "entry ", entry, " is number ", count, " of a list, and is not seen, or out of order");
            before = seen.number_[entry];
            if (pace.Spend(Pace::kFar)) co_yield Pause();
        }
        if (seen.count_ && entry != seen.last_)
            Fail(invariant, "entry ", entry, " is the last one that is seen, recorded ", seen.last_);
        Int count = 0;
        for (const Int number : seen.number_) {
            count += number != 0;
            if (pace.Spend(Pace::kNear)) co_yield Pause();
        }
        if (count != seen.count_) Fail(invariant, count, " entries are seen, the count says ", seen.count_);
        for (const auto& [number, one] : seen.changed_) {
            if (!seen.Has(one) || seen.number_[one] != number)
                Fail(invariant, "entry ", one, " changed, and is not seen");
            if (pace.Spend(Pace::kFar)) co_yield Pause();
        }
    }
};

// Whether each entry of priority lists leads to its place in them.
class PriorityCheck {
  public:
    static Slices Run(const PriorityLists& lists, const char* invariant, std::string where, Pace& pace) {
        const size_t counted = lists.places_.size();
        bool is_sound = lists.order_.size() == counted;
        for (const auto& [place, one] : lists.order_) {
            const auto found = lists.places_.find(one);
            is_sound = is_sound && found != lists.places_.end() && found->second == place;
            if (pace.Spend(Pace::kLookUp)) co_yield Pause();
        }
        if (!is_sound)
            Fail(invariant, where, lists.order_.size(), " retained, counted ", counted, ", or one in two lists");
    }
};

class ListChecks {
  public:
    explicit ListChecks(CheckedFacts& facts) : facts_(facts), pool_(facts.replica.blocks.pool) {}

    // Checks that the links agree in both directions and with the count; marks each free block.
    Slices Free() {
        if (!pool_.split) return Links(pool_.free, facts_.is_free, kLoose);
        return Split();
    }

    // Checks what a reader of the list has seen, and what the policy recorded.
    Slices Policy() {
        for (Slices part = SeenCheck::Run(pool_.free.seen_, pool_.free, kFreeList, facts_.pace); part.Next();)
            co_yield Pause();
        for (const auto& [block, once] : pool_.free.superseded) {
            if (block >= facts_.num_blocks || !pool_.HasKey(block))
                Fail(kFreeList, "block ", block, " was copied and has no key");
            if (facts_.pace.Spend(Pace::kFar)) co_yield Pause();
        }
    }

    // Marks the free blocks that are retained.
    Slices RetainedFree() {
        const RetainedBlocks& retained = pool_.retained;
        for (Slices part = PriorityCheck::Run(retained, kRetained, "free blocks: ", facts_.pace); part.Next();)
            co_yield Pause();
        for (const auto& [place, block] : retained.order()) {
            if (block >= facts_.num_blocks || facts_.is_free[block])
                Fail(kRetained, "block ", block, " is retained, and in another list or beyond the pool");
            facts_.is_free[block] = kLoose;
            if (facts_.pace.Spend(Pace::kFar)) co_yield Pause();
        }
    }

    // Checks that exactly the free blocks with a retained key are in the lists of their priorities, and that names,
    // keys and counts agree. The index was checked.
    Slices Retained() {
        for (Slices part = Names(); part.Next();) co_yield Pause();
        for (Slices part = Owners(); part.Next();) co_yield Pause();
        for (Slices part = Priorities(); part.Next();) co_yield Pause();
    }

    // Checks that retained keys are somewhere. The tiers were checked.
    Slices RetainedAreThere() {
        const RetainedBlocks& retained = pool_.retained;
        if (!retained.is_active_ || !retained.lost_.empty()) co_return;
        for (const auto& [key, numbers] : retained.of_key_) {
            if (IsAbsent(key)) Fail(kRetained, "a key is retained that no block and no tier has");
            if (facts_.pace.Spend(2 * Pace::kLookUp)) co_yield Pause();
        }
    }

  private:
    static constexpr const char *kFreeList = "free_list", *kRetained = "retained", *kSuperblocks = "superblocks";
    enum : uint8_t { kHeld, kLoose, kLooseCached, kUnderState };  // where a block is; not held: it is free

    template <typename Marks>
    Slices Links(const FreeList& list, Marks& marks, uint8_t mark) {
        const auto name = [&](Block block) {
            return block == list.sentinel_ ? "the sentinel"
                                           : block == list.divider_ ? "the divider" : "block " + Words(block);
        };
        const bool has_places = !list.place_.empty();
        Int count = 0, num_placed = 0;
        bool is_behind = !list.is_divided_;  // whether the divider was passed
        Block before = list.sentinel_;
        do {
            const Block block = list.next_[before];
            if (block > list.divider_) Fail(kFreeList, "free list: ", name(before), " leads to ", block);
            const bool is_block = block < list.sentinel_;
            if (is_block ? marks[block] != 0 : block == list.divider_ && is_behind)
                Fail(kFreeList, "free list: ", name(block), " twice");
            if (list.previous_[block] != before)
                Fail(kFreeList, "free list: ", name(block), " does not point back to ", before);
            if (block == list.divider_) is_behind = true;
            if (is_block) {
                marks[block] = mark;
                ++count;
                const auto place = is_behind ? FreeList::kBehind : FreeList::kBefore;
                if (has_places && (pool_.HasKey(block) ? list.place_[block] != place : !list.place_[block]))
                    Fail(kFreeList, "free list: block ", block, " is on the other side of the divider than recorded");
            }
            before = block;
            if (facts_.pace.Spend(2 * Pace::kFar)) co_yield Pause();
        } while (before != list.sentinel_);
        if (!is_behind) Fail(kFreeList, "free list: the divider is not in it");
        if (count != list.count_) Fail(kFreeList, "free list: ", count, " blocks, count says ", list.count_);
        for (const uint8_t place : list.place_) {
            num_placed += place != FreeList::kHeld;
            if (facts_.pace.Spend(Pace::kNear)) co_yield Pause();
        }
        if (has_places && num_placed != count)
            Fail(kFreeList, "free list: ", count, " blocks, ", num_placed, " have a place in it");
    }

    // Checks both lists of a split pool, and which superblocks have states; marks each free block, and the blocks
    // under a held state, which nothing holds and which have no key.
    Slices Split() {
        const SplitList& list = *pool_.split;
        Zeros<uint8_t> whole(list.held_.size());
        for (Slices part = Links(pool_.free, facts_.is_free, kLoose); part.Next();) co_yield Pause();
        for (Slices part = Links(list.whole_, whole, kLoose); part.Next();) co_yield Pause();
        for (Slices part = Links(list.bare_, facts_.is_free, kLoose); part.Next();) co_yield Pause();
        for (Slices part = Links(list.cached_, facts_.is_free, kLooseCached); part.Next();) co_yield Pause();
        Int num_held = 0;
        for (Block number = 0; number < list.held_.size(); ++number) {
            num_held += number ? list.held_[number] : 0;
            Superblock(list, number, whole[number] != 0);
            if (facts_.pace.Spend(2 * Pace::kFar * Int{list.size_})) co_yield Pause();
        }
        if (num_held != list.num_held_)
            Fail(kSuperblocks, num_held, " blocks are held, the count says ", list.num_held_);
    }

    void Superblock(const SplitList& list, Block number, bool is_whole) {
        const Block first = number * list.size_, end = first + list.size_;
        const bool has_state = list.has_state_[number] != 0;
        Int held = 0;
        for (Block block = first; block < end; ++block) held += pool_.references[block] != 0;
        if (list.held_[number] != held || is_whole == (held > 0))
            Fail(kSuperblocks, "superblock ", number, ": ", held, " blocks held, the count says ", list.held_[number],
                 ", whole: ", is_whole);
        BlockList wrong;
        for (Block block = first; block < end; ++block) {
            const uint8_t mark = facts_.is_free[block];
            const auto kept = pool_.HasKey(block) ? SplitList::kCached : SplitList::kBare;
            const auto expected = mark ? kept : SplitList::kNowhere;
            const auto walked = mark == kLoose ? SplitList::kBare : SplitList::kCached;
            if (list.place_[block] != expected || (mark && (walked != expected || !held)))
                Fail(kSuperblocks, "block ", block, " is wrongly among those of cut superblocks");
            if (pool_.HasKey(block) && IsOfState(pool_.records[block].key) != has_state)
                Fail(kSuperblocks, "block ", block, " has a key of another kind than its superblock");
            const bool is_held = pool_.references[block] && !pool_.busy.contains(block);
            if (has_state && block != first && (is_held || pool_.HasKey(block))) wrong.push_back(block);
        }
        if (!wrong.empty()) Fail(kSuperblocks, "blocks ", wrong, " are under a state and in use");
        for (Block block = first; block < end; ++block) {
            const bool is_under = held && has_state && block != first;
            if ((is_under || !held) && !pool_.references[block]) facts_.is_free[block] = kUnderState;
        }
    }

    bool IsOfState(const Key& key) const {
        const auto group = static_cast<size_t>(pool_.pairs.Group(key.pair));
        return facts_.replica.spec.groups[group].is_state();
    }

    // Names and keys lead to each other.
    Slices Names() {
        const RetainedBlocks& retained = pool_.retained;
        size_t named = 0, leading = 0;
        for (const auto& [number, one] : retained.each_) {
            bool leads = !one.keys.empty();
            for (const auto& [position, kept] : one.keys) {
                const auto found = retained.of_key_.find(kept.key);
                leads = leads && found != retained.of_key_.end() && found->second.contains(number) &&
                        found->second.at(number) == position;
                if (facts_.pace.Spend(Pace::kLookUp)) co_yield Pause();
            }
            if (!leads) Fail(kRetained, "the keys of '", one.owner, "' do not lead to the name");
            named += one.keys.size();
        }
        for (const auto& [key, numbers] : retained.of_key_) {
            leading += numbers.size();
            if (facts_.pace.Spend(Pace::kFar)) co_yield Pause();
        }
        if (leading != named || retained.num_named_ != static_cast<Int>(named))
            Fail(kRetained, "a key leads to a name that does not retain it, or keys are not counted");
    }

    bool IsAbsent(const Key& key) const {
        if (pool_.index.Find(pool_.records, key) != kNoRecord) return false;
        const std::vector<Tier*>& holders = pool_.retained.holders;
        return std::none_of(holders.begin(), holders.end(), [&](const Tier* one) { return one->HasOrWrites(key); });
    }

    // The keys of each owner are counted in the places where it retains them.
    Slices Owners() {
        const RetainedBlocks& retained = pool_.retained;
        std::map<std::string, Column> counted;
        for (const auto& [key, numbers] : retained.of_key_) {
            std::map<std::string, Int> firsts;
            for (const auto& [number, position] : numbers) {
                const Retention& one = retained.each_.at(number);
                Int& first = firsts.try_emplace(one.owner, retained.num_places()).first->second;
                first = std::min(first, one.keys.at(position).place);
                if (facts_.pace.Spend(Pace::kLookUp)) co_yield Pause();
            }
            for (const auto& [owner, first] : firsts) {
                Column& mine = counted.try_emplace(owner, retained.num_places()).first->second;
                for (Int place = first; place < retained.num_places(); ++place) ++mine[static_cast<size_t>(place)];
            }
        }
        for (const auto& [owner, used] : retained.used_) {
            const Column mine = counted[owner];
            if (mine != used) Fail(kRetained, "the owner '", owner, "' has ", used, " keys, counted ", mine);
        }
        if (counted.size() != retained.used_.size()) Fail(kRetained, "an owner's keys are not counted");
    }

    // The free blocks with a retained key have its priority, and no others have one.
    Slices Priorities() {
        const RetainedBlocks& retained = pool_.retained;
        for (const auto& [place, block] : retained.order()) {
            const Int priority = retained.is_active_ ? retained.PriorityOf(block) : PriorityLists::kNone;
            if (priority != place.first)
                Fail(kRetained, "block ", block, " is retained with priority ", place.first, ", expected ", priority);
            if (facts_.pace.Spend(Pace::kLookUp)) co_yield Pause();
        }
        for (const auto& [key, numbers] : retained.of_key_) {
            if (!retained.is_active_ || retained.PriorityOf(key, kDevice) == PriorityLists::kNone) continue;
            for (const Block block : pool_.BlocksOf(key)) {
                if (!pool_.references[block] && retained.PriorityAt(block) == PriorityLists::kNone)
                    Fail(kRetained, "block ", block, " is free and not retained, as its key is");
                if (facts_.pace.Spend(Pace::kLookUp)) co_yield Pause();
            }
        }
    }

    CheckedFacts& facts_;
    const BlockPool& pool_;
};

}  // namespace kvplane
