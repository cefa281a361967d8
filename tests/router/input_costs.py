"""What each input of a router costs per byte of it, however it is made: CPU time, and memory at most.

    python -m tests.router.input_costs [SECONDS [SEED]]      60 seconds, seed 0: a table, exits 1 at a finding

Inputs are repetitions of short texts, in the places where a parser would look, and mutations of good ones; none of them
has to be well-formed. A finding is an input that costs more than its path allows, or an exception that its path does
not name. Time is CPU time of the thread; each finding is measured again, because other load inflates it.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPException
from pathlib import Path
from random import Random

import msgspec

from kvplane.base.errors import InvalidArgument
from kvplane_fleet import settings
from kvplane_fleet.fleet import Fleet
from kvplane_fleet.index import Index
from kvplane_fleet.places import Place
from kvplane_fleet.router import asking, prompts
from kvplane_fleet.router.prompts import Body, Prompts, read_body
from kvplane_fleet.settings import PlaceSettings
from tests.router.fleets import finished
from tests.router.fuzz import SEEDS, damaged

MOST_BYTES = 1 << 17
COUNT = b"NNNN"
FIXED_S, FIXED_BYTES = 0.004, 1 << 18
_FOLDER = Path(tempfile.gettempdir())


@dataclass(frozen=True)
class Input:
    """One way into the router.

    Attributes:
        take: parses an input.
        good: well-formed inputs.
        parts: what is repeated; heads, in which COUNT is the number of parts, and tails are around it.
        us_per_kb, bytes_per_byte: what an input may cost, above FIXED_S and FIXED_BYTES.
    """

    take: Callable[[bytes], object]
    good: Sequence[bytes]
    around: Sequence[tuple[bytes, bytes]]
    parts: Sequence[bytes]
    us_per_kb: float
    bytes_per_byte: float

    def drawn(self, rng: Random) -> bytes:
        """Another input."""
        if rng.random() < 0.3:
            return damaged(rng, rng.choice(self.good))[:MOST_BYTES]
        head, tail = rng.choice(self.around)
        parts = [rng.choice(self.parts) for _ in range(rng.randrange(1, 4))]
        part = b"".join(parts)
        times = (rng.choice([100, 1000, MOST_BYTES]) - len(head) - len(tail)) // len(part)
        text = head.replace(COUNT, (times * len(parts)).to_bytes(4, "big")) + part * times + tail
        return damaged(rng, text)[:MOST_BYTES] if rng.random() < 0.3 else text[:MOST_BYTES]

    def cost(self, text: bytes) -> tuple[float, int]:
        """CPU seconds, and bytes of memory at most, of taking an input."""
        began_s = time.thread_time()
        self.take(text)
        spent_s = time.thread_time() - began_s
        tracemalloc.start()
        self.take(text)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return spent_s, most

    def check(self, text: bytes) -> tuple[float, float]:
        """Return the microseconds per kB and the bytes per byte above the fixed cost. Raises AssertionError."""
        for attempt in range(3):
            spent_s, most = self.cost(text)
            per_kb = max(spent_s - FIXED_S, 0) * 1e6 / max(len(text) / 1024, 1)
            per_byte = max(most - FIXED_BYTES, 0) / max(len(text), 1)
            if per_kb <= self.us_per_kb and per_byte <= self.bytes_per_byte:
                return per_kb, per_byte
            assert attempt < 2, f"{per_kb:.0f} us per kB, {per_byte:.0f} bytes per byte: {text[:200]!r}"
        raise AssertionError


class _Taken:
    """What takes the inputs, once for all."""

    @cached_property
    def prompts(self) -> Prompts:
        """Makes prompts of bodies, of no place."""
        return Prompts(Fleet())

    def events(self, payload: bytes) -> None:
        """A payload of an engine."""
        finished(Place(PlaceSettings("a", events="inproc://x", adapters={"sql": "/p"}), Index()).applying(payload))

    def body(self, text: bytes) -> None:
        """The body of an end user's request."""
        body = read_body(text)
        if body is None:
            return
        for name in Body.__struct_fields__:
            body.value(name)
        _run(self.prompts.of_body("m", body, len(text), ()))

    def answer(self, text: bytes) -> None:
        """An engine's answer to /tokenize."""
        _run(_answered(text))

    def file(self, text: bytes) -> None:
        """An operator's file of places."""
        file = _FOLDER / "kvplane_input_costs.yaml"
        file.write_bytes(text)
        try:
            settings.load(file)
        except InvalidArgument:
            return


def _run(work: object) -> None:
    asyncio.run(work)  # type: ignore[arg-type]


