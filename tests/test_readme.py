"""What the README shows is true: its commands are those that CI runs, its code runs as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def fenced_blocks(text: str, language: str) -> list[str]:
    """Return the contents of the fenced code blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def run_block(code: str) -> subprocess.CompletedProcess[str]:
    """Run a block as a reader would: in a process of its own, in the root of the repository."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_blocks_of_one_language_are_found_in_order():
    text = "```sh\nls\n```\ntext\n```python\na = 1\n\nb = 2\n```\n```python\nc\n```\n"
    assert fenced_blocks(text, "python") == ["a = 1\n\nb = 2\n", "c\n"]
    assert fenced_blocks(text, "sh") == ["ls\n"]
    assert fenced_blocks("```python\nnever closed\n", "python") == []


def test_a_block_runs_in_a_process_of_its_own():
    assert run_block("import kvplane.base.step\nprint('ran')").stdout == "ran\n"
    failed = run_block("import no_such_module")
    assert failed.returncode != 0
    assert "no_such_module" in failed.stderr


def test_the_two_commands_are_targets_and_ci_runs_the_second():
    demo, test = (block.strip() for block in fenced_blocks(README, "sh")[:2])
    assert (demo, test) == ("make demo", "make test")
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert {"demo", "test"} <= set(targets)
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    assert commands == [test]
