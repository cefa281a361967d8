// Allocates blocks for a request in all groups of a replica, or in none.
#pragma once

#include "eviction.h"
#include "lookup.h"
#include "managers/full.h"
#include "managers/mamba.h"
#include "managers/uncached.h"
#include "managers/window.h"

namespace kvplane {

struct Admission {
    Int slot, num_new;
    const Hit* hit;
    Int num_external = 0, lookahead = 0, num_encoder = 0;
    bool delay_caching = false, full_fit = false;
    Int leave_free = 0, watermark = 0;
    uint64_t loaded_groups = ~uint64_t{0};
};

struct Growth {
    Int num_new, lookahead, in_flight;
    bool delay_caching = false;
    Int leave_free = 0;
    bool full_fit = false;
};

struct FastPathBounds {
    Int blocks, window, keys;
};

class Coordinator {
  public:
    explicit Coordinator(const Spec& replica_spec)
        : spec(replica_spec),
          pool(replica_spec),
          tiers(replica_spec, pool),
          boundaries(replica_spec, replica_spec.groups[0]) {
        for (size_t number = 0; number < spec.groups.size(); ++number)
            managers.push_back(MakeManager(static_cast<Int>(number)));
        lookup = std::make_unique<PrefixLookup>(spec, managers);
        only_tables_grow_ = true;
        for (const auto& one : managers) {
            const Int kind = one->spec.kind;
            only_tables_grow_ &=
                (kind == kFull || kind == kMla || kind == kWindow) && one->block_size == spec.hash_block_size;
            has_states |= one->spec.is_state();
            checkpoints_single_group_hits |= one->spec.checkpoints_single_group_hits != 0;
            hits_end_in_prompt_ |= kind == kRetainedWindow && spec.safe;
            if (kind == kAlignedState) checkpoints_.emplace_back(spec, one->spec);
            if (one->spec.is_cached()) caching_.push_back(one.get());
            pool.Reserve(one->spec.sink_blocks);
        }
        const bool any_length = managers.size() == 1 || spec.partial_hits || spec.drops_last_block();
        cache_unit_ = any_length ? 1 : spec.scheduler_block_size;
        unfinalized_ = std::max<Int>(0, spec.prefill_lookahead - 1);
    }

    // -- look-up -----------------------------------------------------------------------------------------------------

    Hit FindHit(Int slot, Int limit = kForever) const {
        return lookup->Find(requests.content[slot], requests.domain[slot], MostHit(slot), kInside, limit);
    }

    // How many tokens of a request a hit may have.
    Int MostHit(Int slot) const {
        const Int most = requests.skip_reading[slot] ? 0 : requests.num_tokens[slot] - 1;
        return hits_end_in_prompt_ ? std::min(most, requests.num_prompt[slot]) : most;
    }

    bool HitIsReady(const Hit& hit) const {
        return std::all_of(managers.begin(), managers.end(), [&](const auto& one) {
            return one->HitIsReady(hit.blocks[static_cast<size_t>(one->group)], hit.num_tokens);
        });
    }

    bool CanRewind(Int slot, Int num_computed, Int appended = 0) const {
        if (has_states && num_computed < requests.ShortestState(slot, appended)) return false;
        return std::all_of(managers.begin(), managers.end(),
                           [&](const auto& one) { return one->CanRewind(slot, num_computed); });
    }

    void Rewind(Int slot, Int num_computed) {
        for (const auto& one : managers) one->Rewind(slot, num_computed);
    }

    // Whether the launch of the chunk [start, end) also writes the states from which a repeat of the first
    // `prefill_end` tokens continues, in all groups of states.
    bool WritesCheckpoints(Int start, Int end, Int prefill_end) const {
        const Int position = boundaries.LastBoundary(prefill_end, spec.hit_alignment());
        return !checkpoints_.empty() && std::all_of(checkpoints_.begin(), checkpoints_.end(), [&](const auto& rule) {
            return rule.CanWrite(start, end, position);
        });
    }

    // -- allocation --------------------------------------------------------------------------------------------------

