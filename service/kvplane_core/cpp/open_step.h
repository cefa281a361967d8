// A step that is applied row by row, as an engine in this process decides the rows.
#pragma once

#include "replica.h"

namespace kvplane {

// The rows of a part, for a replica that follows this one: sections as `part_rows.py` makes them. The last entries of a
// column are left out if they are the default.
struct RecordedRows {
    Facts facts;
    Run run;
    Admit admit;
    std::vector<uint8_t> hashes;

    void AddFacts(const Facts& row) {
        AddRow(row, &facts);
        AddHashes(row.hashes);
    }

    void AddGrowth(Int slot, Int appended, const Hashes& made, size_t digest_size) {
        const size_t row = facts.slot.size();
        facts.slot.push_back(slot);
        Put(appended, 0, row, &facts.appended);
        Put(static_cast<Int>(digest_size ? made.size / digest_size : 0), 0, row, &facts.num_hashes);
        AddHashes(made);
    }

    void AddRun(Int slot, Int extra, const Growth& growth, Int flags) {
        run.slot.push_back(slot);
        run.extra.push_back(extra);
        run.lookahead.push_back(growth.lookahead);
        run.in_flight.push_back(growth.in_flight);
        run.flags.push_back(flags);
        run.reserved.push_back(growth.leave_free);
    }

    void AddAdmit(const Admit& row) { AddRow(row, &admit); }

  private:
    template <typename Section, typename Into>
    static void AddRow(const Section& row, Into* into) {
        const size_t at = into->slot.size();
        for (const auto& column : ColumnsOf(row)) {
            const Int otherwise = column.otherwise.value_or(0);
            if (column.is_by_row) Put(Entry(row.*column.of, 0, otherwise), column.otherwise, at, &(into->*column.of));
        }
    }

    static void Put(Int entry, std::optional<Int> otherwise, size_t row, Column* column) {
        if (entry == otherwise) return;
        column->resize(row, otherwise.value_or(0));
        column->push_back(entry);
    }

    void AddHashes(const Hashes& made) {
        if (made.size) hashes.insert(hashes.end(), made.data, made.data + made.size);
    }
};

enum class Granted { kLeft, kRefused, kQuiet, kGrew };  // kLeft: the row was not applied

class OpenStep {
  public:
    explicit OpenStep(Replica& replica)
        : replica_(replica),
          blocks_(replica.blocks),
          requests_(replica.blocks.requests),
          tracker_(replica.tracker),
          validator_(replica.spec, replica.blocks.requests, &replica.blocks.pool, &replica.blocks.tiers),
          row_in_(kMaxSlots, -1),
          granted_in_(kMaxSlots, -1) {}

    // `records`: keeps the rows in `recorded`.
    void Begin(Int executed_through, bool records) {
        Require(!is_open_, "a step is open");
        records_ = records;
        recorded.clear();
        is_open_ = true;
        begun_ = false;
        seq_ = replica_.seq + 1;
        first_part_ = part_ + 1;
        num_granted_ = 0;
        loads_.clear();
        replica_.BeginStep(seq_, executed_through);
        validator_.BeginRows();
        OpenPart();
    }

    void Close() {
        RequireOpen();
        ClosePart();
        replica_.CompleteStep(seq_, &finished.back());
        is_open_ = false;
    }

    // Completes the results of the rows so far; further rows start the next part.
    void Flush() {
        RequireOpen();
        if (!has_rows_) return;
        ClosePart();
        OpenPart();
    }

    bool HasGranted(Int slot) const { return InRange(slot) && granted_in_[slot] >= first_part_; }
    Int num_granted() const { return num_granted_; }
    Int seq() const { return seq_; }
    Int number_of_part() const { return part_ - first_part_; }
    bool reset_done() const { return result_.reset_done; }
    const Refusal& refusal() const { return validator_.refusal(); }  // of the last row that is not valid

    // -- facts, cache, news ------------------------------------------------------------------------------------------

