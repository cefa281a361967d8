"""Numbers that parsers would truncate are refused; everything else is accepted."""

from __future__ import annotations

from array import array
from typing import Any, cast

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import example, given
from hypothesis import strategies as st

from kvplane.base.errors import InvalidArgument
from kvplane.base.hashing import PackedHashes, native
from kvplane.v1.allocation_pb2 import AllocateSlotsRequest, FindCacheHitRequest, RequestContent, SessionRequest
from kvplane.wire import parsing
from kvplane.wire.parsing import check_exact, parse, parse_long

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


# -- long messages


def values(message: Any, descriptor: Descriptor) -> dict[str, Any]:
    """All that a reader sees of a message, or of an object that reads like one."""
    return {field.name: value(message, field) for field in descriptor.fields}


def value(message: Any, field: FieldDescriptor) -> Any:
    found = getattr(message, field.name)
    if field.message_type is None:
        return found if isinstance(found, (str, bytes)) or not hasattr(found, "__len__") else list(found)
    if hasattr(found, "__len__"):
        return [values(one, field.message_type) for one in found]
    return values(found, field.message_type) if message.HasField(field.name) else None


def outcome(read: Any, kind: type[Message], raw: bytes) -> Any:
    try:
        return values(read(kind, raw), cast(Descriptor, kind.DESCRIPTOR))
    except InvalidArgument as error:
        return error.field, str(error)


u32 = st.integers(0, 2**32 - 1)
contents = st.fixed_dictionaries(
    {"token_ids": st.lists(u32, max_size=30)},
    optional={"domain": st.text(max_size=9), "hashes": st.lists(st.binary(max_size=9), max_size=3), "max_tokens": u32},
)
digests = st.integers(1, 9).flatmap(lambda size: st.lists(st.binary(min_size=size, max_size=size), max_size=9))
columns = st.fixed_dictionaries({"tokens": st.binary(max_size=60)}, optional={"slot": st.binary(max_size=4)})
parts = st.fixed_dictionaries({"news": columns}, optional={"facts": columns, "with_hashes": st.booleans()})
messages: st.SearchStrategy[tuple[type[Message], bytes]] = st.one_of(
    st.builds(AllocateSlotsRequest, request_id=st.text(max_size=9), content=contents, max_new_tokens=u32),
    st.builds(AllocateSlotsRequest, appended=st.fixed_dictionaries({"token_ids": st.lists(u32, max_size=30)})),
    st.builds(
        AllocateSlotsRequest, content=contents, appended=contents.map(lambda each: {"token_ids": each["token_ids"]})
    ),
    st.builds(RequestContent, token_ids=st.lists(u32, max_size=30)),
    st.builds(FindCacheHitRequest, content=st.fixed_dictionaries({"num_tokens": u32}, optional={"hashes": digests})),
    st.builds(
        AllocateSlotsRequest, request_id=st.text(max_size=9), appended=st.fixed_dictionaries({"hashes": digests})
    ),
    st.builds(SessionRequest, step=st.fixed_dictionaries({"seq": u32, "parts": st.lists(parts, max_size=2)})),
    st.builds(SessionRequest, image=st.fixed_dictionaries({"data": st.binary(max_size=60), "last": st.booleans()})),
).map(lambda message: (type(message), message.SerializeToString()))


