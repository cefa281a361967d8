"""The one place where protobuf messages and kvplane's own types turn into each other, for client and service.

Columns of a step are little-endian packed integers. Decoding checks shape and names the field at fault;
encoding refuses what a message cannot hold. Neither knows what a step means.
"""

from kvplane.wire.result import (
    decode_event,
    decode_orders,
    decode_result,
    encode_event,
    encode_orders,
    encode_result,
)
from kvplane.wire.session import (
    decode_open,
    decode_opened,
    decode_step_error,
    encode_open,
    encode_opened,
    encode_step_error,
)
from kvplane.wire.spec import decode_spec, encode_spec
from kvplane.wire.step import decode_extra_keys, decode_step, encode_extra_keys, encode_step

__all__ = [
    "decode_event",
    "decode_extra_keys",
    "decode_open",
    "decode_opened",
    "decode_orders",
    "decode_result",
    "decode_spec",
    "decode_step",
    "decode_step_error",
    "encode_event",
    "encode_extra_keys",
    "encode_open",
    "encode_opened",
    "encode_orders",
    "encode_result",
    "encode_spec",
    "encode_step",
    "encode_step_error",
]
