// The state of all requests of one replica, in columns by slot.
#pragma once

#include "types.h"

namespace kvplane {

constexpr Int kNoFastPath = 0;

struct Requests {
    std::vector<uint8_t> live, running, held, skip_reading, by_service;
    std::vector<std::string> request_id;
    std::vector<uint32_t> domain;
    Column serial, limit, num_prompt, num_tokens, computed, in_flight, single_group_hit, granted_step, adopted_step;
    Column load_after, ends_at, fast_path_until, alloc_bound, window_bound, register_bound;
    std::vector<Digests> content;
    // u32 tokens behind the last hash block, of requests hashed here: as many bytes as a block has for each slot
    std::vector<uint8_t> pending;
    std::vector<uint32_t> num_pending;    // bytes of them
    size_t hash_block_bytes = 4;
    std::vector<uint8_t> hashed_outside;  // whether Python hashes a request's tokens
    Int num_outside = 0;                        // of them
    std::map<Int, std::pair<Int, Int>> asked;  // slot -> last step with drafts, and where its row ended
    std::map<Int, Int> unserved;               // slot -> consecutive rows that had room for less than a state block
    std::map<Int, Int> hit_end;  // slot -> tokens of the hit of a running request; not with LRU
    std::map<Int, Int> hints;    // slot -> what the engine says of later requests; only with HAZARD
    std::set<Int> loading, not_zeroed;
    Int num_running = 0;

    // All columns have their full length from the start, so that readers may keep their addresses.
    Requests() {
        constexpr auto most = static_cast<size_t>(kMaxSlots);
        for (auto& [name, flags] : Flags()) flags->resize(most, 0);
        for (auto& [name, numbers] : Numbers()) numbers->resize(most, 0);
        request_id.resize(most);
        domain.resize(most, 0);
        content.resize(most);
        hashed_outside.resize(most, 0);
    }

    Int size() const { return num_slots_; }  // slots that were used so far
    Int HitEnd(Int slot) const {
        const auto found = hit_end.find(slot);
        return found == hit_end.end() ? 0 : found->second;
    }
    Int Hint(Int slot) const {
        const auto found = hints.find(slot);
        return found == hints.end() ? 0 : found->second;
    }
    bool IsLive(Int slot) const { return slot >= 0 && slot < size() && live[slot]; }
    bool AreLive(const Column& slots) const {
        return std::all_of(slots.begin(), slots.end(), [&](Int slot) { return IsLive(slot); });
    }

    std::vector<std::pair<const char*, Column*>> Numbers() {
        return {{"serial", &serial},
                {"limit", &limit},
                {"num_prompt", &num_prompt},
                {"num_tokens", &num_tokens},
                {"computed", &computed},
                {"in_flight", &in_flight},
                {"single_group_hit", &single_group_hit},
                {"granted_step", &granted_step},
                {"adopted_step", &adopted_step},
                {"load_after", &load_after},
                {"ends_at", &ends_at},
                {"fast_path_until", &fast_path_until},
                {"alloc_bound", &alloc_bound},
                {"window_bound", &window_bound},
                {"register_bound", &register_bound}};
    }
    std::vector<std::pair<const char*, std::vector<uint8_t>*>> Flags() {
        return {{"live", &live},
                {"running", &running},
                {"held_slots", &held},
                {"skip_reading", &skip_reading},
                {"by_service", &by_service}};
    }

    void Grow(Int slot) {
        Require(slot < kMaxSlots, "the slot is beyond the last one");
        num_slots_ = std::max(num_slots_, slot + 1);
        if (num_pending.size() >= static_cast<size_t>(num_slots_)) return;
        num_pending.resize(static_cast<size_t>(num_slots_), 0);
        pending.resize(num_pending.size() * hash_block_bytes, 0);
    }
    uint8_t* PendingOf(Int slot) { return pending.data() + static_cast<size_t>(slot) * hash_block_bytes; }

    void HashOutside(Int slot, bool outside) {
        num_outside += (outside ? 1 : 0) - hashed_outside[slot];
        hashed_outside[slot] = outside;
        num_pending[slot] = 0;
    }

    void Add(Int slot, Int tokens, Int most) {
        Grow(slot);
        Require(!live[slot], "the slot is taken");
        live[slot] = 1;
        running[slot] = held[slot] = skip_reading[slot] = by_service[slot] = 0;
        ++serial[slot];
        request_id[slot].clear();
        domain[slot] = 0;
        limit[slot] = most;
        num_prompt[slot] = num_tokens[slot] = tokens;
        content[slot] = Digests();
        HashOutside(slot, false);
        single_group_hit[slot] = load_after[slot] = ends_at[slot] = 0;
        Stop(slot);
    }

    // Position where the request's last launch ends; rows on the fast path do not update `ends_at`.
    Int LaunchEnd(Int slot) const { return std::max(ends_at[slot], computed[slot]); }

    // Below how many tokens the request has no recurrent state, if a row of facts appends this many tokens: a launch
    // left its last state and one behind each draft, a load or a hit the last one. Drafts are no known tokens.
    Int ShortestState(Int slot, Int appended) const {
        return std::min(computed[slot], num_tokens[slot] + std::max<Int>(0, appended - 1));
    }

    void Start(Int slot) {
        Require(!running[slot], "the request runs already");
        running[slot] = 1;
        ++num_running;
    }

    void Stop(Int slot) {
        num_running -= running[slot];
        running[slot] = 0;
        computed[slot] = in_flight[slot] = granted_step[slot] = adopted_step[slot] = 0;
        not_zeroed.erase(slot);
        unserved.erase(slot);
        hit_end.erase(slot);
        InvalidateFastPath(slot);
    }

    void InvalidateFastPath(Int slot) {
        fast_path_until[slot] = alloc_bound[slot] = window_bound[slot] = register_bound[slot] = kNoFastPath;
    }
    void InvalidateRegisterBound(Int slot) { fast_path_until[slot] = register_bound[slot] = kNoFastPath; }
    void InvalidateAllFastPaths() {
        for (Int slot = 0; slot < size(); ++slot) {
            if (live[slot]) InvalidateFastPath(slot);
        }
    }

    void Finish(Int slot) {
        Stop(slot);
        live[slot] = held[slot] = 0;
        loading.erase(slot);
        content[slot] = Digests();
        HashOutside(slot, false);
        asked.erase(slot);
        hints.erase(slot);
    }

  private:
    Int num_slots_ = 0;
};

}  // namespace kvplane
