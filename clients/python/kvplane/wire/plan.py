"""Conversion of RankPlan, the memory layout of a rank, to and from protobuf."""

from __future__ import annotations

from kvplane.base.errors import InvalidArgument
from kvplane.base.layers import KVSharingLayer, Layer
from kvplane.base.rank_plan import GroupLayers, RankPlan, TensorPlacement
from kvplane.v1 import plan_pb2 as pb
from kvplane.wire.columns import build
from kvplane.wire.layers import decode_layer, encode_layer

_SIZES = ("num_blocks", "size_bytes", "bytes_per_block")
_PLACEMENT = ("group", "layer_names", "offset_bytes", "layer_stride_bytes", "block_stride_bytes")


def encode_plan(plan: RankPlan) -> pb.RankPlan:
    """Return the message of a memory layout."""
    groups = [_encode_group(group, f"groups[{index}]") for index, group in enumerate(plan.groups)]
    tensors = [
        build(pb.TensorPlacement, f"tensors[{index}]", {name: getattr(tensor, name) for name in _PLACEMENT})
        for index, tensor in enumerate(plan.tensors)
    ]
    shared = [encode_layer(layer, "shared_layers") for layer in plan.shared_layers]
    sizes = {name: getattr(plan, name) for name in _SIZES}
    layers = {"groups": groups, "tensors": tensors, "shared_layers": shared}
    return build(pb.RankPlan, "plan", {**sizes, **layers, "opaque_layout": plan.opaque_layout})


def decode_plan(message: pb.RankPlan) -> RankPlan:
    """Return the memory layout of a message. Raises InvalidArgument for an impossible layout; the error's field names
    the wrong part.
    """
    plan = RankPlan(
        **{name: getattr(message, name) for name in _SIZES},
        groups=tuple(_decode_group(group, f"groups[{index}]") for index, group in enumerate(message.groups)),
        tensors=tuple(_decode_placement(tensor) for tensor in message.tensors),
        shared_layers=tuple(KVSharingLayer(layer.name, layer.shares_with) for layer in message.shared_layers),
        opaque_layout=message.opaque_layout,
    )
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


def _decode_placement(message: pb.TensorPlacement) -> TensorPlacement:
    return TensorPlacement(
        message.group,
        tuple(message.layer_names),
        message.offset_bytes,
        message.layer_stride_bytes,
        message.block_stride_bytes,
    )
