"""Engines of `tier_world` whose tiers a service follows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Self

import pytest

from kvplane.base.hashing import HashScheme, RequestHasher, pack_tokens, split_hashes
from kvplane.blocking.client import Client
from kvplane_core.face.interface import INSIDE
from kvplane_vllm.target import Target
from kvplane_vllm.tiers import hints, rank
from kvplane_vllm.tiers.service import Service
from kvplane_vllm.tiers.settings import Settings
from tests.vllm.tier_world import Request, World, engine_spec

APPLIED_S = 20.0
SCHEME = HashScheme.of(engine_spec(128, 64))


@contextmanager
def hashed_as_by_a_service() -> Iterator[None]:
    """Let requests have the hashes of the service, and engines directories of their own."""
    with TemporaryDirectory(prefix="kvplane-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank, "content_of", lambda *_: bytes(range(16)))
        patch.setattr(Request, "block_hashes", property(lambda one: hashes_of(one.tokens)))
        patch.setenv("XDG_RUNTIME_DIR", folder)  # its path is short enough for a socket
        yield


def hashes_of(tokens: Sequence[int]) -> list[bytes]:
    """As the service computes them."""
    return split_hashes(RequestHasher(SCHEME).append(pack_tokens(tokens)), SCHEME.digest.size)


class Followed(World):
    """An engine whose tiers a service follows, as a replica of this name."""

    def __init__(self, service: Any, name: str, settings: Settings, seed: int = 5, lag: int = 0) -> None:
        self.follows = Service(Target(service.address, name))
        self.client = Client(service.channel)
        super().__init__(seed, settings, lag, service=self.follows)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.rank.close()
        self.planner.host.shut_down()

    def applied(self) -> None:
        """Wait until the service has applied all steps; no answer of it differed from the engine's."""
        while self.planner.host.is_open:
            self.turn()
        assert self.follows.sender.wait_applied(APPLIED_S), self.follows.sender.state
        assert self.follows.sender.state.divergences == 0

    def asked(self, call: Callable[[], Any]) -> Any:
        """Run steps until a call of the service is answered."""
        self.applied()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(call)
            while not answer.done():
                self.turn()
            return answer.result()

    def turn(self) -> None:
        self.schedule()
        while self.flight:
            self.execute()
        time.sleep(0.001)

    def idle(self) -> None:
        """Run steps until no copy and no job is in flight."""
        while self.planner.is_busy or self.flight or self.requests:
            self.turn()

    def answer(self, prompt: Sequence[int], hint: Any = None) -> None:
        """Let a request with this prompt be computed, or loaded."""
        name, self.count = str(self.count), self.count + 1
        flags = {"skip_reading_prefix_cache": False, "resumable": False, "kv_hints": hint}
        one = Request(
            request_id=name, tokens=list(prompt), num_prompt_tokens=len(prompt), most=len(prompt) + 1, **flags
        )
        vars(one).update(state="waiting", computed=0, num_computed_tokens=0)
        vars(one).update(tables=([], []), is_new=True, fresh=[])
        self.planner.new_request(one)
        self.requests[name] = one
        self.idle()

    def flood(self, first: int) -> None:
        """Let other prompts pass through host memory, more than it holds."""
        for number in range(first, first + 8):
            self.answer([10 + number * 7, *range(71)])

    def in_host(self, prompt: Sequence[int]) -> int:
        """How many leading tokens of a prompt host memory has for all groups."""
        lookup = self.planner.host.replica.coordinator.lookup
        return int(lookup.find(hashes_of(prompt), "", len(prompt), INSIDE).num_tokens)


def hint(action_type: str, **payload: Any) -> Any:
    """Return vLLM's KvHints with one action."""
    action = SimpleNamespace(action_type=action_type, action_version=hints.VERSION, payload=payload)
    return SimpleNamespace(actions=[action])
