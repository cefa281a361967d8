"""Numbers that parsers would truncate are refused; everything else is accepted."""

from __future__ import annotations

from typing import cast

import pytest
from google.protobuf.descriptor import Descriptor
from hypothesis import given
from hypothesis import strategies as st

from kvplane.base.errors import InvalidArgument
from kvplane.v1.allocation_pb2 import AllocateSlotsRequest, SessionRequest
from kvplane.wire.parsing import check_exact

DESCRIPTOR = cast(Descriptor, AllocateSlotsRequest.DESCRIPTOR)
BIG = b"\x80\x80\x80\x80\x10"  # 2^32


def tag(number: int, kind: int) -> bytes:
    return bytes([number << 3 | kind])


def inside(number: int, payload: bytes) -> bytes:
    return tag(number, 2) + bytes([len(payload)]) + payload


CUT = {
    "a scalar": (tag(6, 0) + BIG, "max_new_tokens"),
    "a signed scalar": (tag(7, 0) + BIG, "extra_tokens"),
    "more than 64 bits' worth of bytes": (tag(6, 0) + b"\xff" * 9 + b"\x01", "max_new_tokens"),
    "a packed element": (inside(3, inside(1, b"\x01" + BIG + b"\x02")), "content.token_ids"),
    "a single element": (inside(3, tag(1, 0) + BIG), "content.token_ids"),
    "deep inside": (inside(3, inside(4, inside(4, tag(2, 0) + BIG))), "content.extra_keys.multimodal.offset"),
}


@pytest.mark.parametrize(("raw", "name"), CUT.values(), ids=CUT.keys())
def test_a_number_that_a_parser_would_truncate_is_refused_by_field(raw, name):
    AllocateSlotsRequest.FromString(raw)
    with pytest.raises(InvalidArgument) as caught:
        check_exact(DESCRIPTOR, raw)
    assert caught.value.field == name


UNCUT = {
    "the greatest": AllocateSlotsRequest(max_new_tokens=2**32 - 1, extra_tokens=-(2**31)).SerializeToString(),
    "64 bits where they belong": AllocateSlotsRequest(header={"epoch": 2**64 - 1}).SerializeToString(),
    "text": AllocateSlotsRequest(request_id="x" * 3, victims=["\u0434\u0434\u0434"]).SerializeToString(),
    "bytes": AllocateSlotsRequest(content={"hashes": [BIG * 4]}).SerializeToString(),
    "an unknown field": tag(15, 0) + b"\x01" + b"\xc8\x01" + BIG,
    "a message's number with a number's wire type": tag(3, 0) + BIG,
    "a number's field with a fixed wire type": tag(6, 1) + b"\x80\x80\x80\x80\x10\x00\x00\x00",
}


@pytest.mark.parametrize("raw", UNCUT.values(), ids=UNCUT.keys())
def test_exact_numbers_and_unknown_fields_pass(raw):
    AllocateSlotsRequest.FromString(raw)
    check_exact(DESCRIPTOR, raw)


@given(st.lists(st.integers(0, 2**32 - 1)), st.integers(0, 2**32 - 1), st.lists(st.binary(max_size=40), max_size=4))
def test_messages_of_our_encoder_pass(tokens, count, hashes):
    content = {"token_ids": tokens, "hashes": hashes, "num_tokens": count}
    message = AllocateSlotsRequest(content=content, max_new_tokens=count)
    check_exact(DESCRIPTOR, message.SerializeToString())


def test_a_protobuf_group_is_refused():
    raw = b"\xc3\x01" + b"\xc8\x01" + BIG + b"\xc4\x01"
    SessionRequest.FromString(raw)
    with pytest.raises(InvalidArgument, match="wire type 3"):
        check_exact(cast(Descriptor, SessionRequest.DESCRIPTOR), raw)
