"""Steps that are drawn from bytes: plausible ones for the requests of a replica, and changed ones that a core must
refuse, or apply as the contract says.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import fields, replace
from random import Random
from typing import Any

from kvplane.base.sections import Prefetch, Retain
from kvplane.base.step import Admit, Budget, Cache, ExtraKeys, Facts, News, OnRefusal, Part, Peek, Resume, RowFlag, Run
from kvplane.base.values import NO_REQUEST
from kvplane_core.spec.replica import Replica

SLOTS = range(6)
MOST = 12  # entries of a column that is drawn
SECTIONS = ("facts", "cache", "news", "run", "admit", "peek")
DOMAINS = ("", "d", "\u00fc" * 40)
# Limits of the columns and of the integers that carry them, and their neighbours.
_POWERS = [sign << bits for bits in (12, 14, 30, 31, 32, 62, 63, 64, 70) for sign in (1, -1)]
EDGES = [-1, 0, 1, 2, 3, 5, 7, 31, 32, 63, 64, *(power + by for power in _POWERS for by in (-1, 0, 1))]


class Source:
    """Draws from the bytes of a program; behind their end every draw is the first choice."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def is_over(self) -> bool:
        """Whether all bytes are used."""
        return self._at >= len(self._data)

    def below(self, count: int) -> int:
        """A number from 0 to `count` - 1; at most 256 different ones."""
        self._at += 1
        return self._data[self._at - 1] % count if self._at <= len(self._data) else 0

    def chance(self, percent: int) -> bool:
        """True in this share of all bytes."""
        return self.below(256) * 100 >= (100 - percent) * 256

    def pick(self, choices: Sequence[Any]) -> Any:
        """One of them."""
        return choices[self.below(len(choices))]

    def some(self, choices: Sequence[Any]) -> list[Any]:
        """Some of them, sometimes in reverse order, and seldom one of them twice."""
        found = [one for one in choices if self.chance(60)]
        if found and self.chance(20):
            found.reverse()
        if found and self.chance(4):
            found.append(self.pick(found))
        return found


