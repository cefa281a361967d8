// Tells whether steps and jobs are such as the tiers of a replica permit.
#pragma once

#include "tiers.h"

namespace kvplane {

constexpr Int kMaxWithinNs = Int{3600} * 1'000'000'000;

// Whether the jobs were ordered, no load is done before it could start, and the costs are those of these tiers.
inline bool AcceptsJobs(const Cache& cache, const Tiers& tiers, Int executed_through) {
    const auto is_cost = [](Int cost) { return cost >= 0 && cost <= kMaxCostNs; };
    const Column& costs = cache.costs_ns;
    if (!costs.empty() && costs.size() != 1 + tiers.each.size()) return false;
    if (!std::all_of(costs.begin(), costs.end(), is_cost)) return false;
    const Int last = tiers.each.empty() ? 0 : tiers.last_job;
    const auto is_job = [&](Int job) { return job > 0 && job <= last; };
    for (const Column* jobs : {&cache.jobs_done, &cache.jobs_failed}) {
        if (!std::all_of(jobs->begin(), jobs->end(), is_job)) return false;
    }
    if (cache.jobs_before < 0 || cache.jobs_before > last + 1) return false;
    const std::map<Int, Load>& loads = tiers.jobs.loads;
    return loads.empty() || std::all_of(cache.jobs_done.begin(), cache.jobs_done.end(), [&](Int job) {
        const auto load = loads.find(job);
        return load == loads.end() || load->second.after <= executed_through;
    });
}

// Whether no row with LOAD also loads external tokens, or must be granted all tokens.
inline bool AcceptsLoads(const Admit& admit) {
    for (size_t row = 0; row < admit.flags.size(); ++row) {
        if (!(admit.flags[row] & kLoad)) continue;
        if ((admit.flags[row] & (kDelayCaching | kWhole)) || Entry(admit.external, row, 0)) return false;
    }
    return true;
}

}  // namespace kvplane
