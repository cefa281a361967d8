"""python -m tests.worker.corruption --cases 10000: damaged slots of host memory, none of which may reach a page."""

from __future__ import annotations

import argparse
import logging

from tests.worker.test_movers import count_unscattered
from tests.worker.tier_rig import Rig


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.worker.corruption", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.getLogger("kvplane_worker").setLevel(logging.ERROR)
    rig = Rig()
    count = count_unscattered(rig, range(given.seed, given.seed + given.cases))
    rig.movers.close()
    print(f"{count} damaged slots: none was loaded, and no page changed")


if __name__ == "__main__":
    main()
