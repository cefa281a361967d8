// Tells whether a step can be applied whole. Of a step that it does not accept, validate.py finds the fault or none.
#pragma once

#include "coordinator.h"
#include "tiers/checks.h"

namespace kvplane {

// Finds out whether slots are in range and each there once. Most steps name the slots of the step before.
class DistinctSlots {
  public:
    // `last`: slots that are; becomes these if they are.
    bool Are(const Column& slots, Column* last) {
        if (slots == *last) return true;
        ++mark_;
        for (const Int slot : slots) {
            if (slot < 0 || slot >= kMaxSlots || std::exchange(seen_[static_cast<size_t>(slot)], mark_) == mark_)
                return false;
        }
        *last = slots;
        return true;
    }

  private:
    std::vector<uint64_t> seen_ = std::vector<uint64_t>(kMaxSlots);  // by slot: mark_ when it was last named
    uint64_t mark_ = 0;
};

class StepValidator {
  public:
    StepValidator(const Spec& spec, const Requests& requests, const BlockPool& pool, const Tiers& tiers)
        : spec_(spec), requests_(requests), pool_(pool), tiers_(tiers), number_(kMaxSlots) {
        for (const GroupSpec& one : spec.groups) {
            if (!one.is_state()) continue;
            const bool is_first = states_for_drafts_ < 0;
            states_for_drafts_ =
                is_first ? one.speculative_blocks : std::min(states_for_drafts_, one.speculative_blocks);
        }
    }

    bool Accepts(const Step& step) {
        BeginRows();
        if (step.parts.empty() || step.executed_through < 0 || step.executed_through >= step.seq) return false;
        executed_through_ = std::max(executed_through_, step.executed_through);
        num_parts_ = step.parts.size();
        return std::all_of(step.parts.begin(), step.parts.end(),
                           [&](const Part& part) { return AcceptsPart(part, step.seq); });
    }

    // Begins a step whose rows are checked one by one, each after those before it were applied.
    void BeginRows() {
        ForgetSlots();
        not_busy_.clear();
        asked_to_load_.clear();
        loads_over_.clear();
        executed_through_ = pool_.executed_through;
        num_parts_ = 2;
    }

    bool AcceptsRow(const Part& part, Int seq) {
        ForgetSlots();
        return AcceptsPart(part, seq);
    }

  private:
    void ForgetSlots() {
        plain_ = nullptr;
        for (const auto& [slot, known] : slots_) number_[static_cast<size_t>(slot)] = 0;
        slots_.clear();
        computed_.clear();
    }

    bool AcceptsPart(const Part& part, Int seq) {
        return AcceptsFacts(part.facts, seq, !part.run.extra.empty()) && AcceptsCache(part.cache, seq) &&
               AcceptsNews(part.news) && AcceptsRun(part.run) && AcceptsAdmit(part.admit) && AcceptsPeek(part.peek) &&
               AcceptsPrefetch(part.prefetch) && AcceptsRetain(part.retain) && AcceptsBudget(part.budget);
    }

    // The state that a slot would have after the rows that were checked so far.
    struct Slot {
        bool live = false, held = false, by_service = false;
        Int num_tokens = 0, num_digests = 0, limit = 0;
        size_t digest_size = 0;
    };

    // Valid until the next call.
    Slot& Look(Int slot) {
        if (slot < 0 || slot >= kMaxSlots) return no_slot_ = Slot();
        uint32_t& number = number_[static_cast<size_t>(slot)];
        if (number) return slots_[number - 1].second;
        Slot known;
        if (requests_.IsLive(slot)) {
            const Digests& content = requests_.content[slot];
            known = Slot{true,
                         requests_.held[slot] != 0,
                         requests_.by_service[slot] != 0,
                         requests_.num_tokens[slot],
                         content.count(),
                         requests_.limit[slot],
                         content.size};
        }
        slots_.emplace_back(slot, known);
        number = static_cast<uint32_t>(slots_.size());
        return slots_.back().second;
    }

    bool IsLive(Int slot) const {
        if (slot < 0 || slot >= kMaxSlots) return false;
        const uint32_t number = number_[static_cast<size_t>(slot)];
        return number ? slots_[number - 1].second.live : requests_.IsLive(slot);
    }

