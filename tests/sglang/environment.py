"""Sets up SGLang 0.5.23 for this machine's CPU, in an environment of its own: `make sglang-env`.

    python -m tests.sglang.environment

SGLang's package asks for CUDA's, so it is installed alone, with what its engine imports on a CPU, in the versions with
which these tests ran; `stand_ins` has the rest. Needs about 3 GB and five minutes, and does nothing when it exists.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
FOLDER = (ROOT / ".tools").resolve() / "sglang"
PYTHON = FOLDER / "bin" / "python"
MODELS = FOLDER / "models"
SGLANG = "sglang==0.5.23"
NEEDED = """
    aiohttp==3.14.5 blobfile==3.0.0 build==1.6.1 compressed-tensors==0.18.0 datasets==5.2.0 distro==1.9.0
    easydict==1.14 einops==0.8.2 fastapi==0.165.0 gguf==0.19.0 googleapis-common-protos>=1.66,<2 grpcio==1.85.3
    interegular==0.3.3 ipython==9.18.1 llguidance==1.9.1 mistral_common==1.13.1 modelscope==1.40.2 msgspec==0.23.0
    ninja==1.13.2 numba==0.65.1 numpy==2.3.5 openai==2.8.0 openai-harmony==0.0.4 orjson==3.13.0 outlines==0.1.11
    packaging==26.4 partial_json_parser pillow==13.0.0 prometheus-client protobuf==7.36.2 psutil==7.2.2
    pybase64==1.5.1 pydantic==2.14.4 pytest==9.2.0 python-dateutil==2.9.0.post0 python-multipart==0.0.34
    pyzmq==27.3.0 regex==2026.11.19 requests==2.34.2 scipy==1.17.1 sentencepiece==0.2.1 setproctitle==1.3.8
    setuptools>=80,<82 soundfile==0.14.0 tiktoken==0.14.0 tokenizers==0.23.2 torch==2.13.0 tqdm==4.70.1
    transformers==5.19.0 triton==3.6.0 uvicorn==0.54.0 uvloop==0.23.0 watchfiles==1.3.0 xgrammar==0.2.7
    xxhash==4.1.0 zstandard==0.25.0
""".split()

# SGLang's Gemma 3 reads its answer from the embeddings, whose size here would decide it, whatever the context is.
SMALL_EMBEDDINGS = """
import sys
from safetensors.torch import load_file, save_file
weights = load_file(sys.argv[1])
weights["model.embed_tokens.weight"] *= 0.02
save_file(weights, sys.argv[1], {"format": "pt"})
"""


def variables(**further: str) -> dict[str, str]:
    """The environment variables under which SGLang runs here: on one CPU thread, without the network, with kvplane."""
    roots = [ROOT, HERE / "stand_ins", *(ROOT / one for one in ("clients/sglang", "clients/python", "gpu_worker"))]
    return os.environ | {
        "PYTHONPATH": ":".join(map(str, roots)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "SGLANG_RUST_BUILD_MODE": "never",
        "SGLANG_USE_CPU_ENGINE": "1",
        **further,
    }


def set_up() -> None:
    """Install what is missing. Raises CalledProcessError when a step fails; the next call then starts over."""
    stamp = FOLDER / "ready"
    wanted = json.dumps([sys.version_info[:2], SGLANG, NEEDED, SMALL_EMBEDDINGS])
    if stamp.exists() and stamp.read_text() == wanted:
        return
    sys.stdout.write(f"sglang: {SGLANG} in {FOLDER} (large downloads)\n")
    shutil.rmtree(FOLDER, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(FOLDER))
    pip = (str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    _run(*pip, "--no-deps", SGLANG)
    _run(*pip, *NEEDED)
    _run(str(PYTHON), str(ROOT / "tests" / "vllm" / "tiny_models.py"), str(MODELS))
    _run(str(PYTHON), "-c", SMALL_EMBEDDINGS, str(MODELS / "gemma3" / "model.safetensors"))
    stamp.write_text(wanted)


def run(script: str, *arguments: str, ends: int = 0, **further: str) -> list[dict[str, Any]]:
    """Run a script of this folder there, in a group of processes of its own; returns the lines of JSON that it printed.
    Raises AssertionError with the end of its output if it ends with another status.
    """
    command = [str(PYTHON), "-W", "ignore", str(HERE / script), *arguments]
    env = variables(**further)
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=900, start_new_session=True
    )
    assert done.returncode == ends, f"{script} ended with {done.returncode}: {done.stderr[-3000:]}"
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _run(*command: str) -> None:
    """Quiet unless it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        done.check_returncode()


if __name__ == "__main__":
    set_up()
