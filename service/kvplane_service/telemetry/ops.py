"""Pack the operations of a step into one attribute of its span: a `kvplane.v1.Decision`, compressed with zlib, in
base64.

It has the requested and the granted amounts, without hashes, tokens, extra keys, tables, orders and events. `kvplane
decode` converts it back into readable rows.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from dataclasses import replace

from google.protobuf.message import DecodeError

from kvplane import wire
from kvplane.base.errors import InvalidArgument
from kvplane.base.step import Blocks, Orders, Part, PartResult, Step, StepResult
from kvplane.v1.admin_pb2 import Decision as Message
from kvplane_service.decisions.log import Decision
from kvplane_service.decisions.sent import result_with, step_with

MAX_PACKED_CHARS = 32 << 10
_MAX_UNPACKED_BYTES = 16 << 20
_LEVEL = 1  # compression level: the fastest, because an engine may be waiting for the step


def pack(decision: Decision) -> str:
    """Return the attribute for a decision, or "" if it would be longer than MAX_PACKED_CHARS."""
    step, result = decision.step, decision.result
    message = Message(
        step=wire.encode_step(step_with(step, [_asked(part) for part in step.parts])),
        result=wire.encode_result(result_with(result, [_decided(part) for part in result.parts])),
    )
    text = base64.b64encode(zlib.compress(message.SerializeToString(), _LEVEL)).decode()
    return text if len(text) <= MAX_PACKED_CHARS else ""


def unpack(text: str) -> tuple[Step, StepResult]:
    """Return the step and the result that `pack` packed. Raises InvalidArgument for any other text."""
    try:
        inflater = zlib.decompressobj()
        raw = inflater.decompress(base64.b64decode(text, validate=True), _MAX_UNPACKED_BYTES)
        message = Message.FromString(raw)
    except (binascii.Error, zlib.error, DecodeError, ValueError) as error:
        raise InvalidArgument(
            f"the text is not a packed step: {error}", remedy="pass the unchanged attribute kvcache.ops of a span"
        ) from None
    return wire.decode_step(message.step, None), wire.decode_result(message.result)


def _asked(part: Part) -> Part:
    facts, news = part.facts, part.news
    if facts.hashes:
        facts = replace(facts, num_hashes=[], hashes=b"")
    if news.slot:
        news = replace(news, num_hashes=[], hashes=b"", extra_keys=[], traceparent=[])
    return replace(part, facts=facts, news=news)


def _decided(part: PartResult) -> PartResult:
    return replace(part, tables=Blocks(), orders=Orders(), events=[], num_hashes=[], last_hash=[])
