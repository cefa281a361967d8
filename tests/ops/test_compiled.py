"""Kernels compile for sm_80, sm_90 and sm_100 without a GPU, to the machine code that is meant."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.ops.compiled import CHIPS, SHAPES, Compiled

# Launches whose work is to move bytes: 16 at a time, or the memory's bandwidth stays out of reach.
LOADING = ("copy", "gather", "scatter", "checked", "write", "decode", "latent decode", "prefill")
STORING = ("copy", "gather", "scatter", "checked", "zero", "write", "latent decode", "prefill")
# Programs of these share a multiprocessor: registers per thread, at 4 warps.
MAX_REGISTERS = {"decode bfloat16": 168, "decode float16": 168}


def compiled_for(*arguments: object) -> dict[str, Compiled]:
    """Launch → what it came to on a chip. In a process of its own: this one interprets."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.compiled", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]
    return {each.launch: each for each in found}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("arch", CHIPS)
def test_every_launch_compiles_to_wide_accesses_without_spills(arch):
    compiled = compiled_for(arch)
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


# Accesses of local memory in shapes that few models have: (chip, launch) → how many are known.
KNOWN_SPILLS = {(80, "decode float8, 16 x 128"): 2, (100, "prefill bfloat16, 2 x 256"): 4}


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arch", CHIPS)
def test_more_shapes_of_attention_compile_to_wide_accesses_without_spills(arch):
    compiled = compiled_for(arch, "more")
    assert len(compiled) == 2 * len(SHAPES)
    for name, result in compiled.items():
        assert not result.error, f"{name}: {result.error}"
        spills, known = result.spills, KNOWN_SPILLS.get((arch, name), 0)
        assert spills <= known, f"{name}: {spills} accesses of local memory, known are {known}"
        assert min(result.loads, result.stores) > 0, f"{name}: no 128-bit access"
