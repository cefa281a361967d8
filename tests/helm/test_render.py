"""Manifests of the oldest supported Helm and of the newest: valid, restricted, with valid names."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter

import pytest
import yaml

from kvplane_fleet import settings
from kvplane_fleet.router.process import check_keys
from kvplane_service.config_loading import load
from tests.helm.charts import (
    CHART,
    SETS,
    Helm3,
    Helm4,
    configuration,
    is_restricted,
    kinds,
    pod_specs,
    serves,
    the,
    values_of,
)
from tests.helm.pods import bytes_of
from tests.helm.schemas import CUSTOM, VERSIONS, complaints

SINCE = {"gpu-dra": "1.31"}  # sets that an older Kubernetes cannot run
# Names that YAML does not read as text without quotes, with a leading digit or a dot, and the longest one.
NAMES = ("y", "on", "012", "1e3", "a.b", "r" * 53)
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


def test_no_template_replaces_another_one_of_its_name():
    text = "".join(path.read_text() for path in (CHART / "templates").rglob("*.*"))
    names = Counter(re.findall(r'define "([^"]+)"', text))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.fixture(scope="module", params=SETS)
def case(request):
    """The name of a set of values, and its manifests by Helm 3.6.2."""
    name = request.param
    return name, Helm3(SINCE.get(name, "1.29") + ".0").objects(values_of(name))


@pytest.mark.parametrize("name", SETS)
def test_lint_finds_nothing_for_the_kubernetes_that_the_set_is_for(name):
    for version in (SINCE.get(name, VERSIONS[0]), VERSIONS[-1]):
        assert "WARNING" not in Helm4().lint(values_of(name), version)


# The lint of Helm 3.6 takes Kubernetes to be 1.20, on which a set of a later one is refused.
@pytest.mark.parametrize("name", [name for name in SETS if name not in SINCE])
def test_lint_of_helm_3_finds_nothing(name):
    assert "WARNING" not in Helm3().lint(values_of(name))


def test_both_helms_render_the_same(case):
    name, by_three = case
    by_four = Helm4().objects(values_of(name))
    of_operators = ("ServiceMonitor", "PrometheusRule")  # the library has no cluster with these kinds
    assert kinds(by_four) == kinds([one for one in by_three if one["kind"] not in of_operators])
    generated = [one for one in by_three if one["kind"] == "Secret"]
    plain = [one for one in by_three if one["kind"] not in of_operators and one not in generated]
    own = re.compile(r'"checksum/store-password": "\w+"')  # every rendering generates another password
    assert {own.sub("", json.dumps(one)) for one in plain} <= {own.sub("", json.dumps(one)) for one in by_four}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid(case, version):
    name, objects = case
    if float(version) < float(SINCE.get(name, "0")):
        assert any(complaints(one, version) for one in objects)
        return
    assert [line for one in objects for line in complaints(one, version)] == []


def test_the_schemas_refuse_a_typo_in_every_kind():
    for name in SETS:
        for one in Helm3("1.31.0").objects(values_of(name)):
            part = "spec" if "spec" in one else "metadata"
            broken = json.loads(json.dumps(one))
            broken[part]["tpyo"] = {"a": 1}
            assert complaints(broken, VERSIONS[-1]), one["kind"]
    assert set(CUSTOM) == {"ServiceMonitor", "PrometheusRule", "Certificate"}


def test_the_configuration_is_what_the_service_accepts(case, tmp_path):
    name, objects = case
    if not serves(objects):
        assert [one for one in objects if one["kind"] == "ConfigMap"] == []
        return
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(configuration(objects)))
    loaded = load({}, {}, file)
    given = configuration(objects)
    assert {key for key, source in loaded.sources.items() if source == str(file)} == set(given)
    if name == "everything":
        assert loaded.config.log_bytes == 1 << 30  # and not 1.073741824e+09
        assert loaded.config.store_prefix == "1e3"


def test_no_secret_is_in_a_config_map(case):
    name, objects = case
    secrets = [one for one in objects if one["kind"] == "Secret"]
    assert bool(secrets) == (name in ("ha", "everything"))
    words = [text for one in secrets for text in one["stringData"].values()]
    words += [base64.b64encode(word.encode()).decode() for word in words]
    maps = json.dumps([one for one in objects if one["kind"] != "Secret"])
    assert not any(word in maps for word in words)
    assert not serves(objects) or "password" not in configuration(objects)


def test_pods_are_restricted(case):
    _, objects = case
    for spec in pod_specs(objects):
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            if not container["image"].startswith("example.org/"):  # given by the values
                assert container["securityContext"]["readOnlyRootFilesystem"] is True
                assert container["securityContext"]["allowPrivilegeEscalation"] is False
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_role_permits_one_lease_and_only_the_service_has_a_token(case):
    _, objects = case
    roles, bindings = ([one for one in objects if one["kind"] == kind] for kind in ("Role", "RoleBinding"))
    owns = [configuration(objects)["ownership"]] if serves(objects) and "ownership" in configuration(objects) else []
    assert len(roles) == len(bindings) == len([one for one in owns if one.startswith("lease:")])
    assert not [one for one in objects if one["kind"].startswith("ClusterRole")]
    for role, binding in zip(roles, bindings, strict=True):
        namespace, name = owns[0].removeprefix("lease:").split("/")
        named = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": [name]}
        assert role["rules"] == [{**named, "verbs": ["get", "create", "update"]}]
        assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == namespace
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        account = the(objects, "StatefulSet")["spec"]["template"]["spec"]["serviceAccountName"]
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": namespace}]
    containers = [
        container["name"]
        for spec in pod_specs(objects)
        for container in spec["containers"]
        if any(mount["name"] == "account" for mount in container.get("volumeMounts", ()))
    ]
    assert containers == ["kvplane"] * len(roles)


def test_only_pods_of_workers_on_nodes_need_a_privileged_namespace(case):
    name, objects = case
    needing = [
        one["kind"]
        for one in objects
        if any(not is_restricted(spec) for spec in pod_specs([without_given_containers(one)]))
    ]
    daemons = name in ("everything", "gpu-daemonset", "gpu-dra", "gpu-tiers", "gpu-workers")
    assert needing == (["DaemonSet"] if daemons else [])


def without_given_containers(one):
    """An object without the containers that the values give."""
    one = json.loads(json.dumps(one))
    for spec in pod_specs([one]):
        for part in ("containers", "initContainers"):
            spec[part] = [c for c in spec.get(part, ()) if not c["image"].startswith("example.org/")]
    return one


def test_workers_of_another_release_s_service_are_alone_in_theirs():
    service, workers = Helm4().objects(values_of("tls")), Helm4().objects(values_of("gpu-workers"))
    assert kinds(workers) == ["DaemonSet", "NetworkPolicy", "ServiceAccount"]
    container = the(workers, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]
    (addresses,) = (word for word in container["args"] if word.startswith("--service="))
    (notes,) = (text for path, text in Helm4().files(values_of("tls")).items() if path.endswith("NOTES.txt"))
    assert addresses.removeprefix("--service=") in notes.split()  # what the service's release prints for engines
    assert all(is_restricted(spec) for spec in pod_specs(service))
    assert the(workers, "NetworkPolicy")["spec"]["egress"][1] == {"ports": [{"port": 7070}]}


def test_a_release_of_workers_needs_no_certificate_of_the_service_with_public_authorities():
    values = {**values_of("gpu-workers"), "tls": {"enabled": True, "caKey": ""}}
    container = the(Helm4().objects(values), "DaemonSet")["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "KVPLANE_TLS_CA", "value": "system"} in container["env"]


def test_a_pod_has_time_to_drain(case):
    _, objects = case
    if not serves(objects):
        return
    spec = the(objects, "StatefulSet")["spec"]["template"]["spec"]
    container = spec["containers"][0]
    sleep = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] > sleep + configuration(objects)["drain_grace_ms"] / 1000


@pytest.mark.parametrize("helm", [Helm3(), Helm4()], ids=["helm-3.6.2", "helm-4"])
def test_store_and_service_start_again_together_when_the_generated_password_differs(helm):
    def rendering():
        objects = helm.objects(values_of("ha"))
        pods = [the(objects, kind)["spec"]["template"] for kind in ("Deployment", "StatefulSet")]
        seen = [pod["metadata"]["annotations"]["checksum/store-password"] for pod in pods]
        password = the(objects, "Secret", "-valkey")["stringData"]["password"]
        assert seen == [hashlib.sha256(password.encode()).hexdigest()] * 2
        return password

    assert rendering() != rendering()


@pytest.mark.parametrize("helm", [Helm3(), Helm4()], ids=["helm-3.6.2", "helm-4"])
def test_a_password_of_one_s_own_renders_the_same_every_time(helm):
    own = {"existingSecret": "own", "passwordKey": "word"}
    values = {"store": {"type": "builtin", "builtin": own, "sealing": {"enabled": False}}}
    objects = helm.objects(values)
    assert objects == helm.objects(values)
    assert "Secret" not in kinds(objects)
    reference = {"secretKeyRef": {"name": "own", "key": "word"}}
    valkey = the(objects, "Deployment")["spec"]["template"]["spec"]
    assert valkey["initContainers"][0]["env"] == [{"name": "PASSWORD", "valueFrom": reference}]
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(valkey["containers"][0])
    service = the(objects, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "KVPLANE_STORE_PASSWORD", "valueFrom": reference} in service["env"]


def test_the_health_port_is_within_the_cluster_only():
    for kind in ("ClusterIP", "NodePort", "LoadBalancer"):
        objects = Helm4().objects({"service": {"type": kind}})
        ports = {}
        for one in objects:
            if one["kind"] == "Service":
                ports[one["metadata"]["name"]] = [port["name"] for port in one["spec"]["ports"]]
                assert one["spec"].get("clusterIP") == "None" or one["spec"]["type"] == kind
        assert ports == {"kvplane": ["grpc"], "kvplane-headless": ["grpc", "health"], "kvplane-metrics": ["metrics"]}


def test_the_name_to_which_clients_are_sent_resolves_while_a_pod_is_not_ready():
    objects = Helm4().objects({})
    workload = the(objects, "StatefulSet")
    service = the(objects, "Service", "-headless")
    assert workload["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["publishNotReadyAddresses"] is True
    env = workload["spec"]["template"]["spec"]["containers"][0]["env"]
    (advertise,) = (one["value"] for one in env if one["name"] == "KVPLANE_ADVERTISE")
    assert advertise.startswith(f"$(POD_NAME).{service['metadata']['name']}.")


@pytest.mark.parametrize(("mode", "name"), [("daemonset", "$(NODE_NAME)"), ("sidecar", "$(POD_NAME)")])
def test_a_worker_s_replica_begins_with_the_prefix_of_its_owner(mode, name):
    def replica(**values):
        specs = pod_specs(Helm4().objects({"gpuWorker": {"mode": mode}, **values}))
        (worker,) = (one for spec in specs for one in spec["containers"] if one["name"] == "worker-0")
        return next(word for word in worker["args"] if word.startswith("--replica="))

    assert replica() == f"--replica={name}"
    assert replica(access={"replicaPrefix": "acme/"}) == f"--replica=acme/{name}"


def worker_of(values):
    """The spec of the pod that has the worker of rank 0, and its container."""
    for spec in pod_specs(Helm4().objects({"gpuWorker": values})):
        for one in spec["containers"]:
            if one["name"] == "worker-0":
                return spec, one
    raise AssertionError("no worker")


def test_workers_have_the_tiers_of_the_values():
    _, bare = worker_of({"mode": "daemonset"})
    assert not any(word.startswith(("--host-mib", "--disk")) for word in bare["args"])
    folder = "/data/tiers"
    disk = {"type": "hostPath", "path": folder, "size": "2Ti"}
    resources = {"requests": {"memory": "80Gi"}, "limits": {"memory": "80Gi"}}
    spec, worker = worker_of(
        {"mode": "daemonset", "tiers": {"hostMemory": "64Gi", "disk": disk}, "resources": resources}
    )
    assert {f"--host-mib={64 << 10}", f"--disk={folder}", f"--disk-mib={2 << 20}"} <= set(worker["args"])
    assert {"name": "tiers", "mountPath": folder} in worker["volumeMounts"]
    assert {"name": "tiers", "hostPath": {"path": folder, "type": "DirectoryOrCreate"}} in spec["volumes"]
    (owner,) = spec["initContainers"]  # gives the folder to the user of workers
    assert folder in owner["args"]
    assert {"name": "tiers", "mountPath": folder} in owner["volumeMounts"]


@pytest.mark.parametrize("mode", ["daemonset", "sidecar"])
def test_a_claim_has_room_for_the_disk_tiers_of_all_ranks(mode):
    claim = {"type": "claim", "size": "100Gi", "storageClassName": "fast"}
    spec, worker = worker_of({"mode": mode, "ranks": 3, "tiers": {"disk": claim}})
    (volume,) = (one["ephemeral"] for one in spec["volumes"] if one["name"] == "tiers")
    asked = volume["volumeClaimTemplate"]["spec"]
    assert asked["resources"]["requests"]["storage"] == f"{300 << 10}Mi"
    assert asked["storageClassName"] == "fast"
    (mount,) = (one["mountPath"] for one in worker["volumeMounts"] if one["name"] == "tiers")
    assert f"--disk={mount}" in worker["args"]


def admits(policies, source, target, port):
    """Whether policies let a pod with labels `source` connect to one with labels `target` of the same namespace."""

    def selects(selector, labels):
        return selector.get("matchLabels", {}).items() <= labels.items()

    def allowed(direction, peer, one, other):
        chosen_by = [policy for policy in policies if selects(policy["podSelector"], one)]
        rules = [rule for one in chosen_by for rule in one[direction] if port in [p["port"] for p in rule["ports"]]]
        peers = [rule.get(peer, [{"podSelector": {}}]) for rule in rules]
        chosen = [entry["podSelector"] for entries in peers for entry in entries if "podSelector" in entry]
        return not chosen_by or any(selects(selector, other) for selector in chosen)

    return allowed("egress", "to", source, target) and allowed("ingress", "from", target, source)


def test_policies_admit_what_pods_of_a_release_need_and_nothing_else():
    peers = [{"namespaceSelector": {"matchLabels": {"engines": "true"}}}]
    policy = {"enabled": True, "clients": peers, "metricsClients": peers}
    router = {"enabled": True, "places": [{"name": "r", "service": "kvplane:7070"}]}
    values = {"gpuWorker": {"mode": "daemonset"}, "networkPolicy": policy, "router": router}
    objects = Helm3().objects({**values_of("ha"), **values})
    policies = [one["spec"] for one in objects if one["kind"] == "NetworkPolicy"]
    labels = {}
    for one in objects:
        if one["kind"] in ("StatefulSet", "Deployment", "DaemonSet", "Pod"):
            found = one.get("spec", {}).get("template", one)["metadata"]["labels"]
            labels[found["app.kubernetes.io/component"]] = found
    admitted = {
        (source, target, port)
        for source in labels
        for target in labels
        for port in ("grpc", "health", "valkey", "metrics")
        if admits(policies, labels[source], labels[target], port)
    }
    assert admitted == {
        ("service", "service", "grpc"),  # whether the owner of a replica is still there
        ("service", "valkey", "valkey"),
        ("worker", "service", "grpc"),
        ("test", "service", "grpc"),
        ("test", "service", "health"),
    }


def test_pods_are_replaced_and_probed_as_the_values_say():
    by_default = Helm4().objects({"gpuWorker": {"mode": "daemonset"}})
    assert "updateStrategy" not in the(by_default, "StatefulSet")["spec"]
    assert the(by_default, "DaemonSet")["spec"]["updateStrategy"] == {"type": "OnDelete"}
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"partition": 2}}
    probes = {"startup": {"failureThreshold": 600}, "readiness": {"successThreshold": 3}}
    values = {"updateStrategy": strategy, "probes": probes}
    workers = {"mode": "daemonset", "updateStrategy": {"type": "RollingUpdate"}}
    found = Helm4().objects({**values, "gpuWorker": workers})
    assert the(found, "StatefulSet")["spec"]["updateStrategy"] == strategy
    assert the(found, "DaemonSet")["spec"]["updateStrategy"]["type"] == "RollingUpdate"
    service = the(found, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    grpc = {"port": 7071, "service": "liveness"}
    assert service["startupProbe"] == {"grpc": grpc, "periodSeconds": 1, "failureThreshold": 600}
    assert service["livenessProbe"] == {"grpc": grpc, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6}
    assert service["readinessProbe"] == {
        "grpc": {"port": 7071, "service": "readiness"}, "periodSeconds": 5, "timeoutSeconds": 5, "successThreshold": 3,
    }  # fmt: skip


@pytest.mark.parametrize("helm", [Helm3(), Helm4()], ids=["helm-3.6.2", "helm-4"])
def test_given_annotations_labels_and_variables_are_where_the_values_say(helm):
    word, env = {"example.org/a": "1e3"}, [{"name": "A", "value": "no"}]
    worker = {"mode": "daemonset", "podAnnotations": {"w": "1"}, "podLabels": {"wl": "on"}, "extraEnv": env}
    values = {**values_of("ha"), "commonAnnotations": word, "commonLabels": {"all": "y"}, "gpuWorker": worker}
    values |= {"podAnnotations": {"s": "1"}, "podLabels": {"sl": "on"}, "extraEnv": [{"name": "B", "value": "off"}]}
    values |= {"service": {"annotations": {"lb": "true"}}, "serviceAccount": {"annotations": {"sa": "true"}}}
    objects = helm.objects(values)
    for one in objects:
        assert one["metadata"]["annotations"].items() >= word.items(), one["metadata"]["name"]
        assert one["metadata"]["labels"]["all"] == "y"
        own = {("Service", "kvplane"): "lb", ("ServiceAccount", "kvplane"): "sa"}
        named = own.get((one["kind"], one["metadata"]["name"]))
        assert {"lb", "sa"} & set(one["metadata"]["annotations"]) == ({named} if named else set())
    found = {}
    for kind in ("StatefulSet", "DaemonSet", "Deployment"):
        template = the(objects, kind)["spec"]["template"]
        keys = set(template["metadata"].get("annotations", {})) | set(template["metadata"]["labels"])
        variables = {one["name"] for one in template["spec"]["containers"][0].get("env", ())}
        found[kind] = keys & {"s", "sl", "w", "wl"}, variables & {"A", "B"}
    assert found == {
        "StatefulSet": ({"s", "sl"}, {"B"}), "DaemonSet": ({"w", "wl"}, {"A"}), "Deployment": (set(), set()),
    }  # fmt: skip


def test_routers_read_their_places_and_settings(tmp_path):
    objects = Helm4().objects(values_of("router"))
    (files,) = (one["data"] for one in objects if one["kind"] == "ConfigMap" and "places.yaml" in one["data"])
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    places = settings.load(tmp_path / "places.yaml")
    assert [place.name for place in places.places] == ["engine-0", "engine-1", "replica-0"]
    assert places.router.warm_up_s == 20
    loaded = load({}, {}, tmp_path / "router.yaml")
    check_keys(loaded)
    assert (loaded.config.listen, loaded.config.tls_cert) == ("0.0.0.0:9002", "/etc/kvplane/tls/tls.crt")
    spec = the(objects, "Deployment")["spec"]["template"]["spec"]
    mounts = {one["mountPath"] for one in spec["containers"][0]["volumeMounts"]}
    assert mounts == {f"/etc/kvplane/{name}" for name in ("router", "tls", "ca", "access")}
    assert {one["name"] for one in spec["volumes"]} == {"router", "tls", "ca", "access"}
    variables = {one["name"]: one["value"] for one in spec["containers"][0]["env"]}
    assert variables == {
        "KVPLANE_TLS_CA": "/etc/kvplane/ca/ca.crt", "KVPLANE_TOKEN_FILE": "/etc/kvplane/access/token",
    }  # fmt: skip


def test_routers_are_spread_and_few_are_away_at_a_time():
    objects = Helm4().objects(values_of("router"))
    budget, deployment = the(objects, "PodDisruptionBudget", "-router")["spec"], the(objects, "Deployment", "-router")
    pods = deployment["spec"]["template"]
    assert budget["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    assert budget["maxUnavailable"] == 1
    spread = pods["spec"]["topologySpreadConstraints"]
    assert [one["topologyKey"] for one in spread] == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
    assert all(one["labelSelector"] == deployment["spec"]["selector"] for one in spread)
    one = {"router": {"enabled": True, "replicas": 1, "places": [{"name": "e", "events": "tcp://e:1"}]}}
    assert "PodDisruptionBudget" not in kinds(Helm4().objects(one))


def test_a_router_may_call_the_ports_of_its_places_and_no_others():
    places = [
        {"name": "a", "events": "tcp://a:5557", "replay": "tcp://[::1]:5558", "endpoint": "http://a/v1:9"},
        {"name": "b", "events": "ipc:///b", "endpoint": "https://b.example/"},
        {"name": "c", "service": "c-0:7070,c-1:7072", "endpoint": "c:8000"},
    ]
    values = values_of("router")
    objects = Helm4().objects({**values, "router": {**values["router"], "places": places}})
    policy = the(objects, "NetworkPolicy", "-router")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    ports = [one["port"] for rule in policy["egress"] for one in rule["ports"]]
    assert sorted(ports) == sorted([53, 53, 80, 443, 5557, 5558, 7070, 7072, 8000])


def test_the_keys_of_a_store_outlive_the_release():
    (secret,) = (
        one for one in Helm4().objects({"store": {"type": "sqlite"}}) if one["metadata"]["name"].endswith("-store-keys")
    )
    assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_every_container_has_a_limit_of_memory():
    for spec in pod_specs(Helm4().objects({**values_of("ha"), "gpuWorker": {"mode": "daemonset"}})):
        assert all("memory" in one["resources"]["limits"] for one in spec["containers"])


def test_notes_warn_of_what_is_open():
    def notes(values):
        return next(text for path, text in Helm4().files(values).items() if path.endswith("NOTES.txt"))

    assert "has all permissions" in notes({})
    assert "reads metrics" in notes({})
    closed = {
        "networkPolicy": {"enabled": True, "clients": [{"podSelector": {}}], "metricsClients": [{"podSelector": {}}]}
    }
    certificates = {"tls": {"enabled": True, "existingSecret": "s", "clientAuth": "require"}}
    owners = {"auth": {"existingSecret": "s", "ownersKey": "o", "tokensKey": "t"}}
    for values in (closed, certificates, owners):
        assert "has all permissions" not in notes(values)
    assert "reads metrics" not in notes({"metrics": {"token": {"existingSecret": "s"}}})


def test_a_changed_configuration_changes_the_pods():
    def name_of(values):
        objects = Helm4().objects(values)
        volumes = the(objects, "StatefulSet")["spec"]["template"]["spec"]["volumes"]
        name = next(one["configMap"]["name"] for one in volumes if one["name"] == "config")
        assert name == the(objects, "ConfigMap")["metadata"]["name"]
        return name

    assert name_of({"config": {"lease_ms": 5000}}) != name_of({})
    assert name_of({"podLabels": {"a": "b"}}) == name_of({})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("helm", [Helm3(), Helm4()], ids=["helm-3.6.2", "helm-4"])
def test_any_release_name_gives_valid_object_names(name, helm):
    values = {**values_of("ha"), "gpuWorker": {"mode": "daemonset"}, "metrics": {"dashboard": {"enabled": True}}}
    objects = helm.objects(values, name)
    for one in objects:
        full = one["metadata"]["name"]
        assert DNS_LABEL.fullmatch(full), full
        assert one["kind"] != "StatefulSet" or len(full) <= 52
        labels = dict(one["metadata"]["labels"])
        if "template" in one.get("spec", {}):
            labels |= one["spec"]["template"]["metadata"]["labels"]
        assert all(isinstance(value, str) and LABEL_VALUE.fullmatch(value) for value in labels.values()), labels
        assert labels["app.kubernetes.io/instance"] == name
        assert [line for version in VERSIONS[::8] for line in complaints(one, version)] == []


def test_long_release_names_with_a_common_prefix_differ():
    full = {the(Helm4().objects({}, "r" * 52 + last), "StatefulSet")["metadata"]["name"] for last in "ab"}
    assert len(full) == 2


def test_operator_resources_need_their_api():
    values = values_of("everything")
    assert {"ServiceMonitor", "PrometheusRule"} <= set(kinds(Helm3().objects(values)))
    files = Helm4().files(values)
    assert not any("kind: ServiceMonitor" in text for text in files.values())
    (notes,) = (text for path, text in files.items() if path.endswith("NOTES.txt"))
    assert "monitoring.coreos.com/v1" in notes
    assert "WARNING" in notes


def test_alerts_and_dashboard_are_those_of_the_files():
    objects = Helm3().objects(values_of("everything"))
    assert the(objects, "PrometheusRule")["spec"] == yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    dashboard = the(objects, "ConfigMap", "-dashboard")["data"]["kvplane.json"]
    assert json.loads(dashboard) == json.loads((CHART / "files" / "dashboard.json").read_text())


def test_a_certificate_has_every_name_of_a_pod():
    objects = Helm3().objects(values_of("tls"))
    spec = the(objects, "Certificate")["spec"]
    container = the(objects, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    (advertise,) = (one["value"] for one in container["env"] if one["name"] == "KVPLANE_ADVERTISE")
    assert "*." + advertise.partition(".")[2].partition(":")[0] in spec["dnsNames"]
    assert "kvplane.caches.svc.cluster.local" in spec["dnsNames"]


def test_the_claims_of_a_driver_replace_the_runtime_class():
    spec = the(Helm3("1.31.0").objects(values_of("gpu-dra")), "DaemonSet")["spec"]["template"]["spec"]
    assert "runtimeClassName" not in spec
    assert spec["containers"][0]["resources"]["claims"] == [{"name": "gpus"}]
    spec = the(Helm3().objects(values_of("gpu-daemonset")), "DaemonSet")["spec"]["template"]["spec"]
    assert spec["runtimeClassName"] == "nvidia"
    assert [one["name"] for one in spec["containers"]] == ["worker-0", "worker-1"]
    assert "nvidia.com/gpu" not in json.dumps(spec["containers"])  # the engine requests it, or none would be free


@pytest.mark.parametrize(
    ("memory", "blocks", "log_mib"),
    [
        ("4Gi", 8_351_325, 256),
        ("1.5Gi", 2_758_919, 96),
        ("8G", 16_584_731, 256),
        ("2048Mi", 3_877_401, 128),
        (4 << 30, 8_351_325, 256),
        ("256Mi", 65_536, 16),
    ],
)
@pytest.mark.parametrize("helm", [Helm3(), Helm4()], ids=["helm-3.6.2", "helm-4"])
def test_the_limits_of_the_service_follow_from_the_memory_of_its_container(helm, memory, blocks, log_mib, tmp_path):
    objects = helm.objects({"resources": {"limits": {"memory": memory}}})
    container = the(objects, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    (variable,) = (one for one in container["env"] if one["name"] == "KVPLANE_MEMORY_BYTES")
    assert variable["valueFrom"] == {"resourceFieldRef": {"resource": "limits.memory"}}
    assert {"max_total_blocks", "log_bytes", "memory_bytes"}.isdisjoint(configuration(objects))
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(configuration(objects)))
    environment = {variable["name"]: str(bytes_of(container["resources"]["limits"]["memory"]))}
    loaded = load({}, environment, file).config
    assert (loaded.max_total_blocks, loaded.log_bytes) == (blocks, log_mib << 20)


def test_a_container_without_a_limit_of_memory_names_none():
    """A variable of the limit would have the memory of the whole node."""
    for limits in ({"memory": None}, None):
        objects = Helm4().objects({"resources": {"limits": limits}})
        container = the(objects, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
        assert "KVPLANE_MEMORY_BYTES" not in [one["name"] for one in container["env"]]


def test_a_given_number_of_blocks_is_kept(tmp_path):
    found = configuration(Helm4().objects({"config": {"max_total_blocks": 70_000}}))
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(found))
    assert load({}, {"KVPLANE_MEMORY_BYTES": str(4 << 30)}, file).config.max_total_blocks == 70_000


def test_the_token_of_metrics_is_mounted_and_named_to_the_monitor():
    objects = Helm3().objects(values_of("everything"))
    assert configuration(objects)["metrics_token_file"] == "/etc/kvplane/metrics/token"
    spec = the(objects, "StatefulSet")["spec"]["template"]["spec"]
    (volume,) = (one for one in spec["volumes"] if one["name"] == "metrics-token")
    items = [{"key": "bearer", "path": "token"}]
    assert volume["secret"] == {"secretName": "scrapes", "defaultMode": 0o440, "items": items}
    assert {"name": "metrics-token", "mountPath": "/etc/kvplane/metrics", "readOnly": True} in spec["containers"][0][
        "volumeMounts"
    ]
    (endpoint,) = the(objects, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["authorization"] == {"credentials": {"name": "scrapes", "key": "bearer"}}
    assert "metrics_token_file" not in configuration(Helm3().objects({}))


def test_processes_follow_each_other_by_the_names_of_their_pods():
    objects = Helm3().objects(values_of("ha"))
    pods = [f"kvplane-{number}.kvplane-headless.caches.svc.cluster.local:7070" for number in range(3)]
    assert configuration(objects)["peer_services"].split(",") == pods
    container = the(objects, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    (advertise,) = (one["value"] for one in container["env"] if one["name"] == "KVPLANE_ADVERTISE")
    assert advertise.replace("$(POD_NAME)", "kvplane-1") == pods[1]
    assert not {"peer_services_token", "peer_services_ca"} & set(configuration(objects))


def test_processes_present_token_and_certificate_to_each_other():
    values = values_of("tls")
    before = the(Helm3().objects(values), "Certificate")["spec"]["usages"]
    objects = Helm3().objects({**values, "peerServices": {"enabled": True, "existingSecret": "s", "key": "bearer"}})
    found = configuration(objects)
    assert found["peer_services_token"] == "/etc/kvplane/peers/token"
    assert found["peer_services_ca"] == "/etc/kvplane/tls/ca.crt"
    spec = the(objects, "StatefulSet")["spec"]["template"]["spec"]
    (volume,) = (one["secret"] for one in spec["volumes"] if one["name"] == "peers")
    assert (volume["secretName"], volume["items"]) == ("s", [{"key": "bearer", "path": "token"}])
    mounts = {one["name"]: one["mountPath"] for one in spec["containers"][0]["volumeMounts"]}
    assert (mounts["peers"], mounts["tls"]) == ("/etc/kvplane/peers", "/etc/kvplane/tls")
    assert the(objects, "Certificate")["spec"]["usages"] == [*before, "client auth"]


@pytest.mark.parametrize(("values", "is_said"), [({"replicas": 2}, True), (values_of("ha"), False), ({}, False)])
def test_notes_say_how_processes_share_what_is_cached(values, is_said):
    store = {"store": {"type": "builtin"}}
    (text,) = (text for path, text in Helm4().files({**store, **values}).items() if path.endswith("NOTES.txt"))
    assert ("peerServices.enabled=true" in text) == is_said
