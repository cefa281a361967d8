// The cache of one engine instance: applies steps.
#pragma once

#include "facts.h"
#include "resume.h"
#include "retaining.h"
#include "step_applier.h"
#include "tiers/behind.h"
#include "tiers/prefetch.h"

namespace kvplane {

class Replica {
  public:
    explicit Replica(Spec replica_spec)
        : spec(std::move(replica_spec)),
          blocks(spec),
          tracker(blocks, counters),
          facts(blocks, tracker),
          validator_(spec, blocks.requests, &blocks.pool, &blocks.tiers),
          save_behind_(blocks) {}

    bool Accepts(const Step& step, Refusal* refusal) {
        if (!validator_.Accepts(step)) {
            *refusal = validator_.refusal();
            return false;
        }
        if (!step.resumes()) return true;
        Resumption image(blocks, shown);
        const bool accepts = image.Accepts(step);
        if (!accepts) *refusal = image.refusal();
        return accepts;
    }

    // Applies a step that was accepted.
    void Apply(const Step& step, std::vector<PartResult>* results) {
        BeginStep(step.seq, step.executed_through);
        results->resize(step.parts.size());
        for (size_t number = 0; number < step.parts.size(); ++number) {
            (*results)[number].Clear();
            ApplyPart(step.parts[number], step.seq, step.part == 0 && number == 0, &(*results)[number]);
        }
        if (step.last) CompleteStep(step.seq, &results->back());
    }

    // The rows of an `OpenStep` are applied between these calls.
    void BeginStep(Int step, Int executed_through) {
        seq = std::max(seq, step);
        blocks.pool.step = step;
        tracker.Executed(executed_through);
    }

    void CompletePart(PartResult* result) {
        counters.refused += std::count(result->admit_status.begin(), result->admit_status.end(), Int{kRefused});
        blocks.pool.retained.ForgetLost();
        blocks.TakeOrders(&result->orders);
        if (!spec.tiers.empty()) {
            blocks.tiers.Give(result);
            blocks.tiers.demand_now += static_cast<Int>(result->orders.stamp_block.size());
        }
        result->events = blocks.pool.TakeEvents();
        result->free_blocks = blocks.pool.num_free();
    }

    void CompleteStep(Int step, PartResult* last) {
        tracker.CloseStep(step);
        if (!spec.tiers.empty()) {
            save_behind_.CloseStep(tracker.NextVictim(step));
            blocks.tiers.Give(last);
            blocks.pool.retained.ForgetLost();  // what the saves and moves evicted
        }
        ++counters.steps;
        last->free_blocks = blocks.pool.num_free();
        SweepDomains();
    }

    // -- engine lives ------------------------------------------------------------------------------------------------

    // Begins an engine life after the last one was ended; blocks that its loads may still write are held.
    // `shown`: the stamp table, as in `Replica.enter_epoch`.
    void EnterEpoch(Int epoch, const BlockList& busy, bool memory_is_new, const Shown& shown) {
        BlockPool& pool = blocks.pool;
        BlockList under_load = tracker.Close();
        if (memory_is_new) {
            under_load.clear();
            ReleaseBusy(pool, Column(pool.busy.begin(), pool.busy.end()));
        }
        pool.BeginEpoch(static_cast<uint64_t>(epoch));
        under_load.insert(under_load.end(), busy.begin(), busy.end());
        HoldBusy(pool, under_load);
        blocks.tiers.BeginEpoch(epoch, memory_is_new, shown);
        pool.retained.Resume();
        keeps_keys = true;
        seq = 0;
    }

    Int Horizon() const { return spec.safe ? blocks.pool.executed_through : kInside; }

    const Spec spec;
    Coordinator blocks;
    Counters counters;
    InFlightTracker tracker;
    FactApplier facts;
    Int seq = 0;
    bool keeps_keys = true;  // false while an engine life begins without a stamp table
    Shown shown;  // while a step with an image is applied: what the memory had when the engine life began

  private:
    void ApplyPart(const Part& part, Int step, bool opens, PartResult* result) {
        facts.Apply(part, step, result);
        facts.ApplyCache(part.cache, result);
        facts.ApplyPeers(part.peers);
        result->taken_back = static_cast<Int>(result->preempted.size());
        ApplyNews(part, result);
        if (part.resume) Resumption(blocks, shown).Apply(*part.resume, tracker);
        if (opens) blocks.NewStep();
        StepApplier applier(blocks, tracker, part.budget, result, step);
        if (!part.run.slot.empty()) applier.ApplyRun(part.run);
        if (!part.admit.slot.empty()) applier.ApplyAdmit(part.admit);
        ApplyPeek(part.peek, result);
        if (!part.prefetch.slot.empty()) Prefetcher(blocks, tracker).Apply(part.prefetch, result);
        if (!part.retain.empty()) Retainer(blocks).Apply(part.retain, result);
        if (part.with_tables) AddAllTables(part, result);
        counters.unaligned_chunks += applier.unaligned_chunks;
        counters.starved_chunks += applier.starved_chunks;
        CompletePart(result);
    }