@pytest.mark.parametrize("how", ["compiled", "in pieces"])
@given(messages, st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255), st.integers(0, 2)), max_size=2))
@example((AllocateSlotsRequest, inside(3, inside(1, b"\x01" + BIG + b"\x02"))), [])
@example((AllocateSlotsRequest, inside(3, inside(1, b"\x80\x80\x80\x80\x00" * 9))), [])  # a long form of 0
@example((AllocateSlotsRequest, inside(3, inside(1, b"\x07" * 9 + b"\x80"))), [])
@example((AllocateSlotsRequest, inside(3, inside(1, b"\x07" * 9)) + inside(3, tag(1, 0) + b"\x01")), [])  # merged
@example((AllocateSlotsRequest, inside(3, inside(1, b"\x07" * 9) + tag(1, 0) + b"\x01")), [])
@example((RequestContent, inside(2, b"ab") * 3 + inside(2, b"c") + inside(2, b"de")), [])  # hashes of two sizes
@example((RequestContent, inside(2, b"ab") * 9 + inside(5, b"d") + inside(2, b"de")), [])  # not all together
@example((RequestContent, inside(2, b"ab") * 9 + tag(2, 2) + b"\x02a"), [])
@example((RequestContent, tag(2, 2) + b"\x80\x01" + b"a" * 128), [])  # whose size takes two bytes
@example((RequestContent, inside(2, b"") * 9), [])
@example((AllocateSlotsRequest, inside(9, b"\x07" * 9)), [])  # no column of u32 packed so
def test_a_long_message_reads_as_any_other(how, message, changes):
    """Of all encoders, and with bytes that are wrong: the same values, or the same error."""
    kind, changed = message[0], bytearray(message[1])
    for at, byte, more in changes:
        changed[at : at + more] = bytes([byte])
    raw = bytes(changed)
    with pytest.MonkeyPatch.context() as patch:
        if how == "compiled":
            if native._COMPILED is None:
                pytest.skip("the compiled module is not installed")
            patch.setenv(native.VARIABLE, "on")
        else:
            patch.setenv(native.VARIABLE, "off")
            patch.setattr(parsing, "_PIECE_BYTES", 7)
        assert outcome(parse_long, kind, raw) == outcome(parse, kind, raw)


def test_the_tokens_of_a_long_message_are_an_array_and_its_other_fields_a_message():
    content = RequestContent(token_ids=range(100_000), domain="d")
    raw = AllocateSlotsRequest(request_id="r", content=content).SerializeToString()
    read = parse_long(AllocateSlotsRequest, raw)
    assert isinstance(read.content.token_ids, array)
    assert read.content.token_ids == array("I", range(100_000))
    assert (read.request_id, read.content.domain, read.HasField("appended")) == ("r", "d", False)


def test_the_hashes_of_a_long_message_stay_joined():
    hashes = [bytes([at % 251] * 32) for at in range(70_000)]
    content = RequestContent(num_tokens=9, hashes=hashes, domain="d")
    read = parse_long(FindCacheHitRequest, FindCacheHitRequest(replica="r", content=content).SerializeToString())
    assert isinstance(read.content.hashes, PackedHashes)
    assert read.content.hashes.joined == b"".join(hashes)
    assert (read.replica, read.content.domain, read.WhichOneof("what"), len(read.content.hashes)) == (
        "r",
        "d",
        "content",
        70_000,
    )


def test_the_tokens_of_a_long_step_are_copied_once():
    tokens = array("I", range(100_000)).tobytes()
    step = {"seq": 7, "parts": [{"news": {"slot": b"abcd", "tokens": tokens}}]}
    read = parse_long(SessionRequest, SessionRequest(step=step).SerializeToString())
    (part,) = read.step.parts
    assert not isinstance(part, Message)
    assert (part.news.tokens, part.news.slot, read.WhichOneof("kind"), read.step.seq) == (tokens, b"abcd", "step", 7)


def test_a_message_of_many_fields_is_parsed_whole():
    raw = inside(3, tag(2, 0) + b"\x01") * 100 + inside(3, inside(1, b"\x07" * 100))
    read = parse_long(AllocateSlotsRequest, raw)
    assert isinstance(read, AllocateSlotsRequest)
    assert len(read.content.token_ids) == 100


def test_a_long_message_of_one_endless_varint_is_refused_at_once():
    """Its value would have a million bits, and take hours to compute."""
    with pytest.raises(InvalidArgument):
        parse_long(AllocateSlotsRequest, b"\xff" * 5_000_000)
