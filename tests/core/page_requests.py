"""The requests of an engine as it knows them, and the tokens that their launches really compute.

An engine that sends steps ahead plans positions behind unverified drafts. Its launches begin where the accepted tokens
end: nearer to the start than planned, once a draft was rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field

from kvplane.base.groups import ReplicaSpec
from kvplane_core.spec.replica import Replica
from tests.core.builders import digests
from tests.core.page_memory import Left, Memory, Row, WrongPage

LONGEST = 64  # tokens of a script: the longest request
OTHER = "other"  # a domain whose pages hold capital letters, so that a hit across domains is seen


@dataclass
class Truth:
    """The tokens that executed launches of one stay have computed.

    Attributes:
        end: leading tokens whose pages are right.
        left: where the last launch left its states.
        shortest: length of the shortest of them.
    """

    end: int
    left: Left
    shortest: int


@dataclass
class PlannedRow(Row):
    """A row whose place is known when its launch begins.

    Attributes:
        truth: of its request.
        count: tokens of the launch.
        known: tokens that were known when the step was sent.
        luck: whether the drafter guesses the token at each place of the launch.
        seq: its step.
    """

    truth: Truth = field(default_factory=lambda: Truth(0, Left([], 0, 0), 0))
    count: int = 0
    known: int = 0
    luck: tuple[bool, ...] = ()
    seq: int = 0
    load: Transfer | None = None  # what must be there before
    is_resolved: bool = False
    rejected: int = 0
    sampled: int = 0  # tokens that are known when the launch has run

    @property
    def guesses(self) -> bool:
        """Whether it may compute drafts, or stand behind some."""
        return self.start + self.count > self.known

    @property
    def bounds(self) -> tuple[int, int]:
        """A launch whose place is not known begins where the tokens that are accepted now end, or later."""
        if self.is_resolved:
            return super().bounds
        return min(self.truth.end, self.start), self.start + self.count

    def first_state(self, last: int, block_size: int) -> int:
        """A state before rejected drafts stays behind the block of the last draft, see `Left`."""
        planned = min(self.truth.left.planned, self.start + self.count)
        return max(last, planned - 1) // block_size

    def resolve(self, lost: Container[tuple[int, int]]) -> None:
        """Begin where the launch before this one ended, with its rejected drafts left out.

        A life that lost a launch knows no such place: it runs as it was answered.
        """
        if self.is_resolved:
            return
        self.is_resolved = True
        truth, self.planned_start, self.planned = self.truth, self.start, self.start + self.count
        self.is_lost = self.life in lost or (self.load is not None and self.load.given_up)
        if self.load is not None and self.count and not self.is_lost:
            self.load.write(self.load.end)  # a launch that computes behind a load waits for it
        if not self.is_lost:
            assert truth.end <= self.start, f"{self.life} stands behind its plan"
            if self.loaded == self.start:
                self.loaded = truth.end
            self.start = truth.end
        self.left, end = truth.left, self.start + self.count
        self.certain = max(self.known, self.start + 1)
        guesses = zip(self.script[self.certain : end], self.luck, strict=False)
        drafts = "".join(token if right else "x" for token, right in guesses)
        self.launched = (self.script[: self.certain] + drafts)[:end]
        assert len(self.launched) == end, f"{self.life}: {end} tokens are more than its script"
        truth.end = common(self.launched, self.script)
        self.rejected = end - truth.end
        self.sampled = min(truth.end + 1, LONGEST)
        if self.count:
            truth.left = Left(self.tables, end, self.planned)
            truth.shortest = max(self.start + 1, min(self.certain, end))


@dataclass
class Transfer:
    """A load on its way: tokens [first, end) of a script into the blocks of one admission.

    Attributes:
        after: it writes when this step is executed on all ranks.
        seq: and when the orders of this step are carried out.
        at: it has written the tokens before this one.
    """

    memories: list[Memory]
    tables: list[list[int]]
    script: str
    first: int
    end: int
    after: int
    seq: int
    at: int = 0
    given_up: bool = False

    @property
    def is_done(self) -> bool:
        return self.at >= self.end

    def write(self, count: int) -> None:
        """Some tokens more; a state comes with the last one."""
        first = max(self.at, self.first)
        self.at = min(self.end, first + count)
        for memory in self.memories:
            memory.load(self.tables, self.script, first, self.at, self.is_done)

    def blocks(self, spec: ReplicaSpec) -> set[int]:
        """All that it may write."""
        written = set[int]()
        for group, table in zip(spec.groups, self.tables, strict=True):
            written.update(table[self.first // group.block_size : -(-self.end // group.block_size)])
        return written - {0}


@dataclass
class Request:
    """One request, as the engine knows it.

    Attributes:
        life: (slot, stay): a preemption ends a stay.
        limit: number of tokens with which it ends.
        known: tokens of the script that the service has received.
        prompt: tokens with which it began.
        hashed: block hashes that the service has received, when the engine hashes.
        computed: tokens that its steps so far compute, as the answers say.
        has_run: it has been granted tokens in this stay.
        running: it holds blocks and may run.
        truth: what its launches have computed.
        rows: launches with drafts whose outcome is not reported.
        load: as long as a transfer writes to its pages.
        may_hold: its transfer has ended, and no row has reported that to the service for certain.
        tables: where the transfer writes to, or reads from when the request is held.
    """

    life: tuple[int, int]
    script: str
    known: int
    limit: int = LONGEST
    domain: str = ""
    hashed: int = 0
    computed: int = 0
    has_run: bool = False
    running: bool = False
    truth: Truth | None = None
    rows: list[PlannedRow] = field(default_factory=list)
    load: Transfer | None = None
    may_hold: bool = False
    held: bool = False
    held_seq: int = 0  # the step that held it
    tables: list[list[int]] | None = None
    checked: int = 0  # held: 0 when a launch that wrote its pages never ran
    reached: int = 0  # held: tokens that it had computed, before drafts were rejected; windows ended there
    prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = self.known

    @property
    def is_held(self) -> bool:
        return self.held

    @property
    def drafts(self) -> bool:
        """Whether the outcome of some launch is unknown to the service."""
        return bool(self.rows)


@dataclass
class Texts:
    """The tokens and the text behind each block hash, by domain and digest."""

    spec: ReplicaSpec
    by_digest: dict[tuple[str, bytes], tuple[int, str]] = field(default_factory=dict)

    def learn(self, script: str, domain: str = "") -> list[bytes]:
        """Every prefix of this text that has a hash; these."""
        size, ahead = self.spec.hash_block_size, self.spec.hash_lookahead_tokens
        made = digests(self.spec, script.lower())
        for number, digest in enumerate(made, 1):
            self.by_digest[domain, digest] = number * size, script[: number * size + ahead]
        return made

    def check_keys(
        self,
        replica: Replica,
        memories: list[Memory],
        invalid: Container[int] = (),
        through: int = 0,
    ) -> int:
        """Every key that others may see names a page that holds just that, on every rank; how many were looked at.

        `invalid` are blocks that ranks have invalidated, so that no stamp proves what their keys say. Keys of steps up
        to `through`, which have run, are looked at too, though this is not reported.
        """
        pool, seen = replica.coordinator.pool, 0
        for block in range(pool.num_blocks):
            primary = pool.key_of(block)
            if primary is None or pool.key_step[block] > max(through, pool.executed_through) or block in invalid:
                continue
            for domain, group, digest in (primary, *pool.more_keys.get(block, ())):
                seen += 1
                num_tokens, text = self.by_digest[domain, digest]
                for memory in memories:
                    if not memory.holds(group, block, num_tokens, text):
                        raise WrongPage(f"block {block} has the key of {text!r} and holds {memory.pages.get(block)}")
        return seen


def common(one: str, other: str) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))


Note = Callable[[str, list[int]], None]
