// The events of a pool since its last part. Removals in sequence of keys of one group and domain are one event.
#pragma once

#include "cache_events.h"
#include "keys.h"

namespace kvplane {

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
