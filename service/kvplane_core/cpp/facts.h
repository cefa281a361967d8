// Applies the sections `facts` and `cache` of a part: what happened to requests and pages since the last step.
#pragma once

#include "busy.h"
#include "hasher.h"
#include "tiers/loads.h"

namespace kvplane {

class FactApplier {
  public:
    FactApplier(Coordinator& coordinator, InFlightTracker& tracker)
        : blocks_(coordinator),
          requests_(coordinator.requests),
          pool_(coordinator.pool),
          tracker_(tracker),
          tier_loads_(coordinator, tracker) {}

    void Apply(const Part& part, Int seq, PartResult* result) {
        const Facts& facts = part.facts;
        given_.Begin(facts.num_hashes, facts.hashes);
        MadeHashes made(facts.tokens.ids, part.facts_made, hasher, &result->hashed_facts);
        if (facts.OnlyAppend() && !part.with_hashes) return AppendAll(facts, made);
        for (size_t row = 0; row < facts.slot.size(); ++row) {
            const Int slot = facts.slot[row];
            const Int computed = Entry(facts.computed, row, kUnchanged), end = Entry(facts.end, row, kEndNone);
            const Int appended = Entry(facts.appended, row, 0);
            if (computed != kUnchanged) Correct({slot, computed, appended, end}, seq, result);
            requests_.num_tokens[slot] += appended;
            if (facts.tokens.count) {
                const Hashes hashes = made.Of(requests_, slot, row, appended);
                AddDigests(slot, hashes, hasher.none_hash.size);
            }
            AddDigests(slot, given_.Of(row), given_.digest_size);
            const Int commit = Entry(facts.commit, row, kUnchanged),
                      skipped = Entry(facts.release_skipped, row, kUnchanged);
            if (commit != kUnchanged) Commit(slot, commit, seq);
            if (skipped != kUnchanged && requests_.running[slot]) blocks_.ReleaseSkipped(slot, skipped);
            const Int hint = Entry(facts.hint, row, kUnchanged);
            if (hint != kUnchanged && pool_.hazard) pool_.hazard->NoteHint(requests_, slot, hint);
            if (end != kEndNone) Finish(slot, end, Entry(facts.fence, row, 0), seq, result);
            if (part.with_hashes) ReportHashes(slot, result);
        }
    }

    TokenHasher hasher;

    void ReportHashes(Int slot, PartResult* result) const {
        const Digests& digests = requests_.content[slot];
        result->num_hashes.push_back(digests.count());
        result->last_hash.push_back(digests.count() ? digests.at(digests.count() - 1) : Digest());
    }

    void ApplyCache(const Cache& cache, PartResult* result) {
        for (const Int failed : cache.failed_steps) Append(tracker_.FailStep(failed), &result->preempted);
        bool any = false;
        for (const Int block : cache.evicted) any |= Evict(static_cast<Block>(block));
        if (!cache.costs_ns.empty()) blocks_.tiers.costs_ns = cache.costs_ns;
        if (cache.NamesJobs()) tier_loads_.EndJobs(cache, result);
        if (any) {
            blocks_.RegisterAgain(cache.evicted);
            requests_.InvalidateAllFastPaths();
        }
        for (const Int slot : cache.released) Append(tracker_.ReleaseHeld(slot, pool_.step), &result->preempted);
        if (!cache.loads_over.empty()) ReleaseBusy(pool_, cache.loads_over);
        if (cache.reset) result->reset_done = pool_.Reset();
        if (cache.reset && result->reset_done) blocks_.tiers.Reset();
    }

    void ApplyPeers(const Peers& peers) {
        if (peers.gone.empty() && peers.slot.empty()) return;
        Tier& tier = blocks_.tiers.each.back();
        for (const Int slot : peers.gone) {
            if (tier.HasKey(slot)) tier.DropSlot(slot, kDropped);
        }
        const size_t size = peers.slot.empty() ? 0 : peers.hashes.size / peers.slot.size();
        for (size_t row = 0; row < peers.slot.size(); ++row) {
            const uint32_t domain = pool_.pairs.DomainOf(peers.domain.empty() ? std::string() : peers.domain[row]);
            const Key key{pool_.pairs.Of(domain, peers.group[row]), Digest(peers.hashes.data + row * size, size)};
            tier.SetPeer(peers.slot[row], key, peers.version[row]);
        }
    }

