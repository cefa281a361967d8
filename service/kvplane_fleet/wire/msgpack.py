"""vLLM's and SGLang's cache events: msgpack payloads, whose events are maps (vLLM 0.33) or arrays (before, and SGLang).

    [time, [event, ...], data parallel rank]

A well-formed batch is decoded in one call, or a slice of its events in each. A slice of any other is decoded event by
event, so that one bad event costs only itself, up to MOST_BAD of them. Tokens are 5 of every 6 bytes of a batch and are
skipped unparsed, unless they are asked for.

An engine may be hostile: what a payload can cost is bounded by its length and by limits here, and nothing whose form is
open (`Raw`) becomes objects unless it is short. The number of events is read from the payload's head, before any is.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvplane.base.step import ExtraKeys
from kvplane_fleet.faults import Fault, Faults
from kvplane_fleet.slices import SLICE, Sliced
from kvplane_fleet.wire.events import (
    KEY_BYTES,
    KEY_MASK,
    MAX_BLOCK_SIZE,
    MAX_EVENTS,
    MAX_GROUP,
    MAX_HASHES,
    MAX_HASHES_OF_BATCH,
    MAX_WINDOW,
    TIERS,
    WHOLE_KEY_BYTES,
    Batch,
    Cleared,
    Event,
    Evidence,
    GroupFormat,
    Removed,
    Stored,
    Tier,
)

MAX_PAYLOAD_BYTES = 2 << 20  # 350,000 tokens, or 25,000 evicted blocks, of one step
MOST_BAD = 1024  # events of a batch that cannot be read; one of more is no batch
MOST_CLEARED = 64  # events of a batch that clear the place
MOST_EVIDENCE = 16  # events of a batch whose tokens are decoded
MOST_TOKENS = 1 << 17  # of an event whose tokens are decoded
MOST_OPEN_BYTES = 64 << 10  # of a value whose form is open, that becomes objects
DIGEST_BYTES = (16, 32)  # of the algorithms that engines use; the key is the end of the digest


_NIL = msgspec.Raw(b"\xc0")


class _StoredMap(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None = None
    block_size: int = 0
    medium: str | None = None
    lora_name: msgspec.Raw = _NIL
    extra_keys: msgspec.Raw = _NIL
    cache_salt: msgspec.Raw = _NIL  # SGLang
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    lookahead_token_ids: msgspec.Raw = _NIL
    token_ids: msgspec.Raw = msgspec.Raw(b"\x90")


class _RemovedMap(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedMap(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    pass


class _StoredArray(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: msgspec.Raw = _NIL
    medium: str | None = None
    lora_name: msgspec.Raw = _NIL  # SGLang: a map of metadata
    extra_keys: msgspec.Raw = _NIL
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: msgspec.Raw = _NIL
    ownership: msgspec.Raw = _NIL
    session_id: msgspec.Raw = _NIL
    lookahead_token_ids: msgspec.Raw = _NIL


class _RemovedArray(msgspec.Struct, array_like=True, tag="BlockRemoved", gc=False):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


_Maps = _StoredMap | _RemovedMap | _ClearedMap
_Arrays = _StoredArray | _RemovedArray | _ClearedArray
_AnyStored = _StoredMap | _StoredArray


class _BatchOfMaps(msgspec.Struct, array_like=True, gc=False):
    time: float
    events: list[_Maps]
    rank: int | None = None


class _BatchOfArrays(msgspec.Struct, array_like=True, gc=False):
    time: float
    events: list[_Arrays]
    rank: int | None = None


_BATCHES = (msgspec.msgpack.Decoder(_BatchOfMaps), msgspec.msgpack.Decoder(_BatchOfArrays))
_SLICES = (msgspec.msgpack.Decoder(list[_Maps]), msgspec.msgpack.Decoder(list[_Arrays]))
_MAP, _ARRAY = msgspec.msgpack.Decoder(_Maps), msgspec.msgpack.Decoder(_Arrays)
_RAWS = msgspec.msgpack.Decoder(list[msgspec.Raw])
_SKIPPED = msgspec.msgpack.Decoder(msgspec.Raw)
_ANY = msgspec.msgpack.Decoder()
_AHEAD = msgspec.msgpack.Decoder(list[list[int]] | None)
_TOKENS = msgspec.msgpack.Decoder(list[int])
_ERRORS = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
_KINDS = frozenset(
    """
    full_attention mla_attention sliding_window sliding_window_mla mamba chunked_local_attention sink_full_attention
    encoder_only_attention cross_attention
    """.split()
)


class BatchDecoder:
    """Decodes the payloads of one source, and counts what is wrong with them."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._form = 0  # of the last batch: maps or arrays
        self.want_tokens, self.want_extra = True, False  # of which events: of all, of prompts with an adapter or a salt
        self._evidence_left = 0  # events of this batch whose tokens are decoded
        self._bad = self._hashes = 0  # of this batch: faults of events that cannot be read, hashes of others

    def decoding(self, payload: bytes) -> Sliced[Batch | None]:
        """Return the batch; None, and a fault is counted, if the payload is no batch. Never raises."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            self._faults.count(Fault.PAYLOAD_TOO_LARGE)
            return None
        number = _num_events(payload)
        if number > MAX_EVENTS:
            self._faults.count(Fault.TOO_MANY_EVENTS)
            return None
        self._evidence_left = MOST_EVIDENCE if self.want_tokens or self.want_extra else 0
        for form in (self._form, 1 - self._form) if number <= SLICE else ():
            try:
                batch = _BATCHES[form].decode(payload)
            except _ERRORS:
                continue
            self._form = form
            if _num_hashes(batch.events) > MAX_HASHES_OF_BATCH:
                self._faults.count(Fault.TOO_MANY_HASHES)
                return None
            return self._batch(batch.time, [self._checked(event) for event in batch.events], batch.rank)
        return (yield from self._decoding_slices(payload))

    def _decoding_slices(self, payload: bytes) -> Sliced[Batch | None]:
        """Decode a batch that is long, or of which some part is wrong, and count which."""
        try:
            parts: Sequence[msgspec.Raw] = _RAWS.decode(payload) if payload[:1] in _FEW else ()
        except _ERRORS:
            parts = ()
        if not parts:
            readable = _readable(payload)
            self._faults.count(Fault.BATCH_INVALID if readable else Fault.NOT_MSGPACK)
            return None
        if len(parts) < 2:
            self._faults.count(Fault.BATCH_INVALID)
            return None
        time_s, rank = (_value(_short(one)) for one in (parts[0], parts[2] if len(parts) > 2 else _NIL))
        if isinstance(time_s, bool) or not isinstance(time_s, int | float):
            self._faults.count(Fault.TIME_INVALID)
            time_s = 0.0
        try:
            raws = _RAWS.decode(parts[1])
        except _ERRORS:
            self._faults.count(Fault.EVENTS_INVALID)
            return None
        if len(raws) > MAX_EVENTS:
            self._faults.count(Fault.TOO_MANY_EVENTS)
            return None
        events, clears = list[Event | None](), 0
        self._bad = self._hashes = 0
        for at in range(0, len(raws), SLICE):
            found = self._decode_slice(raws[at : at + SLICE])
            events += found
            clears += _num_clears(found)
            if self._bad > MOST_BAD or self._hashes > MAX_HASHES_OF_BATCH:
                self._faults.count(Fault.EVENTS_INVALID if self._bad > MOST_BAD else Fault.TOO_MANY_HASHES)
                return None
            if clears > MOST_CLEARED:
                break
            yield
        return self._batch(float(time_s), events, rank)

    def _decode_slice(self, raws: Sequence[msgspec.Raw]) -> list[Event | None]:
        """Return some events, and count their hashes, or what is wrong with them."""
        packed = b"\xdd" + len(raws).to_bytes(4, "big") + b"".join(raws)
        for form in (self._form, 1 - self._form):
            try:
                events = _SLICES[form].decode(packed)
            except _ERRORS:
                continue
            self._form = form
            self._hashes += _num_hashes(events)
            return [self._checked(event) for event in events]
        before = self._faults.counts.total()
        found = [self._decode_one(raw) for raw in raws]
        self._bad += self._faults.counts.total() - before
        return found

    def _batch(self, time_s: float, events: Sequence[Event | None], rank: object) -> Batch | None:
        """Return the batch of the events that could be read. A batch that clears too often is one that cannot be read,
        which clears once.
        """
        if _num_clears(events) > MOST_CLEARED:
            self._faults.count(Fault.TOO_MANY_EVENTS)
            return None
        return Batch(time_s, [event for event in events if event is not None], self._rank(rank))

    def _decode_one(self, raw: msgspec.Raw) -> Event | None:
        for decoder in (_MAP, _ARRAY):
            try:
                return self._checked(decoder.decode(raw))
            except _ERRORS:
                continue
        if len(memoryview(raw)) > MOST_OPEN_BYTES:
            self._faults.count(Fault.EVENT_INVALID)
            return Cleared()  # it may be a removal
        value = _value(raw)
        if isinstance(value, dict):
            name = value.get("type")
        else:
            name = value[0] if isinstance(value, list) and value else None
        if not isinstance(value, dict | list) or not isinstance(name, str):
            self._faults.count(Fault.EVENT_UNTYPED)
            return None
        if name not in ("BlockStored", "BlockRemoved", "AllBlocksCleared"):
            self._faults.count(Fault.EVENT_UNKNOWN)
            return None
        self._faults.count(_fault_of(value))
        return None if name == "BlockStored" else Cleared()

    def _checked(self, event: _Maps | _Arrays) -> Event | None:
        """Return the event in kvplane's types, or None if one of its values is out of range."""
        if isinstance(event, _ClearedMap | _ClearedArray):
            return Cleared()
        removal = isinstance(event, _RemovedMap | _RemovedArray)
        keys = self._keys(event.block_hashes)
        group = 0 if event.group_idx is None else event.group_idx
        if not 0 <= group <= MAX_GROUP:
            self._faults.count(Fault.GROUP_INVALID)
            keys = None
        tier = self._tier(event.medium)
        if keys is None:
            return Cleared() if removal else None
        if tier is None:
            return None  # no entry of this medium was made
        width = _key_bytes(event.block_hashes)
        if removal:
            return Removed(group, tier, keys, width)
        assert isinstance(event, _StoredMap | _StoredArray)
        form = self._group_format(event)
        return None if form is None else Stored(group, tier, keys, form, self._evidence(event), width)

    def _keys(self, hashes: Sequence[int | bytes]) -> list[int] | None:
        if len(hashes) > MAX_HASHES:
            self._faults.count(Fault.TOO_MANY_HASHES)
            return None
        keys, is_whole = [], _key_bytes(hashes) == WHOLE_KEY_BYTES
        for one in hashes:
            if isinstance(one, bytes) and is_whole and len(one) in DIGEST_BYTES:
                keys.append(int.from_bytes(one[-WHOLE_KEY_BYTES:], "big"))
            elif isinstance(one, int) and not is_whole and -(1 << 63) <= one <= KEY_MASK:
                keys.append(one & KEY_MASK)  # SGLang's hashes are signed
            else:
                self._faults.count(Fault.HASH_INVALID)
                return None
        return keys

    def _tier(self, medium: str | None) -> Tier | None:
        tier = Tier.DEVICE if medium is None else TIERS.get(medium.lower())
        if tier is None:
            self._faults.count(Fault.MEDIUM_UNKNOWN)
        return tier

    def _group_format(self, event: _AnyStored) -> GroupFormat | None:
        window = event.kv_cache_spec_sliding_window or 0
        kind = event.kv_cache_spec_kind or ""
        if not 0 <= event.block_size <= MAX_BLOCK_SIZE or (event.block_size == 0 and event.group_idx is None):
            self._faults.count(Fault.BLOCK_SIZE_INVALID)
            return None
        if kind and kind not in _KINDS:
            self._faults.count(Fault.KIND_UNKNOWN)
            return None
        if not 0 <= window <= MAX_WINDOW or (kind.startswith("sliding_window") and window == 0):
            self._faults.count(Fault.WINDOW_INVALID)
            return None
        return GroupFormat(kind, event.block_size, window)

    def _evidence(self, event: _AnyStored) -> Evidence | None:
        """Return the content of the blocks, where it is wanted and readable."""
        if self._evidence_left < 1 or not event.block_hashes:
            return None
        salt = event.cache_salt if isinstance(event, _StoredMap) else _NIL
        stated = (event.lora_name, event.extra_keys, salt)
        if not self.want_tokens and (event.parent_block_hash is not None or all(one == _NIL for one in stated)):
            return None
        self._evidence_left -= 1
        if _length(event.token_ids, 0) > MOST_TOKENS:
            return None  # an event with fewer will prove it
        try:
            tokens, ahead = _TOKENS.decode(event.token_ids), _AHEAD.decode(_short(event.lookahead_token_ids))
        except _ERRORS:
            self._faults.count(Fault.TOKENS_INVALID)
            return None
        if tokens and not 0 <= min(tokens) <= max(tokens) < 1 << 32:
            self._faults.count(Fault.TOKENS_INVALID)
            return None
        parent = None
        if event.parent_block_hash is not None:
            keys = self._keys([event.parent_block_hash])
            if keys is None:
                return None
            parent = keys[0]
        plain, extra = _contents(*(_value(_short(one)) for one in stated))
        return Evidence(tokens, parent, plain, ahead or (), _key_bytes(event.block_hashes), extra)

    def _rank(self, rank: object) -> int | None:
        if rank is None or (isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 1 << 16):
            return rank
        self._faults.count(Fault.RANK_INVALID)
        return None


