"""What a worker registers with the service, and what the service assigns to it. A worker holds the pages of
one rank.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field
from enum import Enum

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import MAX_BLOCKS, TierKind, TierSpec
from kvplane.base.rank_plan import RankPlan
from kvplane.base.sections import Peers
from kvplane.base.stamps import MAX_EPOCH

MAX_ADDRESS_CHARS = 512
UNIX = "unix:"
_PARSED_BY_GRPC = frozenset("%?#")  # gRPC parses the path of a Unix socket as a URI: these characters change it
INCARNATION_BYTES = 16
MAX_PEERS = 1024
MAX_NIXL_BYTES = 8192
MAX_DEVICE_CHARS = 64


class WorkerState(Enum):
    """The state of a worker. The value is the name used on the wire."""

    STARTING = "starting"  # it has its plan, but no pages yet
    READY = "ready"  # engines can attach its pages
    LEAVING = "leaving"  # it is shutting down


@dataclass(frozen=True, slots=True)
class TierUse:
    """One tier of a worker, and what its movers have done since the worker started; see `TierUse` in plan.proto."""

    kind: TierKind
    slot_bytes: int = 0
    saved_blocks: int = 0
    saved_bytes: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    discarded_blocks: int = 0
    refused_blocks: int = 0
    failed_blocks: int = 0
    suspended: bool = False


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What the service knows about one worker.

    Attributes:
        rank: the rank whose pages the worker holds.
        worker_id: u64 that each worker process chooses at random, not 0.
        address: gRPC address of its `kvplane.v1.Worker`: "unix:" and a path that `is_socket_path` accepts.
        pid: its process id.
        device: device of its pages, such as "cpu" or "cuda:0".
        state: whether engines can attach its pages.
        incarnation: random number that identifies its page memory; 0 before the memory is allocated.
        owner_epoch: epoch of the engine life that owns the pages, the only one that may write them; 0 = none.
        plan_digest: digest of the memory layout of its pages; "" before they are allocated.
        tiers: the tiers that it holds, in the order of the replica's.
        host_incarnation: 16 bytes that name the memory of its host tier; b"" without one.
        mapped: host tiers of peers that it can read, each by its `host_incarnation`.
        nixl_arena: how workers on other hosts read its host tier over NIXL; b"" = they do not.
        nixl_peers: number of host tiers in `mapped` that it reads over NIXL.
    """

    rank: int
    worker_id: int
    address: str
    pid: int
    device: str
    state: WorkerState = WorkerState.STARTING
    incarnation: int = 0
    owner_epoch: int = 0
    plan_digest: str = ""
    tiers: tuple[TierUse, ...] = ()
    host_incarnation: bytes = b""
    mapped: tuple[bytes, ...] = ()
    nixl_arena: bytes = b""
    nixl_peers: int = 0

    def validate(self) -> None:
        """Raise InvalidArgument for the first attribute that is out of range; the error's field names it."""
        _require(self.worker_id > 0, "worker_id", self.worker_id, "choose a random u64 that is not 0")
        _require_address(self.address, "worker")
        _require(
            len(self.device) <= MAX_DEVICE_CHARS, "device", self.device, f"give at most {MAX_DEVICE_CHARS} characters"
        )
        _require(self.owner_epoch < MAX_EPOCH, "owner_epoch", self.owner_epoch, f"give less than {MAX_EPOCH}")
        _require(len(self.plan_digest) <= MAX_DEVICE_CHARS, "plan_digest", self.plan_digest, "give RankPlan.digest()")
        named = [*self.mapped, self.host_incarnation or bytes(INCARNATION_BYTES)]
        size = f"give names of {INCARNATION_BYTES} bytes, at most {MAX_PEERS} in mapped"
        is_right = len(named) <= 1 + MAX_PEERS and {len(one) for one in named} == {INCARNATION_BYTES}
        _require(is_right, "host_incarnation", [len(one) for one in named[:9]], size)
        _require(
            len(self.nixl_arena) <= MAX_NIXL_BYTES,
            "nixl_arena",
            len(self.nixl_arena),
            f"give at most {MAX_NIXL_BYTES} bytes",
        )
        _require(self.nixl_peers <= len(self.mapped), "nixl_peers", self.nixl_peers, "count some of `mapped`")
        kinds = [tier.kind for tier in self.tiers]
        _require(len(set(kinds)) == len(kinds), "tiers", [kind.value for kind in kinds], "name each kind once")


