"""Size and shape of the product: lines by room, circles of imports, places of a column, files that a call passes.

    python -m tests.bench.structure             prints the tables, writes tests/bench/results/structure.{md,json}
    python -m tests.bench.structure --lines     prints one line, the hand-written product lines (`make check`)

Hand-written product lines are those of the `.py`, `.h` and `.cpp` files that git tracks below `clients`, `service` and
`gpu_worker`, without generated ones. A *stay* is a period that a call spends in one file: 3 files with 4 stays means
that one file was left and entered again. Walks run on the core that an install selects; CPU times are medians of one
process and vary with the machine, counts do not.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
FOLDERS = ("clients", "service", "gpu_worker")
PACKAGES = ("kvplane", "kvplane_fleet", "kvplane_replay", "kvplane_service", "kvplane_vllm", "kvplane_worker")
CORE = "service/kvplane_service/core/"
# Columns of a step whose places are counted: each is used at two or three of them, and carried at the others.
COLUMNS = ("hit_limit", "skip_zero_groups", "jobs_done", "admit_load_after", "min_new", "single_group_hit")


def tracked(*folders: str) -> list[str]:
    """Return the paths that git tracks below `folders`."""
    listed = subprocess.run(["git", "ls-files", "--", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.split()


def is_hand_written(path: str) -> bool:
    """True for source code that is not the output of protoc or of a generator of this repository."""
    return path.endswith((".py", ".h", ".cpp")) and "_pb2" not in path and "generated" not in path


def lines_of(path: str) -> int:
    """Return the number of lines of a tracked file."""
    return (ROOT / path).read_bytes().count(b"\n")


def product() -> dict[str, int]:
    """Return lines by path of the hand-written product."""
    return {path: lines_of(path) for path in tracked(*FOLDERS) if is_hand_written(path)}


def line_of_product(lines: dict[str, int]) -> str:
    """Return the one line that `make check` prints."""
    cpp = sum(count for path, count in lines.items() if not path.endswith(".py"))
    total = sum(lines.values())
    return f"hand-written product lines: {total:,} ({total - cpp:,} Python, {cpp:,} C++)"


def rooms(lines: dict[str, int]) -> dict[str, int]:
    """Return lines by room: a package's folders, and `.` for the files next to them."""
    found: Counter[str] = Counter()
    for path, count in lines.items():
        folders = PurePosixPath(path).parts[1:-1]
        start = next((at for at, name in enumerate(folders) if name.startswith("kvplane")), 0)
        found["/".join(folders[start : start + 2]) or "."] += count
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def pairs(lines: dict[str, int]) -> int:
    """Return how many files of the Python core have a namesake in the compiled one."""
    inside = [path.removeprefix(CORE) for path in lines if path.startswith(CORE)]
    compiled = {path.removeprefix("native/").removesuffix(".h") for path in inside if path.endswith(".h")}
    return sum(path.removesuffix(".py") in compiled for path in inside if not path.startswith("native/"))


def places(lines: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return lines and files of the product that spell each of `COLUMNS`."""
    texts = [(ROOT / path).read_text().splitlines() for path in lines]
    found = {}
    for column in COLUMNS:
        word = re.compile(rf"\b{column}\b")
        counts = [sum(word.search(line) is not None for line in text) for text in texts]
        found[column] = sum(counts), sum(count > 0 for count in counts)
    return found


def binding_functions() -> int:
    """Return how many functions the module of the compiled core has."""
    text = (ROOT / CORE / "native/module.cpp").read_text()
    return len(re.findall(r"\bMETH_\w+", text))


def functions(lines: dict[str, int]) -> dict[str, float]:
    """Return median, 95th percentile and most lines of a Python function, and the share with annotations."""
    defs = (ast.FunctionDef, ast.AsyncFunctionDef)
    trees = [ast.parse((ROOT / path).read_text()) for path in lines if path.endswith(".py")]
    found = [node for tree in trees for node in ast.walk(tree) if isinstance(node, defs)]
    lengths = sorted((node.end_lineno or node.lineno) - node.lineno + 1 for node in found)
    return {
        "functions": len(lengths),
        "median": statistics.median(lengths),
        "p95": lengths[int(0.95 * len(lengths))],
        "most": lengths[-1],
        "annotated": sum(node.returns is not None for node in found) / len(found),
    }


def circles() -> list[list[str]]:
    """Return the sets of two or more modules that import each other, directly or by way of others, largest first."""
    import grimp

    graph = grimp.build_graph(*PACKAGES)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    found = [sorted(group) for group in strongly_connected(imports) if len(group) > 1]
    return sorted(found, key=len, reverse=True)


def strongly_connected(arrows: dict[str, set[str]]) -> Iterator[set[str]]:
    """Yield the strongly connected components of a graph (Kosaraju's algorithm: two searches in depth)."""
    backwards: dict[str, set[str]] = {node: set() for node in arrows}
    for node, targets in arrows.items():
        for target in targets:
            backwards[target].add(node)
    seen: set[str] = set()
    order: list[str] = []
    for node in arrows:
        order += _finished(node, arrows, seen)
    seen = set()
    for node in reversed(order):
        if group := _finished(node, backwards, seen):
            yield set(group)


def _finished(start: str, arrows: dict[str, set[str]], seen: set[str]) -> list[str]:
    """Search in depth from a node over unseen ones; return them in the order in which the search left them."""
    if start in seen:
        return []
    seen.add(start)
    left = []
    stack = [(start, iter(arrows[start]))]
    while stack:
        node, targets = stack[-1]
        following = next((target for target in targets if target not in seen), None)
        if following is None:
            left.append(node)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(arrows[following])))
    return left


