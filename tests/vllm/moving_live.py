"""One engine that loads what others have in host memory, and lends its own. Commands and answers as of `disaggregated`.

python tests/vllm/moving_live.py MODEL KIND NUM_BLOCKS OPTIONS [ENGINE]

KIND is stock or kvplane, with " async" or " tp2" behind it. OPTIONS is JSON: the options of kvplane's connector;
null = the engine has none, and computes everything. ENGINE is JSON: further options of the engine.
"""

from __future__ import annotations

import json
import time
from random import Random
from typing import Any

from disaggregated import Driven, serve
from tiers_live import modes_of, transfer
from workload import engine, followed

WAIT_S = 120.0


class Engine(Driven):
    """The engine."""

    def __init__(self, model: str, kind: str, num_blocks: str, options: str, of_engine: str = "{}") -> None:
        self._options, more = json.loads(options), json.loads(of_engine)
        more |= {"kv_transfer_config": transfer(self._options)} if self._options else {}
        self.llm = engine(model, kind.split()[0], int(num_blocks), **more | modes_of(kind))
        self._scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self._computed = 0
        schedule = self._scheduler.schedule

        def counted(*args: Any, **given: Any) -> Any:
            output = schedule(*args, **given)
            self._computed += output.total_num_scheduled_tokens
            return output

        self._scheduler.schedule = counted

    def step(self, sent: list[str]) -> dict[str, Any]:
        """As `Driven.step`; vLLM's loop also runs while the connector saves."""
        found = super().step(sent)
        connector = self._scheduler.connector
        return found | {"busy": found["busy"] or (connector is not None and connector.has_pending_push_work())}

    def first_token(self, seed: int, length: int) -> tuple[float, int]:
        """Answer a random prompt with one token, alone; return the seconds that it took, and how many were computed."""
        rng, name, before = Random(f"prompt {seed}"), f"{seed} at {time.monotonic()}", self._computed
        prompt = [rng.randrange(3, 900) for _ in range(length)]
        began = time.perf_counter()
        self.add(name, prompt, 1, None)
        while True:
            computed = self._computed
            if name in super().step([])["ended"]:
                break
            if self._computed == computed:
                time.sleep(0.001)  # as vLLM's loop does, so that other threads run
        return time.perf_counter() - began, self._computed - before

    def mirror(self) -> dict[str, Any]:
        """Return whether the service has the state of the tiers. One that was started again gets it with a step."""
        host, until_s = self._scheduler.connector.planner.host, time.monotonic() + WAIT_S
        while not host.service.sender.wait_applied(1.0) and time.monotonic() < until_s:
            self.add(f"at {time.monotonic()}", [1, 2, 3], 1, None)
            while self.step([])["busy"]:
                time.sleep(0.001)
        return followed(host.service.sender, host.replica, self._options["address"], self._options["replica"])

    def state(self) -> dict[str, Any]:
        """Return what was done, and what is left."""
        found = {"free": self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks(), "computed": self._computed}
        if not self._options:
            return found
        planner = self._scheduler.connector.planner
        replica, mismatched = planner.host.replica, planner.counts.mismatched
        counts = replica.tiers.counters
        of_peers = {"loaded": counts.loaded, "discarded": counts.discarded, "failed": counts.loads_failed}
        return found | {"held": replica.block_counts.held, "peers": of_peers, "mismatched": mismatched}


if __name__ == "__main__":
    serve(Engine)
