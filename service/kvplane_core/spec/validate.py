"""Refuses steps that cannot be applied whole, before anything is changed.

Whether a row is valid depends on the rows before it (which slots are live, how many tokens they have), so the validator
reads the parts in order, and records what they would change. A fault that depends on results (which requests run, what
is cached) is never an error: such a row is answered with 0 tokens or a status.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Protocol

from kvplane.base.groups import MAX_TOKENS, CommitRule, ReplicaSpec, TierKind
from kvplane.base.hashing import MAX_TOKEN_ID, block_digest
from kvplane.base.sections import BY_ROW, Peers, Prefetch, Retain
from kvplane.base.step import (
    ALL_GROUPS,
    UNCHANGED,
    UNLIMITED,
    Admit,
    Cache,
    End,
    Facts,
    News,
    OnRefusal,
    Part,
    Peek,
    RowFlag,
    Run,
    Step,
)
from kvplane.base.values import MAX_OWNER_CHARS, MAX_RETAINED_NS, NO_REQUEST
from kvplane_core.face.interface import MAX_SLOTS
from kvplane_core.face.reasons import NONE, Refusal
from kvplane_core.face.setup import states_for_drafts
from kvplane_core.spec.policies import are_hints
from kvplane_core.spec.ranges import RANGES
from kvplane_core.spec.requests import Requests
from kvplane_core.spec.tiers.tiers import MAX_VERSION

MAX_COST_NS = 60_000_000_000  # of a token or a block


class OrderedJobs(Protocol):
    """What the tiers of a replica have ordered."""

    @property
    def each(self) -> Sequence[object]:
        """The tiers."""

    @property
    def last_job(self) -> int:
        """Number of the last job."""

    def load_after(self, job: int) -> int:
        """Return the step that a load in flight waits for; 0 for other jobs."""


RESERVED_ALIGN = 1  # a bit of flags that is ignored
RUN_FLAGS = RESERVED_ALIGN | int(RowFlag.DELAY_CACHING | RowFlag.FULL_FIT | RowFlag.UNALIGNED)
ADMIT_FLAGS = RESERVED_ALIGN | int(sum(RowFlag) & ~RowFlag.LOAD)


@dataclass(slots=True)
class _Slot:
    """The state that a slot would have after the rows that were checked so far."""

    live: bool
    held: bool
    num_tokens: int
    num_digests: int
    limit: int
    by_service: bool  # the service hashes its tokens
    digest_size: int


class StepValidator:
    """Checks whether a step can be applied to the current state of the replica. Changes nothing."""

    def __init__(
        self,
        spec: ReplicaSpec,
        requests: Requests,
        executed_through: int,
        busy: Collection[int] = (),
        tiers: OrderedJobs | None = None,
    ) -> None:
        """`busy`: blocks that loads of earlier engine lives may still write. `tiers`: None = there are none."""
        self._spec = spec
        self._requests = requests
        self._executed_through = executed_through
        self._busy = busy
        self._tiers = tiers
        self._not_busy_any_more: set[int] = set()  # blocks that loads_over releases in this message
        self._slots: dict[int, _Slot] = {}
        self._num_parts = 0
        self._computed: dict[int, int] = {}  # by slot, the computed tokens that facts set
        self._asked_to_load: set[int] = set()  # slots of admit rows of this message
        self._loads_over: set[int] = set()  # slots whose request or load ends in this message

    def check(self, step: Step) -> None:
        """Raise InvalidArgument, naming the field at fault, if a part of the step cannot be applied."""
        self._begin(step, NONE)
        self._require(len(step.parts) > 0, "no parts", "parts")
        through = step.executed_through
        self._require(0 <= through < step.seq, "executed", "executed_through", NONE, step.seq - 1)
        self._executed_through = max(self._executed_through, through)
        self._num_parts = len(step.parts)
        for number, part in enumerate(step.parts):
            self._begin(step, number)
            self._check_part(part, step.seq)

    def check_row(self, part: Part, seq: int) -> None:
        """Check a part with one row, whose predecessors in the step are applied already.

        Raises InvalidArgument as `check` of a step with all these rows would. Records only what concerns the whole
        message: which loads it begins and ends.
        """
        self._slots.clear()
        self._computed.clear()
        self._num_parts = 2
        self._begin(part, NONE)
        self._check_part(part, seq)

    def _begin(self, refused: Step | Part, part: int) -> None:
        self._refused, self._part = refused, part

    def _check_part(self, part: Part, seq: int) -> None:
        self._facts(part.facts, seq)
        self._cache(part.cache, seq)
        if part.peers != Peers():
            self._peers(part.peers)
        self._news(part.news)
        self._run(part.run)
        self._admit(part.admit)
        self._columns(part.peek, "peek")
        self._ranges(part.peek, "peek")
        self._live(part.peek.slot, "peek.slot")
        if part.prefetch != Prefetch():
            self._prefetch(part.prefetch)
        self._retain(part.retain)
        self._ranges(part.budget, "budget")

    # -- sections ----------------------------------------------------------------------------------------------------

    def _facts(self, facts: Facts, seq: int) -> None:
        self._columns(facts, "facts")
        if facts.tokens:
            self._require(len(facts.tokens) == sum(facts.appended), "ids of appended", "facts.tokens")
            self._token_ids(facts.tokens, "facts.tokens")
        size = self._digest_size(facts.hashes, facts.num_hashes, "facts")
        self._require(are_hints(self._spec, facts.hint, UNCHANGED), "hints", "facts.hint")
        for row, slot in enumerate(facts.slot):
            known = self._known(slot, "facts.slot", row)
            if facts.computed and facts.computed[row] != UNCHANGED:
                self._computed[slot] = facts.computed[row]
            self._fact_tokens(facts, row, known)
            self._fact_hashes(facts, row, known, size)
            self._fact_end(facts, row, known, seq)

    def _fact_tokens(self, facts: Facts, row: int, known: _Slot) -> None:
        appended = facts.appended[row] if facts.appended else 0
        fits = 0 <= appended <= known.limit - known.num_tokens
        self._require(fits, "limit", "facts.appended", row, known.num_tokens, known.limit)
        known.num_tokens += appended
        if appended and known.by_service:
            self._require(bool(facts.tokens), "ids wanted", "facts.tokens", row)
        elif appended:
            self._require(not facts.tokens, "hashes wanted", "facts.tokens", row)
        self._fact_load(facts, row)
        longest = self._spec.max_model_len
        for name in ("computed", "commit", "release_skipped"):
            column = getattr(facts, name)
            value = column[row] if column else UNCHANGED
            self._require(UNCHANGED <= value <= longest, "position", f"facts.{name}", row, longest)

    def _fact_load(self, facts: Facts, row: int) -> None:
        slot = facts.slot[row]
        if not facts.commit or facts.commit[row] == UNCHANGED:
            return
        self._load_has_started(slot, "facts.commit", row)
        self._require(slot not in self._asked_to_load, "load asked", "facts.commit", row, slot)

    def _load_has_started(self, slot: int, column: str, row: int) -> None:
        """Refuse a row that ends the load of its request (a commit or run row) before the load may start."""
        requests = self._requests
        if slot in requests.loading and slot not in self._loads_over and requests.running[slot]:
            after = requests.load_after[slot]
            self._require(after <= self._executed_through, "load not started", column, row, slot, after)

    def _fact_hashes(self, facts: Facts, row: int, known: _Slot, size: int) -> None:
        count = facts.num_hashes[row] if facts.num_hashes else 0
        if count == 0:
            return
        self._require(not known.by_service, "no hashes wanted", "facts.num_hashes", row)
        same = known.digest_size in (0, size)
        self._require(same, "hash size", "facts.hashes", NONE, size, known.digest_size)
        known.digest_size = size
        known.num_digests += count
        self._digests_fit(known, "facts.num_hashes", row)

    def _fact_end(self, facts: Facts, row: int, known: _Slot, seq: int) -> None:
        end = facts.end[row] if facts.end else End.NONE
        fence = facts.fence[row] if facts.fence else 0
        self._require(end in End._value2member_map_, "end", "facts.end", row)
        self._require(0 <= fence <= seq, "fence", "facts.fence", row, seq)
        self._require(fence == 0 or end != End.HELD, "fence of held", "facts.fence", row)
        self._require(not known.held, "held", "facts.slot", row)
        if end != End.NONE:
            self._loads_over.add(facts.slot[row])
        known.held = end == End.HELD
        known.live = end != End.FREE

    def _cache(self, cache: Cache, seq: int) -> None:
        for row, failed in enumerate(cache.failed_steps):
            self._require(0 < failed < seq, "not sent", "cache.failed_steps", row, seq)
            # Safe only before executed_through passes it: then its keys are published.
            self._require(failed > self._executed_through, "executed step", "cache.failed_steps", row)
        last = self._spec.num_blocks - 1
        for row, block in enumerate(cache.evicted):
            self._require(0 < block <= last, "block", "cache.evicted", row, last)
        evicted = set(cache.evicted)
        for row, block in enumerate(cache.mismatched):
            self._require(block in evicted, "keeps keys", "cache.mismatched", NONE, row)
        self._ranges(cache, "cache")
        for row, slot in enumerate(cache.released):
            known = self._known(slot, "cache.released", row)
            self._require(known.held or slot in self._requests.loading, "not held", "cache.released", row)
            self._loads_over.add(slot)
            if known.held:
                known.held = known.live = False
        for row, block in enumerate(cache.loads_over):
            is_busy = block in self._busy and block not in self._not_busy_any_more
            self._require(is_busy, "not busy", "cache.loads_over", row)
            self._not_busy_any_more.add(block)
        self._jobs(cache, self._tiers)

    def _jobs(self, cache: Cache, tiers: OrderedJobs | None) -> None:
        """Refuse jobs that were not ordered, loads that are done before they could start, and costs of other tiers."""
        num_tiers = len(tiers.each) if tiers is not None else 0
        if costs := cache.costs_ns:
            self._require(len(costs) == 1 + num_tiers, "costs", "cache.costs_ns", NONE, num_tiers)
            self._require(0 <= min(costs) <= max(costs) <= MAX_COST_NS, "cost", "cache.costs_ns")
        last = tiers.last_job if tiers is not None and num_tiers else 0  # without tiers, no state has the number
        for column, jobs in (("cache.jobs_done", cache.jobs_done), ("cache.jobs_failed", cache.jobs_failed)):
            for row, job in enumerate(jobs):
                self._require(0 < job <= last, "job", column, row, last)
        is_number = isinstance(cache.jobs_before, int) and 0 <= cache.jobs_before <= last + 1
        self._require(is_number, "jobs before", "cache.jobs_before", NONE, last + 1)
        for row, job in enumerate(cache.jobs_done):
            after = tiers.load_after(job) if tiers is not None else 0
            self._require(after <= self._executed_through, "job not started", "cache.jobs_done", row, after)

    def _news(self, news: News) -> None:
        self._columns(news, "news")
        self._require(len(news.num_tokens) == len(news.slot), "entries", "news.num_tokens")
        self._texts(news.request_id, "news.request_id")
        self._texts(news.domain, "news.domain")
        if by_service := bool(news.tokens):
            self._require(len(news.tokens) == sum(news.num_tokens), "ids of prompts", "news.tokens")
            self._require(not news.hashes, "tokens and hashes", "news.hashes")
            self._token_ids(news.tokens, "news.tokens")
        self._require(are_hints(self._spec, news.hint), "hints", "news.hint")
        size = self._digest_size(news.hashes, news.num_hashes, "news")
        for row, slot in enumerate(news.slot):
            self._new_slot(news, row, slot, by_service, size)

    def _new_slot(self, news: News, row: int, slot: int, by_service: bool, digest_size: int) -> None:
        self._require(0 <= slot < MAX_SLOTS, "not a slot", "news.slot", row, MAX_SLOTS - 1)
        self._require(not self._look(slot).live, "taken", "news.slot", row)
        max_tokens = news.max_tokens[row] if news.max_tokens else 0
        limit = min(max_tokens or self._spec.max_model_len, self._spec.max_model_len)
        self._require(0 <= max_tokens <= MAX_TOKENS, "interval", "news.max_tokens", row, 0, MAX_TOKENS)
        num_tokens = news.num_tokens[row]
        self._require(1 <= num_tokens <= limit, "interval", "news.num_tokens", row, 1, limit)
        known = _Slot(True, False, num_tokens, 0, limit, by_service, digest_size)
        known.num_digests = news.num_hashes[row] if news.num_hashes else 0
        self._digests_fit(known, "news.num_hashes", row)
        self._slots[slot] = known

    def _run(self, run: Run) -> None:
        self._columns(run, "run")
        self._live(run.slot, "run.slot")
        self._distinct(run.slot, "run.slot")
        self._live(run.victims, "run.victims")
        if self._requests.loading:
            for row, slot in enumerate(run.slot):
                self._load_has_started(slot, "run.slot", row)
        self._ranges(run, "run")
        self._bits(run.flags, RUN_FLAGS, "run.flags")
        if run.extra and max(run.extra) > 0 and self._spec.commit is CommitRule.SAFE:
            self._drafts(run)

    def _drafts(self, run: Run) -> None:
        """Refuse rows with more drafts than there are draft states: the state before rejected drafts would be lost.

        Placeholders for tokens that steps without an answer will sample are not drafts. Tokens that are computed, and
        those of the request's last row until its step is executed, count as accepted.
        """
        most = states_for_drafts(self._spec)
        if most is None or max(run.extra) <= most:
            return
        requests = self._requests
        for row, (slot, extra) in enumerate(zip(run.slot, run.extra, strict=True)):
            if not requests.is_live(slot) or not requests.running[slot]:
                continue
            known = self._look(slot).num_tokens
            computed = min(self._computed.get(slot, MAX_TOKENS), requests.computed[slot])
            cap = run.cap[row] if run.cap else UNLIMITED
            end = min(known + extra, computed + cap, self._spec.max_model_len)
            step, asked = requests.asked.get(slot, (0, 0))
            base = max(computed, asked if step > self._executed_through else 0)
            fits = known - computed > 1 or end - base <= 1 + most
            self._require(fits, "drafts", "run.extra", row, end - base, 1 + most, most)

    def _admit(self, admit: Admit) -> None:
        self._columns(admit, "admit")
        self._live(admit.slot, "admit.slot")
        self._distinct(admit.slot, "admit.slot")
        self._ranges(admit, "admit")
        are_groups = not admit.skip_zero_groups or 0 <= min(admit.skip_zero_groups) <= max(admit.skip_zero_groups)
        are_groups = are_groups and max(admit.skip_zero_groups, default=0) <= ALL_GROUPS
        self._require(are_groups, "groups", "admit.skip_zero_groups")
        self._bits(admit.flags, ADMIT_FLAGS | (RowFlag.LOAD if self._spec.tiers else 0), "admit.flags")
        for row, flags in enumerate(admit.flags):
            alone = not flags & (RowFlag.DELAY_CACHING | RowFlag.WHOLE) and not (admit.external and admit.external[row])
            self._require(alone or not flags & RowFlag.LOAD, "load", "admit.flags", row)
        if self._num_parts > 1 and admit.external and admit.flags:
            rows = zip(admit.slot, admit.external, admit.flags, strict=True)
            late = [slot for slot, external, flags in rows if external and flags & RowFlag.DELAY_CACHING]
            self._asked_to_load.update(late)
        self._require(admit.on_refusal is not OnRefusal.PREEMPT, "preempt", "admit.on_refusal")

    def _peers(self, rows: Peers) -> None:
        tiers, count = self._spec.tiers, len(rows.slot)
        self._require(bool(tiers) and tiers[-1].kind is TierKind.PEERS, "no peers", "peers")
        self._require(len(rows.version) == count, "count", "peers.version", NONE, count)
        self._require(len(rows.group) == count, "count", "peers.group", NONE, count)
        self._columns(rows, "peers")
        self._texts(rows.domain, "peers.domain")
        size, last = block_digest(self._spec.hash_algorithm).size, tiers[-1].num_blocks - 1
        self._require(len(rows.hashes) == count * size, "hash bytes", "peers.hashes", NONE, count, size)
        self._range(rows.gone, 0, last, "peers.gone")
        self._range(rows.slot, 0, last, "peers.slot")
        self._range(rows.version, 1, MAX_VERSION, "peers.version")
        self._range(rows.group, 0, len(self._spec.groups) - 1, "peers.group")

    def _prefetch(self, rows: Prefetch) -> None:
        self._columns(rows, "prefetch")
        self._digest_size(rows.hashes, rows.num_hashes, "prefetch")
        self._texts(rows.domain, "prefetch.domain")
        self._ranges(rows, "prefetch")
        self._require(len(self._spec.tiers) > 1, "no second tier", "prefetch")
        counts = rows.num_hashes or [0] * len(rows.slot)
        for row, (slot, count) in enumerate(zip(rows.slot, counts, strict=True)):
            has_hashes = slot == NO_REQUEST
            self._require(has_hashes == (count > 0), "not one prompt", "prefetch.num_hashes", row, slot, count)
        for row, slot in enumerate(rows.slot):
            self._require(slot == NO_REQUEST or self._look(slot).live, "no request", "prefetch.slot", row)

    def _retain(self, rows: Retain) -> None:
        self._columns(rows, "retain")
        self._digest_size(rows.hashes, rows.num_hashes, "retain")
        self._texts(rows.domain, "retain.domain")
        self._texts(rows.owner, "retain.owner")
        self._ranges(rows, "retain")
        self._require(len(rows.now_ns) < 2, "one time", "retain.now_ns")
        self._require(self._spec.blocks_per_state == 1 or not rows.num_hashes, "split pages", "retain")
        most = self._spec.max_model_len // self._spec.hash_block_size
        for row, count in enumerate(rows.num_hashes):
            self._require(1 <= count <= most, "prefix", "retain.num_hashes", row, most)
        for row, until_ns in enumerate(rows.until_ns):
            away = until_ns - rows.time_ns
            self._require(away <= MAX_RETAINED_NS, "far end", "retain.until_ns", row, away)
        self._require(all(len(owner) <= MAX_OWNER_CHARS for owner in rows.owner), "owner", "retain.owner")

    # -- checks of values --------------------------------------------------------------------------------------------

    def _look(self, slot: int) -> _Slot:
        known = self._slots.get(slot)
        if known is None:
            requests = self._requests
            if not requests.is_live(slot):
                return _Slot(False, False, 0, 0, 0, False, 0)
            content = requests.content[slot]
            known = _Slot(
                True,
                requests.held[slot],
                requests.num_tokens[slot],
                len(content.digests),
                requests.limit[slot],
                requests.by_service[slot],
                len(content.digests[0]) if content.digests else 0,
            )
            self._slots[slot] = known
        return known

    def _known(self, slot: int, column: str, row: int) -> _Slot:
        known = self._look(slot)
        self._require(known.live, "no request", column, row)
        return known

    def _live(self, slots: Sequence[int], column: str) -> None:
        overlay, requests = self._slots, self._requests
        for row, slot in enumerate(slots):
            is_live = overlay[slot].live if slot in overlay else requests.is_live(slot)
            self._require(is_live, "no request", column, row)

    def _distinct(self, slots: Sequence[int], column: str) -> None:
        if len(set(slots)) != len(slots):
            twice = next(slot for row, slot in enumerate(slots) if slot in slots[:row])
            self._require(False, "twice", column, NONE, twice)

    def _digests_fit(self, known: _Slot, column: str, row: int) -> None:
        most = known.num_tokens // self._spec.hash_block_size
        fit = 0 <= known.num_digests <= most
        self._require(fit, "hashes", column, row, known.num_digests, known.num_tokens, most)

    def _digest_size(self, hashes: bytes, counts: Sequence[int], section: str) -> int:
        """Return the bytes per digest of a section, 0 if it has none; a store cannot recover those of another size."""
        if not hashes and not counts:
            return 0
        self._range(counts, 0, MAX_TOKENS, f"{section}.num_hashes")
        count = sum(counts)
        size = block_digest(self._spec.hash_algorithm).size if count else 0
        self._require(size * count == len(hashes), "hash bytes", f"{section}.hashes", NONE, count, size)
        return size

    def _columns(self, section: Facts | News | Peers | Run | Admit | Peek | Prefetch | Retain, where: str) -> None:
        """Require that each column has one entry per row, or no entry."""
        rows = len(section.num_hashes if isinstance(section, Retain) else section.slot)
        for name in BY_ROW[type(section)]:
            column = getattr(section, name)
            if column and len(column) != rows:
                self._require(False, "count", f"{where}.{name}", NONE, rows)

    def _ranges(self, section: object, where: str) -> None:
        """Require that all values are in the ranges of the contract."""
        for name, values, low, high in RANGES[where](section, self._spec):
            self._range(values, low, high, f"{where}.{name}")

    def _range(self, column: Sequence[int], low: int, high: int, name: str) -> None:
        if column and not (low <= min(column) and max(column) <= high):
            self._require(False, "range", name, NONE, low, high)

    def _bits(self, column: Sequence[int], allowed: int, name: str) -> None:
        allowed = int(allowed)  # the complement of a RowFlag has its own bits alone
        self._require(not reduce(or_, column, 0) & ~allowed, "flags", name, NONE, allowed)

    def _texts(self, column: Sequence[str], name: str) -> None:
        self._require(all(isinstance(one, str) for one in column), "text", name)

    def _token_ids(self, tokens: Sequence[int], name: str) -> None:
        if not isinstance(tokens, array) or tokens.typecode not in "BHI":  # each entry of such an array is an id
            self._range(tokens, 0, MAX_TOKEN_ID, name)

    def _require(self, holds: bool, reason: str, column: str, row: int = NONE, *values: int) -> None:
        if not holds:
            raise Refusal(reason, self._part, column, row, values).error(self._spec, self._refused)
