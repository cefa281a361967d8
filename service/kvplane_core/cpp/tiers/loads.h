// Loads blocks of a hit from the tiers, and ends the jobs of the movers.
#pragma once

#include "../in_flight.h"

namespace kvplane {

// A block of a hit that is not on the device: its place in the table of a group, and the slot that has it.
struct Missing {
    Int group, position;
    Location source;
};

// A hit of the union of device and tiers.
struct LoadPlan {
    Hit hit;                          // with null blocks instead of slots
    std::vector<Missing> missing;     // by group and position
    Int gained = 0;                   // tokens of the hit beyond the hit of the device alone
    Int load_ns = 0, compute_ns = 0;  // times to load what is missing and to compute what is gained; 0, 0: unknown

    Int Farthest() const {
        Int number = 0;
        for (const Missing& one : missing) number = std::max(number, one.source.tier);
        return number;
    }
    bool IsSlower() const { return load_ns >= compute_ns && compute_ns > 0; }
};

enum WhyDeclined : Int { kLoaded = 0, kTooSlow = 1, kNoJob = 2, kWaits = 3, kGivenUp = 4 };

// What is loaded for an admission.
struct Choice {
    std::optional<LoadPlan> plan;    // what is loaded, now or after loads in flight
    WhyDeclined why = kLoaded;       // why the longer hit `passed` is not loaded
    std::optional<LoadPlan> passed;  // none while it waits: it is that of the plan
};

class TierLoads {
  public:
    TierLoads(Coordinator& coordinator, InFlightTracker& tracker)
        : blocks_(coordinator),
          tiers_(coordinator.tiers),
          pool_(coordinator.pool),
          requests_(coordinator.requests),
          tracker_(tracker) {}

    // -- admission ---------------------------------------------------------------------------------------------------

    // Chooses a hit of the union that is longer than the one of the device, and is loaded.
    Choice Choose(Int slot, Int limit, const Hit& device) {
        if (!tiers_.HasKeys()) return {};
        std::optional<LoadPlan> plan = Longest(slot, limit, device), longest;
        if (!plan) return {};
        if (plan->IsSlower()) {
            longest = std::move(plan);
            plan = Nearer(slot, limit, device, longest->Farthest());
            tiers_.counters.too_slow += !plan;
        }
        if (!plan) return {{}, kTooSlow, std::move(longest)};
        if (tiers_.jobs.size() >= kMaxJobs) {
            ++tiers_.counters.no_job;
            return {{}, kNoJob, std::move(plan)};
        }
        const WhyDeclined why = WhyLater(*plan);
        if (why == kLoaded) {
            const bool is_nearer = longest.has_value();
            return {std::move(plan), is_nearer ? kTooSlow : kLoaded, std::move(longest)};
        }
        tiers_.counters.given_up += why == kGivenUp;
        if (why == kWaits) return {std::move(plan), why, {}};
        return {{}, why, std::move(plan)};
    }

    // Admits a request with the hit of the plan, which gets the blocks that are loaded, and orders the load; returns
    // the job. The caller has checked that enough blocks are free.
    Int Begin(Admission admission, LoadPlan* plan, Rows* fresh) {
        Require(!plan->missing.empty(), "no worker gets a job without rows, so it would never end");
        BlockList on_device, filled;
        for (const BlockList& row : plan->hit.blocks) on_device.insert(on_device.end(), row.begin(), row.end());
        for (const Block block : on_device) pool_.Touch(block);  // the allocation below could otherwise evict them
        pool_.Take(static_cast<Int>(plan->missing.size()), &filled);
        for (size_t row = 0; row < filled.size(); ++row) {
            const Missing& one = plan->missing[row];
            plan->hit.blocks[static_cast<size_t>(one.group)][static_cast<size_t>(one.position)] = filled[row];
        }
        admission.hit = &plan->hit;
        blocks_.Admit(admission, fresh);
        pool_.Release(on_device);
        return Order(admission.slot, *plan, filled);
    }

    // -- completion --------------------------------------------------------------------------------------------------

    // Applies the ends of jobs that a part reports; a job that has ended before changes nothing.
    void EndJobs(const Cache& cache, PartResult* result) {
        for (const Int job : cache.jobs_done) End(job, true, result);
        for (const Int job : cache.jobs_failed) End(job, false, result);
        if (cache.jobs_before == 0) return;
        for (const Int job : JobsBefore(cache.jobs_before)) End(job, false, result);
    }

    // The longest hit of a prompt in the union, of at most `most` tokens; none without a hit. Changes nothing.
    std::optional<LoadPlan> Plan(const Digests& digests, uint32_t domain, Int most) const {
        Hit hit = FindPrefix(digests, domain, most, kForever);
        if (hit.num_tokens == 0) return {};
        return Split(std::move(hit), 0);
    }

