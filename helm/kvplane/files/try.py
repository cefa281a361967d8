"""What `helm test` runs: health, reflection, and an allocation that is given back. Where a stranger asks: a refusal.

Arguments: the service's address, the address of its health port, and --stranger when we have nothing to show.
"""

import os
import sys
import uuid
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvplane import Access, Allocate, Client, Content, KvplaneError, ModelSource, Tls, connect
from kvplane.channel import open_channel

TOKENS = list(range(100, 133))  # two blocks of 16, and one token


def access() -> Access:
    """As the variables say that every command of kvplane reads."""
    names = ("KVPLANE_TLS_CA", "KVPLANE_CERT_FILE", "KVPLANE_KEY_FILE", "KVPLANE_TOKEN_FILE")
    ca, cert, key, token = (os.environ.get(name, "") for name in names)
    tls = Tls("" if ca == "system" else ca, cert, key) if ca else None
    return Access(tls, Path(token) if token else "")


def check_health(address: str) -> None:
    """The pod serves, and says so in plain text."""
    with grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(30)
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING, answer
    print("health: serving")


def check_reflection(channel: grpc.Channel) -> None:
    """The service lists its services."""
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]), timeout=10)
    names = {service.name for service in next(answers).list_services_response.service}
    assert "kvplane.v1.Allocation" in names, names
    print("reflection:", ", ".join(sorted(names)))


def check_round_trip(client: Client) -> None:
    """Blocks are granted, given back, and found again."""
    replica = f"{os.environ['REPLICA_PREFIX']}helm-test-{uuid.uuid4().hex[:12]}"
    client.register_replica(replica, ModelSource(model="llama-3.1-8b", num_blocks=64, max_model_len=1008))
    try:
        answer = client.allocate_slots(replica, Allocate("r", content=Content(tokens=TOKENS)))
        client.free(replica, "r")
        hit = client.find_cache_hit(replica, Content(tokens=TOKENS)).hit_tokens
    finally:
        client.deregister_replica(replica)
    assert hit == 32, (answer, hit)
    print(f"allocation: granted, freed, {hit} of {len(TOKENS)} tokens found again")


def main(address: str, health_address: str, *rest: str) -> None:
    """All of it; an exception fails the test."""
    check_health(health_address)
    ours = access()
    with connect(address, tls=ours.tls, token=ours.token) as client:
        if "--stranger" in rest:
            try:
                answer = client.status()
            except KvplaneError as refusal:
                print("a stranger is refused:", refusal)
                return
            raise AssertionError(f"a stranger is answered: {answer}")
        if os.environ["REFLECTION"] == "on":
            with open_channel(address, ours) as channel:
                check_reflection(channel)
        check_round_trip(client)


main(*sys.argv[1:])
