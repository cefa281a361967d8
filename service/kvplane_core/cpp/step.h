// A step and its result. The sections are generated (`sections.h`).
#pragma once

#include "cache_events.h"
#include "orders.h"
#include "sections.h"

namespace kvplane {

struct Facts : FactsFields {
    // Whether the rows do nothing but append tokens and hashes.
    bool OnlyAppend() const {
        return computed.empty() && commit.empty() && end.empty() && fence.empty() && release_skipped.empty() &&
               hint.empty();
    }
};

struct Cache : CacheFields {
    bool NamesJobs() const { return !jobs_done.empty() || !jobs_failed.empty() || jobs_before > 0; }
};

constexpr Int kNoRequest = kUnlimited;  // in Prefetch::slot: the row gives hashes

struct Retain : RetainFields {
    bool empty() const { return num_hashes.empty() && now_ns.empty(); }
    Int time_ns() const { return now_ns.empty() ? 0 : now_ns[0]; }
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
    Peers peers;
    News news;
    Run run;
    Admit admit;
    Peek peek;
    Prefetch prefetch;
    Retain retain;
    Budget budget;
    std::optional<Resume> resume;
    bool with_hashes = false, with_tables = false;
    Made facts_made, news_made;
};

struct Step {
    Int seq = 0, part = 0, executed_through = 0;
    bool last = true;
    std::vector<Part> parts;

    bool resumes() const {
        return std::any_of(parts.begin(), parts.end(), [](const Part& one) { return one.resume.has_value(); });
    }
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

// Adds a row to a table: an entry to each column that has one for each row.
template <typename Table>
void AddRow(Table* table, std::initializer_list<Int> row) {
    auto value = row.begin();
    for (const auto& column : ColumnsOf(*table)) {
        if (column.is_by_row) (table->*column.of).push_back(*value++);
    }
}

// What a part orders of the movers of tiers, in the order of LOAD_COLUMNS, SAVE_COLUMNS and MOVE_COLUMNS of
// `kvplane.base.step`; and new versions of slots.
struct JobOrders {
    using Values = std::vector<uint64_t>;
    template <size_t N>
    using Rows = std::vector<std::array<Int, N>>;  // a number of 64 bits is the Int of the same bits

    Rows<8> load;
    Rows<7> save, move;
    BlockList stamp_block;
    Values stamp;

    bool empty() const { return load.empty() && save.empty() && move.empty() && stamp.empty(); }

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
    Declined declined;
    Prefetched prefetched;
    Retained retained;
    JobOrders orders;
    std::vector<std::pair<Int, CacheEvents>> events;  // with the medium of their tier
};

struct PartResult : PartResultFields {
    BlockLists new_blocks, tables, peek_blocks;
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
        for (const auto& column : ColumnsOf(*this)) (this->*column.of).clear();
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
