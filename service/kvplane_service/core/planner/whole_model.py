"""The layers of all workers as one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvplane.base.errors import InvalidArgument
from kvplane.base.layers import KVSharingLayer, Layer
from kvplane_service.core.planner.options import Worker


@dataclass(frozen=True, slots=True)
class WholeModel:
    """Layers in the order in which workers name them, each once."""

    layers: tuple[Layer, ...]
    shared_layers: tuple[KVSharingLayer, ...]


def whole_model(workers: Sequence[Worker]) -> WholeModel:
    """Merge the workers' layers by name.

    Raises:
        InvalidArgument: no workers, a name twice on one worker, one name for different layers, or a layer
            that shares the cache of one that its worker does not have.
    """
    if not workers:
        raise InvalidArgument("there is none", field="workers", remedy="give at least one")
    merged: dict[str, Layer | KVSharingLayer] = {}
    for index, worker in enumerate(workers):
        field = f"workers[{index}].layers"
        _check_names(worker, field)
        for layer in worker.layers:
            if merged.setdefault(layer.name, layer) != layer:
                raise InvalidArgument(
                    f"{layer.name!r} differs between workers",
                    field=field,
                    remedy="equal names need equal layers",
                )
    return WholeModel(
        tuple(layer for layer in merged.values() if isinstance(layer, Layer)),
        tuple(layer for layer in merged.values() if isinstance(layer, KVSharingLayer)),
    )


def _check_names(worker: Worker, field: str) -> None:
    owned = {layer.name for layer in worker.layers if isinstance(layer, Layer)}
    shared = [layer for layer in worker.layers if isinstance(layer, KVSharingLayer)]
    if len(worker.layers) != len(owned | {layer.name for layer in shared}):
        raise InvalidArgument("a name occurs twice", field=field, remedy="give every layer its own name")
    for layer in shared:
        if layer.shares_with not in owned:
            raise InvalidArgument(
                f"{layer.name!r} shares the cache of {layer.shares_with!r}, which has none here",
                field=field,
                remedy="name a layer of the same worker that owns a cache",
            )
