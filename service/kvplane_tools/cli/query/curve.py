"""The command `mrc`: what pools of other sizes would hit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvplane_tools.cli.client import client_of, grpcurl_line
from kvplane_tools.cli.options import TABLE, Grpcurl, Log, Output, Watch
from kvplane_tools.cli.output import columns, fields_of, repeat, text_of

if TYPE_CHECKING:
    from kvplane.v1.allocation_pb2 import MissCurve
    from kvplane.v1.replica_pb2 import ReplicaSpec

_NONE = "no curve: nothing was looked up, or no group of layers keeps whole prefixes"


def mrc_command(
    replica: Annotated[str, typer.Argument(help="Name of the replica, or with --log a recording (kvplane record).")],
    log: Log = False,
    output: Output = TABLE,
    watch: Watch = None,
    grpcurl: Grpcurl = False,
) -> None:
    """Print the miss-ratio curve: the share of tokens that LRU pools of 1/8 to 4 times the size would hit.

    It is estimated from a sample of the prefixes, usually within two points; recent ones count more. In a model with
    windows or states it is an upper bound. Where the curve is flat at the pool's size, more blocks add no hits.
    """
    from kvplane.unary import calls

    if log:
        from kvplane import wire
        from kvplane_service.rpc.encode import encode_curve
        from kvplane_tools.replay.from_log import curve_of

        spec, curve = curve_of(Path(replica))
        print(_text(encode_curve(curve), wire.encode_spec(spec), output))
        return
    if grpcurl:
        print(grpcurl_line(calls.describe_replica(replica)))
        return

    def one() -> None:
        answer = client.describe_replica(replica)
        print(_text(answer.miss_curve, answer.spec, output))

    with client_of() as client:
        repeat(watch, one)


def _text(curve: MissCurve | None, spec: ReplicaSpec, output: Output) -> str:
    from kvplane.v1.allocation_pb2 import MissCurve

    curve = curve or MissCurve()
    return text_of(lambda: fields_of(curve), output, table=lambda: _table(curve, spec) if curve.sizes else _NONE)


def _table(curve: MissCurve, spec: ReplicaSpec) -> str:
    """Return a line per size; the memory is that of one rank, if the spec says how large pages are."""
    usable, page = spec.num_blocks - 1, max(group.page_bytes for group in spec.groups)
    rows = [("BLOCKS", "GIB", "POOL", "HITS", "")]
    for size in curve.sizes:
        memory = f"{size.blocks * page / 2**30:.1f}" if page else "-"
        share = size.hit_tokens / curve.queried_tokens
        mark = "<- this pool" if size.blocks == usable else ""
        rows.append((f"{size.blocks:,}", memory, f"{size.blocks / usable:.3g}x", f"{share:.1%}", mark))
    return f"{columns(rows)}\nof {curve.queried_tokens:,} tokens looked up, the recent ones counted more"
