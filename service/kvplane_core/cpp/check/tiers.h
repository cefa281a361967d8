// Checks the tiers: each slot is in exactly one state, and the jobs have what they use.
#pragma once

#include "keys.h"
#include "lists.h"

namespace kvplane {

class TierChecks {
  public:
    explicit TierChecks(CheckedFacts& facts) : facts_(facts), tiers_(facts.replica.blocks.tiers) {}

    Slices All() {
        for (const Tier& tier : tiers_.each) {
            for (Slices part = Slots(tier); part.Next();) co_yield Pause();
            for (Slices part = Keys(tier); part.Next();) co_yield Pause();
            for (Slices part = Retained(tier); part.Next();) co_yield Pause();
            for (Slices part = WantedEarly(tier); part.Next();) co_yield Pause();
            for (Slices part = Pins(tier); part.Next();) co_yield Pause();
        }
        for (Slices part = KeyRecords(); part.Next();) co_yield Pause();
        for (Slices part = Jobs(); part.Next();) co_yield Pause();
    }

  private:
    static constexpr const char* kTiers = "tiers";

    std::string Of(const Tier& tier) const { return "tier " + Words(tier.number) + ": "; }

    // The slots that jobs in flight write.
    Column Written(const Tier& tier) const {
        Column slots;
        const auto add = [&](Int, const auto& write) {
            if (write.tier == tier.number) slots.push_back(write.slot);
        };
        tiers_.jobs.saves.ForEach(add);
        tiers_.jobs.moves.ForEach(add);
        return slots;
    }

    Slices Slots(const Tier& tier) {
        const auto num_used = static_cast<size_t>(tier.num_used());
        Zeros<uint8_t> has_state(num_used);
        size_t count = 0;
        const auto note = [&](Int slot, bool is_right) {
            if (slot < 0 || static_cast<size_t>(slot) >= num_used || has_state[static_cast<size_t>(slot)] || !is_right)
                Fail(kTiers, Of(tier), "slot ", slot, " has two states, or was never used");
            has_state[static_cast<size_t>(slot)] = 1;
            ++count;
        };
        const auto is_in = [&](Int slot, SlotState state) {
            return static_cast<size_t>(slot) >= num_used || tier.state[static_cast<size_t>(slot)] == state;
        };
        for (const size_t size : {tier.version.size(), tier.pins.size(), tier.state.size(), tier.links_.size() - 2}) {
            if (size != num_used) Fail(kTiers, Of(tier), num_used, " slots were used, a column has ", size);
        }
        for (const uint32_t slot : tier.free) {
            note(slot, is_in(slot, SlotState::kNoKey) && (slot >= num_used || !tier.pins[slot]));
            if (facts_.pace.Spend(Pace::kFar)) co_yield Pause();
        }
        for (const Int slot : Written(tier)) {
            note(slot, is_in(slot, SlotState::kWritten));
            if (facts_.pace.Spend(Pace::kFar)) co_yield Pause();
        }
        for (Int slot = 0; slot < tier.num_used(); ++slot) {
            const SlotState state = tier.state[static_cast<size_t>(slot)];
            const bool is_only_pinned = state == SlotState::kNoKey && tier.pins[static_cast<size_t>(slot)] > 0;
            if (state >= SlotState::kRecent || is_only_pinned) note(slot, true);
            if (facts_.pace.Spend(3 * Pace::kNear)) co_yield Pause();
        }
        if (count != num_used && !tier.is_of_peers)
            Fail(kTiers, Of(tier), num_used, " slots were used, ", count, " have a state");
    }

    // The keys in the order of eviction, in each queue, and what is retained.
    Slices Keys(const Tier& tier) {
        Column held(tier.uses.size(), 0), expected;
        Int count = 0, shadows = 0;
        const auto note = [&](Int slot, SlotState queue) {
            const size_t at = static_cast<size_t>(slot);
            const uint32_t record = tier.record_[at];
            const Directory& directory = tiers_.directory;
            const bool is_there = tier.state[at] == queue && record < directory.records_.size() &&
                                  directory[record].slot[tier.Number()] == slot;
            if (!is_there || tier.version[at] <= 0 ||
                (tier.version[at] > tiers_.last_job && !tier.is_of_peers))
                Fail(kTiers, Of(tier), "slot ", slot,
                     " has another key than the one that leads to it, or no version");
            facts_.CheckName(directory[record].key, kTiers);
            ++held[static_cast<size_t>(tier.pairs_.Group(directory[record].key.pair))];
            ++count;
            shadows += queue == SlotState::kShadow;
        };
        for (const uint32_t head : {uint32_t{Tier::kShadows}, uint32_t{Tier::kRecents}}) {
            uint32_t before = head;
            do {
                const uint32_t link = tier.links_[before].next;
                if (link >= tier.links_.size() || tier.links_[link].previous != before ||
                    (link < Tier::kFirstLink && link != head))
                    Fail(kTiers, Of(tier), "slot ", Tier::SlotOf(before), " leads to ", Tier::SlotOf(link),
                         ", which does not point back");
                if (link != head) note(Tier::SlotOf(link), head ? SlotState::kRecent : SlotState::kShadow);
                before = link;
                if (facts_.pace.Spend(3 * Pace::kFar)) co_yield Pause();
            } while (before != head);
        }
        for (const auto& [place, slot] : tier.retained.order()) {
            if (slot >= tier.record_.size()) Fail(kTiers, Of(tier), "slot ", slot, " is retained and was never used");
            note(slot, SlotState::kRetained);
            if (facts_.pace.Spend(3 * Pace::kFar)) co_yield Pause();
        }
        if (count != tier.num_held_ || shadows != tier.num_shadows)
            Fail(kTiers, Of(tier), count, " keys lead to ", tier.num_held_, " slots, ", shadows, " of them to ",
                 tier.num_shadows, " shadows");
        for (const GroupUse& use : tier.uses) expected.push_back(use.held);
        if (held != expected) Fail(kTiers, Of(tier), "the groups have ", held, " blocks, counted ", expected);
        for (Slices part = SeenCheck::Run(tier.seen_, tier, kTiers, facts_.pace); part.Next();) co_yield Pause();
    }

