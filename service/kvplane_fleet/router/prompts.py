"""The tokens of an HTTP request in the form of OpenAI's completions, as the engine that will answer it makes them.

Token ids are taken as they are. Text and messages are tokenized by an engine of the model (`/tokenize` of vLLM and
SGLang), so that chat templates and special tokens are the engine's own. What cannot be tokenized counts as not cached.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from kvplane.base.step import ExtraKeys
from kvplane_fleet.fleet import Fleet, Prompt
from kvplane_fleet.router.asking import Engines

TIMEOUT_S = 2.0
MOST_ENGINES = 2  # that are asked for one prompt
ANSWER_BYTES = 64 << 10  # of any answer: a chat template adds to a text
ANSWER_BYTES_PER_BYTE = 8  # of the question: a byte is at most a token, and its id at most 7 bytes
MAX_ANSWER_BYTES = 8 << 20  # a million tokens
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


class _Tokens(msgspec.Struct):
    tokens: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]], msgspec.Meta(min_length=1)]


_ANSWER, _encode = msgspec.json.Decoder(_Tokens), msgspec.json.Encoder().encode
_log = logging.getLogger(__name__)


class Prompts:
    """Makes prompts of requests."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._engines = fleet, Engines()
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
            try:
                question = _encode(asked)
                most_bytes = min(ANSWER_BYTES + ANSWER_BYTES_PER_BYTE * len(question), MAX_ANSWER_BYTES)
                answer = await self._engines.post(endpoint, "/tokenize", question, most_bytes, TIMEOUT_S)
                return _ANSWER.decode(answer).tokens
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                _log.warning("%s does not tokenize: %s", endpoint, error)
        return None


def _rotated(items: list[_T], turns: int) -> list[_T]:
    """Return the items in order, beginning with another one at each turn."""
    first = turns % max(len(items), 1)
    return [*items[first:], *items[:first]]


def _are_tokens(given: object) -> bool:
    return isinstance(given, list) and set(map(type, given)) == {int} and 0 <= min(given) <= max(given) < 1 << 32
