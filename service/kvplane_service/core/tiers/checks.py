"""Refuses specs, steps and jobs that the tiers of a replica do not permit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import CommitRule, HashAlgorithm, ReplicaSpec
from kvplane.base.prefetch import NO_REQUEST, Prefetch
from kvplane.base.step import Admit, Cache, RowFlag

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


def check_jobs(cache: Cache, tiers: OrderedJobs | None, executed_through: int, where: str) -> None:
    """Raise InvalidArgument for jobs that were not ordered, for loads that are done before they could start, and for
    costs of other tiers.

    `where`: prefix of the names of fields.
    """
    if cache.costs_ns:
        num_tiers = len(tiers.each) if tiers is not None else 0
        if len(cache.costs_ns) != 1 + num_tiers:
            raise InvalidArgument(
                f"{len(cache.costs_ns)} costs, the replica has {num_tiers} tiers",
                field=f"{where}cache.costs_ns",
                remedy="give the cost of a token, then of a block of each tier",
            )
        if not 0 <= min(cache.costs_ns) <= max(cache.costs_ns) <= MAX_COST_NS:
            raise InvalidArgument(
                f"{min(cache.costs_ns)} to {max(cache.costs_ns)} ns are not 0 ns to a minute",
                field=f"{where}cache.costs_ns",
                remedy="give nanoseconds per token and per block, 0 for an unknown cost",
            )
    last = tiers.last_job if tiers is not None and tiers.each else 0  # without tiers, no state has the number
    for name, jobs in (("jobs_done", cache.jobs_done), ("jobs_failed", cache.jobs_failed)):
        for row, job in enumerate(jobs):
            if not 0 < job <= last:
                field, problem = f"{where}cache.{name}[{row}]", f"job {job} was not ordered; the last one is {last}"
                raise InvalidArgument(problem, field=field, remedy="report the jobs of Orders")
    if not isinstance(cache.jobs_before, int) or not 0 <= cache.jobs_before <= last + 1:
        raise InvalidArgument(
            f"{cache.jobs_before!r} is not 0 to {last + 1}, the number after the last job",
            field=f"{where}cache.jobs_before",
            remedy="give at most the number after the last job; epoch << 32 for the jobs of earlier lives",
        )
    for row, job in enumerate(cache.jobs_done):
        after = tiers.load_after(job) if tiers is not None else 0
        if after > executed_through:
            raise InvalidArgument(
                f"load {job} cannot have started: step {after} is not executed",
                field=f"{where}cache.jobs_done[{row}]",
                remedy="load when executed_through has reached admit_load_after, or report the job as failed",
            )


def check_prefetch(rows: Prefetch, spec: ReplicaSpec, where: str) -> None:
    """Raise InvalidArgument for a prefetch of a replica without a second tier, and for rows that name not one prompt.

    The caller checks the columns, the hashes, and that the slots have requests.
    """
    if len(spec.tiers) < 2:
        raise InvalidArgument(
            "the replica has no tier from which to copy into the first one",
            field=f"{where}prefetch",
            remedy="register it with a host and a disk tier, or leave the section out",
        )
    counts = rows.num_hashes or [0] * len(rows.slot)
    for row, (slot, count) in enumerate(zip(rows.slot, counts, strict=True)):
        if (slot == NO_REQUEST) != (count > 0):
            raise InvalidArgument(
                f"slot {slot} with {count} hashes is not one prompt",
                field=f"{where}prefetch.num_hashes[{row}]",
                remedy=f"give the slot of a request and 0 hashes, or slot {NO_REQUEST} and hashes",
            )


def check_load_rows(admit: Admit, where: str) -> None:
    """Raise InvalidArgument for rows with LOAD that also load external tokens, or must be granted all tokens."""
    for row, flags in enumerate(admit.flags):
        if not flags & RowFlag.LOAD:
            continue
        if flags & (RowFlag.DELAY_CACHING | RowFlag.WHOLE) or (admit.external and admit.external[row]):
            raise InvalidArgument(
                "a row with LOAD has no external tokens, and neither DELAY_CACHING nor WHOLE",
                field=f"{where}admit.flags[{row}]",
                remedy="send the row without LOAD",
            )


def check_loaded(slot: int, waits: bool) -> None:
    """Raise InvalidArgument if a running request waits for a load from a tier, so that no row may grant it tokens."""
    if waits:
        raise InvalidArgument(f"slot {slot} waits for a load", field="slot", remedy="report the end of its job")
