"""Prints what the newest vLLM on PyPI changed in the names that the adapter uses: `python -m tests.vllm.surface`.

    python -m tests.vllm.surface                  # download the newest vLLM, compare it with surface.txt
    python -m tests.vllm.surface --version 0.32.0
    python -m tests.vllm.surface --record         # write surface.txt from the environment of `make vllm-env`
    python -m tests.vllm.surface --count          # how many names that only vLLM defines the adapter touches, by folder

The surface is read from the source, without importing it: what the adapter imports, the members of those classes that
it names, every name that it can ask of the objects that vLLM gives it, the methods of the KV cache manager with their
parameters, what vLLM itself asks of the KV cache manager, and the fields of every specification of a cache. Ends with
status 1 if anything changed.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.vllm.environment import FOLDER

ROOT = Path(__file__).resolve().parents[2]
ADAPTER = ROOT / "clients" / "vllm" / "kvplane_vllm"
RECORDED = Path(__file__).with_name("surface.txt")
MANAGER = "KVCacheManager"  # the adapter replaces this class: each method counts
SPECS = "vllm/v1/kv_cache_interface.py"
# Where the classes are whose objects the adapter reads: scheduler, queues, requests, configuration, outputs, events.
GIVEN = (
    "vllm/config/", "vllm/distributed/kv_events.py", "vllm/multimodal/inputs.py", "vllm/lora/request.py",
    "vllm/v1/core/",
    "vllm/v1/kv_cache_interface.py", "vllm/v1/metrics/stats.py", "vllm/v1/outputs.py", "vllm/v1/request.py",
    "vllm/v1/structured_output/", "vllm/v1/worker/gpu_",
)  # fmt: skip
ASKS = re.compile(r"\bkv_cache_manager((?:\.\w+)+)")
Files = dict[str, str]  # path in the package -> source


def adapter_imports(folder: str = "") -> set[tuple[str, str]]:
    """(module, name) of each import from vLLM in the adapter, or in one of its folders."""
    found = set()
    for path in (ADAPTER / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found |= {(str(node.module), one.name) for one in node.names}
            if isinstance(node, ast.Import):
                found |= {(one.name, "") for one in node.names if one.name.split(".")[0] == "vllm"}
    return found


def adapter_attributes(folder: str = "") -> set[str]:
    """Every name that the adapter can ask of an object: attributes, arguments by name, and texts for getattr."""
    found = set()
    for path in (ADAPTER / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.keyword) and node.arg:
                found.add(node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                found.add(node.value)
    return found


def _named(files: Files, attributes: set[str]) -> Iterator[str]:
    """Yield what the adapter names of the classes whose objects vLLM gives it, without an import of these classes."""
    for path, source in files.items():
        for node in ast.walk(ast.parse(source)) if path.startswith(GIVEN) else ():
            if isinstance(node, ast.ClassDef):
                methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
                yield from (f"names {path}: {node.name}.{one}" for one in (methods | _fields(node)) & attributes)


def surface(files: Files) -> list[str]:
    """Return the surface of a vLLM, one line per fact, sorted."""
    attributes = adapter_attributes()
    lines = set()
    for module, name in adapter_imports():
        lines |= set(_imported(files, module, name, attributes))
    for path, source in files.items():
        lines |= {f"asks {path}: kv_cache_manager{asked}" for asked in ASKS.findall(source)}
    lines |= set(_named(files, attributes))
    for node in ast.parse(files[SPECS]).body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Spec"):
            lines |= {f"spec {node.name}.{field}" for field in _fields(node)} | {f"spec {node.name}"}
    return sorted(lines)


def _imported(files: Files, module: str, name: str, attributes: set[str]) -> Iterator[str]:
    path = module.replace(".", "/")
    if not name or any(f"{path}/{name}{end}" in files for end in (".py", "/__init__.py")):
        yield f"module {module}{name and '.'}{name}"
        return
    source = files.get(f"{path}.py", files.get(f"{path}/__init__.py"))
    defined = _definition(source, name) if source is not None else None
    if defined is None:
        yield f"missing {module}.{name}"
    elif isinstance(defined, ast.ImportFrom):
        yield from _imported(files, str(defined.module), name, attributes)
    elif isinstance(defined, ast.FunctionDef):
        yield f"function {module}.{name}({ast.unparse(defined.args)})"
    elif isinstance(defined, ast.ClassDef):
        yield f"class {module}.{name}({', '.join(map(ast.unparse, defined.bases))})"
        yield from (f"member {module}.{one}" for one in _members(defined, attributes))
    else:
        yield f"name {module}.{name}"


def _definition(source: str, name: str) -> ast.stmt | None:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and any(name == (one.asname or one.name) for one in node.names):
            return node
        if isinstance(node, ast.Assign | ast.AnnAssign) and re.match(rf"{name}\b", ast.unparse(node)):
            return node
    return None


def _members(node: ast.ClassDef, attributes: set[str]) -> Iterator[str]:
    everything = node.name == MANAGER
    for one in node.body:
        if isinstance(one, ast.FunctionDef):
            is_public = not one.name.startswith("_") or one.name == "__init__"
            if everything and is_public:
                yield f"{node.name}.{one.name}({ast.unparse(one.args)})"
            elif one.name in attributes:
                yield f"{node.name}.{one.name}"
    yield from (f"{node.name}.{field}" for field in _fields(node) & attributes)


def _fields(node: ast.ClassDef) -> set[str]:
    """Fields of a class: annotated in its body, and assigned to `self` in its methods."""
    found = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and ast.unparse(one.value) == "self":
            found.add(one.attr)
    return found


def touched(folder: str = "") -> tuple[set[str], set[str]]:
    """Return the imports of a folder of the adapter, and the names that only vLLM defines which it asks of objects."""
    recorded = [line for line in RECORDED.read_text().splitlines() if line.startswith(("names ", "member "))]
    of_vllm = {found[1] for line in recorded if (found := re.search(r"\.(\w+)(?:\(.*)?$", line))}
    ours = set(dir(str) + dir(list) + dir(dict) + dir(set))
    for root in ("clients", "service", "gpu_worker"):
        for path in (ROOT / root).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    ours |= _fields(node) | {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
    imports = {f"{module}.{name}" for module, name in adapter_imports(folder)}
    return imports, (of_vllm - ours) & adapter_attributes(folder)


def of_wheel(wheel: Path) -> Files:
    """Read the Python files of a wheel of vLLM."""
    with zipfile.ZipFile(wheel) as archive:
        return _python_files(archive.namelist(), lambda name: archive.read(name).decode())


def installed() -> Files:
    """Read the Python files of the vLLM of `make vllm-env`. Raises FileNotFoundError if there is none."""
    places = list((FOLDER / "lib").glob("python3.*/site-packages"))
    if not places:
        raise FileNotFoundError(f"no vLLM in {FOLDER}: run `make vllm-env`")
    paths = (str(path.relative_to(places[0])) for path in (places[0] / "vllm").rglob("*.py"))
    return _python_files(paths, lambda name: (places[0] / name).read_text())


def _python_files(names: Iterator[str] | list[str], read: Callable[[str], str]) -> Files:
    kept = [name for name in names if name.startswith("vllm/") and name.endswith(".py")]
    return {name: read(name) for name in kept}


def published(version: str | None) -> tuple[str, Files]:
    """Download a vLLM from the package index, the newest without a version; its version and Python files. Raises
    CalledProcessError.
    """
    with tempfile.TemporaryDirectory() as folder:
        wanted = f"vllm=={version}" if version else "vllm"
        options = ("--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check", "--dest", folder)
        subprocess.run([sys.executable, "-m", "pip", "download", *options, wanted], check=True)
        (wheel,) = Path(folder).glob("vllm-*.whl")
        return wheel.name.split("-")[1], of_wheel(wheel)


def main() -> int:
    """Compare, or record."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.surface", description="what changed in vLLM")
    parser.add_argument("--version", help="version to compare with (default: the newest)")
    parser.add_argument("--record", action="store_true", help="write surface.txt from the vLLM of `make vllm-env`")
    parser.add_argument("--count", action="store_true", help="count the names that only vLLM defines")
    options = parser.parse_args()
    if options.count:
        for folder in ("", "remote", "tiers"):
            imports, names = touched(folder)
            private = sorted(one for one in names if one.startswith("_"))
            print(f"{folder or 'all'}: {len(imports)} imports, {len(names)} names, of them private {private}")
        return 0
    if options.record:
        RECORDED.write_text("\n".join(surface(installed())) + "\n")
        return 0
    version, files = published(options.version)
    recorded, found = RECORDED.read_text().splitlines(), surface(files)
    changes = difflib.unified_diff(recorded, found, "what the adapter uses", f"vllm {version}", n=0, lineterm="")
    text = "\n".join(one for one in changes if not one.startswith("@@"))
    sys.stdout.write((text or f"vllm {version}: no change in {len(found)} names that the adapter uses") + "\n")
    return int(bool(text))


if __name__ == "__main__":
    sys.exit(main())