def _num_clears(events: Sequence[Event | None]) -> int:
    return sum(isinstance(event, Cleared) for event in events)


def _num_hashes(events: Sequence[_Maps | _Arrays]) -> int:
    return sum(len(one.block_hashes) for one in events if not isinstance(one, _ClearedMap | _ClearedArray))


def _key_bytes(hashes: Sequence[int | bytes]) -> int:
    return WHOLE_KEY_BYTES if hashes and isinstance(hashes[0], bytes) else KEY_BYTES


def _readable(payload: bytes) -> bool:
    try:
        _SKIPPED.decode(payload)
    except _ERRORS:
        return False
    return True


_TIMES = {0xCB: 10, 0xCA: 6}  # by the type of a batch's time, where its events begin


def _num_events(payload: bytes) -> int:
    """Return how many events a batch states, from its head; 0 if it is no batch."""
    at = _TIMES.get(payload[1]) if len(payload) > 1 else None
    if at is not None:
        return _length(payload, at)
    try:
        parts: Sequence[msgspec.Raw] = _RAWS.decode(payload) if payload[:1] in _FEW else ()
    except _ERRORS:
        return 0
    return _length(parts[1], 0) if len(parts) > 1 else 0


_FEW = [bytes([0x90 | length]) for length in range(2, 16)]  # heads of the arrays that a batch may be


