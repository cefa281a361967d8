"""Records of keys (`kvplane.base.key_records`) as entries, which an allocator recovers."""

from __future__ import annotations

import numpy as np

from kvplane.base.key_records import RECORD_BYTES, KeyRecords
from kvplane_core.face.columns import U32, U64, column
from kvplane_core.face.entries import Entries, KeyRun

RECORD = np.dtype(
    [("stamp", "<u8"), ("digest", "u1", 32), ("num_tokens", "<u4"), ("group", "<u4"), ("age", "<u4"), ("zero", "<u4")]
)
assert RECORD.itemsize == RECORD_BYTES


def entries_of(records: KeyRecords) -> Entries:
    """Return all records, also those of keys that are no longer in memory."""
    rows = np.frombuffer(records.records(), RECORD)
    blocks = np.flatnonzero(rows["stamp"])
    blocks = blocks[np.argsort(rows["group"][blocks], kind="stable")]
    rows = rows[blocks]
    groups, counts = np.unique(rows["group"], return_counts=True)
    size = records.digest_bytes
    return Entries(
        size,
        [KeyRun("", group, count) for group, count in zip(groups.tolist(), counts.tolist(), strict=True)],
        column(U32, blocks),
        column(U64, rows["stamp"]),
        column(U32, rows["num_tokens"]),
        column(U32, rows["age"]),
        rows["digest"][:, :size].tobytes(),
    )
