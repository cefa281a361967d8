"""Translates field names in errors: the core names a column of the step, the client sent a field of a unary call."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from kvplane.base.errors import KvplaneError

# Columns of the step -> fields of the call.
_FIELDS = {
    "news.num_tokens": "content.num_tokens",
    "news.num_hashes": "content.hashes",
    "news.hashes": "content.hashes",
    "news.max_tokens": "content.max_tokens",
    "news.slot": "request_id",
    "facts.slot": "request_id",
    "facts.computed": "computed_tokens",
    "facts.appended": "appended.num_tokens",
    "facts.num_hashes": "appended.hashes",
    "facts.hashes": "appended.hashes",
    "facts.tokens": "appended.token_ids",
    "facts.commit": "commit_tokens",
    "facts.end": "end",
    "facts.fence": "fence_seq",
    "cache.evicted": "block_ids",
    "cache.released": "end",
    "cache.reset": "header",
    "prefetch": "header.replica",
    "prefetch.hashes": "content.hashes",
    "prefetch.num_hashes": "content.hashes",
    "prefetch.within_ns": "within_ms",
    "retain": "header.replica",
    "retain.hashes": "content.hashes",
    "retain.num_hashes": "content",
    "retain.priority": "priority",
    "retain.until_ns": "ttl_ms",
    "extra": "extra_tokens",
    "cap": "max_new_tokens",
    "lookahead": "lookahead_tokens",
    "in_flight": "in_flight_tokens",
    "external": "external_tokens",
    "expected_hit": "expected_hit_tokens",
    "encoder_tokens": "encoder_tokens",
    "reserved": "reserved_blocks",
    "watermark": "watermark",
    "executed_through": "header.executed_through",
    "parts": "header.more",
}
_COLUMN = re.compile(r"(?:parts\[\d+\]\.)?(?:run\.|admit\.)?([a-z_.]+)(\[\d+\])?")


@contextmanager
def unary_fields() -> Iterator[None]:
    """Rename the field of errors that are raised in the `with` block, from a column of the step to a field of
    the call.
    """
    try:
        yield
    except KvplaneError as error:
        error.field = unary_field(error.field)
        raise


def unary_field(column: str) -> str:
    """Return the field of the call that fills this column of the step; the column itself if there is none."""
    match = _COLUMN.fullmatch(column)
    name = _FIELDS.get(match[1]) if match else None
    if name is None or match is None:
        return column
    return f"{name}{match[2] or ''}" if name == "block_ids" else name