class StepSource:
    """Draws the parts of steps for one replica.

    Attributes:
        digest_size: bytes of the hashes of requests that count them themselves.
        scripts: by slot, the numbers of the text that its request repeats; equal numbers have equal prefixes.
    """

    def __init__(self, source: Source, digest_size: int) -> None:
        self.source, self.digest_size = source, digest_size
        self.scripts = dict[int, tuple[int, ...]]()

    def parts(self, replica: Replica, seq: int) -> list[Part]:
        """The parts of a step; one in eight has a change that few cores should accept."""
        made = [self._part(replica, seq) for _ in range(1 + self.source.pick([0, 0, 0, 1, 2]))]
        for _ in range(self.source.pick([0, 0, 0, 0, 0, 0, 1, 2])):
            self.change(made)
        return made

    def _part(self, replica: Replica, seq: int) -> Part:
        draw, requests = self.source, replica.requests
        live = requests.slots()
        free = [slot for slot in SLOTS if slot not in live]
        part = Part(with_hashes=draw.chance(10), with_tables=draw.chance(10))
        if live and draw.chance(70):
            part.facts = self._facts(replica, draw.some([slot for slot in live if not requests.held[slot]]), seq)
        if draw.chance(60 if replica.spec.tiers else 25):
            part.cache = self._cache(replica, seq)
        if free and draw.chance(50):
            part.news = self._news(replica, draw.some(free))
        coming = [*live, *part.news.slot]
        if live and draw.chance(80):
            part.run = self._run(draw.some(live), coming)
        if coming and draw.chance(70):
            part.admit = self._admit(draw.some([slot for slot in coming if slot not in part.run.slot] or coming))
            if replica.spec.tiers and draw.chance(75):
                part.admit.flags = [int(RowFlag.LOAD)] * len(part.admit.slot)
                part.admit.external = []
        if coming and draw.chance(20):
            part.peek = Peek(draw.some(coming), with_blocks=draw.chance(50))
            part.peek.limit = self._column(part.peek.slot, 20, lambda: draw.below(70))
        if draw.chance(40):
            part.budget = Budget(draw.pick([5, 12, 40]), draw.pick([12, 24, 60]), draw.pick([0, 2]))
        if len(replica.spec.tiers) > 1 and draw.chance(30):
            part.prefetch = self._prefetch(draw.some(coming), replica)
        self._retain_or_prefetch(part, replica, Random(f"{seq} {live}"))  # from no byte: what was found stays found
        return part

    def _retain_or_prefetch(self, part: Part, replica: Replica, rng: Random) -> None:
        """Sections that any caller may send to any kind of replica, though not all accept all."""
        if rng.random() < 0.2:
            part.retain = Retain(now_ns=[10])
            for digests in [list(replica.requests.hashes(slot)) for slot in replica.requests.slots()]:
                if digests and rng.random() < 0.3:
                    part.retain.num_hashes.append(rng.randint(1, len(digests)))
                    part.retain.hashes += b"".join(digests[: part.retain.num_hashes[-1]])
            part.retain.until_ns = [rng.choice([0, 10, 99]) for _ in part.retain.num_hashes]
            part.retain.percent = [rng.choice([0, 50, 100]) for _ in part.retain.num_hashes]
        if rng.random() < 0.04 and not part.prefetch.slot:
            part.prefetch = Prefetch(within_ns=[7] * rng.randrange(2), domain=[""] * rng.randrange(2))

    def _prefetch(self, slots: list[int], replica: Replica) -> Prefetch:
        """Requests, and one or two prompts that are given by their hashes."""
        draw, rows = self.source, Prefetch(slots, [0] * len(slots))
        for _ in range(1 + draw.below(2)):
            digests = self._digests(-1, 0, 1 + draw.below(9), replica)
            rows.slot.append(NO_REQUEST)
            rows.num_hashes.append(len(digests))
            rows.hashes += b"".join(digests)
        rows.domain = [draw.pick(DOMAINS) for _ in rows.slot] if draw.chance(20) else []
        rows.within_ns = self._column(rows.slot, 30, lambda: draw.pick([0, 1, 50, 10**9]))
        return rows

    def _column(self, rows: Sequence[int], percent: int, value: Any) -> list[int]:
        """A column with a value per row, or none."""
        return [value() for _ in rows] if self.source.chance(percent) else []

    # -- sections ----------------------------------------------------------------------------------------------------

    def _facts(self, replica: Replica, slots: list[int], seq: int) -> Facts:
        draw, requests, spec = self.source, replica.requests, replica.spec
        facts = Facts(slots)
        by_service = draw.chance(50)
        room = {slot: requests.limit[slot] - requests.num_tokens[slot] for slot in slots}
        may_grow = [requests.by_service[slot] == by_service for slot in slots]
        if draw.chance(80):
            facts.appended = [
                min(draw.pick([0, 1, 1, 2, 5]), room[slot]) * grows for slot, grows in zip(slots, may_grow, strict=True)
            ]
        if facts.appended and by_service:
            for slot, count in zip(slots, facts.appended, strict=True):
                facts.tokens += self._text(slot, requests.num_tokens[slot], count)
        elif draw.chance(80):
            appended = facts.appended or [0] * len(slots)
            for slot, count, grows in zip(slots, appended, may_grow, strict=True):
                first = len(requests.content[slot].digests)
                last = (requests.num_tokens[slot] + count) // spec.hash_block_size
                digests = self._digests(slot, first, last, replica) if grows and not requests.by_service[slot] else []
                facts.num_hashes.append(len(digests))
                facts.hashes += b"".join(digests)
        facts.computed = self._column(slots, 15, lambda: draw.below(20) - 1)
        facts.commit = self._column(slots, 15, lambda: draw.below(40) - 1)
        facts.release_skipped = self._column(slots, 10, lambda: draw.below(30) - 1)
        facts.end = self._column(slots, 25, lambda: draw.pick([0, 0, 0, 1, 1, 2, 3, 3]))
        facts.fence = self._column(slots, 15, lambda: draw.below(seq + 1))
        if spec.hint_values:
            facts.hint = self._column(slots, 30, lambda: draw.below(spec.hint_values + 1) - 1)
        return facts

    def _cache(self, replica: Replica, seq: int) -> Cache:
        draw, requests, has_tiers = self.source, replica.requests, bool(replica.spec.tiers)
        held = [one for one in requests.slots() if requests.held[one] or one in requests.loading]
        cache = Cache(
            released=list(dict.fromkeys(draw.some(held))),
            reset=draw.chance(2 if has_tiers else 15),  # what the tiers have is lost too
            loads_over=draw.some(replica.busy_blocks),
        )
        if draw.chance(30):
            cache.failed_steps = draw.some(range(replica.executed_through + 2, seq))
        if draw.chance(10 if has_tiers else 50):
            cache.evicted = [1 + draw.below(replica.spec.num_blocks - 1) for _ in range(draw.below(4))]
        cache.mismatched, cache.hits_checked = cache.evicted[::2], len(cache.evicted)
        if has_tiers:
            self._end_jobs(replica, cache)
        return cache

    def _end_jobs(self, replica: Replica, cache: Cache) -> None:
        """Ends of jobs in flight, sometimes of a load that cannot have begun."""
        draw, tiers = self.source, replica.tiers
        jobs = tiers.jobs.numbers()
        started = [job for job in jobs if tiers.load_after(job) <= replica.executed_through]
        cache.jobs_done = draw.some(jobs if draw.chance(5) else started)
        cache.jobs_failed = draw.some(jobs) if draw.chance(15) else []
        if draw.chance(5):
            cache.jobs_before = draw.pick([*jobs, tiers.last_job + 1])
        if draw.chance(10):
            cache.costs_ns = [draw.pick([0, 5, 100]) for _ in range(1 + len(tiers.each))]

    def _news(self, replica: Replica, slots: list[int]) -> News:
        draw, spec = self.source, replica.spec
        news = News(slots, [1 + draw.below(min(40, spec.max_model_len)) for _ in slots])
        for slot in slots:
            # With tiers few texts, so that what has left the device is asked for again.
            self.scripts[slot] = (draw.below(2), 0, 0) if spec.tiers else (draw.below(2), draw.below(2), draw.below(3))
        if draw.chance(50):
            for slot, count in zip(slots, news.num_tokens, strict=True):
                news.tokens += self._text(slot, 0, count)
            if draw.chance(10):
                news.extra_keys = [ExtraKeys(salt=draw.pick(["", "s"])) for _ in slots]
        elif draw.chance(90):
            for slot, count in zip(slots, news.num_tokens, strict=True):
                digests = self._digests(slot, 0, count // spec.hash_block_size, replica)
                news.num_hashes.append(len(digests))
                news.hashes += b"".join(digests)
        if draw.chance(20):
            news.domain = [draw.pick(DOMAINS) for _ in slots]
        if draw.chance(20):
            news.request_id = [draw.pick(["", "r", "\u00e4\u20ac"]) for _ in slots]
        news.skip_reading = self._column(slots, 10, lambda: draw.below(2))
        news.max_tokens = self._column(slots, 15, lambda: draw.pick([0, 40, 64]))
        if spec.hint_values:
            news.hint = self._column(slots, 60, lambda: draw.below(spec.hint_values))
        return news

    def _run(self, slots: list[int], others: list[int]) -> Run:
        draw = self.source
        return Run(
            slots,
            self._column(slots, 30, lambda: draw.below(7) - 2),
            self._column(slots, 20, lambda: draw.below(12)),
            self._column(slots, 20, lambda: draw.below(6)),
            self._column(slots, 10, lambda: draw.below(9) - 1),
            self._column(slots, 20, lambda: draw.pick([0, 2, 4, 16, 22, 1])),
            draw.some(others) if draw.chance(20) else [],
            draw.pick([*OnRefusal, OnRefusal.PREEMPT]),
            self._column(slots, 10, lambda: draw.below(6)),
        )

    def _admit(self, slots: list[int]) -> Admit:
        draw = self.source
        admit = Admit(
            slots, on_refusal=draw.pick([OnRefusal.STOP, OnRefusal.SKIP]), only_if_no_preemption=draw.chance(10)
        )
        admit.extra = self._column(slots, 15, lambda: draw.below(6) - 2)
        admit.cap = self._column(slots, 25, lambda: draw.below(16))
        admit.lookahead = self._column(slots, 15, lambda: draw.below(6))
        admit.external = self._column(slots, 30, lambda: draw.pick([0, 0, 1, 4, 9, 24]))
        admit.expected_hit = self._column(slots, 10, lambda: draw.below(12) - 1)
        admit.encoder_tokens = self._column(slots, 20, lambda: draw.below(12))
        admit.reserved = self._column(slots, 10, lambda: draw.below(6))
        admit.watermark = self._column(slots, 10, lambda: draw.below(3))
        admit.flags = self._column(slots, 40, lambda: draw.pick([0, 2, 2, 4, 8, 16, 30]))
        admit.hit_limit = self._column(slots, 15, lambda: draw.below(40))
        admit.min_new = self._column(slots, 10, lambda: draw.below(4))
        admit.single_group_hit = self._column(slots, 10, lambda: draw.below(40))
        admit.skip_zero_groups = self._column(slots, 10, lambda: draw.below(8))
        admit.max_running = draw.pick([0xFFFFFFFF, 0xFFFFFFFF, 3, 1])
        return admit

    def _text(self, slot: int, first: int, count: int) -> list[int]:
        script = self.scripts.get(slot, (0, 0, 0))
        return [97 + script[min(at // 16, 2)] for at in range(first, first + count)]

    def _digests(self, slot: int, first: int, last: int, replica: Replica) -> list[bytes]:
        """Hashes of a request that counts them itself; as long as those that it has."""
        draw, script = self.source, self.scripts.get(slot, (0, 0, 0))
        if draw.chance(5):
            last -= 1
        known = replica.requests.content[slot].digests if replica.requests.is_live(slot) else []
        size = len(known[0]) if known else self.digest_size
        at = [str(script[: 1 + number * replica.spec.hash_block_size // 16]) for number in range(max(last, 0))]
        return [hashlib.sha256(f"{at[number]} {number}".encode()).digest()[:size] for number in range(first, last)]

    # -- changes -----------------------------------------------------------------------------------------------------

    def change(self, parts: list[Part]) -> None:
        """Change one value of one part."""
        draw = self.source
        part = draw.pick(parts)
        if draw.chance(6):
            part.budget = replace(part.budget, **{draw.pick(["tokens", "input", "overhead"]): draw.pick(EDGES)})
            return
        if draw.chance(3):
            part.resume = Resume(draw.some(SLOTS), [draw.below(9) for _ in range(draw.below(4))])
            return
        section = getattr(part, draw.pick(SECTIONS))
        name = draw.pick([field.name for field in fields(section)])
        value = getattr(section, name)
        if isinstance(value, bytes):
            setattr(section, name, draw.pick([value[:-1], value + b"\0", value * 2, value[16:], b"", bytearray(value)]))
        elif isinstance(value, (list, array)):
            setattr(section, name, self._changed(list(value), section))
        elif isinstance(value, OnRefusal):
            setattr(section, name, draw.pick(list(OnRefusal)))
        elif isinstance(value, int):
            setattr(section, name, draw.pick([*EDGES, None, "x", 1.5, True]))

    def _changed(self, column: list[Any], section: Any) -> Any:
        """Another column: of another length, with another value, or of another type."""
        draw = self.source
        rows = len(getattr(section, "slot", ()))
        choice = draw.below(8)
        if choice == 0:
            return column[:-1]
        if choice == 1:
            return [*column, draw.pick(EDGES)][:MOST]
        if choice == 2 or not column:
            return [draw.pick(EDGES)] * max(1, rows)
        if choice == 3:
            return [*column, *column][:MOST]
        column[draw.below(len(column))] = draw.pick([*EDGES, *EDGES, None, "x", 0.5, True, b"x"])
        if choice > 5:
            return self._typed(column)
        return column

    def _typed(self, column: list[Any]) -> Any:
        kind = self.source.pick(["I", "i", "Q", "q", "H", "d", "view", "tuple"])
        try:
            if kind == "tuple":
                return tuple(column)
            return memoryview(array("I", column)) if kind == "view" else array(kind, column)
        except (TypeError, OverflowError):
            return column
