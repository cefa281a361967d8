"""The lines of a trace file (plain, gzip or zstd), read one at a time: a compressed trace may expand 250-fold, so it is
never read whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Protocol

from kvplane.base.errors import FailedPrecondition, InvalidArgument, KvplaneError, NotFound

MAX_LINE_BYTES = 64 << 20

# Small, because zstd decompresses a whole chunk at once, up to 32,000-fold.
_CHUNK_BYTES = 4 << 10
_GZIP_MAGIC, _ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class MalformedTrace(KvplaneError):
    """A line of a trace file is malformed. `metadata` has "file" and "line"; the requests before the line are valid."""

    reason = "MALFORMED_TRACE"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a trace file. Line numbers start at 1."""

    file: str
    number: int
    text: bytes

    def malformed(self, cause: str) -> MalformedTrace:
        """Return a MalformedTrace that names this line."""
        return malformed(self.file, self.number, cause)


def malformed(file: str, number: int, cause: str) -> MalformedTrace:
    """Return a MalformedTrace that names a line of a file."""
    return MalformedTrace(f"{file}, line {number}: {cause}", metadata={"file": file, "line": str(number)})


class TraceLines:
    """An iterator over the lines of a file, which it reads on demand. It skips blank lines."""

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            NotFound: there is no such file.
            InvalidArgument: the file cannot be read.
            FailedPrecondition: the file is compressed with zstd, and the package zstandard is not installed.
        """
        self.file = str(path)
        self.bytes_read = 0  # of the stored file
        self._raw = _open(path)
        self.size_bytes = path.stat().st_size
        self._lines = self._split(self._unpacked())

    def __iter__(self) -> Iterator[Line]:
        return self

    def __next__(self) -> Line:
        """Return the next line.

        Raises:
            MalformedTrace: the compressed data are damaged or end early, or the line is too long.
        """
        return next(self._lines)

    def close(self) -> None:
        """Close the file. No further line can be read."""
        self._raw.close()

    def _split(self, chunks: Iterator[bytes]) -> Iterator[Line]:
        number, parts, size = 1, list[bytes](), 0
        try:
            for chunk in chunks:
                *whole, rest = chunk.split(b"\n")
                for part in whole:
                    yield from self._line(number, parts, part)
                    number, parts, size = number + 1, [], 0
                parts.append(rest)
                size += len(rest)
                if size > MAX_LINE_BYTES:
                    raise _DamagedData(f"the line has more than {MAX_LINE_BYTES} bytes")
        except _DamagedData as damage:
            raise malformed(self.file, number, str(damage)) from damage
        yield from self._line(number, parts, b"")

    def _line(self, number: int, parts: list[bytes], last: bytes) -> Iterator[Line]:
        text = b"".join([*parts, last]).strip()
        if text:
            yield Line(self.file, number, text)

    def _unpacked(self) -> Iterator[bytes]:
        chunks = self._stored()
        first = next(chunks, b"")
        if first.startswith(_GZIP_MAGIC):
            return _inflate(first, chunks, lambda: zlib.decompressobj(wbits=31), zlib.error)
        if first.startswith(_ZSTD_MAGIC):
            return _unpack_zstd(first, chunks)
        return chain([first], chunks)

    def _stored(self) -> Iterator[bytes]:
        while chunk := self._raw.read(_CHUNK_BYTES):
            self.bytes_read += len(chunk)
            yield chunk


class _DamagedData(Exception):
    """The data of a file are damaged; the message states how."""


class _Inflater(Protocol):
    """The common interface of the decompressors of zlib and zstandard. One object decompresses one frame."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def _inflate(
    first: bytes, chunks: Iterator[bytes], new_frame: Callable[[], _Inflater], error: type[Exception]
) -> Iterator[bytes]:
    """Yield the decompressed bytes of one or more frames.

    A file that ends inside a frame is truncated, which zstandard's own reader does not report.
    """
    frame, begun = new_frame(), False
    for chunk in chain([first], chunks):
        packed = chunk
        while packed:
            try:
                yield frame.decompress(packed)
            except error as fault:
                raise _DamagedData(f"the compressed data are damaged: {fault}") from fault
            begun = not frame.eof
            packed = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame = new_frame()
    if begun:
        raise _DamagedData("the compressed file is cut off")


def _unpack_zstd(first: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise FailedPrecondition(
            "the trace is compressed with zstd, which needs the package zstandard; it is not installed",
            field="file",
            remedy="pip install zstandard, or decompress the file first",
        ) from None
    unpacker = zstandard.ZstdDecompressor()
    return _inflate(first, chunks, unpacker.decompressobj, zstandard.ZstdError)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}", field="file", remedy="give the path of a trace file") from None
    except OSError as error:
        raise InvalidArgument(
            f"{path} cannot be read: {error.strerror}", field="file", remedy="give a readable file"
        ) from error
