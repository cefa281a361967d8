"""Random damage and forgery of what a store holds: bytes of an SQLite file, values of Redis, and sealed records."""

from __future__ import annotations

import json
import random
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

from kvplane_service.store.record import CHUNK, LEASE, MAGIC, REGISTRATION, seal, unseal
from kvplane_service.store.seals import Seals

PAGE = 4096
EXTREMES = (0, 1, 2**16 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1)
HUGE = (2**63, 2**64, 10**400, 1e300)
VALUES: tuple[Any, ...] = (None, -1, *HUGE, True, "", "x" * 5000, "\ud800", "\n", [], {}, [[]], {"a": {}})


def damaged_bytes(raw: bytes, rng: random.Random) -> bytes:
    """A copy with flipped bits, other bytes, zeros, lost pages or another length."""
    out, kind = bytearray(raw), rng.choice("flip flip bytes page cut grow zero header swap".split())
    at = rng.randrange(len(out))
    if kind == "flip":
        for _ in range(rng.choice((1, 1, 2, 8, 64))):
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    elif kind == "bytes":
        for _ in range(rng.choice((1, 4, 32))):
            out[rng.randrange(len(out))] = rng.randrange(256)
    elif kind == "page":
        at -= at % PAGE
        out[at : at + PAGE] = rng.randbytes(len(out[at : at + PAGE]))
    elif kind == "cut":
        del out[at:]
    elif kind == "grow":
        out += rng.randbytes(rng.randrange(1, 2 * PAGE))
    elif kind == "zero":
        span = out[at : at + rng.randrange(1, 3000)]
        out[at : at + len(span)] = bytes(len(span))
    elif kind == "header":
        for position in (rng.randrange(min(100, len(out))), rng.randrange(len(out)) % 300):
            out[position] = rng.randrange(256)
    else:
        one, two = (rng.randrange(max(1, len(out) // PAGE)) * PAGE for _ in "12")
        out[one : one + PAGE], out[two : two + PAGE] = out[two : two + PAGE], out[one : one + PAGE]
    return bytes(out)


def forged(kind: int, raw: bytes, rng: random.Random) -> bytes:
    """A record with another body and a right checksum."""
    body = bytes(unseal(kind, raw))
    if kind == REGISTRATION and rng.random() < 0.8:
        body = _forged_json(json.loads(body), rng)
    elif rng.random() < 0.5:
        body = damaged_bytes(body, rng)
    else:
        out, at = bytearray(body), rng.randrange(0, max(1, min(len(body), 400) - 8))
        struct.pack_into("<Q", out, at, rng.choice(EXTREMES))
        body = bytes(out)
    return seal(kind, body)


def _forged_json(content: dict[str, Any], rng: random.Random) -> bytes:
    choice = rng.randrange(8)
    if choice == 0:
        return b"[" * 200_000
    if choice == 1:
        return json.dumps(rng.choice((None, -1, 2**63, [content], list(content)))).encode()
    key = rng.choice(list(content))
    if choice == 2:
        del content[key]
    elif choice == 3 and isinstance(content[key], str):
        text = bytearray(content[key].encode() or b"A")
        text[rng.randrange(len(text))] = rng.randrange(128)
        content[key] = text.decode()
    elif choice == 4:
        content["plans"] = [rng.choice(VALUES)]
    else:
        content[key] = rng.choice((*VALUES, *EXTREMES))
    return json.dumps(content).encode()


def forge_row(path: Path, rng: random.Random, seals: Seals | None = None) -> None:
    """Replace a record or a chunk in an SQLite file by a forged one, or its number or name by another. A sealed row
    gets a seal by `seals`, otherwise that of the replaced row or none.
    """
    with closing(sqlite3.connect(path)) as file, file:
        table, kind = rng.choice((("record", REGISTRATION), ("chunk", CHUNK)))
        places = {
            "record": "SELECT rowid, raw, replica FROM record",
            "chunk": "SELECT chunk.rowid, raw, name || ' ' || seq FROM chunk JOIN log ON log.id = chunk.log",
        }
        number, raw, place = rng.choice(file.execute(places[table]).fetchall())
        old_seal, raw = raw[: raw.index(MAGIC)], raw[raw.index(MAGIC) :]
        if rng.random() < 0.8:
            changed = forged(kind, raw, rng)
            seal_of = old_seal if rng.random() < 0.5 else b""
            changed = seals.seal(kind, place, changed) if seals else seal_of + changed
            file.execute(f"UPDATE {table} SET raw = ? WHERE rowid = ?", (changed, number))
        elif table == "chunk":
            file.execute("UPDATE chunk SET seq = ? WHERE rowid = ?", (rng.choice((-5, 0, 2**62, 2**63 - 1)), number))
        else:
            name = rng.choice(("", "q", "\0", "x" * 999))
            file.execute("UPDATE record SET replica = ? WHERE rowid = ?", (name, number))


def forge_key(server: Any, rng: random.Random, seals: Seals | None = None) -> None:
    """Forge the content of one sealed value in Redis: of a record, of a chunk, or of a lease. It gets a seal of its
    place by `seals`, otherwise that of the value that it replaces or none.
    """

    def sealed(kind: int, place: str, old: bytes, content: bytes) -> bytes:
        if seals is not None:
            return seals.seal(kind, place, content)
        return (old[: -len(content)] if rng.random() < 0.5 else b"") + content

    keys = [key for key in sorted(server.scan_iter(count=1000)) if key.rpartition(b":")[2] in (b"record", b"log")]
    keys += sorted(server.scan_iter("*:service:*", count=1000))
    key: bytes = rng.choice(keys)
    name = key.decode()
    if name.endswith(":record"):
        raw = server.get(key)
        replica = name.partition("{")[2].partition("}")[0]
        changed = sealed(REGISTRATION, replica, raw, forged(REGISTRATION, raw[raw.index(MAGIC) :], rng))
        server.set(key, changed, keepttl=True)
    elif name.endswith(":log"):
        head, _, rest = name.partition("}:")
        place = f"{head.partition('{')[2]} {' '.join(rest.split(':')[:2])}"
        entries = server.xrange(key)
        number, content = rng.choice(entries)
        seq = int(number.partition(b"-")[0])
        raw = content[b"c"]
        changed = forged(CHUNK, raw[raw.index(MAGIC) :], rng)
        if rng.random() < 0.2:  # behind all others, with its own number or that of another place
            seq = int(entries[-1][0].partition(b"-")[0]) + rng.choice((1, 2**20, 2**62, 2**63))
            server.xadd(key, {b"c": sealed(CHUNK, f"{place} {seq}", raw, changed)}, id=f"{seq}-0")
            return
        server.delete(key)
        for one, kept in entries:
            server.xadd(key, {b"c": sealed(CHUNK, f"{place} {seq}", raw, changed)} if one == number else kept, id=one)
    else:
        address = name.partition(":service:")[2]
        content_of_lease = rng.choice((b"", b"gone", b"\xff" * 5000, b"[" * 200_000, rng.randbytes(40)))
        server.set(key, sealed(LEASE, address, server.get(key), content_of_lease), px=60_000)


def damage_key(server: Any, rng: random.Random) -> str:
    """Damage one key of a store in Redis; returns what was done."""
    key = rng.choice(sorted(server.scan_iter(count=1000)))
    kind = server.type(key)
    ttl_ms = server.pttl(key)
    what = rng.choice("type type value value value value value".split())
    if what == "type":
        server.delete(key)
        rng.choice((_as_text, _as_list, _as_hash, _as_set, _as_stream))(server, key)
    elif kind == b"string":
        server.set(key, _damaged_value(server.get(key), rng))
    elif kind == b"zset":
        name = rng.choice((b"\xff\xfe", b"x" * 5000, b"", b"\n", b"other", rng.randbytes(4)))
        server.zadd(key, {name: rng.choice((0, 9e15, -1.0, float("inf")))})
    else:
        _damage_stream(server, key, rng)
    if ttl_ms > 0 and server.exists(key):
        server.pexpire(key, ttl_ms)
    return f"{what} of {key!r}"


def _damaged_value(raw: bytes, rng: random.Random) -> bytes:
    choice = rng.randrange(6)
    if choice == 0:
        return rng.choice((b"", b"9" * 5000, "²".encode(), b"x", b"-1", rng.randbytes(50)))
    if choice < 4 and raw.startswith(b"kvps"):
        return forged(REGISTRATION, raw, rng)
    return damaged_bytes(raw or b"1", rng)


def _damage_stream(server: Any, key: bytes, rng: random.Random) -> None:
    entries = server.xrange(key)
    number, fields = rng.choice(entries)
    raw = fields.get(b"c", b"1")
    choice = rng.randrange(6)
    if choice == 0:
        server.xdel(key, number)
        return
    if choice == 1:
        server.xadd(key, {"c": raw}, id=f"{rng.choice((2**40, 2**62, 2**63, 2**64 - 1))}-{rng.choice((0, 2**64 - 1))}")
        return
    if choice == 2:
        server.xadd(key, {rng.choice(("d", "")): raw}, id=f"{int(entries[-1][0].split(b'-')[0])}-7")
        return
    if choice == 3:
        last = int(entries[-1][0].split(b"-")[0])
        server.xadd(key, {"c": b""}, id=f"{last + 2**50}-1")
        server.xtrim(key, maxlen=0, approximate=False)
        return
    changed = forged(CHUNK, raw, rng) if choice == 4 and raw.startswith(b"kvps") else damaged_bytes(raw, rng)
    server.delete(key)
    for one, content in entries:
        server.xadd(key, {b"c": changed} if one == number else content, id=one)


def _as_text(server: Any, key: bytes) -> None:
    server.set(key, "text")


def _as_list(server: Any, key: bytes) -> None:
    server.lpush(key, "x")


def _as_hash(server: Any, key: bytes) -> None:
    server.hset(key, "a", "b")


def _as_set(server: Any, key: bytes) -> None:
    server.sadd(key, "x")


def _as_stream(server: Any, key: bytes) -> None:
    server.xadd(key, {"a": "b"})
