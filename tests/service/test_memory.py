"""The memory that the service takes for its own: from control groups of both versions, or the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvplane_service.runtime.memory import available_memory

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
HALF = (MACHINE // 2, "half of the machine's memory")
GROUP = "the limit of its control group"
MIB = 1 << 20


def tree(root: Path, groups: str, **limits: str) -> Path:
    """A folder with these control groups; `limits` by path, with `__` for a slash."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for path, text in limits.items():
        name = path.replace("__", "/").replace("_LIMIT", ".limit_in_bytes").replace("_MAX", ".max")
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "limits", "found"),
    [
        ("0::/\n", {"memory_MAX": f"{512 * MIB}\n"}, (512 * MIB, GROUP)),
        ("0::/\n", {"memory_MAX": "max\n"}, HALF),
        ("0::/a/b\n", {"a__memory_MAX": str(100 * MIB), "a__b__memory_MAX": "max"}, (100 * MIB, GROUP)),
        ("0::/a/b\n", {"a__memory_MAX": str(100 * MIB), "a__b__memory_MAX": str(90 * MIB)}, (90 * MIB, GROUP)),
        ("0::/docker/x\n", {"memory_MAX": str(80 * MIB)}, (80 * MIB, GROUP)),  # a path outside of the container
        ("5:cpu:/\n4:memory:/pod\n0::/\n", {"memory__pod__memory_LIMIT": str(70 * MIB)}, (70 * MIB, GROUP)),
        ("4:memory:/\n", {"memory__memory_LIMIT": "9223372036854771712"}, HALF),  # what v1 states for no limit
        ("", {}, HALF),
    ],
)
def test_memory_is_the_lowest_limit_of_the_control_groups(tmp_path, groups, limits, found):
    assert tuple(available_memory(tree(tmp_path, groups, **limits))) == found


def test_memory_without_control_groups_is_half_of_the_machine(tmp_path):
    assert tuple(available_memory(tmp_path)) == HALF
    assert 0 < available_memory().num_bytes <= MACHINE
