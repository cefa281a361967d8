"""Asks engines again for prompts that they have answered, and compares the cached tokens that they state with claims.

Clients report on prompts that were sent, so an engine that gets none, or whose claims no client checks, can differ from
its events for long. A probe is a booked prompt of one place with one output token: its difference has a cause, and
unexplained ones make the router learn the place again (see Decisions). An engine gets only prompts that it was sent
before, and those of which it should compute few tokens.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from kvplane.base.errors import KvplaneError, NotFound
from kvplane.base.step import NO_EXTRA_KEYS
from kvplane_fleet.decisions import Ask, Decisions, Event
from kvplane_fleet.fleet import Fleet, Followed, Prompt
from kvplane_fleet.router.asking import Engines
from kvplane_fleet.settings import RouterSettings

REMEMBERED = 16  # prompts of a place
MAX_TOKENS = 32_768  # of a prompt that is remembered
TIMEOUT_S = 30.0
MAX_ANSWER_BYTES = 1 << 20
FAILED, UNSTATED = "failed", "unstated"  # results that are not causes of differences

# endpoint, body -> cached tokens, None if the engine does not state them
Complete = Callable[[str, bytes], Awaitable[int | None]]

_log = logging.getLogger(__name__)


class Prober:
    """Probes the places of one fleet, one at a time.

    Attributes:
        results: number of probes by place and result: a cause of ReportResponse, FAILED or UNSTATED.
    """

    def __init__(
        self, fleet: Fleet, decisions: Decisions, settings: RouterSettings, clock: Callable[[], float]
    ) -> None:
        """`clock` returns seconds that never decrease."""
        self._fleet, self._decisions, self._settings, self._clock = fleet, decisions, settings, clock
        self._prompts: dict[str, deque[tuple[int, ...]]] = {}
        self._due_s: dict[str, float] = {}
        self._engines = Engines()
        self.results: dict[str, Counter[str]] = {}
        if settings.probe_period_s:
            decisions.booked = self._remember

    async def run(self) -> None:
        """Probe until the task is cancelled; at once return if `probe_period_s` is 0."""
        while self._settings.probe_period_s:
            names = [name for name in self._prompts if name in self._fleet.followed]
            for name in names:
                if self._clock() >= self._due_s.get(name, 0.0):
                    await self.probe(name)
            await asyncio.sleep(self._settings.probe_period_s / 4)

    async def probe(self, place: str, complete: Complete | None = None) -> str:
        """Probe a place once, with the prompt that was not used for longest; returns the result, "" without one."""
        one, prompts = self._fleet.followed[place], self._prompts.get(place, deque())
        for _ in range(len(prompts)):
            prompts.rotate(-1)
            decision = self._book(one, place, prompts[-1])
            if decision:
                result = await self._ask(one, decision, prompts[-1], complete or self._complete)
                self.results.setdefault(place, Counter())[result] += 1
                # After a difference the next prompts are tried at once, to find out whether it is one of many.
                period_s = 0.0 if result == "unexplained" else self._settings.probe_period_s
                self._due_s[place] = self._clock() + period_s
                return result
        return ""

    def _remember(self, place: str, ask: Ask) -> None:
        prompt = ask.prompt
        settings = self._fleet.followed[place].place.settings if place in self._fleet.followed else None
        is_known = settings is not None and settings.endpoint and ask.model not in settings.adapters
        is_plain = prompt.extra == NO_EXTRA_KEYS and not prompt.domain
        if is_known and is_plain and 0 < len(prompt.tokens) <= MAX_TOKENS:
            prompts, tokens = self._prompts.setdefault(place, deque(maxlen=REMEMBERED)), tuple(prompt.tokens)
            if tokens not in prompts:
                prompts.append(tokens)

    def _book(self, one: Followed, place: str, tokens: tuple[int, ...]) -> str:
        """Book a prompt if the place claims nearly all of it; returns the id of the decision or ""."""
        domain, ask = one.place.domain, Ask(one.place.settings.model, Prompt(tokens), frozenset([place]), None, True, 1)
        if domain is None or not one.source.is_connected:
            return ""
        try:
            keys = {domain: ask.prompt.keys_of(domain)}
            claim = self._decisions.score(replace(ask, book=False), keys).places[0].claim
            few = len(tokens) - claim.tokens <= self._settings.probe_tokens
            return self._decisions.score(ask, keys).name if claim.tokens and few and not claim.inexact else ""
        except KvplaneError:
            return ""

    async def _ask(self, one: Followed, decision: str, tokens: tuple[int, ...], complete: Complete) -> str:
        settings = one.place.settings
        body = json.dumps({"model": settings.model, "prompt": tokens, "max_tokens": 1, "temperature": 0}).encode()
        cached: int | None = None
        result = FAILED
        try:
            cached = await complete(settings.endpoint, body)
            result = UNSTATED
        except (OSError, ValueError, RecursionError) as error:
            _log.warning("%s cannot be probed: %s", settings.name, error)
        finally:
            valid = cached if cached is not None and 0 <= cached <= len(tokens) else None
            with suppress(NotFound):  # it has expired
                result = self._decisions.ended(decision, Event(self._clock(), valid, 1)) or result
        return result

    async def _complete(self, endpoint: str, body: bytes) -> int | None:
        return cached_tokens(await self._engines.post(endpoint, "/v1/completions", body, MAX_ANSWER_BYTES, TIMEOUT_S))


def cached_tokens(answer: bytes) -> int | None:
    """Return the cached tokens that an engine's answer states; None if it states none. Raises ValueError,
    RecursionError.
    """
    usage = _part(json.loads(answer), "usage")
    cached = _part(_part(usage, "prompt_tokens_details"), "cached_tokens")
    return cached if type(cached) is int else None


def _part(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, dict) else None
