"""The checks of `kvplane doctor`: they query a running service, and each check returns one finding."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvplane import Client
from kvplane.base.errors import KvplaneError
from kvplane.base.hashing import native
from kvplane.rpc.access import PLAIN, Access
from kvplane.rpc.channel import open_channel
from kvplane.sansio.retry import RetryPolicy
from kvplane.unary.retrying import TIMEOUT_S
from kvplane.v1.admin_pb2 import StatusResponse
from kvplane.v1.allocation_pb2 import REPLICA_STATE_LAPSED, STORE_STATE_DEGRADED, DescribeReplicaResponse
from kvplane_core.face import loader
from kvplane_tools.cli.client import described
from kvplane_tools.cli.output import counted, tier_word

MAX_CLOCK_SKEW_MS = 1000
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        is_well: True if the check found no fault.
        seen: what the check found, as text.
        remedy: what an operator can do, if `is_well` is False.
    """

    check: str
    is_well: bool
    seen: str
    remedy: str = ""


def examine(service: str, access: Access = PLAIN, timeout_s: float | None = None) -> list[Finding]:
    """Run all checks in order and return their findings. Raises Unavailable if the service cannot be reached."""
    channel = open_channel(service, access)
    client = Client(channel, timeout_s=timeout_s or TIMEOUT_S, retry=RetryPolicy(attempts=1))
    try:
        sent_ms = time.time_ns() // 1_000_000
        status = client.status()
        received_ms = time.time_ns() // 1_000_000
        replicas = list(described(client, client.list_replicas()))
        return [
            _health(channel),
            _reflection(channel, is_expected=not (access.token or (access.tls and access.tls.cert))),
            _version(status),
            _clock(status, (sent_ms + received_ms) // 2),
            _replicas(replicas),
            _workers(replicas),
            _epochs(replicas),
            _stores(channel, replicas),
            _state(channel),
            _loads(replicas),
            _tiers(replicas),
            _chunks(replicas),
            _starved(replicas),
            _drafts(replicas),
            _cores(status, replicas),
            _hashes(),
        ]
    finally:
        client.close()


def _cores(status: StatusResponse, replicas: list[DescribeReplicaResponse]) -> Finding:
    """Say which cores the replicas have, and new ones get. The slower Python core is a fault unless it was selected."""
    counts = Counter(one.core.name + (f" ({one.core.reason})" if one.core.reason else "") for one in replicas)
    seen = ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "no replica"
    cores = [status.core, *(one.core for one in replicas)]
    if status.core.name:  # an earlier service does not report it
        seen += f"; new ones: {status.core.name}" + (f" ({status.core.reason})" if status.core.reason else "")
    is_well = not any(one.reason and not one.reason.startswith(loader.VARIABLE) for one in cores)
    remedy = f"the Python core is slower (`kvplane status`): on the service's machine {loader.REMEDY}"
    return Finding("cores", is_well, seen, remedy)


def _hashes() -> Finding:
    try:
        return Finding("hashes", True, f"{native.describe()}, in this installation")
    except KvplaneError as error:
        return Finding("hashes", False, f"{error.field}: {error.message}", error.remedy)


def _health(channel: grpc.Channel) -> Finding:
    remedy = "the service drains or still reads its store (`kvplane status`): wait, or connect to another one"
    state = _health_of(channel, "")
    return Finding("health", state == "serving", state, remedy)


def _health_of(channel: grpc.Channel, name: str) -> str:
    """Return the gRPC Health status of a named part of the service, or the status code of the failed call, in lower
    case.
    """
    request = health_pb2.HealthCheckRequest(service=name)
    try:
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_TIMEOUT_S)
    except grpc.RpcError as error:
        return error.code().name.lower()
    state: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return state.lower().replace("_", " ")


def _reflection(channel: grpc.Channel, is_expected: bool) -> Finding:
    """Check that gRPC reflection works. On a service that authenticates its clients, reflection is off by default; that
    counts as no fault.
    """
    remedy = "set the key reflection (`kvplane config` shows it), or pass the .proto files to grpcurl"
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    try:
        answer = next(stub.ServerReflectionInfo(iter([request]), timeout=_TIMEOUT_S))
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED and not is_expected:
            return Finding("reflection", True, "off, the default where clients authenticate")
        return Finding("reflection", False, error.code().name.lower(), remedy)
    names = [one.name for one in answer.list_services_response.service if one.name.startswith("kvplane.")]
    return Finding("reflection", bool(names), f"{len(names)} services of kvplane", remedy)


def _version(status: StatusResponse) -> Finding:
    local = version("kvplane")
    remedy = "install the same version on both sides (`kvplane version`): the contract is compatible within one version"
    return Finding("versions", status.version == local, f"service {status.version}, client {local}", remedy)


def _clock(status: StatusResponse, local_ms: int) -> Finding:
    skew_ms = status.now_unix_ms - local_ms
    remedy = "synchronize both machines with one time server (`kvplane status -o json` has the service's time)"
    return Finding("clocks", abs(skew_ms) <= MAX_CLOCK_SKEW_MS, f"{skew_ms:+} ms", remedy)


def _replicas(replicas: list[DescribeReplicaResponse]) -> Finding:
    lapsed = [one.replica for one in replicas if one.state == REPLICA_STATE_LAPSED]
    seen = f"expired: {', '.join(lapsed)}" if lapsed else f"{len(replicas)}, none expired"
    remedy = "check their engines; `kvplane deregister REPLICA` removes one whose engine will not return"
    return Finding("replicas", not lapsed, seen, remedy)


