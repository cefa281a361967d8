"""gRPC channels to the service."""

from __future__ import annotations

import grpc
import grpc.aio

from kvplane.rpc.access import PLAIN, Access, with_token, with_token_aio

MAX_MESSAGE_BYTES = 32 << 20  # the service's own default

# A peer that stops answering (a stopped process, a lost host) is detected by a ping in half a minute; a proxy
# that forbids so many pings (GOAWAY, ENHANCE_YOUR_CALM) is pinged half as often by gRPC after each refusal;
# a service that restarts is reached again in two seconds. Retries are this client's own: see kvplane.unary.retrying.
_OPTIONS = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # a minute without it, whatever the line above says
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # which is how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),
)


def open_channel(address: str, access: Access = PLAIN, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.Channel:
    """A channel for blocking stubs. Connects when it is first used.

    Args:
        address: "host:port", "dns:///host:port", "unix:/path".
        access: TLS and token.
        max_message_bytes: of a message, each way.

    Raises:
        InvalidArgument, NotFound: of the access.
    """
    access.check(address)
    options = _options(access, max_message_bytes)
    if access.tls is None:
        return with_token(grpc.insecure_channel(address, options), access)
    return with_token(grpc.secure_channel(address, access.tls.credentials(), options), access)


def open_aio_channel(
    address: str, access: Access = PLAIN, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> grpc.aio.Channel:
    """As `open_channel`, for asyncio stubs; call it within the running loop."""
    access.check(address)
    options = _options(access, max_message_bytes)
    if access.tls is None:
        return with_token_aio(grpc.aio.insecure_channel(address, options), access)
    return with_token_aio(grpc.aio.secure_channel(address, access.tls.credentials(), options), access)


def _options(access: Access, max_message_bytes: int) -> list[tuple[str, int | str]]:
    return [
        *_OPTIONS,
        *access.options(),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
    ]
