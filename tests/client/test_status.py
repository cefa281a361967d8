"""Refusals round-trip through rich gRPC statuses."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from kvplane.base.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    KvplaneError,
    LimitExceeded,
    StaleEpoch,
    Unavailable,
)
from kvplane.rpc import status


def every_error():
    found = [KvplaneError]
    for cls in found:
        found.extend(cls.__subclasses__())
    return [cls for cls in found[1:] if cls.__module__ == KvplaneError.__module__]


class Outcome:
    """What grpc says of a failed call."""

    def __init__(self, code, details="", metadata=()):
        self._code, self._details, self._metadata = code, details, metadata

    def code(self):
        return self._code

    def details(self):
        return self._details

    def trailing_metadata(self):
        return self._metadata


@pytest.mark.parametrize("cls", every_error(), ids=lambda cls: cls.__name__)
@pytest.mark.parametrize(
    "facts", [{}, {"field": "spec.groups"}, {"remedy": "ask for less"}, {"metadata": {"epoch": "7"}}]
)
def test_refusals_round_trip_through_a_status(cls, facts):
    error = cls("too much (really): 9", **facts)
    sent = status.encode_status(error)
    assert sent.code == status.status_code(error).value[0]
    metadata = (("other", "x"), (status.DETAILS_KEY, sent.SerializeToString()))
    back = status.error_of_rpc(Outcome(status.status_code(error), sent.message, metadata))
    assert type(back) is cls
    assert vars(back) == vars(error)
    assert str(back) == sent.message


def test_every_error_class_has_a_row_in_the_table():
    assert {cls for cls in every_error() if status.status_code(cls("")) is grpc.StatusCode.UNKNOWN} == set()
    assert status.status_code(StaleEpoch("")) is grpc.StatusCode.FAILED_PRECONDITION
    assert status.status_code(KvplaneError("")) is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, LimitExceeded),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidArgument),
        (grpc.StatusCode.UNKNOWN, InternalError),
    ],
)
def test_an_error_without_details_is_mapped_by_its_code(code, cls):
    back = status.error_of_rpc(Outcome(code, "from afar", None))
    assert type(back) is cls
    assert back.message == "from afar"
    assert back.metadata == {"code": code.name}


def test_foreign_and_malformed_details_are_ignored():
    foreign = status_pb2.Status(message="no")
    foreign.details.add().Pack(error_details_pb2.ErrorInfo(reason="STALE_EPOCH", domain="example.org"))
    for raw in (foreign.SerializeToString(), b"\xff\xff\xff", b""):
        back = status.error_of_rpc(Outcome(grpc.StatusCode.NOT_FOUND, "no", ((status.DETAILS_KEY, raw),)))
        assert back.reason == "NOT_FOUND"


def test_long_texts_are_truncated_to_fit_metadata():
    error = InvalidArgument("m" * 9000, field="f", remedy="r" * 9000, metadata={"fact": "x" * 9000})
    assert len(status.encode_status(error).SerializeToString()) < 6000
