"""An engine of a pod: requests without end, on pages that show whether each hit has the content that its key names.

    python engine.py SERVICE REPLICA SEED

It needs kvplane's client alone. A page holds, for each of its tokens, a checksum of all tokens up to that one, so that
every other content is seen. The next token is computed from what the pages hold. Each second a line of JSON says what
was done so far (see Tally). On SIGTERM it asks nothing more, answers what it was asked, and ends.
"""

from __future__ import annotations

import json
import random
import secrets
import signal
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

import kvplane
from kvplane import GroupKind, GroupSpec, ReplicaSpec, Revival
from kvplane.base.errors import NotFound
from kvplane.base.stamp_table import StampTable, table_bytes
from kvplane.rank import Rank, RankGroup
from kvplane.sansio.retry import RetryPolicy
from kvplane.scheduling import Limits, Request, Scheduled, Scheduler

BLOCKS, SIZE, WINDOW = 200, 4, 16  # pages of the pool, tokens of a page, window in tokens
SPEC = ReplicaSpec(
    groups=(
        GroupSpec(GroupKind.FULL_ATTENTION, SIZE, zero_new_blocks=True),
        GroupSpec(GroupKind.SLIDING_WINDOW, SIZE, window=WINDOW),
    ),
    num_blocks=BLOCKS,
    max_model_len=160,
    hash_block_size=SIZE,
    scheduler_block_size=SIZE,
    max_in_flight_tokens=128,
)
AT_ONCE, TALKS, PAUSE_S = 3, 6, 0.02
PATIENCE = RetryPolicy(attempts=None, within_s=240.0)


@dataclass
class Tally:
    """What the engine did.

    Attributes:
        asked, answered, refused: requests. again: those that began again, since the service no longer had the replica.
        tokens, wrong_tokens: output tokens that were compared with the model's without pages.
        read, wrong_reads: entries of pages that were read.
        prompt, hit: tokens of prompts, and those that were cached.
        kept: for each session that was opened: keys that stayed valid, of how many pages with a stamp.
        longest_s: longest time that the service took for a step.
    """

    asked: int = 0
    answered: int = 0
    refused: int = 0
    again: int = 0
    tokens: int = 0
    wrong_tokens: int = 0
    read: int = 0
    wrong_reads: int = 0
    prompt: int = 0
    hit: int = 0
    kept: list[tuple[int, int]] = field(default_factory=list)
    longest_s: float = 0.0

    def line(self, **more: Any) -> str:
        return json.dumps({**asdict(self), **more})


