"""The command line as a whole: help, version, configuration, errors."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import pytest
import yaml

from kvplane.base.errors import (
    AlreadyExists,
    InternalError,
    InvalidArgument,
    KvplaneError,
    LimitExceeded,
    NotFound,
    Unavailable,
)
from kvplane_tools.cli import COMMANDS, exit_code

HEAVY = ("grpc", "google.protobuf", "uvloop", "yaml", "asyncio", "torch", "redis", "rich", "numpy", "kvplane.api")
HELP = f"""
import sys
from typer.testing import CliRunner
from kvplane_tools.cli import COMMANDS, app
for arguments in ([], *([name] for name in COMMANDS)):
    shown = CliRunner().invoke(app, [*arguments, "--help"], env={{"COLUMNS": "200"}})
    assert shown.exit_code == 0, shown.output
    assert arguments or all(name in shown.output for name in COMMANDS), shown.output
print(*(name for name in {HEAVY!r} if name in sys.modules))
"""


def test_help_names_every_command_and_imports_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")


# What a command imports is most of the CPU time that it takes.
STARTED = f"""
import sys
from kvplane_tools.cli import main
try:
    main()
except SystemExit:
    pass
names = [name for name in sys.modules if name.startswith(("kvplane_tools.cli.", "kvplane_fleet"))]
heavy = [name for name in {HEAVY!r} if name in sys.modules]
sys.stderr.write(f"{{len(sys.modules)}} {{' '.join(heavy)}} {{' '.join(names)}}")
"""


def modules_after(*words: str) -> list[str]:
    """Number of modules after a command, those of HEAVY among them, and those of the command line."""
    done = subprocess.run([sys.executable, "-c", STARTED, *words], capture_output=True, text=True, timeout=60)
    return done.stderr.splitlines()[-1].split()


def test_start_imports_few_modules_and_those_of_the_given_command_alone():
    number, *names = modules_after("--help")
    assert int(number) < 250
    assert not {"rich", "grpc"} & set(names)
    number, *names = modules_after("status", "--service", "127.0.0.1:1")
    assert int(number) < 520
    assert "grpc" in names, "the status was asked for"
    assert not {"rich", "numpy", "yaml", "kvplane.api", "kvplane_tools.cli.replay"} & set(names)
    assert not any(
        name.startswith(("kvplane_fleet", "kvplane_tools.cli.fleet", "kvplane_tools.cli.plan")) for name in names
    )


@pytest.mark.parametrize("word", ["version", "--version"])
def test_version_is_that_of_the_package(kvplane, word):
    code, output, _ = kvplane(word)
    assert code == 0
    assert output == f"kvplane {version('kvplane')}\n"


@pytest.mark.parametrize("words", [(), ("status",), ("store",), ("store", "inspect"), ("worker",)])
def test_short_help_option_equals_the_long_one(kvplane, words):
    code, output, _ = kvplane(*words, "-h")
    assert code == 0
    assert output == kvplane(*words, "--help")[1]
    assert "Usage: " in output


def test_help_shows_one_name_per_option(kvplane, monkeypatch):
    """Former names are accepted, but not documented."""
    monkeypatch.setenv("COLUMNS", "200")
    shown = "".join(kvplane(*words)[1] for words in (["--help"], *([name, "--help"] for name in COMMANDS)))
    for name in ("--service", "KVPLANE_SERVICE", "KVPLANE_TLS_CA"):
        assert name in shown
    for name in ("--address", "KVPLANE_ADDRESS", "KVPLANE_CA_FILE"):
        assert name not in shown


def test_config_prints_every_value_with_its_source(tmp_path, kvplane, monkeypatch):
    file = tmp_path / "k.yaml"
    file.write_text("max_replicas: 7\n")
    monkeypatch.setenv("KVPLANE_OP_WINDOW", "9")
    code, output, _ = kvplane("config", "--config", str(file), "--set", "lease_ms=5", "--listen", "unix:s")
    assert code == 0
    values = yaml.safe_load(output)
    wanted = {"max_replicas": 7, "lease_ms": 5, "op_window": 9, "listen": "unix:s"}
    assert {key: values[key] for key in wanted} == wanted
    assert f"max_replicas: 7  # {file}" in output
    assert "op_window: 9  # KVPLANE_OP_WINDOW" in output


def test_config_file_can_be_set_by_the_environment(tmp_path, kvplane, monkeypatch):
    file = tmp_path / "k.yaml"
    file.write_text("max_replicas: 7\n")
    monkeypatch.setenv("KVPLANE_CONFIG", str(file))
    assert f"max_replicas: 7  # {file}" in kvplane("config")[1]


def test_a_file_that_is_not_yaml_is_one_error_line(tmp_path, kvplane):
    (tmp_path / "k.yaml").write_text("a: [")
    code, _, errors = kvplane("config", "--config", str(tmp_path / "k.yaml"))
    assert code == 2
    assert "is not YAML: while parsing" in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_output_that_cannot_be_encoded_has_question_marks(encoding):
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "kvplane_tools", "plan", "gpt-oss-20b"]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b" ????" in done.stdout


INTERRUPTED_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "kvplane_tools.cli.options":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from kvplane_tools.__main__ import main
main()
"""


def test_ctrl_c_while_the_commands_are_imported_prints_nothing():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("config", "--set", "leese_ms=5"), "the most similar key is lease_ms"),
        (("config", "--set", "foo=1"), "unknown key foo from flag (`kvplane config` prints all keys)"),
        (("config", "--set", "lease_ms"), "KEY=VALUE"),
        (("config", "--set", "lease_ms=soon"), "lease_ms: 'soon' from flag"),
        (("config", "--config", "nowhere.yaml"), "nowhere.yaml"),
        (("serve", "--listen", "here"), "host:port"),
    ],
)
def test_wrong_use_is_one_error_line(kvplane, arguments, message):
    code, output, errors = kvplane(*arguments)
    assert (code, output) == (2, "")
    assert message in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "code"),
    [(InvalidArgument, 2), (NotFound, 2), (Unavailable, 3), (AlreadyExists, 1), (LimitExceeded, 1), (InternalError, 1)],
)
def test_commands_have_the_documented_exit_codes(kind: type[KvplaneError], code):
    assert exit_code(kind("")) == code
