"""Conversion of extra keys, which are hashed with the tokens of a request, to and from protobuf."""

from __future__ import annotations

from kvplane.base.typed import check
from kvplane.base.values import NO_EXTRA_KEYS, ExtraKeys, Multimodal
from kvplane.v1 import step_pb2 as pb
from kvplane.wire.columns import build


def encode_extra_keys(keys: ExtraKeys, where: str = "extra_keys") -> pb.ExtraKeys:
    """Return the message of extra keys. Raises InvalidArgument; the error's field is `where` and the name of the wrong
    value.
    """
    check(keys, ExtraKeys, where)
    name, path = keys.lora or ("", "")
    items = [
        build(
            pb.MultimodalItem,
            f"{where}.multimodal[{at}]",
            {"identifier": item.identifier, "offset": item.offset, "length": item.length},
        )
        for at, item in enumerate(keys.multimodal)
    ]
    fields = {"salt": keys.salt, "multimodal": items, "prompt_embeds": keys.prompt_embeds}
    return build(pb.ExtraKeys, where, {"lora_name": name, "lora_path": path, **fields})


def decode_extra_keys(message: pb.ExtraKeys) -> ExtraKeys:
    """Return the extra keys of a message; the object NO_EXTRA_KEYS if the message has none."""
    if not message.ByteSize():
        return NO_EXTRA_KEYS
    has_lora = bool(message.lora_name or message.lora_path)
    return ExtraKeys(
        lora=(message.lora_name, message.lora_path) if has_lora else None,
        salt=message.salt,
        multimodal=tuple(Multimodal(item.identifier, item.offset, item.length) for item in message.multimodal),
        prompt_embeds=tuple(message.prompt_embeds),
    )