class Pages:
    """The pages of one rank in memory; carries out zeroes and copies for a `Rank`."""

    num_groups = len(SPEC.groups)

    def __init__(self) -> None:
        self.stamps = StampTable.create(bytearray(table_bytes(BLOCKS)), BLOCKS, incarnation=secrets.randbits(63) | 1)
        self.held = [[-1] * SIZE for _ in range(BLOCKS)]  # -1: never written

    def zero(self, group: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.held[block] = [0] * SIZE

    def copy(self, group: int, src: Sequence[int], dst: Sequence[int]) -> None:
        for one, other in zip(src, dst, strict=True):
            self.held[other] = list(self.held[one])

    def moves(self) -> None:
        return None  # the calls above are complete when they return


def sums(tokens: Sequence[int]) -> list[int]:
    """What the pages hold for each token: a checksum of the tokens up to it."""
    found, total = [], 1
    for token in tokens:
        total = zlib.crc32(token.to_bytes(4, "little"), total)
        found.append(total)
    return found


def next_token(seen: Sequence[int]) -> int:
    """The model: the token after those whose checksums are seen."""
    return sum(seen) % 997


class Talks:
    """Conversations that come back with a further turn: most prompts have a long beginning that was computed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.system = [self._rng.randrange(1000) for _ in range(24)]
        self._texts = [self._fresh() for _ in range(TALKS)]
        self._number = 0

    def _fresh(self) -> list[int]:
        return [*self.system, *(self._rng.randrange(1000) for _ in range(8))]

    def next(self) -> Request:
        at = self._number % TALKS
        self._number += 1
        if len(self._texts[at]) > SPEC.max_model_len - 24:
            self._texts[at] = self._fresh()
        self._texts[at] += [self._rng.randrange(1000) for _ in range(3)]
        return Request(f"q{self._number}-{at}", list(self._texts[at]), self._rng.randrange(4, 12))

    def answered(self, request: Request) -> None:
        at = int(request.request_id.partition("-")[2])
        if len(request.tokens) > len(self._texts[at]):
            self._texts[at] = list(request.tokens)


class Engine:
    """An engine on pages, which may be those of an engine before it."""

    def __init__(self, client: kvplane.Client, replica: str, tally: Tally, pages: Pages | None = None) -> None:
        self.tally = tally
        self.pages = pages or Pages()
        self._rank = Rank(self.pages.stamps, self.pages)
        self._group = RankGroup([self.pages.stamps])
        self._scheduler: Scheduler | None = None
        self._epoch = 0
        self._session = client.session(replica, self._revival, retry=PATIENCE)
        self._claim(self._session.next_seq)
        self._scheduler = self.scheduler = Scheduler(self._session.spec, Limits(max_running=AT_ONCE, token_budget=96))

    def _revival(self) -> Revival:
        """What survives a service: stamps, requests, and the blocks of those that run."""
        stamps, group = self._group.agreed_stamps(), self._group
        self._stamped = sum(map(bool, stamps[1:]))
        if self._scheduler is None:
            return Revival(stamps, group.incarnation, owner_epoch=group.owner_epoch)
        (news, running), image = self._scheduler.known_requests(), self._scheduler.resume()
        return Revival(stamps, group.incarnation, news, running, resume=image, owner_epoch=group.owner_epoch)

    def _claim(self, seq: int) -> None:
        if self._epoch != self._session.epoch:
            self._epoch = self._session.epoch
            self._group.claim(self._epoch, seq)
            self.tally.kept.append((self._session.kept_keys, self._stamped))

    def step(self) -> list[Request]:
        """One step; returns the requests that ended."""
        began = time.monotonic()
        part = self.scheduler.plan()
        try:
            answer = self._session.apply(part)
        finally:
            self.tally.longest_s = max(self.tally.longest_s, round(time.monotonic() - began, 2))
        self._claim(answer.seq)
        for number, each in enumerate(answer.parts, answer.part):
            self._rank.carry_out(self._epoch, answer.seq, number, each.orders)
        for row in self.scheduler.update(part, answer.parts[0]):
            self.scheduler.finish_row(row, self._launch(row))
        self._rank.executed(answer.seq)
        return self.scheduler.take_finished()

    def _launch(self, row: Scheduled) -> list[int]:
        """Write what the row computes, and compute its next tokens from all that it sees."""
        right = sums([*row.request.tokens, *row.request.drafts][: row.end])
        full, window = row.tables
        for at in range(row.start, row.end):
            for table in (full, window):
                self.pages.held[table[at // SIZE]][at % SIZE] = right[at]
        sampled = []
        for at in range(row.end - row.num_outputs, row.end):
            seen = [self.pages.held[full[each // SIZE]][each % SIZE] for each in range(at + 1)]
            near = range(max(0, at + 1 - WINDOW), at + 1)
            seen_near = [self.pages.held[window[each // SIZE]][each % SIZE] for each in near]
            expected = [*right[: at + 1], *right[near.start : near.stop]]
            self.tally.read += len(expected)
            self.tally.wrong_reads += sum(a != b for a, b in zip([*seen, *seen_near], expected, strict=True))
            sampled.append(next_token([*seen, *seen_near]))
        return sampled


def without_pages(tokens: Sequence[int]) -> int:
    right = sums(tokens)
    return next_token([*right, *right[max(0, len(right) - WINDOW) :]])


def compare(request: Request, tally: Tally) -> None:
    """Count an ended request, and compare its output with the model's."""
    if request.error:
        tally.refused += 1
        return
    tally.answered += 1
    tally.prompt += len(request.prompt)
    tally.hit += request.hits[0] if request.hits else 0
    for at, token in enumerate(request.output, len(request.prompt)):
        tally.tokens += 1
        tally.wrong_tokens += token != without_pages(request.tokens[:at])


def begun(request: Request) -> Request:
    """The same request, of which nothing was computed."""
    return Request(request.request_id, list(request.prompt), request.max_new_tokens)


class Wishes:
    """What signals ask for."""

    def __init__(self) -> None:
        self.ends = self.rests = False
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.ends = self.ends or number == signal.SIGTERM
        self.rests = number == signal.SIGUSR1

    @property
    def asks(self) -> bool:
        return not self.ends and not self.rests


def main(service: str, replica: str, seed: str) -> None:
    wishes, tally, talks, shown_s = Wishes(), Tally(), Talks(int(seed)), 0.0
    latest: list[int] = []
    with kvplane.connect(service, retry=PATIENCE) as client:
        client.register_replica(replica, SPEC)
        engine, asked = Engine(client, replica, tally), dict[str, Request]()
        while engine.scheduler.has_work or not wishes.ends:
            while wishes.asks and len(asked) < AT_ONCE:
                request = talks.next()
                asked[request.request_id] = request
                engine.scheduler.add(request)
                tally.asked += 1
            try:
                ended = engine.step()
            except NotFound:  # a service without a store forgets its replicas
                client.register_replica(replica, SPEC)
                engine = Engine(client, replica, tally, engine.pages)
                asked = {one.request_id: begun(one) for one in asked.values()}
                for request in asked.values():
                    engine.scheduler.add(request)
                tally.again += len(asked)
                continue
            for request in ended:
                compare(request, tally)
                talks.answered(request)
                latest = list(asked.pop(request.request_id).tokens)
            if time.monotonic() - shown_s > 1:
                shown_s = time.monotonic()
                print(tally.line(latest=[] if engine.scheduler.has_work else latest), flush=True)
            time.sleep(PAUSE_S)
    print(tally.line(ended=True), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
