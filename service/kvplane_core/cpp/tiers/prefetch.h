// Copies into the first tier what prompts that will be admitted soon lack there: the section `prefetch` of a part.
#pragma once

#include "loads.h"

namespace kvplane {

constexpr Int kMostInFlight = kMaxJobs / 4;  // copies into the first tier: loads and saves need jobs too

enum PrefetchOutcome : Int { kAll = 0, kTooLate = 1, kTooMany = 2 };

class Prefetcher {
  public:
    Prefetcher(Coordinator& coordinator, InFlightTracker& tracker)
        : blocks_(coordinator), tiers_(coordinator.tiers), loads_(coordinator, tracker) {}

    // Orders the copies of all rows, which the replica accepts; adds an entry for each to the result.
    void Apply(const Prefetch& rows, PartResult* result) {
        const uint8_t* at = rows.hashes.data;
        for (size_t row = 0; row < rows.slot.size(); ++row) {
            const Int slot = rows.slot[row], within_ns = Entry(rows.within_ns, row, 0);
            if (slot != kNoRequest) {
                const Requests& requests = blocks_.requests;
                const bool waits = !requests.running[slot] && !requests.held[slot];
                const Int most = waits ? blocks_.MostHit(slot) : 0;  // one that runs has its hit
                Order(requests.content[slot], requests.domain[slot], most, within_ns, result);
                continue;
            }
            const Int count = rows.num_hashes[row];
            const size_t num_bytes = static_cast<size_t>(count * blocks_.spec.digest_size);
            Digests digests;
            digests.add(at, num_bytes, static_cast<size_t>(blocks_.spec.digest_size));
            at += num_bytes;
            uint32_t domain = kUnknownDomain;
            blocks_.pool.pairs.Known(rows.domain.empty() ? std::string() : rows.domain[row], &domain);
            Order(digests, domain, count * blocks_.spec.hash_block_size, within_ns, result);
        }
    }

  private:
    void Order(const Digests& digests, uint32_t domain, Int most, Int within_ns, PartResult* result) {
        const std::optional<LoadPlan> plan = most > 0 ? loads_.Plan(digests, domain, most) : std::nullopt;
        if (!plan) return Add(0, 0, kAll, result);
        Tier& first = tiers_.each[0];
        std::vector<Location> missing;
        for (const Missing& one : plan->missing) {
            if (one.source.tier == 0) {
                first.Refresh(one.source.slot);
            } else if (!first.IsWritten(TierAt(one.source.tier).Of(one.source.slot))) {
                missing.push_back(one.source);
            }
        }
        if (within_ns && TimeOf(missing) > within_ns) {
            ++tiers_.counters.prefetches_late;
            return Add(plan->hit.num_tokens, 0, kTooLate, result);
        }
        const Int room = Room(static_cast<Int>(missing.size()));
        Int ordered = 0;
        for (Int row = 0; row < room; ++row) {
            const Location& source = missing[static_cast<size_t>(row)];
            ordered += tiers_.OrderMove(TierAt(source.tier), source.slot, first);
        }
        tiers_.counters.prefetched += ordered;
        Add(plan->hit.num_tokens, ordered, ordered == static_cast<Int>(missing.size()) ? kAll : kTooMany, result);
    }

    static void Add(Int hit, Int ordered, PrefetchOutcome outcome, PartResult* result) {
        AddRow(&result->OfTiers().prefetched, {hit, ordered, outcome});
    }

    Tier& TierAt(Int number) { return tiers_.each[static_cast<size_t>(number)]; }

    // The tier that each copy into the first one reads, of those in flight.
    Column Copies() const {
        Column tiers;
        tiers_.jobs.moves.ForEach([&](Int, const Move& move) {
            if (move.tier == 0) tiers.push_back(move.source.tier);
        });
        return tiers;
    }

    // Nanoseconds to copy these blocks, behind the copies in flight; 0 if it is unknown.
    Int TimeOf(const std::vector<Location>& missing) const {
        Column sources = Copies();
        for (const Location& one : missing) sources.push_back(one.tier);
        const Column& costs = tiers_.costs_ns;
        if (costs.empty()) return 0;
        Int sum = 0;  // at most a minute for each of as many blocks as a tier has: far below 2^63
        for (const Int tier : sources) {
            const Int cost = costs[static_cast<size_t>(tier) + 1];
            if (cost == 0) return 0;
            sum += cost;
        }
        return sum;
    }

    // How many copies may be ordered now, at most `most`: slots of the first tier that are free, or whose key is
    // somewhere else too, in order of eviction.
    Int Room(Int most) const {
        const Tier& first = tiers_.each[0];
        most = std::min({most, kMostInFlight - static_cast<Int>(Copies().size()), kMaxJobs - tiers_.jobs.size()});
        Int count = first.num_free();
        for (Int slot = first.Next(kNoSlot); slot != kNoSlot && count < most; slot = first.Next(slot)) {
            if (first.IsPinned(slot)) continue;
            const InTiers& key = first.Of(slot);
            const auto has = [&](const Tier& one) { return one.number != 0 && one.SlotWith(key) != kNoSlot; };
            if (!first.IsShadow(slot) && std::none_of(tiers_.each.begin(), tiers_.each.end(), has)) break;
            ++count;
        }
        return std::max<Int>(0, std::min(most, count));
    }

    Coordinator& blocks_;
    Tiers& tiers_;
    TierLoads loads_;
};

}  // namespace kvplane
