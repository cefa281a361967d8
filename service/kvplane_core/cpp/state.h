// The image of a replica: its fields in the order of `state.py`. `StateFields` visits them for both directions; what is
// large is written by `SaveState` in slices, and made again by `LoadState`.
//
// A reader accepts a number that the core uses as an index, size or position only in the range of one. What the numbers
// mean is not checked, see `check/check.h`.
#pragma once

#include "check/slices.h"
#include "hazard_state.h"
#include "replica.h"
#include "tiers/state.h"

namespace kvplane {

constexpr std::string_view kMagic = "kvplane state 2\n";
constexpr std::array<const char*, 4> kPolicyNames{"lru", "window_tail", "turn_tail", "hazard"};

// What an image has that the core does not, and what is left out of it.
struct ImageTerms {
    std::vector<uint8_t> spec{};  // its digest
    std::vector<uint64_t> shown{};  // stamps of the memory when the engine life began
    std::map<Int, std::vector<uint8_t>> hashers{};  // by slot: the packed state of a hasher; to save, of those outside
    bool with_statistics = true, hashed = false;  // hashed: without the states of hashers
    size_t run = 1;                               // blocks of an entry of keys
};

template <typename Image>
class StateFields {
  public:
    StateFields(Image& one, Replica& of)
        : image(one), replica(of), pool(of.blocks.pool), requests(of.blocks.requests), tracker(of.tracker) {}

    void Terms(ImageTerms& terms) {
        image.Begin('L', 3);
        image.Number(replica.seq, kCount);
        image.Flag(replica.keeps_keys);
        image.Words(terms.shown);
        image.Holds(terms.shown.size() <= pool.stamp.size(), "has more stamps than blocks");
    }

    void Pool() {
        image.Begin('d', 8);
        image.Name("_counter"), image.Number(pool.counter, {0, kMaxCounter});
        image.Name("busy"), Blocks(pool.busy);
        image.Name("epoch"), image.Number(pool.epoch, {0, (Int{1} << kEpochBits) - 1});
        image.Name("executed_through"), image.Number(pool.executed_through, kCount);
        image.Name("generation"), image.Number(pool.generation, {0, (Int{1} << (64 - kEpochBits - kCounterBits)) - 1});
        image.Name("num_evictable"), image.Number(pool.num_evictable, kCount);
        image.Name("reserved"), image.Numbers(pool.reserved, block);
        image.Name("step"), image.Number(pool.step, kCount);
    }

    // -- requests ----------------------------------------------------------------------------------------------------

    void OfRequests() {
        image.Begin('d', 23);
        Numbers("adopted_step", requests.adopted_step, kCount);
        image.Name("asked"), image.Dict(requests.asked, Slots(), [&](auto& row) {
            image.Begin('t', 2);
            image.Number(row.first, kCount);
            image.Number(row.second, {-kCount.most, kCount.most});  // with negative extra it may end before 0
        });
        std::vector<uint8_t> none(requests.by_service.size());
        Flags("by_service", hides_hashers ? none : requests.by_service);
        Numbers("computed", requests.computed, position);
        Domains();
        Column ends = requests.ends_at;
        for (Int slot = 0; slot < requests.size(); ++slot)
            ends[slot] = requests.running[slot] ? requests.LaunchEnd(slot) : 0;
        Numbers("ends_at", Image::kReads ? requests.ends_at : ends, position);
        Numbers("granted_step", requests.granted_step, kCount);
        Flags("held", requests.held);
        Numbers("in_flight", requests.in_flight, kCount);
        Numbers("limit", requests.limit, position);
        Flags("live", requests.live);
        Numbers("load_after", requests.load_after, kCount);
        image.Name("loading"), OfSlots(requests.loading);
        image.Name("not_zeroed"), OfSlots(requests.not_zeroed);
        Numbers("num_prompt", requests.num_prompt, position);
        image.Name("num_running"), image.Number(requests.num_running, {0, kMaxSlots});
        Numbers("num_tokens", requests.num_tokens, position);
        PerSlot("request_id", requests.request_id, [&](auto& rows) {
            image.Each('L', rows, [&](std::string& one) { image.Text(one); });
        });
        Flags("running", requests.running);
        PerSlot("serial", requests.serial, [&](Column& rows) { image.Numbers(rows, kCount); }, false);
        Numbers("single_group_hit", requests.single_group_hit, position);
        Flags("skip_reading", requests.skip_reading);
        image.Name("unserved"), image.Dict(requests.unserved, Slots(), [&](Int& one) { image.Number(one, kCount); });
        image.Holds(requests.num_running == std::accumulate(requests.running.begin(), requests.running.end(), Int{0}),
                    "has another number of running requests");
        for (Int slot = 0; slot < requests.size(); ++slot)
            image.Holds(requests.live[slot] || !requests.running[slot], "has a request that runs and is not live");
    }

