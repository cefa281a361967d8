"""The script of `helm test`: checks health, reflection, and an allocation; without credentials, a refusal.

Arguments: the service's address, the address of its health port, and --expect-refusal if there are no credentials.
"""

import os
import sys
import uuid
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvplane import Access, Allocate, Client, Content, KvplaneError, ModelSource, Tls, connect
from kvplane.rpc.channel import open_channel

TOKENS = list(range(100, 133))  # two blocks of 16, and one token


def access() -> Access:
    """The credentials in the variables that every command of kvplane reads."""
    names = ("KVPLANE_TLS_CA", "KVPLANE_CERT_FILE", "KVPLANE_KEY_FILE", "KVPLANE_TOKEN_FILE")
    ca, cert, key, token = (os.environ.get(name, "") for name in names)
    tls = Tls("" if ca == "system" else ca, cert, key) if ca else None
    return Access(tls, Path(token) if token else "")


def check_health(address: str) -> None:
    """Check that the pod reports SERVING on its plaintext port."""
    with grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(30)
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING, answer
    print("health: serving")


def check_reflection(channel: grpc.Channel) -> None:
    """Check that reflection lists the services."""
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]), timeout=10)
    names = {service.name for service in next(answers).list_services_response.service}
    assert "kvplane.v1.Allocation" in names, names
    print("reflection:", ", ".join(sorted(names)))


def check_round_trip(client: Client) -> None:
    """Check that blocks are granted, freed, and hit again."""
    replica = f"{os.environ['REPLICA_PREFIX']}helm-test-{uuid.uuid4().hex[:12]}"
    client.register_replica(replica, ModelSource(model="llama-3.1-8b", num_blocks=64, max_model_len=1008))
    try:
        answer = client.allocate_slots(replica, Allocate("r", content=Content(token_ids=TOKENS)))
        client.free(replica, "r")
        hit = client.find_cache_hit(replica, Content(token_ids=TOKENS)).hit_tokens
    finally:
        client.deregister_replica(replica)
    assert hit == 32, (answer, hit)
    print(f"allocation: granted, freed, {hit} of {len(TOKENS)} tokens hit again")


def main(address: str, health_address: str, *rest: str) -> None:
    """Run all checks; an exception fails the test."""
    check_health(health_address)
    credentials = access()
    with connect(address, tls=credentials.tls, token=credentials.token) as client:
        if "--expect-refusal" in rest:
            try:
                answer = client.status()
            except KvplaneError as refusal:
                print("an unauthenticated client is refused:", refusal)
                return
            raise AssertionError(f"an unauthenticated client is answered: {answer}")
        if os.environ["REFLECTION"] == "on":
            with open_channel(address, credentials) as channel:
                check_reflection(channel)
        check_round_trip(client)


main(*sys.argv[1:])