def _workers(replicas: list[DescribeReplicaResponse]) -> Finding:
    """Check that each replica has a worker (page-holding process) for all of its ranks or for none: without any worker,
    the engine holds the pages itself.
    """
    missing = list(_ranks_without_worker(replicas))
    seen = f"missing: {', '.join(missing)}" if missing else "no rank has lost its worker"
    remedy = "`kvplane describe REPLICA` lists the workers: restart the missing one on its machine"
    return Finding("workers", not missing, seen, remedy)


def _ranks_without_worker(replicas: list[DescribeReplicaResponse]) -> Iterator[str]:
    for one in replicas:
        present = {worker.rank for worker in one.workers}
        if present:
            yield from (f"{one.replica} rank {rank}" for rank in range(one.num_ranks) if rank not in present)


def _epochs(replicas: list[DescribeReplicaResponse]) -> Finding:
    wrong = [
        f"{one.replica} rank {worker.rank} (epoch {worker.owner_epoch}, the replica's is {one.epoch})"
        for one in replicas
        for worker in one.workers
        if worker.owner_epoch and worker.owner_epoch != one.epoch
    ]
    seen = "; ".join(wrong) or "every worker has the epoch of its replica"
    remedy = "another service or engine owns the pages (`kvplane describe REPLICA`): reopen the session"
    return Finding("epochs", not wrong, seen, remedy)


def _stores(channel: grpc.Channel, replicas: list[DescribeReplicaResponse]) -> Finding:
    """Check that every replica's store works. Also reads gRPC Health, because a service that could not reach its store
    at its start may have no replica that would report the problem.
    """
    problems = [f"{one.replica}: {one.store.problem}" for one in replicas if one.store.state == STORE_STATE_DEGRADED]
    if _health_of(channel, "store") == "not serving":
        problems = problems or ["the service cannot use its store"]
    seen = "; ".join(problems) or "no store is unavailable"
    remedy = "check the store (`kvplane describe REPLICA`); allocation continues, but a restart would lose hits"
    return Finding("store", not problems, seen, remedy)


def _state(channel: grpc.Channel) -> Finding:
    """Check that no idle replica was found broken. Returns no fault for an earlier version of the service, which does
    not report this.
    """
    is_broken = _health_of(channel, "state") == "not serving"
    seen = "a check of an idle replica found a broken state" if is_broken else "no check found a broken state"
    remedy = "`kvplane snapshot REPLICA` names the invariant, and the log the replica: see KvplaneStateBroken"
    return Finding("state", not is_broken, seen, remedy)


def _loads(replicas: list[DescribeReplicaResponse]) -> Finding:
    held = [f"{one.replica}: {counted(one.busy_blocks, 'block')}" for one in replicas if one.busy_blocks]
    seen = f"held for loads of earlier epochs: {'; '.join(held)}" if held else "no block is held for an old load"
    remedy = "when the transfers have ended, the engine lists the blocks in loads_over (`kvplane describe REPLICA`)"
    return Finding("loads", not held, seen, remedy)


def _tiers(replicas: list[DescribeReplicaResponse]) -> Finding:
    """Check that every slot of a tier held what was written to it, and that no disk is left alone because it fails."""
    wrong = [
        f"{one.replica} rank {worker.rank}: {use.refused_blocks} damaged blocks in the {tier_word(use.kind)} tier"
        + (", which is suspended" if use.suspended else "")
        for one in replicas
        for worker in one.workers
        for use in worker.tiers
        if use.refused_blocks or use.suspended
    ]
    remedy = "check memory and disk of that machine (`kvplane describe REPLICA`): see KvplaneTierDamaged"
    return Finding("tiers", not wrong, "; ".join(wrong) or "no tier is damaged or suspended", remedy)


def _chunks(replicas: list[DescribeReplicaResponse]) -> Finding:
    """Check that no prompt chunk ended inside a state block (a block that holds one recurrent state) because the token
    budget of a step was smaller than the block. Such a chunk leaves no cached state at its end, so later look-ups can
    hit the prompt at fewer positions.
    """
    small = [
        f"{one.replica}: {counted(count, 'chunk')} below its state block of {one.spec.align.block_size}"
        for one in replicas
        if (count := one.counters.unaligned_chunks)
    ]
    seen = "; ".join(small) or "every step could hold a state block"
    remedy = "raise budget and caps to a state block (`kvplane describe REPLICA`), or set max_batched_tokens"
    return Finding("chunks", not small, seen, remedy)


def _starved(replicas: list[DescribeReplicaResponse]) -> Finding:
    """Check that no prompt waited because decode rows left, in every step, fewer tokens of the budget than a state
    block (a block that holds one recurrent state) has.
    """
    waited = [
        f"{one.replica}: {counted(count, 'row')} waited for {one.spec.align.block_size} tokens"
        for one in replicas
        if (count := one.refusals.get("starved", 0))
    ]
    seen = f"behind rows that left less than a state block: {'; '.join(waited)}" if waited else "no prompt was starved"
    remedy = "raise the budget to decode rows plus a state block, or put first what waits (`kvplane requests REPLICA`)"
    return Finding("prompts", not waited, seen, remedy)


def _drafts(replicas: list[DescribeReplicaResponse]) -> Finding:
    lost = [
        f"{one.replica}: {counted(count, 'request')}"
        for one in replicas
        if (count := one.preemptions.get("went_back", 0))
    ]
    seen = f"set behind the state that they held: {'; '.join(lost)}" if lost else "no request lost its state"
    remedy = "set speculative_tokens to the engine's drafts (`kvplane describe REPLICA`), and reject no more than these"
    return Finding("drafts", not lost, seen, remedy)
