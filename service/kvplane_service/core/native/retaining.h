// Applies the section `retain` of a part: retains and releases cached prefixes.
#pragma once

#include "coordinator.h"

namespace kvplane {

enum RetainOutcome : Int { kRetained = 0, kReleased = 1, kOverBudget = 2, kTooManyRetained = 3, kOtherOwner = 4 };

class Retainer {
  public:
    explicit Retainer(Coordinator& coordinator) : blocks_(coordinator), retained_(coordinator.pool.retained) {}

    // Applies all rows, which the replica accepts; adds an entry for each to the result.
    void Apply(const Retain& rows, PartResult* result) {
        const Int now_ns = rows.time_ns();
        retained_.RemoveUntil(now_ns);
        retained_.ForgetLost();  // so that it does not count
        const uint8_t* at = rows.hashes.data;
        for (size_t row = 0; row < rows.num_hashes.size(); ++row) {
            const Int count = rows.num_hashes[row], until_ns = Entry(rows.until_ns, row, 0);
            const auto size = static_cast<size_t>(blocks_.spec.digest_size);
            Digests digests;
            digests.add(at, static_cast<size_t>(count) * size, size);
            at += static_cast<size_t>(count) * size;
            Retention wanted;
            wanted.owner = rows.owner.empty() ? std::string() : rows.owner[row];
            wanted.domain = kUnknownDomain;
            blocks_.pool.pairs.Known(rows.domain.empty() ? std::string() : rows.domain[row], &wanted.domain);
            wanted.digest = digests.at(count - 1);
            wanted.priority = Entry(rows.priority, row, 0);
            wanted.until_ns = until_ns;
            const Int most = blocks_.spec.num_blocks * Entry(rows.percent, row, 0) / 100;
            if (until_ns <= now_ns) {
                Release(wanted, most, result);
            } else {
                Add(std::move(wanted), digests, most, result);
            }
        }
        if (retained_.each().empty()) return;
        Int next = kForever;
        for (const auto& [number, one] : retained_.each()) next = std::min(next, one.until_ns);
        result->OfTiers().next_end_ns = {static_cast<uint64_t>(next)};
    }

  private:
    void Add(Retention wanted, const Digests& digests, Int most, PartResult* result) {
        const Int num_tokens = digests.count() * blocks_.spec.hash_block_size;
        const Hit hit = blocks_.lookup->Find(digests, wanted.domain, num_tokens, kInside);
        std::set<Key> seen;
        for (const BlockList& of_group : hit.blocks) {
            for (auto block = of_group.rbegin(); block != of_group.rend(); ++block) {
                const Key& key = blocks_.pool.records[*block].key;
                if (key.pair && seen.insert(key).second) wanted.keys.emplace(static_cast<Int>(wanted.keys.size()), key);
            }
        }
        const Int used = retained_.CountNew(wanted), count = static_cast<Int>(wanted.keys.size());
        const Int left = most - retained_.CountKeysOf(wanted.owner);
        if (used > most) return Answer(hit.num_tokens, count, std::max<Int>(0, left), kOverBudget, result);
        if (!retained_.HasRoomFor(wanted))
            return Answer(hit.num_tokens, count, left, kTooManyRetained, result);
        if (count > 0) {
            retained_.Add(std::move(wanted));
        } else if (retained_.Has(wanted)) {
            retained_.Remove(wanted);
        }
        Answer(hit.num_tokens, count, most - used, kRetained, result);
    }

    void Release(const Retention& name, Int most, PartResult* result) {
        RetainOutcome outcome = kReleased;
        if (retained_.Has(name)) {
            retained_.Remove(name);
        } else if (retained_.OthersHave(name)) {
            outcome = kOtherOwner;
        }
        Answer(0, 0, std::max<Int>(0, most - retained_.CountKeysOf(name.owner)), outcome, result);
    }

    static void Answer(Int hit, Int count, Int left, RetainOutcome outcome, PartResult* result) {
        JobOrders::AddRow<4>(&result->OfTiers().retained, {hit, count, left, outcome});
    }

    Coordinator& blocks_;
    RetainedBlocks& retained_;
};

}  // namespace kvplane
