"""The README and the first engine are true: the commands are those that CI runs, the code runs as printed."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

import kvplane
from kvplane_plan.models.catalogue import MODELS
from kvplane_tools.cli.child import ServiceChild

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
FIRST_ENGINE = (ROOT / "docs" / "first-engine.md").read_text()
DEFAULT_ADDRESS = "127.0.0.1:7070"


def fenced_blocks(text: str, language: str) -> list[str]:
    """Return the contents of the fenced code blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def run_block(code: str) -> subprocess.CompletedProcess[str]:
    """Run a block as a reader would: in a separate process, in the root of the repository."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_fenced_blocks_of_one_language_are_found_in_order():
    text = "```sh\nls\n```\ntext\n```python\na = 1\n\nb = 2\n```\n```python\nc\n```\n"
    assert fenced_blocks(text, "python") == ["a = 1\n\nb = 2\n", "c\n"]
    assert fenced_blocks(text, "sh") == ["ls\n"]
    assert fenced_blocks("```python\nnever closed\n", "python") == []


def test_block_runs_in_a_separate_process():
    assert run_block("import kvplane.base.step\nprint('ran')").stdout == "ran\n"
    failed = run_block("import no_such_module")
    assert failed.returncode != 0
    assert "no_such_module" in failed.stderr


def test_readme_commands_are_make_targets_and_ci_runs_the_tests():
    blocks = [block.strip() for block in fenced_blocks(README, "sh")]
    (test,) = (block for block in blocks if block == "make test")
    assert blocks[0] == "make demo"
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert {"demo", "test"} <= set(targets)
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    assert commands == [test]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A service for the README's code, instead of the one on the default port."""
    with ServiceChild() as service:
        yield service.address


def test_engine_loop_runs_as_printed(address):
    (loop,) = fenced_blocks(FIRST_ENGINE, "python")
    assert DEFAULT_ADDRESS in loop
    done = run_block(loop.replace(DEFAULT_ADDRESS, address))
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("turn 1: 0 of 100 prompt tokens were cached")
    assert second.startswith("turn 2: 96 of 100 prompt tokens were cached")


def hits_of_the_loop(changes: dict[str, str], **names: object) -> list[int]:
    """Prompt tokens that each turn of the loop hits, with parts of its text replaced; `names` are global in it."""
    (loop,) = fenced_blocks(FIRST_ENGINE, "python")
    for said, other in changes.items():
        assert said in loop
        loop = loop.replace(said, other)
    printed = StringIO()
    with redirect_stdout(printed):
        exec(compile(loop, "first-engine.md", "exec"), names)
    return [int(line.split()[2]) for line in printed.getvalue().splitlines()]


LONG_PROMPT = {"num_blocks=2100": "num_blocks=8000", "range(1000, 1100)": "range(1000, 3000)"}


@pytest.mark.parametrize("model", MODELS)
def test_engine_loop_hits_on_every_model(address, model):
    """The prompt is longer than a block of any model."""
    changes = {DEFAULT_ADDRESS: address, '"readme"': f'"{model}"', "llama-3.1-8b": model, **LONG_PROMPT}
    first, second = hits_of_the_loop(changes)
    assert first == 0
    assert second >= 1500


@pytest.mark.parametrize(
    "name",
    ["deepseek_v32", "falcon_h1", "gemma3n_text", "kimi_linear", "lfm2", "mimo_v2_flash", "nemotron_h", "zamba2"],
)
def test_engine_loop_hits_on_models_registered_from_a_config(address, name):
    plans = ROOT / "tests" / "plan" / "reference_plans" / "plans.json"
    config = json.dumps(json.loads(plans.read_text())[name]["config"])
    changes = {DEFAULT_ADDRESS: address, '"readme"': f'"{name}"', 'model="llama-3.1-8b"': "config=CONFIG"}
    first, second = hits_of_the_loop(changes | LONG_PROMPT, CONFIG=config)
    assert first == 0
    assert second >= 1000


def test_unaligned_rows_of_a_recurrent_model_hit_nothing(address):
    """The loop relies on alignment: unaligned rows leave no state where it can be cached."""
    tokens = range(2000)
    with kvplane.connect(address) as client:
        client.register_replica("opts-out", kvplane.ModelSource(model="jamba-v0.1", num_blocks=8000))
        with client.session("opts-out") as session:
            for slot in (0, 1):
                row = kvplane.AdmitRow(slot, flags=kvplane.RowFlag.UNALIGNED)
                result = session.apply(kvplane.part_of(kvplane.NewsRow(slot, tokens), row)).parts[0]
                assert result.admit_hit == [0]


def curl(line: str, address: str) -> dict[str, object]:
    """Execute a grpcurl command with buf, because grpcurl has no package."""
    words = shlex.split(line)
    assert words[:3] == ["grpcurl", "-plaintext", "-d"], line
    body, method = words[3], words[5]
    command = ["scripts/buf.sh", "curl", "--protocol", "grpc", "--http2-prior-knowledge", "-d", body]
    done = subprocess.run(
        [*command, f"http://{address}/{method}"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_grpcurl_calls_allocate_hit_and_are_refused(address):
    (block,) = (block for block in fenced_blocks(FIRST_ENGINE, "sh") if "grpcurl" in block)
    registered, allocated, _, found, refused = (curl(line, address) for line in block.splitlines())
    assert registered["spec"]
    assert allocated["status"] == "ALLOCATION_STATUS_GRANTED"
    assert found["hitTokens"] == 16
    assert refused["status"] == "ALLOCATION_STATUS_REFUSED"
