"""`python -m tests.core.native_faults [--record] [NAME ...]`: plants faults in the compiled core, and says which test
finds each.

A fault replaces one expression or statement of a C++ file. All are compiled into one private library, in which a number
switches one on, and the tests of `TESTS` run with each in a process of its own, until one fails; then programs of
`tests/fuzz`. Exit 1 if one is not found. `native_finds.json` has the test that found each before, which runs first,
then short ones; `--record` writes it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import pytest

import native_build
from tests.core import native_builds

VARIABLE = "KVPLANE_FAULTS"  # the library, in the process that has it
SWITCH = """
extern "C" __attribute__((visibility("default"), used)) inline int kvplane_fault = 0;
#define kFault kvplane_fault
"""
MOST_S = 900  # of a process
LONG_S = 0.5
FINDS = Path(__file__).with_name("native_finds.json")
TESTS = ("tests/core", "tests/service/test_sent_steps.py")
MESSAGES = ("wire.h", "bind_bytes.h", "bind_pack.h")  # what the second of these compares
LEFT_OUT = (  # of the sources of the library, and of these faults
    "tests/core/test_native.py::test_the_library_is_compiled_from_the_sources_of_this_tree",
    "tests/core/test_native_damage.py",
    "tests/core/test_native_faults.py",
)


class Fault(NamedTuple):
    """A fault: in a file, this expression or statement has another one in its place; "" is a statement left out."""

    name: str
    file: str
    right: str
    wrong: str


FAULTS = [
    Fault("lifetimes are counted one bit too long", "types.h", "std::bit_width(static_cast<uint64_t>(value))",
          "std::bit_width(static_cast<uint64_t>(value)) + 1"),
    Fault("a refused running row needs a block less", "step_applier.h", "std::min(wanted_free, kUnlimited)",
          "std::min(wanted_free - 1, kUnlimited)"),
    Fault("a refused row of an open step needs a block less", "open_step.h", "std::min(wanted_free, kUnlimited)",
          "std::min(wanted_free - 1, kUnlimited)"),
    Fault("a refused waiting row needs what it holds alone", "step_applier.h", "never_fits ? alone : free_wanted",
          "alone"),
    Fault("a key in an order has 32 bits", "answers.h", "kColumns[column].is_wide",
          "kColumns[column].is_wide && column < N - 1"),
    Fault("an index that grows loses its last key", "keys.h", "entries_[spot.at] = EntryOf(entry & mask, spot);",
          "if (entry != before.back()) entries_[spot.at] = EntryOf(entry & mask, spot);"),
    Fault("every seventh key is put into no index", "keys.h", "entries_[spot.at] = EntryOf(record, spot);",
          "if (record % 7) entries_[spot.at] = EntryOf(record, spot);"),
    Fault("domains of running requests are swept", "replica.h", "blocks.requests.live[slot]", "false"),
    Fault("domains of keys are swept", "replica.h",
          "if (record.key.pair) used[pairs.Domain(record.key.pair)] = true;", ""),
    Fault("domains of tiers are swept", "replica.h",
          "blocks.tiers.ForEachKey([&](const Key& key) { used[pairs.Domain(key.pair)] = true; });", ""),
    Fault("new keys that a prompt repeats count twice", "learner.h", "!seen.insert(sampled_[at].key).second", "false"),
    Fault("known keys that a prompt repeats count twice", "learner.h", "recency.IsHeld(entry)", "false"),
    Fault("a removed key hides one behind it", "keys.h", "distance >= gap", "false"),
    Fault("blocks without a key go before the last keyed block", "freelist.h", "first_keyed_ == sentinel_", "true"),
    Fault("a new life leaves the divider at the front", "freelist.h", "MoveDivider(first_keyed_);", ""),
    Fault("a second copy leaves a block superseded", "freelist.h", "superseded[block] = is_first;",
          "superseded[block] = true;"),
    Fault("every block that leaves a window goes first", "eviction.h", "range.first <= index && index < range.second",
          "false"),
    Fault("hits one unit shorter are not kept", "eviction.h", "std::max<Int>(end - unit, 0)", "end"),
    Fault("states are not renewed", "eviction.h", "pool.retained.Renew(resting);", ""),
    Fault("what is retained is evicted with the others", "retained.h",
          "if (empty() || !is_active_) return;", "return;"),
    Fault("the first key of a block decides its priority", "retained.h",
          "highest = std::max(highest, one.priority);", "highest = one.priority;"),
    Fault("a lost key stays retained", "tiers/tier.h", "if (one.keys.empty()) each_.erase(number);",
          "if (one.keys.empty()) one.until_ns = kMaxNs;"),
    Fault("what ends goes to the front", "tiers/tier.h",
          "pool_.free.Append(moved);", "pool_.free.Prepend(moved);"),
    Fault("a new life forgets what is retained", "replica.h",
          "pool.retained.Resume();", "pool.retained.Resume(); pool.retained.Clear();"),
    Fault("a renewal counts twice", "retained.h", "count(before->second.keys, -1);", ""),
    Fault("what is retained counts where it was found alone", "retained.h",
          "place < end", "place < std::min(end, one.place + 1)"),
    Fault("what counts in a tier is retained on the device", "retained.h",
          "one.keys.at(position).place <= place", "true"),
    Fault("slots of what is retained are evicted like others", "tiers/tier.h",
          "place == kDevice ? -1 : retentions_.PriorityOf(KeyOf(slot), place)", "-1"),
    Fault("slots stay where they were when a retention ends", "tiers/tier.h",
          "for (Tier* tier : tiers) tier->PlaceAgain(key);", ""),
    Fault("a key that its last slot lost stays retained", "tiers/tier.h",
          "if (!retentions_.empty()) NoteRetainedLost(slot);", ""),
    Fault("what is retained is not saved", "tiers/behind.h",
          "ahead - pool_.free.count()", "0"),
    Fault("what is retained is not moved", "tiers/behind.h",
          "ahead - (tier.num_held() - tier.retained.num_free())", "0"),
    Fault("the share of a tier is that of the owner", "retaining.h",
          "std::min(tier->num_slots * percent / 100, tier->most_retained)", "tier->num_slots * percent / 100"),
    Fault("what ends is counted on", "retained.h", "--num_named_;", ""),
    Fault("a retention outlives its end", "retained.h",
          "ended->second.until_ns <= now_ns", "ended->second.until_ns < now_ns"),
    Fault("a prompt's own last state is superseded", "eviction.h", "end < LastState(manager, slot)", "true"),
    Fault("classes forget nothing", "hazard.h", "one -= one >> kDecayShift;", ""),
    Fault("what is worth most leaves first", "hazard.h", "std::max(most, mine)", "std::min(most, mine)"),
    Fault("content is popular one use late", "learner.h", "uses[entries_[at]] >= kManyUses - 1",
          "uses[entries_[at]] >= kManyUses"),
    Fault("a request evicts its own ghosts", "learner.h", "owner[entry] < end_of_others", "true"),
    Fault("a removed key hides a ghost behind it", "learner.h",
          "((at - Place(slots_[at].key)) & Mask()) < ((at - hole) & Mask())", "true"),
    Fault("victims are of any depth", "policies.h", "learner.history.Least(for_each, count_of, tokens_of)",
          "learner.history.Least(for_each, count_of, [](Block) { return Int{1}; })"),
    Fault("an image does not say who leads", "hazard_state.h", "image.Flag(duel.leads);",
          "{ bool none = false; image.Flag(none); }"),
    Fault("later hints are ignored", "facts.h", "hint != kUnchanged && pool_.hazard", "false"),
    Fault("blocks behind the divider left a window", "pool.h", "run + i < let_go ? kLeftWindow : kEvicted",
          "kLeftWindow"),
    Fault("a key is evicted by the hash of another", "pool.h", "hashes[i] = sought.hash;",
          "hashes[0] = sought.hash;"),
    Fault("blocks behind the first run are not handed out", "pool.h", "run < into->size()", "run == first"),
    Fault("a key is registered by the hash of another", "managers/base.h", "Sought(keys_[at]).hash",
          "Sought(keys_[0]).hash"),
    Fault("a removed key stays with its block", "keys.h", "key.pair = 0;", ""),
    Fault("a key counts for the group behind its own", "keys.h", "inverse_ * (pair - 1)", "inverse_ * pair"),
    Fault("events of registered blocks start one token late", "cache_events.h", "*start++ = start_of(at);",
          "*start++ = start_of(at) + 1;"),
    Fault("events of registered blocks lack the last key", "cache_events.h", "row.count += keys.size();",
          "row.count += keys.size() - (keys.size() > 1);"),
    Fault("the last use of a block can go back", "pool.h", "std::max(last_use_[block], age_base + until)",
          "age_base + until"),
    Fault("freed blocks without a key are evicted last", "pool.h", "free.Prepend(unkeyed_);", "free.Append(unkeyed_);"),
    Fault("a moved key leaves the stamp", "pool.h", "Restamp(source);", ""),
    Fault("rows of a preempted request stay in the answer", "step.h", "row[entry] != number", "true"),
    Fault("a preempted request still counts as an adopter", "requests.h",
          "computed[slot] = in_flight[slot] = granted_step[slot] = adopted_step[slot] = 0;",
          "computed[slot] = in_flight[slot] = granted_step[slot] = 0;"),
    Fault("adoptions of tentative keys are not recorded", "in_flight.h",
          "adoptions[step][block].push_back(StayOf(slot));", ""),
    Fault("keys of executed steps can be withdrawn", "in_flight.h", "tentative.EraseThrough(through)",
          "tentative.EraseThrough(through - 1)"),
    Fault("what a load left out is not zeroed", "facts.h", "requests_.not_zeroed.contains(slot)", "false"),
    Fault("evicted keys are not registered again", "facts.h", "blocks_.RegisterAgain(cache.evicted);", ""),
    Fault("the fast path passes a full block", "coordinator.h",
          "requests.fast_path_until[slot] = std::min({blocks, window, keys - 1});",
          "requests.fast_path_until[slot] = std::min({blocks, window, keys});"),
    Fault("bounds outlive withdrawn keys", "in_flight.h", "requests_.InvalidateAllFastPaths();", ""),
    Fault("pages of all groups are left to a load", "coordinator.h", "!(admission.loaded_groups >> one->group & 1)",
          "false"),
    Fault("a row that ends a request leaves its grant", "open_step.h",
          "if (Entry(facts.end, 0, kEndNone) != kEndNone) Forget(slot);", ""),
    Fault("keys of a row are not noted", "open_step.h", "tracker_.NoteKeys(slot, seq_);", ""),
    Fault("the quiet zone of a row leaves lookahead out", "open_step.h",
          "end + growth.lookahead <= requests_.fast_path_until[slot]", "end <= requests_.fast_path_until[slot]"),
    Fault("a hit is not shortened again", "lookup.h", "length >= candidate", "true"),
    Fault("the single-group hit is reported always", "lookup.h", "longest_ > length ? longest_ : 0", "longest_"),
    Fault("split pages retain", "validate.h",
          'if (rows > 0 && spec_.blocks_per_state > 1) return Refuse("split pages", "retain");', ""),
    Fault("a refusal is of the first part", "validate.h", "++part_;", "part_ = 0;"),
    Fault("a refusal is of the row behind", "refusal.h", "static_cast<Int>(row)",
          "static_cast<Int>(row + (row < kWholeColumn))"),
    Fault("a refusal has no numbers", "refusal.h", "std::move(values)", "Column(values.size())"),
    Fault("a slot that is listed twice is accepted", "validate.h", "if (distinct_.Are(slots, last)) return true;",
          "return true;"),
    Fault("requests with hashes want ids", "validate.h", 'known.by_service ? "ids wanted" : "hashes wanted"',
          '"ids wanted"'),
    Fault("numbers beyond all limits are others", "convert.h", "if (overflow == 0) return value;", "return value;"),
    Fault("a text that is none is empty", "read_step.h", "fit = false;", ""),
    Fault("two blocks of an image have one stamp", "resume.h", "stamps_.size() == all_.size()", "true"),
    Fault("a key has the stamp of an image", "resume.h", "!AnyKeyHasStamps()", "true"),
    Fault("running requests write what others hold", "resume.h", "name != names_.end() && !name->second.digest.size",
          "false"),
    Fault("a failed load of an image is not zeroed", "resume.h", "requests_.not_zeroed.insert(slot);", ";"),
    Fault("an image keeps stamps of before", "resume.h", "pool_.stamp[block] = shown_.stamps[block];", ";"),
    Fault("keys that no image has stay", "resume.h", "!KeyFits(slot, index, at)", "false"),
    Fault("a resumed hit lacks a block", "resume.h", "last = std::min(last, first_bare);", ";"),
    Fault("a resumed table keeps what it lacks", "resume.h", "end = one + 1;", ""),
    Fault("a resumed state is overwritten with its key", "managers/mamba.h",
          "pool.HasKey(mine[running]) && at.launch_end % block_size", "false"),
    Fault("a resumed state keeps its stamp", "managers/mamba.h",
          "mine[index] != kNullBlock && !pool.HasKey(mine[index])", "false"),
    Fault("a held state of an image may share its memory", "split.h",
          "!given.contains(other) && !pool.references[other] && !pool.HasKey(other)", "true"),
    Fault("a prefetch without rows", "validate.h", "prefetch.within_ns.empty()", "true"),
    Fault("a request goes back below its shortest state", "coordinator.h",
          "num_computed < requests.ShortestState(slot, appended)", "false"),
    Fault("an outcome in the row that goes back does not count", "requests.h", "std::max<Int>(0, appended - 1)", "0"),
    Fault("events start one token late", "cache_events.h", "starts.push_back(start);", "starts.push_back(start + 1);"),
    Fault("held blocks of a hit count as free", "managers/base.h", "pool.references[hit[i]] == 0", "true"),
    Fault("the last block of a hit is not dropped", "managers/full.h", "query.drops_last_block && length > 0", "false"),
    Fault("the end of a prompt is not awaited", "managers/full.h",
          "return AwaitsPromptTail(slot) ? 0 : GroupManager::RegisterBound(slot);",
          "return GroupManager::RegisterBound(slot);"),
    Fault("withdrawn keys stay away", "in_flight.h", "blocks_.RegisterAgain(withdrawn_);", ""),
    Fault("a hit lacks the first blocks of its chunk", "managers/window.h",
          "SkippedTokens(end * block_size) / block_size == first", "true"),
    Fault("a hit before a block that is left out is aligned twice", "managers/window.h",
          "replica.safe ? run : Align(run)", "Align(run)"),
    Fault("a limit is searched once", "lookup.h",
          "hit.num_tokens < whole.num_tokens && whole.num_tokens <= longest ? whole : hit", "hit"),
    Fault("what is retained before windows is needed", "managers/window.h",
          "std::max<Int>(0, num_computed - spec.window + 1) / block_size", "SkippedTokens(num_computed) / block_size"),
    Fault("a chunk leaves one chunk late", "managers/window.h", "(num_processed / spec.chunk + 1) * spec.chunk",
          "(num_processed / spec.chunk + 2) * spec.chunk"),
    Fault("a window leaves one token late", "managers/window.h",
          "(SkippedTokens(num_processed) / block_size + 1) * block_size + margin_",
          "(SkippedTokens(num_processed) / block_size + 1) * block_size + margin_ + 1"),
    Fault("states of rejected drafts are named", "managers/mamba.h", "entry.second > verified", "false"),
    Fault("the last state is released early", "managers/mamba.h", "index >= BlocksFor(num_processed) - 1",
          "index >= BlocksFor(num_processed)"),
    Fault("an encoder gets one block more", "managers/uncached.h",
          "GroupManager::Allocate(slot, num_encoder, num_encoder, num_encoder, fresh);",
          "GroupManager::Allocate(slot, num_encoder + block_size, num_encoder, num_encoder, fresh);"),
    Fault("a ring costs nothing", "managers/uncached.h", "return 1;", "return 0;"),
    Fault("states of drafts are not counted", "managers/uncached.h", "with_drafts.num_slots += Drafts();", ""),
    Fault("a checkpoint needs more than a hash block", "checkpoints.h", "start + hash_block_size_ <= position",
          "start + hash_block_size_ < position"),
    Fault("a request that ended can run", "validate.h", "known->live = end != kEndFree;", ""),
    Fault("the null block can be evicted", "validate.h", "Within(cache.evicted[row], 1, last)",
          "Within(cache.evicted[row], 0, last)"),
    Fault("a victim returns no overhead", "step_applier.h", "input_left_ += granted[at] + overhead_;",
          "input_left_ += granted[at];"),
    Fault("a whole row is cut", "step_applier.h", "wanted > room && (flags & kWhole)", "false"),
    Fault("a request that must not read hits", "replica.h", "Entry(news.skip_reading, row, 0) != 0", "false"),
    Fault("tentative keys are visible outside", "replica.h", "spec.safe ? blocks.pool.executed_through : kInside",
          "kInside"),
    Fault("a reset proves older stamps", "dropping.h", "reset == 0 || InTime(stamp) > InTime(reset)", "true"),
    Fault("sinks get the stamps of a store", "recovery.h", "recovered.stamp[block] = pool.stamp[block];", ""),
    Fault("the order of shared keys is lost", "save.h", "one.next != record", "false"),
    Fault("a loaded key has no further blocks in their order", "load.h",
          "for (size_t at = 0; at < wanted.size(); ++at) "
          "pool.records[wanted[at]].next = wanted[(at + 1) % wanted.size()];", ""),
    Fault("an image has what free slots had", "state.h", "if (!requests.live[slot]) rows[slot] = T();", ""),
    Fault("keys are ordered by the number of their domain", "image.h", "place(one) < place(other)", "one < other"),
    Fault("a reader takes any number", "image.h", "Holds(range.Has(found) && std::in_range<T>(found));", ""),
    Fault("a reader trusts counts", "image.h",
          "Holds(count <= raw_.size() - at_, \"ends before its last byte\");", ""),
    Fault("a loaded hit is behind its table", "state.h",
          "image.Holds(hit.first < size(slot), \"ends before partial_hit\");", ""),
    Fault("a loaded free block is there twice", "load.h", "!seen[block]", "true"),
    Fault("a loaded slot has two keys", "tiers/state.h",
          "row.slot < num_used && !tier.HasKey(row.slot) && tier.Find(row.key) == kNoSlot", "true"),
    Fault("an image changes while it is written", "bind_walks.h", "core.changes == walk->changes",
          "true"),
    Fault("a loaded block has one key", "load.h", "pool.AddKey(block, key, tokens);", ""),
    Fault("a loaded list begins with its divider", "load.h", "pool.free.Rebuild(free, num_first)",
          "pool.free.Rebuild(free, 0)"),
    Fault("a hasher continues from nothing", "save.h",
          "known.count() ? known.at(known.count() - 1) : replica.facts.hasher.none_hash",
          "replica.facts.hasher.none_hash"),
    Fault("a loaded hasher is forgotten", "load.h",
          "if (hasher.size() > 1) terms.hashers[slot] = {hasher.begin(), hasher.end()};", ""),
    Fault("the keys of a loaded tier are shadows", "tiers/state.h", "queue ? SlotState::kRecent : SlotState::kShadow",
          "SlotState::kShadow"),
    Fault("a loaded tier has no stale slots", "tiers/state.h",
          "if (tier) tier->stale.Set(static_cast<size_t>(place), true);", ""),
    Fault("new memory keeps busy blocks", "bind_changes.h",
          "replica.EnterEpoch(epoch, busy, memory_is_new, Shown{shown.data, shown.size});",
          "replica.EnterEpoch(epoch, busy, false, Shown{shown.data, shown.size});"),
    Fault("blocks of two requests count twice", "bind_counts.h", "!std::exchange(seen[block], 1)", "true"),
    Fault("a map takes free blocks for held ones", "bind_counts.h", "pool.references[at]", "uint32_t{group != groups}"),
    Fault("a map moves blocks one cell down", "bind_counts.h", "block * cells / pool.num_blocks",
          "(block - 1) * cells / pool.num_blocks"),
    Fault("an estimate leaves out the victims of a row", "effort.h", "units += Size(victims) * kRow;", ""),
    Fault("grants swap columns", "state.h", "serial.push_back(one.stay.second);",
          "serial.push_back(one.num_tokens);"),
    Fault("a step always ends", "read_step.h", 'IsTrue(ATTRIBUTE(object, "last").get())', "true"),
    Fault("a window of which a part is gone is left", "preempted.h", "one->table[slot][index] == kNullBlock", "false"),
    Fault("what is left forgets the dropped block", "preempted.h", "one->num_cached[slot] - one->drops_last_block",
          "one->num_cached[slot]"),
    Fault("what was granted in the step of a preemption is left", "in_flight.h",
          "requests_.granted_step[slot] == pool_.step", "false"),
    Fault("the first request of a step is the next victim", "in_flight.h", "found->second.back().stay",
          "found->second.front().stay"),
    Fault("a victim's first blocks are saved first", "tiers/behind.h", "if (*at == kNullBlock) continue;",
          "if (*at != kNullBlock) continue;"),
    Fault("states are kept at multiples alone", "managers/mamba.h", "end / per_segment > start / per_segment", "false"),
    Fault("every state is a checkpoint", "managers/mamba.h", "end / per_segment > start / per_segment", "true"),
    Fault("a percentage keeps the checkpoint of every chunk", "managers/mamba.h",
          "replica.kept_every && !replica.checkpoint_percent", "replica.kept_every != 0"),
    Fault("a load evicts what it reads", "tiers/tier.h", "++pins[At(slot)];", ""),
    Fault("shadows are evicted last", "tiers/tier.h", "queue == SlotState::kShadow ? kShadows : kRecents", "kRecents"),
    Fault("keys that are being written are written again", "tiers/behind.h",
          "!behind.HasOrWrites(tier.Of(slot))", "behind.SlotWith(tier.Of(slot)) == kNoSlot"),
    Fault("events of tiers are packed as those of the device", "wire.h",
          "into->Number(13, static_cast<uint64_t>(medium));", ""),
    Fault("removed keys are packed one by one", "wire.h", "share != kEachKey", "false"),
    Fault("hashes of new requests are packed as those of known ones", "bind_pack.h",
          "WriteRows(result.hashed_news, into, 2);", "WriteRows(result.hashed_news, into, 1);"),
    Fault("an empty image is not packed", "wire.h",
          "Write(section, into);\n    into->EndMessage(field, end);",
          "Write(section, into);\n    if (into->size() > end) into->EndMessage(field, end);"),
    Fault("a job ends in another's place", "tiers/tiers.h", "entries_[at].number == number && entries_[at].is_there",
          "entries_[at].is_there"),
    Fault("all tiers are searched, however slow", "tiers/tiers.h", "number < static_cast<size_t>(depth)",
          "number < each.size()"),
    Fault("a reset of the cache leaves versions", "tiers/tiers.h", "InTime(version) > last_reset", "true"),
    Fault("what lost its key is no longer stale", "tiers/tier.h", "stale.Set(at, true);", ""),
    Fault("revoked slots keep their versions", "tiers/tiers.h", "orders.stamp.push_back(pool_.Draw());",
          "orders.stamp.push_back(pool_.stamp[0]);"),
    Fault("what changes is not looked at again", "seen.h", "changed_.insert({number_[entry], entry});", ""),
    Fault("what is far from eviction is saved too", "seen.h", "count_ > std::max<Int>(most, 0)", "false"),
    Fault("blocks that enter the middle are not seen", "seen.h", "count_ == 0 || number_[last_] < 0", "true"),
    Fault("what changes is visited out of order", "seen.h", "is_first ? middle_++ : back_++", "back_++"),
    Fault("what the disk loses is not moved again", "tiers/tier.h", "nearer_->VisitAgain(copy);", ""),
    Fault("what all tiers have lost is not saved again", "tiers/directory.h", "VisitAgain(one.block);", ""),
    Fault("one of several blocks with a key is saved again", "tiers/directory.h",
          "is_other || one.stamp == kSeveral", "false"),
    Fault("what was used once is not kept", "tiers/directory.h", "has_others_ || one.stamp == kSeveral",
          "one.stamp == kSeveral"),
    Fault("a key leaves all tiers with one", "tiers/directory.h", "if (!IsUnused(one)) return;", ""),
    Fault("what changes far from the end is not looked at", "seen.h", "count_ >= most && changed_.empty()",
          "count_ >= most"),
    Fault("moves without a slot are forgotten", "tiers/behind.h", "tier.VisitAgain(left);", ""),
    Fault("loads fill any share of the pool", "tiers/loads.h",
          "static_cast<Int>(plan.missing.size()) + loading > tiers_.most_loading", "false"),
    Fault("what is in flight is saved", "tiers/behind.h", "pool_.key_step[block] <= pool_.executed_through", "true"),
    Fault("what left its place is saved", "tiers/behind.h", "pool_.stamp[block] == stamp && HasFullKey(block)",
          "HasFullKey(block)"),
    Fault("what left its slot is moved", "tiers/behind.h",
          "static_cast<uint64_t>(tier.VersionOf(slot)) != version", "tier.VersionOf(slot) == 0"),
    Fault("what is used once is saved", "tiers/wanted.h", "recent.contains(name) || before.contains(name)", "true"),
    Fault("old uses are remembered forever", "tiers/wanted.h", "before = std::move(recent);", ""),
    Fault("what is wanted is saved twice", "tiers/behind.h",
          "!is_there || directory_.Find(pool_.records[block].key) != kNoRecord", "!is_there"),
    Fault("a hit is no use", "tiers/wanted.h", "if (policy == kReuse) Add(place, version);", ""),
    Fault("what is saved early is evicted last", "tiers/tiers.h", "is_save && tier.wanted.IsEarly()", "false"),
    Fault("the device's next victims stay shadows", "tiers/behind.h", "one.Refresh(slot);", ""),
    Fault("a page that changed is saved", "tiers/loads.h", "is_done && pool_.stamp[write.block] == write.stamp",
          "is_done"),
    Fault("a prefetch evicts what is nowhere else", "tiers/prefetch.h", "!first.IsShadow(slot)", "false"),
    Fault("what is being copied is copied again", "tiers/prefetch.h",
          "!first.IsWritten(TierAt(one.source.tier).Of(one.source.slot))", "true"),
    Fault("what runs is prefetched", "tiers/prefetch.h", "!requests.running[slot] && !requests.held[slot]", "true"),
    Fault("a dropped key is loaded", "tiers/loads.h", "tiers_.IsIntact(row.source)", "true"),
    Fault("the hit on the device is evicted for the load", "tiers/loads.h",
          "for (const Block block : on_device) pool_.Touch(block);", ";"),
    Fault("loads of failed requests keep their keys", "tiers/loads.h", "tiers_.DropFarthest(load.rows);", ""),
    Fault("a failed load forgets what it read in any tier", "tiers/tiers.h", "row.source.tier == farthest", "true"),
    Fault("a load begins before the last use of its pages", "tiers/loads.h",
          "const Int after = pool_.LastUse(filled);", "const Int after = 0;"),
    Fault("a load is done before it could start", "validate.h", "load->second.after > executed_through_", "false"),
    Fault("pins of a loaded state are lost", "tiers/state.h",
          "++tiers_.each[static_cast<size_t>(row.source.tier)].pins[static_cast<size_t>(row.source.slot)];", ""),
    Fault("a request runs while its hit is loaded", "in_flight.h", "if (LoadsFromTiers(slot)) none.insert(slot);", ""),
    Fault("every block is hashed as a first one", "hasher.h", "known.count() ? known.at(known.count() - 1) : none_hash",
          "none_hash"),
    Fault("a hashed block stays pending", "hasher.h", "kept = 0;", ""),
    Fault("hashes that Python made are hashed again", "hasher.h",
          "made_.given && made_.num_hashes[row] != kHashedHere", "false"),
    Fault("a slot keeps the tokens of the request before", "requests.h", "num_pending[slot] = 0;", ""),
    Fault("late hashes of the engine are dropped", "facts.h",
          "AddExpected(facts.slot[row], given_.Of(row), given_.digest_size);", ";"),
    Fault("no number of a step is packed as no limit", "wire.h", "value != otherwise", "value != 0"),
    Fault("parents of events are packed as hashes", "wire.h", "hash -= row.parent_size != 0;", ""),
    Fault("events of held keys are published unread", "bind.h",
          "for (; at != end; ++at) events->needs_hold |= is_held_[*at];", "at = end;"),
    Fault("executed steps hold their blocks for a later one alone", "bind.h",
          "released && one != steps_.end()", "false"),
    Fault("keys stay under a state", "split.h", "pool.Evict(block, pool.records[block].key, kEvicted);", ""),
    Fault("stamps stay under a state", "split.h",
          "for (Block block = first; block < first + size_; ++block) pool.Restamp(block);", ""),
    Fault("the use of a state does not count for its blocks", "split.h", "visit(first);", ""),
    Fault("slack is not used", "split.h", "bare_.count() * kSlack > num_blocks_", "false"),
    Fault("no superblocks are left for the states", "split.h", "whole > wanted_", "true"),
    Fault("superblocks of a hit count as whole", "split.h", "!held_[block / size_]", "false"),
    Fault("a block under load is never a state", "split.h", "fresh.contains(first)", "false"),
    Fault("superblocks with a key are evicted first", "split.h", "whole_.Append(one_)", "whole_.Prepend(one_)"),
    Fault("recovered superblocks have no states", "recovery.h", "pool->split->NameState(block);", ""),
    Fault("states leave before their blocks", "in_flight.h", "blocks_.spec.policy == kTurnTail || pool_.split",
          "blocks_.spec.policy == kTurnTail"),
    Fault("no hit is given up", "step_applier.h", "blocks_.GiveUp(hit)", "false"),
    Fault("stamps of a new life are lost to an image", "load.h",
          "for (const Block block : blocks) pool.NoteStamped(block);", ""),
    Fault("stamps of an image stay at other blocks", "resume.h",
          "if (stamps_.contains(pool_.stamp[block]) && !all_.contains(block)) pool_.stamp[block] = 0;", ""),
    # Reading a step's message, and writing that of its answer.
    Fault("a number of ten bytes loses its highest bits", "wire.h", "if (shift == 63 && *at_ > 1) break;", ""),
    Fault("surrogates are read as text", "types.h", "(letter >= 0xd800 && letter < 0xe000)", "false"),
    Fault("numbers above those of their column are read", "wire.h", "return most <= highest;", "return true;"),
    Fault("choices that no enumeration has are read", "wire.h",
          "field.value <= static_cast<uint64_t>(choice.highest)", "true"),
    Fault("columns of other lengths are read", "wire.h", "one.count != 0 && one.count != rows", "false"),
    Fault("fewer hashes than the rows say are read", "wire.h",
          "if (!AddUp(section.num_hashes, digest_size, section.hashes.size)) return false;", ""),
    Fault("fewer tokens than the rows say are read", "wire.h",
          "return count == 0 || AddUp(TokensOfRows(section), 1, count);", "return true;"),
    Fault("the second of two equal sections counts", "bind_bytes.h",
          "if (found & 1u << field.number) return false;", ""),
    Fault("what is behind a step in its message is not seen", "bind_bytes.h", "!fields.Next(&other) && fields.ok",
          "fields.ok"),
    Fault("a step of any number of parts is read", "bind_bytes.h", "if (num_parts == kMostParts) return false;", ""),
    Fault("answers do not say what is published", "bind_bytes.h",
          "into->Number(4, static_cast<uint64_t>(core.replica.blocks.pool.executed_through));", ""),
    Fault("columns of a part before stay in the next one", "wire.h",
          "(section->*column.of).clear();", ""),
]  # fmt: skip


def plant(folder: Path) -> None:
    """Put all faults, each behind its number, into the sources in a folder. Raises LookupError if one has no place."""
    types = folder / "types.h"
    for number, fault in enumerate(FAULTS, start=1):
        text = (folder / fault.file).read_text()
        if text.count(fault.right) != 1:
            raise LookupError(f"{fault.file} has {text.count(fault.right)} places for {fault.name!r}: update it")
        if fault.right.endswith(";"):
            declared = fault.right.startswith("const ")
            is_on = f"{{ if (kFault == {number}) {{ {fault.wrong} }} else {{ {fault.right} }} }}"
            change = _declaration(number, fault) if declared else is_on
        else:
            change = f"(kFault == {number} ? ({fault.wrong}) : ({fault.right}))"
        (folder / fault.file).write_text(text.replace(fault.right, change))
    text = types.read_text()
    types.write_text(text.replace("\nnamespace kvplane {\n", f"{SWITCH}\nnamespace kvplane {{\n", 1))


def _declaration(number: int, fault: Fault) -> str:
    name, right = fault.right.removesuffix(";").split(" = ", 1)
    wrong = fault.wrong.removesuffix(";").split(" = ", 1)[1]
    return f"{name} = kFault == {number} ? {wrong} : {right};"


def build() -> Path:
    """Compile the library with all faults; returns its path."""
    root = native_builds.FOLDER / "faults"
    shutil.rmtree(root, ignore_errors=True)
    core = native_build.CORE
    sources = (root / core.source).parent
    shutil.copytree((native_build.ROOT / core.root / core.source).parent, sources)
    plant(sources)
    path = root / "faults.so"
    native_build.compile_library(core._replace(root=str(root)), path, flags=["-O1", native_builds.SMALL_TABLES])
    return path


class Play:
    """A plugin of pytest: what is collected is run once per fault, in a process of its own, until a test fails."""

    def __init__(self, library: Path, chosen: Sequence[str]) -> None:
        self._switch = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "kvplane_fault")
        self._chosen = [name for name in chosen if name != "--record"]
        self._records, self._failed = "--record" in chosen, ""
        self._finds: dict[str, str] = json.loads(FINDS.read_text())
        self._took: dict[str, float] = {}  # seconds of each test
        self._running = mmap.mmap(-1, 1 << 12)  # shared with children: the name of the test that runs
        self.is_good = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Print a row per fault."""
        chosen = self._chosen or [fault.name for fault in FAULTS]
        if any(name not in self._finds for name in chosen):
            self._took = json.loads(self._in_a_process(0, lambda: self._measured(session.items)))
        for number, fault in enumerate(FAULTS, start=1):
            if self._chosen and fault.name not in self._chosen:
                continue
            items = ordered(session.items, fault, self._finds, self._took)
            found = self._in_a_process(number, partial(self._found_by, items))
            if found and self._records:
                self._finds[fault.name] = found
                FINDS.write_text(json.dumps(self._finds, indent=0, sort_keys=True) + "\n")
            print(f"| {fault.name} | {fault.file} | {found or 'nothing'} |", flush=True)
            self.is_good &= bool(found)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the test that fails, and how long tests take."""
        self._took[report.nodeid] = self._took.get(report.nodeid, 0.0) + report.duration
        if report.failed and not self._failed:
            self._failed = report.nodeid

    def _in_a_process(self, number: int, work: Callable[[], str]) -> str:
        """Do it with a fault, 0 = none, and return what it says, or how it ended."""
        readable, writable = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            self._switch.value = number
            signal.alarm(MOST_S if number else 0)
            os.write(writable, work().encode())
            os._exit(0)
        os.close(writable)
        with os.fdopen(readable) as pipe:
            found = pipe.read()
        _, status = os.waitpid(child, 0)
        if status == 0:
            return found
        print(f"the process ended with {os.waitstatus_to_exitcode(status)}", file=sys.stderr)
        return self._running[:].rstrip(b"\0").decode()

    def _found_by(self, items: Sequence[pytest.Item]) -> str:
        return self._run(items) or fuzzed()

    def _measured(self, items: Sequence[pytest.Item]) -> str:
        """Run all tests; returns how long each took, as JSON. Raises AssertionError if one fails without a fault."""
        assert not self._run(items), f"{self._failed} fails without a fault"
        return json.dumps(self._took)

    def _run(self, items: Sequence[pytest.Item]) -> str:
        for item, following in zip_longest(items, items[1:]):
            self._running[:] = item.nodeid.encode().ljust(len(self._running), b"\0")
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._failed:
                break
        return self._failed


def ordered(
    items: Sequence[pytest.Item], fault: Fault, finds: Mapping[str, str], took: Mapping[str, float]
) -> list[pytest.Item]:
    """Return the tests: the one that found the fault before, those whose file has a word of the name of the fault's
    file, those that found others, and the others; short ones first.
    """
    named = "sent" if fault.file in MESSAGES else fault.file
    words = {word[:5] for word in re.split(r"[/_.]", named) if len(word) > 3}
    mine, others = finds.get(fault.name), set(finds.values())

    def rank(item: pytest.Item) -> tuple[bool, bool, bool, float]:
        is_named, seconds = bool(words & {word[:5] for word in item.path.stem.split("_")}), took.get(item.nodeid, 0.0)
        is_likely = is_named or item.nodeid in others
        return item.nodeid != mine, not (is_likely and seconds < LONG_S), seconds >= LONG_S, seconds

    return sorted(items, key=rank)


def fuzzed() -> str:
    """Return the first program of tests/fuzz that finds a difference; "" if none does."""
    from tests.fuzz import steps

    for number, program in enumerate(steps.seeds()):
        try:
            steps.run(program)
        except Exception:
            return f"program {number} of tests/fuzz"
    return ""


def main(chosen: list[str]) -> bool:
    """Print a row per fault; whether all are found."""
    if "tests.core.native_builds" not in sys.argv[0] and os.environ.get(VARIABLE) is None:
        command = [sys.executable, "-m", "tests.core.native_builds", path := str(build()), "-m", __spec__.name, *chosen]
        return subprocess.run(command, env={**os.environ, VARIABLE: path}, check=False).returncode == 0
    print("| fault | file | found by |\n|---|---|---|", flush=True)
    play = Play(Path(os.environ[VARIABLE]), chosen)
    options = ["-q", "-s", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", *TESTS]
    left_out = [f"--deselect={test}" for test in LEFT_OUT]
    return pytest.main([*options, *left_out], plugins=[play]) == 0 and play.is_good


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
