"""KV connectors of vLLM, which move pages to other memory or other engines: which of them run with kvplane, and what
kvplane does when a load fails.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.v1.request import Request

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import GroupKind, ReplicaSpec

if TYPE_CHECKING:
    from kvplane_vllm.manager import InProcessManager

TESTED = (
    "OffloadingConnector",
    "MultiConnector",
    "LMCacheMPConnector",
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "MooncakeConnector",
)  # the second joins connectors, each of which must run
NETWORK = "it moves pages through a network for which there was no test"
PACKAGE = "it needs a package with which there was no test"
CUDA = "its workers need CUDA, and there was no test on a GPU"
# Connectors that run on models with one group of layers alone, with the reason.
ONE_GROUP: Mapping[str, str] = {
    "LMCacheMPConnector": "in 3 of 12 runs of a model with windows what it had loaded gave other tokens, also with "
    "vLLM's own scheduler (LMCache 0.5.6, on a CPU)",
}
# Connectors of vLLM that do not run with kvplane, with the reason.
REFUSED: Mapping[str, str] = {
    "DecodeBenchConnector": "it fills pages with dummy values, which the prefix cache would keep as content",
    "ExampleConnector": "it fails where a prompt is computed in chunks, on vLLM's own scheduler too",
    "ExampleHiddenStatesConnector": CUDA,
    "FlexKVConnectorV1": PACKAGE,
    "HF3FSKVConnector": PACKAGE,
    "HiSparseConnector": "kvplane does not have its two-level block pool",
    "LMCacheConnectorV1": PACKAGE,
    "MoRIIOConnector": NETWORK,
    "MooncakeStoreConnector": "it needs a Mooncake master, with which there was no test",
    "SimpleCPUOffloadConnector": "it changes the blocks of vLLM's own block pool",
    "UMBPStoreConnector": NETWORK,
}


def check_connector(config: VllmConfig) -> None:
    """Raise InvalidArgument for a KV connector that does not run with kvplane.

    A connector of the user (`kv_connector_module_path`) runs: vLLM's interface for connectors is tested with one that
    loads while other requests run, keeps blocks after the end of a request, and reports loads that failed.
    """
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector:
        options = transfer.kv_connector_module_path, transfer.kv_connector_extra_config
        for name, is_of_vllm in _joined(transfer.kv_connector, *options):
            if name in TESTED or not is_of_vllm:
                continue
            reason = REFUSED.get(name, "there was no test with it")
            raise InvalidArgument(
                f"the KV connector {name} does not run with kvplane: {reason}",
                field="kv_transfer_config.kv_connector",
                remedy=f"use {' or '.join(TESTED)}, or leave scheduler_cls out",
            )


def _joined(name: str, module: str | None, extra: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield this connector, or the ones that it joins, each with whether it is of vLLM and not the user's."""
    is_of_vllm = not module or module.startswith("vllm.")
    if name == "MultiConnector" and is_of_vllm:
        for one in extra.get("connectors", ()):
            further = one.get("kv_connector_extra_config") or {}
            yield from _joined(str(one.get("kv_connector")), one.get("kv_connector_module_path"), further)
    else:
        yield name, is_of_vllm


def check_groups(config: VllmConfig, connector: Any, spec: ReplicaSpec) -> None:
    """Raise InvalidArgument for a KV connector other than kvplane's on a model with recurrent states, and for one of
    `ONE_GROUP` on a model with several groups.
    """
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector and len(spec.groups) > 1:
        options = transfer.kv_connector_module_path, transfer.kv_connector_extra_config
        for name in [name for name, _ in _joined(transfer.kv_connector, *options) if name in ONE_GROUP]:
            raise InvalidArgument(
                f"the KV connector {name} does not run with kvplane on a model with {len(spec.groups)} groups of "
                f"layers: {ONE_GROUP[name]}",
                field="kv_transfer_config.kv_connector",
                remedy="use kvplane's tiers (KvplaneConnector), or leave scheduler_cls out",
            )
    has_states = any(group.kind is GroupKind.MAMBA for group in spec.groups)
    if connector is not None and has_states and not getattr(connector, "restores_states", False):
        raise InvalidArgument(
            f"the KV connector {type(connector).__name__} does not run with kvplane on a model with recurrent states: "
            "its tokens were not compared with those of stock vLLM",
            field="kv_transfer_config.kv_connector",
            remedy="leave kv_transfer_config or scheduler_cls out",
        )


def failed_blocks(model_output: Any) -> Collection[int]:
    """Return the blocks that a load of the step left unwritten, as the workers report them."""
    found = getattr(model_output, "kv_connector_output", None)
    return found.invalid_block_ids if found is not None else ()


def withdraw(manager: InProcessManager, failed: Collection[int]) -> None:
    """Remove the keys of these blocks and of the blocks behind them in the tables of requests.

    Call this before the step of the load counts as executed, so that no key of such a block is published.
    """
    behind: set[int] = set()
    for known in manager.known.values():
        for table in manager.tables_of(known.slot):
            behind.update(table[_first(table, failed) :])
    manager.evict_blocks({block for block in behind if manager.pool.key_of(block) is not None})
    manager.close_step()  # the next step begins with what has executed since


def readers(manager: InProcessManager, running: Collection[Request], failed: Collection[int]) -> list[Request]:
    """Return the running requests that have one of these blocks but do not compute it again.

    vLLM lets the first request with such a block compute it again, and the others use it. If the first one is
    preempted before, they would use an unwritten block.
    """
    found = []
    for request in running:
        known = manager.known.get(request.request_id)
        for group, table in enumerate(manager.tables_of(known.slot) if known is not None else ()):
            if _first(table, failed) * manager.managers[group].block_size < request.num_computed_tokens:
                found.append(request)
                break
    return found


def _first(table: Collection[int], failed: Collection[int]) -> int:
    return next((index for index, block in enumerate(table) if block in failed), len(table))
