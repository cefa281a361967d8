// Records of each step in flight: tokens granted, keys registered, and blocks to release after its execution.
#pragma once

#include "by_step.h"
#include "preempted.h"

namespace kvplane {

struct Counters {
    Int steps = 0, admitted = 0, ended = 0, preempted = 0, refused = 0, queried_tokens = 0, hit_tokens = 0,
        granted_tokens = 0;
    Int withdrawn_keys = 0, unaligned_chunks = 0, starved_chunks = 0;

    std::vector<std::pair<const char*, Int*>> All() {
        return {{"steps", &steps},
                {"admitted", &admitted},
                {"ended", &ended},
                {"preempted", &preempted},
                {"refused", &refused},
                {"queried_tokens", &queried_tokens},
                {"hit_tokens", &hit_tokens},
                {"granted_tokens", &granted_tokens},
                {"withdrawn_keys", &withdrawn_keys},
                {"unaligned_chunks", &unaligned_chunks},
                {"starved_chunks", &starved_chunks}};
    }
};

class InFlightTracker {
  public:
    InFlightTracker(Coordinator& coordinator, Counters& all)
        : blocks_(coordinator), requests_(coordinator.requests), pool_(coordinator.pool), counters_(all) {}

    // -- notes -------------------------------------------------------------------------------------------------------

    void NoteGrant(Int slot, Int num_tokens, Int seq) {
        if (!requests_.not_zeroed.empty()) EndLoads({slot});
        requests_.in_flight[slot] += num_tokens;
        requests_.granted_step[slot] = seq;
        grants[seq].push_back({StayOf(slot), num_tokens});
        counters_.granted_tokens += num_tokens;
    }

    // Notes the rows of a step that got tokens.
    void NoteGrants(const Column& slots, const Column& num_tokens, Int seq) {
        if (std::all_of(num_tokens.begin(), num_tokens.end(), [](Int one) { return one == 0; })) return;
        if (!requests_.not_zeroed.empty()) {
            for (size_t row = 0; row < slots.size(); ++row) {
                if (num_tokens[row]) EndLoads({slots[row]});
            }
        }
        Grants& of_step = grants[seq];
        const size_t before = of_step.size();
        of_step.resize(before + slots.size());
        Grant* next = of_step.data() + before;
        Int *const in_flight = requests_.in_flight.data(), *const granted_step = requests_.granted_step.data();
        const Int* const serial = requests_.serial.data();
        for (size_t row = 0; row < slots.size(); ++row) {
            const Int slot = slots[row], tokens = num_tokens[row];
            if (tokens == 0) continue;
            in_flight[slot] += tokens;
            granted_step[slot] = seq;
            counters_.granted_tokens += tokens;
            *next++ = {{slot, serial[slot]}, tokens};
        }
        of_step.resize(static_cast<size_t>(next - of_step.data()));
    }

    // How many rows of this step got tokens so far, and the sum of these tokens; rows preempted since do not count.
    std::pair<Int, Int> GrantedIn(Int seq) const {
        const auto found = grants.find(seq);
        std::map<Int, std::pair<Int, Int>> latest;
        if (found == grants.end()) return {0, 0};
        for (const auto& [stay, num_tokens] : found->second) latest[stay.first] = {stay.second, num_tokens};
        Int rows = 0, tokens = 0;
        for (const auto& [slot, granted] : latest) {
            if (!Runs({slot, granted.first})) continue;
            ++rows;
            tokens += granted.second;
        }
        return {rows, tokens};
    }

    void EndLoads(const Column& slots) {
        for (const Int slot : slots) {
            requests_.loading.erase(slot);
            requests_.not_zeroed.erase(slot);
        }
    }

    void NoteAdmission(Int slot, const Hit& hit) {
        ++counters_.admitted;
        if (!requests_.skip_reading[slot]) {
            counters_.queried_tokens += requests_.num_tokens[slot];
            counters_.hit_tokens += hit.num_tokens;
        }
        blocks_.tiers.NoteHit(hit.blocks);
        if (!blocks_.spec.safe) return;
        Int last = 0;
        for (const BlockList& row : hit.blocks) {
            for (const Block block : row) {
                if (block == kNullBlock || pool_.key_step[block] <= pool_.executed_through) continue;
                const Int step = pool_.key_step[block];
                adoptions[step][block].push_back(StayOf(slot));
                last = std::max(last, step);
            }
        }
        requests_.adopted_step[slot] = last;
    }

    void NoteFilling(Int slot, const Hit& hit, Int seq) {
        const std::set<Block> loaded = LoadedBlocks(slot, hit);
        BlockList& filled = filling[seq];
        filled.insert(filled.end(), loaded.begin(), loaded.end());
    }

