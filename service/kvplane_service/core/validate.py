"""Refuses steps that cannot be applied whole, before anything is changed.

Whether a row is valid depends on the rows before it (which slots are live, how many tokens they have), so the validator
reads the parts in order, and records what they would change. A fault that depends on results (which requests run, what
is cached) is never an error: such a row is answered with 0 tokens or a status.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import add, gt

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import MAX_TOKENS, CommitRule, ReplicaSpec
from kvplane.base.hashing import block_digest
from kvplane.base.prefetch import NO_REQUEST, Prefetch
from kvplane.base.retain import MAX_PRIORITY, Retain
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
    RowFlag,
    Run,
    Step,
    Watermark,
)
from kvplane_service.core.policies import check_hints
from kvplane_service.core.requests import MAX_SLOTS, Requests
from kvplane_service.core.retaining import check_retain
from kvplane_service.core.setup import states_for_drafts
from kvplane_service.core.tiers.checks import MAX_WITHIN_NS, OrderedJobs, check_jobs, check_load_rows, check_prefetch
from kvplane_service.core.value_checks import ValueChecks

MAX_LOOKAHEAD = 4096
MAX_NS = (1 << 62) - 1  # of a time
RESERVED_ALIGN = 1  # a bit of flags that is ignored
RUN_FLAGS = RESERVED_ALIGN | int(RowFlag.DELAY_CACHING | RowFlag.FULL_FIT | RowFlag.UNALIGNED)
ADMIT_FLAGS = RESERVED_ALIGN | int(sum(RowFlag) & ~RowFlag.LOAD)
_FACTS_COLUMNS = ("computed", "appended", "num_hashes", "commit", "end", "fence", "release_skipped", "hint")
_NEWS_COLUMNS = "num_tokens num_hashes request_id domain extra_keys skip_reading max_tokens traceparent hint".split()
_ADMIT_COLUMNS = (
    "extra cap lookahead external expected_hit encoder_tokens reserved watermark flags hit_limit min_new "
    "skip_zero_groups single_group_hit"
).split()
_EMPTY = Part()  # sections equal to those of an empty part are skipped


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


class StepValidator(ValueChecks):
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
        self._plain: Sequence[int] = ()  # slots of facts that only append tokens
        self._plain_tokens: Sequence[int] = ()  # number of tokens of these slots after the facts
        self._computed: dict[int, int] = {}  # by slot, the computed tokens that facts set
        self._ended = False  # some slot ends in this step
        self._asked_to_load: set[int] = set()  # slots of admit rows of this message
        self._loads_over: set[int] = set()  # slots whose request or load ends in this message

    def check(self, step: Step) -> None:
        """Raise InvalidArgument, naming the field at fault, if a part of the step cannot be applied."""
        self._require(len(step.parts) > 0, "parts", "a step has at least one part")
        through = step.executed_through
        self._require(0 <= through < step.seq, "executed_through", f"step {through} is not 0 to {step.seq - 1}")
        self._executed_through = max(self._executed_through, through)
        self._num_parts = len(step.parts)
        for number, part in enumerate(step.parts):
            self._where = f"parts[{number}]."
            self._check_part(part, step.seq)

    def check_row(self, part: Part, seq: int) -> None:
        """Check a part with one row, whose predecessors in the step are applied already.

        Raises InvalidArgument as `check` of a step with all these rows would. Records only what concerns the whole
        message: which loads it begins and ends.
        """
        self._slots.clear()
        self._computed.clear()
        self._plain, self._plain_tokens, self._ended = (), (), False
        self._num_parts = 2
        self._check_part(part, seq)

    def _check_part(self, part: Part, seq: int) -> None:
        if part.facts != _EMPTY.facts:
            self._facts(part.facts, seq)
        if part.cache != _EMPTY.cache:
            self._cache(part.cache, seq)
        if part.news != _EMPTY.news:
            self._news(part.news)
        if part.run != _EMPTY.run:
            self._run(part.run)
        if part.admit != _EMPTY.admit:
            self._admit(part.admit)
        if part.peek != _EMPTY.peek:
            self._columns(part.peek, ("limit",), "peek")
            self._range(part.peek.limit, 0, UNLIMITED, "peek.limit")
            self._live(part.peek.slot, "peek.slot")
        if part.prefetch != _EMPTY.prefetch:
            self._prefetch(part.prefetch)
        if part.retain != _EMPTY.retain:
            self._retain(part.retain)
        if part.budget != _EMPTY.budget:
            for name in ("tokens", "input", "overhead"):
                self._range([getattr(part.budget, name)], 0, UNLIMITED, f"budget.{name}")

    # -- sections ----------------------------------------------------------------------------------------------------

    def _facts(self, facts: Facts, seq: int) -> None:
        self._columns(facts, _FACTS_COLUMNS, "facts")
        if facts.tokens:
            self._require(
                len(facts.tokens) == sum(facts.appended),
                "facts.tokens",
                f"{len(facts.tokens)} token ids for {sum(facts.appended)} tokens in `appended`; send one id per token",
            )
            self._token_ids(facts.tokens, "facts.tokens")
        size = self._digest_size(facts.hashes, facts.num_hashes, "facts")
        check_hints(self._spec, facts.hint, UNCHANGED, f"{self._where}facts.hint")
        if self._is_plain_growth(facts, size):
            self._plain = facts.slot
            return
        for row, slot in enumerate(facts.slot):
            known = self._known(slot, f"facts.slot[{row}]")
            if facts.computed and facts.computed[row] != UNCHANGED:
                self._computed[slot] = facts.computed[row]
            self._fact_tokens(facts, row, known)
            self._fact_hashes(facts, row, known, size)
            self._fact_end(facts, row, known, seq)

    def _is_plain_growth(self, facts: Facts, size: int) -> bool:
        """Whether the rows only append tokens, within limits, to distinct running requests whose hashes are given, as
        most rows do. Used only in a step of one part: then no later facts depend on the changes of these rows.
        """
        said = (facts.tokens, facts.computed, facts.commit, facts.end, facts.fence, facts.release_skipped, facts.hint)
        if any(said) or self._num_parts > 1 or not facts.appended or not self._are_running(facts.slot):
            return False
        requests = self._requests
        tokens = list(map(add, map(requests.num_tokens.__getitem__, facts.slot), facts.appended))
        self._plain_tokens = tokens
        return (
            min(facts.appended) >= 0
            and not any(map(requests.by_service.__getitem__, facts.slot))
            and not any(map(gt, tokens, map(requests.limit.__getitem__, facts.slot)))
            and self._are_due(facts, tokens, size)
        )

    def _are_running(self, slots: Sequence[int]) -> bool:
        """Whether these are distinct slots of running requests; such requests are live and not held."""
        running = self._requests.running
        are_known = min(slots, default=0) >= 0 and max(slots, default=0) < len(running)
        return are_known and all(map(running.__getitem__, slots)) and len(set(slots)) == len(slots)

    def _are_due(self, facts: Facts, tokens: Sequence[int], size: int) -> bool:
        """Whether all hashes are of full blocks, and have as many bytes as the request's earlier hashes."""
        unit = self._spec.hash_block_size
        for row, count in enumerate(facts.num_hashes):
            if count:
                digests = self._requests.content[facts.slot[row]].digests
                if len(digests) + count > tokens[row] // unit or (digests and len(digests[0]) != size):
                    return False
        return True

    def _fact_tokens(self, facts: Facts, row: int, known: _Slot) -> None:
        appended = facts.appended[row] if facts.appended else 0
        self._require(
            0 <= appended <= known.limit - known.num_tokens,
            f"facts.appended[{row}]",
            f"the request would have {known.num_tokens + appended} tokens, its limit is {known.limit}",
        )
        known.num_tokens += appended
        if appended and known.by_service:
            self._require(
                bool(facts.tokens),
                f"facts.tokens[{row}]",
                "the request was added with token ids: send the ids of its appended tokens",
            )
        elif appended:
            self._require(
                not facts.tokens,
                f"facts.tokens[{row}]",
                "the request was added with hashes: send hashes of its full blocks, no token ids",
            )
        self._fact_load(facts, row)
        for name in ("computed", "commit", "release_skipped"):
            column = getattr(facts, name)
            value = column[row] if column else UNCHANGED
            self._require(
                UNCHANGED <= value <= self._spec.max_model_len,
                f"facts.{name}[{row}]",
                f"{value} is not 0 to max_model_len {self._spec.max_model_len}, or {UNCHANGED} for unchanged",
            )

    def _fact_load(self, facts: Facts, row: int) -> None:
        slot = facts.slot[row]
        if not facts.commit or facts.commit[row] == UNCHANGED:
            return
        self._load_has_started(slot, f"facts.commit[{row}]")
        self._require(
            slot not in self._asked_to_load,
            f"facts.commit[{row}]",
            f"an earlier part of this message requests a load into slot {slot}; commit it after its answer",
        )

    def _load_has_started(self, slot: int, field: str) -> None:
        """Refuse a row that ends the load of its request (a commit or run row) before the load may start."""
        requests = self._requests
        waits = slot in requests.loading and slot not in self._loads_over and requests.running[slot]
        if waits and requests.load_after[slot] > self._executed_through:
            raise InvalidArgument(
                f"the load into slot {slot} cannot have started: step {requests.load_after[slot]} is not executed",
                field=self._where + field,
                remedy="load when executed_through has reached admit_load_after; if the load failed, release the slot",
            )

    def _fact_hashes(self, facts: Facts, row: int, known: _Slot, size: int) -> None:
        count = facts.num_hashes[row] if facts.num_hashes else 0
        if count == 0:
            return
        field = f"facts.num_hashes[{row}]"
        self._require(not known.by_service, field, "the request was added with token ids: send ids, no hashes")
        same = known.digest_size in (0, size)
        self._require(same, "facts.hashes", f"hashes of {size} bytes, earlier ones have {known.digest_size}")
        known.digest_size = size
        known.num_digests += count
        self._digests_fit(known, field)

    def _fact_end(self, facts: Facts, row: int, known: _Slot, seq: int) -> None:
        end = facts.end[row] if facts.end else End.NONE
        fence = facts.fence[row] if facts.fence else 0
        self._require(end in End._value2member_map_, f"facts.end[{row}]", f"{end} is not a value of End")
        self._require(0 <= fence <= seq, f"facts.fence[{row}]", f"{fence} is not 0 to {seq}, the number of this step")
        self._require(
            fence == 0 or end != End.HELD,
            f"facts.fence[{row}]",
            "a row that ends as HELD has no fence: cache.released releases its blocks",
        )
        self._require(
            not known.held, f"facts.slot[{row}]", "the request has ended as HELD: name its slot in cache.released"
        )
        if end != End.NONE:
            self._loads_over.add(facts.slot[row])
        known.held = end == End.HELD
        known.live = end != End.FREE
        self._ended |= end == End.FREE

    def _cache(self, cache: Cache, seq: int) -> None:
        for row, failed in enumerate(cache.failed_steps):
            field = f"cache.failed_steps[{row}]"
            self._require(0 < failed < seq, field, f"step {failed} was not sent before this one, step {seq}")
            # Safe only before executed_through passes it: then its keys are published.
            self._require(
                failed > self._executed_through, field, f"step {failed} was reported as executed, so it cannot fail"
            )
        for row, block in enumerate(cache.evicted):
            self._require(
                0 < block < self._spec.num_blocks,
                f"cache.evicted[{row}]",
                f"block {block} is not 1 to {self._spec.num_blocks - 1}",
            )
        for block in set(cache.mismatched).difference(cache.evicted):
            self._require(False, "cache.mismatched", f"block {block} keeps its keys: list it in cache.evicted too")
        self._range([cache.hits_checked], 0, UNLIMITED, "cache.hits_checked")
        for row, slot in enumerate(cache.released):
            known = self._known(slot, f"cache.released[{row}]")
            waits = known.held or slot in self._requests.loading
            self._require(waits, f"cache.released[{row}]", f"slot {slot} has not ended as HELD and has no load")
            self._loads_over.add(slot)
            if known.held:
                known.held = known.live = False
                self._ended = True
        for row, block in enumerate(cache.loads_over):
            field = f"cache.loads_over[{row}]"
            is_busy = block in self._busy and block not in self._not_busy_any_more
            self._require(is_busy, field, f"block {block} is not one of busy_blocks, or is listed twice")
            self._not_busy_any_more.add(block)
        check_jobs(cache, self._tiers, self._executed_through, self._where)

    def _news(self, news: News) -> None:
        self._columns(news, _NEWS_COLUMNS, "news")
        self._require(len(news.num_tokens) == len(news.slot), "news.num_tokens", "send one entry per new request")
        for name, texts in (("request_id", news.request_id), ("domain", news.domain)):
            self._require(all(isinstance(one, str) for one in texts), f"news.{name}", "every entry must be a text")
        if by_service := bool(news.tokens):
            self._require(
                len(news.tokens) == sum(news.num_tokens),
                "news.tokens",
                f"{len(news.tokens)} token ids for {sum(news.num_tokens)} tokens in num_tokens; send one id each",
            )
            self._require(not news.hashes, "news.hashes", "give tokens or hashes, not both")
            self._token_ids(news.tokens, "news.tokens")
        check_hints(self._spec, news.hint, 0, f"{self._where}news.hint")
        size = self._digest_size(news.hashes, news.num_hashes, "news")
        for row, slot in enumerate(news.slot):
            self._new_slot(news, row, slot, by_service, size)

    def _new_slot(self, news: News, row: int, slot: int, by_service: bool, digest_size: int) -> None:
        self._require(0 <= slot < MAX_SLOTS, f"news.slot[{row}]", f"slot {slot} is not 0 to {MAX_SLOTS - 1}")
        self._require(not self._look(slot).live, f"news.slot[{row}]", f"slot {slot} is taken by a live request")
        max_tokens = news.max_tokens[row] if news.max_tokens else 0
        limit = min(max_tokens or self._spec.max_model_len, self._spec.max_model_len)
        self._require(
            0 <= max_tokens <= MAX_TOKENS, f"news.max_tokens[{row}]", f"{max_tokens} is not 0 to {MAX_TOKENS}"
        )
        num_tokens = news.num_tokens[row]
        self._require(1 <= num_tokens <= limit, f"news.num_tokens[{row}]", f"{num_tokens} is not 1 to {limit}")
        known = _Slot(True, False, num_tokens, 0, limit, by_service, digest_size)
        known.num_digests = news.num_hashes[row] if news.num_hashes else 0
        self._digests_fit(known, f"news.num_hashes[{row}]")
        self._slots[slot] = known

    def _run(self, run: Run) -> None:
        self._columns(run, ("extra", "cap", "lookahead", "in_flight", "flags", "reserved"), "run")
        if run.slot != self._plain:
            self._live(run.slot, "run.slot")
            self._distinct(run.slot, "run.slot")
        self._live(run.victims, "run.victims")
        if self._requests.loading:
            for row, slot in enumerate(run.slot):
                self._load_has_started(slot, f"run.slot[{row}]")
        self._range(run.extra, -MAX_TOKENS, MAX_TOKENS, "run.extra")
        self._range(run.cap, 0, UNLIMITED, "run.cap")
        self._range(run.lookahead, 0, MAX_LOOKAHEAD, "run.lookahead")
        self._range(run.in_flight, -1, MAX_TOKENS, "run.in_flight")
        self._range(run.reserved, 0, self._spec.num_blocks, "run.reserved")
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
        requests, grown = self._requests, dict(zip(self._plain, self._plain_tokens, strict=False))
        for row, (slot, extra) in enumerate(zip(run.slot, run.extra, strict=True)):
            if not requests.is_live(slot) or not requests.running[slot]:
                continue
            known = grown[slot] if slot in grown else self._look(slot).num_tokens
            computed = min(self._computed.get(slot, MAX_TOKENS), requests.computed[slot])
            cap = run.cap[row] if run.cap else UNLIMITED
            end = min(known + extra, computed + cap, self._spec.max_model_len)
            step, asked = requests.asked.get(slot, (0, 0))
            base = max(computed, asked if step > self._executed_through else 0)
            self._require(
                known - computed > 1 or end - base <= 1 + most,
                f"run.extra[{row}]",
                f"the launch would compute {end - base} tokens; {1 + most} is the most where {most} states are kept "
                "for drafts: send fewer, or register the replica with more speculative_tokens",
            )

    def _admit(self, admit: Admit) -> None:
        self._columns(admit, _ADMIT_COLUMNS, "admit")
        self._live(admit.slot, "admit.slot")
        self._distinct(admit.slot, "admit.slot")
        self._range(admit.extra, -MAX_TOKENS, MAX_TOKENS, "admit.extra")
        for name in ("cap", "hit_limit", "min_new", "single_group_hit"):
            self._range(getattr(admit, name), 0, UNLIMITED, f"admit.{name}")
        self._range(admit.lookahead, 0, MAX_LOOKAHEAD, "admit.lookahead")
        self._range(admit.external, 0, self._spec.max_model_len, "admit.external")
        self._range(admit.encoder_tokens, 0, MAX_TOKENS, "admit.encoder_tokens")
        self._range(admit.expected_hit, -1, self._spec.max_model_len, "admit.expected_hit")
        self._range(admit.reserved, 0, self._spec.num_blocks, "admit.reserved")
        self._range(admit.skip_zero_groups, 0, ALL_GROUPS, "admit.skip_zero_groups")
        self._range(admit.watermark, 0, int(max(Watermark)), "admit.watermark")
        self._bits(admit.flags, ADMIT_FLAGS | (RowFlag.LOAD if self._spec.tiers else 0), "admit.flags")
        check_load_rows(admit, self._where)
        self._range([admit.max_running], 0, UNLIMITED, "admit.max_running")
        if self._num_parts > 1 and admit.external and admit.flags:
            rows = zip(admit.slot, admit.external, admit.flags, strict=True)
            late = [slot for slot, external, flags in rows if external and flags & RowFlag.DELAY_CACHING]
            self._asked_to_load.update(late)
        self._require(
            admit.on_refusal is not OnRefusal.PREEMPT, "admit.on_refusal", "PREEMPT is for run rows: use STOP or SKIP"
        )

    def _prefetch(self, rows: Prefetch) -> None:
        self._columns(rows, ("num_hashes", "domain", "within_ns"), "prefetch")
        self._digest_size(rows.hashes, rows.num_hashes, "prefetch")
        self._require(all(isinstance(one, str) for one in rows.domain), "prefetch.domain", "every entry must be a text")
        self._range(rows.within_ns, 0, MAX_WITHIN_NS, "prefetch.within_ns")
        check_prefetch(rows, self._spec, self._where)
        self._live([slot for slot in rows.slot if slot != NO_REQUEST], "prefetch.slot")

    def _retain(self, rows: Retain) -> None:
        self._columns(rows, ("domain", "owner", "priority", "until_ns", "percent"), "retain")
        self._digest_size(rows.hashes, rows.num_hashes, "retain")
        for name in ("domain", "owner"):
            is_text = all(isinstance(one, str) for one in getattr(rows, name))
            self._require(is_text, f"retain.{name}", "every entry must be a text")
        self._range(rows.priority, 0, MAX_PRIORITY, "retain.priority")
        self._range(rows.percent, 0, 100, "retain.percent")
        self._range([*rows.now_ns, *rows.until_ns], 0, MAX_NS, "retain.until_ns")
        self._require(len(rows.now_ns) < 2, "retain.now_ns", "give one time, or none")
        check_retain(rows, self._spec, self._where)

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

    def _known(self, slot: int, field: str) -> _Slot:
        known = self._look(slot)
        self._require(known.live, field, f"slot {slot} has no request")
        return known

    def _live(self, slots: Sequence[int], field: str) -> None:
        overlay, requests = self._slots, self._requests
        within = not self._ended and min(slots, default=0) >= 0 and max(slots, default=0) < len(requests.live)
        if within and all(map(requests.live.__getitem__, slots)):
            return
        for row, slot in enumerate(slots):
            if not (overlay[slot].live if slot in overlay else requests.is_live(slot)):
                self._require(False, f"{field}[{row}]", f"slot {slot} has no request")

    def _distinct(self, slots: Sequence[int], field: str) -> None:
        if len(set(slots)) != len(slots):
            twice = next(slot for row, slot in enumerate(slots) if slot in slots[:row])
            self._require(False, field, f"slot {twice} is listed twice; send one row per slot")

    def _digests_fit(self, known: _Slot, field: str) -> None:
        most = known.num_tokens // self._spec.hash_block_size
        self._require(
            0 <= known.num_digests <= most,
            field,
            f"{known.num_digests} hashes for {known.num_tokens} tokens; at most {most}",
        )

    def _digest_size(self, hashes: bytes, counts: Sequence[int], section: str) -> int:
        """Return the bytes per digest of a section, 0 if it has none; a store cannot recover those of another size."""
        if not hashes and not counts:
            return 0
        self._range(counts, 0, MAX_TOKENS, f"{section}.num_hashes")
        count, algorithm = sum(counts), self._spec.hash_algorithm
        size = block_digest(algorithm).size if count else 0
        self._require(
            size * count == len(hashes),
            f"{section}.hashes",
            f"{len(hashes)} bytes for {count} hashes of {size} bytes (hash_algorithm {algorithm.value})",
        )
        return size
