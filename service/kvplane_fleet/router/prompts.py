"""The tokens of an HTTP request in the form of OpenAI's completions, as the engine that will answer it makes them.

Token ids are taken as they are. Text and messages are tokenized by an engine of the model (`/tokenize` of vLLM and
SGLang), so that chat templates and special tokens are the engine's own. What cannot be tokenized counts as not cached.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from urllib.error import URLError
from urllib.request import Request, urlopen

from kvplane.base.step import ExtraKeys
from kvplane_fleet.fleet import Fleet, Prompt
from kvplane_service.runtime.executors import Busy, Executor

TIMEOUT_S = 2.0
MOST_ENGINES = 2  # that are asked for one prompt
MAX_ANSWER_BYTES = 64 << 20
_CHAT = (
    "messages",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)
_TEXT = ("prompt", "add_special_tokens")
_CHARACTERS_PER_TOKEN = 4  # of a prompt that is not tokenized

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Prompts:
    """Makes prompts of requests."""

    def __init__(self, fleet: Fleet, threads: int = 8) -> None:
        self._fleet = fleet
        self._offload = Executor("tokenizing by engines", threads=threads)
        self._turn = 0

    async def of_body(self, model: str, body: Mapping[str, Any], num_bytes: int, engines: Collection[str]) -> Prompt:
        """Return the prompt of a request; one of about its length, of which nothing is cached, if it has no tokens."""
        given = body.get("prompt")
        if isinstance(given, list) and given and isinstance(given[0], list | str):
            given = given[0]  # of several prompts the first decides
        salt = body.get("cache_salt")
        extra = ExtraKeys(salt=salt if isinstance(salt, str) else "")
        tokens = given if _are_tokens(given) else await self.tokenized(model, {**body, "prompt": given}, engines)
        if tokens:
            return Prompt(tokens, extra)
        return Prompt((), keys=(), num_keyed=max(num_bytes // _CHARACTERS_PER_TOKEN, 1))

    async def tokenized(self, model: str, body: Mapping[str, Any], engines: Collection[str]) -> Sequence[int] | None:
        """Return the tokens of a text or of messages; None if none of these engines of the model makes them. No other
        engine sees the text: they must be places that the caller may use.
        """
        names = _CHAT if "messages" in body else _TEXT
        if not isinstance(body.get(names[0]), str | list):
            return None
        asked = {"model": model, **{name: body[name] for name in names if name in body}}
        endpoints = [
            one.place.settings.endpoint
            for name, one in self._fleet.of_model(model).items()
            if name in engines and one.source.is_connected and one.place.settings.endpoint
        ]
        self._turn += 1
        for endpoint in _rotated(endpoints, self._turn)[:MOST_ENGINES]:
            url = f"{endpoint if '://' in endpoint else f'http://{endpoint}'}/tokenize"
            try:
                return await self._offload(partial(_tokenize, url, json.dumps(asked).encode()))
            except (OSError, URLError, ValueError, Busy) as error:
                _log.warning("%s does not tokenize: %s", url, error)
        return None


def _rotated(items: list[_T], turns: int) -> list[_T]:
    """Return the items in order, beginning with another one at each turn."""
    first = turns % max(len(items), 1)
    return [*items[first:], *items[:first]]


def _tokenize(url: str, body: bytes, opened: Callable[..., Any] = urlopen) -> Sequence[int]:
    """Return the tokens that an engine makes. Raises OSError, or ValueError if the answer has none."""
    request = Request(url, body, {"content-type": "application/json"})
    with opened(request, timeout=TIMEOUT_S) as answer:
        tokens = json.loads(answer.read(MAX_ANSWER_BYTES)).get("tokens")
    if not _are_tokens(tokens):
        raise ValueError("the answer has no tokens")
    found: Sequence[int] = tokens
    return found


def _are_tokens(given: object) -> bool:
    return isinstance(given, list) and set(map(type, given)) == {int} and 0 <= min(given) <= max(given) < 1 << 32
