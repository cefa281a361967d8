// Applies the run and admit sections of a part: grants tokens to rows in order, within budgets and free blocks.
#pragma once

#include "tiers/loads.h"

namespace kvplane {

constexpr Int kPatientRows = 64;  // more rows than this in sequence without room for a state block count as starved

// The number of tokens of a prefill chunk that ends where recurrent states can be cached; 0 if none is left. A chunk
// ends inside a block only if `most`, the most tokens of a chunk, is less than a block.
inline Int AlignChunk(const Coordinator& blocks, Int slot, Int start, Int wanted, Int most = kUnlimited) {
    const Spec& spec = blocks.spec;
    const Requests& requests = blocks.requests;
    const Int size = spec.align_block_size, prompt = requests.num_prompt[slot];
    const Int prefill_end = std::max(prompt, requests.num_tokens[slot] - 1);
    if (size == 0 || start >= prefill_end || wanted <= 0) return wanted;
    Int end = start + wanted;
    const bool has_checkpoint = end >= prefill_end && blocks.WritesCheckpoints(start, end, prefill_end);
    if (end < prefill_end) {
        const Int aligned = end / size * size;
        if (aligned > start || size <= std::min(spec.align_chunk_limit, most)) end = aligned;
    }
    Column stops;
    if (!has_checkpoint) {
        if (start % size) stops.push_back(CeilDiv(start, size) * size);
        const Int last = blocks.boundaries.LastBoundary(requests.num_tokens[slot], size);
        const Int tail = blocks.boundaries.LastBoundary(prompt, spec.hash_block_size);
        stops.push_back(last);
        if (spec.align_stop_at_tail && last < tail && tail < prompt) stops.push_back(tail);
    }
    const Int single = requests.single_group_hit[slot];
    if (start < single && single < end) {
        const bool inside = blocks.checkpoints_single_group_hits && single <= prompt;
        stops.push_back(inside ? single : start + (single - start) / size * size);
    }
    const Int planned = end;
    for (const Int stop : stops) {
        if (start < stop && stop < planned) end = std::min(end, stop);
    }
    return std::max<Int>(end - start, 0);
}

class StepApplier {
  public:
    StepApplier(Coordinator& coordinator, InFlightTracker& tracker, const Budget& budget, PartResult* result, Int seq)
        : blocks_(coordinator),
          requests_(coordinator.requests),
          tracker_(tracker),
          result_(*result),
          seq_(seq),
          tokens_left_(budget.tokens),
          input_left_(budget.input - budget.overhead),
          overhead_(budget.overhead),
          tier_loads_(coordinator, tracker),
          aligns_(coordinator.spec.align_block_size > 0) {}

    // -- run ---------------------------------------------------------------------------------------------------------

    void ApplyRun(const Run& rows) {
        rows_ = &rows;
        for (size_t row = 0; blocks_.has_states && row < rows.extra.size(); ++row) {
            const Int slot = rows.slot[row];
            requests_.asked[slot] = {seq_, requests_.num_tokens[slot] + rows.extra[row]};
        }
        result_.granted.assign(rows.slot.size(), 0);
        unnoted_ = &result_.granted;
        next_victim_ = 0;
        const std::set<Int> cannot_run = tracker_.CannotRun(seq_);
        bool limited = !rows.reserved.empty();
        for (const Int flags : rows.flags) limited |= (flags & kFullFit) != 0;
        const bool plain = cannot_run.empty() && !limited && rows.extra.empty() && rows.cap.empty() &&
                           rows.flags.empty() && rows.lookahead.empty();
        Int room = Room();
        touched_.clear();
        for (size_t row = 0; row < rows.slot.size(); ++row) {
            if (plain) row = ApplyQuietRows(row, &room);
            if (room <= 0 || row == rows.slot.size()) break;
            const Int slot = rows.slot[row];
            if (!requests_.running[slot] || (!cannot_run.empty() && cannot_run.contains(slot))) continue;
            const Int computed = requests_.computed[slot], wanted = WantedOf(row, room);
            if (wanted <= 0) continue;
            FetchBehind(row);
            const Int slots = computed + wanted + Entry(rows.lookahead, row, 0);
            if ((slots > requests_.fast_path_until[slot] || limited) && !Extend(row, wanted)) {
                if (rows.on_refusal == kStop) break;
                room = Room();
                continue;
            }
            result_.granted[row] = wanted;
            requests_.computed[slot] += wanted;
            room = Spend(wanted);
        }
        tracker_.NoteGrants(rows.slot, result_.granted, seq_);
        unnoted_ = nullptr;
    }

