"""The registry: replicas by name, and limits on their number and blocks."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest

from kvplane.base.errors import AlreadyExists, InvalidArgument, KvplaneError, LimitExceeded, NotFound, StaleEpoch
from kvplane.base.groups import GroupKind, GroupSpec
from kvplane.v1.admin_pb2 import ExplainRequest
from kvplane.v1.allocation_pb2 import DeregisterReplicaRequest, FindCacheHitRequest
from kvplane_service.config import Config
from kvplane_service.registry import Registration, Registry
from kvplane_service.replicas.host import ReplicaHost
from tests.service.hosts import FULL, spec_of
from tests.service.rig import column, running, until

PLAIN = Registration(spec_of())


@pytest.fixture
def registry():
    return Registry(Config(max_replicas=2, max_groups=2, max_blocks=50, max_total_blocks=60), lambda: 0)


def names(registry: Registry) -> list[str]:
    return sorted(entry.host.name for entry in registry)


def test_a_replica_is_found_by_its_name(registry):
    entry = registry.register("a", PLAIN)
    assert registry.get("a") is entry
    assert entry.host.name == "a"
    with pytest.raises(NotFound, match="'b'"):
        registry.get("b")


def test_an_equal_registration_returns_the_first_entry(registry):
    assert registry.register("a", PLAIN) is registry.register("a", Registration(spec_of()))
    assert len(registry) == 1


def test_a_registration_with_the_classes_of_look_ups_that_were_derived_is_equal(registry):
    """A client that states them finds the replica of one that left them out, also from a store, and the reverse."""
    window = GroupSpec(GroupKind.SLIDING_WINDOW, FULL.block_size, window=9)
    unset = Registration(replace(spec_of(), groups=(FULL, window)))
    entry = registry.register("a", unset)
    stated = Registration(replace(spec_of(), groups=(replace(FULL, lookup_class=5), replace(window, lookup_class=2))))
    assert registry.register("a", stated) is entry
    assert registry.register("a", unset) is entry
    assert entry.registration.spec == unset.spec
    with pytest.raises(AlreadyExists, match="other groups"):
        registry.register("a", Registration(replace(spec_of(), groups=(FULL, replace(window, window=10)))))
    with pytest.raises(AlreadyExists, match="num_blocks 21") as refused:
        registry.register("a", Registration(replace(stated.spec, num_blocks=22)))
    assert "`kvplane deregister a`" in refused.value.remedy


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (Registration(spec_of(num_blocks=22)), "num_blocks 21"),
        (Registration(spec_of(hash_seed="x")), "hash_seed "),
        (Registration(replace(spec_of(), groups=(FULL, FULL))), r"other groups \(1\)"),
        (Registration(spec_of(), num_ranks=2), "num_ranks 1"),
        (Registration(spec_of(), namespace_digest=b"x"), "namespace_digest"),
    ],
)
def test_a_taken_name_error_states_the_difference(registry, other, difference):
    registry.register("a", PLAIN)
    with pytest.raises(AlreadyExists, match=difference):
        registry.register("a", other)


@pytest.mark.parametrize("name", ["", "x" * 129, "a b", "a\n", "ü", "a\x00"])
def test_invalid_names_are_refused(registry, name):
    with pytest.raises(InvalidArgument) as caught:
        registry.register(name, PLAIN)
    assert caught.value.field == "replica"


@pytest.mark.parametrize("name", ["x" * 128, "a.b/c_d-9", "0"])
def test_valid_names_are_accepted(registry, name):
    assert registry.register(name, PLAIN).host.name == name


@pytest.mark.parametrize(
    ("registration", "kind", "field"),
    [
        (Registration(spec_of(), num_ranks=0), InvalidArgument, "num_ranks"),
        (Registration(spec_of(), num_ranks=65537), InvalidArgument, "num_ranks"),
        (Registration(spec_of(), namespace_digest=b"x" * 65), InvalidArgument, "namespace_digest"),
        (Registration(spec_of(num_blocks=1)), InvalidArgument, "num_blocks"),
        (Registration(spec_of(scheduler_block_size=24)), InvalidArgument, "scheduler_block_size"),
        (Registration(replace(spec_of(), groups=(FULL,) * 3)), LimitExceeded, "groups"),
        (Registration(spec_of(num_blocks=51)), LimitExceeded, "num_blocks"),
    ],
)
def test_an_invalid_registration_changes_nothing(registry, registration, kind: type[KvplaneError], field):
    with pytest.raises(kind) as caught:
        registry.register("a", registration)
    assert caught.value.field == field
    assert len(registry) == 0


def test_replicas_are_limited_in_number_and_in_blocks(registry):
    registry.register("a", PLAIN)
    with pytest.raises(LimitExceeded, match="no room for 40 blocks"):
        registry.register("b", Registration(spec_of(num_blocks=40)))
    registry.register("b", PLAIN)
    with pytest.raises(LimitExceeded, match="max_replicas"):
        registry.register("c", Registration(spec_of(num_blocks=2)))
    assert names(registry) == ["a", "b"]


def test_a_removed_replica_makes_room(registry):
    registry.register("a", PLAIN)
    registry.register("b", PLAIN)
    registry.remove("a")
    registry.register("c", PLAIN)
    assert names(registry) == ["b", "c"]
    with pytest.raises(NotFound):
        registry.remove("a")


def test_a_replica_is_removed_in_its_epoch_only(registry):
    registry.register("a", PLAIN)
    with pytest.raises(StaleEpoch):
        registry.remove("a", epoch=2)
    registry.remove("a", epoch=1)
    assert len(registry) == 0


def test_a_page_continues_after_a_name():
    registry = Registry(Config(), lambda: 0)
    for name in ("c", "a", "d", "b"):
        registry.register(name, PLAIN)
    pages = [registry.page("", 3), registry.page("c", 3), registry.page("d", 3)]
    assert [[entry.host.name for entry in page] for page in pages] == [["a", "b", "c"], ["d"], []]


def test_a_replica_that_was_deregistered_is_not_kept_in_memory(monkeypatch):
    """Also when it was the last one: nothing that looks at all replicas remembers it meanwhile."""
    looks, real = list[str](), ReplicaHost.expire

    def expire(self):
        looks.append(self.name)
        real(self)

    monkeypatch.setattr(ReplicaHost, "expire", expire)
    with running(Config(listen="127.0.0.1:0", lease_ms=100)) as service:
        service.register("gone")
        host = weakref.ref(service.app.registry.get("gone").host)
        until(lambda: "gone" in looks)
        service.allocation.DeregisterReplica(DeregisterReplicaRequest(replica="gone"))
        until(lambda: gc.collect() >= 0 and host() is None)


@pytest.mark.parametrize("end", ["close", "deregister", "vanish"])
def test_the_pool_of_a_replica_that_was_deregistered_is_freed_without_a_collection(end):
    """One has up to 100 bytes per block, and is collected after many others would have been built."""
    gc.collect()
    gc.disable()
    try:
        with running(Config(listen="127.0.0.1:0")) as service:
            service.register("gone")
            core = weakref.ref(service.app.registry.get("gone").host.replica)
            stream, prompt = service.open("gone"), {"token_ids": list(range(40))}
            news = {"slot": column(0), "num_tokens": column(40), "tokens": column(*range(40)), "request_id": ["a"]}
            stream.step({"news": news, "admit": {"slot": column(0)}})
            service.allocation.FindCacheHit(FindCacheHitRequest(replica="gone", content=prompt))
            service.admin.Explain(ExplainRequest(replica="gone", request_id="a"))
            service.admin.Explain(ExplainRequest(replica="gone", content=prompt))
            service.digest("gone")
            {"close": stream.close, "vanish": stream.vanish, "deregister": lambda: None}[end]()
            service.allocation.DeregisterReplica(DeregisterReplicaRequest(replica="gone"))
            stream.end()
            until(lambda: core() is None)
    finally:
        gc.enable()