    static bool Fits(const Column& column, const Column& slots) {
        return column.empty() || column.size() == slots.size();
    }
    static bool Within(const Column& column, Int low, Int high) {
        return std::all_of(column.begin(), column.end(), [&](Int one) { return low <= one && one <= high; });
    }
    static bool Within(Int value, Int low, Int high) { return low <= value && value <= high; }
    static bool HasBits(const Column& column, Int allowed) {
        return std::all_of(column.begin(), column.end(), [&](Int one) { return (one & ~allowed) == 0; });
    }

    // Bytes per digest, 0 if there are none; false for another size than that of the replica.
    bool DigestSize(const Hashes& hashes, const Column& counts, size_t* size) const {
        *size = 0;
        if (!Within(counts, 0, kMaxTokens)) return false;
        size_t count = 0;
        for (const Int one : counts) count += static_cast<size_t>(one);
        if (count == 0) return hashes.size == 0;
        *size = static_cast<size_t>(spec_.digest_size);
        return *size * count == hashes.size;
    }

    Int MostHint() const { return std::max<Int>(1, spec_.hint_values) - 1; }

    bool DigestsFit(const Slot& known) const { return known.num_digests <= known.num_tokens / spec_.hash_block_size; }

    bool AcceptsFacts(const Facts& facts, Int seq, bool has_drafts) {
        for (const Column* column : {&facts.computed, &facts.appended, &facts.num_hashes, &facts.commit, &facts.end,
                                     &facts.fence, &facts.release_skipped, &facts.hint}) {
            if (!Fits(*column, facts.slot)) return false;
        }
        if (facts.tokens.count) {
            Int sum = 0;
            for (const Int one : facts.appended) sum += Within(one, 0, kMaxTokens) ? one : kForever / 2;
            if (facts.tokens.count != sum || !facts.tokens.fit) return false;
        }
        if (!Within(facts.hint, kUnchanged, MostHint())) return false;
        size_t size = 0;
        if (!DigestSize(facts.hashes, facts.num_hashes, &size)) return false;
        if (IsPlain(facts, has_drafts) && distinct_.Are(facts.slot, &facts_slots_) && AcceptsAppended(facts)) {
            plain_ = &facts.slot;
            return AcceptsHashes(facts, size);
        }
        for (size_t row = 0; row < facts.slot.size(); ++row) {
            if (!AcceptsFactsRow(facts, row, size, seq)) return false;
        }
        return true;
    }

    // Whether the rows only append tokens and hashes, and no row or section behind them depends on how many: they can
    // be checked against the requests. Most rows of most steps are such.
    bool IsPlain(const Facts& facts, bool has_drafts) const {
        return num_parts_ == 1 && (states_for_drafts_ < 0 || !has_drafts) && facts.OnlyAppend();
    }

    // The requests and the columns of tokens of rows that only append.
    bool AcceptsAppended(const Facts& facts) const {
        const Int *const limit = requests_.limit.data(), *const num_tokens = requests_.num_tokens.data();
        const Int* const appended = facts.appended.empty() ? nullptr : facts.appended.data();
        const uint8_t *const live = requests_.live.data(), *const held = requests_.held.data();
        const uint8_t *const by_service = requests_.by_service.data(), has_tokens = facts.tokens.count > 0;
        bool accepts = true;
        for (size_t row = 0; row < facts.slot.size(); ++row) {
            const Int slot = facts.slot[row], count = appended == nullptr ? 0 : appended[row];
            accepts &= live[slot] && !held[slot] && count >= 0 && count <= limit[slot] - num_tokens[slot] &&
                       (count == 0 || by_service[slot] == has_tokens);
        }
        return accepts;
    }

    // The columns of hashes of rows that only append.
    bool AcceptsHashes(const Facts& facts, size_t size) const {
        for (size_t row = 0; row < facts.num_hashes.size(); ++row) {
            const Int count = facts.num_hashes[row], slot = facts.slot[row];
            if (count == 0) continue;
            const Digests& known = requests_.content[slot];
            const Int num_tokens = requests_.num_tokens[slot] + Entry(facts.appended, row, 0);
            if (requests_.by_service[slot] || (known.size != 0 && known.size != size) ||
                known.count() + count > num_tokens / spec_.hash_block_size)
                return false;
        }
        return true;
    }

