"""A core that reads messages applies what Python reads from them, and answers what Python writes; it packs decisions
about steps of messages and of objects as Python does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvplane import wire
from kvplane.base.errors import InvalidArgument
from kvplane.base.sections import Peers, Prefetch, Retain
from kvplane.base.step import Admit, ExtraKeys, Facts, News, Part, Resume, Run, Step, StepResult
from kvplane.v1 import allocation_pb2 as pb
from kvplane.v1 import step_pb2
from kvplane.wire.parsing import parse
from kvplane_core.face.interface import HAS_KEYS, ReadStep
from kvplane_core.spec.replica import Replica
from kvplane_service.decisions.log import without_tokens
from kvplane_service.decisions.packing import HEAD, pack_decision
from kvplane_service.decisions.sent import Record, SentResult, SentStep, answered, kinds_of
from kvplane_service.replicas.step_order import check_sections, size_of
from tests.core import page_engine, test_tier_contents
from tests.core.compared import ComparedCores
from tests.core.test_page_contents import CACHED_MIXES, run
from tests.service.hosts import spec_of
from tests.service.test_packing import finish

native = pytest.importorskip(
    "kvplane_core.face.native",
    reason="the core is not compiled: install g++ and install kvplane again",
    exc_type=ImportError,
)
if TYPE_CHECKING:
    from kvplane_core.face.native import NativeReplica
else:
    NativeReplica = native.NativeReplica
AT_NS, TOOK_NS = 1 << 50, 70_000


def message_of(step: Step) -> bytes:
    return pb.SessionRequest(step=wire.encode_step(step)).SerializeToString()


class ByMessages(NativeReplica):
    """A compiled core that gets its steps as messages, and is compared with what Python reads, packs and writes.

    Attributes:
        sent: number of steps that came as messages.
    """

    sent = 0

    def _apply(self, step: Step, alone: bool) -> StepResult:
        try:
            message = message_of(step)
            decoded = wire.decode_step(parse(pb.SessionRequest, message).step, self.digest_size)
        except InvalidArgument:
            return answered(step, super()._apply(step, alone))
        read = self.read_step(message)
        assert read is not None
        assert (read.epoch, read.seq, read.part, read.last) == (step.epoch, step.seq, step.part, step.last)
        assert (read.executed_through, read.traceparent) == (step.executed_through, step.traceparent)
        assert (read.num_parts, read.num_rows, read.num_tokens) == (len(step.parts), *size_of(step))
        assert read.kinds & ~HAS_KEYS == kinds_of(step)
        sent = SentStep(read, message, lambda _: decoded.parts)
        assert self.effort(sent) == self.effort(step)
        answer = super()._apply(sent, alone)
        type(self).sent += 1
        return self._recorded(sent, decoded, answered(sent, answer))

    def _recorded(self, sent: SentStep, decoded: Step, result: StepResult) -> StepResult:
        assert isinstance(result, SentResult)
        packed = self.pack_applied(sent, HEAD.pack(TOOK_NS, AT_NS))
        assert packed is not None
        record = Record(packed, result.events, result.tier_events)
        result.recorded(record)
        made = StepResult(result.seq, result.part, result.parts, result.published_through)
        assert result.message == pb.SessionResponse(result=wire.encode_result(made)).SerializeToString()
        assert packed == packed_by_python(decoded, made)
        return made


def packed_by_python(step: Step, result: StepResult) -> bytes:
    events = [part.events for part in result.parts]
    return finish(pack_decision(without_tokens(step), result, events, AT_NS, TOOK_NS))


class OfObjects(NativeReplica):
    """A compiled core that gets its steps as objects; what it packs is compared with what Python packs.

    Attributes:
        sent: number of steps that it packed.
    """

    sent = 0

    def _apply(self, step: Step, alone: bool) -> StepResult:
        result = super()._apply(step, alone)
        assert isinstance(result, StepResult)
        packed = self.pack_applied(step, HEAD.pack(TOOK_NS, AT_NS))
        assert packed in (None, packed_by_python(step, result))
        type(self).sent += packed is not None
        return result


@pytest.fixture(params=[ByMessages, OfObjects])
def counted(monkeypatch, request) -> type[ByMessages | OfObjects]:
    """Let the second core of page engines be such a core."""
    monkeypatch.setattr(page_engine, "new_replica", lambda spec: ComparedCores(Replica(spec), request.param.load))
    monkeypatch.setattr(request.param, "sent", 0)
    return request.param


@pytest.mark.parametrize("mix", CACHED_MIXES)
def test_steps_of_random_engines_are_applied_alike_as_messages(counted, mix):
    for seed in range(10, 12):
        run(mix, seed)
    assert counted.sent > 50


@pytest.mark.parametrize("mix", ["window and full", "states and full"])
def test_steps_with_tiers_are_applied_alike_as_messages(counted, mix):
    for seed in range(10, 13):
        test_tier_contents.run(mix, seed)
    assert counted.sent > 50


EVERYTHING = Part(
    facts=Facts([1, 2], computed=[-1, 7], appended=[2, 0], tokens=[5, 6], commit=[-1, 3], end=[0, 2], hint=[-1, 4]),
    news=News(
        [3], [2], tokens=[8, 9], request_id=["é\U0001f600"], domain=["team"], extra_keys=[ExtraKeys(salt="s")],
        traceparent=["00-1-2-01"],
    ),
    run=Run([1], extra=[-3], cap=[1 << 31]),
    prefetch=Prefetch([4], [1], bytes(32), ["x"], [1 << 62]),
    retain=Retain([1], bytes(32), ["d"], ["o"], [1], [1 << 63], [50]),
    peers=Peers([4], [1 << 50], [0], bytes(32), ["d"], [5]),
    resume=Resume([9], [1], [2], [3], num_blocks=[1], blocks=[5]),
    with_hashes=True,
)  # fmt: skip


def core() -> ByMessages:
    return ByMessages(spec_of())


def read_of(step: Step) -> ReadStep:
    read = core().read_step(message_of(step))
    assert read is not None
    return read


def test_what_a_step_has_is_known_before_it_is_applied():
    step = Step(3, 4, [Part(), EVERYTHING], 2, False, 1, "00-a-b-01")
    read = read_of(step)
    assert read.num_parts == 2
    assert (read.num_rows, read.num_tokens) == size_of(step)
    assert read.kinds == kinds_of(step) | HAS_KEYS
    assert (read.of_service_at, list(read.domains)) == (1, [(1, ["team"])])
    assert (read.epoch, read.seq, read.part, read.last) == (3, 4, 2, False)
    assert (read.executed_through, read.traceparent) == (1, "00-a-b-01")


@pytest.mark.parametrize("section", [{"retain": Retain([1], bytes(32))}, {"peers": Peers(gone=[3])}])
def test_sections_that_only_the_service_adds_are_refused(section):
    step = Step(3, 4, [Part(), Part(**section)])
    assert read_of(step).of_service_at == 1
    assert read_of(Step(3, 4, [Part(), Part()])).of_service_at == -1
    (name,) = section
    with pytest.raises(InvalidArgument) as refused:
        check_sections(step)
    assert refused.value.field == f"parts[1].{name}"


def reads_alike(raw: bytes) -> bool:
    """Whether the core reads a message; then Python does too, and finds as many rows."""
    read = core().read_step(raw)
    if read is None or read.kinds & HAS_KEYS:
        return False
    step = wire.decode_step(parse(pb.SessionRequest, raw).step, 32)
    assert size_of(step) == (read.num_rows, read.num_tokens)
    assert (step.epoch, step.seq, step.part) == (read.epoch, read.seq, read.part)
    assert step.traceparent == read.traceparent
    return True


def test_a_message_with_a_wrong_byte_is_read_only_if_python_reads_it():
    part = replace(EVERYTHING, news=replace(EVERYTHING.news, extra_keys=[]))  # which the core does not read
    raw = bytearray(message_of(Step(3, 4, [part], executed_through=2)))
    results = set()
    for at in range(len(raw)):
        for bits in (1, 8, 128):
            raw[at] ^= bits
            results.add(reads_alike(bytes(raw)))
            raw[at] ^= bits
        results.add(reads_alike(bytes(raw[:at])))
    assert results == {False, True}


@pytest.mark.parametrize(
    "part",
    [
        step_pb2.Part(run=step_pb2.Run(slot=b"abc")),
        step_pb2.Part(run=step_pb2.Run(slot=bytes(8), extra=bytes(4))),
        step_pb2.Part(run=step_pb2.Run(extra=bytes(4))),
        step_pb2.Part(facts=step_pb2.Facts(slot=bytes(4), end=b"\4\0\0\0")),
        step_pb2.Part(facts=step_pb2.Facts(slot=bytes(4), appended=b"\2\0\0\0", tokens=bytes(4))),
        step_pb2.Part(facts=step_pb2.Facts(slot=bytes(4), num_hashes=b"\1\0\0\0", hashes=bytes(31))),
        step_pb2.Part(news=step_pb2.News(slot=bytes(8), num_tokens=bytes(8), domain=["a"])),
        step_pb2.Part(admit=step_pb2.Admit(on_refusal=step_pb2.ON_REFUSAL_PREEMPT)),
        step_pb2.Part(retain=step_pb2.Retain(num_hashes=bytes(8), owner=["a"])),
    ],
)
def test_a_malformed_step_is_left_to_python_which_names_its_fault(part):
    raw = pb.SessionRequest(step=step_pb2.Step(epoch=1, seq=1, parts=[part])).SerializeToString()
    assert core().read_step(raw) is None
    with pytest.raises(InvalidArgument) as refused:
        wire.decode_step(parse(pb.SessionRequest, raw).step, 32)
    assert refused.value.field.startswith("parts[0].")


@pytest.mark.parametrize(
    "wrong",
    [
        Part(news=News([0], [1], request_id=[7])),  # type: ignore[list-item]
        Part(admit=Admit([0], skip_zero_groups=[-1])),
        Part(news=News([0], [1], tokens=[-1])),
    ],
    ids=["text", "bits", "tokens"],
)
def test_a_refused_step_of_objects_leaves_nothing_in_the_memory_of_the_next_message(wrong):
    made = NativeReplica(spec_of())
    made.begin_epoch(1)
    right = Part(news=News([1], [2], tokens=[5, 6], request_id=["a"]), admit=Admit([1], skip_zero_groups=[1]))
    for seq in range(1, 9):  # the memory of some steps is used again
        with pytest.raises(InvalidArgument):
            made.apply(Step(1, seq, [wrong]))
        right.news.slot = right.admit.slot = [seq]
        step = Step(1, seq, [right])
        message = message_of(step)
        read = made.read_step(message)
        assert read is not None
        made.apply(SentStep(read, message, lambda _: [right]))


def test_a_step_of_very_many_parts_is_left_to_python():
    """An empty part is two bytes of a message, and a thousand times as many where it is read."""
    assert core().read_step(message_of(Step(1, 1, [Part()] * 4096))) is not None
    assert core().read_step(message_of(Step(1, 1, [Part()] * 4097))) is None


def as_step(step: bytes, after: bytes = b"") -> bytes:
    return b"\x12" + bytes([len(step)]) + step + after


ROWS = step_pb2.Step(epoch=1, seq=1, parts=[step_pb2.Part(run=step_pb2.Run(slot=bytes(4)))]).SerializeToString()


@pytest.mark.parametrize("number", [1, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_numbers_of_every_length_are_read(number):
    read = core().read_step(as_step(step_pb2.Step(epoch=number, seq=1, parts=[step_pb2.Part()]).SerializeToString()))
    assert read is not None
    assert read.epoch == number


@pytest.mark.parametrize("last", [2, 0x7F])
def test_a_number_of_more_than_64_bits_is_read_by_python_which_drops_the_bits_above(last):
    raw = as_step(b"\x08" + b"\xff" * 9 + bytes([last]) + ROWS[2:])
    assert core().read_step(raw) is None
    assert wire.decode_step(parse(pb.SessionRequest, raw).step, 32).epoch == (1 << 63) - 1 | (last & 1) << 63


@pytest.mark.parametrize(
    "text",
    [
        b"\xed\xa0\x80",
        b"\xed\xbf\xbf",
        b"\xc0\x80",
        b"\xe0\x80\x80",
        b"\xf4\x90\x80\x80",
        b"\xf5\x80\x80\x80",
        b"a\x80",
    ],
)
def test_what_is_no_utf8_is_left_to_python_which_refuses_it(text):
    raw = as_step(ROWS + b"\x3a" + bytes([len(text)]) + text)
    assert core().read_step(raw) is None
    with pytest.raises(InvalidArgument):
        parse(pb.SessionRequest, raw)
    good = as_step(ROWS + b"\x3a\x03\xed\x9f\xbf")  # the last letter before the surrogates
    assert reads_alike(good)


def test_what_follows_a_step_in_its_message_leaves_it_to_python():
    one = as_step(ROWS)
    assert core().read_step(one) is not None
    assert core().read_step(one + one) is None
    assert core().read_step(one + b"\x0a\x00") is None
    assert parse(pb.SessionRequest, one + b"\x0a\x00").WhichOneof("kind") == "open"


def test_a_step_in_other_bytes_is_read_by_python():
    """A section that comes twice: protobuf joins both."""
    one = step_pb2.Part(run=step_pb2.Run(slot=bytes(4))).SerializeToString()
    other = step_pb2.Part(run=step_pb2.Run(reserved=bytes(4))).SerializeToString()
    part = one + other
    step = b"\x08\x01\x10\x01\x32" + bytes([len(part)]) + part
    raw = b"\x12" + bytes([len(step)]) + step
    assert core().read_step(raw) is None
    decoded = wire.decode_step(parse(pb.SessionRequest, raw).step, 32)
    assert read_of(decoded).num_rows == 1


@pytest.mark.parametrize("more", [{"extra_keys": [ExtraKeys(salt="s")]}, {"traceparent": ["00-1-2-01"]}])
def test_python_packs_a_decision_about_objects_that_the_core_does_not_read(more):
    made, step = NativeReplica(spec_of()), Step(1, 1, [Part(news=News([0], [2], **more))])
    made.begin_epoch(1)
    made.apply(step)
    assert made.pack_applied(step, HEAD.pack(TOOK_NS, AT_NS)) is None
