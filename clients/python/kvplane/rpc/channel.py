"""gRPC channels to the service, with their keepalive and message limits."""

from __future__ import annotations

import grpc
import grpc.aio

from kvplane.rpc.access import PLAIN, Access, with_token, with_token_aio

MAX_MESSAGE_BYTES = 32 << 20  # the service's own default

# Pings detect a peer that stops answering (a stopped process, a lost host) within half a minute. When a proxy refuses
# frequent pings (GOAWAY, ENHANCE_YOUR_CALM), gRPC halves their rate after each refusal. A restarted service is reached
# within two seconds. gRPC's own retries are off: see kvplane.unary.retrying.
_OPTIONS = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # otherwise gRPC waits a minute, despite keepalive_timeout_ms
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also the timeout of one attempt to connect
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),
)


def open_channel(address: str, access: Access = PLAIN, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.Channel:
    """Return a channel for blocking stubs. It connects on first use.

    Args:
        address: "host:port", "dns:///host:port" or "unix:/path".
        access: TLS and token.
        max_message_bytes: largest message that is sent or received, in bytes.

    Raises:
        InvalidArgument: a TLS file or the token is malformed, or the token would be sent in plain text.
        NotFound: a TLS file cannot be read.
    """
    access.check(address)
    options = _options(access, max_message_bytes)
    if access.tls is None:
        return with_token(grpc.insecure_channel(address, options), access)
    return with_token(grpc.secure_channel(address, access.tls.credentials(), options), access)


def open_aio_channel(
    address: str, access: Access = PLAIN, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> grpc.aio.Channel:
    """Return a channel for asyncio stubs; see `open_channel`. Call it while the event loop runs."""
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
