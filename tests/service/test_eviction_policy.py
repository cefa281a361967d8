"""The eviction policy of a replica from its source to its spec, and what a peer of another version does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplane import connect, wire
from kvplane.base.errors import AlreadyExists, FailedPrecondition, InvalidArgument
from kvplane.base.groups import EvictionPolicy, SavePolicy, TierKind, TierSpec
from kvplane.base.sources import ModelSource
from kvplane.base.step import End
from kvplane.session.rows import FactRow, NewsRow, part_of
from kvplane.unary import calls
from kvplane.v1 import allocation_pb2 as pb
from kvplane_service.config import Config
from kvplane_service.config_loading import load
from kvplane_service.registry import Registration
from kvplane_service.rpc.sources import plan_source
from kvplane_service.store.registration import namespace_of
from tests.core.builders import full, replica_spec, window
from tests.plan.test_match_unit import both_sources, planned
from tests.service.rig import running

WINDOW_TAIL = EvictionPolicy.WINDOW_TAIL
SPEC = replica_spec(window(8), full())


@pytest.mark.parametrize("policy", EvictionPolicy)
def test_sources_and_specs_carry_the_policy(policy):
    for source in (*both_sources(eviction=policy), replace(SPEC, eviction=policy)):
        assert planned(source).spec.eviction is policy


def test_sources_and_specs_without_a_policy_have_lru_and_their_earlier_bytes():
    for source in (*both_sources(), SPEC):
        assert planned(source).spec.eviction is EvictionPolicy.LRU
        (message,) = wire.encode_source(source).values()
        assert "eviction" not in [field.name for field, _ in message.ListFields()]


def test_an_unknown_policy_is_refused_by_name():
    for source in (*both_sources(), SPEC):
        request = pb.RegisterReplicaRequest(replica="r", **wire.encode_source(source))
        kind = request.WhichOneof("source")
        getattr(request, kind).eviction = 9
        with pytest.raises(InvalidArgument, match=r"9 is not a value.*EVICTION_POLICY_HAZARD") as refused:
            plan_source(request)
        assert refused.value.field == f"{kind}.eviction"


def test_a_service_that_does_not_know_the_policy_is_refused_by_name():
    """It ignores the field and answers with the spec without it."""
    answer = pb.RegisterReplicaResponse(spec=wire.encode_spec(SPEC))
    calls.check_policy(SPEC, answer)
    with pytest.raises(FailedPrecondition, match="the service does not know the policy 'window_tail'") as refused:
        calls.check_policy(replace(SPEC, eviction=WINDOW_TAIL), answer)
    assert refused.value.field == "eviction"


def test_a_service_that_does_not_know_when_tiers_save_is_refused_by_name():
    host, disk = TierSpec(TierKind.HOST, 9), TierSpec(TierKind.DISK, 9)
    answer = pb.RegisterReplicaResponse(spec=wire.encode_spec(replace(SPEC, tiers=(host, disk))))
    calls.check_policy(replace(SPEC, tiers=(host, disk)), answer)
    with pytest.raises(FailedPrecondition, match="the service does not know the policy 'reuse'") as refused:
        calls.check_policy(replace(SPEC, tiers=(host, replace(disk, save=SavePolicy.REUSE))), answer)
    assert refused.value.field == "tiers[1].save"
    with pytest.raises(FailedPrecondition, match="does not know checkpoints") as refused:
        calls.check_policy(replace(SPEC, tiers=(replace(host, checkpoint_percent=15), disk)), answer)
    assert refused.value.field == "tiers[0].checkpoint_percent"
    with pytest.raises(FailedPrecondition) as refused:
        calls.check_policy(replace(SPEC, tiers=(host, replace(disk, retained_percent=15))), answer)
    assert refused.value.field == "tiers[1].retained_percent"


def test_a_registered_replica_has_its_policy_until_it_is_deregistered():
    with running() as service, connect(service.address) as client:
        source = ModelSource(model="gpt-oss-120b", num_blocks=4096, eviction=WINDOW_TAIL)
        assert client.register_replica("r", source).spec.eviction == wire.encode_spec(planned(source).spec).eviction
        with client.session("r") as session:
            assert session.spec.eviction is WINDOW_TAIL
        with pytest.raises(AlreadyExists, match=r"eviction EvictionPolicy.WINDOW_TAIL"):
            client.register_replica("r", replace(source, eviction=EvictionPolicy.LRU))


def test_a_source_without_a_policy_gets_the_configured_one_and_keeps_it():
    """Of the same name, a later registration without a policy agrees with any."""
    source = ModelSource(model="gpt-oss-120b", num_blocks=4096)
    with running(Config(listen="127.0.0.1:0", eviction="window_tail")) as service, connect(service.address) as client:
        for name, given, policy in (
            ("default", source, WINDOW_TAIL),
            ("named", replace(source, eviction=EvictionPolicy.LRU), EvictionPolicy.LRU),
            ("named", source, EvictionPolicy.LRU),
            ("spec", replace(SPEC, num_blocks=64), EvictionPolicy.LRU),
        ):
            answer = client.register_replica(name, given)
            assert wire.decode_spec(answer.spec).eviction is policy
            assert wire.decode_spec(client.describe_replica(name).spec).eviction is policy


def test_hints_are_announced_at_the_registration_and_refused_without():
    with running() as service, connect(service.address) as client:
        for values, source in enumerate((*both_sources(), replace(SPEC, num_blocks=64)), 1):
            given = replace(source, eviction=EvictionPolicy.HAZARD, hint_values=values)
            assert client.register_replica(f"r{values}", given).spec.hint_values == values
            with client.session(f"r{values}") as session:
                assert session.spec.hint_values == values
                session.apply(part_of(NewsRow(0, [1, 2, 3], hint=values - 1), NewsRow(1, [4])))
                session.apply(part_of(FactRow(0, end=End.FREE, hint=0)))
                with pytest.raises(InvalidArgument, match=f"hint_values {values}, found -1 to {values}") as refused:
                    session.apply(part_of(FactRow(1, hint=values), FactRow(1)))
                assert refused.value.field == "parts[0].facts.hint"
        with pytest.raises(InvalidArgument, match="must be 0 to 64") as refused:
            client.register_replica("more", replace(SPEC, hint_values=65))
        assert refused.value.field == "hint_values"
        with pytest.raises(AlreadyExists, match="hint_values"):
            client.register_replica("r1", replace(both_sources()[0], hint_values=2))


def test_the_configuration_takes_every_policy_and_no_other():
    for policy in EvictionPolicy:
        assert f"eviction: {policy.value}" in load({"eviction": policy.value}, {}, None).as_yaml()
    with pytest.raises(InvalidArgument, match="fifo") as refused:
        load({}, {"KVPLANE_EVICTION": "fifo"}, None)
    assert refused.value.field == "eviction"


def test_replicas_with_different_policies_share_stored_entries():
    """The policy decides when a key leaves, not what it names."""
    names = {
        namespace_of(Registration(replace(SPEC, eviction=policy, hint_values=hints), 1, b""))
        for policy in EvictionPolicy
        for hints in (0, 3)
    }
    assert len(names) == 1
