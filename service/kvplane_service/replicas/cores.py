"""Makes the core of a replica. The environment variable KVPLANE_CORE selects it:

    python   `Replica`, the specification (default)
    native   the compiled core (`kvplane_service.core.native`); a replica that it does not support is refused
    twin     both: `Replica` answers, and each step's results and state are compared with the compiled core's
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane.base.groups import ReplicaSpec
from kvplane_service.core.interface import ReplicaCore
from kvplane_service.core.replica import Replica
from kvplane_service.core.state import load_state
from kvplane_service.core.twin import TwinReplica

VARIABLE = "KVPLANE_CORE"
CORES = ("python", "native", "twin")
CHECK_EVERY = 32  # steps between two comparisons of the whole state of twins


def new_replica(spec: ReplicaSpec) -> ReplicaCore:
    """Make an empty replica.

    Raises:
        InvalidArgument: the spec contradicts itself, KVPLANE_CORE has an unknown value, or the compiled core does not
            support the spec.
        FailedPrecondition: the compiled core is selected, and it is not installed.
    """
    return _as_selected(Replica(spec))


def load_replica(spec: ReplicaSpec, raw: bytes) -> ReplicaCore:
    """Make a replica with an exported state, see `state.load_state`. Raises the errors of `new_replica` too."""
    return _as_selected(load_state(spec, raw))


def describe() -> str:
    """Return which core this process uses, in a line for people. Raises the errors of `new_replica`."""
    choice = _choice()
    if choice == "python":
        return "python" if _native() is None else f"python ({VARIABLE}=native selects the compiled one)"
    _required()
    return choice


def _as_selected(replica: Replica) -> ReplicaCore:
    choice = _choice()
    if choice == "python":
        return replica
    native = _required()
    if choice == "twin":
        return TwinReplica(replica, native.NativeReplica.of if native.is_supported(replica.spec) else None, CHECK_EVERY)
    if not native.is_supported(replica.spec):
        raise InvalidArgument(
            f"the compiled core does not have the policy {replica.spec.eviction.value}",
            field="eviction",
            remedy=f"start the service with {VARIABLE}=python",
        )
    made: ReplicaCore = native.NativeReplica.of(replica)
    return made


def _choice() -> str:
    choice = os.environ.get(VARIABLE) or CORES[0]
    if choice not in CORES:
        raise InvalidArgument(f"it is {choice!r}", field=VARIABLE, remedy=f"set one of {', '.join(CORES)}")
    return choice


def _native() -> ModuleType | None:
    try:
        return import_module("kvplane_service.core.native")
    except ImportError:
        return None


def _required() -> ModuleType:
    native = _native()
    if native is None:
        raise FailedPrecondition(
            "the compiled core is not installed",
            field=VARIABLE,
            remedy=f"install g++ and install kvplane again, or set {VARIABLE}=python",
        )
    return native
