"""Compile the backend's own launches for GPUs that are not present, and count instructions in the machine code.

    python -m tests.kernels.compiled 90            a line of JSON per launch
    python -m tests.kernels.compiled 90 more       attention only, in more shapes

Runs without the interpreter: a process either interprets kernels or compiles them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia

from kvplane_kernels.checks import EIGHT_BIT
from kvplane_kernels.interface import (
    AttentionPages,
    AttentionRule,
    Batch,
    DeltaInputs,
    GroupPages,
    LatentPages,
    ScanInputs,
    StateInputs,
    StatePages,
    StateRows,
    StateWeights,
)
from kvplane_kernels.triton_ops import attention, delta_rule, moves, selective_scan, states, writes
from kvplane_kernels.triton_ops.kernels import moves as kinds
from kvplane_kernels.triton_ops.launch import Chip, Launch

CHIPS = {
    80: Chip(108, 163 << 10, False),
    90: Chip(132, 227 << 10, True, can_overlap=True),
    100: Chip(148, 227 << 10, True, has_tensor_memory=True, can_overlap=True),
}
NATIVE_ON_80 = Chip(108, 163 << 10, native_fp8=True)


@dataclass(frozen=True)
class Compiled:
    """Machine code of a launch on a chip.

    Attributes:
        loads: 128-bit loads from global memory, to registers or to shared memory.
        stores: 128-bit stores to global memory.
        spills: accesses of local memory.
        products: instructions of tensor cores.
        narrow: loads of single bytes, and copies to shared memory of less than 16 bytes per thread.
        outside: products of warp groups whose layout has more rows or columns than the result; Triton 3.6 lets some of
            them read shared memory outside its bounds.
        error: why it cannot be compiled; "" = it can.
    """

    launch: str
    arch: int
    loads: int = 0
    stores: int = 0
    spills: int = 0
    narrow: int = 0
    products: int = 0
    registers: int = 0
    shared_bytes: int = 0
    outside: int = 0
    error: str = ""


class NoDevice:
    """A Triton driver for an absent chip: it specialises and compiles, and cannot run."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> int:
        return self._target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def compile_launch(name: str, launch: Launch, arch: int) -> Compiled:
    """Compile a launch for a chip, and count memory accesses in the machine code."""
    triton.runtime.driver.set_active(NoDevice(arch))
    try:
        kernel = launch.kernel.warmup(*launch.arguments, **launch.constants, grid=launch.grid, **launch.options)
    except (triton.CompilationError, ValueError) as error:
        return Compiled(name, arch, error=reason(error))
    code = machine_code(kernel.asm["cubin"])
    counts = Counter(re.findall(r"^\s+/\*\w+\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]+)", code, flags=re.M))
    wide = {op: n for op, n in counts.items() if ".128" in op}
    return Compiled(
        name,
        arch,
        loads=sum(n for op, n in wide.items() if op.startswith(("LDG", "LDGSTS"))),
        stores=sum(n for op, n in wide.items() if op.startswith("STG")),
        spills=sum(n for op, n in counts.items() if op.startswith(("LDL", "STL"))),
        products=sum(n for op, n in counts.items() if re.match(r"(H|HG|UTCH|UTCQ|Q)MMA|UTC", op)),
        narrow=sum(n for op, n in counts.items() if is_narrow(op)),
        registers=kernel_registers(kernel.asm["cubin"]),
        shared_bytes=kernel.metadata.shared,
        outside=products_outside(kernel.asm["ttgir"]),
    )


def products_outside(text: str) -> int:
    """Count products of warp groups whose warps cover more than the result, in Triton's intermediate code."""
    layout = (
        r"(#mma\d*) = #ttg.nvidia_mma<\{versionMajor = 3.*?warpsPerCTA = \[(\d+), (\d+)\], instrShape = \[(\d+), (\d+)"
    )
    covered = {name: (int(a) * int(m), int(b) * int(n)) for name, a, b, m, n in re.findall(layout, text)}
    results = re.findall(r"ttng\.warp_group_dot .*-> tensor<(\d+)x(\d+)x\w+, (#mma\d*)>", text)
    return sum(int(rows) < covered[name][0] or int(columns) < covered[name][1] for rows, columns, name in results)


def is_narrow(op: str) -> bool:
    return op.startswith(("LDS.U8", "LDG.E.U8")) or (op.startswith("LDGSTS") and ".128" not in op)


def reason(error: BaseException) -> str:
    """The last line of the innermost error; Triton wraps it once per call."""
    while error.__cause__ is not None:
        error = error.__cause__
    return [type(error).__name__, *str(error).strip().splitlines()][-1]


