// The events of a part as packed rows, which become Python objects when somebody reads them.
#pragma once

#include "types.h"

namespace kvplane {

class CacheEvents {
  public:
    // One event. Its hashes, blocks and positions are the next `count` ones of the columns.
    struct Row {
        EventKind kind;
        Int group = 0;
        RemoveReason reason = kNoReason;
        Int block_size = 0, slot = 0, start = 0, end = 0;
        size_t name = 0, hash_size = 0, parent_size = 0, count = 0;  // name: index of the domain in `names`
    };

    bool empty() const { return rows.empty(); }
    void Add(const Row& row) { rows.push_back(row); }

    // `of_domain` is the number of the domain.
    void Add(Row row, uint32_t of_domain, const std::string& domain, const Digest& parent) {
        if (names.empty() || of_domain != last_domain_) names.push_back(domain);
        last_domain_ = of_domain;
        row.name = names.size() - 1;
        row.parent_size = parent.size;
        rows.push_back(row);
        if (parent.size) hashes.push_back(parent.bytes);
    }

    // Adds a key to the last event.
    void AddKey(const Digest& digest, Block block) {
        Row& row = rows.back();
        row.hash_size = digest.size;
        ++row.count;
        hashes.push_back(digest.bytes);
        blocks.push_back(block);
    }
    void AddKey(const Digest& digest, Block block, Int start) {
        AddKey(digest, block);
        starts.push_back(start);
    }

    // Makes room for `count` further keys.
    void MakeRoom(size_t count) {
        const auto reserve = [&](auto& column) {
            const size_t size = column.size() + count;
            if (size > column.capacity()) column.reserve(std::max(size, 2 * column.capacity()));
        };
        reserve(hashes);
        reserve(blocks);
        reserve(starts);
    }

    // Returns the events, and makes room for as many.
    CacheEvents Take() {
        CacheEvents fresh;
        if (!empty()) {
            fresh.rows.reserve(rows.size());
            fresh.hashes.reserve(hashes.size());
            fresh.blocks.reserve(blocks.size());
            fresh.starts.reserve(starts.size());
        }
        return std::exchange(*this, std::move(fresh));
    }

    // What is in a part's events for the service, which holds STORED events until their step is executed.
    bool has_stored = false, has_others = false, needs_hold = false;  // the last one: an event concerns a held one

    std::vector<Row> rows;
    std::vector<std::string> names;
    std::vector<decltype(Digest::bytes)> hashes;  // of each event: its parent if it has one, its hashes
    BlockList blocks;
    Column starts;  // of STORED events

  private:
    uint32_t last_domain_ = 0;
};

}  // namespace kvplane
