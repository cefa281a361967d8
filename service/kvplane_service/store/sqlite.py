"""A store in one SQLite file in WAL mode; a chunk is a row of a table.

The application id marks a file of kvplane, and the user version is the version of the tables. Both are read before
anything is written, so that a file of another program or of a newer kvplane stays unchanged.

A file of kvplane is checked as a whole when it is opened, and an error that its content causes later is damage too. A
damaged file is kept under another name; what can be read of it is copied to the file that replaces it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from kvplane.base.errors import NotFound
from kvplane_service.store.errors import (
    LogSuperseded,
    StoreDamaged,
    StoreForeign,
    StoreFull,
    StoreInUse,
    StoreNewer,
    StoreReadOnly,
    StoreUnavailable,
)
from kvplane_service.store.interface import LogName, StoredChunk
from kvplane_service.store.record import MAGIC, SEAL_MAGIC

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
_TABLES = (
    "CREATE TABLE log (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE) STRICT",
    "CREATE TABLE chunk (log INTEGER NOT NULL, seq INTEGER NOT NULL, raw BLOB NOT NULL, UNIQUE (log, seq)) STRICT",
    "CREATE TABLE record (replica TEXT PRIMARY KEY, raw BLOB NOT NULL) STRICT",
)
_MARKS = (MAGIC + b"\1\0", SEAL_MAGIC + b"\1\0", _TABLES[1].encode())  # only kvplane writes these
_MAX_VERSION = 999  # a higher version of the tables is damage
_PROBED = 2_000  # rows that are looked up by their number in a damaged table
_UNREADABLE = (sqlite3.Error, UnicodeDecodeError, OverflowError)
_SEARCHED_BYTES = 8 << 20  # of a file without a valid header, for records of kvplane
_OF_THE_MACHINE = {  # errors that no content of the file causes
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_NOLFS,
    sqlite3.SQLITE_MISUSE,
}


class SqliteStore:
    """Implements BlockingStore with one connection, used by one thread at a time."""

    def __init__(self, path: Path, busy_timeout_s: float = BUSY_TIMEOUT_S, read_only: bool = False) -> None:
        """Open the file, or create it.

        A damaged file is renamed and replaced by an empty one. With `read_only` the file must exist and stays
        unchanged.

        Raises:
            StoreForeign, StoreNewer: another program, or a newer kvplane, wrote the file.
            StoreReadOnly: the file or its directory cannot be written.
            StoreInUse: another process writes the file.
            NotFound: `read_only` is set and the file does not exist.
        """
        self._path = path
        self._busy_timeout_s = busy_timeout_s
        self._read_only = read_only
        self._lock = threading.Lock()
        self._held = ExitStack()  # the lock of the file
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        with self._named_errors():
            has_header = not path.exists() or _check_file(path)
            if read_only:
                self._connection = _open_to_read(path, busy_timeout_s)
                return
            _check_writable(path)
            self._held.enter_context(_only_writer(path))
            try:
                if not has_header:
                    raise _Damage("the header of the file is damaged")
                self._open()
            except (sqlite3.Error, UnicodeDecodeError) as error:
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
                for statement in _TABLES:
                    run(statement)
                run(f"PRAGMA application_id = {APPLICATION_ID}")
                run(f"PRAGMA user_version = {TABLES_VERSION}")
        run("PRAGMA trusted_schema = OFF")
        if {sql.strip() for (sql,) in run("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL")} != set(_TABLES):
            raise _Damage("the tables are not those of kvplane")
        if (found := run("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
            raise _Damage(found)
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = NORMAL")  # a crash of the machine may lose the last writes, which only costs hits
        run(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
        run(f"PRAGMA journal_size_limit = {_WAL_PAGES * 4096}")

    def _replace_damaged(self) -> None:
        """Rename the damaged file, which replaces an earlier damaged one, and continue with a new file that has the
        rows that can be read.
        """
        self._connection.close()
        renamed = f"{self._path}.damaged"
        for end in ("", "-wal"):
            if (part := Path(f"{self._path}{end}")).exists():
                part.replace(f"{renamed}{end}")
        Path(f"{self._path}-shm").unlink(missing_ok=True)
        self._open()
        num_records, num_chunks = self._copy_from(Path(renamed))
        what = "%s is damaged: it is renamed to %s; %d records and %d chunks of it can be read and are kept"
        _log.warning(what, self._path, renamed, num_records, num_chunks)

    def _copy_from(self, damaged: Path) -> tuple[int, int]:
        """Copy the rows that can be read from a damaged file; returns the number of records and of chunks."""
        with closing(_open_to_read(damaged, self._busy_timeout_s)) as old, self._writing():
            add, before = self._connection.execute, self._connection.total_changes
            for _, name, raw in _scan(old, "rowid, replica, raw FROM record"):
                if isinstance(name, str) and isinstance(raw, bytes):
                    add("INSERT OR IGNORE INTO record VALUES (?, ?)", (name, raw))
            num_records, before = self._connection.total_changes - before, self._connection.total_changes
            logs = {number for number, name in _scan(old, "rowid, name FROM log") if _add_log(add, number, name)}
            before += len(logs)
            for _, number, seq, raw in _scan(old, "rowid, log, seq, raw FROM chunk"):
                if number in logs and isinstance(seq, int) and isinstance(raw, bytes):
                    add("INSERT OR IGNORE INTO chunk VALUES (?, ?, ?)", (number, seq, raw))
            return num_records, self._connection.total_changes - before

    def append(self, log: LogName, chunk: StoredChunk, trim_below: int) -> int:
        """Append a chunk to a log, and drop old chunks (see IndexStore.append)."""
        with self._lock, self._named_errors(), self._writing():
            run = self._connection.execute
            run("INSERT OR IGNORE INTO log (name) VALUES (?)", (str(log),))
            number = self._number(log)
            (newest,) = run("SELECT max(seq) FROM chunk WHERE log = ?", (number,)).fetchone()
            if not isinstance(newest, int | None):
                raise _Damage(f"a chunk has the number {newest!r}")
            if newest is not None and newest > chunk.seq:
                raise LogSuperseded(newest)
            run("DELETE FROM chunk WHERE log = ? AND seq < ?", (number, trim_below))
            if newest is None or newest < chunk.seq:
                run("INSERT INTO chunk VALUES (?, ?, ?)", (number, chunk.seq, chunk.raw))
            count: int = run("SELECT count(*) FROM chunk WHERE log = ?", (number,)).fetchone()[0]
            return count

    def load(self, log: LogName) -> Iterator[StoredChunk]:
        """Yield the chunks of a log, ordered by number (see IndexStore.load)."""
        after = -1
        while True:
            with self._lock, self._named_errors():
                rows = self._connection.execute(
                    "SELECT seq, raw FROM chunk WHERE log = ? AND seq > ? ORDER BY seq LIMIT 64",
                    (self._number(log), after),
                ).fetchall()
                numbers = [after, *(seq for seq, _ in rows)]
                if not all(isinstance(seq, int) for seq in numbers) or sorted(set(numbers)) != numbers:
                    raise _Damage("chunks are not in the order of their numbers")
            if not rows:
                return
            yield from (StoredChunk(seq, _bytes(raw)) for seq, raw in rows)
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
            return _bytes(row[0]) if row else None

    def records(self) -> Iterator[tuple[str, bytes]]:
        """Yield all pairs of name and record (see IndexStore.records)."""
        with self._lock, self._named_errors():
            rows = self._connection.execute("SELECT replica, raw FROM record ORDER BY replica").fetchall()
        yield from ((name, _bytes(raw)) for name, raw in rows if isinstance(name, str))

    def drop_record(self, replica: str) -> None:
        """Delete the record of a replica (see IndexStore.drop_record)."""
        with self._lock, self._named_errors(), self._writing():
            self._connection.execute("DELETE FROM record WHERE replica = ?", (replica,))

    def keep_alive(self, log: LogName) -> None:
        """Do nothing: data in a file do not expire (see IndexStore.keep_alive)."""

    def close(self) -> None:
        """Close connections and files (see IndexStore.close)."""
        with self._lock:
            self._connection.close()
            self._held.close()

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
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
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
    return sqlite3.connect(uri, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False, uri=True)


def _scan(damaged: sqlite3.Connection, what: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table that can be read: in order from the first one and then from the last one, until the
    damage, and then those between them that are found by their number.
    """
    damaged.text_factory = _text
    seen, ends = set[int](), {"ASC": 0, "DESC": 0}
    for order in ends:
        with suppress(*_UNREADABLE):
            for row in damaged.execute(f"SELECT {what} NOT INDEXED ORDER BY rowid {order}"):
                number, previous = row[0], ends[order]
                is_in_order = not previous or (number > previous) == (order == "ASC")
                if number in seen or not is_in_order:
                    break
                seen.add(number)
                ends[order] = number
                yield row
    first, end = ends["ASC"] + 1, ends["DESC"] or ends["ASC"] + _PROBED
    for number in range(max(first, end - _PROBED), end):
        with suppress(*_UNREADABLE):
            for row in damaged.execute(f"SELECT {what} NOT INDEXED WHERE rowid = ?", (number,)):
                if row[0] == number and number not in seen:
                    seen.add(number)
                    yield row


