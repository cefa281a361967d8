"""How a session continues after its service restarted. Functions without I/O, for the blocking and the asyncio session.

The restarted service recovers the cache entries for which the stamps of the page memory prove that the pages are
unchanged; it has lost all requests. The session sends the stamps, every request, and the blocks of running requests
(the image). The session itself answers the steps in flight: nothing was granted, and running requests that are not in
the image were preempted. The engine sees a pause; preempted requests hit their cached prefixes when they are admitted
again. The engine's step numbers continue, the new service's step numbers begin at 1: `StepNumbering` converts between
them.

If the service refuses the image, all running requests are preempted instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice

from kvplane.base.sections import Prefetched, Retained
from kvplane.base.session import NEW_EPOCH, Opened, OpenRequest
from kvplane.base.step import AdmitStatus, Cache, News, Orders, Part, PartResult, Resume, Step, StepResult


@dataclass(frozen=True, slots=True)
class Revival:
    """What an engine sends to a restarted service. Every granted step must have been launched.

    With a `resume`, every launch must have finished.

    Attributes:
        stamp_table: one stamp per block, on which all ranks agree; 0 where they differ.
        incarnation: identifies the page memory, 0 = unknown.
        news: every request that has not ended, in its current state, with all its tokens or hashes.
        running: slots of requests that hold blocks.
        held: slots whose requests ended as HELD (transfers use their blocks) and were not released. A slot that
            `resume` omits loses its pages: a transfer that reads such a page finds a changed stamp afterwards.
        busy_blocks: blocks that loads (transfers into pages from outside) in progress may still write, including loads
            of requests with `Resume.loading` 1. The session adds the blocks of its own `busy_blocks` that no
            step listed in `Cache.loads_over`.
        owner_epoch: the highest epoch that owns a rank's memory, 0 = none or unknown; the new epoch gets a higher
            epoch.
        disk_incarnation: identifies what the disk tiers hold (`RankGroup.disk_incarnation`), 0 = unknown.
        resume: the blocks of running requests that continue, and those of transfers; None: all running requests are
            preempted. Omit every request whose pages a failed launch may have written.
    """

    stamp_table: tuple[int, ...] = ()
    incarnation: int = 0
    news: News = field(default_factory=News)
    running: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    resume: Resume | None = None
    busy_blocks: tuple[int, ...] = ()
    owner_epoch: int = 0
    disk_incarnation: int = 0

    def first_request(self, replica: str, nonce: int, with_events: bool, client: str) -> OpenRequest:
        """Return the message that opens the session for the first time."""
        return self.open_request(OpenRequest(replica, nonce, NEW_EPOCH, with_events, client), nonce)

    def open_request(self, first: OpenRequest, nonce: int, busy: Iterable[int] = ()) -> OpenRequest:
        """Return the message that reopens the session. `busy` are blocks that loads (transfers into pages) of earlier
        epochs may still write.
        """
        return replace(
            first,
            epoch=NEW_EPOCH,
            nonce=nonce,
            stamp_table=self.stamp_table,
            incarnation=self.incarnation,
            busy_blocks=tuple(sorted({*self.busy_blocks, *busy})),
            owner_epoch=self.owner_epoch,
            disk_incarnation=self.disk_incarnation,
        )

    def first_steps(self, opened: Opened, lost: Iterable[Step]) -> list[Step]:
        """Return the first steps of the new epoch: the evictions of the unanswered (`lost`) steps, then
        the requests.
        """
        cache = Cache()
        for part in (part for step in lost for part in step.parts):
            cache.evicted.extend(part.cache.evicted)
            cache.reset = cache.reset or part.cache.reset
        parts = [Part(cache=cache), *(Part(news=some) for some in _in_pieces(self.news, opened.max_rows))]
        return [Step(opened.epoch, opened.seq + number, [part]) for number, part in enumerate(parts, 1)]

    def resume_step(self, opened: Opened, results: Sequence[StepResult]) -> Step | None:
        """Return the step that sends the image (the blocks of running requests), after the `results` of the first
        steps; None if there is no image.
        """
        if self.resume is None:
            return None
        return Step(opened.epoch, opened.seq + len(results) + 1, [Part(resume=self.resume)])

    def without_resume(self) -> Revival:
        """Return a copy without the image (the blocks of running requests), for use after the service refused the
        image.
        """
        return replace(self, resume=None)

    @property
    def dropped_held(self) -> frozenset[int]:
        """The held slots that the image (the blocks of running requests) omits, so that the new service does not know
        these slots.
        """
        return frozenset(self.held) - frozenset(self.resume.held_slot if self.resume else ())

    @property
    def adopted_loads(self) -> frozenset[int]:
        """The blocks that loads (transfers into pages from outside) of requests in the image still write. These blocks
        are no longer busy once the service has accepted the image (the blocks of running requests).
        """
        resume, found = self.resume or Resume(), set[int]()
        blocks, groups = iter(resume.blocks), len(resume.num_blocks) // max(1, len(resume.slot))
        for row, loading in enumerate(resume.loading):
            table = list(islice(blocks, sum(resume.num_blocks[row * groups : (row + 1) * groups])))
            found.update(table if loading == 1 else ())
        blocks = iter(resume.held_blocks)
        flags = resume.held_loading or [0] * len(resume.held_slot)
        for slot, count, loading in zip(resume.held_slot, resume.held_count, flags, strict=True):
            held = list(islice(blocks, count))
            found.update(held if loading or slot not in self.held else ())
        return frozenset(found)

    def answers(self, lost: Sequence[Step], results: Sequence[StepResult]) -> list[StepResult]:
        """Return the answers of the unanswered (`lost`) steps, in which nothing was granted.

        The first answer lists the preempted requests, and has the orders of all steps that began the new epoch
        (`results`).
        """
        free_blocks = results[-1].parts[-1].free_blocks
        answers = []
        for step in lost:
            parts = [_nothing_granted(part, free_blocks) for part in step.parts]
            answers.append(StepResult(step.seq, step.part, parts, step.executed_through))
        if answers:
            first = answers[0].parts[0]
            kept = frozenset(self.resume.slot if self.resume else ())
            first.preempted = [slot for slot in self.running if slot not in kept]
            first.orders = _joined([part.orders for result in results for part in result.parts])
        return answers


class StepNumbering:
    """The conversion between the engine's step numbers and those of the current service.

    Attributes:
        has_restarted: whether the service was replaced. Equal numbers would not show it: earlier steps may differ.
    """

    def __init__(self) -> None:
        self.has_restarted = False
        self._ahead = 0  # the engine's number of a step minus the service's
        self._cut: tuple[int, int] = (0, 0)  # (step, parts of it) that the previous service received
        # Held slots that the service does not have, and the (step, part) that released one, since it may be resent.
        self._held: dict[int, tuple[int, int] | None] = {}

    def restart(self, next_step: tuple[int, int], used: int, held: Iterable[int]) -> None:
        """Start with a new service: the engine's next (step, part) is the first part of the service's step `used` + 1.

        `held` are held slots (their requests ended, transfers use their blocks) that the new service does not know.
        """
        self.has_restarted = True
        self._ahead = next_step[0] - used - 1
        self._cut = next_step
        self._held = dict.fromkeys(held)  # earlier steps are not resent

    def to_service(self, step: Step) -> Step:
        """Return a step with the step number that the service uses."""
        if not self.has_restarted:
            return step
        part = step.part - self._cut[1] if step.seq == self._cut[0] else step.part
        done = self._done(step.executed_through)
        return replace(step, seq=step.seq - self._ahead, part=part, executed_through=done, parts=self._parts(step))

    def to_engine(self, result: StepResult) -> StepResult:
        """Return a result with the step number that the engine uses."""
        if not self.has_restarted:
            return result
        seq = result.seq + self._ahead
        part = result.part + (self._cut[1] if seq == self._cut[0] else 0)
        parts = [self._result(each) if each.admit_load_after else each for each in result.parts]
        published = result.published_through + self._ahead
        return replace(result, seq=seq, part=part, parts=parts, published_through=published)

    def _result(self, part: PartResult) -> PartResult:
        return replace(part, admit_load_after=[step and step + self._ahead for step in part.admit_load_after])

    def position(self, opened: Opened) -> tuple[int, int]:
        """Return the (step, part) that the service expects next, in the engine's numbers."""
        seq = opened.seq + 1 + self._ahead
        return seq, opened.next_part + (self._cut[1] if seq == self._cut[0] else 0)

    def less(self, seq: int) -> int:
        """Return the service's number of a step of the engine; 0 if that step was sent to an earlier service."""
        return seq - self._ahead if seq >= self._cut[0] else 0

    def _done(self, seq: int) -> int:
        """Return the value of `executed_through` in the service's step numbers. The first steps of an epoch
        launch nothing and count as executed.
        """
        return max(seq, self._cut[0] - 1) - self._ahead

    def _parts(self, step: Step) -> list[Part]:
        return [self._part(part, (step.seq, step.part)) if _names_steps(part) else part for part in step.parts]

    def _part(self, part: Part, place: tuple[int, int]) -> Part:
        facts, cache = part.facts, part.cache
        facts = replace(facts, fence=[self.less(fence) for fence in facts.fence])
        failed = [self.less(seq) for seq in cache.failed_steps if seq >= self._cut[0]]
        released = [slot for slot in cache.released if self._held.get(slot, ()) not in (None, place)]
        self._held.update({slot: place for slot in cache.released if slot in self._held and slot not in released})
        return replace(part, facts=facts, cache=replace(cache, failed_steps=failed, released=released))


