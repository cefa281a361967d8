"""A column that one line adds to the contract is read, checked, packed and written by both cores without other code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from scripts.gen_columns import FILES
from tests.packaging.environments import ROOT

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]

LINES = {
    "Admit": '  // u32, default 7: a probe.\n  bytes probe = 18 [(column) = {default: 7, range: "0 to 9"}];\n',
    "Orders": '  // u32: probes.\n  bytes probe_block = 98 [(column) = {table: "probe"}];\n',
    "PartResult": "  // u32: probes.\n  bytes probe = 98 [(column) = {rows: ANY}];\n",
}
PROGRAM = """
from kvplane import wire
from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import GroupKind, GroupSpec, ReplicaSpec
from kvplane.base.sections import AdmitRow
from kvplane.base.step import Admit, News, Orders, Part, PartResult, Step, StepResult
from kvplane.v1 import allocation_pb2 as pb
from kvplane_core.face.native import NativeReplica
from kvplane_core.spec.replica import Replica
from kvplane_service.decisions.packing import HEAD, pack_decision, unpack_decision
from tests.service.test_packing import finish

assert AdmitRow(3).probe == 7
step = Step(1, 1, [Part(news=News([3], [5], list(range(5))), admit=Admit([3], probe=[9]))])
assert wire.decode_step(wire.encode_step(step), 32).parts[0].admit.probe == [9]
group = GroupSpec(kind=GroupKind.FULL_ATTENTION, block_size=4)
spec = ReplicaSpec((group,), 50, 4096, hash_block_size=4, scheduler_block_size=4, max_in_flight_tokens=100)
cores = [NativeReplica(spec), Replica(spec)]
for core in cores:
    core.begin_epoch(1)
    for wrong, found in ([10], "0 to 9"), ([1, 2], "one per row"):
        step.parts[0].admit.probe = wrong
        try:
            core.apply(step)
        except InvalidArgument as error:
            assert error.field == "parts[0].admit.probe" and found in str(error), error
        else:
            raise AssertionError(f"{core} accepts {wrong}")
    step.parts[0].admit.probe = [9]
compiled, specified = [core.apply(step) for core in cores]
assert compiled == specified
packed = cores[0].pack_applied(step, HEAD.pack(2, 1))
assert packed == finish(pack_decision(step, compiled, (compiled.parts[0].events,), 1, 2)), "the cores pack it alike"
assert unpack_decision(packed).step.parts[0].admit.probe == [9]
answer = StepResult(1, 0, [PartResult(probe=[4], orders=Orders(probe_block=[5]))])
assert wire.decode_result(wire.encode_result(answer)) == answer


class SentStep(Step):
    pass


step = SentStep(1, 2, [Part(admit=Admit([3], probe=[10]))])
message = pb.SessionRequest(step=wire.encode_step(step)).SerializeToString()
step.read, step.with_events = cores[0].read_step(message).form, False
try:
    cores[0].apply(step)
except InvalidArgument as error:
    assert error.field == "parts[0].admit.probe", error
else:
    raise AssertionError("the compiled reader skips it")
"""


def test_one_line_of_the_contract_adds_a_column(tmp_path):
    for name in ("clients", "service", "proto", "scripts", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__", "results"))
    for name in ("pyproject.toml", "buf.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".tools").symlink_to(ROOT / ".tools")
    step = tmp_path / "proto" / "kvplane" / "v1" / "step.proto"
    text = step.read_text()
    for message, line in LINES.items():
        end = text.index("\n}\n", text.index(f"message {message} {{\n")) + 1
        text = text[:end] + line + text[end:]
    step.write_text(text)
    paths = [tmp_path / "clients" / "python", tmp_path / "service", tmp_path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "KVPLANE_BUILD": "native"}

    def run(*command: str) -> None:
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    run("scripts/gen_proto.py")
    run("-m", "scripts.gen_columns")
    changed = [path for path in FILES if (tmp_path / path).read_text() != (ROOT / path).read_text()]
    assert {*FILES}.difference(changed) == {"service/kvplane_core/cpp/values.h"}  # it is that of types, not of columns
    run("clients/python/native_build.py")
    run("-c", PROGRAM)