    // Applies one row of facts, and appends the slots that are preempted by it; false: it is not valid.
    bool Update(const Part& part, Column* preempted) {
        RequireOpen();
        const Facts& facts = part.facts;
        const Int slot = facts.slot[0];
        if (!IsPlainGrowth(facts)) {
            if (!validator_.AcceptsRow(part, seq_)) return false;
            Enter(kFactsSection);
        } else if (row_in_[slot] == part_) {
            Enter(kFactsSection);
        }
        has_rows_ = true;
        if (records_) rows_.AddFacts(facts);
        const size_t before = result_.preempted.size();
        replica_.facts.Apply(part, seq_, &result_);
        if (Entry(facts.end, 0, kEndNone) != kEndNone) Forget(slot);
        TakenBack(before, preempted);
        return true;
    }

    bool ChangeCache(const Part& part, Column* preempted) {
        RequireOpen();
        const auto begins = [&](Int slot) { return loads_.contains(slot); };
        if (!validator_.AcceptsRow(part, seq_)) return false;
        if (std::any_of(part.cache.released.begin(), part.cache.released.end(), begins))
            return validator_.Refuse("load released", "cache.released");
        if (section_ > kCacheSection || has_cache_) {
            ClosePart();
            OpenPart();
        }
        Enter(kCacheSection);
        has_rows_ = has_cache_ = true;
        const size_t before = result_.preempted.size();
        replica_.facts.ApplyCache(part.cache, &result_);
        TakenBack(before, preempted);
        return true;
    }

    bool Add(const Part& part) {
        RequireOpen();
        if (!validator_.AcceptsRow(part, seq_)) return false;
        section_ = std::max(section_, kNewsSection);
        has_rows_ = true;
        replica_.ApplyNews(part, &result_);
        return true;
    }

    // -- run, admit --------------------------------------------------------------------------------------------------

    // Appends what a running request gained, and grants it tokens. Leaves a row that needs the checks of other methods.
    Granted Decode(Int slot, Int num_tokens, const Hashes& hashes, size_t digest_size, const Growth& growth) {
        RequireOpen();
        if (!InRange(slot) || row_in_[slot] >= first_part_) return Granted::kLeft;
        const Int num_new = growth.num_new, before = requests_.num_tokens[slot];
        if (num_new <= 0 || num_new > kMaxTokens) return Granted::kLeft;
        const Int end = requests_.computed[slot] + num_new;
        if (num_tokens < before || num_tokens > end || end > requests_.limit[slot]) return Granted::kLeft;
        const bool looks = growth.lookahead >= 0 && growth.lookahead <= kMaxLookahead;
        const bool is_quiet = hashes.size == 0 && end == num_tokens && looks && IsQuiet(slot, end, growth);
        if (!is_quiet && !(looks && MayGrow(slot, num_tokens, hashes, digest_size, end, growth.in_flight)))
            return Granted::kLeft;
        if (section_ != kRunSection) Enter(kRunSection);
        requests_.num_tokens[slot] = num_tokens;
        replica_.facts.AddDigests(slot, hashes, digest_size);
        row_in_[slot] = part_;
        const bool stays = is_quiet || IsQuiet(slot, end, growth);
        if (records_) {
            if (num_tokens > before || hashes.size) rows_.AddGrowth(slot, num_tokens - before, hashes, digest_size);
            Growth row = growth;
            if (stays) row.in_flight = -1;
            rows_.AddRun(slot, end - num_tokens, row, blocks_.spec.align_block_size ? kUnaligned : Int{0});
        }
        return Run(slot, growth, end - num_tokens, stays);
    }

    Granted Extend(Int slot, Growth growth, Int flags) {
        RequireOpen();
        if (!CanRun(slot, growth.num_new)) return Granted::kLeft;
        const Int end = requests_.computed[slot] + growth.num_new, extra = end - requests_.num_tokens[slot];
        if (blocks_.spec.align_block_size) flags |= kUnaligned;
        Part part;
        part.run.slot = {slot};
        part.run.extra = {extra};
        part.run.lookahead = {growth.lookahead};
        part.run.in_flight = {growth.in_flight};
        part.run.flags = {flags};
        part.run.reserved = {growth.leave_free};
        if (!validator_.AcceptsRow(part, seq_)) return Granted::kLeft;
        Enter(kRunSection, slot);
        if (records_) rows_.AddRun(slot, extra, growth, flags);
        growth.delay_caching = (flags & kDelayCaching) != 0;
        growth.full_fit = (flags & kFullFit) != 0;
        if (growth.in_flight < 0) growth.in_flight = requests_.in_flight[slot];
        return Run(slot, growth, extra, IsQuiet(slot, end, growth) && !growth.leave_free && !growth.full_fit);
    }

