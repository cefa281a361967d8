// The slots of one tier: which key each has, which are pinned, and which is evicted next.
#pragma once

#include "directory.h"
#include "wanted.h"

namespace kvplane {

constexpr Int kNoSlot = -1;
constexpr Int kMaxJobs = 4096;  // in flight; at this number nothing is saved, moved or loaded

// Blocks of one group in one tier.
struct GroupUse {
    Int held = 0, stored = 0, loaded = 0, evicted = 0;
};

// kNoKey: free, or only pinned. kRetained: in no queue, but in a list of `Tier::retained`.
enum class SlotState : uint8_t { kNoKey, kWritten, kRecent, kShadow, kRetained };

// A set of slots that knows how many it has.
class SlotSet {
  public:
    void Resize(size_t num_slots) {  // to an empty set
        marks_.assign(num_slots, false);
        count_ = 0;
    }
    void Set(size_t slot, bool is_in) {
        count_ += static_cast<Int>(is_in) - static_cast<Int>(marks_[slot]);
        marks_[slot] = is_in;
    }
    Int count() const { return count_; }
    const std::vector<bool>& marks() const { return marks_; }

  private:
    std::vector<bool> marks_;
    Int count_ = 0;
};

class Tier {
  public:
    // `nearer`: the tier whose keys are moved to this one, if there is one.
    Tier(Int tier_number, const TierSpec& spec, const Spec& replica_spec, Directory& directory, Tier* nearer)
        : number(tier_number),
          medium(spec.medium),
          num_slots(spec.num_slots),
          most_retained(spec.most_retained),
          wanted(spec.save, spec.num_slots),
          uses(replica_spec.groups.size()),
          spec_(replica_spec),
          pairs_(directory.pool.pairs),
          directory_(directory),
          retentions_(directory.pool.retained),
          nearer_(nearer) {
        if (most_retained > 0) {
            retentions_.tiers.push_back(this);
            place = retentions_.num_places() - 1;
        }
        const auto most = static_cast<size_t>(num_slots);
        record_.reserve(most);  // pages of memory that no slot has used are not in use either
        version.reserve(most);
        pins.reserve(most);
        state.reserve(most);
        stale.Resize(most);
        is_of_peers = medium == kPeers;
        is_lent = replica_spec.tiers.back().medium == kPeers && !is_of_peers;
        links_.reserve(most + kFirstLink);
        links_.assign(kFirstLink, Link());
        for (uint32_t queue = 0; queue < kFirstLink; ++queue) links_[queue] = {queue, queue};
        seen_.Resize(kFirstLink);
        while (is_of_peers && num_used() < num_slots) AddSlot();  // none is taken, so none is free to be taken
    }

    // The slot that has the key, or kNoSlot.
    Int Find(const Sought& key) const {
        const uint32_t record = directory_.Find(key);
        return record == kNoRecord ? kNoSlot : SlotWith(directory_[record]);
    }
    Int SlotWith(const InTiers& one) const {
        const uint32_t slot = one.slot[Number()];
        return slot == kNoRecord || state[slot] == SlotState::kWritten ? kNoSlot : Int{slot};
    }
    // Whether a slot has the key, or a job writes it into one.
    bool HasOrWrites(const InTiers& one) const { return one.slot[Number()] != kNoRecord; }
    bool HasOrWrites(const Key& key) const {
        const uint32_t record = directory_.Find(Sought(key));
        return record != kNoRecord && HasOrWrites(directory_[record]);
    }
    bool IsWritten(const InTiers& one) const {
        return HasOrWrites(one) && state[one.slot[Number()]] == SlotState::kWritten;
    }

    Int num_used() const { return static_cast<Int>(record_.size()); }
    Int num_held() const { return num_held_; }
    Int num_free() const { return static_cast<Int>(free.size()) + num_slots - num_used(); }
    bool HasKey(Int slot) const { return state[At(slot)] >= SlotState::kRecent; }
    bool IsShadow(Int slot) const { return state[At(slot)] == SlotState::kShadow; }
    bool IsPinned(Int slot) const { return pins[At(slot)] > 0; }
    // Of a slot that has a key, or is being written.
    uint32_t RecordOf(Int slot) const { return record_[At(slot)]; }
    const InTiers& Of(Int slot) const { return directory_[RecordOf(slot)]; }
    const Key& KeyOf(Int slot) const { return Of(slot).key; }
    // 0 for a slot without a key.
    Int VersionOf(Int slot) const { return slot >= 0 && slot < num_used() ? version[static_cast<size_t>(slot)] : 0; }

