"""The bench of hybrid loads, small: what it loads is what a hit needs, and a page that was not loaded is found."""

from __future__ import annotations

import pytest

from kvplane.base.groups import TierKind
from kvplane_kernels.torch_ops import TorchOps
from tests.bench.hybrid_loads import Shape, play

SMALL = Shape("small", full=2, windows=9, window=32, block=16, key_size=4)
PROMPTS, TOKENS = 4, 1024


@pytest.mark.parametrize("kind", [TierKind.HOST, TierKind.DISK])
def test_loads_are_what_the_groups_need(kind: TierKind):
    found = play(SMALL, kind, PROMPTS, TOKENS, 1)
    page = 16 * 4 * 2 * 2
    assert found.uniform_bytes == 11 * TOKENS // 16 * page
    assert found.hybrid_bytes == (2 * TOKENS // 16 + 9 * 2) * page
    assert len(found.pairs) == len(found.single) == PROMPTS


def test_a_page_that_holds_something_else_is_found(monkeypatch: pytest.MonkeyPatch):
    scatter = TorchOps.scatter

    def but_one(self: TorchOps, pages, blocks, rows) -> None:
        scatter(self, pages, blocks[1:], rows[1:])

    monkeypatch.setattr(TorchOps, "scatter", but_one)
    with pytest.raises(AssertionError, match="holds"):
        play(SMALL, TierKind.HOST, PROMPTS, TOKENS, 1)