    Int FreeWanted(const Admission& admission) const {
        const Int total = Known(admission), num_main = total + admission.num_new;
        const Int num_slots = std::min(num_main + admission.lookahead, spec.max_model_len);
        const Need need{admission.slot, num_slots, num_main, total, admission.hit->num_tokens, admission.num_encoder};
        // The blocks of this row are counted last: a split pool leaves superblocks for the states that were.
        const Int whole = admission.full_fit ? BlocksOfAll(admission.slot, total, admission.hit->num_tokens,
                                                           admission.hit, admission.num_encoder)
                                             : 0;
        const Int wanted = std::max(whole, Count(need, admission.hit) + admission.leave_free);
        return wanted + admission.watermark;
    }

    // The caller has checked that FreeWanted blocks are free.
    void Admit(const Admission& admission, Rows* fresh) {
        const Int slot = admission.slot, local = admission.hit->num_tokens, total = Known(admission);
        const Int num_main = total + admission.num_new,
                  num_slots = std::min(num_main + admission.lookahead, spec.max_model_len);
        const size_t zeroes = orders.zero_block.size();
        requests.computed[slot] = total;
        if (spec.policy != kLru) requests.hit_end[slot] = local;
        if (pool.hazard) pool.hazard->NoteAdmitted(requests, pool.pairs.NameOf(requests.domain[slot]), slot, local);
        AdoptHit(admission, local, total);
        Empty(fresh);
        for (size_t number = 0; number < managers.size(); ++number)
            managers[number]->Allocate(slot, num_slots, num_main, admission.num_encoder, &(*fresh)[number]);
        if (admission.num_external && admission.delay_caching && spec.safe)
            LeaveToLoad(admission, local, total, zeroes);
        requests.ends_at[slot] = num_main;
        if (!admission.delay_caching) Register(slot, std::min(num_main, requests.num_tokens[slot]));
        requests.InvalidateFastPath(slot);
    }

    // Returns 0; or, if too few blocks are free, how many had to be, and allocates nothing.
    Int Extend(Int slot, const Growth& growth, Rows* fresh) {
        Empty(fresh);
        const Int computed = requests.computed[slot];
        if (const Int wanted = growth.full_fit ? BlocksOfAll(slot, computed, computed, nullptr, 0) : 0;
            wanted > pool.num_free())
            return wanted;
        const Int num_main = computed + growth.num_new,
                  num_slots = std::min(num_main + growth.lookahead, spec.max_model_len);
        const Int processed = std::max<Int>(0, computed - growth.in_flight);
        const bool slides = processed >= requests.window_bound[slot] || growth.leave_free > 0;
        bool grows = slides || num_slots > requests.alloc_bound[slot];
        if (grows) {
            Int refused = 0;
            if (only_tables_grow_ && requests.alloc_bound[slot] && !slides && !growth.delay_caching) {
                refused = AppendBlocks(slot, num_slots, num_main, fresh);
                grows = false;
            } else {
                refused = GrowTables(slot, num_slots, num_main, processed, growth.leave_free, fresh);
            }
            if (refused) {
                requests.InvalidateFastPath(slot);
                return refused;
            }
        }
        requests.ends_at[slot] = num_main;
        const Int known = std::min(num_main, requests.num_tokens[slot]);
        const bool registers = known >= requests.register_bound[slot] && !growth.delay_caching;
        if (registers) Register(slot, known);
        if (grows || (registers && has_states)) {
            FindFastPath(slot, processed, num_main);
        } else if (registers) {
            FindNextKey(slot, num_main);
        }
        return 0;
    }

    // Fetches what `Extend` will read, see `GroupManager::Fetch`.
    void Fetch(Int slot, int stage) const {
        const Int processed = std::max<Int>(0, requests.computed[slot] - requests.in_flight[slot]);
        for (const auto& one : managers) one->Fetch(slot, stage, processed);
    }

    void ReleaseSkipped(Int slot, Int num_processed) {
        if (requests.loading.contains(slot)) return;
        const Int processed = std::min(num_processed, requests.computed[slot] - requests.in_flight[slot]);
        for (const auto& one : managers) one->ReleaseSkipped(slot, std::max<Int>(0, processed));
        requests.InvalidateFastPath(slot);
    }

