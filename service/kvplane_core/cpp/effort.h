// Estimates what a step takes, in units, see effort.py.
#pragma once

#include "replica.h"

namespace kvplane {

class Effort {
  public:
    explicit Effort(const Replica& replica) : replica_(replica), requests_(replica.blocks.requests) {}

    Int Of(const Step& step) const {
        Int units = 0;
        for (const Part& part : step.parts) units += OfRows(part) + OfTables(part) + OfCache(part);
        return units;
    }

    Int OfLookUp(Int num_tokens) const {
        return kRow + num_tokens / replica_.spec.hash_block_size / kDigestsRead + BlocksOf(num_tokens);
    }

  private:
    // A key that is looked up is one unit: a large index is not in the processor's cache.
    static constexpr Int kRow = 4, kTokensHashed = 64, kDigestsRead = 32, kIdsEncoded = 32, kBlocksSeen = 4;
    static constexpr Int kSparseBlocks = 4, kMost = Int{1} << 48;  // tokens above which estimates are equal

    static Int Size(const Column& column) { return static_cast<Int>(column.size()); }
    static Int Sum(const Column& column) { return std::accumulate(column.begin(), column.end(), Int{0}); }
    // Of the entries of these slots; a request of another one begins in this step, with the news section.
    Int Sum(const Column& column, const Column& slots) const {
        Int sum = 0;
        for (const Int slot : slots) sum += requests_.IsLive(slot) ? column[static_cast<size_t>(slot)] : 0;
        return sum;
    }
    static Int Capped(Int num_tokens, const Column& caps) {
        return caps.empty() ? num_tokens : std::min(num_tokens, Sum(caps));
    }
    Int BlocksOf(Int num_tokens) const {
        Int sum = 0;
        for (const GroupSpec& group : replica_.spec.groups) sum += FloorDiv(num_tokens, group.block_size);
        return sum;
    }

    Int OfRows(const Part& part) const {
        const Facts& facts = part.facts;
        const News& news = part.news;
        const Int rows = Size(facts.slot) + Size(news.slot) + Size(part.run.slot) + Size(part.admit.slot) +
                         Size(part.peek.slot) + Size(part.prefetch.slot) + Size(part.retain.num_hashes) +
                         Size(part.peers.gone) + Size(part.peers.slot);
        const size_t bytes =
            facts.hashes.size + news.hashes.size + part.prefetch.hashes.size + part.retain.hashes.size;
        return rows * kRow + (facts.tokens.count + news.tokens.count) / kTokensHashed +
               static_cast<Int>(bytes) / replica_.spec.digest_size / kDigestsRead;
    }

    // How many blocks, over all groups, the rows allocate, register, look up and release.
    Int OfTables(const Part& part) const {
        const Facts& facts = part.facts;
        const Run& run = part.run;
        const Admit& admit = part.admit;
        const Column &known = requests_.num_tokens, &computed = requests_.computed;
        const Int waiting = Sum(known, admit.slot) + Sum(part.news.num_tokens);
        const auto [lowered, dropped] = Rewound(facts);
        const Int running =
            Sum(known, run.slot) - Sum(computed, run.slot) + lowered + Sum(facts.appended) + Sum(run.extra);
        const Int wanted = Capped(running, run.cap) + Capped(waiting + Sum(admit.extra), admit.cap);
        Int granted = std::max<Int>(0, std::min(wanted, part.budget.tokens));
        granted += Sum(run.lookahead) + Sum(admit.lookahead) + Sum(admit.external);
        for (const Int count : facts.commit) granted += count != kUnchanged ? count : 0;
        granted += Sum(facts.num_hashes) * replica_.spec.hash_block_size;  // their blocks may be registered only now
        granted = std::min(granted, kMost);
        Int found = waiting + Sum(known, part.peek.slot) + Sum(known, part.prefetch.slot), seen = dropped;
        for (size_t row = 0; row < std::min(facts.slot.size(), facts.end.size()); ++row)
            seen += facts.end[row] ? Sum(computed, {facts.slot[row]}) : 0;
        found += (Sum(part.prefetch.num_hashes) + Sum(part.retain.num_hashes)) * replica_.spec.hash_block_size;
        Int units = 0, needed = 0;
        for (const GroupSpec& group : replica_.spec.groups) {
            const bool dense = group.kind == kFull || group.kind == kMla || group.kind == kSinkFull ||
                               group.kind == kRetainedWindow;
            units += FloorDiv(FloorDiv(granted, group.block_size), dense ? 1 : kSparseBlocks);
            needed += FloorDiv(granted, group.block_size) + Size(run.slot);
        }
        const bool whole = std::any_of(run.flags.begin(), run.flags.end(), [](Int flag) { return flag & kFullFit; });
        const bool may_lack = needed > replica_.blocks.pool.num_free() || !run.reserved.empty() || whole;
        if (run.on_refusal == kPreempt && may_lack) {
            const Column& victims = run.victims.empty() ? run.slot : run.victims;
            seen += Sum(computed, victims);  // the blocks that they share are released once for each of them
            units += Size(victims) * kRow;
        }
        if (part.with_tables) units += BlocksOf(std::min(waiting + Sum(known, run.slot), kMost)) / kIdsEncoded;
        return units + BlocksOf(std::min(found, kMost)) + BlocksOf(std::min(seen, kMost)) / kBlocksSeen;
    }

    // By how many computed tokens the rows go back, and those of requests that such a row preempts.
    std::pair<Int, Int> Rewound(const Facts& facts) const {
        Int lowered = 0, dropped = 0;
        for (size_t row = 0; row < std::min(facts.slot.size(), facts.computed.size()); ++row) {
            const Int slot = facts.slot[row], count = facts.computed[row];
            if (count == kUnchanged || !requests_.IsLive(slot)) continue;
            const Int computed = requests_.computed[static_cast<size_t>(slot)];
            if (count >= computed) continue;
            lowered += computed - count;
            dropped += replica_.blocks.CanRewind(slot, std::max<Int>(count, 0)) ? 0 : computed;
        }
        return {lowered, dropped};
    }

    // How many blocks a cache section, or an image, visits.
    Int OfCache(const Part& part) const {
        const Cache& cache = part.cache;
        const Coordinator& blocks = replica_.blocks;
        Int units = Size(cache.evicted) + Size(cache.loads_over);
        if (part.resume) units += Size(part.resume->blocks) + replica_.spec.num_blocks;  // the stamps are compared
        Int seen = cache.reset ? blocks.pool.num_evictable : 0;
        for (const Int slot : cache.released) {
            const auto held = replica_.tracker.held.find(slot);
            if (requests_.IsLive(slot) && held != replica_.tracker.held.end())
                seen += static_cast<Int>(held->second.size());
        }
        seen += BlocksOf(Sum(requests_.computed, cache.released));
        Int failed = 0;
        for (const Int step : cache.failed_steps) {
            const auto granted = replica_.tracker.grants.find(step);
            if (granted != replica_.tracker.grants.end()) failed += static_cast<Int>(granted->second.size());
        }
        units += failed * kRow;
        for (const auto& tier : blocks.tiers.each) units += cache.evicted.empty() ? 0 : tier.stale.count();
        if (!cache.evicted.empty() || failed) {
            Int computed = 0;
            for (Int slot = 0; slot < requests_.size(); ++slot) computed += Sum(requests_.computed, {slot});
            seen += BlocksOf(computed);
        }
        return units + seen / kBlocksSeen;
    }

    const Replica& replica_;
    const Requests& requests_;
};

}  // namespace kvplane
