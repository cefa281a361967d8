"""Rules that hold for every command: one meaning per option, connection options anywhere, units, former names."""

from __future__ import annotations

import inspect
import json
import re
import socket
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import typer.main

from kvplane_tools.cli import FORMER, MODULES, SECTIONS, app
from kvplane_tools.cli.options import Given
from tests.service.rig import running

ROOT: Any = typer.main.get_command(app)
CONNECTION = {f"--{name.replace('_', '-')}" for name in Given.__slots__}
CALLS_NOTHING = {"demo", "serve", "plan", "models", "config", "token", "store", "erase", "decode", "version"}
# Options whose value is a count, a share or a ratio, although the name or the help has a word of time or size.
NO_QUANTITY = {"--page-size", "--block-size", "--speed", "--prefill-tokens-per-second", "--decisions"}
UNITS = re.compile(r"\b(seconds?|milliseconds?|microseconds?|bytes|[KMG]i?B)\b|-(mib|ms|us|seconds)$", re.IGNORECASE)


def commands() -> list[tuple[str, Any]]:
    """Every command that does something, with the words that call it."""
    found = []
    for name in MODULES:
        command = ROOT.get_command(None, name)
        inner = getattr(command, "commands", None)
        found += [(f"{name} {one}", each) for one, each in inner.items()] if inner else [(name, command)]
    return found


def options(command: Any) -> list[Any]:
    return [one for one in command.params if one.param_type_name == "option" and "--help" not in one.opts]


def shown(command: Any) -> list[Any]:
    return [one for one in options(command) if not one.hidden]


def kind(option: Any) -> tuple[object, ...]:
    """What an option accepts, whatever version of typer parses it."""
    choices = getattr(getattr(option, "type", None), "choices", None)
    annotation = getattr(getattr(option, "type_descriptor", None), "annotation", None)
    return option.metavar, option.is_flag, option.multiple, option.nargs, tuple(choices or ()), str(annotation)


def test_an_option_has_one_meaning_in_all_commands():
    meanings = defaultdict(set)
    for _, command in commands():
        for one in shown(command):
            for name in (*one.opts, *one.secondary_opts):
                meanings[name].add((kind(one), one.help, tuple(one.opts)))
    assert len(meanings) > 80
    assert {name: found for name, found in meanings.items() if len(found) > 1} == {}


def test_every_option_says_what_it_does():
    silent = [f"{path} {one.opts}" for path, command in commands() for one in shown(command) if not one.help]
    assert silent == []


def test_a_command_that_prints_a_table_prints_it_as_json():
    """A command prints a table through `columns`, `show` or `text_of`; it has -o then."""
    without = []
    for path, command in commands():
        module = inspect.getmodule(inspect.unwrap(command.callback))
        source = inspect.getsource(inspect.unwrap(command.callback))
        prints = re.search(r"\b(show|text_of|columns|fleet_table|show_log|show_replay)\(", source)
        if prints and not any("--output" in one.opts for one in options(command)):
            without.append((path, module))
    assert without == []
    with_output = [path for path, command in commands() if any("-o" in one.opts for one in options(command))]
    assert {"status", "replicas", "top", "plan", "replay", "bench", "fleet list", "doctor", "token"} <= set(with_output)


def test_a_size_or_a_duration_has_a_unit_and_not_its_name():
    for path, command in commands():
        for one in shown(command):
            name = max(one.opts, key=len)
            if name not in NO_QUANTITY and UNITS.search(name):
                raise AssertionError(f"{path} {name}: give it a value with a unit")
            if one.metavar in ("SIZE", "DURATION"):
                assert re.search(r"\d+ ?([smhd]|ms|[KMGT]i?B)\b|0 = |Time between", one.help), (path, name, one.help)


@pytest.mark.parametrize(("path", "command"), commands(), ids=[path for path, _ in commands()])
def test_connection_options_stand_after_every_command_that_calls(path, command):
    taken = {name for one in options(command) for name in one.opts if one.hidden} & CONNECTION
    first = path.split()[0]
    if first in CALLS_NOTHING:
        assert not taken
    elif first in ("fleet", "router"):
        assert taken == CONNECTION - {"--service"}
    elif first == "health":
        assert taken == {"--request-timeout"}
    else:
        assert taken == CONNECTION


