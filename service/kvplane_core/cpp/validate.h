// Tells whether a step can be applied whole, and if not, names the fault: the first one in the order of validate.py.
#pragma once

#include "coordinator.h"
#include "refusal.h"
#include "tiers/tiers.h"

namespace kvplane {

class StepValidator : public ColumnChecks {
  public:
    // `pool`, `tiers`: null of a replica that has nothing yet.
    StepValidator(const Spec& spec, const Requests& requests, const BlockPool* pool, const Tiers* tiers)
        : ColumnChecks(spec), requests_(requests), pool_(pool), tiers_(tiers), number_(kMaxSlots) {
        for (const GroupSpec& one : spec.groups) {
            if (!one.is_state()) continue;
            const bool is_first = states_for_drafts_ < 0;
            states_for_drafts_ =
                is_first ? one.speculative_blocks : std::min(states_for_drafts_, one.speculative_blocks);
        }
    }

    bool Accepts(const Step& step) {
        BeginRows();
        if (step.parts.empty()) return Refuse("no parts", "parts");
        if (step.executed_through < 0 || step.executed_through >= step.seq)
            return Refuse("executed", "executed_through", kWholeColumn, {step.seq - 1});
        executed_through_ = std::max(executed_through_, step.executed_through);
        num_parts_ = step.parts.size();
        for (const Part& part : step.parts) {
            ++part_;
            if (!AcceptsPart(part, step.seq)) return false;
        }
        return true;
    }

    // Begins a step whose rows are checked one by one, each after those before it were applied.
    void BeginRows() {
        ForgetSlots();
        not_busy_.clear();
        asked_to_load_.clear();
        loads_over_.clear();
        executed_through_ = pool_ ? pool_->executed_through : 0;
        num_parts_ = 2;
        part_ = kNone;
    }

    bool AcceptsRow(const Part& part, Int seq) {
        ForgetSlots();
        return AcceptsPart(part, seq);
    }

  private:
    void ForgetSlots() {
        for (const auto& [slot, known] : slots_) number_[static_cast<size_t>(slot)] = 0;
        slots_.clear();
        computed_.clear();
        plain_ = nullptr;
    }

