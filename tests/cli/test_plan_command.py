"""`kvplane plan`."""

from __future__ import annotations

import json

import pytest
import yaml

from kvplane_plan.models.model_types import READERS


def test_plan_prints_tables(kvplane):
    code, out, _ = kvplane("plan", "gpt-oss-120b", "--concurrent-batches", "2")
    assert code == 0
    lines = out.splitlines()
    assert lines[:4] == [
        "gpt-oss-120b in 40GiB per rank: 72,817 blocks of 576 KiB",
        "72 KiB per token while every token is kept",
        "3,081 blocks per request of 32,768 tokens: 23.63 concurrent requests if each is in a prefill of 8,192 tokens "
        "(engines admit by this), 35.38 while all decode",
        "17.78 in a uniform cache, so the gain is 1.33 x and 1.99 x",
    ]
    assert ["fp8", "8", "4.5", "KiB", "1,165,084", "378.15", "284.44"] in [line.split() for line in lines]
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
    mtp = "warning: the model's layer for multi-token prediction: planned only with the drafter mtp"
    assert fine[3:6] == ["prefix hits are multiples of 16 tokens", mtp, ""]
    assert coarse[5] == mtp
    assert json.loads(kvplane("plan", "llama-3.1-8b", "--no-prefix-caching", "-o", "json")[1])["hit_unit"] == 0
    code, _, errors = kvplane("plan", "qwen3-next-80b", "--prefix-match-unit", "48")
    assert (code, errors.split(":")[1].strip()) == (2, "prefix_match_unit")


@pytest.mark.parametrize(
    ("model", "size", "warning"),
    [
        ("llama-3.1-8b", "7", "blocks of 7 tokens: attention kernels have multiples of 16"),
        ("llama-3.1-8b", "100", "blocks of 100 tokens: attention kernels have multiples of 16"),
        ("llama-4-scout", "48", "chunks of 8192 tokens begin inside blocks of 48"),
    ],
)
def test_plan_warns_of_blocks_that_no_kernel_has_and_that_no_chunk_is_a_multiple_of(kvplane, model, size, warning):
    lines = kvplane("plan", model, "--context", "8192", "--block-size", size)[1].splitlines()
    assert [line for line in lines if line.startswith("warning: ")] == [f"warning: {warning}"]


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


def test_plan_for_a_gpu_subtracts_the_share_of_the_weights(kvplane):
    def blocks(*options):
        answer = json.loads(kvplane("plan", "llama-3.1-70b", "-o", "json", *options)[1])
        fp8 = [one for one in answer["by_layout"] if one["cache_dtype"] == "fp8"]
        return answer["num_blocks"], {one["tensor_parallel"]: one["num_blocks"] for one in fp8}

    on_gpu = blocks("--gpu", "H100", "--utilization", "0.9", "--weights", "140GB", "--tensor-parallel", "4")
    left = (81_559 << 20) * 9 // 10  # 81,559 MiB as the driver reports
    assert on_gpu[0] == blocks("--memory", f"{left - 35 * 10**9}", "--tensor-parallel", "4")[0]
    assert on_gpu[1].keys() == {2, 4, 8}, "the weights do not fit on one"
    assert (
        on_gpu[1][8]
        == blocks("--memory", f"{left - 17_500 * 10**6}", "--tensor-parallel", "8", "--cache-dtype", "fp8")[0]
    )


def test_plan_for_bad_memory_is_refused(kvplane):
    for options, complaint in (
        (("--gpu", "h100", "--memory", "40GiB"), "gpu: --gpu and --memory are both given"),
        (("--gpu", "voodoo"), "gpu: the GPU 'voodoo' is unknown (use one of a10, "),
        (("--gpu", "h100", "--utilization", "1.5"), "utilization: it is 1.5"),
        (("--gpu", "h100", "--weights", "140GB"), "weights: 140,000,000,000 bytes on 1 ranks leave none"),
        (("--weights", "much"), "weights: 'much' is not a size in bytes"),
    ):
        code, _, errors = kvplane("plan", "llama-3.1-70b", *options)
        assert code == 2
        assert errors.startswith(f"kvplane: {complaint}")


def test_models_lists_names_and_model_types(kvplane):
    code, out, _ = kvplane("models")
    assert code == 0
    lines = out.splitlines()
    assert "jamba-v0.1      32      28 mamba, 4 full_attention" in lines
    assert max(map(len, lines)) <= 100
    named = json.loads(kvplane("models", "-o", "json")[1])
    assert {"name": "llama-3.1-8b", "layers": 32, "caches": "32 full_attention"} in named["models"]
    assert named["model_types"] == sorted(READERS)
    assert all(one in out for one in READERS)


