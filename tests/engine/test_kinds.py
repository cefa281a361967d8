"""The engine on the Triton backend, in the interpreter, and on the cuDNN backend with a fake of cuDNN: a model per kind
of cache group, requests over several tiles.

`TRITON_INTERPRET=1 python -m tests.engine --kinds --backend triton --requests 1000` is the large run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvplane.base.errors import InvalidArgument
from kvplane.base.layer_spec import DType
from kvplane_kernels.cudnn_ops import backend as cudnn
from kvplane_kernels.cudnn_ops import rows
from kvplane_worker.pages.dtypes import TORCH_DTYPES
from tests.engine.backends import CUDNN, Place, lender
from tests.engine.reference.config import EIGHT_BIT, HALVES, LATENT, MIXED, ModelConfig, StateLayer
from tests.engine.stress import (
    FULL,
    JAMBA,
    KINDS,
    QWEN3_NEXT,
    TOLERANCE_8BIT,
    TOLERANCE_16BIT,
    in_pages_of,
    run_mix,
)
from tests.engine.twin import Twin
from tests.engine.world import SAMPLES, Pool, World
from tests.kernels import subjects
from tests.kernels.cudnn_twin import Faults, Library

REQUESTS = 2


@pytest.mark.parametrize("mix", KINDS, ids=lambda mix: mix.name)
def test_engine_on_triton_equals_the_dense_model(mix):
    """The pages belong to another process, as those of a worker do."""
    with lender() as other:
        report = run_mix(mix, REQUESTS, seed=1, place=Place(backend="triton", lender=other))
    assert report.complaints == []
    assert report.requests == report.counts.completed == REQUESTS
    assert report.long
    assert 0 < report.worst < (TOLERANCE_8BIT if mix.pool.model.cache_dtype else 1e-4), "sums have another order"


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["window", "latents"])
def test_engine_with_pages_of_16_bits_equals_the_dense_model_but_for_near_ties(name, dtype):
    (mix,) = (in_pages_of(dtype, mix) for mix in KINDS if mix.name == name)
    report = run_mix(mix, REQUESTS, seed=1, place=Place(backend="triton"))
    assert report.complaints == []
    assert report.requests == report.counts.completed == REQUESTS
    assert 0 < report.worst < TOLERANCE_16BIT[dtype]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_engine_on_cudnn_equals_the_dense_model_but_for_near_ties(monkeypatch, dtype):
    """A fake of cuDNN computes long rows from gathered pages, in one span or two, and torch the others of a batch."""
    folds = []
    monkeypatch.setattr(cudnn, "fold", lambda *given, fold=cudnn.fold: folds.append(fold(*given)))
    by_cudnn = {}
    for mix in KINDS:
        report = run_mix(in_pages_of(dtype, mix), 3 * REQUESTS, seed=1, place=Place(backend=CUDNN))
        assert report.complaints == []
        by_cudnn[mix.name] = report.by_cudnn
    others = {"chunk", "latents", "e4m3: full and window", "e5m2: chunk and states", "e4m3: latents"}
    assert {name for name, count in by_cudnn.items() if not count} == others
    assert len(folds) > 10


def swapped(out, sums, more, more_sums):
    """A merge of two spans with each other's weights."""
    cudnn_fold(out, more_sums, more, sums)


def shifted(batch, shape, block_size, limits):
    """The first block of each span is that of the next row of the table."""
    found = cudnn_split(batch, shape, block_size, limits)
    for row in found.long:
        for span in row.spans:
            span.blocks[0] = batch.block_table[(row.row + 1) % len(batch.block_table), 0]
    return found


cudnn_fold, cudnn_split = cudnn.fold, rows.split
PLANTED: dict[str, Faults | tuple[str, Callable[..., object]]] = {
    "window": Faults(window=1),
    "scale": Faults(scale=0.2),
    "first query": Faults(from_the_top=True),
    "reads past the end": Faults(reads_past_the_end=True),
    "writes past the end": Faults(writes_past_the_end=True),
    "base of log-sum-exps": Faults(base_2=True),
    "merge": ("fold", swapped),
    "gathered blocks": ("split", shifted),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_engine_catches_a_fault_of_cudnn_or_around_it(monkeypatch, fault):
    if isinstance(planted := PLANTED[fault], Faults):
        monkeypatch.setattr(subjects, "Library", lambda: Library(planted))
    else:
        name, function = planted
        monkeypatch.setattr(cudnn, name, function)
    kind = "window" if fault == "window" else "full"
    (mix,) = (in_pages_of(DType.FLOAT16, mix) for mix in KINDS if mix.name == kind)
    assert run_mix(mix, 12 * REQUESTS, seed=1, place=Place(backend=CUDNN)).complaints


def test_pages_of_other_elements_are_refused():
    with pytest.raises(InvalidArgument, match=r"cache_dtype: pages cannot be of DType.INT8 \(give a type of 8 or 16"):
        ModelConfig((FULL,), cache_dtype=DType.INT8)


@pytest.mark.parametrize("dtype", EIGHT_BIT, ids=str)
@pytest.mark.parametrize("config", [MIXED, LATENT], ids=["mixed", "latent"])
def test_scales_are_the_largest_keys_and_values_of_the_samples(config, dtype):
    """Per head and layer, as the dense model computes them, without rounding."""
    model = replace(config, cache_dtype=dtype)
    world = World(Pool(model, num_blocks=120))
    twin = Twin(model, world.weights)
    for sample in SAMPLES:
        twin.logits(sample)
    limit = torch.finfo(TORCH_DTYPES[dtype]).max
    for number, largest in twin.largest.items():
        for found, scale in zip(largest, world.twin.scales(number), strict=True):
            torch.testing.assert_close(scale.flatten(), found / limit, rtol=1e-6, atol=0)
    assert len(twin.largest) == sum(not isinstance(layer, StateLayer) for layer in model.layers)


def test_a_selective_scan_on_ranks_and_uneven_heads_of_keys_are_refused():
    with pytest.raises(InvalidArgument, match=r"layers\[1\]: .* \(give num_ranks = 1"):
        ModelConfig((FULL, JAMBA), num_ranks=2)
    with pytest.raises(InvalidArgument, match=r"layers\[0\]\.key_heads: 2 cannot be divided over 4 ranks"):
        ModelConfig((QWEN3_NEXT,), num_ranks=4)
