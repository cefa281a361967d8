"""Contradicting values are refused before anything is installed; generated files follow values.yaml."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane_service.config import KEYS
from kvplane_service.config_loading import load
from tests.helm.charts import CHART, ROOT, SETS, Helm3, Helm4, Refused, configuration, serves, values_of

HELMS = pytest.mark.parametrize("helm", [Helm3(), Helm4()], ids=["helm-3.6.2", "helm-4"])
EXTERNAL = {"type": "external", "external": {"url": "redis://r:6379"}}

ENGINE: dict[str, Any] = {"name": "e", "events": "tcp://e:1"}
ANY_POD: list[dict[str, Any]] = [{"namespaceSelector": {}}]

# Values, and a part of the refusal.
CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "two on no store": ({"replicas": 2}, "store.type: none is not shared, and there may be 2 service processes"),
    "two on a file": ({"replicas": 2, "store": {"type": "sqlite"}}, "sqlite is not shared"),
    "autoscaled on no store": ({"autoscaling": {"enabled": True}}, "there may be 4 service processes"),
    "no address": ({"store": {"type": "external"}}, "store.external.url is empty"),
    "an unused store": ({"store": {**EXTERNAL, "type": "none"}}, "store.external is given, but store.type is none"),
    "a user": ({"store": {"type": "external", "external": {"url": "redis://u:p@r"}}}, "contains a user"),
    "half a pair for the store": (
        {"store": {"type": "external", "external": {"url": "rediss://r", "existingSecret": "s", "certKey": "c"}}},
        "half a TLS pair",
    ),
    "a CA without TLS": (
        {"store": {"type": "external", "external": {"url": "redis://r", "existingSecret": "s", "caKey": "c"}}},
        "begin it with rediss",
    ),
    "keys of no secret": (
        {"store": {"type": "external", "external": {"url": "redis://r", "usernameKey": "u"}}},
        "no existingSecret",
    ),
    "no certificate": ({"tls": {"enabled": True}}, "tls.enabled without a certificate"),
    "two certificates": (
        {"tls": {"enabled": True, "existingSecret": "s", "certManager": {"enabled": True, "issuerRef": {"name": "i"}}}},
        "choose one",
    ),
    "no issuer": ({"tls": {"enabled": True, "certManager": {"enabled": True}}}, "name the issuer"),
    "TLS set up and off": ({"tls": {"clientAuth": "require"}}, "set tls.enabled=true"),
    "a client CA without clientAuth": (
        {"tls": {"enabled": True, "existingSecret": "s", "clientCA": {"existingSecret": "c"}}},
        "set tls.clientAuth=require",
    ),
    "tokens of no secret": ({"auth": {"tokensKey": "t"}}, "no existingSecret that holds them"),
    "auth without owners": ({"auth": {"existingSecret": "s", "tokensKey": "t"}}, "auth.ownersKey is empty"),
    "auth without credentials": ({"auth": {"existingSecret": "s", "ownersKey": "o"}}, "without a way to authenticate"),
    "keys for any token": (
        {"auth": {"existingSecret": "s", "ownersKey": "o", "jwksKey": "k", "jwtIssuer": "i"}},
        "any token signed by these keys would be accepted",
    ),
    "claims without keys": (
        {"auth": {"existingSecret": "s", "ownersKey": "o", "tokensKey": "t", "jwtIssuer": "i"}},
        "name auth.jwksKey",
    ),
    "a key that seals nothing": (
        {"store": {**EXTERNAL, "sealing": {"enabled": False, "existingSecret": "s"}}},
        "but nothing is sealed",
    ),
    "etcd without members": (
        {"store": EXTERNAL, "ownership": {"type": "etcd"}},
        "and ownership.type is etcd: give etcdUrls with type etcd",
    ),
    "members of etcd for a Lease": (
        {"store": EXTERNAL, "ownership": {"etcdUrls": "http://e:2379"}},
        "ownership.etcdUrls names the members of etcd, and ownership.type is lease",
    ),
    "owners of a store for one": (
        {"ownership": {"type": "etcd", "etcdUrls": "http://e:2379"}},
        "ownership.type is etcd, but store.type none is for one process",
    ),
    "a Lease for every pod": (
        {"store": EXTERNAL, "serviceAccount": {"create": False}},
        "so that every pod of the namespace could take the Lease",
    ),
    "access to nothing": ({"access": {"tokenKey": "t"}}, "access names keys of a secret"),
    "half a pair of a client": (
        {"access": {"existingSecret": "s", "certKey": "c"}},
        "access has half a TLS pair",
    ),
    "a token in plain text": ({"access": {"existingSecret": "s", "tokenKey": "t"}}, "in plain text"),
    "limits that cross": (
        {"store": EXTERNAL, "autoscaling": {"enabled": True, "minReplicas": 5}},
        "minReplicas 5 is above maxReplicas 4",
    ),
    "a monitor without metrics": (
        {"metrics": {"enabled": False, "serviceMonitor": {"enabled": True}}},
        "metrics.serviceMonitor has no endpoint to scrape",
    ),
    "a token without metrics": (
        {"metrics": {"enabled": False, "token": {"existingSecret": "s"}}},
        "metrics.token protects nothing",
    ),
    "processes that come and go": (
        {"store": EXTERNAL, "autoscaling": {"enabled": True}, "peerServices": {"enabled": True}},
        "autoscaling.enabled starts and ends others: choose one",
    ),
    "peers twice": (
        {"config": {"peer_services": "far:7070"}, "peerServices": {"enabled": True}},
        "both name the services to follow",
    ),
    "a token for no peer": ({"peerServices": {"existingSecret": "s"}}, "but nothing is followed"),
    "peers without a token": (
        {
            "peerServices": {"enabled": True},
            "auth": {"existingSecret": "s", "ownersKey": "o", "tokensKey": "t"},
        },
        "peerServices has no token for the other processes",
    ),
    "a token of peers in plain text": (
        {"peerServices": {"enabled": True, "existingSecret": "s"}},
        "peerServices.existingSecret would cross the network in plain text",
    ),
    "peers that cannot be verified": (
        {"peerServices": {"enabled": True}, "tls": {"enabled": True, "existingSecret": "s", "caKey": ""}},
        "peerServices cannot verify the other processes: name tls.caKey",
    ),
    "one port twice": ({"ports": {"health": 7070}}, "must differ"),
    "too little time": ({"terminationGracePeriodSeconds": 25}, "give more than 25"),
    "a variable of the chart": (
        {"extraEnv": [{"name": "KVPLANE_LISTEN", "value": "x:1"}]},
        "extraEnv sets KVPLANE_LISTEN, which the chart sets",
    ),
    "one replica on all nodes": (
        {"gpuWorker": {"mode": "daemonset", "replica": "one"}},
        "include $(NODE_NAME)",
    ),
    "one replica in all pods": ({"gpuWorker": {"mode": "sidecar", "replica": "one"}}, "include $(POD_NAME)"),
    "a worker without a token": (
        {"gpuWorker": {"mode": "daemonset"}, "auth": {"existingSecret": "s", "ownersKey": "o", "tokensKey": "t"}},
        "gpuWorker has no token",
    ),
    "a replica of no owner": (
        {
            "gpuWorker": {"mode": "daemonset"},
            "tls": {"enabled": True, "existingSecret": "s"},
            "auth": {"existingSecret": "s", "ownersKey": "o", "tokensKey": "t"},
            "access": {"existingSecret": "s", "tokenKey": "t"},
        },
        "set access.replicaPrefix, such as acme/, or gpuWorker.replica",
    ),
    "workers of another service as sidecars": (
        {"gpuWorker": {"mode": "sidecar", "service": "kvplane.a.svc:7070"}},
        "but gpuWorker.mode is sidecar: use daemonset",
    ),
    "a store without a service": (
        {"gpuWorker": {"mode": "daemonset", "service": "kvplane.a.svc:7070"}, "store": EXTERNAL},
        "store.type is of a service, but gpuWorker.service makes this a release of workers alone",
    ),
    "tiers of no worker": ({"gpuWorker": {"tiers": {"hostMemory": "1Gi"}}}, "but gpuWorker.mode is disabled"),
    "a claim without a size": (
        {"gpuWorker": {"mode": "daemonset", "tiers": {"disk": {"type": "claim"}}}},
        "gpuWorker.tiers.disk.size is empty",
    ),
    "a disk of no type": (
        {"gpuWorker": {"mode": "daemonset", "tiers": {"disk": {"size": "1Gi"}}}},
        "gpuWorker.tiers.disk is given, but its type is none",
    ),
    "a class of no claim": (
        {"gpuWorker": {"mode": "daemonset", "tiers": {"disk": {"type": "hostPath", "storageClassName": "fast"}}}},
        "storageClassName is of a claim, but the type is hostPath",
    ),
    "a folder of the node in the service's pod": (
        {"gpuWorker": {"mode": "sidecar", "tiers": {"disk": {"type": "hostPath"}}}},
        "type hostPath is for workers on nodes",
    ),
    "a host tier above the memory of its container": (
        {
            "gpuWorker": {
                "mode": "daemonset",
                "tiers": {"hostMemory": "8Gi"},
                "resources": {"requests": {"memory": "9Gi"}, "limits": {"memory": "12Gi"}},
            }
        },
        "gpuWorker.resources.requests.memory 9Gi has no room for a host tier of 8Gi, which is at most 80 % of it: give "
        "at least 10240Mi",
    ),
    "a policy that admits no engine": (
        {"networkPolicy": {"enabled": True, "metricsClients": ANY_POD}},
        "networkPolicy.clients is empty",
    ),
    "a policy that admits no scrape": (
        {"networkPolicy": {"enabled": True, "clients": ANY_POD}},
        "networkPolicy.metricsClients is empty",
    ),
    "a router of nothing": ({"router": {"enabled": True}}, "router.places is empty"),
    "two places of one name": (
        {"router": {"enabled": True, "places": [ENGINE, {**ENGINE, "events": "tcp://f:1"}]}},
        "router.places has two places of the name e",
    ),
    "a router without a token": (
        {
            "router": {"enabled": True, "places": [{"name": "r", "service": "s:7070"}]},
            "auth": {"existingSecret": "s", "ownersKey": "o", "tokensKey": "t"},
        },
        "router.places follows r at a service, but has no token for it",
    ),
    "one port of a router twice": (
        {"router": {"enabled": True, "port": 7071, "places": [ENGINE]}},
        "router.port must differ",
    ),
    "a store above the memory of its container": (
        {"store": {"type": "builtin", "builtin": {"maxMemory": "310mb"}}},
        "store.builtin.maxMemory 310mb is more than 80 % of resources.limits.memory 384Mi",
    ),
    "a log on a root that is read-only": ({"auditLog": "/var/log/audit"}, "mount a volume"),
    "a worker without a certificate": (
        {"gpuWorker": {"mode": "daemonset"}, "tls": {"enabled": True, "existingSecret": "s", "clientAuth": "require"}},
        "gpuWorker has no certificate",
    ),
}


def refusal(values: dict[str, Any], helm: Helm3 | Helm4) -> str:
    with pytest.raises(Refused) as refused:
        helm.objects(values)
    return str(refused.value)


@HELMS
@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_refused_with_the_remedy(name, helm):
    values, words = CONTRADICTIONS[name]
    message = refusal(values, helm)
    assert words in message
    assert "kvplane: invalid values:" in message


def test_every_rule_refuses_some_case():
    """Rules are the lines of the templates that begin with a value's name."""
    text = (CHART / "templates" / "_validations.tpl").read_text()
    names = r"[a-z]\w*\.|auditLog |access |auth |tls |gpuWorker |extraEnv |terminationG"
    rules = re.findall(rf"^((?:{names})[^\n]*)$", text, re.MULTILINE)
    assert len(rules) > 20
    messages = "".join(refusal(values, Helm4()) for values, _ in CONTRADICTIONS.values())
    messages += refusal(values_of("gpu-dra"), Helm3("1.30.0"))
    for rule in rules:
        assert max(re.split(r"{{.*?}}", rule), key=len) in messages


