"""Seeds and mutations of programs: change fields of messages, add and remove operations."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from kvplane.v1 import admin_pb2, allocation_pb2, events_pb2, plan_pb2
from kvplane.v1 import allocation_pb2 as pb
from tests.fuzz import worker
from tests.fuzz.world import HEADER, MAX_OPERATIONS, METHODS, ON_STATES, SESSION, TOKEN, WORKER, decode, encode
from tests.service.mutations import VALUES, fields_of, is_list
from tests.service.test_fuzz import OPEN, PROMPT, STEP, STEP_ON_STATES, STEP_ONE, VALID, VALID_ON_STATES
from tests.worker import test_fuzz as of_worker

Operation = tuple[int, bytes]
Bend = Callable[[bytes], bytes]  # other bytes of about the same kind

_SERVICES = {
    service.full_name: service
    for file in (admin_pb2, allocation_pb2, events_pb2, plan_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
}
_MORE: dict[str, list[Message]] = {
    "Explain": [
        admin_pb2.ExplainRequest(replica="r", content={"token_ids": PROMPT}),
        admin_pb2.ExplainRequest(replica="r", request_id="b"),
    ],
    "ListRequests": [admin_pb2.ListRequestsRequest(replica="r", limit=1)],
    "Record": [admin_pb2.RecordRequest(replica="r"), admin_pb2.RecordRequest(replica="r", from_now=True)],
    "Retain": [allocation_pb2.RetainRequest(header={"replica": "r"}, content={"token_ids": PROMPT}, ttl_ms=9)],
    "Prefetch": [allocation_pb2.PrefetchRequest(header={"replica": "r"}, content={"token_ids": PROMPT}, within_ms=9)],
    "Status": [admin_pb2.StatusRequest()],
    "DeregisterWorker": [plan_pb2.DeregisterWorkerRequest(replica="r", worker_id=5)],
}
_WORKER = {"rank": 0, "worker_id": 5, "address": "unix:/nowhere/x", "pid": 1, "device": "cpu"}
_WORKER_S_LIFE: dict[str, Message] = {  # on a replica whose memory is planned
    "RegisterReplica": VALID["RegisterReplica"][1],
    "RegisterWorker": plan_pb2.RegisterWorkerRequest(replica="s", worker=_WORKER),
    "RenewWorker": plan_pb2.RenewWorkerRequest(replica="s", worker=_WORKER),
}
_HEADERS = (f"Bearer {TOKEN}", "Bearer a.b.c", "Basic x", "bearer ", "Bearer token-acme ", "")


def seeds() -> Iterator[bytes]:
    """Programs that are answered, for each method and for sessions."""
    for table, start in ((VALID | _MORE, []), (VALID_ON_STATES, [(ON_STATES, b"")])):
        for name, requests in table.items():
            kind = _kind_of(name)
            for request in requests:
                raw = request.SerializeToString()
                yield encode([*start, (kind, raw)])
                yield encode([*start, (kind, raw), (kind, raw.replace(b"\x01r", b"\x01v"))])
    for first, step in (((0, b""), STEP), ((ON_STATES, b""), STEP_ON_STATES)):
        messages = [(SESSION, message.SerializeToString()) for message in (OPEN, STEP_ONE, step)]
        yield encode([first, *messages] if first[0] == ON_STATES else messages)
        close = pb.SessionRequest(close={}).SerializeToString()
        yield encode([*messages, (SESSION, close), (SESSION, OPEN.SerializeToString())])
    yield encode([(_kind_of(name), request.SerializeToString()) for name, request in _WORKER_S_LIFE.items()])
    yield encode([(HEADER, header.encode()) for header in _HEADERS])
    on_worker = [
        (WORKER + worker.METHODS.index(name), request.SerializeToString())
        for name, requests in of_worker.VALID.items()
        for request in requests
    ]
    yield from (encode([operation]) for operation in on_worker)
    yield encode(on_worker)


def _kind_of(name: str) -> int:
    return next(at for at, method in enumerate(METHODS) if method.endswith(f"/{name}"))


def mutate(data: bytes, max_size: int, seed: int, bend: Bend) -> bytes:
    """Another program, from one to three changes; `bend` is the fuzzer's own way to change bytes."""
    chance = random.Random(seed)
    operations = decode(data)
    for _ in range(chance.randint(1, 3)):
        if not operations or chance.random() < 0.15:
            _rearrange(chance, operations)
        at = chance.randrange(len(operations))
        kind, raw = operations[at]
        operations[at] = (kind, _mutated(chance, kind, raw, bend)[:0xFFFF])
    made = encode(operations)
    return made if len(made) <= max_size else data[:max_size]


