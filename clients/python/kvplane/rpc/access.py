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
    """TLS to the service. The files are PEM and are read when a channel is opened.

    Attributes:
        ca: file with the certificate authorities of the service; "" = the system's.
        cert, key: files with the client's certificate and key, if the service requires one; both or none.
        server_name: name that the service's certificate must have; "" = the host of the address.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """The credentials of a channel. Raises InvalidArgument for `cert` without `key` (or the reverse) and for files
        that are not PEM, NotFound for files that cannot be read.
        """
        import grpc  # here, so that a command line that parses options does not load gRPC

        if bool(self.cert) != bool(self.key):
            lacking = "key" if self.cert else "cert"
            raise InvalidArgument("cert without key or the reverse", field=f"tls.{lacking}", remedy="give both or none")
        return grpc.ssl_channel_credentials(
            _read_pem(self.ca, "tls.ca"), _read_pem(self.key, "tls.key"), _read_pem(self.cert, "tls.cert")
        )


@dataclass(frozen=True, slots=True)
class Access:
    """TLS or plain text, with or without a token. A token is sent in plain text only to this machine."""

    tls: Tls | None = None
    token: Token = field(default="", repr=False)

    def check(self, address: str) -> None:
        """Raise InvalidArgument when the token would cross the network unencrypted."""
        if self.token and self.tls is None and not address.startswith(_LOCAL):
            raise InvalidArgument(
                f"the token would be sent to {address} in plain text", field="token", remedy="give tls too"
            )

    def options(self) -> list[tuple[str, str]]:
        """The options of a channel."""
        if self.tls is None or not self.tls.server_name:
            return []
        return [("grpc.ssl_target_name_override", self.tls.server_name)]

    def metadata(self) -> Metadata:
        """The metadata of a call. Raises NotFound when the token's file cannot be read, InvalidArgument for a malformed
        or missing token.
        """
        token = _read_token(self.token) if isinstance(self.token, Path) else self.token
        if not token.isascii() or not token.isprintable():
            raise InvalidArgument("it is not printable ASCII", field="token", remedy="give one line of printable ASCII")
        return (("authorization", f"Bearer {token}"),)


PLAIN = Access()


class TokenChannel:
    """Wraps a channel, blocking or asyncio, so that its calls carry a token. Other attributes are the channel's."""

    def __init__(self, channel: Any, access: Access) -> None:  # noqa: ANN401 - grpc.Channel or grpc.aio.Channel
        self._channel = channel
        self._access = access

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._channel, name)

    def __enter__(self) -> TokenChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:  # noqa: ANN401
        """See grpc.Channel."""
        return self._with_token(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:  # noqa: ANN401
        """See grpc.Channel."""
        return self._with_token(self._channel.unary_stream(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:  # noqa: ANN401
        """See grpc.Channel."""
        return self._with_token(self._channel.stream_stream(*args, **kwargs))

    def _with_token(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def with_token(*args: Any, metadata: Metadata | None = None, **kwargs: Any) -> Any:  # noqa: ANN401
            return call(*args, metadata=(*(metadata or ()), *self._access.metadata()), **kwargs)

        return with_token


def with_token(channel: grpc.Channel, access: Access) -> grpc.Channel:
    """The channel, wrapped so that its calls carry the token, if there is one."""
    return cast("grpc.Channel", TokenChannel(channel, access)) if access.token else channel


def with_token_aio(channel: grpc.aio.Channel, access: Access) -> grpc.aio.Channel:
    """`with_token` for asyncio."""
    return cast("grpc.aio.Channel", TokenChannel(channel, access)) if access.token else channel


def _read_pem(path: str, name: str) -> bytes | None:
    if not path:
        return None
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}", field=name, remedy="give a readable PEM file") from None
    if b"-----BEGIN " not in content:
        raise InvalidArgument(f"{path} is not PEM", field=name, remedy="give a PEM file")
    return content


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}", field="token", remedy="give a readable file") from None
    except UnicodeDecodeError:
        token = ""
    if not token:
        raise InvalidArgument(f"{path} contains no token", field="token", remedy="write the token on one line of ASCII")
    return token
