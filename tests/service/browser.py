"""A headless Chromium, driven by the DevTools protocol over a pipe; every page is a new one, without state."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "debian.sh"
LIMIT_S = 60.0
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """The browser's end of the pipe: commands, and the events that came with their answers."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._writer, self._reader = os.fdopen(to_browser, "wb", buffering=0), os.fdopen(from_browser, "rb")
        self._pending, self._number = b"", 0
        self.session = ""
        self.events: list[dict[str, Any]] = []

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Run a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self._writer.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            piece = os.read(self._reader.fileno(), 1 << 20)
            assert piece, "the browser has ended"
            self._pending += piece
        raw, _, self._pending = self._pending.partition(b"\0")
        return json.loads(raw)

    def open(self, url: str, dark: bool = False, size: tuple[int, int] = (1280, 900)) -> None:
        """Open a page in a context of its own."""
        self.session, self.events = "", []
        context = self.command("Target.createBrowserContext")["browserContextId"]
        target = self.command("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        self.session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.command("Emulation.setEmulatedMedia", features=scheme)
        width, height = size
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        self.command("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Evaluate JavaScript in the page."""
        result = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def text(self, selector: str) -> str:
        """The visible text of an element; "" while there is none."""
        return str(self.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def wait(self, condition: Callable[[], Any]) -> Any:
        """Poll a condition until it holds; returns its value."""
        ends = time.monotonic() + LIMIT_S
        while not (value := condition()):
            assert time.monotonic() < ends, self.value("document.body.innerText")
            time.sleep(0.05)
        return value

    def press(self, *keys: str) -> None:
        """Press keys, as a person does: letters, "Tab", "Enter"."""
        codes = {"Tab": 9, "Enter": 13}
        for key in keys:
            code = codes.get(key, ord(key.upper()[0]))
            text = {"Enter": "\r", "Tab": ""}.get(key, key)
            fields = {"key": key, "code": key, "windowsVirtualKeyCode": code, "text": text}
            self.command("Input.dispatchKeyEvent", type="keyDown", **fields)
            self.command("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        """Put text at the cursor."""
        self.command("Input.insertText", text=text)

    def picture(self, path: Path) -> bytes:
        """A screenshot of the whole page, also as a file."""
        data = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        raw = base64.b64decode(data)
        path.write_bytes(raw)
        return raw

    def requests(self) -> list[dict[str, Any]]:
        """Requests of the page so far."""
        return [one["params"]["request"] for one in self.events if one.get("method") == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """Errors of scripts, and what the browser refused (such as a violation of the content security policy)."""
        found = [one for one in self.events if one.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")]
        return [json.dumps(one["params"]) for one in found]


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A running browser; skips the test with the reason where there is none."""
    if shutil.which("chromium") is None and shutil.which("apt-get") is None:
        pytest.skip("no Chromium, and no apt-get that fetches Debian's package")
    first = subprocess.run([SCRIPT, "chromium", "--version"], capture_output=True, text=True, check=False, timeout=600)
    if first.returncode != 0:
        pytest.skip(f"Chromium cannot be had: {first.stderr.strip()[-300:]}")
    out_read, to_browser = os.pipe()
    from_browser, in_write = os.pipe()
    command = f'exec "{SCRIPT}" chromium {" ".join(_FLAGS)} "--user-data-dir={folder}" 3<&{out_read} 4>&{in_write}'
    process = subprocess.Popen(
        ["bash", "-c", command], pass_fds=(out_read, in_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(out_read)
    os.close(in_write)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        process.terminate()
        process.wait(LIMIT_S)
