"""History of one run: the world appends records of what happens; the rules (`rules.py`) read only these."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field
from typing import TypeAlias, TypeVar, get_args

from kvplane.base.step import PartResult

Place: TypeAlias = tuple[str, int, int]  # replica, rank, incarnation of the memory

RANKS = 2


# -- what happens ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault was injected."""

    kind: str


@dataclass(frozen=True)
class Began:
    """A service began an engine life, whose identity is `life`: the nonce of its opening. `entered_ns`: when the
    service got the replica. `kept`: keyed blocks with their stamps; `due`: those that it must keep by its own state;
    `flushed`: those that another service had stored when it released the replica; `shown`: the ranks' stamps at that
    moment.
    """

    service: int
    replica: str
    epoch: int
    life: int
    entered_ns: int
    kept: tuple[tuple[int, int], ...]
    due: tuple[tuple[int, int], ...]
    flushed: tuple[tuple[int, int], ...]
    shown: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Applied:
    """A service applied a step, or parts of one."""

    service: int
    replica: str
    epoch: int
    seq: int
    part: int
    answer: str


@dataclass(frozen=True)
class Answered:
    """An engine received a result; `seq` is the service's number."""

    replica: str
    epoch: int
    seq: int
    part: int
    answer: str


@dataclass(frozen=True)
class Stored:
    """A step registered a key."""

    service: int
    replica: str
    epoch: int
    seq: int
    group: int
    block: int
    digest: bytes


@dataclass(frozen=True)
class Published:
    """A key was published."""

    service: int
    replica: str
    epoch: int
    group: int
    block: int
    digest: bytes


@dataclass(frozen=True)
class Opened:
    """A session was opened as a new engine life; `owner`: the owner epoch in the ranks' tables before."""

    replica: str
    epoch: int
    owner: int


@dataclass(frozen=True)
class Claimed:
    """An engine life that this service (a process number) began owns a rank's memory. `ahead`: the engine's number of a
    step minus the service's.
    """

    place: Place
    epoch: int
    ahead: int
    service: int


@dataclass(frozen=True)
class CarriedOut:
    """A rank carried out the orders of a part of this engine life; `owner`: the owner epoch at that time."""

    place: Place
    epoch: int
    owner: int
    seq: int
    part: int
    stamped: tuple[tuple[int, int], ...]
    life: int


@dataclass(frozen=True)
class Executed:
    """A rank ran the launch of a step."""

    place: Place
    epoch: int
    seq: int


@dataclass(frozen=True)
class Invalidated:
    """A rank invalidated pages, before a launch without an answer."""

    place: Place
    epoch: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Lapsed:
    """A lease was checked; the blocks held by requests before and after."""

    replica: str
    before: str
    after: str


@dataclass(frozen=True)
class Hit:
    """A request was admitted with a hit; `across`: on pages of an earlier service life."""

    replica: str
    num_tokens: int
    across: bool


@dataclass(frozen=True)
class Wrote:
    """A service wrote to the store for a replica; `is_owned`: it owned the replica when the write began."""

    service: int
    replica: str
    is_owned: bool


@dataclass(frozen=True)
class Owned:
    """Addresses of the services that have a replica, long after the last fault."""

    replica: str
    services: tuple[str, ...]


@dataclass(frozen=True)
class Moved:
    """An engine read the pages of a request that ended as held; `right`: the bytes are those that were held, or the
    stamps differ.
    """

    replica: str
    right: bool


@dataclass(frozen=True)
class Lost:
    """The pages of a held request changed although its engine and the service were alive."""

    replica: str
    slot: int


@dataclass(frozen=True)
class Waited:
    """Time between a service's read of a message and its answer."""

    seconds: float


@dataclass(frozen=True)
class Asked:
    """A bystander called a running service, and waited this long."""

    service: int
    what: str
    seconds: float
    is_answered: bool


