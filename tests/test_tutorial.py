"""docs/tutorial.md: every block runs, one behind another in one process, and prints what the page shows below it."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from kvplane_tools.cli.child import ServiceChild

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "tutorial.md").read_text()
ADDRESS = "127.0.0.1:7070"


def steps_of(page: str) -> list[tuple[str, str]]:
    """Return each block of Python with the output shown below it."""
    return re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)


def output(code: str, name: str, variables: dict[str, Any]) -> str:
    printed = StringIO()
    with redirect_stdout(printed):
        exec(compile(code, name, "exec"), variables)
    return printed.getvalue()


def test_each_of_the_ten_steps_and_the_whole_loop_print_what_the_page_shows():
    titles = re.findall(r"^## (\d+)\. ", PAGE, flags=re.MULTILINE)
    assert titles == [str(number) for number in range(1, 11)]
    steps = steps_of(PAGE)
    assert len(steps) == len(titles) + 1 == PAGE.count("```python\n")
    assert [code.count(ADDRESS) for code, _ in steps] == [1, *[0] * 9, 1]
    variables: dict[str, Any] = {}
    with ServiceChild() as service:
        for number, (code, shown) in enumerate(steps, 1):
            assert output(code.replace(ADDRESS, service.address), f"step {number}", variables) == shown


def test_blocks_are_paired_with_the_output_below_them():
    page = "```python\na = 1\n\nprint(a)\n```\n\n```text\n1\n```\ntext\n```python\nb\n```\n"
    assert steps_of(page) == [("a = 1\n\nprint(a)\n", "1\n")]
    assert output(*steps_of(page)[0], {}) == "1\n"


def test_engine_with_real_pages_hits_them_after_it_was_killed(tmp_path):
    page = (Path(__file__).resolve().parent.parent / "docs" / "real-pages.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    first, further = re.findall(r"^```text\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert ADDRESS in code
    with ServiceChild() as service:
        code = code.replace(ADDRESS, service.address)
        killed = f"{code}\nimport os\nos.kill(os.getpid(), 9)\n"
        runs = [
            subprocess.run([sys.executable, "-c", each], cwd=tmp_path, capture_output=True, text=True, timeout=60)
            for each in (killed, code)
        ]
    assert [one.returncode for one in runs] == [-9, 0], [one.stderr for one in runs]
    assert runs[0].stdout == first
    assert runs[1].stdout.startswith(further)
    assert (tmp_path / "pages.bin").stat().st_size > 0
