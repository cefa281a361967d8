// The victims of the policy HAZARD: by what `learner.h` has learnt, in batches.
#pragma once

#include "freelist.h"
#include "learner.h"
#include "requests.h"

namespace kvplane {

class HazardPolicy {
  public:
    explicit HazardPolicy(const Spec& spec)
        : learner(NumHashBlocks(spec), spec.hash_block_size), owner(static_cast<size_t>(spec.num_blocks)) {}

    // Records an admission, before it adopts the tokens of its hit and allocates.
    void NoteAdmitted(const Requests& requests, const std::string& domain, Int slot, Int num_hit) {
        const Digests& digests = requests.content[slot];
        prompts[slot] =
            learner.Admit(digests, SaltOf(domain), requests.num_tokens[slot], num_hit, requests.Hint(slot));
    }

    // Records what the engine says of requests that continue this one.
    void NoteHint(Requests& requests, Int slot, Int hint) {
        requests.hints[slot] = hint;
        if (const auto found = prompts.find(slot); found != prompts.end()) learner.Describe(found->second, hint);
    }

    // Records that a request is the last user of blocks, which are at these indices of its table.
    template <typename IndexOf>
    void NoteOwners(Int slot, const BlockList& blocks, Int block_size, IndexOf&& index_of) {
        const auto found = prompts.find(slot);
        if (found == prompts.end()) return;
        const Prompt& prompt = found->second;
        for (size_t at = 0; at < blocks.size(); ++at)
            owner[blocks[at]] = prompt.number * kPieces + prompt.PieceOf((index_of(at) + 1) * block_size);
    }

    // Puts blocks of least worth before the divider, if there are fewer than `count` and HAZARD leads.
    template <typename KeyTokens>
    void PutBefore(FreeList& free, Int count, KeyTokens&& tokens_of) {
        if (!learner.duel.leads) return;
        const Int missing = count - free.CountFirst(count);
        if (missing <= 0) return;
        const auto for_each = [&](auto&& visit) {
            for (Block block = 0; block < owner.size(); ++block) {
                if (free.IsBehind(block) && tokens_of(block) > 0) visit(block, owner[block]);
            }
        };
        const auto count_of = [&](size_t all) { return std::max(static_cast<size_t>(missing), all / kBatches); };
        chosen_.clear();
        for (const History::Entry& one : learner.history.Least(for_each, count_of, tokens_of))
            chosen_.push_back(one.number);
        for (const Block block : chosen_) free.Remove(block);
        free.AppendLeftWindow(chosen_);
    }

    Learner learner;
    Column owner;                   // by block: number of the admission that used it last * kPieces + piece
    std::map<Int, Prompt> prompts;  // slot -> how the prompt of its request is divided

  private:
    static Int NumHashBlocks(const Spec& spec) {
        Int most = 0;
        for (const GroupSpec& one : spec.groups) most = std::max(most, one.block_size);
        const auto num_groups = static_cast<Int>(spec.groups.size());
        return std::max<Int>(1, spec.num_blocks * most / (num_groups * spec.hash_block_size));
    }

    // FNV-1a; 0 for the empty domain.
    static uint64_t SaltOf(const std::string& domain) {
        if (domain.empty()) return 0;
        uint64_t salt = 0xCBF29CE484222325;
        for (const char byte : domain) salt = (salt ^ static_cast<uint8_t>(byte)) * 0x100000001B3;
        return salt;
    }

    BlockList chosen_;
};

}  // namespace kvplane
