"""Replays operation traces recorded from vLLM 0.33.0 and compares every recorded output.

    python -m tests.conformance.replay FILE...

Each recorded call into the reference's manager becomes a part of a step; `step` records close one and open the next.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from kvplane.base.groups import GroupKind, ReplicaSpec
from kvplane.base.step import (
    NO_EXTRA_KEYS,
    UNLIMITED,
    Admit,
    AdmitStatus,
    Cache,
    CacheEvent,
    End,
    EventKind,
    ExtraKeys,
    Facts,
    Multimodal,
    News,
    OnRefusal,
    Part,
    PartResult,
    Peek,
    RowFlag,
    Run,
    Watermark,
)
from tests.conformance.divergence import Divergence
from tests.conformance.forms import BadRecording, Record, refusals_named
from tests.conformance.header import read_records, trace_spec
from tests.conformance.operations import OPERATIONS, check_operation
from tests.conformance.paths import InProcessPath, Path, PathPart, Seen


@dataclass
class Request:
    """A request's state in the driver of a trace."""

    slot: int
    tokens: list[int]
    prompt: int
    extra: ExtraKeys
    computed: int = 0  # as the replica counts


@dataclass
class Outcome:
    """The outputs of one operation, in the terms of the recording."""

    result: PartResult
    outputs: Record = field(default_factory=dict)


@dataclass
class Pending:
    """An operation that is sent: its parts, and how to read their results."""

    number: int
    op: Record
    parts: list[PathPart]
    read: Callable[[list[PartResult]], Outcome]
    owners: dict[int, Request]  # by slot, when the operation was made


