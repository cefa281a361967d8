"""The specification (`Replica`) with the state of any core: tests read or damage what no core shows otherwise."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from kvplane_core.face.interface import ReplicaCore
from kvplane_core.face.state import export_state
from kvplane_core.spec.loading import load_state
from kvplane_core.spec.replica import Replica
from tests.core.compared import ComparedCores

_LOADED: WeakKeyDictionary[ReplicaCore, tuple[bytes, Replica]] = WeakKeyDictionary()


def specification_of(core: ReplicaCore) -> Replica:
    """Return the specification itself where it decides, else one that is loaded from the core's image: the same object
    until the image changes. A change of a loaded one does not reach the core.
    """
    if isinstance(core, ComparedCores):
        return core.first
    if isinstance(core, Replica):
        return core
    image = export_state(core)
    before, loaded = _LOADED.get(core, (b"", None))
    if loaded is None or image != before:
        loaded = load_state(core.spec, image)
        _LOADED[core] = image, loaded
    return loaded