@dataclass(frozen=True)
class Wrong:
    """A page has other content than its key; `what` names the page and the reader."""

    what: str


@dataclass(frozen=True)
class Misled:
    """A subscriber's view of the keys differs from the published keys."""

    what: str


@dataclass(frozen=True)
class Broken:
    """An impossible state, or an unexpected end of a process."""

    what: str


@dataclass(frozen=True)
class Emptied:
    """Every request of a replica has ended."""

    replica: str
    free: int
    usable: int


# -- mirrors: an engine that decides itself, and the services that apply its steps; `life` is its nonce ----------------


@dataclass(frozen=True)
class Decided:
    """An engine applied a step; `state` is a digest of its allocator after it. Step 0 is the start."""

    replica: str
    life: int
    seq: int
    answer: str
    state: str


@dataclass(frozen=True)
class Mirrored:
    """A service published a step of a mirrored engine."""

    service: int
    replica: str
    life: int
    seq: int
    answer: str


@dataclass(frozen=True)
class Imaged:
    """A service continues from an engine's image. `kept`: blocks whose keys are published, with their stamps."""

    service: int
    replica: str
    life: int
    epoch: int
    seq: int
    kept: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Planted:
    """The state of a service was changed, so that it decides otherwise than its engine."""

    service: int
    replica: str


@dataclass(frozen=True)
class Viewed:
    """A mirrored replica in a service, after a message of its engine or a look at the leases. `shows`: a subscriber has
    entries; `age_ms`: of the last step when it was sent; `state`: digest of the service's allocator.
    """

    service: int
    replica: str
    life: int
    seq: int
    is_message: bool
    status: str
    shows: bool
    age_ms: int
    state: str


@dataclass(frozen=True)
class CaughtUp:
    """An engine ends, long after the last fault: its last step, and the last one that its service has applied."""

    replica: str
    newest: int
    applied: int


Record: TypeAlias = (
    Fault
    | Began
    | Applied
    | Answered
    | Stored
    | Published
    | Opened
    | Claimed
    | CarriedOut
    | Executed
    | Invalidated
    | Lapsed
    | Hit
    | Wrote
    | Owned
    | Moved
    | Lost
    | Waited
    | Asked
    | Wrong
    | Misled
    | Broken
    | Emptied
    | Decided
    | Mirrored
    | Imaged
    | Planted
    | Viewed
    | CaughtUp
)


_R = TypeVar("_R", bound=Record)


@dataclass
class History:
    """The records of one run, in order, with their times."""

    records: list[tuple[int, Record]] = field(default_factory=list)

    def add(self, at_ns: int, record: Record) -> None:
        self.records.append((at_ns, record))

    def of(self, kind: type[_R]) -> Iterator[_R]:
        return (record for _, record in self.records if isinstance(record, kind))

    def digest(self) -> str:
        """Equal runs have equal digests. It contains no names of code, so that a rename does not change it."""
        digest, kinds = hashlib.sha256(), get_args(Record)
        for at_ns, record in self.records:
            digest.update(f"{at_ns} {kinds.index(type(record))} {astuple(record)}\n".encode())
        return digest.hexdigest()[:16]


def fingerprint(parts: Sequence[PartResult]) -> str:
    """Digest of a result, on either side of the network."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        orders, columns = part.orders, (part.new_blocks, part.tables, part.peek_blocks)
        rows = (
            part.granted, part.preempted, part.admit_status, part.admit_hit, part.admit_granted,
            part.admit_single_group_hit, part.peek_hit, orders.stamp_block, orders.stamp, orders.copy_src,
            orders.copy_dst, orders.zero_block,
            *(column for blocks in columns for column in (blocks.row, blocks.group, blocks.count, blocks.ids)),
        )  # fmt: skip
        digest.update(repr([[int(value) for value in row] for row in rows]).encode())
        digest.update(f"{part.free_blocks} {part.reset_done}".encode())
    return digest.hexdigest()