class Replayer:
    """Drives one replica through one trace.

    The driver that recorded a trace decided by the answers of look-ups and allocations; all operations up to the next
    of these go to the path together.
    """

    ANSWERS_NEEDED = frozenset({"lookup", "alloc", "snapshot", "end"})

    def __init__(self, header: Record, make_path: Callable[[ReplicaSpec], Path] = InProcessPath) -> None:
        self.spec = trace_spec(header)
        self.path = make_path(self.spec)
        self.requests: dict[str, Request] = {}
        self._slots: dict[int, Request] = {}
        self._queue: list[Pending] = []
        self._held: dict[str, int] = {}
        self._free_slots: list[int] = []
        self._next_slot = 0
        self._copies: list[tuple[int, int, int]] = []
        self._zero: list[tuple[int, int]] = []
        self._events = EventWriter(self.spec)
        self.values = self.operations = 0
        self._ops: dict[str, Callable[[Record], Sent]] = {
            "step": self._step, "new": self._new, "lookup": self._lookup, "alloc": self._alloc, "tok": self._tok,
            "cache": self._cache, "free": self._free, "preempt": self._preempt, "hold": self._hold,
            "release": self._release, "evict": self._evict, "reset": self._reset, "snapshot": self._snapshot,
        }  # fmt: skip

    def replay(self, number: int, op: Record) -> None:
        """Take one operation; send and compare when its answer is needed. Raises Divergence."""
        check_operation(op, f"line {number}", self.requests, self._held)
        if op["op"] != "end":
            parts, read = self._ops[op["op"]](op)
            self._queue.append(Pending(number, op, parts, read, dict(self._slots)))
            self.operations += 1
        if op["op"] in self.ANSWERS_NEEDED:
            self._flush()

    @property
    def messages(self) -> int:
        """Messages that carried the operations; in process, parts."""
        return self.path.messages

    def close(self) -> None:
        """Release the path."""
        self.path.close()

    def _flush(self) -> None:
        queue, self._queue = self._queue, []
        results = self.path.send([part for pending in queue for part in pending.parts])
        for pending in queue:
            count = len(pending.parts)
            mine, results = results[:count], results[count:]
            self._compare(pending, mine)

    def _compare(self, pending: Pending, results: list[PartResult]) -> None:
        outputs = self._outputs(pending, results)
        self.values += sum(name in pending.op or bool(value) for name, value in outputs.items())
        name = first_difference(pending.op, outputs)
        if name is not None:
            raise Divergence(pending.number, pending.op, name, pending.op.get(name), outputs.get(name))

    def _outputs(self, pending: Pending, results: list[PartResult]) -> Record:
        for result in results[:1] if pending.op["op"] == "step" else results:
            orders = result.orders
            self._copies.extend(zip(orders.copy_group, orders.copy_src, orders.copy_dst, strict=True))
            self._zero.extend(zip(orders.zero_group, orders.zero_block, strict=True))
        outcome = pending.read(results)
        events = [self._event(event, pending.owners) for part in results for event in part.events]
        return outcome.outputs | {"free": outcome.result.free_blocks, "ev": events}

    def _event(self, event: CacheEvent, owners: dict[int, Request]) -> list[Any]:
        owner = owners.get(event.slot)
        return self._events.write(event, owner.tokens if owner else [], owner.extra if owner else NO_EXTRA_KEYS)

    # -- operations: the parts that express them, and how to read the answer -------------------------------------------

    def _step(self, op: Record) -> Sent:
        del op

        def read(results: list[PartResult]) -> Outcome:
            copies = [[src, dst] for _, src, dst in sorted(self._copies, key=lambda one: one[0])]
            outputs: Record = {"copies": copies, "retained": [block for pair in copies for block in pair]}
            outputs["zero"] = [block for _, block in sorted(self._zero, key=lambda one: one[0])]
            self._copies.clear()
            self._zero.clear()
            return Outcome(results[-1], outputs)

        return [PathPart(Part(), last=True), PathPart(Part())], read

    def _new(self, op: Record) -> Sent:
        tokens = segment_tokens(op["segs"])
        items = tuple(Multimodal(*item) for item in op["mm"] or ())
        lora = (op["lora"], f"/l/{op['lora']}") if op["lora"] else None
        extra = ExtraKeys(lora, op["salt"] or "", items)
        slot = self._free_slots.pop() if self._free_slots else self._next_slot
        self._next_slot = max(self._next_slot, slot + 1)
        self.requests[op["id"]] = self._slots[slot] = Request(slot, tokens, len(tokens), extra)
        news = News([slot], [len(tokens)], list(tokens), request_id=[op["id"]])
        news.extra_keys = [] if extra == NO_EXTRA_KEYS else [extra]
        news.skip_reading = [int(op.get("skip", False))]
        count = len(tokens)
        return _one(Part(news=news, with_hashes=True), lambda result: Outcome(result, {"n": count} | _hashes(result)))

    def _lookup(self, op: Record) -> Sent:
        request = self.requests[op["id"]]

        def read(result: PartResult) -> Outcome:
            blocks = result.peek_blocks.by_row().get(0, {})
            rows = [blocks.get(group, []) for group in range(len(self.spec.groups))]
            return Outcome(result, {"hit": result.peek_hit[0], "bnd": result.peek_single_group_hit[0], "blk": rows})

        return _one(Part(peek=Peek([request.slot], with_blocks=True)), read)

    def _alloc(self, op: Record) -> Sent:
        request = self.requests[op["id"]]
        part = Part(admit=self._admission(op, request)) if op.get("use_hit") else self._running(op, request)
        part.with_tables = True

        def read(result: PartResult) -> Outcome:
            ok = result.admit_status == [AdmitStatus.GRANTED] if op.get("use_hit") else result.granted == [op["new"]]
            new, tables = result.new_blocks.by_row().get(0, {}), result.tables.by_row().get(0, {})
            groups = range(len(self.spec.groups))
            outputs: Record = {"ok": ok, "tbl": [tables.get(group, []) for group in groups]}
            if ok:
                outputs["nb"] = [new.get(group, []) for group in groups]
                hit = op["hit"] if op.get("use_hit") else 0
                request.computed = op["comp"] + hit + op.get("ext", 0) + op["new"]
            return Outcome(result, outputs)

        return _one(part, read)

    def _admission(self, op: Record, request: Request) -> Admit:
        flags = RowFlag.FULL_FIT * bool(op.get("full"))
        known = len(request.tokens)
        return Admit(
            slot=[request.slot],
            extra=[op["new"] + op["hit"] + op.get("ext", 0) - known],
            cap=[UNLIMITED],
            lookahead=[op.get("look", 0)],
            external=[op.get("ext", 0)],
            encoder_tokens=[op.get("enc", 0)],
            expected_hit=[op["hit"]],
            reserved=[op.get("reserved", 0)],
            watermark=[Watermark.ALWAYS if op.get("has_sched", True) else Watermark.NEVER],
            flags=[_flags(op) | int(flags)],
        )

    def _running(self, op: Record, request: Request) -> Part:
        """A run row. It states the computed tokens only after rejected drafts, to cover the fast path too."""
        run = Run(
            slot=[request.slot],
            extra=[op["comp"] + op["new"] - len(request.tokens)],
            lookahead=[op.get("look", 0)],
            in_flight=[op.get("infl", 0)],
            flags=[_flags(op)],
            on_refusal=OnRefusal.STOP,
        )
        if op["comp"] == request.computed:
            return Part(run=run)
        return Part(facts=Facts(slot=[request.slot], computed=[op["comp"]]), run=run)

    def _tok(self, op: Record) -> Sent:
        request = self.requests[op["id"]]
        request.tokens.extend(op["t"])
        facts = Facts(slot=[request.slot], appended=[len(op["t"])], tokens=list(op["t"]))
        part = Part(facts=facts, with_hashes=True)
        return _one(part, lambda result: Outcome(result, _hashes(result)))

    def _cache(self, op: Record) -> Sent:
        """Rejected drafts show in the next `comp`: here they cannot be distinguished from tokens in flight."""
        return _one(Part(facts=Facts(slot=[self.requests[op["id"]].slot], commit=[op["n"]])), Outcome)

    def _free(self, op: Record) -> Sent:
        slot = self.requests.pop(op["id"]).slot
        self._free_slots.append(slot)
        return _one(Part(facts=Facts(slot=[slot], end=[End.FREE])), Outcome)

    def _preempt(self, op: Record) -> Sent:
        request = self.requests[op["id"]]
        request.computed = 0
        return _one(Part(facts=Facts(slot=[request.slot], end=[End.PREEMPTED])), Outcome)

    def _hold(self, op: Record) -> Sent:
        slot = self._held[op["id"]] = self.requests.pop(op["id"]).slot
        return _one(Part(facts=Facts(slot=[slot], end=[End.HELD])), Outcome)

    def _release(self, op: Record) -> Sent:
        slot = self._held.pop(op["id"])
        self._free_slots.append(slot)
        return _one(Part(cache=Cache(released=[slot])), Outcome)

    def _evict(self, op: Record) -> Sent:
        return _one(Part(cache=Cache(evicted=list(op["ids"]))), Outcome)

    def _reset(self, op: Record) -> Sent:
        del op
        return _one(Part(cache=Cache(reset=True)), lambda result: Outcome(result, {"ok": result.reset_done}))

    def _snapshot(self, op: Record) -> Sent:
        return _one(Part(), lambda result: self._seen(op, result, self.path.snapshot()))

    def _seen(self, op: Record, result: PartResult, seen: Seen) -> Outcome:
        outputs: Record = {
            "freeq": seen.free_blocks if len(seen.free_blocks) <= 400 else None,
            "freeq_crc": zlib.crc32(json.dumps(seen.free_blocks).encode()),
            "cached_hashes": seen.distinct_keys,
            "cached": seen.keyed_blocks if self.spec.num_blocks <= 400 else None,
            "usage": round(seen.usage, 9),
        }
        return Outcome(result, {name: value for name, value in outputs.items() if name in op or value is not None})