    bool AcceptsPart(const Part& part, Int seq) {
        return AcceptsFacts(part.facts, seq, !part.run.extra.empty()) && AcceptsCache(part.cache, seq) &&
               AcceptsPeers(part.peers) && AcceptsNews(part.news) && AcceptsRun(part.run) &&
               AcceptsAdmit(part.admit) && AcceptsPeek(part.peek) && AcceptsPrefetch(part.prefetch) &&
               AcceptsRetain(part.retain) && AreInRange(part.budget);
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

    bool DigestsFit(const Slot& known, const char* column, size_t row) {
        const Int most = known.num_tokens / spec_.hash_block_size;
        return Within(known.num_digests, 0, most) ||
               Refuse("hashes", column, row, {known.num_digests, known.num_tokens, most});
    }

    bool AllLive(const Column& slots, const char* column) {
        if (slots_.empty() && requests_.AreLive(slots)) return true;
        for (size_t row = 0; row < slots.size(); ++row) {
            if (!IsLive(slots[row])) return Refuse("no request", column, row);
        }
        return true;
    }

    // Whether the slots are those of live requests, each once.
    bool AllLiveAndDistinct(const Column& slots, Column* last, const char* column) {
        if (plain_ != nullptr && slots_.empty() && slots == *plain_) return true;
        if (!AllLive(slots, column)) return false;
        if (distinct_.Are(slots, last)) return true;
        for (auto one = slots.begin(); one != slots.end(); ++one) {
            if (std::find(slots.begin(), one, *one) != one) return Refuse("twice", column, kWholeColumn, {*one});
        }
        return true;
    }

    // -- facts -------------------------------------------------------------------------------------------------------

    bool AcceptsFacts(const Facts& facts, Int seq, bool has_drafts) {
        if (!Fit(NumEntriesOf(facts), facts.slot.size()))
            return false;
        if (facts.tokens.count) {
            if (facts.tokens.count != Sum(facts.appended)) return Refuse("ids of appended", "facts.tokens");
            if (!facts.tokens.fit) return Refuse("range", "facts.tokens", kWholeColumn, {0, kUnlimited});
        }
        size_t size = 0;
        if (!DigestSize(facts.hashes, facts.num_hashes, "facts.num_hashes", "facts.hashes", &size) ||
            !Hints(facts.hint, kUnchanged, "facts.hint"))
            return false;
        if (IsPlain(facts, has_drafts) && distinct_.Are(facts.slot, &facts_slots_) && AcceptsAppended(facts) &&
            AcceptsHashes(facts, size)) {
            plain_ = &facts.slot;
            return true;
        }
        for (size_t row = 0; row < facts.slot.size(); ++row) {
            if (!AcceptsFactsRow(facts, row, size, seq)) return false;
        }
        return true;
    }

    // Whether the rows only append, and nothing behind them depends on how many: they can be checked against the
    // requests. Most rows of most steps are such.
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
        if (!known.live) return Refuse("no request", "facts.slot", row);
        if (!Within(appended, 0, known.limit - known.num_tokens))
            return Refuse("limit", "facts.appended", row, {known.num_tokens, known.limit});
        known.num_tokens += appended;
        if (appended && known.by_service != (facts.tokens.count > 0))
            return Refuse(known.by_service ? "ids wanted" : "hashes wanted", "facts.tokens", row);
        const Int commit = Entry(facts.commit, row, kUnchanged), longest = spec_.max_model_len;
        const Int computed = Entry(facts.computed, row, kUnchanged);
        if (commit != kUnchanged) {
            if (!LoadHasStarted(slot, "facts.commit", row)) return false;
            if (asked_to_load_.contains(slot)) return Refuse("load asked", "facts.commit", row, {slot});
        }
        if (!Within(computed, kUnchanged, longest)) return Refuse("position", "facts.computed", row, {longest});
        if (!Within(commit, kUnchanged, longest)) return Refuse("position", "facts.commit", row, {longest});
        if (!Within(Entry(facts.release_skipped, row, kUnchanged), kUnchanged, longest))
            return Refuse("position", "facts.release_skipped", row, {longest});
        if (states_for_drafts_ >= 0 && computed != kUnchanged) computed_[slot] = computed;
        if (const Int count = Entry(facts.num_hashes, row, 0)) {
            if (known.by_service) return Refuse("no hashes wanted", "facts.num_hashes", row);
            const Column sizes{static_cast<Int>(size), static_cast<Int>(known.digest_size)};
            if (sizes[1] && sizes[0] != sizes[1]) return Refuse("hash size", "facts.hashes", kWholeColumn, sizes);
            known.digest_size = size;
            known.num_digests += count;
            if (!DigestsFit(known, "facts.num_hashes", row)) return false;
        }
        return AcceptsEnd(facts, row, seq, &known);
    }

    bool AcceptsEnd(const Facts& facts, size_t row, Int seq, Slot* known) {
        const Int end = Entry(facts.end, row, kEndNone), fence = Entry(facts.fence, row, 0);
        if (!Within(end, kEndNone, kEndPreempted)) return Refuse("end", "facts.end", row);
        if (!Within(fence, 0, seq)) return Refuse("fence", "facts.fence", row, {seq});
        if (fence && end == kEndHeld) return Refuse("fence of held", "facts.fence", row);
        if (known->held) return Refuse("held", "facts.slot", row);
        if (end != kEndNone) loads_over_.insert(facts.slot[row]);
        known->held = end == kEndHeld;
        known->live = end != kEndFree;
        return true;
    }

    bool LoadHasStarted(Int slot, const char* column, size_t row) {
        const bool waits = requests_.loading.contains(slot) && !loads_over_.contains(slot) && requests_.running[slot];
        if (!waits || requests_.load_after[slot] <= executed_through_) return true;
        return Refuse("load not started", column, row, {slot, requests_.load_after[slot]});
    }

    // -- cache -------------------------------------------------------------------------------------------------------

