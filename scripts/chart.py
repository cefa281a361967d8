"""Generate values.schema.json and the table of values in README.md from helm/kvplane/values.yaml.

A value has the type of its default. In the comment above it, `# --` begins the description, which may have several
lines, and `# @schema {...}` extends the schema. A map with values accepts no other keys. An empty map must state in its
@schema what it accepts. `$keys` stands for the keys of the service's configuration (config), of a router's file
(places, router), or for labels; `$open: true` for additional keys of any name. Every key is required: Helm removes a
key that is null, and templates would fail without naming it.

    python scripts/chart.py            write both files
    python scripts/chart.py --check    print what would change; exits 1 if anything would
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from kvplane_fleet.settings import PlaceSettings, RouterSettings
from kvplane_service.config import Config

CHART = Path(__file__).resolve().parent.parent / "helm" / "kvplane"
BEGIN, END = "<!-- values: made by scripts/chart.py -->", "<!-- end of values -->"
TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "seq": "array", "map": "object"}


@dataclass(frozen=True, slots=True)
class Value:
    """A key of values.yaml with its comment.

    Attributes:
        path: such as image.tag.
        node: its default.
        description: "" when there is none.
        extra: what its @schema says.
    """

    path: str
    node: yaml.Node
    description: str
    extra: dict[str, Any]

    @property
    def default(self) -> Any:  # noqa: ANN401 - whatever YAML holds
        """The default as plain data."""
        loader = yaml.SafeLoader("")
        return loader.construct_document(self.node)

    @property
    def parts(self) -> list[tuple[yaml.Node, yaml.Node]]:
        """Keys and values if it is a map with a complete list of keys; otherwise none."""
        is_open = "additionalProperties" in self.extra or "$keys" in self.extra
        return self.node.value if isinstance(self.node, yaml.MappingNode) and not is_open else []


class Values:
    """values.yaml with its comments."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        root = yaml.compose(text, yaml.SafeLoader)
        assert root is not None
        self._root = root

    def root(self) -> Value:
        """The whole file."""
        return Value("", self._root, "", {})

    def children(self, parent: Value) -> Iterator[Value]:
        """The keys, in order. Raises SystemExit for an empty map without an @schema."""
        for key, node in parent.parts:
            path = f"{parent.path}.{key.value}".lstrip(".")
            description, extra = self._comment(key.start_mark.line)
            child = Value(path, node, description, extra)
            if isinstance(node, yaml.MappingNode) and not node.value and not extra:
                sys.exit(f"values.yaml: {path} is an empty map: state in an @schema what it accepts")
            yield child

    def leaves(self, parent: Value) -> Iterator[Value]:
        """All values, in order."""
        for child in self.children(parent):
            if child.parts:
                yield from self.leaves(child)
            else:
                yield child

    def _comment(self, line: int) -> tuple[str, dict[str, Any]]:
        """Description and schema in the comment lines right above a line."""
        lines: list[str] = []
        extra: dict[str, Any] = {}
        for text in reversed(self._lines[:line]):
            comment = text.strip()
            if not comment.startswith("# "):
                break
            content = comment.removeprefix("# ")
            if content.startswith("@schema "):
                extra = yaml.safe_load(content.removeprefix("@schema "))
            else:
                lines.insert(0, content.removeprefix("-- "))
            if content.startswith("-- "):
                return " ".join(lines), extra
        return "", extra


def schema_of(values: Values, value: Value) -> dict[str, Any]:
    """JSON schema of a value and all below it."""
    schema: dict[str, Any] = {"type": TYPES.get(value.node.tag.rpartition(":")[2], "null")}
    if value.description:
        schema["description"] = value.description
    schema |= {name: content for name, content in value.extra.items() if not name.startswith("$")}
    if "$keys" in value.extra:
        schema |= KEYS[value.extra["$keys"]]()
    if value.parts:
        parts = {child.path.rpartition(".")[2]: schema_of(values, child) for child in values.children(value)}
        schema |= {"additionalProperties": "$open" in value.extra, "properties": parts}
        schema["required"] = [name for name, part in parts.items() if "null" not in part["type"]]
    return schema


def config_schema() -> dict[str, Any]:
    """What `config` accepts."""
    return {"additionalProperties": False, "properties": dict(config_keys())}


