"""Determine why the hit of a prompt or a request is not longer.

    LookupExplanation (core)   the hit of each group, the group that limits the hit, and the missing block
    History (log)              when the missing block was stored and removed

The cause is exact, or NOT_RECORDED if the log does not reach back far enough. An answer contains positions, requests,
domains and adapters, never a token or a salt. Positions are exact to one hash block, because the log has block hashes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvplane.base.groups import GroupKind, ReplicaSpec
from kvplane.base.step import NO_EXTRA_KEYS, EventKind, ExtraKeys, RemoveReason
from kvplane.base.values import WhyDeclined
from kvplane_core.face.hit_rules import LookupExplanation, MissingPrefix
from kvplane_service.explain.history import NOW, Change, History, KeyName, Known, PassedOver, Spot

MAX_ALTERNATIVES = 32  # most extra keys of other requests with which a prompt is hashed to compare it


class Cause(StrEnum):
    """The reason for which a hit is not longer."""

    NOTHING = "nothing"  # the hit has its maximum length: the last token is always computed
    CACHING_OFF = "caching_off"
    NOT_READ = "not_read"  # the request disabled the look-up
    BELOW_ONE_BLOCK = "below_one_block"
    EVICTED = "evicted"
    LEFT_WINDOW = "left_window"  # evicted first, by the policy: it had left a request's window or was superseded
    DROPPED = "dropped"
    WITHDRAWN = "withdrawn"
    UNVERIFIED = "unverified"
    WITHOUT_STAMPS = "without_stamps"  # an engine life began without a stamp table, so that no key could be verified
    RESET = "reset"
    TENTATIVE = "tentative"
    WINDOW_NOT_RESIDENT = "window_not_resident"
    NO_STATE_AT_BOUNDARY = "no_state_at_boundary"
    UNPROVEN_KEYS = "unproven_keys"  # its extra keys do not prove its content, so that it shares no block
    OTHER_DOMAIN = "other_domain"
    OTHER_SALT = "other_salt"
    OTHER_LORA = "other_lora"
    OTHER_MULTIMODAL = "other_multimodal"
    DIFFERS = "differs"
    NEVER_CACHED = "never_cached"
    LAST_BLOCK_DROPPED = "last_block_dropped"
    NOT_RECORDED = "not_recorded"
    IN_TIER = "in_tier"  # the device lacks it, a tier has it: an admission with LOAD loads it
    TOO_SLOW = "too_slow"  # a tier has it; to load it would have taken longer than to compute it
    NO_JOB = "no_job"  # a tier has it; too many jobs were in flight
    WAITS = "waits"  # a tier has it; the admission waits for loads in flight
    GIVEN_UP = "given_up"  # a tier has it; loads that no request waits for any more leave no room
    MISMATCH = "mismatch"  # a canary found other content in the block than its key names


_NOT_LOADED = {
    WhyDeclined.TOO_SLOW: Cause.TOO_SLOW,
    WhyDeclined.NO_JOB: Cause.NO_JOB,
    WhyDeclined.WAITS: Cause.WAITS,
    WhyDeclined.GIVEN_UP: Cause.GIVEN_UP,
}
_OF_REMOVAL = {
    RemoveReason.EVICTED: Cause.EVICTED,
    RemoveReason.LEFT_WINDOW: Cause.LEFT_WINDOW,
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
        start, end: range of the missing tokens; for DIFFERS, the range that contains the first different token.
        by: name of the request that evicted the block, or name of the other cache domain (requests share blocks only
            inside one) or adapter for which the content was cached, or kind of the tier that has it; "" if none.
        epoch, seq, at_ns: engine life (number of the epoch), step and time (in nanoseconds) at which the key was
            removed; 0 if the cause is not a removal.
        load_ns, compute_ns: for TOO_SLOW, the times that were compared.
        peers: for IN_TIER, those that have the missing block.
    """

    cause: Cause
    start: int = 0
    end: int = 0
    by: str = ""
    epoch: int = 0
    seq: int = 0
    at_ns: int = 0
    load_ns: int = 0
    compute_ns: int = 0
    peers: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """A look-up whose result is to be explained.

    Attributes:
        digests: block hashes of the prompt.
        domain: cache domain of the look-up; look-ups hit only blocks of their own domain.
        num_tokens: length of the prompt.
        at: position in the log of the first event after the look-up.
        reads: False if the request asked not to look up cached blocks.
        alternatives: the same tokens hashed with the extra keys of other requests; empty if the tokens are unknown.
        own_keys: extra keys (adapter, salt, multimodal items) of the prompt.
        tier: number of the tier that has what is missing on the device; None if none has.
        peers: those that have it.
    """

    digests: Sequence[bytes]
    domain: str
    num_tokens: int
    at: Spot = NOW
    reads: bool = True
    alternatives: Sequence[tuple[ExtraKeys, Sequence[bytes]]] = ()
    own_keys: ExtraKeys = NO_EXTRA_KEYS
    tier: int | None = None
    peers: Sequence[str] = ()


