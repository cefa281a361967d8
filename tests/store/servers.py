"""Redis servers that tests start: each in its own directory, on free ports, killed at the end."""

from __future__ import annotations

import contextlib
import functools
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

DEBIAN = Path(__file__).resolve().parents[2] / "scripts" / "debian.sh"
START_LIMIT_S = 30.0
USER, PASSWORD = "kvplane", "a-long-secret"
# Exactly the permissions that the store needs.
ACL = (
    f"user {USER} on >{PASSWORD} ~kvplane* resetchannels -@all +xadd +xtrim +xlen +xrange +pexpire +get "
    "+set +del +eval +zadd +zrange +zrem +zremrangebyscore +time +memory|usage +multi +exec +ping +hello"
)


@functools.cache
def redis_command() -> tuple[str, ...]:
    """The command of a Redis server: installed, or unpacked from Debian's package. Skips where there is neither."""
    if valkey := shutil.which("valkey-server"):
        return (valkey,)
    command = (str(DEBIAN), "redis-server")
    tried = subprocess.run([*command, "--version"], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"there is no redis-server: {tried.stderr}")
    return command


@functools.cache
def etcd_command() -> tuple[str, ...]:
    """The command of etcd: installed, or unpacked from Debian's package. Skips where there is neither."""
    command = (str(DEBIAN), "etcd")
    tried = subprocess.run([*command, "--version"], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"there is no etcd: {tried.stderr}")
    return command


def free_port() -> int:
    """A port on which nothing listens, below those that the system gives to connections: none takes it meanwhile."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_until(happened, what: str, limit_s: float = START_LIMIT_S) -> None:
    """Poll until the condition holds: another process changes it, so there is no event to wait for."""
    deadline = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < deadline, f"{what}: not within {limit_s} s"
        time.sleep(0.02)


class Server:
    """One redis-server. `stop` and `start` keep its directory, and so its identity."""

    def __init__(self, folder: Path, *options: str, sentinel: bool = False, port: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = port or free_port()
        self.options = options
        self.sentinel = sentinel
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        config = self.folder / "redis.conf"
        if not config.exists():
            config.write_text("")
        command = [*redis_command(), str(config)]
        if self.sentinel:
            command.append("--sentinel")
        command += ["--port", str(self.port), "--dir", str(self.folder), "--save", "", *self.options]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(self.answers, f"redis-server: {' '.join(command)}")

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "log").read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False

    def client(self, **options) -> redis.Redis:
        return redis.Redis("127.0.0.1", self.port, **options)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[Server]:
    server = Server(folder, *options)
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[tuple[Server, Path]]:
    """A server with TLS and one ACL user; yields it and the certificate of its CA."""
    authority = make_certificates(folder)
    acl = folder / "users.acl"
    acl.write_text(f"user default off\n{ACL}\n")
    port = free_port()
    options = f"--tls-port {port} --tls-auth-clients no".split()
    files = ("--tls-cert-file", "server.pem", "--tls-key-file", "server.key", "--tls-ca-cert-file", "ca.pem")
    options += [str(folder / text) if text.endswith((".pem", ".key")) else text for text in files]
    server = Server.__new__(Server)
    server.folder, server.port, server.sentinel, server.process = folder, port, False, None
    server.options = ("--port", "0", *options, "--aclfile", str(acl))
    server.start()
    try:
        yield server, authority
    finally:
        server.kill()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[list[Server]]:
    """A cluster of three nodes."""
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
    nodes = []
    try:
        for number in range(3):
            port = free_port()
            bus = ("--cluster-port", str(free_port()))
            nodes.append(Server(folder / str(number), *options, *bus, port=port))
        first = nodes[0].client()
        for number, node in enumerate(nodes):
            bounds = number * 16384 // 3, (number + 1) * 16384 // 3 - 1
            node.client().execute_command("CLUSTER", "ADDSLOTSRANGE", *bounds)
            if node is not nodes[0]:
                first.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, int(node.options[-1]))
        wait_until(lambda: all(_is_whole(node) for node in nodes), "a cluster of three nodes")
        yield nodes
    finally:
        for node in nodes:
            node.kill()


def _is_whole(node: Server) -> bool:
    lines = node.client().execute_command("CLUSTER", "INFO").split()
    return b"cluster_state:ok" in lines and b"cluster_known_nodes:3" in lines


class Watched:
    """A primary, its replica, and a Sentinel that monitors them under the name `main`."""

    def __init__(self, folder: Path) -> None:
        self.primary = Server(folder / "primary")
        self.replica = Server(folder / "replica", "--replicaof", "127.0.0.1", str(self.primary.port))
        (folder / "sentinel").mkdir()
        lines = (
            f"sentinel monitor main 127.0.0.1 {self.primary.port} 1",
            "sentinel down-after-milliseconds main 300",
            "sentinel failover-timeout main 2000",
        )
        (folder / "sentinel" / "redis.conf").write_text("\n".join(lines) + "\n")
        self.sentinel = Server(folder / "sentinel", sentinel=True)
        wait_until(self._is_complete, "Sentinel knows the replica")

    def _is_complete(self) -> bool:
        return any(one["flags"] == "slave" for one in self.sentinel.client().sentinel_slaves("main"))

    def fail_over(self) -> None:
        """Kill the primary and wait until the replica is the primary."""
        self.primary.kill()
        wait_until(lambda: self.replica.client().role()[0] == b"master", "the replica has become the primary")

    def kill(self) -> None:
        for server in (self.primary, self.replica, self.sentinel):
            server.kill()


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[Watched]:
    servers = Watched(folder)
    try:
        yield servers
    finally:
        servers.kill()


def make_certificates(folder: Path) -> Path:
    """A CA and a server certificate for 127.0.0.1, created by openssl, as strict as Python 3.13 verifies them."""
    folder.mkdir(parents=True, exist_ok=True)

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
    named = ("-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority", "-days", "2")
    openssl("req", "-x509", *key, *usage, *named)
    openssl("req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=127.0.0.1")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-days", "2")
    openssl("x509", "-req", "-in", "server.csr", "-out", "server.pem", *signing)
    return folder / "ca.pem"
