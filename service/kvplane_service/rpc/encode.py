"""Encode the answers of unary calls as protobuf messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from heapq import nlargest
from io import BytesIO
from itertools import chain
from typing import Any

from kvplane import wire
from kvplane.base.step import EventKind, Orders, StepResult
from kvplane.v1 import admin_pb2
from kvplane.v1 import allocation_pb2 as pb
from kvplane.wire.same import encode_same
from kvplane_core.face import loader
from kvplane_core.face.columns import pieces
from kvplane_core.face.counters import GroupCounters, Residency
from kvplane_core.face.inspect import Snapshot
from kvplane_core.face.interface import ReplicaCore
from kvplane_service.decisions.counters import REFUSALS, REMOVALS
from kvplane_service.decisions.packing import Took
from kvplane_service.explain.causes import cause_of
from kvplane_service.explain.history import Change, KeyName
from kvplane_service.explain.service import Explanation, reaches_registration
from kvplane_service.registry import Entry
from kvplane_service.replicas.host import ReplicaHost
from kvplane_service.replicas.mirror import Mirror
from kvplane_service.runtime.reports import StoreReport
from kvplane_service.unary.calls import Allocated, Committed

SLOWEST_STEPS = 5
_NS_PER_MS = 1_000_000


def _with_mutation(message: Any, step: StepResult) -> bytes:  # noqa: ANN401
    """Return the serialized answer with the part that all calls that change a replica share: step number, free blocks,
    orders (pages to copy or zero), events. It is written in place, because copying a message with many rows would block
    the interpreter for milliseconds.
    """
    applied, result = step.parts[0], message.result
    result.seq, result.free_blocks = step.seq, applied.free_blocks
    result.orders.SetInParent()
    _fill_orders(result.orders, applied.orders)
    result.events.extend([wire.encode_event(event) for event in (*applied.events, *applied.tier_events)])
    raw: bytes = message.SerializeToString()
    return raw


def _fill_orders(message: pb.RankOrders, orders: Orders) -> None:
    add_stamp, add_copy, add_zero = message.stamps.add, message.copies.add, message.zeroes.add
    for block, stamp in zip(orders.stamp_block, orders.stamp, strict=True):
        add_stamp(block=block, stamp=stamp)
    for group, src, dst in zip(orders.copy_group, orders.copy_src, orders.copy_dst, strict=True):
        add_copy(group=group, src_block=src, dst_block=dst)
    for group, block in zip(orders.zero_group, orders.zero_block, strict=True):
        add_zero(group=group, block=block)


def encode_groups(groups: Iterable[Iterable[int]]) -> list[pb.GroupBlocks]:
    """Return the block ids of each group, with one message per group."""
    return [pb.GroupBlocks(block_ids=ids) for ids in groups]


def encode_allocated(answer: Allocated) -> bytes:
    """Return the serialized AllocateSlotsResponse."""
    message = pb.AllocateSlotsResponse(
        status=f"ALLOCATION_STATUS_{answer.status.value}",
        hit_tokens=answer.hit,
        granted_tokens=answer.granted,
        single_group_hit=answer.single_group_hit,
        load_after=answer.load_after,
        needed_blocks=answer.needed,
        preempted=answer.preempted,
        num_hashes=answer.hashes.count,
        last_hash=answer.hashes.last,
    )
    for groups, blocks in ((message.new_blocks, answer.new_blocks), (message.block_table, answer.table)):
        for ids in blocks:
            groups.add().block_ids.extend(ids)  # a constructor would copy the tables
    return _with_mutation(message, answer.step)


def encode_committed(answer: Committed) -> bytes:
    """Return the serialized CommitBlocksResponse."""
    message = pb.CommitBlocksResponse(num_hashes=answer.hashes.count, last_hash=answer.hashes.last)
    return _with_mutation(message, answer.step)


def encode_freed(step: StepResult) -> bytes:
    """Return the serialized FreeResponse, from the result of the step that ended the request."""
    return _with_mutation(pb.FreeResponse(), step)


def encode_evicted(step: StepResult) -> bytes:
    """Return the serialized EvictBlocksResponse, from the result of the step that removed the keys."""
    return _with_mutation(pb.EvictBlocksResponse(), step)


def encode_reset(step: StepResult) -> bytes:
    """Return the serialized ResetPrefixCacheResponse, from the result of the step that reset the cache."""
    return _with_mutation(pb.ResetPrefixCacheResponse(done=step.parts[0].reset_done), step)


def encode_prefetched(step: StepResult) -> bytes:
    """Return the serialized PrefetchResponse, from the result of the step that ordered the copies."""
    done = step.parts[0].prefetched
    outcome = pb.PrefetchOutcome.Name(1 + done.outcome[0])
    message = pb.PrefetchResponse(seq=step.seq, hit_tokens=done.hit[0], copied_blocks=done.blocks[0], outcome=outcome)
    return message.SerializeToString()


def encode_retained(step: StepResult) -> bytes:
    """Return the serialized RetainResponse, from the result of the step that retained or released a prefix."""
    done = step.parts[0].retained
    message = pb.RetainResponse(
        seq=step.seq, retained_tokens=done.hit[0], retained_blocks=done.blocks[0], left_blocks=done.left[0]
    )
    return message.SerializeToString()


def encode_description(
    entry: Entry, report: StoreReport, groups: Sequence[GroupCounters]
) -> pb.DescribeReplicaResponse:
    """Return the state and the counters of a replica, and the state of its store. `groups`: what the replica's
    `group_counters` returns.
    """
    host, replica = entry.host, entry.host.replica
    tally = host.tally
    return pb.DescribeReplicaResponse(
        replica=host.name,
        spec=wire.encode_spec(replica.spec),
        state=f"REPLICA_STATE_{host.state.name}",
        epoch=host.epoch,
        free_blocks=replica.free_blocks,
        slack_blocks=replica.block_counts.slack,
        running_requests=replica.num_running,
        seq=host.seq,
        executed_through=replica.executed_through,
        counters=encode_counters(replica, groups),
        num_ranks=entry.registration.num_ranks,
        common_prefix_blocks=replica.common_prefix_blocks(),
        residency=encode_residency(replica.residency),
        workers=[wire.encode_worker(replace(worker, nixl_arena=b"")) for worker in entry.workers.alive()],
        event_seq=host.events.last_seq,
        refusals={name: tally.refusals[status] for status, name in REFUSALS.items()} | _starved(replica),
        preemptions={reason.value: count for reason, count in tally.preemptions.items()},
        removed_keys={name: tally.removals[reason] for reason, name in REMOVALS.items()},
        slowest_steps=[_step_time(host, took) for took in host.decisions.slowest(SLOWEST_STEPS)],
        store=encode_store(host, report),
        busy_blocks=len(replica.busy_blocks),
        mirror=_encode_mirror(host.mirror) if host.mirror.is_attached else None,
        core=pb.CoreStatus(name=loader.core_of(replica), reason=loader.reason_of(replica)),
        tiers=encode_tiers(replica),
        tier_jobs=replica.tiers.open_jobs() if replica.spec.tiers else {},
        tier_counts=tier_counts(replica),
        retained_prefixes=replica.retained_counts[0],
        retained_blocks=replica.retained_counts[1],
        retain_counts={outcome.name.lower(): count for outcome, count in tally.retentions.items() if count},
        waiting_requests=host.waiting_requests,
        model_name=entry.registration.model_name,
        peer_namespace=entry.namespace.name if entry.namespace is not None else b"",
        peers=_encode_peers(entry),
        age_ms=host.lifetime_ns // _NS_PER_MS,
        last_seen_ms=host.unused_ns // _NS_PER_MS,
    )


def _encode_peers(entry: Entry) -> list[pb.PeerStatus]:
    found = entry.namespace.peers_of(entry.host.name) if entry.namespace is not None else ()
    return [
        pb.PeerStatus(
            replica=one.replica,
            service=one.service,
            num_slots=one.num_slots,
            held_blocks=len(one.held),
            is_read=is_read,
        )
        for one, is_read in found
    ]


def _encode_mirror(mirror: Mirror) -> pb.MirrorStatus:
    return pb.MirrorStatus(
        lag_steps=mirror.lag_steps,
        lag_ms=mirror.lag_ms,
        hidden=mirror.hidden.reason if mirror.hidden else "",
        images=mirror.images,
        divergences=mirror.divergences,
        diverged_seq=mirror.last.step.step.seq if mirror.last else 0,
        diverged=mirror.last.how if mirror.last else "",
    )


def _starved(replica: ReplicaCore) -> dict[str, int]:
    """Return the refusal reason `starved` with its count, for a replica with recurrent states. The count includes
    running requests.
    """
    return {"starved": replica.counters.starved_chunks} if replica.spec.align.block_size else {}


def _step_time(host: ReplicaHost, took: Took) -> pb.StepTime:
    age_ms = host.age_ns(took.at_ns) // 1_000_000
    return pb.StepTime(epoch=took.epoch, seq=took.seq, took_ns=took.took_ns, rows=took.rows, age_ms=age_ms)


def encode_store(host: ReplicaHost, report: StoreReport) -> pb.StoreStatus:
    """Return the state of the store for a replica, and the outcome of its recovery from the store."""
    loaded = host.recovering or host.recovered
    state = f"STORE_STATE_{report.state.name}"
    status = encode_same(report, pb.StoreStatus, "store", state=state, resync_blocks=report.resync_left)
    if loaded is not None:
        status.loading = loaded.loading
        status.loaded_entries = loaded.rows
        status.recovered_entries = loaded.recovered or 0
        status.refused_chunks.update(loaded.refused)
    return status


def encode_residency(residency: Residency) -> pb.Residency:
    """Return the histograms of block lifetimes, without trailing zeros."""
    return pb.Residency(
        lifetime=_without_tail(residency.lifetime),
        idle_before_evict=_without_tail(residency.idle_before_evict),
        reuse_gap=_without_tail(residency.reuse_gap),
    )


def _without_tail(histogram: list[int]) -> list[int]:
    return histogram[: max((index + 1 for index, count in enumerate(histogram) if count), default=0)]


def encode_counters(replica: ReplicaCore, groups: Sequence[GroupCounters]) -> pb.ReplicaCounters:
    """Return the counters of a replica since its registration."""
    return encode_same(
        replica.counters,
        pb.ReplicaCounters,
        "counters",
        evicted_keys=sum(group.evicted_blocks for group in groups),
        groups=[encode_same(group, pb.GroupCounters, "counters.groups") for group in groups],
    )


def encode_summary(entry: Entry) -> pb.ReplicaSummary:
    """Return the entry of a replica in the answer of ListReplicas."""
    host, counters = entry.host, entry.host.replica.counters
    return pb.ReplicaSummary(
        replica=host.name,
        state=f"REPLICA_STATE_{host.state.name}",
        epoch=host.epoch,
        num_blocks=host.replica.spec.num_blocks,
        free_blocks=host.replica.free_blocks,
        running_requests=host.replica.num_running,
        waiting_requests=host.waiting_requests,
        model_name=entry.registration.model_name,
        age_ms=host.lifetime_ns // _NS_PER_MS,
        last_seen_ms=host.unused_ns // _NS_PER_MS,
        steps=counters.steps,
        queried_tokens=counters.queried_tokens,
        hit_tokens=counters.hit_tokens,
    )


def encode_snapshot(snapshot: Snapshot, summary: bool) -> bytes:
    """Return the serialized SnapshotResponse; with `summary`, without its lists of free blocks, keys and requests.

    The lists are serialized and joined in pieces, because other threads do not run meanwhile.
    """
    head = admin_pb2.SnapshotResponse(
        digest=snapshot.digest,
        distinct_keys=snapshot.distinct_keys,
        usage=snapshot.usage,
        num_free_blocks=snapshot.num_free_blocks,
    )
    lists = () if summary else _snapshot_lists(snapshot)
    whole = BytesIO()  # joins without a last copy of everything
    for message in chain([head], lists):
        whole.write(message.SerializeToString())
    return whole.getvalue()


def _snapshot_lists(snapshot: Snapshot) -> Iterator[admin_pb2.SnapshotResponse]:
    for blocks in pieces(snapshot.free_blocks):
        yield admin_pb2.SnapshotResponse(free_blocks=blocks)
    for keys in pieces(snapshot.keys):
        message = admin_pb2.SnapshotResponse()
        for one in keys:
            message.keys.add(
                block=one.block,
                group=one.group,
                domain=one.domain,
                hash=one.digest,
                num_tokens=one.num_tokens,
                tentative=one.tentative,
            )
        yield message
    for request in snapshot.requests:
        message = admin_pb2.SnapshotResponse()
        message.requests.add(
            slot=request.slot,
            request_id=request.request_id,
            num_tokens=request.num_tokens,
            computed_tokens=request.computed_tokens,
            tables=[admin_pb2.BlockTable(block_ids=table) for table in request.tables],
            running=request.running,
        )
        yield message


def encode_requests(replica: ReplicaCore, limit: int) -> admin_pb2.ListRequestsResponse:
    """Return the requests that hold the most blocks, without tables, and the number of all."""
    requests, slots = replica.requests, replica.requests.slots()
    blocks = {slot: [replica.count_held(slot)] if requests.held[slot] else replica.group_blocks(slot) for slot in slots}
    largest = nlargest(limit, slots, key=lambda slot: (sum(blocks[slot]), -slot))
    listed = [
        admin_pb2.RequestState(
            slot=slot,
            request_id=requests.request_id[slot],
            num_tokens=requests.num_tokens[slot],
            computed_tokens=requests.computed[slot],
            running=requests.running[slot],
            held=requests.held[slot],
            num_blocks=blocks[slot],
        )
        for slot in largest
    ]
    return admin_pb2.ListRequestsResponse(requests=listed, num_requests=len(slots))


def encode_changes(host: ReplicaHost, changes: Iterable[tuple[Change, KeyName]]) -> admin_pb2.ExplainResponse:
    """Return the answer of Explain for a block: the changes of its keys."""
    tiers = [*(tier.kind.value for tier in host.replica.spec.tiers), ""]
    made = []
    for one, key in changes:
        stored = one.kind is EventKind.STORED
        change = admin_pb2.KeyChange(
            block=one.block,
            group=key.group,
            domain=key.domain,
            hash=key.digest,
            stored=stored,
            cause=f"MISS_CAUSE_{'UNSPECIFIED' if stored else cause_of(one).value.upper()}",
            by=one.by,
            epoch=one.epoch,
            seq=one.seq,
            age_ms=host.age_ns(one.at_ns) // 1_000_000,
            tier=tiers[one.tier],
        )
        made.append(change)
    return admin_pb2.ExplainResponse(changes=made, log_is_complete=reaches_registration(host))


def encode_explanation(host: ReplicaHost, found: Explanation) -> admin_pb2.ExplainResponse:
    """Return the answer of Explain: hit of each group, limiting groups, and the cause for which the hit is not
    longer.
    """
    account, why = found.account, found.why
    kinds = (group.kind.value for group in host.replica.spec.groups)
    return encode_same(
        why,
        admin_pb2.ExplainResponse,
        "explain",
        num_tokens=found.num_tokens,
        hit_tokens=account.hit,
        longest_hit=account.longest,
        groups=[
            admin_pb2.GroupHit(group=group, kind=f"GROUP_KIND_{kind.upper()}", hit_tokens=account.alone[group])
            for group, kind in enumerate(kinds)
        ],
        cut_by=account.cut_by,
        wanted=account.wanted,
        cause=f"MISS_CAUSE_{why.cause.value.upper()}",
        age_ms=host.age_ns(why.at_ns) // 1_000_000 if why.at_ns else 0,
        admit_status=int(found.status),
        admit_seq=found.seq,
        admit_epoch=found.epoch,
        admit_needed=found.needed,
        admit_free=found.free,
        run_seq=found.growth.seq if found.growth else 0,
        run_needed=found.growth.needed if found.growth else 0,
        run_free=found.growth.free if found.growth else 0,
        run_preempted=found.growth is not None and found.growth.preempted,
        log_is_complete=found.is_complete,
    )


def encode_tiers(replica: ReplicaCore) -> list[pb.TierStatus]:
    """Return the slots of each tier."""
    return [
        pb.TierStatus(
            kind=f"TIER_KIND_{spec.kind.name}",
            num_blocks=tier.num_slots,
            held_blocks=tier.num_held,
            shadow_blocks=tier.num_shadows,
            free_blocks=tier.num_free,
            hit_tokens=tier.hit_tokens,
            retained_blocks=tier.num_retained,
            groups=[
                pb.TierGroup(
                    held_blocks=use.held,
                    stored_blocks=use.stored,
                    loaded_blocks=use.loaded,
                    evicted_blocks=use.evicted,
                )
                for use in tier.uses
            ],
        )
        for tier, spec in zip(replica.tiers.each, replica.spec.tiers, strict=True)
    ]


def tier_counts(replica: ReplicaCore) -> dict[str, int]:
    """Return the counters of a replica with tiers; none of others."""
    return asdict(replica.tiers.counters) if replica.spec.tiers else {}