    // The slots with a key in order of eviction, shadows first and what is retained last: Next(kNoSlot) is the first
    // one, kNoSlot is behind the last one.
    Int Next(Int slot) const {
        if (slot != kNoSlot && state[At(slot)] == SlotState::kRetained)
            return retained.After(static_cast<uint32_t>(slot));
        const uint32_t link = Following(slot == kNoSlot ? kShadows : static_cast<uint32_t>(LinkOf(slot)));
        return link == kRecents ? retained.First() : SlotOf(link);
    }
    // Visits the first `most` slots with a key that are not retained, as `Seen::Visit` does.
    template <typename F>
    void VisitNew(Int most, F&& visit) {
        seen_.Visit(*this, most, [&](uint32_t link) { return visit(SlotOf(link)); },
                    [&](uint32_t link) { directory_.Fetch(RecordOf(SlotOf(link))); }, [](uint32_t) {});
    }
    void VisitAgain(Int slot) { seen_.Change(static_cast<uint32_t>(LinkOf(slot))); }

    // A slot to write the content of the key, or of that of a record, into, evicting the key that is first in order;
    // kNoSlot if every slot is pinned or written.
    template <typename K>
    Int BeginWrite(const K& key) {
        const Int slot = TakeSlot();
        if (slot == kNoSlot) return kNoSlot;
        MarkWritten(slot, key);
        return slot;
    }

    // The end of a write: the slot has the key in this version, or is free.
    void EndWrite(Int slot, bool is_good, Int job) {
        Require(state[At(slot)] == SlotState::kWritten, "a slot is not being written");
        if (is_good) {
            const Key& key = Settle(slot, job, SlotState::kRecent);
            ++UseOf(key).stored;
            if (spec_.events) Report(slot, key, kStored, kNoReason);
        } else {
            NoteLost(slot);
            Leave(slot);
            free.push_back(static_cast<uint32_t>(slot));
        }
    }

    // Takes over the version of a key in this unused tier, without events, the one to evict first first. The first row
    // of a slot or a key counts.
    void Install(Int slot, const Key& key, Int of_version) {
        while (num_used() <= slot) AddSlot();
        if (HasKey(slot) || Find(key) != kNoSlot) return;
        Hold(slot, key, of_version, SlotState::kRecent);
        ++UseOf(key).stored;
    }
    // Behind the last one of these.
    void EndInstall() {
        if (is_of_peers) return;  // all of its slots are used
        while (!record_.empty() && record_.back() == kNoRecord) DropLastSlot();
        for (Int slot = 0; slot < num_used(); ++slot) {
            if (!HasKey(slot)) free.push_back(static_cast<uint32_t>(slot));
        }
    }

    // A slot of a peer has this key now, in this version. A load that reads what was there fails.
    void SetPeer(Int slot, const Key& key, Int of_version) {
        if (HasKey(slot)) DropSlot(slot, kDropped);
        Drop(key);
        Hold(slot, key, of_version, SlotState::kRecent);
    }

    // Makes the key the last one to be evicted.
    void Refresh(Int slot) { Enqueue(slot, SlotState::kRecent); }

    // Puts the key where it belongs now that other prefixes are retained.
    void PlaceAgain(const Key& key) {
        const Int slot = Find(Sought(key));
        if (slot == kNoSlot || IsShadow(slot)) return;
        if (retentions_.PriorityOf(key, place) != retained.PriorityAt(static_cast<uint32_t>(slot))) Refresh(slot);
    }

    // Records that the device has the key too. What peers read has no shadows: what the device has is what they lack.
    void NoteOnDevice(uint32_t record) {
        const Int slot = SlotWith(directory_[record]);
        if (!is_lent) return MakeShadow(record);
        if (slot != kNoSlot) Refresh(slot);
    }

