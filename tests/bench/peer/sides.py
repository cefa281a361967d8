"""The ways to do the work of a case: kvplane's engine on a session to each place, and vLLM's manager in its process."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol

from kvplane.base.groups import HashAlgorithm
from tests.bench.peer.engine import Engine
from tests.bench.peer.models import Model
from tests.bench.peer.places import Place
from tests.bench.peer.plan import AHEAD, CPU, DECODE, DELAY, HASHES, IN_PROCESS, PACED, REFERENCE, WAIT, Plan
from tests.conformance.live.peer import Peer

Intervals = dict[str, list[int]]  # by kind: nanoseconds, one each


class Side(Protocol):
    """One way. A case is: open, then decodings or admissions, then close."""

    name: str

    def open(self, model: Model, num_blocks: int) -> None:
        """Start with an empty pool."""
        ...

    def prefill(self, num_requests: int) -> None:
        """Admit the requests that decode."""
        ...

    def decode(self, plan: Plan) -> Intervals:
        """One round."""
        ...

    def decoded(self, plan: Plan) -> object:
        """Run the remaining steps, so that all sides have run as many; returns free blocks, which must be equal."""
        ...

    def admit(self, seed: int, tokens: int, hashing: str) -> tuple[int, int]:
        """Admit a prompt and end it; returns nanoseconds of the admission, and the hit, which must be equal."""
        ...

    def close(self) -> None:
        """Drop the pool."""
        ...

    def freeze(self) -> None:
        """Freeze the objects of the case for the garbage collector, as vLLM's engine core does."""
        ...


class OurSide:
    """An engine in this process."""

    def __init__(self, name: str, place: Place) -> None:
        self.name = name
        self._place = place
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "open comes first"
        return self._engine

    def open(self, model: Model, num_blocks: int) -> None:
        self._engine = Engine(self._place.session(model.spec(num_blocks)), model.shape)

    def prefill(self, num_requests: int) -> None:
        self.engine.admit(num_requests)

    def decode(self, plan: Plan) -> Intervals:
        taken = {DECODE: [self.engine.decode() for _ in range(plan.steps)]}
        if self.name == IN_PROCESS:  # sending ahead gains nothing: the core runs on the engine's thread
            return taken
        ahead = self.engine.decode_ahead(plan.ahead_steps, plan.gpu_ms / 1000)
        kinds = {
            AHEAD: [step.spent for step in ahead],
            WAIT: [step.waited for step in ahead],
            DELAY: [step.delayed for step in ahead],
            CPU: [step.cpu for step in ahead],
        }
        return taken | kinds

    def decoded(self, plan: Plan) -> object:
        while self.engine.steps < plan.all_steps:
            self.engine.decode()
        return self.engine.session.free_blocks

    def admit(self, seed: int, tokens: int, hashing: str) -> tuple[int, int]:
        return self.engine.measure_admission(seed, tokens, HashAlgorithm(HASHES[hashing]["ours"]))

    def close(self) -> None:
        self.engine.session.close()
        self._engine = None
        self._place.forget()

    def freeze(self) -> None:
        """Nothing: `Start` freezes the whole process once for all sides."""


class ReferenceSide:
    """vLLM's manager, measured in its own process."""

    name = REFERENCE

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def open(self, model: Model, num_blocks: int) -> None:
        self._ask("open", header=model.header(num_blocks), shape=asdict(model.shape))

    def prefill(self, num_requests: int) -> None:
        self._ask("admit", requests=num_requests)

    def decode(self, plan: Plan) -> Intervals:
        paced = self._ask("decode", steps=plan.ahead_steps, gpu_s=plan.gpu_ms / 1000)["ns"]
        return {DECODE: self._ask("decode", steps=plan.steps, gpu_s=0.0)["ns"], PACED: paced}

    def decoded(self, plan: Plan) -> object:
        made = plan.all_rounds * (plan.steps + plan.ahead_steps)
        return self._ask("decode", steps=plan.all_steps - made, gpu_s=0.0)["free"]

    def admit(self, seed: int, tokens: int, hashing: str) -> tuple[int, int]:
        answer = self._ask("admission", seed=seed, tokens=tokens, hash=HASHES[hashing]["reference"])
        return answer["ns"][0], answer["hit"]

    def close(self) -> None:
        """The next open replaces the manager."""

    def freeze(self) -> None:
        self._ask("freeze")

    def versions(self) -> dict[str, str]:
        """Versions of the reference."""
        return self._ask("about")

    def _ask(self, op: str, **inputs: Any) -> dict[str, Any]:
        return self._peer.ask({"op": op, **inputs})
