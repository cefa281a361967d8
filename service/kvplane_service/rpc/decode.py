"""Decode the messages of unary calls. The form of a message is checked here; its values are checked by the host and the
core.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvplane import wire
from kvplane.base.errors import InvalidArgument
from kvplane.base.hashing import HashScheme, PackedHashes
from kvplane.base.requests import Ending
from kvplane.base.step import ANY_HIT, NO_EXTRA_KEYS, UNCHANGED, UNLIMITED, RowFlag, Watermark
from kvplane.v1 import allocation_pb2 as pb
from kvplane_service.auth.gate import CALL
from kvplane_service.replicas.step_order import UnaryStep
from kvplane_service.unary.calls import AllocateCall, Appended, CallHeader, CommitCall, Content, FreeCall

_HASHES_AT_ONCE = 4096  # whose bytes objects protobuf makes in one call, during which no other thread runs
_MAX_COLUMN = 2**31 - 1  # largest value of i32 columns, in which -1 means "absent"


def fingerprint(raw: bytes) -> bytes:
    """Return the SHA-256 digest of a message, by which a retried call is recognized."""
    return hashlib.sha256(raw).digest()


def decode_header(header: pb.MutationHeader, raw: bytes) -> CallHeader:
    """Return the header of a call that changes a replica; `raw` is the whole message."""
    through = header.executed_through if header.HasField("executed_through") else None
    at = UnaryStep(header.epoch, header.more, through)
    return CallHeader(at, header.op_id, fingerprint(raw) if header.op_id else b"")


def decode_content(message: pb.RequestContent, scheme: HashScheme) -> Content:
    """Return the content of a new request; its token ids are not hashed yet.

    Raises:
        InvalidArgument: the message contradicts itself; the error names a field inside `content`.
        PermissionDenied: the caller may not use the request's cache domain.
    """
    CALL.get().check_domain(message.domain, "content.domain")
    hashes = _join(message.hashes, scheme, "content.hashes") if message.hashes else b""
    if not (message.token_ids or message.num_tokens):
        raise InvalidArgument(
            "it has neither token_ids nor num_tokens",
            field="content",
            remedy="give token_ids, or num_tokens with the hashes of the full blocks",
        )
    if message.token_ids and (message.hashes or message.num_tokens):
        what = "hashes or num_tokens is given in addition to token_ids"
        raise InvalidArgument(what, field="content.hashes", remedy="give token_ids alone")
    has_keys = message.token_ids and message.HasField("extra_keys")
    return Content(
        num_tokens=message.num_tokens or len(message.token_ids),
        hashes=hashes,
        num_hashes=len(message.hashes),
        extra_keys=wire.decode_extra_keys(message.extra_keys) if has_keys else NO_EXTRA_KEYS,
        domain=message.domain,
        skip_reading=message.skip_reading,
        max_tokens=message.max_tokens,
        token_ids=message.token_ids or (),
    )


def decode_appended(message: pb.AppendedTokens, scheme: HashScheme) -> Appended:
    """Return the tokens appended to a request; token ids are not hashed yet. Raises InvalidArgument that names a field
    inside `appended`.
    """
    if message.token_ids and (message.hashes or message.num_tokens):
        raise InvalidArgument(
            "token_ids is given in addition to hashes or num_tokens",
            field="appended.token_ids",
            remedy="give what the request began with: either token_ids, or num_tokens and hashes",
        )
    hashes = _join(message.hashes, scheme, "appended.hashes")
    num_tokens = message.num_tokens or len(message.token_ids)
    return Appended(num_tokens, hashes, len(message.hashes), token_ids=message.token_ids or ())


def decode_allocate(message: pb.AllocateSlotsRequest, scheme: HashScheme) -> AllocateCall:
    """Return the decoded AllocateSlots call.

    Raises:
        InvalidArgument: a field is invalid; the error names it.
        PermissionDenied: the caller may not use the request's cache domain.
    """
    has_content = message.HasField("content")
    if has_content and message.HasField("appended"):
        what = "it is set in addition to content, which creates a new request"
        raise InvalidArgument(what, field="appended", remedy="put all tokens into content")
    return AllocateCall(
        request_id=message.request_id,
        content=decode_content(message.content, scheme) if has_content else None,
        computed=_optional(message, "computed_tokens", UNCHANGED),
        appended=decode_appended(message.appended, scheme),
        cap=message.max_new_tokens if message.HasField("max_new_tokens") else UNLIMITED,
        extra=message.extra_tokens,
        lookahead=message.lookahead_tokens,
        flags=_flags(message),
        external=message.external_tokens,
        encoder_tokens=message.encoder_tokens,
        reserved=message.reserved_blocks,
        watermark=_watermark(message.watermark),
        expected_hit=_optional(message, "expected_hit_tokens", ANY_HIT),
        in_flight=_optional(message, "in_flight_tokens", -1),
        victims=tuple(message.victims),
    )


def decode_commit(message: pb.CommitBlocksRequest, scheme: HashScheme) -> CommitCall:
    """Return the decoded CommitBlocks call. Raises InvalidArgument that names the invalid field."""
    return CommitCall(
        request_id=message.request_id,
        computed=_optional(message, "computed_tokens", UNCHANGED),
        appended=decode_appended(message.appended, scheme),
        commit=_optional(message, "commit_tokens", UNCHANGED),
    )


def decode_free(message: pb.FreeRequest) -> FreeCall:
    """Return the decoded Free call. Raises InvalidArgument for an unknown EndKind."""
    return FreeCall(message.request_id, _end(message.end), message.fence_seq)


def _end(value: int) -> Ending:
    if value == pb.END_KIND_UNSPECIFIED:
        return Ending.FREE
    known = pb.EndKind.DESCRIPTOR.values_by_number.get(value)
    if known is None:
        remedy = "use FREE, HELD, PREEMPTED or RELEASED"
        raise InvalidArgument(f"{value} is not a value of EndKind", field="end", remedy=remedy)
    return Ending(known.name.removeprefix("END_KIND_").lower())


def _flags(message: pb.AllocateSlotsRequest) -> RowFlag:
    flags = RowFlag.NONE
    if message.unaligned:
        flags |= RowFlag.UNALIGNED
    if message.delay_caching:
        flags |= RowFlag.DELAY_CACHING
    if message.full_fit:
        flags |= RowFlag.FULL_FIT
    return flags


def _watermark(value: int) -> Watermark:
    try:
        return Watermark(value)
    except ValueError:
        raise InvalidArgument(
            f"{value} is not a value of WatermarkUse", field="watermark", remedy="use UNSPECIFIED, ALWAYS or NEVER"
        ) from None


def _optional(message: pb.AllocateSlotsRequest | pb.CommitBlocksRequest, name: str, default: int) -> int:
    if not message.HasField(name):
        return default
    value: int = getattr(message, name)
    if value > _MAX_COLUMN:
        raise InvalidArgument(f"it is {value}", field=name, remedy=f"give at most {_MAX_COLUMN} tokens")
    return value


def _join(hashes: Sequence[bytes], scheme: HashScheme, field: str) -> bytes:
    size, joined = scheme.digest.size, []
    if isinstance(hashes, PackedHashes) and hashes.size == size:
        return hashes.joined
    for first in range(0, len(hashes), _HASHES_AT_ONCE):
        digests = hashes[first : first + _HASHES_AT_ONCE]
        if {*map(len, digests)} != {size}:
            at = next(at for at, digest in enumerate(digests) if len(digest) != size)
            raise InvalidArgument(
                f"the hash has {len(digests[at])} bytes",
                field=f"{field}[{first + at}]",
                remedy=f"send hashes of {size} bytes, the digest size of the replica's hash algorithm",
            )
        joined.append(b"".join(digests))
    return b"".join(joined)
