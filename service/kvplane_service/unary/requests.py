"""The requests of unary calls: maps the names that clients use to slots, the small numbers by which the core knows
requests.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from kvplane.base.errors import LimitExceeded, NotFound
from kvplane.base.hashing import HashTail
from kvplane.base.step import NO_EXTRA_KEYS, ExtraKeys


@dataclass(slots=True)
class KnownRequest:
    """One request of unary calls; its tokens and blocks are in the core.

    Attributes:
        name: the request id that the client chose.
        slot: the small number by which the core knows the request.
        tail: state of its hash chain; None if the client computes the hashes.
        extra_keys: inputs of its hashes other than tokens, such as the LoRA adapter.
    """

    name: str
    slot: int
    tail: HashTail | None
    extra_keys: ExtraKeys = NO_EXTRA_KEYS


class RequestBook:
    """The known requests by name and by slot (number in the core). A new request gets the lowest free slot, so that the
    arrays that the core indexes by slot stay short.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_name: dict[str, KnownRequest] = {}
        self._by_slot: dict[int, KnownRequest] = {}
        self._free: list[int] = []

    def find(self, name: str) -> KnownRequest | None:
        """Return the request with this name, None if there is none."""
        return self._by_name.get(name)

    def get(self, name: str, field: str = "request_id") -> KnownRequest:
        """Return the request of that name. Raises NotFound, with `field` as the field at fault."""
        request = self._by_name.get(name)
        if request is None:
            raise NotFound(
                f"there is no request {name[:140]!r}",
                field=field,
                remedy="allocate it with its content first",
            )
        return request

    def name_of(self, slot: int) -> str:
        """Return the name of the request that has this slot (number in the core)."""
        return self._by_slot[slot].name

    def next_slot(self) -> int:
        """Return the slot (number in the core) that the next new request will get. Changes nothing. Raises
        LimitExceeded if no slot is free.
        """
        if len(self._by_name) >= self._limit:
            raise LimitExceeded(
                f"the replica has {self._limit} requests, the limit",
                field="request_id",
                remedy="free some, or raise max_requests of the service",
            )
        return self._free[0] if self._free else len(self._by_slot)

    def add(self, request: KnownRequest) -> None:
        """Add a request whose slot is the result of `next_slot`."""
        assert request.name not in self._by_name, request
        if self._free:
            slot = heapq.heappop(self._free)
            assert slot == request.slot, request
        self._by_name[request.name] = request
        self._by_slot[request.slot] = request

    def remove(self, request: KnownRequest) -> None:
        """Remove a request and make its slot (number in the core) available to new requests."""
        del self._by_name[request.name]
        del self._by_slot[request.slot]
        heapq.heappush(self._free, request.slot)
