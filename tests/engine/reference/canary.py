"""The canary: it computes a sampled hit again, in memory of its own, and compares the result with the pages of the hit.

    admission with a hit ─▶ sampled? ─▶ compute the prefix in scratch pages ─▶ compare, per layer and token slot
                                                                                │ equal: the launch runs
                                                                                └ different: the launch does not run

What it finds goes to the service with the next step (`Cache.mismatched`), and the request is computed without a hit.
See docs/concepts/canary.md.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import NamedTuple

import torch
from torch import Tensor

from kvplane.base.layer_spec import AttentionSpec, ceil_div
from kvplane.base.layers import MambaSpec, MLASpec
from kvplane.base.rank_plan import LayerPlace, TensorPlacement
from kvplane.base.step import Cache
from kvplane_worker.pages import PageBuffers
from kvplane_worker.pages.buffers import WORD_BYTES
from kvplane_worker.pages.dtypes import SCALED, TORCH_DTYPES
from tests.engine.reference.batch import NO_STATE, Launch, Row
from tests.engine.reference.config import ModelConfig
from tests.engine.reference.model import Model
from tests.engine.reference.request import Request
from tests.engine.reference.scheduler import Scheduled

CHUNK_TOKENS = 512  # of a prefix that are computed at once
MOST_SUSPECTS = 1024  # prefixes; with more, every hit is compared
MOST_KEPT = 32  # mismatches whose content is kept
MOST_LINES = 8  # in the log, of one hit: the first slot of each block
SMALLEST = 2.0**-60  # norm of a slot

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A token slot of a page, or a state, that differs from what its prefix gives.

    Attributes:
        position: of the token; of a state, of its last token.
        distance: norm of the difference, relative to the norm of `expected`, or to the mean of all slots if that is
            larger.
        found, expected: the contents, copied while the request holds the block.
    """

    rank: int
    layer: str
    group: int
    block: int
    position: int
    distance: float
    found: Tensor
    expected: Tensor

    def __str__(self) -> str:
        """Return where it is, and by how much it differs."""
        where = f"rank {self.rank}, layer {self.layer}, group {self.group}, block {self.block}, token {self.position}"
        return f"{where}: differs by {self.distance:.2g} of its norm"


class WrongHit(NamedTuple):
    """What is wrong about the hits of a launch.

    Attributes:
        blocks: those that differ.
        evicted: these, and all that follow the first one in its prefix.
    """

    requests: list[Request]
    blocks: set[int]
    evicted: set[int]


