"""YAML files that operators write: read without surprises. PyYAML is imported by who reads one, not by an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvplane.base.units import parse_bytes, parse_duration

_UNITS = {"us": "us", "ms": "ms", "s": "s"}


def parse_yaml(text: bytes) -> object:
    """Return the content of a YAML file.

    Raises ValueError for whatever keeps it from being read, and for a key that stands twice in a mapping: YAML would
    keep the last one in silence. PyYAML raises other errors too, such as those of dates, of long numbers and of deep
    nesting; the line of such a value is named.
    """
    import yaml

    class Loader(yaml.SafeLoader):  # not libyaml's: deep nesting makes it crash the process
        """Refuses a key that stands twice, and names the line of a value that cannot be read."""

        def construct_object(self, node: Any, deep: bool = False) -> Any:  # noqa: ANN401 - a Node
            try:
                return super().construct_object(node, deep)
            except (ValueError, ArithmeticError, AttributeError, LookupError) as error:  # the last two of wrong tags
                if not isinstance(node, yaml.ScalarNode):
                    raise
                what = f"line {node.start_mark.line + 1}: {node.value[:40]!r} is no {node.tag.rpartition(':')[2]}"
                raise ValueError(f"{what}, as which YAML reads it ({error}); put a text in quotation marks") from None

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:  # noqa: ANN401 - a MappingNode
            lines: dict[str, int] = {}
            for key, _ in node.value:
                line, name = key.start_mark.line + 1, str(key.value)
                if key.tag != "tag:yaml.org,2002:merge" and lines.setdefault(name, line) != line:
                    raise ValueError(f"the key {name[:140]!r} stands twice, in lines {lines[name]} and {line}")
            return super().construct_mapping(node, deep)

    try:
        return Loader(text).get_single_data()
    except (yaml.YAMLError, ArithmeticError, RecursionError, UnicodeError) as error:
        raise ValueError(" ".join(str(error).split())) from None  # in one line


def in_named_unit(key: str, value: object) -> object:
    """Return the value of a key in the unit that the key ends with: "10s" of lease_ms is 10000, "8GiB" of memory_bytes
    8589934592. Other values are returned as they are, also numbers, which are in that unit already. Raises
    InvalidArgument, with the key as its field.
    """
    if not isinstance(value, str) or not value.strip()[-1:].isalpha():
        return value
    if key.endswith("_bytes") or key == "bytes_per_second":
        return parse_bytes(value, key)
    unit = _UNITS.get(key.rpartition("_")[2])
    if unit is None or key.endswith(f"_per_{unit}"):
        return value
    length = parse_duration(value, key, unit)
    return int(length) if length.is_integer() else length


def in_named_units(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return all values as `in_named_unit`. Raises InvalidArgument."""
    return {key: in_named_unit(str(key), value) for key, value in values.items()}
