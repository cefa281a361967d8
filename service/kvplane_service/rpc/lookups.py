"""Answer FindCacheHit: how many leading tokens of a prompt or a request are cached. Long look-ups run on a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from kvplane.base.errors import NotFound
from kvplane.base.hashing import PackedHashes
from kvplane.v1 import allocation_pb2 as pb
from kvplane_core.face.interface import Hit, ReplicaCore
from kvplane_service.auth.gate import CALL
from kvplane_service.replicas import applying
from kvplane_service.replicas.host import ReplicaHost
from kvplane_service.rpc import encode
from kvplane_service.rpc.prices import HASH_BYTES
from kvplane_service.rpc.reads import LongReads
from kvplane_service.unary.calls import Content, Hashes

_ANSWERED_NS = 80  # of each block in an answer, on every core
_MAX_WAITING = 64  # long look-ups that may wait; each keeps its message in memory


@dataclass(frozen=True, slots=True)
class LookUp:
    """A look-up that is ready to run on a replica.

    Attributes:
        effort_ns: an estimate of its duration.
        num_known: hashes of the look-up that the request does not contain.
        find: runs the look-up and returns the answer; changes nothing.
    """

    effort_ns: int
    find: Callable[[], pb.FindCacheHitResponse]
    num_known: int = 0


Planned: TypeAlias = Callable[[ReplicaCore], LookUp]


class LookUps:
    """Runs the look-ups of all replicas of a service, long ones on a thread of their own."""

    def __init__(self) -> None:
        self._reads = LongReads("long look-ups", _MAX_WAITING)

    async def find(self, host: ReplicaHost, plan: Planned) -> pb.FindCacheHitResponse:
        """Run the look-up that `plan` prepares for the current state of the replica, and return its answer.

        Raises:
            ReplicaLapsed: the content of the replica's pages is unknown.
            Busy: too many long look-ups wait.
            KvplaneError: `plan` or the look-up raised it.
        """
        await host.idle()
        lookup = _planned(host, plan)
        CALL.get().count(HASH_BYTES * lookup.num_known)
        if lookup.effort_ns <= applying.MOST_INLINE_NS:
            return lookup.find()
        return await self._reads.run(host, lambda: _planned(host, plan).find)


def _planned(host: ReplicaHost, plan: Planned) -> LookUp:
    """Return the look-up, which is valid only until the caller awaits something, because the replica may change then.
    Raises as `LookUps.find`.
    """
    host.check_readable()
    return plan(host.replica)


def of_content(content: Content, with_blocks: bool, replica: ReplicaCore) -> LookUp:
    """Return the look-up of a prompt whose tokens are hashed."""
    effort = _effort_ns(replica, content.num_tokens, with_blocks)
    return LookUp(effort, partial(_find_content, replica, content, with_blocks))


def of_request(name: str, with_blocks: bool, replica: ReplicaCore) -> LookUp:
    """Return the look-up of the request with this name. Raises NotFound if the replica has no such request."""
    requests = replica.requests
    slot = requests.slot_named(name) if name else None
    if slot is None:
        what = f"the replica has no request {name[:140]!r}"
        raise NotFound(what, field="request_id", remedy="send the content of the prompt instead")
    num_tokens = requests.num_tokens[slot]
    find = partial(_find_request, replica, slot, with_blocks)
    effort = _effort_ns(replica, num_tokens, with_blocks)
    return LookUp(effort, find, num_tokens // replica.spec.hash_block_size)


def _effort_ns(replica: ReplicaCore, num_tokens: int, with_blocks: bool) -> int:
    """Estimate what a look-up takes with its answer."""
    answered = sum(num_tokens // group.block_size for group in replica.spec.groups) if with_blocks else 0
    return replica.look_up_effort(num_tokens) + answered * _ANSWERED_NS


def _find_content(replica: ReplicaCore, content: Content, with_blocks: bool) -> pb.FindCacheHitResponse:
    if content.tail is None or content.max_tokens:
        digests = replica.digests_of(content.as_probe())
    else:  # they were checked when they were hashed
        digests = PackedHashes(content.hashes, replica.digest_size)
    most = 1 if content.skip_reading else content.num_tokens  # the last of these tokens is never hit
    return _found(replica.lookup(digests, content.domain, most), content.num_tokens, digests, with_blocks)


def _find_request(replica: ReplicaCore, slot: int, with_blocks: bool) -> pb.FindCacheHitResponse:
    requests = replica.requests
    return _found(replica.peek_slot(slot), requests.num_tokens[slot], requests.hashes(slot), with_blocks)


def _found(hit: Hit, num_tokens: int, digests: Sequence[bytes], with_blocks: bool) -> pb.FindCacheHitResponse:
    hashes = Hashes(len(digests), digests[-1]) if digests else Hashes()
    return pb.FindCacheHitResponse(
        hit_tokens=hit.num_tokens,
        single_group_hit=hit.single_group_hit,
        num_tokens=num_tokens,
        num_hashes=hashes.count,
        last_hash=hashes.last,
        blocks=encode.encode_groups(hit.blocks) if with_blocks else (),
    )
