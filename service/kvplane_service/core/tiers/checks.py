"""Refuses specs whose tiers a replica cannot have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import CommitRule, HashAlgorithm, ReplicaSpec

MAX_COST_NS = 60_000_000_000  # of a token or a block
MAX_WITHIN_NS = 3600 * 1_000_000_000
_WEAK = (HashAlgorithm.XXHASH, HashAlgorithm.XXHASH_CBOR)


class OrderedJobs(Protocol):
    """What the tiers of a replica have ordered."""

    @property
    def each(self) -> Sequence[object]:
        """The tiers."""

    @property
    def last_job(self) -> int:
        """Number of the last job."""

    def load_after(self, job: int) -> int:
        """Return the step that a load in flight waits for; 0 for other jobs."""


def check_tiers(spec: ReplicaSpec) -> None:
    """Raise InvalidArgument, naming the field, if the replica cannot have its tiers."""
    if not spec.tiers:
        return
    if not spec.enable_caching:
        raise InvalidArgument("without prefix caching no block has a key", field="tiers", remedy="turn caching on")
    if spec.commit is not CommitRule.SAFE:
        raise InvalidArgument(
            "only content whose step is executed is saved", field="tiers", remedy="use commit=safe with tiers"
        )
    if spec.checkpoint_percent:
        _check_checkpoints(spec)
    if spec.hash_algorithm in _WEAK:
        raise InvalidArgument(
            f"{spec.hash_algorithm.value} is no cryptographic hash, and a tier outlives the makers of its keys",
            field="hash_algorithm",
            remedy="use kvplane, sha256 or sha256_cbor with tiers",
        )


def _check_checkpoints(spec: ReplicaSpec) -> None:
    field = "tiers[0].checkpoint_percent"
    if spec.retention_interval:
        what = f"retention_interval {spec.retention_interval} already says what is kept"
        raise InvalidArgument(what, field=field, remedy="set one of the two to 0")
    for has_checkpoints, kinds in ((True, "windows or states"), (False, "attention that keeps all blocks")):
        if not any(bool(group.checkpoint_blocks) is has_checkpoints for group in spec.groups):
            what = f"{spec.checkpoint_percent} has no effect without a group of {kinds}"
            raise InvalidArgument(what, field=field, remedy="set it to 0")
