"""The stress catches each planted fault, by a differing token or logit, or by a named error."""

from __future__ import annotations

import pytest

from kvplane.base import errors
from kvplane.base.layer_spec import DType
from tests.engine.faults import FAULTS
from tests.engine.stress import MIXES, in_pages_of, run_mix
from tests.engine.test_stress import SEED

MIX_OF = {mix.name: mix for mix in MIXES}
REQUESTS = 30


@pytest.mark.parametrize("dtype", [None, DType.BFLOAT16], ids=["exact", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_planted_fault_is_caught(fault, dtype):
    """Also with pages of 16 bits, where logits have a tolerance."""
    mix = in_pages_of(dtype, MIX_OF[fault.mix]) if dtype else MIX_OF[fault.mix]
    if fault.raises:
        with pytest.raises(getattr(errors, fault.raises)):
            run_mix(mix, REQUESTS, SEED, fault)
        return
    complaints = run_mix(mix, REQUESTS, SEED, fault).complaints
    assert complaints
    expected = "restarts that kept nothing" if fault.mix == "restarts" else "requests with differing logits"
    assert any(expected in complaint for complaint in complaints), complaints
