"""The registry of the replicas of this process. A registration comes in; an entry, with everything that serves the
replica, goes out.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from kvplane.base.errors import AlreadyExists, InvalidArgument, KvplaneError, LimitExceeded, NotFound
from kvplane.base.groups import EvictionPolicy, ReplicaSpec, TierKind
from kvplane.base.rank_plan import RankPlan
from kvplane_core.face.interface import ReplicaCore
from kvplane_service.config import Config
from kvplane_service.decisions.packed_log import LogBudget
from kvplane_service.replicas.engine_lives import Clock
from kvplane_service.replicas.host import ReplicaHost, new_replica
from kvplane_service.replicas.lenders import Member
from kvplane_service.replicas.peers import Namespace
from kvplane_service.replicas.recent import Recent
from kvplane_service.replicas.workers import TiersOfWorkers, WorkerRoster
from kvplane_service.runtime.executors import Executor, Offload
from kvplane_service.unary.hashing import ContentHasher
from kvplane_service.unary.service import UnaryCalls

_NAME = re.compile(r"[a-zA-Z0-9._/-]{1,128}", re.ASCII)
MAX_RANKS = 65536
MAX_NAMESPACE_BYTES = 64  # of a registration's digest
NAMESPACE_BYTES = 16
_MODEL_NAME_CHARS = 256


@dataclass(frozen=True, slots=True)
class Registration:
    """The parameters of a replica. Registering equal parameters again returns the same replica.

    Attributes:
        spec: specification of the block pool and its groups.
        num_ranks: number of ranks of the engine.
        namespace_digest: digest of all settings that must be equal for pages to be exchanged with another replica.
        plans: memory plans of the ranks, one per pipeline stage; empty if groups were given explicitly.
        registered_by: owner of the replica; "" without authentication.
        model_name: name of the model, for operators.
        nonce: drawn for a replica with tiers when it is registered: no two registrations share what a disk holds.
    """

    spec: ReplicaSpec
    num_ranks: int = 1
    namespace_digest: bytes = b""
    plans: tuple[RankPlan, ...] = field(default=(), compare=False)
    registered_by: str = field(default="", compare=False)
    nonce: int = field(default=0, compare=False)
    model_name: str = field(default="", compare=False)

    @property
    def content_id(self) -> bytes:
        """As `Assignment.content_id`."""
        namespace = hashlib.blake2b(self.namespace_digest, digest_size=8).digest()
        return namespace + self.nonce.to_bytes(8, "little") if self.spec.tiers else b""

    @property
    def namespace(self) -> bytes:
        """As `Assignment.namespace`."""
        spec = self.spec.normalized
        named = [self.registered_by, self.namespace_digest, self.num_ranks, spec.hash_algorithm.value]
        named += [spec.hash_block_size, spec.groups, [plan.digest() for plan in self.plans]]
        return hashlib.blake2b(repr(named).encode(), digest_size=NAMESPACE_BYTES).digest() if spec.tiers else b""

    def agrees_with(self, other: Registration) -> bool:
        """Whether both registrations describe the same replica."""
        mine, others = (replace(one, spec=one.spec.normalized) for one in (self, other))
        return mine == others and (self.plans == other.plans or not (self.plans and other.plans))


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered replica and the objects that serve it.

    Attributes:
        registration: parameters of the replica.
        host: decides which session or call may write.
        unary: applies unary calls through the host.
        workers: the workers of the ranks.
        offload: thread for long steps and calls, which all replicas share.
        recent: samples of the last hour.
        namespace: the replicas that may read each other's host tiers; None if this one has none.
    """

    registration: Registration
    host: ReplicaHost
    unary: UnaryCalls
    workers: WorkerRoster
    offload: Offload
    recent: Recent = field(default_factory=Recent)
    namespace: Namespace | None = None

    def extend_leases(self, late_ns: int) -> None:
        """Extend every lease of the replica by `late_ns` nanoseconds, in which the process could not
        receive messages.
        """
        self.host.extend_lease(late_ns)
        self.workers.extend_leases(late_ns)


class UnknownReplica(NotFound):
    """Raised if this process does not serve the replica; another process may serve it."""

    def __init__(self, replica: str) -> None:
        super().__init__(f"there is no replica {replica!r}", field="replica", remedy="register it first")
        self.replica = replica


