// Checks requests: their tables, transfers, and the bounds of the fast path.
#pragma once

#include "facts.h"

namespace kvplane {

class RequestChecks {
  public:
    explicit RequestChecks(CheckedFacts& facts)
        : facts_(facts),
          replica_(facts.replica),
          blocks_(facts.replica.blocks),
          requests_(facts.replica.blocks.requests) {}

    // Checks that only running requests have tables, that these have every needed block, and that loads are recorded.
    Slices Tables() {
        Int running = 0, outside = 0;
        for (Int slot = 0; slot < requests_.size(); ++slot) {
            const uint32_t domain = requests_.domain[slot];
            if (requests_.live[slot] && (domain >= facts_.is_live.size() || !facts_.is_live[domain]))
                Fail("domains", "slot ", slot, " is of domain ", domain, ", which has no name");
            running += requests_.live[slot] && requests_.running[slot];
            outside += requests_.hashed_outside[slot] != 0;
            if (facts_.pace.Spend(Pace::kFar)) co_yield Pause();
        }
        if (running != requests_.num_running)
            Fail("running_count", running, " run, the count says ", requests_.num_running);
        if (outside != requests_.num_outside)
            Fail("running_count", outside, " are hashed elsewhere, the count says ", requests_.num_outside);
        for (Int slot = 0; slot < requests_.size(); ++slot) {
            Int size = 0;
            for (const auto& one : blocks_.managers) {
                CheckTable(*one, slot);
                size += static_cast<Int>(one->table[slot].size());
            }
            if (requests_.live[slot]) CheckTransfers(slot);
            if (facts_.pace.Spend(Pace::kLookUp + size)) co_yield Pause();
        }
        CheckLoads();
    }

    // Checks that the bounds of the fast path are those computed now, and that no block is needed before them.
    Slices FastPaths() {
        for (Int slot = 0; slot < requests_.size(); ++slot) {
            if (requests_.live[slot]) CheckFastPath(slot);
            Int size = 0;
            for (const auto& one : blocks_.managers) size += static_cast<Int>(one->table[slot].size());
            if (facts_.pace.Spend(Pace::kLookUp + size)) co_yield Pause();
        }
    }

  private:
    static constexpr const char *kTables = "tables", *kTransfers = "transfers", *kFastPath = "fast_path";

    void CheckTable(const GroupManager& manager, Int slot) const {
        const BlockList& table = manager.table[slot];
        const auto size = static_cast<Int>(table.size());
        if (const auto found = manager.partial_hit.find(slot); found != manager.partial_hit.end()) {
            const auto [index, shared] = found->second;
            if (index >= size || table[index] != shared)
                Fail("partial_hits", "slot ", slot, ": shared block ", shared, " is not at index ", index,
                     " of its table");
        }
        if (table.empty()) return;
        const Int group = manager.group;
        if (!requests_.running[slot]) Fail(kTables, "slot ", slot, " holds blocks of group ", group, ", not running");
        if (manager.num_cached[slot] > size)
            Fail(kTables, "slot ", slot, ": ", manager.num_cached[slot], " cached blocks in a table of ", size);
        if (!manager.IsSound(slot))
            Fail("state_positions", "slot ", slot, ": what the manager of group ", group,
                 " recorded contradicts its table");
        const Int computed = requests_.computed[slot];  // with commit=reference a rewind may need released blocks
        if (replica_.spec.safe && !manager.CanRewind(slot, computed))
            Fail(kTables, "slot ", slot, ": group ", group, " lacks a block that the token after ", computed, " needs");
    }

    void CheckTransfers(Int slot) const {
        const bool loads = requests_.loading.contains(slot) && !requests_.running[slot];
        if ((requests_.held[slot] || loads) != replica_.tracker.held.contains(slot))
            Fail(kTransfers, "slot ", slot, ": blocks of a transfer are not held, or held too long");
        if (requests_.load_after[slot] > replica_.seq)
            Fail(kTransfers, "slot ", slot, ": its load waits for step ", requests_.load_after[slot]);
    }

    void CheckLoads() const {
        Column not_live, zeroed, stopped;
        for (const Int slot : requests_.loading) {
            if (!requests_.IsLive(slot)) {
                not_live.push_back(slot);
            } else if (requests_.running[slot] && !requests_.not_zeroed.contains(slot)) {
                zeroed.push_back(slot);
            }
        }
        for (const Int slot : requests_.not_zeroed) {
            if (!requests_.IsLive(slot) || !requests_.running[slot]) stopped.push_back(slot);
        }
        if (!not_live.empty()) Fail(kTransfers, "loads into slots ", not_live, " that are not live");
        if (!zeroed.empty())
            Fail(kTransfers, "slots ", zeroed, " load, and their new blocks are not exempt from zeroing");
        if (!stopped.empty()) Fail(kTransfers, "slots ", stopped, " wait for a load and do not run");
    }

    void CheckFastPath(Int slot) const {
        const Int blocks = requests_.alloc_bound[slot], window = requests_.window_bound[slot];
        const Int keys = requests_.register_bound[slot], until = requests_.fast_path_until[slot];
        if (until != kNoFastPath && until != std::min({blocks, window, keys - 1}))
            Fail(kFastPath, "slot ", slot, ": wrong bounds, fast path until ", until, ": blocks ", blocks, ", window ",
                 window, ", keys ", keys);
        if (!requests_.running[slot]) {
            if (until != kNoFastPath || blocks != kNoFastPath || window != kNoFastPath || keys != kNoFastPath)
                Fail(kFastPath, "slot ", slot, ": wrong bounds, it does not run");
            return;
        }
        const Int processed = std::max<Int>(0, requests_.computed[slot] - requests_.in_flight[slot]);
        const FastPathBounds slow = blocks_.BoundsOf(slot, processed);
        if (blocks != kNoFastPath && blocks != slow.blocks)
            Fail(kFastPath, "slot ", slot, " needs a block after ", slow.blocks, " slots, not ", blocks);
        // Not compared: an engine may count fewer tokens in flight than there are, and be ahead of the bound of now.
        const auto releases = [&](const auto& one) { return one->Releases(slot, window - 1); };
        if (window != kNoFastPath && std::any_of(blocks_.managers.begin(), blocks_.managers.end(), releases))
            Fail(kFastPath, "slot ", slot, ": a block leaves its window before ", window, " tokens");
        if (keys != kNoFastPath && keys != slow.keys)
            Fail(kFastPath, "slot ", slot, " registers a key at ", slow.keys, " tokens, not ", keys);
        if (until <= requests_.computed[slot]) return;
        for (const auto& one : blocks_.managers) {
            if (one->BlocksToExtend(slot, until, until))
                Fail(kFastPath, "slot ", slot, ": group ", one->group, " needs a block before ", until, " slots");
        }
    }

    CheckedFacts& facts_;
    const Replica& replica_;
    const Coordinator& blocks_;
    const Requests& requests_;
};

}  // namespace kvplane