def tool(name: str, cubin: bytes, *options: str) -> str:
    """Output of a tool of Triton about machine code."""
    binary = Path(nvidia.__file__).parent / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([binary, *options, file.name], check=True, capture_output=True, text=True).stdout


def machine_code(cubin: bytes) -> str:
    return tool("cuobjdump", cubin, "-sass")


def kernel_registers(cubin: bytes) -> int:
    found = re.search(r"REG:(\d+)", tool("cuobjdump", cubin, "-res-usage"))
    return int(found[1]) if found else -1


def group(page_bytes: int) -> GroupPages:
    return GroupPages(tuple(torch.zeros((8, page_bytes), dtype=torch.uint8) for _ in range(2)))


def move_launches(page_bytes: int, names: str) -> Iterator[tuple[str, Launch]]:
    pages = group(page_bytes)
    table, ids = moves.LayerTable.of(pages), torch.arange(1, 5, dtype=torch.int32)
    staging = torch.zeros((4, pages.bytes_per_block), dtype=torch.uint8)
    sums = torch.zeros(4, dtype=torch.int64)
    rooms: dict[str, tuple[Any, Tensor | None, Tensor | None, Tensor | None]] = {
        "copy": (kinds.COPY, ids, None, None),
        "gather": (kinds.GATHER, None, staging, None),
        "scatter": (kinds.SCATTER, None, staging, None),
        "zero": (kinds.ZERO, None, None, None),
        "checked": (kinds.CHECKED_GATHER, None, staging, sums),
    }
    for name in names.split():
        what, targets, room, total = rooms[name]
        move = moves.Move(int(what), ids, targets, room, total)
        yield f"{name}, pages of {page_bytes} bytes", moves.move_launch(table, move)


def keys_values(dtype: torch.dtype, page: int, heads: int, size: int) -> AttentionPages:
    room = torch.zeros((8, 2, page, heads, size), dtype=dtype if dtype.itemsize > 1 else torch.uint8).view(dtype)
    scale = torch.ones(heads) if dtype.itemsize == 1 else None
    return AttentionPages(room[:, 0], room[:, 1], scale, scale)


def write_launch(dtype: torch.dtype, chip: Chip) -> tuple[str, Launch]:
    pages, slots = keys_values(dtype, 16, 8, 128), torch.arange(32)
    new = torch.zeros((32, 8, 128), dtype=torch.bfloat16 if dtype.itemsize == 1 else dtype)
    k, v = writes.Written(new, pages.k, pages.k_scale), writes.Written(new, pages.v, pages.v_scale)
    return f"write {short(dtype)}", writes.write_launch(k, v, slots, chip)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def latent_write_launch(chip: Chip) -> Launch:
    latents, new = torch.zeros((8, 64, 1, 576), dtype=torch.bfloat16), torch.zeros((32, 1, 576), dtype=torch.bfloat16)
    return writes.write_launch(writes.Written(new, latents, None), None, torch.arange(32), chip)


