"""The core that decides in the engine's process: compiled where it is installed, else the Python one."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import cast

from kvplane.base.compiled import NOT_INSTALLED, problem_of
from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane.base.groups import ReplicaSpec
from kvplane_service import core
from kvplane_service.core.open_step import OpenStep
from kvplane_service.core.replica import Replica

VARIABLE = "KVPLANE_CORE"  # of the engine's environment
CHOICES = ("auto", "python", "native", "twin")  # as of a service; `twin` is `python` here


def new_core(spec: ReplicaSpec) -> Replica:
    """Make an empty replica whose steps are applied row by row: a compiled one has the methods and attributes of
    `Replica` that this adapter uses.

    Raises:
        InvalidArgument: KVPLANE_CORE has an unknown value.
        FailedPrecondition: KVPLANE_CORE is `native`, and the compiled core cannot be used.
    """
    choice = os.environ.get(VARIABLE) or "auto"
    if choice not in CHOICES:
        raise InvalidArgument(f"it is {choice!r}", field=VARIABLE, remedy=f"set one of {', '.join(CHOICES)}")
    if choice in ("python", "twin"):
        return Replica(spec)
    problem = problem_of(Path(core.__file__).parent / "native")
    try:
        native = None if problem else import_module("kvplane_service.core.native")
    except ImportError:
        native = None
    if native is not None:
        return cast(Replica, native.NativeReplica(spec))
    if choice == "native":
        raise FailedPrecondition(problem or NOT_INSTALLED, field=VARIABLE, remedy=f"set {VARIABLE}=auto")
    return Replica(spec)


def open_step(replica: Replica, executed_through: int, records: bool = False) -> OpenStep:
    """Begin the next step of a replica of `new_core`. `records`: its rows are read later, see `OpenStep.recorded`."""
    begin: Callable[[int, bool], OpenStep] | None = getattr(replica, "open_step", None)
    return OpenStep(replica, executed_through) if begin is None else begin(executed_through, records)
