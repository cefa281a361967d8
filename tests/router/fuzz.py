"""Fuzzes what an engine can send: frames, payloads and events, mutated by their structure and by their bytes.

    python -m tests.router.fuzz [SECONDS [SEED]]      60 seconds, seed 0; exits 1 at a finding and prints its payload

A payload that takes a new way through the code (a pair of lines of decoder, place or index that follow each other, by
sys.settrace) joins the corpus from which later ones are made. A finding is
an exception, a lost batch that is not counted, a key out of range, a change of another engine's entries, or entries of
the place that differ from a multiset of the decoded events.
"""

from __future__ import annotations

import inspect
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from types import CodeType, FrameType
from typing import Any

import msgspec

from kvplane_fleet import domains, index, places
from kvplane_fleet.faults import Fault, Faults
from kvplane_fleet.native import make_index
from kvplane_fleet.places import Place
from kvplane_fleet.settings import PlaceSettings
from kvplane_fleet.wire import msgpack
from kvplane_fleet.wire.events import Batch, GroupFormat, Removed, Stored, Tier
from kvplane_fleet.wire.frames import parse_live, parse_replay
from kvplane_fleet.wire.msgpack import BatchDecoder
from tests.router.fleets import DOMAIN, content, finished, tokens

FOLLOWED = frozenset(inspect.getfile(one) for one in (msgpack, places, domains, index))
MOST_CORPUS, MOST_BYTES = 2000, 8192  # payloads from which others are made, and the bytes of each
CHECKED = 8  # payloads between two comparisons of all entries
HEAD = ["BlockStored", [11, -12], None, list(range(32)), 16, None]
WEIRD: Sequence[Any] = (
    None, True, False, 0, -1, 1, 63, 64, 16, 1 << 17, 1 << 31, 1 << 63, (1 << 64) - 1, -(1 << 63), 10**9, 0.5,
    float("nan"), float("inf"), "", "GPU", "gpu", "CPU_PINNED", "DISK7", "BlockStored", "BlockRemoved",
    "AllBlocksCleared", "mamba", "sliding_window", "full_attention", "\ud7ff", b"", b"x" * 16, b"x" * 32, b"x" * 33,
    [], [[]], {}, {"type": "BlockStored"}, [1] * 300, [b"y" * 32] * 3, msgspec.Raw(b"\x91" * 40 + b"\x90"),
    msgspec.Raw(b"\xd9\x02\xff\xfe"), msgspec.Raw(b"\xc1"), msgspec.msgpack.Ext(5, b"abc"),
)  # fmt: skip


