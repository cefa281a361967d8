"""`kvplane doctor --kubernetes`: each reason for which pods do not start, as a cluster reports it through kubectl."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvplane_tools.cli.options import FAILED, UNAVAILABLE, WRONG_USE
from kvplane_tools.cli.query import kubernetes

SCRIPT = """#!/bin/sh
echo "$@" >> {folder}/calls
case "$*" in *events*) cat {folder}/events.json ;; *) cat {folder}/objects.json ;; esac
"""


def named(kind: str, name: str, owner: str = "", **content: Any) -> dict[str, Any]:
    """An object whose uid is its kind and name."""
    owners = [{"uid": owner}] if owner else []
    return {"kind": kind, "metadata": {"name": name, "uid": f"{kind}/{name}", "ownerReferences": owners}, **content}


def stateful(ready: int = 0, wanted: int = 1) -> dict[str, Any]:
    return named("StatefulSet", "kvplane", spec={"replicas": wanted}, status={"readyReplicas": ready})


def daemon(ready: int = 0, wanted: int = 1) -> dict[str, Any]:
    status = {"desiredNumberScheduled": wanted, "numberReady": ready}
    return named("DaemonSet", "kvplane-worker", spec={}, status=status)


def pod(containers=(), ready: str = "False", scheduled: str = "True", said: str = "", **spec: Any) -> dict[str, Any]:
    conditions = [
        {"type": "PodScheduled", "status": scheduled, "message": said},
        {"type": "Ready", "status": ready, "message": "containers with unready status: [kvplane]"},
    ]
    status = {"phase": "Pending", "conditions": conditions, "containerStatuses": list(containers)}
    return named("Pod", "kvplane-0", spec=spec, status=status)


def container(reason: str = "", message: str = "", ended: tuple[str, int] | None = None) -> dict[str, Any]:
    last = {"terminated": {"reason": ended[0], "exitCode": ended[1]}} if ended else {}
    state = {"waiting": {"reason": reason, "message": message}} if reason else {"running": {}}
    return {"name": "kvplane", "state": state, "lastState": last}


def event(of: str, reason: str, message: str, at: str = "2026-11-30T10:00:00Z", **more: Any) -> dict[str, Any]:
    kind, name = of.split("/")
    involved = {"kind": kind, "name": name, "uid": of}
    return {"involvedObject": involved, "reason": reason, "message": message, "lastTimestamp": at, **more}


REFUSED = 'create Pod kvplane-0 in StatefulSet kvplane failed error: pods "kvplane-0" is forbidden: '
CASES = {
    "runtime class": (
        [daemon()],
        [event("DaemonSet/kvplane-worker", "FailedCreate", 'pod rejected: RuntimeClass "nvidia" not found')],
        "install the GPU operator",
    ),
    "pod security": (
        [stateful()],
        [event("StatefulSet/kvplane", "FailedCreate", REFUSED + 'violates PodSecurity "restricted:latest": hostPath')],
        "pod-security.kubernetes.io/enforce",
    ),
    "quota": (
        [stateful()],
        [event("StatefulSet/kvplane", "FailedCreate", REFUSED + "exceeded quota: small, requested: cpu=1")],
        "ResourceQuota",
    ),
    "quota of a deployment's replica set": (
        [
            named("Deployment", "kvplane-router", spec={"replicas": 2}, status={}),
            named("ReplicaSet", "kvplane-router-5", owner="Deployment/kvplane-router"),
        ],
        [event("ReplicaSet/kvplane-router-5", "FailedCreate", "forbidden: exceeded quota: small")],
        "ResourceQuota",
    ),
    "secret of an environment variable": (
        [stateful(), pod([container("CreateContainerConfigError", 'secret "kvplane-auth" not found')])],
        [],
        "create it in this namespace",
    ),
    "secret of a volume": (
        [stateful(), pod([container("ContainerCreating")])],
        [event("Pod/kvplane-0", "FailedMount", 'MountVolume.SetUp failed for "tls" : secret "kvplane-tls" not found')],
        "create it in this namespace",
    ),
    "image": (
        [stateful(), pod([container("ImagePullBackOff", 'Back-off pulling image "kvplane/service:9"')])],
        [],
        "image.repository",
    ),
    "no GPU": (
        [daemon(), pod(scheduled="False", said="0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")],
        [],
        "device plugin",
    ),
    "taint": (
        [stateful(), pod(scheduled="False", said="0/1 nodes are available: 1 node(s) had untolerated taint {a: b}.")],
        [],
        "tolerations",
    ),
    "memory of nodes": (
        [stateful(), pod(scheduled="False", said="0/1 nodes are available: 1 Insufficient memory.")],
        [],
        "lower `resources`",
    ),
    "volume": (
        [
            stateful(),
            pod(
                scheduled="False",
                said="0/1 nodes are available.",
                volumes=[{"persistentVolumeClaim": {"claimName": "store-kvplane-0"}}, {"emptyDir": {}}],
            ),
        ],
        [
            event(
                "PersistentVolumeClaim/store-kvplane-0",
                "ProvisioningFailed",
                'storageclass.storage.k8s.io "fast" not found',
            )
        ],
        "storageClassName",
    ),
    "memory of a container": (
        [stateful(), pod([container("CrashLoopBackOff", "back-off 5m0s", ("OOMKilled", 137))])],
        [],
        "resources.limits.memory",
    ),
    "memory of a container that runs again": (
        [stateful(1), pod([container(ended=("OOMKilled", 137))], ready="True")],
        [],
        "resources.limits.memory",
    ),
    "a process that ends": (
        [stateful(), pod([container("CrashLoopBackOff", "back-off 5m0s", ("Error", 2))])],
        [],
        "kubectl logs --previous kvplane-0",
    ),
    "a probe that fails": (
        [stateful(), pod([container()])],
        [event("Pod/kvplane-0", "Unhealthy", "Readiness probe failed: draining")],
        "kubectl describe pod kvplane-0",
    ),
    "a node selector": ([daemon(wanted=0)], [], "gpuWorker.nodeSelector"),
    "no release": ([], [], "--namespace"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_reason_is_named_with_its_remedy(case):
    objects, events, remedy = CASES[case]
    faults = [one for one in kubernetes.findings(objects, events) if not one.is_well]
    assert any(remedy in one.remedy for one in faults), faults


def test_a_release_that_runs_is_well_also_where_it_once_was_not():
    objects = [stateful(1), daemon(2, 2), pod([container()], ready="True")]
    events = [
        event("StatefulSet/kvplane", "FailedCreate", "exceeded quota: small"),
        event("Pod/kvplane-0", "FailedMount", 'secret "kvplane-tls" not found'),
    ]
    found = list(kubernetes.findings(objects, events))
    assert [(one.check, one.is_well) for one in found] == [
        ("statefulset/kvplane", True),
        ("daemonset/kvplane-worker", True),
    ]
    assert [one.seen for one in found] == ["1 of 1 pods ready", "2 of 2 pods ready"]


def test_the_latest_event_of_an_object_counts_and_none_of_an_earlier_one_of_the_same_name():
    late = {"series": {"lastObservedTime": "2026-11-30T12:00:00.000000Z"}, "lastTimestamp": None}
    events = [
        {**event("StatefulSet/kvplane", "FailedCreate", "exceeded quota: small"), **late},
        event("StatefulSet/kvplane", "FailedCreate", 'serviceaccount "old" not found', at="2026-11-30T11:00:00Z"),
        {
            **event("StatefulSet/kvplane", "FailedCreate", "RuntimeClass", at="2026-11-30T13:00:00Z"),
            "involvedObject": {},
        },
    ]
    (found,) = kubernetes.findings([stateful()], events)
    assert found.seen == "0 of 1 pods ready: FailedCreate: exceeded quota: small"


@pytest.mark.parametrize("damage", [None, [], "text", 3, {"status": None}, {"metadata": []}])
def test_objects_of_any_form_are_read(damage):
    objects = [{**stateful(), "status": damage}, {**pod(), "metadata": {"name": damage}}, {**pod(), "status": damage}]
    assert list(kubernetes.findings(objects, [{"involvedObject": damage}, {"series": damage}]))


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A kubectl that answers from files."""

    def answer(objects: object, events: object = (), script: str = SCRIPT) -> Path:
        (tmp_path / "objects.json").write_text(json.dumps({"items": objects}))
        (tmp_path / "events.json").write_text(json.dumps({"items": list(events)}))  # type: ignore[call-overload]
        kubectl = tmp_path / "kubectl"
        kubectl.write_text(script.format(folder=tmp_path))
        kubectl.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return tmp_path

    return answer


