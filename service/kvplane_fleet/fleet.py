"""All places: follows them, and claims what each would hit of a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import zmq.asyncio

from kvplane.base.errors import InvalidArgument
from kvplane.base.events import domain_mask
from kvplane.base.step import NO_EXTRA_KEYS, ExtraKeys
from kvplane.rpc.access import PLAIN, Access
from kvplane_fleet.domains import Domain
from kvplane_fleet.follow.inbox import Inbox
from kvplane_fleet.follow.order import SourceOrder
from kvplane_fleet.follow.replica_source import ReplicaSource
from kvplane_fleet.follow.zmq_source import ZmqSource
from kvplane_fleet.hits import Asked, Claim, claims
from kvplane_fleet.index import Index
from kvplane_fleet.native import NativeIndex, make_index
from kvplane_fleet.places import Place
from kvplane_fleet.settings import PlaceSettings
from kvplane_fleet.wire.events import KEY_BYTES, Tier


@asynccontextmanager
async def following(fleet: Fleet, places: Iterable[PlaceSettings]) -> AsyncIterator[Sequence[asyncio.Task[None]]]:
    """Follow the places while the context is entered, in a task for each, which only a bug ends; it is raised at the
    end.
    """
    context = zmq.asyncio.Context()
    for place in places:
        fleet.add(place)
    tasks = [asyncio.create_task(fleet.follow(name, context)) for name in fleet.followed]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        context.destroy(linger=0)
    for end in ends:
        if isinstance(end, Exception):
            raise end


# Of a replica's service that answers, and refuses: what the operator of the router has to do.
_STATES = {
    "UNAUTHENTICATED": "not authenticated",
    "PERMISSION_DENIED": "not permitted",
    "NOT_FOUND": "not registered",
}


@dataclass(frozen=True, slots=True)
class Followed:
    """A place and its source.

    Attributes:
        order: the order of its batches; None for a replica of kvplane, whose client keeps the order.
    """

    place: Place
    source: ZmqSource | ReplicaSource
    order: SourceOrder | None = None

    @property
    def state(self) -> str:
        """What is known of the engine, in a word or two."""
        if isinstance(self.source, ZmqSource) and self.source.is_given_up:
            return "given up"
        if not self.source.is_connected:
            error = self.source.error if isinstance(self.source, ReplicaSource) else None
            return _STATES.get(error.reason, "not connected") if error else "not connected"
        if self.place.withdrawn:
            return "withdrawn"
        if isinstance(self.source, ReplicaSource):
            return "partial" if self.source.partial else "current"
        assert self.order is not None
        if self.order.replaying:
            return "replaying"
        if self.place.domain is None and self.place.entries:
            return "unproven"
        return "partial" if self.order.partial else "current"

    @property
    def is_readable(self) -> bool:
        """Whether its peers may find what its entries name."""
        return self.source.is_connected and not self.place.withdrawn

    async def run(self, context: zmq.asyncio.Context) -> None:
        """Follow the engine until the task is cancelled."""
        if isinstance(self.source, ReplicaSource):
            await self.source.run()
        else:
            await self.source.run(context)

    async def wait_until_current(self) -> None:
        """Wait until the engine is connected and what it has was learned; from a kvplane service, until it answers."""
        if isinstance(self.source, ReplicaSource):
            await self.source.wait_until(0)
        else:
            await self.source.wait_until_current()


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request would compute.

    Attributes:
        tokens: its token ids.
        extra: LoRA, images and salt, which are in the hashes of its blocks.
        domain: its domain in kvplane; requests share blocks only within one.
        keys: the keys of its blocks, if they were computed before; `tokens` is not read then.
        num_keyed: number of its tokens, if there are `keys`.
        key_bytes: bytes of each of the `keys`.
    """

    tokens: Sequence[int]
    extra: ExtraKeys = NO_EXTRA_KEYS
    domain: str = ""
    keys: Sequence[int] | None = None
    num_keyed: int = 0
    key_bytes: int = KEY_BYTES

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.tokens) if self.keys is None else self.num_keyed

    def keys_of(self, domain: Domain) -> list[int]:
        """Return the keys of its blocks. Raises InvalidArgument if a token is out of range, or if it was given by keys
        of which the domain has another number.
        """
        mask = domain_mask(self.domain) & domain.mask
        if self.keys is None:
            return [key ^ mask for key in domain.keys(self.tokens, self.extra)]
        whole = max(self.num_keyed - domain.lookahead, 0) // domain.block_size
        if len(self.keys) != whole:
            raise InvalidArgument(
                f"{len(self.keys)} keys for {self.num_keyed} tokens, which are {whole} blocks of {domain.block_size}",
                field="prompt.keys",
                remedy="send the keys of all full hash blocks, or token_ids",
            )
        if self.keys and self.key_bytes < domain.key_bytes:
            raise InvalidArgument(
                f"keys of {self.key_bytes} bytes, where the engine states {domain.key_bytes}",
                field="prompt.keys",
                remedy=f"send the last {domain.key_bytes} bytes of each hash, with key_bytes, or token_ids",
            )
        return [key & domain.mask ^ mask for key in self.keys]


