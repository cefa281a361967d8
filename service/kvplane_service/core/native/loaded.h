// Checks a state that was loaded: every number that the core uses as an index, size or position has the range of one.
// What the numbers mean is not checked, see `invariants.py`.
#pragma once

#include "convert.h"

namespace kvplane {

class LoadedState {
  public:
    explicit LoadedState(Replica& replica)
        : spec_(replica.spec),
          pool_(replica.blocks.pool),
          requests_(replica.blocks.requests),
          tracker_(replica.tracker),
          counters_(replica.counters.All()),
          seq_(replica.seq),
          managers_(replica.blocks.managers) {}

    void Check() const {
        CheckPool();
        CheckRequests();
        CheckTracker();
        for (const auto& one : managers_) CheckManager(*one);
    }

    // Before they become a list: each block once, and not the null block.
    static void CheckFree(std::span<const Block> order, Int num_blocks) {
        std::vector<bool> seen(static_cast<size_t>(num_blocks), false);
        for (const Block block : order) {
            Holds(block != kNullBlock && block < seen.size() && !seen[block]);
            seen[block] = true;
        }
    }

  private:
    static void Holds(bool holds) { kvplane::Check(holds); }
    void Position(Int tokens) const { Holds(tokens >= 0 && tokens <= spec_.max_model_len + kMaxLookahead); }
    // A number of a step, or a count since the registration, of which sums are made.
    static void Number(Int number) { Holds(number >= 0 && number < kForever / 4); }
    static void Numbers(const Column& numbers) { std::for_each(numbers.begin(), numbers.end(), Number); }
    void Slot(Int slot) const { Holds(slot >= 0 && slot < requests_.size()); }
    template <typename Blocks>
    void Known(const Blocks& blocks) const {
        for (const Block block : blocks) Holds(block < spec_.num_blocks);
    }
    void Named(const Key& key) const {
        Holds(key.pair > 0 && pool_.pairs.Domain(key.pair) < pool_.pairs.Capacity());
    }
    void Named(const NamedKeys& keys) const {
        for (const auto& [block, key] : keys) {
            Holds(block < spec_.num_blocks);
            Named(key);
        }
    }

    void CheckPool() const {
        Known(pool_.reserved);
        Known(pool_.busy);
        for (const auto& [block, is_superseded] : pool_.free.superseded) Known(BlockList{block});
        Named(pool_.registered);
        Holds(pool_.evicted_keys.size() == spec_.groups.size() && pool_.counter <= kMaxCounter);
        for (const Column* one : {&pool_.key_step, &pool_.born, &pool_.used, &pool_.last_use_, &pool_.evicted_keys})
            Numbers(*one);
        Numbers({pool_.age_base, pool_.step, pool_.executed_through, pool_.num_evictable, seq_});
        const Residency& ages = pool_.residency;
        for (const auto* one : {&ages.lifetime, &ages.idle_before_evict, &ages.reuse_gap})
            std::for_each(one->begin(), one->end(), Number);
        for (const auto& [name, count] : counters_) Number(*count);
        Holds(pool_.epoch >> kEpochBits == 0 && pool_.generation >> (64 - kEpochBits - kCounterBits) == 0);
    }

    void CheckRequests() const {
        Int running = 0;
        for (Int slot = 0; slot < requests_.size(); ++slot) {
            running += requests_.running[slot];
            Holds(requests_.live[slot] || !requests_.running[slot]);
            Holds(requests_.domain[slot] < pool_.pairs.Capacity());
            for (const Column* one : {&requests_.num_tokens, &requests_.num_prompt, &requests_.computed,
                                      &requests_.limit, &requests_.single_group_hit, &requests_.ends_at})
                Position((*one)[slot]);
            for (const Column* one : {&requests_.in_flight, &requests_.serial, &requests_.granted_step,
                                      &requests_.adopted_step, &requests_.load_after})
                Number((*one)[slot]);
            const Digests& content = requests_.content[slot];
            Holds(content.size ? content.size <= kDigestBytes && content.bytes.size() % content.size == 0
                               : content.bytes.empty());
        }
        Holds(running == requests_.num_running);
        for (const std::set<Int>* slots : {&requests_.loading, &requests_.not_zeroed}) {
            for (const Int slot : *slots) Slot(slot);
        }
        for (const auto& [slot, row] : requests_.asked) {
            Slot(slot);
            Numbers({row.first, std::max<Int>(row.second, 0)});  // a row with negative extra may end before 0
        }
        for (const auto& [slot, tokens] : requests_.hit_end) {
            Slot(slot);
            Position(tokens);
        }
        for (const auto& [slot, hint] : requests_.hints) {
            Slot(slot);
            Holds(hint >= 0 && hint < std::max<Int>(1, spec_.hint_values));
        }
        for (const auto& [slot, count] : requests_.unserved) {
            Slot(slot);
            Number(count);
        }
    }

