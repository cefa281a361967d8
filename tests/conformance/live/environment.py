"""Sets up the reference, vLLM 0.33.0, in its own environment; does nothing when the environment exists.

    python -m tests.conformance.live.environment

Its v1/core runs without a GPU and needs a CPU build of torch and a handful of packages of the many that vLLM names.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".tools" / "reference"
PYTHON = FOLDER / "bin" / "python"
TORCH = "torch==2.13.0"
VLLM = "vllm==0.33.0"
# What vllm.v1.core imports, in the versions that vLLM's own metadata asks for.
NEEDED = (
    "numpy", "psutil", "pyzmq", "requests", "regex", "msgspec", "pydantic", "cbor2", "transformers", "aiohttp",
    "oss-harmony", "openai", "pillow", "pybase64", "cachetools", "cloudpickle", "py-cpuinfo", "prometheus_client",
    "apache-tvm-ffi", "fastapi", "partial-json-parser", "llguidance",
)  # fmt: skip
NEEDED_ALONE = ("xgrammar",)  # its own requirements (torch, a compiler for GPU kernels) are not
UNNAMED = ("uvloop", "urllib3", "packaging", "xxhash")  # imported, but not in the metadata
IMPORTS = "import vllm.v1.core.kv_cache_manager, vllm.v1.request, vllm.lora.request, vllm.multimodal.inputs"


def variables() -> dict[str, str]:
    """The environment variables under which the reference runs."""
    quiet = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | quiet


def set_up() -> None:
    """Install what is missing; raises CalledProcessError when a step fails; the next call then starts over."""
    stamp = FOLDER / "ready"
    wanted = json.dumps([sys.version_info[:2], TORCH, VLLM, NEEDED, NEEDED_ALONE, UNNAMED])
    if stamp.exists() and stamp.read_text() == wanted:
        return
    _say(f"a virtual environment in {FOLDER.relative_to(ROOT)}")
    shutil.rmtree(FOLDER, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(FOLDER))
    _say(f"{TORCH} (a large download)")
    _install(TORCH)
    _say(f"{VLLM} without what it requires (a large download)")
    _install("--no-deps", VLLM)
    asked = _requirements()
    _say("the packages that its v1/core imports")
    _install(TORCH, *UNNAMED, *(asked[name] for name in NEEDED))
    _install("--no-deps", *(asked[name] for name in NEEDED_ALONE))
    _say("a first import (compiles)")
    _run(str(PYTHON), "-c", IMPORTS)
    stamp.write_text(wanted)
    _say("ready")


def _requirements() -> dict[str, str]:
    """VLLM's requirements that hold on this machine, by name, extras left out."""
    code = (
        "import json\n"
        "from importlib.metadata import requires\n"
        "from pip._vendor.packaging.requirements import Requirement\n"
        "found = [Requirement(one) for one in requires('vllm')]\n"
        "print(json.dumps({one.name: one.name + str(one.specifier) for one in found"
        " if one.marker is None or one.marker.evaluate({'extra': ''})}))"
    )
    answer = subprocess.run([str(PYTHON), "-c", code], check=True, capture_output=True, text=True)
    found: dict[str, str] = json.loads(answer.stdout)
    return found


def _install(*what: str) -> None:
    _run(str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what)


def _run(*command: str) -> None:
    """Quiet unless it fails: pip warns of every requirement of vLLM that its v1/core does not use."""
    done = subprocess.run(command, env=variables(), capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
        done.check_returncode()


def _say(text: str) -> None:
    print(f"reference: {text}", flush=True)


if __name__ == "__main__":
    set_up()
