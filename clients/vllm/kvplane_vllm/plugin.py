"""The entry point `vllm.general_plugins`: each process of vLLM calls it where kvplane is installed."""

from __future__ import annotations

import logging
from importlib.metadata import version

TESTED = "0.33"

logger = logging.getLogger("vllm.kvplane")  # with the handlers of vLLM


def check() -> None:
    """Warn of a version of vLLM that was not tested. `needed` refuses one that lacks a name.

    Changes nothing, and also runs in engines that do not use kvplane.
    """
    found = version("vllm")
    if found.split(".")[:2] != TESTED.split("."):
        logger.warning("kvplane_vllm is tested with vLLM %s, this is %s", TESTED, found)
