"""Upgrades from each set of values to each other: accepted and whole, or refused with nothing changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import helm_python
import pytest

from tests.helm.charts import CHART, NAMESPACE, Helm3, Object, values_of
from tests.helm.cluster import FIXED, RESOURCES, Cluster, Place, canonical, cluster

NAMES = [path.name.removesuffix("-values.yaml") for path in sorted((CHART / "ci").glob("*-values.yaml"))]
SQLITE = {"type": "sqlite"}
SETS: dict[str, dict[str, Any]] = {name: values_of(name) for name in NAMES} | {
    "sqlite": {"store": SQLITE},
    "sqlite of 1024Mi": {"store": SQLITE | {"sqlite": {"size": "1024Mi"}}},
    "sqlite of 2Gi": {"store": SQLITE | {"sqlite": {"size": "2Gi"}}},
    "sqlite of another class": {"store": SQLITE | {"sqlite": {"storageClassName": "fast"}}},
    "sqlite, not sealed": {"store": SQLITE | {"sealing": {"enabled": False}}},
    "one name": {"fullnameOverride": "cache", "nameOverride": "one"},
    "another name": {"fullnameOverride": "cache", "nameOverride": "another"},
}
EVERY_DAY = {
    ("default", "sqlite"), ("sqlite", "ha"), ("sqlite", "sqlite of 2Gi"), ("sqlite", "sqlite of 1024Mi"),
    ("sqlite", "sqlite of another class"), ("one name", "another name"), ("default", "tls"), ("router", "default"),
}  # fmt: skip
PAIRS = [(before, after) for before in SETS for after in SETS if before != after]
WORKLOADS = ("StatefulSet", "Deployment", "DaemonSet")


def marked(pairs: list[tuple[str, str]]) -> list[Any]:
    """All but a few run at night."""
    nightly = pytest.mark.nightly
    return [pytest.param(*pair, marks=() if pair in EVERY_DAY else nightly, id=" to ".join(pair)) for pair in pairs]


class Release:
    """One release on an emulated cluster."""

    def __init__(self, kubeconfig: str, chart: Path = CHART) -> None:
        self._helm = helm_python.Config(kubeconfig_content=kubeconfig, namespace=NAMESPACE, storage_driver="memory")
        self._chart = str(chart)

    def install(self, values: dict[str, Any]) -> None:
        self._helm.install(self._chart, "kvplane", values, namespace=NAMESPACE)

    def upgrade(self, values: dict[str, Any]) -> str:
        """Return the complaint; empty if there is none."""
        try:
            self._helm.upgrade(self._chart, "kvplane", values, namespace=NAMESPACE)
        except helm_python.HelmReleaseError as error:
            return str(error)
        return ""

    def rollback(self, revision: int) -> None:
        self._helm.rollback("kvplane", version=revision)


def fixed_of(here: Cluster) -> dict[tuple[str, str], Object]:
    """What no update may change, by workload."""
    return {
        (one["kind"], one["metadata"]["name"]): {key: canonical(one["spec"].get(key)) for key in FIXED[one["kind"]]}
        for one in here.installed()
        if one["kind"] in FIXED
    }


def config_maps(here: Cluster) -> dict[tuple[str, str], set[str]]:
    """Names of the ConfigMaps that the pods of each workload read."""
    return {
        (one["kind"], one["metadata"]["name"]): {
            volume["configMap"]["name"]
            for volume in one["spec"]["template"]["spec"].get("volumes", [])
            if "configMap" in volume
        }
        for one in here.installed()
        if one["kind"] in WORKLOADS
    }


def snapshot(here: Cluster) -> str:
    return json.dumps(here.installed(), sort_keys=True)


def complaints_about(before: str, after: str, chart: Path = CHART) -> list[str]:
    """What is wrong with an upgrade."""
    with cluster("1.33") as (there, kubeconfig):
        Release(kubeconfig).install(SETS[after])
        asked = fixed_of(there)
    with cluster("1.33") as (here, kubeconfig):
        release = Release(kubeconfig, chart)
        release.install(SETS[before])
        fixed, read, was = fixed_of(here), config_maps(here), snapshot(here)
        forbidden = [of for of, given in fixed.items() if asked.get(of, given) != given]
        refused, wrong = release.upgrade(SETS[after]), []
        if bool(forbidden) != bool(refused):
            wrong.append(f"the API forbids changes of {forbidden}, and the upgrade says {refused!r}")
        if refused and snapshot(here) != was:
            wrong.append("something has changed")
        if refused and not any(remedy in refused for remedy in ("--cascade=orphan", "fullnameOverride")):
            wrong.append("no remedy is named")
        there_are = {one["metadata"]["name"] for one in here.of_kind("ConfigMap")}
        for of, names in config_maps(here).items():
            if not names | read.get(of, set()) <= there_are:
                wrong.append(f"{of} has no ConfigMap {names | read.get(of, set())}")
        return wrong


@pytest.mark.parametrize(("before", "after"), marked(PAIRS))
def test_an_upgrade_is_whole_or_changes_nothing(before, after):
    assert complaints_about(before, after) == []


@pytest.mark.parametrize(
    ("file", "right", "wrong", "pair"),
    [
        ("_validations.tpl", ' "installed"', "", ("default", "sqlite")),
        ("_installed.tpl", "{{ toJson .files | sha256sum | trunc 10 }}", "config", ("default", "sqlite")),
        ("_installed.tpl", "{{ $_ := set $maps $before .data }}", "", ("default", "tls")),
        ("_installed.tpl", 'include "kvplane.quantity" $size', 'toString $size', ("sqlite", "sqlite of 1024Mi")),
        ("_installed.tpl", "ne (toJson $labels) (toJson $selector)", "false", ("one name", "another name")),
    ],
    ids=["unchecked", "one name", "before is removed", "sizes as text", "selectors unchecked"],
)  # fmt: skip
def test_a_fault_of_the_chart_is_found(file, right, wrong, pair, tmp_path):
    chart = Path(shutil.copytree(CHART, tmp_path / "kvplane"))
    place = chart / "templates" / file
    text = place.read_text()
    assert right in text
    place.write_text(text.replace(right, wrong))
    if file == "_installed.tpl" and wrong == "config":  # what the API refuses half way replaces the configuration
        (chart / "templates" / "_validations.tpl").write_text(
            (CHART / "templates" / "_validations.tpl").read_text().replace(' "installed"', "")
        )
    assert complaints_about(pair[0], pair[1], chart)


def test_a_store_is_changed_by_removing_the_statefulset_first():
    """As the complaint says, and back by a rollback, whose StatefulSet must be removed too."""
    place = Place("apps/v1", "statefulsets", NAMESPACE, "kvplane")
    assert RESOURCES["apps/v1"]["statefulsets"] == "StatefulSet"
    with cluster("1.33") as (here, kubeconfig):
        release = Release(kubeconfig)
        release.install({})
        first = config_maps(here)["StatefulSet", "kvplane"]
        assert "delete statefulset kvplane --cascade=orphan" in release.upgrade(SETS["sqlite"])
        here.remove(place)
        assert release.upgrade(SETS["sqlite"]) == ""
        assert here.of_kind("StatefulSet")[0]["spec"]["volumeClaimTemplates"]
        with pytest.raises(helm_python.HelmReleaseError, match="may not change"):
            release.rollback(1)
        assert config_maps(here)["StatefulSet", "kvplane"] != first
        here.remove(place)
        release.rollback(1)
        assert config_maps(here)["StatefulSet", "kvplane"] == first
        assert "volumeClaimTemplates" not in here.of_kind("StatefulSet")[0]["spec"]


def test_configuration_of_the_installed_pods_stays_for_one_upgrade():
    """A pod that is not yet replaced may start again; a later upgrade removes what it read."""
    with cluster("1.33") as (here, kubeconfig):
        release = Release(kubeconfig)
        release.install({})
        seen = [config_maps(here)["StatefulSet", "kvplane"]]
        for lease_ms in (5000, 6000):
            assert release.upgrade({"config": {"lease_ms": lease_ms}}) == ""
            seen.append(config_maps(here)["StatefulSet", "kvplane"])
            assert {one["metadata"]["name"] for one in here.of_kind("ConfigMap")} == seen[-2] | seen[-1]
        assert len({name for names in seen for name in names}) == 3


def test_notes_name_the_secrets_and_keys_that_are_missing(tmp_path):
    file = tmp_path / "kubeconfig"
    file.touch(0o600)
    where = ("--namespace", NAMESPACE, "--kubeconfig", str(file))
    with cluster("1.33") as (here, kubeconfig):
        file.write_text(kubeconfig)
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        here.write("POST", Place("v1", "serviceaccounts", NAMESPACE, "default"), account)
        notes = Helm3().run("install", "kvplane", str(CHART), *where, values=values_of("everything"))
        missing = notes.partition("start only when they are there")[2].splitlines()[1:]
        assert "  auth.existingSecret: there is no Secret clients-auth" in missing
        auth = values_of("everything")["auth"]
        data = {auth["ownersKey"]: "", auth["jwksKey"]: ""}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "clients-auth"}, "stringData": data}
        here.write("POST", Place("v1", "secrets", NAMESPACE, "clients-auth"), secret)
        notes = Helm3().run("upgrade", "kvplane", str(CHART), *where, values=values_of("everything"))
        assert f"  auth.tokensKey: Secret clients-auth has no key {auth['tokensKey']}\n" in notes
        assert "there is no Secret clients-auth" not in notes
        assert "start only when" not in Helm3().run("upgrade", "kvplane", str(CHART), *where, values={"replicas": 1})