def test_all_contradictions_are_in_one_message():
    values = {"replicas": 2, "tls": {"enabled": True}, "access": {"tokenKey": "t"}}
    assert refusal(values, Helm4()).count("\n  - ") == 3


def test_resource_claims_need_a_new_kubernetes():
    assert "needs Kubernetes 1.31, this is v1.30.0" in refusal(values_of("gpu-dra"), Helm3("1.30.0"))


@HELMS
@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replica": 2}, "replica"),
        ({"tls": {"enable": True}}, "enable"),
        ({"store": {"typ": "none"}}, "typ"),
        ({"config": {"leese_ms": 5}}, "leese_ms"),
        ({"config": {"listen": "0.0.0.0:1"}}, "listen"),
        ({"config": {"lease_ms": 0}}, "lease_ms"),
        ({"config": {"lease_ms": "soon"}}, "lease_ms"),
        ({"config": {"reflection": "sometimes"}}, "reflection"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": "2"}, "replicas"),
        ({"store": {"type": "etcd"}}, "type"),
        ({"image": {"digest": "abc"}}, "digest"),
        ({"commonLabels": {"number": 42}}, "number"),
        ({"tls": {"clientAuth": "optional"}}, "clientAuth"),
        ({"fullnameOverride": "1e3"}, "fullnameOverride"),
        ({"gpuWorker": {"service": "*.kvplane-headless"}}, "service"),
        ({"store": {"builtin": {"maxMemory": "256Mi"}}}, "maxMemory"),
        ({"store": {"builtin": {"maxMemory": "0"}}}, "maxMemory"),
        ({"store": {"sqlite": {"size": "0Gi"}}}, "size"),
        ({"gpuWorker": {"tiers": {"hostMemory": "0Mi"}}}, "hostMemory"),
        ({"listenAddress": "::"}, "listenAddress"),
        ({"commonLabels": {"app.kubernetes.io/name": "x"}}, "app.kubernetes.io/name"),
        ({"podLabels": {"app.kubernetes.io/component": "x"}}, "app.kubernetes.io/component"),
        ({"gpuWorker": {"podLabels": {"helm.sh/chart": "x"}}}, "helm.sh/chart"),
        ({"extraEnv": [{"value": "x"}]}, "name"),
        ({"gpuWorker": {"extraEnv": [{"value": "x"}]}}, "name"),
        ({"router": {"places": [{"name": "a"}]}}, "places"),
        ({"router": {"places": [{**ENGINE, "service": "s:1"}]}}, "places"),
        ({"router": {"places": [{**ENGINE, "model": 7}]}}, "model"),
        ({"router": {"places": [{**ENGINE, "repaly": "tcp://e:2"}]}}, "repaly"),
        ({"router": {"places": [{**ENGINE, "events": "e:1"}]}}, "events"),
        ({"router": {"settings": {"polcy": "cost"}}}, "polcy"),
        ({"router": {"settings": {"max_decisions": 0}}}, "max_decisions"),
        ({"resources": None}, "resources"),
        ({"store": {"external": None}}, "external"),
        ({"tolerations": None}, "tolerations"),
        ({"gpuWorker": {"resources": None}}, "resources"),
        ({"config": None}, "config"),
    ],
)
def test_the_schema_refuses_unknown_values_by_name(values, named, helm):
    assert named in refusal(values, helm)


