"""The options of `Client.session`, checked, and the first message of the session; for both clients."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TypedDict, cast, get_type_hints

from kvplane.base.errors import InvalidArgument
from kvplane.base.session import NEW_EPOCH, OPEN_TIMEOUT_S, STEP_TIMEOUT_S, OpenRequest
from kvplane.base.typed import check
from kvplane.sansio.retry import RetryPolicy
from kvplane.session.known_requests import KnownRequests
from kvplane.session.reopening import Revival


class SessionOptions(TypedDict, total=False):
    """Options of a session.

    Attributes:
        epoch: the engine life to continue; NEW_EPOCH, the default, begins a new one.
        with_events: answers carry cache events.
        stamp_table: see OpenRequest; not with a `revive`, which provides it.
        client: name of the client, for operators.
        retry: how to retry when the stream breaks, see Session.
        step_timeout_s: seconds that a call waits for an answer before it raises DeadlineExceeded.
        open_timeout_s: seconds that opening a stream may take.
        remember: without a `revive`, record the requests so that a restarted service can receive them; True by default.
    """

    epoch: int
    with_events: bool
    stamp_table: Sequence[int]
    client: str
    retry: RetryPolicy | None
    step_timeout_s: float
    open_timeout_s: float
    remember: bool


def draw_nonce() -> int:
    """A u64 that names one stream."""
    return secrets.randbits(64)


def first_request(replica: str, revive: Callable[[], Revival] | None, options: SessionOptions) -> OpenRequest:
    """The message that opens the session. Raises InvalidArgument for an unknown option or an invalid value."""
    hints = get_type_hints(SessionOptions)
    for name, value in options.items():
        if name not in hints:
            raise InvalidArgument("unknown option", field=name, remedy=f"use one of {', '.join(hints)}")
        check(value, hints[name], name)
        if name.endswith("timeout_s") and not cast(float, value) > 0.0:
            raise InvalidArgument(f"{value} s is not a timeout", field=name, remedy="give seconds above 0")
    check(replica, str, "replica")
    check(revive, Callable[[], Revival] | None, "revive")
    epoch, stamps = options.get("epoch", NEW_EPOCH), tuple(options.get("stamp_table", ()))
    with_events, client = options.get("with_events", False), options.get("client", "")
    if revive is None:
        return OpenRequest(replica, draw_nonce(), epoch, with_events, client, stamps)
    if stamps or epoch != NEW_EPOCH:
        name = "stamp_table" if stamps else "epoch"
        raise InvalidArgument("a revive begins an engine life with its own stamps", field=name, remedy="omit it")
    revival = revive()
    check(revival, Revival, "revive()")
    return revival.first_request(replica, draw_nonce(), with_events, client)


def timeouts(options: SessionOptions) -> tuple[float, float]:
    """The timeouts of opening a stream and of a step, in seconds."""
    return options.get("open_timeout_s", OPEN_TIMEOUT_S), options.get("step_timeout_s", STEP_TIMEOUT_S)


def revival_of(
    revive: Callable[[], Revival] | None, options: SessionOptions
) -> Callable[[], Revival] | KnownRequests | None:
    """How the session survives a restart of its service; None: it does not.

    Requests are recorded only for a new engine life: a session that continues one has not seen its earlier steps.
    """
    if revive is not None or options.get("epoch", NEW_EPOCH) != NEW_EPOCH or not options.get("remember", True):
        return revive
    return KnownRequests()
