"""Replays step traces recorded from vLLM 0.33.0's Scheduler and compares every recorded output.

    python -m tests.conformance.steps FILE...

Twice per file: each step as one part where the program can say it, and one part per row. Not compared: `skip_drafts`
(a hint to the drafter, no decision on blocks), `log` (calls inside the reference), and, with whole steps, the counts
between two inputs of one step, which then are not separate operations. What a part cannot say: an admission of one
token that is padded with drafts, since whether it is depends on its hit; such steps go in parts.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path as FilePath
from typing import Any

from kvplane.base.groups import ReplicaSpec
from kvplane.base.step import ExtraKeys, Part, PartResult
from tests.conformance.header import BadRecording, Record, read_records, step_spec
from tests.conformance.paths import InProcessPath, Path, PathPart, Seen
from tests.conformance.replay import Divergence, EventWriter, segment_tokens
from tests.conformance.scheduler import Plan, Request, Scheduler


class StepReplayer:
    """Runs one step trace against one replica."""

    def __init__(
        self, header: Record, whole: bool, make_path: Callable[[ReplicaSpec], Path] = InProcessPath
    ) -> None:
        self.spec = step_spec(header)
        self.path = make_path(self.spec)
        self.whole = whole
        self.values = self.steps = 0
        self._free_blocks = self.spec.num_blocks - 1
        self._scheduler = Scheduler(header, self._send, whole)
        self._events = EventWriter(self.spec)
        self._plans: dict[int, Plan] = {}
        self._tokens: dict[int, tuple[list[int], ExtraKeys]] = {}
        self._line = 0
        self._op: Record = {}
        self._snapshot_every = header["snapshot_every"]
        self._input_events: list[Any] = []

    def _send(self, parts: list[Part], last: bool) -> list[PartResult]:
        end = len(parts) - 1
        results = self.path.send([PathPart(part, last and number == end) for number, part in enumerate(parts)])
        self._free_blocks = results[-1].free_blocks
        return results

    def replay(self, number: int, record: Record) -> None:
        """Inputs, one schedule call, outputs; raises Divergence."""
        self._line, self._op = number, record
        self._input_events = []
        for op in record["in"]:
            self._input(op)
        if record.get("end"):
            return
        plan = self._scheduler.schedule()
        self._plans[record["t"]] = plan
        self.steps += 1
        self._compare(record, plan)

    # -- inputs ------------------------------------------------------------------------------------------------------

    def _input(self, op: Record) -> None:
        self._op = op
        scheduler = self._scheduler
        scheduler.input_parts.clear()
        if op["op"] == "add":
            self._add(op)
        elif op["op"] == "abort":
            scheduler.abort(op["id"])
        elif op["op"] == "upd":
            ended = scheduler.update(self._plans.pop(op["of"]), {name: list(tokens) for name, tokens in op["tok"]})
            self._same("fin", op.get("fin", []), ended)
        elif op["op"] == "draft":
            for name, drafts in op["d"]:
                scheduler.draft(name, drafts)
        else:
            raise BadRecording(f"line {self._line}: unknown input {op['op']!r}")
        for part in scheduler.input_parts:
            self._input_events.extend(self._write_events(part))
        if not self.whole and "free" in op:
            self._same("free", op["free"], self._free_blocks)

    def _add(self, op: Record) -> None:
        tokens = segment_tokens(op["segs"])
        lora = (op["lora"], f"/l/{op['lora']}") if op.get("lora") else None
        extra = ExtraKeys(lora, op.get("salt") or "")
        request = Request(op["id"], 0, tokens, len(tokens), op["max"], op["arr"], op.get("prio", 0), extra)
        self._scheduler.add(request)
        self._tokens[request.slot] = (request.tokens, extra)
        self._same("n", op["n"], len(tokens))
        for part in self._scheduler.input_parts:
            if self.spec.enable_caching:  # the reference hashes nothing when it caches nothing
                last = part.last_hash[-1]
                self._same("nh", op["nh"], part.num_hashes[-1])
                self._same("lasth", op["lasth"], last[-8:].hex() if last else None)

    # -- outputs -----------------------------------------------------------------------------------------------------

    def _compare(self, record: Record, plan: Plan) -> None:
        self._op = record
        out = record["out"]
        expected_events = out.get("ev_in", []) + out.get("ev", [])
        events = self._input_events + [event for part in plan.results for event in self._write_events(part)]
        running = [one.name for one in self._scheduler.running]
        waiting = [one.name for one in self._scheduler.waiting]
        orders = [part.orders for part in plan.results]
        copies = [pair for one in orders for pair in zip(one.copy_group, one.copy_src, one.copy_dst, strict=True)]
        zero = [pair for one in orders for pair in zip(one.zero_group, one.zero_block, strict=True)]
        order = self.path.free_order()
        got: Record = {
            "sched": [[one.name, granted] for one, granted in plan.scheduled],
            "new": plan.new,
            "res": plan.resumed,
            "run": plan.run,
            "spec": [[name, drafts] for name, drafts in plan.spec.items()],
            "pre": [one.name for one in plan.preempted],
            "fin": plan.finished,
            "copies": [[src, dst] for _, src, dst in sorted(copies, key=lambda one: one[0])],
            "zero": [block for _, block in sorted(zero, key=lambda one: one[0])],
            "free": len(order),
            "fq": zlib.crc32(json.dumps(order).encode()),
            "running": running,
            "waiting": waiting,
        }
        for name, value in got.items():
            self._same(name, out.get(name, type(value)()), value)
        if self.spec.events:
            self._same("ev", expected_events, events)
        if "snap" in out:
            self._same("snap", out["snap"], self._snap(self.path.snapshot()))

    def _snap(self, seen: Seen) -> Record:
        tables = {one.name: seen.tables[one.slot] for one in self._scheduler.running}
        return {"freeq": seen.free_blocks, "cached": seen.keyed_blocks, "tables": tables}

    def _write_events(self, part: PartResult) -> list[Any]:
        return [self._events.write(event, *self._tokens.get(event.slot, ([], ExtraKeys()))) for event in part.events]

    def _same(self, name: str, expected: Any, got: Any) -> None:
        self.values += 1
        if json.loads(json.dumps(expected)) != json.loads(json.dumps(got)):
            raise Divergence(self._line, self._op, name, expected, got)


def replay_file(path: FilePath, whole: bool, make_path: Callable[[ReplicaSpec], Path] = InProcessPath) -> StepReplayer:
    """Replay one file; raises Divergence or BadRecording."""
    records = read_records(path)
    header = next(records, None)
    if header is None:
        raise BadRecording(f"{path.name}: empty file")
    replayer, ended = StepReplayer(header, whole, make_path), False
    for number, record in enumerate(records, 2):
        replayer.replay(number, record)
        ended = bool(record.get("end"))
    if not ended:
        raise BadRecording(f"{path.name}: the file ends before its `end` record")
    return replayer


def replay_all(paths: Sequence[FilePath], make_path: Callable[[ReplicaSpec], Path]) -> int:
    """Replay the files both ways and print a line each; how many differ."""
    failed = 0
    for path in paths:
        for whole in (True, False):
            way = "whole" if whole else "rows "
            try:
                done = replay_file(path, whole, make_path)
                per_step = done.path.messages / max(done.steps, 1)
                print(f"same   {way} {path.name}: {done.values} values, {per_step:.2f} messages per step")
                done.path.close()
            except (Divergence, BadRecording) as error:
                failed += 1
                print(f"DIFFER {way} {path.name}: {error}")
    print(f"{2 * len(paths) - failed} identical, {failed} not")
    return failed


def main(arguments: Sequence[str]) -> int:
    """Replay the files on the chosen path; 0 when all are identical."""
    parser = argparse.ArgumentParser(prog="tests.conformance.steps", description=__doc__)
    parser.add_argument("files", nargs="+", type=FilePath)
    parser.add_argument("--rpc", choices=["session"], help="over gRPC, to a service of its own; default: in process")
    options = parser.parse_args(arguments)
    if options.rpc is None:
        return 1 if replay_all(options.files, InProcessPath) else 0
    from kvplane.unary import connect
    from kvplane_service.cli.child import ServiceChild
    from tests.conformance.rpc import SessionPath

    with ServiceChild() as service, connect(service.address) as client:
        return 1 if replay_all(options.files, lambda spec: SessionPath(client, spec)) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