class Canary:
    """Compares the hits of a share of all requests, and of all whose prefix was wrong before.

    Attributes:
        checks: hits compared.
        worst: the largest distance of a slot that counts as equal.
        mismatches: the last ones.
    """

    def __init__(self, model: Model, rate: float) -> None:
        """`rate`: share of the requests, 0 to 1; the id of a request decides, so that a run can be repeated."""
        self.checks, self.worst = 0, 0.0
        self.mismatches: deque[Mismatch] = deque(maxlen=MOST_KEPT)
        self._model, self._rate = model, rate
        self._tolerance = tolerance_of(model.config)
        self._suspects: dict[tuple[str, int], set[bytes]] = {}  # by domain and length: digests of prefixes
        self._num_suspects = 0
        self._unreported, self._sent = Cache(), Cache()

    def check(self, scheduled: Sequence[Scheduled], copies: Mapping[int, int]) -> WrongHit | None:
        """Compare the hits of a launch that has not run. `copies`: source by target, of the copies ordered for it.

        Returns None if all are right.
        """
        wrong = WrongHit([], set(), set())
        for one in scheduled:
            if one.planned.is_admission and one.row.start and self.is_due(one.request, one.row.start):
                self._check(one, _written(self._model.ranks[0], scheduled, one), wrong)
        if not wrong.requests:
            return None
        for blocks in (wrong.blocks, wrong.evicted):  # a copy has no key yet: its source has it
            blocks.update([copies[block] for block in blocks if block in copies])
        self._unreported.evicted += sorted(wrong.evicted)
        self._unreported.mismatched += sorted(wrong.blocks)
        return wrong

    def is_due(self, request: Request, hit: int) -> bool:
        """Whether to compare the hit of this many tokens."""
        sampled = zlib.crc32(request.request_id.encode()) < self._rate * 2**32
        if sampled or not self._suspects:
            return sampled
        if self._num_suspects > MOST_SUSPECTS:
            return True
        of_domain = [at for domain, at in self._suspects if domain == request.domain and at <= hit]
        return any(_digest(request.tokens[:at]) in self._suspects[request.domain, at] for at in of_domain)

    def report(self, cache: Cache) -> None:
        """Add what was found since the last report to this section of the next step."""
        cache.evicted = [*cache.evicted, *self._unreported.evicted]
        cache.mismatched = [*cache.mismatched, *self._unreported.mismatched]
        cache.hits_checked += self._unreported.hits_checked
        self._sent, self._unreported = self._unreported, Cache()

    def report_again(self) -> None:
        """Report once more what the last report had: a new engine life began, which has not applied that step."""
        self._unreported = self._sent

    def _check(self, one: Scheduled, unwritten: set[int], wrong: WrongHit) -> None:
        self.checks += 1
        self._unreported.hits_checked += 1
        found = list(self._compare(one, unwritten))
        if not found:
            return
        for mismatch in list({each.block: each for each in reversed(found)}.values())[:MOST_LINES]:
            _log.error("canary: wrong hit of request %r, %s", one.request.request_id, mismatch)
        self.mismatches.extend(found)
        request, first = one.request, min(mismatch.position for mismatch in found)
        # Whatever was computed behind this token may be wrong too, also in prompts that continue in another way.
        self._suspects.setdefault((request.domain, first + 1), set()).add(_digest(request.tokens[: first + 1]))
        self._num_suspects += 1
        wrong.requests.append(request)
        wrong.blocks.update(mismatch.block for mismatch in found)
        for place in self._model.ranks[0].plan.places():
            wrong.evicted.update(block for at, block in _claimed(place, one) if at + place.spec.block_size > first)

    def _compare(self, one: Scheduled, unwritten: set[int]) -> Iterator[Mismatch]:
        """Compute the prefix of the hit again, and yield what differs."""
        tokens, ranks = one.request.tokens[: one.row.start], self._model.ranks
        scratch = [scratch_like(pages, len(tokens)) for pages in ranks]
        self._model.fill(scratch, (Launch([row], self._model.device) for row in _rows(tokens, scratch[0])))
        for rank, (pages, made) in enumerate(zip(ranks, scratch, strict=True)):
            for place in pages.plan.places():
                claimed = [(at, block) for at, block in _claimed(place, one) if block not in unwritten]
                if not claimed:
                    continue
                is_state = isinstance(place.spec, MambaSpec)
                again = [1 if is_state else 1 + at // place.spec.block_size for at, _ in claimed]
                for has, gives in zip(views(pages, place), views(made, place), strict=True):
                    slots = Slots(has[[block for _, block in claimed]], gives[again], [at for at, _ in claimed])
                    for row, at, distance, pair in self._differing(slots, len(tokens), is_state):
                        yield Mismatch(rank, place.name, place.group, claimed[row][1], at, distance, *pair)

    def _differing(
        self, slots: Slots, hit: int, is_state: bool
    ) -> Iterator[tuple[int, int, float, tuple[Tensor, Tensor]]]:
        """Yield block, position, distance and contents of each slot that differs. A state is one slot."""
        num_slots = 1 if is_state else slots.has.shape[1]
        has, gives = (part.double().reshape(len(part), num_slots, -1) for part in slots[:2])
        own = gives.norm(dim=2)
        distance = (has - gives).norm(dim=2) / torch.maximum(own, own.mean()).clamp(min=SMALLEST)
        position = torch.tensor(slots.starts)[:, None] + torch.arange(own.shape[1])
        inside = (position < hit).to(own.device)
        is_wrong = inside & ~(distance <= self._tolerance)  # also NaN
        self.worst = max([self.worst, *distance[inside & ~is_wrong].tolist()])
        for row, slot in is_wrong.nonzero().tolist():
            contents = has[row, slot].cpu(), gives[row, slot].cpu()
            yield row, int(position[row, slot]), float(distance[row, slot]), contents


class Slots(NamedTuple):
    """Blocks of a layer as they are and as they were computed again, each with the position of its first token."""

    has: Tensor
    gives: Tensor
    starts: list[int]


def tolerance_of(config: ModelConfig) -> float:
    """Return the largest distance of equal contents: the geometric mean of what rounding gives, the precision of the
    coarsest element type on the way, and of what other content gives, about 1.
    """
    dtypes = {config.dtype, config.product_dtype, config.cache_dtype or config.dtype}
    return math.sqrt(max(torch.finfo(TORCH_DTYPES[dtype]).eps for dtype in dtypes))


def scratch_like(pages: PageBuffers, num_tokens: int) -> PageBuffers:
    """Allocate pages for one prompt, with the formats and scales of `pages`. Every layer has memory of its own, so each
    group numbers its blocks from 1.
    """
    places, tensors, end = pages.plan.places(), list[TensorPlacement](), 0
    num_blocks = 1 + max(ceil_div(num_tokens, place.spec.block_size) for place in places)
    for place in places:
        stride = ceil_div(place.spec.page_bytes, WORD_BYTES) * WORD_BYTES
        tensors.append(TensorPlacement(place.group, (place.name,), end, 0, stride))
        end += stride * num_blocks
    plan = replace(pages.plan, num_blocks=num_blocks, size_bytes=end, tensors=tuple(tensors))
    made = PageBuffers.allocate(plan, pages.memory.device)
    for place in places:
        if isinstance(place.spec, MLASpec):
            latent = pages.latent(place.name)
            if latent.rows.dtype in SCALED:
                assert latent.scale is not None
                made.set_scales(place.name, latent.scale)
        elif isinstance(place.spec, AttentionSpec) and TORCH_DTYPES[place.spec.dtype] in SCALED:
            keys = pages.attention(place.name)
            assert keys.k_scale is not None
            made.set_scales(place.name, keys.k_scale, keys.v_scale)
    return made


def _rows(tokens: list[int], scratch: PageBuffers) -> Iterator[Row]:
    """Yield the rows that compute a prefix from its start; the last state is in block 1."""
    states = {place.group for place in scratch.plan.places() if isinstance(place.spec, MambaSpec)}
    blocks = list(range(1, scratch.num_blocks))
    tables = [[1] * len(blocks) if group in states else blocks for group in range(scratch.num_groups)]
    for start in range(0, len(tokens), CHUNK_TOKENS):
        read = dict.fromkeys(states, 1 if start else NO_STATE)
        yield Row(tokens[start : start + CHUNK_TOKENS], start, 0, tables, read)


def _claimed(place: LayerPlace, one: Scheduled) -> Iterator[tuple[int, int]]:
    """Yield the blocks that a hit claims in a layer, each with the position of its first token: all that its table has
    of the prefix; of a state the one that the launch reads, with its last token.
    """
    hit, size = one.row.start, place.spec.block_size
    if isinstance(place.spec, MambaSpec):
        yield hit - 1, one.row.states[place.group]
        return
    for at, block in enumerate(one.row.tables[place.group][: ceil_div(hit, size)]):
        if block:
            yield at * size, block


def _written(pages: PageBuffers, scheduled: Sequence[Scheduled], one: Scheduled) -> set[int]:
    """Return the blocks that other rows of the launch write: a hit may claim those, which have no content yet."""
    return {
        block
        for place in pages.plan.places()
        for other in scheduled
        if other is not one
        for block in other.row.tables[place.group][
            other.row.start // place.spec.block_size : ceil_div(other.row.end, place.spec.block_size)
        ]
    }


def views(pages: PageBuffers, place: LayerPlace) -> tuple[Tensor, ...]:
    """Return views of a layer's pages whose elements are numbers: [blocks, slots, ...], and of states [blocks, ...]."""
    if isinstance(place.spec, MambaSpec):
        return pages.states(place.name)
    if isinstance(place.spec, MLASpec):
        return (pages.latent(place.name).rows,)
    keys = pages.attention(place.name)
    return keys.k, keys.v


def _digest(tokens: Sequence[int]) -> bytes:
    return sha256(repr(tokens).encode()).digest()