def _add_log(add: Callable[..., object], number: int, name: object) -> bool:
    if isinstance(name, str):
        add("INSERT OR IGNORE INTO log VALUES (?, ?)", (number, name))
    return isinstance(name, str)


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _bytes(raw: object) -> bytes:
    """Return the raw content of a record; a value of another type, from a damaged file, becomes a truncated record."""
    return raw if isinstance(raw, bytes) else b""


class _Damage(sqlite3.DatabaseError):
    """Damage that this module finds and SQLite does not."""

    sqlite_errorcode = sqlite3.SQLITE_CORRUPT


def _check_file(path: Path) -> bool:
    """Return False if the file was written by kvplane and its header is damaged. Raise StoreForeign or StoreNewer if
    kvplane, or this version of it, did not write the file. Opens no database, which would create files next to it.
    """
    with path.open("rb") as file:
        raw = file.read(_SEARCHED_BYTES)
    head = raw[:_HEAD_BYTES]
    if not head:
        return True
    version, application = _VERSION_AT.unpack_from(head.ljust(_HEAD_BYTES))
    is_empty = head[100:101] == _LEAF_PAGE and head[103:105] == bytes(2)
    is_new = is_empty and application == version == 0
    is_known = head.startswith(_MAGIC) and (application == APPLICATION_ID or is_new)
    if not is_known and (_is_cut(raw) or any(mark in raw for mark in _MARKS)):
        return False
    if not is_known:
        raise StoreForeign(
            f"{path} was not written by kvplane", field="store", remedy="name another file; this one was not changed"
        )
    if not 0 <= version <= _MAX_VERSION:
        return False
    if version > TABLES_VERSION:
        raise StoreNewer(
            f"{path} has tables of version {version}, this service supports versions up to {TABLES_VERSION}",
            field="store",
            remedy="run a newer kvplane, or name another file; this one was not changed",
        )
    return is_new or set(head[18:20]) <= {1, 2}  # versions of the file format that SQLite can write


