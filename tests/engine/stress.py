"""The stress: many requests through engines with too small caches; each answer is compared with the dense model's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from kvplane.base.groups import DENSE_RETENTION, Planner
from kvplane.base.layer_spec import DType
from kvplane.scheduling import Counts
from kvplane_kernels.cudnn_ops.backend import CudnnOps
from kvplane_kernels.interface import PagedOps
from kvplane_kernels.torch_ops import TorchOps
from kvplane_service.config import Config
from kvplane_service.registry import Registry
from tests.engine.backends import Place, backend_of, suited
from tests.engine.faults import Fault, WholePages
from tests.engine.reference.config import (
    ATTENTION,
    EVEN,
    HALVES,
    LATENT,
    MIXED,
    AttentionLayer,
    DeltaLayer,
    LatentLayer,
    LayerConfig,
    ModelConfig,
    ScanLayer,
    StateLayer,
)
from tests.engine.reference.request import Request
from tests.engine.reference.scheduler import SchedulerConfig
from tests.engine.workload import Answers, LongPrompts, Pairs, Recall, Requests
from tests.engine.world import SOUND, Pool, World

# Largest difference of a logit, by the element type of the model.
TOLERANCE = {DType.FLOAT64: 1e-9, DType.FLOAT32: 1e-4}
# On a GPU, where sums have any order.
NEAR_TIE = {DType.FLOAT64: 1e-6, DType.FLOAT32: 2e-4}
# Both for 8-bit pages in a model of float32: where sums differ, elements of pages may differ by one step of their type.
TOLERANCE_8BIT, NEAR_TIE_8BIT = 0.2, 0.05
# For pages of 16 bits, where kernels also round weights of attention: without that, logits differ by up to 0.004 and
# 0.0006; with a wrong page, by 0.1 and more.
TOLERANCE_16BIT = {DType.BFLOAT16: 0.05, DType.FLOAT16: 0.01}
NEAR_TIE_16BIT = {DType.BFLOAT16: 0.02, DType.FLOAT16: 0.004}


@dataclass(frozen=True)
class Mix:
    """One configuration of the stress.

    Attributes:
        engines: number of replicas on one service, stepped in turn, each with its own requests.
        restart_every: requests after which an engine ends with its session open, and a new engine life begins.
        lose_every: launches after which one fails.
        max_open: most requests in progress.
        requests: source of requests.
        ops: backend of page operations instead of the run's.
        wrong: share of wrong drafts of a drafter that remembers every output; below 0: drafts by n-gram.
    """

    name: str
    pool: Pool
    config: SchedulerConfig = SchedulerConfig(token_budget=64)  # noqa: RUF009 - frozen
    engines: int = 1
    restart_every: int = 0
    lose_every: int = 0
    max_open: int = 11
    requests: type[Requests] = Requests
    ops: type[TorchOps] | None = None
    wrong: float = -1.0

    def backend(self, place: Place) -> PagedOps:
        return self.ops() if self.ops else backend_of(place.backend, place.device)


@dataclass
class Report:
    """Results of a run.

    Attributes:
        differing: output tokens that differ from the dense model's.
        near_ties: differing tokens with nearly equal logits in the dense model; always 0 in float64 on the CPU.
        long: requests of more than two tiles of LONG tokens.
        late_compiles: kernels that were compiled after the start of an engine.
        fallbacks: operations that the backend's kernels did not compute, with reasons.
        by_cudnn: rows that cuDNN computed.
        off: requests with logits beyond the tolerance.
        worst: largest difference of a logit.
        tokens: count of each generated token.
        kept_keys: keys that each restart kept.
        checks, mismatches: of the canary.
        farthest: largest distance that it took as equal.
    """

    requests: int = 0
    differing: int = 0
    near_ties: int = 0
    long: int = 0
    fallbacks: dict[str, str] = field(default_factory=dict)
    by_cudnn: int = 0
    late_compiles: int = 0
    off: int = 0
    worst: float = 0.0
    tokens: Counter[int] = field(default_factory=Counter)
    hit_lengths: Counter[int] = field(default_factory=Counter)
    evicted: int = 0
    refused: int = 0
    kept_keys: list[int] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    checks: int = 0
    mismatches: int = 0
    farthest: float = 0.0

    @property
    def complaints(self) -> list[str]:
        """The problems that were found; empty = none."""
        problems = {
            "differing tokens": self.differing,
            "requests with differing logits": self.off,
            "requests refused": self.refused,
            "mismatches of a canary": self.mismatches,
            "kernels compiled while serving": self.late_compiles,
            "restarts that kept nothing": self.kept_keys.count(0),
            f"operations without a kernel ({self.fallbacks})": len(self.fallbacks),
        }
        return [f"{count} {what}" for what, count in problems.items() if count]

    def add_counts(self, counts: Counts) -> None:
        for one in fields(Counts):
            setattr(self.counts, one.name, getattr(self.counts, one.name) + getattr(counts, one.name))

    def add(self, other: Report) -> None:
        self.add_counts(other.counts)
        self.worst = max(self.worst, other.worst)
        self.farthest = max(self.farthest, other.farthest)
        for name in (
            "requests",
            "differing",
            "near_ties",
            "long",
            "off",
            "tokens",
            "hit_lengths",
            "evicted",
            "refused",
            "by_cudnn",
            "checks",
            "mismatches",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.kept_keys += other.kept_keys
        self.fallbacks |= other.fallbacks
        self.late_compiles = max(self.late_compiles, other.late_compiles)


class Side:
    """One engine with its requests, over several engine lives."""

    def __init__(self, world: World, seed: int, mix: Mix, report: Report) -> None:
        self.world = world
        self.report = report
        self._requests = mix.requests(world.pool.max_model_len, seed)
        self._recall = world.config.drafter
        self._mix = mix
        self._open: dict[str, Request] = {}
        self._left = 0
        self._since_restart = 0

    def start(self, count: int) -> None:
        self._left = count

    @property
    def has_work(self) -> bool:
        return bool(self._left or self._open or self.world.engine.has_work)

    def step(self) -> None:
        engine = self.world.engine
        while self._left and len(self._open) < self._mix.max_open:
            self._add(self._requests.next())
        for request in engine.step():
            self._finish(request)
        if self._mix.restart_every and self._since_restart >= self._mix.restart_every and self._left:
            self._restart()

    def _add(self, request: Request) -> None:
        self._left -= 1
        self._open[request.request_id] = request
        self.world.engine.add(request)

    def _finish(self, request: Request) -> None:
        del self._open[request.request_id]
        self._since_restart += 1
        self.report.requests += 1
        if request.error:
            self.report.refused += request.error != "aborted"
            return
        self._requests.done(request)
        if isinstance(self._recall, Recall):
            self._recall.learn(request.tokens)
        self.report.hit_lengths.update(hit for hit in request.hits if hit)
        self.report.tokens.update(request.output)
        self.report.long += len(request.tokens) > LONG
        compare(self.world, request, self.report)

    def _restart(self) -> None:
        """End the engine between two steps, and send its open requests to the next one."""
        self._end_engine()
        self.world.engine = self.world.begin()
        self.report.kept_keys.append(self.world.session.kept_keys)
        again = [
            Request(one.request_id, one.prompt, one.max_new_tokens, one.domain, keep_logits=True)
            for one in self._open.values()
        ]
        self._since_restart = 0
        for request in again:
            self._open[request.request_id] = request
            self.world.engine.add(request)

    def _end_engine(self) -> None:
        self.report.add_counts(self.world.engine.counts)
        if (found := self.world.engine.canary) is not None:
            self.report.checks += found.checks
            self.report.mismatches += len(found.mismatches)
            self.report.farthest = max(self.report.farthest, found.worst)

    def close(self) -> None:
        self.world.check()
        self._end_engine()
        self.report.late_compiles = getattr(self.world.ops, "late_compiles", 0)
        ops = self.world.ops
        if isinstance(ops, CudnnOps):  # what cuDNN does not compute has another backend's kernels
            self.report.by_cudnn, ops = self.report.by_cudnn + ops.rows, ops.other
        self.report.fallbacks |= getattr(ops, "fallbacks", {})
        self.report.evicted += sum(group.evicted_blocks for group in self.world.host.replica.group_counters())


def compare(world: World, request: Request, report: Report) -> None:
    """Compare an answer with the dense model: count differing tokens, and logits beyond the tolerance.

    Except in float64 on the CPU, differing tokens with nearly equal logits in the dense model are counted as near ties.
    """
    dtype, cache_dtype = world.pool.model.dtype, world.pool.model.cache_dtype
    tolerance, near_tie = TOLERANCE[dtype], NEAR_TIE[dtype]
    if cache_dtype in HALVES:
        tolerance, near_tie = TOLERANCE_16BIT[cache_dtype], NEAR_TIE_16BIT[cache_dtype]
    elif world.place.device == "cpu" and dtype is DType.FLOAT64:
        near_tie = 0.0
    elif cache_dtype:
        tolerance, near_tie = TOLERANCE_8BIT, NEAR_TIE_8BIT
    expected = world.twin.logits(request.tokens[:-1])[len(request.prompt) - 1 :]
    for scores, token in zip(expected, request.output, strict=True):
        short = (scores.max() - scores[token]).item()
        report.near_ties += 0 < short < near_tie
        report.differing += short > 0 and short >= near_tie
    distance = (expected - torch.stack(request.logits)).abs().max().item()
    if not distance <= tolerance:  # also NaN
        report.off += 1
    report.worst = max(report.worst, distance)


def tuned(**changes: Any) -> SchedulerConfig:
    return replace(SchedulerConfig(token_budget=64), **changes)


FULL = AttentionLayer(kv_heads=2, block_size=16)
# As Jamba, Qwen3-Next and Kimi Linear, with fewer layers.
JAMBA = ScanLayer(channels=24, state_size=4, rank=4, block_size=16)
QWEN3_NEXT = DeltaLayer(key_heads=2, heads=4, key_size=8, value_size=4, block_size=16)
KIMI = DeltaLayer(key_heads=4, heads=4, key_size=8, value_size=8, block_size=16, gates_of_keys=True)
# A state as large as four blocks of 16 tokens, which is the block of attention with split pages.
LARGE_STATE = StateLayer(heads=4, head_size=16, state_size=32, block_size=64)
WIDE = AttentionLayer(kv_heads=4, block_size=64)
HYBRID = ModelConfig((LARGE_STATE, WIDE, replace(WIDE, window=40), LARGE_STATE))
LARGE_DELTA = DeltaLayer(key_heads=2, heads=4, key_size=32, value_size=32, block_size=64)
SPLIT: dict[str, Any] = {"planner": Planner.SPLIT}
DENSE: dict[str, Any] = {"retention_interval": DENSE_RETENTION}
MIXES = (
    Mix("tight", Pool(num_blocks=80)),
    Mix("whole pages", Pool(num_blocks=120), ops=WholePages),
    Mix("blocks larger than a step", Pool(num_blocks=80, max_batched_tokens=12, **DENSE), tuned(token_budget=12)),
    Mix("dense states", Pool(num_blocks=120, **DENSE), tuned(chunk_tokens=16)),
    Mix("no early commits", Pool(num_blocks=80, **DENSE), tuned(commits=False, lookahead=3)),
    Mix("late reports", Pool(num_blocks=110, batches=4, **DENSE), tuned(token_budget=48, report_lag=3)),
    Mix("block outermost", Pool(num_blocks=90, block_outermost=True), tuned(max_running=5)),
    Mix("no drafts", Pool(num_blocks=80, watermark=0.05), tuned(num_drafts=0, chunk_tokens=24)),
    Mix("one block size", Pool(EVEN, num_blocks=60, **DENSE), tuned(token_budget=60)),
    Mix("attention alone", Pool(ATTENTION, num_blocks=90, batches=2), tuned(token_budget=50, report_lag=1)),
    Mix("two engines", Pool(num_blocks=80), engines=2),
    Mix("known drafts", Pool(num_blocks=300, **DENSE), tuned(chunk_tokens=32), wrong=0.2),
    Mix("hits inside blocks", Pool(num_blocks=150), tuned(), max_open=1, requests=Pairs),
    Mix("kept drafts", Pool(num_blocks=200, **DENSE), tuned(), max_open=1, requests=Answers, wrong=0.1),
    Mix("known, late", Pool(EVEN, num_blocks=150, batches=4), tuned(report_lag=3), wrong=0.3),
    Mix("restarts", Pool(num_blocks=160, batches=4, **DENSE), tuned(report_lag=3), restart_every=3, max_open=5),
    Mix("delta rule on ranks", Pool(ModelConfig((QWEN3_NEXT, FULL)), num_blocks=80)),
    Mix("gates of keys on ranks", Pool(ModelConfig((KIMI, FULL, KIMI)), num_blocks=80), wrong=0.3),
    Mix("selective scan", Pool(ModelConfig((JAMBA, FULL), num_ranks=1), num_blocks=80)),
    Mix("split pages", Pool(HYBRID, num_blocks=128, **SPLIT)),
    Mix("split, dense states", Pool(HYBRID, num_blocks=160, **DENSE, **SPLIT), tuned(chunk_tokens=24), wrong=0.3),
    Mix("split, late", Pool(HYBRID, num_blocks=280, batches=4, **SPLIT), tuned(report_lag=3), restart_every=3),
    Mix("split delta rule", Pool(ModelConfig((LARGE_DELTA, WIDE)), num_blocks=120, **SPLIT), lose_every=9),
    Mix("latents", Pool(LATENT, num_blocks=60)),
    Mix("8-bit pages", Pool(replace(MIXED, cache_dtype=DType.FLOAT8_E4M3FN), num_blocks=90, **DENSE)),
    Mix("8-bit latents", Pool(replace(LATENT, cache_dtype=DType.FLOAT8_E5M2), num_blocks=90), restart_every=3),
    Mix("lost launches", Pool(num_blocks=90, **DENSE), lose_every=9),
    Mix("lost, late", Pool(EVEN, num_blocks=80, batches=3), tuned(report_lag=2), lose_every=7),
)

# A model for each kind of cache group, whose windows and chunks extend over several tiles of a kernel.
LONG = 128


def of_kind(name: str, *layers: LayerConfig, cache_dtype: DType | None = None) -> Mix:
    model = ModelConfig(layers, num_ranks=1, cache_dtype=cache_dtype)
    pool = Pool(model, num_blocks=110, max_model_len=300, max_batched_tokens=160)
    return Mix(name, pool, tuned(token_budget=160), requests=LongPrompts)


STATE = StateLayer(heads=4, head_size=4, state_size=8, block_size=16)
WINDOW, CHUNK = replace(FULL, window=150), replace(FULL, chunk=160)
LATENT_ROWS = LatentLayer(value_size=16, rotary_size=8, block_size=16)
KINDS = (
    of_kind("full", FULL, FULL),
    of_kind("window", WINDOW, WINDOW),
    of_kind("chunk", CHUNK, CHUNK),
    of_kind("states", STATE, FULL),
    of_kind("selective scans", JAMBA, FULL),
    of_kind("gated delta rule", QWEN3_NEXT, FULL),
    of_kind("delta rule with gates of keys", KIMI, FULL),
    of_kind("latents", LATENT_ROWS, LATENT_ROWS),
    of_kind("e4m3: full and window", FULL, WINDOW, cache_dtype=DType.FLOAT8_E4M3FN),
    of_kind("e5m2: chunk and states", CHUNK, STATE, cache_dtype=DType.FLOAT8_E5M2),
    of_kind("e4m3: latents", LATENT_ROWS, LATENT_ROWS, cache_dtype=DType.FLOAT8_E4M3FN),
    of_kind("full, window, chunk and states", STATE, FULL, *EVEN.layers[::3]),
)


def in_pages_of(dtype: DType, mix: Mix) -> Mix:
    """The mix with keys, values, latent rows and queries of 16 bits; unchanged where pages have 8."""
    model = replace(mix.pool.model, dtype=DType.FLOAT32, cache_dtype=mix.pool.model.cache_dtype or dtype)
    return replace(mix, pool=replace(mix.pool, model=model))


def run_mix(mix: Mix, num_requests: int, seed: int, fault: Fault = SOUND, place: Place = Place()) -> Report:  # noqa: B008 - frozen
    """Serve `count` requests, then check the invariants of the core. With a fault, end when it is caught."""
    pool = replace(mix.pool, model=suited(mix.pool.model, place.backend))
    report = Report()
    registry = Registry(Config(), lambda: 0)
    sides = []
    for number in range(mix.engines):
        ops = mix.backend(place)
        config = mix.config if mix.wrong < 0 else replace(mix.config, drafter=Recall(seed, mix.wrong))
        world = World(pool, config, registry, f"engine/{number}", ops, fault, mix.lose_every, place)
        share = num_requests // mix.engines + (number < num_requests % mix.engines)
        sides.append(Side(world, seed * 1000 + number, mix, report))
        sides[-1].start(share)
    while any(side.has_work for side in sides) and not (fault is not SOUND and report.complaints):
        for side in sides:
            if side.has_work:
                side.step()
    for side in sides:
        side.close()
    return report
