"""Hits of diverging prompts with and without checkpoints: `python -m tests.bench.checkpoints`.

Prompts leave a document of 20,000 to 60,000 tokens anywhere, and continue with 500 tokens of their own; a document is
asked for again after some others. The device has room for two documents, the host for most of them. *hit* is the
percentage of the prompts' tokens, *bound* that of full attention alone, which has all of this memory; *written* is how
many blocks of windows or states were saved for a hundred blocks of full attention. *all* keeps every window and state.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from kvplane.base.groups import DENSE_RETENTION, ReplicaSpec, TierKind, TierSpec
from kvplane_tools.replay.engine import Engine
from kvplane_tools.replay.fleet import Fleet
from kvplane_tools.replay.plan import CostModel, EngineConfig
from kvplane_tools.replay.workloads import Span, TokenSource, TraceRequest
from tests.bench.machine import machine_line
from tests.bench.policies import CoreSession, share_of_hits
from tests.bench.preempted import MODELS, replica

PERCENTS = (0, 5, 15, 30)
DOCUMENTS, OWN = 40, 500


def diverging(count: int) -> Iterator[TraceRequest]:
    """Yield prompts that leave a document, half of them one of the last few."""
    rng = Random(7)
    sizes, last = [rng.randrange(20_000, 60_000) for _ in range(DOCUMENTS)], list[int]()
    for number in range(count):
        document = rng.choice(last[-4:]) if last and rng.random() < 0.5 else rng.randrange(DOCUMENTS)
        last.append(document)
        shared = rng.randrange(1000, sizes[document])
        spans = Span(document, 0, shared), Span(DOCUMENTS + number, 0, OWN)
        yield TraceRequest(f"r{number}", number, "", TokenSource(spans), TokenSource((Span(number, 0, 1, True),)))


def run(spec: ReplicaSpec, count: int) -> tuple[Engine, CoreSession]:
    """Replay the prompts, four at a time."""
    session = CoreSession(spec)
    engine = Engine(session, EngineConfig(4, 8192, max_output=1), CostModel(10**9, 0, 0))
    fleet = Fleet([engine], diverging(count))
    while fleet.run_step():
        pass
    return engine, session


def rows(model: str, count: int) -> Iterator[list[str]]:
    """Yield the rows of a model, without its name."""
    size = MODELS[model][0].block_size
    host = TierSpec(TierKind.HOST, 1_000_000 // size)
    alone = replica(model, 150_000, (host,))
    bound = share_of_hits(run(replace(alone, groups=alone.groups[:1]), count)[0])
    for percent in (*PERCENTS, None):
        tier = replace(host, checkpoint_percent=percent or 0)
        spec = replica(model, 150_000, (tier,), retention_interval=0 if percent is not None else DENSE_RETENTION)
        engine, session = run(spec, count)
        full, *others = [use.stored for use in session.replica.tiers.each[0].uses]
        name, apart = ("all", "") if percent is None else (str(percent), str(spec.kept_every or ""))
        yield [name, apart, f"{share_of_hits(engine):.1f}", f"{bound:.1f}", f"{100 * sum(others) / max(1, full):.0f}"]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.checkpoints", description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt-oss", "Gemma 3", "Jamba", "Qwen3-Next"])
    given = parser.parse_args()
    print(f"{machine_line()}\n\n| groups as in | percent | tokens apart | hit | bound | written |")
    for model in given.models:
        for cells in rows(model, given.requests):
            print(f"| {' | '.join([model, *cells])} |", flush=True)


if __name__ == "__main__":
    main()
