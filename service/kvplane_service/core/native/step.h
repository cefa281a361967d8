// A step and its result, in columns: one entry per row, or none where every row has the default.
#pragma once

#include "cache_events.h"

namespace kvplane {

struct Hashes {
    const uint8_t* data = nullptr;
    size_t size = 0;
};

struct Facts {
    Column slot, computed, appended, num_hashes, commit, end, fence, release_skipped, hint;
    Int num_tokens = 0;  // ids in the column `tokens`
    bool tokens_fit = true;
    std::vector<uint8_t> tokens;  // u32, if they fit
    Hashes hashes;
    // Whether the rows do nothing but append tokens and hashes.
    bool OnlyAppend() const {
        return computed.empty() && commit.empty() && end.empty() && fence.empty() && release_skipped.empty() &&
               hint.empty();
    }
};

struct Cache {
    Column failed_steps, evicted, released, loads_over, jobs_done, jobs_failed, costs_ns, mismatched;
    Int jobs_before = 0, hits_checked = 0;
    bool reset = false;

    bool NamesJobs() const { return !jobs_done.empty() || !jobs_failed.empty() || jobs_before > 0; }
};

struct News {
    Column slot, num_tokens, num_hashes, skip_reading, max_tokens, hint;
    Int num_token_ids = 0, num_extra_keys = 0, num_traceparents = 0;
    bool tokens_fit = true;
    std::vector<uint8_t> tokens;  // u32, if they fit
    Hashes hashes;
    std::vector<std::string> request_id, domain;
};

struct Run {
    Column slot, extra, cap, lookahead, in_flight, flags, victims, reserved;
    Int on_refusal = kPreempt;
};

struct Admit {
    Column slot, extra, cap, lookahead, external, expected_hit, encoder_tokens, reserved, watermark, flags, hit_limit,
        min_new, single_group_hit;
    std::vector<uint64_t> skip_zero_groups;
    Int max_running = kUnlimited, on_refusal = kStop;
    bool only_if_no_preemption = false;
};

struct Peek {
    Column slot, limit;
    bool with_blocks = false;
};

constexpr Int kNoRequest = kUnlimited;  // in Prefetch::slot: the row gives hashes

struct Prefetch {
    Column slot, num_hashes, within_ns;
    Hashes hashes;
    std::vector<std::string> domain;
};

struct Retain {
    Column num_hashes, priority, until_ns, percent, now_ns;
    Hashes hashes;
    std::vector<std::string> domain, owner;

    bool empty() const { return num_hashes.empty() && now_ns.empty(); }
    Int time_ns() const { return now_ns.empty() ? 0 : now_ns[0]; }
};

struct Budget {
    Int tokens = kUnlimited, input = kUnlimited, overhead = 0;
};

// Hashes that Python made of the tokens of a part; kHashedHere for rows whose tokens are hashed by the core.
constexpr Int kHashedHere = -1;
struct Made {
    Column num_hashes;
    Hashes hashes;
    bool given = false;
};

// The hashes that were made of the tokens of a section, by the rows that have tokens.
struct Hashed {
    Column num_hashes;
    std::vector<uint8_t> hashes;
    size_t digest_size = 0;

    void clear() {
        num_hashes.clear();
        hashes.clear();
    }
};

struct Part {
    Facts facts;
    Cache cache;
    News news;
    Run run;
    Admit admit;
    Peek peek;
    Prefetch prefetch;
    Retain retain;
    Budget budget;
    bool with_hashes = false, with_tables = false;
    Made facts_made, news_made;
};

struct Step {
    Int seq = 0, part = 0, executed_through = 0;
    bool last = true;
    std::vector<Part> parts;
};

struct BlockLists {
    std::vector<uint32_t> row, group, count;
    BlockList ids;

    void Add(Int number, Int of_group, const BlockList& blocks) {
        row.push_back(static_cast<uint32_t>(number));
        group.push_back(static_cast<uint32_t>(of_group));
        count.push_back(static_cast<uint32_t>(blocks.size()));
        if (blocks.size() == 1) {
            ids.push_back(blocks[0]);
        } else {
            ids.insert(ids.end(), blocks.begin(), blocks.end());
        }
    }