    // -- admit -------------------------------------------------------------------------------------------------------

    void ApplyAdmit(const Admit& rows) {
        admit_ = &rows;
        const bool reached = !(rows.only_if_no_preemption && !result_.preempted.empty());
        for (size_t row = 0; reached && row < rows.slot.size(); ++row) {
            if (Room() <= 0 || requests_.num_running >= rows.max_running) break;
            const Int status = AdmitRow(row);
            if (status != kGranted && status != kNotWaiting && rows.on_refusal != kSkip) break;
        }
        for (Column* column :
             {&result_.admit_status, &result_.admit_hit, &result_.admit_granted, &result_.admit_single_group_hit}) {
            column->resize(rows.slot.size(), kNotReached);
        }
        ResizeMore(rows.slot.size());
    }

    // Applies a section of one row behind the sections that were applied before it; returns the row's status.
    Int AdmitOne(const Admit& row) {
        admit_ = &row;
        const Int status = AdmitRow(0);
        ResizeMore(result_.admit_status.size());
        return status;
    }
    const Rows& fresh() const { return fresh_; }  // new blocks per group of the last row that got some

    Int unaligned_chunks = 0, starved_chunks = 0;

  private:
    // Grants one token to each row from `row` on that asks for one and touches no block; returns the first other row.
    size_t ApplyQuietRows(size_t row, Int* room) {
        const Column& slots = rows_->slot;
        const Int *const known = requests_.num_tokens.data(), *const quiet_until = requests_.fast_path_until.data();
        Int *const computed = requests_.computed.data(), *const granted = result_.granted.data();
        const uint8_t* const running = requests_.running.data();
        const Int spent = 1 + overhead_, longest = blocks_.spec.max_model_len;
        const Int most = std::max<Int>(std::min(tokens_left_, CeilDiv(input_left_, spent)), 0);
        const size_t first = row, end = first + std::min(static_cast<size_t>(most), slots.size() - first);
        for (; row < end; ++row) {
            const Int slot = slots[row], next = computed[slot] + 1;
            if (!running[slot] || known[slot] != next || next > quiet_until[slot] || next > longest) break;
            granted[row] = 1;
            computed[slot] = next;
        }
        const auto count = static_cast<Int>(row - first);
        *room = Spend(count, count);
        return row;
    }

    // Fetches what the rows behind this one that are not on the fast path will read, each in three stages.
    void FetchBehind(size_t row) {
        if (touched_.empty()) FindTouched(row);
        while (next_touched_ < touched_.size() && touched_[next_touched_] <= row) ++next_touched_;
        for (size_t ahead = 0; ahead < 3 && next_touched_ + ahead < touched_.size(); ++ahead)
            blocks_.Fetch(rows_->slot[touched_[next_touched_ + ahead]], 2 - static_cast<int>(ahead));
    }

    // Finds these rows, from the first one on.
    void FindTouched(size_t first) {
        const Column& slots = rows_->slot;
        const Int *const known = requests_.num_tokens.data(), *const quiet_until = requests_.fast_path_until.data();
        touched_.resize(slots.size() + 1);
        size_t count = 1;
        touched_[0] = first;  // also where it is on the fast path
        for (size_t row = first + 1; row < slots.size(); ++row) {
            touched_[count] = row;
            count += known[slots[row]] > quiet_until[slots[row]];
        }
        touched_.resize(count);
        next_touched_ = 0;
    }

    // How many tokens a run row can get at most, free blocks aside.
    Int WantedOf(size_t row, Int room) {
        const Run& rows = *rows_;
        const Int slot = rows.slot[row], computed = requests_.computed[slot];
        const Int known = requests_.num_tokens[slot] - computed, cap = Entry(rows.cap, row, kUnlimited);
        const Int wanted =
            std::min({known + Entry(rows.extra, row, 0), room, blocks_.spec.max_model_len - computed, cap});
        const bool plain = rows.extra.empty() && rows.cap.empty() && rows.flags.empty();
        const bool aligns = aligns_ && (known > 1 || (!plain && computed < requests_.num_prompt[slot]));
        if (!aligns || (Entry(rows.flags, row, 0) & kUnaligned)) return wanted;
        return Aligned(slot, computed, wanted, cap);
    }

