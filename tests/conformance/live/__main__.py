"""Drive vLLM 0.33.0 and kvplane's core with the same random operations.

    python -m tests.conformance.live [--kind K] [--seeds 50] [--seed-base 0] [--operations 300]

It prints a line per kind: seeds, operations, values compared, differences. It shrinks a sequence with a difference and
writes it to tests/conformance/scenarios; the exit status is 1. With `--recorded FILE...` it asks the reference for
recorded operations instead and compares the answers with the recording: this checks that the reference here is the
recorded one. Attention sinks are not among the kinds: vLLM 0.33.0 fails to build them (BEHAVIOURS.md names the tests of
kvplane's).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.conformance.live.kinds import KINDS
from tests.conformance.live.peer import Peer
from tests.conformance.live.recorded import compare_recording
from tests.conformance.live.session import HEADING, Tally, run_seed


def main(argv: Sequence[str] | None = None) -> int:
    """0 when nothing differs."""
    options = _parse(argv)
    with Peer() as peer:
        if options.recorded:
            return _recorded(peer, options.recorded)
        total = Tally()
        print(f"{'kind':18}{HEADING}")
        for kind in options.kind or list(KINDS):
            tally = Tally()
            for seed in range(options.seed_base, options.seed_base + options.seeds):
                tally.add(run_seed(peer, kind, seed, options.operations, options.keep))
            print(f"{kind:18}{tally}", flush=True)
            total.add(tally)
    print(f"{'all':18}{total}")
    return 0 if total.sound else 1


def _recorded(peer: Peer, paths: Sequence[Path]) -> int:
    different = 0
    for path in paths:
        first = compare_recording(peer, path)
        different += first is not None
        print(f"{'DIFFER' if first else 'same  '} {path.name}{': ' + first if first else ''}", flush=True)
    return 1 if different else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.live", description=__doc__)
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="one kind; may be repeated")
    parser.add_argument("--seeds", type=int, default=50, help="configurations per kind")
    parser.add_argument("--seed-base", type=int, default=0, help="the first seed")
    parser.add_argument("--operations", type=int, default=300, help="operations per seed, at least")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="record there what both answered, for a replay")
    parser.add_argument("--recorded", type=Path, nargs="+", help="compare the reference with recordings")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
