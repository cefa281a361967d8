// Saves what the device evicts next, and moves what a tier evicts next to the tier behind it: the policy `behind`.
#pragma once

#include "../coordinator.h"

namespace kvplane {

constexpr Int kAheadSteps = 10;  // steps whose blocks are looked at: twice those that are in flight while a save is
constexpr Int kSlotShare = 2;    // at most one of this number of slots is looked at, of those that are copied to
constexpr Int kSavedSteps = 2;   // blocks saved at the end of a step, in blocks that a step takes

class SaveBehind {
  public:
    explicit SaveBehind(Coordinator& coordinator)
        : blocks_(coordinator), spec_(coordinator.spec), pool_(coordinator.pool), tiers_(coordinator.tiers),
          directory_(tiers_.directory) {}

    // Orders the saves and moves of a step. `next_victim`: slot of the request that is preempted next; -1: none.
    void CloseStep(Int next_victim) {
        tiers_.demand = std::max(tiers_.demand_now, tiers_.demand - tiers_.demand / 16);
        tiers_.demand_now = 0;
        if (tiers_.each[0].is_of_peers) return;  // nothing is saved there
        const Int ahead = std::min(spec_.most_ahead, kAheadSteps * tiers_.demand);
        Int left = std::min(kSavedSteps * tiers_.demand, kMaxJobs - tiers_.jobs.size());
        if (pool_.retained.num_free() > 0) left = SaveRetained(ahead - pool_.free.count(), left);
        left = SaveWanted(SaveSome(ahead, left, next_victim));
        for (size_t number = 0; number + 1 < tiers_.each.size(); ++number) {
            Tier &tier = tiers_.each[number], &behind = tiers_.each[number + 1];
            if (behind.is_of_peers) continue;
            const Int looked_at = std::min(ahead, std::max<Int>(1, behind.num_slots / kSlotShare));
            if (tier.num_free() < ahead) left = MoveSome(tier, behind, looked_at, left);
            left = MoveWanted(tier, behind, left);
        }
    }

  private:
    // Saves some of the blocks that are evicted next, the free ones first; returns how many further jobs may begin.
    Int SaveSome(Int ahead, Int room, Int next_victim) {
        const bool only_used = tiers_.each[0].wanted.policy == kReuse;
        bool stops = false;
        const auto visit = [&](Block block) {
            // With more tokens a block has another key.
            if (IsDone(block) || !HasFullKey(block)) return Visited::kSeen;
            if (!IsExecuted(block)) return Visited::kAgain;
            const Sought key(pool_.records[block].key);
            if (const uint32_t record = directory_.Find(key); record != kNoRecord) {
                Keep(directory_[record]);
                directory_.Note(block, record);
                return Visited::kSeen;
            }
            // A free block whose key is retained later leaves the free list, so that `SaveRetained` visits it.
            if (only_used && !pool_.retained.HasKey(key.key)) {
                directory_.Note(block);  // until a tier has its key
                return Visited::kSeen;
            }
            if (room <= 0) {
                tiers_.counters.no_job += tiers_.jobs.size() >= kMaxJobs;
                room = 0;
                stops = true;
            } else if (OrderSave(block, key)) {
                --room;
            } else {
                stops = true;
            }
            return stops ? Visited::kStop : Visited::kSeen;
        };
        pool_.free.VisitNew(
            ahead, visit, [&](Block block) { directory_.FetchBlock(block); },
            [&](Block block) {
                if (pool_.HasKey(block) && !directory_.IsNoted(block)) directory_.Expect(pool_.records[block].key);
            });
        if (next_victim < 0) return room;
        Int count = ahead - pool_.num_free();
        for (const auto& one : blocks_.managers) {
            const BlockList& table = one->table[next_victim];
            for (auto at = table.rbegin(); at != table.rend() && count > 0 && !stops; ++at) {
                if (*at == kNullBlock) continue;
                visit(*at);
                --count;
            }
        }
        return room;
    }

    // Saves some of the first `count` retained blocks, evicted soon for lack of others; returns as `SaveSome`.
    Int SaveRetained(Int count, Int room) {
        const bool only_used = tiers_.each[0].wanted.policy == kReuse;
        for (auto next = pool_.retained.order().begin(); next != pool_.retained.order().end() && count > 0; ++next) {
            const Block block = next->second;
            --count;
            if (IsDone(block) || !HasFullKey(block) || !IsExecuted(block)) continue;
            const Sought key(pool_.records[block].key);
            if (const uint32_t record = directory_.Find(key); record != kNoRecord) {
                Keep(directory_[record]);
                directory_.Note(block, record);
                continue;
            }
            if (only_used && !pool_.retained.HasKey(key.key)) continue;  // it has a further key that is retained
            if (room <= 0) {
                tiers_.counters.no_job += tiers_.jobs.size() >= kMaxJobs;
                return 0;
            }
            if (!OrderSave(block, key)) return room;
            --room;
        }
        return room;
    }

