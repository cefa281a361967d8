"""Explain a prompt or a request of a running replica: the state is read at one moment, the log in slices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvplane.base.errors import InvalidArgument, NotFound
from kvplane.base.groups import CommitRule
from kvplane.base.step import NO_EXTRA_KEYS, AdmitStatus, ExtraKeys
from kvplane_service.core.explain_lookup import LookupExplainer, LookupExplanation, MissingPrefix, Prefix
from kvplane_service.core.keys import Key
from kvplane_service.core.pool import INSIDE
from kvplane_service.decisions.log import Entry
from kvplane_service.explain.causes import Cause, Explainer, Question, Why, other_keys, with_hit_checked
from kvplane_service.explain.history import Attempt, History, HistoryReader, KeyName
from kvplane_service.replicas.host import ReplicaHost
from kvplane_service.runtime.executors import Offload
from kvplane_service.runtime.slices import in_slices

Present = dict[KeyName, frozenset[int]]
HashWith = Callable[[ExtraKeys], Sequence[bytes]]


@dataclass(frozen=True, slots=True)
class Explanation:
    """A look-up, its result and the cause. `status`, `seq` and `epoch` are those of a request's admission attempt."""

    num_tokens: int
    account: LookupExplanation
    why: Why
    is_complete: bool
    status: AdmitStatus = AdmitStatus.NOT_REACHED
    seq: int = 0
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to explain; `hash_with` hashes its tokens with other extra keys, None when the tokens are unknown."""

    digests: Sequence[bytes]
    num_tokens: int
    domain: str = ""
    extra_keys: ExtraKeys = NO_EXTRA_KEYS
    hash_with: HashWith | None = None


def reaches_registration(host: ReplicaHost) -> bool:
    """Whether the decision log covers the replica since its registration. It does not after a recovery from a store."""
    return host.decisions.num_lost == 0 and host.recovering is None and host.recovered is None


async def explain_prompt(host: ReplicaHost, prompt: Prompt, offload: Offload) -> Explanation:
    """Explain the hit that FindCacheHit would report for a prompt now."""
    replica, spec = host.replica, host.replica.spec
    pool = replica.coordinator.pool
    horizon = pool.executed_through if spec.commit is CommitRule.SAFE else INSIDE
    prefix = Prefix(prompt.digests, prompt.domain, prompt.num_tokens - 1, horizon)
    account = LookupExplainer(spec, replica.coordinator.lookup, pool).explain(prefix)
    is_complete = reaches_registration(host)
    tentative = _tentative(host, prefix, account.missing) if account.missing else None
    if tentative is not None:
        return Explanation(prompt.num_tokens, account, tentative, is_complete)
    history = await _read(host, host.decisions)

    def think() -> Why:
        question = Question(
            prompt.digests,
            prompt.domain,
            prompt.num_tokens,
            alternatives=list(_alternatives(history, prompt)),
            own_keys=prompt.extra_keys,
        )
        return Explainer(spec, history, is_complete).why(question, account)

    return Explanation(prompt.num_tokens, account, await offload(think), is_complete)


async def explain_request(host: ReplicaHost, name: str, offload: Offload) -> Explanation:
    """Explain the hit of the last attempt to admit this request. Raises NotFound when the log has no attempt."""
    log = host.decisions
    history = await _read(host, log, log.num_lost)
    attempt = history.attempts.get(name)
    if attempt is None:
        raise NotFound(
            f"no attempt to admit {name[:140]!r} is in the decision log",
            field="request_id",
            remedy="explain its content, or raise decision_log_steps and log_bytes",
        )
    await host.idle()
    # The keys and the entries at one moment, because the log has grown meanwhile.
    first, entries, present = log.num_lost, iter(log), _present(host, attempt)

    def think() -> Explanation:
        return _explain_attempt(host, attempt, history, present)

    history = await _read(host, entries, first)
    return await offload(think)


async def _read(host: ReplicaHost, entries: Iterable[Entry], first: int = 0) -> History:
    """As `read_history`, in slices, in which packed entries are also unpacked."""
    reader = HistoryReader(host.scheme.digest.size)
    async for number, entry in in_slices(enumerate(entries, first)):
        reader.add(number, entry)
    return reader.history


def _explain_attempt(host: ReplicaHost, attempt: Attempt, history: History, present: Present) -> Explanation:
    spec, request = host.replica.spec, attempt.request

    def find(domain: str, groups: Sequence[int], digest: bytes) -> list[int] | None:
        found = []
        for group in groups:
            key = KeyName(domain, group, digest)
            blocks = history.blocks_at(key, attempt.at, present.get(key, frozenset()))
            if not blocks:
                return None
            found.append(min(blocks))
        return found

    max_tokens = 0 if request.skip_reading else request.num_tokens - 1
    prefix = Prefix(request.digests, request.domain, max_tokens, INSIDE)
    account = LookupExplainer.over(spec, find).explain(prefix)
    reads = not request.skip_reading
    question = Question(
        request.digests, request.domain, request.num_tokens, attempt.at, reads, own_keys=request.extra_keys
    )
    is_complete = reaches_registration(host)
    why = Explainer(spec, history, is_complete).why(question, account)
    why = with_hit_checked(why, account, attempt.hit)
    return Explanation(request.num_tokens, account, why, is_complete, attempt.status, attempt.seq, attempt.epoch)


def _alternatives(history: History, prompt: Prompt) -> Iterator[tuple[ExtraKeys, Sequence[bytes]]]:
    """The prompt hashed with the extra keys of other requests; keys that do not fit the prompt are skipped."""
    if prompt.hash_with is None:
        return
    for keys in other_keys(history, prompt.extra_keys):
        with contextlib.suppress(InvalidArgument):
            yield keys, prompt.hash_with(keys)


def _present(host: ReplicaHost, attempt: Attempt) -> Present:
    """Blocks that have the request's keys now."""
    pool, domain = host.replica.coordinator.pool, attempt.request.domain
    present: Present = {}
    for group in range(pool.num_groups):
        for digest in attempt.request.digests:
            blocks = pool.blocks_of(Key(domain, group, digest))
            if blocks:
                present[KeyName(domain, group, digest)] = frozenset(blocks)
    return present


def _tentative(host: ReplicaHost, prefix: Prefix, missing: MissingPrefix) -> Why | None:
    """TENTATIVE when the block has the key, but its step has not been executed."""
    pool, digest = host.replica.coordinator.pool, prefix.digests[missing.num_hashes - 1]
    found = pool.find(prefix.domain, (missing.group,), digest, INSIDE)
    if found is None:
        return None
    return Why(Cause.TENTATIVE, missing.start, missing.end, epoch=host.epoch, seq=pool.key_step[found[0]])
