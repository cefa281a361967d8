"""Renders the chart with Helm 3.6.2 (a command) and 4 (a library), and reads the manifests."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "kvplane"
SETS = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))
NAMESPACE = "caches"
HELM_3 = [str(ROOT / "scripts" / "helm.sh")]
MONITORING = "monitoring.coreos.com/v1"

Object = dict[str, Any]
Values = Mapping[str, Any]


class Refused(Exception):
    """Helm refuses to render the chart."""


def values_of(name: str) -> dict[str, Any]:
    """A set of values in ci/, as Helm reads it."""
    return helm_python.values_from_yaml((CHART / "ci" / f"{name}-values.yaml").read_text())


def objects_in(text: str) -> list[Object]:
    """Manifests in a text, parsed as Kubernetes does, for which `on` is true."""
    return [one for one in yaml.safe_load_all(text) if one]


@dataclass(frozen=True, slots=True)
class Helm3:
    """The command. It has the schema, the capabilities that it is given, and the version of Kubernetes."""

    kubernetes: str = "1.29.0"

    def run(self, *arguments: str, values: Values | None = None, check: bool = True) -> str:
        """Run it; returns its output. Raises Refused with its error."""
        given = ["--values", "-"] if values is not None else []
        done = subprocess.run(
            [*HELM_3, *arguments, *given],
            input=json.dumps(values),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        if check and done.returncode != 0:
            raise Refused(done.stdout + done.stderr)
        return done.stdout

    def text(self, values: Values, release: str = "kvplane") -> str:
        """All manifests, tests too, on a cluster with Prometheus' operator."""
        where = ("--namespace", NAMESPACE, "--kube-version", self.kubernetes, "--api-versions", MONITORING)
        return self.run("template", release, str(CHART), *where, values=values)

    def objects(self, values: Values, release: str = "kvplane") -> list[Object]:
        return objects_in(self.text(values, release))

    def lint(self, values: Values, kubernetes: str = "") -> str:
        """Lint the chart; returns the output. Raises Refused. Lint supports one version of Kubernetes."""
        return self.run("lint", "--strict", str(CHART), "--namespace", NAMESPACE, values=values)


class Helm4:
    """The library, without a cluster."""

    def files(self, values: Values, release: str = "kvplane") -> dict[str, str]:
        """The text of each template, and of NOTES.txt."""
        chart = helm_python.Chart.load(str(CHART))
        try:
            chart.validate_schema(dict(values))
            return chart.render(dict(values), name=release, namespace=NAMESPACE)
        except helm_python.HelmError as error:
            raise Refused(str(error)) from None

    def objects(self, values: Values, release: str = "kvplane") -> list[Object]:
        texts = self.files(values, release)
        return [one for path, text in texts.items() if path.endswith(".yaml") for one in objects_in(text)]

    def lint(self, values: Values, kubernetes: str = "1.29") -> str:
        version = f"v{kubernetes}.0"
        report = helm_python.lint(str(CHART), dict(values), strict=True, namespace=NAMESPACE, kube_version=version)
        if report["errors"]:
            raise Refused("\n".join(report["errors"]))
        return "\n".join(message["error"] for message in report["messages"])


def kinds(objects: list[Object]) -> list[str]:
    return sorted(one["kind"] for one in objects)


def the(objects: list[Object], kind: str, suffix: str = "") -> Object:
    """The one object of a kind whose name has the suffix."""
    (found,) = [
        one for one in objects if one["kind"] == kind and (not suffix or one["metadata"]["name"].endswith(suffix))
    ]
    return found


def pod_specs(objects: list[Object]) -> list[Object]:
    """Pod specs of every object that creates pods, and of pods."""
    specs = []
    for one in objects:
        if one["kind"] == "Pod":
            specs.append(one["spec"])
        elif one["kind"] in ("StatefulSet", "Deployment", "DaemonSet"):
            specs.append(one["spec"]["template"]["spec"])
    return specs


def serves(objects: list[Object]) -> bool:
    """Whether the service is part of a release; otherwise it has workers alone."""
    return "StatefulSet" in kinds(objects)


def is_restricted(spec: Object) -> bool:
    """Whether a pod may run in a namespace that enforces the restricted Pod Security Standard."""
    host = any(spec.get(name) for name in ("hostIPC", "hostPID", "hostNetwork"))
    kept = {"configMap", "secret", "emptyDir", "projected", "downwardAPI", "csi", "ephemeral", "persistentVolumeClaim"}
    volumes = all(set(volume) - {"name"} <= kept for volume in spec.get("volumes", ()))
    pod = spec.get("securityContext", {})
    containers = [*spec["containers"], *spec.get("initContainers", ())]
    return not host and volumes and all(_is_restricted(one, pod) for one in containers)


def _is_restricted(container: Object, pod: Object) -> bool:
    own = {**pod, **container.get("securityContext", {})}
    capabilities = own.get("capabilities", {})
    return (
        own.get("runAsNonRoot") is True
        and own.get("runAsUser") != 0
        and own.get("allowPrivilegeEscalation") is False
        and not own.get("privileged")
        and own.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost")
        and "ALL" in capabilities.get("drop", ())
        and set(capabilities.get("add", ())) <= {"NET_BIND_SERVICE"}
        and not any("hostPort" in port for port in container.get("ports", ()))
    )


def configuration(objects: list[Object]) -> dict[str, Any]:
    """The configuration file of the service."""
    for one in objects:
        if one["kind"] == "ConfigMap" and "config.yaml" in one.get("data", {}):
            return yaml.safe_load(one["data"]["config.yaml"])
    raise AssertionError("there is no config.yaml")
