"""Files of this folder: bytes that one version wrote.

tests/versions/COMMIT/store.db              a SQLite store
tests/versions/COMMIT/store.json            the same content by record and log, as a store in Redis has it
tests/versions/COMMIT/sealed.json           the same, sealed with the key `KEY`
tests/versions/COMMIT/memory.json           by replica of the stores: its memory, and the keys that recover on it
tests/versions/COMMIT/sessions/NAME.bin     messages of a session in order, from its opening: `Sent`
tests/versions/COMMIT/engines/NAME.bin      a spec, a state, then steps and results of a random engine as messages
tests/versions/COMMIT/mirrors/NAME.bin      messages of a mirrored engine: opening, pieces of the image, steps
tests/versions/COMMIT/recordings/NAME.log   recordings of the decision log, with the state that they begin with
tests/versions/COMMIT/worker/NAME           stamp table, records of keys, job table, and index of a disk tier
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
COMMITS = sorted(one.name for one in HERE.iterdir() if (one / "store.db").exists())
KEY = bytes(range(32))
_HEAD = struct.Struct("<cI")


@dataclass(frozen=True, slots=True)
class Sent:
    """A message: of the engine (">"), of the service ("<"), or what belongs to neither ("=")."""

    way: str
    raw: bytes


def write_messages(path: Path, messages: Iterable[Sent]) -> None:
    """Write a file of messages."""
    path.parent.mkdir(parents=True, exist_ok=True)
    framed = [_HEAD.pack(one.way.encode(), len(one.raw)) + one.raw for one in messages]
    path.write_bytes(zlib.compress(b"".join(framed), 9))


def read_messages(path: Path) -> list[Sent]:
    """Read a file of messages."""
    raw, at, found = zlib.decompress(path.read_bytes()), 0, []
    while at < len(raw):
        way, size = _HEAD.unpack_from(raw, at)
        at += _HEAD.size
        found.append(Sent(way.decode(), raw[at : at + size]))
        at += size
    return found


def files(folder: str, ending: str = "bin") -> list[Path]:
    """Return the files of a folder, of all commits."""
    return [path for commit in COMMITS for path in sorted((HERE / commit / folder).glob(f"*.{ending}"))]
