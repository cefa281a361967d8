"""Types of the compiled module; _native.cpp is its source. `form`: 0 kvplane, 1 vLLM's pickle, 2 canonical CBOR."""

from collections.abc import Sequence
from typing import Any

ACCELERATED: bool
HASHER: object  # a capsule with the function that hashes blocks
MAX_BLOCK: int

def append_blocks(
    tables: dict[int, Any],
    slots: Sequence[int],
    row: Sequence[int],
    group: Sequence[int],
    count: Sequence[int],
    ids: Sequence[int],
    /,
) -> None: ...
def hash_run(form: int, parent: bytes, packed: bytes, block_size: int, portable: bool = False, /) -> bytes: ...
def pack_ids(ids: object, /) -> bytes | None: ...
def read_answer(
    message: bytes, arrays: type, /
) -> tuple[int, int, int, dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]] | None: ...
def read_rows(message: bytes, /) -> tuple[int, int, int, bool, int, bytes, bytes, bool, int, int, int] | None: ...
def step_message(epoch: int, seq: int, part: int, more: int, executed_through: int, written: bytes, /) -> bytes: ...
def write_answer(seq: int, part: int, published_through: int, fields: dict[str, Any], /) -> bytes | None: ...
def unpack_varints(packed: bytes | memoryview, /) -> bytes: ...
