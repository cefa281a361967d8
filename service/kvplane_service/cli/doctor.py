"""`kvplane doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kvplane_service.cli import FAILED
from kvplane_service.cli.access import given_access
from kvplane_service.cli.asking import DEFAULT_SERVICE, Form, Output, Service, columns, naming_the_service, plain_text

if TYPE_CHECKING:
    from kvplane_service.cli.checks import Finding


def command(service: Service = DEFAULT_SERVICE, output: Output = Form.TABLE) -> None:
    """Look for what is known to go wrong, and say what to do about it; exit code 1 when something is found.

    Health, reflection, versions, clocks, lapsed replicas, ranks without a worker, workers of another epoch, the store.
    """
    from dataclasses import asdict

    from kvplane_service.cli.checks import examine

    with naming_the_service():
        findings = examine(service, given_access())
    print(_table(findings) if output is Form.TABLE else plain_text([asdict(one) for one in findings], output))
    raise typer.Exit(0 if all(one.is_well for one in findings) else FAILED)


def _table(findings: list[Finding]) -> str:
    rows = [("CHECK", "STATE", "WHAT WAS SEEN")]
    rows += [(one.check, "ok" if one.is_well else "FAULT", one.seen) for one in findings]
    remedies = [f"{one.check}: {one.remedy}" for one in findings if not one.is_well]
    return "\n".join([columns(rows), *([""] if remedies else []), *remedies])
