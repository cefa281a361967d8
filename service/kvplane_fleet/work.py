"""The prompts that were sent to one place, what they cost it, and how true the claims about them were.

    booked ──▶ started ──▶ first token ──▶ ended
       what waits for its first token is the queue; what has not ended is in flight

An engine computes prompts one after another (or in chunks of several, which takes equally long in all), so the
time that a prompt's tokens took is that since the first token of the prompt before it, or since its own arrival.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvplane_fleet.costs import EngineCosts

UNREPORTED_S = 2.0  # a prompt counts as computed after this time, or twice the predicted time, if nothing is reported
TRUST_MEMORY = 0.1  # weight of a claim in the mean of those that came true


@dataclass(slots=True)
class Booking:
    """A prompt that was sent to a place; times in seconds of the router's clock.

    Attributes:
        name: id of the decision.
        place: name of the place.
        num_tokens: length of the prompt.
        hit: tokens that the events claimed.
        expected: tokens that the place was expected to hit.
        first_token_s: predicted time to the first token.
        miss_s: predicted time to compute what is not hit.
        best_other_s: least predicted time to the first token among the other places; infinite if there is none.
        inexact: why the claim may be wrong.
        seen: events of the place that stored and removed, at the decision.
        at_s: when it was booked.
        loaded: tokens after the expected ones that the place has in other tiers; the engine may load them.
        load_s: predicted time for that.
        started_s, token_s: when it began, and when its first token came; None before.
        in_flight: prompts in flight at the place when its first token came.
        owner: name of the owner who booked it.
    """

    name: str
    place: str
    num_tokens: int
    hit: int
    expected: int
    first_token_s: float
    miss_s: float
    best_other_s: float
    inexact: str
    seen: tuple[int, int]
    at_s: float
    loaded: int = 0
    load_s: float = 0.0
    started_s: float | None = None
    token_s: float | None = None
    in_flight: int = 0
    cached: int | None = None
    owner: str = ""

    @property
    def claimed(self) -> int:
        """Tokens that the place was claimed to have, in any tier."""
        return self.expected + self.loaded

    def cause(self, cached: int, seen: tuple[int, int]) -> str:
        """Return why the engine hit `cached` tokens: see ReportResponse in routing.proto. `seen` as now."""
        if cached in (self.expected, self.claimed):
            return "equal"
        if self.inexact:
            return "incomplete" if self.inexact.startswith("the place is") else "inexact"
        if self.expected != self.hit:
            return "expected"
        if self.loaded and cached > self.expected:
            return "loaded"
        at = cached < self.expected
        if seen[at] != self.seen[at]:
            return "removed" if at else "stored"
        return "unexplained"


@dataclass(slots=True)
class Truth:
    """How true the claims about one place were.

    Attributes:
        claimed, real, prompts: tokens that decisions expected to be cached, that were, and of all the prompts.
        differences: tokens by which they differ, by cause.
        regret_s: seconds by which first tokens came later than the best other place was predicted to have them.
        decisions: prompts booked.
        unreported: booked prompts that no client reported on.
    """

    claimed: int = 0
    real: int = 0
    prompts: int = 0
    differences: Counter[str] = field(default_factory=Counter)
    regret_s: float = 0.0
    decisions: int = 0
    unreported: int = 0


class Work:
    """The booked prompts of one place.

    Attributes:
        costs: the place's fitted costs.
        truth: the place's claims and what they became.
        trust: mean share of recent claims that came true; where memory is short, content leaves before its prompt
            comes.
    """

    def __init__(self, costs: EngineCosts) -> None:
        self.costs, self.truth = costs, Truth()
        self.trust = 1.0
        self._open: dict[str, Booking] = {}
        self._answered_s = -math.inf  # when the last prompt was booked whose first token was reported
        self._token_s = 0.0  # when the last first token came

    def __iter__(self) -> Iterator[Booking]:
        return iter(self._open.values())

    @property
    def in_flight(self) -> int:
        """Prompts that have not ended."""
        return len(self._open)

    def waiting(self, now_s: float) -> list[Booking]:
        """Return the prompts that wait for their first token, the oldest first."""
        return [one for one in self._open.values() if one.token_s is None and not self._is_presumed(one, now_s)]

    def queue_s(self, now_s: float) -> float:
        """Return the seconds until all prompts that wait have their first token."""
        waiting = self.waiting(now_s)
        if not waiting:
            return 0.0
        since = now_s - max(self._token_s, waiting[0].at_s)
        return max(waiting[0].miss_s - since, 0.0) + sum(one.miss_s for one in waiting[1:])

    def book(self, one: Booking) -> None:
        """Add a prompt."""
        self._open[one.name] = one
        self.truth.decisions += 1

    def start(self, one: Booking, at_s: float) -> None:
        """The engine begins with a prompt."""
        if one.started_s is None:
            one.started_s = at_s

    def first_token(self, one: Booking, at_s: float) -> None:
        """The first token of a prompt has come."""
        if one.token_s is not None:
            return
        began = max(one.started_s if one.started_s is not None else one.at_s, min(self._token_s, at_s))
        cached = one.claimed if one.cached is None else one.cached
        load_s = one.load_s if cached > one.expected else 0.0
        self.costs.take_prefill(max(one.num_tokens - cached, 1), cached, max(at_s - began - load_s, 0.0))
        one.token_s, one.in_flight = at_s, self.in_flight
        self._answered_s = max(self._answered_s, one.at_s)
        self._token_s = max(self._token_s, at_s)
        self.truth.regret_s += max(at_s - one.at_s - max(one.best_other_s, 0.0), 0.0)

    def learn(self, one: Booking, cached: int, seen: tuple[int, int]) -> str:
        """Compare the claim with what the engine had cached; return the cause of a difference. Counts once."""
        cause = one.cause(cached, seen)
        if one.cached is None:
            one.cached, truth = cached, self.truth
            claimed = one.expected if cached == one.expected else one.claimed
            truth.claimed, truth.real = truth.claimed + claimed, truth.real + cached
            truth.prompts += one.num_tokens
            truth.differences[cause] += abs(cached - claimed)
            if one.claimed:
                self.trust += TRUST_MEMORY * (min(cached / one.claimed, 1.0) - self.trust)
        return cause

    def end(self, one: Booking, at_s: float, output_tokens: int) -> None:
        """A prompt has ended."""
        del self._open[one.name]
        if one.token_s is not None and output_tokens > 1:
            mean = (one.in_flight + self.in_flight + 1) / 2
            self.costs.take_decode(output_tokens - 1, mean, at_s - one.token_s)

    def forget(self, one: Booking) -> None:
        """No client reports on a prompt."""
        del self._open[one.name]
        self.truth.unreported += 1

    def _is_presumed(self, one: Booking, now_s: float) -> bool:
        """Return whether a prompt counts as computed although it was not reported: nothing is reported of this place,
        or a later prompt was, and engines begin with the oldest.
        """
        began = one.started_s if one.started_s is not None else one.at_s
        is_reported = self.costs.samples > 0 and self._answered_s <= one.at_s
        return not is_reported and now_s >= began + max(UNREPORTED_S, 2 * one.first_token_s)