def labels_schema() -> dict[str, Any]:
    """Labels that do not replace those of the chart, by which objects select pods."""
    own = r"^(app\.kubernetes\.io/(name|instance|component|version|managed-by|part-of)|helm\.sh/chart)$"
    return {"additionalProperties": {"type": "string"}, "propertyNames": {"not": {"pattern": own}}}


def places_schema() -> dict[str, Any]:
    """What `router.places` accepts: places with one source each."""
    place = struct_schema(PlaceSettings)
    place["oneOf"] = [{"required": ["service"]}, {"required": ["events"]}]
    return {"items": place}


def router_schema() -> dict[str, Any]:
    """What `router.settings` accepts; times and sizes also with their units."""
    schema = struct_schema(RouterSettings)
    for name, one in schema["properties"].items():
        if name.endswith(("_s", "_bytes")) and "_per_" not in name:
            one["type"] = [one["type"], "string"]
    return schema


KEYS = {"config": config_schema, "labels": labels_schema, "places": places_schema, "router": router_schema}


def struct_schema(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Schema of a struct of a router's file, without references, titles and defaults."""
    schema = msgspec.json.schema(struct)
    definitions = schema["$defs"]

    def plain(content: Any) -> Any:  # noqa: ANN401 - any JSON
        if isinstance(content, list):
            return [plain(one) for one in content]
        if not isinstance(content, dict):
            return content
        if "$ref" in content:
            return plain(definitions[content["$ref"].rpartition("/")[2]])
        kept = {name: one for name, one in content.items() if name not in ("default", "title", "description")}
        return {name: plain(one) for name, one in kept.items()}

    found: dict[str, Any] = plain(schema)
    return found


def config_keys() -> Iterator[tuple[str, dict[str, Any]]]:
    """Schemas of the service's keys that the chart does not set by other values."""
    template = (CHART / "templates" / "_config.tpl").read_text()
    listed = re.search(r'"kvplane.chartKeys" -}}\n{{ list (.*) \| toYaml }}', template)
    assert listed is not None
    set_by_chart = set(re.findall(r'"(\w+)"', listed[1]))
    for name, schema in Config.model_json_schema()["properties"].items():
        if name not in set_by_chart:
            kept = ("type", "minimum", "maximum", "pattern", "enum", "description")
            found = {key: clean(schema[key]) for key in kept if key in schema}
            if {"true", "false"} <= set(schema.get("enum", ())):  # which YAML writes without quotes too
                found = {"description": found["description"], "enum": [*schema["enum"], True, False]}
            yield name, found


def clean(content: object) -> object:
    """Text of a docstring in one line."""
    return " ".join(content.split()) if isinstance(content, str) else content


def schema_file(values: Values) -> str:
    """values.schema.json. Draft 7, which Helm 3 and 4 read."""
    schema = {"$schema": "http://json-schema.org/draft-07/schema#"} | schema_of(values, values.root())
    return json.dumps(schema, indent=1) + "\n"


def table(values: Values) -> str:
    """One line per value. A value without a description has the meaning of the Kubernetes field of that name."""
    lines = ["| value | default | |", "|---|---|---|"]
    for value in values.leaves(values.root()):
        default = json.dumps(value.default, ensure_ascii=False)
        lines.append(f"| `{value.path}` | `{default}` | {value.description.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def readme_file(values: Values, before: str) -> str:
    """README.md with the generated table."""
    head, _, rest = before.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table(values)}\n{END}{tail}"


def main() -> None:
    """Write the files, or check them."""
    parser = argparse.ArgumentParser(description="values.schema.json and the table of values, from values.yaml")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if anything would change")
    parser.add_argument("--chart", type=Path, default=CHART)
    arguments = parser.parse_args()
    chart: Path = arguments.chart
    values = Values((chart / "values.yaml").read_text())
    readme = (chart / "README.md").read_text()
    made = {"values.schema.json": schema_file(values), "README.md": readme_file(values, readme)}
    stale = [name for name, text in made.items() if not (chart / name).exists() or (chart / name).read_text() != text]
    for name in stale:
        if arguments.check:
            old = (chart / name).read_text().splitlines() if (chart / name).exists() else []
            changes = difflib.unified_diff(old, made[name].splitlines(), name, "generated", lineterm="", n=0)
            print("\n".join(list(changes)[:20]))
        else:
            (chart / name).write_text(made[name])
            print(f"written: helm/kvplane/{name}")
    if stale and arguments.check:
        sys.exit(f"helm/kvplane: {', '.join(stale)}: not up to date with values.yaml and the configuration: make chart")


if __name__ == "__main__":
    main()