    bool AcceptsFactsRow(const Facts& facts, size_t row, size_t size, Int seq) {
        const Int slot = facts.slot[row], appended = Entry(facts.appended, row, 0);
        Slot& known = Look(slot);
        if (!known.live || !Within(appended, 0, known.limit - known.num_tokens)) return false;
        known.num_tokens += appended;
        if (appended && known.by_service != (facts.tokens.count > 0)) return false;
        const Int commit = Entry(facts.commit, row, kUnchanged);
        if (commit != kUnchanged && (!LoadHasStarted(slot) || asked_to_load_.contains(slot))) return false;
        for (const Int value :
             {Entry(facts.computed, row, kUnchanged), commit, Entry(facts.release_skipped, row, kUnchanged)}) {
            if (!Within(value, kUnchanged, spec_.max_model_len)) return false;
        }
        if (states_for_drafts_ >= 0 && Entry(facts.computed, row, kUnchanged) != kUnchanged)
            computed_[slot] = facts.computed[row];
        if (const Int count = Entry(facts.num_hashes, row, 0)) {
            if (known.by_service || (known.digest_size != 0 && known.digest_size != size)) return false;
            known.digest_size = size;
            known.num_digests += count;
            if (!DigestsFit(known)) return false;
        }
        const Int end = Entry(facts.end, row, kEndNone), fence = Entry(facts.fence, row, 0);
        if (!Within(end, kEndNone, kEndPreempted) || !Within(fence, 0, seq) || (fence && end == kEndHeld) || known.held)
            return false;
        if (end != kEndNone) loads_over_.insert(slot);
        known.held = end == kEndHeld;
        known.live = end != kEndFree;
        return true;
    }

    bool LoadHasStarted(Int slot) const {
        const bool waits = requests_.loading.contains(slot) && !loads_over_.contains(slot) && requests_.running[slot];
        return !waits || requests_.load_after[slot] <= executed_through_;
    }

    bool AcceptsCache(const Cache& cache, Int seq) {
        for (const Int failed : cache.failed_steps) {
            if (failed <= 0 || failed >= seq || failed <= executed_through_) return false;
        }
        if (!Within(cache.evicted, 1, spec_.num_blocks - 1)) return false;
        if (!cache.mismatched.empty()) {
            const std::set<Int> evicted(cache.evicted.begin(), cache.evicted.end());
            for (const Int block : cache.mismatched) {
                if (!evicted.contains(block)) return false;
            }
        }
        if (!Within(cache.hits_checked, 0, kUnlimited)) return false;
        for (const Int slot : cache.released) {
            Slot& known = Look(slot);
            if (!known.live || !(known.held || requests_.loading.contains(slot))) return false;
            loads_over_.insert(slot);
            if (known.held) known.held = known.live = false;
        }
        for (const Int block : cache.loads_over) {
            if (!Within(block, 1, spec_.num_blocks - 1) || !pool_.busy.contains(static_cast<Block>(block)))
                return false;
            if (!not_busy_.insert(static_cast<Block>(block)).second) return false;
        }
        return AcceptsJobs(cache, tiers_, executed_through_);
    }

    bool AcceptsNews(const News& news) {
        const size_t rows = news.slot.size();
        for (const Column* column : {&news.num_hashes, &news.skip_reading, &news.max_tokens, &news.hint}) {
            if (!Fits(*column, news.slot)) return false;
        }
        for (const size_t count : {news.request_id.size(), news.domain.size(), static_cast<size_t>(news.num_extra_keys),
                                   static_cast<size_t>(news.num_traceparents)}) {
            if (count && count != rows) return false;
        }
        if (!Within(news.hint, 0, MostHint())) return false;
        if (news.num_tokens.size() != rows || !Within(news.num_tokens, 1, spec_.max_model_len)) return false;
        Int sum = 0;
        for (const Int one : news.num_tokens) sum += one;
        const bool by_service = news.tokens.count > 0;
        if (by_service && (news.tokens.count != sum || news.hashes.size || !news.tokens.fit)) return false;
        size_t size = 0;
        if (!DigestSize(news.hashes, news.num_hashes, &size)) return false;
        for (size_t row = 0; row < rows; ++row) {
            const Int slot = news.slot[row], most = Entry(news.max_tokens, row, 0);
            if (!Within(slot, 0, kMaxSlots - 1) || !Within(most, 0, kMaxTokens)) return false;
            Slot& known = Look(slot);
            if (known.live) return false;
            const Int limit = most ? std::min(most, spec_.max_model_len) : spec_.max_model_len;
            if (news.num_tokens[row] > limit) return false;
            known = Slot{true, false, by_service, news.num_tokens[row], Entry(news.num_hashes, row, 0), limit, size};
            if (!DigestsFit(known)) return false;
        }
        return true;
    }

