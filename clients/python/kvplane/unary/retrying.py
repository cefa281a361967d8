"""The attempts of a unary call over the list of services and their redirections. Without I/O, for both clients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from kvplane.base.errors import KvplaneError, Unavailable
from kvplane.sansio.driver import Pause, Work
from kvplane.sansio.owners import Owners, Route
from kvplane.sansio.retry import Attempts, RetryPolicy
from kvplane.unary.calls import Call

TIMEOUT_S = 10.0
UNARY_RETRY = RetryPolicy(attempts=4)

Answer = TypeVar("Answer", bound=Message)
C = TypeVar("C")


@dataclass(slots=True)
class Ask(Generic[C]):
    """The action to send one call to one service. Its outcome is the answer."""

    channel: C
    call: Call[Any]


def asked(owners: Owners[C], call: Call[Answer], retry: RetryPolicy) -> Work[Ask[C] | Pause, Answer]:
    """Make a call and return its answer, as a generator of actions.

    The call goes to the current service of the list and follows Moved to the owner of the replica. After Unavailable a
    repeatable call goes to the next service.
    """
    attempts = Attempts(retry if call.repeatable else replace(retry, attempts=0))
    while True:
        route = Route(owners)
        try:
            while True:
                try:
                    answer: Answer = yield Ask(route.channel, call)
                    if call.check is not None:
                        call.check(answer)
                    return answer
                except KvplaneError as failed:
                    route.after(failed)
        except Unavailable as failed:
            yield Pause(attempts.pause_s(failed))
