"""The contract catches each planted fault."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kernels.contract import CHECKS, check
from tests.kernels.faults import FAULTS
from tests.kernels.subjects import SUBJECTS

SEEDS = range(400)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.operation}: {fault.name}")
def test_contract_catches_planted_faults(fault):
    correct = SUBJECTS["torch"]("cpu")
    faulty = replace(correct, ops=fault.planted(correct.ops))
    for seed in SEEDS:
        try:
            check(faulty, fault.operation, seed)
        except AssertionError:
            return
    pytest.fail(f"{len(SEEDS)} cases of {fault.operation} pass with the fault: {fault.name}")


def test_every_operation_has_planted_faults():
    assert {fault.operation for fault in FAULTS} == CHECKS.keys()