Sent = tuple[list[PathPart], Callable[[list[PartResult]], Outcome]]


def _one(part: Part, read: Callable[[PartResult], Outcome]) -> Sent:
    return [PathPart(part)], lambda results: read(results[0])


def _flags(op: Record) -> int:
    """Bits of a row whose amount is recorded, whatever states need."""
    return int(RowFlag.UNALIGNED | RowFlag.DELAY_CACHING * bool(op.get("delay")))


def _hashes(result: PartResult) -> Record:
    last = result.last_hash[0]
    return {"nh": result.num_hashes[0], "lasth": last[-8:].hex() if last else None}


def first_difference(op: Record, outputs: Record) -> str | None:
    """The first output by name that differs from the recording; an absent output equals an empty one."""
    for name in sorted(OPERATIONS[op["op"]].all_outputs):
        if (name in op or outputs.get(name)) and op.get(name) != outputs.get(name):
            return name
    return None


class EventWriter:
    """Writes cache events in the terms of the recordings."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._groups = spec.groups
        self._lookahead = spec.hash_lookahead_tokens

    def write(self, event: CacheEvent, tokens: Sequence[int], extra: ExtraKeys) -> list[Any]:
        """The event of a request with these tokens and keys."""
        if event.kind is EventKind.CLEARED:
            return ["C"]
        hashes = [digest[-8:].hex() for digest in event.hashes]
        if event.kind is EventKind.REMOVED:
            return ["R", event.group, hashes]
        span = list(tokens[event.start : event.end])
        group = self._groups[event.group]
        covered = event.block_size + self._lookahead
        keys = [event_keys(extra, start, start + covered) for start in event.block_starts]
        # The reference counts R-SWA as full attention: its window bounds memory, not what is cached.
        retained = group.kind is GroupKind.R_SWA
        kind, window = (GroupKind.FULL_ATTENTION, 0) if retained else (group.kind, group.window)
        return [
            "S", event.group, event.block_size, event.parent[-8:].hex() if event.parent else None, hashes, len(span),
            zlib.crc32(json.dumps(span).encode()), keys if any(keys) else None, kind.value, window or None, "GPU",
        ]  # fmt: skip


def event_keys(extra: ExtraKeys, start: int, end: int) -> list[Any] | None:
    """Extra keys of a block as events carry them: without tags."""
    keys: list[Any] = [extra.lora[0]] if extra.lora else []
    for item in extra.multimodal:
        if item.offset < end and item.offset + item.length > start:
            keys.append([item.identifier, item.offset - start])
    if extra.salt and start == 0:
        keys.append(extra.salt)
    return keys or None


def segment_tokens(segments: Sequence[Sequence[int]]) -> list[int]:
    """Token ids of a prompt given as [seed, length] segments."""
    return [(seed * 1000003 + i * 7919) % 50021 for seed, length in segments for i in range(length)]


def replay_file(path: FilePath, make: Callable[[Record], Replayer] = Replayer) -> Replayer:
    """Replay one file and release its path; raises Divergence or BadRecording."""
    records = read_records(path)
    header = next(records, None)
    if header is None:
        raise BadRecording("empty file")
    with refusals_named("header"):
        replayer = make(header)
    with closing(replayer):
        _replay_records(replayer, records)
    return replayer


def _replay_records(replayer: Replayer, records: Iterator[Record]) -> None:
    number, record = 1, Record()
    for number, record in enumerate(records, 2):
        with refusals_named(f"line {number}"):
            replayer.replay(number, record)
        if record["op"] == "end":
            break
    if record.get("op") != "end":
        raise BadRecording(f"line {number}: the file ends before its `end` record")
    if next(records, None) is not None:
        raise BadRecording(f"line {number + 1}: there is more behind the `end` record")


def replay_all(paths: Sequence[FilePath], make: Callable[[Record], Replayer], in_messages: bool) -> int:
    """Replay the files and print a line each, and the mean of operations in a message, if any; how many differ."""
    failed = operations = messages = 0
    for path in paths:
        try:
            done = replay_file(path, make)
            carried = done.messages if in_messages else 0
            operations, messages = operations + done.operations, messages + carried
            print(f"same   {path.name}: {done.values} values{_mean(', ', done.operations, carried)}")
        except (Divergence, BadRecording) as error:
            failed += 1
            print(f"{'DIFFER' if isinstance(error, Divergence) else 'REFUSED'} {path.name}: {error}")
    print(f"{len(paths) - failed} identical, {failed} not{_mean('; ', operations, messages)}")
    return failed


def _mean(before: str, operations: int, messages: int) -> str:
    return f"{before}{operations / messages:.2f} operations per message" if messages else ""


def main(arguments: Sequence[str]) -> int:
    """Replay the files on the chosen path; 0 when all are identical."""
    parser = argparse.ArgumentParser(prog="tests.conformance.replay", description=__doc__)
    parser.add_argument("files", nargs="+", type=FilePath)
    parser.add_argument("--rpc", choices=["unary", "session"], help="over gRPC, to a service of its own")
    options = parser.parse_args(arguments)
    if options.rpc is None:
        return 1 if replay_all(options.files, Replayer, in_messages=False) else 0
    from kvplane.blocking.client import connect
    from kvplane_tools.cli.child import ServiceChild
    from tests.conformance.rpc import make_replayer

    with ServiceChild() as service, connect(service.address) as client:
        return 1 if replay_all(options.files, make_replayer(options.rpc, client), in_messages=True) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
