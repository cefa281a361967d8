"""Requests of unary calls: clients use names, the core uses slots."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from kvplane.base.errors import LimitExceeded, NotFound
from kvplane.base.hashing import HashTail
from kvplane.base.step import NO_EXTRA_KEYS, ExtraKeys


@dataclass(slots=True)
class KnownRequest:
    """One request of unary calls. Its state is in the core.

    Attributes:
        slot: its number in the core.
        tail: state of its hash chain; None when the client computes the hashes.
        extra_keys: other inputs of its hashes.
    """

    name: str
    slot: int
    tail: HashTail | None
    extra_keys: ExtraKeys = NO_EXTRA_KEYS


class RequestBook:
    """Known requests by name and by slot. The lowest free slot is used, so that slots stay dense."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_name: dict[str, KnownRequest] = {}
        self._by_slot: dict[int, KnownRequest] = {}
        self._free: list[int] = []

    def find(self, name: str) -> KnownRequest | None:
        """The request of that name, None when there is none."""
        return self._by_name.get(name)

    def get(self, name: str, field: str = "request_id") -> KnownRequest:
        """The request of that name. Raises NotFound."""
        request = self._by_name.get(name)
        if request is None:
            raise NotFound(
                f"there is no request {name[:140]!r}",
                field=field,
                remedy="allocate it with its content first",
            )
        return request

    def name_of(self, slot: int) -> str:
        """Name of the request in that slot."""
        return self._by_slot[slot].name

    def next_slot(self) -> int:
        """The slot that the next new request will get; changes nothing. Raises LimitExceeded."""
        if len(self._by_name) >= self._limit:
            raise LimitExceeded(
                f"{self._limit} requests are known",
                field="request_id",
                remedy="free some, or raise max_requests of the service",
            )
        return self._free[0] if self._free else len(self._by_slot)

    def add(self, request: KnownRequest) -> None:
        """Add a request whose slot is `next_slot`."""
        assert request.name not in self._by_name, request
        if self._free:
            slot = heapq.heappop(self._free)
            assert slot == request.slot, request
        self._by_name[request.name] = request
        self._by_slot[request.slot] = request

    def remove(self, request: KnownRequest) -> None:
        """Remove a request and free its slot."""
        del self._by_name[request.name]
        del self._by_slot[request.slot]
        heapq.heappush(self._free, request.slot)
