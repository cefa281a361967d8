"""Makes the core of a replica: the compiled one where it is installed, else the specification.
The environment variable KVPLANE_CORE selects another:

    python   `Replica`, the specification
    native   the compiled core (`kvplane_core.face.native`)

No other module of the product imports the specification.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, cast

from kvplane.base.compiled import load
from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane.base.groups import ReplicaSpec
from kvplane_core.face.interface import ReplicaCore
from kvplane_core.spec.loading import load_state
from kvplane_core.spec.open_step import OpenStep
from kvplane_core.spec.replica import Replica

if TYPE_CHECKING:
    from kvplane_core.face.native import NativeReplica
    from kvplane_core.face.native.open_step import NativeOpenStep

REMEDY = "install g++ and install kvplane again (in a clone: run make)"
VARIABLE = "KVPLANE_CORE"
AUTO = "auto"
CORES = (AUTO, "python", "native")


def new_replica(spec: ReplicaSpec) -> ReplicaCore:
    """Make an empty replica.

    Raises:
        InvalidArgument: the spec contradicts itself, or KVPLANE_CORE has an unknown value.
        FailedPrecondition: the compiled core is selected, and it is not installed.
    """
    return _select(lambda: Replica(spec), lambda compiled: compiled.NativeReplica(spec))


def load_replica(spec: ReplicaSpec, raw: bytes) -> ReplicaCore:
    """Make a replica with an exported state, see `state`. Raises the errors of `new_replica` too."""
    return _select(lambda: load_state(spec, raw), lambda compiled: compiled.NativeReplica.load(spec, raw))


def new_in_process(spec: ReplicaSpec) -> NativeReplica:
    """Make an empty replica whose steps an engine applies row by row, see `open_step`. The specification has all
    methods and attributes of a `NativeReplica` that engines use. Raises the errors of `new_replica`.
    """
    return cast("NativeReplica", new_replica(spec))


def open_step(replica: NativeReplica, executed_through: int, records: bool = False) -> NativeOpenStep:
    """Begin the next step of a replica of `new_in_process`. `records`: its rows are read later."""
    if isinstance(replica, Replica):
        return cast("NativeOpenStep", OpenStep(replica, executed_through))
    return replica.open_step(executed_through, records)


def describe() -> str:
    """Return which core this process uses, in a line for people. Raises the errors of `new_replica`."""
    name, reason = chosen()
    return f"{name} ({reason})" if reason and _choice() == AUTO else name


def chosen() -> tuple[str, str]:
    """Return which core new replicas get, as `KVPLANE_CORE` names it, and why it is not the compiled one ("" if it is).
    Raises the errors of `new_replica`.
    """
    choice = _choice()
    if choice == "python":
        return choice, f"{VARIABLE}={choice}"
    if (_required() if choice == "native" else _native()) is not None:
        return "native", ""
    return "python", problem()


def core_of(replica: ReplicaCore) -> str:
    """Return which core a replica has, as `KVPLANE_CORE` names it."""
    return "python" if isinstance(replica, Replica) else "native"


def reason_of(replica: ReplicaCore) -> str:
    """Return why the Python core applies the steps of a replica; "" if the compiled core does."""
    return "" if core_of(replica) == "native" else chosen()[1]


def _select(python: Callable[[], Replica], native: Callable[[ModuleType], ReplicaCore]) -> ReplicaCore:
    choice = _choice()
    compiled = _required() if choice == "native" else _native() if choice == AUTO else None
    return python() if compiled is None else native(compiled)


def _choice() -> str:
    choice = os.environ.get(VARIABLE) or CORES[0]
    if choice not in CORES:
        raise InvalidArgument(f"it is {choice!r}", field=VARIABLE, remedy=f"set one of {', '.join(CORES)}")
    return choice


def problem() -> str:
    """Return why the compiled core cannot be used; "" if it can."""
    return load("kvplane_core.cpp", "core")[1]


def _native() -> ModuleType | None:
    return None if problem() else import_module("kvplane_core.face.native")


def _required() -> ModuleType:
    native = _native()
    if native is None:
        raise FailedPrecondition(
            problem(),
            field=VARIABLE,
            remedy=f"{REMEDY}, or set {VARIABLE}=python",
        )
    return native
