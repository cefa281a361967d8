"""The script that measures kernels on a GPU runs from end to end: at tiny size, in the interpreter."""

from __future__ import annotations

import json
import sys

import pytest

from tests.bench.gpu import __main__ as script
from tests.bench.gpu import correct, decoding
from tests.bench.gpu.figures import Figure


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["gpu", "--tiny", "--out", str(tmp_path)])
    return tmp_path


@pytest.mark.timeout(240)
def test_gpu_benchmark_checks_measures_and_writes_its_table(tiny):
    assert script.main() == 0
    data = json.loads((tiny / "gpu.json").read_text())
    names = [figure["name"] for figure in data["figures"]]
    assert len(names) == len(set(names))
    some = {"copy, 16 KiB pages", "write 32 tokens, float8_e4m3fn", "decode bfloat16, 2 x 64 tokens, pages of 16"}
    some |= {"decode while another process saves pages by batched copies"}
    some |= {
        "decode during saves of 4 KiB fragments",
        "3 drafts per row, 2 x 64 tokens",
        "prefill bfloat16, 64 of 64 tokens",
    }
    assert some <= set(names)
    assert all(figure["value"] > 0 and figure["ratio"] > 0 for figure in data["figures"])
    text = (tiny / "gpu.md").read_text()
    assert "NO FIGURE COUNTS" in text
    assert all(f"| {name} |" in text for name in names)


@pytest.mark.timeout(240)
def test_gpu_experiment_measures_every_cause(tiny, monkeypatch):
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--only", "causes"])
    assert script.main() == 0
    ratios = {figure["name"]: figure["ratio"] for figure in json.loads((tiny / "gpu.json").read_text())["figures"]}
    assert all(ratio > 0 for ratio in ratios.values())
    first = {"copies both ways by copy engines", "saves by batched copies", "gathers by 16 programs", "loads"}
    causes = first | {"saves, half spans", "saves, again", "saves, with priority"}
    assert {f"decode during {cause}" for cause in causes} <= ratios.keys()


def test_gpu_benchmark_with_wrong_results_measures_says_so_and_fails(tiny, monkeypatch, capsys):
    def broken(clock, sizes, limits):
        raise RuntimeError("an illegal memory access")
        yield

    monkeypatch.setattr(correct, "failures", lambda device, sizes: iter(["gather: 3 bytes are wrong"]))
    monkeypatch.setattr(decoding, "PARTS", (broken, decoding.latents))
    monkeypatch.setattr(script, "MEASURED", {"decoding": decoding})
    assert script.main() == 1
    assert "gather: 3 bytes are wrong" in capsys.readouterr().err
    text = (tiny / "gpu.md").read_text()
    assert "WRONG RESULTS 1" in text
    assert "MLA decode" in text


def test_gpu_figure_verdict_compares_with_its_goal():
    assert Figure("copy", 4e12, "device copy", 0.96, 0.95).verdict == "reached"
    assert Figure("copy", 4e12, "device copy", 0.94, 0.95).verdict == "missed"
    assert Figure("more", 1.0, "without", 1.02, 1.03, at_most=True).verdict == "reached"
    assert Figure("peer", 4e12, "device copy", 0.5).verdict == ""
