"""Runs the pods of the manifests as processes of this machine: service, stores, workers and `helm test`."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

import kvplane
from kvplane import Allocate, Client, Content
from kvplane.base.errors import Unavailable
from kvplane.base.sources import LayerSource
from tests.helm.charts import Helm4, values_of
from tests.helm.pods import Machine, Pod, machine, secret
from tests.plan.layers import full, named, window
from tests.service.certificates import Authority
from tests.service.guarded import Guard
from tests.store.servers import redis_command, wait_until
from tests.worker.children import attach_once
from tests.worker.rig import FORKS

TOKENS = list(range(500, 540))
MODEL = kvplane.ModelSource(model="llama-3.1-8b", num_blocks=64, max_model_len=1008)
LAYERS = LayerSource(
    layers=named(f=(2, full()), w=(2, window())), num_blocks=64, max_model_len=256, max_batched_tokens=256
)
QUICK = {"drain": {"preStopSeconds": 1, "graceSeconds": 10}}


def rendered(*sets: str, **values: Any) -> list[dict[str, Any]]:
    given: dict[str, Any] = dict(QUICK)
    for name in sets:
        given |= values_of(name)
    return Helm4().objects({**given, **values})


def client_of(pod: Pod) -> Client:
    return kvplane.connect(f"{pod.ip}:7070,*")  # the machine gives pods addresses instead of names


def hit_after_a_round(client: Client, replica: str) -> int:
    """Allocate, free, and look up; returns the hit tokens."""
    client.allocate_slots(replica, Allocate("r", content=Content(token_ids=TOKENS)))
    client.free(replica, "r")
    return client.find_cache_hit(replica, Content(token_ids=TOKENS)).hit_tokens


def helm_test(node: Machine) -> str:
    """Run the chart's own test; returns its output."""
    pod = node.start("kvplane-test")
    assert pod.wait() == {"try": 0}, pod.said("try")
    return pod.said("try")


def test_default_values_serve_and_drain():
    with machine(rendered("default")) as node:
        pod = node.start("kvplane-0")
        pod.wait_ready()
        assert all(pod.is_well("kvplane", f"{name}Probe") for name in ("startup", "liveness", "readiness"))
        said = helm_test(node)
        assert "health: serving" in said
        assert "reflection: grpc.health.v1.Health" in said
        assert "32 of 33 tokens hit again" in said
        with client_of(pod) as client:
            client.register_replica("r", MODEL)
            session = client.session("r")
            endings: list[Any] = []
            thread = threading.Thread(target=lambda: endings.append(pod.terminate()))
            thread.start()
            wait_until(lambda: not pod.is_well("kvplane", "readinessProbe"), "the pod is taken out")
            assert pod.is_well("kvplane", "livenessProbe")  # the kubelet does not kill it during the drain
            with pytest.raises(Unavailable):
                client.register_replica("new", MODEL)
            step = kvplane.part_of(kvplane.NewsRow(0, tokens=TOKENS), kvplane.AdmitRow(0))
            assert session.apply(step).parts[0].admit_hit[0] == 0  # the open session is served to its end
            session.close()
            thread.join(60)
    (ending,) = endings
    assert (ending.codes, ending.killed) == ({"kvplane": 0}, [])
    assert 1 < ending.took_s < 10  # preStop, and then no longer than the session


def test_a_remaining_session_is_ended_before_the_pod_is_killed():
    with machine(rendered("default", drain={"preStopSeconds": 0, "graceSeconds": 1})) as node:
        pod = node.start("kvplane-0")
        pod.wait_ready()
        with client_of(pod) as client:
            client.register_replica("r", MODEL)
            session = client.session("r")
            ending = pod.terminate()
            session.close()
    assert (ending.codes, ending.killed) == ({"kvplane": 0}, [])
    assert 1 <= ending.took_s < pod.spec["terminationGracePeriodSeconds"]


def test_a_misspelled_key_ends_the_pod_and_names_the_nearest_one():
    objects = rendered("default")
    (config,) = (one for one in objects if one["kind"] == "ConfigMap")
    config["data"]["config.yaml"] += "leese_ms: 5\n"
    with machine(objects) as node:
        pod = node.start("kvplane-0")
        assert pod.wait() == {"kvplane": 2}
        assert "the most similar key is lease_ms" in pod.said("kvplane")


def test_a_volume_outlives_its_pod():
    with machine(rendered("default", store={"type": "sqlite"})) as node:
        pod = node.start("kvplane-0")
        pod.wait_ready()
        with client_of(pod) as client:
            client.register_replica("r", MODEL)
            assert hit_after_a_round(client, "r") == 32
        pod.terminate()
        pod = node.start("kvplane-0")
        pod.wait_ready()
        with client_of(pod) as client:
            assert [one.replica for one in client.list_replicas()] == ["r"]


def test_three_processes_share_the_built_in_store():
    redis_command()
    builtin = {"type": "builtin", "builtin": {"existingSecret": "own"}}
    password = secret("own", password='a "quoted" \\word')
    with machine(rendered("ha", store=builtin), password) as node:
        for name in ("kvplane-valkey-deployment", "kvplane-0", "kvplane-1", "kvplane-2"):
            node.start(name)
        for pod in node.pods:
            pod.wait_ready()
        store, first, *others = node.pods
        assert store.containers.keys() == {"valkey"}
        with client_of(first) as client:
            client.register_replica("r", MODEL)
            assert hit_after_a_round(client, "r") == 32
        for pod in others:  # redirect to kvplane-0 by its advertised name, which clients follow
            with client_of(pod) as client:
                wait_until(lambda client=client: owner_of(client) == "r", "the others know whose it is")
                assert client.find_cache_hit("r", Content(token_ids=TOKENS)).hit_tokens == 32
        helm_test(node)


