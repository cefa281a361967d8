"""The options of the linker (`linker_extra_config`), and the engines that it refuses, by name and at start."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvplane.base.errors import InvalidArgument
from kvplane.base.units import parse_bytes, parse_duration
from kvplane_worker.tiers.seal import IDENTITY_BYTES

FIELD = "unified_cache_external_linker_config.linker_extra_config"
OPTIONS = ("host", "disk", "disk_size", "load_timeout")
LEAVE_OUT = "leave --enable-unified-cache-external-linker out"
FROM_FILES = ("auto", "pt", "safetensors", "npcache", "instanttensor")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".py")
# What gives the bytes of a page their meaning, with the weights and the layout.
MEANING = (
    "attention_backend", "context_length", "decode_attention_backend", "dtype", "json_model_override_args",
    "kv_cache_dtype", "load_format", "model_impl", "model_loader_extra_config", "page_size",
    "prefill_attention_backend", "quantization", "quantization_param_path",
)  # fmt: skip

Problem = tuple[str, str, str, Callable[[Any], Any]]  # problem, field, remedy, whether it is there

REFUSED: tuple[Problem, ...] = (
    (
        "there was no test with several ranks",
        "tp_size, pp_size, dp_size, dcp_size, attn_cp_size",
        f"give 1 for each, or {LEAVE_OUT}",
        lambda one: max(one.tp_size, one.pp_size, one.dp_size, one.dcp_size, one.attn_cp_size) > 1,
    ),
    (
        "an adapter's weights may change under its name",
        "enable_lora",
        f"leave --enable-lora and --lora-paths out, or {LEAVE_OUT}",
        lambda one: one.enable_lora or one.lora_paths,
    ),
    (
        "there was no test with speculative decoding",
        "speculative_algorithm",
        f"leave --speculative-algorithm out, or {LEAVE_OUT}",
        lambda one: one.speculative_algorithm,
    ),
    (
        "it saves and loads pages of one engine",
        "disaggregation_mode",
        f'give --disaggregation-mode "null", or {LEAVE_OUT}',
        lambda one: one.disaggregation_mode != "null",
    ),
    (
        "pages are unmapped while a save may read them",
        "enable_memory_saver",
        f"leave --enable-memory-saver out, or {LEAVE_OUT}",
        lambda one: one.enable_memory_saver,
    ),
)
REFUSED_WITH_DISK: tuple[Problem, ...] = (
    (
        "its file outlives the engine, and the weights under a name of a hub may change meanwhile",
        "model_path",
        "give the folder of the weights as --model-path, or leave the option disk out",
        lambda one: not Path(one.model_path).is_dir(),
    ),
    (
        "its file outlives the engine, and weights that are not read from files may be others the next time",
        "load_format",
        "give --load-format auto, or leave the option disk out",
        lambda one: one.load_format not in FROM_FILES,
    ),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The options.

    Attributes:
        host_bytes: host memory.
        disk: folder of the files; None = no disk.
        disk_bytes: size of all files together.
        load_timeout_s: a load that the disk does not answer by then is computed instead.
    """

    host_bytes: int
    disk: Path | None
    disk_bytes: int
    load_timeout_s: float


def settings_of(given: Mapping[str, Any]) -> Settings:
    """Return the options. Raises InvalidArgument for one that is wrong or missing."""
    for name, value in given.items():
        if name not in OPTIONS:
            raise wrong(name, f"{name!r} is not one of the options {', '.join(OPTIONS)}", "leave it out")
        if not isinstance(value, str) or not value:
            raise wrong(name, f"{value!r} is not a text", 'write it in quotes, such as "64GiB"')
    if ("disk" in given) != ("disk_size" in given):
        raise wrong("disk_size", "disk and disk_size need each other", "give both, or neither")
    if "host" not in given:
        raise wrong("host", "it is missing: what is on the disk passes through host memory", 'give "host": "8GiB"')
    disk = Path(given["disk"]) if "disk" in given else None
    if disk is not None and not disk.is_absolute():
        raise wrong("disk", f"{str(disk)!r} depends on the folder in which SGLang starts", "give an absolute path")
    timeout_s = parse_duration(given.get("load_timeout", "10s"), f"{FIELD}.load_timeout")
    if timeout_s <= 0:
        raise wrong("load_timeout", "a load needs time", 'leave it out, or give a duration such as "10s"')
    return Settings(
        parse_bytes(given["host"], f"{FIELD}.host"),
        disk,
        parse_bytes(given["disk_size"], f"{FIELD}.disk_size") if disk else 0,
        timeout_s,
    )


def check_engine(server_args: Any, settings: Settings) -> None:
    """Raise InvalidArgument for a setting of SGLang with which the linker does not run."""
    for problem, field, remedy, applies in (*REFUSED, *(REFUSED_WITH_DISK if settings.disk else ())):
        if applies(server_args):
            raise InvalidArgument(f"kvplane's tiers do not run with this engine: {problem}", field=field, remedy=remedy)


def content_of(server_args: Any, layout: object, release: str) -> bytes:
    """Return 16 bytes that name everything that decides, with its tokens, the bytes of a page: the files of the weights
    by name, size and time, the settings of the model, and the layout. A file of a disk begins empty where one differs.
    """
    folder = Path(server_args.model_path)
    files = sorted(folder.iterdir()) if folder.is_dir() else ()
    weights = [(one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in files if one.suffix in WEIGHTS]
    meaning = [(name, str(getattr(server_args, name))) for name in MEANING]
    text = json.dumps([release, str(folder.absolute()), weights, meaning, repr(layout)])
    return blake2b(text.encode(), digest_size=IDENTITY_BYTES).digest()


def wrong(option: str, problem: str, remedy: str) -> InvalidArgument:
    """Return the refusal of an option."""
    return InvalidArgument(problem, field=f"{FIELD}.{option}", remedy=remedy)
