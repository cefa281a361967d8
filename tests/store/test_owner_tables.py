"""Every table of owners against one contract, and the answers of a Kubernetes API server."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane_service.runtime.executors import InOrder
from kvplane_service.store.errors import StoreDenied, StoreForeign, StoreUnavailable
from kvplane_service.store.etcd import EtcdTable
from kvplane_service.store.grants import Grants, Identity, NotGranted
from kvplane_service.store.interface import OwnerTable
from kvplane_service.store.json_api import Endpoint, JsonApi
from kvplane_service.store.lease import ANNOTATION, LeaseTable, endpoint, path_of
from kvplane_service.store.writer import Runtime
from tests.store import apiserver, servers
from tests.store.apiserver import NAME, NAMESPACE, failure
from tests.store.etcd_server import Etcd
from tests.store.granting import Access, WildTable
from tests.twins import weakened

TIMEOUT_S = 2.0
LEASE_MS = 1000


def lease_table(at: Endpoint, timeout_s: float = TIMEOUT_S) -> LeaseTable:
    return LeaseTable(JsonApi(at, InOrder("a test"), timeout_s), NAMESPACE, NAME, LEASE_MS)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return servers.make_certificates(tmp_path_factory.mktemp("certificates")).parent


@pytest.fixture
def server(tmp_path, certificates):
    with apiserver.serving(tmp_path, certificates) as running:
        yield running


class TableContract:
    """A fixture `tables` gives two clients of one table that is empty."""

    async def test_one_of_two_creates_it(self, tables: tuple[OwnerTable, OwnerTable]):
        one, other = tables
        assert (await one.read()).version is None
        assert (await other.read()).version is None
        assert await one.replace(None, b"first")
        assert not await other.replace(None, b"second")
        assert (await other.read()).raw == b"first"

    async def test_one_of_two_replaces_a_version(self, tables: tuple[OwnerTable, OwnerTable]):
        one, other = tables
        await one.replace(None, b"first")
        seen, too = await one.read(), await other.read()
        assert await one.replace(seen.version, b"second")
        assert not await other.replace(too.version, b"third")
        assert not await one.replace(seen.version, b"fourth")
        assert (await one.read()).raw == (await other.read()).raw == b"second"

    async def test_no_version_is_used_twice(self, tables: tuple[OwnerTable, OwnerTable]):
        one, other = tables
        await one.replace(None, b"same")
        old = await one.read()
        for _ in range(3):
            assert await other.replace((await other.read()).version, b"same")
        assert not await one.replace(old.version, b"late")

    async def test_a_large_table_is_read_as_written(self, tables: tuple[OwnerTable, OwnerTable]):
        raw = bytes(range(32, 127)) * 2000
        assert await tables[0].replace(None, raw)
        assert (await tables[1].read()).raw == raw


class TestWild(TableContract):
    @pytest.fixture
    def tables(self):
        table = WildTable(Random(1), delay_s=0.0)
        return Access(table, "one"), Access(table, "other")


class TestLease(TableContract):
    @pytest.fixture
    def tables(self, server):
        return lease_table(server[1]), lease_table(server[1])


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    server = Etcd(tmp_path_factory.mktemp("etcd"))
    try:
        yield f"http://{server.address}"
    finally:
        server.kill()


class TestEtcd(TableContract):
    @pytest.fixture
    async def tables(self, etcd, request):
        dead = Endpoint(f"http://127.0.0.1:{servers.free_port()}")

        def table() -> EtcdTable:
            apis = [JsonApi(at, InOrder("a test"), TIMEOUT_S) for at in (dead, Endpoint(etcd))]
            return EtcdTable(apis, request.node.name)

        one, other = table(), table()
        deadline = time.monotonic() + servers.START_LIMIT_S
        for each in (one, other):
            while True:  # the first member does not answer, and the second one starts
                try:
                    await each.read()
                    break
                except StoreUnavailable:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.05)
        return one, other


class TestApiServer:
    """What a Lease can answer, and what then holds."""

    async def test_a_deleted_lease_is_not_created_again_by_an_update(self, server):
        state, at = server
        table = lease_table(at)
        await table.replace(None, b"first")
        seen = await table.read()
        state.lease = None
        assert not await table.replace(seen.version, b"second")
        assert state.lease is None
        with weakened("a deleted Lease comes back"):
            assert await table.replace(seen.version, b"second")

    async def test_a_lease_that_was_created_again_has_another_version(self, server):
        state, at = server
        one, other = lease_table(at), lease_table(at)
        await one.replace(None, b"first")
        seen = await one.read()
        state.lease = None
        state.revision -= 1  # another API server may count from anywhere
        await other.replace(None, b"again")
        state.lease["metadata"]["uid"] = "another"
        assert not await one.replace(seen.version, b"second")
        assert (await other.read()).raw == b"again"

    async def test_what_others_wrote_into_the_lease_stays(self, server):
        state, at = server
        table = lease_table(at)
        await table.replace(None, b"first")
        state.lease["metadata"] |= {"labels": {"team": "a"}, "ownerReferences": [{"name": "x"}]}
        state.lease["metadata"]["annotations"]["other"] = "kept"
        assert await table.replace((await table.read()).version, b"second")
        metadata = state.lease["metadata"]
        assert (metadata["labels"], metadata["ownerReferences"]) == ({"team": "a"}, [{"name": "x"}])
        assert metadata["annotations"] == {"other": "kept", ANNOTATION: "second"}

    async def test_a_lost_answer_may_have_taken_effect(self, server):
        state, at = server
        table = lease_table(at)
        state.loses = 1
        with pytest.raises(StoreUnavailable):
            await table.replace(None, b"first")
        assert (await table.read()).raw == b"first"

    @pytest.mark.parametrize("verb", ["get", "create", "update"])
    async def test_a_verb_that_the_role_lacks_is_named(self, server, verb):
        state, at = server
        table = lease_table(at)
        if verb == "update":
            await table.replace(None, b"first")
        state.verbs -= {verb}
        with pytest.raises(StoreDenied, match=f"cannot {verb}") as refused:
            await table.replace((await table.read()).version, b"second")
        assert "Role" in refused.value.remedy

    async def test_a_rotated_token_is_read_again(self, server):
        state, at = server
        table = lease_table(at)
        await table.read()
        state.tokens = {"second"}
        with pytest.raises(StoreDenied, match="Unauthorized"):
            await table.read()
        rotate(Path(at.token))
        await table.read()

    async def test_a_server_with_another_certificate_is_not_trusted(self, server, tmp_path):
        _, at = server
        other = servers.make_certificates(tmp_path / "other")
        with pytest.raises(StoreUnavailable, match="certificate verify failed"):
            await lease_table(replace(at, ca=str(other))).read()

    async def test_it_is_not_called_before_it_wants(self, server):
        state, at = server
        now = 0.0
        table = LeaseTable(JsonApi(at, InOrder("a test"), TIMEOUT_S, lambda: now), NAMESPACE, NAME, LEASE_MS)
        state.before = lambda method: failure(429, "TooManyRequests", "later", Retry_After="7")
        with pytest.raises(StoreUnavailable, match="429 later"):
            await table.read()
        state.before, calls = (lambda method: None), state.calls["GET"]
        now = 6.9
        with pytest.raises(StoreUnavailable, match="called later"):
            await table.read()
        assert state.calls["GET"] == calls
        now = 7.0
        await table.read()

    @pytest.mark.parametrize(
        "answer",
        [
            failure(500, "InternalError", "etcdserver: leader changed"),
            failure(410, "Gone", "expired"),
            failure(503, "ServiceUnavailable", "starting", Retry_After="soon"),
            (302, {"Location": "https://elsewhere/"}, {}),
            (200, {}, b"<html>"),
            (200, {}, []),
            (200, {}, {"kind": "Lease"}),
            (200, {}, {"metadata": "none"}),
            (200, {}, b"[" * 100_000),
            (200, {}, b'{"a": "' + b"x" * (5 << 20)),
        ],
    )
    async def test_any_other_answer_is_an_outage(self, server, answer):
        state, at = server
        state.before = lambda method: answer
        with pytest.raises(StoreUnavailable):
            await lease_table(at).read()

    async def test_a_slow_answer_ends_with_the_deadline(self, server):
        state, at = server
        state.slow_s = 1.0
        with pytest.raises(StoreUnavailable, match=r"no answer within 0\.1 s|timed out"):
            await lease_table(at, 0.1).read()

    async def test_a_lease_of_another_program_is_refused_and_unchanged(self, server):
        state, at = server
        metadata = {"name": NAME, "namespace": NAMESPACE, "uid": "u", "resourceVersion": "1"}
        state.lease = before = {"kind": "Lease", "metadata": metadata, "spec": {"holderIdentity": "scheduler"}}
        grants = grants_of(lease_table(at), "a:1", 1)
        with pytest.raises(StoreForeign, match="that of scheduler"):
            await grants.renew({"r": 0})
        assert state.lease == before
        assert not state.calls["PUT"]

    async def test_a_lease_of_another_release_is_refused_while_that_lives(self, server):
        state, at = server
        other, grants = grants_of(lease_table(at), "a:1", 1, "other"), grants_of(lease_table(at), "b:1", 2)
        await other.renew({"r": 0})
        before = state.lease
        with pytest.raises(StoreForeign, match="another store: a:1"):
            await grants.renew({"r": 0})
        assert state.lease == before
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                await grants.renew({"r": 0})
                break
            except StoreForeign:
                await asyncio.sleep(LEASE_MS / 5000)
        assert (await lease_table(at).read()).raw.startswith(b'{"format":1,"index":"index"')

    async def test_a_replica_is_granted_to_one_of_two_services(self, server):
        _, at = server
        one, other = grants_of(lease_table(at), "a:1", 1), grants_of(lease_table(at), "b:1", 2)
        deadline = time.monotonic() + 20
        while not has(one, "r"):
            assert time.monotonic() < deadline
            await one.renew({"r": 0})
            await asyncio.sleep(LEASE_MS / 5000)
        assert await other.take("r") == "a:1"
        while not has(other, "r"):  # the first has stopped
            assert time.monotonic() < deadline
            await other.renew({"r": 0})
            assert not (has(one, "r") and has(other, "r"))
            await asyncio.sleep(LEASE_MS / 5000)
        assert await one.renew({"r": 0}) == {"r": "b:1"}


def rotate(token: Path) -> None:
    token.write_text("second\n")


def has(grants: Grants, name: str) -> bool:
    try:
        grants.check(name)
    except NotGranted:
        return False
    return True


def grants_of(table: OwnerTable, address: str, process: int, index: str = "index") -> Grants:
    runtime = Runtime(time.monotonic_ns, asyncio.sleep, InOrder("a test"), lambda: 0.5)
    return Grants(table, Identity(address, process, index), LEASE_MS, runtime, lambda: process << 8 | 1)


def test_a_lease_is_named_by_its_namespace(tmp_path):
    (tmp_path / "namespace").write_text("here\n")
    assert path_of("lease:owners", tmp_path) == ("here", "owners")
    assert path_of("lease:there/owners.a", tmp_path) == ("there", "owners.a")
    for wrong in ("lease:", "lease:a/b/c", "lease:Upper", "lease:../secrets/x", "lease:a?b", "lease:a/-b"):
        with pytest.raises(InvalidArgument, match="does not name a Lease"):
            path_of(wrong, tmp_path)
    with pytest.raises(InvalidArgument, match="namespace of this pod"):
        path_of("lease:owners", tmp_path / "none")


def test_the_api_server_is_that_of_the_pod():
    variables = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    account = "/var/run/secrets/kubernetes.io/serviceaccount"
    assert endpoint(variables) == Endpoint("https://[fd00::1]:6443", ca=f"{account}/ca.crt", token=f"{account}/token")
    assert endpoint(variables, "c", "t") == Endpoint("https://[fd00::1]:6443", ca="c", token="t")
    with pytest.raises(InvalidArgument, match="needs a cluster"):
        endpoint({})
