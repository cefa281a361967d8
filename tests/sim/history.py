"""What happens in one run: the world appends what it sees (`Record`), the rules (`rules.py`) read nothing else."""

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
    """Chaos did something."""

    kind: str


@dataclass(frozen=True)
class Began:
    """A service began an engine life. `kept` are the keyed blocks with their stamps, `due` those that it must keep by
    what it knew, `flushed` by what another service had written when it let go; `shown` what the ranks' tables said at
    that moment.
    """

    service: int
    replica: str
    epoch: int
    kept: tuple[tuple[int, int], ...]
    due: tuple[tuple[int, int], ...]
    flushed: tuple[tuple[int, int], ...]
    shown: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Applied:
    """A service applied (parts of) a step."""

    service: int
    replica: str
    epoch: int
    seq: int
    part: int
    answer: str


@dataclass(frozen=True)
class Answered:
    """An engine got an answer; `seq` is the service's number."""

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
    """Others were shown a key."""

    service: int
    replica: str
    epoch: int
    group: int
    block: int
    digest: bytes


@dataclass(frozen=True)
class Opened:
    """A session was opened as a new engine life; `owner` is the epoch that the ranks' tables had shown."""

    replica: str
    epoch: int
    owner: int


@dataclass(frozen=True)
class Claimed:
    """An engine life that this service (a process number) began owns a rank's memory. `ahead`: its number of a step,
    less the service's.
    """

    place: Place
    epoch: int
    ahead: int
    service: int


@dataclass(frozen=True)
class CarriedOut:
    """A rank obeyed the orders of a part, which this service gave; `owner` is the epoch that owned the memory then."""

    place: Place
    epoch: int
    owner: int
    seq: int
    part: int
    stamped: tuple[tuple[int, int], ...]
    service: int


@dataclass(frozen=True)
class Executed:
    """A rank ran the launch of a step."""

    place: Place
    epoch: int
    seq: int


@dataclass(frozen=True)
class Invalidated:
    """A rank forgot what pages held, before a launch without an answer."""

    place: Place
    epoch: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Lapsed:
    """A lease was looked at; what requests held before and after."""

    replica: str
    before: str
    after: str


@dataclass(frozen=True)
class Hit:
    """A request was admitted with a prefix; `across`: pages of an earlier service life."""

    replica: str
    num_tokens: int
    across: bool


@dataclass(frozen=True)
class Wrote:
    """A service wrote of a replica into the store; `is_owned`: it decided for it when it began to."""

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
    """An engine read the pages of a request that ended as held; `right`: what it read is what was held, or the stamps
    said that it is not.
    """

    replica: str
    right: bool


@dataclass(frozen=True)
class Lost:
    """The pages of a held request changed though neither its engine nor the service had gone."""

    replica: str
    slot: int


@dataclass(frozen=True)
class Waited:
    """Between a service's read of a message and its answer."""

    seconds: float


@dataclass(frozen=True)
class Asked:
    """A bystander asked a service that ran, and waited so long while it did."""

    service: int
    what: str
    seconds: float
    is_answered: bool


@dataclass(frozen=True)
class Wrong:
    """A page that holds something else: `what` says which, and who looked."""

    what: str


@dataclass(frozen=True)
class Misled:
    """A follower of every batch of events believes something else than what is published."""

    what: str


@dataclass(frozen=True)
class Broken:
    """A state, or an end of a process, that cannot be."""

    what: str


@dataclass(frozen=True)
class Emptied:
    """Every request of a replica has ended."""

    replica: str
    free: int
    usable: int


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
        """Equal runs have equal digests. No name of code is in it, so that a renaming can be seen to change nothing."""
        digest, kinds = hashlib.sha256(), get_args(Record)
        for at_ns, record in self.records:
            digest.update(f"{at_ns} {kinds.index(type(record))} {astuple(record)}\n".encode())
        return digest.hexdigest()[:16]


def fingerprint(parts: Sequence[PartResult]) -> str:
    """Stands for an answer, on either side of the network."""
    told = hashlib.blake2b(digest_size=8)
    for part in parts:
        orders, columns = part.orders, (part.new_blocks, part.tables, part.peek_blocks)
        rows = (
            part.granted, part.preempted, part.admit_status, part.admit_hit, part.admit_granted,
            part.admit_single_group_hit, part.peek_hit, orders.stamp_block, orders.stamp, orders.copy_src,
            orders.copy_dst, orders.zero_block,
            *(column for blocks in columns for column in (blocks.row, blocks.group, blocks.count, blocks.ids)),
        )  # fmt: skip
        told.update(repr([[int(value) for value in row] for row in rows]).encode())
        told.update(f"{part.free_blocks} {part.reset_done}".encode())
    return told.hexdigest()
