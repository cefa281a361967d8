"""Block hashes by the compiled module _native, where it is there: a whole prompt in one call, without Python's lock.

The Python functions of algorithms.py are the specification and take over without it. The environment variable
KVPLANE_NATIVE selects: `auto` (default), `on` or `off`. `auto` takes the compiled hashes if the processor has
instructions for SHA-256 that the module uses (SHA-NI), because OpenSSL's SHA-256, which Python uses, is faster than
portable code. What needs no such instructions is compiled wherever the module is installed: the xxhash forms, the token
ids of prompts and of long messages, and the messages of decode steps with what their answers change.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

from kvplane.base.compiled import load
from kvplane.base.errors import FailedPrecondition, InvalidArgument

Fields: TypeAlias = dict[str, Any]

VARIABLE = "KVPLANE_NATIVE"


_COMPILED, _PROBLEM = load("kvplane.base.hashing", "hashing")


def pack_ids() -> Callable[[object], bytes | None] | None:
    """Return a function that returns a list of token ids as u32 values, little-endian, and None for anything else. None
    where it is not used.
    """
    found: Callable[[object], bytes | None] | None = _function("pack_ids")
    return found


def varints() -> Callable[[memoryview], bytes] | None:
    """Return a function that returns packed varints as u32 values, without Python's lock; None where it is not used.

    The function raises ValueError for bytes that are no varints of at most 32 bits.
    """
    found: Callable[[memoryview], bytes] | None = _function("unpack_varints")
    return found


def step_message() -> Callable[[int, int, int, int, int, bytes], bytes] | None:
    """Return a function that returns the message of a step of one part, from its numbers and the bytes of the part.
    None where it is not used.
    """
    found: Callable[[int, int, int, int, int, bytes], bytes] | None = _function("step_message")
    return found


def read_answer() -> Callable[[bytes, type], tuple[int, int, int, Fields, Fields, Fields, Fields] | None] | None:
    """Return a function that reads the message with the answer to a step of one part: its number and part, the last
    published step, and the fields of the part, of its new blocks, tables and orders, with arrays of the given type.
    It returns None for a message that has anything else. None where it is not used.
    """
    found: Callable[[bytes, type], tuple[int, int, int, Fields, Fields, Fields, Fields] | None] | None = _function(
        "read_answer"
    )
    return found


def append_blocks() -> Callable[..., None] | None:
    """Return a function that appends new blocks to block tables: the tables by slot, the slots of the rows, and the
    columns of the blocks, all arrays of u32. None where it is not used.
    """
    found: Callable[..., None] | None = _function("append_blocks")
    return found


def _function(name: str) -> Any:  # noqa: ANN401
    return getattr(selected(needs_sha256=False), name, None)


def describe() -> str:
    """Return which hashes this process uses, and why, in a line for people. Raises the errors of `selected`."""
    if selected() is not None:
        return "compiled" if _COMPILED is not None and _COMPILED.ACCELERATED else "compiled, without SHA instructions"
    if os.environ.get(VARIABLE) == "off":
        return f"Python ({VARIABLE}=off)"
    if _COMPILED is None:
        return f"Python ({_PROBLEM}: install g++ and install kvplane again)"
    return f"Python (no SHA instructions that the compiled module uses; {VARIABLE}=on takes it nevertheless)"


def selected(needs_sha256: bool = True) -> ModuleType | None:
    """Return the module if it is to be used.

    Raises:
        InvalidArgument: KVPLANE_NATIVE has another value than auto, on and off.
        FailedPrecondition: KVPLANE_NATIVE is on, and the compiled module is missing.
    """
    choice = os.environ.get(VARIABLE) or "auto"
    if choice not in ("auto", "on", "off"):
        raise InvalidArgument(f"it is {choice!r}", field=VARIABLE, remedy="set auto, on or off")
    if choice == "on" and _COMPILED is None:
        raise FailedPrecondition(
            "the compiled hashes are not installed",
            field=VARIABLE,
            remedy="install g++ and install kvplane again, or set auto",
        )
    if _COMPILED is None or choice == "off" or (choice == "auto" and needs_sha256 and not _COMPILED.ACCELERATED):
        return None
    return _COMPILED


def hasher() -> object:
    """Return the capsule of the function that hashes blocks, of a module that is selected."""
    return None if _COMPILED is None else _COMPILED.HASHER