  private:
    Tier& TierOf(const Location& source) const { return tiers_.each[static_cast<size_t>(source.tier)]; }

    std::optional<LoadPlan> Longest(Int slot, Int limit, const Hit& device) const {
        Hit hit = Find(slot, limit);
        if (hit.num_tokens <= device.num_tokens) return {};
        LoadPlan plan = Split(std::move(hit), device.num_tokens);
        // Without missing blocks the look-up needed one that the hit does not: a job without rows would never end.
        if (plan.missing.empty()) return {};
        return plan;
    }

    // The longest hit in this number of tiers or fewer that is loaded faster than computed, if there is one.
    std::optional<LoadPlan> Nearer(Int slot, Int limit, const Hit& device, Int depth) {
        std::optional<LoadPlan> nearer;
        for (tiers_.depth = depth; tiers_.depth > 0; --tiers_.depth) {
            nearer = Longest(slot, limit, device);
            if (!nearer || !nearer->IsSlower()) break;
            nearer.reset();
        }
        tiers_.depth = static_cast<Int>(tiers_.each.size());
        return nearer;
    }

    // Why a load may not begin now. It waits for a load of the same slot, whose block is hit then, and for room; while
    // it waits for room no later row begins a load, so that its turn comes. It waits only for loads that a request
    // waits for: an engine gives up those that do not end.
    WhyDeclined WhyLater(const LoadPlan& plan) {
        if (tiers_.waits_in && tiers_.waits_in == pool_.step) return kWaits;
        const Int loading = std::accumulate(tiers_.num_loading.begin(), tiers_.num_loading.end(), Int{0});
        const auto& before = tiers_.jobs.loads;
        if (loading && static_cast<Int>(plan.missing.size()) + loading > tiers_.most_loading) {
            const auto waits = [&](const auto& one) { return IsAwaited(one.first); };
            if (!std::any_of(before.begin(), before.end(), waits)) return kGivenUp;
            tiers_.waits_in = pool_.step;
            ++tiers_.counters.waited;
            return kWaits;
        }
        std::set<std::pair<Int, Int>> wanted;  // slots that loads in flight read too
        for (const Missing& one : plan.missing) {
            if (TierOf(one.source).IsPinned(one.source.slot)) wanted.insert({one.source.tier, one.source.slot});
        }
        if (wanted.empty()) return kLoaded;
        const auto is_wanted = [&](const Filled& row) { return wanted.contains({row.source.tier, row.source.slot}); };
        const auto waits = [&](const auto& one) {
            const std::vector<Filled>& rows = one.second.rows;
            return std::any_of(rows.begin(), rows.end(), is_wanted) && IsAwaited(one.first);
        };
        return std::any_of(before.begin(), before.end(), waits) ? kWaits : kGivenUp;
    }

    // Whether the request that a load was ordered for still waits for it.
    bool IsAwaited(Int job) const {
        const Int request = tiers_.jobs.loads.at(job).request;
        const auto found = tiers_.loading.find(request);
        return found != tiers_.loading.end() && found->second.first == job && tracker_.LoadsFromTiers(request);
    }

    // The times to load what is missing, behind the loads in flight, and to compute what is gained, if they are known.
    void SetTimes(LoadPlan* plan) const {
        const Column& costs = tiers_.costs_ns;
        if (costs.empty() || !costs[0]) return;
        Column rows = tiers_.num_loading;
        for (const Missing& one : plan->missing) ++rows[static_cast<size_t>(one.source.tier)];
        __int128 sum = 0;
        for (size_t number = 0; number < rows.size(); ++number) {
            if (rows[number] && !costs[1 + number]) return;
            sum += static_cast<__int128>(rows[number]) * costs[1 + number];
        }
        const auto within = [](__int128 time) { return static_cast<Int>(std::min<__int128>(time, kForever)); };
        plan->load_ns = within(sum);
        plan->compute_ns = within(static_cast<__int128>(plan->gained) * costs[0]);
    }

    // The longest prefix in the union that ends between blocks in every group: a block in which a hit ends is copied
    // when the request is admitted, before a load would fill it.
    Hit FindPrefix(const Digests& digests, uint32_t domain, Int most, Int limit) const {
        const PrefixLookup& lookup = *blocks_.lookup;
        const Int unit = blocks_.spec.scheduler_block_size;
        Hit hit = lookup.Find(digests, domain, most, kInside, limit, &tiers_);
        while (hit.num_tokens % unit)
            hit = lookup.Find(digests, domain, most, kInside, hit.num_tokens - hit.num_tokens % unit, &tiers_);
        return hit;
    }
    Hit Find(Int slot, Int limit) const {
        return FindPrefix(requests_.content[slot], requests_.domain[slot], blocks_.MostHit(slot), limit);
    }

