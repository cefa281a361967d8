"""Every backend that runs on this machine satisfies the contract: 400 random cases per operation."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.contract import CHECKS, run
from tests.kernels.subjects import SUBJECTS

CASES = 400
CASES_PER_TEST = 100
PLACES = [("torch", "cpu"), *([("torch", "cuda:0")] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("first", range(0, CASES, CASES_PER_TEST))
@pytest.mark.parametrize("operation", CHECKS)
@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_backend_keeps_the_contract(backend, device, operation, first):
    failures = run(SUBJECTS[backend](device), operation, range(first, first + CASES_PER_TEST))
    assert not failures, "\n".join([f"{len(failures)} of {CASES_PER_TEST} cases", *failures[:5]])