    // The bounds of the fast path, with so many tokens computed by executed steps.
    FastPathBounds BoundsOf(Int slot, Int processed) const {
        FastPathBounds bounds{kForever, kForever, RegisterBoundOf(slot)};
        for (const auto& one : managers) {
            bounds.blocks = std::min(bounds.blocks, one->AllocBound(slot));
            bounds.window = std::min(bounds.window, one->WindowBound(slot, processed));
        }
        return bounds;
    }

    void ZeroUnloaded(Int slot, Int num_tokens) {
        for (const auto& one : managers) one->ZeroUnloaded(slot, num_tokens);
    }

    // Drops the keys of a hit's blocks, whose superblocks a request needs whole for its states; false if none has one.
    bool GiveUp(const Hit& hit) {
        bool any = false;
        for (const BlockList& row : hit.blocks) {
            for (const Block block : row) any |= block != kNullBlock && pool.DropKeys(block, kDropped);
        }
        return any;
    }

    Int BlocksWhenAlone(Int num_tokens, Int num_encoder) const {
        Counted counted;
        for (const auto& one : managers) counted.Add(*one, one->BlocksAlone(num_tokens, num_encoder));
        return pool.split ? pool.split->InBlocks(counted.blocks, counted.states) : counted.blocks;
    }

    // -- prefix cache ------------------------------------------------------------------------------------------------

    void Register(Int slot, Int num_tokens) {
        if (!spec.enable_caching) return;
        const Positions replayed = ReplayBoundaries(spec, requests.num_prompt[slot]);
        for (GroupManager* one : caching_) one->RegisterBlocks(slot, Share(*one, num_tokens), replayed);
    }

    // Fetches what the registration of the key of the request's last full block will read.
    void ExpectKey(Int slot, const Digest& digest) const {
        for (const GroupManager* one : caching_)
            pool.Expect(Key{pool.pairs.Of(requests.domain[slot], one->group), digest});
    }

    // Registers blocks that earlier steps wrote, so that look-ups of this step find them.
    void Commit(Int slot, Int num_tokens) {
        Register(slot, num_tokens);
        for (const auto& one : managers) one->NoteWritten(slot);
    }

    template <typename Blocks>
    void RegisterAgain(const Blocks& blocks) {
        if (!spec.safe) return;
        const std::set<Block> given(blocks.begin(), blocks.end());
        for (const auto& one : managers) one->RegisterAgain(given);
    }

    // -- release -----------------------------------------------------------------------------------------------------

    void Free(Int slot) {
        for (const auto& one : managers) {
            taken_.clear();
            one->TakeAll(slot, &taken_);
            pool.Release(taken_.rbegin(), taken_.rend());
        }
    }

    // Records for HAZARD that a request is the last user of its blocks, before it releases them.
    void NoteReleased(Int slot) {
        if (!pool.hazard) return;
        for (const auto& one : managers) {
            const auto index_of = [](size_t at) { return static_cast<Int>(at); };
            pool.hazard->NoteOwners(slot, one->table[slot], one->block_size, index_of);
        }
        pool.hazard->prompts.erase(slot);
    }

    BlockList TakeAll(Int slot) {
        BlockList blocks;
        for (const auto& one : managers) one->TakeAll(slot, &blocks);
        return blocks;
    }

    // -- steps -------------------------------------------------------------------------------------------------------

    void Grow(Int slot) {
        for (const auto& one : managers) one->Grow(slot);
    }

    void NewStep() {
        for (const auto& one : managers) one->NewStep();
    }

    BlockList TakeCopies() {
        BlockList held;
        for (const auto& one : managers) {
            for (const auto& [source, target] : one->copies) {
                held.push_back(source);
                held.push_back(target);
            }
            one->copies.clear();
        }
        return held;
    }

    void TakeOrders(Orders* into) {
        pool.TakeStamped(&orders.stamp_block);
        for (const Block block : orders.stamp_block) orders.stamp.push_back(pool.stamp[block]);
        std::swap(*into, orders);
        orders.Clear();
    }

