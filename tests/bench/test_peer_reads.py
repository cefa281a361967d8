"""The bench of reads of a peer, small: each way reads what is there, and takes a time."""

from __future__ import annotations

import pytest

from tests.bench.peer_reads import measure
from tests.peers.campaign import HAS_NIXL


@pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed: pip install '.[nixl]'")
def test_each_way_to_read_a_peer_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    times = measure(3, 5000, 2)
    assert list(times) == ["copy", "mapped", "mapped, verified", "raw", "NIXL", "NIXL, verified"]
    assert min(times.values()) > 0
