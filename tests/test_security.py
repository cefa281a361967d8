"""Every test that SECURITY.md names exists, and every line of its table names one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAMED = re.compile(r"`((?:[a-z_]+/)*[a-z_]+[.]py)`(?:: ((?:`[a-z_0-9]+`(?:, )?)+))?")


def missing(text: str, folder: str = "") -> list[str]:
    """The files and functions in a text that do not exist. Paths begin at `folder`."""
    found = []
    for path, names in NAMED.findall(text):
        file = ROOT / folder / path
        source = file.read_text(encoding="utf-8") if file.exists() else ""
        found += [path] if not source else []
        defined = set(re.findall(r"^ *(?:async )?def (\w+)\(", source, re.M))
        found += [name for name in re.findall("`(.+?)`", names) if name not in defined]
    return found


def test_every_protection_names_a_test_that_exists():
    lines = (ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("| attacker |"))
    end = next(number for number, line in enumerate(lines) if number > begin and not line.startswith("|"))
    rows = [line.split("|")[4] for line in lines[begin + 2 : end]]
    assert len(rows) > 10
    assert [row for row in rows if not any(names for _, names in NAMED.findall(row))] == []
    assert missing(" ".join(rows), "tests") == []
    rest = [*lines[:begin], *lines[end:]]
    assert missing("\n".join(rest).replace("\n", " ")) == []


def test_a_test_that_does_not_exist_is_found():
    assert missing("`test_security.py`: `missing`, `test_absent`; `absent.py`", "tests") == ["test_absent", "absent.py"]
