"""The contract of every backend: `interface.PagedOps`, checked on random cases against a float64 reference.

`CHECKS` has one function per operation. It draws a case from a generator, runs the backend on it, and raises
`AssertionError` when the result differs from the reference. `run` tries many seeds and names those that fail:

    python -m tests.kernels decode_attention --seed 17 --backend torch --device cpu
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvplane.base.errors import KvplaneError
from kvplane_kernels.interface import PagedOps
from tests.kernels import cases, float64, page_cases, scan_cases, state_cases
from tests.kernels.formats import FLOAT64, FORMATS, Format
from tests.kernels.memory import DeviceMemory
from tests.kernels.state_cases import on_cpu


@dataclass(frozen=True)
class Subject:
    """A backend under test, and what it supports.

    Attributes:
        formats: element types of pages; it refuses all others.
        page_bytes_multiple: sizes of pages are a multiple of this number of bytes.
    """

    ops: PagedOps
    device: str = "cpu"
    formats: tuple[Format, ...] = FORMATS
    page_bytes_multiple: int = 1


# Largest error relative to the result's magnitude (the same sum over absolute values; see float64.py). Sums are
# computed
# in float32, in float64 for float64. In addition, weights and result are rounded to the query's type, half an eps each:
# 1 eps, and half of that again for the logits.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 1.5 * 2.0**-10, "bfloat16": 1.5 * 2.0**-7}
# With 8-bit pages, a backend may round scaled keys and values to the query's type: one more eps, and one in the logits.
TOLERANCE_OF_8BIT = {"float64": 1e-12, "float32": 1e-5, "float16": 3 * 2.0**-10, "bfloat16": 3 * 2.0**-7}
# States are stored with the precision of the sums, then rounded once to the page's type.
SUM_TOLERANCE = {True: 1e-12, False: 1e-5}
# Near a tie, value / scale may round either way, depending on the last bits of the division.
HALF_A_STEP = 0.5 + 1e-4


def attention_tolerance(query: Format, pages: Format) -> float:
    return (TOLERANCE_OF_8BIT if pages.is_8bit else TOLERANCE)[query.name]


@contextmanager
def poisoned_results() -> Iterator[None]:
    """PyTorch fills uninitialised tensors with NaN (integers with their maximum) in this context, so that elements that
    an operation does not write fail the comparison.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def assert_near(out: torch.Tensor, like: torch.Tensor, want: float64.Result, factor: float) -> None:
    """Assert that the result has the type of `like` and the wanted shape, and differs by at most factor x magnitude."""
    assert out.dtype == like.dtype, f"{out.dtype}, wanted {like.dtype}"
    assert out.device == like.device, f"on {out.device}, wanted {like.device}"
    assert tuple(out.shape) == want.values.shape, f"shape {tuple(out.shape)}, wanted {want.values.shape}"
    form = next(f for f in FORMATS if f.torch_dtype == out.dtype)
    error = np.abs(on_cpu(out, form) - want.values)
    allowed = factor * want.magnitude + form.step(np.zeros(1))
    bad = ~(error <= allowed)  # NaN is wrong
    assert not bad.any(), worst_element(error, allowed, bad)


def worst_element(error: np.ndarray, allowed: np.ndarray, bad: np.ndarray) -> str:
    ratio = np.where(bad, np.nan_to_num(error / allowed, nan=np.inf), 0)
    at = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    where = tuple(int(i) for i in at)
    what = f"{int(bad.sum())} of {bad.size} elements are wrong"
    return f"{what}, the worst at {where} by {error[at]:.3g}, allowed {allowed[at]:.3g}"


def assert_only_written(memory: DeviceMemory, wanted: np.ndarray, may_differ: np.ndarray | None = None) -> None:
    """Assert that memory has the wanted bytes, except where `may_differ` is True."""
    different = memory.bytes() != wanted
    if may_differ is not None:
        different &= ~may_differ
    places = np.flatnonzero(different)
    assert len(places) == 0, f"{len(places)} bytes of the pages are wrong, the first at {places[:8].tolist()}"


