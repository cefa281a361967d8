"""What every test shares: the hypothesis profile and the folder of public traces."""

from __future__ import annotations

import os
import signal
from pathlib import Path

# Kernels are interpreted in this process, compiled in another (tests/ops): read when a kernel's module is imported.
os.environ["TRITON_INTERPRET"] = "1"

import pytest
from hypothesis import HealthCheck, settings

# No deadline: machines that run tests are noisy. Two runs draw the same examples; the profile "explore" draws new ones,
# those of `--hypothesis-seed=N`. A failing example is printed as a blob that reproduces it.
for name, fixed, examples in (("kvplane", True, 100), ("quick", True, 20), ("explore", False, 300)):
    settings.register_profile(
        name,
        deadline=None,
        print_blob=True,
        derandomize=fixed,
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("kvplane")

# A shell starts background jobs with SIGINT ignored, and every child inherits that: Ctrl-C tests could never end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

WORKLOADS_VARIABLE = "KVPLANE_WORKLOADS"


def workloads_folder() -> Path | None:
    """Return the folder of public traces, None when the variable is unset."""
    value = os.environ.get(WORKLOADS_VARIABLE, "")
    return Path(value) if value else None


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a variable that leads nowhere: it would turn every test of real traces into a skip."""
    folder = workloads_folder()
    if folder is not None and not folder.is_dir():
        raise pytest.UsageError(f"{WORKLOADS_VARIABLE}={folder} is not a folder; unset it to go without")


def pytest_report_header() -> str:
    """Say at the top whether real traces are replayed."""
    return workloads_line()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say again at the end, where it is read, when real traces were not there."""
    if workloads_folder() is None:
        terminalreporter.section("workloads")
        terminalreporter.write_line(workloads_line())


def workloads_line() -> str:
    """Return one line on the folder of public traces."""
    folder = workloads_folder()
    if folder is None:
        return f"workloads: ABSENT, tests of real traces are skipped; {WORKLOADS_VARIABLE} names their folder"
    return f"workloads: {folder}"


@pytest.fixture(scope="session")
def workloads() -> Path:
    """The folder of public traces; a test that takes it is skipped, with a word, when there is none."""
    folder = workloads_folder()
    if folder is None:
        pytest.skip(workloads_line())
    return folder
