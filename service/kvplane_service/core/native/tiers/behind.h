// Saves what the device evicts next, and moves what a tier evicts next to the tier behind it: the policy `behind`.
#pragma once

#include "../coordinator.h"

namespace kvplane {

constexpr Int kAheadSteps = 10;  // steps whose blocks are looked at: twice those that are in flight while a save is
constexpr Int kSavedSteps = 2;   // blocks saved at the end of a step, in blocks that a step takes

class SaveBehind {
  public:
    explicit SaveBehind(Coordinator& coordinator)
        : spec_(coordinator.spec), pool_(coordinator.pool), tiers_(coordinator.tiers) {}

    // Orders the saves and moves of a step.
    void CloseStep() {
        tiers_.demand = std::max(tiers_.demand_now, tiers_.demand - tiers_.demand / 16);
        tiers_.demand_now = 0;
        const Int ahead = std::min(spec_.most_ahead, kAheadSteps * tiers_.demand);
        Int left = std::min(kSavedSteps * tiers_.demand, kMaxJobs - tiers_.jobs.size());
        left = SaveSome(ahead, left);
        for (size_t number = 0; number + 1 < tiers_.each.size(); ++number) {
            Tier& tier = tiers_.each[number];
            if (tier.num_free() < ahead) left = MoveSome(tier, tiers_.each[number + 1], ahead, left);
        }
    }

  private:
    // Saves some of the blocks that are evicted next; returns how many further jobs may begin.
    Int SaveSome(Int ahead, Int room) {
        pool_.free.VisitNew(ahead, [&](Block block) {
            if (tiers_.behind.Has(block) || !pool_.HasKey(block)) return Visited::kSeen;
            if (pool_.key_step[block] > pool_.executed_through) return Visited::kAgain;
            const Key& key = pool_.records[block].key;
            const Int group = pool_.pairs.Group(key.pair);
            const Int block_size = spec_.groups[static_cast<size_t>(group)].block_size;
            if (pool_.KeyTokens(block) % block_size) return Visited::kSeen;  // with more tokens it has another key
            if (tiers_.Has(key)) {
                Keep(key);
                tiers_.behind.Add(block);
                return Visited::kSeen;
            }
            if (room <= 0) {
                tiers_.counters.no_job += tiers_.jobs.size() >= kMaxJobs;
                room = 0;
                return Visited::kStop;
            }
            const Int slot = tiers_.BeginWrite(tiers_.each[0], key);
            if (slot == kNoSlot) return Visited::kStop;
            const Int job = tiers_.NextJob();
            const uint64_t stamp = pool_.stamp[block];
            tiers_.jobs.saves.emplace(job, Save{key, block, stamp, 0, slot});
            JobOrders::AddRow<6>(&tiers_.orders.save, {job, Int{block}, group, static_cast<Int>(stamp), 0, slot});
            tiers_.behind.Add(block);
            --room;
            return Visited::kSeen;
        });
        return room;
    }

    // The device evicts the key soon, so its copy in a tier is no shadow any more.
    void Keep(const Key& key) {
        for (Tier& one : tiers_.each) {
            if (one.num_shadows == 0) continue;
            const Int slot = one.Find(key);
            if (slot != kNoSlot && one.IsShadow(slot)) one.Refresh(slot);
        }
    }

    // Copies some of the keys that a tier evicts next to the tier behind it; returns as `SaveSome`.
    Int MoveSome(Tier& tier, Tier& behind, Int ahead, Int room) {
        Column wanted;
        tier.VisitNew(ahead, [&](Int slot) {
            if (static_cast<Int>(wanted.size()) >= room) return Visited::kStop;
            const Key& key = tier.KeyOf(slot);
            if (!behind.IsWritten(key) && behind.Find(key) == kNoSlot) wanted.push_back(slot);
            return Visited::kSeen;
        });
        for (auto next = wanted.begin(); next != wanted.end(); ++next) {
            const Int slot = *next;
            const Key key = tier.KeyOf(slot);
            const Int target = tiers_.BeginWrite(behind, key);
            if (target == kNoSlot) {
                std::for_each(next, wanted.end(), [&](Int left) { tier.VisitAgain(left); });
                return 0;
            }
            const Int job = tiers_.NextJob();
            const Location source{tier.number, slot, tier.VersionOf(slot)};
            tiers_.jobs.moves.emplace(job, Move{key, source, behind.number, target});
            JobOrders::AddRow<6>(&tiers_.orders.move, {job, source.tier, slot, source.version, behind.number, target});
        }
        return room - static_cast<Int>(wanted.size());
    }

    const Spec& spec_;
    BlockPool& pool_;
    Tiers& tiers_;
};

}  // namespace kvplane