    void NoteKeys(Int slot, Int seq) {
        if (pool_.registered.empty()) return;
        blocks_.tiers.NoteComputed(pool_.registered, blocks_.spec);
        if (blocks_.spec.safe && seq > pool_.executed_through) {
            tentative[seq].Add(StayOf(slot), pool_.registered);
        }
        pool_.registered.clear();
    }

    bool IsExecuted(Int slot, Int num_tokens) const {
        if (num_tokens > requests_.computed[slot] - requests_.in_flight[slot]) return false;
        if (requests_.granted_step[slot] > pool_.executed_through) return false;
        return requests_.adopted_step[slot] <= pool_.executed_through;
    }

    // Notes a load into an admitted request; returns the last step in flight that may use one of its blocks.
    Int NoteLoad(Int slot, const Hit& hit) {
        requests_.loading.insert(slot);
        requests_.not_zeroed.insert(slot);
        return requests_.load_after[slot] = pool_.LastUse(LoadedBlocks(slot, hit));
    }

    // -- ends --------------------------------------------------------------------------------------------------------

    void Executed(Int through) {
        through = pool_.executed_through = std::max(pool_.executed_through, through);
        for (const auto& [seq, done] : grants) {
            if (seq > through) break;
            for (const auto& [stay, num_tokens] : done) {
                if (Runs(stay))
                    requests_.in_flight[stay.first] = std::max<Int>(requests_.in_flight[stay.first] - num_tokens, 0);
            }
        }
        grants.EraseThrough(through);
        tentative.EraseThrough(through);
        adoptions.EraseThrough(through);
        filling.EraseThrough(through);
        while (!waiting.empty() && waiting.front().first <= through) {
            const BlockList blocks = std::move(waiting.front().second);
            waiting.pop_front();
            pool_.Release(blocks);
        }
    }

    void ReleaseLater(const BlockList& blocks, Int fence) {
        if (fence <= pool_.executed_through) {
            pool_.Release(blocks);
        } else if (!blocks.empty()) {
            Require(fence <= pool_.step, "blocks wait for a step that was not sent");
            waiting.emplace_back(fence, blocks);
        }
    }

    Column Preempt(Int slot, Int seq, Int fence = 0) {
        return PreemptCascade({StayOf(slot)}, requests_.granted_step[slot] == seq ? seq : seq + 1, fence);
    }

    // Lets a request that is preempted now, and all of whose blocks are as they should be, continue later from where it
    // is, if the replica has tiers.
    void PrepareReturn(Int slot) {
        const bool is_fresh = requests_.granted_step[slot] == pool_.step;  // what it was granted is not computed
        if (blocks_.tiers.each.empty() || is_fresh || requests_.loading.contains(slot) || LoadsFromTiers(slot)) return;
        // As if the step before had registered them: if that, or one before it, does not run, they are withdrawn.
        --pool_.step;
        LeaveHit(blocks_, slot);
        NoteKeys(slot, pool_.step);
        ++pool_.step;
        for (const auto& one : blocks_.managers) {
            const BlockList& table = one->table[slot];
            blocks_.tiers.NoteHit({{table.rbegin(), table.rend()}});
        }
    }

    // The slot of the last request that a step granted tokens to, which an engine preempts first; -1: none.
    Int NextVictim(Int seq) const {
        const auto found = grants.find(seq);
        if (found == grants.end() || found->second.empty()) return -1;
        const Stay& last = found->second.back().stay;
        return Runs(last) ? last.first : -1;
    }

    Column FailStep(Int seq) {
        std::vector<Stay> stays;
        if (const auto found = grants.find(seq); found != grants.end()) stays = StaysOf(found->second);
        return PreemptCascade(std::move(stays), seq);
    }

    // Records that a load has ended; returns the step after which the request's pages may be released.
    Int LoadIsOver(Int slot, Int fence = 0) {
        if (requests_.loading.erase(slot)) {
            fence = std::max(fence, requests_.load_after[slot]);
            if (const auto found = held.find(slot); found != held.end() && !requests_.held[slot]) {
                const BlockList blocks = std::move(found->second);
                held.erase(found);
                ReleaseLater(blocks, fence);
            }
        }
        return fence;
    }

    // Whether a load from the tiers fills blocks of the request's hit.
    bool LoadsFromTiers(Int slot) const {
        if (blocks_.tiers.loading.empty()) return false;
        const Load* load = blocks_.tiers.LoadOf(slot);
        return load != nullptr && Runs({slot, load->serial});
    }

    // Slots that get no tokens in this part.
    std::set<Int> CannotRun(Int seq) const {
        std::set<Int> none;
        if (const auto found = grants.find(seq); blocks_.spec.safe && found != grants.end()) {
            for (const Grant& one : found->second) none.insert(one.stay.first);
        }
        for (const Int slot : requests_.loading) {
            if (!IsReady(slot)) none.insert(slot);
        }
        for (const auto& [slot, load] : blocks_.tiers.loading) {
            if (LoadsFromTiers(slot)) none.insert(slot);
        }
        return none;
    }

