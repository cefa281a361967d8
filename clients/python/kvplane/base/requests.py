"""The arguments of unary calls: the operations of a step, one request at a time, for small engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvplane.base.session import NEW_EPOCH
from kvplane.base.step import NO_EXTRA_KEYS, ExtraKeys, Watermark


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a request: token ids, which the service hashes, or block hashes and a number of tokens.

    Attributes:
        token_ids: the tokens, which the service hashes; or
        num_tokens, hashes: the number of tokens and the digests of the full hash blocks, in order.
        extra_keys: further inputs of the hashes; used with token ids.
        domain: requests share pages only within a domain.
        skip_reading: do not look the prefix up; register it anyway.
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
    """Tokens appended to a request: their ids, or their number and the digests of blocks that they completed."""

    token_ids: Sequence[int] = ()
    num_tokens: int = 0
    hashes: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class At:
    """The header of a mutation: engine life, identity, and step.

    Attributes:
        epoch: engine life; NEW_EPOCH = the current one.
        op_id: identifies the call, so that a repeat gets the stored answer; "" = the client draws one.
        more: whether more calls belong to the same step.
        executed_through: all steps up to this one have finished on all ranks; None = all before this call's step.
    """

    epoch: int = NEW_EPOCH
    op_id: str = ""
    more: bool = False
    executed_through: int | None = None


HERE = At()


@dataclass(frozen=True, slots=True)
class Allocate:
    """Asks for blocks for a request's next tokens. On the first call the request adopts its prefix hit.

    Attributes:
        request_id: 1 to 128 characters.
        content: content of a request that is new to the replica.
        computed_tokens: new number of computed tokens, set first (after rejected drafts); None = unchanged.
        appended: tokens appended before this call.
        max_new_tokens: most tokens to grant; None = all tokens that are not computed.
        extra_tokens: drafts and placeholders beyond the known tokens; negative to compute fewer than known.
        lookahead_tokens: further slots for later drafts.
        external_tokens: first call: tokens after the hit that an external load provides.
        in_flight_tokens: running request: tokens in flight; None = as counted by the service.
        delay_caching: allocate now, register keys by a later commit.
        unaligned: the chunk may end where no recurrent state can be cached.
        full_fit: first call: the whole sequence must fit.
        encoder_tokens: first call: tokens of the encoder, for cross attention.
        reserved_blocks: first call: blocks to leave free for other requests.
        watermark: first call: whether to leave the watermark free.
        expected_hit_tokens: first call: refuse with STALE_HIT when the hit differs; None = any.
        victims: running request: requests to preempt when blocks are short, in this order.
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
    """Progress of a request: computed and appended tokens, blocks to register. An empty request_id only ends the step.

    Attributes:
        request_id: of the request.
        computed_tokens: new number of computed tokens, set first; None = unchanged.
        appended: appended tokens.
        commit_tokens: register full blocks up to this number of tokens; None = register nothing.
    """

    request_id: str = ""
    computed_tokens: int | None = None
    appended: Appended | None = None
    commit_tokens: int | None = None


class Ending(Enum):
    """How a request ends. The value is the suffix of the enum name on the wire."""

    FREE = "free"  # its blocks return to the pool
    HELD = "held"  # it ended, its blocks stay until RELEASED
    PREEMPTED = "preempted"  # its blocks return, its tokens stay: it can be allocated again
    RELEASED = "released"  # the blocks of a held request return
