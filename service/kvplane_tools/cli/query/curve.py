"""The command `mrc`: what pools of other sizes would hit."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvplane_tools.cli.client import client_of
from kvplane_tools.cli.options import TABLE, Decisions, Limit, Log, Output, given
from kvplane_tools.cli.output import columns, text_of

if TYPE_CHECKING:
    from kvplane_tools.replay.pools import Curve, PoolHits

_LAST_REQUESTS = 2000  # that run again by default


def mrc_command(
    replica: Annotated[str, typer.Argument(help="Name of the replica, or with --log a recording (kvplane record).")],
    log: Log = False,
    decisions: Decisions = None,
    limit: Limit = _LAST_REQUESTS,
    output: Output = TABLE,
) -> None:
    """Print what pools of 1/4 to 4 times the size would hit: the miss-ratio curve.

    The requests of a recording, or of a replica's decision log, run again in a pool of each size, by the allocator
    itself: it counts windows, states, and what running requests hold. Where the log no longer begins at the
    registration, the replica is followed from now on; then, and of more requests than --limit, the first half only
    fills the pools. Where the curve is flat at the pool's size, more blocks add no hits.
    """
    from kvplane_tools.replay.pools import curve_of

    with tempfile.TemporaryDirectory() as folder:
        path = Path(replica)
        if not log:
            path = Path(folder) / "decisions"
            _follow(replica, path, decisions)
        for curve in curve_of(path, max(2, limit or _LAST_REQUESTS)):
            print(f"\r{len(curve.pools)} of {curve.num_sizes} pools", end="", file=sys.stderr, flush=True)
        print("\r\033[K" if sys.stderr.isatty() else "", file=sys.stderr, flush=True)
    print(text_of(lambda: _plain(curve), output, table=lambda: _table(curve)))


def _follow(replica: str, path: Path, decisions: int | None) -> None:
    """Write the replica's decisions until now to a file; those from now on if the log no longer has the first ones."""
    from kvplane.base.errors import FailedPrecondition
    from kvplane.v1.admin_pb2 import RecordRequest
    from kvplane_tools.cli.query.recorder import record

    with client_of() as client:
        described = client.describe_replica(replica)
    if not described.counters.steps:
        what, remedy = f"{replica} has applied no step", "ask when its engine has had work"
        raise FailedPrecondition(what, field="replica", remedy=remedy)
    now = described.epoch, described.seq
    try:
        record(given().address, RecordRequest(replica=replica), path, decisions, until=now)
    except FailedPrecondition:
        end = f"for {decisions:,} decisions" if decisions else "until Ctrl-C"
        print(f"kvplane: the log of {replica} is cut: following it from now on, {end}", file=sys.stderr, flush=True)
        record(given().address, RecordRequest(replica=replica, from_now=True), path, decisions)


def _table(curve: Curve) -> str:
    """Return a line per size; the memory is that of one rank, if the spec says how large pages are."""
    spec = curve.recorded.spec
    page = max(group.page_bytes for group in spec.groups)
    rows = [("BLOCKS", "GIB", "POOL", "HITS", "PREEMPTED", "")]
    for one in curve.pools:
        memory = f"{one.num_blocks * page / 2**30:.1f}" if page else "-"
        mark = f"<- this pool; really {curve.real.share:.1%}" if one.num_blocks == spec.num_blocks else ""
        hits = "-" if one.error else f"{one.share:.1%}"
        lost = f"{one.never_fits:,} requests never fit" if one.never_fits else mark
        preempted = "-" if one.error else f"{one.counts['preempted']:,}"
        pool = f"{one.num_blocks / spec.num_blocks:.3g}x"
        rows.append((f"{one.num_blocks:,}", memory, pool, hits, preempted, one.error or lost))
    looked_up = f"{curve.real.counts['queried_tokens']:,} tokens that {curve.num_requests:,} requests looked up"
    return f"{columns(rows)}\nof {looked_up}"


def _plain(curve: Curve) -> dict[str, object]:
    return {
        "requests": curve.num_requests,
        "real": _figures(curve.real),
        "sizes": [{**_figures(one), "this_pool": one.num_blocks == curve.real.num_blocks} for one in curve.pools],
    }


def _figures(one: PoolHits) -> dict[str, object]:
    known = {"blocks": one.num_blocks, "never_fits": one.never_fits, **({"error": one.error} if one.error else {})}
    return {**known, "hit_share": one.share, **one.counts}