    Column Finish(Int slot, Int seq, Int fence) {
        std::vector<Stay> adopters = ForgetUngranted(slot, seq);
        GiveBack(slot, fence);
        requests_.Finish(slot);
        ++counters_.ended;
        return PreemptCascade(std::move(adopters), seq);
    }

    Column Hold(Int slot, Int seq) {
        std::vector<Stay> adopters = ForgetUngranted(slot, seq);
        PinForTransfer(slot);
        requests_.Stop(slot);
        requests_.held[slot] = 1;
        ++counters_.ended;
        return PreemptCascade(std::move(adopters), seq);
    }

    Column ReleaseHeld(Int slot, Int seq) {
        if (!requests_.held[slot]) {
            const bool ready = IsReady(slot);
            const Int fence = LoadIsOver(slot);
            return ready || !requests_.running[slot] ? Column() : Preempt(slot, seq, fence);
        }
        const BlockList blocks = std::move(held.at(slot));
        held.erase(slot);
        ReleaseLater(blocks, requests_.load_after[slot]);
        requests_.Finish(slot);
        return {};
    }

    void CloseStep(Int seq) {
        const BlockList copies = blocks_.TakeCopies();
        if (copies.empty()) return;
        pool_.NoteUse(copies, seq);
        ReleaseLater(copies, blocks_.spec.safe ? seq : 0);
    }

    // -- ends of engine lives ----------------------------------------------------------------------------------------

    // Notes which blocks loads may still write, and ends those from tiers. A block with a key belongs to a hit, and no
    // load writes those.
    void NoteUnderLoad() {
        for (const auto& [step, blocks] : filling) under_load.insert(blocks.begin(), blocks.end());
        const auto note = [&](const BlockList& blocks) {
            for (const Block block : blocks) {
                if (!pool_.HasKey(block)) under_load.insert(block);
            }
        };
        for (const Int slot : requests_.loading) {
            if (!requests_.running[slot]) {
                note(held.at(slot));
                continue;
            }
            for (const auto& one : blocks_.managers) note(one->table[slot]);
        }
        under_load.erase(kNullBlock);
        const BlockList from_tiers = blocks_.tiers.AbandonLoads();
        under_load.insert(from_tiers.begin(), from_tiers.end());
        pool_.Release(from_tiers);
    }

    // Releases the blocks of up to `most` requests, or of fewer with `most_blocks`, whose steps in flight will not be
    // executed; false: none is left.
    bool AbandonSome(Int most, Int most_blocks) {
        Int ended = 0;
        const Int returned = pool_.num_free();
        for (Int slot = 0; slot < requests_.size(); ++slot) {
            if (!requests_.live[slot] && !held.contains(slot)) continue;
            if (held.contains(slot)) ReleaseHeld(slot, 0);
            if (requests_.live[slot]) {
                blocks_.Free(slot);
                requests_.Finish(slot);
            }
            if (++ended == most || pool_.num_free() - returned >= most_blocks) return true;
        }
        for (; !waiting.empty(); waiting.pop_front()) pool_.Release(waiting.front().second);
        pool_.Release(blocks_.TakeCopies());
        return false;
    }

    // Clears all records of the ended life; returns the blocks that its loads may still write.
    BlockList Close() {
        const BlockList busy(under_load.begin(), under_load.end());
        under_load.clear();
        grants.clear();
        tentative.clear();
        adoptions.clear();
        filling.clear();
        return busy;
    }

    std::set<Block> under_load;  // while a life ends: blocks whose loads are not confirmed to be over
    ByStep<Grants> grants;
    ByStep<KeyBook> tentative;                            // keys, by the stay that registered
    ByStep<Ordered<Block, std::vector<Stay>>> adoptions;  // stays that adopted a key of the step, by block
    std::deque<std::pair<Int, BlockList>> waiting;        // (step, blocks) to release once it is executed
    std::map<Int, BlockList> held;                        // slot -> blocks that a transfer reads or writes
    ByStep<BlockList> filling;                            // blocks that are loaded before the launch

  private:
    Stay StayOf(Int slot) const { return {slot, requests_.serial[slot]}; }
    bool Runs(const Stay& stay) const {
        return requests_.running[stay.first] && requests_.serial[stay.first] == stay.second;
    }
    bool IsReady(Int slot) const { return requests_.load_after[slot] <= pool_.executed_through; }

    static std::vector<Stay> StaysOf(const Grants& granted) {
        std::vector<Stay> stays;
        for (const Grant& one : granted) stays.push_back(one.stay);
        return stays;
    }