    // The tokens of a chunk, shortened so that it ends where recurrent states can be cached. It ends inside a state
    // block only if the budget of the whole step is below one block.
    Int Aligned(Int slot, Int start, Int wanted, Int cap) {
        Int clipped = AlignChunk(blocks_, slot, start, wanted);
        if (clipped <= 0 && wanted > 0) {
            clipped = AlignChunk(blocks_, slot, start, wanted, std::min(BudgetOfStep(), cap));
            unaligned_chunks += clipped > 0;
        }
        if (clipped <= 0 && wanted > 0) {
            starved_chunks += ++requests_.unserved[slot] > kPatientRows;
        } else {
            requests_.unserved.erase(slot);
        }
        return clipped;
    }

    // How many tokens a row of this step could have had if it were the only row of the step.
    Int BudgetOfStep() const {
        auto [rows, tokens] = tracker_.GrantedIn(seq_);
        for (size_t row = 0; unnoted_ != nullptr && row < unnoted_->size(); ++row) {
            rows += (*unnoted_)[row] != 0;
            tokens += (*unnoted_)[row];
        }
        return tokens + std::min(tokens_left_, input_left_ + rows * overhead_);
    }

    Int Room() const { return std::min(tokens_left_, input_left_); }

    Int Spend(Int num_tokens, Int num_rows = 1) {
        tokens_left_ -= num_tokens;
        input_left_ -= num_tokens + num_rows * overhead_;
        return Room();
    }

    // Allocates the blocks of the row, preempting victims until enough blocks are free; false if that is not enough.
    bool Extend(size_t row, Int wanted) {
        const Run& rows = *rows_;
        const Int slot = rows.slot[row], flags = Entry(rows.flags, row, 0);
        Int in_flight = Entry(rows.in_flight, row, -1);
        if (in_flight < 0) in_flight = requests_.in_flight[slot];
        const Growth growth{wanted,
                            Entry(rows.lookahead, row, 0),
                            in_flight,
                            (flags & kDelayCaching) != 0,
                            Entry(rows.reserved, row, 0),
                            (flags & kFullFit) != 0};
        while (true) {
            const Int wanted_free = blocks_.Extend(slot, growth, &fresh_);
            if (!wanted_free) {
                tracker_.NoteKeys(slot, seq_);
                ReportNewBlocks(static_cast<Int>(row), fresh_);
                return true;
            }
            Int victim = 0;
            const bool preempts = rows.on_refusal == kPreempt && NextVictim(&victim);
            if (preempts) Preempt(victim, row);
            if (!preempts || !requests_.running[slot]) {
                result_.run_needed.resize(rows.slot.size(), 0);
                result_.run_needed[row] = std::min(wanted_free, kUnlimited);
                return false;
            }
        }
    }

    bool NextVictim(Int* victim) {
        const Column& order = rows_->victims.empty() ? rows_->slot : rows_->victims;
        while (next_victim_ < order.size()) {
            const size_t at = next_victim_++;
            *victim = rows_->victims.empty() ? order[order.size() - 1 - at] : order[at];
            if (requests_.running[*victim]) return true;
        }
        return false;
    }

    // Preempts a request for run row `row`, and the requests that adopted keys which it registered in this step.
    void Preempt(Int slot, size_t row) {
        Column& granted = result_.granted;
        Column fresh;
        for (size_t at = num_indexed_; at < row; ++at) {
            if (!granted[at]) continue;
            fresh.push_back(rows_->slot[at]);
            row_of_[rows_->slot[at]] = at;
        }
        num_indexed_ = row;
        tracker_.EndLoads(fresh);
        if (row_of_.contains(slot)) requests_.granted_step[slot] = seq_;
        tracker_.PrepareReturn(slot);
        const Column gone = tracker_.Preempt(slot, seq_);
        result_.preempted.insert(result_.preempted.end(), gone.begin(), gone.end());
        for (const Int one : gone) {
            const auto found = row_of_.find(one);
            if (found == row_of_.end()) continue;
            const size_t at = found->second;
            row_of_.erase(found);
            tokens_left_ += granted[at];
            input_left_ += granted[at] + overhead_;
            granted[at] = 0;
            result_.new_blocks.RemoveRow(static_cast<Int>(at));
        }
    }

    void ReportNewBlocks(Int row, const Rows& fresh) {
        for (size_t group = 0; group < fresh.size(); ++group) {
            if (!fresh[group].empty()) result_.new_blocks.Add(row, static_cast<Int>(group), fresh[group]);
        }
    }

    Int AdmitRow(size_t row) {
        result_.admit_status.push_back(0);
        result_.admit_hit.push_back(0);
        result_.admit_granted.push_back(0);
        result_.admit_single_group_hit.push_back(0);
        const Int slot = admit_->slot[row];
        const size_t at = result_.admit_status.size() - 1;
        const Int status = requests_.running[slot] || requests_.held[slot] ? Int{kNotWaiting} : TryAdmit(row, at);
        return result_.admit_status[at] = status;
    }