    bool AllLive(const Column& slots) const {
        if (slots_.empty()) return requests_.AreLive(slots);
        return std::all_of(slots.begin(), slots.end(), [&](Int slot) { return IsLive(slot); });
    }

    // Whether the slots are those of live requests, each once.
    bool AllLiveAndDistinct(const Column& slots, Column* last) {
        if (plain_ != nullptr && slots_.empty() && slots == *plain_) return true;
        return distinct_.Are(slots, last) && AllLive(slots);
    }

    bool AcceptsRun(const Run& run) {
        for (const Column* column : {&run.extra, &run.cap, &run.lookahead, &run.in_flight, &run.flags, &run.reserved}) {
            if (!Fits(*column, run.slot)) return false;
        }
        if (!AllLiveAndDistinct(run.slot, &run_slots_) || !AllLive(run.victims)) return false;
        if (!requests_.loading.empty()) {
            if (!std::all_of(run.slot.begin(), run.slot.end(), [&](Int slot) { return LoadHasStarted(slot); }))
                return false;
        }
        return Within(run.extra, -kMaxTokens, kMaxTokens) && Within(run.cap, 0, kUnlimited) &&
               Within(run.lookahead, 0, kMaxLookahead) && Within(run.in_flight, -1, kMaxTokens) &&
               Within(run.reserved, 0, spec_.num_blocks) && Within(run.on_refusal, kStop, kPreempt) &&
               HasBits(run.flags, kReservedAlign | kDelayCaching | kFullFit | kUnaligned) && AcceptsDrafts(run);
    }

    // Rows with more drafts than there are draft states would lose the state before rejected drafts.
    bool AcceptsDrafts(const Run& run) {
        if (states_for_drafts_ < 0 || !spec_.safe) return true;
        const Int most = states_for_drafts_;
        if (std::all_of(run.extra.begin(), run.extra.end(), [&](Int extra) { return extra <= most; })) return true;
        for (size_t row = 0; row < run.extra.size(); ++row) {
            const Int slot = run.slot[row];
            if (!requests_.IsLive(slot) || !requests_.running[slot]) continue;
            const Int known = Look(slot).num_tokens;
            const auto given = computed_.find(slot);
            const Int computed =
                std::min(given == computed_.end() ? kMaxTokens : given->second, requests_.computed[slot]);
            const Int end =
                std::min({known + run.extra[row], computed + Entry(run.cap, row, kUnlimited), spec_.max_model_len});
            const auto asked = requests_.asked.find(slot);
            const bool in_flight = asked != requests_.asked.end() && asked->second.first > executed_through_;
            const Int base = std::max(computed, in_flight ? asked->second.second : 0);
            if (known - computed <= 1 && end - base > 1 + most) return false;
        }
        return true;
    }

    bool AcceptsAdmit(const Admit& admit) {
        for (const Column* column : {&admit.extra, &admit.cap, &admit.lookahead, &admit.external, &admit.expected_hit,
                                     &admit.encoder_tokens, &admit.reserved, &admit.watermark, &admit.flags,
                                     &admit.hit_limit, &admit.min_new, &admit.single_group_hit}) {
            if (!Fits(*column, admit.slot)) return false;
        }
        if (!admit.skip_zero_groups.empty() && admit.skip_zero_groups.size() != admit.slot.size()) return false;
        if (!AllLiveAndDistinct(admit.slot, &admit_slots_)) return false;
        const bool fits = Within(admit.extra, -kMaxTokens, kMaxTokens) && Within(admit.cap, 0, kUnlimited) &&
                          Within(admit.lookahead, 0, kMaxLookahead) && Within(admit.external, 0, spec_.max_model_len) &&
                          Within(admit.encoder_tokens, 0, kMaxTokens) &&
                          Within(admit.expected_hit, -1, spec_.max_model_len) &&
                          Within(admit.reserved, 0, spec_.num_blocks) && Within(admit.hit_limit, 0, kUnlimited) &&
                          Within(admit.min_new, 0, kUnlimited) && Within(admit.single_group_hit, 0, kUnlimited) &&
                          Within(admit.watermark, kAuto, kNever) && Within(admit.max_running, 0, kUnlimited) &&
                          Within(admit.on_refusal, kStop, kSkip) &&
                          HasBits(admit.flags, kReservedAlign | kDelayCaching | kFullFit | kWhole | kUnaligned |
                                                   (spec_.tiers.empty() ? Int{0} : Int{kLoad})) &&
                          AcceptsLoads(admit);
        if (!fits) return false;
        for (size_t row = 0; num_parts_ > 1 && row < admit.slot.size(); ++row) {
            if (Entry(admit.external, row, 0) && (Entry(admit.flags, row, 0) & kDelayCaching))
                asked_to_load_.insert(admit.slot[row]);
        }
        return true;
    }

