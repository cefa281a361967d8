"""Generate docs/reference from its sources: RPCs and messages from the comments in proto/, error reasons from the
classes of errors and the table of statuses, configuration keys from their docstrings, the command line from its parser,
metrics from the collector; times from the recorded results of tests/bench.

    python -m scripts.reference            write the pages
    python -m scripts.reference --check    print what would change; exits 1 if anything would
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Iterator
from inspect import getdoc
from pathlib import Path
from typing import Any

import typer.main

from kvplane.base import errors
from kvplane.rpc.status import status_code
from kvplane_service.config import Config
from kvplane_service.registry import Registry
from kvplane_service.telemetry.collector import ServiceCollector
from kvplane_tools.cli import app
from scripts.reference_python import python_page

ROOT = Path(__file__).resolve().parents[1]
PROTO = ROOT / "proto" / "kvplane" / "v1"
PAGES = ROOT / "docs" / "reference"
RESULTS = ROOT / "tests" / "bench" / "results"
NOTE = "<!-- made by scripts/reference.py: make reference -->\n"

OPENING = re.compile(r"(service|message|enum|oneof|extend) ([\w.]+) \{(\})?$")
RPC = re.compile(r"rpc (\w+)\((stream )?([\w.]+)\) returns \((stream )?([\w.]+)\)")
FIELD = re.compile(r"(?:(optional|repeated) )?(map<[^>]+>|[\w.]+) (\w+) = (\d+)(?: \[.*\])?;$")
VALUE = re.compile(r"(\w+) = (\d+)(?: \[.*\])?;$")
IGNORED = re.compile(r"(syntax|package|import|option|reserved)\b|\}$|$")


def cell(text: str) -> str:
    """Return a text as the cell of a table. Between backticks only the bar has a meaning there."""
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    parts[::2] = (one.replace("&", "&amp;").replace("<", "&lt;").replace("*", "\\*") for one in parts[::2])
    return "`".join(parts)


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table; the cells are Markdown."""
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def statements(source: str) -> Iterator[tuple[str, str]]:
    """Yield each statement of a proto file with the comment above it.

    Raises:
        ValueError: if a line is none that this script knows.
    """
    comment: list[str] = []
    for number, raw in enumerate(source.splitlines(), 1):
        line = raw.strip()
        if line.startswith("//"):
            comment.append(line[2:].strip())
            continue
        if not any(known.match(line) for known in (OPENING, RPC, FIELD, VALUE, IGNORED)):
            raise ValueError(f"line {number}: {line!r} is no statement that scripts/reference.py can read (extend it)")
        yield line, " ".join(comment)
        comment = []


def proto_section(source: str, pages: dict[str, str]) -> Iterator[str]:
    """Yield the Markdown of one proto file: its services, messages and enumerations in the order of the file.

    `pages` has the page of each message and enumeration, "" for those of this file.
    """
    choice, in_table = "", False
    for line, comment in statements(source):
        if found := OPENING.match(line):
            kind, name, closed = found.groups()
            if kind == "oneof":
                choice = name
                continue
            yield from ("", f"## {name}", "", f"*{kind}* {cell(comment)}")
            in_table = False
            if not closed:
                yield ""
        elif found := RPC.match(line):
            name, asks, request, answers, response = found.groups()
            sent, got = f"{asks or ''}{linked(request, pages)}", f"{answers or ''}{linked(response, pages)}"
            yield from (f"**{name}** ({sent}) returns ({got})  ", cell(comment), "")
        elif found := FIELD.match(line):
            label, kind, name, number = found.groups()
            if not in_table:
                yield from table(("no.", "field", "type", "meaning"), ())
                in_table = True
            mark = f" (one of {choice})" if choice else ""
            type_ = f"{label} {linked(kind, pages)}" if label else linked(kind, pages)
            yield f"| {number} | `{name}` | {type_} | {cell(comment)}{mark} |"
        elif found := VALUE.match(line):
            if not in_table:
                yield from table(("no.", "value", "meaning"), ())
                in_table = True
            yield f"| {found[2]} | `{found[1]}` | {cell(comment)} |"
        elif line == "}" and choice:
            choice = ""


