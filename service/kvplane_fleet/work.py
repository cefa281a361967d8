"""The prompts that were sent to one place, what they cost it, and how true the claims about them were.

    booked ──▶ started ──▶ first token ──▶ ended
       what waits for its first token is the queue; what has not ended is in flight

An engine computes prompts one after another (or in chunks of several, which takes equally long in all), so the
time that a prompt's tokens took is that since the first token of the prompt before it, or since its own arrival.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from kvplane_fleet.costs import EngineCosts
from kvplane_fleet.held import NOTHING, Held, Share

UNREPORTED_S = 2.0  # a prompt counts as computed after this time, or twice the predicted time, if nothing is reported
FEW = 64  # entries of prompts that have left, which a heap may have in any case
TRUST_MEMORY = 0.1  # weight of a claim in the mean of those that came true
STAY_MEMORY = 0.1  # weight of a prompt in the mean time that prompts hold their blocks


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
        reads_peers: the place may load what its peers have, which no event of it states.
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
    reads_peers: bool = False

    @property
    def presumed_s(self) -> float:
        """When it counts as computed, if nothing is reported."""
        began_s = self.started_s if self.started_s is not None else self.at_s
        return began_s + max(UNREPORTED_S, 2 * self.first_token_s)

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
        if (self.loaded or self.reads_peers) and cached > self.expected:
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


class Queue:
    """The prompts of one place that wait for their first token, in the order of their bookings. A call costs the same
    however many wait.

    A prompt counts as computed although it was not reported if its time, `presumed_s`, has passed, and either nothing
    was reported of this place, or a later prompt was, and engines begin with the oldest.
    """

    def __init__(self) -> None:
        self._waiting = OrderedDict[str, Booking]()
        self._sum_s = 0.0  # to compute them
        self._presumed: dict[str, Booking] = {}  # that count as computed until the first report; empty after it
        self._answered_s: float | None = None  # when the last prompt was booked whose first token was reported
        self._due: list[tuple[float, str]] = []  # a heap of the times `presumed_s`, some of which have changed since
        self._overdue: list[tuple[float, str]] = []  # a heap of times of bookings, for which this time has passed

    def add(self, one: Booking) -> None:
        """A prompt was booked, the last one of all."""
        self._waiting[one.name] = one
        self._sum_s += one.miss_s
        heapq.heappush(self._due, (one.presumed_s, one.name))

    def remove(self, one: Booking) -> None:
        """A prompt has its first token, has ended, or is forgotten."""
        self._presumed.pop(one.name, None)
        if self._waiting.pop(one.name, None) is not None:
            self._sum_s = self._sum_s - one.miss_s if self._waiting else 0.0

    def answered(self, one: Booking) -> None:
        """The first token of a prompt was reported."""
        if self._answered_s is None:
            self._count_again([late for late in self._presumed.values() if late.at_s >= one.at_s])
            self._presumed.clear()
        self._answered_s = max(self._answered_s or 0.0, one.at_s)

    def length(self, now_s: float) -> int:
        """Return how many wait."""
        self._sweep(now_s)
        return len(self._waiting)

    def seconds(self, now_s: float, token_s: float) -> float:
        """Return the seconds until all have their first token; `token_s` is when the last one came."""
        if not self.length(now_s):
            return 0.0
        first = next(iter(self._waiting.values()))
        since_s = now_s - max(token_s, first.at_s)
        return max(first.miss_s - since_s, 0.0) + self._sum_s - first.miss_s

    def _sweep(self, now_s: float) -> None:
        """Remove what counts as computed."""
        while self._due and self._due[0][0] <= now_s:
            one = self._waiting.get(heapq.heappop(self._due)[1])
            if one is not None:
                self._wait_again(one, now_s)
        while self._overdue and (self._answered_s is None or self._overdue[0][0] < self._answered_s):
            one = self._waiting.get(heapq.heappop(self._overdue)[1])
            if one is not None and one.presumed_s > now_s:
                self._wait_again(one, now_s)
            elif one is not None:
                self.remove(one)
                if self._answered_s is None:
                    self._presumed[one.name] = one

    def _wait_again(self, one: Booking, now_s: float) -> None:
        """Put a prompt, which may have begun since, into the heap in which it belongs."""
        if one.presumed_s > now_s:
            heapq.heappush(self._due, (one.presumed_s, one.name))
            return
        heapq.heappush(self._overdue, (one.at_s, one.name))
        if len(self._overdue) > 2 * len(self._waiting) + FEW:  # most of them have left
            self._overdue = [(at_s, name) for at_s, name in self._overdue if name in self._waiting]
            heapq.heapify(self._overdue)

    def _count_again(self, late: list[Booking]) -> None:
        """Let prompts wait, in their order among the others. It happens once."""
        every = sorted([*late, *self._waiting.values()], key=lambda one: one.at_s) if late else []
        for one in late:
            heapq.heappush(self._overdue, (one.at_s, one.name))
            self._sum_s += one.miss_s
        if every:
            self._waiting = OrderedDict((one.name, one) for one in every)


class Work:
    """The booked prompts of one place.

    Attributes:
        costs: the place's fitted costs.
        truth: the place's claims and what they became.
        in_flight: prompts that have not ended.
        held: the blocks of these.
        trust: mean share of recent claims that came true; where memory is short, content leaves before its prompt
            comes.
    """

    def __init__(self, costs: EngineCosts) -> None:
        self.costs, self.truth = costs, Truth()
        self.trust = 1.0
        self.held = Held()
        self._queue = Queue()
        self._stay_s: float | None = None  # mean time from first token to end; None: no end was reported
        self.in_flight = 0
        self._token_s = 0.0  # when the last first token came

    def waiting(self, now_s: float) -> int:
        """Return how many prompts wait for their first token."""
        return self._queue.length(now_s)

    def queue_s(self, now_s: float) -> float:
        """Return the seconds until all prompts that wait have their first token."""
        return self._queue.seconds(now_s, self._token_s)

    def lacking(self, share: Share, capacity: int) -> float:
        """Return how many blocks a prompt lacks, of `capacity` blocks, while those in flight hold theirs; 0 if ends are
        not reported, or the capacity is not known.
        """
        if self._stay_s is None or not capacity or not self.in_flight:
            return 0.0
        return max(self.held.blocks + self.held.wanted(share) - capacity, 0.0)

    def memory_s(self, lacking: float, capacity: int) -> float:
        """Return the seconds until these blocks are free: as prompts end at a steady rate, all blocks in use are freed
        in the mean time for which a prompt holds its own.
        """
        return (self._stay_s or 0.0) * lacking / max(min(self.held.blocks, capacity), 1)

    def crowding_s(self, share: Share, capacity: int) -> float:
        """Return the seconds by which the blocks that a prompt takes delay those in flight, summed over them: they are
        held for the mean time, and wanted by as many as the place is full.
        """
        if self._stay_s is None or not capacity:
            return 0.0
        full = min(self.held.blocks / capacity, 1.0)
        return self._stay_s * self.held.wanted(share) / capacity * full * self.in_flight

    def book(self, one: Booking, share: Share = NOTHING) -> None:
        """Add a prompt."""
        self.held.add(one.name, share)
        self._queue.add(one)
        self.in_flight += 1
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
        self._queue.remove(one)
        self._queue.answered(one)
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
        self._leave(one)
        if one.token_s is not None:
            stay_s = max(at_s - one.token_s, 0.0)
            self._stay_s = stay_s if self._stay_s is None else self._stay_s + STAY_MEMORY * (stay_s - self._stay_s)
        if one.token_s is not None and output_tokens > 1:
            mean = (one.in_flight + self.in_flight + 1) / 2
            self.costs.take_decode(output_tokens - 1, mean, at_s - one.token_s)

    def forget(self, one: Booking) -> None:
        """No client reports on a prompt."""
        self._leave(one)
        self.truth.unreported += 1

    def _leave(self, one: Booking) -> None:
        self._queue.remove(one)
        self.held.remove(one.name)
        self.in_flight -= 1
