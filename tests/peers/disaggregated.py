"""Prefill on one engine, decode on another: the second loads as a peer what the first has computed.

A prompt is computed by engine 0, for one token, and then by engine 1 or 2, which load what engine 0 has saved, and
compute what has no key: the last tokens of the prompt, and the state inside a block. Engine 0 dies before it is read,
or has forgotten a prompt by then; the request then computes, and answers the same.
"""

from __future__ import annotations

from kvplane_worker.engine.request import Request
from tests.engine.stress import compare
from tests.peers.campaign import BLOCK, OF_TWO, Outcome, Run

PREFILL = 0
KINDS = ("sound", "wrong bytes", "killed", "late", "sound of windows", "sound of states", "sound" + OF_TWO)
LEAST_ROUNDS, MOST_ROUNDS = 8, 60  # that a decode engine waits for what the prefill engine saves


class Disaggregated(Run):
    """A run in which every prompt moves from the prefill engine to a decode engine."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__(kind, seed)
        self._waiting: list[tuple[Request, int]] = []  # with the rounds that it has waited

    def _ask(self) -> None:
        self._number += 1
        prompt = self._text(self._rng.randrange(40, 160))
        self._begin(PREFILL, Request(f"q{self._number}", prompt, 1, keep_logits=True), 0)

    def _begin(self, number: int, request: Request, expected: int) -> None:
        self._open[request.request_id] = request, 0, expected
        self._asked[request.request_id] = number
        self.site.worlds[number].engine.add(request)

    def _finish(self, number: int, request: Request) -> None:
        _, _, expected = self._open.pop(request.request_id)
        if not request.error:
            compare(self.site.worlds[number], request, self.outcome.report)
        if number == PREFILL:
            placeholder = f"{request.request_id} decodes"  # the run continues
            self._open[placeholder], self._asked[placeholder] = (request, 0, 0), -1
            self._waiting.append((request, 0))
            return
        self.outcome.report.requests += 1
        self.outcome.only_peers += expected
        self.outcome.loaded += min(expected, request.hits[-1]) if request.hits else 0

    def _round(self) -> None:
        """Start what decodes when the prefill engine has saved its last whole block, or has not for long."""
        still = list[tuple[Request, int]]()
        for request, rounds in self._waiting:
            if rounds < LEAST_ROUNDS or (rounds < MOST_ROUNDS and not self._is_saved()):
                still.append((request, rounds + 1))
                continue
            del self._open[f"{request.request_id} decodes"]
            again = Request(f"{request.request_id}+", request.prompt, self._rng.choice([1, 3, 9]), keep_logits=True)
            whole = (len(request.prompt) - 1) // BLOCK * BLOCK
            self._begin(self._rng.randrange(1, len(self.site.worlds)), again, whole)
        self._waiting = still

    def _is_saved(self) -> bool:
        """Whether nothing is being saved by the prefill engine, so that all it computed has a slot, or never will."""
        core = self.site.worlds[PREFILL].host.replica
        return not core.tiers.open_jobs().get("save")


def run(kind: str, num_requests: int, seed: int) -> Outcome:
    """Serve prompts of this kind."""
    return Disaggregated(kind, seed).serve(num_requests)