    void CheckTracker() const {
        for (const auto& [step, grants] : tracker_.grants) {
            for (const Grant& one : grants) {
                Slot(one.stay.first);
                Number(one.num_tokens);
            }
        }
        for (const auto& [step, book] : tracker_.tentative) {
            book.ForEach([&](const Stay& stay, const NamedKeys& keys) {
                Slot(stay.first);
                Named(keys);
            });
        }
        for (const auto& [step, book] : tracker_.adoptions) {
            book.ForEach([&](const Block& block, const std::vector<Stay>& stays) {
                Holds(block < spec_.num_blocks);
                for (const Stay& stay : stays) Slot(stay.first);
            });
        }
        for (const auto& [step, blocks] : tracker_.waiting) Known(blocks);
        for (const auto& [slot, blocks] : tracker_.held) {
            Slot(slot);
            Known(blocks);
        }
        for (const auto& [step, blocks] : tracker_.filling) Known(blocks);
        Known(tracker_.under_load);
    }

    void CheckManager(const GroupManager& one) const {
        Holds(one.table.size() == one.num_cached.size() && one.table.size() >= static_cast<size_t>(requests_.size()));
        for (size_t slot = 0; slot < one.table.size(); ++slot) {
            Known(one.table[slot]);
            Holds(one.num_cached[slot] >= kNotTracked && one.num_cached[slot] <= SizeOf(one, slot));
        }
        for (const auto& [slot, hit] : one.partial_hit) {
            Index(one, slot, hit.first);
            Holds(hit.second < spec_.num_blocks);
        }
        Numbers({one.allocated, one.adopted});
        for (const auto& [source, target] : one.copies) Holds(std::max(source, target) < spec_.num_blocks);
        if (one.spec.kind == kAlignedState) CheckStates(static_cast<const AlignedStateManager&>(one));
    }

    void CheckStates(const AlignedStateManager& one) const {
        for (const size_t count : {one.last_state.size(), one.num_retired.size(), one.has_allocated.size()})
            Holds(count == one.table.size());
        for (size_t slot = 0; slot < one.table.size(); ++slot) {
            const Int size = SizeOf(one, slot);
            Holds(one.last_state[slot] >= kNoState && one.last_state[slot] < size);
            Holds(one.num_retired[slot] >= 0 && one.num_retired[slot] <= size);
            Holds(!one.has_allocated[slot] || size > one.spec.speculative_blocks);
        }
        for (const auto& [slot, ends] : one.stopped_at) Slot(slot);
        for (const auto& [slot, place] : one.last_checkpoints) {
            Index(one, slot, place[1]);
            Position(place[0]);
        }
        for (const Key& key : one.registered_this_step) Named(key);
    }

    static Int SizeOf(const GroupManager& one, size_t slot) { return static_cast<Int>(one.table[slot].size()); }
    static void Index(const GroupManager& one, Int slot, Int index) {
        Holds(slot >= 0 && slot < static_cast<Int>(one.table.size()));
        Holds(index >= 0 && index < SizeOf(one, static_cast<size_t>(slot)));
    }

    const Spec& spec_;
    const BlockPool& pool_;
    const Requests& requests_;
    const InFlightTracker& tracker_;
    const std::vector<std::pair<const char*, Int*>> counters_;
    const Int seq_;
    const std::vector<std::unique_ptr<GroupManager>>& managers_;
};

}  // namespace kvplane
