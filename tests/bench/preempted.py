"""What preempted requests compute again, on replicas with tiers: `python -m tests.bench.preempted`.

Of the tokens that requests had computed when they were preempted, the percentage that they do not hit when they come
back, and why: *tail*, tokens behind the last whole block; *boundary*, some group of layers has more than all together
(a window has gone on, a state was overwritten); *gone*, no group has them: evicted before they were saved.

Two workloads: `prompts`, Mooncake's conversation trace, whose requests are mostly preempted while their prompt is
computed (it needs `KVPLANE_WORKLOADS`); `outputs`, short prompts with long answers, mostly preempted while they decode.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from random import Random

from kvplane.base.groups import AlignSpec, GroupKind, GroupSpec, MambaMode, ReplicaSpec, SavePolicy, TierKind, TierSpec
from kvplane.base.step import AdmitStatus, Part, PartResult
from kvplane_tools.replay.engine import Engine
from kvplane_tools.replay.fleet import Fleet
from kvplane_tools.replay.plan import CostModel, EngineConfig
from kvplane_tools.replay.workloads import Span, TokenSource, TraceRequest
from tests.bench.policies import CoreSession, requests_of
from tests.conftest import workloads_folder, workloads_line

CHUNK, LONGEST = 2048, 1 << 17


def full(size: int) -> GroupSpec:
    return GroupSpec(GroupKind.FULL_ATTENTION, size)


def window(tokens: int, size: int) -> GroupSpec:
    cap = 1 + -(-(tokens + CHUNK) // size)
    return GroupSpec(GroupKind.SLIDING_WINDOW, size, window=tokens, lookup_class=1, admission_cap_blocks=cap)


def chunk(tokens: int, size: int) -> GroupSpec:
    return GroupSpec(GroupKind.CHUNKED_LOCAL, size, chunk=tokens, lookup_class=2)


def state(size: int) -> GroupSpec:
    return GroupSpec(GroupKind.MAMBA, size, mamba_mode=MambaMode.ALIGN, lookup_class=3)


# As `kvplane plan` divides the layers of these models.
MODELS = {
    "full": (full(16),),
    "latents": (GroupSpec(GroupKind.MLA, 64),),
    "gpt-oss": (full(16), window(128, 16)),
    "Gemma 3": (full(16), *[window(1024, 16)] * 5),
    "Llama 4 Scout": (full(16), *[chunk(8192, 16)] * 3),
    "Jamba": (full(80), *[state(80)] * 7),
    "Qwen3-Next": (full(544), *[state(544)] * 3),
}


def replica(model: str, pool_tokens: int, tiers: tuple[TierSpec, ...] = (), **changes: object) -> ReplicaSpec:
    """A replica whose group of full attention has room for this number of tokens, with as much for the others."""
    groups = MODELS[model]
    size = groups[0].block_size
    align = AlignSpec(size, CHUNK) if any(group.kind is GroupKind.MAMBA for group in groups) else AlignSpec()
    return ReplicaSpec(
        groups=groups,
        num_blocks=1 + pool_tokens // size,
        max_model_len=LONGEST,
        hash_block_size=size,
        scheduler_block_size=size,
        max_in_flight_tokens=CHUNK,
        align=align,
        events=False,
        tiers=tiers,
        **changes,  # type: ignore[arg-type]
    )


class Watching(Engine):
    """An engine that notes what preempted requests had computed, and what they hit when they come back."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.lost = dict[str, int]()
        self.seen = Counter[str]()

    def _compute(self, part: Part, answer: PartResult) -> None:
        for slot in answer.preempted:
            request = self._scheduler._request(slot)
            if not request.load:
                self.lost[request.request_id] = request.computed
        rows = zip(part.admit.slot, answer.admit_status, answer.admit_hit, answer.admit_single_group_hit, strict=True)
        for slot, status, hit, single in rows:
            request = self._scheduler._request(slot)
            if status == AdmitStatus.GRANTED and request.request_id in self.lost:
                self._note(self.lost.pop(request.request_id), hit, single)
        super()._compute(part, answer)

    def _note(self, computed: int, hit: int, single: int) -> None:
        whole = computed // self.spec.scheduler_block_size * self.spec.scheduler_block_size
        most = min(max(hit, single), whole)
        self.seen.update(
            requests=1,
            computed=computed,
            tail=computed - whole,
            boundary=most - min(hit, most),
            gone=whole - most,
        )


def outputs(count: int) -> Iterator[TraceRequest]:
    """Yield requests of prompts of 200 to 4,000 tokens, with answers of 500 to 6,000."""
    rng = Random(count)
    for number in range(count):
        prompt, answer = rng.randrange(200, 4000), rng.randrange(500, 6000)
        prompts, answers = (TokenSource((Span(number, 0, *of),)) for of in ((prompt, False), (answer, True)))
        yield TraceRequest(f"r{number}", 0, "", prompts, answers)


def run(model: str, tiers: tuple[TierSpec, ...], workload: str, count: int) -> Watching:
    """Replay a workload on a pool for about a dozen requests."""
    spec = replica(model, {"prompts": 150_000, "outputs": 60_000}[workload], tiers)
    engine = Watching(CoreSession(spec), EngineConfig(64, CHUNK), CostModel())
    with ExitStack() as files:
        trace = outputs(count)
        if workload == "prompts":
            folder = workloads_folder()
            assert folder is not None, workloads_line()
            trace = requests_of(folder, "conversation", count, files)
        fleet = Fleet([engine], trace)
        while fleet.run_step():
            pass
    return engine


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.preempted", description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--workloads", nargs="+", default=["outputs", *["prompts"] * (workloads_folder() is not None)])
    given = parser.parse_args()
    if "prompts" not in given.workloads:
        print(workloads_line())
    print("| workload | model | tiers | preempted | again % | tail | boundary | gone |")
    for workload in given.workloads:
        for model in given.models:
            for name, tiers in settings(model):
                seen = run(model, tiers, workload, given.requests).seen
                parts = [100 * seen[part] / max(1, seen["computed"]) for part in ("tail", "boundary", "gone")]
                cells = [workload, model, name, str(seen["requests"]), *(f"{one:.1f}" for one in (sum(parts), *parts))]
                print(f"| {' | '.join(cells)} |", flush=True)


def settings(model: str) -> Iterator[tuple[str, tuple[TierSpec, ...]]]:
    """Yield the tiers of the table: as large as two pools, or one and four."""
    slots = 150_000 // MODELS[model][0].block_size
    yield "none", ()
    for save in SavePolicy:
        yield f"host, {save.value}", (TierSpec(TierKind.HOST, 2 * slots, save),)
    yield "host, disk", (TierSpec(TierKind.HOST, slots), TierSpec(TierKind.DISK, 4 * slots))


if __name__ == "__main__":
    main()
