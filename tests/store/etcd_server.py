"""An etcd server that tests start."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.store.servers import etcd_command, free_port


class Etcd:
    """One etcd of one member. `kill` and `start` keep its folder, and so what it has."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self.address, peer = f"{host}:{free_port()}", f"http://127.0.0.1:{free_port()}"
        url = f"http://{self.address}"
        urls = ("--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", peer)
        more = ("--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}", "--log-level", "error")
        self._command = [*etcd_command(), "--data-dir", str(folder), *urls, *more]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
