"""The conversion between protobuf messages and kvplane's types, for client and service. No other module does it.

The columns of a step are packed little-endian integers. Decoding checks lengths and value ranges, and its errors name
the invalid field; encoding refuses values that the message cannot hold. Neither decoding nor encoding interprets a
step.
"""

from kvplane.wire.extra_keys import decode_extra_keys as decode_extra_keys
from kvplane.wire.extra_keys import encode_extra_keys as encode_extra_keys
from kvplane.wire.layers import decode_layer as decode_layer
from kvplane.wire.layers import encode_layer as encode_layer
from kvplane.wire.plan import decode_plan as decode_plan
from kvplane.wire.plan import encode_plan as encode_plan
from kvplane.wire.result import decode_batch as decode_batch
from kvplane.wire.result import decode_event as decode_event
from kvplane.wire.result import decode_result as decode_result
from kvplane.wire.result import encode_batch as encode_batch
from kvplane.wire.result import encode_event as encode_event
from kvplane.wire.result import encode_result as encode_result
from kvplane.wire.same import encode_same as encode_same
from kvplane.wire.session import decode_open as decode_open
from kvplane.wire.session import decode_opened as decode_opened
from kvplane.wire.session import decode_step_error as decode_step_error
from kvplane.wire.session import encode_open as encode_open
from kvplane.wire.session import encode_opened as encode_opened
from kvplane.wire.session import encode_step_error as encode_step_error
from kvplane.wire.session import split_stamps as split_stamps
from kvplane.wire.spec import decode_policy as decode_policy
from kvplane.wire.spec import decode_spec as decode_spec
from kvplane.wire.spec import decode_tiers as decode_tiers
from kvplane.wire.spec import encode_spec as encode_spec
from kvplane.wire.step import decode_step as decode_step
from kvplane.wire.step import encode_step as encode_step
from kvplane.wire.unary import encode_allocate as encode_allocate
from kvplane.wire.unary import encode_commit as encode_commit
from kvplane.wire.unary import encode_content as encode_content
from kvplane.wire.unary import encode_ending as encode_ending
from kvplane.wire.unary import encode_header as encode_header
from kvplane.wire.unary import encode_layer_source as encode_layer_source
from kvplane.wire.unary import encode_model_source as encode_model_source
from kvplane.wire.unary import encode_source as encode_source
from kvplane.wire.worker import decode_assignment as decode_assignment
from kvplane.wire.worker import decode_news as decode_news
from kvplane.wire.worker import decode_renewal as decode_renewal
from kvplane.wire.worker import decode_worker as decode_worker
from kvplane.wire.worker import encode_assignment as encode_assignment
from kvplane.wire.worker import encode_news as encode_news
from kvplane.wire.worker import encode_renewal as encode_renewal
from kvplane.wire.worker import encode_worker as encode_worker
