"""A plugin of pytest, in the environment of vLLM: vLLM's own tests build kvplane's manager instead of vLLM's.

KVPLANE_REPORT names a file that gets, by test, whether kvplane managed a cache ("kvplane"), or vLLM's own manager did,
for a model that kvplane does not support ("stock").

KVPLANE_MIRROR names the address of a service. Every manager then sends its steps there, and a test in which an answer
differs, or does not come, is reported as "differs"; one in which a call of the manager sends more than one message, as
"more messages than calls".
"""

from __future__ import annotations

import inspect
import json
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import grpc
import pytest
import vllm.v1.core.kv_cache_manager as managers
import vllm.v1.core.sched.scheduler as schedulers
from handoffs import hand_off
from vllm.v1.core.kv_cache_manager import KVCacheManager
from white_box import show_inside

from kvplane.rpc.channel import open_channel
from kvplane.v1.allocation_pb2 import DeregisterReplicaRequest
from kvplane.v1.allocation_pb2_grpc import AllocationStub
from kvplane_vllm import views
from kvplane_vllm.manager import InProcessManager
from kvplane_vllm.spec import UnsupportedModel

USED: dict[str, set[str]] = {}
CURRENT = [""]
ADDRESS = os.environ.get("KVPLANE_MIRROR", "")
MIRRORS: list[Any] = []  # of the test that runs
STEPS = [0]  # steps compared
MESSAGES = Counter[str]()  # calls of managers, and messages that they sent
WAIT_S = 60


def build(*args: Any, **options: Any) -> InProcessManager:
    """Return kvplane's manager; with KVPLANE_MIRROR, one whose steps a service follows."""
    if not ADDRESS:
        return InProcessManager(*args, **options)
    from kvplane_vllm.mirror import mirroring
    from kvplane_vllm.target import Target

    name = f"own/{os.getpid()}/{len(USED)}/{len(MIRRORS)}"
    MIRRORS.append(mirroring(Target(ADDRESS, name))(*args, **options))
    count_messages(MIRRORS[-1])
    return MIRRORS[-1]


def count_messages(manager: Any) -> None:
    """Note each call of a method of vLLM's manager that sends more than one message."""
    for name, method in inspect.getmembers(KVCacheManager, inspect.isfunction):
        if not name.startswith("_"):
            setattr(manager, name, counted(manager, name, getattr(manager, name), method))


def counted(manager: Any, name: str, call: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call`, which notes itself if it sends more than one message. A call within a call is part of it."""

    @wraps(method)
    def counting(*args: Any, **options: Any) -> Any:
        before = manager.sender.num_submitted
        found = call(*args, **options)
        sent = manager.sender.num_submitted - before
        MESSAGES["calls"] += 1
        MESSAGES["messages"] += sent
        if sent > 1:
            USED[CURRENT[0]].add(f"more messages than calls: {sent} in {name}")
        return found

    return counting


class Either(InProcessManager):
    """Builds kvplane's manager, or vLLM's own for a model that kvplane does not support."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Return an object that is already built, of another class."""
        used = USED.setdefault(CURRENT[0], set())
        try:
            manager: Any = build(*args, **options)
            manager.built_with = args, options
            used.add("kvplane")
        except UnsupportedModel:
            manager = KVCacheManager(*args, **options)
            used.add("stock")
        return manager


def detach(manager: Any) -> None:
    """End the mirroring of a manager, and remove its replica."""
    manager.sender.close()
    manager.lock.release()
    with open_channel(ADDRESS) as channel, suppress(grpc.RpcError):  # perhaps never registered
        AllocationStub(channel).DeregisterReplica(DeregisterReplicaRequest(replica=manager.target.replica))


def set_retention(coordinator: Any, interval: int | None) -> None:
    """Build the manager again with another retention interval: tests set it after the manager is built."""
    manager = coordinator._manager
    args, options = manager.built_with
    named = dict(zip(inspect.signature(InProcessManager).parameters, args, strict=False)) | options
    named["kv_cache_config"] = replace(named["kv_cache_config"], prefix_cache_retention_interval=interval)
    if ADDRESS:
        detach(manager)
    manager.__init__(**named)
    manager.built_with = (), named


views.Coordinator.retention_interval = property(  # type: ignore[attr-defined]
    lambda coordinator: coordinator._real.retention_interval, set_retention
)
hand_off()
show_inside()
managers.KVCacheManager = schedulers.KVCacheManager = Either  # type: ignore[misc]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    """Note the test that runs."""
    CURRENT[0] = item.nodeid


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Compare what the service has with the managers of the test, and remove their replicas."""
    for manager in MIRRORS:
        manager.close_step()
        sender = manager.sender
        is_applied = sender.wait_applied(WAIT_S)
        if not is_applied or sender.ended or sender.state.divergences or sender.state.images != 1:
            USED[CURRENT[0]].add(f"differs: {sender.ended} {sender.state}")
        STEPS[0] += sender.state.applied_through
        detach(manager)
    MIRRORS.clear()


def pytest_sessionfinish() -> None:
    """Write the report."""
    if ADDRESS:
        USED["steps compared"] = {str(STEPS[0])}
        USED["messages"] = {f"{MESSAGES['messages']} in {MESSAGES['calls']} calls"}
    if target := os.environ.get("KVPLANE_REPORT"):
        Path(target).write_text(json.dumps({name: sorted(used) for name, used in USED.items()}))
