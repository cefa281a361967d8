"""The page of the Python client in docs/reference: the public names of `kvplane`, from signatures and docstrings."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Iterator

from kvplane import api
from kvplane.base.errors import KvplaneError

# Sections of the page: title, modules below `kvplane` whose public names it has. Errors have a page of their own.
SECTIONS = (
    ("Clients", ("blocking.client", "rpc.access", "sansio.retry", "base.requests", "base.errors")),
    (
        "Sessions of engines",
        ("blocking.session", "session.options", "session.reopening", "base.session", "session.known_requests"),
    ),
    ("Rows of a step", ("session.rows", "session.section_rows", "session.builder")),
    ("Steps and answers", ("base.step", "base.sections", "base.values", "session.tables", "base.events")),
    ("Settings of a replica", ("base.groups", "base.sources")),
    ("Transports", ("blocking.transport", "blocking.ttrpc")),
)
HEAD = """
`import kvplane`, after `pip install .` in a clone. `kvplane.aio` has the same for asyncio: `connect` there returns a
client whose calls are awaited, and all other names are equal. [Engines](../engines.md) shows a session at work, and
[errors](errors.md) has all classes of errors, which derive from `KvplaneError`.
"""
LABEL = re.compile(r"^(Args|Raises|Attributes|Returns|Yields):$", re.MULTILINE)


def text_of(thing: object) -> Iterator[str]:
    """Yield the Markdown of a docstring: its paragraphs, and its lists of fields and errors as lists."""
    for line in (inspect.getdoc(thing) or "").splitlines():
        if LABEL.match(line):
            yield f"**{line}**"
            yield ""
        elif item := re.match(r"    (\*{0,2}\w[\w., ]*): +(.*)", line):
            yield f"- `{item[1]}`: {escaped(item[2])}"
        else:
            yield f"  {escaped(line.strip())}" if line.startswith("     ") else escaped(line)


def escaped(text: str) -> str:
    """Return a text in which Markdown gives no character outside backticks another meaning."""
    parts = text.split("`")
    parts[::2] = (one.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_") for one in parts[::2])
    return "`".join(parts)


def signature_of(name: str, thing: object) -> list[str]:
    """Return a call as code, with a line per parameter if it is long."""
    assert callable(thing)
    signature = inspect.signature(thing)
    found = [shown(one) for one in signature.parameters.values() if one.name != "self"]
    result = signature.return_annotation
    plain = signature.replace(parameters=found, return_annotation=result if result is _EMPTY else _Shown(result))
    call = f"{name}{plain}".replace(" -> None", "")
    if len(call) > 100:
        inner = "".join(f"    {one},\n" for one in map(str, found))
        call = f"{name}(\n{inner})" + ("" if result in (_EMPTY, None, "None") else f" -> {plain.return_annotation!r}")
    return ["```python", call, "```"]


class _Shown:
    """An annotation or a default value as the page shows it: equal on every machine."""

    def __init__(self, value: object) -> None:
        text = value if isinstance(value, str) else getattr(value, "__name__", repr(value))
        self._text = re.sub(r"<(?:built-in method |function )?([\w.]+)[^<>]*>", r"\1", text)

    def __repr__(self) -> str:
        return self._text


def shown(one: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter whose annotation and default value are as the page shows them."""
    if one.annotation is not _EMPTY:
        one = one.replace(annotation=_Shown(one.annotation))
    if one.default is _EMPTY or isinstance(one.default, str):
        return one
    return one.replace(default=_Shown(one.default))


_EMPTY = inspect.Parameter.empty


def members(kind: type) -> Iterator[str]:
    """Yield the Markdown of the public methods and properties of a class, its own first."""
    bases = [one for one in kind.__mro__ if one.__module__.startswith("kvplane.")]
    found = {name: thing for one in reversed(bases) for name, thing in vars(one).items()}
    for name in dict.fromkeys(name for one in bases for name in vars(one)):
        thing = found[name]
        if name.startswith("_") or not inspect.getdoc(thing):
            continue
        if inspect.isfunction(thing):
            yield from (
                f"#### {kind.__name__}.{escaped(name)}",
                "",
                *signature_of(name, thing),
                "",
                *text_of(thing),
                "",
            )
        elif isinstance(thing, property | classmethod | staticmethod):
            yield from (f"#### {kind.__name__}.{escaped(name)}", "", *text_of(thing), "")


def entry(name: str, thing: object) -> Iterator[str]:
    """Yield the Markdown of a public name."""
    yield from (f"### {escaped(name)}", "")
    if isinstance(thing, enum.EnumType):
        yield from (*text_of(thing), "", ", ".join(f"`{one}`" for one in thing.__members__), "")
    elif isinstance(thing, type):
        begin = vars(thing).get("__init__")
        yield from (*signature_of(name, thing), "") if begin is not None else ()
        yield from (*text_of(thing), "")
        if begin is not None and begin.__doc__:  # not of a data class
            yield from (*text_of(begin), "")
        yield from members(thing)
    elif callable(thing):
        yield from (*signature_of(name, thing), "", *text_of(thing), "")
    else:
        yield from (f"`{thing!r}`", "")


def python_page(note: str) -> str:
    """Return the page.

    Raises:
        ValueError: if a public name is in no section.
    """
    public = {name: getattr(api, name) for name in api.__all__ if name != "aio"}
    on_another = {
        name for name, thing in public.items() if isinstance(thing, type) and KvplaneError in thing.__mro__[1:]
    }
    left = public.keys() - on_another
    lines = ["# Python client", "", note, HEAD.strip(), ""]
    for title, modules in SECTIONS:
        lines += [f"## {title}", ""]
        for module in modules:
            for name, thing in public.items():
                where = getattr(thing, "__module__", "kvplane.base.session")  # NEW_EPOCH, a number
                if name in left and where in (f"kvplane.{module}", "builtins"):
                    left.discard(name)
                    lines += entry(name, thing)
    if left:
        raise ValueError(f"{sorted(left)} are in no section of scripts/reference_python.py")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"