    const Spec& spec;
    Requests requests;
    BlockPool pool;
    Tiers tiers;
    Orders orders;
    std::vector<std::unique_ptr<GroupManager>> managers;
    std::unique_ptr<PrefixLookup> lookup;
    const CheckpointRule boundaries;
    // The managers of the groups that are cached.
    const std::vector<GroupManager*>& caching() const { return caching_; }

    bool has_states = false, checkpoints_single_group_hits = false;

  private:
    // Blocks of all groups, and how many of them are states.
    struct Counted {
        Int blocks = 0, states = 0;
        void Add(const GroupManager& manager, Int count) {
            blocks += count;
            states += manager.spec.is_state() ? count : 0;
        }
    };

    std::unique_ptr<GroupManager> MakeManager(Int number) {
        switch (spec.groups[static_cast<size_t>(number)].kind) {
            case kFull:
            case kMla:
            case kSinkFull:
                return std::make_unique<FullAttentionManager>(number, spec, pool, requests, orders);
            case kWindow:
            case kWindowMla:
                return std::make_unique<SlidingWindowManager>(number, spec, pool, requests, orders);
            case kCross:
                return std::make_unique<CrossAttentionManager>(number, spec, pool, requests, orders);
            case kRetainedWindow:
                return std::make_unique<RetainedWindowManager>(number, spec, pool, requests, orders);
            case kRing:
                return std::make_unique<RingManager>(number, spec, pool, requests, orders);
            case kAlignedState:
                return std::make_unique<AlignedStateManager>(number, spec, pool, requests, orders);
            case kUncachedState:
                return std::make_unique<UncachedStateManager>(number, spec, pool, requests, orders);
            default:
                return std::make_unique<ChunkedLocalManager>(number, spec, pool, requests, orders);
        }
    }

    void Empty(Rows* fresh) const {
        fresh->resize(managers.size());
        for (BlockList& row : *fresh) row.clear();
    }

    Int Known(const Admission& admission) const {
        return std::min(admission.hit->num_tokens + admission.num_external, spec.max_model_len);
    }

    Int AppendBlocks(Int slot, Int num_slots, Int num_main, Rows* fresh) {
        Int sum = 0;
        for (const auto& one : managers) sum += one->BlocksToExtend(slot, num_slots, num_main);
        if (sum > pool.num_free()) return sum;
        Empty(fresh);
        Int bound = kForever;
        for (size_t number = 0; number < managers.size(); ++number) {
            if (managers[number]->BlocksToExtend(slot, num_slots, num_main))
                managers[number]->Allocate(slot, num_slots, num_main, 0, &(*fresh)[number]);
            bound = std::min(bound, managers[number]->AllocBound(slot));
        }
        requests.alloc_bound[slot] = bound;
        requests.fast_path_until[slot] =
            std::min({bound, requests.window_bound[slot], requests.register_bound[slot] - 1});
        return 0;
    }

    Int GrowTables(Int slot, Int num_slots, Int num_main, Int processed, Int leave_free, Rows* fresh) {
        Counted counted;
        for (const auto& one : managers) {
            one->ReleaseSkipped(slot, processed);
            counted.Add(*one, one->BlocksToExtend(slot, num_slots, num_main));
        }
        if (const Int wanted = Demand(counted, nullptr) + leave_free; wanted > pool.num_free()) return wanted;
        Empty(fresh);
        for (size_t number = 0; number < managers.size(); ++number)
            managers[number]->Allocate(slot, num_slots, num_main, 0, &(*fresh)[number]);
        return 0;
    }

    Int BlocksOfAll(Int slot, Int total, Int local, const Hit* hit, Int num_encoder) const {
        const Int num_tokens = std::min(requests.num_tokens[slot], spec.max_model_len);
        return Count(Need{slot, num_tokens, num_tokens, total, local, num_encoder, true}, hit);
    }