    // The status of a row of a waiting request that adopts a hit and is granted `num_new` tokens; -1: it is not valid.
    Int Admit(Part* part, Int num_new) {
        RequireOpen();
        struct Admit& row = part->admit;
        const Int slot = row.slot[0], start = row.expected_hit[0] + row.external[0];
        row.extra = {start + num_new - (requests_.IsLive(slot) ? requests_.num_tokens[slot] : 0)};
        if (blocks_.spec.align_block_size) row.flags[0] |= kUnaligned;
        if (!validator_.AcceptsRow(*part, seq_)) return -1;
        if (num_new < 0 || num_new > blocks_.spec.max_model_len - start) {
            const Column numbers{num_new, row.expected_hit[0], row.external[0]};
            validator_.Refuse("new behind hit", "num_new", kWholeColumn, numbers);
            return -1;
        }
        Enter(kAdmitSection, slot);
        has_rows_ = true;
        if (records_) rows_.AddAdmit(row);
        if (!applier_) applier_.emplace(blocks_, tracker_, Budget(), &result_, seq_);
        const Int status = applier_->AdmitOne(row);
        if (status == kGranted) {
            NoteGranted(slot);
            if (row.external[0] && (row.flags[0] & kDelayCaching)) loads_.insert(slot);
        }
        return status;
    }

    std::vector<RecordedRows> recorded;  // of this step, by part
    Rows fresh;                        // new blocks per group of the last row that got some
    std::vector<PartResult> finished;  // of this step, not returned yet

    const Rows& AdmittedBlocks() const { return applier_->fresh(); }

  private:
    enum Section { kFactsSection, kCacheSection, kNewsSection, kRunSection, kAdmitSection };

    void RequireOpen() const { Require(is_open_, "no step is open"); }
    bool InRange(Int slot) const { return slot >= 0 && slot < requests_.size(); }

    void OpenPart() {
        ++part_;
        section_ = kFactsSection;
        result_ = PartResult();
        applier_.reset();
        run_slots_.clear();
        run_extra_.clear();
        has_rows_ = has_cache_ = false;
    }

    void ClosePart() {
        LeaveSection();
        if (!begun_) BeginToAllocate();
        replica_.CompletePart(&result_);
        finished.push_back(std::move(result_));
        if (records_) recorded.push_back(std::exchange(rows_, RecordedRows()));
    }

    // Begins a row of this section. Starts the next part if this part is past the section, or already has a row of this
    // slot.
    void Enter(Section section, Int slot = -1) {
        if (section < section_ || (section == section_ && slot >= 0 && row_in_[slot] == part_)) {
            ClosePart();
            OpenPart();
        }
        if (section > section_) {
            LeaveSection();
            section_ = section;
        }
        if (slot >= 0) row_in_[slot] = part_;
        if (section >= kRunSection && !begun_) BeginToAllocate();
    }

    void BeginToAllocate() {
        begun_ = true;
        blocks_.NewStep();
    }

    void LeaveSection() {
        if (section_ != kRunSection || run_slots_.empty()) return;
        if (!result_.run_needed.empty()) result_.run_needed.resize(result_.granted.size(), 0);
        const bool drafts = std::any_of(run_extra_.begin(), run_extra_.end(), [](Int extra) { return extra != 0; });
        for (size_t row = 0; blocks_.has_states && drafts && row < run_slots_.size(); ++row) {
            const Int slot = run_slots_[row];
            requests_.asked[slot] = {seq_, requests_.num_tokens[slot] + run_extra_[row]};
        }
        tracker_.NoteGrants(run_slots_, result_.granted, seq_);
    }

    Granted Run(Int slot, const Growth& growth, Int extra, bool is_quiet) {
        has_rows_ = true;
        run_slots_.push_back(slot);
        run_extra_.push_back(extra);
        if (!is_quiet) {
            if (const Int wanted_free = blocks_.Extend(slot, growth, &fresh)) {
                result_.run_needed.resize(result_.granted.size(), 0);
                result_.run_needed.push_back(std::min(wanted_free, kUnlimited));
                result_.granted.push_back(0);
                return Granted::kRefused;
            }
            tracker_.NoteKeys(slot, seq_);
            const auto row = static_cast<Int>(result_.granted.size());
            for (size_t group = 0; group < fresh.size(); ++group) {
                if (!fresh[group].empty()) result_.new_blocks.Add(row, static_cast<Int>(group), fresh[group]);
            }
        }
        result_.granted.push_back(growth.num_new);
        requests_.computed[slot] += growth.num_new;
        NoteGranted(slot);
        return is_quiet ? Granted::kQuiet : Granted::kGrew;
    }

