"""Conversion of layers and their formats to and from protobuf. Every field of a format has a field in the message."""

from __future__ import annotations

from typing import TypeAlias

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import GroupKind, MambaMode
from kvplane.base.layer_json import spec_from_dict, spec_to_dict
from kvplane.base.layer_spec import LayerSpec
from kvplane.base.layers import HiddenStateSpec, KVSharingLayer, Layer, MLASpec
from kvplane.v1 import replica_pb2 as pb
from kvplane.wire.columns import build
from kvplane.wire.same import decode_enum, encode_enum

AnyLayer: TypeAlias = Layer | KVSharingLayer

# Fields of the message that no field of our formats has, or has in another form.
_OTHERS = {"kind", "states", "mamba_mode", "is_draft", "page_size_padded", "dcp_sharded", "hidden_state"}
_SAME = [name for name in pb.LayerFormat.DESCRIPTOR.fields_by_name if name not in _OTHERS]
# Fields of our formats that have another name in the message.
_NAMES = {
    "padded_page_bytes": "page_size_padded",
    "type": "kind",
    "mode": "mamba_mode",
    "shapes": "states",
    "dtypes": "states",
}


def encode_layer(layer: AnyLayer, where: str) -> pb.Layer:
    """Return the message of a layer. Raises InvalidArgument with the field `where` for a value that its message field
    cannot hold.
    """
    if isinstance(layer, KVSharingLayer):
        return pb.Layer(name=layer.name, shares_with=layer.shares_with)
    layer_format = _encode_format(layer.spec, f"{where}.format")
    layer_format.is_draft = layer.is_draft
    return pb.Layer(name=layer.name, format=layer_format)


def decode_layer(message: pb.Layer, where: str) -> AnyLayer:
    """Return the layer of a message. Raises InvalidArgument for an impossible layer; the error's field is `where` and
    the name of the wrong field.
    """
    if message.HasField("format") == bool(message.shares_with):
        found = "both format and shares_with" if message.shares_with else "neither format nor shares_with"
        raise InvalidArgument(
            f"the layer has {found}",
            field=where,
            remedy="give format for a layer with a cache of its own, or shares_with for one that reads another's",
        )
    if message.shares_with:
        return KVSharingLayer(message.name, message.shares_with)
    try:
        spec = spec_from_dict(_decode_format(message.format, f"{where}.format"), f"{where}.format")
    except InvalidArgument as error:
        prefix, _, name = error.field.rpartition(".")
        error.field = f"{prefix}.{_NAMES.get(name, name)}"
        raise
    return Layer(message.name, spec, message.format.is_draft)


def _encode_format(spec: LayerSpec, where: str) -> pb.LayerFormat:
    given = spec_to_dict(spec)
    message = {name: given[name] for name in _SAME if name in given}
    message["kind"] = encode_enum(pb.GroupKind, spec.kind)
    message["hidden_state"] = isinstance(spec, HiddenStateSpec)
    message["page_size_padded"] = spec.padded_page_bytes
    if "dcp_sharded" in given:
        message["dcp_sharded"] = spec.dcp_sharded
    if "mode" in given:
        message["mamba_mode"] = encode_enum(pb.MambaMode, MambaMode(given["mode"]))
    if "shapes" in given:
        pairs = zip(given["shapes"], given["dtypes"], strict=True)
        message["states"] = [pb.StateTensor(shape=shape, dtype=dtype) for shape, dtype in pairs]
    return build(pb.LayerFormat, where, message)


def _decode_format(message: pb.LayerFormat, where: str) -> dict[str, object]:
    """Return the fields that are set in the message, under the names that kvplane's layer formats use."""
    data: dict[str, object] = {"type": _decode_type(message, where)}
    data |= {name: value for name in _SAME if (value := getattr(message, name))}
    if message.page_size_padded:
        data["padded_page_bytes"] = message.page_size_padded
    if message.HasField("dcp_sharded"):
        data["dcp_sharded"] = message.dcp_sharded
    if message.states:
        data["shapes"] = [list(state.shape) for state in message.states]
        data["dtypes"] = [state.dtype for state in message.states]
    if message.mamba_mode:
        data["mode"] = decode_enum(pb.MambaMode, message.mamba_mode, f"{where}.mamba_mode", MambaMode.NONE).value
    return data


def _decode_type(message: pb.LayerFormat, where: str) -> str:
    """Return the name of the layer format's type; "" if the message has none."""
    kind = decode_enum(pb.GroupKind, message.kind, f"{where}.kind", GroupKind.FULL_ATTENTION)
    if not message.hidden_state:
        return kind.value if message.kind else ""
    if kind is not MLASpec.kind:
        raise InvalidArgument(
            f"hidden states have the kind {kind.value}, but are stored in MLA's format",
            field=f"{where}.kind",
            remedy="give MLA_ATTENTION",
        )
    return HiddenStateSpec.type_name