    // `at`: the place of the row among the admit rows of the result.
    Int TryAdmit(size_t row, size_t at) {
        const Admit& rows = *admit_;
        const Int slot = rows.slot[row], external = Entry(rows.external, row, 0), flags = Entry(rows.flags, row, 0);
        if (requests_.loading.contains(slot)) return kDeferred;
        const Int limit = Entry(rows.hit_limit, row, kUnlimited);
        const Hit hit = blocks_.FindHit(slot, limit);
        if (flags & kLoad) {
            Choice choice = tier_loads_.Choose(slot, limit, hit);
            if (choice.why) ReportDeclined(at, choice);
            if (choice.plan) return AdmitWithLoad(row, at, &choice);
        }
        result_.admit_hit[at] = hit.num_tokens;
        result_.admit_single_group_hit[at] = hit.single_group_hit;
        const Int start = hit.num_tokens + external, expected = Entry(rows.expected_hit, row, kAnyHit);
        if ((expected != kAnyHit && expected != hit.num_tokens) || start > requests_.num_tokens[slot]) return kStaleHit;
        SetSingleGroupHit(row, hit.single_group_hit);
        const Int wanted = WantedAtAdmission(row, start, flags), min_new = Entry(rows.min_new, row, 1);
        const bool late = external && (flags & kDelayCaching);
        if (wanted < (late ? 0 : start ? min_new : std::max<Int>(1, min_new))) return kNoRoom;
        if (!blocks_.HitIsReady(hit)) return kDeferred;
        const Admission admission = AdmissionOf(row, wanted, flags, &hit);
        if (const Int wanted_free = blocks_.FreeWanted(admission); wanted_free > blocks_.pool.num_free()) {
            // With a shorter hit, if the row permits it.
            if (wanted_free >= kForever && blocks_.pool.IsUnused() && blocks_.GiveUp(hit)) return TryAdmit(row, at);
            return Refuse(row, at, wanted_free);
        }
        blocks_.Admit(admission, &fresh_);
        requests_.Start(slot);
        requests_.computed[slot] = start + wanted;
        Spend(wanted);
        tracker_.NoteGrant(slot, wanted, seq_);
        if (late) {
            SetOfRow(&result_.admit_load_after, at, tracker_.NoteLoad(slot, hit));
        } else if (external) {
            tracker_.NoteFilling(slot, hit, seq_);
        }
        tracker_.NoteKeys(slot, seq_);
        tracker_.NoteAdmission(slot, hit);
        result_.admit_granted[at] = wanted;
        ReportAdmission(at, slot);
        return kGranted;
    }

    // Admits a request with a hit that is partly in the tiers. It gets its blocks, and no tokens before the load is
    // done.
    Int AdmitWithLoad(size_t row, size_t at, Choice* choice) {
        LoadPlan* const plan = &*choice->plan;
        const Int slot = admit_->slot[row], expected = Entry(admit_->expected_hit, row, kAnyHit);
        const Hit& hit = plan->hit;
        result_.admit_hit[at] = hit.num_tokens;
        result_.admit_single_group_hit[at] = hit.single_group_hit;
        if (expected != kAnyHit && expected != hit.num_tokens) return kStaleHit;
        SetSingleGroupHit(row, hit.single_group_hit);
        if (choice->why == kWaits || !blocks_.HitIsReady(hit)) return kDeferred;
        // No keys are registered before the load is done, and none of its blocks is zeroed or copied.
        Admission admission = AdmissionOf(row, 0, Entry(admit_->flags, row, 0), &hit);
        admission.lookahead = 0;
        admission.delay_caching = admission.full_fit = true;
        const Int wanted_free = blocks_.FreeWanted(admission) + static_cast<Int>(plan->missing.size());
        if (wanted_free > blocks_.pool.num_free()) return Refuse(row, at, wanted_free);
        const Int job = tier_loads_.Begin(admission, plan, &fresh_);
        requests_.Start(slot);
        tracker_.NoteGrant(slot, 0, seq_);
        tracker_.NoteAdmission(slot, hit);
        SetOfRow(&result_.admit_load_after, at, blocks_.tiers.jobs.loads.at(job).after);
        SetOfRow(&result_.admit_job, at, job);
        SetOfRow(&result_.admit_tier_tokens, at, plan->gained);
        ReportAdmission(at, slot);
        return kGranted;
    }

