"""How a client reaches the service: TLS, and the token that says who it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from kvplane.base.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    import grpc
    import grpc.aio

Token: TypeAlias = str | Path  # itself, or a file that holds it and is read for each call, since tokens are renewed
Metadata: TypeAlias = tuple[tuple[str, str], ...]

_LOCAL = ("unix:", "127.0.0.1:", "localhost:", "[::1]:")


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS to the service. Files are PEM, and read when a channel is opened.

    Attributes:
        ca: authorities that the service's certificate is checked against; "" = the system's.
        cert, key: our own pair, where the service asks for one; both or none.
        server_name: that the certificate must have; "" = the host of the address.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """For a channel. Raises InvalidArgument for half a pair or files that are not PEM, NotFound."""
        import grpc  # here, so that a command line can keep an access without waiting for it

        if bool(self.cert) != bool(self.key):
            lacking = "key" if self.cert else "cert"
            raise InvalidArgument("half a pair: it is empty", field=f"tls.{lacking}", remedy="give both, or none")
        return grpc.ssl_channel_credentials(
            _read_pem(self.ca, "tls.ca"), _read_pem(self.key, "tls.key"), _read_pem(self.cert, "tls.cert")
        )


@dataclass(frozen=True, slots=True)
class Access:
    """TLS or plain text, with a token or without. A token is sent in plain text only within the machine."""

    tls: Tls | None = None
    token: Token = field(default="", repr=False)

    def check(self, address: str) -> None:
        """Raise InvalidArgument when the token would cross the network where everybody can read it."""
        if self.token and self.tls is None and not address.startswith(_LOCAL):
            raise InvalidArgument(
                f"the token would travel to {address} in plain text", field="token", remedy="give tls too"
            )

    def options(self) -> list[tuple[str, str]]:
        """Of a channel."""
        if self.tls is None or not self.tls.server_name:
            return []
        return [("grpc.ssl_target_name_override", self.tls.server_name)]

    def metadata(self) -> Metadata:
        """Of a call. Raises NotFound, InvalidArgument: there is no token in its file."""
        token = _read_token(self.token) if isinstance(self.token, Path) else self.token
        if not token.isascii() or not token.isprintable():
            raise InvalidArgument("it has characters that no token has", field="token", remedy="give one line of ASCII")
        return (("authorization", f"Bearer {token}"),)


PLAIN = Access()


class TokenChannel:
    """A channel whose calls carry a token; for stubs of either kind. Everything else is the channel's own."""

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
    """The channel, its calls carrying the token when there is one."""
    return cast("grpc.Channel", TokenChannel(channel, access)) if access.token else channel


def with_token_aio(channel: grpc.aio.Channel, access: Access) -> grpc.aio.Channel:
    """As `with_token`."""
    return cast("grpc.aio.Channel", TokenChannel(channel, access)) if access.token else channel


def _read_pem(path: str, name: str) -> bytes | None:
    if not path:
        return None
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}", field=name, remedy="name a readable PEM file") from None
    if b"-----BEGIN " not in content:
        raise InvalidArgument(f"{path} is not PEM", field=name, remedy="name a PEM file")
    return content


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}", field="token", remedy="name a readable file") from None
    except UnicodeDecodeError:
        token = ""
    if not token:
        raise InvalidArgument(f"{path} holds no token", field="token", remedy="write it there, in one line")
    return token
