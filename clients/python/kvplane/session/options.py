"""The options of `Client.session`, with their checks, and the first message of a session; for both clients."""

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

_MEMORY = ("incarnation", "disk_incarnation", "owner_epoch")


class SessionOptions(TypedDict, total=False):
    """The options of `Client.session`.

    Attributes:
        epoch: epoch to continue; NEW_EPOCH, the default, begins a new epoch.
        life_nonce: with an epoch, required: `life_nonce` of the session that began this epoch or continued it.
        with_events: whether answers contain cache events.
        stamp_table, incarnation, disk_incarnation, owner_epoch: see OpenRequest; not together with a `revive`, whose
            Revival has them.
        client: name of the client, for operators.
        retry: how to retry after the stream breaks, see Session.
        step_timeout_s: seconds that a call waits for an answer before it raises DeadlineExceeded.
        open_timeout_s: seconds that opening a stream may take.
        remember: without a `revive`: record the requests, so that the session can send them to a restarted service;
            True by default.
        session_socket: path of the Unix socket on which the first service of the client's list serves sessions (its
            setting of this name), if it runs on this machine: a step takes a fraction of its time over gRPC. Sessions
            with other services use gRPC. Not for the asyncio client. "", the default = gRPC alone.
    """

    epoch: int
    life_nonce: int
    with_events: bool
    stamp_table: Sequence[int]
    incarnation: int
    disk_incarnation: int
    owner_epoch: int
    client: str
    retry: RetryPolicy | None
    step_timeout_s: float
    open_timeout_s: float
    remember: bool
    session_socket: str


def draw_nonce() -> int:
    """Return a random u64, not 0, to identify one stream."""
    return secrets.randbits(64) or 1


def first_request(replica: str, revive: Callable[[], Revival] | None, options: SessionOptions) -> OpenRequest:
    """Return the message that opens the session. Raises InvalidArgument for an unknown option or an invalid value."""
    hints = get_type_hints(SessionOptions)
    for name, value in options.items():
        if name not in hints:
            raise InvalidArgument(
                f"a session has no option {name}", field=name, remedy=f"use one of {', '.join(hints)}"
            )
        check(value, hints[name], name)
        if name.endswith("timeout_s") and not cast(float, value) > 0.0:
            raise InvalidArgument(f"a timeout of {value} s is not above 0", field=name, remedy="give seconds above 0")
    check(replica, str, "replica")
    check(revive, Callable[[], Revival] | None, "revive")
    epoch, life = options.get("epoch", NEW_EPOCH), options.get("life_nonce", 0)
    stamps = tuple(options.get("stamp_table", ()))
    with_events, client = options.get("with_events", False), options.get("client", "")
    numbers = {name: options.get(name, 0) for name in _MEMORY}
    if revive is None:
        memory = {"stamp_table": stamps, "life_nonce": life, **numbers}
        return OpenRequest(replica, draw_nonce(), epoch, with_events, client, **memory)  # type: ignore[arg-type]
    given = [name for name in ("stamp_table", "epoch", "life_nonce", *_MEMORY) if options.get(name)]
    if given:
        name = given[0]
        raise InvalidArgument(
            f"{name} is given together with revive, which begins a new epoch with its own stamps",
            field=name,
            remedy=f"omit {name} or revive",
        )
    revival = revive()
    check(revival, Revival, "revive()")
    return revival.first_request(replica, draw_nonce(), with_events, client)


def timeouts(options: SessionOptions) -> tuple[float, float]:
    """Return (seconds to open a stream, seconds to wait for an answer)."""
    return options.get("open_timeout_s", OPEN_TIMEOUT_S), options.get("step_timeout_s", STEP_TIMEOUT_S)


def revival_of(
    revive: Callable[[], Revival] | None, options: SessionOptions
) -> Callable[[], Revival] | KnownRequests | None:
    """Return the function or the record from which the session gets what it sends to a restarted service; None if a
    restart ends the session.

    Requests are recorded only by a session that begins a new epoch: a session that continues one has
    not seen the earlier steps.
    """
    if revive is not None or options.get("epoch", NEW_EPOCH) != NEW_EPOCH or not options.get("remember", True):
        return revive
    return KnownRequests()
