"""How long the service's threads keep the interpreter's lock at a time while they serve one long message.

    python -m tests.bench.slices     prints a table and writes tests/bench/results/slices.md

Meanwhile the event loop, and with it every other replica, waits. A thread does the work of one message, piece by piece,
while another one reads the first one's CPU time whenever it gets the lock, which it asks for all the time. The longest
difference of two readings is the longest slice, in CPU time. Other load of the machine can only lengthen it, where the
reading thread has no CPU, so the least of 15 repetitions counts.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

from kvplane.base.groups import ReplicaSpec
from kvplane.base.hashing import HashScheme
from kvplane.base.step import Admit, End, Facts, News, Part, Peek, Step
from kvplane.v1 import allocation_pb2 as pb
from kvplane.wire.parsing import parse_long
from kvplane.wire.result import encode_result
from kvplane.wire.step import encode_step
from kvplane_service.core.interface import ReplicaCore
from kvplane_service.replicas.host_state import new_replica
from kvplane_service.rpc import decode, session
from kvplane_service.rpc.lookups import _find_content
from kvplane_service.unary.hashing import hash_tokens
from tests.bench.machine import machine_line
from tests.bench.peer.models import MODELS

RESULT = Path(__file__).parent / "results" / "slices.md"
MILLION, HASHES, STEP_TOKENS, BLOCKS, REPEATS, SWITCH_S = 1_000_000, 62_000, 900_000, 70_000, 15, 1e-5
Pieces = dict[str, Callable[[], object]]


def longest_ms(work: Callable[[], object]) -> tuple[float, float]:
    """The longest slice of some work, and its CPU time."""
    begin, done = threading.Event(), list[int]()

    def run() -> None:
        begin.wait()
        work()
        done.append(time.thread_time_ns())

    thread = threading.Thread(target=run)
    thread.start()
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    before, longest = time.clock_gettime_ns(clock), 0
    start = before
    begin.set()
    while not done:
        now = time.clock_gettime_ns(clock)
        longest, before = max(longest, now - before), now
        time.sleep(0)
    thread.join()
    return max(longest, done[0] - before) / 1e6, (done[0] - start) / 1e6


def spec() -> ReplicaSpec:
    """One group of full attention, with room for the longest prompt."""
    return replace(MODELS[0].spec(BLOCKS), max_model_len=MILLION)


def looked_up(replica: ReplicaCore, content: pb.RequestContent) -> Pieces:
    """A look-up, as FindCacheHit answers it."""
    raw = pb.FindCacheHitRequest(replica="r", content=content).SerializeToString()
    scheme, made = HashScheme.of(replica.spec), dict[str, Any]()

    def parsed() -> None:
        made["request"] = parse_long(pb.FindCacheHitRequest, raw)

    def decoded() -> None:
        made["content"] = decode.decode_content(made["request"].content, scheme)

    def hashed() -> None:
        given = made["content"]
        if given.token_ids:
            made["hashes"] = hash_tokens(scheme, given.token_ids, given.extra_keys, None)

    def found() -> None:
        given, hashes = made["content"], made.get("hashes")
        if hashes is not None:
            joined = hashes.hashes
            given = replace(given, hashes=joined, num_hashes=len(joined) // scheme.digest.size, token_ids=())
        _find_content(replica, given, with_blocks=True)

    return {"parse": parsed, "decode": decoded, "hash": hashed, "look up and encode": found}


def stepped(replica: ReplicaCore, part: Part, seq: Iterator[int]) -> Pieces:
    """A step of a session."""
    made, size = dict[str, Any](), replica.digest_size
    more = (parse_long,) if len(signature(session._understand).parameters) > 2 else ()  # not at earlier commits

    def parsed() -> None:
        raw = pb.SessionRequest(step=encode_step(Step(1, next(seq), [part]))).SerializeToString()
        made["raw"] = raw

    def understood() -> None:
        made["message"] = session._understand(made["raw"], size, *more)

    def applied() -> None:
        made["result"] = replica.apply_concurrently(made["message"].step)

    def encoded() -> None:
        encode_result(made["result"]).SerializeToString()

    return {"": parsed, "parse and decode": understood, "hash and apply": applied, "encode": encoded}


def rows() -> Iterator[list[str]]:
    """The rows of the table."""
    replica, seq = new_replica(spec()), iter(range(1, MILLION))
    hashes = [os.urandom(32) for _ in range(HASHES)]
    cases: dict[str, Pieces] = {
        f"look-up of {HASHES:,} hashes": looked_up(replica, pb.RequestContent(num_tokens=16 * HASHES, hashes=hashes)),
        f"look-up of {MILLION:,} tokens": looked_up(replica, pb.RequestContent(token_ids=range(MILLION))),
    }
    tokens = array("I", range(STEP_TOKENS))
    admission = Part(news=News([0], [STEP_TOKENS], tokens=tokens), admit=Admit([0]))
    cases[f"step that admits {STEP_TOKENS:,} tokens"] = stepped(replica, admission, seq)
    peeks = stepped(replica, Part(peek=Peek([0] * 100)), seq)
    end = Part(facts=Facts([0], end=[End.FREE]))
    for name, pieces in cases.items():
        took: dict[str, list[tuple[float, float]]] = {piece: [] for piece in pieces}
        for _ in range(REPEATS):
            for piece, work in pieces.items():
                took[piece].append(longest_ms(work))
            if name.startswith("step"):
                replica.apply(Step(1, next(seq), [end]))
        yield from _shown(name, took)
    replica.apply(Step(1, next(seq), [admission]))
    took = {piece: [longest_ms(work) for _ in range(REPEATS)] for piece, work in peeks.items()}
    yield from _shown(f"step of 100 look-ups of {STEP_TOKENS:,} tokens", took)


def _shown(name: str, took: dict[str, list[tuple[float, float]]]) -> Iterator[list[str]]:
    for piece, each in took.items():
        if piece:
            longest, whole = map(min, zip(*each, strict=True))
            yield [name, piece, f"{longest:.2f}", f"{whole:.2f}"]


def main() -> None:
    """Measure, print and write the table."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    head = ["message", "piece", "longest slice, ms", "CPU of the piece, ms"]
    lines = [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows()]]
    sys.setswitchinterval(interval)
    text = f"{__doc__}\n{machine_line()}\n\n" + "\n".join(lines) + "\n"
    RESULT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
