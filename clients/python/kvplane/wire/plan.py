"""Conversion of RankPlan, the memory layout of a rank, to and from protobuf."""

from __future__ import annotations

from kvplane.base.errors import InvalidArgument
from kvplane.base.layers import KVSharingLayer, Layer
from kvplane.base.rank_plan import GroupLayers, RankPlan
from kvplane.v1 import plan_pb2 as pb
from kvplane.wire.layers import decode_layer, encode_layer
from kvplane.wire.same import decode_same, encode_same


def encode_plan(plan: RankPlan) -> pb.RankPlan:
    """Return the message of a memory layout."""
    groups = [_encode_group(group, f"groups[{index}]") for index, group in enumerate(plan.groups)]
    shared = [encode_layer(layer, "shared_layers") for layer in plan.shared_layers]
    return encode_same(plan, pb.RankPlan, "plan", groups=groups, shared_layers=shared)


def decode_plan(message: pb.RankPlan) -> RankPlan:
    """Return the memory layout of a message. Raises InvalidArgument for an impossible layout; the error's field names
    the wrong part.
    """
    groups = tuple(_decode_group(group, f"groups[{index}]") for index, group in enumerate(message.groups))
    shared = tuple(KVSharingLayer(layer.name, layer.shares_with) for layer in message.shared_layers)
    plan = decode_same(RankPlan, message, groups=groups, shared_layers=shared)
    plan.validate()
    return plan


def _encode_group(group: GroupLayers, where: str) -> pb.GroupLayers:
    layers = [Layer(name, spec) for name, spec in zip(group.layer_names, group.specs, strict=True)]
    return pb.GroupLayers(layers=[encode_layer(layer, f"{where}.{layer.name}") for layer in layers])


def _decode_group(message: pb.GroupLayers, where: str) -> GroupLayers:
    names, specs = [], []
    for index, one in enumerate(message.layers):
        layer = decode_layer(one, f"{where}.layers[{index}]")
        if isinstance(layer, KVSharingLayer):
            raise InvalidArgument(
                f"the layer {layer.name} has no cache of its own",
                field=f"{where}.layers[{index}]",
                remedy="list it in shared_layers",
            )
        names.append(layer.name)
        specs.append(layer.spec)
    return GroupLayers(tuple(names), tuple(specs))
