"""The Triton backend satisfies the contract in the interpreter: some random cases; 400 in `make test-nightly`."""

from __future__ import annotations

import pytest

from kvplane_kernels.triton_ops.backend import TritonOps
from tests.kernels.contract import CHECKS, run
from tests.kernels.subjects import SUBJECTS

# Seeds per operation, and how many of them must run in a kernel; the others fall back to the torch backend.
SEEDS = {
    "write_kv": (80, 40),
    "write_latent": (80, 40),
    "decode_attention": (40, 18),
    "prefill_attention": (40, 18),
    "mla_decode": (20, 9),
    "state_step": (30, 15),
    "convolve": (30, 15),
    "selective_scan": (30, 15),
    "gated_delta_rule": (60, 30),
    "copy_pages": (60, 35),
    "zero_pages": (60, 35),
    "gather": (60, 35),
    "scatter": (60, 35),
    "checksum": (30, 15),
}
NIGHTLY_SEEDS, NIGHTLY_BY_KERNELS = 1000, 400


def by_kernels(operation: str, seeds: range, enough: int) -> tuple[int, list[str]]:
    """Run seeds until `enough` of them ran in kernels. Returns that number, and the failures."""
    subject, taken, failures = SUBJECTS["triton"]("cpu"), 0, []
    assert isinstance(subject.ops, TritonOps)
    for seed in seeds:
        subject.ops.fallbacks.clear()
        failures += run(subject, operation, [seed])
        taken += operation not in subject.ops.fallbacks
        if taken == enough:
            break
    return taken, failures


@pytest.mark.parametrize("operation", SEEDS)
def test_random_cases_in_the_interpreter(operation):
    seeds, least = SEEDS[operation]
    taken, failures = by_kernels(operation, range(seeds), seeds)
    assert not failures, "\n".join([f"{len(failures)} of {seeds} cases", *failures[:5]])
    assert taken >= least, f"kernels ran {taken} of {seeds} cases"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("operation", SEEDS)
def test_400_random_cases_in_the_interpreter(operation):
    taken, failures = by_kernels(operation, range(1000, 1000 + NIGHTLY_SEEDS), NIGHTLY_BY_KERNELS)
    assert not failures, "\n".join([f"{len(failures)} cases", *failures[:5]])
    assert taken == NIGHTLY_BY_KERNELS


def test_every_operation_is_checked():
    assert set(SEEDS) == set(CHECKS)