  public:
    void ApplyNews(const Part& part, PartResult* result) {
        const News& news = part.news;
        Requests& requests = blocks.requests;
        GivenHashes given;
        given.Begin(news.num_hashes, news.hashes);
        MadeHashes made(news.tokens.ids, part.news_made, facts.hasher, &result->hashed_news);
        const bool has_tokens = news.tokens.count > 0;
        for (size_t row = 0; row < news.slot.size(); ++row) {
            const Int slot = news.slot[row], most = Entry(news.max_tokens, row, 0);
            requests.Add(slot, news.num_tokens[row], std::min(most ? most : spec.max_model_len, spec.max_model_len));
            blocks.Grow(slot);
            requests.HashOutside(slot, has_tokens && made.IsGiven(row));
            const Hashes hashes = has_tokens ? made.Of(requests, slot, row, news.num_tokens[row]) : given.Of(row);
            const size_t digest_size = has_tokens ? facts.hasher.none_hash.size : given.digest_size;
            requests.content[slot].add(hashes.data, hashes.size, digest_size);
            requests.by_service[slot] = has_tokens;
            if (!news.request_id.empty()) requests.request_id[slot] = news.request_id[row];
            requests.domain[slot] = blocks.pool.pairs.DomainOf(news.domain.empty() ? std::string() : news.domain[row]);
            requests.skip_reading[slot] = Entry(news.skip_reading, row, 0) != 0;
        }
        for (size_t row = 0; row < news.hint.size() && blocks.pool.hazard; ++row)
            blocks.pool.hazard->NoteHint(requests, news.slot[row], news.hint[row]);
        if (part.with_hashes) {
            for (const Int slot : news.slot) facts.ReportHashes(slot, result);
        }
    }

  private:
    void ApplyPeek(const Peek& peek, PartResult* result) const {
        for (size_t row = 0; row < peek.slot.size(); ++row) {
            const Hit hit = blocks.FindHit(peek.slot[row], Entry(peek.limit, row, kUnlimited));
            result->peek_hit.push_back(hit.num_tokens);
            result->peek_single_group_hit.push_back(hit.single_group_hit);
            for (size_t group = 0; peek.with_blocks && group < hit.blocks.size(); ++group) {
                result->peek_blocks.Add(static_cast<Int>(row), static_cast<Int>(group), hit.blocks[group]);
            }
        }
    }

    void AddAllTables(const Part& part, PartResult* result) const {
        result->tables = BlockLists();
        Int row = 0;
        for (const Column* slots : {&part.run.slot, &part.admit.slot}) {
            for (const Int slot : *slots) {
                for (const auto& one : blocks.managers) result->tables.Add(row, one->group, one->table[slot]);
                ++row;
            }
        }
    }

    // Frees the numbers of domains that neither keys nor requests nor records of steps in flight name.
    void SweepDomains() {
        Pairs& pairs = blocks.pool.pairs;
        if (pairs.Live() < next_sweep_ && !kSmallTables) return;
        std::vector<bool> used(pairs.Capacity(), false);
        for (const KeyRecord& record : blocks.pool.records) {
            if (record.key.pair) used[pairs.Domain(record.key.pair)] = true;
        }
        for (Int slot = 0; slot < blocks.requests.size(); ++slot) {
            if (blocks.requests.live[slot]) used[blocks.requests.domain[slot]] = true;
        }
        const auto mark = [&](const NamedKeys& keys) {
            for (const auto& [block, key] : keys) used[pairs.Domain(key.pair)] = true;
        };
        for (const auto& [step, book] : tracker.tentative)
            book.ForEach([&](const Stay&, const NamedKeys& keys) { mark(keys); });
        mark(blocks.pool.registered);
        for (const auto& one : blocks.managers) {
            for (const Key& key : one->RecordedKeys()) used[pairs.Domain(key.pair)] = true;
        }
        for (const auto& [number, one] : blocks.pool.retained.each()) used[one.domain] = true;
        blocks.tiers.ForEachKey([&](const Key& key) { used[pairs.Domain(key.pair)] = true; });
        pairs.Sweep(used);
        next_sweep_ = pairs.Live() * 2 + 1024;
    }

    StepValidator validator_;
    SaveBehind save_behind_;
    size_t next_sweep_ = 1024;
};

}  // namespace kvplane