    bool AcceptsPeek(const Peek& peek) const {
        return Fits(peek.limit, peek.slot) && Within(peek.limit, 0, kUnlimited) && AllLive(peek.slot);
    }

    bool AcceptsPrefetch(const Prefetch& prefetch) const {
        const size_t rows = prefetch.slot.size();
        if (rows == 0) {
            return prefetch.hashes.size == 0 && prefetch.domain.empty() && prefetch.num_hashes.empty() &&
                   prefetch.within_ns.empty();
        }
        size_t size = 0;
        if (!Fits(prefetch.num_hashes, prefetch.slot) || !Fits(prefetch.within_ns, prefetch.slot) ||
            (!prefetch.domain.empty() && prefetch.domain.size() != rows) ||
            !Within(prefetch.within_ns, 0, kMaxWithinNs) ||
            !DigestSize(prefetch.hashes, prefetch.num_hashes, &size) || spec_.tiers.size() < 2)
            return false;
        for (size_t row = 0; row < rows; ++row) {
            const Int slot = prefetch.slot[row];
            if ((slot == kNoRequest) != (Entry(prefetch.num_hashes, row, 0) > 0)) return false;
            if (slot != kNoRequest && !IsLive(slot)) return false;
        }
        return true;
    }

    bool AcceptsRetain(const Retain& retain) const {
        const size_t rows = retain.num_hashes.size();
        if (rows > 0 && spec_.blocks_per_state > 1) return false;  // superblocks are evicted as a whole
        size_t size = 0;
        for (const Column* column : {&retain.priority, &retain.until_ns, &retain.percent}) {
            if (!Fits(*column, retain.num_hashes)) return false;
        }
        for (const auto* texts : {&retain.domain, &retain.owner}) {
            if (!texts->empty() && texts->size() != rows) return false;
        }
        const auto is_long = [](const std::string& owner) {
            const auto is_first = [](char byte) { return (byte & 0xC0) != 0x80; };
            return std::count_if(owner.begin(), owner.end(), is_first) > kMaxOwnerChars;
        };
        const Int most = spec_.max_model_len / spec_.hash_block_size;
        return DigestSize(retain.hashes, retain.num_hashes, &size) && Within(retain.num_hashes, 1, most) &&
               retain.now_ns.size() < 2 && Within(retain.now_ns, 0, kMaxNs) &&
               Within(retain.until_ns, 0, std::min(kMaxNs, retain.time_ns() + kMaxRetainedNs)) &&
               Within(retain.priority, 0, kMaxPriority) && Within(retain.percent, 0, 100) &&
               std::none_of(retain.owner.begin(), retain.owner.end(), is_long);
    }

    bool AcceptsBudget(const Budget& budget) const {
        return Within(budget.tokens, 0, kUnlimited) && Within(budget.input, 0, kUnlimited) &&
               Within(budget.overhead, 0, kUnlimited);
    }

    const Spec& spec_;
    const Requests& requests_;
    const BlockPool& pool_;
    const Tiers& tiers_;
    Int executed_through_ = 0;
    std::set<Block> not_busy_;                 // blocks that loads_over releases in this message
    std::vector<std::pair<Int, Slot>> slots_;  // those that the message names so far
    std::vector<uint32_t> number_;             // by slot: 1 + its index in slots_, 0 = none
    Slot no_slot_;
    std::set<Int> asked_to_load_, loads_over_;  // slots of this message
    DistinctSlots distinct_;
    Column facts_slots_, run_slots_, admit_slots_;  // of the last such section with distinct slots
    const Column* plain_ = nullptr;                 // slots of the facts of this message if they only append
    std::unordered_map<Int, Int> computed_;  // by slot, the computed tokens that facts set; only with states
    Int states_for_drafts_ = -1;             // how many drafts can be rejected without losing a state; -1: no states
    size_t num_parts_ = 0;
};

}  // namespace kvplane
