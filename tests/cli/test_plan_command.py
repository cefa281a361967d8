"""`kvplane plan`."""

from __future__ import annotations

import json

import yaml


def test_a_plan_is_told_as_a_table(kvplane):
    code, out, _ = kvplane("plan", "gpt-oss-120b", "--concurrent-batches", "2")
    assert code == 0
    lines = out.splitlines()
    assert lines[:3] == [
        "gpt-oss-120b in 40GiB per rank: 72,817 blocks of 589,824 bytes",
        "73,728 bytes per token while every token is kept",
        "3,081 blocks per request of 32,768 tokens: 23.63 at once; uniform 17.78, hybrid is 1.33 x",
    ]
    assert "fp8       8   4,608        1,165,084  378.15   284.44" in lines
    assert any(line.startswith("131,072  7.89") and line.endswith("██") for line in lines)


def test_and_as_data(kvplane):
    told = json.loads(kvplane("plan", "llama-3.1-70b", "--cache-dtype", "fp8", "--context", "8192", "-o", "json")[1])
    assert told["bytes_per_token"] == 163_840
    assert told["concurrency"] == 32.0
    assert told["groups"][0]["kind"] == "full_attention"
    assert {"cache_dtype": "fp8", "tensor_parallel": 2} in [
        {name: one[name] for name in ("cache_dtype", "tensor_parallel")} for one in told["by_layout"]
    ]
    at_8k = next(one for one in told["by_length"] if one["max_model_len"] == 8192)
    assert (at_8k["concurrency"], at_8k["uniform_concurrency"]) == (32.0, 32.0)
    assert yaml.safe_load(kvplane("plan", "llama-3.1-70b", "-o", "yaml")[1])["gain"] == 1.0


def test_an_unknown_model_is_wrong_use(kvplane):
    code, _, told = kvplane("plan", "gemma-4")
    assert code == 2
    assert "did you mean" in told


def test_a_plan_is_drawn(kvplane, tmp_path):
    png, svg = tmp_path / "plan.png", tmp_path / "plan.svg"
    assert kvplane("plan", "gpt-oss-120b", "--plot", str(png))[0] == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert kvplane("plan", "gpt-oss-120b", "--plot", str(svg), "-o", "json")[0] == 0
    drawn = svg.read_text()
    assert "<!-- hybrid -->" in drawn
    assert "<!-- uniform: every layer keeps every token -->" in drawn
    assert "<!-- 128k -->" in drawn


def test_a_picture_that_cannot_be_written_is_refused_by_name(kvplane, tmp_path):
    code, _, told = kvplane("plan", "gpt-oss-120b", "--plot", str(tmp_path / "plan.txt"))
    assert code == 2
    assert "plot: 'plan.txt' is no picture's name" in told
    code, _, told = kvplane("plan", "gpt-oss-120b", "--plot", str(tmp_path / "none" / "plan.png"))
    assert code == 2
    assert "make it first" in told
    code, _, told = kvplane("plan", "gpt-oss-120b", "--plot", "/proc/plan.png")
    assert code == 2
    assert told == "kvplane: plot: /proc/plan.png: No such file or directory (name a place that can be written)\n"
    (tmp_path / "folder.png").mkdir()
    code, _, told = kvplane("plan", "gpt-oss-120b", "--plot", str(tmp_path / "folder.png"))
    assert code == 2
    assert "is a folder (name a file)" in told
