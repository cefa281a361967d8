"""What a scheduler works with: requests, limits, the rows of a launch, and counters."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from kvplane.base.errors import InvalidArgument
from kvplane.base.step import UNLIMITED, RowFlag
from kvplane.session.rows import FactRow, NewsRow

NO_SLOT = -1

Drafter = Callable[[Sequence[int], int], list[int]]  # (tokens of a request, most drafts) -> proposed next tokens


def no_drafts(tokens: Sequence[int], most: int) -> list[int]:
    """Return no drafts: the drafter of an engine without speculative decoding."""
    return []


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an engine.

    Attributes:
        max_running: most requests that run at the same time.
        token_budget: most tokens that a step computes.
        chunk_tokens: most tokens of one prompt that a step computes.
        admit_rows: most waiting requests that a step asks to admit, from the head of the queue.
        num_drafts: most draft tokens per request and step; with recurrent states at most GroupSpec.speculative_blocks.
        drafter: proposes the next tokens of a request.
        lookahead: token positions that each row asks for in addition to its drafts.
        commits: report accepted drafts as committed, so that other requests can hit their blocks one step earlier.
        admit_flags: flags of each admit row. With LOAD, hits are loaded from the tiers of the replica (`TierJobs`).
        prefetch_rows: most waiting requests that a step prefetches, those next to be admitted, each once: what only the
            disk has of their hits is copied to the host (`Prefetch`). 0 for a replica without both tiers.
        passed_by: most requests that are admitted before an earlier one that lacks blocks: prompts whose beginning
            running requests hold need few. They are among the `admit_rows` first of the queue. 0 = all wait.
    """

    max_running: int = 256
    token_budget: int = 8192
    chunk_tokens: int = UNLIMITED
    admit_rows: int = 8
    num_drafts: int = 0
    drafter: Drafter = no_drafts
    lookahead: int = 0
    commits: bool = False
    admit_flags: RowFlag = RowFlag.NONE
    prefetch_rows: int = 0
    passed_by: int = 0


@dataclass(eq=False, slots=True)
class Request:
    """A generation request, from its prompt to its last token.

    Attributes:
        request_id: id that the service uses in explanations and traces.
        prompt: token ids.
        max_new_tokens: most tokens to generate; a stop token may end the request earlier.
        domain: requests share blocks only within a domain.
        stop_token_ids: the request ends with any of these tokens.
        hint: what the engine knows of later requests that continue this one, see `News.hint`; set it again before the
            request ends, such as by why it stops. Only for a replica with `hint_values`.
        tokens: the prompt and the generated tokens.
        slot: the request's number at the service; NO_SLOT before it is announced.
        computed: number of leading tokens whose keys, values and states are in pages.
        launch_end: number of tokens after the last launch, rejected drafts included.
        drafts: proposed next tokens.
        hits: number of cached tokens that each admission found.
        error: why the request ended without its last token; "" if it did not.
        load: job that loads its hit, which it waits for; 0 = none.
        may_load: whether its next admission may load from tiers.
        may_hit: whether its next admission may look up cached blocks.
        is_admitted: whether it was admitted, and has not computed a token since.
        is_prefetched: whether a step has prefetched it.
        arrived: number of steps before it was added to a scheduler.
        passed: number of later requests that were admitted before it.
    """

    request_id: str
    prompt: Sequence[int]
    max_new_tokens: int
    domain: str = ""
    stop_token_ids: Container[int] = ()
    hint: int = 0
    tokens: list[int] = field(init=False)
    slot: int = field(default=NO_SLOT, init=False)
    computed: int = field(default=0, init=False)
    launch_end: int = field(default=0, init=False)
    drafts: list[int] = field(default_factory=list, init=False)
    hits: list[int] = field(default_factory=list, init=False)
    error: str = field(default="", init=False)
    load: int = field(default=0, init=False)
    may_load: bool = field(default=True, init=False)
    may_hit: bool = field(default=True, init=False)
    is_admitted: bool = field(default=False, init=False)
    is_prefetched: bool = field(default=False, init=False)
    arrived: int = field(default=0, init=False)
    passed: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Raise InvalidArgument if the prompt is empty or `max_new_tokens` is below 1."""
        self.tokens = list(self.prompt)
        if not self.tokens or self.max_new_tokens < 1:
            raise InvalidArgument(
                f"the request has {len(self.tokens)} prompt tokens and asks for {self.max_new_tokens} new ones",
                field="max_new_tokens" if self.tokens else "prompt",
                remedy="give 1 or more of each",
            )

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the prompt and generated so far."""
        return len(self.tokens)

    @property
    def max_tokens(self) -> int:
        """The most tokens that the request can have: its prompt and `max_new_tokens`."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def output(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[len(self.prompt) :]

    @property
    def is_done(self) -> bool:
        """Whether the request has its last token."""
        count = self.num_tokens - len(self.prompt)
        return count >= self.max_new_tokens or (count > 0 and self.tokens[-1] in self.stop_token_ids)

    def news_row(self) -> NewsRow:
        """Return the row that announces the request, with all its tokens, to the service."""
        return NewsRow(
            self.slot,
            self.tokens,
            request_id=self.request_id,
            domain=self.domain,
            max_tokens=self.max_tokens,
            hint=self.hint,
        )

    def append(self, token: int) -> None:
        """Append a generated token to the request."""
        self.tokens.append(token)

    def content(self, num_appended: int) -> FactRow:
        """Return the row that reports the last `num_appended` tokens to the service."""
        return FactRow(self.slot, tokens=self.tokens[len(self.tokens) - num_appended :])


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One row of a launch: `num_tokens` tokens of one request from position `start`: known tokens, then drafts.

    Attributes:
        num_outputs: number of last tokens after each of which the engine samples one.
        tables: block ids of each group, in token order.
        is_admission: whether it is the first row since the request was admitted.
    """

    request: Request
    start: int
    num_tokens: int
    num_outputs: int
    tables: Sequence[Sequence[int]]
    is_admission: bool = False

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + self.num_tokens

    @property
    def tokens(self) -> list[int]:
        """The token ids to compute."""
        return [*self.request.tokens, *self.request.drafts][self.start : self.end]


@dataclass(slots=True)
class Counts:
    """Counters of one scheduler since its start. They never decrease."""

    steps: int = 0
    completed: int = 0
    refused: int = 0
    aborted: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    hits: int = 0
    hit_tokens: int = 0
    copies: int = 0
    preempted: int = 0
    deferred: int = 0
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    lost_steps: int = 0
    loads: int = 0
    loaded_tokens: int = 0
    loads_given_up: int = 0
