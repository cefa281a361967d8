"""Every set of values of the chart in a namespace of its own: installed as far as the cluster permits, and tested."""

from __future__ import annotations

import secrets
import shlex
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvplane_service.auth.tokens import line_of
from tests.cluster.certificates import Authority
from tests.cluster.cluster import (
    CHART,
    Object,
    Space,
    merged,
    named,
    secret,
    values_of,
    wait_until,
)
from tests.cluster.load import addresses
from tests.cluster.programs import add_programs, container_of, script, volume
from tests.cluster.runs import Run
from tests.cluster.workers import (
    CPU,
    NO_GPU,
    RUN_DIR,
    WORKER,
    Life,
    counts_in,
    engine_life,
    text_of,
    worker_pods,
)

TOKEN = "token-acme"
OWNERS = 'acme: {replicas: ["acme/*"], domains: [""]}\n'


@dataclass(frozen=True)
class Fit:
    """How a set of values fits a cluster that lacks what it names.

    Attributes:
        values: laid over the set.
        left_out: what is then not as in the set.
        before: makes what the set needs in its namespace; returns further values.
        enforce: the Pod Security Standard of the namespace.
        after: what its workers do; returns what was seen. None = it has no worker.
    """

    values: Object = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    before: Callable[[Space], Object] | None = None
    enforce: str = "restricted"
    after: Callable[[Space], str] | None = None


def tls_secrets(space: Space, *names: str) -> None:
    """Secrets of certificates by one authority, with a token: for the service, its clients, and both."""
    end = f"kvplane.{space.name}.svc.cluster.local"
    pods = f"*.kvplane-headless.{space.name}.svc.cluster.local"
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        pair = authority.issue_for([end, pods, f"redis.{space.name}.svc.cluster.local", "localhost"])
        own = authority.issue_for(["own"])
        ca = authority.certificate
    for name in names:
        space.apply(secret(name, ca_crt=ca, tls_crt=pair.certificate, tls_key=pair.key))
    space.apply(
        secret("kvplane-access", token=TOKEN, tls_crt=own.certificate, tls_key=own.key),
        secret("own", token=TOKEN),
        secret("kvplane-auth", owners=OWNERS, tokens=f"{line_of(TOKEN, 'acme')}\n"),
    )


def for_tls(space: Space) -> Object:
    tls_secrets(space, "kvplane-tls")
    return {"tls": {"existingSecret": "kvplane-tls", "certManager": {"enabled": False, "issuerRef": {"name": ""}}}}


def for_router(space: Space) -> Object:
    tls_secrets(space, "certificate")
    return {}


def for_redis(space: Space) -> Object:
    """A Valkey that is called by TLS alone, with a user."""
    tls_secrets(space, "redis-tls")
    password = secrets.token_hex(12)
    keys = secrets.token_hex(32)
    ca = space.cluster.get(space.name, "secret", "redis-tls")["data"]["ca.crt"]
    space.apply(
        secret("kvplane-store-keys", keys_txt=f"{keys}\n"),
        {**named("Secret", "redis"), "stringData": {"user": "cache", "password": password}, "data": {"ca.pem": ca}},
        named("Service", "redis", spec={"selector": {"app": "redis"}, "ports": [{"port": 6380}]}),
        redis_pod(space, password),
    )
    space.ready("app=redis", 1, 90)
    return {"store": {"external": {"url": f"rediss://redis.{space.name}.svc.cluster.local:6380/2"}}}


def redis_pod(space: Space, password: str) -> Object:
    """A pod of the store's image, or of the chart's default."""
    image = space.cluster.images.store
    reference = image.reference if image else "docker.io/valkey/valkey:8.1-alpine"
    command = ["valkey-server", "--port", "0", "--tls-port", "6380", "--tls-auth-clients", "no", "--save", ""]
    files = {"--tls-cert-file": "tls.crt", "--tls-key-file": "tls.key", "--tls-ca-cert-file": "ca.crt"}
    command += [word for option, file in files.items() for word in (option, f"/tls/{file}")]
    command += ["--dir", "/data", "--user", "cache", "on", f">{password}", "~*", "&*", "+@all"]
    container = {
        "name": "redis",
        "image": reference,
        "command": command,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "readinessProbe": {"tcpSocket": {"port": 6380}, "periodSeconds": 1},
        "volumeMounts": [{"name": "tls", "mountPath": "/tls"}, {"name": "data", "mountPath": "/data"}],
    }
    identity = {"runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001}
    spec = {
        "securityContext": {**identity, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "tls", "secret": {"secretName": "redis-tls"}}, {"name": "data", "emptyDir": {}}],
    }
    return named("Pod", "redis", labels={"app": "redis"}, spec=spec)


def for_sidecar(space: Space) -> Object:
    """The engine's container is one of this test's, in the worker's image."""
    add_programs(space)
    image = space.cluster.images.worker
    assert image is not None
    works = shlex.join(script("paged", "127.0.0.1:7070", "kvplane-0", "/run/kvplane/rank-0"))
    mounts = [*values_of("gpu-sidecar")["extraContainers"][0]["volumeMounts"]]
    mounts += [{"name": "programs", "mountPath": "/programs"}, {"name": "tmp", "mountPath": "/var/tmp"}]
    engine = container_of("engine", image, ["sh", "-c", f"{works} && exec sleep 3600"], mounts)
    return {"extraContainers": [engine], "extraVolumes": [volume()]}


def after_sidecar(space: Space) -> str:
    def is_done() -> bool:
        return "{" in space.logs("kvplane-0", "--container=engine")

    wait_until(is_done, "the engine in the service's pod has answered", 180)
    return text_of(counts_in(space.logs("kvplane-0", "--container=engine")))