    // Records that the device has the key again.
    void MakeShadow(uint32_t record) {
        const Int slot = SlotWith(directory_[record]);
        if (slot == kNoSlot || IsShadow(slot)) return;
        directory_.Forget(record);  // the device evicts it some day
        Enqueue(slot, SlotState::kShadow);
    }

    // Forgets the key. A pinned slot becomes free with its last pin.
    void Drop(const Key& key, RemoveReason reason = kDropped) {
        const Int slot = Find(key);
        if (slot != kNoSlot) DropSlot(slot, reason);
    }
    void DropSlot(Int slot, RemoveReason reason) {
        const size_t at = At(slot);
        Require(state[at] >= SlotState::kRecent, "a slot has no key");
        const Key& key = directory_[record_[at]].key;
        NoteLost(slot);
        GroupUse& use = UseOf(key);
        --use.held;
        use.evicted += reason == kEvicted;
        if (spec_.events && !is_of_peers) Report(slot, key, kRemoved, reason);
        Unlink(slot);
        num_shadows -= state[at] == SlotState::kShadow;
        --num_held_;
        Leave(slot);
        version[at] = 0;
        if (is_of_peers) return;
        stale.Set(at, true);
        if (!pins[at]) free.push_back(static_cast<uint32_t>(slot));
    }

    // Keeps a slot that has a key from being written; its key becomes the last one to be evicted.
    void Pin(Int slot) {
        Require(HasKey(slot), "a slot without a key is read");
        ++pins[At(slot)];
        Refresh(slot);
    }
    void Unpin(Int slot) {
        Require(pins[At(slot)] > 0, "a slot is not pinned");
        const bool is_over = --pins[At(slot)] == 0 && state[At(slot)] == SlotState::kNoKey;
        if (is_over && !is_of_peers) free.push_back(static_cast<uint32_t>(slot));
    }

    void DropAll(RemoveReason reason) {
        for (Int slot = Next(kNoSlot); slot != kNoSlot; slot = Next(kNoSlot)) DropSlot(slot, reason);
    }
    void Clear() {
        DropAll(kUnverified);
        wanted.Clear();
    }

    // -- state -------------------------------------------------------------------------------------------------------

    void AddSlot() {
        Require(num_used() < num_slots, "a tier has no further slot");
        record_.push_back(kNoRecord);
        version.push_back(0);
        pins.push_back(0);
        state.push_back(SlotState::kNoKey);
        links_.emplace_back();
        seen_.Resize(links_.size());
    }
    // `key`: or its record.
    template <typename K>
    void MarkWritten(Int slot, const K& key) {
        const size_t at = At(slot);
        record_[at] = directory_.Enter(Number(), static_cast<uint32_t>(slot), key);
        state[at] = SlotState::kWritten;
    }
    // Gives a slot without a key this one, which is evicted last of its queue.
    void Hold(Int slot, const Key& key, Int of_version, SlotState queue) {
        MarkWritten(slot, Sought(key));
        Settle(slot, of_version, queue);
    }
    GroupUse& UseOf(const Key& key) { return uses[static_cast<size_t>(pairs_.Group(key.pair))]; }

    const Int number, medium, num_slots, most_retained;  // most_retained: keys of one owner
    bool is_of_peers = false;     // its slots are those of peers: they are never written, free or evicted here
    bool is_lent = false;         // peers read it
    Int place = kDevice;          // number of this place in `RetainedBlocks`; kDevice if the tier retains nothing
    PriorityLists retained;       // the slots whose key is retained, and no shadow
    Wanted wanted;                // what is copied here early
    std::vector<GroupUse> uses;  // by group
    Int hit_tokens = 0, num_shadows = 0;
    Column version;                  // by slot: 0 without a key
    std::vector<uint32_t> pins;      // by slot: number of loads that read it
    std::vector<SlotState> state;    // by slot
    BlockList free;                  // slots that were used and are free; the last one is used first
    // By slot: the stamp table may have the version of content that no key here names, which a store may bring back.
    SlotSet stale;
    CacheEvents events;

  private:
    friend class Seen;
    friend class SeenCheck;
    friend class TierChecks;

    struct Link {
        uint32_t next = 0, previous = 0;
    };
    struct Run {
        EventKind kind = kCleared;
        RemoveReason reason = kNoReason;
        uint32_t pair = 0;
        bool operator==(const Run&) const = default;
    };
    enum : uint32_t { kShadows = 0, kRecents = 1, kFirstLink = 2 };  // the links of slots are behind those of queues