class Registry:
    """Replicas by name, within the limits of the configuration.

    Attributes:
        logs: memory budget of the logs of all replicas.
        max_replicas: largest number of replicas.
        num_expired: number of replicas that have expired.
        namespaces: those of its replicas, by `Registration.namespace`.
        peer_services: whether each other service that is followed answers, by address.
    """

    def __init__(self, config: Config, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._hasher = ContentHasher(config)
        self._offload = Executor("long steps")  # pure Python work: a second thread would not be faster
        self.logs = LogBudget(config.log_bytes)
        self.max_replicas, self.num_expired = config.max_replicas, 0
        self._entries: dict[str, Entry] = {}
        self.namespaces: dict[bytes, Namespace] = {}
        self.peer_services: dict[str, bool] = {}
        self._watchers: list[Callable[[Entry], None]] = []
        self._removal_watchers: list[Callable[[str], None]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def one_by_one(self) -> Iterator[Entry]:
        """Iterate over the replicas, looking up each one when its turn comes.

        A loop that pauses between two replicas thus skips replicas that are removed meanwhile, and does not keep them
        alive.
        """
        for name in list(self._entries):
            if name in self._entries:
                yield self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def get(self, name: str) -> Entry:
        """Return the replica of that name. Raises UnknownReplica."""
        entry = self._entries.get(name)
        if entry is None:
            raise UnknownReplica(name)
        return entry

    @staticmethod
    def is_name(name: str) -> bool:
        """Whether `name` is a valid replica name."""
        return _NAME.fullmatch(name) is not None

    def default_policy(self, name: str) -> EvictionPolicy:
        """Return the eviction policy of a registration that names none: the replica's, or the configured one."""
        entry = self._entries.get(name)
        return EvictionPolicy(self._config.eviction) if entry is None else entry.registration.spec.eviction

    def register(self, name: str, registration: Registration) -> Entry:
        """Create a replica, or return the existing one with an equal registration.

        Raises:
            InvalidArgument, LimitExceeded, AlreadyExists: as `find_equal`.
        """
        return self.find_equal(name, registration) or self.add(name, registration, new_replica(registration.spec))

    def find_equal(self, name: str, registration: Registration) -> Entry | None:
        """Return the existing replica with an equal registration; None if the name is free and limits allow a new one.

        Raises:
            InvalidArgument: the name, the spec or a count is invalid.
            LimitExceeded: too many replicas, groups or blocks.
            AlreadyExists: the name has a different registration.
        """
        if not self.is_name(name):
            raise InvalidArgument(
                f"{name[:140]!r} is not a valid name",
                field="replica",
                remedy="use 1 to 128 characters of [a-zA-Z0-9._/-]",
            )
        entry = self._entries.get(name)
        if entry is None:
            self._check(registration)
            return None
        entry.host.touch()
        if not entry.registration.agrees_with(registration):
            raise AlreadyExists(
                f"{name} is registered with {_difference(entry.registration, registration)}",
                field="replica",
                remedy=f"choose another name, or remove it first: DeregisterReplica, `kvplane deregister {name}`",
            )
        return entry

    def add(self, name: str, registration: Registration, replica: ReplicaCore) -> Entry:
        """Add a replica that the caller has built; returns the existing replica if an equal one was added meanwhile.

        Raises as `find_equal`.
        """
        entry = self.find_equal(name, registration)
        if entry is None:
            if registration.spec.tiers and not registration.nonce:
                registration = replace(registration, nonce=secrets.randbits(64) or 1)
            host = ReplicaHost(name, replica, self._config, self._clock, registration.num_ranks, self.logs)
            lease_ms = self._config.worker_lease_ms
            tiers = TiersOfWorkers(registration.spec.tiers, registration.content_id, registration.namespace)
            lent = _lends_pool(registration.spec)
            workers = WorkerRoster(registration.plans, registration.num_ranks, lease_ms, self._clock, tiers, lent)
            unary = UnaryCalls(host, self._config, self._hasher, self._offload)
            namespace = self._join(registration, host, workers)
            entry = Entry(registration, host, unary, workers, self._offload, namespace=namespace)
            self._entries[name] = entry
            for watcher in self._watchers:
                watcher(entry)
        return entry

    def _join(self, registration: Registration, host: ReplicaHost, workers: WorkerRoster) -> Namespace | None:
        spec = registration.spec
        is_lent = (spec.tiers and spec.tiers[0].kind is TierKind.HOST) or _lends_pool(spec)
        if not is_lent or not spec.events:
            return None  # without events the keys that it holds are unknown
        digest = registration.namespace
        namespace = self.namespaces.setdefault(digest, Namespace(digest if self._config.peer_services else b""))
        member = Member(host.name, host, spec, registration.num_ranks, workers)
        namespace.join(member)
        host.join(namespace, member)
        return namespace

    def watch(self, watcher: Callable[[Entry], None]) -> None:
        """Call `watcher` with every replica that is added from now on."""
        self._watchers.append(watcher)

    def watch_removals(self, watcher: Callable[[str], None]) -> None:
        """Call `watcher` with the name of every replica that is removed from now on."""
        self._removal_watchers.append(watcher)

    def remove(self, name: str, epoch: int | None = None) -> None:
        """Deregister a replica, and end its session and subscriptions.

        Raises:
            NotFound: no such replica.
            StaleEpoch: `epoch` is given and is not the current one.
        """
        if epoch is not None:
            self.get(name).host.check_epoch(epoch)
        self.let_go(name, NotFound(f"{name} was deregistered", field="replica", remedy="register it again"))
        for watcher in self._removal_watchers:
            watcher(name)

    def let_go(self, name: str, reason: KvplaneError) -> None:
        """Stop serving a replica that another process owns from now on; its session and subscriptions end with
        `reason`.

        Raises:
            NotFound: no such replica.
        """
        entry = self.get(name)
        host = entry.host
        del self._entries[name]
        if entry.namespace is not None:
            entry.namespace.leave(name)
            if not len(entry.namespace):
                self.namespaces.pop(entry.registration.namespace, None)
        host.retire(reason)

    def page(self, after: str, size: int) -> list[Entry]:
        """Return at most `size` replicas whose names are greater than `after`, in order of name."""
        names = sorted(name for name in self._entries if name > after)
        return [self._entries[name] for name in names[:size]]

    def _check(self, registration: Registration) -> None:
        spec, config = registration.spec, self._config
        spec.validate()
        if not 1 <= registration.num_ranks <= MAX_RANKS:
            raise InvalidArgument(
                f"{registration.num_ranks} is not a valid number of ranks",
                field="num_ranks",
                remedy=f"give 1 to {MAX_RANKS}",
            )
        if len(registration.namespace_digest) > MAX_NAMESPACE_BYTES:
            raise InvalidArgument(
                f"{len(registration.namespace_digest)} bytes",
                field="namespace_digest",
                remedy=f"give at most {MAX_NAMESPACE_BYTES} bytes",
            )
        if not is_model_name(registration.model_name):
            raise InvalidArgument(
                f"{registration.model_name[:64]!r} cannot be shown",
                field="model_name",
                remedy=f"give at most {_MODEL_NAME_CHARS} printable characters",
            )
        if spec.tiers and not registration.namespace_digest:
            raise InvalidArgument(
                "a tier outlives the engine, so what it stores must be named",
                field="namespace_digest",
                remedy="give a digest of all that the pages depend on: weights, their revision, RoPE, scales, adapters",
            )
        blocks = sum(entry.registration.spec.num_stamps for entry in self) + spec.num_stamps
        _limit(len(spec.groups), config.max_groups, "max_groups", "groups")
        _limit(spec.num_blocks, config.max_blocks, "max_blocks", "num_blocks")
        for index, tier in enumerate(spec.tiers):
            _limit(tier.num_blocks, config.max_blocks, "max_blocks", f"tiers[{index}].num_blocks")
        _check_room(blocks <= config.max_total_blocks, f"{spec.num_stamps} blocks", "max_total_blocks", "num_blocks")
        _check_room(len(self) < config.max_replicas, "another replica", "max_replicas", "replica")


def _lends_pool(spec: ReplicaSpec) -> bool:
    """Whether peers read the pool of a replica, which is in host memory."""
    return bool(spec.tiers) and spec.tiers[0].kind is TierKind.PEERS


def is_model_name(name: str) -> bool:
    """Whether operators can be shown this name of a model; "" is one."""
    return len(name) <= _MODEL_NAME_CHARS and name.isprintable()


def _limit(value: int, limit: int, key: str, field: str) -> None:
    if value > limit:
        raise LimitExceeded(f"{value} is over the limit of {limit}", field=field, remedy=f"raise {key} of the service")


def _check_room(is_there: bool, what: str, key: str, field: str) -> None:
    """Raise LimitExceeded if `is_there` is false. The message does not reveal how much other owners use."""
    if not is_there:
        raise LimitExceeded(f"no room for {what}", field=field, remedy=f"raise {key} of the service")


def _difference(old: Registration, new: Registration) -> str:
    """Describe the first difference between two registrations, with the value of the old one."""
    if old.num_ranks != new.num_ranks:
        return f"num_ranks {old.num_ranks}"
    if old.namespace_digest != new.namespace_digest:
        return "another namespace_digest"
    for name in ReplicaSpec.__dataclass_fields__:
        value = getattr(old.spec.normalized, name)
        if value != getattr(new.spec.normalized, name):
            return f"other groups ({len(value)})" if name == "groups" else f"{name} {value}"
    if old.plans != new.plans:
        return "another layout of its memory"
    raise AssertionError("equal registrations differ")
