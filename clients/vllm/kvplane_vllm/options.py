"""The options below "kvplane" of vLLM's `--additional-config`, checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig

from kvplane.base.errors import InvalidArgument
from kvplane_vllm.connectors import check_connector
from kvplane_vllm.remote.settings import refuse
from kvplane_vllm.target import ACCESS, FIELD, FIXED_HASHES, MODEL_NAME, access_of, of_rank, shown
from kvplane_worker.lending.rundir import default_run_dir

# Accepted values; None: any text that is not empty.
OPTIONS: dict[str, tuple[str, ...] | None] = {
    "mode": ("inprocess", "mirror", "remote"),
    "fallback": ("stock",),
    "pages": ("own", "worker"),
    "address": None,  # only in the modes with a service, which need it, and the replica too
    "replica": None,
    "pipeline": ("on", "off"),  # only in mode "remote"
    "step_timeout": None,  # only in mode "remote": seconds
    "session_socket": None,  # only in mode "remote": of the service, on the same machine
    "worker": None,
    **dict.fromkeys(ACCESS),  # only in the modes with a service
}
RANK = "{rank}"  # in the option `worker`

# Settings with which pages of an earlier engine life may be wrong: (problem, field, its test).
UNFIT: tuple[tuple[str, str, Callable[[VllmConfig], Any]], ...] = (
    ("an adapter's weights may change between epochs", "lora_config", lambda one: one.lora_config),
    (
        "the scales of the pages are computed again in each epoch",
        "cache_config.calculate_kv_scales",
        lambda one: getattr(one.cache_config, "calculate_kv_scales", False),
    ),
    (
        "the pages cannot be unmapped while the engine sleeps",
        "model_config.enable_sleep_mode",
        lambda one: one.model_config.enable_sleep_mode,
    ),
    (
        "a KV connector may still write pages after the engine has ended",
        "kv_transfer_config",
        lambda one: one.kv_transfer_config and one.kv_transfer_config.kv_connector,
    ),
    (
        "without prefix caching there is no cache to keep",
        "cache_config.enable_prefix_caching",
        lambda one: not one.cache_config.enable_prefix_caching,
    ),
    (
        "block hashes of this algorithm differ between processes; give sha256 or sha256_cbor",
        "cache_config.prefix_caching_hash_algo",
        lambda one: one.cache_config.prefix_caching_hash_algo not in FIXED_HASHES,
    ),
)


def options_of(config: VllmConfig) -> dict[str, str]:
    """Return the options of this engine. Raises InvalidArgument for an option, or a setting of vLLM, that is not
    supported.
    """
    given = (config.additional_config or {}).get("kvplane", {})
    if not isinstance(given, dict):
        raise InvalidArgument(f"{given!r} is not an object", field="additional_config.kvplane")
    for name, value in given.items():
        values = OPTIONS.get(name, ())
        if values is None and isinstance(value, str) and value:
            continue
        if values is None or value not in values:
            allowed = " or ".join(map(repr, values)) if values else f"one of the options {', '.join(OPTIONS)}"
            allowed = "a text" if values is None else allowed
            raise InvalidArgument(f"{value!r} is not {allowed}", field=f"additional_config.kvplane.{name}")
    given = of_rank(config, given)
    _check_mode(config, given)
    check_connector(config)
    if config.parallel_config.decode_context_parallel_size > 1:
        raise InvalidArgument("decode context parallelism is not supported", field="decode_context_parallel_size")
    if config.observability_config.kv_cache_metrics:
        raise InvalidArgument(
            "the residency of blocks is sampled by vLLM's own block pool only",
            field="observability_config.kv_cache_metrics",
            remedy="leave --kv-cache-metrics out; a service (mode mirror) has metrics of the cache",
        )
    return given | {MODEL_NAME: shown(config.model_config.served_model_name)}


def _check_mode(config: VllmConfig, given: dict[str, str]) -> None:
    mode, has_worker = given.get("mode", "inprocess"), given.get("pages") == "worker"
    has_service, is_remote = mode != "inprocess", mode == "remote"
    if is_remote and has_worker and config.scheduler_config.async_scheduling:
        problem = "pages: worker in the mode remote needs --no-async-scheduling"
        raise InvalidArgument(problem, field="additional_config.kvplane.pages")
    users = (
        ("address", has_service),
        ("replica", has_service or has_worker),
        ("worker", has_worker),
        ("pipeline", is_remote),
        ("step_timeout", is_remote),
        ("session_socket", is_remote),
        *((name, has_service) for name in ACCESS),
    )
    for name, is_used in users:
        if name in given and not is_used:
            problem = "given without mode mirror" if name == "address" else "given, but not used with these options"
            raise InvalidArgument(f"{name} is {problem}", field=f"additional_config.kvplane.{name}")
        if has_service and name in ("address", "replica") and name not in given:
            raise InvalidArgument(f"{name} is missing in mode {mode}", field=f"additional_config.kvplane.{name}")
    hashes = config.cache_config.prefix_caching_hash_algo
    if has_service and hashes not in FIXED_HASHES:
        raise InvalidArgument(f"{hashes} in mode {mode}: use {' or '.join(FIXED_HASHES)}", field="hash_algo")
    access_of(given)
    if is_remote:
        _check_remote(config, given)


def _check_remote(config: VllmConfig, given: dict[str, str]) -> None:
    if "fallback" in given:
        raise InvalidArgument("mode remote has no fallback", field="additional_config.kvplane.fallback")
    try:
        is_positive = float(given.get("step_timeout", "1")) > 0
    except ValueError:
        is_positive = False
    if not is_positive:
        raise InvalidArgument("step_timeout is not a number of seconds", field="additional_config.kvplane.step_timeout")
    refuse(config)


def worker_addresses(config: VllmConfig, options: dict[str, str]) -> list[str]:
    """Return the directory or address of the kvplane worker of each rank; none with `pages: own`.

    Raises InvalidArgument for settings with which pages of an earlier engine life would be wrong.
    """
    if options.get("pages") != "worker":
        return []
    for problem, setting, applies in UNFIT:
        if applies(config):
            raise InvalidArgument(problem, field=setting, remedy="give pages: own, or change this setting")
    if "fallback" in options:
        raise InvalidArgument(
            "vLLM's own KV cache manager writes no stamps into the pages of a worker",
            field=f"{FIELD}.fallback",
            remedy="leave fallback out, or give pages: own",
        )
    num_ranks = config.parallel_config.world_size
    where = options.get("worker", "")
    if num_ranks > 1 and where and RANK not in where:
        raise InvalidArgument(f"{num_ranks} ranks need a worker each", field=f"{FIELD}.worker", remedy=f"write {RANK}")
    if not where and "replica" not in options:
        raise InvalidArgument("the worker is not named", field=f"{FIELD}.worker", remedy="give worker or replica")
    if where:
        return [where.replace(RANK, str(rank)) for rank in range(num_ranks)]
    return [str(default_run_dir(options["replica"], rank)) for rank in range(num_ranks)]