def stored(**fields: Any) -> dict[str, Any]:
    """A store event as a map."""
    prompt = tokens(fields.pop("seed", 0), 2)
    return {
        "type": "BlockStored", "block_hashes": DOMAIN.keys(prompt), "parent_block_hash": None, "token_ids": prompt,
        "block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    } | fields  # fmt: skip


SEEDS: Sequence[Any] = (
    [1.0, [stored(), {"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU", "group_idx": 0}], 0],
    [1.0, [stored(group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=32)], 0],
    [2.0, [stored(medium="CPU", lookahead_token_ids=[[1], [2]], extra_keys=[None, ["x"]])], None],
    [1.5, [[*HEAD, "GPU", None, None, 0, "full_attention", None], ["BlockRemoved", [11], "GPU", 0]], 3],
    [1.0, [[*HEAD, "CPU_PINNED", {"cache_salt": "a"}], ["AllBlocksCleared"]]],
    [1.0, [stored(lora_name="sql", extra_keys=[["sql", "salt"], ["sql"]]), stored(cache_salt="s", seed=3)], 0],
    [1.0, [stored(block_hashes=[b"z" * 32, b"q" * 32], seed=1), {"type": "AllBlocksCleared"}], 1],
)


def mutated(rng: Random, value: Any) -> Any:
    """A value with one part replaced, removed, repeated, or put into another."""
    if rng.random() < 0.25 or not isinstance(value, list | dict) or not value:
        return rng.choice(WEIRD)
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    at = rng.choice(list(copy)) if isinstance(copy, dict) else rng.randrange(len(copy))
    action = rng.random()
    if action < 0.7:
        copy[at] = mutated(rng, copy[at])
    elif action < 0.8:
        del copy[at]
    elif action < 0.9 and isinstance(copy, list):
        copy[at:at] = [copy[at]] * rng.choice([1, 2, 40])
    elif isinstance(copy, dict):
        copy[rng.choice(["type", "unknown", "medium", "group_idx"])] = rng.choice(WEIRD)
    else:
        copy = [copy]
    return copy


def damaged(rng: Random, payload: bytes) -> bytes:
    """A payload with some of its bytes changed, lost or repeated."""
    raw = bytearray(payload)
    for _ in range(rng.choice([0, 0, 1, 1, 3])):
        at = rng.randrange(len(raw) + 1)
        action = rng.random()
        if action < 0.5 and at < len(raw):
            raw[at] = rng.choice([0, 0x80, 0x90, 0xC1, 0xDD, 0xDF, 0xFF, rng.randrange(256)])
        elif action < 0.7:
            del raw[at:]
        elif action < 0.85:
            del raw[at : at + rng.randrange(1, 9)]
        else:
            raw[at:at] = raw[at : at + rng.randrange(1, 30)] or struct.pack(">I", rng.getrandbits(32))
    return bytes(raw)


class Ways:
    """Pairs of lines that followed each other in the followed files while this was entered."""

    def __init__(self) -> None:
        self.pairs = set[tuple[CodeType, int, int]]()

    def __enter__(self) -> Ways:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        del event
        if frame.f_code.co_filename not in FOLLOWED:
            return None
        code, pairs, last = frame.f_code, self.pairs, frame.f_lineno

        def line(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
            nonlocal last
            if event == "line":
                pairs.add((code, last, frame.f_lineno))
                last = frame.f_lineno
            return line

        return line


class Fuzzer:
    """One place that takes everything, next to another that must not change."""

    def __init__(self, seed: int) -> None:
        self._rng, self._index = Random(seed), make_index()
        self.place, self._other = (
            Place(PlaceSettings(name, events="inproc://x", adapters={"sql": "/p"}), self._index)
            for name in ("fuzzed", "other")
        )
        finished(self._other.applying(msgspec.msgpack.encode(SEEDS[0])))
        self._kept = content(self._other)
        self._model: dict[tuple[Tier, int], Counter[int]] = {}
        self._corpus = [msgspec.msgpack.encode(one) for one in SEEDS]
        self._seen = set[tuple[CodeType, int, int]]()
        self._forms: dict[int, GroupFormat] = {}
        self._key_bytes = 0
        self.runs = 0

    @property
    def ways(self) -> int:
        """Number of different pairs of lines."""
        return len(self._seen)

    def run(self, payload: bytes | None = None) -> None:
        """Apply one payload, a new one by default. Raises AssertionError, or what the product raises, at a finding."""
        self.runs += 1
        raw = self._payload() if payload is None else payload
        try:
            self._check(raw)
        except BaseException:
            print(f"finding after {self.runs} payloads: {raw!r}", file=sys.stderr)
            raise

    def _payload(self) -> bytes:
        raw = self._rng.choice(self._corpus)
        try:
            value = msgspec.msgpack.decode(raw)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return damaged(self._rng, raw)
        for _ in range(self._rng.choice([0, 1, 1, 2, 4])):
            value = mutated(self._rng, value)
        try:
            return damaged(self._rng, msgspec.msgpack.encode(value))
        except (TypeError, ValueError, OverflowError, RecursionError):
            return damaged(self._rng, raw)  # not a value of the format

    def _check(self, raw: bytes) -> None:
        faults = Faults()
        batch = finished(BatchDecoder(faults).decoding(raw))
        assert batch is not None or faults.counts, "a lost batch is counted"
        before = self.place.faults.counts.copy()
        with Ways() as ways:
            finished(self.place.applying(raw))
        self._follow(batch, self.place.faults.counts - before)
        if self.runs % CHECKED == 0:
            held = {cell: keys for cell, keys in content(self.place).items() if keys}
            assert held == {cell: keys for cell, keys in self._model.items() if keys}, "entries differ"
        if self.runs % 64 == 0:
            assert content(self._other) == self._kept, "another place changed"
            self._check_frames(raw)
        if not ways.pairs <= self._seen and len(raw) <= MOST_BYTES:
            self._seen |= ways.pairs
            self._corpus.append(raw)
            del self._corpus[: len(self._corpus) - MOST_CORPUS]

    def _follow(self, batch: Batch | None, faults: Counter[Fault]) -> None:
        """Apply the events to the model; a group that changes clears the place before the event."""
        if batch is None:
            self._model.clear()
            return
        changes, widths, forms = 0, 0, self._forms
        for event in batch.events:
            if isinstance(event, Stored | Removed) and event.keys:
                if self._key_bytes not in (0, event.key_bytes):
                    widths += 1
                    forms.clear()
                    self._model.clear()
                self._key_bytes = event.key_bytes
            if isinstance(event, Stored):
                assert all(0 <= key < 1 << 8 * event.key_bytes for key in event.keys)
                if event.tier is Tier.DEVICE:
                    if forms.get(event.group, event.form) != event.form:
                        changes += 1
                        self._key_bytes = event.key_bytes if event.keys else 0
                        forms.clear()
                        self._model.clear()
                    forms[event.group] = event.form
                self._model.setdefault((event.tier, event.group), Counter()).update(event.keys)
            elif isinstance(event, Removed):
                held = self._model.get((event.tier, event.group), Counter())
                self._model[event.tier, event.group] = +(held - Counter(event.keys))
            else:
                self._model.clear()
        assert (faults[Fault.GROUP_CHANGED], faults[Fault.HASH_CHANGED]) == (changes, widths)

    def _check_frames(self, raw: bytes) -> None:
        rng, faults = self._rng, Faults()
        parts = [rng.choice([b"", b"t", raw[:7], raw[:8], raw[:9], b"\xff" * 8]) for _ in range(rng.randrange(6))]
        for parse in (lambda: parse_live(parts, faults), lambda: parse_replay(parts, b"t", faults)):
            before = faults.counts.total()
            assert (parse() is None) == (faults.counts.total() == before + 1)


def main(seconds: float, seed: int, clock: Callable[[], float] = time.monotonic) -> None:
    """Fuzz for a time."""
    fuzzer, until = Fuzzer(seed), clock() + seconds
    while clock() < until:
        fuzzer.run()
    counts = fuzzer.place.faults
    print(f"{fuzzer.runs:,} payloads, {fuzzer.ways} pairs of lines, seed {seed}; {counts}")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
