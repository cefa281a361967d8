"""Engines whose service has owners and TLS, and engines of data parallelism, each with a replica of its own."""

from __future__ import annotations

import json

import pytest

from tests.service.certificates import Authority
from tests.service.guarded import guarded
from tests.vllm import environment, processes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
FIELD = "additional_config.kvplane"


@pytest.fixture(scope="module", autouse=True)
def vllm():
    environment.set_up()


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def world(tmp_path, authority):
    """A service with owners that requires client certificates."""
    pair = authority.issue("server")
    tls = {"tls_cert": pair.cert, "tls_key": pair.key, "tls_client_auth": "require", "tls_client_ca": authority.cert}
    with guarded(tmp_path, **tls) as world:
        yield world


@pytest.fixture
def credentials(tmp_path, authority):
    """The options of an engine of acme."""
    pair, token = authority.issue("engine"), tmp_path / "token"
    token.write_text("token-acme\n")
    return {"tls_ca": authority.cert, "tls_cert": pair.cert, "tls_key": pair.key, "token_file": str(token)}


def first_request(world, mode, **options):
    given = {"mode": mode, "address": world.service.address, "replica": "r", **options}
    return processes.run("first_request.py", json.dumps(given))


def replicas(world):
    """The steps that the service has applied, by replica."""
    return {entry.host.name: entry.host.replica.seq for entry in world.service.app.registry}


@pytest.mark.parametrize("mode", ["mirror", "remote"])
def test_an_engine_presents_its_certificate_and_its_token(mode, world, credentials):
    found = first_request(world, mode, **credentials)
    assert found["cached"] > 0
    assert found["tokens"][0] == found["tokens"][1]
    found = replicas(world)
    assert set(found) == {"r"}
    assert found["r"] > 5


def test_an_engine_with_the_token_of_another_owner_is_refused(world, credentials, tmp_path):
    (tmp_path / "token").write_text("token-rival\n")
    with pytest.raises(AssertionError, match=r"PermissionDenied|PERMISSION_DENIED|may not"):
        first_request(world, "remote", **credentials)
    assert replicas(world) == {}


SERVICE = {"mode": "mirror", "address": "10.0.0.1:7070", "replica": "r"}
OF_RANK = {**SERVICE, "replica": "a-{dp_rank}"}


def cases(**by_name):
    return processes.run("option_cases.py", json.dumps(by_name))


def test_credentials_that_cannot_be_used_are_refused_at_the_start(credentials, tmp_path):
    (tmp_path / "empty").write_text("")
    given = {
        "token_in_plain_text": {**SERVICE, "token_file": credentials["token_file"]},
        "one_of_several_is_far": {**SERVICE, "address": "127.0.0.1:1,b:2", "token_file": credentials["token_file"]},
        "certificate_without_tls": {**SERVICE, "tls_cert": credentials["tls_cert"]},
        "no_such_file": {**SERVICE, "tls_ca": str(tmp_path / "none")},
        "empty_token": {**SERVICE, "tls_ca": "system", "token_file": str(tmp_path / "empty")},
        "without_a_service": {"tls_ca": "system"},
        "system": {**SERVICE, "tls_ca": "system", "token_file": credentials["token_file"]},
    }
    found = cases(**{name: [one, 0, 1] for name, one in given.items()})
    assert found.pop("system") == given.pop("system")
    fields = {name: field for name, (field, _) in found.items()}
    assert fields == {
        "token_in_plain_text": "token",
        "one_of_several_is_far": "token",
        "certificate_without_tls": f"{FIELD}.tls_ca",
        "no_such_file": "tls.ca",
        "empty_token": "token",
        "without_a_service": f"{FIELD}.tls_ca",
    }


@pytest.mark.parametrize("mode", ["mirror", "remote"])
def test_ranks_of_data_parallelism_have_replicas_of_their_own(mode):
    """The ranks of a dense model have a size of 1, in vLLM."""
    of_rank, shared = {**OF_RANK, "mode": mode}, {**SERVICE, "mode": mode}
    worker = {"pages": "worker", "worker": "/run/{rank}", "replica": "a-{dp_rank}"}
    found = cases(
        first=[of_rank, 0, 2], second=[of_rank, 1, 1], alone=[of_rank, 0, 1], in_process=[{}, 1, 2],
        shared=[shared, 0, 2], shared_dense=[shared, 1, 1], shared_worker=[worker, 0, 2],
    )  # fmt: skip
    assert [found[name]["replica"] for name in ("first", "second", "alone")] == ["a-0", "a-1", "a-0"]
    assert found["in_process"] == {}
    assert [found[name][0] for name in ("shared", "shared_dense")] == [f"{FIELD}.replica"] * 2
    assert found["shared_worker"][0] == f"{FIELD}.worker"
    assert "{dp_rank}" in found["shared"][1]


@pytest.mark.parametrize("given", [{}, SERVICE], ids=["inprocess", "mirror"])
def test_metrics_of_vllms_own_block_pool_are_refused_by_name(given):
    found = cases(asked=[given, 0, 1, "kv_cache_metrics"], not_asked=[given, 0, 1])
    assert found["asked"][0] == "observability_config.kv_cache_metrics"
    assert found["not_asked"] == given


def test_mode_remote_refuses_a_prefill_interval_by_name():
    interval, remote = "prefill_schedule_interval", {**SERVICE, "mode": "remote"}
    found = cases(asked=[remote, 0, 1, interval], not_asked=[remote, 0, 1], mirrored=[SERVICE, 0, 1, interval])
    field, text = found["asked"]
    assert field == "mode"
    assert "a prefill interval is not supported in mode remote; use mode: mirror" in text
    assert (found["not_asked"], found["mirrored"]) == (remote, SERVICE)
