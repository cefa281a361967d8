// Applies the section `retain` of a part: retains and releases cached prefixes.
#pragma once

#include "coordinator.h"

namespace kvplane {

enum RetainOutcome : Int {
    kRetained = 0,
    kReleased = 1,
    kOverBudget = 2,
    kTooManyRetained = 3,
    kOtherOwner = 4,
    kOverHostBudget = 5,
    kOverDiskBudget = 6,
};

class Retainer {
  public:
    explicit Retainer(Coordinator& coordinator) : blocks_(coordinator), retained_(coordinator.pool.retained) {}

    // Applies all rows, which the replica accepts; adds an entry for each to the result.
    void Apply(const Retain& rows, PartResult* result) {
        const Int now_ns = rows.time_ns();
        retained_.RemoveUntil(now_ns);
        retained_.ForgetLost();  // so that it does not count
        const uint8_t* at = rows.hashes.data;
        for (size_t row = 0; row < rows.num_hashes.size(); ++row) {
            const Int count = rows.num_hashes[row], until_ns = Entry(rows.until_ns, row, 0);
            const auto size = static_cast<size_t>(blocks_.spec.digest_size);
            Digests digests;
            digests.add(at, static_cast<size_t>(count) * size, size);
            at += static_cast<size_t>(count) * size;
            Retention wanted;
            wanted.owner = rows.owner.empty() ? std::string() : rows.owner[row];
            wanted.domain = kUnknownDomain;
            blocks_.pool.pairs.Known(rows.domain.empty() ? std::string() : rows.domain[row], &wanted.domain);
            wanted.digest = digests.at(count - 1);
            wanted.priority = Entry(rows.priority, row, 0);
            wanted.until_ns = until_ns;
            const Column most = MostOf(Entry(rows.percent, row, 0));
            if (until_ns <= now_ns) {
                Release(wanted, most, result);
            } else {
                Add(std::move(wanted), digests, most, result);
            }
        }
        if (retained_.each().empty()) return;
        Int next = kForever;
        for (const auto& [number, one] : retained_.each()) next = std::min(next, one.until_ns);
        result->OfTiers().retained.next_end_ns = {next};
    }

  private:
    void Add(Retention wanted, const Digests& digests, const Column& most, PartResult* result) {
        const Int num_tokens = digests.count() * blocks_.spec.hash_block_size;
        const Tiers* tiers = retained_.tiers.empty() ? nullptr : &blocks_.tiers;
        const Hit hit = blocks_.lookup->Find(digests, wanted.domain, num_tokens, kInside, kForever, tiers);
        std::set<Key> seen;
        for (const BlockList& of_group : hit.blocks) {
            for (auto block = of_group.rbegin(); block != of_group.rend(); ++block) {
                const KeptKey kept = KeptOf(*block);
                if (kept.place < retained_.num_places() && kept.key.pair && seen.insert(kept.key).second)
                    wanted.keys.emplace(static_cast<Int>(wanted.keys.size()), kept);
            }
        }
        const Column used = retained_.CountNew(wanted), before = retained_.UsedBy(wanted.owner);
        const Int count = static_cast<Int>(wanted.keys.size());
        for (size_t place = 0; place < used.size(); ++place) {
            if (used[place] <= most[place]) continue;
            const Int left = std::max<Int>(0, most[place] - before[place]);
            return Answer(hit.num_tokens, count, left, OverBudget(place), result);
        }
        if (!retained_.HasRoomFor(wanted))
            return Answer(hit.num_tokens, count, Left(most, before), kTooManyRetained, result);
        if (count > 0) {
            retained_.Add(std::move(wanted));
        } else if (retained_.Has(wanted)) {
            retained_.Remove(wanted);
        }
        Answer(hit.num_tokens, count, Left(most, used), kRetained, result);
    }

    // A block of a hit: the key, and the first place where it may be retained. A slot of a tier that retains nothing
    // leaves it to the tiers behind.
    KeptKey KeptOf(Block block) const {
        const Location source = blocks_.tiers.LocationOf(block);
        if (source.slot == kNoSlot) return {blocks_.pool.records[block].key, kDevice};
        Int place = retained_.num_places();
        for (const Tier* tier : retained_.tiers) {
            if (tier->number >= source.tier) place = std::min(place, tier->place);
        }
        return {blocks_.tiers.each[static_cast<size_t>(source.tier)].KeyOf(source.slot), place};
    }

    // How many keys an owner with this percentage may retain, by place.
    Column MostOf(Int percent) const {
        Column most{blocks_.spec.num_blocks * percent / 100};
        for (const Tier* tier : retained_.tiers)
            most.push_back(std::min(tier->num_slots * percent / 100, tier->most_retained));
        return most;
    }

    static Int Left(const Column& most, const Column& used) {
        Int left = most[0] - used[0];
        for (size_t place = 1; place < used.size(); ++place) left = std::min(left, most[place] - used[place]);
        return std::max<Int>(0, left);
    }

    RetainOutcome OverBudget(size_t place) const {
        if (place == kDevice) return kOverBudget;
        return retained_.tiers[place - 1]->medium == kHost ? kOverHostBudget : kOverDiskBudget;
    }

    void Release(const Retention& name, const Column& most, PartResult* result) {
        RetainOutcome outcome = kReleased;
        if (retained_.Has(name)) {
            retained_.Remove(name);
        } else if (retained_.OthersHave(name)) {
            outcome = kOtherOwner;
        }
        Answer(0, 0, Left(most, retained_.UsedBy(name.owner)), outcome, result);
    }

    static void Answer(Int hit, Int count, Int left, RetainOutcome outcome, PartResult* result) {
        AddRow(&result->OfTiers().retained, {hit, count, left, outcome});
    }

    Coordinator& blocks_;
    RetainedBlocks& retained_;
};

}  // namespace kvplane
