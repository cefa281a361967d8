"""`kvplane serve` with a sampler: `python -m tests.soak.service SAMPLES [kvplane serve options]`.

The sampler writes one JSON object per second: resources of the process, and the longest time its event loop was held.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from kvplane_service.process.app import App
from kvplane_tools.cli import main

LOOK_S = 0.002
SAMPLE_S = 1.0


def holdings() -> dict[str, int]:
    """Resources that can leak: resident bytes, descriptors, threads, tasks, blocks of Python's allocator."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return {
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tasks": len(asyncio.all_tasks()),
        "objects": sys.getallocatedblocks(),
    }


async def sample(path: Path) -> None:
    """Write a sample per second until the process exits."""
    began_s = time.monotonic()
    with path.open("w", encoding="utf-8") as out:
        while True:
            longest_s, until_s = 0.0, time.monotonic() + SAMPLE_S
            while (now_s := time.monotonic()) < until_s:
                await asyncio.sleep(LOOK_S)
                longest_s = max(longest_s, time.monotonic() - now_s - LOOK_S)
            line: dict[str, Any] = {"at_s": now_s - began_s, "held_ms": longest_s * 1e3, **holdings()}
            print(json.dumps(line), file=out, flush=True)


class SampledApp(App):
    """Run the service, with the sampler as another task."""

    async def start(self) -> str:
        address = await super().start()
        self.sampler = asyncio.create_task(sample(SAMPLES))
        return address


if __name__ == "__main__":
    SAMPLES = Path(sys.argv.pop(1))
    import kvplane_service.process.app

    kvplane_service.process.app.App = SampledApp  # type: ignore[misc]
    sys.argv[0] = "kvplane"
    main()
