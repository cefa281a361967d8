"""The generated code matches proto/, and works on every protobuf version that the client allows."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gen_columns import FILES
from tests.packaging.environments import ROOT, base_requirements, installed, run_isolated

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(300)]

CLIENT = ROOT / "clients" / "python"
SCRIPT = ROOT / "tests" / "packaging" / "round_trip.py"
GENERATED = Path("clients/python/kvplane/v1")


# The oldest and the newest version that the client supports, and the 6.x that other engines pin.
@pytest.mark.parametrize(
    ("pins", "protobuf"),
    [
        (("protobuf==5.29.6", "grpcio==1.71.2"), "5.29.6"),
        (("protobuf==6.33.6",), "6.33.6"),
        (("protobuf>=7,<8",), "7."),
    ],
    ids=["oldest", "6.33", "7"],
)
def test_generated_code_works_on_protobuf(pins, protobuf):
    packages = installed(*base_requirements(), *pins)
    version, _, messages, stubs = run_isolated([str(SCRIPT)], packages, CLIENT).split()
    assert version.startswith(protobuf)
    assert int(messages) > 10
    assert int(stubs) > 1


def drift(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "gen_proto.py"), "--check", "--root", str(root)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def contract(tmp_path):
    """A copy of the contract and its generated code, for planted faults."""
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    shutil.copytree(ROOT / GENERATED, tmp_path / GENERATED)
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    return tmp_path


def test_committed_code_matches_the_proto_files():
    done = drift(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_drift_of_generated_code_is_named(contract):
    (contract / GENERATED / "step_pb2.py").write_text("")
    (contract / GENERATED / "admin_pb2.pyi").unlink()
    (contract / GENERATED / "old_pb2.py").write_text("")
    done = drift(contract)
    assert done.returncode == 1
    assert {"missing: admin_pb2.pyi", "differs: step_pb2.py"} < set(done.stdout.splitlines())
    assert "left over, its .proto is missing: old_pb2.py" in done.stdout
    assert "make proto" in done.stdout


def columns(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.gen_columns", "--check", "--root", str(root)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_committed_code_for_columns_matches_the_proto_files(contract):
    done = columns(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    done = columns(contract)  # which has none
    assert done.returncode == 1
    assert {f"differs: {path}" for path in FILES} < set(done.stdout.splitlines())
    assert "make proto" in done.stdout


@pytest.mark.parametrize(
    ("written", "planted", "complaint"),
    [
        ("i32, default -1 = any: the hit", "u32, default -1 = any: the hit", "Admit.expected_hit: the option says i32"),
        ("u32, default 1: fewest", "u32, default 0: fewest", "Admit.min_new: the option has the default 1"),
    ],
)
def test_a_comment_that_contradicts_the_option_is_refused(contract, written, planted, complaint):
    step = contract / "proto" / "kvplane" / "v1" / "step.proto"
    assert written in step.read_text()
    step.write_text(step.read_text().replace(written, planted))
    done = columns(contract)
    assert done.returncode == 1
    assert complaint in done.stderr


def buf(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / "buf.sh"), *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


def test_buf_refuses_an_undocumented_field_and_an_incompatible_change(contract):
    admin = contract / "proto" / "kvplane" / "v1" / "admin.proto"
    against = ["breaking", "--against", str(ROOT / "proto" / "baseline.binpb")]
    assert buf(contract, "lint").returncode == 0
    assert buf(contract, *against).returncode == 0

    admin.write_text(admin.read_text() + "\nmessage Undocumented {}\n")
    refused = buf(contract, "lint")
    assert refused.returncode != 0
    assert 'Message "Undocumented" should have a non-empty comment' in refused.stdout

    admin.write_text(admin.read_text().replace("string replica = 1;", "bytes replica = 1;"))
    refused = buf(contract, *against)
    assert refused.returncode != 0
    assert 'changed type from "string" to "bytes"' in refused.stdout
