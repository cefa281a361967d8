"""`kvplane describe`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvplane_service.cli.asking import (
    DEFAULT_SERVICE,
    Form,
    Grpcurl,
    Output,
    Replica,
    Service,
    age,
    by_reason,
    client_of,
    columns,
    grpcurl_line,
    show,
    word,
)

if TYPE_CHECKING:
    from kvplane.v1.allocation_pb2 import DescribeReplicaResponse, StoreStatus


def command(
    replica: Replica, service: Service = DEFAULT_SERVICE, output: Output = Form.TABLE, grpcurl: Grpcurl = False
) -> None:
    """Tell everything about a replica: pool, groups, workers, counters, slowest steps."""
    from kvplane import calls

    if grpcurl:
        print(grpcurl_line(service, calls.describe_replica(replica)))
        return
    with client_of(service) as client:
        answer = client.describe_replica(replica)
    show(answer, output, lambda: "\n".join(_lines(answer)))


def _lines(told: DescribeReplicaResponse) -> Iterator[str]:
    from kvplane.v1.allocation_pb2 import ReplicaState

    counters, usable = told.counters, told.spec.num_blocks - 1
    state = word(ReplicaState.Name(told.state), "REPLICA_STATE_")
    yield f"{told.replica}: {state}, epoch {told.epoch}, step {told.seq} (executed through {told.executed_through})"
    yield f"pool: {usable - told.free_blocks} of {usable} blocks held by {told.running_requests} running requests"
    if told.busy_blocks:
        yield f"      {told.busy_blocks} of them under loads of earlier engine lives"
    share = counters.hit_tokens / counters.queried_tokens if counters.queried_tokens else 0.0
    yield f"hits: {counters.hit_tokens} of {counters.queried_tokens} tokens looked up ({share:.0%})"
    yield f"requests: {counters.admitted} admitted, {counters.ended} ended, {counters.preempted} preempted"
    yield f"preempted: {by_reason(told.preemptions)}"
    yield from _explained(told)
    yield f"refused: {by_reason(told.refusals)}"
    yield f"keys removed: {by_reason(told.removed_keys)}"
    yield f"store: {', '.join(_store(told.store))}"
    yield ""
    yield _groups(told)
    yield ""
    yield _workers(told)
    if told.slowest_steps:
        yield ""
        yield _slowest(told)


_WHY = {
    "taken_back": "their step failed, or keys that they had adopted were withdrawn",
    "went_back": "rejected drafts or a failed load set them behind what they held: see kvplane doctor",
}


def _explained(told: DescribeReplicaResponse) -> Iterator[str]:
    for reason, why in _WHY.items():
        if told.preemptions.get(reason):
            yield f"  {reason.replace('_', ' ')}: {why}"
    if told.counters.unaligned_chunks:
        yield f"unaligned: {told.counters.unaligned_chunks} chunks ended inside a state block: see kvplane doctor"
    if told.refusals.get("starved"):
        yield f"starved: {told.refusals['starved']} rows waited for room for a state block: see kvplane doctor"


def _store(store: StoreStatus) -> Iterator[str]:
    from kvplane.v1.allocation_pb2 import STORE_STATE_OFF, StoreState

    if store.state == STORE_STATE_OFF:
        yield "none"
        return
    yield word(StoreState.Name(store.state), "STORE_STATE_").replace("_", " ")
    yield f"{store.lag_entries} changes wait"
    if store.loaded_entries:
        yield f"the memory proved {store.recovered_entries} of {store.loaded_entries} stored entries"
    if any(store.refused_chunks.values()):
        yield f"chunks refused: {by_reason(store.refused_chunks)}"
    if store.problem:
        yield store.problem


def _groups(told: DescribeReplicaResponse) -> str:
    from kvplane.v1.replica_pb2 import GroupKind

    rows = [("GROUP", "KIND", "BLOCK", "HELD", "CACHED", "ALLOCATED", "HIT", "EVICTED")]
    for number, (group, counts) in enumerate(zip(told.spec.groups, told.counters.groups, strict=True)):
        reach = group.window or group.chunk
        kind = word(GroupKind.Name(group.kind), "GROUP_KIND_") + (f" {reach}" if reach else "")
        now = (str(counts.used_blocks), str(counts.cached_blocks))
        ever = (str(counts.allocated_blocks), str(counts.hit_blocks), str(counts.evicted_blocks))
        rows.append((str(number), kind, str(group.block_size), *now, *ever))
    return columns(rows)


def _workers(told: DescribeReplicaResponse) -> str:
    from kvplane.v1.plan_pb2 import WorkerState

    if not told.workers:
        return f"workers: none for {told.num_ranks} ranks"
    rows = [("RANK", "WORKER", "DEVICE", "PROCESS", "INCARNATION", "EPOCH", "ADDRESS")]
    for one in told.workers:
        state = word(WorkerState.Name(one.state), "WORKER_STATE_")
        life = (f"{one.incarnation:016x}", str(one.owner_epoch))
        rows.append((str(one.rank), state, one.device, str(one.pid), *life, one.address))
    return columns(rows)


def _slowest(told: DescribeReplicaResponse) -> str:
    rows = [("SLOWEST STEPS", "EPOCH", "TIME", "ROWS", "AGO")]
    for one in told.slowest_steps:
        rows.append((str(one.seq), str(one.epoch), f"{one.took_ns / 1e6:.2f} ms", str(one.rows), age(one.age_ms)))
    return columns(rows)