def owner_of(client: Client) -> str:
    try:
        return client.describe_replica("r").replica
    except kvplane.NotFound:
        return ""


def guarded(node: Machine, folder: Path) -> kvplane.Tls:
    """Create the secrets of the set `tls`; returns the credentials of a client."""
    authority = Authority(folder)
    service = authority.issue("service", host=node.addresses["kvplane-0"])
    own = authority.issue("own")
    guard = Guard(folder)
    node.objects += [
        secret("kvplane-tls", ca_crt=read(authority.cert), tls_crt=read(service.cert), tls_key=read(service.key)),
        secret("kvplane-auth", owners=read(guard.owners_file), tokens=read(guard.tokens_file)),
        secret("kvplane-access", token="token-acme\n", tls_crt=read(own.cert), tls_key=read(own.key)),
    ]
    return kvplane.Tls(authority.cert, own.cert, own.key)


def test_unauthenticated_clients_are_refused(tmp_path):
    """TLS, client certificates and tokens: `helm test` passes with them, and is refused without any one of them."""
    with machine(rendered("tls")) as node:
        guarded(node, tmp_path)
        pod = node.start("kvplane-0")
        pod.wait_ready()
        said = helm_test(node)
        assert "32 of 33 tokens hit again" in said
        assert "reflection" not in said  # off, because clients must authenticate
        container = node.plans["kvplane-test"].spec["containers"][0]
        container["args"].append("--expect-refusal")
        for ours in ("KVPLANE_TOKEN_FILE",), ("KVPLANE_CERT_FILE", "KVPLANE_KEY_FILE"):
            container["env"] = [one for one in container["env"] if one["name"] not in ours]
            assert "an unauthenticated client is refused" in helm_test(node)
        assert pod.terminate().codes == {"kvplane": 0}


def read(path: str | Path) -> bytes:
    return Path(path).read_bytes()


def test_a_sidecar_holds_pages_for_an_engine_in_its_pod():
    values = {"gpuWorker": {"mode": "sidecar", "device": "cpu", "graceSeconds": 5}}
    with machine(rendered(**values)) as node:
        pod = node.start("kvplane-0")
        wait_until(lambda: pod.is_well("kvplane", "readinessProbe"), "the service is ready")
        assert not pod.is_well("worker-0", "readinessProbe")  # it waits for an engine to register the replica
        use_pages(pod, pod, "kvplane-0")
        ending = pod.terminate()
        assert ending.codes == {"kvplane": 0, "worker-0": 0}


def test_a_node_s_workers_hold_pages_for_engines_of_that_node():
    ours = {"runAsNonRoot": True, "runAsUser": os.getuid(), "runAsGroup": os.getgid()}
    worker = {"mode": "daemonset", "device": "cpu", "ranks": 2, "graceSeconds": 5}
    with machine(rendered(gpuWorker=worker, podSecurityContext=ours)) as node:
        service = node.start("kvplane-0")
        workers = node.start("kvplane-worker-daemonset")
        service.wait_ready()
        use_pages(service, workers, "node-1")
        assert workers.place("/run/kvplane").stat().st_mode & 0o777 == 0o700
        assert service.terminate().codes == {"kvplane": 0}
        assert all(process.poll() is None for process in workers.processes.values())  # pages outlive the service
        assert workers.terminate().codes == {"worker-0": 0, "worker-1": 0}


def test_a_worker_presents_its_credentials(tmp_path):
    worker = {"mode": "sidecar", "device": "cpu", "graceSeconds": 5}
    with machine(rendered("tls", gpuWorker=worker)) as node:
        tls = guarded(node, tmp_path)
        pod = node.start("kvplane-0")
        wait_until(lambda: pod.is_well("kvplane", "readinessProbe"), "the service is ready")
        with kvplane.connect(f"{pod.ip}:7070", tls=tls, token="token-acme") as client:
            client.register_replica("acme/kvplane-0", LAYERS)
            pod.wait_ready()
            (shown,) = client.describe_replica("acme/kvplane-0").workers
            assert shown.address == f"unix:{pod.place('/run/kvplane')}/rank-0/worker.sock"
        assert pod.terminate().codes == {"kvplane": 0, "worker-0": 0}


def use_pages(service: Pod, workers: Pod, replica: str) -> None:
    """An engine registers the replica, attaches to every rank, and gets blocks."""
    ranks = range(sum(name.startswith("worker-") for name in workers.containers))
    with client_of(service) as client:
        client.register_replica(replica, LAYERS, num_ranks=len(ranks))
        workers.wait_ready()
        assert [one.rank for one in client.describe_replica(replica).workers] == list(ranks)
        for rank in ranks:
            engine = FORKS.Process(target=attach_once, args=(workers.place(f"/run/kvplane/rank-{rank}"),))
            engine.start()
            engine.join()
            assert engine.exitcode == 0
        assert hit_after_a_round(client, replica) == 32


def test_a_probe_of_a_process_that_does_not_listen_fails():
    """Checks the runner: a pod whose process does not listen is not ready, and one that ends is reported."""
    objects = rendered("default")
    (workload,) = (one for one in objects if one["kind"] == "StatefulSet")
    container = workload["spec"]["template"]["spec"]["containers"][0]
    container["command"], container["args"] = ["sleep"], ["60"]
    with machine(objects) as node:
        pod = node.start("kvplane-0")
        assert not pod.is_well("kvplane", "livenessProbe")
    container["command"], container["args"] = ["python"], ["-c", "import sys; sys.exit('no port is free')"]
    with machine(objects) as node, pytest.raises(AssertionError, match="no port is free"):
        node.start("kvplane-0").wait_ready()
