"""A flipped byte in any page that a step reads changes the logits of the step.

The test flips bytes in the upper half of float64 elements (sign, exponent, mantissa down to 2^-20 of the value) and
compares logits bit by bit. Lower bytes can vanish in rounding, these cannot.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvplane.base.groups import DENSE_RETENTION
from tests.engine.faults import Fault
from tests.engine.reference.batch import Launch, Row
from tests.engine.reference.config import MIXED, AttentionLayer, layer_name
from tests.engine.reference.engine import Engine, OpenSession
from tests.engine.reference.model import Model
from tests.engine.reference.ranks import RankMemory
from tests.engine.reference.scheduler import Scheduled, SchedulerConfig
from tests.engine.workload import Requests
from tests.engine.world import Pool, World


@dataclass(frozen=True)
class Part:
    """Elements of one page that a row reads, as a view."""

    kind: str
    elements: Tensor


def parts_read(row: Row, memory: RankMemory) -> Iterator[Part]:
    """The elements of earlier tokens that the row's new tokens read, per page."""
    for number, layer in enumerate(MIXED.layers):
        place = memory.pages.layer(layer_name(number))
        if not isinstance(layer, AttentionLayer):
            state = memory.pages.state(place.name)
            block = row.states[place.group]
            yield Part("convolution", state.conv[block].mT)
            yield Part("state", state.ssm[block])
            continue
        pages = memory.pages.attention(place.name)
        kind = "window" if layer.window else "chunk" if layer.chunk else "full"
        first = max(0, row.start - layer.window + 1) if layer.window else 0
        first = row.start // layer.chunk * layer.chunk if layer.chunk else first
        for start in range(first, row.start):
            is_first_of_page = start == first or start % layer.block_size == 0
            if is_first_of_page:
                index = start // layer.block_size
                read = slice(start % layer.block_size, min(layer.block_size, row.start - index * layer.block_size))
                block = row.tables[place.group][index]
                yield Part(f"{kind} keys", pages.k[block, read])
                yield Part(f"{kind} values", pages.v[block, read])


def flip(part: Part, rng: random.Random) -> None:
    """Invert some bits of one byte in the upper half of one element."""
    at = [rng.randrange(size) for size in part.elements.shape]
    width = part.elements.element_size()
    at[-1] = at[-1] * width + rng.randrange(width // 2, width)
    part.elements.view(torch.uint8)[tuple(at)] ^= rng.randrange(1, 256)


class Flipping(Engine):
    """A model that first computes each launch with flipped bytes, then with the original pages."""

    def __init__(
        self, open_session: OpenSession, memory: Sequence[RankMemory], model: Model, config: SchedulerConfig
    ) -> None:
        super().__init__(open_session, memory, model, config)
        self.memory = memory
        self.rng = random.Random(5)
        self.seen: Counter[str] = Counter()
        self.unchanged: list[str] = []

    def _compute(self, scheduled: list[Scheduled]) -> None:
        reading = [one.row for one in scheduled if one.row.start and one.row.num_outputs]
        if reading:
            saved = [one.pages.memory.clone() for one in self.memory]
            launch = Launch([self.rng.choice(reading)], self._model.device)
            sound = self._model.logits(launch)
            for part in parts_read(launch.rows[0], self.rng.choice(self.memory)):
                self._try(part, launch, sound, saved)
            self._restore(saved)
        super()._compute(scheduled)

    def _try(self, part: Part, launch: Launch, sound: Tensor, saved: list[Tensor]) -> None:
        self._restore(saved)
        flip(part, self.rng)
        self.seen[part.kind] += 1
        if torch.equal(self._model.logits(launch), sound):
            self.unchanged.append(f"{part.kind} from {launch.rows[0].start}")

    def _restore(self, saved: list[Tensor]) -> None:
        for memory, before in zip(self.memory, saved, strict=True):
            memory.pages.memory.copy_(before)


def test_every_byte_that_a_step_reads_affects_the_output():
    pool = Pool(num_blocks=200, retention_interval=DENSE_RETENTION)
    config = SchedulerConfig(max_running=3, chunk_tokens=40)
    world = World(pool, config, fault=Fault("flips must be undone", "", engine=Flipping))
    engine, requests = world.engine, Requests(pool.max_model_len, seed=11)
    assert isinstance(engine, Flipping)
    for _ in range(4):
        engine.add(requests.next())
    while engine.has_work and sum(engine.seen.values()) < 200:
        engine.step()
    assert engine.unchanged == []
    assert set(engine.seen) == {
        f"{kind} {part}" for kind in ("full", "window", "chunk") for part in ("keys", "values")
    } | {"convolution", "state"}
    assert min(engine.seen.values()) >= 5, engine.seen
