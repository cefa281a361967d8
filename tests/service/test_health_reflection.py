"""Health and reflection, called as probes and tools call them."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from kvplane_service.config import Config
from tests.service.rig import running

SERVICES = ("kvplane.v1.Allocation", "kvplane.v1.Events", "kvplane.v1.Workers", "kvplane.v1.Admin")


@pytest.fixture(scope="module")
def service():
    with running() as service:
        yield service


@pytest.mark.parametrize("name", ["", "liveness", "readiness", *SERVICES])
def test_health_of_each_service_is_serving(service, name):
    stub = health_pb2_grpc.HealthStub(service.channel)
    answer = stub.Check(health_pb2.HealthCheckRequest(service=name))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_health_of_an_unknown_service_is_not_found(service):
    with pytest.raises(grpc.RpcError) as raised:
        health_pb2_grpc.HealthStub(service.channel).Check(health_pb2.HealthCheckRequest(service="x"))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


def ask(service, version: str, **request):
    """One question to the reflection service of a version, as its tools ask it."""
    call = service.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    return next(call(iter([reflection_pb2.ServerReflectionRequest(**request)])))


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_lists_services(service, version):
    answer = ask(service, version, list_services="")
    listed = {one.name for one in answer.list_services_response.service}
    assert listed == {*SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_describes_every_listed_service(service, version):
    """Clients ask for each listed service in turn and give up at the first that has no descriptor."""
    for one in ask(service, version, list_services="").list_services_response.service:
        answer = ask(service, version, file_containing_symbol=one.name)
        assert answer.WhichOneof("message_response") == "file_descriptor_response", one.name


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
@pytest.mark.parametrize("symbol", SERVICES)
def test_reflection_finds_the_file_of_a_symbol(service, version, symbol):
    answer = ask(service, version, file_containing_symbol=symbol)
    files = map(descriptor_pb2.FileDescriptorProto.FromString, answer.file_descriptor_response.file_descriptor_proto)
    assert symbol in {f"{file.package}.{one.name}" for file in files for one in file.service}


def test_reflection_can_be_off():
    with running(Config(listen="127.0.0.1:0", reflection="false")) as service:
        for version in ("v1", "v1alpha"):
            with pytest.raises(grpc.RpcError) as raised:
                ask(service, version, list_services="")
            assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
