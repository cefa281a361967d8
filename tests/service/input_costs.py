"""What input costs that any client, an owner or a writer of a file can choose: CPU time and memory per byte of it.

    python -m tests.service.input_costs     prints the table; tests/service/test_input_costs.py holds its bounds

Each way in gets the dearest messages of its size that its format permits: as many as possible of each field that
repeats, alone and within the others, deep nesting, long numbers, and bytes that are nothing.
"""

from __future__ import annotations

import json
import re
import struct
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor

from kvplane.base.errors import KvplaneError
from kvplane.base.settings_file import parse_yaml
from kvplane.v1 import admin_pb2, allocation_pb2, plan_pb2
from kvplane.wire import parsing
from kvplane_plan.models.config_fields import MAX_LAYERS
from kvplane_service.config import Config
from kvplane_service.decisions.recording import MAGIC, Frames
from kvplane_service.store import record, registration
from kvplane_service.store.errors import RecordRefused
from kvplane_service.store.interface import LogName, StoredChunk
from kvplane_worker.tiers.kept import read_index
from tests.plan.test_planner_costs import config_of
from tests.service.rig import Service, running
from tests.service.test_session_socket import Raw

SIZE = 1 << 18  # of a message; the fields of those of more than 64 KiB are counted
PAGE_BYTES = 15 << 10
LOG = LogName("r", bytes(16), 1)


@dataclass(frozen=True, slots=True)
class Bound:
    """The most that a way in may cost: CPU time and memory per byte, and memory whatever the length."""

    ns_per_byte: float
    bytes_per_byte: float
    fixed_bytes: int = 24 << 20


