"""The image of a replica with nothing in flight: what another replica needs to continue from here.

    image_of(replica)  ->  Image  ->  replica_of(image, epoch, stamps)
    decisive_state(replica)           equal for a replica and one that was made of its image

An engine's session sends the same after a crash, from its own records: `Resume` rows behind its requests. Keys travel
separately, as `Entries`: a page may be in a running table and published.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Any

from kvplane.base.errors import FailedPrecondition
from kvplane.base.groups import ReplicaSpec
from kvplane.base.step import Orders, Part, Resume, Step
from kvplane_core.face.contents import Content
from kvplane_core.face.entries import Entries
from kvplane_core.face.inspect import _keys
from kvplane_core.face.keys import NULL_BLOCK, Key
from kvplane_core.spec.eviction import TurnTailList, WindowTailList
from kvplane_core.spec.managers.base import GroupManager
from kvplane_core.spec.managers.mamba import AlignedStateManager
from kvplane_core.spec.policies import HazardList
from kvplane_core.spec.pool import BlockPool
from kvplane_core.spec.replica import Replica
from kvplane_core.spec.split import SplitList
from kvplane_core.spec.state_entries import policy_state
from tests.core.compared import compared
from tests.core.images import values_of


@dataclass(frozen=True, slots=True)
class RequestImage:
    """One request, with or without blocks."""

    slot: int
    request_id: str
    domain: str
    skip_reading: bool
    limit: int
    num_prompt: int
    num_tokens: int
    content: Content


@dataclass(frozen=True, slots=True)
class Image:
    """A replica.

    Attributes:
        requests: all that have not ended.
        resume: what holds blocks; every other block is free.
        entries: its published keys.
        free: in eviction order.
        shared: keys of several blocks, in the order in which these are hit.
        busy: blocks that loads of earlier engine lives may still write.
        eviction: the eviction policy's own part of the state (`state_entries.policy_state`): how many blocks are
            evicted first, where hits of requests end, and what is learnt or superseded.
    """

    spec: ReplicaSpec
    requests: tuple[RequestImage, ...]
    resume: Resume
    entries: Entries
    free: tuple[int, ...]
    shared: tuple[tuple[Key, tuple[int, ...]], ...]
    busy: tuple[int, ...] = ()
    eviction: tuple[int, dict[int, int], list[Any]] = (0, {}, [])


def image_of(replica: Replica) -> Image:
    """The image; touches nothing. Raises FailedPrecondition while something is in flight."""
    requests, tracker = replica.requests, replica.tracker
    copies = any(manager.copies for manager in replica.coordinator.managers)
    if tracker.grants or tracker.tentative or tracker.waiting or copies:
        raise FailedPrecondition("steps are in flight", remedy="say that they are executed first")
    return Image(
        replica.spec,
        tuple(_request_image(replica, slot) for slot in requests.slots() if not requests.held[slot]),
        _resume_of(replica),
        replica.entries(),
        tuple(replica.coordinator.pool.free),
        tuple(_shared_keys(replica.coordinator.pool)),
        replica.busy_blocks,
        _eviction_of(replica),
    )


def replica_of(image: Image, epoch: int, shown: Sequence[int]) -> tuple[Replica, Orders]:
    """A replica that continues from the image, in a new engine life on the same page memory; the first orders to ranks.

    Args:
        image: of `image_of`.
        epoch: above every one in which stamps were given for this memory.
        shown: one stamp per block, as the memory of every rank shows it. Keys that it does not prove are lost.

    Raises:
        InvalidArgument: it does not prove the pages of the requests.
    """
    replica = Replica(image.spec)
    replica.recover(epoch, [shown], [image.entries], image.busy)
    for one in image.requests:
        replica.requests.add(one.slot, one.num_tokens, one.limit, _copy_of(one.content))
        replica.coordinator.grow(one.slot)
        replica.requests.request_id[one.slot], replica.requests.domain[one.slot] = one.request_id, one.domain
        replica.requests.skip_reading[one.slot] = one.skip_reading
        replica.requests.num_prompt[one.slot] = one.num_prompt
    (result,) = compared(replica).apply(Step(epoch, 1, [Part(resume=image.resume)])).parts
    free = replica.coordinator.pool.free
    for key, blocks in image.shared:
        _prefer(replica.coordinator.pool, key, blocks)
    num_first, hit_end, others = image.eviction
    if isinstance(free, SplitList):
        if set(free) == set(image.free) and others:
            free.load(image.free, *others)
    elif set(free) == set(image.free):
        free.rebuild(image.free, num_first) if isinstance(free, WindowTailList) else free.rebuild(image.free)
    replica.requests.hit_end = dict(hit_end)
    if isinstance(free, TurnTailList) and others:
        (free.superseded,) = deepcopy(others)
    elif isinstance(free, HazardList) and others:
        *learnt, hints = deepcopy(others)
        replica.requests.hints = {slot: hint for slot, hint in hints.items() if replica.requests.is_live(slot)}
        free.load(learnt)
    return compared(replica), result.orders


def _eviction_of(replica: Replica) -> tuple[int, dict[int, int], list[Any]]:
    free, policy = replica.coordinator.pool.free, deepcopy(policy_state(replica))
    if isinstance(free, SplitList):
        return 0, {}, free.state()
    return (policy[1], policy[2], policy[3:]) if policy else (0, {}, [])


def _prefer(pool: BlockPool, key: Key, blocks: Sequence[int]) -> None:
    """Let look-ups find the blocks of a key in this order, unless the key has other blocks."""
    if sorted(pool.index.get(key, ())) == sorted(blocks):
        pool.index[key][:] = blocks


def _request_image(replica: Replica, slot: int) -> RequestImage:
    requests = replica.requests
    return RequestImage(
        slot,
        requests.request_id[slot],
        requests.domain[slot],
        requests.skip_reading[slot],
        requests.limit[slot],
        requests.num_prompt[slot],
        requests.num_tokens[slot],
        _copy_of(requests.content[slot]),
    )


def _copy_of(content: Content) -> Content:
    return Content(list(content.digests), copy(content.hasher))


def _resume_of(replica: Replica) -> Resume:
    requests, resume = replica.requests, Resume()
    for slot in (slot for slot in requests.slots() if requests.running[slot]):
        resume.slot.append(slot)
        resume.computed.append(requests.computed[slot])
        resume.launch_end.append(requests.launch_end(slot))
        resume.num_prompt.append(requests.num_prompt[slot])
        resume.single_group_hit.append(requests.single_group_hit[slot])
        resume.loading.append(1 if slot in requests.loading else 2 * (slot in requests.not_zeroed))
        resume.num_cached_blocks.extend(max(manager.num_cached[slot], 0) for manager in replica.coordinator.managers)
        for table in replica.coordinator.tables(slot):
            resume.num_blocks.append(len(table))
            resume.blocks.extend(table)
    for slot, blocks in replica.tracker.held.items():
        blocks = [block for block in blocks if block != NULL_BLOCK]
        resume.held_slot.append(slot)
        resume.held_loading.append(int(slot in requests.loading))
        resume.held_count.append(len(blocks))
        resume.held_blocks.extend(blocks)
    return resume


def decisive_state(replica: Replica) -> dict[object, object]:
    """All that later answers depend on, by name; steps, epochs and stamps apart. Nothing is in flight."""
    pool, requests = replica.coordinator.pool, replica.requests
    each = _keys(values_of(b"".join(replica.image(with_statistics=False))))
    keys = [(one.block, one.key, one.num_tokens * (one.key == pool.key_of(one.block))) for one in each]
    state: dict[object, object] = {
        "free": list(pool.free),
        "eviction": _eviction_of(replica),
        "references": list(pool.references),
        "keys": keys,
        "shared keys": sorted(_shared_keys(pool)),
        "busy": replica.busy_blocks,
        "held": {slot: [block for block in blocks if block] for slot, blocks in replica.tracker.held.items()},
        "loading": (requests.loading, requests.not_zeroed),
    }
    for slot in (slot for slot in requests.slots() if not requests.held[slot]):
        one = _request_image(replica, slot)
        state["request", slot] = replace(one, content=Content(one.content.digests))
        state["hasher", slot] = one.content.hasher.tail if one.content.hasher else None
        if requests.running[slot]:
            at = requests.computed[slot], requests.launch_end(slot), requests.single_group_hit[slot]
            state["running", slot] = at
            for manager in replica.coordinator.managers:
                state["table", slot, manager.group] = _table_state(manager, slot)
    return state


def _table_state(manager: GroupManager, slot: int) -> tuple[object, ...]:
    """The request's table and what is noted about it. Of states before the running one, those that may get a key: one
    that has its key gets no other.

    `last_state` is left out: what the window releases always contains it, so it decides nothing.
    """
    table, first = manager.table[slot], max(manager.num_cached[slot], 0)
    state = (table, first, manager.partial_hit.get(slot))
    if not isinstance(manager, AlignedStateManager):
        return state
    before = range(len(table) - 1 - manager.spec.speculative_blocks)
    ends = manager._stopped_at.get(slot, {})
    whole = {index: end for index, end in ends.items() if end == (index + 1) * manager.block_size}
    unnamed = {index for index in before if table[index] and manager.pool.key[table[index]] is None}
    left = {index: end for index, end in whole.items() if index in unnamed and index >= first}
    return *state, manager.num_retired[slot], manager.has_allocated[slot], left


def _shared_keys(pool: BlockPool) -> Iterator[tuple[Key, tuple[int, ...]]]:
    """Keys of several blocks, these in the order in which they are hit."""
    return ((key, tuple(blocks)) for key, blocks in pool.index.items() if len(blocks) > 1)
