"""The memory that this process may use: the limit of its control group, or half of the machine's memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/")


class Available(NamedTuple):
    """Memory for this process.

    Attributes:
        num_bytes: how much.
        source: where it is stated.
    """

    num_bytes: int
    source: str


def available_memory(root: Path = _ROOT) -> Available:
    """Return the lowest limit of the control groups of this process (v2 and v1) that is below the machine's memory.
    Without one, half of that memory, since engines and workers of the machine need the rest.

    Args:
        root: where /proc and /sys are; a test gives another.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = min(_limits(root), default=machine)
    if limit < machine:
        return Available(limit, "the limit of its control group")
    return Available(machine // 2, "half of the machine's memory")


def _limits(root: Path) -> Iterator[int]:
    for folder, name in _groups(root):
        try:
            text = (folder / name).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():  # not `max`
            yield int(text)


def _groups(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the folders of the groups of this process and of those around them, with the name of the file of the limit.

    Inside a container, the path that /proc states may not exist: then the group is at the root of the tree.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            tree, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            tree, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        place = Path(path.lstrip("/"))
        for each in (place, *place.parents):
            yield tree / each, name
