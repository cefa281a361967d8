"""The runs behind the tables: each is a function of names and numbers, so that processes share them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import process_time

from kvplane_plan.models.catalogue import model_named
from kvplane_plan.models.shapes import ModelOptions
from kvplane_plan.models.sizing import Sizing, figures_of
from tests.bench.tables import fleet as published_columns
from tests.bench.tables import product
from tests.bench.tables.fleet import (
    PAGE_BYTES,
    QUESTION,
    SYSTEM,
    Load,
    StagedFleet,
    TraceLoad,
    percentile,
    published_fleet,
)
from tests.bench.tables.model import FITTED, MAX_MODEL_LEN, WINDOW, Fitted, StepCost
from tests.bench.tables.product import product_fleet
from tests.bench.tables.published import BLOCK, ENGINES, GROUPS, OUTPUT, RATES, STAGE_S

WARM, BEYOND = 20, (40, 60, 80)  # requests per second: before the first stage that counts, and of the table
SWEEP = (WARM, *BEYOND)
PARTS = 4  # of the fleet, of which every table but the first one runs one
TRACES = {"conversation": (16,), "Weka": (2,)}  # and the rates on half of the fleet
TRACE_ENGINES, TRACE_LIMIT, TRACE_COLUMNS = 8, 250, (
    "both", "exact scores", "priced", "+ passing", "with peers", "priced peers", "+ displacement"
)  # fmt: skip
PUBLISHED_POLICY = "both"
SEED_COLUMN, SEEDS = "+ displacement", (2, 3)  # which runs again with other arrivals, as the published policy
LARGE_POOL = "priced", (("pool_bytes", 8.0),)  # a column without the limit of memory


@dataclass(frozen=True, slots=True)
class Run:
    """One run: a column, published or kvplane's, over stages; on one of `parts` of the fleet.

    Attributes:
        column: of `fleet.COLUMNS` or `product.COLUMNS`.
        rates: requests per second of the stages, of the whole fleet.
        factors: of the fitted constants, by name.
        parts, stage_s: the size of the fleet and of its stages.
        trace: a public trace, which TRACE_ENGINES serve instead of the published load.
        seed: of the load and of the router.
    """

    column: str
    rates: tuple[int, ...] = RATES
    factors: tuple[tuple[str, float], ...] = ()
    parts: int = 1
    stage_s: float = STAGE_S
    trace: str = ""
    seed: int = 1

    @property
    def fitted(self) -> Fitted:
        """The constants with their factors."""
        return replace(FITTED, **{name: getattr(FITTED, name) * factor for name, factor in self.factors})

    def fleet(self) -> StagedFleet:
        """Return the fleet, empty."""
        engines = TRACE_ENGINES if self.trace else ENGINES // self.parts
        if self.column in published_columns.COLUMNS:
            return published_fleet(self.column, self.fitted, self.seed, engines)
        return product_fleet(product.COLUMNS[self.column], self.fitted, self.seed, engines)

    def load(self) -> Load | TraceLoad:
        """Return the load."""
        return TraceLoad(self.trace, TRACE_LIMIT) if self.trace else Load(self.seed, GROUPS // self.parts)


def key_of(run: Run) -> str:
    """Return the name of a run within its table."""
    of_trace = [run.trace, str(run.rates[0])] if run.trace else []
    of_seed = [f"seed {run.seed}"] if run.seed > 1 else []
    return " ".join([run.column, *of_trace, *of_seed, *(f"{name}*{factor}" for name, factor in run.factors)])


Figures = Mapping[str, float]


def stages_of(run: Run) -> list[Figures]:
    """Run the stages and return the figures of each; `cpu_s` alone differs between equal runs."""
    fleet, load, found = run.fleet(), run.load(), list[Figures]()
    for rate in run.rates:
        before, steps = process_time(), fleet.steps
        stage = fleet.run(load, rate / run.parts, run.stage_s)
        row = stage.row
        found.append({
            "rate": rate, "throughput": row.throughput * run.parts, "ttft_s": row.ttft_s,
            "ttft_p50_s": percentile(stage.first_token_s, 50), "ttft_p90_s": row.ttft_p90_s,
            "ttft_p99_s": percentile(stage.first_token_s, 99), "latency_s": row.latency_s,
            "hit": stage.hit / stage.prompt, "virtual_s": stage.last_s - stage.start_s,
            "steps": fleet.steps - steps, "cpu_s": process_time() - before,
        })  # fmt: skip
    return found


def capacity_ratio(batched_tokens: int) -> float:
    """Return how many requests of 131,072 tokens the planner admits to a hybrid cache, for each of a uniform one."""
    options = ModelOptions(block_size=BLOCK, max_model_len=MAX_MODEL_LEN)
    gain = figures_of(Sizing(model_named("gpt-oss-120b"), options, 40 << 30, batched_tokens)).gain
    assert gain is not None
    return gain


def bounds(fitted: Fitted) -> tuple[float, float]:
    """Return the requests per second that no routing and no cache exceeds: by the operations of prefills that reuse
    every shared token, and with the bytes of decode steps whose batches fill the pool behind one prefix.
    """
    question = StepCost(fitted).prefill_s(SYSTEM, QUESTION)
    blocks = int(fitted.pool_bytes / PAGE_BYTES) - SYSTEM // BLOCK
    most = blocks // (-(-(QUESTION + OUTPUT) // BLOCK) + 1 + WINDOW // BLOCK)
    return ENGINES / question, ENGINES / (question + OUTPUT * _decode_s(fitted, most) / most)


def least_drain_s(fitted: Fitted, rate: float) -> float:
    """Return how long a stage lasts behind its last arrival if no pool has a limit, nothing waits, and engines are
    equally loaded: as long as the last prompt decodes, while those before it end.
    """
    arriving, running, before = rate / ENGINES, 1.0, 0.0
    while abs(running - before) > 0.01:
        before, running = running, arriving * OUTPUT * _decode_s(fitted, running)
    return sum(_decode_s(fitted, max(1.0, running * (1 - at / OUTPUT))) for at in range(OUTPUT))


def _decode_s(fitted: Fitted, running: float) -> float:
    """Return a step of requests that have half of their tokens."""
    cost = StepCost(fitted)
    return cost.weights_s(running) + running * cost.contexts_s([SYSTEM + QUESTION + OUTPUT // 2])
