"""Where the services of a fleet keep the index and agree on owners, as servers that can be killed, stopped and lost."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.fleet.network import INDEX, TABLE, Network
from tests.store import apiserver, etcd_server, servers

OPEN = ("--protected-mode", "no")  # without a password, to other hosts
UNREPLICATED_S = 0.5  # what a failover loses


class Index:
    """A Redis primary and its replica on one host; a failover gives the replica the address of the primary."""

    def __init__(self, folder: Path, network: Network) -> None:
        self._folder, self._lives, self._network = folder, 0, network
        with self.here():
            self.primary = servers.Server(folder / "0", *OPEN)
            self._follow()
        self.address = f"{network.host(INDEX)}:{self.primary.port}"

    def here(self) -> AbstractContextManager[None]:
        """Be on the host inside the block."""
        return self._network.inside(INDEX)

    def _follow(self) -> None:
        self._lives += 1
        at = ("--replicaof", "127.0.0.1", str(self.primary.port))
        self.replica = servers.Server(self._folder / str(self._lives), *OPEN, *at)
        servers.wait_until(self._is_synchronous, "the replica follows")

    def _is_synchronous(self) -> bool:
        with self.replica.client() as client:
            return bool(client.info("replication").get("master_link_status") == "up")

    def fail_over(self) -> None:
        """Kill the primary before it replicates its latest writes; its replica takes its place, without them."""
        with self.here():
            with self.replica.client() as client:
                client.replicaof("NO", "ONE")
                time.sleep(UNREPLICATED_S)
                self.primary.kill()
                client.config_set("port", self.primary.port)
            self.replica.port, self.primary = self.primary.port, self.replica
            self._follow()

    def stop(self, stopped: bool) -> None:
        _signal(self.primary.process, stopped)

    def close(self) -> None:
        self.primary.kill()
        self.replica.kill()


class Etcd:
    """One etcd that has the table of owners."""

    def __init__(self, folder: Path, network: Network) -> None:
        self._network = network
        with network.inside(TABLE):
            self.server = etcd_server.Etcd(folder, network.host(TABLE))
        self.address = self.server.address

    def settings(self, address: str) -> dict[str, str]:
        return {"ownership": f"etcd:http://{address}"}

    def variables(self, _: str) -> dict[str, str]:
        return {}

    def stop(self, stopped: bool) -> None:
        _signal(self.server.process, stopped)

    def lose(self) -> None:
        """Lose the process, and start it with what it had written."""
        self.server.kill()
        with self._network.inside(TABLE):
            self.server.start()

    def forget(self) -> None:
        """Delete the table."""
        body = json.dumps({"key": base64.b64encode(b"kvplane/owners").decode()}).encode()
        servers.wait_until(partial(self._post, "/v3/kv/deleterange", body), "etcd deletes the table")

    def _post(self, path: str, body: bytes) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{self.address}{path}", body, 5) as answer:
            return bool(answer.status == 200)
        return False

    def close(self) -> None:
        self.server.kill()


class Lease:
    """An API server that has the table of owners in a Lease."""

    def __init__(self, folder: Path, network: Network) -> None:
        folder.mkdir()
        self._stack, host = ExitStack(), network.host(TABLE)
        certificates = servers.make_certificates(folder).parent
        _name(certificates, host)
        with network.inside(TABLE):  # its socket stays there
            serving = apiserver.serving(folder, certificates, host)
            self._state, self._endpoint = self._stack.enter_context(serving)
        self.address = str(urlsplit(self._endpoint.url).netloc)

    def settings(self, _: str) -> dict[str, str]:
        lease = f"lease:{apiserver.NAMESPACE}/{apiserver.NAME}"
        return {"ownership": lease, "ownership_ca": self._endpoint.ca, "ownership_token": self._endpoint.token}

    def variables(self, address: str) -> dict[str, str]:
        host, _, port = address.rpartition(":")
        return {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}

    def stop(self, stopped: bool) -> None:
        refused = apiserver.failure(500, "InternalError", "etcdserver: request timed out")
        self._state.before = lambda _: refused if stopped else None

    def lose(self) -> None:
        """Delete the Lease, as an operator may."""
        with self._state.lock:
            self._state.lease = None

    def forget(self) -> None:
        """Delete the table."""
        self.lose()

    def close(self) -> None:
        self._stack.close()


def _name(certificates: Path, host: str) -> None:
    """Give the server's certificate another address."""
    (certificates / "names").write_text(f"subjectAltName=IP:{host}\nauthorityKeyIdentifier=keyid\n")
    files = "-in server.csr -out server.pem -CA ca.pem -CAkey ca.key -CAcreateserial -extfile names"
    subprocess.run(
        ["openssl", "x509", "-req", *files.split(), "-days", "2"],
        cwd=certificates,
        check=True,
        stderr=subprocess.DEVNULL,
    )


class Grants:
    """The table of owners in the index."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self.address = ""

    def settings(self, _: str) -> dict[str, str]:
        return {"ownership": "grants"}

    def variables(self, _: str) -> dict[str, str]:
        return {}

    def stop(self, stopped: bool) -> None:
        self._index.stop(stopped)

    def lose(self) -> None:
        self._index.fail_over()

    def forget(self) -> None:
        """Delete the table."""
        with self._index.here(), self._index.primary.client() as client:
            client.delete("kvplane:owners")

    def close(self) -> None:
        """Nothing: the index is closed by its owner."""


Table = Etcd | Lease | Grants
OWNERSHIP = ("grants", "lease", "etcd")


def table_of(kind: str, folder: Path, index: Index, network: Network) -> Table:
    """The table of owners of a kind of OWNERSHIP."""
    if kind == "grants":
        return Grants(index)
    return (Lease if kind == "lease" else Etcd)(folder / kind, network)


def _signal(process: Any, stopped: bool) -> None:
    os.kill(process.pid, signal.SIGSTOP if stopped else signal.SIGCONT)