    [[gnu::always_inline]] size_t At(Int slot) const {
        Require(slot >= 0 && slot < num_used(), "a slot is beyond the tier");
        return static_cast<size_t>(slot);
    }
    size_t Number() const { return static_cast<size_t>(number); }
    size_t LinkOf(Int slot) const { return At(slot) + kFirstLink; }
    static Int SlotOf(uint32_t link) { return Int{link} - Int{kFirstLink}; }

    // The slots with a key as `Seen` reads them: the shadows are the first part.
    uint32_t First() const { return Following(kShadows); }
    uint32_t End() const { return kRecents; }
    uint32_t Following(uint32_t link) const {
        return links_[link].next == kShadows ? links_[kRecents].next : links_[link].next;
    }
    uint32_t Preceding(uint32_t link) const {
        return links_[link].previous == kRecents ? links_[kShadows].previous : links_[link].previous;
    }
    bool IsInFirstPart(uint32_t link, bool) const { return IsShadow(SlotOf(link)); }

    // The slot does not have its key any more: the device may save it again, and the nearer tier move it.
    void Leave(Int slot) {
        const size_t at = At(slot);
        const uint32_t record = std::exchange(record_[at], kNoRecord);
        state[at] = SlotState::kNoKey;
        directory_.Forget(record);
        if (nearer_ != nullptr) {
            if (const Int copy = nearer_->SlotWith(directory_[record]); copy != kNoSlot) nearer_->VisitAgain(copy);
        }
        directory_.Leave(Number(), record);
    }

    // Functions of their own, so that those that each job takes stay short where nothing is retained.
    // The key of a slot, which will have it no more, may be retained no longer.
    void NoteLost(Int slot) const {
        if (!retentions_.empty()) NoteRetainedLost(slot);
    }
    [[gnu::noinline]] void NoteRetainedLost(Int slot) const { retentions_.NoteLost(KeyOf(slot)); }
    [[gnu::noinline]] void RemoveRetained(Int slot) { retained.Remove(static_cast<uint32_t>(slot)); }
    // Whether the key of the slot is retained here.
    [[gnu::noinline]] bool InsertRetained(Int slot) {
        const Int priority = place == kDevice ? -1 : retentions_.PriorityOf(KeyOf(slot), place);
        if (priority < 0) return false;
        state[At(slot)] = SlotState::kRetained;
        retained.Put(priority, static_cast<uint32_t>(slot));
        return true;
    }

    // The slot has the key that was entered, in this version, and is evicted last of its queue.
    // Returns the key.
    const Key& Settle(Int slot, Int of_version, SlotState queue) {
        const size_t at = At(slot);
        version[at] = of_version;
        stale.Set(at, false);
        Insert(slot, queue);
        ++num_held_;
        const Key& key = directory_[record_[at]].key;
        ++UseOf(key).held;
        return key;
    }

    Int TakeSlot() {
        if (free.empty() && num_used() < num_slots) {
            AddSlot();
            return num_used() - 1;
        }
        if (free.empty()) {
            Int victim = Next(kNoSlot);
            while (victim != kNoSlot && pins[At(victim)]) victim = Next(victim);
            if (victim == kNoSlot) return kNoSlot;
            DropSlot(victim, kEvicted);
            FetchNext();
        }
        const Int slot = free.back();
        free.pop_back();
        return slot;
    }

    // Fetches what the next evictions will read.
    void FetchNext() const {
        const Int next = Next(kNoSlot);
        if (next == kNoSlot) return;
        directory_.ExpectLeave(Number(), RecordOf(next));
        if (const Int after = Next(next); after != kNoSlot) directory_.Fetch(RecordOf(after));
    }

    void DropLastSlot() {
        record_.pop_back();
        version.pop_back();
        pins.pop_back();
        state.pop_back();
        links_.pop_back();
    }