    void Clear() {
        for (auto* column : {&row, &group, &count, &ids}) column->clear();
    }

    void RemoveRow(Int number) {
        BlockLists rest;
        auto at = ids.begin();
        for (size_t entry = 0; entry < row.size(); ++entry) {
            const auto end = at + count[entry];
            if (row[entry] != number) rest.Add(row[entry], group[entry], BlockList(at, end));
            at = end;
        }
        *this = std::move(rest);
    }
};

// What a part orders of the movers of tiers, in the order of LOAD_COLUMNS, SAVE_COLUMNS and MOVE_COLUMNS of
// `kvplane.base.step`; and new versions of slots.
struct JobOrders {
    using Values = std::vector<uint64_t>;
    template <size_t N>
    using Rows = std::vector<std::array<Int, N>>;  // a number of 64 bits is the Int of the same bits

    Rows<7> load;
    Rows<6> save, move;
    BlockList stamp_block;
    Values stamp;

    bool empty() const { return load.empty() && save.empty() && move.empty() && stamp.empty(); }
    size_t num_values() const { return 7 * load.size() + 6 * (save.size() + move.size()); }

    template <size_t N>
    static void AddRow(std::array<Values, N>* columns, const std::array<Int, N>& row) {
        for (size_t at = 0; at < N; ++at) (*columns)[at].push_back(static_cast<uint64_t>(row[at]));
    }

    // Returns the rows, and makes room for as many.
    JobOrders Take() {
        JobOrders fresh;
        fresh.load.reserve(load.size());
        fresh.save.reserve(save.size());
        fresh.move.reserve(move.size());
        return std::exchange(*this, std::move(fresh));
    }
    // Adds the rows of others behind these.
    void Append(const JobOrders& others) {
        const auto append = [](auto* rows, const auto& further) {
            rows->insert(rows->end(), further.begin(), further.end());
        };
        append(&load, others.load);
        append(&save, others.save);
        append(&move, others.move);
        append(&stamp_block, others.stamp_block);
        append(&stamp, others.stamp);
    }
};

// What a part answers only with tiers, or with retained prefixes.
struct TierAnswer {
    Column admit_job, admit_tier_tokens;
    std::array<JobOrders::Values, 6> declined;  // in the order of `kvplane.base.declined`
    std::array<JobOrders::Values, 3> prefetched;  // in the order of `kvplane.base.prefetch`
    std::array<JobOrders::Values, 4> retained;  // in the order of `kvplane.base.retain`
    JobOrders::Values next_end_ns;
    JobOrders orders;
    std::vector<std::pair<Int, CacheEvents>> events;  // with the medium of their tier
};

struct PartResult {
    Column granted, preempted, admit_status, admit_hit, admit_granted, admit_single_group_hit, admit_load_after;
    BlockLists new_blocks, tables, peek_blocks;
    Column peek_hit, peek_single_group_hit, num_hashes;
    std::vector<Digest> last_hash;  // size 0: none
    bool reset_done = false;
    Orders orders;
    Int free_blocks = 0;
    CacheEvents events;
    Int taken_back = 0, went_back = 0;
    std::unique_ptr<TierAnswer> tiers;  // null: nothing
    Hashed hashed_facts, hashed_news;
    std::shared_ptr<const CacheEvents> answered;  // the events, once the answer has them; null: there are none

    TierAnswer& OfTiers() {
        if (tiers == nullptr) tiers = std::make_unique<TierAnswer>();
        return *tiers;
    }

    void Clear() {
        for (Column* column : {&granted, &preempted, &admit_status, &admit_hit, &admit_granted, &admit_single_group_hit,
                               &admit_load_after, &peek_hit, &peek_single_group_hit, &num_hashes})
            column->clear();
        for (BlockLists* blocks : {&new_blocks, &tables, &peek_blocks}) blocks->Clear();
        last_hash.clear();
        hashed_facts.clear();
        hashed_news.clear();
        answered.reset();
        reset_done = false;
        free_blocks = taken_back = went_back = 0;
        tiers.reset();
    }
};

inline Int Entry(const Column& column, size_t row, Int otherwise) { return column.empty() ? otherwise : column[row]; }

}  // namespace kvplane
