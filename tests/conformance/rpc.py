"""Recordings over gRPC: in a session, many operations per message, and by unary calls, one operation per call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

from kvplane import wire
from kvplane.base.groups import ReplicaSpec
from kvplane.base.requests import Allocate, Appended, At, Commit, Content, Ending
from kvplane.base.step import ExtraKeys, Multimodal, Orders, PartResult, Watermark
from kvplane.blocking.client import Client
from kvplane.v1 import allocation_pb2 as pb
from tests.conformance.forms import Record
from tests.conformance.operations import check_operation
from tests.conformance.paths import PathPart, Seen
from tests.conformance.replay import Outcome, Pending, Replayer, Request, segment_tokens

MOST_IN_FLIGHT = 4
_names = count(1)


def _seen(client: Client, replica: str) -> Seen:
    snapshot = client.snapshot(replica)
    blocks = sorted({key.block for key in snapshot.keys})
    tables = {one.slot: [list(table.block_ids) for table in one.tables] for one in snapshot.requests if one.running}
    return Seen(list(snapshot.free_blocks), snapshot.distinct_keys, blocks, snapshot.usage, tables)


class SessionPath:
    """Operations as parts of steps on a session's stream."""

    def __init__(self, client: Client, spec: ReplicaSpec) -> None:
        self._client = client
        self._name = f"session-{next(_names)}"
        client.register_replica(self._name, spec)
        self._session = client.session(self._name, with_events=True)
        self.messages = 0
        self._seq, self._complete = 1, 0  # step under way, last one answered whole
        self._ends: deque[bool] = deque()  # of the messages in flight: whether they end their step

    def send(self, parts: list[PathPart]) -> list[PartResult]:
        """One message per step that the parts touch."""
        results: list[PartResult] = []
        group: list[PathPart] = []
        for number, one in enumerate(parts):
            group.append(one)
            if one.last or number == len(parts) - 1:
                self._submit(group, results)
                group = []
        while self._session.in_flight:
            self._receive(results)
        return results

    def _receive(self, results: list[PartResult]) -> None:
        answer = self._session.receive()
        results.extend(answer.parts)
        if self._ends.popleft():
            self._complete = answer.seq

    def _submit(self, group: list[PathPart], results: list[PartResult]) -> None:
        if self._session.in_flight == MOST_IN_FLIGHT:
            self._receive(results)
        last = group[-1].last
        executed = min(self._seq - 1, self._complete)
        self._ends.append(last)
        self._session.submit(*(one.part for one in group), last=last, executed_through=executed)
        self._seq += last
        self.messages += 1

    def free_order(self) -> list[int]:
        """See Path."""
        return self.snapshot().free_blocks

    def snapshot(self) -> Seen:
        """See Path."""
        return _seen(self._client, self._name)

    def close(self) -> None:
        """End the session and remove the replica."""
        self._session.close()
        self._client.deregister_replica(self._name)