def linked(kind: str, pages: dict[str, str]) -> str:
    """Return a type as Markdown: messages and enumerations, which alone begin with a capital, as links."""
    return f"[{kind}]({pages[kind]}#{kind.lower()})" if kind[0].isupper() else f"`{kind}`"


def rpcs_pages() -> dict[str, str]:
    """Return the pages of the wire: a list of the RPCs, and a page for each file with its messages and enumerations."""
    sources = {path.stem: path.read_text() for path in sorted(PROTO.glob("*.proto"))}
    found = {stem: list(statements(source)) for stem, source in sources.items()}
    places = {
        opening[2]: f"{stem}.md" for stem, lines in found.items() for one, _ in lines if (opening := OPENING.match(one))
    }
    listed = ["# RPCs and messages", "", NOTE, "Made from the comments in `proto/kvplane/v1`.", ""]
    listed += table(("page", "what it has"), (_contents(stem, lines) for stem, lines in found.items()))
    made = {"rpcs.md": "\n".join(listed) + "\n"}
    for stem, source in sources.items():
        pages = {name: "" if place == f"{stem}.md" else place for name, place in places.items()}
        services = [one.split()[1] for one, _ in found[stem] if one.startswith("service ")]
        title = f"Service {services[0]}" if len(services) == 1 else f"{stem}.proto"
        made[f"rpcs/{stem}.md"] = "\n".join([f"# {title}", "", NOTE.rstrip(), *proto_section(source, pages)]) + "\n"
    return made


def _contents(stem: str, lines: list[tuple[str, str]]) -> tuple[str, str]:
    """Return a row of the list: link, and the RPCs or the purpose of the file."""
    calls = ", ".join(f"`{call[1]}`" for one, _ in lines if (call := RPC.match(one)))
    about = next((comment for one, comment in lines if one.startswith("package ")), "").partition(". ")[0].rstrip(".")
    return f"[{stem}.proto](rpcs/{stem}.md)", f"{cell(about)}: {calls}" if calls else cell(about)


def error_classes(base: type[errors.KvplaneError] = errors.KvplaneError) -> Iterator[type[errors.KvplaneError]]:
    """Yield every class of errors below `base`, in the order of their definition."""
    for child in base.__subclasses__():
        if child.__module__ == errors.__name__:
            yield child
        yield from error_classes(child)


def errors_page() -> str:
    """Return the page of the error reasons."""
    rows = (
        (f"`{one.reason}`", f"`{status_code(one('')).name}`", f"`{one.__name__}`", cell(getdoc(one) or ""))
        for one in error_classes()
    )
    head = """
A refused call has a gRPC status whose details hold a `google.rpc.ErrorInfo` with the domain `kvplane`, the reason, and
metadata (`remedy` and facts). A `BadRequest` names the field, if one is wrong; a `QuotaFailure` and a `RetryInfo`
accompany an exceeded quota. The Python clients raise the class.
"""
    lines = table(("reason", "status", "class", "meaning"), rows)
    return "\n".join(["# Error reasons", "", NOTE, head.strip(), "", *lines]) + "\n"


def configuration_page() -> str:
    """Return the page of the configuration keys."""
    head = """
A key is set, in this order of precedence, by `kvplane serve --set KEY=VALUE`, by the environment variable `KVPLANE_`
followed by the key in capitals, or in the YAML file that `--config` names. A plain number is in the unit that the key
ends with; `10s`, `250ms`, `8GiB` and `64MB` state their own. A key that stands twice in a file is refused. Limits are
inclusive. `kvplane config` prints the values in force and where each comes from.
"""
    rows = (
        (f"`{name}`", f"`{field.default}`" if str(field.default) else "empty", cell(field.description or ""))
        for name, field in Config.model_fields.items()
    )
    lines = table(("key", "default", "meaning"), rows)
    return "\n".join(["# Configuration keys", "", NOTE, head.strip(), "", *lines]) + "\n"