    // Exactly the keys that are retained here, and are no shadows, are in the lists of their priorities.
    Slices Retained(const Tier& tier) {
        for (Slices part = PriorityCheck::Run(tier.retained, kTiers, Of(tier), facts_.pace); part.Next();)
            co_yield Pause();
        for (Int slot = 0; slot < tier.num_used(); ++slot) {
            const SlotState state = tier.state[static_cast<size_t>(slot)];
            if (facts_.pace.Spend(Pace::kNear)) co_yield Pause();
            if (state != SlotState::kRecent && state != SlotState::kRetained) continue;
            const bool may_be = tier.place != kDevice && !tier.retentions_.empty();
            const Int expected = may_be ? tier.retentions_.PriorityOf(tier.KeyOf(slot), tier.place) : -1;
            const Int priority = tier.retained.PriorityAt(static_cast<uint32_t>(slot));
            if (priority != expected)
                Fail(kTiers, Of(tier), "slot ", slot, " is retained with priority ", priority, ", expected ", expected);
            if (may_be && facts_.pace.Spend(2 * Pace::kLookUp)) co_yield Pause();
        }
        if (tier.place == kDevice) co_return;
        for (const auto& [owner, used] : tier.retentions_.used_) {
            const Int mine = used[static_cast<size_t>(tier.place)];
            if (mine > tier.most_retained)
                Fail(kTiers, Of(tier), "the owner '", owner, "' retains ", mine, " keys, at most ", tier.most_retained);
        }
    }

    Slices WantedEarly(const Tier& tier) {
        const Wanted& wanted = tier.wanted;
        const Int most = tier.number ? tiers_.each[static_cast<size_t>(tier.number) - 1].num_slots
                                     : facts_.replica.spec.num_blocks;
        std::set<Int> places;
        bool are_there = true;
        for (const Int place : wanted.order_) {
            are_there &= place >= 0 && place < most && places.insert(place).second &&
                         static_cast<size_t>(place) < wanted.version_.size() &&
                         wanted.version_[static_cast<size_t>(place)] != Wanted::kNotWanted;
            if (facts_.pace.Spend(Pace::kLookUp)) co_yield Pause();
        }
        size_t count = 0;
        for (const uint64_t version : wanted.version_) {
            count += version != Wanted::kNotWanted;
            if (facts_.pace.Spend(Pace::kNear)) co_yield Pause();
        }
        if (!are_there || count != wanted.order_.size())
            Fail(kTiers, Of(tier), "wants ", wanted.order_.size(), " of ", count, " places, below ", most);
        if (!wanted.IsEarly() && !(wanted.empty() && wanted.recent.empty()))
            Fail(kTiers, Of(tier), "wants something early with the policy ", wanted.policy);
    }

    Slices Pins(const Tier& tier) {
        Zeros<uint32_t> pins(tier.pins.size());
        Int rows = 0;
        size_t writing = 0;
        for (const auto& [job, load] : tiers_.jobs.loads) {
            for (const Filled& row : load.rows) {
                if (row.source.tier != tier.number) continue;
                if (row.source.slot < 0 || row.source.slot >= tier.num_used())
                    Fail(kTiers, Of(tier), "load ", job, " reads slot ", row.source.slot, ", which was never used");
                ++pins[static_cast<size_t>(row.source.slot)];
                ++rows;
                if (facts_.pace.Spend(Pace::kFar)) co_yield Pause();
            }
        }
        for (size_t slot = 0; slot < tier.pins.size(); ++slot) {
            writing += tier.state[slot] == SlotState::kWritten;
            if (tier.pins[slot] != pins[slot])
                Fail(kTiers, Of(tier), "the pins are not those of the loads in flight: slot ", slot, " has ",
                     tier.pins[slot], " of ", pins[slot]);
            if (facts_.pace.Spend(3 * Pace::kNear)) co_yield Pause();
        }
        if (tiers_.num_loading[tier.Number()] != rows)
            Fail(kTiers, Of(tier), rows, " blocks are loaded, counted ", tiers_.num_loading[tier.Number()]);
        if (const size_t jobs = Written(tier).size(); writing != jobs)
            Fail(kTiers, Of(tier), writing, " keys are being written, by ", jobs, " jobs");
    }

