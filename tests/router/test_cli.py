"""`kvplane fleet` follows the engines of a file once, and prints what they have."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.router.engine import EngineProcess, batches
from tests.store.servers import free_port


def run(*words):
    command = [sys.executable, "-m", "kvplane_service", "fleet", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    engine = EngineProcess(events, replay, seed=0)
    try:
        engine.publish(3)
        path = tmp_path_factory.mktemp("fleet") / "places.yaml"
        path.write_text(f"places: [{{name: first, events: '{events}', replay: '{replay}', model: m}}]")
        yield path
    finally:
        engine.kill()


def test_describe_names_groups_hashes_and_faults(places):
    done = run("describe", str(places))
    assert done.returncode == 0, done.stderr
    heading, line = done.stdout.splitlines()
    assert heading.split() == "PLACE MODEL STATE BATCHES ENTRIES GROUPS HASHES FAULTS".split()
    assert "first  m      current  3 " in line
    assert "0 full_attention in 16; 1 sliding_window of 32 in 16" in line
    assert "sha256, default seed, blocks of 16" in line


def test_hits_are_the_prompts_cached_tokens(places):
    prompt = next(batches(0))[0]["token_ids"]
    tokens = ",".join(map(str, [*prompt, 7]))
    done = run("hits", str(places), "--tokens", tokens, "--model", "m")
    assert done.stdout.splitlines()[1].split()[:2] == ["first", str(len(prompt))]
    assert len(run("hits", str(places), "--tokens", tokens).stdout.splitlines()) == 1, "no place has this model"


def test_wrong_use_and_absent_engines_are_errors(places, tmp_path):
    assert run("hits", str(places), "--tokens", "a,b").returncode == 2
    assert run("describe", str(tmp_path / "missing")).returncode == 2
    alone = tmp_path / "places.yaml"
    alone.write_text(f"places: [{{name: a, events: 'tcp://127.0.0.1:{free_port()}'}}]")
    done = run("describe", str(alone), "--within", "0.5")
    assert done.returncode == 3
    assert "no engine of" in done.stderr
