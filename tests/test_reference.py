"""docs/reference agrees with its sources, and its test vectors with the product and with the stated form."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from struct import pack
from typing import Any

import cbor2
import pytest

from kvplane import api
from kvplane.base.hashing import HashScheme, RequestHasher, pack_tokens, split_hashes
from kvplane.base.step import ExtraKeys, Multimodal
from kvplane.v1 import admin_pb2, allocation_pb2, events_pb2, plan_pb2, replica_pb2, step_pb2, worker_pb2
from kvplane_tools.cli import COMMANDS
from scripts.reference import narrow
from tests.test_readme import fenced_blocks

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "reference"
PROTO = ROOT / "proto" / "kvplane" / "v1"
HASHES = (PAGES / "hashes.md").read_text()
VECTORS: list[dict[str, Any]] = json.loads(fenced_blocks(HASHES, "json")[0])


def reference_script(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.reference", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


def test_pages_are_up_to_date():
    done = reference_script("--check")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "name",
    ["rpcs/admin.md", "errors.md", "configuration.md", "commands.md", "metrics.md", "performance.md", "python.md"],
)
def test_changed_page_is_found_and_written_again(name, tmp_path):
    pages = tmp_path / "reference"
    shutil.copytree(PAGES, pages)
    (pages / name).write_text((PAGES / name).read_text().replace("replica", "copy").replace("µs", "ms"))
    done = reference_script("--check", "--pages", pages)
    assert done.returncode == 1
    assert f"{name}: not up to date" in done.stderr
    assert reference_script("--pages", pages).returncode == 0
    assert (pages / name).read_text() == (PAGES / name).read_text()


def test_every_command_is_on_the_page():
    page = (PAGES / "commands.md").read_text()
    assert [name for name in COMMANDS if f"\n## kvplane {name}\n" not in page] == []
    assert "\n## kvplane store inspect\n" in page


def test_every_public_name_of_the_client_is_on_the_page():
    page = (PAGES / "python.md").read_text().replace("\\_", "_")
    errors = (PAGES / "errors.md").read_text()
    names = [name for name in api.__all__ if name != "aio"]
    assert [name for name in names if f"\n### {name}\n" not in page and f"`{name}`" not in errors] == []
    assert "\n#### Client.allocate_slots\n" in page


def test_every_rpc_message_and_field_is_on_the_page():
    page = "\n".join(one.read_text() for one in (PAGES / "rpcs").glob("*.md"))
    assert {one.stem for one in (PAGES / "rpcs").glob("*.md")} == {one.stem for one in PROTO.glob("*.proto")}
    missing = []
    for module in (admin_pb2, allocation_pb2, events_pb2, plan_pb2, replica_pb2, step_pb2, worker_pb2):
        file = module.DESCRIPTOR
        for message in file.message_types_by_name.values():
            section = page.partition(f"\n## {message.name}\n")[2].partition("\n## ")[0]
            missing += [f"{message.name}.{one.name}" for one in message.fields if f"| `{one.name}` |" not in section]
        for service in file.services_by_name.values():
            missing += [one.full_name for one in service.methods if f"**{one.name}** (" not in page]
        for enum in file.enum_types_by_name.values():
            missing += [one.name for one in enum.values if f"| `{one.name}` |" not in page]
    assert missing == []


def test_a_wide_table_becomes_several_with_every_cell():
    rows = [[f"{row}.{column}" for column in range(20)] for row in range(4)]
    lines = list(narrow(["**title**", "", *("|" + "|".join(row) + "|" for row in rows)]))
    assert lines[:2] == ["**title**", ""]
    tables = [part.splitlines() for part in "\n".join(lines[2:]).split("\n\n")]
    assert [[line.strip("|").split("|")[0] for line in table] for table in tables] == [["0.0", "1.0", "2.0", "3.0"]] * 3
    assert all(line.count("|") <= 11 for line in lines)
    assert {cell for line in lines for cell in line.strip("|").split("|")} >= {cell for row in rows for cell in row}


def test_page_on_performance_has_the_rows_that_lose():
    page = (PAGES / "performance.md").read_text()
    assert page.count("\n| 8 | 1 | ") == 2, "schedule() of eight requests, where stock vLLM is faster"
    for model in ("Llama-3.1-70B", "gpt-oss-20b", "Gemma-3-27B", "Jamba-v0.1"):
        assert f"\n**{model}**\n" in page


def test_drawings_and_tables_of_the_pages_fit_a_window_of_1400_pixels():
    """docs/wide.css is made for this width; `sh` and `python` blocks scroll."""
    too_wide = []
    for path in (ROOT / "docs").rglob("*.md"):
        for line in path.read_text().splitlines():
            is_drawing = re.search("[\u2500-\u257f]", line) is not None
            if (is_drawing and len(line) > 106) or (line.startswith("|-") and line.count("|") > 11):
                too_wide.append(f"{path.relative_to(ROOT)}: {line}")
    assert too_wide == []


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_product_computes_the_vector(vector):
    items = tuple(Multimodal(*item) for item in vector.get("multimodal", ()))
    lora = vector.get("lora")
    keys = ExtraKeys(tuple(lora) if lora else None, vector.get("salt", ""), items)
    scheme = HashScheme.named(vector["block_size"], seed=vector["seed"])
    hashes = RequestHasher(scheme, keys).append(pack_tokens(vector["tokens"]))
    assert [one.hex() for one in split_hashes(hashes, 32)] == vector["hashes"]


def stated_keys(vector: dict[str, Any], start: int) -> bytes:
    """The extra keys of a block in the form that the page states, by another encoder than the product's."""
    keys: list[list[Any]] = [["lora", *vector["lora"]]] if "lora" in vector else []
    for name, offset, length in vector.get("multimodal", ()):
        if offset < start + vector["block_size"] and start < offset + length:
            keys.append(["mm", name, offset - start])
    if "salt" in vector and start == 0:
        keys.append(["cache_salt", vector["salt"]])
    return cbor2.dumps(keys, canonical=True) if keys else b""


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_stated_form_gives_the_vector(vector):
    size, tokens, hashes = vector["block_size"], vector["tokens"], []
    parent = sha256(b"kvn1" + (vector["seed"] or "kvplane-none-hash").encode()).digest()
    for start in range(0, len(tokens) // size * size, size):
        keys = stated_keys(vector, start)
        head = b"kvb1" + pack("<II", size, len(keys)) + parent
        parent = sha256(head + pack(f"<{size}I", *tokens[start : start + size]) + keys).digest()
        hashes.append(parent.hex())
    assert hashes == vector["hashes"]


def test_python_of_the_page_gives_the_vectors_without_keys():
    (code,) = fenced_blocks(HASHES, "python")
    names: dict[str, Any] = {}
    exec(code, names)
    plain = [one for one in VECTORS if not {"lora", "salt", "multimodal"} & set(one)]
    assert len(plain) == 3
    for one in plain:
        seed = {"seed": one["seed"]} if one["seed"] else {}
        assert names["block_hashes"](one["tokens"], one["block_size"], **seed) == one["hashes"]