# The bounds are several times what an idle machine measures.
BOUNDS = {
    "gRPC": Bound(10_000, 150),
    "session over gRPC": Bound(10_000, 150),
    "session socket": Bound(10_000, 150),
    "status page": Bound(20_000, 150),
    "config.json": Bound(50_000, 300),
    "settings (YAML)": Bound(500_000, 300),
    "recording": Bound(5_000, 150),
    "store row": Bound(5_000, 100),
    "tier index": Bound(500, 20),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A message for one way in."""

    path: str
    what: str
    num_bytes: int
    send: Callable[[], object]

    def measure(self) -> tuple[float, float]:
        """CPU time in ns per byte, and peak memory in bytes; a refusal is an outcome as well."""
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        before, began_ns = _memory("VmRSS"), time.process_time_ns()
        with suppress(KvplaneError, RecordRefused, grpc.RpcError, urllib.error.HTTPError, ValueError):
            self.send()
        took_ns = time.process_time_ns() - began_ns
        return took_ns / self.num_bytes, max(0, _memory("VmHWM") - before)


def _memory(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


# -- messages of protobuf


def _varint(number: int) -> bytes:
    return bytes([number]) if number < 0x80 else bytes([number & 0x7F | 0x80]) + _varint(number >> 7)


def _field(field: FieldDescriptor, body: bytes) -> bytes:
    return _varint(field.number << 3 | 2) + _varint(len(body)) + body


def repeated(kind: Any, size: int, depth: int = 4) -> Iterator[tuple[str, bytes]]:
    """The fields of a message that can be there many times, each filling `size` bytes, with the least elements."""
    for field in kind.fields:
        many = parsing._is_repeated(field)
        if field.message_type is not None and depth:
            for name, body in repeated(field.message_type, size, depth - 1):
                yield f"{field.name}.{name}", _field(field, body)
        if many and field.cpp_type in (FieldDescriptor.CPPTYPE_MESSAGE, FieldDescriptor.CPPTYPE_STRING):
            one = _field(field, b"")
            yield field.name, one * (size // len(one))
        elif many:
            yield field.name, _field(field, b"\1" * size)


def of_grpc(service: Service, size: int) -> Iterator[Case]:
    for file, name in ((allocation_pb2, "Allocation"), (admin_pb2, "Admin"), (plan_pb2, "Workers")):
        found = file.DESCRIPTOR.services_by_name[name]
        for method in found.methods:
            if method.client_streaming or method.server_streaming or method.name == "Drain":
                continue
            call: Any = service.channel.unary_unary(f"/{found.full_name}/{method.name}")
            replica = method.input_type.fields_by_name.get("replica")
            head = _field(replica, b"r") if replica is not None else b""
            messages = [(name, head + body) for name, body in repeated(method.input_type, size)]
            for what, raw in [*messages, ("bytes that are nothing", b"\xff" * size)]:
                yield Case("gRPC", f"{method.name}: {what}", len(raw), partial(call, raw, timeout=60))


def _steps(size: int) -> Iterator[tuple[str, bytes]]:
    yield from repeated(allocation_pb2.SessionRequest.DESCRIPTOR, size)
    yield "bytes that are nothing", b"\xff" * size


def of_sessions(service: Service, size: int) -> Iterator[Case]:
    for what, raw in _steps(size):

        def send(raw: bytes = raw) -> None:
            stream = service.open()
            stream.send_raw(raw)
            stream.receive()

        yield Case("session over gRPC", what, len(raw), send)


def of_socket(path: str, size: int) -> Iterator[Case]:
    for what, raw in _steps(size):

        def send(raw: bytes = raw) -> None:
            with Raw(path) as client:
                client.begin()
                client.open()
                client.receive()
                client.send(0x3, raw)
                client.receive()

        yield Case("session socket", what, len(raw), send)


# -- texts


def _nested(size: int) -> dict[str, str]:
    return {
        "deep lists": "[" * size,
        "closed lists": "[" * (size // 2) + "]" * (size // 2),
        "empty lists": "[" + "[]," * (size // 3) + "[]]",
        "keys": "{" + ",".join(f'"{number}":0' for number in range(size // 10)) + "}",
        "a long number": "9" * size,
        "numbers": "[" + "1," * (size // 2) + "1]",
    }


def of_page(address: str) -> Iterator[Case]:
    texts = {**_nested(PAGE_BYTES), "contents": '{"content":{"token_ids":[' + "1," * (PAGE_BYTES // 2 - 20) + "1]}}"}
    for what, text in texts.items():
        for name in ("Admin/Explain", "Allocation/DescribeReplica"):

            def send(name: str = name, text: str = text) -> None:
                url, headers = f"http://{address}/api/{name}", {"content-type": "application/json"}
                urllib.request.urlopen(urllib.request.Request(url, text.encode(), headers), timeout=60).read()

            yield Case("status page", f"{name}: {what}", len(text), send)


def of_config(service: Service, size: int) -> Iterator[Case]:
    texts = {**_nested(size), "formats": config_of(MAX_LAYERS, 1024, 1).config}
    texts["architectures"] = json.dumps({"architectures": ["LlamaForCausalLM"] * (size // 20)})
    for what, text in texts.items():
        source = {"config": text, "num_blocks": 100, "max_model_len": 1000}
        request = allocation_pb2.RegisterReplicaRequest(replica="other", model=source)
        yield Case("config.json", what, len(text), partial(service.allocation.RegisterReplica, request, timeout=60))


def of_settings(size: int) -> Iterator[Case]:
    aliases = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{chr(98 + at)}: &{chr(98 + at)} [{','.join(['*' + chr(97 + at)] * 9)}]\n" for at in range(9)
    )
    for what, text in {
        **_nested(size // 32),
        "aliases of aliases": aliases,
        "a tag": "!!python/object:os.system x",
    }.items():
        yield Case("settings (YAML)", what, max(len(text), 1000), partial(parse_yaml, text.encode()))


# -- files


def of_recordings(folder: Path, size: int) -> Iterator[Case]:
    for at, (what, raw) in enumerate(
        [*repeated(admin_pb2.RecordResponse.DESCRIPTOR, size), ("bytes that are nothing", b"\xff" * size)]
    ):
        path = folder / f"recording-{at}"
        path.write_bytes(MAGIC + struct.pack("<II", len(raw), zlib.crc32(raw)) + raw)
        yield Case("recording", what, len(raw), partial(list, Frames(path)))
    path = folder / "lengths"
    path.write_bytes(MAGIC + struct.pack("<II", 0xFFFFFFFF, 0) + bytes(size))
    yield Case("recording", "a length of 4 GiB", size, partial(list, Frames(path)))


def of_rows(size: int) -> Iterator[Case]:
    counts = {"domains": (0xFFFF, 0, 0, 0, 0), "runs": (1, 0xFFFFFFFF, 0, 0, 0), "rows": (0, 0, 0xFFFFFFFF, 0, 0)}
    for what, number in counts.items():
        body = struct.pack("<16sQQHHIIII", LOG.namespace, LOG.incarnation, 1, 32, *number) + bytes(size)
        chunk = StoredChunk(1, record.seal(record.CHUNK, body))
        yield Case("store row", f"chunk: {what}", size, partial(record.unpack_chunk, LOG, chunk))
    for what, text in _nested(size).items():
        raw = record.seal(record.REGISTRATION, text.encode())
        yield Case("store row", f"record: {what}", size, partial(registration.unpack_record, raw))
    for what, body in repeated(plan_pb2.RankPlan.DESCRIPTOR, size):
        content = json.dumps({"plans": [registration._text(body)], "spec": "", "num_ranks": 1, "namespace": ""})
        raw = record.seal(record.REGISTRATION, content.encode())
        yield Case("store row", f"record: plans.{what}", len(raw), partial(registration.unpack_record, raw))


def of_index(folder: Path, size: int) -> Iterator[Case]:
    for what, raw in {"zeroes": bytes(size), "a head": b"kvpindx1" + bytes(16) + b"\xff" * (size - 24)}.items():
        path = folder / f"index-{len(what)}"
        path.write_bytes(raw)
        yield Case("tier index", what, size, partial(read_index, path, bytes(16), size // 8))


def cases(folder: Path, size: int = SIZE) -> Generator[Case]:
    """All messages, of about this size, with a service that gets them."""
    socket = str(folder / "sessions")
    config = Config(listen="127.0.0.1:0", metrics_listen="127.0.0.1:0", session_socket=socket)
    with running(config) as service:
        service.register()
        yield from of_grpc(service, size)
        yield from of_sessions(service, size)
        yield from of_socket(socket, size)
        yield from of_page(service.app.metrics_address)
        yield from of_config(service, size)
    yield from of_settings(size)
    yield from of_recordings(folder, size)
    yield from of_rows(size)
    yield from of_index(folder, size)


def dearest(measured: list[tuple[Case, float, float]]) -> list[str]:
    """The lines of a table: by way in, the message with the most CPU time and that with the most memory per byte."""
    lines = ["| way in | messages | us of CPU per KiB | message | memory per byte | message |", "|---" * 6 + "|"]
    for path in dict.fromkeys(case.path for case, *_ in measured):
        of_path = [one for one in measured if one[0].path == path]
        slow, large = max(of_path, key=lambda one: one[1]), max(of_path, key=lambda one: one[2] / one[0].num_bytes)
        cells = [f"{slow[1] * 1.024:.0f}", slow[0].what, f"{large[2] / large[0].num_bytes:.0f}", large[0].what]
        lines.append(f"| {path} | {len(of_path)} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder, closing(cases(Path(folder))) as all_cases:
        sys.stdout.write("\n".join(dearest([(case, *case.measure()) for case in all_cases])) + "\n")


if __name__ == "__main__":
    main()