    LoadPlan Split(Hit hit, Int on_device) const {
        LoadPlan plan;
        plan.gained = hit.num_tokens - on_device;
        for (const auto& one : blocks_.managers) {
            BlockList& row = hit.blocks[static_cast<size_t>(one->group)];
            const Int skipped = std::max<Int>(one->SkippedTokens(hit.num_tokens), 0) / one->block_size;
            for (size_t index = 0; index < row.size(); ++index) {
                const bool is_needed = static_cast<Int>(index) >= skipped;
                const Location source = is_needed ? tiers_.LocationOf(row[index]) : Location();
                if (!is_needed || source.slot != kNoSlot) row[index] = kNullBlock;
                if (source.slot != kNoSlot) plan.missing.push_back({one->group, static_cast<Int>(index), source});
            }
        }
        plan.hit = std::move(hit);
        SetTimes(&plan);
        return plan;
    }

    Int Order(Int slot, const LoadPlan& plan, const BlockList& filled) {
        const Int job = tiers_.NextJob();
        const Int after = pool_.LastUse(filled);
        Load load{slot, requests_.serial[slot], plan.hit.num_tokens, after, {}};
        for (size_t row = 0; row < filled.size(); ++row) {
            const Missing& one = plan.missing[row];
            const Location& source = one.source;
            load.rows.push_back(Fill(slot, filled[row], one));
            const uint64_t key = pool_.pairs.SealKey(TierOf(source).KeyOf(source.slot));
            TierOf(source).Pin(source.slot);
            tiers_.orders.load.push_back({job, source.tier, source.slot, source.version, Int{filled[row]}, one.group,
                                          static_cast<Int>(pool_.stamp[filled[row]]), static_cast<Int>(key)});
        }
        tiers_.AddLoad(job, std::move(load));
        tiers_.BeginLoad(slot, job);
        Count(plan);
        tiers_.each[static_cast<size_t>(plan.Farthest())].hit_tokens += plan.gained;
        return job;
    }

    // Counts a load by what its hit is put together from: slots, and blocks of the device.
    void Count(const LoadPlan& plan) {
        bool with_host = false, with_disk = false, windows = true, states = true;
        for (const Missing& one : plan.missing) {
            with_host |= TierOf(one.source).medium == kHost;
            with_disk |= TierOf(one.source).medium == kDisk;
            const Int kind = blocks_.spec.groups[static_cast<size_t>(one.group)].kind;
            windows &= kind == kWindow || kind == kWindowMla;
            states &= kind == kAlignedState;
        }
        size_t in_use = 0;
        for (const BlockList& row : plan.hit.blocks) {
            in_use += row.size() - static_cast<size_t>(std::count(row.begin(), row.end(), kNullBlock));
        }
        const bool with_device = in_use > plan.missing.size();
        TierCounters& counters = tiers_.counters;
        ++counters.loads;
        counters.loaded_tokens += plan.gained;
        counters.device_host += with_device && with_host && !with_disk;
        counters.host_disk += with_host && with_disk && !with_device;
        counters.device_host_disk += with_device && with_host && with_disk;
        counters.windows_alone += windows;
        counters.states_alone += states;
    }

    Filled Fill(Int slot, Block block, const Missing& one) const {
        const GroupManager& manager = *blocks_.managers[static_cast<size_t>(one.group)];
        const Digests& digests = requests_.content[slot];
        const Int first = one.position * manager.block_size / manager.hash_size;
        const Int end = (one.position + 1) * manager.block_size;
        const Key key{pool_.pairs.Of(requests_.domain[slot], one.group), digests.at(end / manager.hash_size - 1)};
        return {block, pool_.stamp[block], key, end, first ? digests.at(first - 1) : Digest(), one.source};
    }

    Column JobsBefore(Int number) const {
        std::set<Int> before;
        const auto add = [&](Int job, const auto&) {
            if (job < number) before.insert(job);
        };
        for (const auto& [job, load] : tiers_.jobs.loads) add(job, load);
        tiers_.jobs.saves.ForEach(add);
        tiers_.jobs.moves.ForEach(add);
        return Column(before.begin(), before.end());
    }

