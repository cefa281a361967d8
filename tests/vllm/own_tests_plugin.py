"""A plugin of pytest, in the environment of vLLM: vLLM's own tests build kvplane's manager instead of vLLM's.

KVPLANE_REPORT names a file that gets, by test, whether kvplane managed a cache ("kvplane"), or vLLM's own manager did,
for a model that kvplane does not support ("stock").
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import vllm.v1.core.kv_cache_manager as managers
import vllm.v1.core.sched.scheduler as schedulers
from vllm.v1.core.kv_cache_manager import KVCacheManager

from kvplane_vllm.manager import InProcessManager
from kvplane_vllm.spec import UnsupportedModel

USED: dict[str, set[str]] = {}
CURRENT = [""]


class Either(InProcessManager):
    """Builds kvplane's manager, or vLLM's own for a model that kvplane does not support."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Return an object that is already built, of another class."""
        used = USED.setdefault(CURRENT[0], set())
        try:
            manager: Any = InProcessManager(*args, **options)
            used.add("kvplane")
        except UnsupportedModel:
            manager = KVCacheManager(*args, **options)
            used.add("stock")
        return manager


managers.KVCacheManager = schedulers.KVCacheManager = Either  # type: ignore[misc]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    """Note the test that runs."""
    CURRENT[0] = item.nodeid


def pytest_sessionfinish() -> None:
    """Write the report."""
    if target := os.environ.get("KVPLANE_REPORT"):
        Path(target).write_text(json.dumps({name: sorted(used) for name, used in USED.items()}))
