"""The arguments of unary calls. Each call does one operation of a step for one request. Unary calls are meant for small
engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvplane.base.session import NEW_EPOCH
from kvplane.base.step import NO_EXTRA_KEYS, ExtraKeys, Watermark


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a request: its token ids, or the number of its tokens and their block hashes.

    Attributes:
        token_ids: the tokens, from which the service computes the hashes.
        num_tokens: without token ids: the number of tokens.
        hashes: without token ids: the digests of the full hash blocks, in order.
        extra_keys: inputs of the hashes other than the tokens; used with token ids.
        domain: requests share pages only within a domain.
        skip_reading: whether to skip the look-up of a cached prefix; the request's blocks are registered in any case.
        max_tokens: maximum length of the request in tokens; 0 = max_model_len.
    """

    token_ids: Sequence[int] = ()
    num_tokens: int = 0
    hashes: Sequence[bytes] = ()
    extra_keys: ExtraKeys = NO_EXTRA_KEYS
    domain: str = ""
    skip_reading: bool = False
    max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Appended:
    """Tokens that are appended to a request: their ids, or their number and the digests of the blocks that
    became full.
    """

    token_ids: Sequence[int] = ()
    num_tokens: int = 0
    hashes: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class At:
    """Which epoch and which step a unary call belongs to, and the id with which the
    service detects a repeated call.

    Attributes:
        epoch: epoch of the engine; NEW_EPOCH = the current epoch.
        op_id: identifies the call, so that a repeated call gets the stored answer; "" = the client chooses one.
        more: whether more calls belong to the same step.
        executed_through: number of a step; it and all earlier steps have finished on all ranks; None = all steps before
            this call's step have finished.
    """

    epoch: int = NEW_EPOCH
    op_id: str = ""
    more: bool = False
    executed_through: int | None = None


HERE = At()


@dataclass(frozen=True, slots=True)
class Allocate:
    """Ask for blocks for the next tokens of a request. The first call looks the request up in the prefix cache.

    Attributes:
        request_id: id of the request, 1 to 128 characters.
        content: content of a request that is new to the replica; None for a known request.
        computed_tokens: new number of computed tokens, set before all else (after rejected drafts); None = unchanged.
        appended: tokens that are appended to the request before blocks are allocated.
        max_new_tokens: most tokens to grant; None = all tokens that are not computed.
        extra_tokens: drafts and placeholders after the known tokens; negative to compute fewer tokens than are known.
        lookahead_tokens: further slots for later drafts.
        external_tokens: first call: number of tokens after the hit that a load, a transfer into pages from outside,
            provides.
        in_flight_tokens: running request: tokens in flight; None = as counted by the service.
        delay_caching: allocate now, and register the keys only with a later commit.
        unaligned: the chunk may end where no recurrent state can be cached.
        full_fit: first call: refuse unless the pool has room for the whole request, not only for this chunk.
        encoder_tokens: first call: tokens of the encoder, for cross attention.
        reserved_blocks: first call: blocks to leave free for other requests.
        watermark: first call: whether to leave free the number of blocks that the replica's watermark states.
        expected_hit_tokens: first call: refuse with STALE_HIT if the hit has another length; None = accept any.
        victims: running request: ids of the requests to preempt if too few blocks are free, in this order.
    """

    request_id: str
    content: Content | None = None
    computed_tokens: int | None = None
    appended: Appended | None = None
    max_new_tokens: int | None = None
    extra_tokens: int = 0
    lookahead_tokens: int = 0
    external_tokens: int = 0
    in_flight_tokens: int | None = None
    delay_caching: bool = False
    unaligned: bool = False
    full_fit: bool = False
    encoder_tokens: int = 0
    reserved_blocks: int = 0
    watermark: Watermark = Watermark.AUTO
    expected_hit_tokens: int | None = None
    victims: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """Report the progress of a request. An empty request_id only ends the step.

    Attributes:
        request_id: id of the request.
        computed_tokens: new number of computed tokens, set first; None = unchanged.
        appended: tokens that are appended to the request.
        commit_tokens: register the full blocks of the first `commit_tokens` tokens; None = register nothing.
    """

    request_id: str = ""
    computed_tokens: int | None = None
    appended: Appended | None = None
    commit_tokens: int | None = None


class Ending(Enum):
    """How a request ends. The value is the last part of the name in the proto enum."""

    FREE = "free"  # its blocks return to the pool
    HELD = "held"  # it ended, its blocks stay until RELEASED
    PREEMPTED = "preempted"  # its blocks return, its tokens stay: it can be allocated again
    RELEASED = "released"  # the blocks of a held request return
