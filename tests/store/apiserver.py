"""An API server that has one Lease, as small as that permits, with every answer that the API's contract allows.

It follows Kubernetes: an update states uid and resourceVersion, or conflicts; one without a resourceVersion is invalid,
and creates what does not exist, whatever resourceVersion it states; RBAC permits verbs for one name. TLS, and tokens.
"""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kvplane_service.store.json_api import Endpoint

NAMESPACE, NAME = "serving", "kvplane-owners"
Hook = Callable[[str], tuple[int, dict[str, str], Any] | None]


@dataclass
class State:
    """What the server has, and how it misbehaves.

    Attributes:
        lease: the Lease, None if there is none.
        tokens: bearer tokens that it accepts.
        verbs: what the role of the service account permits for the Lease.
        namespace, name: of the Lease.
        before: returns an answer instead of the call, by its method; None: the call is carried out.
        loses: number of answers that are lost after the call took effect.
        slow_s: pause before each answer.
        calls: number of calls by method.
    """

    lease: dict[str, Any] | None = None
    tokens: set[str] = field(default_factory=lambda: {"first"})
    verbs: set[str] = field(default_factory=lambda: {"get", "create", "update"})
    namespace: str = NAMESPACE
    name: str = NAME
    before: Hook = lambda method: None
    loses: int = 0
    slow_s: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)
    revision: int = 100
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, method: str, path: str, token: str, body: Any) -> tuple[int, dict[str, str], Any]:
        with self.lock:
            self.calls[method] += 1
            if path != f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases/{self.name}":
                return failure(404, "NotFound", "no such path")
            if token not in self.tokens:
                return failure(401, "Unauthorized", "Unauthorized")
            if hooked := self.before(method):
                return hooked
            if method == "GET":
                return self._get()
            return self._put(body) if method == "PUT" else failure(405, "MethodNotAllowed", method)

    def _get(self) -> tuple[int, dict[str, str], Any]:
        if "get" not in self.verbs:
            return forbidden("get")
        if self.lease is None:
            return failure(404, "NotFound", f"leases {self.name} not found")
        return 200, {}, self.lease

    def _put(self, body: Any) -> tuple[int, dict[str, str], Any]:
        if "update" not in self.verbs:
            return forbidden("update")
        metadata = body["metadata"]
        if (metadata["name"], metadata["namespace"]) != (self.name, self.namespace) or body["kind"] != "Lease":
            return failure(400, "BadRequest", "the name of the object does not match the name on the URL")
        if sum(len(key) + len(value) for key, value in metadata.get("annotations", {}).items()) > 256 << 10:
            return failure(422, "Invalid", "metadata.annotations: Too long: may not be more than 262144 bytes")
        found = {} if self.lease is None else self.lease["metadata"]
        if metadata.get("uid", found.get("uid")) != found.get("uid"):
            return failure(409, "Conflict", "Precondition failed: UID in precondition")
        if self.lease is None and "create" not in self.verbs:
            return forbidden("create")
        if self.lease is not None and not metadata.get("resourceVersion"):
            return failure(422, "Invalid", "metadata.resourceVersion: must be specified for an update")
        if self.lease is not None and metadata["resourceVersion"] != found["resourceVersion"]:
            return failure(409, "Conflict", "the object has been modified")
        created = self.lease is None
        self.revision += 1
        own = {"uid": f"uid-{self.revision}"} if created else {"uid": found["uid"]}
        self.lease = {**body, "metadata": {**metadata, **own, "resourceVersion": str(self.revision)}}
        return 201 if created else 200, {}, self.lease


def failure(status: int, reason: str, message: str, **headers: str) -> tuple[int, dict[str, str], Any]:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return status, names, {"kind": "Status", "status": "Failure", "reason": reason, "message": message, "code": status}


def forbidden(verb: str) -> tuple[int, dict[str, str], Any]:
    who = "system:serviceaccount:serving:kvplane"
    what = f"leases.coordination.k8s.io {NAME} is forbidden: User {who} cannot {verb} it"
    return failure(403, "Forbidden", what)


class _Handler(BaseHTTPRequestHandler):
    state: State

    def do_GET(self) -> None:
        self._do(None)

    def do_PUT(self) -> None:
        self._do(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _do(self, body: Any) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        status, headers, content = self.state.answer(self.command, self.path, token, body)
        if self.state.loses and self.command == "PUT":
            self.state.loses -= 1
            self.connection.close()
            return
        time.sleep(self.state.slow_s)
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        with contextlib.suppress(OSError):  # the caller has given up
            self.send_response(status)
            for name, value in {"Content-Length": str(len(raw)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        """Nothing: thousands of calls."""


@contextlib.contextmanager
def serving(folder: Path, certificates: Path, host: str = "127.0.0.1") -> Iterator[tuple[State, Endpoint]]:
    """A server with these certificates (`servers.make_certificates`), and how a pod reaches it."""
    state = State()
    handler = type("Handler", (_Handler,), {"state": state})
    server = ThreadingHTTPServer((host, 0), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a handshake that the client refuses
    token = folder / "token"
    token.write_text("first\n")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    url = f"https://{host}:{server.server_address[1]}"
    try:
        yield state, Endpoint(url, ca=str(certificates / "ca.pem"), token=str(token))
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
