"""Wall clocks of single processes that jump while they run, by libfaketime. Monotonic clocks stay as they are."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

from tests.store.servers import DEBIAN

HOUR_S = 3600
INSTALLED = "/usr/lib/*/faketime/libfaketime.so.1"
UNPACKED = ".tools/faketime" + INSTALLED


@functools.cache
def library() -> Path | None:
    """The library, installed or unpacked from Debian's package; None where there is neither."""
    for folder, pattern in ((Path("/"), INSTALLED[1:]), (DEBIAN.parents[1], UNPACKED)):
        for found in folder.glob(pattern):
            return found
    done = subprocess.run([str(DEBIAN), "faketime", "--version"], capture_output=True)
    return None if done.returncode else next(DEBIAN.parents[1].glob(UNPACKED), None)


class WallClock:
    """The wall clock of one process after another. Without the library it is always right."""

    def __init__(self, file: Path) -> None:
        self._file, self.ahead_s = file, 0
        self.set(0)

    def set(self, ahead_s: int) -> None:
        """Let the clock be this many seconds ahead of the machine's from now on."""
        self.ahead_s = ahead_s
        fresh = self._file.with_suffix(".new")
        fresh.write_text(f"{ahead_s:+d}\n")
        fresh.replace(self._file)  # a reader finds the one or the other

    @property
    def variables(self) -> dict[str, str]:
        """What a process needs in its environment."""
        if library() is None:
            return {}
        monotonic = dict.fromkeys(("FAKETIME_DONT_FAKE_MONOTONIC", "DONT_FAKE_MONOTONIC"), "1")
        return {
            "LD_PRELOAD": str(library()),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            **monotonic,
        }
