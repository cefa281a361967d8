"""Numbers that no engine sends, in each field of a mirror's messages: no session ends with INTERNAL.

Each integer is set to the edges of its type, each column to entries of the highest bit and of all bits.
"""

from __future__ import annotations

import grpc
import pytest

from kvplane.base.errors import InternalError
from kvplane.wire.mirror import mirrored_message, slice_message
from kvplane.wire.spec import encode_spec
from kvplane.wire.stream import open_message
from kvplane_service.replicas.mirror import Mirror
from tests.service.mirrors import DecidingEngine, open_request, spec_of
from tests.service.mutations import FD, fields_of, is_list
from tests.service.rig import NONCES, Stream, error_of, running

STEPS = 40
EDGES = {
    FD.TYPE_UINT64: (1 << 63, (1 << 63) - 1, (1 << 64) - 1),
    FD.TYPE_FIXED64: (1 << 63, (1 << 64) - 1),
    FD.TYPE_UINT32: (1 << 31, (1 << 32) - 1),
}


class Followed:
    """A random engine whose messages a service gets, and the engine's image before each of them."""

    def __init__(self, service):
        self.service, self.engine = service, DecidingEngine(spec_of("window and full"), seed=3)
        self.messages, self.images = [], []
        for _ in range(STEPS):
            self.images.append(self.engine.image())
            self.engine.run_step()
            self.messages.append(mirrored_message(self.engine.message(), self.engine.replica.seq, age_ms=1))
        service.register("r", encode_spec(self.engine.spec))

    def open(self, **terms):
        """A session of the engine, or the error for which there is none."""
        stream = Stream(self.service.channel)
        stream.send_raw(open_message(open_request(next(NONCES), **terms)).SerializeToString())
        try:
            stream.opened = stream.receive().opened
        except grpc.RpcError as error:
            return error_of(error)
        return stream

    def answer(self, at, message):
        """The answer to a message where message `at` belongs: progress, or the error that ends the session."""
        stream = self.open()
        try:
            stream.send_raw(slice_message(self.images[at], True, True).SerializeToString())
            assert not stream.receive().progress.image_wanted
            stream.send_raw(message.SerializeToString())
            return stream.receive().progress
        except grpc.RpcError as error:
            return error_of(error)
        finally:
            stream.vanish()


def changed(message):
    """Yield by field copies of the message with an edge in it."""
    for place, (owner, field) in enumerate(fields_of(message)):
        value = getattr(owner, field.name)
        edges: tuple[int | bytes, ...] = () if is_list(value) else EDGES.get(field.type, ())
        if field.type == FD.TYPE_BYTES and not is_list(value) and value:
            edges = bytes([0xFF]) * len(value), (bytes([0, 0, 0, 0x80]) * len(value))[: len(value)]
        for edge in edges:
            copy = type(message).FromString(message.SerializeToString())
            target, _ = fields_of(copy)[place]
            setattr(target, field.name, edge)
            yield field.full_name, edge, copy


@pytest.fixture(scope="module")
def followed():
    with running() as service:
        yield Followed(service)


def test_no_number_in_a_message_of_a_mirror_ends_its_session_with_internal(followed):
    tried, wrong = set(), []
    for at, message in enumerate(followed.messages):
        for name, edge, copy in changed(message):
            if (name, edge[:4] if isinstance(edge, bytes) else edge) in tried:
                continue
            tried.add((name, edge[:4] if isinstance(edge, bytes) else edge))
            answer = followed.answer(at, copy)
            if isinstance(answer, InternalError):
                wrong.append((name, edge, answer.message))
            followed.service.describe()
    assert not wrong
    names = {name.removeprefix("kvplane.v1.") for name, _ in tried}
    assert {"Step.seq", "Step.epoch", "Step.executed_through", "MirroredStep.cache_request"} <= names
    assert {"MirroredSteps.newest", "Facts.appended", "Run.slot", "Admit.expected_hit"} <= names
    assert followed.answer(STEPS - 1, followed.messages[-1]).applied_through == STEPS


@pytest.mark.parametrize("number", [1 << 63, (1 << 63) - 1, (1 << 64) - 1])
@pytest.mark.parametrize("field", ["epoch", "life", "incarnation"])
def test_no_number_of_an_open_is_internal(followed, field, number):
    opened = followed.open(**{field: number})
    if isinstance(opened, Stream):
        opened.vanish()
    assert not isinstance(opened, InternalError)


def test_a_number_that_ends_a_session_with_internal_is_found(followed, monkeypatch):
    async def fails(mirror, steps, newest, age_ms, offload):
        assert newest < 1 << 63
        return mirror.progress()

    monkeypatch.setattr(Mirror, "apply", fails)
    with pytest.raises(AssertionError):
        test_no_number_in_a_message_of_a_mirror_ends_its_session_with_internal(followed)