    // The blocks that a load may write: all of the request's tables except those of the hit at the same position.
    std::set<Block> LoadedBlocks(Int slot, const Hit& hit) const {
        std::set<Block> loaded;
        for (size_t number = 0; number < blocks_.managers.size(); ++number) {
            const BlockList& table = blocks_.managers[number]->table[slot];
            const BlockList& of_hit = hit.blocks[number];
            for (size_t i = 0; i < table.size(); ++i) {
                if (i >= of_hit.size() || table[i] != of_hit[i]) loaded.insert(table[i]);
            }
        }
        return loaded;
    }

    Column PreemptCascade(std::vector<Stay> queue, Int from_step, Int fence = 0) {
        std::set<Stay> seen;
        Column preempted;
        for (size_t at = 0; at < queue.size(); ++at) {
            const Stay stay = queue[at];
            if (!seen.insert(stay).second) continue;
            Withdraw(stay, from_step, &queue);
            if (!Runs(stay)) continue;
            const Int slot = stay.first;
            if (requests_.loading.contains(slot)) {
                PinForTransfer(slot);
            } else {
                GiveBack(slot, fence);
            }
            requests_.Stop(slot);
            ++requests_.serial[slot];
            ++counters_.preempted;
            preempted.push_back(slot);
        }
        CancelGrants(seen, from_step);
        RegisterAgain();
        return preempted;
    }

    // Lets the requests that still hold blocks whose keys were withdrawn register these blocks again.
    void RegisterAgain() {
        std::erase_if(withdrawn_, [&](Int block) { return pool_.references[block] == 0; });
        if (!withdrawn_.empty()) {
            blocks_.RegisterAgain(withdrawn_);
            requests_.InvalidateAllFastPaths();
        }
        withdrawn_.clear();
    }

    void CancelGrants(const std::set<Stay>& stays, Int from_step) {
        if (stays.empty()) return;
        for (auto at = grants.lower_bound(from_step); at != grants.end(); ++at) {
            std::erase_if(at->second, [&](const Grant& one) {
                const bool gone = stays.contains(one.stay);
                if (gone) counters_.granted_tokens -= one.num_tokens;
                return gone;
            });
        }
    }

    // Drops the keys that this stay registered in steps from `from_step` on; appends the stays that adopted them.
    void Withdraw(const Stay& stay, Int from_step, std::vector<Stay>* adopters) {
        for (auto at = tentative.lower_bound(from_step); at != tentative.end(); ++at) {
            const NamedKeys mine = at->second.Pop(stay);
            for (const auto& [block, key] : mine) {
                if (!pool_.HasThisKey(block, key)) continue;
                withdrawn_.push_back(block);
                pool_.DropKeys(block, kWithdrawn);
                ++counters_.withdrawn_keys;
            }
            const auto of_step = adoptions.find(at->first);
            if (of_step == adoptions.end()) continue;
            for (const auto& [block, key] : mine) {
                const std::vector<Stay>* stays = of_step->second.Find(block);
                if (stays != nullptr) adopters->insert(adopters->end(), stays->begin(), stays->end());
            }
        }
    }

    void NoteUse(Int slot) {
        const Int last = std::min(requests_.granted_step[slot], pool_.step - 1);
        if (last <= pool_.executed_through) return;
        for (const auto& one : blocks_.managers) pool_.NoteUse(one->table[slot], last);
    }

    BlockList TakeReversed(Int slot) {
        BlockList blocks = blocks_.TakeAll(slot);
        std::reverse(blocks.begin(), blocks.end());
        return blocks;
    }

    void GiveBack(Int slot, Int fence) {
        NoteUse(slot);
        if (blocks_.spec.policy == kTurnTail || pool_.split) RenewStates(blocks_.managers, slot);
        blocks_.NoteReleased(slot);
        if (fence > pool_.executed_through) {
            ReleaseLater(TakeReversed(slot), fence);
        } else {
            blocks_.Free(slot);
        }
    }

    void PinForTransfer(Int slot) {
        NoteUse(slot);
        blocks_.NoteReleased(slot);
        const BlockList blocks = TakeReversed(slot);
        BlockList& pinned = held[slot];
        pinned.insert(pinned.end(), blocks.begin(), blocks.end());
    }

    std::vector<Stay> ForgetUngranted(Int slot, Int seq) {
        std::vector<Stay> adopters;
        if (requests_.granted_step[slot] == seq) Withdraw(StayOf(slot), seq, &adopters);
        return adopters;
    }

    Coordinator& blocks_;
    Requests& requests_;
    BlockPool& pool_;
    Counters& counters_;
    Column withdrawn_;  // blocks that lost their keys in the cascade that is carried out
};

}  // namespace kvplane
