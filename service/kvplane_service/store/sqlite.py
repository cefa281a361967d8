"""A store in one SQLite file in WAL mode; a chunk is a row of a table.

The application id marks a file of kvplane, and the user version is the version of the tables. Both are read before
anything is written, so that a file of another program or of a newer kvplane stays unchanged.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvplane.base.errors import NotFound
from kvplane_service.store.errors import (
    LogSuperseded,
    StoreDamaged,
    StoreForeign,
    StoreFull,
    StoreNewer,
    StoreReadOnly,
    StoreUnavailable,
)
from kvplane_service.store.interface import LogName, StoredChunk

_log = logging.getLogger(__name__)

APPLICATION_ID = 0x6B767073  # "kvps"
TABLES_VERSION = 1
BUSY_TIMEOUT_S = 5.0
_WAL_PAGES = 256  # checkpoint the write-ahead log every megabyte
# Of SQLite's file format: user version at byte 60, application id at 68, the first page's kind and cells at 100.
_MAGIC = b"SQLite format 3\0"
_HEAD_BYTES = 108
_VERSION_AT = struct.Struct(">60x i 4x i")
_LEAF_PAGE = b"\x0d"
_MAKE_WRITABLE = "make the file and its directory writable for this user"
_TABLES = """
CREATE TABLE log (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE) STRICT;
CREATE TABLE chunk (log INTEGER NOT NULL, seq INTEGER NOT NULL, raw BLOB NOT NULL, UNIQUE (log, seq)) STRICT;
CREATE TABLE record (replica TEXT PRIMARY KEY, raw BLOB NOT NULL) STRICT;
"""


class SqliteStore:
    """Implements BlockingStore with one connection, used by one thread at a time."""

    def __init__(self, path: Path, busy_timeout_s: float = BUSY_TIMEOUT_S, read_only: bool = False) -> None:
        """Open the file, or create it.

        A damaged file is renamed and replaced by an empty one. With `read_only` the file must exist and stays
        unchanged.

        Raises:
            StoreForeign, StoreNewer: another program, or a newer kvplane, wrote the file.
            StoreReadOnly: the file or its directory cannot be written.
            NotFound: `read_only` is set and the file does not exist.
        """
        self._path = path
        self._busy_timeout_s = busy_timeout_s
        self._read_only = read_only
        self._lock = threading.Lock()
        with self._named_errors():
            if path.exists():
                _check_file(path)
            if read_only:
                self._connection = _open_to_read(path, busy_timeout_s)
                return
            _check_writable(path)
            try:
                self._open()
            except sqlite3.Error as error:
                if not _is_damage(error):
                    raise
                self._replace_damaged()

    def _open(self) -> None:
        self._connection = sqlite3.connect(
            self._path, timeout=self._busy_timeout_s, isolation_level=None, check_same_thread=False
        )
        run = self._connection.execute
        with self._writing():  # before WAL mode, so that the header of the file has the application id
            if run("PRAGMA application_id").fetchone()[0] == 0:
                for statement in _TABLES.split(";"):
                    run(statement)
                run(f"PRAGMA application_id = {APPLICATION_ID}")
                run(f"PRAGMA user_version = {TABLES_VERSION}")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = NORMAL")  # a crash of the machine may lose the last writes, which only costs hits
        run(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
        run(f"PRAGMA journal_size_limit = {_WAL_PAGES * 4096}")

    def _replace_damaged(self) -> None:
        """Rename the damaged file, which replaces an earlier damaged one, and continue with an empty file."""
        self._connection.close()
        renamed = f"{self._path}.damaged"
        for end in ("", "-wal"):
            if (part := Path(f"{self._path}{end}")).exists():
                part.replace(f"{renamed}{end}")
        Path(f"{self._path}-shm").unlink(missing_ok=True)
        _log.warning("%s is damaged: it is renamed to %s, and replaced by an empty file", self._path, renamed)
        self._open()

    def append(self, log: LogName, chunk: StoredChunk, trim_below: int) -> int:
        """Append a chunk (batch of stored block states) to a log, and drop old chunks (see IndexStore.append)."""
        with self._lock, self._named_errors(), self._writing():
            run = self._connection.execute
            run("INSERT OR IGNORE INTO log (name) VALUES (?)", (str(log),))
            number = self._number(log)
            (newest,) = run("SELECT max(seq) FROM chunk WHERE log = ?", (number,)).fetchone()
            if newest is not None and newest > chunk.seq:
                raise LogSuperseded(newest)
            run("DELETE FROM chunk WHERE log = ? AND seq < ?", (number, trim_below))
            if newest is None or newest < chunk.seq:
                run("INSERT INTO chunk VALUES (?, ?, ?)", (number, chunk.seq, chunk.raw))
            count: int = run("SELECT count(*) FROM chunk WHERE log = ?", (number,)).fetchone()[0]
            return count

    def load(self, log: LogName) -> Iterator[StoredChunk]:
        """Yield the chunks (batches of stored block states) of a log, ordered by number (see IndexStore.load)."""
        after = -1
        while True:
            with self._lock, self._named_errors():
                rows = self._connection.execute(
                    "SELECT seq, raw FROM chunk WHERE log = ? AND seq > ? ORDER BY seq LIMIT 64",
                    (self._number(log), after),
                ).fetchall()
            if not rows:
                return
            yield from (StoredChunk(seq, raw) for seq, raw in rows)
            after = rows[-1][0]

    def drop(self, log: LogName) -> None:
        """Delete a log (see IndexStore.drop)."""
        with self._lock, self._named_errors(), self._writing():
            number = self._number(log)
            self._connection.execute("DELETE FROM chunk WHERE log = ?", (number,))
            self._connection.execute("DELETE FROM log WHERE id = ?", (number,))

    def size_bytes(self, log: LogName) -> int:
        """Return the size of a log in bytes (see IndexStore.size_bytes)."""
        with self._lock, self._named_errors():
            query = "SELECT coalesce(sum(length(raw)), 0) FROM chunk WHERE log = ?"
            size: int = self._connection.execute(query, (self._number(log),)).fetchone()[0]
            return size

    def put_record(self, replica: str, record: bytes) -> None:
        """Replace the record of a replica (see IndexStore.put_record)."""
        with self._lock, self._named_errors(), self._writing():
            self._connection.execute("INSERT OR REPLACE INTO record VALUES (?, ?)", (replica, record))

    def get_record(self, replica: str) -> bytes | None:
        """Return the record of a replica, or None (see IndexStore.get_record)."""
        with self._lock, self._named_errors():
            row = self._connection.execute("SELECT raw FROM record WHERE replica = ?", (replica,)).fetchone()
            return row[0] if row else None

    def records(self) -> Iterator[tuple[str, bytes]]:
        """Yield all pairs of name and record (see IndexStore.records)."""
        with self._lock, self._named_errors():
            rows = self._connection.execute("SELECT replica, raw FROM record ORDER BY replica").fetchall()
        yield from rows

    def drop_record(self, replica: str) -> None:
        """Delete the record of a replica (see IndexStore.drop_record)."""
        with self._lock, self._named_errors(), self._writing():
            self._connection.execute("DELETE FROM record WHERE replica = ?", (replica,))

    def keep_alive(self, log: LogName) -> None:
        """Do nothing: data in a file do not expire (see IndexStore.keep_alive)."""
        del log

    def close(self) -> None:
        """Close connections and files (see IndexStore.close)."""
        with self._lock:
            self._connection.close()

    def _number(self, log: LogName) -> int:
        row = self._connection.execute("SELECT id FROM log WHERE name = ?", (str(log),)).fetchone()
        return row[0] if row else -1

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Run the block in a transaction, which is rolled back if the block fails."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        finally:
            if self._connection.in_transaction:  # it failed; a full disk has already ended it
                self._connection.execute("ROLLBACK")

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            if _is_damage(error) and not self._read_only:
                self._replace_damaged()
            raise _named(self._path, error) from error


def _open_to_read(path: Path, busy_timeout_s: float) -> sqlite3.Connection:
    """Open the file for reading. A file without a write-ahead log is opened as immutable, because otherwise SQLite
    would create files next to it.
    """
    if not path.exists():
        raise NotFound(f"the file {path} does not exist", field="store", remedy="name the store file of a service")
    mode = "mode=ro" if Path(f"{path}-wal").exists() else "immutable=1"
    uri = f"{path.absolute().as_uri()}?{mode}"
    return sqlite3.connect(uri, busy_timeout_s, isolation_level=None, check_same_thread=False, uri=True)


def _check_file(path: Path) -> None:
    """Raise StoreForeign or StoreNewer if kvplane, or this version of it, did not write the file. Reads only the
    header, because opening the database would create files next to it.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if not head:
        return
    version, application = _VERSION_AT.unpack_from(head.ljust(_HEAD_BYTES))
    is_empty = head[100:101] == _LEAF_PAGE and head[103:105] == bytes(2)
    is_new = is_empty and application == version == 0
    if not head.startswith(_MAGIC) or not (application == APPLICATION_ID or is_new):
        raise StoreForeign(
            f"{path} was not written by kvplane", field="store", remedy="name another file; this one was not changed"
        )
    if version > TABLES_VERSION:
        raise StoreNewer(
            f"{path} has tables of version {version}, this service supports versions up to {TABLES_VERSION}",
            field="store",
            remedy="run a newer kvplane, or name another file; this one was not changed",
        )


def _check_writable(path: Path) -> None:
    """Raise StoreReadOnly if the file or its directory cannot be written. SQLite would open such a file, and fail at
    the first write.
    """
    for place in (path, path.parent):
        if place.exists() and not os.access(place, os.W_OK):
            raise StoreReadOnly(f"{place} is read-only", field="store", remedy=_MAKE_WRITABLE)


def _is_damage(error: Exception) -> bool:
    """Return True if the error means that the file is damaged."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)
    return code == sqlite3.SQLITE_IOERR_SHORT_READ or code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _named(path: Path, error: sqlite3.Error | OSError) -> Exception:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    text = f"{path}: {error}"
    if _is_damage(error):
        return StoreDamaged(text, field="store", remedy="check the disk; the damaged file was renamed")
    if code == sqlite3.SQLITE_FULL:
        return StoreFull(text, field="store", remedy="free space on the disk; allocation continues meanwhile")
    if code in (
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_AUTH,
    ) or isinstance(error, PermissionError):
        return StoreReadOnly(text, field="store", remedy=_MAKE_WRITABLE)
    return StoreUnavailable(text, field="store", remedy="check the disk; allocation continues meanwhile")
