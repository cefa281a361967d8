"""The cases of a run, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvplane.base.errors import InvalidArgument
from tests.cluster.defects import UNSTARTABLE, run_refused_upgrade, run_unstartable
from tests.cluster.installs import run_install
from tests.cluster.load import BUILT_IN, EVENTS, NONE, SQLITE, run_load
from tests.cluster.policies import run_policies
from tests.cluster.routers import run_routers
from tests.cluster.runs import Run
from tests.cluster.workers import run_workers
from tests.helm.charts import SETS

Case = Callable[[Run], None]

WITHOUT_STORE = [step for step in EVENTS if step.name != "restart of the store"]
CASES: Mapping[str, Case] = {
    **{f"set-{name}": partial(run_install, name=name) for name in SETS},
    "load": partial(run_load, of=BUILT_IN, steps=EVENTS),
    "load-sqlite": partial(run_load, of=SQLITE, steps=WITHOUT_STORE),
    "load-none": partial(run_load, of=NONE, steps=WITHOUT_STORE[:3]),
    "workers": run_workers,
    "router": run_routers,
    "policies": run_policies,
    "upgrade": run_refused_upgrade,
    **{f"doctor-{one.slug}": partial(run_unstartable, one=one) for one in UNSTARTABLE},
}


def chosen(names: Sequence[str]) -> list[Case]:
    """The cases of these names, or all. Raises InvalidArgument."""
    for name in names:
        if name not in CASES:
            raise InvalidArgument(f"there is no case {name[:60]!r}", field="ONLY", remedy=f"use {', '.join(CASES)}")
    return [CASES[name] for name in names or CASES]
