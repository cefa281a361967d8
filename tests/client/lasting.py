"""An engine that survives restarts of its service: its requests, its page memory, and the Revival that it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvplane.base.step import News, Part, PartResult, Resume
from kvplane.blocking.session import Session
from kvplane.session.reopening import Revival
from kvplane.session.rows import NewsRow, ResumeRow, part_of, resume_of
from kvplane.session.tables import BlockTables
from tests.client.mini_engine import FULL, MAMBA, WINDOW, MiniEngine, spec_of

INCARNATION = 0xFEED
ONE_GROUP = spec_of(FULL, num_blocks=60)
HYBRID = spec_of(FULL, replace(WINDOW, lookup_class=1))
STATE = spec_of(FULL, replace(MAMBA, lookup_class=1), align=FULL.block_size)


class PageMemory:
    """The stamps of one rank, written by the orders of each answer."""

    def __init__(self, num_blocks: int, incarnation: int = INCARNATION) -> None:
        self.stamps = [0] * num_blocks
        self.incarnation = incarnation

    def carry_out(self, result: PartResult) -> None:
        for block, stamp in zip(result.orders.stamp_block, result.orders.stamp, strict=True):
            self.stamps[block] = stamp


class LastingEngine(MiniEngine):
    """A MiniEngine with a page memory; `open_session` is given its `revive`.

    Its requests lose their blocks when the service restarts, unless it `resumes`.
    """

    def __init__(
        self, open_session: Callable[..., Session], num_blocks: int, seed: int = 1, resumes: bool = False
    ) -> None:
        self.memory = PageMemory(num_blocks)
        self.resumes = resumes
        self.tables: BlockTables | None = None
        self.revivals = 0
        self.hits_at_revival = 0
        super().__init__(self._apply, seed)
        self.session = open_session(self.revive)

    def _apply(self, part: Part) -> PartResult:
        (result,) = self.session.apply(part).parts
        self.memory.carry_out(result)
        self.tables = self.tables or BlockTables(len(self.session.spec.groups))
        self.tables.update(part, result)
        return result

    def revive(self) -> Revival:
        """What the engine has now, while a step of its own is on its way."""
        self.revivals += bool(self.log)
        self.hits_at_revival = self.num_hit
        known = [(slot, request) for slot, request in self._waiting if request.known]
        rows = [NewsRow(slot, request.tokens, request_id=f"request-{slot}") for slot, request in known]
        for slot, request in self.running.items():
            rows.append(NewsRow(slot, request.tokens, request_id=f"request-{slot}"))
        news = part_of(*rows).news if rows else News()
        resume = self._resume() if self.resumes else None
        return Revival(tuple(self.memory.stamps), self.memory.incarnation, news, tuple(self.running), resume=resume)

    def _resume(self) -> Resume:
        tables = self.tables
        assert tables is not None or not self.running
        return resume_of(
            [
                ResumeRow(slot, request.computed, tables[slot], len(request.tokens))
                for slot, request in self.running.items()
                if tables
            ]
        )

    @property
    def hits_since_revival(self) -> int:
        return self.num_hit - self.hits_at_revival