class UnaryReplayer(Replayer):
    """Each operation as a unary call; a call that does not end its step states that more calls follow."""

    def __init__(self, header: Record, client: Client) -> None:
        super().__init__(header, _NoPath)
        self._client = client
        self._name = f"unary-{next(_names)}"
        client.register_replica(self._name, self.spec)
        self._known: set[str] = set()
        self._contents: dict[str, Content] = {}
        self._order = count()
        self._free_blocks = self.spec.num_blocks - 1
        self._calls: dict[str, Callable[[Record], Outcome]] = {
            "step": self._call_step, "new": self._call_new, "lookup": self._call_lookup, "alloc": self._call_alloc,
            "tok": self._call_tok, "cache": self._call_cache, "free": self._call_free, "preempt": self._call_preempt,
            "hold": self._call_hold, "release": self._call_release, "evict": self._call_evict,
            "reset": self._call_reset, "snapshot": self._call_snapshot,
        }  # fmt: skip

    def replay(self, number: int, op: Record) -> None:
        """One call, and compare."""
        check_operation(op, f"line {number}", self.requests, self._held)
        if op["op"] == "end":
            return
        self.operations += 1
        outcome = self._calls[op["op"]](op)
        self._compare(Pending(number, op, [], lambda _: outcome, dict(self._slots)), [outcome.result])

    @property
    def messages(self) -> int:
        """One each."""
        return self.operations

    def close(self) -> None:
        """Remove the replica."""
        self._client.deregister_replica(self._name)

    # -- operations ----------------------------------------------------------------------------------------------------

    def _call_step(self, op: Record) -> Outcome:
        del op
        self._mutated(self._client.commit_blocks(self._name, Commit(), At()).result)
        begun = self._mutated(self._client.commit_blocks(self._name, Commit(), _MORE).result)
        copies = [[src, dst] for _, src, dst in sorted(self._copies, key=lambda one: one[0])]
        outputs: Record = {"copies": copies, "retained": [block for pair in copies for block in pair]}
        outputs["zero"] = [block for _, block in sorted(self._zero, key=lambda one: one[0])]
        self._copies.clear()
        self._zero.clear()
        return Outcome(begun, outputs)

    def _call_new(self, op: Record) -> Outcome:
        tokens = segment_tokens(op["segs"])
        lora = (op["lora"], f"/l/{op['lora']}") if op["lora"] else None
        extra = ExtraKeys(lora, op["salt"] or "", tuple(Multimodal(*item) for item in op["mm"] or ()))
        request = Request(next(self._order), tokens, len(tokens), extra)
        self.requests[op["id"]] = request
        skip = op.get("skip", False)
        self._contents[op["id"]] = Content(token_ids=list(tokens), extra_keys=extra, skip_reading=skip)
        found = self._client.find_cache_hit(self._name, self._contents[op["id"]])
        return Outcome(self._unchanged(), {"n": found.num_tokens} | _hashes(found.num_hashes, found.last_hash))

    def _call_lookup(self, op: Record) -> Outcome:
        what = op["id"] if op["id"] in self._known else self._contents[op["id"]]
        found = self._client.find_cache_hit(self._name, what, with_blocks=True)
        blocks = [list(group.block_ids) for group in found.blocks]
        return Outcome(self._unchanged(), {"hit": found.hit_tokens, "bnd": found.single_group_hit, "blk": blocks})

    def _call_alloc(self, op: Record) -> Outcome:
        answer = self._client.allocate_slots(self._name, self._wish(op), _MORE)
        self._known.add(op["id"])
        ok = answer.status == pb.ALLOCATION_STATUS_GRANTED and answer.granted_tokens == op["new"]
        outputs: Record = {"ok": ok, "tbl": _ids(answer.block_table)}
        if ok:
            outputs["nb"] = _ids(answer.new_blocks)
        return Outcome(self._mutated(answer.result, op["id"]), outputs)

    def _wish(self, op: Record) -> Allocate:
        known = len(self.requests[op["id"]].tokens)
        if not op.get("use_hit"):
            return Allocate(
                op["id"],
                computed_tokens=op["comp"],
                extra_tokens=op["comp"] + op["new"] - known,
                lookahead_tokens=op.get("look", 0),
                in_flight_tokens=op.get("infl", 0),
                delay_caching=op.get("delay", False),
                unaligned=True,
            )
        return Allocate(
            op["id"],
            content=None if op["id"] in self._known else self._contents[op["id"]],
            extra_tokens=op["new"] + op["hit"] + op.get("ext", 0) - known,
            lookahead_tokens=op.get("look", 0),
            external_tokens=op.get("ext", 0),
            delay_caching=op.get("delay", False),
            unaligned=True,
            full_fit=op.get("full", False),
            encoder_tokens=op.get("enc", 0),
            reserved_blocks=op.get("reserved", 0),
            watermark=Watermark.ALWAYS if op.get("has_sched", True) else Watermark.NEVER,
            expected_hit_tokens=op["hit"],
        )

    def _call_tok(self, op: Record) -> Outcome:
        self.requests[op["id"]].tokens.extend(op["t"])
        answer = self._client.commit_blocks(self._name, Commit(op["id"], appended=Appended(token_ids=op["t"])), _MORE)
        return Outcome(self._mutated(answer.result, op["id"]), _hashes(answer.num_hashes, answer.last_hash))

    def _call_cache(self, op: Record) -> Outcome:
        commit = Commit(op["id"], commit_tokens=op["n"])
        return Outcome(self._mutated(self._client.commit_blocks(self._name, commit, _MORE).result, op["id"]))

    def _call_free(self, op: Record) -> Outcome:
        self.requests.pop(op["id"])
        return self._end(op["id"], Ending.FREE)

    def _call_preempt(self, op: Record) -> Outcome:
        return self._end(op["id"], Ending.PREEMPTED)

    def _call_hold(self, op: Record) -> Outcome:
        self.requests.pop(op["id"])
        self._held[op["id"]] = 0
        return self._end(op["id"], Ending.HELD)

    def _call_release(self, op: Record) -> Outcome:
        del self._held[op["id"]]
        return self._end(op["id"], Ending.RELEASED)

    def _end(self, request_id: str, ending: Ending) -> Outcome:
        if request_id not in self._known:  # the service never received it
            return Outcome(self._unchanged())
        if ending in (Ending.FREE, Ending.RELEASED):
            self._known.discard(request_id)
        return Outcome(self._mutated(self._client.free(self._name, request_id, ending, at=_MORE).result))

    def _call_evict(self, op: Record) -> Outcome:
        return Outcome(self._mutated(self._client.evict_blocks(self._name, op["ids"], _MORE).result))

    def _call_reset(self, op: Record) -> Outcome:
        del op
        answer = self._client.reset_prefix_cache(self._name, _MORE)
        return Outcome(self._mutated(answer.result), {"ok": answer.done})

    def _call_snapshot(self, op: Record) -> Outcome:
        return self._seen(op, self._unchanged(), _seen(self._client, self._name))

    # -- results -------------------------------------------------------------------------------------------------------

    def _unchanged(self) -> PartResult:
        return PartResult(free_blocks=self._free_blocks)

    def _mutated(self, result: pb.MutationResult, request_id: str = "") -> PartResult:
        """The result as that of a part; events name slots of the service, here the request that the call was about."""
        self._free_blocks = result.free_blocks
        events = [wire.decode_event(event) for event in result.events]
        if request_id in self.requests:
            for event in events:
                self._slots[event.slot] = self.requests[request_id]
        orders = Orders(
            copy_src=[copy.src_block for copy in result.orders.copies],
            copy_dst=[copy.dst_block for copy in result.orders.copies],
            copy_group=[copy.group for copy in result.orders.copies],
            zero_block=[zero.block for zero in result.orders.zeroes],
            zero_group=[zero.group for zero in result.orders.zeroes],
        )
        return PartResult(free_blocks=result.free_blocks, events=events, orders=orders)


_MORE = At(more=True)


class _NoPath:
    """Placeholder: unary calls use the client."""

    messages = 0

    def __init__(self, spec: ReplicaSpec) -> None:
        del spec

    def send(self, parts: list[PathPart]) -> list[PartResult]:
        """Never called."""
        raise AssertionError(parts)

    def free_order(self) -> list[int]:
        """Never called."""
        raise AssertionError

    def snapshot(self) -> Seen:
        """Never called."""
        raise AssertionError

    def close(self) -> None:
        """Nothing to release."""


def make_replayer(rpc: str, client: Client) -> Callable[[Record], Replayer]:
    """Makes replayers over gRPC: rpc is "unary" or "session"."""
    if rpc == "unary":
        return lambda header: UnaryReplayer(header, client)
    return lambda header: Replayer(header, lambda spec: SessionPath(client, spec))


def _ids(groups: Any) -> list[list[int]]:
    return [list(group.block_ids) for group in groups]


def _hashes(num_hashes: int, last: bytes) -> Record:
    return {"nh": num_hashes, "lasth": last[-8:].hex() if last else None}