def command_section(path: str, command: Any) -> Iterator[str]:  # noqa: ANN401 - click's or typer's own, by version
    """Yield the Markdown of a command, or of each command of a group."""
    if hasattr(command, "commands"):
        for name in command.list_commands(None):
            yield from command_section(f"{path} {name}", command.get_command(None, name))
        return
    arguments = [one.name.upper() for one in command.params if one.param_type_name == "argument"]
    yield from ("", f"## {path}", "", f"    {' '.join([path, *arguments])}", "")
    yield from (cell(paragraph) + "\n" for paragraph in (command.help or "").split("\n\n"))
    yield from option_table(command)


def option_table(command: Any) -> Iterator[str]:  # noqa: ANN401
    """Yield a table of the options of a command, if it has any."""
    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    if options:
        names = (", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts)) for one in options)
        yield from table(("option", "meaning"), zip(names, (cell(one.help or "") for one in options), strict=True))


def commands_page() -> str:
    """Return the page of the command line."""
    head = "Each command also has `--help`, which shows defaults and environment variables."
    root: Any = typer.main.get_command(app)
    shared = "These options stand before or after each command that calls a service or a router:"
    lines = (shared, "", *option_table(root), *command_section("kvplane", root))
    return "\n".join(["# Command line", "", NOTE, head, "", *lines]) + "\n"


def metrics_page() -> str:
    """Return the page of the metrics, under the names that Prometheus stores."""
    head = """
`kvplane serve --metrics ADDRESS` serves these ([how to scrape them](../metrics.md)). A histogram `NAME` has the series
`NAME_bucket` and `NAME_count`, and `NAME_sum` where it is of seconds.
"""
    families = ServiceCollector(Registry(Config(), lambda: 0)).collect()
    rows = (
        (
            f"`{one.name}{'_total' if one.type == 'counter' else ''}`",
            one.type,
            ", ".join(f"`{label}`" for label in getattr(one, "_labelnames", ())),
            cell(one.documentation),
        )
        for one in families
    )
    lines = table(("metric", "kind", "labels", "meaning"), rows)
    return "\n".join(["# Metrics and their labels", "", NOTE, head.strip(), "", *lines]) + "\n"


# The sections of the page on performance: title, file of results, the tables taken from it (0 = the first), what they
# say. Tables are taken whole, so the rows that lose are among them.
MAX_COLUMNS = 10
MEASURED = (
    (
        "An engine that is killed",
        "crash.md",
        (0,),
        "vLLM with kvplane and stock vLLM answer 8 conversations, are killed, start again and continue; a Llama of 4 "
        "layers with random weights on a CPU. TTFT over HTTP, mean of all 8 at once.",
    ),
    (
        "A step of vLLM's scheduler",
        "vllm_schedule.md",
        (0,),
        "CPU time of the engine's thread for `schedule()`, with kvplane in the engine's process, mirrored by a "
        "service, or decided by it, as a multiple of stock vLLM: above 1 kvplane costs more, as it does at 8 requests.",
    ),
    (
        "A step of an engine on the protocol",
        "peer.md",
        (0, 2, 4, 6),
        "The engine's thread, next to vLLM's own manager doing the same work in its process; µs, and in bold as a "
        'multiple of vLLM\'s. Steps "ahead" are sent while the GPU executes the one before.',
    ),
    ("Steps in the steady state", "steady.md", (0,), "CPU time per step in the service, µs: least (median)."),
    (
        "How long a step holds the event loop",
        "held.md",
        (0, 1),
        "While it is held, no other engine of the service is answered. Bold: longer than allowed.",
    ),
    ("A restart with a million entries", "restart.md", (0,), "CPU time until all keys are ready."),
    (
        "A service under load",
        "service_load.md",
        (0,),
        "`kvplane bench`: one engine that waits for each step, over TCP, with prompts of 1,024 tokens and 128 output "
        "tokens. Times of a clock, from a step's message to its answer; the picture is of the first model.",
    ),
    ("What a noisy owner costs another", "neighbour.md", (0,), "With the default limit of bytes, and without."),
    ("What watching costs", "overhead.md", (0,), "CPU time that is added to a step."),
    ("Hashing", "hashing.md", (0,), "6,144 tokens in µs, with the compiled hashes and in Python alone."),
    (
        "Eviction policies",
        "policies.md",
        (0,),
        "Percentage of the tokens of prompts that hit; the bound knows the future and has no windows to keep.",
    ),
    ("Hits inside the blocks of states", "fine_hits.md", (0,), "A chat of 100 sessions; see `prefix_match_unit`."),
)


def narrow(lines: list[str]) -> Iterator[str]:
    """Yield a table; one with more columns than a page shows as several tables that begin with the same column."""
    at = next(number for number, line in enumerate(lines) if line.startswith("|"))
    cells = [line.strip("|").split("|") for line in lines[at:]]
    count = -(-(len(cells[0]) - 1) // (MAX_COLUMNS - 1))
    width = -(-(len(cells[0]) - 1) // count)
    yield from lines[:at]
    for begin in range(1, len(cells[0]), width):
        yield from ("|" + "|".join([row[0], *row[begin : begin + width]]) + "|" for row in cells)
        yield ""


def tables_of(text: str) -> list[list[str]]:
    """Return the lines of each Markdown table in a text, after the heading of its section in bold, if it has one."""
    found = []
    for section in re.split(r"^## ", "\n" + text, flags=re.MULTILINE):
        name, _, rest = section.partition("\n")
        heading = [f"**{name}**", ""] if name else []
        blocks = re.findall(r"(?:^\|.*\n?)+", rest, flags=re.MULTILINE)
        found += [[*heading, *block.strip().splitlines()] for block in blocks]
    return found


def performance_page() -> str:
    """Return the page of the measured times: whole tables of the recorded results, with date and machine."""
    head = """
Tables of `tests/bench/results`, each with its date, machine and load. All were measured on shared machines of two
cores: compare within a table, not between tables. The head of each file names the command that measures it
again. Nothing here was measured on a GPU; what is known of kernels is in [Kernels](../kernels.md).
"""
    lines = ["# Performance", "", NOTE, head.strip()]
    for title, name, numbers, text in MEASURED:
        recorded = (RESULTS / name).read_text()
        found = tables_of(recorded)
        when = next(line for line in recorded.splitlines() if re.match(r"(date )?\d{4}-\d\d-\d\d", line))
        lines += ["", f"## {title}", "", f"{text} `{name}`: {when.removeprefix('date ').rstrip('.')}."]
        for number in numbers:
            lines += ["", *narrow(found[number])]
            lines.pop()
        if (picture := (PAGES / name).with_suffix(".svg")).exists():
            lines += ["", f"![{title}]({picture.name})"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description="docs/reference from its sources")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if anything would change")
    parser.add_argument("--pages", type=Path, default=PAGES)
    arguments = parser.parse_args()
    made = {
        **rpcs_pages(),
        "errors.md": errors_page(),
        "configuration.md": configuration_page(),
        "commands.md": commands_page(),
        "metrics.md": metrics_page(),
        "performance.md": performance_page(),
        "python.md": python_page(NOTE),
    }
    old = {name: (arguments.pages / name).read_text() if (arguments.pages / name).exists() else "" for name in made}
    stale = [name for name, text in made.items() if old[name] != text]
    for name in stale:
        if arguments.check:
            before, after = old[name].splitlines(), made[name].splitlines()
            changes = difflib.unified_diff(before, after, name, "generated", lineterm="", n=0)
            print("\n".join(list(changes)[:20]))
        else:
            (arguments.pages / name).parent.mkdir(exist_ok=True)
            (arguments.pages / name).write_text(made[name])
            print(f"written: docs/reference/{name}")
    if stale and arguments.check:
        sys.exit(f"docs/reference: {', '.join(stale)}: not up to date with the sources: make reference")


if __name__ == "__main__":
    main()
