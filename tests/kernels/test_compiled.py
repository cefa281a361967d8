"""Kernels compile for sm_80, sm_90 and sm_100 without a GPU, to wide memory accesses without spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.kernels.compiled import CHIPS, SHAPES, Compiled

# Launches that are bound by memory bandwidth: they must access 16 bytes at a time.
LOADING = ("copy", "gather", "scatter", "checked", "write", "decode", "drafts", "latent", "prefill")
STORING = ("copy", "gather", "scatter", "checked", "zero", "write", "drafts", "latent", "prefill")
# Launches that multiply with tensor cores.
PRODUCTS = ("scan rows", "invert chunks", "advance heads, 512", "advance heads by key, 512")
# Most registers per thread, at 4 warps, so that several programs share a multiprocessor.
MAX_REGISTERS = {"decode bfloat16": 168, "decode float16": 168}

# Known accesses of local memory: (chip, launch) → count.
KNOWN_SPILLS = {
    (80, "prefill float8, 16 x 128"): 8,
    # Faster with them than without, as measured.
    (90, "scan rows, 512 tokens per row"): 46,
    (90, "advance heads, 512 tokens per row"): 33,
    (90, "prefill float32, 4 x 128"): 10,
    (100, "decode float32, 2 x 64"): 6,
    (100, "prefill float32, 4 x 128"): 8,
}
# Most loads of single bytes: of masks, where rows have several queries (data would take more than a hundred), and one
# outside the loop where products are accumulated in tensor memory.
KNOWN_NARROW = {"prefill": 8, "drafts": 12, "latent prefill": 11}
KNOWN_NARROW_ON_100 = {"scan rows": 1, "advance heads": 1}


def compiled_for(*arguments: object) -> dict[str, Compiled]:
    """Compile all launches for a chip, in a child process: this process uses the interpreter."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiled", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]
    return {each.launch: each for each in found}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("arch", CHIPS)
def test_launches_compile_to_wide_accesses_without_spills(arch):
    compiled = compiled_for(arch)
    native_on_80 = compiled.pop("write float8_e4m3fn, native", None)
    assert len(compiled) == 48
    for name, result in compiled.items():
        assert not result.error, f"{name}: {result.error}"
        assert not result.outside, f"{name}: {result.outside} products of warp groups wider than their results"
        known = KNOWN_SPILLS.get((arch, name), 0)
        assert result.spills <= known, f"{name}: {result.spills} accesses of local memory, expected at most {known}"
        known_narrow = KNOWN_NARROW | (KNOWN_NARROW_ON_100 if arch == 100 else {})
        allowed = max((count for start, count in known_narrow.items() if name.startswith(start)), default=0)
        assert result.narrow <= allowed or name.startswith("convolve"), (
            f"{name}: {result.narrow} loads of bytes or short copies"
        )
        if name.startswith(PRODUCTS):
            assert result.products > 0, f"{name}: no instruction of tensor cores"
        if name.startswith(LOADING):
            assert result.loads > 0, f"{name}: no 128-bit load"
        if name.startswith(STORING):
            assert result.stores > 0, f"{name}: no 128-bit store"
        for start, most in MAX_REGISTERS.items():
            assert not name.startswith(start) or result.registers <= most, f"{name}: {result.registers} registers"
    if native_on_80 is not None:
        assert "fp8e4nv" in native_on_80.error, "sm_80 has no native conversion to 8-bit floats"


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arch", CHIPS)
def test_attention_shapes_compile_to_wide_accesses_without_spills(arch):
    compiled = compiled_for(arch, "more")
    assert len(compiled) == 2 * len(SHAPES)
    for name, result in compiled.items():
        assert not result.error, f"{name}: {result.error}"
        spills, known = result.spills, KNOWN_SPILLS.get((arch, name), 0)
        assert spills <= known, f"{name}: {spills} accesses of local memory, expected at most {known}"
        assert min(result.loads, result.stores) > 0, f"{name}: no 128-bit access"
