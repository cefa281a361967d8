"""The options of the connector (`kv_connector_extra_config`), and the engines that it refuses, by name and at start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import MAX_BLOCKS, SavePolicy, TierKind, TierSpec
from kvplane.base.units import parse_bytes, parse_duration
from kvplane.base.worker import MAX_PEERS
from kvplane_vllm.target import ACCESS, FIXED_HASHES, MODEL_NAME, Target, of_rank, shown, target_of
from kvplane_vllm.tiers.layout import host_plan, row_bytes
from kvplane_worker.nixl.transport import PeerTransport

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

FIELD = "kv_transfer_config.kv_connector_extra_config"
OPTIONS = (
    "host", "disk", "disk_size", "save", "load_timeout", "min_load",
    "address", "replica", "peers", "peer_transport", *ACCESS,
)  # fmt: skip
RETAINED_PERCENT = 25  # of host memory and of the disk, for one owner
LEAVE_OUT = "leave --kv-transfer-config out"

Problem = tuple[str, str, str, Callable[["VllmConfig"], Any]]  # problem, field, remedy, whether it is there

REFUSED: tuple[Problem, ...] = (
    (
        "a request whose load fails would end with an error",
        "kv_transfer_config.kv_load_failure_policy",
        'give "kv_load_failure_policy": "recompute"',
        lambda one: one.kv_transfer_config.kv_load_failure_policy != "recompute",
    ),
    (
        "it saves and loads pages of one engine",
        "kv_transfer_config.kv_role",
        'give "kv_role": "kv_both"',
        lambda one: one.kv_transfer_config.kv_role != "kv_both",
    ),
    (
        "without prefix caching blocks have no hashes",
        "cache_config.enable_prefix_caching",
        "give --enable-prefix-caching",
        lambda one: not one.cache_config.enable_prefix_caching,
    ),
    (
        "ranks are tested with tensor parallelism alone",
        "parallel_config",
        f"give no other --...-parallel-size than --tensor-parallel-size, or {LEAVE_OUT}",
        lambda one: (
            one.parallel_config.world_size > one.parallel_config.tensor_parallel_size
            or one.parallel_config.decode_context_parallel_size > 1
        ),
    ),
    (
        "there was no test with speculative decoding",
        "speculative_config",
        f"leave --speculative-config out, or {LEAVE_OUT}",
        lambda one: one.speculative_config,
    ),
    (
        "an adapter's weights may change under its name",
        "lora_config",
        f"leave --enable-lora out, or {LEAVE_OUT}",
        lambda one: one.lora_config,
    ),
    (
        "pages are unmapped while the engine sleeps",
        "model_config.enable_sleep_mode",
        f"leave --enable-sleep-mode out, or {LEAVE_OUT}",
        lambda one: one.model_config.enable_sleep_mode,
    ),
)
REFUSED_WITH_SERVICE: tuple[Problem, ...] = (
    (
        "a service cannot compute block hashes of this algorithm that callers could name",
        "cache_config.prefix_caching_hash_algo",
        "give --prefix-caching-hash-algo sha256, or leave address out",
        lambda one: one.cache_config.prefix_caching_hash_algo not in FIXED_HASHES,
    ),
)
REFUSED_WITH_DISK: tuple[Problem, ...] = (
    (
        "block hashes of this algorithm differ between processes",
        "cache_config.prefix_caching_hash_algo",
        "give --prefix-caching-hash-algo sha256, or leave disk out",
        lambda one: one.cache_config.prefix_caching_hash_algo not in FIXED_HASHES,
    ),
    (
        "the scales of the pages are computed again in each process",
        "cache_config.calculate_kv_scales",
        "leave --calculate-kv-scales or disk out",
        lambda one: getattr(one.cache_config, "calculate_kv_scales", False),
    ),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of the connector.

    Attributes:
        host_bytes: of the tier in host memory, of each rank.
        disk: folder of the disk tier; None = there is none.
        disk_bytes: of the disk tier, of each rank.
        save: when blocks in host memory are copied to the disk.
        load_timeout_s: how long a request waits for the disk before it is computed.
        service: follows the tiers; None = no service knows them.
        peers: engines that one is loaded from, as if each had as much host memory; 0 = from none, and it lends none.
        peer_transport: how their host memory is read.
        min_load: fewer tokens than these are computed, not loaded.
    """

    host_bytes: int
    disk: Path | None
    disk_bytes: int
    save: SavePolicy
    load_timeout_s: float
    service: Target | None = None
    peers: int = 0
    peer_transport: PeerTransport = PeerTransport.SHARED_MEMORY
    min_load: int = 0


