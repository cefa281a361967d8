"""The records of `kvstep/1`: one per schedule call, with the inputs before it."""

from __future__ import annotations

from collections.abc import Container

from tests.conformance.forms import (
    ANYTHING,
    COUNT,
    NUMBER,
    POSITIVE,
    TEXT,
    BadRecording,
    Form,
    Record,
    list_of,
    one_of,
    outputs,
    row_of,
)

_OUT = outputs(
    "new", "res", "run", "spec", "pre", "fin", "zero", "copies", "skip_drafts", "log", "ev_in", "ev", "snap"
)  # fmt: skip
_STEP = Form({"t": COUNT, "in": list_of(ANYTHING), "out": ANYTHING})
_STEP_OUT = Form(outputs=outputs("sched", "free", "fq", "running", "waiting"), sometimes=_OUT)
_END = Form({"end": one_of(True), "in": list_of(ANYTHING), "out": ANYTHING})
_END_OUT = Form(outputs=outputs("free"), sometimes=_OUT)
_INPUTS = {
    "add": Form(
        {"id": TEXT, "segs": list_of(row_of(COUNT, COUNT)), "max": POSITIVE, "arr": NUMBER},
        {"prio": NUMBER, "salt": TEXT, "lora": TEXT},
        outputs("n", "nh", "lasth"),
    ),
    "abort": Form({"id": TEXT}, {}, outputs("free")),
    "upd": Form(
        {"of": COUNT, "tok": list_of(row_of(TEXT, list_of(COUNT)))}, {}, outputs("free"), outputs("fin")
    ),
    "draft": Form({"d": list_of(row_of(TEXT, list_of(COUNT)))}),
}  # fmt: skip


def check_step(record: Record, where: str) -> None:
    """Raise BadRecording for a line of another form."""
    ends = "end" in record
    (_END if ends else _STEP).check(record, where)
    (_END_OUT if ends else _STEP_OUT).check(record["out"], f"{where}: out")


def check_input(op: Record, where: str, live: Container[str], pending: Container[int]) -> None:
    """Raise BadRecording for an input that is unknown, of another form, or about an unknown request or step.

    Args:
        live: names of the requests there are.
        pending: steps whose results have not arrived.
    """
    name = op.get("op")
    if name not in _INPUTS:
        raise BadRecording(f"{where}: unknown input {name!r}")
    where = f"{where}: {name}"
    _INPUTS[name].check({field: value for field, value in op.items() if field != "op"}, where)
    if name == "add" and op["id"] in live:
        raise BadRecording(f"{where}: request {op['id']!r} is there already")
    if name == "upd" and op["of"] not in pending:
        raise BadRecording(f"{where}: step {op['of']} awaits no results")