    void Enqueue(Int slot, SlotState queue) {
        Unlink(slot);
        num_shadows -= IsShadow(slot);
        Insert(slot, queue);
    }
    void Unlink(Int slot) {
        if (state[At(slot)] == SlotState::kRetained) return RemoveRetained(slot);
        const auto at = static_cast<uint32_t>(LinkOf(slot));
        const Link link = links_[at];
        seen_.Remove(at, Preceding(at));
        links_[link.previous].next = link.next;
        links_[link.next].previous = link.previous;
    }
    void Insert(Int slot, SlotState queue) {
        if (queue == SlotState::kRecent && !retentions_.empty() && InsertRetained(slot)) return;
        const uint32_t end = queue == SlotState::kShadow ? kShadows : kRecents;
        const auto link = static_cast<uint32_t>(LinkOf(slot));
        links_[link] = {end, links_[end].previous};
        links_[links_[end].previous].next = link;
        links_[end].previous = link;
        state[At(slot)] = queue;
        num_shadows += queue == SlotState::kShadow;
        if (queue == SlotState::kShadow) seen_.EnterMiddle({&link, 1});
    }

    // Consecutive keys of one group, domain, kind and reason are one event.
    void Report(Int slot, const Key& key, EventKind kind, RemoveReason reason) {
        const Run run{kind, reason, key.pair};
        if (events.empty() || run != run_) BeginEvent(run);
        events.AddKey(key.digest, static_cast<Block>(slot));
    }

    [[gnu::noinline]] void BeginEvent(const Run& run) {
        const Int group = pairs_.Group(run.pair);
        const Int size = run.kind == kStored ? spec_.groups[static_cast<size_t>(group)].block_size : 0;
        events.Add({.kind = run.kind, .group = group, .reason = run.reason, .block_size = size},
                   pairs_.Domain(run.pair), pairs_.Name(run.pair), Digest());
        run_ = run;
    }

    const Spec& spec_;
    const Pairs& pairs_;
    Directory& directory_;
    RetainedBlocks& retentions_;
    Tier* nearer_;
    std::vector<uint32_t> record_;  // by slot: of the key that it has, or that a job writes into it
    Int num_held_ = 0;
    std::vector<Link> links_;  // the queues of eviction
    Seen seen_;
    Run run_;                  // the last event
};

// What the retentions ask of tiers that retain, and change in them.
inline bool RetainedBlocks::HasRoomFor(const Retention& wanted) const {
    const auto before = Find(wanted);
    const Int named = num_named_ + static_cast<Int>(wanted.keys.size()) -
                      (before == each_.end() ? 0 : static_cast<Int>(before->second.keys.size()));
    const bool has_place = before != each_.end() || static_cast<Int>(each_.size()) < kMaxRetained;
    Int num_blocks = pool_.num_blocks;
    for (const Tier* tier : tiers) num_blocks += tier->num_slots;
    return has_place && named <= kMaxRetainedPerBlock * num_blocks;
}

inline void RetainedBlocks::ForgetAbsent(const std::vector<Key>& keys) {
    for (const Key& key : keys) {
        const auto found = of_key_.find(key);
        if (found == of_key_.end() || pool_.Find(key, kInside) != kNullBlock) continue;
        const auto has_key = [&](const Tier* one) { return one->HasOrWrites(key); };
        if (std::any_of(holders.begin(), holders.end(), has_key)) continue;
        const std::map<Int, Int> numbers = found->second;
        for (const auto& [number, position] : numbers) {
            Retention& one = each_.at(number);
            ForgetKey(number, one.keys.at(position));
            one.keys.erase(position);
            if (one.keys.empty()) each_.erase(number);
        }
    }
}

// Puts the free blocks and the slots with these keys where they belong now: those that are not retained any more at the
// back of the free list, as if they were used now.
inline void RetainedBlocks::PlaceAgain(const std::vector<Key>& keys) {
    BlockList moved;
    for (const Key& key : keys) {
        for (Tier* tier : tiers) tier->PlaceAgain(key);
        for (const Block block : pool_.BlocksOf(key)) {
            if (pool_.references[block] > 0) continue;
            const Int priority = PriorityOf(block);
            if (PriorityAt(block) == priority) continue;
            LeaveFree(block);
            if (priority < 0 || !is_active_) {
                moved.push_back(block);
            } else {
                Put(priority, block);
            }
        }
    }
    pool_.free.Append(moved);
}

}  // namespace kvplane