@dataclass(frozen=True, slots=True)
class PlaceClaim:
    """What one place would hit.

    Attributes:
        place: name of the place.
        tokens: length of the hit; 0 if it cannot be computed.
        claim: the claim in detail; None if it cannot be computed.
        inexact: why the hit of the engine may be another; "" if it is this one.
        expected: the same length, counting the prompts that were sent to the place and are not yet in its events.
        single_group: what one group alone would hit, where it is longer than `expected`, as counted there; else 0. A
            prompt that is computed there leaves what the other groups lack.
        host, disk: tokens after `expected` that it has in its host memory, and tokens after these on disk, at most: an
            engine decides what it loads, and not all that it loads counts as a hit of the device.
        peers: tokens after `expected` and `host` that it may load from the host memory of its peers, at most.
        peer: the peer one of whose groups has the most of the prompt in its host memory; "" without `peers`.
    """

    place: str
    tokens: int
    claim: Claim | None
    inexact: str
    expected: int = 0
    single_group: int = 0
    host: int = 0
    disk: int = 0
    peers: int = 0
    peer: str = ""

    @property
    def reachable(self) -> int:
        """Tokens that it need not compute, at most."""
        return self.expected + self.host + self.disk + self.peers


class Fleet:
    """The places that are followed; see `following`."""

    def __init__(self, access: Access = PLAIN) -> None:
        """`access`: TLS and token with which services are called."""
        self._access, self.index = access, make_index()
        self.followed: dict[str, Followed] = {}

    def add(self, settings: PlaceSettings) -> Followed:
        """Add a place, which `follow` then follows. Raises InvalidArgument if a token would be sent in plain text."""
        place = Place(settings, self.index)
        if settings.events is None:
            assert settings.service is not None, "settings name one of both"
            for address in settings.service.split(","):
                self._access.check(address.strip())
            replica = ReplicaSource(settings.service, settings.name, place, self._access)
            self.followed[settings.name] = one = Followed(place, replica)
            return one
        inbox = Inbox(place)
        order = SourceOrder(inbox, place.faults, can_replay=settings.replay is not None)
        source = ZmqSource((settings.events, settings.replay), settings.topic, order, inbox)
        self.followed[settings.name] = one = Followed(place, source, order)
        return one

    async def follow(self, name: str, context: zmq.asyncio.Context) -> None:
        """Follow a place that was added, until the task is cancelled; its entries are removed then."""
        one = self.followed[name]
        try:
            await one.run(context)
        finally:
            del self.followed[name]
            one.place.release()

    async def wait_until_current(self) -> None:
        """Wait until every place is connected and its replay has ended."""
        await asyncio.gather(*(one.wait_until_current() for one in self.followed.values()))

    def of_model(self, model: str) -> dict[str, Followed]:
        """Return the places of a model, by name."""
        return {name: one for name, one in self.followed.items() if one.place.serves(model)}

    def domains(self, model: str) -> set[Domain]:
        """Return how the places of a model hash, as far as it is proven."""
        known = set()
        for one in self.of_model(model).values():
            with suppress(InvalidArgument):
                known.add(one.place.domain_of(model))
        return known

    def claims(
        self,
        model: str,
        prompt: Prompt,
        keys: Mapping[Domain, Sequence[int]] | None = None,
        visible: Collection[str] | None = None,
    ) -> list[PlaceClaim]:
        """Return what each place of a model would hit of a prompt, the longest hit first.

        Args:
            model: name of the model.
            prompt: the prompt.
            keys: its keys by domain, if they are computed; those of other domains are computed here.
            visible: names of the places that are asked for; None = all.

        Raises:
            InvalidArgument: a token is out of range.
        """
        found, known = _Batch(), dict(keys or {})
        for name, one in self.of_model(model).items():
            if visible is None or name in visible:
                found.ask(name, one, model, prompt, known)
        return sorted(found.claims(self.index, prompt.num_tokens), key=lambda one: -one.tokens)


