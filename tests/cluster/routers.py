"""Routers that follow a replica of the service, and answer where a prompt hits."""

from __future__ import annotations

import json

from tests.cluster.cluster import Failed, Object, Space, merged, wait_until
from tests.cluster.load import QUICK, Engines
from tests.cluster.programs import Program, counts_of
from tests.cluster.runs import Run

ROUTER = "app.kubernetes.io/component=router"
PROBE = "probe"


def run_routers(run: Run) -> None:
    """Two routers follow one engine's replica; each claims for a prompt what the service finds."""
    with run.space("router") as space:
        with run.row("routers follow a replica and answer", space) as seen:
            service = f"kvplane.{space.name}.svc.cluster.local:7070,*.kvplane-headless.{space.name}.svc.cluster.local"
            place: Object = {"name": "engine-0", "model": "m", "service": service, "endpoint": "http://engine-0:8000"}
            space.install(merged(QUICK, {"router": {"enabled": True, "replicas": 2, "places": [place]}}))
            engines = Engines(space, 1)
            engines.start()
            space.apply(Program(PROBE, run.cluster.images.service, ("sleep", "3600")).pod)
            space.ready("app=kvplane-cluster-test", 2)
            tokens = prompt_of(engines)
            claims = [claim(space, router, tokens) for router in addresses_of(space)]
            expected = found(space, service, tokens)
            if set(claims) != {expected} or not expected:
                raise Failed(f"routers claim {claims} tokens, the service finds {expected}")
            seen.text = (
                f"{len(claims)} routers claim {expected} of {tokens.count(',') + 1} tokens, as the service finds"
            )
        with run.row("  a router killed, the Service answers", space) as seen:
            space.kubectl("delete", "pod", f"--selector={ROUTER}", "--force", "--grace-period=0", limit_s=60)
            space.ready(ROUTER, 2)
            claims = [claim(space, f"kvplane-router.{space.name}:9002", tokens)]
            if claims != [expected]:
                raise Failed(f"after its restart a router claims {claims} tokens, the service finds {expected}")
            engines.space.execute(engines.names[0], "python", "-c", "import os; os.kill(1, 12)")
            engines.go_on(5)
            seen.text = f"it claims {expected} tokens again"


def prompt_of(engines: Engines) -> str:
    """Let the engine rest; returns the tokens of the request that ended last, which its pages have."""
    name, kept = engines.names[0], [list[int]()]
    engines.space.execute(name, "python", "-c", "import os; os.kill(1, 10)")

    def rests() -> bool:
        kept[0] = counts_of(engines.space, name).get("latest", [])
        return bool(kept[0])

    wait_until(rests, f"{name} rests", 30)
    return ",".join(map(str, kept[0]))


def addresses_of(space: Space) -> list[str]:
    return [f"{pod['status']['podIP']}:9002" for pod in space.pods(ROUTER)]


def claim(space: Space, router: str, tokens: str) -> int:
    """Tokens that a router says the engine hits, once it follows it."""
    hit = [0]

    def is_answered() -> bool:
        command = ("kvplane", "fleet", "score", "--router", router, "--model", "m", "--tokens", tokens, "-o", "json")
        hit[0] = json.loads(space.execute(PROBE, *command))["places"][0]["hit_tokens"]
        return hit[0] > 0

    wait_until(is_answered, f"router {router} claims a hit", 60)
    return hit[0]


def found(space: Space, service: str, tokens: str) -> int:
    """Tokens that the service finds on the device of the engine."""
    command = ("kvplane", "lookup", "engine-0", "--service", service, "--tokens", tokens, "-o", "json")
    return int(json.loads(space.execute(PROBE, *command))["hits"][0]["hit_tokens"])