    void AddDigests(Int slot, const Hashes& hashes, size_t digest_size) {
        if (hashes.size == 0) return;
        requests_.content[slot].add(hashes.data, hashes.size, digest_size);
        if (blocks_.spec.enable_caching) requests_.InvalidateRegisterBound(slot);
    }

  private:
    // Applies rows that only append tokens and hashes.
    void AppendAll(const Facts& facts, MadeHashes& made) {
        Int* const num_tokens = requests_.num_tokens.data();
        const bool has_tokens = facts.tokens.count > 0;
        for (size_t row = 0; row < facts.appended.size(); ++row) {
            if (has_tokens && row + kAhead < facts.slot.size()) made.Expect(requests_, facts.slot[row + kAhead]);
            const Int slot = facts.slot[row], count = facts.appended[row];
            num_tokens[slot] += count;
            if (has_tokens) AddExpected(slot, made.Of(requests_, slot, row, count), hasher.none_hash.size);
        }
        for (size_t row = 0; row < facts.num_hashes.size(); ++row)
            AddExpected(facts.slot[row], given_.Of(row), given_.digest_size);
    }

    void AddExpected(Int slot, const Hashes& hashes, size_t digest_size) {
        if (hashes.size == 0) return;
        AddDigests(slot, hashes, digest_size);
        blocks_.ExpectKey(slot, Digest(hashes.data + hashes.size - digest_size, digest_size));
    }

    // Drops the keys of a block, and gives it a new stamp; returns whether it had keys.
    bool Evict(Block block) {
        if (!blocks_.tiers.each.empty()) blocks_.tiers.Revoke(block);  // saved from this page, or one with its content
        const bool had_keys = pool_.DropKeys(block, kDropped);
        if (!had_keys) pool_.Restamp(block);
        return had_keys;
    }

    static void Append(const Column& slots, Column* into) { into->insert(into->end(), slots.begin(), slots.end()); }

    struct Correction {
        Int slot, computed, appended, end;
    };

    void Correct(const Correction& row, Int seq, PartResult* result) {
        const Int slot = row.slot, computed = row.computed;
        if (computed < requests_.computed[slot] && blocks_.spec.safe) {
            if (row.end == kEndNone && !blocks_.CanRewind(slot, computed, row.appended)) {
                const Column gone = tracker_.Preempt(slot, seq);
                Append(gone, &result->preempted);
                result->went_back += static_cast<Int>(gone.size());
                return;
            }
            blocks_.Rewind(slot, computed);
            if (requests_.not_zeroed.contains(slot)) blocks_.ZeroUnloaded(slot, computed);
        }
        requests_.ends_at[slot] = requests_.LaunchEnd(slot);
        requests_.computed[slot] = std::min(requests_.computed[slot], computed);
        requests_.InvalidateFastPath(slot);
    }

    void Commit(Int slot, Int num_tokens, Int seq) {
        if (tracker_.LoadsFromTiers(slot)) return;  // the end of its job registers the blocks
        tracker_.LoadIsOver(slot);
        num_tokens = std::min({num_tokens, requests_.computed[slot], requests_.num_tokens[slot]});
        pool_.step = tracker_.IsExecuted(slot, num_tokens) ? pool_.executed_through : seq;
        requests_.ends_at[slot] = requests_.LaunchEnd(slot);
        blocks_.Commit(slot, num_tokens);
        tracker_.NoteKeys(slot, pool_.step);
        pool_.step = seq;
        requests_.InvalidateFastPath(slot);
    }

    void Finish(Int slot, Int end, Int fence, Int seq, PartResult* result) {
        if (end == kEndPreempted && requests_.running[slot]) tracker_.PrepareReturn(slot);
        if (end != kEndHeld) fence = tracker_.LoadIsOver(slot, fence);
        if (end == kEndFree) {
            Append(tracker_.Finish(slot, seq, fence), &result->preempted);
        } else if (end == kEndHeld) {
            Append(tracker_.Hold(slot, seq), &result->preempted);
        } else if (requests_.running[slot]) {
            for (const Int gone : tracker_.Preempt(slot, seq, fence)) {
                if (gone != slot) result->preempted.push_back(gone);
            }
        }
    }

    Coordinator& blocks_;
    Requests& requests_;
    BlockPool& pool_;
    InFlightTracker& tracker_;
    TierLoads tier_loads_;
    GivenHashes given_;
};

}  // namespace kvplane