    Int Count(const Need& need, const Hit* hit) const {
        static const BlockList none;
        Counted counted;
        for (size_t number = 0; number < managers.size(); ++number) {
            const GroupManager& one = *managers[number];
            counted.Add(one, one.BlocksNeeded(need, hit == nullptr ? none : hit->blocks[number]));
        }
        return Demand(counted, hit);
    }

    // How many free blocks an allocation takes; kForever if too few superblocks are whole for its states.
    Int Demand(const Counted& counted, const Hit* hit) const {
        if (!pool.split) return counted.blocks;
        const auto is_state = [&](size_t group) { return spec.groups[group].is_state(); };
        return pool.split->Demand(counted.blocks, counted.states, hit ? &hit->blocks : nullptr, is_state);
    }

    void AdoptHit(const Admission& admission, Int local, Int total) {
        const Rows& blocks = admission.hit->blocks;
        const bool any = std::any_of(blocks.begin(), blocks.end(), [](const BlockList& row) { return !row.empty(); });
        if (!any && !admission.num_external) return;
        for (size_t number = 0; number < managers.size(); ++number)
            managers[number]->Adopt(admission.slot, blocks[number], local, total);
        if (!admission.num_external) return;
        for (const auto& one : managers) one->AllocateExternal(admission.slot, local, total);
    }

    void LeaveToLoad(const Admission& admission, Int local, Int total, size_t first_zero) {
        std::set<Block> loaded;
        for (const auto& one : managers) {
            if (!(admission.loaded_groups >> one->group & 1)) continue;
            const BlockList& blocks = one->table[admission.slot];
            const Int end = std::min(one->BlocksFor(total), static_cast<Int>(blocks.size()));
            for (Int index = local / one->block_size; index < end; ++index) loaded.insert(blocks[index]);
        }
        size_t kept = first_zero;
        for (size_t i = first_zero; i < orders.zero_block.size(); ++i) {
            if (loaded.contains(orders.zero_block[i])) continue;
            orders.zero_block[kept] = orders.zero_block[i];
            orders.zero_group[kept++] = orders.zero_group[i];
        }
        orders.zero_block.resize(kept);
        orders.zero_group.resize(kept);
    }

    void FindFastPath(Int slot, Int processed, Int num_main) {
        if (num_main < requests.num_prompt[slot]) {
            requests.InvalidateFastPath(slot);
            return;
        }
        const auto [blocks, window, keys] = BoundsOf(slot, processed);
        requests.alloc_bound[slot] = blocks;
        requests.window_bound[slot] = window;
        requests.register_bound[slot] = keys;
        requests.fast_path_until[slot] = std::min({blocks, window, keys - 1});
    }

    void FindNextKey(Int slot, Int num_main) {
        if (num_main < requests.num_prompt[slot]) {
            requests.InvalidateFastPath(slot);
            return;
        }
        const Int keys = requests.register_bound[slot] = RegisterBoundOf(slot);
        requests.fast_path_until[slot] = std::min({requests.alloc_bound[slot], requests.window_bound[slot], keys - 1});
    }

    Int RegisterBoundOf(Int slot) const {
        if (!spec.enable_caching) return kForever;
        Int keys = kForever;
        for (const auto& one : managers) keys = std::min(keys, one->RegisterBound(slot));
        return CeilDiv(keys, cache_unit_) * cache_unit_;
    }

    Int Share(const GroupManager& manager, Int num_tokens) const {
        const Int final = std::max<Int>(0, num_tokens - unfinalized_);
        if (managers.size() == 1) return final;
        const Int aligned = Align(num_tokens);
        if (manager.drops_last_block && aligned > 0) return std::min(final, Align(final) + manager.block_size);
        return aligned;
    }

    Int Align(Int num_tokens) const {
        return spec.partial_hits ? num_tokens : num_tokens / spec.scheduler_block_size * spec.scheduler_block_size;
    }

    bool only_tables_grow_ = false, hits_end_in_prompt_ = false;
    std::vector<CheckpointRule> checkpoints_;
    std::vector<GroupManager*> caching_;
    Int cache_unit_ = 1, unfinalized_ = 0;
    BlockList taken_;
};

}  // namespace kvplane