def test_plan_compares_planners_for_a_mix_of_lengths(kvplane):
    _, out, _ = kvplane("plan", "gemma-3-27b", "--mix", "1000:3,5000", "-o", "json")
    assert [cell["length"] for cell in json.loads(out)["cells"]] == [1000, 5000, 32768]


@pytest.mark.parametrize(
    ("mix", "problem"),
    [
        ("2048;3", "is no length with a weight"),
        ("2048,2048:2", "is no length with a weight"),
        ("2048:0", "weights"),
        ("0", "a length of 0 tokens"),
        (",".join(map(str, range(1, 18))), "17 lengths"),
    ],
)
def test_plan_refuses_a_mix_by_name(kvplane, mix, problem):
    code, _, err = kvplane("plan", "gemma-3-27b", "--mix", mix)
    assert code
    assert "mix" in err
    assert problem in err


def test_plan_compares_planners(kvplane):
    code, out, _ = kvplane("plan", "gemma-3-27b", "--compare")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "reference: 7 groups, layout LBNHC, prefix hits are multiples of 16 tokens"
    assert lines[2] == "a cheaper plan has too many groups, each with a block table"
    assert lines[6].split() == ["2,048", "63.3", "63.3", "71.1", "+0.0%", "+12.3%"]
    answer = json.loads(kvplane("plan", "gemma-3-27b", "--compare", "-o", "json")[1])
    assert (answer["binds"], len(answer["cells"]), answer["best"]["groups"]) == ("groups", 3, 7)
    assert [one["num_layers"] for one in answer["best"]["by_group"]] == [9, 9, 9, 9, 8, 8, 10]


def test_plan_reports_blocks_and_pipeline_stages(kvplane):
    """gemma-3-27b: 62 layers, of which 10 attend to everything, in 4 stages that vLLM divides into 15, 16, 16, 15."""
    words = ("plan", "gemma-3-27b", "--compare", "--pipeline-parallel", "4")
    lines = [line.split() for line in kvplane(*words)[1].splitlines()]
    assert ["reference", "4", "sliding_window", "9", "16"] in lines
    assert ["best", "1", "full_attention", "10", "16"] in lines
    assert ["reference", "1", "16", "384", "KiB", "100.0%", "23.8%"] in lines
    answer = json.loads(kvplane(*words, "-o", "json")[1])
    for plan in ("reference", "best"):
        groups, stages = answer[plan]["by_group"], answer[plan]["by_stage"]
        assert sum(one["num_layers"] for one in groups) == sum(one["num_layers"] for one in stages) == 62
        assert max(one["memory_share"] for one in stages) == pytest.approx(1, abs=0.001)
    page = 16 * 2 * 16 * 128 * 2  # 16 tokens, keys and values of 16 heads of 128 in 2 bytes
    assert stages[0]["bytes_per_block"] == 3 * page
    assert stages[0]["padding_share"] == pytest.approx(1 - 15 / (6 * 3))


@pytest.mark.parametrize(
    ("words", "problem"),
    [(["--pipeline-parallel", "4"], "--compare"), (["--compare", "--pipeline-parallel", "63"], "62")],
)
def test_plan_refuses_stages_that_it_cannot_report(kvplane, words, problem):
    code, _, err = kvplane("plan", "gemma-3-27b", *words)
    assert code
    assert err.startswith("kvplane: pipeline_parallel:")
    assert problem in err


def test_layers_are_divided_as_vllm_does(kvplane):
    """Of the rest, each stage before the last has one layer more; a drafter is in the last stage."""
    words = (
        "plan",
        "llama-3.1-8b",
        "--compare",
        "--pipeline-parallel",
        "6",
        "--drafter",
        "eagle",
        "--speculative-tokens",
        "2",
        "-o",
        "json",
    )
    stages = json.loads(kvplane(*words)[1])["reference"]["by_stage"]
    assert [one["num_layers"] for one in stages] == [5, 5, 5, 6, 6, 6]


def test_plan_compares_split_pages_of_a_model_with_states(kvplane):
    code, out, _ = kvplane("plan", "qwen3-next-80b", "--compare", "--mix", "1500")
    assert code == 0
    lines = out.splitlines()
    assert lines[2] == "split: 4 groups, layout LBNHC, prefix hits are multiples of 16 tokens"
    assert lines[3].startswith("split: 34 blocks of attention have the memory of a state; about 1/32 of all blocks")
    assert lines[7].split()[:5] == ["TOKENS", "REFERENCE", "BEST", "SPLIT", "IDEAL"]
    answer = json.loads(kvplane("plan", "qwen3-next-80b", "--compare", "--mix", "1500", "-o", "json")[1])
    assert (answer["split"]["blocks_per_state"], answer["split"]["hit_unit"]) == (34, 16)
    cell = answer["cells"][0]
    assert cell["reference"] < cell["split"] <= cell["ideal"]