@dataclass
class Walk:
    """The files of the product that a call passes, seen by `sys.setprofile`.

    Attributes:
        stays: the files in the order in which they were entered.
        calls: functions of the product that were called.
        deepest: most functions of the product on the stack.
    """

    stays: list[str] = field(default_factory=list)
    calls: int = 0
    deepest: int = 0
    _stack: list[str | None] = field(default_factory=list)

    def profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Take one event of the interpreter."""
        if event == "call":
            name = _product_file(frame.f_code.co_filename)
            self._stack.append(name)
            if name is not None:
                self.calls += 1
                self.deepest = max(self.deepest, sum(one is not None for one in self._stack))
                self._enter(name)
        elif event == "return" and self._stack:
            self._stack.pop()
            above = next((one for one in reversed(self._stack) if one is not None), None)
            if above is not None:
                self._enter(above)

    def _enter(self, name: str) -> None:
        if not self.stays or self.stays[-1] != name:
            self.stays.append(name)

    def row(self) -> dict[str, int]:
        """Return the figures of the walk."""
        return {"calls": self.calls, "files": len(set(self.stays)), "stays": len(self.stays), "deepest": self.deepest}


def _product_file(path: str) -> str | None:
    if "_pb2" in path or not path.startswith(str(ROOT)):
        return None
    inside = path.removeprefix(f"{ROOT}/")
    return inside if inside.startswith(FOLDERS) else None


def walks() -> dict[str, dict[str, int]]:
    """Return the walks of calls through a real service; the second call of each kind, which creates nothing first."""
    from kvplane.v1 import allocation_pb2 as pb
    from kvplane_service.config import Config
    from tests.service.rig import running

    found: dict[str, dict[str, int]] = {}
    with running(Config(listen="127.0.0.1:0")) as service:
        service.register()

        def walked(name: str, call: Callable[[], object]) -> None:
            walk = Walk()
            service.in_loop(lambda: sys.setprofile(walk.profile))
            try:
                call()
            finally:
                service.in_loop(lambda: sys.setprofile(None))
            found[name] = walk.row()

        def allocate(name: str, tokens: list[int]) -> object:
            content = {"token_ids": tokens}
            request = pb.AllocateSlotsRequest(header={"replica": "r"}, request_id=name, content=content)
            return service.allocation.AllocateSlots(request)

        def look_up(tokens: list[int]) -> object:
            return service.allocation.FindCacheHit(pb.FindCacheHitRequest(replica="r", content={"token_ids": tokens}))

        def free(name: str) -> object:
            return service.allocation.Free(pb.FreeRequest(header={"replica": "r"}, request_id=name))

        prompt = list(range(40))
        allocate("first", [9] * 40)
        free("first")
        look_up([9] * 40)
        walked("AllocateSlots, miss of 40 tokens", lambda: allocate("a", prompt))
        walked("FindCacheHit", lambda: look_up([*prompt, 1]))
        free("a")
        stream = service.open()
        slot, size = (0).to_bytes(4, "little"), (40).to_bytes(4, "little")
        news = {"slot": slot, "num_tokens": size, "tokens": b"".join(t.to_bytes(4, "little") for t in prompt)}
        walked("session step, admission, gRPC", lambda: stream.step({"news": news, "admit": {"slot": slot}}))
        stream.finish()
    return found


def measured() -> dict[str, Any]:
    """Return every figure."""
    lines = product()
    tests = sum(lines_of(path) for path in tracked("tests") if is_hand_written(path))
    found = circles()
    return {
        "product": line_of_product(lines),
        "core, Python, compiled and what converts": sum(n for path, n in lines.items() if path.startswith(CORE)),
        "tests": tests,
        "rooms": rooms(lines),
        "files of one name in both cores": pairs(lines),
        "functions of the binding": binding_functions(),
        "circles": [len(group) for group in found],
        "modules in circles": found,
        "functions": functions(lines),
        "places": places(lines),
        "walks": walks(),
    }


def table(figures: dict[str, Any]) -> str:
    """Return the figures as a page of Markdown."""
    shape = figures["functions"]
    rows = [
        ("product", figures["product"].partition(": ")[2]),
        ("core: Python, C++ and what converts, lines", f"{figures['core, Python, compiled and what converts']:,}"),
        ("tests, lines of Python", f"{figures['tests']:,}"),
        ("files of one name in both cores", figures["files of one name in both cores"]),
        ("functions of the core's binding", figures["functions of the binding"]),
        ("circles of modules (their sizes)", ", ".join(map(str, figures["circles"])) or "none"),
        (
            "Python functions: number, median, p95, longest",
            f"{shape['functions']}, {shape['median']:.0f}, {shape['p95']}, {shape['most']}",
        ),
        *((f"places of `{name}`", f"{n} lines in {files} files") for name, (n, files) in figures["places"].items()),
        *(
            (
                f"walk: {name}",
                f"{row['files']} files, {row['stays']} stays, {row['calls']} calls, {row['deepest']} deep",
            )
            for name, row in figures["walks"].items()
        ),
        *((f"lines of {name}", f"{count:,}") for name, count in figures["rooms"].items() if count >= 500),
    ]
    body = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"# Structure\n\n`python -m tests.bench.structure`\n\n| what | figure |\n|---|---|\n{body}\n"


def main() -> None:
    """Print the figures, and keep them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lines", action="store_true", help="print the hand-written product lines alone")
    parser.add_argument("--no-write", action="store_true", help="leave tests/bench/results as it is")
    options = parser.parse_args()
    if options.lines:
        print(line_of_product(product()))
        return
    figures = measured()
    page = table(figures)
    print(page)
    if not options.no_write:
        (RESULTS / "structure.md").write_text(page)
        (RESULTS / "structure.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
