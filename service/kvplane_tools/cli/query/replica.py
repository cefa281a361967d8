"""Commands about one replica: `describe`, `events`, `record`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvplane_tools.cli.client import calls, client_of, print_call, remedies
from kvplane_tools.cli.options import TABLE, Decisions, Format, Grpcurl, Output, Replica, Shape, Watch, given, size_of
from kvplane_tools.cli.output import (
    age,
    by_reason,
    columns,
    counted,
    last_seen,
    repeat,
    retained_line,
    show,
    size,
    slack_line,
    sources_line,
    store_word,
    text_of,
    tier_word,
    usable_blocks,
    word,
)

if TYPE_CHECKING:
    from kvplane import EventBatch
    from kvplane.v1.allocation_pb2 import DescribeReplicaResponse, MirrorStatus, StoreStatus


def describe_command(
    replica: Replica,
    output: Output = TABLE,
    watch: Watch = None,
    grpcurl: Grpcurl = False,
) -> None:
    """Show details of a replica: pool, groups, workers, counters, slowest steps."""
    print_call(grpcurl, calls.describe_replica(replica))

    def one() -> None:
        answer = client.describe_replica(replica)
        show(answer, output, table=lambda: "\n".join(_description(answer)), name=lambda: answer.replica)

    with client_of() as client:
        repeat(watch, one)


def _description(answer: DescribeReplicaResponse) -> Iterator[str]:
    from kvplane.v1.allocation_pb2 import ReplicaState
    from kvplane.v1.replica_pb2 import EvictionPolicy

    counters, usable = answer.counters, usable_blocks(answer.spec)
    state = word(ReplicaState.Name(answer.state), "REPLICA_STATE_")
    executed = f"executed through {answer.executed_through}"
    yield f"{answer.replica}: {state}, epoch {answer.epoch}, step {answer.seq} ({executed})"
    model = f"{answer.model_name}, " if answer.model_name else ""
    yield f"age: {model}registered {age(answer.age_ms)} ago, last seen {last_seen(answer)}"
    running = counted(answer.running_requests, "running request")
    if answer.HasField("waiting_requests"):
        running += f", {answer.waiting_requests} wait for admission"
    place = f" in {tier_word(answer.spec.pool)} memory" if answer.spec.pool else ""
    yield f"pool: {usable - answer.free_blocks:,} of {counted(usable, 'block')}{place} held by {running}"
    if answer.spec.eviction > EvictionPolicy.EVICTION_POLICY_LRU:
        hints = f", hints below {answer.spec.hint_values}" if answer.spec.hint_values else ""
        yield f"eviction: {word(EvictionPolicy.Name(answer.spec.eviction), 'EVICTION_POLICY_')}{hints}"
    if answer.busy_blocks:
        yield f"      {answer.busy_blocks} of them under loads of earlier epochs"
    share = counters.hit_tokens / counters.queried_tokens if counters.queried_tokens else 0.0
    if answer.spec.blocks_per_state > 1:
        yield f"slack: {slack_line(answer)}"
    yield f"hits: {counters.hit_tokens} of {counters.queried_tokens} tokens looked up ({share:.0%})"
    yield f"requests: {counters.admitted} admitted, {counters.ended} ended, {counters.preempted} preempted"
    yield f"preempted: {by_reason(answer.preemptions)}"
    yield from _causes(answer)
    yield f"refused: {by_reason(answer.refusals)}"
    yield f"keys removed: {by_reason(answer.removed_keys)}"
    yield f"store: {', '.join(_store(answer.store))}"
    if answer.HasField("mirror"):
        yield from _mirror(answer.mirror)
    if answer.core.name:
        yield f"core: {answer.core.name}" + (f" ({answer.core.reason})" if answer.core.reason else "")
    if answer.retain_counts:
        yield f"retained: {retained_line(answer)}; {by_reason(answer.retain_counts)}"
    if answer.tiers:
        yield from _jobs_of_tiers(answer)
    yield ""
    yield _groups(answer)
    if answer.tiers:
        yield ""
        yield _tiers(answer)
    if answer.peers:
        yield ""
        yield _peers(answer)
    yield ""
    yield _workers(answer)
    if answer.slowest_steps:
        yield ""
        yield _slowest(answer)


_PREEMPTION_CAUSES = {
    "taken_back": "their step failed, or keys that they had adopted were withdrawn",
    "went_back": "rejected drafts or a failed load set them behind the state that they held: see kvplane doctor",
}


def _causes(answer: DescribeReplicaResponse) -> Iterator[str]:
    for reason, cause in _PREEMPTION_CAUSES.items():
        if answer.preemptions.get(reason):
            yield f"  {reason.replace('_', ' ')}: {cause}"
    if answer.counters.unaligned_chunks:
        chunks = counted(answer.counters.unaligned_chunks, "chunk")
        yield f"unaligned: {chunks} ended inside a state block: see kvplane doctor"
    if answer.refusals.get("starved"):
        rows = counted(answer.refusals["starved"], "row")
        yield f"starved: {rows} waited for room for a state block: see kvplane doctor"


def _mirror(mirror: MirrorStatus) -> Iterator[str]:
    counts = f"{counted(mirror.images, 'image')}, {counted(mirror.divergences, 'divergence')}"
    hidden = f", hidden: {mirror.hidden}" if mirror.hidden else ""
    yield f"mirror: {counted(mirror.lag_steps, 'step')} behind its engine, {mirror.lag_ms} ms old, {counts}{hidden}"
    if mirror.diverged:
        yield f"  last divergence: {mirror.diverged} (step {mirror.diverged_seq}): see kvplane record --divergence"


def _store(store: StoreStatus) -> Iterator[str]:
    from kvplane.v1.allocation_pb2 import STORE_STATE_OFF

    if store.state == STORE_STATE_OFF:
        yield "none"
        return
    yield store_word(store)
    yield f"{counted(store.lag_entries, 'change')} pending"
    if store.loaded_entries:
        yield f"{store.recovered_entries} of {store.loaded_entries} stored entries verified by the stamp table"
    if any(store.refused_chunks.values()):
        yield f"chunks refused: {by_reason(store.refused_chunks)}"
    if store.problem:
        yield store.problem


def _groups(answer: DescribeReplicaResponse) -> str:
    from kvplane.v1.replica_pb2 import GroupKind

    rows = [("GROUP", "KIND", "BLOCK", "HELD", "CACHED", "ALLOCATED", "HIT", "EVICTED")]
    for number, (group, counts) in enumerate(zip(answer.spec.groups, answer.counters.groups, strict=True)):
        reach = group.window or group.chunk
        kind = word(GroupKind.Name(group.kind), "GROUP_KIND_") + (f" {reach}" if reach else "")
        now = (str(counts.used_blocks), str(counts.cached_blocks))
        total = (str(counts.allocated_blocks), str(counts.hit_blocks), str(counts.evicted_blocks))
        rows.append((str(number), kind, str(group.block_size), *now, *total))
    return columns(rows)


def _jobs_of_tiers(answer: DescribeReplicaResponse) -> Iterator[str]:
    yield f"hits by source: {sources_line(answer)}"
    yield f"tiers: {by_reason(answer.tier_counts)}"
    yield f"copy jobs: {by_reason(answer.tier_jobs)}"


def _tiers(answer: DescribeReplicaResponse) -> str:
    """Return what each tier holds, by group, and in total."""
    from kvplane.v1.replica_pb2 import SAVE_POLICY_BEHIND, GroupKind, SavePolicy

    rows = [["TIER", "GROUP", "SAVE", "SLOTS", "HELD", "RETAINED", "STORED", "LOADED", "EVICTED", "HIT TOKENS"]]
    for tier, spec in zip(answer.tiers, answer.spec.tiers, strict=True):
        name = tier_word(tier.kind)
        for number, (group, use) in enumerate(zip(answer.spec.groups, tier.groups, strict=True)):
            kind = word(GroupKind.Name(group.kind), "GROUP_KIND_")
            counts = (use.stored_blocks, use.loaded_blocks, use.evicted_blocks)
            rows.append([name, f"{number} {kind}", "", "", str(use.held_blocks), "", *map(str, counts), ""])
        save = word(SavePolicy.Name(spec.save or SAVE_POLICY_BEHIND), "SAVE_POLICY_")
        save += f", {spec.checkpoint_percent}% kept" * (spec.checkpoint_percent > 0)
        save += f", {spec.retained_percent}% retained per owner" * (spec.retained_percent > 0)
        sizes = str(tier.num_blocks), str(tier.held_blocks), str(tier.retained_blocks)
        rows.append([name, "all", save, *sizes, "", "", "", str(tier.hit_tokens)])
    return columns(rows)


def _peers(answer: DescribeReplicaResponse) -> str:
    rows = [("PEER", "SERVICE", "SLOTS", "HELD", "READ")]
    for one in answer.peers:
        sizes = str(one.num_slots), str(one.held_blocks)
        rows.append((one.replica, one.service or "this one", *sizes, "yes" if one.is_read else "not yet"))
    return columns(rows)


def _tiers_of_workers(answer: DescribeReplicaResponse) -> Iterator[str]:
    for one in answer.workers:
        for use in one.tiers:
            moved = f"{size(use.saved_bytes)} saved, {size(use.loaded_bytes)} loaded"
            counts = {name: getattr(use, f"{name}_blocks") for name in ("discarded", "refused", "failed")}
            suspended = ", suspended: its disk fails" if use.suspended else ""
            yield f"rank {one.rank}, {tier_word(use.kind)} tier: {moved}; blocks: {by_reason(counts)}{suspended}"
        if one.mapped:
            yield f"rank {one.rank}, peers: {len(one.mapped) - one.nixl_peers} on this host, {one.nixl_peers} over NIXL"


def _workers(answer: DescribeReplicaResponse) -> str:
    from kvplane.v1.plan_pb2 import WorkerState

    if not answer.workers:
        return f"workers: none for {counted(answer.num_ranks, 'rank')}"
    rows = [("RANK", "WORKER", "DEVICE", "PROCESS", "INCARNATION", "EPOCH", "ADDRESS")]
    for one in answer.workers:
        state = word(WorkerState.Name(one.state), "WORKER_STATE_")
        life = (f"{one.incarnation:016x}", str(one.owner_epoch))
        rows.append((str(one.rank), state, one.device, str(one.pid), *life, one.address))
    return "\n".join((columns(rows), *_tiers_of_workers(answer)))


def _slowest(answer: DescribeReplicaResponse) -> str:
    rows = [("SLOWEST STEPS", "EPOCH", "TIME", "ROWS", "AGO")]
    for one in answer.slowest_steps:
        rows.append((str(one.seq), str(one.epoch), f"{one.took_ns / 1e6:.2f} ms", str(one.rows), age(one.age_ms)))
    return columns(rows)


def events_command(
    replica: Replica,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stream new events until Ctrl-C.")] = False,
    after: Annotated[
        int, typer.Option(min=0, help="Start after this batch. 0 = at the oldest one that is retained.")
    ] = 0,
    tail: Annotated[int | None, typer.Option(min=0, help="Start with the last batches, this number of them.")] = None,
    output: Output = TABLE,
    grpcurl: Grpcurl = False,
) -> None:
    """Print the prefix-cache events of a replica: keys stored and removed, by batch.

    JSON is one object per line, YAML one document per batch. With --follow a lost connection is resumed after the last
    batch that was printed.
    """
    with client_of(with_retries=follow) as client:
        request = calls.subscription(replica, after)
        print_call(grpcurl, calls.Call("/kvplane.v1.Events/Subscribe", request, type(request)))
        last = client.describe_replica(replica).event_seq
        after = after if tail is None else max(after, last - tail)
        if not follow and after == last:
            return
        for batch in client.subscribe(replica, after):
            print(_batch_text(batch, output), flush=True)
            if not follow and batch.seq >= last:
                return


def _batch_text(batch: EventBatch, output: Shape) -> str:
    if output.format is Format.JSON:
        return json.dumps(_plain_batch(batch))  # one line
    text = text_of(lambda: _plain_batch(batch), output, table=lambda: "\n".join(_batch_lines(batch)))
    return f"---\n{text}" if output.format is Format.YAML else text


def _batch_lines(batch: EventBatch) -> list[str]:
    marks = [name for name in ("gap", "withdrawn", "restored") if getattr(batch, name)]
    lines = [f"batch {batch.seq} of epoch {batch.epoch}{''.join(f', {mark}' for mark in marks)}"]
    for event in batch.events:
        hashes = " ".join(digest.hex()[:12] for digest in event.hashes)
        reason = f" ({event.reason.name.lower()})" if event.reason else ""
        tokens = f" tokens {event.start}..{event.end}" if event.end else ""
        where = f" in {event.tier.name.lower()} tier" if event.tier else ""
        lines.append(f"  {event.kind.name.lower()} group {event.group}{where}{tokens}{reason} {hashes}".rstrip())
    return lines


def _plain_batch(batch: EventBatch) -> dict[str, object]:
    events = [
        {
            "kind": event.kind.name.lower(),
            "group": event.group,
            "domain": event.domain,
            "hashes": [digest.hex() for digest in event.hashes],
            "blocks": list(event.blocks),
            "start": event.start,
            "end": event.end,
            "reason": event.reason.name.lower(),
            "tier": event.tier.name.lower(),
        }
        for event in batch.events
    ]
    flags = {name: getattr(batch, name) for name in ("gap", "withdrawn", "restored")}
    return {"seq": batch.seq, "epoch": batch.epoch, **flags, "events": events}


def record_command(
    replica: Replica,
    file: Annotated[Path, typer.Argument(help="Output file. Must not exist.")],
    decisions: Decisions = None,
    from_now: Annotated[
        bool, typer.Option("--from-now", help="Begin with the state of the replica now, not with its registration.")
    ] = False,
    divergence: Annotated[
        bool, typer.Option("--divergence", help="Of a mirror: up to the step that last differed from its engine.")
    ] = False,
    rotate: Annotated[
        int | None, size_of("--rotate", "Begin a new file FILE.1, FILE.2, ... after this size, such as 100MB.")
    ] = None,
    keep: Annotated[int, typer.Option(min=1, help="With --rotate: number of files that are kept.")] = 10,
) -> None:
    """Record every decision of a replica, for `kvplane replay --log`: since its registration, or from now on.

    With --rotate it records from now on without an end. Each file begins with the state of the replica and can be
    replayed alone; together they have every decision. After a lost connection it continues with a new file.

    A file holds hashes, request names and domains. It holds no tokens and no salts.
    """
    from kvplane.base.errors import InvalidArgument
    from kvplane.v1.admin_pb2 import RecordRequest
    from kvplane_tools.cli.query.recorder import Rotation, record

    request = RecordRequest(replica=replica, divergence=divergence, from_now=from_now)
    if rotate:
        if decisions or divergence or from_now:
            raise InvalidArgument("it has no other options than --keep", field="--rotate", remedy="leave them out")

        Rotation(given().address, replica, file, rotate, keep).run()
        return
    with remedies():
        count = record(given().address, request, file, decisions)
    print(f"{counted(count, 'decision')} of {replica} in {file}")
