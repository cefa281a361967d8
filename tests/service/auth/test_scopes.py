"""Every method has a required scope, and no call is accepted without it."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvplane.base.errors import KvplaneError, PermissionDenied, Unauthenticated
from kvplane.rpc.access import TokenChannel
from kvplane.v1 import admin_pb2, allocation_pb2, events_pb2, plan_pb2, worker_pb2
from kvplane_service.auth.scopes import METHODS, Scope
from tests.service.guarded import Caller, Guard, guarded
from tests.service.rig import error_of, running

FILES = (admin_pb2, allocation_pb2, events_pb2, plan_pb2, worker_pb2)
ON_A_SOCKET = {"Worker"}  # served by each worker on a socket of its user alone, with a token of its directory


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with guarded(tmp_path_factory.mktemp("guard"), reflection="true") as world:
        yield world


def outcome(channel: grpc.Channel | TokenChannel, method: str, raw: bytes = b"") -> KvplaneError | None:
    """The refusal of any method; None when it is answered, or stays open."""
    try:
        method_of: Any = channel.stream_stream(f"/{method}")
        call = method_of(iter([raw]), timeout=10)
        next(call, None)
        call.cancel()
    except grpc.RpcError as error:
        return error_of(error)
    return None


def test_every_method_of_every_service_has_a_rule():
    files = [file.DESCRIPTOR for file in FILES]
    services = [service for file in [*files, health_pb2.DESCRIPTOR] for service in file.services_by_name.values()]
    served = [service for service in services if service.name not in ON_A_SOCKET]
    named = {f"{service.full_name}/{method.name}" for service in served for method in service.methods}
    assert named == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_calls_without_credentials_are_unauthenticated(world, method):
    assert isinstance(outcome(world.service.channel, method), Unauthenticated)


@pytest.mark.parametrize("method", [name for name, rule in METHODS.items() if rule.scope])
def test_a_method_is_denied_without_its_scope_and_allowed_with_it(tmp_path, method):
    scope = METHODS[method].scope
    assert scope is not None
    owners = {
        "has": {"scopes": [scope.value], "every_replica": True},
        "lacks": {"scopes": [one.value for one in Scope if one is not scope], "every_replica": True},
    }
    guard = Guard(tmp_path, owners)
    with running(guard.config()) as service:
        denied = outcome(Caller(service, "token-lacks").channel, method)
        assert isinstance(denied, PermissionDenied)
        assert scope.value in denied.message
        assert not isinstance(outcome(Caller(service, "token-has").channel, method), PermissionDenied | Unauthenticated)


def test_calls_on_all_replicas_require_every_replica(tmp_path):
    guard = Guard(tmp_path, {"acme": {"scopes": ["admin"]}})
    with running(guard.config()) as service:
        assert isinstance(outcome(Caller(service, "token-acme").channel, "kvplane.v1.Admin/Drain"), PermissionDenied)
        assert not service.app.about.drain_asked.is_set()


@pytest.mark.parametrize(
    "metadata",
    [
        [("authorization", "token-acme")],
        [("authorization", "Basic token-acme")],
        [("authorization", "Bearer ")],
        [("authorization", "Bearer token-acm")],
        [("authorization", "Bearer token-acme"), ("authorization", "Bearer token-rival")],
        [("authorization", "Bearer a.b.c")],
    ],
)
def test_invalid_tokens_are_refused_and_not_echoed(world, metadata):
    call = world.service.channel.unary_unary("/kvplane.v1.Admin/Status")
    with pytest.raises(grpc.RpcError) as raised:
        call(b"", metadata=metadata)
    error = error_of(raised.value)
    assert isinstance(error, Unauthenticated)
    assert "token-" not in str(error)


def test_health_of_its_own_port_needs_no_credentials_and_no_scope_otherwise(tmp_path):
    guard = Guard(tmp_path, {"acme": {"scopes": ["worker"]}})
    with running(guard.config(health_listen="127.0.0.1:0")) as service:
        anyone = grpc.insecure_channel(service.app.health_address)
        for channel in (anyone, Caller(service, "token-acme").channel):
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        anyone.close()


REFLECTION = "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def test_reflection_is_off_by_default(tmp_path, world):
    assert outcome(world.service.channel, REFLECTION) is None
    with running(Guard(tmp_path).config()) as service:
        refused = outcome(service.channel, REFLECTION)
        assert refused is not None
        assert refused.metadata["code"] == "UNIMPLEMENTED"
