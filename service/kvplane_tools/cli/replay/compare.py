"""The end of `kvplane demo`: conversations about long documents with three caches of equal memory for each model.

hybrid: window layers free what left their window. uniform: every layer keeps every token. no prefix cache: as hybrid,
and every prompt is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from random import Random

from kvplane.base.sources import LayerSource, ModelSource
from kvplane.blocking.client import Client
from kvplane_plan.models.catalogue import model_named
from kvplane_plan.models.shapes import ModelOptions
from kvplane_tools.cli.output import columns
from kvplane_tools.cli.replay.engines import running
from kvplane_tools.replay.plan import EngineConfig, RunPlan
from kvplane_tools.replay.run import ReplayRun
from kvplane_tools.replay.summary import Summary
from kvplane_tools.replay.workloads import DocumentShape, document_workload

SHAPE = DocumentShape()
POOLS = {"gpt-oss-120b": 6 << 30, "gemma-3-27b": 24 << 30}  # bytes: room for all conversations, if windows are freed
_ENGINE = EngineConfig(max_running=64, token_budget=2048)
_WAIT_S = 0.25


class Cache(Enum):
    """A way to cache."""

    HYBRID = "hybrid"
    UNIFORM = "uniform"
    NONE = "no prefix cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPlan(RunPlan):
    """The plan of a run with a given cache in `memory_bytes` bytes."""

    cache: Cache
    memory_bytes: int

    def source(self) -> ModelSource | LayerSource:
        """Return the source of the replica; a uniform cache has the model's layers as full attention."""
        length, tokens = self.max_model_len, self.engine.token_budget
        if self.cache is not Cache.UNIFORM:
            return ModelSource(
                model=self.model,
                memory_bytes=self.memory_bytes,
                max_model_len=length,
                max_batched_tokens=tokens,
                disable_caching=self.cache is Cache.NONE,
            )
        layers = model_named(self.model).layers(ModelOptions(max_model_len=length))
        full = tuple(replace(one, spec=one.spec.as_full_attention(one.spec.block_size)) for one in layers)
        return LayerSource(layers=full, memory_bytes=self.memory_bytes, max_model_len=length, max_batched_tokens=tokens)


@dataclass(frozen=True, slots=True)
class Compared:
    """The outcome of one run.

    Attributes:
        at_once: most requests that ran at the same time.
    """

    cache: Cache
    summary: Summary
    at_once: int


def compare(client: Client, seed: int) -> list[Compared]:
    """Run all models with all caches on the service, at the same time. Raises the error of a failed engine."""
    with ExitStack() as stack:
        runs = [(cache, stack.enter_context(run)) for cache, run in _runs(client, seed)]
        at_once = dict.fromkeys((run.names[0] for _, run in runs), 0)

        def note(run: ReplayRun) -> None:
            name = run.names[0]
            at_once[name] = max(at_once[name], run.fleet.progress.running)

        with running([run for _, run in runs], note) as engines:
            while not engines.wait(_WAIT_S):
                pass
        return [Compared(cache, run.summary("documents"), at_once[run.names[0]]) for cache, run in runs]


def _runs(client: Client, seed: int) -> Iterator[tuple[Cache, ReplayRun]]:
    for model, memory_bytes in POOLS.items():
        for cache in Cache:
            plan = ComparedPlan(
                model=model,
                max_model_len=SHAPE.max_model_len,
                engine=_ENGINE,
                cache=cache,
                memory_bytes=memory_bytes,
            )
            name = f"{model}/{cache.name.lower()}"
            yield cache, ReplayRun(client, plan, name, document_workload(Random(seed), SHAPE))


def question() -> str:
    """Return what is compared, as a heading."""
    return (
        f"What does the cache save? {SHAPE.num_documents} conversations of {SHAPE.turns} turns, each about a document "
        f"of {SHAPE.document_tokens:,} tokens, with three caches of equal memory:"
    )


def comparison(outcomes: Sequence[Compared]) -> str:
    """Return a table of the runs."""
    rows = [("MODEL", "MEMORY", "CACHE", "HIT", "AT ONCE", "TOKENS COMPUTED")]
    for one in outcomes:
        summary = one.summary
        memory = f"{POOLS[summary.model] >> 30} GiB"
        counts = (f"{summary.counts.hit_share:.0%}", f"{one.at_once}", f"{summary.counts.granted_tokens:,}")
        rows.append((summary.model, memory, one.cache.value, *counts))
    return columns(rows)


def conclusion(outcomes: Sequence[Compared]) -> Iterator[str]:
    """Yield a sentence per model that says what the table shows."""
    for model in POOLS:
        hybrid, uniform, none = (next(one for one in outcomes if _is(one, model, cache)) for cache in Cache)
        counts = hybrid.summary.counts
        times = none.summary.counts.granted_tokens / max(1, counts.granted_tokens)
        yield (
            f"{model}: a hybrid cache hits {counts.hit_share:.0%} of the tokens and runs {hybrid.at_once} requests "
            f"at once, a uniform one of the same size {uniform.summary.counts.hit_share:.0%} and {uniform.at_once}; "
            f"without a prefix cache {times:.1f} times as many tokens are computed."
        )


def _is(one: Compared, model: str, cache: Cache) -> bool:
    return one.summary.model == model and one.cache is cache