def _joined(orders: Iterable[Orders]) -> Orders:
    """Return one Orders that has the entries of all given orders, in order."""
    joined = Orders()
    for each in orders:
        for name in (column.name for column in fields(Orders)):
            getattr(joined, name).extend(getattr(each, name))
    return joined


def _names_steps(part: Part) -> bool:
    return bool(part.facts.fence or part.cache.failed_steps or part.cache.released)


def _nothing_granted(part: Part, free_blocks: int) -> PartResult:
    rows = len(part.admit.slot)
    known = len(part.facts.slot) + len(part.news.slot) if part.with_hashes else 0
    return PartResult(
        granted=[0] * len(part.run.slot),
        admit_status=[int(AdmitStatus.NOT_REACHED)] * rows,
        admit_hit=[0] * rows,
        admit_granted=[0] * rows,
        admit_single_group_hit=[0] * rows,
        peek_hit=[0] * len(part.peek.slot),
        peek_single_group_hit=[0] * len(part.peek.slot),
        prefetched=Prefetched(*([0] * len(part.prefetch.slot) for _ in range(3))),
        retained=Retained(*([0] * len(part.retain.num_hashes) for _ in range(4))),
        num_hashes=[0] * known,
        last_hash=[b""] * known,
        free_blocks=free_blocks,
    )