def _length(packed: bytes | msgspec.Raw, at: int) -> int:
    """Return the length that the head of an array states; 0 if it is none."""
    head = bytes(memoryview(packed)[at : at + 5])
    if not head:
        return 0
    if head[0] in (0xDC, 0xDD):
        return int.from_bytes(head[1 : 3 if head[0] == 0xDC else 5], "big")
    return head[0] & 0xF if head[0] & 0xF0 == 0x90 else 0


_LONG = msgspec.Raw(b"\x91\xc3")  # a list that is not empty, and no list of lists


def _short(raw: msgspec.Raw) -> msgspec.Raw:
    """Return a value whose form is open, or another one in its place if it is long."""
    return raw if len(memoryview(raw)) <= MOST_OPEN_BYTES else _LONG


def _value(raw: msgspec.Raw) -> object:
    try:
        return _ANY.decode(raw)
    except _ERRORS:
        return None


def _contents(lora: object, keys: object, salt: object) -> tuple[bool, ExtraKeys | None]:
    """Return whether blocks consist of tokens alone, and what else their first one has; None if it has nothing, or more
    than an adapter and a salt. `keys`: the extra keys by block, untagged; where they are stated, they have the adapter.
    """
    if isinstance(lora, dict):  # SGLang, where its events are arrays
        salt = lora.get("cache_salt")
    name = lora if isinstance(lora, str) else ""
    if not name and not salt and (keys is None or (isinstance(keys, list) and not any(keys))):
        return True, None
    first = keys[0] if isinstance(keys, list) and keys else ()
    values = list(first) if isinstance(first, list) else []
    if values[:1] == [name]:
        del values[0]
    values += [salt] if salt else []
    if len(values) > 1 or not all(isinstance(one, str) for one in values):
        return False, None
    return False, ExtraKeys(lora=(name, "") if name else None, salt=values[0] if values else "")


_FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size")


def _fault_of(value: dict[object, object] | list[object]) -> Fault:
    """Return which field of an event of a known type has the wrong type."""
    fields = value if isinstance(value, dict) else dict(zip(_FIELDS, value[1:], strict=False))
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list) or any(isinstance(one, bool) or not isinstance(one, int | bytes) for one in hashes):
        return Fault.HASH_INVALID
    if not isinstance(fields.get("block_size", 0), int):
        return Fault.BLOCK_SIZE_INVALID
    if not isinstance(fields.get("group_idx"), int | None):
        return Fault.GROUP_INVALID
    if not isinstance(fields.get("medium"), str | None):
        return Fault.MEDIUM_UNKNOWN
    if not isinstance(fields.get("kv_cache_spec_kind"), str | None):
        return Fault.KIND_UNKNOWN
    if not isinstance(fields.get("kv_cache_spec_sliding_window"), int | None):
        return Fault.WINDOW_INVALID
    return Fault.EVENT_INVALID
