"""Replays operation traces recorded from vLLM 0.33.0 and compares every recorded output.

    python -m tests.conformance.replay FILE...

Each recorded call into the reference's manager becomes a part of a step; `step` records close one and open the next.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvplane.base.groups import GroupSpec
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
    Step,
    StepResult,
    Watermark,
)
from kvplane_service.core.inspect import check, take_snapshot
from kvplane_service.core.replica import Replica
from tests.conformance.header import BadRecording, Record, read_records, trace_spec

# Per operation: input fields, output fields. "free" and "ev" are outputs of every operation.
FIELDS: dict[str, tuple[set[str], set[str]]] = {
    "step": (set(), {"copies", "retained", "zero"}),
    "new": ({"id", "segs", "salt", "lora", "mm"}, {"n", "nh", "lasth"}),
    "lookup": ({"id"}, {"hit", "bnd", "blk"}),
    "alloc": (
        {"id", "comp", "new", "st", "use_hit", "hit", "look", "ext", "delay", "full", "reserved", "has_sched", "infl"},
        {"ok", "nb", "tbl"},
    ),
    "tok": ({"id", "t"}, {"nh", "lasth"}),
    "cache": ({"id", "n"}, set()),
    "free": ({"id"}, set()),
    "preempt": ({"id"}, set()),
    "evict": ({"ids"}, set()),
    "reset": (set(), {"ok"}),
    "snapshot": (set(), {"freeq", "freeq_crc", "cached_hashes", "cached", "usage"}),
}


@dataclass
class Request:
    """What the driver of a trace knows of a request."""

    slot: int
    tokens: list[int]
    prompt: int
    extra: ExtraKeys
    has_hit: bool = False
    running: bool = False


@dataclass
class Divergence(Exception):
    """The first output that differs."""

    line: int
    op: Record
    name: str
    expected: Any
    got: Any

    def __str__(self) -> str:
        return (
            f"line {self.line}: {self.name}: expected {_short(self.expected)}, got {_short(self.got)}\n"
            f"  operation: {_short(self.op)}"
        )


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 600 else text[:600] + "..."


@dataclass
class Outcome:
    """What one operation did, in the words of the recording."""

    result: PartResult
    outputs: Record = field(default_factory=dict)


class Replayer:
    """Drives one replica through one trace."""

    def __init__(self, header: Record, check_every: int = 50) -> None:
        self.spec = trace_spec(header)
        self.replica = Replica(self.spec)
        self.requests: dict[str, Request] = {}
        self._free_slots: list[int] = []
        self._next_slot = 0
        self._seq, self._part = 1, 0
        self._copies: list[tuple[int, int, int]] = []
        self._zero: list[tuple[int, int]] = []
        self._events = EventWriter(self.spec.groups)
        self.values = 0
        self._check_every = check_every
        self._ops: dict[str, Callable[[Record], Outcome]] = {
            "step": self._step, "new": self._new, "lookup": self._lookup, "alloc": self._alloc, "tok": self._tok,
            "cache": self._cache, "free": self._free, "preempt": self._preempt, "evict": self._evict,
            "reset": self._reset, "snapshot": self._snapshot,
        }  # fmt: skip

    def replay(self, number: int, op: Record) -> None:
        """Apply one operation and compare; raises Divergence."""
        if op["op"] == "end":
            return
        if op["op"] not in self._ops:
            raise BadRecording(f"line {number}: unknown operation {op['op']!r}")
        inputs, outputs = FIELDS[op["op"]]
        unknown = sorted(set(op) - inputs - outputs - {"op", "free", "ev"})
        if unknown:
            raise BadRecording(f"line {number}: operation {op['op']!r} has an unknown field {unknown[0]!r}")
        outcome = self._ops[op["op"]](op)
        outcome.outputs["free"] = outcome.result.free_blocks
        outcome.outputs["ev"] = [self._event(event) for event in outcome.result.events]
        for name in sorted(outputs | {"free", "ev"}):
            got = outcome.outputs.get(name)
            if name not in op and not got:
                continue
            self.values += 1
            if op.get(name) != got:
                raise Divergence(number, op, name, op.get(name), got)
        if number % self._check_every == 0:
            check(self.replica)

    # -- operations --------------------------------------------------------------------------------------------------

    def _apply(self, part: Part, last: bool = False) -> PartResult:
        step = Step(0, self._seq, [part], self._part, last, executed_through=self._seq - 1)
        result: StepResult = self.replica.apply(step)
        self._part += 1
        orders = result.parts[0].orders
        self._copies.extend(zip(orders.copy_group, orders.copy_src, orders.copy_dst, strict=True))
        self._zero.extend(zip(orders.zero_group, orders.zero_block, strict=True))
        return result.parts[0]

    def _event(self, event: CacheEvent) -> list[Any]:
        owner = next((one for one in self.requests.values() if one.slot == event.slot), None)
        return self._events.write(event, owner.tokens if owner else [], owner.extra if owner else NO_EXTRA_KEYS)

    def _step(self, op: Record) -> Outcome:
        del op
        result = self._apply(Part(), last=True)
        copies = [[src, dst] for _, src, dst in sorted(self._copies, key=lambda one: one[0])]
        outputs = {"copies": copies, "zero": [block for _, block in sorted(self._zero, key=lambda one: one[0])]}
        outputs["retained"] = [block for pair in copies for block in pair]
        self._copies.clear()
        self._zero.clear()
        self._seq, self._part = self._seq + 1, 0
        begun = self._apply(Part())
        begun.events[:0] = result.events
        return Outcome(begun, {name: value for name, value in outputs.items() if value})

    def _new(self, op: Record) -> Outcome:
        tokens = segment_tokens(op["segs"])
        items = tuple(Multimodal(*item) for item in op["mm"] or ())
        lora = (op["lora"], f"/l/{op['lora']}") if op["lora"] else None
        extra = ExtraKeys(lora, op["salt"] or "", items)
        slot = self._free_slots.pop() if self._free_slots else self._next_slot
        self._next_slot = max(self._next_slot, slot + 1)
        self.requests[op["id"]] = Request(slot, tokens, len(tokens), extra)
        keys = [] if extra == NO_EXTRA_KEYS else [extra]
        result = self._apply(Part(news=News([slot], [len(tokens)], tokens, request_id=[op["id"]], extra_keys=keys)))
        return Outcome(result, {"n": len(tokens)} | self._hashes(result))

    @staticmethod
    def _hashes(result: PartResult) -> Record:
        last = result.last_hash[0]
        return {"nh": result.num_hashes[0], "lasth": last[-8:].hex() if last else None}

    def _lookup(self, op: Record) -> Outcome:
        request = self.requests[op["id"]]
        result = self._apply(Part(peek=Peek([request.slot], with_blocks=True)))
        blocks = result.peek_blocks.by_row().get(0, {})
        rows = [blocks.get(group, []) for group in range(len(self.spec.groups))]
        return Outcome(result, {"hit": result.peek_hit[0], "bnd": result.peek_junction[0], "blk": rows})

    def _alloc(self, op: Record) -> Outcome:
        request = self.requests[op["id"]]
        if op.get("use_hit"):
            part = Part(admit=self._admission(op, request))
        else:
            part = self._running(op, request)
        part.with_tables = True
        result = self._apply(part)
        ok = result.admit_status == [AdmitStatus.GRANTED] if op.get("use_hit") else result.granted == [op["new"]]
        request.running = request.running or ok
        new, tables = result.new_blocks.by_row().get(0, {}), result.tables.by_row().get(0, {})
        groups = range(len(self.spec.groups))
        outputs = {"ok": ok, "tbl": [tables.get(group, []) for group in groups]}
        if ok:
            outputs["nb"] = [new.get(group, []) for group in groups]
        return Outcome(result, outputs)

    def _admission(self, op: Record, request: Request) -> Admit:
        flags = RowFlag.DELAY_CACHING * bool(op.get("delay")) | RowFlag.FULL_FIT * bool(op.get("full"))
        known = len(request.tokens)
        return Admit(
            slot=[request.slot],
            extra=[op["new"] + op["hit"] + op.get("ext", 0) - known],
            cap=[UNLIMITED],
            lookahead=[op.get("look", 0)],
            external=[op.get("ext", 0)],
            expected_hit=[op["hit"]],
            reserved=[op.get("reserved", 0)],
            watermark=[Watermark.ALWAYS if op.get("has_sched", True) else Watermark.NEVER],
            flags=[int(flags)],
        )

    def _running(self, op: Record, request: Request) -> Part:
        run = Run(
            slot=[request.slot],
            extra=[op["comp"] + op["new"] - len(request.tokens)],
            lookahead=[op.get("look", 0)],
            in_flight=[op.get("infl", 0)],
            on_refusal=OnRefusal.STOP,
        )
        return Part(facts=Facts(slot=[request.slot], computed=[op["comp"]]), run=run)

    def _tok(self, op: Record) -> Outcome:
        request = self.requests[op["id"]]
        request.tokens.extend(op["t"])
        result = self._apply(Part(facts=Facts(slot=[request.slot], appended=[len(op["t"])], tokens=list(op["t"]))))
        return Outcome(result, self._hashes(result))

    def _cache(self, op: Record) -> Outcome:
        slot = self.requests[op["id"]].slot
        return Outcome(self._apply(Part(facts=Facts(slot=[slot], computed=[op["n"]], commit=[op["n"]]))))

    def _free(self, op: Record) -> Outcome:
        request = self.requests.pop(op["id"])
        self._free_slots.append(request.slot)
        return Outcome(self._apply(Part(facts=Facts(slot=[request.slot], end=[End.FREE]))))

    def _preempt(self, op: Record) -> Outcome:
        slot = self.requests[op["id"]].slot
        self.requests[op["id"]].running = False
        return Outcome(self._apply(Part(facts=Facts(slot=[slot], end=[End.PREEMPTED]))))

    def _evict(self, op: Record) -> Outcome:
        return Outcome(self._apply(Part(cache=Cache(evicted=list(op["ids"])))))

    def _reset(self, op: Record) -> Outcome:
        del op
        result = self._apply(Part(cache=Cache(reset=True)))
        return Outcome(result, {"ok": result.reset_done})

    def _snapshot(self, op: Record) -> Outcome:
        result = self._apply(Part())
        seen = take_snapshot(self.replica)
        order = list(seen.free_blocks)
        outputs: Record = {
            "freeq": order if len(order) <= 400 else None,
            "freeq_crc": zlib.crc32(json.dumps(order).encode()),
            "cached_hashes": seen.distinct_keys,
            "cached": sorted({one.block for one in seen.keys}) if self.spec.num_blocks <= 400 else None,
            "usage": round(seen.usage, 9),
        }
        return Outcome(result, {name: value for name, value in outputs.items() if name in op or value is not None})


class EventWriter:
    """Writes cache events in the words of the recordings."""

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        self._groups = groups

    def write(self, event: CacheEvent, tokens: Sequence[int], extra: ExtraKeys) -> list[Any]:
        """The event of a request with these tokens and keys."""
        if event.kind is EventKind.CLEARED:
            return ["C"]
        hashes = [digest[-8:].hex() for digest in event.hashes]
        if event.kind is EventKind.REMOVED:
            return ["R", event.group, hashes]
        span = list(tokens[event.start : event.end])
        group = self._groups[event.group]
        keys = [event_keys(extra, start, start + event.block_size) for start in event.block_starts]
        return [
            "S", event.group, event.block_size, event.parent[-8:].hex() if event.parent else None, hashes, len(span),
            zlib.crc32(json.dumps(span).encode()), keys if any(keys) else None, group.kind.value,
            group.window or None, "GPU",
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


def replay_file(path: Path) -> int:
    """Replay one file; the number of values compared. Raises Divergence or BadRecording."""
    records = read_records(path)
    header = next(records, None)
    if header is None:
        raise BadRecording(f"{path.name}: empty file")
    replayer = Replayer(header)
    ended = False
    for number, record in enumerate(records, 2):
        if "op" not in record:
            raise BadRecording(f"{path.name}: line {number}: no operation")
        replayer.replay(number, record)
        ended = record["op"] == "end"
    if not ended:
        raise BadRecording(f"{path.name}: the file ends before its `end` record")
    return replayer.values


def main(paths: Sequence[str]) -> int:
    """Replay the files; 0 when all are identical."""
    failed = 0
    for name in paths:
        path = Path(name)
        try:
            values = replay_file(path)
            print(f"same   {path.name}: {values} values")
        except (Divergence, BadRecording) as error:
            failed += 1
            print(f"DIFFER {path.name}: {error}")
    print(f"{len(paths) - failed} identical, {failed} not")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