@pytest.mark.parametrize("memory", ["1.5Gi", "12G", "12e9", 12_000_000_000, "12582912Ki", "12288M", "10000000k"])
def test_memory_in_any_unit_of_kubernetes_is_compared_with_a_host_tier(memory):
    def values(limit):
        resources = {"requests": {"memory": "13Gi"}, "limits": {"memory": limit}}
        return {"gpuWorker": {"mode": "daemonset", "tiers": {"hostMemory": "10Gi"}, "resources": resources}}

    said = refusal(values(memory), Helm4())
    assert "gpuWorker.resources.limits.memory" in said
    assert "requests.memory" not in said
    for enough in ("12800Mi", "13.5G", "14e9", 14_000_000_000):
        assert Helm4().objects(values(enough))


def test_units_of_router_settings_are_accepted():
    settings = {"forget_after_s": "10m", "max_body_bytes": "64MiB", "warm_up_s": 2.5, "policy": "ttft"}
    assert Helm4().objects({"router": {"enabled": True, "places": [ENGINE], "settings": settings}})


def test_globals_of_a_parent_chart_are_accepted():
    assert Helm4().objects({"global": {"other": 1}})


def test_a_typo_in_the_rendered_file_is_refused_with_the_nearest_key(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("leese_ms: 5\n")
    with pytest.raises(InvalidArgument, match="the most similar key is lease_ms"):
        load({}, {}, file)


@pytest.fixture
def copy(tmp_path):
    """A copy of values.yaml and of the generated files."""
    for name in ("values.yaml", "values.schema.json", "README.md"):
        shutil.copy(CHART / name, tmp_path)
    return tmp_path


def chart_script(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "chart.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_schema_and_table_are_up_to_date():
    done = chart_script("--check")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [("replicas: 1", "replicas: 2"), ("# -- Names of secrets", "# -- Secrets"), ("clusterDomain:", "domain:")],
)
def test_outdated_generated_files_are_detected(old, new, copy):
    values = copy / "values.yaml"
    values.write_text(values.read_text().replace(old, new))
    done = chart_script("--check", "--chart", copy)
    assert done.returncode == 1
    assert "make chart" in done.stderr
    assert chart_script("--chart", copy).returncode == 0
    assert chart_script("--check", "--chart", copy).returncode == 0


def test_an_empty_map_needs_a_schema(copy):
    with (copy / "values.yaml").open("a") as file:
        file.write("more: {}\n")
    done = chart_script("--chart", copy)
    assert done.returncode == 1
    assert "more is an empty map" in done.stderr


def test_the_schema_has_the_keys_of_the_configuration():
    properties = json.loads((CHART / "values.schema.json").read_text())["properties"]["config"]["properties"]
    rendered = [Helm4().objects(values_of(name)) for name in SETS]
    set_by_chart = {key for objects in rendered if serves(objects) for key in configuration(objects)}
    assert set(properties) <= set(KEYS)
    variables = {"advertise", "memory_bytes", "store_username", "store_password"}
    assert set(KEYS) - set(properties) <= set_by_chart | variables
