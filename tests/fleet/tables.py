"""Where the services of a fleet keep the index and agree on owners, as servers that can be killed, stopped and lost."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.store import apiserver, etcd_server, servers

UNREPLICATED_S = 0.5  # what a failover loses


class Index:
    """A Redis primary and its replica; a failover gives the replica the address of the primary."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lives = folder, 0
        self.primary = servers.Server(folder / "0")
        self._follow()

    def _follow(self) -> None:
        self._lives += 1
        at = ("--replicaof", "127.0.0.1", str(self.primary.port))
        self.replica = servers.Server(self._folder / str(self._lives), *at)
        servers.wait_until(self._is_synchronous, "the replica follows")

    def _is_synchronous(self) -> bool:
        with self.replica.client() as client:
            return bool(client.info("replication").get("master_link_status") == "up")

    def fail_over(self) -> None:
        """Kill the primary before it replicates its latest writes; its replica takes its place, without them."""
        with self.replica.client() as client:
            client.replicaof("NO", "ONE")
            time.sleep(UNREPLICATED_S)
            self.primary.kill()
            client.config_set("port", self.primary.port)
        self.replica.port, self.primary = self.primary.port, self.replica
        self._follow()

    def stop(self, stopped: bool) -> None:
        _signal(self.primary.process, stopped)

    def lose(self) -> None:
        """Lose all that is stored."""
        with self.primary.client() as client:
            client.flushall()

    def close(self) -> None:
        self.primary.kill()
        self.replica.kill()


class Etcd:
    """One etcd that has the table of owners."""

    def __init__(self, folder: Path) -> None:
        self.server = etcd_server.Etcd(folder)
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
        self.server.start()

    def close(self) -> None:
        self.server.kill()


class Lease:
    """An API server that has the table of owners in a Lease."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._stack = ExitStack()
        certificates = servers.make_certificates(folder).parent
        self._state, self._endpoint = self._stack.enter_context(apiserver.serving(folder, certificates))
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

    def close(self) -> None:
        self._stack.close()


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

    def close(self) -> None:
        """Nothing: the index is closed by its owner."""


Table = Etcd | Lease | Grants
OWNERSHIP = ("grants", "lease", "etcd")


def table_of(kind: str, folder: Path, index: Index) -> Table:
    """The table of owners of a kind of OWNERSHIP."""
    if kind == "grants":
        return Grants(index)
    return (Lease if kind == "lease" else Etcd)(folder / kind)


def _signal(process: Any, stopped: bool) -> None:
    os.kill(process.pid, signal.SIGSTOP if stopped else signal.SIGCONT)
