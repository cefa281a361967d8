"""The reference engine in a pod, on pages that a worker of its node holds.

    python paged.py SERVICE REPLICA RUN_DIR...

It registers the replica with a rank for each folder of a worker, attaches, and answers each prompt twice: computed,
and with what is cached. Both must give the same tokens. A second pod begins with what the first one left in the pages.
A line of JSON says what was done. Secrets with a CA and a token are below /access, if the service wants them.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import kvplane
from kvplane.base.errors import AlreadyExists, KvplaneError
from kvplane.base.sources import LayerSource
from kvplane.sansio.retry import RetryPolicy
from kvplane_kernels.torch_ops import TorchOps
from tests.engine.reference.config import BOS, MIXED
from tests.engine.reference.engine import Engine
from tests.engine.reference.model import Model
from tests.engine.reference.ranks import RankMemory, attach_ranks
from tests.engine.reference.request import Request
from tests.engine.reference.scheduler import SchedulerConfig
from tests.engine.reference.weights import draw_weights

PROMPTS, LENGTH, NEW, LIMIT_S = 6, 70, 8, 120.0
PATIENCE = RetryPolicy(attempts=None, within_s=LIMIT_S)


def attached(folders: list[str]) -> list[RankMemory]:
    """The pages of all ranks, once their workers have them: they need the layout of the registered replica."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return attach_ranks([f"unix:{folder}/worker.sock" for folder in folders], TorchOps())
        except KvplaneError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def answers(engine: Engine, prompts: list[list[int]], name: str) -> tuple[list[list[int]], int]:
    """The output for each prompt, one after another, and the tokens that were hit."""
    found, hit = [], 0
    for at, prompt in enumerate(prompts):
        request = Request(f"{name}-{at}", list(prompt), NEW)
        engine.add(request)
        while engine.has_work:
            engine.step()
        found.append(list(request.output))
        hit += request.hits[0] if request.hits else 0
    return found, hit


def main(service: str, replica: str, *folders: str) -> None:
    torch.set_num_threads(1)
    ops, model = TorchOps(), replace(MIXED, num_ranks=len(folders))
    rng = random.Random(7)
    prompts = [[BOS, *(rng.randrange(256) for _ in range(LENGTH))] for _ in range(PROMPTS)]
    source = LayerSource(layers=model.cache_layers(), num_blocks=200, max_model_len=200, max_batched_tokens=96)
    access = Path("/access")
    tls = kvplane.Tls(str(access / "kvplane-ca/ca.crt")) if access.exists() else None
    token = access / "kvplane-access/token" if tls else ""
    with kvplane.connect(service, tls=tls, token=token, retry=PATIENCE) as client:
        try:
            client.register_replica(replica, source, num_ranks=len(folders))
        except AlreadyExists:
            raise SystemExit(f"replica {replica} is registered with other settings") from None
        memory = attached(list(folders))
        forward = Model(model, draw_weights(model), [one.pages for one in memory], ops)
        session = partial(client.lasting_session, replica, retry=PATIENCE)
        engine = Engine(session, memory, forward, SchedulerConfig(token_budget=96))
        kept = engine.kept_keys
        first, first_hit = answers(engine, prompts, "first")
        again, hit = answers(engine, prompts, "again")
    differ = sum(a != b for one, other in zip(first, again, strict=True) for a, b in zip(one, other, strict=True))
    counts = {"kept": kept, "prompts": len(prompts), "prompt_tokens": sum(map(len, prompts)), "first_hit": first_hit}
    print(json.dumps({**counts, "hit": hit, "differ": differ, "outputs": first}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
