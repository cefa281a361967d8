"""One engine that loads what others have in host memory, and lends its own. Commands and answers as of `disaggregated`.

python tests/vllm/moving_live.py MODEL stock|kvplane NUM_BLOCKS OPTIONS

OPTIONS is JSON: the options of kvplane's connector; null = the engine has none, and computes everything.
"""

from __future__ import annotations

import json
from typing import Any

from disaggregated import Driven, serve
from tiers_live import transfer
from vllm.distributed.kv_transfer import get_kv_transfer_group
from workload import engine, followed


class Engine(Driven):
    """The engine."""

    def __init__(self, model: str, kind: str, num_blocks: str, options: str) -> None:
        self._options = json.loads(options)
        more = {"kv_transfer_config": transfer(self._options)} if self._options else {}
        self.llm = engine(model, kind, int(num_blocks), **more)
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

    def mirror(self) -> dict[str, Any]:
        """Return whether the service has the state of the tiers."""
        host = self._scheduler.connector.planner.host
        return followed(host.service.sender, host.replica, self._options["address"], self._options["replica"])

    def state(self) -> dict[str, Any]:
        """Return what was done, and what is left."""
        found = {"free": self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks(), "computed": self._computed}
        if not self._options:
            return found
        planner, peers = self._scheduler.connector.planner, get_kv_transfer_group().rank.peers
        held, counts = planner.host.replica.block_counts.held, peers.slots.counts
        of_peers = {name: getattr(counts, name) for name in ("loaded", "discarded", "refused", "failed")}
        return found | {"held": held, "peers": of_peers, "mismatched": planner.counts.mismatched}


if __name__ == "__main__":
    serve(Engine)
