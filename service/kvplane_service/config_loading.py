"""Load the configuration: one frozen `Config` from command-line flags, environment variables, a YAML file and
defaults, in this order of precedence.

Keys are flat and end with the unit of a plain number; "10s" and "8GiB" state their own. The environment variable of a
key is KVPLANE_ followed by the key in capitals.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import SecretStr, ValidationError

from kvplane.base.errors import InvalidArgument, NotFound
from kvplane.base.settings_file import in_named_unit, parse_yaml
from kvplane_service.config import KEYS, Config, check_together, defaults_for, reason_of

ENV_PREFIX = "KVPLANE_"
DEFAULT_SOURCE = "default"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and the source of each value: "flag", an environment variable, a file path, or "default"."""

    config: Config
    sources: Mapping[str, str]

    def as_yaml(self) -> str:
        """Return an equivalent YAML file; a comment on each line states the source of the value."""
        lines = []
        for key in KEYS:
            value = getattr(self.config, key)
            shown = str(value) if isinstance(value, SecretStr) else value
            text = yaml.safe_dump({key: shown}, width=1000).rstrip()
            lines.append(f"{text}  # {self.sources[key]}\n")
        return "".join(lines)


def load(
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Path | None,
    available: Callable[[], tuple[int, str]] = lambda: (0, ""),
) -> Loaded:
    """Merge flags, environment variables and the file into one configuration.

    Args:
        flags, environment, file: the sources.
        available: finds the memory for this process and who states it, where `memory_bytes` does not; 0 = unknown.

    Raises:
        InvalidArgument: a key is unknown (the remedy names the most similar known key), a value is invalid, or two
            values contradict each other.
        NotFound: the file cannot be read.
    """
    values: dict[str, Any] = {}
    sources = dict.fromkeys(KEYS, DEFAULT_SOURCE)
    for layer in (_from_file(file) if file else {}, _from_environment(environment), _from_flags(flags)):
        for key, (value, source) in layer.items():
            sources[key] = source
            try:
                values[key] = in_named_unit(key, value)
            except InvalidArgument as error:
                error.message = f"{value!r} from {source}: {error.message}"
                raise
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        raise InvalidArgument(
            f"{first['input']!r} from {sources[key]}: {reason_of(first)}",
            field=key,
            remedy=f"its default is {Config.model_fields[key].default!r}",
        ) from None
    check_together(config)
    memory_bytes, stated_by = (config.memory_bytes, sources["memory_bytes"]) if config.memory_bytes else available()
    derived = defaults_for(memory_bytes) if memory_bytes else {}
    derived = {key: value for key, value in derived.items() if sources[key] == DEFAULT_SOURCE}
    source = f"{DEFAULT_SOURCE} for {memory_bytes} bytes of memory: {stated_by}"
    return Loaded(config.model_copy(update=derived), sources | dict.fromkeys(derived, source))


def split_setting(text: str) -> tuple[str, str]:
    """Split the argument KEY=VALUE of `--set`. Raises InvalidArgument if there is no `=`."""
    key, equals, value = text.partition("=")
    if not equals:
        raise InvalidArgument(f"{text!r} has no '='", field="--set", remedy="write --set KEY=VALUE")
    return key.strip(), value.strip()


_Layer = dict[str, tuple[Any, str]]


def _from_flags(flags: Mapping[str, Any]) -> _Layer:
    for key in flags:
        _check_key(key, "flag")
    return {key: (value, "flag") for key, value in flags.items()}


def _from_environment(environment: Mapping[str, str]) -> _Layer:
    """Return the values of the environment variables that are named KVPLANE_ and a key.

    A name that is similar to a known key is refused as a spelling error. Other names are ignored, because Kubernetes
    sets KVPLANE_SERVICE_HOST and similar variables in every pod when a Service is called kvplane.
    """
    layer: _Layer = {}
    for name, value in environment.items():
        key = name.removeprefix(ENV_PREFIX).lower()
        if not name.startswith(ENV_PREFIX):
            continue
        if key in KEYS:
            layer[key] = (value, name)
        elif _nearest(key, 0.8):
            raise _unknown(name, (f"{ENV_PREFIX}{key.upper()}" for key in _nearest(key, 0.8)))
    return layer


def _from_file(path: Path) -> _Layer:
    try:
        content = parse_yaml(path.read_bytes())
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}", field="--config", remedy="name a readable YAML file") from None
    except ValueError as error:
        remedy = "write lines of `key: value`"
        raise InvalidArgument(f"{path} is not YAML: {error}", field="--config", remedy=remedy) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        what = f"{path} contains a {type(content).__name__}, not a mapping of keys to values"
        raise InvalidArgument(what, field="--config", remedy="write lines of `key: value`")
    for key in content:
        _check_key(str(key), str(path))
    return {str(key): (value, str(path)) for key, value in content.items()}


def _check_key(key: str, source: str) -> None:
    if key not in KEYS:
        raise _unknown(f"{key} from {source}", _nearest(key, 0.5))


def _nearest(key: str, cutoff: float) -> list[str]:
    return difflib.get_close_matches(key, KEYS, n=1, cutoff=cutoff)


def _unknown(what: str, nearest: Iterable[str]) -> InvalidArgument:
    similar = "".join(f"the most similar key is {key}; " for key in nearest)
    remedy = f"{similar}`kvplane config` prints all keys"
    return InvalidArgument(f"unknown key {what}", field="configuration", remedy=remedy)