@dataclass(frozen=True, slots=True)
class PeerArena:
    """The host tier of a peer that a worker may read.

    Attributes:
        first_slot: slot of the tier of peers that stands for its slot 0.
        num_slots: number of its slots.
        address: of the peer's worker of the same rank.
        incarnation: `WorkerInfo.host_incarnation` of that worker.
        nixl_arena: `WorkerInfo.nixl_arena` of that worker.
    """

    first_slot: int
    num_slots: int
    address: str
    incarnation: bytes
    nixl_arena: bytes = b""

    def validate(self, where: str) -> None:
        """Raise InvalidArgument for the first attribute that is out of range; `where` names the arena in errors."""
        size = f"give at most {MAX_NIXL_BYTES} bytes"
        _require(0 < self.num_slots <= MAX_BLOCKS, "num_slots", self.num_slots, f"give 1 to {MAX_BLOCKS}", where)
        _require_address(self.address, where)
        _require(
            len(self.incarnation) == INCARNATION_BYTES, "incarnation", self.incarnation[:32], "give 16 bytes", where
        )
        _require(len(self.nixl_arena) <= MAX_NIXL_BYTES, "nixl_arena", len(self.nixl_arena), size, where)


@dataclass(frozen=True, slots=True)
class PeerNews:
    """What a service says of one of its replicas to another service.

    Attributes:
        replica: its name.
        is_gone: it is no peer any more.
        arenas: its host tier on each rank, if that has changed; if an incarnation is new, all slots are empty.
        rows: what slots of its host tier hold now, or hold no longer.
    """

    replica: str
    is_gone: bool = False
    arenas: tuple[PeerArena, ...] = ()
    rows: Peers = field(default_factory=Peers)


@dataclass(frozen=True, slots=True)
class Renewal:
    """The service's answer to a renewal: milliseconds of the lease, and the host tiers that the worker may read now."""

    lease_ms: int
    peers: tuple[PeerArena, ...] = ()


@dataclass(frozen=True, slots=True)
class Assignment:
    """The service's answer to a worker's registration.

    Attributes:
        plan: memory layout of the worker's rank; None = the engine has laid out the memory, which peers read.
        num_ranks: number of ranks of the replica.
        lease_ms: the registration expires if the worker does not renew it for this number of milliseconds.
        tiers: the tiers of the replica; the worker holds all their slots, with the bytes of its rank.
        content_id: names what the slots of a disk tier hold, over restarts of the worker: 8 bytes of the namespace,
            8 of the registration; b"" without tiers.
        namespace: names what gives the bytes of a slot their meaning, with plan and rank; b"" without tiers.
    """

    plan: RankPlan | None
    num_ranks: int
    lease_ms: int
    tiers: tuple[TierSpec, ...] = ()
    content_id: bytes = b""
    namespace: bytes = b""


def is_socket_path(path: str) -> bool:
    """Return whether gRPC, the operating system and pathlib read the same file from this path of a Unix socket."""
    is_normal = path == posixpath.normpath(path) and not path.startswith("//")
    return path.startswith("/") and is_normal and path.isprintable() and _PARSED_BY_GRPC.isdisjoint(path)


def _require_address(address: str, where: str) -> None:
    most = f"give at most {MAX_ADDRESS_CHARS} characters"
    form = "give unix:PATH with an absolute path that has no empty, . or .. component and no %, ? or #"
    _require(len(address) <= MAX_ADDRESS_CHARS, "address", address, most, where)
    is_path = address.startswith(UNIX) and is_socket_path(address.removeprefix(UNIX))
    _require(is_path, "address", address, form, where)


def _require(holds: bool, name: str, found: object, remedy: str, where: str = "worker") -> None:
    if not holds:
        raise InvalidArgument(f"{found!r} is out of range", field=f"{where}.{name}", remedy=remedy)