def _is_cut(raw: bytes) -> bool:
    """Return True for the beginning of a database, and for zeros alone, as a crash of the machine leaves them."""
    return not raw.strip(b"\0") or (len(raw) < _HEAD_BYTES and _MAGIC.startswith(raw[: len(_MAGIC)]))


def _check_writable(path: Path) -> None:
    """Raise StoreReadOnly if the file or its directory cannot be written. SQLite would open such a file, and fail at
    the first write.
    """
    if not path.parent.is_dir():
        raise StoreReadOnly(f"the directory {path.parent} does not exist", field="store", remedy="make it")
    for place in (path, path.parent):
        if place.exists() and not os.access(place, os.W_OK):
            raise StoreReadOnly(f"{place} is read-only", field="store", remedy=_MAKE_WRITABLE)


@contextmanager
def _only_writer(path: Path) -> Iterator[None]:
    """Keep other processes from the file, which is private to this user from its creation on. The lock is on a file of
    its own: SQLite has locks on the other, and a damaged one is renamed. It ends with the process, however that ends.
    """
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    with open(os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR, 0o600), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreInUse(
                f"process {file.read(20).decode(errors='replace') or 'of another machine'} writes {path}",
                field="store",
                remedy="stop it, or name another file; services that share a store need Redis",
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        file.flush()
        yield


def _is_damage(error: Exception) -> bool:
    """Return True if the content of the file causes the error: any error of SQLite that the machine does not cause,
    since the statements are always the same.
    """
    if isinstance(error, UnicodeDecodeError):
        return True
    if not isinstance(error, sqlite3.Error) or isinstance(error, (sqlite3.ProgrammingError, sqlite3.InterfaceError)):
        return False
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code == sqlite3.SQLITE_IOERR_SHORT_READ or code & 0xFF not in _OF_THE_MACHINE


def _named(path: Path, error: sqlite3.Error | OSError | UnicodeDecodeError) -> Exception:
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
