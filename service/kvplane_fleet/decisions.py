"""Decides where a prompt is answered: the claims of all places, priced in seconds, and the prompts already sent there.

    claims ─▶ costs ─▶ policy ─▶ booking ─▶ reports ─▶ fitted costs, claimed against real tokens

A miss is computed while others wait, so its time counts for the prompts in flight too, as far as some place has what is
missed: twice their number at the place with this one, at most their mean number per place, which counts as one at
least. With its own time alone a fleet that runs short of memory spreads prefixes over all engines, and computes them
repeatedly; with the mean alone an idle engine is never given a prompt.

What a peer has is loaded soon, but into blocks of its own, where prompts at one place would share them: with the time
of the load alone prompts spread over all engines, until memory is short everywhere. So its blocks delay others too.

A claim is multiplied by the share of the place's recent claims that came true: content for which a prompt waits long in
a queue may be evicted before it is computed.

An engine caches a window or a state where a prompt ends, and where a second prompt left the first one. So the second
prompt of a group that shares its beginning hits nothing anywhere, and only where it is computed on the same engine as
the first one will the third hit. What that saves later is subtracted, as far as no engine has it already.
"""

from __future__ import annotations

import heapq
import logging
import math
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from kvplane.base.errors import InvalidArgument, LimitExceeded, NotFound
from kvplane_fleet.costs import EngineCosts, Prior
from kvplane_fleet.domains import Domain
from kvplane_fleet.fleet import Fleet, Followed, PlaceClaim, Prompt
from kvplane_fleet.held import NOTHING, STRIDE, Share
from kvplane_fleet.policies import Chooser, Cost, Option, Policy
from kvplane_fleet.returns import sample
from kvplane_fleet.settings import RouterSettings
from kvplane_fleet.wire.events import KEY_MASK
from kvplane_fleet.work import Booking, Work

DELAY_WEIGHT = 2.0
EXPECTED_S = 2.0  # for which a prompt's entries are expected, or twice the predicted time to its first token
PUBLISHED_S = 1.0  # after the first token, within which the engine has published them
OWNERS_SHARE = 2  # one owner may book one part in this number of `max_decisions`
RELEARNED_S = 600.0  # least time between two: a caller that reports what is not so costs a place no more
DOUBTS, DOUBTED_S = 3, 60.0  # unexplained differences within a time, after which a cache is learned again
TIER_WEIGHT = 0.8  # of a token in host memory or on disk, in the policy `weights`, as llm-d has it
SHARED_MEMORY = 0.02  # weight of a prompt in the mean of what recent prompts share
_UNKNOWN_OUTPUT = 200  # tokens that are generated for a prompt that does not say

Keys = Mapping[Domain, Sequence[int]]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt to be sent somewhere.

    Attributes:
        model: name of the model.
        prompt: the prompt.
        candidates: names of the places that may be chosen; None = all of the model.
        visible: names of the places that its caller may know of; None = all. No cost depends on any other.
        owner: name of its caller's owner, who has a share of `max_decisions`; "" = the router's own.
        policy: None = the router's.
        book: whether it will be sent to the chosen place.
        output_tokens: tokens that will be generated; 0 = unknown.
    """

    model: str
    prompt: Prompt
    candidates: frozenset[str] | None = None
    policy: Policy | None = None
    book: bool = False
    output_tokens: int = 0
    visible: frozenset[str] | None = None
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Scored:
    """A place with its claim and costs."""

    claim: PlaceClaim
    option: Option


@dataclass(frozen=True, slots=True)
class Around:
    """What all places have in common at a decision.

    Attributes:
        in_flight: mean number of prompts in flight at a place.
        longest: tokens that the place with the most of them has, in any tier.
        known: tokens that some group of some place has: the others are computed wherever the prompt is sent.
        now_s: the router's time.
    """

    in_flight: float
    longest: int
    known: int
    now_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """The places, the chosen one first; `name` is "" unless it is booked."""

    name: str
    policy: Policy
    places: Sequence[Scored]


@dataclass(frozen=True, slots=True)
class Event:
    """What is reported of a booked prompt; `at_s` on the router's clock."""

    at_s: float
    cached: int | None = None
    output_tokens: int = 0


