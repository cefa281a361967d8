"""The operations of `kvtrace/1`: their fields, and the conditions that each requires."""

from __future__ import annotations

from collections.abc import Container

from tests.conformance.forms import (
    COUNT,
    FLAG,
    POSITIVE,
    TEXT,
    BadRecording,
    Form,
    Record,
    list_of,
    maybe,
    one_of,
    outputs,
    row_of,
)

_ALWAYS = outputs("free")
_EVENTS = outputs("ev")
_ID = {"id": TEXT}
_ITEM = row_of(TEXT, COUNT, POSITIVE)  # multimodal: id, offset, length
_ADMISSION_ONLY = ("hit", "ext", "full", "reserved", "enc")

_NEW = Form(
    _ID
    | {"segs": list_of(row_of(COUNT, COUNT)), "salt": maybe(TEXT), "lora": maybe(TEXT), "mm": maybe(list_of(_ITEM))},
    {"skip": FLAG},
    outputs("n", "nh", "lasth") | _ALWAYS,
    _EVENTS,
)
_ALLOC = Form(
    _ID | {"comp": COUNT, "new": COUNT, "st": one_of("WAITING", "RUNNING", "PREEMPTED")},
    {
        "use_hit": FLAG, "hit": COUNT, "look": COUNT, "ext": COUNT, "delay": FLAG, "full": FLAG, "reserved": COUNT,
        "has_sched": FLAG, "infl": COUNT, "enc": COUNT,
    },
    outputs("ok", "tbl") | _ALWAYS,
    outputs("nb") | _EVENTS,
)  # fmt: skip

OPERATIONS: dict[str, Form] = {
    "step": Form({}, {}, _ALWAYS, outputs("copies", "retained", "zero") | _EVENTS),
    "new": _NEW,
    "lookup": Form(_ID, {}, outputs("hit", "bnd", "blk") | _ALWAYS, _EVENTS),
    "alloc": _ALLOC,
    "tok": Form(_ID | {"t": list_of(COUNT)}, {}, outputs("nh", "lasth") | _ALWAYS, _EVENTS),
    "cache": Form(_ID | {"n": COUNT}, {}, _ALWAYS, _EVENTS),
    "free": Form(_ID, {}, _ALWAYS, _EVENTS),
    "preempt": Form(_ID, {}, _ALWAYS, _EVENTS),
    "hold": Form(_ID, {}, _ALWAYS, _EVENTS),
    "release": Form(_ID, {}, _ALWAYS, _EVENTS),
    "evict": Form({"ids": list_of(COUNT)}, {}, _ALWAYS, _EVENTS),
    "reset": Form({}, {}, outputs("ok") | _ALWAYS, _EVENTS),
    "snapshot": Form({}, {}, outputs("freeq", "freeq_crc", "cached_hashes", "cached", "usage") | _ALWAYS, _EVENTS),
    "end": Form({"stats": one_of(None)}, {"free": COUNT}),
}


def check_operation(op: Record, where: str, live: Container[str], held: Container[str]) -> None:
    """Raise BadRecording for an operation that is unknown, of another form, or about an unknown request.

    Args:
        live: names of the requests there are.
        held: names of those that ended and hold their blocks.
    """
    name = op.get("op")
    if name not in OPERATIONS:
        raise BadRecording(f"{where}: unknown operation {name!r}")
    where = f"{where}: {name}"
    OPERATIONS[name].check({field: value for field, value in op.items() if field != "op"}, where)
    if "id" in op:
        _check_request(op, where, live, held)
    if name == "alloc":
        _check_allocation(op, where)


def _check_request(op: Record, where: str, live: Container[str], held: Container[str]) -> None:
    if op["op"] == "new":
        if op["id"] in live:
            raise BadRecording(f"{where}: request {op['id']!r} is there already")
    elif op["id"] not in (held if op["op"] == "release" else live):
        raise BadRecording(f"{where}: there is no request {op['id']!r}")


def _check_allocation(op: Record, where: str) -> None:
    if op.get("use_hit"):
        if "hit" not in op:
            raise BadRecording(f"{where}: field 'hit' is missing: an admission names it")
        return
    given = [name for name in _ADMISSION_ONLY if name in op]
    if given:
        raise BadRecording(f"{where}: {given[0]!r} is for an admission (use_hit)")