    // Saves some of the blocks that the first tier wants early, in order; returns as `SaveSome`.
    Int SaveWanted(Int room) {
        Wanted& wanted = tiers_.each[0].wanted;
        while (!wanted.empty() && room > 0) {
            const auto [place, stamp] = wanted.First();
            const auto block = static_cast<Block>(place);
            const bool is_there = pool_.stamp[block] == stamp && HasFullKey(block);
            if (is_there && !IsExecuted(block)) return room;  // those behind it wait a step or two longer
            wanted.RemoveFirst();
            if (!is_there || directory_.Find(pool_.records[block].key) != kNoRecord) continue;
            if (!OrderSave(block, pool_.records[block].key)) return room;
            --room;
        }
        return room;
    }

    // Whether no more tokens will follow in a block that has a key.
    bool HasFullKey(Block block) const {
        if (!pool_.HasKey(block)) return false;
        const Int group = pool_.pairs.Group(pool_.records[block].key.pair);
        return pool_.KeyTokens(block) % spec_.groups[static_cast<size_t>(group)].block_size == 0;
    }
    // Whether a visit of the block would find nothing new. With `reuse` its key may be retained since it was noted.
    bool IsDone(Block block) const {
        const bool may_be_retained = tiers_.each[0].wanted.policy == kReuse && !pool_.retained.empty();
        return directory_.IsNoted(block) && !may_be_retained;
    }
    bool IsExecuted(Block block) const { return pool_.key_step[block] <= pool_.executed_through; }

    // Orders the save of a block; returns false if there is no slot for it. As in other calls that each job takes, what
    // it calls is made part of it, which the compiler would not do in a library of this size.
    [[gnu::flatten]] bool OrderSave(Block block, const Sought& key) {
        Tier& first = tiers_.each[0];
        const Int slot = tiers_.BeginWrite(first, key);
        if (slot == kNoSlot) return false;
        const Int job = tiers_.NextJob(), group = pool_.pairs.Group(key.key.pair);
        const uint64_t stamp = pool_.stamp[block];
        tiers_.jobs.saves.Add(job, Save{block, stamp, 0, slot});
        tiers_.orders.save.push_back({job, Int{block}, group, static_cast<Int>(stamp), 0, slot,
                                      static_cast<Int>(pool_.pairs.SealKey(key.key))});
        directory_.Note(block, first.RecordOf(slot));
        return true;
    }

    // The device evicts the key soon, so its copy in a tier is no shadow any more.
    void Keep(const InTiers& key) {
        for (Tier& one : tiers_.each) {
            const Int slot = one.SlotWith(key);
            if (slot != kNoSlot && one.IsShadow(slot)) one.Refresh(slot);
        }
    }

    // Copies some of the keys that a tier evicts next to the tier behind it; returns as `SaveSome`.
    Int MoveSome(Tier& tier, Tier& behind, Int ahead, Int room) {
        Column wanted;
        const auto visit = [&](Int slot) {
            if (static_cast<Int>(wanted.size()) >= room) return Visited::kStop;
            if (!behind.HasOrWrites(tier.Of(slot))) wanted.push_back(slot);
            return Visited::kSeen;
        };
        Int left = ahead - (tier.num_held() - tier.retained.num_free());  // of what is retained, for lack of others
        for (Int slot = tier.retained.First(); slot != kNoSlot && left > 0; slot = tier.Next(slot), --left) visit(slot);
        if (behind.wanted.policy != kReuse) tier.VisitNew(ahead, visit);
        for (auto next = wanted.begin(); next != wanted.end(); ++next) {
            if (tiers_.OrderMove(tier, *next, behind)) continue;
            std::for_each(next, wanted.end(), [&](Int left) { tier.VisitAgain(left); });
            return 0;
        }
        return room - static_cast<Int>(wanted.size());
    }

    // Copies some of what a tier wants early from the tier before it, in order; returns as `SaveSome`.
    Int MoveWanted(Tier& tier, Tier& behind, Int room) {
        Wanted& wanted = behind.wanted;
        while (!wanted.empty() && room > 0) {
            const auto [slot, version] = wanted.First();
            wanted.RemoveFirst();
            if (static_cast<uint64_t>(tier.VersionOf(slot)) != version) continue;
            if (behind.HasOrWrites(tier.Of(slot))) continue;
            if (!tiers_.OrderMove(tier, slot, behind)) return room;
            --room;
        }
        return room;
    }

    Coordinator& blocks_;
    const Spec& spec_;
    BlockPool& pool_;
    Tiers& tiers_;
    Directory& directory_;
};

}  // namespace kvplane