    // -- steps in flight ---------------------------------------------------------------------------------------------

    void Tracker() {
        image.Begin('d', 7);
        image.Name("adoptions"), image.Dict(tracker.adoptions, kCount, [&](auto& book) {
            std::vector<std::pair<Block, Stay>> rows;
            book.ForEach([&](Block one, const auto& stays) {
                for (const Stay& stay : stays) rows.emplace_back(one, stay);
            });
            image.Each('L', rows, [&](auto& row) {
                image.Begin('t', 3);
                image.Number(row.first, block);
                OfStay(row.second);
            });
            if constexpr (Image::kReads) {
                for (const auto& [one, stay] : rows) book[one].push_back(stay);
            }
        });
        const auto blocks = [&](BlockList& list) { image.Numbers(list, block); };
        image.Name("filling"), image.Dict(tracker.filling, kCount, blocks);
        image.Name("grants"), image.Dict(tracker.grants, kCount, [&](Grants& grants) { OfGrants(grants); });
        image.Name("held"), image.Dict(tracker.held, Slots(), blocks);
        image.Name("tentative"), image.Dict(tracker.tentative, kCount, [&](KeyBook& book) {
            std::vector<std::pair<Stay, NamedKeys>> rows;
            book.ForEach([&](const Stay& stay, const NamedKeys& keys) { rows.emplace_back(stay, keys); });
            image.Each('L', rows, [&](auto& row) {
                image.Begin('t', 3);
                OfStay(row.first);
                Keys(row.second);
            });
            if constexpr (Image::kReads) {
                for (const auto& [stay, keys] : rows) book.Add(stay, keys);
            }
        });
        image.Name("under_load"), Blocks(tracker.under_load);
        image.Name("waiting"), image.Each('L', tracker.waiting, [&](auto& one) {
            image.Begin('t', 2);
            image.Number(one.first, kCount);
            blocks(one.second);
        });
    }

    // -- groups ------------------------------------------------------------------------------------------------------

    void Manager(GroupManager& one) {
        auto* const states = one.spec.kind == kAlignedState ? static_cast<AlignedStateManager*>(&one) : nullptr;
        image.Begin('d', states ? 11 : 5);
        if (states) {
            image.Name("_registered_this_step"), image.Keys(states->registered_this_step);
            image.Name("_stopped_at"), image.Dict(states->stopped_at, Slots(), [&](auto& ends) {
                image.Dict(ends, kCount, [&](Int& tokens) { image.Number(tokens, position); });
            });
        }
        image.Name("copies"), image.Each('L', one.copies, [&](auto& copy) {
            image.Begin('t', 2);
            image.Number(copy.first, block);
            image.Number(copy.second, block);
        });
        if (states) {
            image.Name("has_allocated"), image.Flags(states->has_allocated);
            image.Name("last_checkpoints"), image.Dict(states->last_checkpoints, Slots(), [&](auto& place) {
                image.Begin('t', place.size());
                image.Number(place[0], position);
                image.Number(place[1], kCount);
                image.Number(place[2], kCount);
            });
            image.Name("last_state"), image.Numbers(states->last_state);
        }
        image.Name("num_cached"), image.Numbers(one.num_cached);
        if (states) image.Name("num_retired"), image.Numbers(states->num_retired);
        image.Name("partial_hit"), image.Dict(one.partial_hit, Slots(), [&](auto& hit) {
            image.Begin('t', 2);
            image.Number(hit.first, kCount);
            image.Number(hit.second, block);
        });
        image.Name("stores_empty_ranges"), image.Flag(one.stores_empty_ranges);
        image.Name("table"), image.Each('L', one.table, [&](BlockList& table) { image.Numbers(table, block); });
        if constexpr (Image::kReads) Check(one, states);
    }

    // -- eviction ----------------------------------------------------------------------------------------------------

