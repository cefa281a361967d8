"""The values that a group manager is made of and asked with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvplane.base.groups import GroupSpec, ReplicaSpec
from kvplane.base.step import Orders
from kvplane_service.core.pool import BlockPool
from kvplane_service.core.requests import Requests


@dataclass(frozen=True, slots=True)
class GroupSetup:
    """The arguments of a manager's constructor.

    Attributes:
        group: index of the group.
        orders: where the manager puts what ranks must do before the launch.
    """

    group: int
    spec: GroupSpec
    replica: ReplicaSpec
    pool: BlockPool
    requests: Requests
    orders: Orders


@dataclass(frozen=True, slots=True)
class Need:
    """An allocation, to count the blocks that it would take from the free count.

    Attributes:
        slot: the request.
        num_slots: tokens of the request that need a slot, lookahead included.
        num_main: the same without lookahead.
        total_computed: tokens that need not be computed: hit and external ones included.
        local_computed: of these, not external.
        num_encoder: encoder tokens.
        capped: count at most what the whole sequence can hold at once (`full_fit`).
    """

    slot: int
    num_slots: int
    num_main: int
    total_computed: int
    local_computed: int
    num_encoder: int = 0
    capped: bool = False


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """How far a request is computed, with nothing in flight.

    Attributes:
        computed: leading tokens whose pages are written.
        launch_end: tokens of the last launch, rejected drafts included.
        num_prompt: tokens of the request when it was new.
    """

    computed: int
    launch_end: int
    num_prompt: int


@dataclass(frozen=True, slots=True)
class Query:
    """A prefix look-up in groups that are looked up jointly.

    Attributes:
        digests: hashes of the request's full hash blocks.
        domain: of the request.
        groups: ids of the groups.
        max_tokens: the longest hit that may be returned.
        drops_last_block: leave out the last matched block (with partial hits: the last hash block), as for drafts.
        horizon: keys that later steps registered are ignored.
    """

    digests: Sequence[bytes]
    domain: str
    groups: tuple[int, ...]
    max_tokens: int
    drops_last_block: bool
    horizon: int
