"""`kvplane replay`, run as a process."""

from __future__ import annotations

import gzip
import json
import os
import signal
from pathlib import Path

import pytest

from tests.cli.processes import Watched, children, interrupt, run_kvplane, running

OWN_BLOCKS = 3


def mooncake_line(number: int, shared: int, output: int = 20) -> str:
    """A request whose first `shared` blocks of 512 tokens are shared by all requests."""
    ids = [*range(shared), *(1000 + OWN_BLOCKS * number + at for at in range(OWN_BLOCKS))]
    record = {
        "timestamp": 50 * number,
        "input_length": 512 * len(ids) - 100,
        "output_length": output,
        "hash_ids": ids,
    }
    return json.dumps(record) + "\n"


@pytest.fixture
def trace(tmp_path) -> Path:
    """Forty requests with four shared blocks."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(mooncake_line(number, 4) for number in range(40)), encoding="utf-8")
    return path


@pytest.fixture
def long_trace(tmp_path) -> Path:
    """A replay that takes minutes unless it is interrupted."""
    path = tmp_path / "long.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as out:
        out.writelines(mooncake_line(number, 4, output=2000) for number in range(20_000))
    return path


def test_replay_json_has_equal_counts_of_engine_and_service(trace):
    done = run_kvplane("replay", trace, "--json", "--events", "--pool-blocks", 800, "--max-model-len", 4000)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["disagreements"] == []
    assert (answer["requests"], answer["completed"], answer["refused"]) == (40, 40, {})
    for name in ("steps", "hit_tokens", "allocated_blocks", "evicted_blocks", "preempted"):
        assert answer["service"][name] == answer["engine"][name]
    assert answer["service"]["hit_tokens"] >= 39 * 4 * 512 * 0.5
    assert sum(answer["service"]["evicted_blocks"]) > 0
    assert answer["generated_tokens"] == 40 * 20


def test_replay_with_tiers_says_what_each_one_hit(tmp_path):
    """Prompts that come back when the pool has evicted them: the host has some, the disk the rest."""
    path = tmp_path / "trace.jsonl"
    lines = [json.loads(mooncake_line(number % 12, 1, output=2)) for number in range(36)]
    path.write_text("".join(json.dumps({**line, "timestamp": 50 * at}) + "\n" for at, line in enumerate(lines)))
    pool = ("--pool-blocks", "600", "--max-model-len", "4096", "--one-at-a-time", "--token-budget", "512")
    tiers = ("--host-blocks", "400", "--disk-blocks", "3000", "--mover-steps", "1")

    def outcome(*words):
        done = run_kvplane("replay", str(path), *pool, *words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    alone, tiered = outcome(), outcome(*tiers)
    assert tiered["disagreements"] == alone["disagreements"] == []
    kinds = [("host", 400), ("disk", 3000)]
    found = [(tier["kind"], tier["num_blocks"], tier["save"], tier["checkpoint_percent"]) for tier in tiered["tiers"]]
    assert found == [(kind, count, "behind", 0) for kind, count in kinds]
    host, disk = tiered["service"]["tier_hit_tokens"]
    assert min(host, disk) > 0
    assert tiered["service"]["hit_tokens"] > 2 * alone["service"]["hit_tokens"]
    done = run_kvplane("replay", str(path), *pool, *tiers)
    assert "loaded from disk" in done.stdout
    reused = outcome(*tiers, "--host-save", "reuse", "--disk-save", "through")
    assert [one["save"] for one in reused["tiers"]] == ["reuse", "through"]
    assert 0 < reused["engine"]["tier_writes"][0] < tiered["engine"]["tier_writes"][0]
    done = run_kvplane("replay", str(path), "--disk-save", "through")
    assert (done.returncode, done.stderr.split(":")[1].strip()) == (2, "--disk-save")
    done = run_kvplane("replay", str(path), "--host-checkpoints", "15")
    assert (done.returncode, done.stderr.split(":")[1].strip()) == (2, "--host-checkpoints")
    done = run_kvplane("replay", str(path), *pool, *tiers, "--host-checkpoints", "15")
    assert (done.returncode, "tiers[0].checkpoint_percent" in done.stderr) == (2, True), "no windows and no states"
    done = run_kvplane("replay", str(path), "--log", "--host-blocks", "5")
    assert (done.returncode, done.stderr.split(":")[1].strip()) == (2, "--host-blocks")


def test_replay_takes_a_match_unit(tmp_path):
    path = tmp_path / "twice.jsonl"
    path.write_text(2 * mooncake_line(0, 4))
    sizes = ("--model", "qwen3-next-80b", "--pool-blocks", 4000, "--max-model-len", 4000, "--one-at-a-time")
    hits = {}
    for unit in (0, 16):
        done = run_kvplane("replay", path, "--json", *sizes, "--prefix-match-unit", unit)
        hits[unit] = json.loads(done.stdout)["service"]["hit_tokens"]
    prompt = 512 * (4 + OWN_BLOCKS) - 100
    assert hits == {unit: (prompt - 1) // step * step for unit, step in ((0, 544), (16, 16))}


def test_replay_command_is_deterministic(trace):
    sizes = ("--pool-blocks", 4000, "--max-model-len", 4000, "--replicas", 2)
    first, second = (
        json.loads(run_kvplane("replay", trace, "--json", "--model", "gemma-3-27b", *sizes).stdout) for _ in range(2)
    )
    for answer in (first, second):
        assert answer.pop("wall_s") > 0
        assert answer.pop("steps_per_s") > 0
    assert first == second
    assert first["replicas"] == 2


def test_replay_table_names_refused_requests(trace):
    done = run_kvplane("replay", trace, "--limit", 5, "--max-model-len", 3000)
    assert done.returncode == 0, done.stderr
    assert "refused: longer than max_model_len" in done.stdout
    assert "refused line-1: longer than max_model_len (3504 tokens" in done.stdout
    assert "preemptions" in done.stdout


def test_replay_names_a_malformed_line_and_counts_earlier_requests(trace):
    with trace.open("a", encoding="utf-8") as out:
        out.write('{"timestamp": 9000, "input_length": "many", "output_length": 1, "hash_ids": []}\n')
        out.write(mooncake_line(900, 4))
    done = run_kvplane("replay", trace, "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 1
    assert (answer["requests"], answer["completed"]) == (40, 40)
    assert "line 41" in answer["fault"]
    assert "input_length" in done.stderr


def test_replay_names_a_truncated_file_and_counts_earlier_requests(tmp_path):
    path = tmp_path / "cut.jsonl.gz"
    whole = gzip.compress("".join(mooncake_line(number, 4) for number in range(300)).encode())
    path.write_bytes(whole[: len(whole) * 3 // 4])
    done = run_kvplane("replay", path, "--json", "--max-output", 1)
    answer = json.loads(done.stdout)
    assert done.returncode == 1
    assert "cut off" in done.stderr
    assert 100 < answer["completed"] == answer["requests"] < 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-file.jsonl"], "no-such-file.jsonl"),
        (["TRACE", "--model", "llama-9"], "llama-9"),
        (["TRACE", "--max-model-len", "131072", "--pool-blocks", "5000000"], "max_blocks"),
        (["TRACE", "--service", "127.0.0.1:1"], "127.0.0.1:1"),
        (["TRACE", "--address", "127.0.0.1:1"], "127.0.0.1:1"),
        (["TRACE", "--replicas", "0"], "replicas"),
    ],
)
def test_replay_error_is_one_line_and_an_exit_code(trace, arguments, message):
    done = run_kvplane("replay", *[str(trace) if word == "TRACE" else word for word in arguments])
    assert done.returncode in (1, 2, 3)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_of_replay_leaves_no_child(long_trace):
    with running("replay", long_trace) as process:
        assert process.stderr is not None
        assert "completed" in process.stderr.readline()
        (child,) = children(process.pid)
        service = Watched(child)
        assert interrupt(process) == 130
        assert service.wait_for_end()
        assert "interrupted" in process.stderr.read()


def test_a_killed_replay_leaves_no_child(long_trace):
    with running("replay", long_trace) as process:
        assert process.stderr is not None
        assert "completed" in process.stderr.readline()
        (child,) = children(process.pid)
        service = Watched(child)
        os.kill(process.pid, signal.SIGKILL)
        assert service.wait_for_end()


@pytest.mark.parametrize(
    ("file", "arguments"),
    [
        ("mooncake_conversation_first_half.jsonl.gz", ("--model", "gpt-oss-120b")),
        ("mooncake_synthetic_first_half.jsonl.gz", ("--model", "gemma-3-27b", "--replicas", 2)),
        # Its sessions hardly overlap, so every token takes a step: fewer tokens, to save time.
        ("weka_claude_code_share.jsonl.zst", ("--model", "jamba-v0.1", "--max-output", 40)),
    ],
)
def test_replay_command_replays_300_requests_of_real_traces(workloads, file, arguments):
    done = run_kvplane("replay", workloads / file, "--limit", 300, "--json", "--events", *arguments)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["requests"] == 300 == answer["completed"] + sum(answer["refused"].values())
    assert set(answer["refused"]) <= {"longer than max_model_len"}
    assert answer["completed"] > 200
    assert answer["service"]["hit_tokens"] > 0
