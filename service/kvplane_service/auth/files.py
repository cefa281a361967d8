"""Read files that other programs (Kubernetes, certificate agents) may replace while the service runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from kvplane.base.errors import InvalidArgument, NotFound

MAX_FILE_BYTES = 8 << 20

T = TypeVar("T")
_Signature = tuple[tuple[int, int, int], ...]

_log = logging.getLogger(__name__)


class Reloaded(Generic[T]):
    """A value that is read from files, and read again when one of the files has changed. If the new content is invalid,
    the error is logged once and the old value stays in use.
    """

    def __init__(self, paths: Sequence[str], read: Callable[[], T]) -> None:
        """Read the value by calling `read`, which raises KvplaneError if a file is missing or invalid; the constructor
        raises the same error.
        """
        self._paths = paths
        self._read = read
        self._seen = self._signature()
        self._value = read()

    def get(self) -> T:
        """Return the newest valid value. Thread-safe: two threads that read a change at the same time read equal
        values.
        """
        seen = self._signature()
        if seen != self._seen:
            self._seen = seen
            try:
                self._value = self._read()
            except Exception as error:  # whatever it is, the calls that come now are not at fault
                _log.error("%s changed and is invalid; the old content stays in use: %s", ", ".join(self._paths), error)
            else:
                _log.info("reloaded %s", ", ".join(self._paths))
        return self._value

    def _signature(self) -> _Signature:
        return tuple([_stat(path) for path in self._paths])


def read_bytes(path: str, key: str) -> bytes:
    """Return the content of a file.

    Raises:
        NotFound: the file cannot be read; the error names the configuration key `key`.
        InvalidArgument: the file has more than MAX_FILE_BYTES bytes.
    """
    try:
        if os.stat(path).st_size > MAX_FILE_BYTES:
            what = f"{path} has more than {MAX_FILE_BYTES} bytes"
            raise InvalidArgument(what, field=key, remedy="check that the key names the right file")
        return Path(path).read_bytes()
    except OSError as error:
        what, remedy = f"{path} cannot be read: {error.strerror}", "name a file that the service's user can read"
        raise NotFound(what, field=key, remedy=remedy) from None


def _stat(path: str) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)
