"""Kubernetes' schemas, strict: unknown fields are refused. Schemas of operators' resources are given here."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import importlib_resources
import jsonschema
from referencing import Registry, Resource

VERSIONS = tuple(f"1.{minor}" for minor in range(29, 38))

_TEXT = {"type": "string"}
_MAP = {"type": "object", "additionalProperties": _TEXT}
_METADATA = {"type": "object", "required": ["name", "namespace", "labels"]}


def _resource(kind: str, api: str, spec: dict[str, Any]) -> dict[str, Any]:
    closed = {"type": "object", "additionalProperties": False, **spec}
    fixed = {"kind": {"const": kind}, "apiVersion": {"const": api}, "metadata": _METADATA, "spec": closed}
    return {"type": "object", "additionalProperties": False, "required": list(fixed), "properties": fixed}


_SECRET_KEY = {
    "type": "object",
    "additionalProperties": False,
    "required": ["key"],
    "properties": {"name": _TEXT, "key": _TEXT, "optional": {"type": "boolean"}},
}
_ENDPOINT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["port"],
    "properties": {
        "port": _TEXT,
        "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
        "authorization": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"type": _TEXT, "credentials": _SECRET_KEY},
        },
        "relabelings": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "properties": {"targetLabel": _TEXT, "replacement": _TEXT},
            },
        },
    },
}
_RULE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["alert", "expr", "labels", "annotations"],
    "properties": {"alert": _TEXT, "expr": _TEXT, "for": _TEXT, "labels": _MAP, "annotations": _MAP},
}
_GROUP = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "rules"],
    "properties": {"name": _TEXT, "interval": _TEXT, "rules": {"type": "array", "minItems": 1, "items": _RULE}},
}
# The fields of the operators' resources that the chart uses, by their documentation.
CUSTOM = {
    "ServiceMonitor": _resource(
        "ServiceMonitor",
        "monitoring.coreos.com/v1",
        {
            "required": ["selector", "endpoints"],
            "properties": {
                "selector": {"type": "object", "required": ["matchLabels"]},
                "namespaceSelector": {"type": "object", "required": ["matchNames"]},
                "endpoints": {"type": "array", "minItems": 1, "items": _ENDPOINT},
            },
        },
    ),
    "PrometheusRule": _resource(
        "PrometheusRule",
        "monitoring.coreos.com/v1",
        {"required": ["groups"], "properties": {"groups": {"type": "array", "minItems": 1, "items": _GROUP}}},
    ),
    "Certificate": _resource(
        "Certificate",
        "cert-manager.io/v1",
        {
            "required": ["secretName", "dnsNames", "issuerRef"],
            "properties": {
                "secretName": _TEXT,
                "duration": {"type": "string", "pattern": "^[0-9]+h$"},
                "renewBefore": {"type": "string", "pattern": "^[0-9]+h$"},
                "privateKey": {"type": "object", "required": ["algorithm", "size", "rotationPolicy"]},
                "usages": {"type": "array", "items": _TEXT},
                "dnsNames": {"type": "array", "minItems": 1, "items": {"type": "string", "maxLength": 253}},
                "issuerRef": {"type": "object", "required": ["name", "kind", "group"]},
            },
        },
    ),
}


@cache
def _folder(version: str) -> Any:
    return importlib_resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"


@cache
def _definitions(version: str) -> Registry[Any]:
    contents = json.loads((_folder(version) / "_definitions.json").read_text())
    return Resource.from_contents(contents) @ Registry()


@cache
def _validator(version: str, kind: str, api: str) -> Any:
    if kind in CUSTOM:
        return jsonschema.Draft202012Validator(CUSTOM[kind])
    group, _, level = api.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.partition(".")[0], level)))
    schema = json.loads((_folder(version) / f"{name}.json").read_text())
    return jsonschema.Draft202012Validator(schema, registry=Resource.from_contents(schema) @ _definitions(version))


def complaints(manifest: dict[str, Any], version: str) -> list[str]:
    """Errors of a manifest by a version of Kubernetes; raises FileNotFoundError for an unknown kind."""
    found = _validator(version, manifest["kind"], manifest["apiVersion"]).iter_errors(manifest)
    name = f"{manifest['kind']} {manifest['metadata']['name']}"
    return [f"{version}: {name}: {'.'.join(map(str, error.path))}: {error.message}" for error in found]
