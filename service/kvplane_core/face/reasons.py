"""Why steps are refused: both cores name a reason, a part, a column and a row, and here is the text of each reason."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import attrgetter, or_
from typing import NamedTuple

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import ReplicaSpec
from kvplane.base.step import ALL_GROUPS, UNCHANGED, Part, RowFlag, Step
from kvplane.base.values import MAX_OWNER_CHARS, MAX_RETAINED_NS, NO_REQUEST

NONE = -1  # instead of the number of a part or a row

_PREEMPT = "leave resume out; the requests are preempted then"

# By reason, the message and the remedy. {0} and so on are the values of the refusal; `it` is its `_Place`.
TEXTS = {
    "no parts": ("a step has at least one part", ""),
    "executed": ("step {it.most} is not 0 to {0}", ""),
    # columns
    "count": ("{it.size} entries for {0} rows; send one per row, or none", ""),
    "range": ("every entry must be {0} to {1}, found {it.least} to {it.most}", ""),
    "groups": (f"every entry must be 0 to {ALL_GROUPS}, found {{it.least}} to {{it.most}}", ""),
    "text": ("every entry must be a text", ""),
    "flags": ("bit {it.flag} is not a flag of these rows{it.about_flag}", "leave it out"),
    "hints": (
        "the replica was registered with hint_values {it.spec.hint_values}, found {it.least} to {it.most}",
        "announce the number of hints as hint_values of the registration, and send hints below it",
    ),
    "hash bytes": (
        "{it.size} bytes for {0} hashes of {1} bytes (hash_algorithm {it.spec.hash_algorithm.value})", "",
    ),
    # slots and what their requests have
    "no request": ("slot {it.entry} has no request", ""),
    "twice": ("slot {0} is listed twice; send one row per slot", ""),
    "not a slot": ("slot {it.entry} is not 0 to {0}", ""),
    "taken": ("slot {it.entry} is taken by a live request", ""),
    "interval": ("{it.entry} is not {0} to {1}", ""),
    "hashes": ("{0} hashes for {1} tokens; at most {2}", ""),
    # facts
    "ids of appended": ("{it.size} token ids for {it.appended} tokens in `appended`; send one id per token", ""),
    "limit": ("the request would have {it.grown} tokens, its limit is {1}", ""),
    "ids wanted": ("the request was added with token ids: send the ids of its appended tokens", ""),
    "hashes wanted": ("the request was added with hashes: send hashes of its full blocks, no token ids", ""),
    "no hashes wanted": ("the request was added with token ids: send ids, no hashes", ""),
    "hash size": ("hashes of {0} bytes, earlier ones have {1}", ""),
    "position": (f"{{it.entry}} is not 0 to max_model_len {{0}}, or {UNCHANGED} for unchanged", ""),
    "load asked": (
        "an earlier part of this message requests a load into slot {0}; commit it after its answer", "",
    ),
    "load not started": (
        "the load into slot {0} cannot have started: step {1} is not executed",
        "load when executed_through has reached admit_load_after; if the load failed, release the slot",
    ),
    "end": ("{it.entry} is not a value of End", ""),
    "fence": ("{it.entry} is not 0 to {0}, the number of this step", ""),
    "fence of held": ("a row that ends as HELD has no fence: cache.released releases its blocks", ""),
    "held": ("the request has ended as HELD: name its slot in cache.released", ""),
    # cache
    "not sent": ("step {it.entry} was not sent before this one, step {0}", ""),
    "executed step": ("step {it.entry} was reported as executed, so it cannot fail", ""),
    "block": ("block {it.entry} is not 1 to {0}", ""),
    "keeps keys": ("block {it.at} keeps its keys: list it in cache.evicted too", ""),
    "not held": ("slot {it.entry} has not ended as HELD and has no load", ""),
    "not busy": ("block {it.entry} is not one of busy_blocks, or is listed twice", ""),
    "costs": (
        "{it.size} costs, the replica has {0} tiers", "give the cost of a token, then of a block of each tier",
    ),
    "cost": (
        "{it.least} to {it.most} ns are not 0 ns to a minute",
        "give nanoseconds per token and per block, 0 for an unknown cost",
    ),
    "job": ("job {it.entry} was not ordered; the last one is {0}", "report the jobs of Orders"),
    "jobs before": (
        "{it.least!r} is not 0 to {0}, the number after the last job",
        "give at most the number after the last job; epoch << 32 for the jobs of earlier lives",
    ),
    "job not started": (
        "load {it.entry} cannot have started: step {0} is not executed",
        "load when executed_through has reached admit_load_after, or report the job as failed",
    ),
    # news
    "entries": ("send one entry per new request", ""),
    "ids of prompts": ("{it.size} token ids for {it.prompts} tokens in num_tokens; send one id each", ""),
    "tokens and hashes": ("give tokens or hashes, not both", ""),
    # run, admit
    "drafts": (
        "the launch would compute {0} tokens; {1} is the most where {2} states are kept for drafts: send fewer, or "
        "register the replica with more speculative_tokens", "",
    ),
    "load": (
        "a row with LOAD has no external tokens, and neither DELAY_CACHING nor WHOLE", "send the row without LOAD",
    ),
    "preempt": ("PREEMPT is for run rows: use STOP or SKIP", ""),
    # peers, prefetch, retain
    "no peers": ("the replica has no tier of peers", "register it with a tier of kind PEERS, or leave the section out"),
    "no second tier": (
        "the replica has no tier from which to copy into the first one",
        "register it with a host and a disk tier, or leave the section out",
    ),
    "not one prompt": (
        "slot {0} with {1} hashes is not one prompt",
        f"give the slot of a request and 0 hashes, or slot {NO_REQUEST} and hashes",
    ),
    "split pages": (
        "a replica with split pages retains nothing: its superblocks are evicted as a whole",
        "register it with another planner",
    ),
    "prefix": ("{it.entry} hashes are not 1 to {0}", "give the full blocks of a prompt of max_model_len at most"),
    "one time": ("give one time, or none", ""),
    "far end": ("the end is {0} ns behind now_ns", f"give at most {MAX_RETAINED_NS} ns, and now_ns"),
    "owner": ("the name of an owner is too long", f"give at most {MAX_OWNER_CHARS} characters"),
    # images
    "image alone": ("an image is alone in its step, behind its requests", _PREEMPT),
    "image late": ("this epoch has allocated blocks already: an image must come first", _PREEMPT),
    "no stamps": ("the session was opened without a stamp table", _PREEMPT),
    "load may write": ("a load may still write block {0}; mark its request as loading", _PREEMPT),
    "image lacks": ("the table of slot {0} in group {1} lacks a block that {2} tokens need", _PREEMPT),
    "block twice": ("the table of slot {0} in group {1} has a block twice", _PREEMPT),
    "other content": ("block {0} of the table of slot {1} in group {2} has other content in another table", _PREEMPT),
    "slot twice": ("a slot is listed twice", _PREEMPT),
    "row count": ("{0} entries for {1} rows, expected one per row", _PREEMPT),
    "loading value": ("a value is not 0, 1 (a load writes) or 2 (it is over, no grant since)", _PREEMPT),
    "table count": ("expected one entry of at least 0 per row and group, found {0} entries", _PREEMPT),
    "block count": ("{0} blocks, num_blocks adds up to {1}", _PREEMPT),
    "not waiting": ("slot {0} has no waiting request", _PREEMPT),
    "image computed": ("{0} tokens are not 1 to {1}", _PREEMPT),
    "image launch": ("{0} tokens are not {1} (computed) to {2} (max_model_len)", _PREEMPT),
    "image prompt": ("{0} tokens are not 1 to {1}, the tokens of the request", _PREEMPT),
    "image single": ("{0} tokens are not 0 to {1} (max_model_len)", _PREEMPT),
    "held count": ("{0} entries for {1} held slots", _PREEMPT),
    "held sum": ("{0} blocks, held_count adds up to {1}", _PREEMPT),
    "no slot": ("there is no slot {0}", _PREEMPT),
    "held twice": ("slot {0} lists a block twice", _PREEMPT),
    "written": ("a running request writes block {0}", _PREEMPT),
    "no block": ("a block is the null block, reserved, or not in the pool", _PREEMPT),
    "unproven": ("a block has no stamp of an earlier life that all ranks agree on", _PREEMPT),
    "two stamps": ("two blocks have the same stamp, which proves neither content", _PREEMPT),
    "state inside": ("a state is at a block that is no multiple of {0}", _PREEMPT),
    "state shared": ("another block in use has memory of state {0}", _PREEMPT),
    # rows of an open step
    "waits": ("slot {0} waits for a load", "report the end of its job"),
    "not running": ("slot {0} has no running request", ""),
    "granted": ("slot {0} has tokens of this step already", "close the step"),
    "new after": ("{0} new tokens after {1} computed ones: give 1 to max_model_len in all", ""),
    "new behind hit": ("{0} new tokens after {1} + {2}: give 0 to max_model_len in all", ""),
    "load released": ("a load of this step is released", "close the step"),
}  # fmt: skip


class Refusal(NamedTuple):
    """Why a step, or a row, is refused.

    Attributes:
        reason: a key of TEXTS.
        part: number of the part; NONE for a row, and for the step itself.
        column: name of the field in the part or step.
        row: entry of the column; NONE for the whole column.
        values: numbers of the text.
    """

    reason: str
    part: int
    column: str
    row: int = NONE
    values: tuple[int, ...] = ()

    def error(self, spec: ReplicaSpec, refused: Step | Part) -> InvalidArgument:
        """Return the error for this step, or for a part with the row."""
        message, remedy = TEXTS[self.reason]
        part = refused.parts[self.part] if isinstance(refused, Step) and self.part != NONE else refused
        where = (f"parts[{self.part}]." if self.part != NONE else "") + self.column
        field = where if self.row == NONE else f"{where}[{self.row}]"
        text = message.format(*self.values, it=_Place(self, spec, part))
        return InvalidArgument(text, field=field, remedy=remedy)


class _Place:
    """What the texts read of a refused column, and of the spec."""

    def __init__(self, refusal: Refusal, spec: ReplicaSpec, part: Step | Part) -> None:
        self.spec, self._refusal, self._part = spec, refusal, part

    @property
    def _column(self) -> Sequence[int]:
        found = attrgetter(self._refusal.column)(self._part)
        return found if isinstance(found, Sequence) else [found]

    @property
    def size(self) -> int:
        return len(self._column)

    @property
    def least(self) -> int:
        return min(self._column)

    @property
    def most(self) -> int:
        return max(self._column)

    @property
    def entry(self) -> int:
        return self._column[self._refusal.row]

    @property
    def at(self) -> int:
        return self._column[self._refusal.values[0]]

    @property
    def grown(self) -> int:
        return self._refusal.values[0] + self.entry

    @property
    def appended(self) -> int:
        return sum(attrgetter("facts.appended")(self._part))

    @property
    def prompts(self) -> int:
        return sum(attrgetter("news.num_tokens")(self._part))

    @property
    def _unknown(self) -> int:
        return reduce(or_, self._column) & ~self._refusal.values[0]

    @property
    def flag(self) -> int:
        return self._unknown & -self._unknown

    @property
    def about_flag(self) -> str:
        return ": LOAD is for admit rows of a replica with tiers" if self._unknown & RowFlag.LOAD else ""
