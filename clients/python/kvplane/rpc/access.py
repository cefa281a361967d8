"""TLS and authentication of a client: certificates, and the token that identifies it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from kvplane.base.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    import grpc
    import grpc.aio

Token: TypeAlias = str | Path  # the token, or a file that is read for each call, since tokens are renewed
Metadata: TypeAlias = tuple[tuple[str, str], ...]

_LOCAL = ("unix:", "127.0.0.1:", "localhost:", "[::1]:")


@dataclass(frozen=True, slots=True)
class Tls:
    """The certificates of TLS connections to the service. The files are PEM and are read when a channel is opened.

    Attributes:
        ca: file with the certificate authorities of the service; "" = the system's.
        cert: file with the client's certificate, if the service requires one; given together with `key`.
        key: file with the private key of `cert`.
        server_name: host name that the service's certificate must have; "" = the host of the address.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of a channel.

        Raises:
            InvalidArgument: only one of `cert` and `key` is given, or a file is not PEM.
            NotFound: a file cannot be read.
        """
        import grpc  # here, so that a command line that parses options does not load gRPC

        if bool(self.cert) != bool(self.key):
            given, lacking = ("cert", "key") if self.cert else ("key", "cert")
            raise InvalidArgument(
                f"{given} is given without {lacking}", field=f"tls.{lacking}", remedy="give both cert and key, or none"
            )
        return grpc.ssl_channel_credentials(
            _read_pem(self.ca, "tls.ca"), _read_pem(self.key, "tls.key"), _read_pem(self.cert, "tls.cert")
        )


@dataclass(frozen=True, slots=True)
class Access:
    """How calls are protected: with TLS or in plain text, and with or without a token.

    A token is sent in plain text only to a service on this machine.
    """

    tls: Tls | None = None
    token: Token = field(default="", repr=False)

    def check(self, address: str) -> None:
        """Raise InvalidArgument if the token would cross the network in plain text."""
        if self.token and self.tls is None and not address.startswith(_LOCAL):
            raise InvalidArgument(
                f"the token would be sent to {address} in plain text", field="token", remedy="also give tls"
            )

    def options(self) -> list[tuple[str, str]]:
        """Return the gRPC options of a channel."""
        if self.tls is None or not self.tls.server_name:
            return []
        return [("grpc.ssl_target_name_override", self.tls.server_name)]

    def metadata(self) -> Metadata:
        """Return the gRPC metadata of a call, with the token.

        Raises:
            NotFound: the token's file cannot be read.
            InvalidArgument: the token is malformed, or the file has none.
        """
        token = _read_token(self.token) if isinstance(self.token, Path) else self.token
        if not token.isascii() or not token.isprintable():
            raise InvalidArgument(
                "the token has a character that is not printable ASCII",
                field="token",
                remedy="give one line of printable ASCII",
            )
        return (("authorization", f"Bearer {token}"),)


PLAIN = Access()


class TokenChannel:
    """Wrap a blocking or asyncio gRPC channel so that its calls carry a token. All other attributes are those of the
    wrapped channel.

    Attributes:
        access: the token.
    """

    def __init__(self, channel: Any, access: Access) -> None:  # noqa: ANN401 - grpc.Channel or grpc.aio.Channel
        self._channel = channel
        self.access = access

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._channel, name)

    def __enter__(self) -> TokenChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:  # noqa: ANN401
        """Return the method of grpc.Channel of this name, with the token in its metadata."""
        return self._with_token(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:  # noqa: ANN401
        """Return the method of grpc.Channel of this name, with the token in its metadata."""
        return self._with_token(self._channel.unary_stream(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:  # noqa: ANN401
        """Return the method of grpc.Channel of this name, with the token in its metadata."""
        return self._with_token(self._channel.stream_stream(*args, **kwargs))

    def _with_token(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def with_token(*args: Any, metadata: Metadata | None = None, **kwargs: Any) -> Any:  # noqa: ANN401
            return call(*args, metadata=(*(metadata or ()), *self.access.metadata()), **kwargs)

        return with_token


def access_of(channel: object) -> Access:
    """Return the token with which a channel calls, without its TLS."""
    return channel.access if isinstance(channel, TokenChannel) else PLAIN


def with_token(channel: grpc.Channel, access: Access) -> grpc.Channel:
    """Return the channel, wrapped so that its calls carry the token; the channel itself if there is no token."""
    return cast("grpc.Channel", TokenChannel(channel, access)) if access.token else channel


def with_token_aio(channel: grpc.aio.Channel, access: Access) -> grpc.aio.Channel:
    """Return the asyncio channel, wrapped so that its calls carry the token; the channel itself if there is
    no token.
    """
    return cast("grpc.aio.Channel", TokenChannel(channel, access)) if access.token else channel


def _read_pem(path: str, name: str) -> bytes | None:
    if not path:
        return None
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise NotFound(
            f"{path} cannot be read: {error.strerror}", field=name, remedy="give the path of a readable PEM file"
        ) from None
    if b"-----BEGIN " not in content:
        raise InvalidArgument(f"{path} is not a PEM file", field=name, remedy="give a file with a -----BEGIN line")
    return content


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise NotFound(
            f"{path} cannot be read: {error.strerror}", field="token", remedy="give the path of a readable file"
        ) from None
    except UnicodeDecodeError:
        token = ""
    if not token:
        raise InvalidArgument(f"{path} contains no token", field="token", remedy="write the token on one line of ASCII")
    return token