    // The directory finds each key, with the slots that have it; what it noted of blocks of the device holds.
    Slices KeyRecords() {
        const Directory& directory = tiers_.directory;
        for (Slices part = IndexCheck::Run(directory.index_, directory.records_, kTiers, facts_); part.Next();)
            co_yield Pause();
        size_t count = 0;
        for (uint32_t record = 0; record < directory.records_.size(); ++record) {
            count += CheckRecord(record);
            if (facts_.pace.Spend(3 * Pace::kFar)) co_yield Pause();
        }
        if (count != directory.index_.count() || count + directory.free_.size() != directory.records_.size())
            Fail(kTiers, directory.records_.size(), " records, ", count, " of keys, ", directory.free_.size(),
                 " unused, ", directory.index_.count(), " in the index");
        for (const uint32_t record : directory.free_) {
            if (record >= directory.records_.size() || directory[record].key.pair)
                Fail(kTiers, "record ", record, " of a key is unused, and has one");
            if (facts_.pace.Spend(Pace::kFar)) co_yield Pause();
        }
        for (Block block = 0; block < directory.noted_.size(); ++block) {
            if (directory.IsNoted(block) && !directory.has_others_) CheckNoted(block);
            if (facts_.pace.Spend(Pace::kFar)) co_yield Pause();
        }
    }

    // Returns whether it is that of a key.
    bool CheckRecord(uint32_t record) const {
        const InTiers& one = tiers_.directory[record];
        bool is_used = false;
        for (size_t number = 0; number < kMostTiers; ++number) {
            const uint32_t slot = one.slot[number];
            if (slot == kNoRecord) continue;
            is_used = true;
            const Tier* const tier = number < tiers_.each.size() ? &tiers_.each[number] : nullptr;
            if (tier == nullptr || slot >= tier->record_.size() || tier->record_[slot] != record ||
                tier->state[slot] == SlotState::kNoKey)
                Fail(kTiers, "tier ", number, ": slot ", slot, " has another key than the one that leads to it");
        }
        const bool has_key = one.key.pair != 0;
        if (has_key != is_used || (has_key && one.hash != static_cast<uint32_t>(Sought(one.key).hash)))
            Fail(kTiers, "record ", record, " has a key without a slot, a slot without a key, or another hash");
        return has_key;
    }

    void CheckNoted(Block block) const {
        const BlockPool& pool = facts_.replica.blocks.pool;
        const uint32_t record = pool.HasKey(block) ? tiers_.directory.Find(pool.records[block].key) : kNoRecord;
        const auto keeps = [&](const Tier& one) {
            const Int slot = one.SlotWith(tiers_.directory[record]);
            return one.IsWritten(tiers_.directory[record]) || (slot != kNoSlot && !one.IsShadow(slot));
        };
        if (record == kNoRecord || std::none_of(tiers_.each.begin(), tiers_.each.end(), keeps))
            Fail(kTiers, "block ", block, " is noted as saved, and no tier keeps its key");
    }

    Slices Jobs() {
        BlockList keyed;
        std::set<Int> numbers;
        const auto note = [&](Int job) {
            if (!numbers.insert(job).second || job > tiers_.last_job)
                Fail(kTiers, "two jobs have one number, or one above the last, ", tiers_.last_job);
        };
        const auto note_write = [&](Int job, const auto&) { note(job); };
        tiers_.jobs.saves.ForEach(note_write);
        tiers_.jobs.moves.ForEach(note_write);
        for (const auto& [job, load] : tiers_.jobs.loads) {
            note(job);
            for (const Filled& row : load.rows) {
                if (facts_.replica.blocks.pool.HasKey(row.block)) keyed.push_back(row.block);
            }
            if (facts_.pace.Spend(Pace::kFar * static_cast<Int>(load.rows.size()))) co_yield Pause();
        }
        for (const auto& [slot, load] : tiers_.loading) {
            const auto found = tiers_.jobs.loads.find(load.first);
            if (found == tiers_.jobs.loads.end() || found->second.request != slot)
                Fail(kTiers, "slot ", slot, " waits for load ", load.first, ", which is not in flight");
        }
        if (!keyed.empty()) Fail(kTiers, "loads in flight fill blocks ", keyed, ", which have keys");
    }

    CheckedFacts& facts_;
    const Tiers& tiers_;
};

}  // namespace kvplane