class Explainer:
    """Finds the causes of short hits in the history of a replica.

    Args:
        spec: specification of the replica.
        history: contents of its decision log.
        is_complete: the log reaches back to the registration of the replica. A cause is called NEVER_CACHED only if
            it does and the replica reports events.
    """

    def __init__(self, spec: ReplicaSpec, history: History, is_complete: bool) -> None:
        self._spec = spec
        self._history = history
        self._is_complete = is_complete and spec.events

    def why(self, question: Question, account: LookupExplanation) -> Why:
        """Return why the look-up did not hit more tokens. `account` is the core's explanation of the same look-up: the
        hit of each group, the group that limits the hit, and the missing block.
        """
        if not self._spec.enable_caching:
            return Why(Cause.CACHING_OFF)
        if not question.reads:
            return Why(Cause.NOT_READ)
        if question.num_tokens - 1 < self._spec.hit_alignment:
            return Why(Cause.BELOW_ONE_BLOCK)
        hashed = question.num_tokens - self._spec.hash_lookahead_tokens
        if not question.digests and question.own_keys != NO_EXTRA_KEYS and hashed >= self._spec.hash_block_size:
            return Why(Cause.UNPROVEN_KEYS)
        if not account.cut_by:
            return Why(Cause.NOTHING)
        if account.missing is None:
            return Why(Cause.LAST_BLOCK_DROPPED)
        if question.tier is not None:
            by, missing = self._spec.tiers[question.tier].kind.value, account.missing
            return Why(Cause.IN_TIER, missing.start, missing.end, by=by, peers=question.peers)
        return self._of_block(question, account.missing)

    def passed_over(self, passed: PassedOver, start: int) -> Why:
        """Return why an admission did not load a hit of the tiers, whose tokens from `start` on the device lacked."""
        by = self._spec.tiers[passed.tier].kind.value
        load_ns, compute_ns = passed.load_ns, passed.compute_ns
        return Why(_NOT_LOADED[passed.why], start, passed.hit, by=by, load_ns=load_ns, compute_ns=compute_ns)

    def _of_block(self, question: Question, missing: MissingPrefix) -> Why:
        for look in (self._removed, self._elsewhere, self._differs):
            found = look(question, missing)
            if found is not None:
                return found
        cause = Cause.NEVER_CACHED if self._is_complete else Cause.NOT_RECORDED
        return Why(cause, missing.start, missing.end)

    def _removed(self, question: Question, missing: MissingPrefix) -> Why | None:
        """Return the cause for which the missing key was removed; None if the key's last change before the look-up, as
        far as the log shows it, is not a removal.
        """
        key = KeyName(question.domain, missing.group, question.digests[missing.num_hashes - 1])
        change = self._history.last_change(key, question.at)
        if change is None or change.kind is EventKind.STORED:
            return None
        # If an engine life that kept no key began after the removal, it is the cause: the key would be lost anyway.
        change = self._history.cleared_by_life(change.at, question.at) or change
        return Why(cause_of(change), missing.start, missing.end, change.by, change.epoch, change.seq, change.at_ns)

    def _elsewhere(self, question: Question, missing: MissingPrefix) -> Why | None:
        """Return the cause that names the other group, cache domain, salt or adapter for which the missing content was
        computed; None if there is none.
        """
        span, count = (missing.start, missing.end), missing.num_hashes
        digest = question.digests[count - 1]
        if self._was_computed(question.domain, digest, count, question):
            kind = self._spec.groups[missing.group].kind
            if kind is GroupKind.MAMBA:
                return Why(Cause.NO_STATE_AT_BOUNDARY, *span)
            if kind in (GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA, GroupKind.CHUNKED_LOCAL):
                return Why(Cause.WINDOW_NOT_RESIDENT, *span)
            return None
        if found := self._other_domains(digest, count, question):
            return Why(Cause.OTHER_DOMAIN, *span, by=min(found))
        for keys, digests in question.alternatives:
            if self._was_computed(question.domain, digests[count - 1], count, question):
                cause = _difference(question.own_keys, keys)
                name = keys.lora[0] if keys.lora and cause is Cause.OTHER_LORA else ""
                return Why(cause, *span, by=name)
        return None

    def _was_computed(self, domain: str, digest: bytes, count: int, question: Question) -> bool:
        computed = (
            self._has_computed(request, digest, count, question) for request in self._requests(domain, question)
        )
        return self._is_stored(domain, digest, question) or any(computed)

    def _other_domains(self, digest: bytes, count: int, question: Question) -> set[str]:
        """Return the other cache domains for which the content of the hash was computed, by one pass over requests."""
        admitted = [one for one in self._history.admitted(question.at) if one.domain != question.domain]
        stored = {one for one in {one.domain for one in admitted} if self._is_stored(one, digest, question)}
        return stored | {one.domain for one in admitted if self._has_computed(one, digest, count, question)}

    def _is_stored(self, domain: str, digest: bytes, question: Question) -> bool:
        keys = (KeyName(domain, group, digest) for group in range(len(self._spec.groups)))
        return any(self._history.is_stored(key, question.at) for key in keys)

    def _has_computed(self, request: Known, digest: bytes, count: int, question: Question) -> bool:
        computed = request.computed_at(question.at) // self._spec.hash_block_size
        return count <= computed and request.has(digest, count)

    def _requests(self, domain: str, question: Question) -> Iterator[Known]:
        """Yield the requests of a cache domain (requests share cached blocks only inside one) that had been granted
        blocks before the look-up.
        """
        return (request for request in self._history.admitted(question.at) if request.domain == domain)

    def _differs(self, question: Question, missing: MissingPrefix) -> Why | None:
        """Return DIFFERS, with the position of the difference, if another prompt has the same beginning as this one and
        then differs. Of several other prompts, the one with the longest common beginning counts.

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


def cause_of(removal: Change) -> Cause:
    """Return the cause for which a key was removed."""
    if removal.without_stamps:
        return Cause.WITHOUT_STAMPS
    if removal.mismatched:
        return Cause.MISMATCH
    return Cause.RESET if removal.reason is RemoveReason.NONE else _OF_REMOVAL[removal.reason]


def other_keys(history: History, own: ExtraKeys) -> list[ExtraKeys]:
    """Return the extra keys (salt, adapter, multimodal items; they are part of each hash) of other requests that had
    blocks, the latest first, at most MAX_ALTERNATIVES.
    """
    keys = dict.fromkeys(request.extra_keys for request in reversed(list(history.admitted(NOW))))
    keys.pop(own, None)
    return list(keys)[:MAX_ALTERNATIVES]


def _difference(own: ExtraKeys, other: ExtraKeys) -> Cause:
    """Return the cause that names the first extra key (salt, adapter or multimodal item) in which two requests with
    equal tokens differ.
    """
    if own.lora != other.lora:
        return Cause.OTHER_LORA
    return Cause.OTHER_SALT if own.salt != other.salt else Cause.OTHER_MULTIMODAL


def _common(chain: Sequence[bytes], digests: Sequence[bytes]) -> int:
    """Return the number of equal leading hashes. Each hash covers all tokens before its end, so equal hashes at an
    index imply equal hashes before it.
    """
    low, high = 0, min(len(chain), len(digests))
    while low < high:
        middle = (low + high + 1) // 2
        if chain[middle - 1] == digests[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def with_hit_checked(why: Why, account: LookupExplanation, hit: int) -> Why:
    """Return the cause `why`, or NOT_RECORDED if the look-up `account`, reconstructed from the log, has another hit
    length than the answer that the request got: then the log is incomplete.
    """
    return why if account.hit == hit else Why(Cause.NOT_RECORDED, start=hit)
