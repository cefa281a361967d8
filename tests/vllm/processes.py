"""Processes of these tests: scripts in the environment of vLLM, kvplane workers and services."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from threading import Timer
from typing import Any

from tests.store.servers import free_port, wait_until
from tests.vllm import environment


class Worker:
    """A kvplane worker without a service.

    Attributes:
        folder: its directory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Worker:
        command = "from kvplane_tools.cli import main; main()"
        options = ["worker", "--opaque", "--replica", "r", "--run-dir", str(self.folder)]
        self._process = subprocess.Popen([sys.executable, "-c", command, *options], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert "pages at" in self._process.stdout.readline()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self._process.kill()
        self._process.wait()


@contextmanager
def worker_in(folder: Path) -> Iterator[Path]:
    """Run a kvplane worker without a service in a directory."""
    with Worker(folder):
        yield folder


class Server:
    """A process that serves, and can be killed or stopped."""

    _process: subprocess.Popen[str]

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self._process.kill()
        self._process.wait()

    def pause(self, seconds: float) -> None:
        """Stop it for some seconds, without waiting for them."""
        self._process.send_signal(signal.SIGSTOP)
        Timer(seconds, self._process.send_signal, [signal.SIGCONT]).start()


class Service(Server):
    """`kvplane serve`, which can be killed and started again at its address.

    Attributes:
        settings: by key of the configuration.
    """

    def __init__(self, **settings: object) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.settings = {"advertise": self.address, **settings}
        self.lives = 0

    def start(self) -> None:
        """Start it, and wait until it serves."""
        self.lives += 1
        command = "from kvplane_tools.cli import main; main()"
        options = ["serve", "--listen", self.address]
        options += [text for key, value in self.settings.items() for text in ("--set", f"{key}={value}")]
        self._process = subprocess.Popen([sys.executable, "-c", command, *options], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        with self._process.stdout as output:
            assert "serving on" in output.readline()

    def drain(self, within_s: float = 60.0) -> None:
        """End it with SIGTERM, so that it drains first. Raises TimeoutExpired if that takes longer than `within_s`."""
        self._process.terminate()
        self._process.wait(within_s)

    def __enter__(self) -> Service:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class LmCache(Server):
    """LMCache's server, with a cache in host memory, which can be killed and started again at its address.

    Attributes:
        env: the environment variables of an engine that uses it.
    """

    def __init__(self, mode: str = "auto", **given: str) -> None:
        """`mode`: who copies pages, as LMCache names it. `given`: further environment variables of an engine."""
        self.port, self.mode = free_port(), mode
        self.env = environment.variables_of_lmcache(self.port) | {"LMCACHE_MP_TRANSFER_MODE": mode} | given

    def start(self) -> None:
        """Start it, and wait until it listens."""
        listen = ["--host", "127.0.0.1", "--port", str(self.port)]
        listen += ["--http-host", "127.0.0.1", "--http-port", str(free_port())]
        cache = ["--l1-size-gb", "1", "--l1-use-lazy", "--eviction-policy", "LRU", "--chunk-size", "64"]
        mode = ["--supported-transfer-mode", self.mode, "--disable-observability"]
        command = [str(environment.PYTHON), "-m", "lmcache.cli.main", "server", *listen, *cache, *mode]
        streams: dict[str, Any] = {"stdout": self._output, "stderr": subprocess.STDOUT}
        self._process = subprocess.Popen(command, env=self.env, **streams)
        wait_until(self._listens, "LMCache's server starts", 120.0)

    def __enter__(self) -> LmCache:
        self._output = TemporaryFile("w+")
        self.start()
        return self

    def _listens(self) -> bool:
        self._output.seek(0)
        assert self._process.poll() is None, self._output.read()[-3000:]
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._output.close()


def run(
    script: str,
    *arguments: object,
    on_step: Callable[[], None] = lambda: None,
    env: Mapping[str, str] | None = None,
) -> Any:
    """Run a script of this folder with vLLM; returns its result. `on_step` is called for each line "STEP", after which
    the script gets an empty line. `env`: None = `environment.variables()`.
    """
    command = [str(environment.PYTHON), str(Path(__file__).with_name(script)), *map(str, arguments)]
    lines = []
    with TemporaryFile("w+") as errors:
        env = environment.variables() if env is None else env
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        with subprocess.Popen(command, env=env, text=True, **pipes) as process:  # type: ignore[call-overload]
            try:
                for line in process.stdout:
                    lines.append(line)
                    if line == "STEP\n":
                        on_step()
                        with suppress(BrokenPipeError):
                            print(file=process.stdin, flush=True)
            except BaseException:
                process.kill()
                raise
        errors.seek(0)
        results = [line for line in lines if line.startswith("RESULT ")]
        assert results, "".join(lines)[-3000:] + errors.read()[-3000:]
    return json.loads(results[0].removeprefix("RESULT "))
