"""What every test shares: the hypothesis profile, the folder of public traces, and which tests run (`targets`)."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

# Kernels are interpreted in this process, compiled in another (tests/kernels): read when a kernel's module is imported.
os.environ["TRITON_INTERPRET"] = "1"

import pytest
from hypothesis import HealthCheck, settings

from tests import targets

# No deadline: machines that run tests are noisy. Two runs draw the same examples; the profile "explore" draws new ones,
# those of `--hypothesis-seed=N`. A failing example is printed as a blob that reproduces it.
for name, fixed, examples in (("kvplane", True, 40), ("quick", True, 20), ("explore", False, 300)):
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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that leaves nothing out."""
    parser.addoption("--all", action="store_true", help="also nightly tests, and targets whose sources are unchanged")


def is_whole(config: pytest.Config) -> bool:
    """Whether the run is that of `make test`: no caller named tests. Workers of a parallel run get the names of all."""
    given = getattr(config, "workerinput", {}).get("is_whole")
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS if given is None else given


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Let the workers of a parallel run know."""
    node.workerinput["is_whole"] = is_whole(node.config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark nightly tests, and leave out targets whose sources are unchanged, unless tests are named."""
    if not is_whole(config):
        return
    unchanged = [] if config.option.all else targets.unchanged()
    left_out = [name for target in unchanged for name in targets.GUARDED[target].tests]
    kept, sample = list[pytest.Item](), targets.Sample()
    for item in items:
        path = item.path.relative_to(targets.ROOT).as_posix()
        if targets.is_in(path, targets.NIGHTLY, getattr(item, "originalname", "")) or sample.leaves_out(item.nodeid):
            item.add_marker(pytest.mark.nightly)
        if not targets.is_in(path, left_out):
            kept.append(item)
    left = set(items).difference(kept)
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = sorted(kept, key=lambda item: targets.place_of(item.path.relative_to(targets.ROOT).as_posix()))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let no later garbage collection visit what importing has made, which takes a tenth of the time of a run."""
    del session
    gc.collect()
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say at the top whether real traces are replayed, and what is left out."""
    return [workloads_line(), *left_out_lines(config)]


def left_out_lines(config: pytest.Config) -> list[str]:
    """Return a line for each target that is left out."""
    whole = is_whole(config) and not config.option.all
    return [
        f"{name}: left out, unchanged since they passed; `make test-{name}` runs them"
        for name in targets.unchanged()
        if whole
    ]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say again at the end, where it is read, when real traces were not there, and what was left out."""
    for line in left_out_lines(config):
        terminalreporter.write_line(line)
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
