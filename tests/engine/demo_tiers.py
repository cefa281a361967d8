"""The third act of `make demo-engine`: a conversation leaves the device and the host tier; it is loaded from the disk.

The same requests run on a replica without tiers, in equal device memory. All answers are compared with the dense
model's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import kvplane
from kvplane import wire
from kvplane.base.groups import ReplicaSpec, TierKind, TierSpec
from kvplane.base.sources import LayerSource
from kvplane.base.step import RowFlag, StepResult
from tests.engine.backends import Place, backend_of, suited
from tests.engine.reference.config import EVEN
from tests.engine.reference.engine import Engine
from tests.engine.reference.model import Model
from tests.engine.reference.ranks import attach_ranks
from tests.engine.reference.request import Request
from tests.engine.reference.scheduler import SchedulerConfig
from tests.engine.reference.weights import draw_weights
from tests.engine.twin import Twin
from tests.engine.workers import running_workers

BLOCKS = 260  # of the device: three prompts; loads may fill a quarter
TIERS = (TierSpec(TierKind.HOST, 60), TierSpec(TierKind.DISK, 600))
PROMPT, OTHERS, OUTPUT = 700, 6, 8  # tokens of a prompt, prompts in between, tokens of an answer
CHUNK = 32  # tokens of a step: so that it takes fewer blocks than are saved ahead, half of the device


@dataclass
class Came:
    """What became of the conversation that came back.

    Attributes:
        hit, prompt: tokens of its prompt that were hit, and all.
        from_device: tokens that the device alone would have hit.
        answer_s: of the last answer, from its arrival to its last token.
        blocks: blocks that were loaded, by tier and group.
        differing, compared: tokens of all answers that differ from the dense model's.
    """

    spec: ReplicaSpec
    hit: int = 0
    prompt: int = 0
    from_device: int = 0
    answer_s: float = 0.0
    blocks: Counter[tuple[int, int]] = field(default_factory=Counter)
    differing: int = 0
    compared: int = 0

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the blocks that were loaded."""
        return sum(self.spec.groups[group].page_bytes * count for (_, group), count in self.blocks.items())

    @property
    def uniform_bytes(self) -> int:
        """Bytes of every block of every group of the hit."""
        return sum(group.page_bytes * (self.hit // group.block_size) for group in self.spec.groups)

    @property
    def tiers(self) -> str:
        """The tiers that were read."""
        return " and ".join(self.spec.tiers[tier].kind.value for tier in sorted({tier for tier, _ in self.blocks}))


class LoadingEngine(Engine):
    """Counts the blocks of each load."""

    blocks: Counter[tuple[int, int]]

    def _carry_out(self, answer: StepResult) -> None:
        super()._carry_out(answer)
        for part in answer.parts:
            self.blocks.update(zip(part.orders.load_tier, part.orders.load_group, strict=True))


def show(address: str, place: Place, text: bytes) -> int:
    """Run the act; returns how many tokens differ from the dense model's. `text`: what the conversations are about."""
    came = {}
    for replica, tiers in (("with-tiers", TIERS), ("without-tiers", ())):
        print(
            f"== {replica}: {OTHERS + 1} conversations, more than the device holds; the first one comes back",
            flush=True,
        )
        with engine_with(address, replica, tiers, place) as (engine, twin, spec):
            came[replica] = come_back(engine, twin, spec, text)
    print(outcome(came["with-tiers"], came["without-tiers"]), flush=True)
    return sum(one.differing for one in came.values())


def outcome(tiered: Came, bare: Came) -> str:
    """What the tiers saved, in sentences."""
    loaded, uniform = tiered.loaded_bytes / 1024, tiered.uniform_bytes / 1024
    return "\n".join(
        (
            f"the conversation came back from the {tiered.tiers} tier: hit {tiered.hit} of {tiered.prompt} tokens, "
            f"{tiered.from_device} of them on the device; without tiers {bare.hit}",
            f"answered in {tiered.answer_s:.2f} s with tiers and {bare.answer_s:.2f} s without: "
            f"{bare.answer_s - tiered.answer_s:.2f} s saved",
            f"loaded {loaded:.0f} KiB a rank in {tiered.blocks.total()} blocks; uniform loads, of every block of every "
            f"group, would be {uniform:.0f} KiB: {uniform - loaded:.0f} KiB saved",
            f"both gave the dense model's tokens: {tiered.differing + bare.differing} of "
            f"{tiered.compared + bare.compared} differ",
        )
    )


def come_back(engine: LoadingEngine, twin: Twin, spec: ReplicaSpec, text: bytes) -> Came:
    """Answer conversations one after the other, then continue the first."""
    came = Came(spec)
    prompts = [[256, *text[at * PROMPT : (at + 1) * PROMPT - 1]] for at in range(OTHERS + 1)]
    first = answer(engine, twin, Request("1.1", prompts[0], OUTPUT), came)
    for number, prompt in enumerate(prompts[1:], 2):
        answer(engine, twin, Request(f"{number}.1", prompt, OUTPUT), came)
    wait_until_idle(engine)
    loaded, engine.blocks = engine.counts.loaded_tokens, Counter()
    again = Request("1.2", [*first.prompt, *first.output, *b"\nQ: and then?\nA: "], OUTPUT)
    answer(engine, twin, again, came)
    came.hit, came.prompt, came.blocks = again.hits[-1], len(again.prompt), engine.blocks
    came.from_device = came.hit - (engine.counts.loaded_tokens - loaded)
    return came


def answer(engine: LoadingEngine, twin: Twin, request: Request, came: Came) -> Request:
    """Answer one request, and compare the answer with the dense model's. Sets how long it took."""
    began = time.monotonic()
    engine.add(request)
    while engine.has_work:
        engine.step()
    came.answer_s = time.monotonic() - began
    came.compared += len(request.output)
    came.differing += twin.count_wrong(request.prompt, request.output)
    return request


def wait_until_idle(engine: Engine) -> None:
    """Let the movers end what was ordered: a conversation comes back after a pause."""
    for _ in range(40):
        engine.step()
        time.sleep(0.01)


@contextmanager
def engine_with(
    address: str, replica: str, tiers: tuple[TierSpec, ...], place: Place
) -> Iterator[tuple[LoadingEngine, Twin, ReplicaSpec]]:
    """Register the replica, and start its workers and the engine."""
    model = suited(EVEN, place.backend)
    source = LayerSource(
        layers=model.cache_layers(),
        num_blocks=BLOCKS,
        max_model_len=1024,
        max_batched_tokens=CHUNK,
        tiers=tiers,
    )
    with kvplane.connect(address) as client, TemporaryDirectory(prefix="kvplane-demo-") as folder:
        client.register_replica(replica, source, num_ranks=model.num_ranks, namespace_digest=b"demo")
        spec = wire.decode_spec(client.describe_replica(replica).spec)
        with running_workers(address, replica, place.device, Path(folder), model.num_ranks) as workers:
            ops, weights = backend_of(place.backend, place.device), draw_weights(model)
            memory = attach_ranks(workers, ops)
            forward = Model(model, weights, [one.pages for one in memory], ops)
            flags = RowFlag.LOAD if tiers else RowFlag.NONE
            config = SchedulerConfig(max_running=1, token_budget=CHUNK, chunk_tokens=CHUNK, admit_flags=flags)
            engine = LoadingEngine(partial(client.lasting_session, replica), memory, forward, config)
            engine.blocks = Counter()
            yield engine, Twin(model, weights), spec