async def _answered(text: bytes) -> None:
    reader = asyncio.StreamReader(limit=asking.MOST_HEAD_BYTES)
    reader.feed_data(text)
    reader.feed_eof()
    try:
        prompts._ANSWER.decode(await asking._answer(reader, MOST_BYTES))
    except (OSError, EOFError, asyncio.LimitOverrunError, HTTPException, *prompts._ERRORS):
        return


_TAKEN = _Taken()
_JSON = (b"{},", b"[],", b"1,", b'"a",', b"[[", b'{"a":', b"null,", b"\\u0041", b" ", b"1e9,", b"\xff", b"0.1,")
_HEAD, _CHUNKED = b"HTTP/1.1 200 OK\r\n", b"transfer-encoding: chunked\r\n\r\n"
_BATCH = b"\x93\xcb" + bytes(8)
INPUTS = {
    "ZMQ payload": Input(
        _TAKEN.events,
        [msgspec.msgpack.encode(one) for one in SEEDS],
        [(_BATCH + b"\xdd" + COUNT, b"\x00"), (_BATCH + b"\xdd\x00\x01\x00\x00", b"\x00"), (b"", b""),
         (_BATCH + b"\x91", b"")],
        [b"\x90", b"\x91", b"\x81\xa4type\xabBlockStored", b"\xc0", b"\xdd\x00\x00\xff\xff",
         b"\x91\xb0AllBlocksCleared", b"\x92\xacBlockRemoved\x91\x01", b"\x95\xabBlockStored\x91\x01\xc0\x90\x10",
         msgspec.msgpack.encode(SEEDS[0][1][0]), msgspec.msgpack.encode(SEEDS[0][1][1])],
        us_per_kb=1500, bytes_per_byte=40,
    ),
    "ext_proc body": Input(
        _TAKEN.body,
        [b'{"model":"m","prompt":[1,2,3]}',
         b'{"model":"m","messages":[{"role":"user","content":"a"}],"cache_salt":"s"}'],
        [(b'{"model":"m","prompt":[', b"1]}"), (b'{"messages":[', b"{}]}"), (b'{"x":[', b"1]}"),
         (b'{"cache_salt":"', b'"}'), (b'{"prompt":["', b'"]}'), (b'{"tools":', b"}"), (b"", b"")],
        _JSON, us_per_kb=300, bytes_per_byte=40,
    ),
    "/tokenize answer": Input(
        _TAKEN.answer,
        [_HEAD + b'content-length: 16\r\n\r\n{"tokens":[1,2]}', _HEAD + _CHUNKED + b"2\r\n{}\r\n0\r\n\r\n"],
        [(_HEAD + b'content-length: 131072\r\n\r\n{"tokens":[', b"1]}"), (_HEAD + _CHUNKED, b""),
         (_HEAD + b"\r\n", b""), (_HEAD, b"\r\n\r\n"), (b"", b"")],
        [*_JSON, b"1\r\nx\r\n", b"a: b\r\n", b"0000001\r\n\r\r\n", b"\r\n"],
        us_per_kb=1000, bytes_per_byte=60,
    ),
    "places.yaml": Input(
        _TAKEN.file,
        [b"places: [{name: a, events: 'tcp://h:1', model: m}]\nrouter: {policy: cost}\n"],
        [(b"places:\n", b"\n"), (b"places: [", b"]"), (b"", b""), (b"places:\n  - name: ", b"\n"), (b"a: &a ", b"\n")],
        [b"  - {name: a, events: 'tcp://h:1'}\n", b"[", b"{a: ", b"? ", b"- ", b"*a ", b"&a ", b"1",
         b"2024-01-01 ", b"'", b"!!map ", b"a: 1\n", b"\t", b"#", b"<<: *a\n"],
        us_per_kb=200_000, bytes_per_byte=4000,
    ),
}  # fmt: skip


def fuzz(name: str, seed: int, seconds: float, most: int = 1 << 30) -> tuple[int, float, float]:
    """Draw inputs of one path for a time; returns their number, and the most of both costs. Raises AssertionError."""
    rng, until, one = Random(seed), time.monotonic() + seconds, INPUTS[name]
    number, per_kb, per_byte = 0, 0.0, 0.0
    while time.monotonic() < until and number < most:
        found = one.check(one.drawn(rng))
        number, per_kb, per_byte = number + 1, max(per_kb, found[0]), max(per_byte, found[1])
    return number, per_kb, per_byte


def main(seconds: float, seed: int) -> None:
    """Fuzz all paths, and print the table."""
    print("| input | inputs | most us per kB | allowed | most bytes per byte | allowed |\n|---|---|---|---|---|---|")
    for name, one in INPUTS.items():
        number, per_kb, per_byte = fuzz(name, seed, seconds / len(INPUTS))
        print(f"| {name} | {number:,} | {per_kb:.0f} | {one.us_per_kb:g} | {per_byte:.0f} | {one.bytes_per_byte:g} |")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
