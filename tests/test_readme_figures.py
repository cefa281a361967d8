"""The figures of the README are those of the recorded results, its links and tests exist, its pictures are drawn."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SAID = " ".join(README.split())
RESULTS = ROOT / "tests" / "bench" / "results"


def rows_of(table: str) -> list[list[str]]:
    """Return the cells of the rows of all Markdown tables in a text."""
    lines = [line.strip() for line in table.splitlines() if line.strip().startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def span(cells: list[str]) -> str:
    """Return the least and the most of the numbers in the cells, as they are written there."""
    numbers = sorted((number for cell in cells for number in cell.split(", ")), key=float)
    return "–".join(dict.fromkeys((numbers[0], numbers[-1])))


def count_records(folder: str, start: bytes) -> tuple[int, int]:
    """Return the number of recordings in a folder, and of their lines that begin with `start`, without the headers."""
    files = sorted((ROOT / "tests" / "conformance" / folder).glob("*.jsonl.gz"))
    return len(files), sum(gzip.decompress(one.read_bytes()).count(b"\n" + start) for one in files)


def test_span_keeps_the_written_form():
    assert span(["1.10, 0.9", "10.00"]) == "0.9–10.00"


def test_cost_of_schedule_is_that_of_the_results():
    """Each row: stock's time, then the ratio of each mode; ratios above 1 in every run are bold."""
    recorded = [row for row in rows_of((RESULTS / "vllm_schedule.md").read_text()) if row[2] in ("phase", "even")]
    shown = (("8", "1"), ("8", "7"), ("256", "1"), ("256", "7"))
    spans = {
        case: [span([row[column] for row in recorded if (row[0], row[1]) == case]) for column in (3, 4, 5, 6, 7)]
        for case in shown
    }
    assert sum((row[0], row[1]) in shown for row in recorded) == 8, "the results have two loads of each case"
    in_readme, in_vllm = (
        {(row[0], row[1]): row[2:] for row in rows_of(text) if row[0] in ("8", "256")}
        for text in (README, (ROOT / "docs" / "vllm.md").read_text())
    )
    for case, (stock, *ratios) in spans.items():
        losing = [f"**{one}**" if float(one.split("–")[0]) > 1 else one for one in ratios[:3]]
        assert in_readme[case] == [stock, *losing]
        assert in_vllm[case] == ratios
    date = re.search(r"date (\S+),", (RESULTS / "vllm_schedule.md").read_text())
    assert date is not None
    assert f"Two loads, one run each, {date[1]}:" in SAID


def test_steps_out_of_process_are_those_of_the_results():
    cells = json.loads((RESULTS / "peer.json").read_text())["cells"]
    ratios = {
        requests: [
            cell["ratio"]
            for cell in cells
            if (cell["case"]["kind"], cell["case"]["size"], cell["side"]) == ("decode", requests, "session socket")
        ]
        for requests in (1, 256)
    }
    printed = {row[0]: row[1:] for row in rows_of(README)}
    assert printed["one"] == [f"**{one:.2g}**" for one in ratios[1]]
    assert printed["256 in one step"] == [f"{one:.2g}" for one in ratios[256]]
    faster = sorted(1 / one for one in ratios[256])
    assert f"large batches are {faster[0]:.0f} to {faster[-1]:.0f} times faster" in SAID
    assert f"single requests {min(ratios[1]):.0f} to {max(ratios[1]):.0f} times slower" in SAID


def test_what_a_killed_engine_hits_and_its_ttft_are_those_of_the_results():
    results = (RESULTS / "crash.md").read_text()
    killed = {row[0]: row for row in rows_of(results) if "kill -9" in row[1]}
    stock, ours = killed["stock"], killed["b, kvplane"]
    for name, row in (("stock vLLM", stock), ("vLLM with kvplane", ours)):
        share = re.search(r"\((\d+ %)\)", row[3])
        assert share is not None
        assert [name, share[1], f"{row[4]} s"] in rows_of(README)
        assert {f"next turn: TTFT {row[4]} s", f"{share[1]} of the prompt cached"} <= texts_of("crash-light.svg")
    date, load = re.search(r"date (\S+),.* load (.+); one run", results).groups()  # type: ignore[union-attr]
    assert f"one run on {date} at load {load}" in SAID
    assert f"prompts of {int(stock[2]) // 8:,} tokens" in SAID
    assert "0 of 64 answers differ" in results


def texts_of(picture: str) -> set[str]:
    return set(re.findall(r"<text[^>]*>([^<]*)</text>", (ROOT / "docs" / picture).read_text()))


def test_restart_is_that_of_the_results():
    measured = json.loads((RESULTS / "restart.json").read_text())
    (one,) = (each for each in measured if (each["store"], each["groups"]) == ("SQLite", 1))
    assert one["entries"] == 1_000_000
    assert f"a million keys ready in {one['ready_s']:.2f} s from SQLite" in SAID
    assert f"{one['hits']:,} of {one['expected_hits']:,} prefixes hit as before" in SAID


def test_simulated_runs_are_those_of_the_campaigns():
    said = re.search(
        r"No wrong hit \| ([\d,]+) simulated runs with ([\d,]+) faults \(seeds (\d+) to (\d+) at (\w+)\)", SAID
    )
    assert said is not None
    campaigns = rows_of((ROOT / "tests" / "sim" / "CAMPAIGNS.md").read_text())
    (row,) = (row for row in campaigns if row[1:3] == [said[5], f"{said[3]}..{said[4]}"])
    assert row[3] == said[1].replace(",", "")
    assert row[5] == said[2].replace(",", "")
    assert row[8] == "0", "no seed of the campaign failed"
    assert f"make sim SEEDS={row[3]} SEED_BASE={said[3]}" in SAID


def test_recordings_are_counted():
    assert "{} recordings of {:,} operations".format(*count_records("traces", b"{")) in SAID
    assert "{} recordings of {:,} scheduler steps".format(*count_records("steps", b'{"t":')) in SAID


def test_files_that_the_readme_names_exist():
    named = set(re.findall(r"`(tests/[\w/.]+\.py)`", README))
    named |= {link for link in re.findall(r"\]\(([^)#]+)\)", README) if not link.startswith("https://")}
    named |= set(re.findall(r'(?:src|srcset)="([^"]+)"', README))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_row_of_works_with_names_a_test():
    section = README.split("## Works with")[1].split("## ")[0]
    rows = rows_of(section)[2:]
    assert len(rows) >= 5
    assert all(re.search(r"`tests/\S+\.py`", tested) for _, tested in rows)


def test_make_targets_that_the_readme_names_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    named = set(re.findall(r"`make ([a-z-]+)", README))
    assert len(named) > 6
    assert named <= set(targets)


def test_pictures_are_drawn_by_the_script(tmp_path):
    code = "import sys; from pathlib import Path; import pictures as p; p.DOCS = Path(sys.argv[1]); p.main()"
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT / "scripts", timeout=60, check=True)
    names = sorted(drawn.name for drawn in tmp_path.iterdir())
    assert names == [
        "crash-dark.svg",
        "crash-light.svg",
        "system-dark.svg",
        "system-light.svg",
        "tiers-dark.svg",
        "tiers-light.svg",
    ]
    for name in names:
        assert (tmp_path / name).read_text() == (ROOT / "docs" / name).read_text(), "python scripts/pictures.py"