def assert_rounded(data: np.ndarray, form: Format, exact: np.ndarray) -> None:
    """Assert that stored elements are the nearest of the format to the exact values, saturated at its range."""
    stored, exact = form.decode(data), np.clip(exact, -form.largest, form.largest)
    error = np.abs(stored - exact)
    bad = ~(error <= HALF_A_STEP * form.step(exact))
    assert not bad.any(), f"{int(bad.sum())} of {bad.size} stored elements are not the nearest to their values"


def check_attention(subject: Subject, rng: np.random.Generator, decode: bool) -> None:
    case = cases.attention(rng, subject.formats, one_query_per_row=decode)
    pages, memory = case.pages.on(subject.device)
    query, batch = case.query.on(subject.device), case.tables.on(subject.device)
    operation = subject.ops.decode_attention if decode else subject.ops.prefill_attention
    with poisoned_results():
        lse = lse_for(rng, query)
        out = operation(query, pages, batch, cases.rule_on(case.rule, subject.device), lse)
    want = float64.attention(case.query.values, *case.pages.decoded(), case.tables.reference, case.rule)
    assert_near(out, query, want, attention_tolerance(case.query.form, case.pages.shape.form))
    assert_log_sums(lse, want, case.query.form)
    assert_only_written(memory, case.pages.memory.buffer)


def lse_for(rng: np.random.Generator, query: torch.Tensor) -> torch.Tensor | None:
    """Memory for log-sum-exps, in a third of the cases."""
    return query.new_empty(query.shape[:2], dtype=torch.float32) if rng.random() < 0.33 else None


def assert_log_sums(lse: torch.Tensor | None, want: float64.Result, form: Format) -> None:
    """Assert that log-sum-exps are near; they are stored as float32, and -inf is exact."""
    if lse is None:
        return
    allowed = max(TOLERANCE[form.name], TOLERANCE["float32"])
    np.testing.assert_allclose(lse.cpu().numpy(), want.lse, rtol=allowed, atol=8 * allowed)


def decode_attention(subject: Subject, rng: np.random.Generator) -> None:
    check_attention(subject, rng, decode=True)


def prefill_attention(subject: Subject, rng: np.random.Generator) -> None:
    check_attention(subject, rng, decode=False)


def mla_decode(subject: Subject, rng: np.random.Generator) -> None:
    case = cases.mla_decode(rng, subject.formats)
    pages, memory = case.pages.on(subject.device)
    query, batch = case.dense.on(subject.device), case.tables.on(subject.device)
    with poisoned_results():
        lse = lse_for(rng, query)
        out = subject.ops.mla_decode(query, pages, batch, case.scale, case.value_size, lse)
    latents = case.pages.scaled(case.pages.form.decode(case.pages.part()))
    want = float64.mla_decode(case.dense.values, latents, case.tables.reference, case.scale, case.value_size)
    assert_near(out, query, want, attention_tolerance(case.dense.form, case.pages.form))
    assert_log_sums(lse, want, case.dense.form)
    assert_only_written(memory, case.pages.memory.buffer)


def write_kv(subject: Subject, rng: np.random.Generator) -> None:
    case = cases.write_kv(rng, subject.formats)
    pages, memory = case.pages.on(subject.device)
    key, value = case.key.on(subject.device), case.value.on(subject.device)
    subject.ops.write_kv(pages, key, value, cases.ints(case.slots, subject.device, torch.int64))
    after = replace(case.pages, memory=memory.now())
    kept = case.slots >= 0
    scales = case.pages.k_scale, case.pages.v_scale
    for got, wanted, new, scale in zip(after.parts(), case.pages.parts(), (case.key, case.value), scales, strict=True):
        exact = new.values[kept] / cases.per_head(scale)
        assert_stored(got, wanted, case.slots[kept], (case.pages.shape.form, exact))
    assert_only_written(memory, case.pages.memory.buffer)


