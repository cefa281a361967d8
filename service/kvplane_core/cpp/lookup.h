// Finds the longest prefix that is cached in all groups of a replica.
#pragma once

#include "managers/base.h"

namespace kvplane {

struct Hit {
    Int num_tokens = 0, single_group_hit = 0;
    Rows blocks;  // per group
};

struct LookupClass {
    std::vector<Int> groups;
    GroupManager* manager;
    bool drops_last_block, downward_closed;

    Int Reach(Int longest, Int margin) const {
        if (!downward_closed) return longest + margin;
        return CeilDiv(longest + margin, manager->block_size) * manager->block_size;
    }
};

class PrefixLookup {
  public:
    PrefixLookup(const Spec& spec, const std::vector<std::unique_ptr<GroupManager>>& managers)
        : spec_(spec), managers_(managers) {
        std::vector<std::pair<Int, LookupClass>> found;
        for (const auto& one : managers) {
            if (!one->spec.is_cached()) continue;
            auto same = std::find_if(found.begin(), found.end(),
                                     [&](const auto& entry) { return entry.first == one->spec.lookup_class; });
            if (same == found.end()) {
                found.push_back({one->spec.lookup_class, LookupClass{{}, one.get(), false, one->IsDownwardClosed()}});
                same = found.end() - 1;
            }
            same->second.groups.push_back(one->group);
            same->second.drops_last_block |= one->spec.drops_last_block != 0;
        }
        for (const bool closed : {true, false}) {
            for (const auto& [number, one] : found) {
                if (one.downward_closed == closed) classes_.push_back(one);
            }
        }
    }

    // `tiers`: also what only these have.
    Hit Find(const Digests& digests, uint32_t domain, Int max_tokens, Int horizon, Int longest = kForever,
             const Tiers* tiers = nullptr) const;
    // The longest prefix of each group by itself: blocks and length in tokens, by group.
    std::pair<Rows, Column> FindEach(const Digests& digests, uint32_t domain, Int max_tokens) const;

  private:
    const Spec& spec_;
    const std::vector<std::unique_ptr<GroupManager>>& managers_;
    std::vector<LookupClass> classes_;
};

// One search for the longest hit of all look-up classes; the candidate length shrinks until all accept it.
class Search {
  public:
    Search(const std::vector<LookupClass>& classes, size_t num_groups, const Digests& digests, uint32_t domain,
           Int horizon, const Tiers* tiers = nullptr)
        : classes_(classes),
          digests_(digests),
          domain_(domain),
          horizon_(horizon),
          tiers_(tiers),
          rows_(num_groups),
          lengths_(classes.size(), -1),
          dropped_(classes.size(), false) {}

    Hit Run(Int max_tokens, Int longest) {
        readable_ = longest < max_tokens ? max_tokens : 0;
        const bool two_pass_enough = classes_.size() == 2 && classes_[0].downward_closed;
        Int candidate = std::min(max_tokens, longest), length = candidate;
        while (true) {
            length = candidate;
            for (size_t number = 0; number < classes_.size(); ++number) length = Ask(number, length);
            if (length >= candidate) break;
            candidate = length;
            if (two_pass_enough) break;
        }
        return MakeHit(std::min(candidate, length));
    }

    Int Ask(size_t number, Int length) {
        const LookupClass& one = classes_[number];
        if (one.downward_closed && lengths_[number] >= 0) return std::min(length, lengths_[number]);
        const bool drop = one.drops_last_block && !dropped_[number];
        const Int margin = drop ? one.manager->DropMargin() : 0;
        Int reach = std::max(length, std::min(one.Reach(length, margin) - margin, readable_)) + margin;
        if (drop) reach = std::min(reach, digests_.count() * one.manager->hash_size);
        const Query query{&digests_, domain_, &one.groups, reach, drop, horizon_, tiers_};
        Int found = one.manager->FindPrefix(query, &found_);
        if (drop) {
            dropped_[number] = true;
        } else if (found < length) {
            std::fill(dropped_.begin(), dropped_.end(), false);
        }
        lengths_[number] = found;
        for (size_t row = 0; row < one.groups.size(); ++row)
            rows_[static_cast<size_t>(one.groups[row])].swap(found_[row]);
        found = std::min(found, length);
        longest_ = std::max(longest_, found);
        return found;
    }

    const BlockList& Row(Int group) const { return rows_[static_cast<size_t>(group)]; }

  private:
    Hit MakeHit(Int length) {
        for (const LookupClass& one : classes_) {
            if (!one.downward_closed) continue;
            const auto keep = static_cast<size_t>(CeilDiv(length, one.manager->block_size));
            for (const Int group : one.groups) {
                BlockList& row = rows_[static_cast<size_t>(group)];
                if (row.size() > keep) row.resize(keep);
            }
        }
        return Hit{length, longest_ > length ? longest_ : 0, std::move(rows_)};
    }

    const std::vector<LookupClass>& classes_;
    const Digests& digests_;
    uint32_t domain_;
    Int horizon_;
    const Tiers* tiers_;
    Rows rows_, found_;
    Column lengths_;             // by class; -1: not asked
    std::vector<bool> dropped_;  // classes whose dropped block the candidate already excludes
    Int longest_ = 0, readable_ = 0;
};

inline Hit PrefixLookup::Find(const Digests& digests, uint32_t domain, Int max_tokens, Int horizon, Int longest,
                              const Tiers* tiers) const {
    if (!spec_.safe) max_tokens = std::min(max_tokens, longest);
    if (!spec_.enable_caching || std::min(max_tokens, longest) <= 0 || classes_.empty())
        return Hit{0, 0, Rows(managers_.size())};
    if (longest < max_tokens) longest -= longest % spec_.hit_alignment();
    if (managers_.size() > 1) {
        const auto run = [&](Int most) {
            return Search(classes_, managers_.size(), digests, domain, horizon, tiers).Run(max_tokens, most);
        };
        Hit hit = run(longest);
        if (hit.num_tokens >= longest || longest >= max_tokens) return hit;
        // Which class leaves a block out depends on where each search begins: the other one may keep more.
        Hit whole = run(kForever);
        return hit.num_tokens < whole.num_tokens && whole.num_tokens <= longest ? whole : hit;
    }
    const LookupClass& only = classes_[0];
    const Int reach = only.Reach(longest, only.drops_last_block ? only.manager->DropMargin() : 0);
    Hit hit;
    const Int most = std::min(max_tokens, reach);
    const Query query{&digests, domain, &only.groups, most, only.drops_last_block, horizon, tiers};
    hit.num_tokens = std::min(only.manager->FindPrefix(query, &hit.blocks), longest);
    const auto keep = static_cast<size_t>(CeilDiv(hit.num_tokens, only.manager->block_size));
    if (hit.blocks[0].size() > keep) hit.blocks[0].resize(keep);
    return hit;
}

inline std::pair<Rows, Column> PrefixLookup::FindEach(const Digests& digests, uint32_t domain, Int max_tokens) const {
    Rows rows(managers_.size());
    Column lengths(managers_.size(), 0);
    if (!spec_.enable_caching || max_tokens <= 0) return {rows, lengths};
    Search search(classes_, managers_.size(), digests, domain, kInside);
    for (size_t number = 0; number < classes_.size(); ++number) {
        const Int length = search.Ask(number, max_tokens);
        for (const Int group : classes_[number].groups) {
            rows[static_cast<size_t>(group)] = search.Row(group);
            lengths[static_cast<size_t>(group)] = length;
        }
    }
    return {rows, lengths};
}

}  // namespace kvplane
