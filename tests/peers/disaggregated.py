"""Prefill on one engine, decode on another: the second loads as a peer what the first has computed.

A prompt is computed by engine 0, for one token, and then by engine 1 or 2, which load what engine 0 has saved, and
compute what has no key: the last tokens of the prompt, and the state inside a block. Engine 0 dies before it is read,
or has forgotten a prompt by then; the request then computes, and answers the same.
"""

from __future__ import annotations

import time

from tests.engine.reference.request import Request
from tests.engine.stress import compare
from tests.peers.campaign import BLOCK, FULL_HOST, OF_TWO, Outcome, Run

PREFILL = 0
KINDS = ("sound", "wrong bytes", "killed", "late", "sound of windows", "sound of states", "sound" + OF_TWO, FULL_HOST)
ROUNDS = 8  # in a row without a save of the prefill engine, before what it computed is asked of another
MOST_S = 30.0  # that the saves may take


class Disaggregated(Run):
    """A run in which every prompt moves from the prefill engine to a decode engine."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__(kind, seed)
        self._waiting: list[tuple[Request, float]] = []  # with the time until which it waits
        self._idle = 0  # rounds since the last save

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
            self._waiting.append((request, time.monotonic() + MOST_S))
            self._idle = 0
            return
        self.outcome.report.requests += 1
        self.outcome.only_peers += expected
        self.outcome.loaded += min(expected, request.hits[-1]) if request.hits else 0

    def _round(self) -> None:
        """Start what decodes when the prefill engine has saved what it computed, and services have reported it."""
        saves = self.site.worlds[PREFILL].host.replica.tiers.open_jobs()["save"]
        self._idle = 0 if saves else self._idle + 1
        still = list[tuple[Request, float]]()
        for request, until in self._waiting:
            if self._idle < ROUNDS and time.monotonic() < until:
                still.append((request, until))
                continue
            del self._open[f"{request.request_id} decodes"]
            again = Request(f"{request.request_id}+", request.prompt, self._rng.choice([1, 3, 9]), keep_logits=True)
            whole = (len(request.prompt) - 1) // BLOCK * BLOCK
            self._begin(self._rng.randrange(1, len(self.site.worlds)), again, whole)
        self._waiting = still


def run(kind: str, num_requests: int, seed: int) -> Outcome:
    """Serve prompts of this kind."""
    return Disaggregated(kind, seed).serve(num_requests)
