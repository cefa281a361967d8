"""Conversion between the messages of routing.proto and the router's types."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvplane import wire
from kvplane.base.errors import InvalidArgument, KvplaneError
from kvplane.v1 import routing_pb2 as pb
from kvplane.wire.same import encode_same
from kvplane_fleet.decisions import Ask, Decision, Decisions, Scored
from kvplane_fleet.domains import keys_of
from kvplane_fleet.fleet import Followed, Prompt
from kvplane_fleet.policies import Policy
from kvplane_fleet.wire.events import KEY_BYTES, KEY_MASK, WHOLE_KEY_BYTES, GroupFormat
from kvplane_service.auth.gate import CALL

MAX_TOKENS = 10_000_000
MAX_CANDIDATES = 4096
_POLICY = "ROUTING_POLICY_"


def decode_ask(request: pb.ScoreRequest) -> Ask:
    """Return what is asked. Raises InvalidArgument that names the field, PermissionDenied for another's domain."""
    if len(request.candidates) > MAX_CANDIDATES:
        what = f"{len(request.candidates)} names"
        raise InvalidArgument(what, field="candidates", remedy=f"name at most {MAX_CANDIDATES} places")
    known = pb.RoutingPolicy.DESCRIPTOR.values_by_number.get(request.policy)
    if known is None:
        names = ", ".join(one.name for one in Policy)
        raise InvalidArgument(f"{request.policy} is no policy", field="policy", remedy=f"use one of {names}")
    return Ask(
        request.model,
        _prompt(request.prompt),
        frozenset(request.candidates) or None,
        Policy[known.name.removeprefix(_POLICY)] if request.policy else None,
        request.book,
        request.expected_output_tokens,
    )


def _prompt(message: pb.Prompt) -> Prompt:
    CALL.get().check_domain(message.domain, "prompt.domain")
    by_keys = bool(message.keys or message.num_tokens)
    if by_keys == bool(message.token_ids):
        what = "both tokens and keys are given" if by_keys else "it is empty"
        raise InvalidArgument(what, field="prompt", remedy="send token_ids, or keys with num_tokens")
    if max(len(message.token_ids), message.num_tokens) > MAX_TOKENS:
        raise InvalidArgument("it is too long", field="prompt", remedy=f"send at most {MAX_TOKENS} tokens")
    if not by_keys:
        return Prompt(message.token_ids, wire.decode_extra_keys(message.extra_keys), message.domain)
    width = message.key_bytes or KEY_BYTES
    if width not in (KEY_BYTES, WHOLE_KEY_BYTES):
        raise InvalidArgument(f"{width} bytes per key", field="prompt.key_bytes", remedy="send 8 or 16 bytes per key")
    if len(message.keys) % width:
        what = f"{len(message.keys)} bytes are no whole number of keys"
        raise InvalidArgument(what, field="prompt.keys", remedy=f"send {width} bytes per key")
    keys = keys_of(message.keys, width, width)
    return Prompt((), domain=message.domain, keys=keys, num_keyed=message.num_tokens, key_bytes=width)


def pack_keys(keys: Sequence[int], key_bytes: int) -> bytes:
    """Return keys as in the messages."""
    words = [key & KEY_MASK for key in keys]
    if key_bytes == WHOLE_KEY_BYTES:
        words = [word for key, low in zip(keys, words, strict=True) for word in (key >> 64, low)]
    return np.array(words, ">u8").tobytes()


def encode_decision(decision: Decision, decisions: Decisions, most: int) -> pb.ScoreResponse:
    """Return the answer; `most` places of it, 0 = all."""
    followed = decisions.followed
    places = [_place_score(one, followed[one.claim.place]) for one in decision.places[: most or None]]
    return pb.ScoreResponse(decision_id=decision.name, places=places, reason=_reason(decision))


def _place_score(scored: Scored, followed: Followed) -> pb.PlaceScore:
    claim, cost = scored.claim, scored.option.cost
    groups = []
    if claim.claim is not None:
        numbers, formats = followed.place.layout().groups, followed.place.formats
        limits = set(claim.claim.limits)
        groups = [
            pb.PlaceGroupHit(group=number, kind=formats[number].kind, tokens_alone=max(alone, 0), limits=at in limits)
            for at, (number, alone) in enumerate(zip(numbers, claim.claim.alone, strict=True))
        ]
    return pb.PlaceScore(
        place=claim.place,
        endpoint=followed.place.settings.endpoint,
        hit_tokens=claim.tokens,
        expected_tokens=claim.expected,
        groups=groups,
        inexact=claim.inexact,
        host_tokens=claim.host,
        disk_tokens=claim.disk,
        peer_tokens=claim.peers,
        peer=claim.peer,
        cost=encode_same(cost, pb.PlaceCost, "cost", total_s=cost.total_s),
        in_flight=scored.option.in_flight,
    )


def _reason(decision: Decision) -> str:
    first, policy = decision.places[0], decision.policy.value
    chosen = f"{first.claim.place} by policy {policy}: {first.claim.expected} tokens cached"
    if len(decision.places) == 1:
        return f"{chosen}; it is the only candidate"
    if first.claim.peer:
        chosen += f", {first.claim.peers} more loaded from peers such as {first.claim.peer}"
    cost, others = first.option.cost, decision.places[1:]
    longest = max(others, key=lambda one: one.claim.expected)
    text = f"{chosen}, cost {cost.total_s:.3f} s (queue {cost.queue_s:.3f}, memory {cost.memory_s:.3f}, "
    text += f"load {cost.load_s:.3f}, miss {cost.miss_s:.3f})"
    if longest.claim.expected > first.claim.expected:
        other = longest.option.cost
        text += (
            f"; {longest.claim.place} has {longest.claim.expected} cached, and costs {other.total_s:.3f} s "
            f"(queue {other.queue_s:.3f}, memory {other.memory_s:.3f}, displacement {other.displacement_s:.3f}, "
            f"delay of others {other.delay_s:.3f})"
        )
    return text


def encode_place(name: str, followed: Followed, decisions: Decisions) -> pb.PlaceInfo:
    """Return what is known of a place."""
    place, work = followed.place, decisions.work_of(name)
    return pb.PlaceInfo(
        place=name,
        endpoint=place.settings.endpoint,
        model=place.settings.model,
        other_models=[*place.settings.aliases, *place.settings.adapters],
        state=followed.state,
        batches=place.batches,
        events=place.events,
        entries=place.entries,
        groups=[encode_group(number, form) for number, form in sorted(place.formats.items())],
        hashes=str(place.domain or ""),
        faults={fault.value: times for fault, times in place.faults.counts.items()},
        in_flight=work.in_flight,
        prefill_tokens_per_s=work.costs.prefill_tokens_per_s,
        samples=work.costs.samples,
        claimed_tokens=work.truth.claimed,
        real_tokens=work.truth.real,
    )


def encode_group(number: int, form: GroupFormat) -> pb.PlaceGroup:
    """Return what events state of a group."""
    return pb.PlaceGroup(group=number, kind=form.kind, block_size=form.block_size, window=form.window)


def encode_error(error: KvplaneError) -> pb.RoutingError:
    """Return the refusal of one request of a stream."""
    return pb.RoutingError(reason=error.reason, message=error.message, field=error.field, remedy=error.remedy)
