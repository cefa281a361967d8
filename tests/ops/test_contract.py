"""Every backend that runs on this machine keeps the contract: 400 random cases per operation."""

from __future__ import annotations

import pytest
import torch

from tests.ops.contract import CHECKS, run
from tests.ops.subjects import SUBJECTS

CASES = 400
CASES_PER_TEST = 100


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Cases are small; threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("first", range(0, CASES, CASES_PER_TEST))
@pytest.mark.parametrize("operation", CHECKS)
def test_torch_on_the_cpu(operation, first):
    failures = run(SUBJECTS["torch"]("cpu"), operation, range(first, first + CASES_PER_TEST))
    assert not failures, "\n".join([f"{len(failures)} of {CASES_PER_TEST} cases", *failures[:5]])
