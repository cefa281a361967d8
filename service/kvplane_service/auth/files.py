"""Files that may change while the service runs, as Kubernetes and certificate agents replace them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from kvplane.base.errors import InvalidArgument, KvplaneError, NotFound

MAX_FILE_BYTES = 8 << 20

T = TypeVar("T")
_Signature = tuple[tuple[int, int, int], ...]

_log = logging.getLogger(__name__)


class Reloaded(Generic[T]):
    """A value read from files, again when one of them changes. An invalid change is logged once, and the old
    value is kept.
    """

    def __init__(self, paths: Sequence[str], read: Callable[[], T]) -> None:
        """`read` reads the value or raises KvplaneError, which the first read propagates."""
        self._paths = paths
        self._read = read
        self._seen = self._signature()
        self._value = read()

    def get(self) -> T:
        """The newest valid value. Thread-safe: in a race one of two equal values is kept."""
        seen = self._signature()
        if seen != self._seen:
            self._seen = seen
            try:
                self._value = self._read()
            except KvplaneError as error:
                _log.error("ignoring an invalid change, the old value stays in use: %s", error)
            else:
                _log.info("reloaded %s", ", ".join(self._paths))
        return self._value

    def _signature(self) -> _Signature:
        return tuple([_stat(path) for path in self._paths])


def read_bytes(path: str, key: str) -> bytes:
    """The content of a file; `key` is the configuration key that errors name. Raises NotFound, InvalidArgument."""
    try:
        if os.stat(path).st_size > MAX_FILE_BYTES:
            raise InvalidArgument(f"{path} has more than {MAX_FILE_BYTES} bytes", field=key, remedy="name another file")
        return Path(path).read_bytes()
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}", field=key, remedy="name a file that this user can read") from None


def _stat(path: str) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)
