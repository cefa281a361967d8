"""The command line, run in this process."""

from __future__ import annotations

import sys

import pytest

from kvplane_tools.cli import main


@pytest.fixture
def kvplane(monkeypatch, capsys):
    """Run a command line in this process: exit status, output, errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvplane", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return run
