"""Explain a prompt or a request of a running replica. The state is read at one moment, the decision log
on a thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvplane.base.errors import InvalidArgument, NotFound
from kvplane.base.groups import TierKind
from kvplane.base.step import NO_EXTRA_KEYS, AdmitStatus, ExtraKeys
from kvplane_core.face.hit_rules import HitRules, LookupExplanation, MissingPrefix
from kvplane_service.decisions.log import Candidate
from kvplane_service.explain.causes import Cause, Explainer, Question, Why, other_keys, with_hit_checked
from kvplane_service.explain.history import Attempt, Change, History, HistoryReader, KeyName, RefusedGrowth
from kvplane_service.replicas.host import ReplicaHost
from kvplane_service.runtime.executors import Offload
from kvplane_service.runtime.slices import Turns, resting

_PIECE = 1024  # hashes of a prompt that are looked up without a rest
MAX_HASHED_AGAIN = 1 << 21  # tokens of a prompt, times the extra keys with which it is compared
MAX_CHANGES = 200  # of the keys of a block, in an explanation
Present = dict[KeyName, frozenset[int]]
_T = TypeVar("_T")
HashWith = Callable[[ExtraKeys], Awaitable[Sequence[bytes]]]
Alternatives = Sequence[tuple[ExtraKeys, Sequence[bytes]]]


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of a look-up.

    Attributes:
        num_tokens: length of the prompt.
        account: the core's explanation: hit of each group, limiting group, missing block.
        why: the cause for which the hit does not have more tokens.
        is_complete: the decision log reaches back to the registration of the replica.
        status, seq, epoch: outcome, step number and number of the engine life of the explained admission attempt; not
            set for a prompt.
        needed, free: blocks that the attempt needed and that were free, if it was refused.
        growth: the last run row after the attempt that was refused; None if there was none.
    """

    num_tokens: int
    account: LookupExplanation
    why: Why
    is_complete: bool
    status: AdmitStatus = AdmitStatus.NOT_REACHED
    seq: int = 0
    epoch: int = 0
    needed: int = 0
    free: int = 0
    growth: RefusedGrowth | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to explain. `hash_with` hashes the prompt's tokens with other extra keys (salt, adapter, multimodal
    items); None if the tokens are unknown.
    """

    digests: Sequence[bytes]
    num_tokens: int
    domain: str = ""
    extra_keys: ExtraKeys = NO_EXTRA_KEYS
    hash_with: HashWith | None = None


def reaches_registration(host: ReplicaHost) -> bool:
    """Return True if the decision log has every entry since the registration of the replica, which is not the case
    after the replica was recovered from a store.
    """
    return host.decisions.num_lost == 0 and host.recovering is None and host.recovered is None


async def explain_prompt(host: ReplicaHost, prompt: Prompt, offload: Offload) -> Explanation:
    """Explain the hit that FindCacheHit would return now for a prompt; `offload` runs the search for the cause on a
    thread.
    """
    spec, is_complete, entries = host.replica.spec, reaches_registration(host), host.decisions.candidates("")
    digests, looking = prompt.digests, _on_thread(offload, partial(_look_up, host, prompt))
    account, tier, tentative = await host.steps.aside(looking)  # the state of this moment
    if tentative is not None:
        return Explanation(prompt.num_tokens, account, tentative, is_complete)
    peers = _peers(host, prompt, account, tier)
    wanted = await offload(lambda: frozenset(digests))

    def think(others: Alternatives, history: History) -> tuple[Why, list[ExtraKeys]]:
        own, length = prompt.extra_keys, prompt.num_tokens
        question = Question(digests, prompt.domain, length, alternatives=others, own_keys=own, tier=tier, peers=peers)
        known = other_keys(history, own) if prompt.hash_with is not None else []
        return Explainer(spec, history, is_complete).why(question, account), known

    why, known = await _read(host, offload, entries, partial(think, ()), wanted=wanted)
    if others := await _alternatives(known, prompt):
        wanted = wanted.union(*(hashes for _, hashes in others))
        why, _ = await _read(host, offload, entries, partial(think, others), wanted=wanted)
    return Explanation(prompt.num_tokens, account, why, is_complete)


async def explain_request(host: ReplicaHost, name: str, turns: Turns, offload: Offload) -> Explanation:
    """Explain the hit of the last attempt to admit the request `name`.

    It works while it holds the lock `turns`, for which a bounded number of callers may wait, and releases the lock
    while it waits for the replica. Raises NotFound if the log has no such attempt.
    """
    async with turns.turn():
        attempt = await _find_attempt(host, name, offload)
    async with turns.turn(host.steps):
        return await _explain_found(host, attempt, offload)


async def explain_block(host: ReplicaHost, block: int, turns: Turns, offload: Offload) -> list[tuple[Change, KeyName]]:
    """Return the last changes of the keys that a block has had, oldest first, each with its key: `MAX_CHANGES` at most.

    It works while it holds the lock `turns`, as `explain_request`. Raises InvalidArgument for a block that the replica
    does not have.
    """
    most = host.replica.spec.num_blocks - 1
    if not 0 < block <= most:
        raise InvalidArgument(f"there is no block {block}", field="block", remedy=f"give a number from 1 to {most}")
    async with turns.turn():
        first, entries = host.decisions.num_lost, host.decisions.candidates("")

        def keys(ended: threading.Event) -> frozenset[bytes]:
            return frozenset(digest for entry in resting(entries, ended) for digest in entry.keys_of(block))

        wanted = await _on_thread(offload, keys)
        return await _read(host, offload, entries, lambda history: history.of_block(block, MAX_CHANGES), first, wanted)


async def _find_attempt(host: ReplicaHost, name: str, offload: Offload) -> Attempt:
    """Seek the name in the packed entries. An index of names would save a tenth of an explanation at most, whose time
    is that of the changes of keys, which any entry may have.
    """
    log = host.decisions
    entries, first = log.candidates(name), log.num_lost

    def find(ended: threading.Event) -> Attempt | None:
        named = [at for at, entry in resting(enumerate(entries), ended) if entry.may_name]
        orders = reversed(named), iter(named)  # the last one is enough, unless it has no attempt yet
        found = [next((at for at in resting(order, ended) if entries[at].names(name)), None) for order in orders]
        for at in dict.fromkeys(one for one in found if one is not None):
            reader = HistoryReader(host.scheme.digest.size, frozenset(), name)
            for number in resting(range(at, len(entries)), ended):
                reader.add(first + number, entries[number].read())
                if reader.is_over():
                    break
            if name in reader.history.attempts:
                return reader.history.attempts[name]
        return None

    attempt = await _on_thread(offload, find)
    if attempt is None:
        raise NotFound(
            f"the decision log has no attempt to admit the request {name[:140]!r}",
            field="request_id",
            remedy="ask about the tokens of the prompt instead, or raise decision_log_steps and log_bytes",
        )
    return attempt


async def _explain_found(host: ReplicaHost, attempt: Attempt, offload: Offload) -> Explanation:
    # Take the keys and the entries at the same moment: the log has grown while its history was read.
    log = host.decisions
    first, entries = log.num_lost, log.candidates("")
    present = await host.steps.aside(_on_thread(offload, partial(_present, host, attempt)))
    think = partial(_explain_attempt, host, attempt, present)
    return await _read(host, offload, entries, think, first, frozenset(attempt.request.digests))


async def _read(
    host: ReplicaHost,
    offload: Offload,
    entries: Sequence[Candidate],
    think: Callable[[History], _T],
    first: int = 0,
    wanted: Set[bytes] | None = None,
) -> _T:
    """Read the history of the log's entries on a thread, of `wanted` keys alone, and return what `think` returns for
    it there. Entries are unpacked there, and the history, a million objects of a large log, is freed there.
    """

    def read(ended: threading.Event) -> _T:
        reader = HistoryReader(host.scheme.digest.size, wanted)
        for number, entry in resting(enumerate(entries, first), ended):
            reader.add(number, entry.read())
        return think(reader.history)

    return await _on_thread(offload, read)


async def _on_thread(offload: Offload, work: Callable[[threading.Event], _T]) -> _T:
    """Run the work on a thread; the event that it gets is set when the caller is cancelled."""
    ended = threading.Event()
    try:
        return await offload(partial(work, ended))
    finally:
        ended.set()


def _explain_attempt(host: ReplicaHost, attempt: Attempt, present: Present, history: History) -> Explanation:
    spec, request = host.replica.spec, attempt.request

    def had(group: int, digest: bytes) -> bool:
        key = KeyName(request.domain, group, digest)
        return bool(history.blocks_at(key, attempt.at, present.get(key, frozenset())))

    columns = [bytes(had(group, digest) for digest in request.digests) for group in range(len(spec.groups))]
    account = HitRules(spec).explain(columns, 0 if request.skip_reading else request.num_tokens - 1)
    reads = not request.skip_reading
    question = Question(
        request.digests, request.domain, request.num_tokens, attempt.at, reads, own_keys=request.extra_keys
    )
    is_complete = reaches_registration(host)
    explainer, passed = Explainer(spec, history, is_complete), attempt.passed
    if passed is not None:
        why = explainer.passed_over(passed, min(attempt.hit, account.hit))
    else:
        why = with_hit_checked(explainer.why(question, account), account, attempt.hit)
    blocks = attempt.needed, attempt.free, attempt.growth
    return Explanation(
        request.num_tokens, account, why, is_complete, attempt.status, attempt.seq, attempt.epoch, *blocks
    )


async def _alternatives(known: Sequence[ExtraKeys], prompt: Prompt) -> Alternatives:
    """Return the prompt hashed with the extra keys (salt, adapter, multimodal items) of other requests, of a long
    prompt with few; extra keys that do not fit the prompt are skipped.
    """
    found = list[tuple[ExtraKeys, Sequence[bytes]]]()
    if prompt.hash_with is None:
        return found
    for keys in known[: max(MAX_HASHED_AGAIN // prompt.num_tokens, 1)]:
        with contextlib.suppress(InvalidArgument):
            found.append((keys, await prompt.hash_with(keys)))
    return found


def _look_up(
    host: ReplicaHost, prompt: Prompt, ended: threading.Event
) -> tuple[LookupExplanation, int | None, Why | None]:
    """Return the core's explanation of the look-up of a prompt now, and of what is missing on the device: the tier
    that has it, and whether a step is computing it.
    """
    replica, digests, columns = host.replica, prompt.digests, list[list[bytes]]()
    for start in resting(range(0, len(digests), _PIECE), ended):
        columns.append(replica.cached_columns(digests[start : start + _PIECE], prompt.domain))
    joined = [b"".join(pieces) for pieces in zip(*columns, strict=True)] or [b""] * len(replica.spec.groups)
    account = HitRules(replica.spec).explain(joined, prompt.num_tokens - 1)
    if not account.missing:
        return account, None, None
    tier = replica.tiers.tier_of(prompt.domain, account.missing.group, digests[account.missing.num_hashes - 1])
    return account, tier, _tentative(host, prompt, account.missing)


def _present(host: ReplicaHost, attempt: Attempt, ended: threading.Event) -> Present:
    """Return, by key (hash of a block of the prompt), the blocks that have this key now, for the request of the
    attempt.
    """
    replica, domain = host.replica, attempt.request.domain
    present: Present = {}
    for digest in resting(attempt.request.digests, ended):
        for group in range(len(replica.spec.groups)):
            blocks = replica.blocks_of(domain, group, digest)
            if blocks:
                present[KeyName(domain, group, digest)] = frozenset(blocks)
    return present


def _peers(host: ReplicaHost, prompt: Prompt, account: LookupExplanation, tier: int | None) -> Sequence[str]:
    """Return which peers have the missing block, where the tier that has it is theirs."""
    tiers = host.replica.spec.tiers
    if account.missing is None or host.peers is None or tier is None or tiers[tier].kind is not TierKind.PEERS:
        return ()
    key = prompt.domain, account.missing.group, prompt.digests[account.missing.num_hashes - 1]
    return host.peers.holders(host.name, key)


def _tentative(host: ReplicaHost, prompt: Prompt, missing: MissingPrefix) -> Why | None:
    """Return TENTATIVE if a block has the missing key, but the step that computes the block has not been executed yet,
    otherwise None.
    """
    step = host.replica.key_step(prompt.domain, missing.group, prompt.digests[missing.num_hashes - 1])
    return None if step is None else Why(Cause.TENTATIVE, missing.start, missing.end, epoch=host.epoch, seq=step)
