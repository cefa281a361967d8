"""The engine on the Triton backend, in the interpreter: a model per kind of cache group, requests over several tiles.

`TRITON_INTERPRET=1 python -m tests.engine --kinds --backend triton --requests 1000` is the large run.
"""

from __future__ import annotations

import pytest

from tests.engine.backends import Place, lender
from tests.engine.stress import KINDS, run_mix

REQUESTS = 2


@pytest.mark.parametrize("mix", KINDS, ids=lambda mix: mix.name)
def test_engine_on_triton_equals_the_dense_model(mix):
    """The pages belong to another process, as those of a worker do."""
    with lender() as other:
        report = run_mix(mix, REQUESTS, seed=1, place=Place(backend="triton", lender=other))
    assert report.complaints == []
    assert report.requests == report.counts.completed == REQUESTS
    assert report.long
    assert 0 < report.worst < 1e-4, "logits are compared, and sums have another order"
