"""How a client opens a session: the options of `Client.session`, for both clients."""

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
        epoch: the engine life to go on with; NEW_EPOCH, the default, begins one.
        with_events: answers carry cache events.
        stamp_table: see OpenRequest; not with a `revive`, which gives it.
        client: name of the client, for operators.
        retry: how to go on when the stream breaks, see Session.
        step_timeout_s: how long a call waits for an answer of the service before it raises DeadlineExceeded.
        open_timeout_s: how long the service may take to open a stream.
        remember: without a `revive`, keep what is needed to tell a new service the requests; True by default.
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
    """What opens the session. Raises InvalidArgument for an option that there is not, or cannot be."""
    hints = get_type_hints(SessionOptions)
    for name, value in options.items():
        if name not in hints:
            raise InvalidArgument("there is no such option", field=name, remedy=f"use one of {', '.join(hints)}")
        check(value, hints[name], name)
        if name.endswith("timeout_s") and not cast(float, value) > 0.0:
            raise InvalidArgument(f"{value} s is no time to wait", field=name, remedy="give seconds above 0")
    check(replica, str, "replica")
    check(revive, Callable[[], Revival] | None, "revive")
    epoch, stamps = options.get("epoch", NEW_EPOCH), tuple(options.get("stamp_table", ()))
    with_events, client = options.get("with_events", False), options.get("client", "")
    if revive is None:
        return OpenRequest(replica, draw_nonce(), epoch, with_events, client, stamps)
    if stamps or epoch != NEW_EPOCH:
        name = "stamp_table" if stamps else "epoch"
        raise InvalidArgument("a revive begins an engine life with its own stamps", field=name, remedy="leave it out")
    revival = revive()
    check(revival, Revival, "revive()")
    return revival.first_request(replica, draw_nonce(), with_events, client)


def timeouts(options: SessionOptions) -> tuple[float, float]:
    """Of opening and of a step, in seconds."""
    return options.get("open_timeout_s", OPEN_TIMEOUT_S), options.get("step_timeout_s", STEP_TIMEOUT_S)


def revival_of(
    revive: Callable[[], Revival] | None, options: SessionOptions
) -> Callable[[], Revival] | KnownRequests | None:
    """How the session outlives its service. Who goes on with an engine life has not seen its beginning."""
    if revive is not None or options.get("epoch", NEW_EPOCH) != NEW_EPOCH or not options.get("remember", True):
        return revive
    return KnownRequests()
