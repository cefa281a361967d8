"""Install, test, upgrade, roll back, uninstall: real Helm on an emulated Kubernetes API, and once with real pods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import helm_python
import pytest

from tests.helm.charts import CHART, NAMESPACE, Helm3, Object, values_of
from tests.helm.cluster import Cluster, cluster
from tests.helm.pods import Machine, Pod, machine
from tests.helm.schemas import VERSIONS

TIMEOUT_S = 60
# Fields that the API adds.
ADDED = ("uid", "creationTimestamp", "resourceVersion", "generation", "managedFields", "annotations")
CHANGE: dict[str, Any] = {"config": {"lease_ms": 5000}, "podLabels": {"new": "label"}, "commonLabels": {"also": "new"}}


class ByHelm4:
    """The library, with its releases in memory."""

    def __init__(self, kubeconfig: str, _: Path) -> None:
        self._helm = helm_python.Config(kubeconfig_content=kubeconfig, namespace=NAMESPACE, storage_driver="memory")

    def install(self, values: dict[str, Any]) -> None:
        self._helm.install(str(CHART), "kvplane", values, namespace=NAMESPACE, wait="watcher", timeout=TIMEOUT_S)

    def upgrade(self, values: dict[str, Any]) -> None:
        self._helm.upgrade(str(CHART), "kvplane", values, namespace=NAMESPACE, wait="watcher", timeout=TIMEOUT_S)

    def test(self) -> None:
        self._helm.test("kvplane", timeout=TIMEOUT_S)

    def rollback(self, revision: int) -> None:
        self._helm.rollback("kvplane", version=revision, wait="watcher", timeout=TIMEOUT_S)

    def uninstall(self) -> None:
        self._helm.uninstall("kvplane", wait="watcher", timeout=TIMEOUT_S)


class ByHelm3:
    """The command, with its releases in Secrets."""

    def __init__(self, kubeconfig: str, folder: Path) -> None:
        file = folder / "kubeconfig"
        file.touch(0o600)
        file.write_text(kubeconfig)
        self._where = ("--namespace", NAMESPACE, "--kubeconfig", str(file))
        self._wait = (*self._where, "--wait", "--timeout", f"{TIMEOUT_S}s")

    def install(self, values: dict[str, Any]) -> None:
        Helm3().run("install", "kvplane", str(CHART), *self._wait, values=values)

    def upgrade(self, values: dict[str, Any]) -> None:
        Helm3().run("upgrade", "kvplane", str(CHART), *self._wait, values=values)

    def test(self) -> None:
        Helm3().run("test", "kvplane", *self._where)

    def rollback(self, revision: int) -> None:
        Helm3().run("rollback", "kvplane", str(revision), *self._wait)

    def uninstall(self) -> None:
        Helm3().run("uninstall", "kvplane", *self._where)


def plain(one: Object) -> Object:
    """An object without the fields of API and Helm, and without a generated password and its checksum."""
    one = json.loads(json.dumps(one))
    for key in ADDED:
        one["metadata"].pop(key, None)
    one.pop("status", None)
    one["metadata"].setdefault("namespace", NAMESPACE)
    one["metadata"].setdefault("labels", {})["app.kubernetes.io/managed-by"] = "Helm"
    if one["kind"] == "Service" and one["spec"].get("clusterIP") != "None":
        one["spec"].pop("clusterIP", None)
    if one["kind"] == "StatefulSet":
        one["spec"].pop("updateStrategy", None)
    if one["kind"] in ("StatefulSet", "Deployment"):
        one["spec"]["template"]["metadata"].get("annotations", {}).pop("checksum/store-password", None)
    if one["kind"] == "Secret":
        one.pop("data", None)
        one.pop("stringData", None)
    return one


def generated(here: Cluster) -> list[Object]:
    """Passwords and keys, which are generated once and kept."""
    return [one["data"] for one in here.of_kind("Secret") if "release" not in one["data"]]


def configuration(objects: list[Object]) -> list[Object]:
    """The ConfigMaps of the service."""
    return [one for one in objects if "config.yaml" in one.get("data", {})]


def assert_is(here: Cluster, values: dict[str, Any], before: dict[str, Any] | None = None) -> None:
    """Check that the cluster has exactly the objects of the chart, and the configuration of the values before them."""
    helm = Helm3(f"{here.version}.0")
    objects = helm.objects(values)
    (config,) = configuration(objects)
    for one in configuration(helm.objects(before) if before is not None else []):
        objects.append({**one, "metadata": config["metadata"] | {"name": one["metadata"]["name"]}})
    expected = [plain(one) for one in objects if one["kind"] != "Pod"]
    found = {(one["kind"], one["metadata"]["name"]): plain(one) for one in here.installed()}
    assert found == {(one["kind"], one["metadata"]["name"]): one for one in expected}


@pytest.mark.parametrize(
    ("by", "name", "version"),
    [
        (ByHelm4, "default", VERSIONS[0]),
        (ByHelm4, "ha", VERSIONS[-1]),
        (ByHelm4, "everything", "1.33"),
        (ByHelm4, "gpu-dra", "1.35"),
        (ByHelm3, "external-redis", VERSIONS[0]),
        (ByHelm3, "everything", VERSIONS[-1]),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_release_is_installed_upgraded_and_removed(by, name, version, tmp_path):
    before, after = values_of(name), {**values_of(name), **CHANGE}
    with cluster(version) as (here, kubeconfig):
        helm = by(kubeconfig, tmp_path)
        helm.install(before)
        assert_is(here, before)
        helm.test()
        assert [line for line in here.log if "Pod kvplane-test" in line or "Pod cache-test" in line][-1][:6] == "DELETE"
        helm.upgrade(after)
        assert_is(here, after, before)
        secrets = generated(here)
        helm.rollback(1)
        assert_is(here, before)
        assert generated(here) == secrets
        helm.uninstall()
        kept = [one["metadata"]["name"] for one in here.installed()]
        assert all(one.endswith("-store-keys") for one in kept), "the key of a store outlives its release"


def test_an_object_with_an_unknown_field_is_refused():
    extra = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"prots": []}}
    with cluster("1.33") as (_, kubeconfig), pytest.raises(helm_python.HelmReleaseError, match="prots"):
        ByHelm4(kubeconfig, Path()).install({"extraObjects": [extra]})


class Kubelet:
    """Runs the pods of the cluster's StatefulSet, and those that Helm creates."""

    def __init__(self, here: Cluster, node: Machine) -> None:
        self._here = here
        self._node = node
        self.pod: Pod | None = None
        self.said = ""
        here.run_pod = self.run_pod

    def roll(self) -> None:
        """Replace the pods one by one by those of the current manifests."""
        if self.pod is not None:
            assert self.pod.terminate().codes == {"kvplane": 0}
        self._node.look_at(self._here.installed())
        self.pod = self._node.start("kvplane-0")
        self.pod.wait_ready()

    def run_pod(self, manifest: Object) -> bool:
        self._node.look_at([*self._here.installed(), manifest])
        pod = self._node.start(manifest["metadata"]["name"])
        is_well = set(pod.wait().values()) == {0}
        self.said = pod.said("try")
        return is_well


@contextmanager
def release() -> Iterator[tuple[ByHelm4, Kubelet]]:
    with cluster(VERSIONS[-1]) as (here, kubeconfig), machine([]) as node:
        yield ByHelm4(kubeconfig, Path()), Kubelet(here, node)


def test_a_release_with_running_pods_is_installed_and_upgraded():
    values = {"drain": {"preStopSeconds": 0, "graceSeconds": 5}, "store": {"type": "sqlite"}}
    with release() as (helm, kubelet):
        helm.install(values)
        kubelet.roll()
        helm.test()
        assert "32 of 33 tokens hit again" in kubelet.said
        helm.upgrade({**values, "config": {"log_level": "DEBUG"}})
        kubelet.roll()
        helm.test()
        assert kubelet.pod is not None
        pod = kubelet.pod
        assert "DEBUG" in (pod.place("/etc/kvplane/config") / "config.yaml").read_text()
        helm.rollback(1)
        kubelet.roll()
        helm.test()
        assert kubelet.pod.terminate().codes == {"kvplane": 0}
        with pytest.raises(helm_python.HelmReleaseError):  # no pod answers any more
            helm.test()
        helm.uninstall()
