"""The types of the arguments of a group manager: for its construction, for allocations and for look-ups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvplane.base.groups import GroupSpec, ReplicaSpec
from kvplane.base.step import Orders
from kvplane_core.spec.pool import BlockPool
from kvplane_core.spec.requests import Requests


@dataclass(frozen=True, slots=True)
class GroupSetup:
    """The arguments of a manager's constructor.

    Attributes:
        group: index of the group.
        spec: specification of the group.
        replica: specification of the replica.
        pool: the block pool, which all groups share.
        requests: state of all requests.
        orders: what ranks must do before the launch of the step; the manager adds to this list.
    """

    group: int
    spec: GroupSpec
    replica: ReplicaSpec
    pool: BlockPool
    requests: Requests
    orders: Orders


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """How far a request is computed while none of its steps is in flight.

    Attributes:
        computed: leading tokens whose pages are written.
        launch_end: position in tokens where the last launch ended, rejected drafts included.
        num_prompt: tokens of the request when it was added.
        loading: a load may still write its pages; no block has been released since the admission.
    """

    computed: int
    launch_end: int
    num_prompt: int
    loading: bool = False


class KeyIndex(Protocol):
    """Where look-ups find keys: the pool, or the union of the pool and the replica's tiers."""

    def find(self, domain: str, groups: Sequence[int], digest: bytes, horizon: int) -> list[int] | None:
        """Return, for each of the groups, a block that has the key; None if some group has none. See
        `BlockPool.find`.
        """


@dataclass(frozen=True, slots=True)
class Query:
    """A prefix look-up in groups that are looked up jointly.

    Attributes:
        digests: hashes of the request's full hash blocks.
        domain: domain of the request; keys of other domains are not found.
        groups: ids of the groups.
        max_tokens: the longest hit that may be returned.
        drops_last_block: leave out the last matched block (with partial hits: the last hash block), because drafters
            compute it again.
        horizon: a step number; keys that later steps registered are ignored.
        index: where keys are found.
    """

    digests: Sequence[bytes]
    domain: str
    groups: tuple[int, ...]
    max_tokens: int
    drops_last_block: bool
    horizon: int
    index: KeyIndex

    def find(self, digest: bytes) -> list[int] | None:
        """Return, for each of the groups, a block that has the key; None if some group has none."""
        return self.index.find(self.domain, self.groups, digest, self.horizon)