    void End(Int job, bool is_done, PartResult* result) {
        Jobs& jobs = tiers_.jobs;
        if (auto load = jobs.loads.empty() ? decltype(jobs.loads)::node_type() : jobs.loads.extract(job)) {
            EndLoad(job, load.mapped(), is_done, result);
        } else if (const Save* const save = jobs.saves.Take(job)) {
            const Save& write = *save;
            if (const Save* const next = jobs.saves.Behind(kAhead)) __builtin_prefetch(&pool_.stamp[next->block]);
            const bool is_good = is_done && pool_.stamp[write.block] == write.stamp;
            EndWrite(job, write.tier, write.slot, is_done, is_good, &tiers_.counters.saved);
        } else if (const Move* const move = jobs.moves.Take(job)) {
            const Move& write = *move;
            const bool is_good = is_done && tiers_.IsIntact(write.source);
            EndWrite(job, write.tier, write.slot, is_done, is_good, &tiers_.counters.moved);
        }
    }

    void EndWrite(Int job, Int tier, Int slot, bool is_done, bool is_good, Int* good) {
        tiers_.EndWrite(job, tier, slot, is_good, good == &tiers_.counters.saved);
        tiers_.counters.failed += !is_done;
        tiers_.counters.discarded += is_done && !is_good;
        *good += is_good;
    }

    void EndLoad(Int job, const Load& load, bool is_done, PartResult* result) {
        const Int slot = load.request;
        // A key that was dropped is not trusted; a block that was evicted may be damaged since.
        const bool is_good = is_done && std::all_of(load.rows.begin(), load.rows.end(), [&](const Filled& row) {
                                 return tiers_.IsIntact(row.source) && pool_.stamp[row.block] == row.stamp;
                             });
        const bool runs = requests_.running[slot] && requests_.serial[slot] == load.serial;
        const auto waits = tiers_.loading.find(slot);
        if (waits != tiers_.loading.end() && waits->second.first == job) tiers_.loading.erase(waits);
        tiers_.Unpin(load);
        BlockList blocks;
        for (const Filled& row : load.rows) blocks.push_back(row.block);
        if (is_good) {
            tiers_.counters.loaded += static_cast<Int>(load.rows.size());
            for (const Filled& row : load.rows) ++TierOf(row.source).UseOf(row.key).loaded;
            tiers_.NoteLoaded(load);
            // A request that went back behind its hit may overwrite the blocks: it registers them when it has computed
            // them.
            if (!runs || requests_.computed[slot] >= load.num_tokens) {
                Register(load);
            } else {
                blocks_.RegisterAgain(blocks);
                requests_.InvalidateAllFastPaths();
            }
        } else {
            ++tiers_.counters.loads_failed;
            tiers_.DropFarthest(load.rows);
            const Column gone = runs ? tracker_.Preempt(slot, pool_.step) : Column();
            result->preempted.insert(result->preempted.end(), gone.begin(), gone.end());
        }
        tracker_.ReleaseLater(blocks, load.after);  // launches that were sent before may still use the pages
    }

    // Gives the loaded blocks their keys, which are visible at once: their content is verified.
    void Register(const Load& load) {
        const Int step = std::exchange(pool_.step, pool_.executed_through);
        for (const Filled& row : load.rows) {
            pool_.Register(row.block, row.key, row.num_tokens);
            const uint32_t record = TierOf(row.source).RecordOf(row.source.slot);
            for (Tier& one : tiers_.each) one.NoteOnDevice(record);
        }
        tracker_.NoteKeys(load.request, pool_.step);
        pool_.step = step;
        if (!blocks_.spec.events) return;
        for (size_t first = 0, end = 0; first < load.rows.size(); first = end) {
            for (end = first + 1; end < load.rows.size() && Follows(load.rows[end - 1], load.rows[end]);) ++end;
            ReportStored(load, first, end);
        }
    }

    // Whether the blocks of two rows of one group follow each other in the prompt.
    static bool Follows(const Filled& before, const Filled& row) {
        return row.key.pair == before.key.pair && row.parent == before.key.digest;
    }

    void ReportStored(const Load& load, size_t first, size_t end) {
        const Filled& row = load.rows[first];
        const Int group = pool_.pairs.Group(row.key.pair);
        const Int size = blocks_.managers[static_cast<size_t>(group)]->block_size;
        pool_.AddStored({.kind = kStored,
                         .group = group,
                         .block_size = size,
                         .slot = load.request,
                         .start = row.num_tokens - size,
                         .end = load.rows[end - 1].num_tokens},
                        pool_.pairs.Domain(row.key.pair), row.parent);
        for (; first < end; ++first) {
            const Filled& one = load.rows[first];
            pool_.events.AddKey(one.key.digest, one.block, one.num_tokens - size);
        }
    }

    Coordinator& blocks_;
    Tiers& tiers_;
    BlockPool& pool_;
    Requests& requests_;
    InFlightTracker& tracker_;
};

}  // namespace kvplane
