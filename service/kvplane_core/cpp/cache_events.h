// The events of a part as packed rows, which become Python objects when somebody reads them.
#pragma once

#include "keys.h"
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

    // Adds keys to the last event. `block_of`, `start_of`: the block and the position of each, by its number.
    template <typename Keys, typename BlockOf, typename StartOf>
    void AddKeys(const Keys& keys, BlockOf&& block_of, StartOf&& start_of) {
        Row& row = rows.back();
        if (!keys.empty()) row.hash_size = keys[0].digest.size;
        row.count += keys.size();
        auto* hash = Extend(&hashes, keys.size());
        auto* block = Extend(&blocks, keys.size());
        auto* start = Extend(&starts, keys.size());
        for (size_t at = 0; at < keys.size(); ++at) {
            *hash++ = keys[at].digest.bytes;
            *block++ = block_of(at);
            *start++ = start_of(at);
        }
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
    // Makes a column longer; returns where its new entries begin.
    template <typename T>
    static T* Extend(std::vector<T>* column, size_t count) {
        column->resize(column->size() + count);
        return column->data() + column->size() - count;
    }

    uint32_t last_domain_ = 0;
};

// The events of a pool since its last part. Removals in sequence of keys of one group and domain are one event.
class PoolEvents {
  public:
    PoolEvents(size_t num_groups, bool is_on) : pairs(num_groups), is_on_(is_on) {}

    void AddEvent(const CacheEvents::Row& event) {
        events.Add(event);
        open_run_ = false;
    }
    // `parent`: the hash before its first block, of size 0 if there is none.
    void AddStored(CacheEvents::Row event, uint32_t domain, const Digest& parent) {
        event.kind = kStored;
        events.Add(event, domain, pairs.NameOf(domain), parent);
        open_run_ = false;
    }

    void ReportRemoved(Block block, const std::vector<Key>& keys, RemoveReason reason) {
        if (!is_on_) return;
        for (const Key& key : keys) {
            const bool joins = open_run_ && run_pair_ == key.pair && events.rows.back().reason == reason &&
                               events.rows.back().hash_size == key.digest.size;
            if (!joins) {
                events.Add({.kind = kRemoved, .group = pairs.Group(key.pair), .reason = reason}, pairs.Domain(key.pair),
                           pairs.Name(key.pair), Digest());
                open_run_ = true;
                run_pair_ = key.pair;
            }
            events.AddKey(key.digest, block);
        }
    }

    // Reports the removal of keys of one domain and group, each from the block at its place.
    void ReportAll(const std::vector<Key>& keys, const BlockList& blocks, RemoveReason reason) {
        for (size_t at = 0; at < keys.size(); ++at) ReportRemoved(blocks[at], {keys[at]}, reason);
        open_run_ = false;
    }

    CacheEvents TakeEvents() {
        open_run_ = false;
        return events.Take();
    }

    Pairs pairs;
    CacheEvents events;

  private:
    bool is_on_;
    bool open_run_ = false;  // whether further removals can join the last event
    uint32_t run_pair_ = 0;
};

}  // namespace kvplane