    bool AcceptsCache(const Cache& cache, Int seq) {
        for (size_t row = 0; row < cache.failed_steps.size(); ++row) {
            const Int failed = cache.failed_steps[row];
            if (failed <= 0 || failed >= seq) return Refuse("not sent", "cache.failed_steps", row, {seq});
            if (failed <= executed_through_) return Refuse("executed step", "cache.failed_steps", row);
        }
        const Int last = spec_.num_blocks - 1;
        for (size_t row = 0; row < cache.evicted.size(); ++row) {
            if (!Within(cache.evicted[row], 1, last)) return Refuse("block", "cache.evicted", row, {last});
        }
        if (!cache.mismatched.empty()) {
            const std::set<Int> evicted(cache.evicted.begin(), cache.evicted.end());
            const auto keeps = [&](Int block) { return !evicted.contains(block); };
            const auto one = std::find_if(cache.mismatched.begin(), cache.mismatched.end(), keeps);
            if (one != cache.mismatched.end())
                return Refuse("keeps keys", "cache.mismatched", kWholeColumn, {one - cache.mismatched.begin()});
        }
        if (!AreInRange(cache)) return false;
        for (size_t row = 0; row < cache.released.size(); ++row) {
            const Int slot = cache.released[row];
            Slot& known = Look(slot);
            if (!known.live) return Refuse("no request", "cache.released", row);
            if (!known.held && !requests_.loading.contains(slot)) return Refuse("not held", "cache.released", row);
            loads_over_.insert(slot);
            if (known.held) known.held = known.live = false;
        }
        for (size_t row = 0; row < cache.loads_over.size(); ++row) {
            const Int block = cache.loads_over[row];
            const bool is_busy = Within(block, 1, last) && pool_ && pool_->busy.contains(static_cast<Block>(block));
            if (!is_busy || !not_busy_.insert(static_cast<Block>(block)).second)
                return Refuse("not busy", "cache.loads_over", row);
        }
        return AcceptsCosts(cache.costs_ns) && AcceptsJobs(cache);
    }

    bool AcceptsCosts(const Column& costs) {
        const size_t num_tiers = tiers_ ? tiers_->each.size() : 0;
        if (!costs.empty() && costs.size() != 1 + num_tiers)
            return Refuse("costs", "cache.costs_ns", kWholeColumn, {static_cast<Int>(num_tiers)});
        const auto fits = [](Int cost) { return Within(cost, 0, kMaxCostNs); };
        return std::all_of(costs.begin(), costs.end(), fits) || Refuse("cost", "cache.costs_ns");
    }

    // Whether the jobs were ordered, and no load is done before it could start.
    bool AcceptsJobs(const Cache& cache) {
        if (!cache.NamesJobs() && cache.jobs_before == 0) return true;
        const Int last = tiers_ && !tiers_->each.empty() ? tiers_->last_job : 0;
        const auto ordered = [&](const Column& jobs, const char* column) {
            for (size_t row = 0; row < jobs.size(); ++row) {
                if (!Within(jobs[row], 1, last)) return Refuse("job", column, row, {last});
            }
            return true;
        };
        if (!ordered(cache.jobs_done, "cache.jobs_done") || !ordered(cache.jobs_failed, "cache.jobs_failed"))
            return false;
        if (!Within(cache.jobs_before, 0, last + 1))
            return Refuse("jobs before", "cache.jobs_before", kWholeColumn, {last + 1});
        for (size_t row = 0; row < cache.jobs_done.size(); ++row) {
            const auto load = tiers_->jobs.loads.find(cache.jobs_done[row]);
            if (load != tiers_->jobs.loads.end() && load->second.after > executed_through_)
                return Refuse("job not started", "cache.jobs_done", row, {load->second.after});
        }
        return true;
    }

    // -- news --------------------------------------------------------------------------------------------------------

    bool AcceptsNews(const News& news) {
        const size_t rows = news.slot.size();
        if (!Fit(NumEntriesOf(news), rows))
            return false;
        if (news.num_tokens.size() != rows) return Refuse("entries", "news.num_tokens");
        if (!Texts(news.request_id_fit, "news.request_id") || !Texts(news.domain_fit, "news.domain")) return false;
        const bool by_service = news.tokens.count > 0;
        if (by_service) {
            if (news.tokens.count != Sum(news.num_tokens)) return Refuse("ids of prompts", "news.tokens");
            if (news.hashes.size) return Refuse("tokens and hashes", "news.hashes");
            if (!news.tokens.fit) return Refuse("range", "news.tokens", kWholeColumn, {0, kUnlimited});
        }
        size_t size = 0;
        if (!Hints(news.hint, 0, "news.hint") ||
            !DigestSize(news.hashes, news.num_hashes, "news.num_hashes", "news.hashes", &size))
            return false;
        for (size_t row = 0; row < rows; ++row) {
            if (!AcceptsRequest(news, row, size)) return false;
        }
        return true;
    }

