"""Makes a `Replica` of an image, see `state`."""

from __future__ import annotations

from typing import Any

from kvplane.base.groups import EvictionPolicy, ReplicaSpec
from kvplane_core.face.state import not_loaded, read_entries, spec_digests
from kvplane_core.spec.replica import Replica
from kvplane_core.spec.state_entries import load_entries


def load_state(spec: ReplicaSpec, image: bytes) -> Replica:
    """Return a replica with the state that `export_state` returned. Raises InvalidArgument if the bytes are damaged or
    of another spec; the invariants are not checked, see `inspect.check`.
    """
    replica, entries = Replica(spec), dict[str, list[Any]]()
    for name, value in read_entries(image):
        entries.setdefault(name, []).append(value)
    try:
        _check_policy(spec, entries.get("eviction", []))
        if entries["spec"][0] not in spec_digests(spec):
            raise not_loaded("state", "the state is that of a pool with another spec")
        load_entries(replica, entries)
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, AssertionError) as error:
        raise not_loaded("state", f"the state is incomplete: {type(error).__name__} {error}") from error
    return replica


def _check_policy(spec: ReplicaSpec, found: list[Any]) -> None:
    policy = found[0][0] if found else EvictionPolicy.LRU.value
    if policy != spec.eviction.value:
        raise not_loaded("eviction", f"it is {spec.eviction.value!r}, but the state is that of a pool with {policy!r}")