def test_the_command_queries_a_namespace_and_prints_remedies(cluster, kvplane):
    objects, events, remedy = CASES["quota"]
    folder = cluster(objects, events)
    code, out, _ = kvplane("doctor", "--kubernetes", "-n", "models", "--kube-context", "one")
    assert code == FAILED
    assert "statefulset/kvplane  FAULT" in out
    assert remedy in out
    calls = (folder / "calls").read_text().splitlines()
    assert len(calls) == 2
    assert all(call.startswith("--namespace=models --context=one get ") for call in calls)


def test_the_command_is_content_with_a_release_that_runs(cluster, kvplane):
    cluster([stateful(1)])
    code, out, _ = kvplane("doctor", "--kubernetes", "-o", "json")
    assert code == 0
    assert json.loads(out)[0]["is_well"] is True


def test_text_of_the_cluster_is_printed_escaped(cluster, kvplane):
    cluster([stateful()], [event("StatefulSet/kvplane", "FailedCreate", "\x1b]0;gone\x07")])
    _, out, _ = kvplane("doctor", "--kubernetes")
    assert "\x1b" not in out
    assert "gone" in out


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("#!/bin/sh\necho 'Error from server (Forbidden): pods is forbidden' >&2\nexit 1\n", "Forbidden"),
        ("#!/bin/sh\necho nothing\n", "no list of objects"),
        ("#!/bin/sh\necho '{{\"items\": 3}}'\n", "no list of objects"),
        (
            "#!/bin/sh\nwhile :; do echo 0123456789012345678901234567890123456789; done\n",
            "no list of objects",
        ),
    ],
    ids=["forbidden", "no JSON", "no list", "endless"],
)
def test_a_cluster_that_does_not_answer_is_named(cluster, kvplane, monkeypatch, script, said):
    monkeypatch.setattr(kubernetes, "MAX_BYTES", 1 << 16)
    cluster([], script=script)
    found, _, errors = kvplane("doctor", "--kubernetes")
    assert found == UNAVAILABLE
    assert said in errors


def test_a_machine_without_kubectl_is_named(tmp_path, kvplane, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, errors = kvplane("doctor", "--kubernetes")
    assert (code, "install kubectl" in errors) == (FAILED, True)


def test_a_kubectl_that_hangs_is_ended(cluster, kvplane, monkeypatch):
    monkeypatch.setattr(kubernetes, "TIMEOUT_S", -4.8)  # 0.2 s
    cluster([], script="#!/bin/sh\nexec sleep 600\n")
    assert kvplane("doctor", "--kubernetes")[0] == UNAVAILABLE


@pytest.mark.parametrize(
    "arguments",
    [("--kubernetes", "-n", "--all"), ("--kubernetes", "-n", "A"), ("-n", "models"), ("--kube-context", "one")],
)
def test_wrong_options_are_refused(kvplane, arguments):
    assert kvplane("doctor", *arguments)[0] == WRONG_USE