    bool AcceptsRequest(const News& news, size_t row, size_t digest_size) {
        const Int slot = news.slot[row], most = Entry(news.max_tokens, row, 0), num_tokens = news.num_tokens[row];
        if (!Within(slot, 0, kMaxSlots - 1)) return Refuse("not a slot", "news.slot", row, {kMaxSlots - 1});
        Slot& known = Look(slot);
        if (known.live) return Refuse("taken", "news.slot", row);
        if (!Within(most, 0, kMaxTokens)) return Refuse("interval", "news.max_tokens", row, {0, kMaxTokens});
        const Int limit = most ? std::min(most, spec_.max_model_len) : spec_.max_model_len;
        if (!Within(num_tokens, 1, limit)) return Refuse("interval", "news.num_tokens", row, {1, limit});
        known = Slot{true, false, news.tokens.count > 0, num_tokens, Entry(news.num_hashes, row, 0), limit,
                     digest_size};
        return DigestsFit(known, "news.num_hashes", row);
    }

    // -- run, admit --------------------------------------------------------------------------------------------------

    bool AcceptsRun(const Run& run) {
        if (!Fit(NumEntriesOf(run), run.slot.size()) ||
            !AllLiveAndDistinct(run.slot, &run_slots_, "run.slot") || !AllLive(run.victims, "run.victims"))
            return false;
        for (size_t row = 0; !requests_.loading.empty() && row < run.slot.size(); ++row) {
            if (!LoadHasStarted(run.slot[row], "run.slot", row)) return false;
        }
        return AreInRange(run) &&
               Bits(run.flags, kReservedAlign | kDelayCaching | kFullFit | kUnaligned, "run.flags") &&
               AcceptsDrafts(run);
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
            if (known - computed <= 1 && end - base > 1 + most)
                return Refuse("drafts", "run.extra", row, {end - base, 1 + most, most});
        }
        return true;
    }

    bool AcceptsAdmit(const Admit& admit) {
        if (!Fit(NumEntriesOf(admit), admit.slot.size()))
            return false;
        const Int load = spec_.tiers.empty() ? Int{0} : kLoad;
        const Int flags = kReservedAlign | kDelayCaching | kFullFit | kWhole | kUnaligned | load;
        if (!(AllLiveAndDistinct(admit.slot, &admit_slots_, "admit.slot") &&
              AreInRange(admit) && (admit.skip_zero_groups_fit || Refuse("groups", "admit.skip_zero_groups")) &&
              Bits(admit.flags, flags, "admit.flags") && AcceptsLoads(admit)))
            return false;
        for (size_t row = 0; num_parts_ > 1 && row < admit.slot.size(); ++row) {
            if (Entry(admit.external, row, 0) && (Entry(admit.flags, row, 0) & kDelayCaching))
                asked_to_load_.insert(admit.slot[row]);
        }
        return admit.on_refusal != kPreempt || Refuse("preempt", "admit.on_refusal");
    }

    // No row with LOAD also loads external tokens, or must be granted all tokens.
    bool AcceptsLoads(const Admit& admit) {
        for (size_t row = 0; row < admit.flags.size(); ++row) {
            if (!(admit.flags[row] & kLoad)) continue;
            if ((admit.flags[row] & (kDelayCaching | kWhole)) || Entry(admit.external, row, 0))
                return Refuse("load", "admit.flags", row);
        }
        return true;
    }

    bool AcceptsPeek(const Peek& peek) {
        return Fit(NumEntriesOf(peek), peek.slot.size()) &&
               AreInRange(peek) && AllLive(peek.slot, "peek.slot");
    }