class _Batch:
    """The places whose hits are asked for, by the keys that they share."""

    def __init__(self) -> None:
        self._unknown: list[PlaceClaim] = []
        self._asked: dict[Domain, tuple[Sequence[int], list[tuple[str, Followed]]]] = {}

    def ask(self, name: str, one: Followed, model: str, prompt: Prompt, known: dict[Domain, Sequence[int]]) -> None:
        """Ask for a place. `known` has the prompt's keys by domain, and gets those that are computed."""
        try:
            domain = one.place.domain_of(model)
        except InvalidArgument as error:
            self._unknown.append(PlaceClaim(name, 0, None, str(error)))
            return
        try:
            if domain not in known:
                known[domain] = prompt.keys_of(domain)
        except InvalidArgument as error:
            if prompt.keys is None:
                raise
            self._unknown.append(PlaceClaim(name, 0, None, str(error)))
            return
        self._asked.setdefault(domain, (known[domain], []))[1].append((name, one))

    def claims(self, index: Index | NativeIndex, num_tokens: int) -> list[PlaceClaim]:
        """Return the claims of all places."""
        made = list(self._unknown)
        for keys, places in self._asked.values():
            lenders = _Lenders(places)
            asked = [_variants(one.place, lenders) for _, one in places]
            found = iter(claims(index, keys, num_tokens, [each for variants in asked for each in variants.values()]))
            of_place = [{variant: next(found) for variant in variants} for variants in asked]
            lent = {
                name: max(each[_LENT].alone) for (name, _), each in zip(places, of_place, strict=True) if _LENT in each
            }
            for (name, one), by_variant in zip(places, of_place, strict=True):
                claim = by_variant[_DEVICE]
                counted = by_variant.get(_EXPECTED, claim)
                tokens, alone = max(claim.tokens, counted.tokens), max(counted.alone, default=0)
                host = max(by_variant.get(Tier.HOST, counted).tokens, tokens) - tokens
                disk = max(by_variant.get(Tier.DISK, counted).tokens, tokens + host) - tokens - host
                peers = max(by_variant.get(_PEERS, counted).tokens, tokens + host) - tokens - host
                most = max((each for each in lenders.of(one.place) if each != name), key=lent.__getitem__, default="")
                single = alone if alone > tokens else 0
                state = "" if one.state == "current" else f"the place is {one.state}"
                inexact = one.place.layout().inexact or state
                loaded = (host, disk, peers, most if peers else "")
                made.append(PlaceClaim(name, claim.tokens, claim, inexact, tokens, single, *loaded))
        return made


class _Lenders:
    """Which places have something in their host memory that others may load, by namespace."""

    def __init__(self, places: Iterable[tuple[str, Followed]]) -> None:
        self._names: dict[bytes, list[str]] = {}
        cells: dict[bytes, list[int]] = {}
        read = {one.place.namespace for _, one in places if one.place.reads_peers}
        for name, one in places:
            if one.place.namespace in read and one.place.namespace and one.is_readable and one.place.has(Tier.HOST):
                self._names.setdefault(one.place.namespace, []).append(name)
                cells.setdefault(one.place.namespace, []).extend(one.place.lent.cells)
        self._cells = {namespace: tuple(of_all) for namespace, of_all in cells.items()}

    def of(self, place: Place) -> Sequence[str]:
        """Return the names of those that a place may read, which may be one of them."""
        return self._names.get(place.namespace, ())

    def cells(self, place: Place) -> Sequence[int]:
        """Return their cells; equal places have the same object."""
        return self._cells.get(place.namespace, ())


_DEVICE, _EXPECTED, _PEERS, _LENT = "device", "expected", "peers", "lent"


def _variants(place: Place, lenders: _Lenders) -> dict[object, Asked]:
    """Return what is asked of a place: its hit on the device, the same with what is expected there, and these with what
    is in its host memory, and also on disk or at its peers, as far as there is any; and what it lends to these.
    """
    expects, variants = bool(place.expected), dict[object, Asked]()
    variants[_DEVICE] = place.asked()
    if expects:
        variants[_EXPECTED] = place.asked(with_expected=True)
    if place.has(Tier.HOST):
        variants[Tier.HOST] = place.asked(expects, (Tier.HOST,))
    if place.has(Tier.DISK):
        variants[Tier.DISK] = place.asked(expects, (Tier.HOST, Tier.DISK))
    if shared := lenders.cells(place):
        variants[_LENT] = place.lent
        if place.reads_peers:
            variants[_PEERS] = place.asked(expects, (Tier.HOST,), shared)
    return variants
