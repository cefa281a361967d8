"""Patches as Kubernetes applies them: JSON merge (RFC 7386), and the part of strategic merge that charts use."""

from __future__ import annotations

import json
from typing import Any

from tests.helm.charts import Object

# Lists whose elements are merged by a key, by the list's name; all other lists are replaced whole.
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
    "topologySpreadConstraints": "topologyKey",
}
PORT_KEYS = ("containerPort", "port")


def merge(before: Object, patch: Object) -> Object:
    """A JSON merge patch: null removes, lists are replaced."""
    after = dict(before)
    for key, value in patch.items():
        if value is None:
            after.pop(key, None)
        elif isinstance(value, dict) and isinstance(after.get(key), dict):
            after[key] = merge(after[key], value)
        else:
            after[key] = value
    return after


def strategic_merge(before: Object, patch: Object) -> Object:
    """A strategic merge patch, on a copy."""
    return _merged(json.loads(json.dumps(before)), patch)


def _merged(after: Object, patch: Object) -> Object:
    if patch.get("$patch") == "replace":
        return {key: value for key, value in patch.items() if key != "$patch"}
    kept = patch.get("$retainKeys")
    if kept is not None:
        after = {key: value for key, value in after.items() if key in kept}
    for key, value in patch.items():
        if key.startswith("$"):
            continue
        if value is None:
            after.pop(key, None)
        elif isinstance(value, dict):
            after[key] = _merged(after.get(key) or {}, value)
        elif isinstance(value, list):
            order = patch.get(f"$setElementOrder/{key}")
            after[key] = _merged_list(key, after.get(key) or [], value, order)
        else:
            after[key] = value
    for key, order in patch.items():  # only an order, for a list that the patch does not change
        name = key.removeprefix("$setElementOrder/")
        if name != key and name not in patch and name in after:
            after[name] = _ordered(after[name], order, _key_of(name, order))
    return after


def _merged_list(name: str, before: list[Any], patch: list[Any], order: list[Any] | None) -> list[Any]:
    by = _key_of(name, patch)
    if not by:
        return patch
    after = {one[by]: one for one in before}
    for one in patch:
        if one.get("$patch") == "delete":
            after.pop(one[by], None)
        else:
            after[one[by]] = _merged(after.get(one[by], {}), one)
    return _ordered(list(after.values()), order, by)


def _key_of(name: str, elements: list[Any]) -> str:
    if name == "ports":
        return next((key for key in PORT_KEYS if all(key in one for one in elements)), "")
    return MERGE_KEYS.get(name, "")


def _ordered(elements: list[Any], order: list[Any] | None, by: str) -> list[Any]:
    if not order or not by:
        return elements
    wanted = [one[by] for one in order]
    return sorted(elements, key=lambda one: wanted.index(one[by]) if one[by] in wanted else len(wanted))
