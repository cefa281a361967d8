"""Kernels compile for sm_80, sm_90 and sm_100 without a GPU, to the machine code that is meant."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.ops.compiled import CHIPS, Compiled

# Launches whose work is to move bytes: 16 at a time, or the memory's bandwidth stays out of reach.
LOADING = ("copy", "gather", "scatter", "checked", "write", "decode", "latent decode", "prefill")
STORING = ("copy", "gather", "scatter", "checked", "zero", "write", "latent decode", "prefill")
# Programs of these share a multiprocessor: registers per thread, at 4 warps.
MAX_REGISTERS = {"decode bfloat16": 168, "decode float16": 168}


@pytest.fixture(scope="module", params=CHIPS, ids=lambda arch: f"sm_{arch}")
def compiled(request: pytest.FixtureRequest) -> dict[str, Compiled]:
    """Launch → what it came to on a chip. In a process of its own: this one interprets."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.compiled", str(request.param)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]
    return {each.launch: each for each in found}


@pytest.mark.timeout(240)
def test_every_launch_compiles_to_wide_accesses_without_spills(compiled):
    native_on_80 = compiled.pop("write float8_e4m3fn, native", None)
    assert len(compiled) == 18
    for name, result in compiled.items():
        assert not result.error, f"{name}: {result.error}"
        assert result.spills == 0, f"{name}: {result.spills} accesses of local memory"
        if name.startswith(LOADING):
            assert result.loads > 0, f"{name}: no 128-bit load"
        if name.startswith(STORING):
            assert result.stores > 0, f"{name}: no 128-bit store"
        for start, most in MAX_REGISTERS.items():
            assert not name.startswith(start) or result.registers <= most, f"{name}: {result.registers} registers"
    if native_on_80 is not None:
        assert "fp8e4nv" in native_on_80.error, "sm_80 has no native conversion to 8-bit floats"
