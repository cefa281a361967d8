"""`kvplane plan`."""

from __future__ import annotations

import json

import yaml


def test_plan_prints_tables(kvplane):
    code, out, _ = kvplane("plan", "gpt-oss-120b", "--concurrent-batches", "2")
    assert code == 0
    lines = out.splitlines()
    assert lines[:3] == [
        "gpt-oss-120b in 40GiB per rank: 72,817 blocks of 589,824 bytes",
        "73,728 bytes per token while every token is kept",
        "3,081 blocks per request of 32,768 tokens: 23.63 concurrent requests; uniform 17.78, gain 1.33 x",
    ]
    assert "fp8       8   4,608        1,165,084  378.15      284.44" in lines
    assert any(line.startswith("131,072  7.89") and line.endswith("██") for line in lines)


def test_plan_prints_json_and_yaml(kvplane):
    answer = json.loads(kvplane("plan", "llama-3.1-70b", "--cache-dtype", "fp8", "--context", "8192", "-o", "json")[1])
    assert answer["bytes_per_token"] == 163_840
    assert answer["concurrency"] == 32.0
    assert answer["groups"][0]["kind"] == "full_attention"
    assert {"cache_dtype": "fp8", "tensor_parallel": 2} in [
        {name: one[name] for name in ("cache_dtype", "tensor_parallel")} for one in answer["by_layout"]
    ]
    at_8k = next(one for one in answer["by_length"] if one["max_model_len"] == 8192)
    assert (at_8k["concurrency"], at_8k["uniform_concurrency"]) == (32.0, 32.0)
    assert yaml.safe_load(kvplane("plan", "llama-3.1-70b", "-o", "yaml")[1])["gain"] == 1.0


def test_plan_states_the_unit_of_hits(kvplane):
    lines = [kvplane("plan", "qwen3-next-80b", "--prefix-match-unit", unit)[1].splitlines() for unit in ("0", "16")]
    coarse, fine = lines
    assert coarse[3] == "prefix hits are multiples of 544 tokens"
    assert coarse[4].startswith("warning: prefix hits are multiples of 544 tokens, a block of states; with prefix_mat")
    assert fine[3:5] == ["prefix hits are multiples of 16 tokens", ""]
    assert json.loads(kvplane("plan", "llama-3.1-8b", "--no-prefix-caching", "-o", "json")[1])["hit_unit"] == 0
    code, _, errors = kvplane("plan", "qwen3-next-80b", "--prefix-match-unit", "48")
    assert (code, errors.split(":")[1].strip()) == (2, "prefix_match_unit")


def test_plan_of_an_unknown_model_is_wrong_use(kvplane):
    code, _, errors = kvplane("plan", "gemma-4")
    assert code == 2
    assert "the most similar name is gemma-3-27b" in errors


def test_plan_plot_is_written(kvplane, tmp_path):
    png, svg = tmp_path / "plan.png", tmp_path / "plan.svg"
    assert kvplane("plan", "gpt-oss-120b", "--plot", str(png))[0] == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert kvplane("plan", "gpt-oss-120b", "--plot", str(svg), "-o", "json")[0] == 0
    drawn = svg.read_text()
    assert "<!-- hybrid -->" in drawn
    assert "<!-- uniform: every layer keeps every token -->" in drawn
    assert "<!-- 128k -->" in drawn


def test_plan_plot_to_an_invalid_path_is_refused(kvplane, tmp_path):
    code, _, errors = kvplane("plan", "gpt-oss-120b", "--plot", str(tmp_path / "plan.txt"))
    assert code == 2
    assert "--plot: 'plan.txt' does not end in the suffix of an image format" in errors
    code, _, errors = kvplane("plan", "gpt-oss-120b", "--plot", str(tmp_path / "none" / "plan.png"))
    assert code == 2
    assert "create the directory first" in errors
    code, _, errors = kvplane("plan", "gpt-oss-120b", "--plot", "/proc/plan.png")
    assert code == 2
    reason = "/proc/plan.png cannot be written: No such file or directory"
    assert errors == f"kvplane: --plot: {reason} (name a writable path)\n"
    (tmp_path / "folder.png").mkdir()
    code, _, errors = kvplane("plan", "gpt-oss-120b", "--plot", str(tmp_path / "folder.png"))
    assert code == 2
    assert "is a directory (name a file)" in errors
