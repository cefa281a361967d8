"""Users of 16k-token prompts in turn on one server of gpt-oss-120b with TP 4: throughput over their number, by cache.

At most 80 prompts are in flight, each is answered with one token, and every user has sent the prompt before. One
constant, `ANSWERS_PER_S`, is read from the published figure: what limits the server while all prompts hit, which no
model of the GPU contains. Where each cache is full, and what follows, is the core's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvplane.base.groups import GroupKind, GroupSpec, ReplicaSpec, SavePolicy, TierKind, TierSpec
from kvplane_plan.models.sizing import gpu_bytes
from kvplane_tools.replay.plan import NS_PER_SECOND
from kvplane_tools.replay.workloads import Span, TokenSource, TraceRequest
from tests.bench.routing import PublishingSession
from tests.bench.tables import published
from tests.bench.tables.engine import TimedEngine
from tests.bench.tables.fleet import PAGE_BYTES, spec_of
from tests.bench.tables.model import (
    DENSE_BYTES,
    EXPERT_BYTES,
    FITTED,
    LINK_BYTES_PER_S,
    STORAGE_BYTES_PER_S,
    StepCost,
)
from tests.bench.tables.published import BLOCK, HOST_BYTES, MEMORY_SHARE

RANKS, PROMPT, CONCURRENT = 4, 16_384, 80
ACTIVATIONS_BYTES = 4 << 30  # assumed: memory for activations and graphs of each rank
STORAGE_BYTES = 4 << 40  # assumed; "large enough, so we never hit this cliff"
SPEEDS = (RANKS * LINK_BYTES_PER_S, STORAGE_BYTES_PER_S)
ANSWERS_PER_S = 1000 * published.USERS["GPU", False][1] / PROMPT
LEVELS = (*range(100, 401, 50), *range(500, 901, 100))
TIERS = {"GPU": (), "GPU + CPU": (TierKind.HOST,), "GPU + CPU + storage": (TierKind.HOST, TierKind.DISK)}
FALLEN, AFTER = 0.75, 1  # of the throughput before: what is less has fallen; levels


@dataclass(frozen=True, slots=True)
class Cache:
    """What the server caches in: with the hybrid allocator or without, and tiers of `TIERS`."""

    tiers: str
    hybrid: bool

    @property
    def name(self) -> str:
        """Its name in results."""
        return f"{self.tiers}, {'hybrid' if self.hybrid else 'uniform'}"

    @property
    def page_bytes(self) -> int:
        """Bytes of a block: without the hybrid allocator it has all layers."""
        return PAGE_BYTES if self.hybrid else 2 * PAGE_BYTES

    def spec(self) -> ReplicaSpec:
        """Return the server; without the hybrid allocator all layers keep every token, in as many bytes."""
        pool = RANKS * (gpu_bytes("h100", MEMORY_SHARE) - ACTIVATIONS_BYTES) - DENSE_BYTES - EXPERT_BYTES
        sizes = {TierKind.HOST: RANKS * HOST_BYTES, TierKind.DISK: STORAGE_BYTES}
        tiers = (TierSpec(one, sizes[one] // self.page_bytes, SavePolicy.THROUGH) for one in TIERS[self.tiers])
        found = replace(spec_of(pool * PAGE_BYTES / self.page_bytes), tiers=tuple(tiers))
        return found if self.hybrid else replace(found, groups=(GroupSpec(GroupKind.FULL_ATTENTION, BLOCK),))


class Server(TimedEngine):
    """The server, and the users who wait for their answers."""

    def __init__(self, cache: Cache) -> None:
        fitted = replace(FITTED, flops=RANKS * FITTED.flops, bandwidth=RANKS * FITTED.bandwidth)
        super().__init__(PublishingSession(cache.spec()), cache.page_bytes, StepCost(fitted), speeds=SPEEDS)
        self.hit = 0
        self.first_token = self.published = _ignore
        self.ended = lambda _, request: self._count(request.hits[0])

    def _awaited_ns(self) -> int:
        """When the next load ends, or all saves: only a load has a request that waits."""
        loads = [end_ns for end_ns, job in self._ends if job in self.grouped._open_loads]
        return min(loads, default=max(self._ends)[0])

    def _count(self, tokens: int) -> None:
        self.hit += tokens

    def answer(self, users: int) -> float:
        """Answer each user once, and return the seconds."""
        start_ns, sent = self.clock_ns, 0
        while sent < users or self.has_work:
            due_ns = start_ns + int(sent / ANSWERS_PER_S * NS_PER_SECOND)
            if sent < users and self.num_waiting + self.num_running < CONCURRENT and due_ns <= self.clock_ns:
                answer = TokenSource((Span(sent, 0, 1, generated=True),))
                self.submit(TraceRequest(f"{start_ns} {sent}", 0.0, "", TokenSource((Span(sent, 0, PROMPT),)), answer))
                sent += 1
            elif self.has_work:
                self.step()
            else:
                self.clock_ns = due_ns
        assert not self.refusals, self.refusals[0]
        return (self.clock_ns - start_ns) / NS_PER_SECOND


def _ignore(*_: object) -> None:
    pass


def sweep(cache: Cache) -> list[Mapping[str, float]]:
    """Return tokens per second and the part that hit, by users. Their number grows; at each level all send their prompt
    twice, and the second time counts. It ends `AFTER` levels behind the fall.
    """
    server, found = Server(cache), list[Mapping[str, float]]()
    for users in LEVELS:
        server.answer(users)
        before = server.hit
        seconds = server.answer(users)
        tokens = users * PROMPT
        found.append({"users": users, "throughput": tokens / seconds, "hit": (server.hit - before) / tokens})
        at = fall(found)
        if at is not None and len(found) > at + AFTER:
            break
    return found


def fall(stages: Sequence[Mapping[str, float]]) -> int | None:
    """Return the index of the first level at which the throughput has fallen; None = at none."""
    return next((at for at, one in enumerate(stages) if one["throughput"] < FALLEN * stages[0]["throughput"]), None)


CACHES = [Cache(tiers, hybrid) for tiers in TIERS for hybrid in (False, True)]