    void Retained(std::vector<Retention>& each, std::map<Int, BlockList>& lists) {
        image.Begin('L', 2);
        image.Each('L', each, [&](Retention& one) {
            image.Begin('L', 6);
            image.Text(one.owner);
            image.Domain(one.domain);
            image.OfDigest(one.digest);
            image.Number(one.priority, {0, kMaxPriority});
            image.Number(one.until_ns, {0, kMaxNs});
            std::vector<KeptKey> keys;
            for (const auto& [number, kept] : one.keys) keys.push_back(kept);
            image.Each('L', keys, [&](KeptKey& kept) { OfKeptKey(one.domain, kept); });
            if constexpr (Image::kReads) {
                for (const KeptKey& kept : keys) one.keys.emplace(static_cast<Int>(one.keys.size()), kept);
            }
        });
        std::vector<std::pair<Int, BlockList>> rows(lists.begin(), lists.end());
        image.Each('L', rows, [&](auto& row) {
            image.Begin('L', 2);
            image.Number(row.first, {0, kMaxPriority});
            image.Numbers(row.second, block);
        });
        if constexpr (Image::kReads) lists = {rows.begin(), rows.end()};
    }

    // `num_first`: number of free blocks before the divider.
    void Eviction(Int& num_first) {
        const Int policy = replica.spec.policy;
        image.Begin('L', policy == kTurnTail ? 4 : policy == kHazard ? 7 : 3);
        image.Fixed(kPolicyNames[static_cast<size_t>(policy)]);
        image.Number(num_first, {0, pool.num_blocks - 1});
        image.Dict(requests.hit_end, Slots(), [&](Int& tokens) { image.Number(tokens, position); });
        if (policy == kTurnTail) image.Dict(pool.free.superseded, block, [&](auto& one) { image.Flag(one); });
        if (policy != kHazard) return;
        HazardState(image, *pool.hazard).Visit();
        const Range hint{0, std::max<Int>(1, replica.spec.hint_values) - 1};
        image.Dict(requests.hints, Slots(), [&](Int& one) { image.Number(one, hint); });
    }

    // -- statistics --------------------------------------------------------------------------------------------------

    void Counters() {
        Column counts;
        for (const auto& [name, count] : replica.counters.All()) counts.push_back(*count);
        const size_t size = counts.size();
        image.Numbers(counts, kCount);
        image.Holds(counts.size() == size, "has another number of counts");
        if constexpr (Image::kReads) {
            for (size_t at = 0; at < size; ++at) *replica.counters.All()[at].second = counts[at];
        }
    }
    void Ages() {
        image.Begin('L', 3);
        for (auto* one : {&pool.residency.lifetime, &pool.residency.idle_before_evict, &pool.residency.reuse_gap}) {
            Column counts(one->begin(), one->end());
            image.Numbers(counts, kCount);
            image.Holds(counts.size() == one->size(), "has another number of counts");
            std::copy(counts.begin(), counts.end(), one->begin());
        }
    }
    void PoolCounters() {
        image.Begin('d', 3);
        image.Name("_age_base"), image.Number(pool.age_base, kCount);
        image.Name("evicted_keys"), image.Numbers(pool.evicted_keys, kCount);
        image.Holds(pool.evicted_keys.size() == replica.spec.groups.size(), "has another number of groups");
        image.Name("registered"), Keys(pool.registered);
    }
    void GroupCounters() {
        image.Begin('L', replica.blocks.managers.size());
        for (const auto& one : replica.blocks.managers) {
            image.Begin('t', 2);
            image.Number(one->allocated, kCount);
            image.Number(one->adopted, kCount);
        }
    }

    Image& image;
    Replica& replica;
    BlockPool& pool;
    Requests& requests;
    InFlightTracker& tracker;
    bool hides_hashers = false;
    const Range position{0, replica.spec.max_model_len + kMaxLookahead}, block{0, replica.spec.num_blocks - 1};

  private:
    std::optional<size_t> num_rows_;  // of the columns by slot