    bool IsQuiet(Int slot, Int end, const Growth& growth) const {
        return end + growth.lookahead <= requests_.fast_path_until[slot];
    }

    bool MayGrow(Int slot, Int num_tokens, const Hashes& hashes, size_t digest_size, Int end, Int in_flight) const {
        return requests_.running[slot] && in_flight >= 0 && !requests_.loading.contains(slot) &&
               !tracker_.LoadsFromTiers(slot) && !(end > num_tokens && blocks_.has_states) &&
               (hashes.size == 0 || AreNext(slot, num_tokens, hashes, digest_size));
    }

    // Whether the request may append these hashes when it has `num_tokens` tokens.
    bool AreNext(Int slot, Int num_tokens, const Hashes& hashes, size_t digest_size) const {
        const Digests& known = requests_.content[slot];
        const auto count = static_cast<Int>(digest_size ? hashes.size / digest_size : 0);
        return known.size == digest_size && known.count() > 0 &&
               known.count() + count <= num_tokens / blocks_.spec.hash_block_size;
    }

    // Whether the row only adds tokens and block hashes to a running request, within the limits.
    bool IsPlainGrowth(const Facts& facts) const {
        const Int slot = facts.slot[0];
        if (!InRange(slot) || !requests_.running[slot] || requests_.by_service[slot] || !facts.OnlyAppend())
            return false;
        const Int appended = Entry(facts.appended, 0, 0), room = requests_.limit[slot] - requests_.num_tokens[slot];
        if (appended < 0 || appended > room) return false;
        const Int count = Entry(facts.num_hashes, 0, 0);
        return count == 0 || AreNext(slot, requests_.num_tokens[slot] + appended, facts.hashes,
                                     facts.hashes.size / static_cast<size_t>(count));
    }

    bool CanRun(Int slot, Int num_new) {
        const auto refuse = [&](const char* reason) {
            return validator_.Refuse(reason, "slot", kWholeColumn, {slot});
        };
        if (!requests_.IsLive(slot) || !requests_.running[slot]) return refuse("not running");
        if (tracker_.LoadsFromTiers(slot)) return refuse("waits");
        if (blocks_.spec.safe && HasGranted(slot)) return refuse("granted");
        const Int computed = requests_.computed[slot];
        return (num_new > 0 && num_new <= blocks_.spec.max_model_len - computed) ||
               validator_.Refuse("new after", "num_new", kWholeColumn, {num_new, computed});
    }

    void NoteGranted(Int slot) {
        num_granted_ += granted_in_[slot] < first_part_;
        granted_in_[slot] = part_;
    }

    void Forget(Int slot) {
        if (!HasGranted(slot)) return;
        granted_in_[slot] = -1;
        --num_granted_;
    }

    void TakenBack(size_t before, Column* preempted) {
        for (size_t at = before; at < result_.preempted.size(); ++at) {
            Forget(result_.preempted[at]);
            preempted->push_back(result_.preempted[at]);
        }
        result_.taken_back += static_cast<Int>(result_.preempted.size() - before);
    }

    Replica& replica_;
    Coordinator& blocks_;
    Requests& requests_;
    InFlightTracker& tracker_;
    StepValidator validator_;
    Column row_in_, granted_in_;     // by slot: the part with its last run or admit row; with its last grant
    Int part_ = 0, first_part_ = 0;  // numbers of parts, which count on over all steps
    Int seq_ = 0, num_granted_ = 0;
    bool records_ = false, is_open_ = false, begun_ = false, has_rows_ = false, has_cache_ = false;
    Section section_ = kFactsSection;
    PartResult result_;
    std::optional<StepApplier> applier_;  // of the admit rows of the open part
    Column run_slots_, run_extra_;        // of the open part
    RecordedRows rows_;                   // of the open part
    std::set<Int> loads_;                 // slots whose load begins in this step
};

}  // namespace kvplane
