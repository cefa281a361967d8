"""Determine why the hit of a prompt or a request is not longer.

    LookupExplanation (core)   the hit of each group, the group that limits the hit, and the missing block
    History (log)              what happened to the content of that block

An answer is exact, or states that the log does not reach back far enough. It contains positions, requests, domains and
adapters, never a token or a salt. Positions are exact to one hash block, because the log has hashes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvplane.base.groups import GroupKind, ReplicaSpec
from kvplane.base.step import NO_EXTRA_KEYS, EventKind, ExtraKeys, RemoveReason
from kvplane_service.core.explain_lookup import LookupExplanation, MissingPrefix
from kvplane_service.explain.history import NOW, History, KeyName, Known, Spot

MAX_ALTERNATIVES = 32  # other extra keys that a prompt is hashed with


class Cause(StrEnum):
    """Why a hit is not longer."""

    NOTHING = "nothing"  # the hit has its maximum length: the last token is always computed
    CACHING_OFF = "caching_off"
    NOT_READ = "not_read"  # the request disabled the look-up
    BELOW_ONE_BLOCK = "below_one_block"
    EVICTED = "evicted"
    DROPPED = "dropped"
    WITHDRAWN = "withdrawn"
    UNVERIFIED = "unverified"
    WITHOUT_STAMPS = "without_stamps"  # an engine life began without stamps, and so kept no key
    RESET = "reset"
    TENTATIVE = "tentative"
    WINDOW_NOT_RESIDENT = "window_not_resident"
    NO_STATE_AT_BOUNDARY = "no_state_at_boundary"
    OTHER_DOMAIN = "other_domain"
    OTHER_SALT = "other_salt"
    OTHER_LORA = "other_lora"
    OTHER_MULTIMODAL = "other_multimodal"
    DIFFERS = "differs"
    NEVER_CACHED = "never_cached"
    LAST_BLOCK_DROPPED = "last_block_dropped"
    NOT_RECORDED = "not_recorded"


_OF_REMOVAL = {
    RemoveReason.EVICTED: Cause.EVICTED,
    RemoveReason.DROPPED: Cause.DROPPED,
    RemoveReason.WITHDRAWN: Cause.WITHDRAWN,
    RemoveReason.PROMOTED: Cause.DROPPED,
    RemoveReason.UNVERIFIED: Cause.UNVERIFIED,
    RemoveReason.MOVED: Cause.DROPPED,
}


@dataclass(frozen=True, slots=True)
class Why:
    """A cause with its details.

    Attributes:
        start, end: the missing tokens; for DIFFERS, the range that has the first different token.
        by: the request that evicted the block, the other domain, or the other adapter.
        epoch, seq, at_ns: step and time of the event; 0 when the cause is not an event.
    """

    cause: Cause
    start: int = 0
    end: int = 0
    by: str = ""
    epoch: int = 0
    seq: int = 0
    at_ns: int = 0


@dataclass(frozen=True, slots=True)
class Question:
    """A look-up to explain.

    Attributes:
        digests, domain, num_tokens: of the look-up.
        at: the first event of the log after the look-up.
        reads: False when the request disabled the look-up.
        alternatives: the same tokens hashed with other extra keys; empty when the tokens are unknown.
        own_keys: extra keys of the look-up.
    """

    digests: Sequence[bytes]
    domain: str
    num_tokens: int
    at: Spot = NOW
    reads: bool = True
    alternatives: Sequence[tuple[ExtraKeys, Sequence[bytes]]] = ()
    own_keys: ExtraKeys = NO_EXTRA_KEYS


class Explainer:
    """Finds causes in a history.

    Args:
        spec: of the replica.
        history: of its log.
        is_complete: the log reaches back to the registration, and the replica reports events.
    """

    def __init__(self, spec: ReplicaSpec, history: History, is_complete: bool) -> None:
        self._spec = spec
        self._history = history
        self._is_complete = is_complete and spec.events

    def why(self, question: Question, account: LookupExplanation) -> Why:
        """Why the explained look-up found no longer hit."""
        if not self._spec.enable_caching:
            return Why(Cause.CACHING_OFF)
        if not question.reads:
            return Why(Cause.NOT_READ)
        if question.num_tokens - 1 < self._spec.hit_alignment:
            return Why(Cause.BELOW_ONE_BLOCK)
        if not account.cut_by:
            return Why(Cause.NOTHING)
        if account.missing is None:
            return Why(Cause.LAST_BLOCK_DROPPED)
        return self._of_block(question, account.missing)

    def _of_block(self, question: Question, missing: MissingPrefix) -> Why:
        for look in (self._removed, self._elsewhere, self._differs):
            found = look(question, missing)
            if found is not None:
                return found
        cause = Cause.NEVER_CACHED if self._is_complete else Cause.NOT_RECORDED
        return Why(cause, missing.start, missing.end)

    def _removed(self, question: Question, missing: MissingPrefix) -> Why | None:
        """The key was stored and removed."""
        key = KeyName(question.domain, missing.group, question.digests[missing.num_hashes - 1])
        change = self._history.last_change(key, question.at)
        if change is None or change.kind is EventKind.STORED:
            return None
        # A key removed before such a life would have been lost in any case when it began.
        change = self._history.cleared_by_life(change.at, question.at) or change
        cause = Cause.RESET if change.reason is RemoveReason.NONE else _OF_REMOVAL[change.reason]
        cause = Cause.WITHOUT_STAMPS if change.without_stamps else cause
        return Why(cause, missing.start, missing.end, change.by, change.epoch, change.seq, change.at_ns)

    def _elsewhere(self, question: Question, missing: MissingPrefix) -> Why | None:
        """The content was computed, but for other groups, domains, salts or adapters."""
        digest, span = question.digests[missing.num_hashes - 1], (missing.start, missing.end)
        if self._was_computed(question.domain, digest, question):
            kind = self._spec.groups[missing.group].kind
            if kind is GroupKind.MAMBA:
                return Why(Cause.NO_STATE_AT_BOUNDARY, *span)
            if kind in (GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA, GroupKind.CHUNKED_LOCAL):
                return Why(Cause.WINDOW_NOT_RESIDENT, *span)
            return None
        for domain in sorted({request.domain for request in self._history.admitted(question.at)} - {question.domain}):
            if self._was_computed(domain, digest, question):
                return Why(Cause.OTHER_DOMAIN, *span, by=domain)
        for keys, digests in question.alternatives:
            if self._was_computed(question.domain, digests[missing.num_hashes - 1], question):
                cause = _difference(question.own_keys, keys)
                name = keys.lora[0] if keys.lora and cause is Cause.OTHER_LORA else ""
                return Why(cause, *span, by=name)
        return None

    def _was_computed(self, domain: str, digest: bytes, question: Question) -> bool:
        keys = (KeyName(domain, group, digest) for group in range(len(self._spec.groups)))
        if any(self._history.is_stored(key, question.at) for key in keys):
            return True
        size = self._spec.hash_block_size
        return any(
            digest in request.digests[: request.computed_at(question.at) // size]
            for request in self._requests(domain, question)
        )

    def _requests(self, domain: str, question: Question) -> Iterator[Known]:
        """Requests of a domain that had blocks by then."""
        return (request for request in self._history.admitted(question.at) if request.domain == domain)

    def _differs(self, question: Question, missing: MissingPrefix) -> Why | None:
        """Another prompt has a common prefix and differs after it; the longest such prefix counts.

        Only prompts with the same extra keys are compared: with other keys, hashes differ although tokens are equal.
        """
        size, own = self._spec.hash_block_size, question.own_keys
        alike = [one.digests for one in self._requests(question.domain, question) if one.extra_keys == own]
        shared = max((_common(chain, question.digests) for chain in alike), default=0)
        if shared >= missing.num_hashes:
            return None
        if any(len(chain) > shared and _common(chain, question.digests) == shared for chain in alike):
            return Why(Cause.DIFFERS, shared * size, (shared + 1) * size)
        return None


def other_keys(history: History, own: ExtraKeys) -> list[ExtraKeys]:
    """Extra keys of other requests that had blocks, the latest first, at most MAX_ALTERNATIVES."""
    keys = dict.fromkeys(request.extra_keys for request in reversed(list(history.admitted(NOW))))
    keys.pop(own, None)
    return list(keys)[:MAX_ALTERNATIVES]


def _difference(own: ExtraKeys, other: ExtraKeys) -> Cause:
    """The first extra key in which two requests with equal tokens differ."""
    if own.lora != other.lora:
        return Cause.OTHER_LORA
    return Cause.OTHER_SALT if own.salt != other.salt else Cause.OTHER_MULTIMODAL


def _common(chain: Sequence[bytes], digests: Sequence[bytes]) -> int:
    """Number of equal leading hashes. Hashes are chained, so equality at an index implies equality before it."""
    low, high = 0, min(len(chain), len(digests))
    while low < high:
        middle = (low + high + 1) // 2
        if chain[middle - 1] == digests[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def with_hit_checked(why: Why, account: LookupExplanation, hit: int) -> Why:
    """The cause, or NOT_RECORDED when the account does not reproduce the answered hit, because the log is
    incomplete.
    """
    return why if account.hit.num_tokens == hit else Why(Cause.NOT_RECORDED, start=hit)