def after_daemonset(space: Space) -> str:
    add_programs(space)
    counts = engine_life(space, Life("engine", worker_pods(space)[0]["spec"]["nodeName"]))
    space.ready(WORKER, len(worker_pods(space)))
    return text_of(counts)


def after_tiers(space: Space) -> str:
    """The workers wait for a replica with tiers, without an error."""
    names = [pod["metadata"]["name"] for pod in worker_pods(space)]

    def are_running() -> bool:
        found = [one for pod in space.pods(WORKER) for one in pod["status"].get("containerStatuses", ())]
        return bool(found) and all("running" in one["state"] and not one["restartCount"] for one in found)

    wait_until(are_running, f"the containers of {names} run", 90)
    return f"{len(names)} pods with 2 ranks run"


ON_NODES: Object = {"gpuWorker": {"device": "cpu", "graceSeconds": 5, "runDir": RUN_DIR}}
SMALL_TIERS: Object = {
    **ON_NODES["gpuWorker"],
    "tiers": {"hostMemory": "64Mi", "disk": {"size": "64Mi", "path": "/var/lib/kvplane-cluster-test"}},
    "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
}
FITS: Mapping[str, Fit] = {
    "tls": Fit(before=for_tls, left_out=("cert-manager: the certificate is a Secret of this test",)),
    "external-redis": Fit(before=for_redis, left_out=("the Redis is a Valkey of this test, in the same namespace",)),
    "router": Fit(before=for_router, left_out=("engines: the places of the set are not there",)),
    "gpu-daemonset": Fit(ON_NODES, (NO_GPU,), None, "privileged", after_daemonset),
    "gpu-tiers": Fit(
        {"gpuWorker": SMALL_TIERS}, (NO_GPU, "tiers of 64 MiB, and no engine"), None, "privileged", after_tiers
    ),
    "gpu-sidecar": Fit(CPU, (NO_GPU,), for_sidecar, "restricted", after_sidecar),
}
# Sets that no cluster can run as they are, for what they name: the server checks their objects.
CHECKED = {
    "everything": "an image by a made-up digest, scheduler `other`, runtime class `gvisor`, Sentinels outside",
    "gpu-dra": "claims of a GPU driver's DeviceClass",
}


def run_install(run: Run, name: str) -> None:
    """The row of a set."""
    if name in CHECKED:
        check_by_server(run, name)
    elif name == "gpu-workers":
        install_apart(run)
    else:
        install(run, name, FITS.get(name, Fit()))


def install(run: Run, name: str, fit: Fit) -> None:
    with run.space(f"set-{name}", fit.enforce) as space, run.row(f"install: {name}", space) as seen:
        seen.left_out += fit.left_out
        if fit.after and run.cluster.images.worker is None:
            seen.left_out.append("workers: WORKER_IMAGE is not stated")
            return
        more = fit.before(space) if fit.before else {}
        values = merged(merged(values_of(name), fit.values), more)
        space.install(values)
        space.test()
        seen.text = "installed, helm test passed"
        if fit.after:
            seen.text += f"; {fit.after(space)}"
        space.cluster.helm("uninstall", "kvplane", f"--namespace={space.name}", "--timeout=3m")


def install_apart(run: Run) -> None:
    """Workers of a release of their own, of a service with TLS and tokens in another namespace."""
    with (
        run.space("set-gpu-workers-service") as caches,
        run.space("set-gpu-workers", "privileged") as space,
        run.row("install: gpu-workers", caches, space) as seen,
    ):
        seen.left_out.append(NO_GPU)
        if run.cluster.images.worker is None:
            seen.left_out.append("all of it: WORKER_IMAGE is not stated")
            return
        tls_secrets(caches, "kvplane-tls")
        access = {"existingSecret": "kvplane-access", "tokenKey": "token", "replicaPrefix": "acme/"}
        auth = {"existingSecret": "kvplane-auth", "ownersKey": "owners", "tokensKey": "tokens"}
        tls = {"enabled": True, "existingSecret": "kvplane-tls"}
        caches.install({"tls": tls, "auth": auth, "access": access})
        caches.test()
        ca = run.cluster.get(caches.name, "secret", "kvplane-tls")["data"]["ca.crt"]
        space.apply({**named("Secret", "kvplane-ca"), "data": {"ca.crt": ca}}, secret("kvplane-access", token=TOKEN))
        workers = {"gpuWorker": {"service": addresses(caches), "ranks": 2, "runDir": RUN_DIR}}
        space.install(merged(merged(values_of("gpu-workers"), CPU), workers), release="workers")
        add_programs(space)
        life = Life("engine", worker_pods(space)[0]["spec"]["nodeName"], prefix="acme/", service=addresses(caches))
        seen.text = f"installed, helm test passed; {text_of(engine_life(space, life))}"


def check_by_server(run: Run, name: str) -> None:
    """The server takes every object of a set, strictly, and keeps none."""
    with run.space(f"set-{name}", "privileged") as space, run.row(f"install: {name}", space) as seen:
        where = (f"--namespace={space.name}", f"--kube-version={run.found.version}", "--no-hooks")
        text = space.cluster.helm("template", "kvplane", str(CHART), *where, values=values_of(name))
        said = space.kubectl("apply", "--dry-run=server", "--validate=strict", "--filename=-", given=text)
        seen.text = f"the server takes its {len(said.splitlines())} objects, strictly"
        seen.left_out.append(f"it is not started: {CHECKED[name]}")