_PIECE_TOKENS = 1 << 18
_FLAT = ("tokens", "hashes", "num_hashes")


def _in_pieces(news: News, max_rows: int) -> Iterator[News]:
    """Yield the rows in pieces of at most `max_rows` rows and, (unless a single row has more) at most _PIECE_TOKENS
    tokens.

    Small pieces limit the time that the service needs for the hashes of one message.
    """
    by_row = [name for name in (one.name for one in fields(News)) if name not in _FLAT]
    size = len(news.hashes) // max(1, sum(news.num_hashes))
    token_at = hash_at = start = 0
    while start < len(news.slot):
        stop, num_tokens = start + 1, news.num_tokens[start]
        while stop < min(start + max_rows, len(news.slot)) and num_tokens + news.num_tokens[stop] <= _PIECE_TOKENS:
            num_tokens += news.num_tokens[stop]
            stop += 1
        piece = News(**{name: getattr(news, name)[start:stop] for name in by_row})
        piece.num_hashes = news.num_hashes[start:stop]
        num_bytes = sum(piece.num_hashes) * size
        piece.tokens = news.tokens[token_at : token_at + num_tokens]
        piece.hashes = news.hashes[hash_at : hash_at + num_bytes]
        token_at, hash_at, start = token_at + num_tokens, hash_at + num_bytes, stop
        yield piece
