"""Replays step traces recorded from vLLM 0.33.0's Scheduler and compares every recorded output.

    python -m tests.conformance.steps FILE...

Twice per file: each step as one part, and one part per row. One part cannot express an admission of one token that is
padded with drafts, since the padding depends on its hit. Where such an admission may occur, the step has one part more.

Not compared, since no answer contains it: in `log`, the amount of a call that is refused permanently, and, with whole
steps, the calls for running requests; with whole steps, the free blocks between two inputs, which then are not separate
operations.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path as FilePath
from typing import Any

from kvplane.base.groups import ReplicaSpec
from kvplane.base.step import ExtraKeys, Part, PartResult
from tests.conformance.divergence import Divergence
from tests.conformance.forms import BadRecording, Record, refusals_named
from tests.conformance.header import read_records, step_spec
from tests.conformance.paths import InProcessPath, Path, PathPart, Seen
from tests.conformance.replay import EventWriter, segment_tokens
from tests.conformance.scheduler import Plan, Request, Scheduler
from tests.conformance.step_records import check_input, check_step

PADDED = "with an admission that drafts may pad"


class StepReplayer:
    """Runs one step trace against one replica."""

    def __init__(self, header: Record, whole: bool, make_path: Callable[[ReplicaSpec], Path] = InProcessPath) -> None:
        self.spec = step_spec(header)
        self.path = make_path(self.spec)
        self.whole = whole
        self.values = self.steps = self.in_parts = 0
        self._free_blocks = self.spec.num_blocks - 1
        self._scheduler = Scheduler(header, self._send, whole)
        self._events = EventWriter(self.spec)
        self._plans: dict[int, Plan] = {}
        self._tokens: dict[int, tuple[list[int], ExtraKeys]] = {}
        self._added: dict[str, Record] = {}
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
        check_step(record, f"line {number}")
        self._line, self._op = number, record
        self._input_events = []
        for op in record["in"]:
            self._input(op)
        if "end" in record:
            self._compare_end(record)
            return
        plan = self._scheduler.schedule()
        self._plans[record["t"]] = plan
        self.steps += 1
        self.in_parts += len(plan.results) > 1
        if self.whole:
            self._compare_hashes(plan.results[0])
        self._compare(record, plan)

    # -- inputs ------------------------------------------------------------------------------------------------------

    def _input(self, op: Record) -> None:
        self._op = op
        scheduler = self._scheduler
        check_input(op, f"line {self._line}", scheduler.requests, self._plans)
        scheduler.input_parts.clear()
        if op["op"] == "add":
            self._add(op)
        elif op["op"] == "abort":
            scheduler.abort(op["id"])
        elif op["op"] == "upd":
            plan = self._plans.pop(op["of"])
            self._same("tok", [name for name, _ in op["tok"]], [one.name for one, _ in plan.scheduled])
            ended = scheduler.update(plan, {name: list(tokens) for name, tokens in op["tok"]})
            self._same("fin", op.get("fin", []), ended)
        else:
            for name, drafts in op["d"]:
                scheduler.draft(name, drafts)
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
        self._added[op["id"]] = op
        for part in self._scheduler.input_parts:
            self._compare_hashes(part)

    def _compare_hashes(self, part: PartResult) -> None:
        """Compare the hashes of the requests in the last news: the last rows of the part."""
        # The reference hashes only what it caches.
        names = self._scheduler.last_news if self.spec.enable_caching else []
        for name, number, last in zip(names[::-1], part.num_hashes[::-1], part.last_hash[::-1], strict=False):
            self._op = self._added[name]
            self._same("nh", self._op["nh"], number)
            self._same("lasth", self._op["lasth"], last[-8:].hex() if last else None)

    # -- outputs -----------------------------------------------------------------------------------------------------

    def _compare(self, record: Record, plan: Plan) -> None:
        self._op = record
        out = record["out"]
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
            "skip_drafts": not plan.drafts_needed,
        }
        for name, value in got.items():
            self._same(name, out.get(name, type(value)()), value)
        self._compare_calls(out.get("log", []), plan)
        if self.spec.events:
            self._compare_events(out.get("ev_in", []), out.get("ev", []), plan)
        if "snap" in out:
            self._same("snap", out["snap"], self._snap(self.path.snapshot()))

    def _compare_events(self, at_inputs: list[Any], at_schedule: list[Any], plan: Plan) -> None:
        """With whole steps the inputs belong to the step, and so do their events."""
        events = [event for part in plan.results for event in self._write_events(part)]
        if self.whole:
            self._same("ev", at_inputs + at_schedule, events)
        else:
            self._same("ev_in", at_inputs, self._input_events)
            self._same("ev", at_schedule, events)

    def _compare_calls(self, expected: list[list[Any]], plan: Plan) -> None:
        """Compare the calls that the answers contain, and their amounts where the answers contain them."""
        if plan.run_at_once:
            expected = [call for call in expected if call[0] in ("L", "W")]
        without_amount = {number for number, call in enumerate(plan.calls) if len(call) == 4 and call[2] is None}
        reported = [[*call[:2], None, *call[3:]] if at in without_amount else call for at, call in enumerate(expected)]
        self._same("log", reported, plan.calls)

    def _compare_end(self, record: Record) -> None:
        """All requests have ended; with whole steps the core receives their ends here."""
        self._op, out = record, record["out"]
        for part in self._scheduler.finish():
            self._input_events.extend(self._write_events(part))
        self._same("free", out["free"], len(self.path.free_order()))
        if self.spec.events:
            self._same("ev_in", out.get("ev_in", []), self._input_events)
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
    """Replay one file and release its path; raises Divergence or BadRecording."""
    records = read_records(path)
    header = next(records, None)
    if header is None:
        raise BadRecording("empty file")
    with refusals_named("header"):
        replayer = StepReplayer(header, whole, make_path)
    with closing(replayer.path):
        _replay_records(replayer, records)
    return replayer


def _replay_records(replayer: StepReplayer, records: Iterator[Record]) -> None:
    number, record = 1, Record()
    for number, record in enumerate(records, 2):
        with refusals_named(f"line {number}"):
            replayer.replay(number, record)
        if "end" in record:
            break
    if "end" not in record:
        raise BadRecording(f"line {number}: the file ends before its `end` record")
    if next(records, None) is not None:
        raise BadRecording(f"line {number + 1}: there is more behind the `end` record")


def replay_all(paths: Sequence[FilePath], make_path: Callable[[ReplicaSpec], Path]) -> int:
    """Replay the files both ways and print a line each; how many differ."""
    failed = 0
    for path in paths:
        for whole in (True, False):
            way = "whole" if whole else "rows "
            try:
                done = replay_file(path, whole, make_path)
                per_step = done.path.messages / done.steps
                in_parts = f"; in parts: {done.in_parts} steps {PADDED}" if whole and done.in_parts else ""
                print(f"same   {way} {path.name}: {done.values} values, {per_step:.2f} messages per step{in_parts}")
            except (Divergence, BadRecording) as error:
                failed += 1
                print(f"{'DIFFER' if isinstance(error, Divergence) else 'REFUSED'} {way} {path.name}: {error}")
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
    from kvplane.blocking.client import connect
    from kvplane_tools.cli.child import ServiceChild
    from tests.conformance.rpc import SessionPath

    with ServiceChild() as service, connect(service.address) as client:
        return 1 if replay_all(options.files, lambda spec: SessionPath(client, spec)) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