    void ReportDeclined(size_t at, const Choice& choice) {
        const LoadPlan& passed = choice.passed ? *choice.passed : *choice.plan;
        const Int times[] = {passed.load_ns, passed.compute_ns};
        AddRow(&result_.OfTiers().declined, {static_cast<Int>(at), choice.why, passed.Farthest(),
                                              passed.hit.num_tokens, times[0], times[1]});
    }

    void ReportAdmission(size_t at, Int slot) {
        const Int number = static_cast<Int>(result_.granted.size() + at);
        ReportNewBlocks(number, fresh_);
        for (const auto& one : blocks_.managers) result_.tables.Add(number, one->group, one->table[slot]);
    }

    // The single-group hit of a request: as its row gives it, or as found.
    void SetSingleGroupHit(size_t row, Int found) {
        const Int given = Entry(admit_->single_group_hit, row, kUnlimited);
        requests_.single_group_hit[admit_->slot[row]] = given == kUnlimited ? found : given;
    }

    // Sets the entry of an admit row in a column that is empty while all its entries are 0.
    void SetOfRow(Column* column, size_t at, Int value) {
        if (!value) return;
        column->resize(result_.admit_status.size(), 0);
        (*column)[at] = value;
    }

    // Gives the columns of admit rows that have entries this number of them.
    void ResizeMore(size_t count) {
        for (const auto& column : ColumnsOf(result_)) {
            Column& entries = result_.*column.of;
            if (column.otherwise && !entries.empty()) entries.resize(count, *column.otherwise);
        }
    }

    Int WantedAtAdmission(size_t row, Int start, Int flags) {
        const Int slot = admit_->slot[row], room = Room(), cap = Entry(admit_->cap, row, kUnlimited);
        Int wanted = std::min(requests_.num_tokens[slot] + Entry(admit_->extra, row, 0) - start, cap);
        if (wanted > room && (flags & kWhole)) return -1;
        wanted = std::min(wanted, room);
        if (aligns_ && !(flags & kUnaligned)) wanted = Aligned(slot, start, wanted, cap);
        return std::min(wanted, blocks_.spec.max_model_len - start);
    }

    Admission AdmissionOf(size_t row, Int wanted, Int flags, const Hit* hit) const {
        const Admit& rows = *admit_;
        const Int watermark = Entry(rows.watermark, row, kAuto);
        const bool leaves = watermark == kAlways || (watermark == kAuto && requests_.num_running > 0);
        Admission admission{rows.slot[row], wanted, hit};
        admission.num_external = Entry(rows.external, row, 0);
        admission.lookahead = Entry(rows.lookahead, row, 0);
        admission.num_encoder = Entry(rows.encoder_tokens, row, 0);
        admission.delay_caching = (flags & kDelayCaching) != 0;
        admission.full_fit = (flags & kFullFit) != 0;
        admission.leave_free = Entry(rows.reserved, row, 0);
        admission.watermark = leaves ? blocks_.spec.watermark_blocks : 0;
        if (!rows.skip_zero_groups.empty()) admission.loaded_groups = rows.skip_zero_groups[row];
        return admission;
    }

    // Reports how many blocks a row needs that has too few.
    Int Refuse(size_t row, size_t at, Int free_wanted) {
        const Int usable = blocks_.spec.num_blocks - 1 - static_cast<Int>(blocks_.pool.reserved.size());
        const Int num_tokens = requests_.num_tokens[admit_->slot[row]];
        const Int alone = blocks_.BlocksWhenAlone(num_tokens, Entry(admit_->encoder_tokens, row, 0));
        const bool never_fits = alone > usable;
        SetOfRow(&result_.admit_needed, at, std::min(never_fits ? alone : free_wanted, kUnlimited));
        return never_fits ? kNeverFits : kRefused;
    }

    Coordinator& blocks_;
    Requests& requests_;
    InFlightTracker& tracker_;
    PartResult& result_;
    Int seq_, tokens_left_, input_left_, overhead_;
    TierLoads tier_loads_;
    bool aligns_;
    const Column* unnoted_ = nullptr;  // tokens of run rows that the tracker has not recorded yet
    const Run* rows_ = nullptr;
    const Admit* admit_ = nullptr;
    std::unordered_map<Int, size_t> row_of_;  // by slot: its run row that got tokens, of the rows before num_indexed_
    size_t num_indexed_ = 0, next_victim_ = 0, next_touched_ = 0;
    std::vector<size_t> touched_;
    Rows fresh_;
};

}  // namespace kvplane
