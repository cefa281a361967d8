"""What unary calls say: the operations of a step in readable form, for engines that start small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvplane.base.session import NEW_EPOCH
from kvplane.base.step import NO_EXTRA_KEYS, ExtraKeys, Watermark


@dataclass(frozen=True, slots=True)
class Content:
    """What a request consists of: token ids, which the service hashes, or block hashes and a count of tokens.

    Attributes:
        token_ids: what the service hashes; or
        num_tokens, hashes: their count and the digests of the full hash blocks, in order.
        extra_keys: what else makes the content; used with token ids.
        domain: requests share pages only within a domain.
        skip_reading: look nothing up, still register.
        max_tokens: most tokens the request may reach; 0 = max_model_len.
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
    """Tokens that joined a request: ids, or their count and the digests of blocks that became complete."""

    token_ids: Sequence[int] = ()
    num_tokens: int = 0
    hashes: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class At:
    """Where a mutation belongs.

    Attributes:
        epoch: engine life; NEW_EPOCH = the current one, whichever it is.
        op_id: names the call, so that a repeat gets the first answer; "" = the client draws one.
        more: more calls belong to the same step as this one.
        executed_through: all steps up to this one have finished on all ranks; None = all before this call's.
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
        content: of a request that is new to the replica.
        computed_tokens: sets computed tokens first (after rejected drafts); None = as they are.
        appended: tokens that joined before this call.
        max_new_tokens: most tokens to grant; None = all that are not computed.
        extra_tokens: drafts and placeholders beyond the known tokens; negative to compute fewer than known.
        lookahead_tokens: more slots for drafts to come.
        external_tokens: first call, tokens behind the hit that come from outside.
        in_flight_tokens: running, tokens in flight; None = as the service counts.
        delay_caching: allocate now, register keys by a later commit.
        unaligned: the chunk ends anywhere, also where no recurrent state can be cached.
        full_fit: first call, the whole sequence must fit.
        encoder_tokens: first call, for cross attention.
        reserved_blocks: first call, blocks to leave free for others.
        watermark: first call, whether the watermark is left free.
        expected_hit_tokens: first call, refuse with STALE_HIT when the hit is another; None = any.
        victims: running, requests to preempt when blocks are short, first to go first.
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
    """What became true of a request. Without a request_id the call only ends the step.

    Attributes:
        request_id: of the request.
        computed_tokens: sets computed tokens first; None = as they are.
        appended: tokens that joined.
        commit_tokens: registers full blocks up to so many tokens; None = registers nothing.
    """

    request_id: str = ""
    computed_tokens: int | None = None
    appended: Appended | None = None
    commit_tokens: int | None = None


class Ending(Enum):
    """How a request leaves. The value is the end of the name on the wire."""

    FREE = "free"  # its blocks return to the pool
    HELD = "held"  # it ended, its blocks stay until RELEASED
    PREEMPTED = "preempted"  # its blocks return, its tokens stay: it can be allocated again
    RELEASED = "released"  # the blocks of a held request return