def write_latent(subject: Subject, rng: np.random.Generator) -> None:
    case = cases.write_latent(rng, subject.formats)
    pages, memory = case.pages.on(subject.device)
    slots = cases.ints(case.slots, subject.device, torch.int64)
    subject.ops.write_latent(pages, case.latent.on(subject.device), slots)
    after, kept = replace(case.pages, memory=memory.now()), case.slots >= 0
    exact = case.latent.values[kept] / case.pages.scaled(np.ones(1))
    assert_stored(after.part(), case.pages.part(), case.slots[kept], (case.pages.form, exact))
    assert_only_written(memory, case.pages.memory.buffer)


def assert_stored(got: np.ndarray, wanted: np.ndarray, slots: np.ndarray, exact: tuple[Format, np.ndarray]) -> None:
    """Assert that slots of `got` hold the rounded exact values, and copy them to `wanted`."""
    form, values = exact
    blocks, offsets = np.divmod(slots, got.shape[1])
    assert_rounded(got[blocks, offsets], form, values)
    wanted[blocks, offsets] = got[blocks, offsets]


def state_step(subject: Subject, rng: np.random.Generator) -> None:
    case = state_cases.state_step(rng, subject.formats)
    pages, inputs, weights, memory = case.on(subject.device)
    with poisoned_results():
        y = subject.ops.state_step(pages, inputs, weights)
    want, kept = case.expected()
    factor = TOLERANCE[case.x.form.name]
    assert_near(y, inputs.x, want, factor)
    (conv, ssm), (wanted_conv, wanted_ssm) = replace(case, memory=memory.now()).parts(), case.parts()
    for block, values in kept.conv.items():
        assert_rounded(conv[block], case.shape.conv_form, values)
        wanted_conv[block] = conv[block]
    assert_states(ssm, wanted_ssm, kept.ssm, case.shape.ssm_form, case.x.form)
    assert_only_written(memory, case.memory.buffer)


def assert_states(
    got: np.ndarray, wanted: np.ndarray, kept: dict[int, float64.Result], form: Format, of_tokens: Format
) -> None:
    """Assert that the blocks of `got` hold the states that are kept, and copy them to `wanted`."""
    for block, state in kept.items():
        error = np.abs(form.decode(got[block]) - state.values)
        allowed = SUM_TOLERANCE[of_tokens is FLOAT64] * state.magnitude
        bad = ~(error <= allowed + HALF_A_STEP * form.step(state.values))
        assert not bad.any(), f"the state in block {block}: " + worst_element(error, allowed, bad)
        wanted[block] = got[block]


def convolve(subject: Subject, rng: np.random.Generator) -> None:
    case = scan_cases.convolve(rng, subject.formats)
    (conv, rows, x, weight, bias), memory = case.on(subject.device)
    with poisoned_results():
        u = subject.ops.convolve(conv, rows, x, weight, bias)
    want, kept = case.expected()
    assert_near(u, x, want, TOLERANCE[case.x.form.name])
    now, wanted = case.conv.bytes(memory.now()), case.conv.bytes()
    for block, values in kept.items():
        assert_rounded(now[block], case.conv.form, case.conv.turned(values))
        wanted[block] = now[block]
    assert_only_written(memory, case.conv.memory.buffer)


def selective_scan(subject: Subject, rng: np.random.Generator) -> None:
    case = scan_cases.selective_scan(rng, subject.formats)
    (states, inputs, a, d), memory = case.on(subject.device)
    with poisoned_results():
        y = subject.ops.selective_scan(states, inputs, a, d)
    want, kept = case.expected()
    form = case.tokens["x"].form
    assert_near(y, inputs.x, want, TOLERANCE[form.name])
    assert_states(case.states.bytes(memory.now()), case.states.bytes(), kept, case.states.form, form)
    assert_only_written(memory, case.states.memory.buffer)


def gated_delta_rule(subject: Subject, rng: np.random.Generator) -> None:
    case = scan_cases.gated_delta_rule(rng, subject.formats)
    (states, inputs), memory = case.on(subject.device)
    with poisoned_results():
        y = subject.ops.gated_delta_rule(states, inputs)
    want, kept = case.expected()
    form = case.tokens["v"].form
    assert_near(y, inputs.v, want, TOLERANCE[form.name])
    assert_states(case.states.bytes(memory.now()), case.states.bytes(), kept, case.states.form, form)
    assert_only_written(memory, case.states.memory.buffer)