def batch(rows: int, queries: int = 0) -> Batch:
    starts = torch.arange(0, queries + 1, queries // rows, dtype=torch.int32) if queries else None
    return Batch(torch.zeros((rows, 16), dtype=torch.int32), torch.ones(rows, dtype=torch.int32), starts)


def attention_case(shape: tuple[int, int], dtype: torch.dtype, page: int, rule: AttentionRule) -> attention.Call:
    """A batch with 64 query heads on 8 kv heads of 128; 0 queries = one per row."""
    rows, queries = shape
    query = torch.zeros((queries or rows, 64, 128), dtype=torch.bfloat16 if dtype.itemsize == 1 else dtype)
    return attention.keys_and_values(query, keys_values(dtype, page, 8, 128), batch(rows, queries), rule)


def decode_launches(dtype: torch.dtype, page: int, rule: AttentionRule, chip: Chip) -> Iterator[tuple[str, Launch]]:
    spans, merge = attention.launches(attention_case((4, 0), dtype, page, rule), chip)
    yield f"decode {short(dtype)}, pages of {page}, {of(rule)}", spans
    if rule.sinks is not None:
        yield f"merge, {of(rule)}", merge


def prefill_launch(dtype: torch.dtype, page: int, rule: AttentionRule, chip: Chip) -> tuple[str, Launch]:
    case = attention_case((4, 256), dtype, page, rule)
    return f"prefill {short(dtype)}, pages of {page}, {of(rule)}", attention.launches(case, chip)[0]


def draft_launch(rule: AttentionRule, chip: Chip) -> tuple[str, Launch]:
    """Three drafts per row, as a tree."""
    case = attention_case((4, 16), torch.bfloat16, 16, rule)
    tree = replace(case, batch=replace(case.batch, tree=torch.full((16,), -1)))
    return f"drafts bfloat16, {of(rule)}, tree", attention.launches(tree, chip)[0]


def of(rule: AttentionRule) -> str:
    extent = f"window {rule.window}" if rule.window else f"chunk {rule.chunk}" if rule.chunk else "full"
    return extent + (" with sinks" if rule.sinks is not None else "")


def latent_launch(queries: int, chip: Chip, dtype: torch.dtype = torch.bfloat16) -> Launch:
    """Latent rows with 16 query heads; 0 queries = one per row."""
    query = torch.zeros((queries or 4, 16, 576), dtype=torch.bfloat16)
    latents = LatentPages(torch.zeros((8, 64, 576)).to(dtype), torch.ones(1) if dtype.itemsize == 1 else None)
    call = attention.latent(query, latents, batch(4, queries), 0.1, 512)
    return attention.launches(call, chip)[0]


def state_launches(tokens: int, chip: Chip) -> Iterator[tuple[str, Launch]]:
    """Four rows of a layer of Mamba-2 with 8 heads per rank, 64 x 128 each."""
    heads, size, state, rows = 8, 64, 128, 4
    channels = heads * size + 2 * state
    ints = torch.zeros(max(tokens, rows + 1), dtype=torch.int32)
    pages = StatePages(torch.zeros((5, channels, 3)).bfloat16(), torch.zeros((5, heads, size, state)))
    x, dt = torch.zeros((tokens, channels)).bfloat16(), torch.zeros((tokens, heads))
    inputs = StateInputs(ints[: rows + 1], ints[:rows], ints[:tokens], x, dt)
    weights = StateWeights(torch.zeros((channels, 4)), torch.zeros(channels), torch.zeros(heads), torch.zeros(heads))
    for launch in states.launches(pages, inputs, weights, chip)[1]:
        yield f"{launch.kernel.__name__.replace('_', ' ')}, {tokens // rows} tokens per row", launch


def selective_launches(tokens: int, chip: Chip) -> Iterator[tuple[str, Launch]]:
    """Four rows of a layer of Mamba-1 with 1024 channels per rank, and the convolution before it."""
    channels, size, rows = 1024, 16, 4
    conv, ssm = torch.zeros((5, 3, channels)).bfloat16().mT, torch.zeros((5, channels, size))
    x, b = torch.zeros((tokens, channels)).bfloat16(), torch.zeros((tokens, size)).bfloat16()
    ints = torch.zeros(max(tokens, rows + 1), dtype=torch.int32)
    blocks = StateRows(ints[: rows + 1], ints[:rows], ints[:tokens])
    weight, bias = torch.zeros((channels, 4)), torch.zeros(channels)
    inputs = ScanInputs(blocks.query_start, blocks.read_block, blocks.write_block, x, x, b, b)
    launches = [*states.convolve(conv, blocks, x, weight, bias, chip)[1]]
    launches += selective_scan.launches(ssm, inputs, torch.zeros((channels, size)), bias, chip)[1]
    for launch in launches:
        name = launch.kernel.__name__.replace("_", " ")
        what = f"{launch.constants['S'].state} of a state" if name == "hold states" else f"{channels} channels"
        yield f"{name}, {what}, {tokens // rows} tokens per row", launch


def delta_launches(tokens: int, by_key: bool, chip: Chip) -> Iterator[tuple[str, Launch]]:
    """Four rows of a layer with the gated delta rule, with 4 heads per rank, as Qwen3-Next or Kimi Linear has it."""
    heads, key_heads, size, rows = 4, 4 if by_key else 2, 128, 4
    k, v = torch.zeros((tokens, key_heads, size)).bfloat16(), torch.zeros((tokens, heads, size)).bfloat16()
    ints, beta = torch.zeros(max(tokens, rows + 1), dtype=torch.int32), torch.zeros((tokens, heads))
    gates = torch.zeros((tokens, heads, size)) if by_key else beta
    inputs = DeltaInputs(ints[: rows + 1], ints[:rows], ints[:tokens], k, k, v, gates, beta)
    for launch in delta_rule.launches(torch.zeros((5, heads, size, size)), inputs, chip)[1]:
        if launch.kernel.__name__ != "hold_states":
            name = f"{launch.kernel.__name__.replace('_', ' ')}{' by key' * by_key}"
            yield f"{name}, {tokens // rows} tokens per row", launch


def launches(chip: Chip) -> Iterator[tuple[str, Launch]]:
    """The launches that must compile for a chip."""
    yield from move_launches(4096, "copy gather scatter zero checked")
    yield from move_launches(65536, "copy gather")
    for dtype in (torch.bfloat16, *EIGHT_BIT):
        yield write_launch(dtype, chip)
    yield "write latents", latent_write_launch(chip)
    full, window = AttentionRule(0.1), AttentionRule(0.1, window=128, sinks=torch.zeros(64))
    for dtype in (torch.bfloat16, *EIGHT_BIT):
        yield from decode_launches(dtype, 16, full, chip)
        yield prefill_launch(dtype, 16, full, chip)
    yield from decode_launches(torch.bfloat16, 64, window, chip)
    yield from decode_launches(torch.float16, 16, AttentionRule(0.1, chunk=8192), chip)
    yield draft_launch(AttentionRule(0.1, soft_cap=30.0, slopes=torch.zeros(64)), chip)
    yield "latent decode", latent_launch(0, chip)
    yield "latent prefill", latent_launch(64, chip)
    yield "latent decode float8_e4m3fn", latent_launch(0, chip, torch.float8_e4m3fn)
    yield from state_launches(2048, chip)
    yield from state_launches(4, chip)
    yield from selective_launches(2048, chip)
    yield from selective_launches(4, chip)
    for by_key in (False, True):
        yield from delta_launches(2048, by_key, chip)
        yield from delta_launches(4, by_key, chip)


def matrix(arch: int) -> Iterator[Compiled]:
    """Compile every launch for a chip; on sm_80 also one that must fail."""
    for name, launch in launches(CHIPS[arch]):
        yield compile_launch(name, launch, arch)
    if arch == 80:
        name, launch = write_launch(torch.float8_e4m3fn, NATIVE_ON_80)
        yield compile_launch(f"{name}, native", launch, arch)


# Shapes of attention, named by query heads per kv head x elements: pages, heads and elements, window, sinks.
SHAPES: dict[str, tuple[torch.dtype, tuple[int, int, int], int, bool]] = {
    "bfloat16, 8 x 64, window 128, sinks": (torch.bfloat16, (8, 8, 64), 128, True),
    "bfloat16, 4 x 80": (torch.bfloat16, (4, 4, 80), 0, False),
    "bfloat16, 1 x 128": (torch.bfloat16, (8, 1, 128), 0, False),
    "bfloat16, 16 x 128": (torch.bfloat16, (2, 16, 128), 0, False),
    "bfloat16, 2 x 256": (torch.bfloat16, (4, 2, 256), 0, False),
    "bfloat16, 8 x 256": (torch.bfloat16, (4, 8, 256), 0, False),
    "float8, 1 x 64": (torch.float8_e4m3fn, (4, 1, 64), 0, False),
    "float8, 2 x 64, sinks": (torch.float8_e4m3fn, (2, 2, 64), 0, True),
    "float8, 8 x 64, window 128, sinks": (torch.float8_e4m3fn, (8, 8, 64), 128, True),
    "float8, 1 x 128": (torch.float8_e4m3fn, (8, 1, 128), 0, False),
    "float8, 16 x 128": (torch.float8_e4m3fn, (2, 16, 128), 0, False),
    "float8, 8 x 128, window 128, sinks": (torch.float8_e4m3fn, (8, 8, 128), 128, True),
    "float8, 2 x 256": (torch.float8_e4m3fn, (4, 2, 256), 0, False),
    "float32, 2 x 64": (torch.float32, (2, 2, 64), 0, False),
    "float32, 4 x 128": (torch.float32, (2, 4, 128), 0, False),
    "float32, 1 x 256": (torch.float32, (2, 1, 256), 0, False),
}


def more(arch: int) -> Iterator[Compiled]:
    """Decode and prefill launches of `SHAPES`."""
    chip = CHIPS[arch]
    for name, (dtype, (kv_heads, group, size), window, has_sinks) in SHAPES.items():
        rule = AttentionRule(0.1, window, sinks=torch.zeros(kv_heads * group) if has_sinks else None)
        pages, query_type = keys_values(dtype, 16, kv_heads, size), torch.bfloat16 if dtype.itemsize == 1 else dtype
        query = torch.zeros((512, kv_heads * group, size), dtype=query_type)
        decode = attention.keys_and_values(query[:4], pages, batch(4), rule)
        yield compile_launch(f"decode {name}", attention.launches(decode, chip)[0], arch)
        prefill = attention.keys_and_values(query, pages, batch(4, 512), rule)
        yield compile_launch(f"prefill {name}", attention.launches(prefill, chip)[0], arch)


def main() -> int:
    for compiled in (more if sys.argv[2:] == ["more"] else matrix)(int(sys.argv[1])):
        sys.stdout.write(json.dumps(asdict(compiled)) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