class Decisions:
    """The decisions of one router. Nothing is awaited, so that each call sees the fleet in one state."""

    def __init__(self, fleet: Fleet, settings: RouterSettings, clock: Callable[[], float]) -> None:
        """`clock` returns seconds that never decrease."""
        self._fleet, self.settings, self._clock = fleet, settings, clock
        self._chooser = Chooser(Random(secrets.randbits(64)))
        self._prior = Prior(settings.prefill_tokens_per_s, settings.decode_s)
        self._bookings = OrderedDict[str, Booking]()  # whose first one is found at once, however many have ended
        self._of_owner = Counter[str]()  # bookings
        self._expected: dict[str, tuple[float, str]] = {}  # by decision: until when, at which place
        self._due: list[tuple[float, str]] = []  # a heap of these times, and of some that have changed since
        self._shared = 0.5  # part of recent prompts that some group of some place had: how probably a later one shares
        self._doubts: dict[str, deque[float]] = {}
        self._relearned: dict[str, float] = {}  # when a place was last learned again
        self.booked: Callable[[str, Ask], None] = _no_one_listens  # takes each place with the prompt sent there
        self.work: dict[str, Work] = {}

    @property
    def followed(self) -> Mapping[str, Followed]:
        """The places, by name."""
        return self._fleet.followed

    def work_of(self, place: str) -> Work:
        """Return what was sent to a place."""
        if place not in self.work:
            self.work[place] = Work(EngineCosts(self._prior))
        return self.work[place]

    # -- scores ------------------------------------------------------------------------------------------------------

    def score(self, ask: Ask, keys: Keys) -> Decision:
        """Order the places for a prompt, whose keys by domain are given.

        Raises:
            NotFound: no place has the model, or none of these is a candidate.
            InvalidArgument: the prompt is empty.
            LimitExceeded: too many prompts are booked.
        """
        if ask.prompt.num_tokens < 1:
            raise InvalidArgument("it has no token", field="prompt", remedy="send token_ids, or keys with num_tokens")
        self.sweep()
        if ask.book and len(self._bookings) >= self.settings.max_decisions:
            raise LimitExceeded(
                f"{len(self._bookings)} booked prompts have not ended, the maximum",
                remedy="report the stage ENDED of each, or raise max_decisions",
            )
        most = max(self.settings.max_decisions // OWNERS_SHARE, 1)
        if ask.book and ask.owner and self._of_owner[ask.owner] >= most:
            raise LimitExceeded(
                f"{most} booked prompts of {ask.owner} have not ended, the most of one owner",
                remedy="report the stage ENDED of each, or raise max_decisions",
            )
        found = self._fleet.claims(ask.model, ask.prompt, keys, ask.visible)
        claims = {one.place: self._worth(one) for one in found}
        allowed = [name for name in claims if ask.candidates is None or name in ask.candidates]
        if not allowed:
            raise NotFound(_no_candidate(ask, claims), field="model")
        now_s = self._clock()
        around = Around(
            sum(self.work_of(name).in_flight for name in claims) / len(claims),
            max(one.reachable for one in claims.values()),
            max(max(one.reachable, one.single_group) for one in claims.values()),
            now_s,
        )
        begun = {domain: each[STRIDE - 1 :: STRIDE] for domain, each in keys.items()}
        options = [self._option(claims[name], ask, around, begun) for name in allowed]
        policy = ask.policy or self.settings.policy
        # Places that cannot be reached come last, whatever they claim.
        ordered = self._chooser.order(policy, options, _start_of(ask.prompt, keys))
        ordered.sort(key=lambda one: not self._fleet.followed[one.place].source.is_connected)
        places = [Scored(claims[one.place], one) for one in ordered]
        name = self._book(ask, keys, places, now_s, begun) if ask.book else ""
        return Decision(name, policy, places)

    def _option(self, claim: PlaceClaim, ask: Ask, around: Around, begun: Keys) -> Option:
        work, place = self.work_of(claim.place), self._fleet.followed[claim.place].place
        num_tokens = ask.prompt.num_tokens
        share = min(claim.reachable / num_tokens, 1.0)
        cached = int(work.trust * share * (num_tokens - 1))
        miss_s = work.costs.prefill_s(num_tokens - cached, cached)
        output = ask.output_tokens or _UNKNOWN_OUTPUT
        evicted = self._evicted(claim, num_tokens)
        taken = self._share(claim, ask, begun)
        lacking = work.lacking(taken, place.capacity)
        delay = DELAY_WEIGHT * min(max(around.in_flight, 1.0), work.in_flight + 1)
        unknown_s = work.costs.prefill_s(max(num_tokens - around.known, 1), around.known)
        later, probable = max(claim.single_group - around.longest, 0), work.trust * self._shared
        cost = Cost(
            queue_s=work.queue_s(around.now_s),
            miss_s=miss_s,
            delay_s=delay * max(miss_s - unknown_s, 0.0)
            + work.crowding_s(taken, place.capacity) * min(claim.peers / num_tokens, 1.0),
            displacement_s=evicted * miss_s / max(num_tokens - cached, 1) * place.returns.share,
            decode_s=work.costs.row_s() * work.in_flight * output / 2,
            later_s=-probable * (1 + delay) * work.costs.prefill_s(later, around.longest) if later else 0.0,
            load_s=work.trust * self._load_s(claim),
            memory_s=work.memory_s(lacking, place.capacity),
        )
        lacked = min(lacking / place.capacity, 1.0) if lacking else 0.0
        weighted = min((claim.expected + TIER_WEIGHT * (claim.reachable - claim.expected)) / num_tokens, 1.0)
        return Option(claim.place, weighted, work.waiting(around.now_s), work.in_flight, lacked, cost)

    def _share(self, claim: PlaceClaim, ask: Ask, begun: Keys) -> Share:
        """Return the memory that a prompt takes at a place. `begun`: one in STRIDE of its keys, by domain."""
        if claim.claim is None:
            return NOTHING
        place, tokens = self._fleet.followed[claim.place].place, ask.prompt.num_tokens
        rule, output = place.layout().rule, ask.output_tokens or _UNKNOWN_OUTPUT
        blocks = rule.num_held(tokens)
        return Share(begun.get(place.domain_of(ask.model), ()), blocks, rule.num_held(tokens + output) - blocks)

    def _load_s(self, claim: PlaceClaim) -> float:
        settings = self.settings
        own_s = claim.host / settings.host_tokens_per_s + claim.disk / settings.disk_tokens_per_s
        return own_s + claim.peers / settings.peer_tokens_per_s

    def _worth(self, claim: PlaceClaim) -> PlaceClaim:
        """Return a claim with what its peers have only if that is loaded sooner than it is computed: an engine that
        reads peers measures both.
        """
        computed_s = self.work_of(claim.place).costs.prefill_s(claim.peers, claim.reachable - claim.peers)
        pays = claim.peers / self.settings.peer_tokens_per_s < computed_s
        return claim if pays or not claim.peers else replace(claim, peers=0, peer="")

    def _evicted(self, claim: PlaceClaim, num_tokens: int) -> float:
        """Return the tokens whose entries a place has to evict for a prompt; they count where all groups have them."""
        place = self._fleet.followed[claim.place].place
        if claim.claim is None or not self.settings.price_displacement or not place.capacity:
            return 0.0
        left = place.num_blocks_of(num_tokens)
        needed = left * (1 - claim.expected / num_tokens)
        evicted = max(0.0, needed - max(0, place.capacity - place.device_entries))
        return evicted * num_tokens / max(left, 1)

    # -- bookings ----------------------------------------------------------------------------------------------------

    def _book(self, ask: Ask, keys: Keys, places: Sequence[Scored], now_s: float, begun: Keys) -> str:
        chosen, name = places[0], secrets.token_hex(8)
        known = max(max(one.claim.reachable, one.claim.single_group) for one in places)
        self._shared += SHARED_MEMORY * (known / ask.prompt.num_tokens - self._shared)
        place = self._fleet.followed[chosen.claim.place].place
        cost = chosen.option.cost
        booking = Booking(
            name, chosen.claim.place, ask.prompt.num_tokens, chosen.claim.tokens, chosen.claim.expected,
            cost.first_token_s, cost.miss_s,
            min((one.option.cost.first_token_s for one in places[1:]), default=math.inf),
            chosen.claim.inexact, (place.stores, place.removals), now_s, chosen.claim.reachable - chosen.claim.expected,
            cost.load_s, owner=ask.owner, reads_peers=place.reads_peers,
        )  # fmt: skip
        self._bookings[name] = booking
        self._of_owner[ask.owner] += 1
        self.booked(booking.place, ask)
        self.work_of(booking.place).book(booking, self._share(chosen.claim, ask, begun))
        of_place = keys.get(place.domain_of(ask.model)) if chosen.claim.claim is not None else None
        if of_place is not None:
            sampled = sample(of_place)
            for one in places:
                self._fleet.followed[one.claim.place].place.returns.asked(sampled)
            place.expect(name, of_place, booking.num_tokens, chosen.claim.single_group)
            self._expect(name, now_s + max(EXPECTED_S, 2 * booking.first_token_s), booking.place)
        return name

    def booking(self, name: str) -> Booking:
        """Return a booked prompt. Raises NotFound if it has ended, expired or never was."""
        if name not in self._bookings:
            raise NotFound(
                f"there is no open decision {name[:140]!r}",
                field="decision_id",
                remedy="report while the prompt is in flight, each stage once, at the router that decided",
            )
        return self._bookings[name]

    def started(self, name: str, event: Event) -> str:
        """The engine begins with a prompt. Returns the cause of a wrong claim; "" without `event.cached`."""
        one = self.booking(name)
        self.work_of(one.place).start(one, event.at_s)
        return self._learn(one, event)

    def first_token(self, name: str, event: Event) -> str:
        """The first token of a prompt has come. Returns as `started`."""
        one = self.booking(name)
        cause = self._learn(one, event)
        self.work_of(one.place).first_token(one, event.at_s)
        self._expect_until(name, event.at_s + PUBLISHED_S)
        return cause

    def ended(self, name: str, event: Event) -> str:
        """A prompt has ended. Returns as `started`."""
        one = self.booking(name)
        cause = self._learn(one, event)
        self._left(one)
        self.work_of(one.place).end(one, event.at_s, event.output_tokens)
        self._expect_until(name, event.at_s + PUBLISHED_S)
        return cause

    def _learn(self, one: Booking, event: Event) -> str:
        if event.cached is None:
            return ""
        followed = self._fleet.followed.get(one.place)
        seen = (followed.place.stores, followed.place.removals) if followed else one.seen
        cause = self.work_of(one.place).learn(one, event.cached, seen)
        if cause != "equal":
            claimed = f"{one.expected} and {one.loaded} in tiers of {one.num_tokens} tokens claimed"
            _log.debug("%s at %s: %s, %d cached: %s", one.name, one.place, claimed, event.cached, cause)
        if cause == "unexplained" and followed is not None:
            self._doubt(one.place, followed)
        return cause

    def _doubt(self, place: str, followed: Followed) -> None:
        """Learn an engine's cache again if its hits contradict its events repeatedly."""
        doubts = self._doubts.setdefault(place, deque(maxlen=DOUBTS))
        now_s = self._clock()
        doubts.append(now_s)
        if now_s - self._relearned.get(place, -math.inf) < RELEARNED_S:
            return
        if len(doubts) == DOUBTS and doubts[-1] - doubts[0] <= DOUBTED_S:
            doubts.clear()
            self._relearned[place] = now_s
            _log.warning("the hits of %s contradict its events: its cache is learned again", place)
            followed.source.learn_again()

    def _expect_until(self, name: str, at_s: float) -> None:
        if name in self._expected:
            until, place = self._expected[name]
            self._expect(name, min(until, at_s), place)

    def _expect(self, name: str, until_s: float, place: str) -> None:
        self._expected[name] = until_s, place
        heapq.heappush(self._due, (until_s, name))

    def sweep(self) -> None:
        """Forget what is no longer expected, and prompts that no client reports on."""
        now_s = self._clock()
        while self._due and self._due[0][0] <= now_s:
            until_s, name = heapq.heappop(self._due)
            known_s, place = self._expected.get(name, (math.inf, ""))
            if known_s != until_s:
                continue  # it was changed, or swept
            del self._expected[name]
            if place in self._fleet.followed:
                self._fleet.followed[place].place.expected.forget(name)
        while self._bookings:
            one = next(iter(self._bookings.values()))
            if one.at_s + self.settings.forget_after_s > now_s:
                break
            self._left(one)
            self.work_of(one.place).forget(one)

    def _left(self, one: Booking) -> None:
        del self._bookings[one.name]
        self._of_owner[one.owner] -= 1
        if not self._of_owner[one.owner]:
            del self._of_owner[one.owner]


def _no_one_listens(place: str, ask: Ask) -> None:
    del place, ask


def _start_of(prompt: Prompt, keys: Keys) -> bytes:
    """Return what a prompt begins with: its first keys, or tokens where it is not known yet how engines hash."""
    first = next(iter(keys.values()), ())[:4]
    if first:
        return b"".join((key & KEY_MASK).to_bytes(8, "big") for key in first)
    return b"".join(token.to_bytes(4, "big") for token in prompt.tokens[:16])


def _no_candidate(ask: Ask, claims: Mapping[str, PlaceClaim]) -> str:
    if not claims:
        return f"no place has the model {ask.model[:140]!r}"
    return f"none of the {len(ask.candidates or ())} candidates is a place of the model {ask.model[:140]!r}"
