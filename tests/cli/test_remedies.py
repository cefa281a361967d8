"""Every alert, every section of the runbook and every remedy of `kvplane doctor` names a command that exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from kvplane_service.config import Config
from kvplane_tools.cli import app
from kvplane_tools.cli.query.checks import examine
from tests.service.rig import running

ROOT = Path(__file__).parents[2]
ALERTS = [
    rule
    for group in yaml.safe_load((ROOT / "helm/kvplane/files/alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
RUNBOOK = (ROOT / "docs" / "operating.md").read_text()
VALUES = {"FILE": "file", "N": "60", "HOST:PORT": "127.0.0.1:7070"}


def parse(command: str) -> None:
    """Parse a command line as the shell would pass it; raises an exception of click if it is wrong."""
    program, *words = [VALUES.get(word, word) for word in shlex.split(re.sub(r"\{\{.*?\}\}", "r", command))]
    assert program == "kvplane"
    root: Any = typer.main.get_command(app)
    context = root.make_context("kvplane", list(words))
    name, found, rest = root.resolve_command(context, words)
    found.make_context(name, rest, parent=context)


def commands_in(text: str) -> list[str]:
    return [" ".join(found.split()) for found in re.findall(r"`(kvplane\s[a-z][^`]*)`", text)]


def test_a_command_or_option_that_does_not_exist_is_found():
    for wrong in ("kvplane rescue r", "kvplane describe", "kvplane evict r 1 --really"):
        with pytest.raises(Exception, match=r"No such command|Missing parameter|No such option"):
            parse(wrong)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_and_its_runbook_name_commands_that_exist(alert):
    parse(alert["annotations"]["command"])
    _, _, section = RUNBOOK.partition(f"### {alert['alert']}\n")
    commands = commands_in(section.partition("\n### ")[0])
    assert commands
    for command in commands:
        parse(command)


def test_every_remedy_of_doctor_names_a_command_that_exists():
    with running(Config(listen="127.0.0.1:0")) as service:
        findings = examine(service.address)
    assert len(findings) > 12
    for finding in findings:
        commands = commands_in(finding.remedy)
        assert commands or not finding.remedy, finding
        for command in commands:
            parse(command)