def settings_of(config: VllmConfig) -> Settings:
    """Return the options of this engine. Raises InvalidArgument for an option that is wrong or missing, and for a
    setting of vLLM with which tiers do not run.
    """
    transfer = config.kv_transfer_config
    assert transfer is not None, "vLLM makes a connector for a kv_transfer_config"
    given: dict[str, Any] = transfer.kv_connector_extra_config
    for name, value in given.items():
        if name not in OPTIONS:
            raise _wrong(name, f"{name!r} is not one of the options {', '.join(OPTIONS)}", "leave it out")
        if not isinstance(value, str) or not value:
            raise _wrong(name, f"{value!r} is not a text", 'write it in quotes, such as "64GiB"')
    disk = given.get("disk")
    for one, other in (("disk", "disk_size"), ("address", "replica")):
        if (one in given) != (other in given):
            raise _wrong(other, f"{one} and {other} need each other", "give both, or neither")
    for name in ACCESS:
        if name in given and "address" not in given:
            raise _wrong(name, "it is for a service, and there is no address", "give address and replica too")
    if "host" not in given:
        raise _wrong("host", "it is missing: what is on the disk passes through host memory", 'give "host": "8GiB"')
    policies = [one.value for one in SavePolicy]
    if given.get("save", policies[0]) not in policies:
        raise _wrong("save", f"{given['save']!r} is no policy", f"give one of {', '.join(policies)}")
    peers = _peers_of(given)
    more = [*(REFUSED_WITH_DISK if disk or peers else ()), *(REFUSED_WITH_SERVICE if "address" in given else ())]
    for problem, field, remedy, applies in (*REFUSED, *more):
        if applies(config):
            raise InvalidArgument(f"kvplane's tiers do not run with this engine: {problem}", field=field, remedy=remedy)
    return Settings(
        parse_bytes(given["host"], f"{FIELD}.host"),
        None if disk is None else Path(disk),
        parse_bytes(given["disk_size"], f"{FIELD}.disk_size") if disk else 0,
        SavePolicy(given.get("save", SavePolicy.THROUGH.value)),
        parse_duration(given.get("load_timeout", "10s"), f"{FIELD}.load_timeout"),
        _service_of(config, given) if "address" in given else None,
        peers,
        PeerTransport(given.get("peer_transport", PeerTransport.SHARED_MEMORY.value)),
        _number("min_load", given.get("min_load", "0"), 0, config.model_config.max_model_len, "tokens"),
    )


def _number(name: str, given: str, least: int, most: int, unit: str) -> int:
    """Return the number that an option gives. Raises InvalidArgument."""
    if not (given.isascii() and given.isdecimal()) or not least <= int(given) <= most:
        raise _wrong(name, f"{given!r} is no number of {unit}", f"give {least} to {most}")
    return int(given)


def _peers_of(given: dict[str, str]) -> int:
    """Return the option `peers`. Raises InvalidArgument if it, or `peer_transport`, is wrong."""
    if "peers" not in given:
        if "peer_transport" in given:
            raise _wrong("peer_transport", "it is for peers, and there are none", "give peers too")
        return 0
    if "address" not in given:
        raise _wrong("peers", "a service says what peers have", "give address and replica too")
    if "disk" in given:
        raise _wrong("peers", "there was no test of peers with a disk", "leave peers, or disk and disk_size, out")
    number = _number("peers", given["peers"], 1, MAX_PEERS, "engines")
    ways = [one.value for one in PeerTransport]
    if given.get("peer_transport", ways[0]) not in ways:
        raise _wrong("peer_transport", f"{given['peer_transport']!r} is no transport", f"give one of {', '.join(ways)}")
    return number


def _service_of(config: VllmConfig, given: dict[str, str]) -> Target:
    kvplane = (config.additional_config or {}).get("kvplane", {})
    if given["replica"] == kvplane.get("replica"):
        raise _wrong("replica", "it is that of the device", "give the tiers a replica of their own")
    name = {MODEL_NAME: shown(config.model_config.served_model_name)}
    return target_of(of_rank(config, given, FIELD) | name, FIELD)


def check_groups(config: KVCacheConfig) -> None:
    """Raise InvalidArgument for a model with a kind of cache of which tiers hold nothing."""
    loaded = set(config.prefix_cacheable_group_ids)
    for number, group in enumerate(config.kv_cache_groups):
        spec, why = group.kv_cache_spec, ""
        if number not in loaded or group.host_resident:
            why = "its blocks have no hashes"
        elif group.is_eagle_group:
            why = "it is of a draft model"
        elif spec.prefix_replay_tokens:
            why = "vLLM computes the last window of its hits again"
        elif not spec.has_layer_views:
            why = "its pages are not placed by layer"
        if why:
            raise InvalidArgument(
                f"kvplane's tiers hold no {type(spec).__name__} of layers {', '.join(group.layer_names[:3])}: {why}",
                field="kv_cache_config",
                remedy=LEAVE_OUT,
            )


def tiers_of(config: KVCacheConfig, settings: Settings) -> tuple[int, tuple[TierSpec, ...]]:
    """Return the blocks in host memory, and the tier behind it: a disk, or peers. Raises InvalidArgument if one has no
    room for a block.
    """
    width = host_plan(row_bytes(config), 2).bytes_per_block
    num_blocks = settings.host_bytes // width
    if num_blocks < 2:
        raise _wrong("host", f"{settings.host_bytes} bytes have room for no block of {width} bytes", "give more")
    if settings.peers:
        most = min((settings.peers + 1) * num_blocks, MAX_BLOCKS)  # slots are numbered with those of this engine
        return num_blocks, (TierSpec(TierKind.PEERS, most, SavePolicy.BEHIND),)
    if settings.disk is None:
        return num_blocks, ()
    slot_bytes = TierKind.DISK.slot_bytes(width)
    num_slots = settings.disk_bytes // slot_bytes
    if not num_slots:
        raise _wrong(
            "disk_size", f"{settings.disk_bytes} bytes have room for no block of {slot_bytes} bytes", "give more"
        )
    return num_blocks, (TierSpec(TierKind.DISK, num_slots, settings.save, retained_percent=RETAINED_PERCENT),)


def _wrong(option: str, problem: str, remedy: str) -> InvalidArgument:
    return InvalidArgument(problem, field=f"{FIELD}.{option}", remedy=remedy)
