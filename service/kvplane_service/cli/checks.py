"""What `kvplane doctor` looks at. Each check asks the running service and judges nothing but what it answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvplane import Client
from kvplane.access import PLAIN, Access
from kvplane.channel import open_channel
from kvplane.retry import RetryPolicy
from kvplane.v1.admin_pb2 import StatusResponse
from kvplane.v1.allocation_pb2 import REPLICA_STATE_LAPSED, STORE_STATE_DEGRADED, DescribeReplicaResponse
from kvplane_service.cli.asking import described

MAX_CLOCK_SKEW_MS = 1000
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check saw; the remedy is for when it is not well."""

    check: str
    is_well: bool
    seen: str
    remedy: str = ""


def examine(service: str, access: Access = PLAIN) -> list[Finding]:
    """All checks in order. Raises Unavailable when the service cannot be reached."""
    channel = open_channel(service, access)
    client = Client(channel, retry=RetryPolicy(attempts=1))
    try:
        asked_ms = time.time_ns() // 1_000_000
        status = client.status()
        answered_ms = time.time_ns() // 1_000_000
        all_told = list(described(client, client.list_replicas()))
        return [
            _health(channel),
            _reflection(channel, is_expected=not (access.token or (access.tls and access.tls.cert))),
            _version(status),
            _clock(status, (asked_ms + answered_ms) // 2),
            _replicas(all_told),
            _workers(all_told),
            _epochs(all_told),
            _stores(channel, all_told),
            _loads(all_told),
            _chunks(all_told),
            _starved(all_told),
            _drafts(all_told),
        ]
    finally:
        client.close()


def _health(channel: grpc.Channel) -> Finding:
    remedy = "it drains, or has not read its store yet: wait, or connect elsewhere"
    state = _health_of(channel, "")
    return Finding("health", state == "serving", state, remedy)


def _health_of(channel: grpc.Channel, name: str) -> str:
    """What the service says of one of its parts, or why it does not."""
    request = health_pb2.HealthCheckRequest(service=name)
    try:
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_TIMEOUT_S)
    except grpc.RpcError as error:
        return error.code().name.lower()
    state: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return state.lower().replace("_", " ")


def _reflection(channel: grpc.Channel, is_expected: bool) -> Finding:
    """Where callers say who they are it is off by default."""
    remedy = "set reflection = true in its configuration, or give grpcurl the .proto files"
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    try:
        answer = next(stub.ServerReflectionInfo(iter([request]), timeout=_TIMEOUT_S))
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED and not is_expected:
            return Finding("reflection", True, "off, as it is where callers say who they are")
        return Finding("reflection", False, error.code().name.lower(), remedy)
    names = [one.name for one in answer.list_services_response.service if one.name.startswith("kvplane.")]
    return Finding("reflection", bool(names), f"{len(names)} services of kvplane", remedy)


def _version(status: StatusResponse) -> Finding:
    here = version("kvplane")
    remedy = "install one version on both sides; the contract is compatible within one"
    return Finding("versions", status.version == here, f"service {status.version}, here {here}", remedy)


def _clock(status: StatusResponse, here_ms: int) -> Finding:
    skew_ms = status.now_unix_ms - here_ms
    remedy = "let both machines follow one time server; traces and logs will not line up"
    return Finding("clocks", abs(skew_ms) <= MAX_CLOCK_SKEW_MS, f"{skew_ms:+} ms", remedy)


def _replicas(told: list[DescribeReplicaResponse]) -> Finding:
    lapsed = [one.replica for one in told if one.state == REPLICA_STATE_LAPSED]
    seen = f"lapsed: {', '.join(lapsed)}" if lapsed else f"{len(told)}, none lapsed"
    return Finding("replicas", not lapsed, seen, "look at their engines; deregister those that will not return")


def _workers(told: list[DescribeReplicaResponse]) -> Finding:
    """A replica without any worker may be served by its engine; one with some lacks those that fell silent."""
    lacking = list(_ranks_without(told))
    seen = f"silent or gone: {', '.join(lacking)}" if lacking else "every rank that had one has one"
    return Finding("workers", not lacking, seen, "look at the worker's process; start it again on that machine")


def _ranks_without(told: list[DescribeReplicaResponse]) -> Iterator[str]:
    for one in told:
        present = {worker.rank for worker in one.workers}
        if present:
            yield from (f"{one.replica} rank {rank}" for rank in range(one.num_ranks) if rank not in present)


def _epochs(told: list[DescribeReplicaResponse]) -> Finding:
    wrong = [
        f"{one.replica} rank {worker.rank} (epoch {worker.owner_epoch}, the replica's is {one.epoch})"
        for one in told
        for worker in one.workers
        if worker.owner_epoch and worker.owner_epoch != one.epoch
    ]
    seen = "; ".join(wrong) or "pages belong to the engine life that the service knows"
    return Finding("epochs", not wrong, seen, "another service or engine owns the pages: open the session anew")


def _stores(channel: grpc.Channel, told: list[DescribeReplicaResponse]) -> Finding:
    """A service that was started while its store was away may know no replica that could say so."""
    away = [f"{one.replica}: {one.store.problem}" for one in told if one.store.state == STORE_STATE_DEGRADED]
    if _health_of(channel, "store") == "not serving":
        away = away or ["the service cannot use it"]
    seen = "; ".join(away) or "no replica's store is away"
    return Finding("store", not away, seen, "look at the store; allocation goes on, a restart would lose hits")


def _loads(told: list[DescribeReplicaResponse]) -> Finding:
    held = [f"{one.replica}: {one.busy_blocks} blocks" for one in told if one.busy_blocks]
    seen = (
        f"held for loads of earlier engine lives: {'; '.join(held)}" if held else "no block is held for a dead engine"
    )
    return Finding("loads", not held, seen, "let the engine ask its movers, and name these blocks in cache.loads_over")


def _chunks(told: list[DescribeReplicaResponse]) -> Finding:
    """Steps whose budget cannot hold a state block: prompts advance in parts, and more steps pass between two hits."""
    small = [
        f"{one.replica}: {one.counters.unaligned_chunks} chunks below its state block of {one.spec.align.block_size}"
        for one in told
        if one.counters.unaligned_chunks
    ]
    seen = "; ".join(small) or "every step could hold a state block"
    remedy = "raise the engine's budget and caps to a state block, or register with its budget as max_batched_tokens"
    return Finding("chunks", not small, seen, remedy)


def _starved(told: list[DescribeReplicaResponse]) -> Finding:
    """Decode rows come first and leave less than a state block in every step: a prompt waits until they end."""
    waited = [
        f"{one.replica}: {count} rows waited for {one.spec.align.block_size} tokens"
        for one in told
        if (count := one.refusals.get("starved", 0))
    ]
    seen = f"behind rows that left less than a state block: {'; '.join(waited)}" if waited else "no prompt was starved"
    remedy = "let the engine's budget hold a state block beside its decode rows; or put waiting run rows first"
    return Finding("prompts", not waited, seen, remedy)


def _drafts(told: list[DescribeReplicaResponse]) -> Finding:
    lost = [f"{one.replica}: {count} requests" for one in told if (count := one.preemptions.get("went_back", 0))]
    seen = f"set behind what they held: {'; '.join(lost)}" if lost else "no request was set behind what it held"
    remedy = "register with the engine's draft tokens as speculative_tokens; reject no more than the last step's drafts"
    return Finding("drafts", not lost, seen, remedy)