def _rearrange(chance: random.Random, operations: list[Operation]) -> None:
    """Add, duplicate, move or remove an operation; at least one is left."""
    choice = chance.randrange(4) if operations else 0
    if choice == 0 or len(operations) >= MAX_OPERATIONS:
        operations[:] = operations[: MAX_OPERATIONS - 3]
        operations += decode(chance.choice(_ALL))
    elif choice == 1:
        operations.append(chance.choice(operations))
    elif choice == 2:
        chance.shuffle(operations)
    elif len(operations) > 1:
        operations.pop(chance.randrange(len(operations)))


def _mutated(chance: random.Random, kind: int, raw: bytes, bend: Bend) -> bytes:
    if kind in (HEADER, ON_STATES) or chance.random() < 0.2:
        return bend(raw)
    message = _request_of(kind)
    try:
        message.ParseFromString(raw)
    except DecodeError:
        return bend(raw)
    places = fields_of(message)
    if not places:
        return bend(raw)
    owner, field = chance.choice(places)
    _change(chance, owner, field, bend)
    return message.SerializeToString()


def _request_of(kind: int) -> Message:
    if kind >= WORKER:
        return worker.request_of(worker.METHODS[kind - WORKER])
    if kind == SESSION:
        return pb.SessionRequest()
    service, _, name = METHODS[kind].rpartition("/")
    return GetMessageClass(_SERVICES[service].methods_by_name[name].input_type)()


def _change(chance: random.Random, owner: Message, field: Any, bend: Bend) -> None:
    value = getattr(owner, field.name)
    if is_list(value):
        _change_list(chance, value, field, bend)
    elif field.message_type is not None:
        if owner.HasField(field.name):
            owner.ClearField(field.name)
        else:
            value.SetInParent()
    elif chance.random() < 0.2:
        owner.ClearField(field.name)
    else:
        setattr(owner, field.name, _value(chance, field, value, bend))


def _change_list(chance: random.Random, values: Any, field: FieldDescriptor, bend: Bend) -> None:
    index = chance.randrange(max(1, len(values)))
    choice = chance.randrange(4)
    if choice == 0 and len(values):
        del values[index]
    elif choice == 1 and len(values):
        values.extend([values[index]] * chance.choice([1, 2, 50]))
    elif field.message_type is not None:
        values.add()
    elif choice == 2 and len(values):
        values[index] = _value(chance, field, values[index], bend)
    else:
        values.append(_value(chance, field, values[0] if len(values) else None, bend))


def _value(chance: random.Random, field: FieldDescriptor, old: Any, bend: Bend) -> Any:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _column(chance, old or b"", bend)
    return chance.choice(VALUES[field.type])


def _column(chance: random.Random, old: bytes, bend: Bend) -> bytes:
    """A column with another entry, one more or one less; or bytes that are not a column."""
    choice = chance.randrange(5)
    if choice == 0:
        return bend(old)
    size = chance.choice([4, 4, 8])
    entry = (chance.choice(VALUES[FieldDescriptor.TYPE_SINT32]) & (256**size - 1)).to_bytes(size, "little")
    at = chance.randrange(len(old) // size + 1) * size
    if choice == 1:
        return old[:-size]
    return old[:at] + entry + old[at + (size if choice < 4 else 0) :]


_ALL = list(seeds())