def test_help_lists_every_command_once_and_in_sections(kvplane):
    _, text, _ = kvplane("--help")
    for title, section in SECTIONS.items():
        assert f"{title}:\n" in text
        for name in section:
            assert len(re.findall(rf"^  {name} +\S", text, re.MULTILINE)) == 1, name
    assert "Commands:" not in text


def test_the_service_is_named_before_or_after_and_the_last_one_counts(kvplane):
    with running() as service:
        here = ("--service", service.address)
        assert kvplane(*here, "status")[0] == 0
        assert kvplane("status", *here)[0] == 0
        assert kvplane("--service", "127.0.0.1:1", "status", *here)[0] == 0
        assert kvplane(*here, "status", "--service", "127.0.0.1:1")[0] == 3


def test_tls_options_stand_after_the_command(kvplane):
    _, before, _ = kvplane("--tls-ca", "ca.pem", "--token-file", "t", "status", "--grpcurl")
    _, after, _ = kvplane("status", "--grpcurl", "--tls-ca", "ca.pem", "--token-file", "t")
    assert before == after
    assert "-cacert ca.pem" in after
    code, _, errors = kvplane("status", "--tls-cert", "c.pem")
    assert (code, "--tls-ca: it is empty" in errors) == (2, True)


@pytest.mark.parametrize("text", ["0.2", "200ms"])
def test_a_request_timeout_ends_a_call_and_its_remedy_names_it(kvplane, text):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        begun_s = time.monotonic()
        code, _, errors = kvplane("status", "--service", address, "--request-timeout", text)
    assert time.monotonic() - begun_s < 5
    assert (code, "--request-timeout" in errors) == (1, True), errors


@pytest.mark.parametrize("words", [("--watch", "0.01"), ("--watch", "x"), ("--request-timeout", "5 parsecs")])
def test_a_wrong_duration_names_its_option(kvplane, words):
    code, _, errors = kvplane("status", *words)
    assert code == 2
    assert words[0] in errors


def test_tokens_are_a_list_or_a_file_everywhere(kvplane, tmp_path):
    file = tmp_path / "ids"
    file.write_text("[1, 2,\n3]")
    printed = {kvplane("lookup", "r", "--tokens", given, "--grpcurl")[1] for given in ("1,2,3", "1 2 3", str(file))}
    assert len(printed) == 1
    body = re.search(r"'(.*)'", printed.pop())
    assert body is not None
    assert json.loads(body[1])["content"]["token_ids"] == [1, 2, 3]
    for wrong in ("1,x", str(tmp_path), "nothing"):
        for words in (("lookup", "r"), ("explain", "r"), ("fleet", "score"), ("fleet", "explain")):
            code, _, errors = kvplane(*words, "--tokens", wrong)
            assert (code, "--tokens" in errors) == (2, True), (words, wrong)
    assert kvplane("fleet", "score")[0] == 2


def test_former_names_of_options_are_accepted_and_not_shown():
    for first, names in FORMER.items():
        for path, command in commands():
            if path.split()[0] != first:
                continue
            for former, current in names.items():
                known = {name for one in options(command) for name in one.opts}
                if f"--{current}" in known:
                    value = "7" if former != "address" else "h:1"
                    context = command.make_context(path, [*_needed(command), f"--{former}", value])
                    assert context is not None
                assert f"--{former}" not in {name for one in shown(command) for name in one.opts}, path


def _needed(command: Any) -> list[str]:
    """The arguments, and the options that must be given."""
    words = ["x" for one in command.params if one.param_type_name == "argument" and one.required]
    for one in options(command):
        words += [one.opts[0], "x"] if one.required else []
    return words


def test_reference_has_the_connection_options():
    text = (Path(__file__).parents[2] / "docs" / "reference" / "commands.md").read_text()
    for name in CONNECTION:
        assert f"`{name}`" in text
