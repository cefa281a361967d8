"""The conversion between protobuf messages and kvplane's types, for client and service. No other module does it.

The columns of a step are packed little-endian integers. Decoding checks lengths and value ranges, and its errors name
the invalid field; encoding refuses values that the message cannot hold. Neither decoding nor encoding interprets a
step.
"""

from kvplane.wire.events import decode_batch, encode_batch
from kvplane.wire.extra_keys import decode_extra_keys, encode_extra_keys
from kvplane.wire.layers import decode_layer, encode_layer
from kvplane.wire.plan import decode_plan, encode_plan
from kvplane.wire.result import (
    decode_event,
    decode_result,
    encode_event,
    encode_result,
)
from kvplane.wire.same import encode_same
from kvplane.wire.session import (
    decode_open,
    decode_opened,
    decode_step_error,
    encode_open,
    encode_opened,
    encode_step_error,
    split_stamps,
)
from kvplane.wire.sources import encode_layer_source, encode_model_source
from kvplane.wire.spec import decode_policy, decode_spec, decode_tiers, encode_spec
from kvplane.wire.step import decode_step, encode_step
from kvplane.wire.unary import (
    encode_allocate,
    encode_commit,
    encode_content,
    encode_ending,
    encode_header,
    encode_source,
)
from kvplane.wire.worker import (
    decode_assignment,
    decode_renewal,
    decode_worker,
    encode_assignment,
    encode_renewal,
    encode_worker,
)

__all__ = [
    "decode_assignment",
    "decode_batch",
    "decode_event",
    "decode_extra_keys",
    "decode_layer",
    "decode_open",
    "decode_opened",
    "decode_plan",
    "decode_policy",
    "decode_renewal",
    "decode_result",
    "decode_spec",
    "decode_step",
    "decode_step_error",
    "decode_tiers",
    "decode_worker",
    "encode_allocate",
    "encode_assignment",
    "encode_batch",
    "encode_commit",
    "encode_content",
    "encode_ending",
    "encode_event",
    "encode_extra_keys",
    "encode_header",
    "encode_layer",
    "encode_layer_source",
    "encode_model_source",
    "encode_open",
    "encode_opened",
    "encode_plan",
    "encode_renewal",
    "encode_result",
    "encode_same",
    "encode_source",
    "encode_spec",
    "encode_step",
    "encode_step_error",
    "encode_worker",
    "split_stamps",
]
