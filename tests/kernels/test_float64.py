"""The float64 reference, against published results and simple arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels import float64, float64_states
from tests.kernels.formats import BFLOAT16, FLOAT8, FLOAT16, FORMATS


@pytest.mark.parametrize(("h", "mixed"), [(0, 0), (1, 0x514E28B7), (2, 0x30F4C306), (0xFFFFFFFF, 0x81F16F39)])
def test_mix_is_the_murmur3_finalizer(h, mixed):
    assert float64.murmur3_finalizer(h) == mixed


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_format_reads_and_rounds_as_torch(form):
    rng = np.random.default_rng(1)
    exact = rng.standard_normal(20_000) * np.exp2(rng.uniform(-20, 8, 20_000))
    exact = np.clip(exact, -form.largest, form.largest).astype(np.float32).astype(np.float64)
    ours = form.encode(exact)
    theirs = torch.from_numpy(exact).to(form.torch_dtype)
    assert (ours == theirs.view(torch.uint8).numpy()).all()
    assert (form.decode(ours) == theirs.double().numpy()).all()
    assert (np.abs(form.decode(ours) - exact) <= form.step(exact) / 2).all()


@pytest.mark.parametrize("form", [FLOAT8, FLOAT16, BFLOAT16], ids=lambda form: form.name)
def test_small_formats_round_trip_every_code(form):
    codes = np.arange(1 << (8 * form.num_bytes), dtype=np.uint16 if form.num_bytes == 2 else np.uint8).view(np.uint8)
    values = form.decode(codes)
    theirs = torch.from_numpy(codes.copy()).view(form.torch_dtype).double().numpy()
    assert np.array_equal(values, theirs, equal_nan=True)
    finite = np.repeat(np.isfinite(values), form.num_bytes)
    assert (form.encode(values[np.isfinite(values)]) == codes[finite]).all()


def tables(block_table, seq_lens, query_start):
    return float64.Tables(np.array(block_table), np.array(seq_lens), np.array(query_start))


def test_attention_with_equal_keys_is_the_mean_of_values():
    values = np.arange(16.0).reshape(4, 4, 1, 1)  # token t of block b has value 4 b + t
    keys = np.zeros((4, 4, 1, 2))
    query, batch = np.ones((2, 1, 2)), tables([[3, 1]], [6], [0, 2])

    def means(**rule):
        return float64.attention(query, keys, values, batch, float64.Rule(1.0, **rule)).values.ravel()

    assert means() == pytest.approx([(12 + 13 + 14 + 15 + 4) / 5, (12 + 13 + 14 + 15 + 4 + 5) / 6])
    assert means(window=2) == pytest.approx([(15 + 4) / 2, (4 + 5) / 2])
    assert means(chunk=4) == pytest.approx([4, (4 + 5) / 2])
    assert means(window=1, sinks=np.zeros(1)) == pytest.approx([2, 2.5])


def test_null_block_and_empty_row_have_output_0():
    values = np.full((2, 2, 1, 1), np.nan)
    values[1] = 3.0
    batch = tables([[0, 1], [0, 0], [0, 0]], [4, 2, 0], [0, 1, 2, 3])
    out = float64.attention(np.ones((3, 1, 1)), values, values, batch, float64.Rule(1.0)).values
    assert out.ravel().tolist() == [3.0, 0.0, 0.0]


def test_state_is_a_sum_of_decayed_inputs():
    """Width 1 and no bias: u = silu(x); h = sum of exp(a dt) ** age x dt v B."""
    x, dt, a = np.array([[1.0, 2.0, 0.5], [0.3, -1.0, 2.0]]), np.array([[0.5], [0.25]]), np.array([-0.7])
    weights = float64_states.Recurrence(np.ones((3, 1)), np.zeros(3), a, np.array([0.1]))
    rows = float64_states.Rows(np.array([0, 2]), np.array([0]), np.array([0, 1]))
    result, kept = float64_states.state_step((np.zeros((2, 3, 0)), np.zeros((2, 1, 1, 1))), rows, x, dt, weights)
    (v0, b0, _), (v1, b1, c1) = x / (1 + np.exp(-x))
    state = np.exp(-0.7 * 0.25) * 0.5 * v0 * b0 + 0.25 * v1 * b1
    assert kept.ssm[1].values.item() == pytest.approx(state, rel=1e-14)
    assert result.values[1].item() == pytest.approx(state * c1 + 0.1 * v1, rel=1e-14)