def test_plan_says_what_tiers_hold(kvplane):
    """gpt-oss-20b at 131,072 tokens: 8,192 blocks of full attention and 8 of the window, as a load of
    tests/service/tier_rows.py has them.
    """
    words = ("plan", "gpt-oss-20b", "--context", "131072", "--host", "64GiB", "--disk", "1TB")
    code, out, _ = kvplane(*words)
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["TIER", "SLOTS", "SLOT", "SAVE", "BLOCKS/PROMPT", "PROMPTS", "OF", "131,072", "TOKENS"] in lines
    (host,) = [line for line in lines if line[:1] == ["host"] and len(line) == 8]
    assert host == ["host", "174,762", "384", "KiB", "behind", "8,200", "21.31", "2,793,464"]
    assert ["host", "1", "full_attention", "8,192", "174,591", "2,793,456"] in lines
    assert ["host", "0", "sliding_window", "8", "170", "2,720"] in lines
    tiers = json.loads(kvplane(*words, "-o", "json")[1])["tiers"]
    assert [one["kind"] for one in tiers] == ["host", "disk"]
    assert tiers[1]["slot_bytes"] == tiers[0]["slot_bytes"] + 4096  # with the page of its seal
    assert tiers[1]["num_blocks"] == 10**12 // tiers[1]["slot_bytes"]
    assert "tiers" not in json.loads(kvplane(*words[:4], "-o", "json")[1])


def test_plan_says_what_checkpoints_cost_and_when_tiers_save(kvplane):
    """151 windows of 8 blocks: one each 864 tokens, as tests/core/test_checkpoint_percent.py has it."""
    tiers = ("--host", "64GiB", "--disk", "1TB", "--checkpoints", "15", "--disk-save", "through")
    words = ("plan", "gpt-oss-20b", "--context", "131072", *tiers)
    out = kvplane(*words)[1]
    assert (
        "host: 1,208 blocks of a prompt are checkpoints, each 864 tokens (states: where the next chunk of 8,192 ends); "
        "without them 21.31 prompts fit"
    ) in out.splitlines()
    lines = [line.split() for line in out.splitlines()]
    assert ["host", "174,762", "384", "KiB", "behind", "9,408", "18.58", "2,434,779"] in lines
    assert ["host", "0", "sliding_window", "1,216", "22,588", "361,408"] in lines
    host, disk = json.loads(kvplane(*words, "-o", "json")[1])["tiers"]
    assert (host["save"], disk["save"]) == ("behind", "through")
    assert host["checkpoint_blocks"] == disk["checkpoint_blocks"] == 1208
    assert [group["checkpoint_blocks"] for group in host["groups"]] == [1208, 0]
    assert host["prompts"] < host["prompts_without"] == pytest.approx(21.31, abs=0.01)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            ("gpt-oss-20b", "--checkpoints", "15"),
            "--checkpoints: checkpoints are settings of a tier, and there is none",
        ),
        (("gpt-oss-20b", "--host", "9GB", "--disk-save", "reuse"), "--disk-save: there is no disk tier to save into"),
        (("llama-3.1-8b", "--host", "9GB", "--checkpoints", "15"), "tiers[0].checkpoint_percent: 15 has no effect"),
    ],
)
def test_settings_of_tiers_without_effect_are_refused(kvplane, words, complaint):
    code, _, errors = kvplane("plan", *words)
    assert code == 2
    assert errors.startswith(f"kvplane: {complaint}")


@pytest.mark.parametrize(("option", "field"), [("--host", "host"), ("--disk", "disk")])
def test_a_tier_without_a_slot_for_each_group_is_refused(kvplane, option, field):
    code, _, errors = kvplane("plan", "gpt-oss-20b", option, "390KiB")
    assert code == 2
    assert errors.startswith(f"kvplane: {field}: 399,360 bytes are ")
    assert "the model has 2 groups (give at least " in errors
    code, _, errors = kvplane("plan", "gpt-oss-20b", option, "plenty")
    assert (code, f"{option}-size" in errors) == (2, True)
    code, _, errors = kvplane("plan", "gpt-oss-20b", option, "1GiB", "--no-prefix-caching")
    assert (code, "no block has a key" in errors) == (2, True)


def test_plan_reports_stages_of_split_pages(kvplane):
    """Each block of a state has its share of it."""
    answer = json.loads(kvplane("plan", "qwen3-next-80b", "--compare", "--pipeline-parallel", "4", "-o", "json")[1])
    paddings = [stage["padding_share"] for plan in ("reference", "best", "split") for stage in answer[plan]["by_stage"]]
    assert len(paddings) == 12
    assert all(0 <= padding < 0.1 for padding in paddings)
