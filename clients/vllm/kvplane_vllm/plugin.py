"""The entry point `vllm.general_plugins`: each process of vLLM calls it where kvplane is installed."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from importlib.metadata import version

SUPPORTED = ("0.32", "0.33")  # of vLLM; the tiers need the last one, see `needed`

logger = logging.getLogger("vllm.kvplane")  # with the handlers of vLLM


def is_one_of(installed: str, supported: Sequence[str]) -> bool:
    """Whether a version of vLLM belongs to one of these releases."""
    release = re.match(r"(\d+)\.(\d+)", installed)
    return release is not None and ".".join(release.groups()) in supported


def check() -> None:
    """Warn of a version of vLLM that is not supported; kvplane's scheduler refuses it at the start, see `needed`.

    Changes nothing, and also runs in engines that do not use kvplane.
    """
    found = version("vllm")
    if not is_one_of(found, SUPPORTED):
        logger.warning("kvplane_vllm supports vLLM %s, this is %s", " and ".join(SUPPORTED), found)