    bool AcceptsPeers(const Peers& peers) {
        const size_t rows = peers.slot.size();
        if (peers.gone.empty() && rows == 0 && peers.version.empty() && peers.group.empty() &&
            peers.hashes.size == 0 && peers.domain.empty())
            return true;
        if (spec_.tiers.empty() || spec_.tiers.back().medium != kPeers) return Refuse("no peers", "peers");
        const Column count{static_cast<Int>(rows)};
        if (peers.version.size() != rows) return Refuse("count", "peers.version", kWholeColumn, count);
        if (peers.group.size() != rows) return Refuse("count", "peers.group", kWholeColumn, count);
        if (!Fit(NumEntriesOf(peers), rows) || !Texts(peers.domain_fit, "peers.domain")) return false;
        const Int size = spec_.digest_size, last = spec_.tiers.back().num_slots - 1;
        if (peers.hashes.size != rows * static_cast<size_t>(size))
            return Refuse("hash bytes", "peers.hashes", kWholeColumn, {static_cast<Int>(rows), size});
        const auto groups = static_cast<Int>(spec_.groups.size());
        return Range(peers.gone, 0, last, "peers.gone") && Range(peers.slot, 0, last, "peers.slot") &&
               Range(peers.version, 1, static_cast<Int>(kVersions), "peers.version") &&
               Range(peers.group, 0, groups - 1, "peers.group");
    }

    // -- prefetch, retain ------------------------------------------------------------------------------------

    bool AcceptsPrefetch(const Prefetch& prefetch) {
        if (prefetch.slot.empty() && prefetch.hashes.size == 0 && prefetch.domain.empty() &&
            prefetch.num_hashes.empty() && prefetch.within_ns.empty())
            return true;
        size_t size = 0;
        if (!Fit(NumEntriesOf(prefetch), prefetch.slot.size()) ||
            !DigestSize(prefetch.hashes, prefetch.num_hashes, "prefetch.num_hashes", "prefetch.hashes", &size) ||
            !Texts(prefetch.domain_fit, "prefetch.domain") || !AreInRange(prefetch))
            return false;
        if (spec_.tiers.size() < 2) return Refuse("no second tier", "prefetch");
        for (size_t row = 0; row < prefetch.slot.size(); ++row) {
            const Int slot = prefetch.slot[row], count = Entry(prefetch.num_hashes, row, 0);
            if ((slot == kNoRequest) != (count > 0))
                return Refuse("not one prompt", "prefetch.num_hashes", row, {slot, count});
        }
        for (size_t row = 0; row < prefetch.slot.size(); ++row) {
            const Int slot = prefetch.slot[row];
            if (slot != kNoRequest && !IsLive(slot))
                return Refuse("no request", "prefetch.slot", row);
        }
        return true;
    }

    bool AcceptsRetain(const Retain& retain) {
        const size_t rows = retain.num_hashes.size();
        size_t size = 0;
        if (!Fit(NumEntriesOf(retain), rows) ||
            !DigestSize(retain.hashes, retain.num_hashes, "retain.num_hashes", "retain.hashes", &size) ||
            !Texts(retain.domain_fit, "retain.domain") || !Texts(retain.owner_fit, "retain.owner") ||
            !AreInRange(retain))
            return false;
        if (retain.now_ns.size() > 1) return Refuse("one time", "retain.now_ns");
        if (rows > 0 && spec_.blocks_per_state > 1) return Refuse("split pages", "retain");
        const Int most = spec_.max_model_len / spec_.hash_block_size;
        for (size_t row = 0; row < rows; ++row) {
            if (!Within(retain.num_hashes[row], 1, most))
                return Refuse("prefix", "retain.num_hashes", row, {most});
        }
        for (size_t row = 0; row < retain.until_ns.size(); ++row) {
            const Int away = retain.until_ns[row] - retain.time_ns();
            if (away > kMaxRetainedNs) return Refuse("far end", "retain.until_ns", row, {away});
        }
        const auto is_long = [](const std::string& owner) {
            const auto is_first = [](char byte) { return (byte & 0xC0) != 0x80; };
            return std::count_if(owner.begin(), owner.end(), is_first) > kMaxOwnerChars;
        };
        return std::none_of(retain.owner.begin(), retain.owner.end(), is_long) || Refuse("owner", "retain.owner");
    }

    const Requests& requests_;
    const BlockPool* const pool_;
    const Tiers* const tiers_;
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
