"""Unary requests -> our types. Checks shape; what the values mean is the host's and the core's to judge."""

from __future__ import annotations

from dataclasses import replace

from kvplane import wire
from kvplane.base.errors import InvalidArgument
from kvplane.base.hashing import HashScheme
from kvplane.base.step import ANY_HIT, UNCHANGED, UNLIMITED, News, RowFlag, Watermark
from kvplane.v1 import allocation_pb2 as pb
from kvplane_service.auth.gate import CALL
from kvplane_service.replicas.host import ReplicaHost, UnaryStep
from kvplane_service.unary.hashing import ContentHasher
from kvplane_service.unary.requests import KnownRequest
from kvplane_service.unary.service import AllocateCall, Appended, CommitCall, Content, EndKind

_MAX_COLUMN = 2**31 - 1  # of i32 columns, which hold -1 for "absent"


def decode_header(header: pb.MutationHeader) -> UnaryStep:
    """Where a mutation belongs."""
    through = header.executed_through if header.HasField("executed_through") else None
    return UnaryStep(header.epoch, header.more, through)


async def decode_content(message: pb.RequestContent, host: ReplicaHost, hasher: ContentHasher) -> Content:
    """A new request's content, hashed.

    Raises:
        InvalidArgument: naming a field below `content`.
        PermissionDenied: the domain is not the caller's to use.
    """
    CALL.get().check_domain(message.domain, "content.domain")
    scheme = host.scheme
    content = Content(
        num_tokens=message.num_tokens,
        hashes=_join(message.hashes, scheme, "content.hashes"),
        num_hashes=len(message.hashes),
        domain=message.domain,
        skip_reading=message.skip_reading,
        max_tokens=message.max_tokens,
    )
    if not message.token_ids:
        if not message.num_tokens:
            raise InvalidArgument(
                "neither tokens nor hashes are given",
                field="content",
                remedy="give token_ids, or num_tokens with the hashes of the full blocks",
            )
        return content
    if message.hashes or message.num_tokens:
        raise InvalidArgument("both tokens and hashes are given", field="content.hashes", remedy="give token_ids alone")
    _check_length(len(message.token_ids), host)
    keys = wire.decode_extra_keys(message.extra_keys)
    hashed = await hasher.hash(scheme, message.token_ids, keys, field="content.token_ids")
    return replace(
        content,
        num_tokens=len(message.token_ids),
        hashes=hashed.hashes,
        num_hashes=len(hashed.hashes) // scheme.digest.size,
        tail=hashed.tail,
        extra_keys=keys,
    )


async def decode_appended(
    message: pb.AppendedTokens, request: KnownRequest, scheme: HashScheme, hasher: ContentHasher
) -> Appended:
    """Tokens that joined a known request, hashed. Raises InvalidArgument naming a field below `appended`."""
    by_service = request.tail is not None
    if message.token_ids:
        if message.hashes or message.num_tokens or not by_service:
            raise InvalidArgument(
                "both tokens and hashes are given" if by_service else "this request came with hashes",
                field="appended.token_ids",
                remedy="go on as the request began: with tokens, or with num_tokens and hashes",
            )
        hashed = await hasher.hash(scheme, message.token_ids, request.extra_keys, request.tail, "appended.token_ids")
        num_hashes = len(hashed.hashes) // scheme.digest.size
        return Appended(len(message.token_ids), hashed.hashes, num_hashes, request.tail, hashed.tail)
    if by_service and (message.num_tokens or message.hashes):
        raise InvalidArgument("this request came with tokens", field="appended.num_tokens", remedy="give token_ids")
    hashes = _join(message.hashes, scheme, "appended.hashes")
    return Appended(message.num_tokens, hashes, len(message.hashes))


def _check_length(num_tokens: int, host: ReplicaHost) -> None:
    """Before the work of hashing: nothing longer than a request can be."""
    limit = host.replica.spec.max_model_len
    if num_tokens > limit:
        raise InvalidArgument(
            f"{num_tokens} tokens", field="content.token_ids", remedy=f"max_model_len of the replica is {limit}"
        )


def as_probe(content: Content) -> News:
    """Content as a row of its own, for look-ups."""
    return content.as_news(0, "")


def decode_allocate(message: pb.AllocateSlotsRequest, content: Content | None, appended: Appended) -> AllocateCall:
    """An AllocateSlots call with its tokens hashed."""
    return AllocateCall(
        request_id=message.request_id,
        content=content,
        computed=_optional(message, "computed_tokens", UNCHANGED),
        appended=appended,
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


def decode_commit(message: pb.CommitBlocksRequest, appended: Appended) -> CommitCall:
    """A CommitBlocks call with its tokens hashed."""
    return CommitCall(
        request_id=message.request_id,
        computed=_optional(message, "computed_tokens", UNCHANGED),
        appended=appended,
        commit=_optional(message, "commit_tokens", UNCHANGED),
    )


def decode_end(value: int) -> EndKind:
    """How a request leaves."""
    if value == pb.END_KIND_UNSPECIFIED:
        return EndKind.FREE
    known = pb.EndKind.DESCRIPTOR.values_by_number.get(value)
    if known is None:
        raise InvalidArgument(f"{value} is no EndKind", field="end", remedy="use a value of EndKind")
    return EndKind(known.name.removeprefix("END_KIND_"))


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
            f"{value} is no WatermarkUse", field="watermark", remedy="use a value of WatermarkUse"
        ) from None


def _optional(message: pb.AllocateSlotsRequest | pb.CommitBlocksRequest, name: str, default: int) -> int:
    if not message.HasField(name):
        return default
    value: int = getattr(message, name)
    if value > _MAX_COLUMN:
        raise InvalidArgument(f"{value} tokens", field=name, remedy=f"give at most {_MAX_COLUMN}")
    return value


def _join(hashes: object, scheme: HashScheme, field: str) -> bytes:
    digests = list(hashes)  # type: ignore[call-overload]
    for at, digest in enumerate(digests):
        if len(digest) != scheme.digest.size:
            raise InvalidArgument(
                f"{len(digest)} bytes",
                field=f"{field}[{at}]",
                remedy=f"a hash has {scheme.digest.size} bytes",
            )
    return b"".join(digests)