    Range Slots() const { return {0, requests.size() - 1}; }
    void OfSlots(std::set<Int>& slots) {
        image.Set(slots, [&](auto& one) { image.Number(one, Slots()); });
    }
    void Blocks(std::set<Block>& blocks) {
        image.Set(blocks, [&](auto& one) { image.Number(one, block); });
    }
    void OfStay(Stay& stay) {
        image.Number(stay.first, Slots());
        image.Number(stay.second, kCount);
    }
    void Keys(NamedKeys& keys) {
        image.Each('L', keys, [&](auto& one) {
            image.Begin('t', 2);
            image.Number(one.first, block);
            image.OfKey(one.second);
        });
    }
    void OfGrants(Grants& grants) {
        Column slot, serial, tokens;
        for (const Grant& one : grants) {
            slot.push_back(one.stay.first);
            serial.push_back(one.stay.second);
            tokens.push_back(one.num_tokens);
        }
        image.Begin('L', 3);
        image.Numbers(slot, Slots());
        image.Numbers(serial, kCount);
        image.Numbers(tokens, kCount);
        image.Holds(serial.size() == slot.size() && tokens.size() == slot.size(), "has columns of other sizes");
        grants.resize(slot.size());
        for (size_t row = 0; row < slot.size(); ++row) grants[row] = {{slot[row], serial[row]}, tokens[row]};
    }
    // Without its domain, which is that of the retention, and with its place unless that is the device.
    void OfKeptKey(uint32_t domain, KeptKey& kept) {
        Int group = 0;
        if constexpr (Image::kReads) {
            const size_t count = image.Begin('L');
            image.Holds(count == 2 || count == 3, "has another number of values");
            image.Number(group, {0, pool.pairs.num_groups() - 1});
            image.OfDigest(kept.key.digest);
            kept.key.pair = pool.pairs.Of(domain, group);
            kept.place = kDevice;
            if (count == 3) image.Number(kept.place, {kDevice, pool.retained.num_places() - 1});
        } else {
            image.Begin('L', kept.place == kDevice ? 2 : 3);
            image.Number(group = pool.pairs.Group(kept.key.pair));
            image.OfDigest(kept.key.digest);
            if (kept.place != kDevice) image.Number(kept.place);
        }
    }

    // -- columns by slot ---------------------------------------------------------------------------------------------

    // A column without what free slots have, of which only the serial is part of the state.
    template <typename T, typename F>
    void PerSlot(const char* name, std::vector<T>& column, F&& visit, bool of_live = true) {
        std::vector<T> rows(column.begin(), column.begin() + requests.size());
        for (Int slot = 0; of_live && slot < requests.size(); ++slot) {
            if (!requests.live[slot]) rows[slot] = T();
        }
        image.Name(name);
        visit(rows);
        if constexpr (Image::kReads) {
            image.Holds(rows.size() == num_rows_.value_or(rows.size()) && rows.size() <= column.size(),
                        "has another number of slots");
            num_rows_ = rows.size();
            if (!rows.empty()) requests.Grow(static_cast<Int>(rows.size()) - 1);
            std::move(rows.begin(), rows.end(), column.begin());
        }
    }
    void Numbers(const char* name, Column& column, Range range) {
        PerSlot(name, column, [&](Column& rows) { image.Numbers(rows, range); });
    }
    void Flags(const char* name, std::vector<uint8_t>& column) {
        PerSlot(name, column, [&](auto& rows) { image.Flags(rows); });
    }
    void Domains() {
        std::vector<std::string> names(requests.domain.size());
        for (Int slot = 0; slot < requests.size(); ++slot) {
            if (requests.live[slot]) names[slot] = pool.pairs.NameOf(requests.domain[slot]);
        }
        PerSlot("domain", names, [&](auto& rows) {
            image.Each('L', rows, [&](std::string& one) { image.Text(one); });
        });
        if constexpr (Image::kReads) {
            for (Int slot = 0; slot < requests.size(); ++slot)
                requests.domain[slot] = image.DomainOf(names[static_cast<size_t>(slot)]);
        }
    }

    void Check(const GroupManager& one, const AlignedStateManager* states) const {
        const size_t count = one.table.size();
        image.Holds(count >= static_cast<size_t>(requests.size()) && count <= static_cast<size_t>(kMaxSlots) &&
                        one.num_cached.size() == count,
                    "has another number of slots");
        const auto size = [&](Int slot) {
            return slot < static_cast<Int>(count) ? static_cast<Int>(one.table[slot].size()) : 0;
        };
        for (size_t slot = 0; slot < count; ++slot)
            image.Holds(one.num_cached[slot] >= kNotTracked && one.num_cached[slot] <= size(slot),
                        "has less than num_cached");
        for (const auto& [slot, hit] : one.partial_hit) image.Holds(hit.first < size(slot), "ends before partial_hit");
        if (!states) return;
        for (const size_t rows : {states->last_state.size(), states->num_retired.size(), states->has_allocated.size()})
            image.Holds(rows == count, "has another number of slots");
        for (size_t slot = 0; slot < count; ++slot) {
            image.Holds(states->last_state[slot] >= kNoState && states->last_state[slot] < size(slot),
                        "ends before last_state");
            image.Holds(states->num_retired[slot] >= 0 && states->num_retired[slot] <= size(slot),
                        "has less than num_retired");
            image.Holds(!states->has_allocated[slot] || size(slot) > one.spec.speculative_blocks,
                        "has no blocks for drafts");
        }
        for (const auto& [slot, place] : states->last_checkpoints)
            image.Holds(place[1] < size(slot), "ends before last_checkpoints");
    }
};

}  // namespace kvplane
