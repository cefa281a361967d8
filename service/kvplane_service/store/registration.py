"""The stored record of a replica: its registration, its last owner and the name of its log.

The owner in a record is only a hint; the owner epochs in the stamp tables of the ranks decide which engine may write
the pages.
"""

from __future__ import annotations

import binascii
import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from kvplane import wire
from kvplane.base.errors import KvplaneError, Moved, Unavailable
from kvplane.base.groups import EvictionPolicy
from kvplane.base.stamps import MAX_EPOCH
from kvplane.v1 import plan_pb2, replica_pb2
from kvplane_service.registry import Registration, is_model_name
from kvplane_service.replicas.stamps import Contents
from kvplane_service.store.errors import RecordRefused, Refusal
from kvplane_service.store.interface import LogName
from kvplane_service.store.record import REGISTRATION, seal, unseal

_MAX_ADDRESS = 1024


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """The stored record of a replica.

    Attributes:
        epoch: number of the latest engine life (each begins when an engine takes over the page memory).
        incarnation: random number of the page-memory allocation whose log is stored; drawn by the service if the engine
            states none.
        owner: address of the service that wrote the record.
        written_ms: time of writing, in milliseconds since 1970.
        released: True if the owner has released the replica to other services.
        expired: True if the owner has released it because nothing used it: only a registration recovers it.
        disk_incarnation: number that identifies what the disk tiers hold that the log describes, 0 = unknown.
        process: random number of the process that wrote the record, because another process may reuse the address.
    """

    name: str
    registration: Registration
    epoch: int
    incarnation: int
    owner: str
    written_ms: int
    released: bool = False
    process: int = 0
    disk_incarnation: int = 0
    expired: bool = False

    @property
    def contents(self) -> Contents:
        """What the log describes."""
        return Contents(self.incarnation, self.disk_incarnation)

    @property
    def log(self) -> LogName:
        """Name of the log that has the entries of the replica."""
        return LogName(self.name, namespace_of(self.registration), self.incarnation)


def namespace_of(registration: Registration) -> bytes:
    """Return 16 bytes, a digest that differs between two registrations if neither can use the entries stored for the
    other.

    The eviction policy and the hints are left out: they decide when a key leaves, not which content a key names.
    """
    alike = replace(registration.spec, eviction=EvictionPolicy.LRU, hint_values=0)
    spec = wire.encode_spec(alike).SerializeToString(deterministic=True)
    digest = hashlib.blake2b(digest_size=16)
    for part in (registration.namespace_digest, registration.num_ranks.to_bytes(4, "little"), spec):
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.digest()


def pack_record(record: ReplicaRecord) -> bytes:
    """Serialize a record."""
    registration = record.registration
    content = {
        "name": record.name,
        "spec": _text(wire.encode_spec(registration.spec).SerializeToString()),
        "num_ranks": registration.num_ranks,
        "namespace": _text(registration.namespace_digest),
        "nonce": registration.nonce,
        "registered_by": registration.registered_by,
        "model_name": registration.model_name,
        "plans": [_text(wire.encode_plan(plan).SerializeToString()) for plan in registration.plans],
        "epoch": record.epoch,
        "incarnation": record.incarnation,
        "owner": record.owner,
        "written_ms": record.written_ms,
        "released": record.released,
        "process": record.process,
        "disk_incarnation": record.disk_incarnation,
        "expired": record.expired,
    }
    return seal(REGISTRATION, json.dumps(content, separators=(",", ":")).encode())


def unpack_record(raw: bytes) -> ReplicaRecord:
    """Parse a serialized record. Raises RecordRefused."""
    body = bytes(unseal(REGISTRATION, raw))
    try:
        content = json.loads(body)
        plans = [plan_pb2.RankPlan.FromString(_bytes(plan)) for plan in content["plans"]]
        registration = Registration(
            wire.decode_spec(replica_pb2.ReplicaSpec.FromString(_bytes(content["spec"]))),
            _number(content["num_ranks"], 1 << 32),
            _bytes(content["namespace"]),
            tuple(wire.decode_plan(plan) for plan in plans),
            str(content.get("registered_by", "")),  # records of earlier versions have no owner
            _number(content.get("nonce", 0), 1 << 64),
            name if is_model_name(name := str(content.get("model_name", ""))) else "",
        )
        return ReplicaRecord(
            str(content["name"]),
            registration,
            _number(content["epoch"], MAX_EPOCH + 1),
            _number(content["incarnation"], 1 << 64),
            _address(content["owner"]),
            _number(content["written_ms"], 1 << 64),
            bool(content.get("released", False)),
            _number(content.get("process", 0), 1 << 64),  # records of earlier versions have none
            _number(content.get("disk_incarnation", 0), 1 << 64),  # nor this
            bool(content.get("expired", False)),
        )
    except Exception as error:  # whatever a forged body raises ends here
        raise RecordRefused(Refusal.IMPOSSIBLE, f"{type(error).__name__}: {error}") from error


def _number(value: Any, below: int) -> int:  # noqa: ANN401 - what JSON holds
    if not isinstance(value, int) or not 0 <= value < below:
        raise ValueError(f"{value!r} is not an integer from 0 to {below - 1}")
    return value


def _address(value: Any) -> str:  # noqa: ANN401 - what JSON holds
    """Return an address that can be sent to clients as a header of gRPC."""
    if not isinstance(value, str) or len(value) > _MAX_ADDRESS or not (value.isascii() and value.isprintable()):
        raise ValueError(f"{str(value)[:100]!r} is not an address")
    return value


def _text(raw: bytes) -> str:
    return binascii.b2a_base64(raw, newline=False).decode("ascii")


def _bytes(text: str) -> bytes:
    return binascii.a2b_base64(text)


def elsewhere(record: ReplicaRecord) -> KvplaneError:
    """Return the error for calls of a replica that another service has adopted, and may have released again."""
    if not record.released:
        return moved(record.name, record.owner)
    what = f"the service at {record.owner} has had {record.name} meanwhile, and released it"
    return Unavailable(what, field="replica", remedy="try again")


def moved(name: str, address: str) -> Moved:
    """Return the error for clients that call this service about a replica that the service at this address owns."""
    return Moved(
        f"the service at {address} owns {name}",
        field="replica",
        remedy=f"call the service at {address}",
        metadata={"address": address},
    )
