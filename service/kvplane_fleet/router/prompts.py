"""The tokens of an HTTP request in the form of OpenAI's completions, as the engine that will answer it makes them.

Token ids are taken as they are. Text and messages are tokenized by an engine of the model (`/tokenize` of vLLM and
SGLang), so that chat templates and special tokens are the engine's own. What cannot be tokenized counts as not cached.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Annotated, TypeVar

import msgspec

from kvplane.base.step import ExtraKeys
from kvplane_fleet.fleet import Fleet, Prompt
from kvplane_fleet.router.asking import Engines

TIMEOUT_S = 2.0
MOST_ENGINES = 2  # that are asked for one prompt
ANSWER_BYTES = 64 << 10  # of any answer: a chat template adds to a text
ANSWER_BYTES_PER_BYTE = 8  # of the question: a byte is at most a token, and its id at most 7 bytes
MAX_ANSWER_BYTES = 8 << 20  # a million tokens
MAX_TOKENS = 1 << 20  # of a prompt whose ids are read; a longer one counts as not cached
MAX_VALUE_BYTES = 64 << 10  # of a salt, or a number
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


_Ids = Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]], msgspec.Meta(min_length=1)]
_ABSENT = msgspec.Raw(b"")


class Body(msgspec.Struct, gc=False):
    """The values of a request's body that are read, unparsed: an end user may send anything, and objects of it would
    take many times its length. Others are skipped.
    """

    model: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    messages: msgspec.Raw = _ABSENT
    tools: msgspec.Raw = _ABSENT
    chat_template: msgspec.Raw = _ABSENT
    chat_template_kwargs: msgspec.Raw = _ABSENT
    add_generation_prompt: msgspec.Raw = _ABSENT
    continue_final_message: msgspec.Raw = _ABSENT
    add_special_tokens: msgspec.Raw = _ABSENT
    cache_salt: msgspec.Raw = _ABSENT
    max_tokens: msgspec.Raw = _ABSENT
    max_completion_tokens: msgspec.Raw = _ABSENT

    def value(self, name: str) -> object:
        """Return a value that is short; None if it is absent, long, or no JSON."""
        raw = bytes(getattr(self, name))
        try:
            return msgspec.json.decode(raw) if 0 < len(raw) <= MAX_VALUE_BYTES else None
        except _ERRORS:
            return None


class _Tokens(msgspec.Struct):
    tokens: _Ids


_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)
_BODY, _IDS, _ITEMS = msgspec.json.Decoder(Body), msgspec.json.Decoder(_Ids), msgspec.json.Decoder(list[msgspec.Raw])
_ANSWER, _encode = msgspec.json.Decoder(_Tokens), msgspec.json.Encoder().encode


def text_body(text: str) -> Body:
    """Return the body of a request for the completion of a text."""
    return Body(prompt=msgspec.Raw(_encode(text)))


def read_body(body: bytes) -> Body | None:
    """Return the values of a body; None if it is no JSON object."""
    try:
        return _BODY.decode(body)
    except _ERRORS:
        return None


_log = logging.getLogger(__name__)


class Prompts:
    """Makes prompts of requests."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._engines = fleet, Engines()
        self._turn = 0

    async def of_body(self, model: str, body: Body, num_bytes: int, engines: Collection[str]) -> Prompt:
        """Return the prompt of a request; one of about its length, of which nothing is cached, if it has no tokens."""
        salt = body.value("cache_salt")
        extra = ExtraKeys(salt=salt if isinstance(salt, str) else "")
        tokens: Sequence[int] | None = _ids(body.prompt)
        if tokens is None and not body.messages:
            body = _first(body)
            tokens = _ids(body.prompt)
        tokens = tokens or await self.tokenized(model, body, engines)
        if tokens:
            return Prompt(tokens, extra)
        return Prompt((), keys=(), num_keyed=max(num_bytes // _CHARACTERS_PER_TOKEN, 1))

    async def tokenized(self, model: str, body: Body, engines: Collection[str]) -> Sequence[int] | None:
        """Return the tokens of a text or of messages; None if none of these engines of the model makes them. No other
        engine sees the text: they must be places that the caller may use.
        """
        names = _CHAT if body.messages else _TEXT
        if bytes(getattr(body, names[0]))[:1] not in (b'"', b"["):
            return None
        given = {name: getattr(body, name) for name in names if getattr(body, name)}
        question = _encode({"model": model, **given})
        endpoints = [
            one.place.settings.endpoint
            for name, one in self._fleet.of_model(model).items()
            if name in engines and one.source.is_connected and one.place.settings.endpoint
        ]
        self._turn += 1
        for endpoint in _rotated(endpoints, self._turn)[:MOST_ENGINES]:
            try:
                most_bytes = min(ANSWER_BYTES + ANSWER_BYTES_PER_BYTE * len(question), MAX_ANSWER_BYTES)
                answer = await self._engines.post(endpoint, "/tokenize", question, most_bytes, TIMEOUT_S)
                return _ANSWER.decode(answer).tokens
            except (OSError, *_ERRORS) as error:
                _log.warning("%s does not tokenize: %s", endpoint, error)
        return None


def _rotated(items: list[_T], turns: int) -> list[_T]:
    """Return the items in order, beginning with another one at each turn."""
    first = turns % max(len(items), 1)
    return [*items[first:], *items[:first]]


def _first(body: Body) -> Body:
    """Return a body of the first of several prompts, which decides."""
    raw = bytes(body.prompt)
    if raw[:1] == b"[" and raw.count(b",") < MAX_TOKENS:
        with suppress(*_ERRORS):
            items = _ITEMS.decode(raw)
            if items and bytes(items[0])[:1] in (b'"', b"["):
                return msgspec.structs.replace(body, prompt=items[0])
    return body


def _ids(prompt: msgspec.Raw) -> list[int] | None:
    raw = bytes(prompt)
    if raw[:1] != b"[" or raw.count(b",") >= MAX_TOKENS:
        return None
    try:
        return _IDS.decode(raw)
    except _ERRORS:
        return None