def copy_pages(subject: Subject, rng: np.random.Generator) -> None:
    case = page_cases.copies(rng, subject.page_bytes_multiple)
    group, memory = case.on(subject.device)
    subject.ops.copy_pages(group, case.blocks, case.targets)
    float64.copy_pages(case.layers(), case.blocks, case.targets)
    assert_only_written(memory, case.memory.buffer)


def zero_pages(subject: Subject, rng: np.random.Generator) -> None:
    case = page_cases.targets(rng, subject.page_bytes_multiple)
    group, memory = case.on(subject.device)
    subject.ops.zero_pages(group, case.blocks)
    for layer in case.layers():
        layer[case.blocks] = 0
    assert_only_written(memory, case.memory.buffer)


def gather(subject: Subject, rng: np.random.Generator) -> None:
    case = page_cases.sources(rng, subject.page_bytes_multiple)
    group, memory = case.on(subject.device)
    wanted = [float64.block_bytes(case.layers(), block) for block in case.blocks]
    inverse = np.frombuffer(b"".join(wanted), np.uint8) ^ 0xFF  # every byte is wrong until it is written
    staging = torch.from_numpy(inverse.reshape(len(wanted), group.bytes_per_block)).to(subject.device)
    subject.ops.gather(group, case.blocks, staging)
    wrong = [i for i, row in enumerate(staging.cpu().numpy()) if row.tobytes() != wanted[i]]
    assert not wrong, f"rows {wrong} of the staging buffer are wrong"
    assert_only_written(memory, case.memory.buffer)


def scatter(subject: Subject, rng: np.random.Generator) -> None:
    case = page_cases.named_once(rng, subject.page_bytes_multiple)
    group, memory = case.on(subject.device)
    data = rng.integers(0, 256, (len(case.blocks), group.bytes_per_block)).astype(np.uint8)
    subject.ops.scatter(group, case.blocks, torch.from_numpy(data).to(subject.device))
    start = 0
    for layer in case.layers():
        layer[case.blocks] = data[:, start : start + layer.shape[1]]
        start += layer.shape[1]
    assert_only_written(memory, case.memory.buffer)


def checksum(subject: Subject, rng: np.random.Generator) -> None:
    case = page_cases.sources(rng, subject.page_bytes_multiple)
    group, memory = case.on(subject.device)
    with poisoned_results():
        sums = subject.ops.checksum(group, case.blocks)
    assert sums.dtype == torch.int64, f"{sums.dtype}, wanted int64"
    wanted = [float64.checksum(float64.block_bytes(case.layers(), block)) for block in case.blocks]
    assert sums.tolist() == wanted, f"{sums.tolist()}, wanted {wanted}"
    assert_only_written(memory, case.memory.buffer)


Check = Callable[[Subject, np.random.Generator], None]

CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        write_kv,
        decode_attention,
        prefill_attention,
        write_latent,
        mla_decode,
        state_step,
        convolve,
        selective_scan,
        gated_delta_rule,
        copy_pages,
        zero_pages,
        gather,
        scatter,
        checksum,
    )
}


def check(subject: Subject, operation: str, seed: int) -> None:
    """Run one case.

    Raises:
        AssertionError: the backend violates the contract.
    """
    CHECKS[operation](subject, np.random.default_rng([seed, zlib.crc32(operation.encode())]))


def run(subject: Subject, operation: str, seeds: Iterable[int]) -> list[str]:
    """Run the seeds. Returns a line per failure, with the command that repeats it."""
    failures = []
    for seed in seeds:
        try:
            check(subject, operation, seed)
        except (AssertionError, KvplaneError, RuntimeError, IndexError) as error:
            again = f"{operation} --seed {seed} --backend {subject.ops.name} --device {subject.device}"
            failures.append(f"python -m tests.kernels {again}\n    {type(error).__name__}: {error}")
    return failures
