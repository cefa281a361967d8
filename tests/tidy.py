"""House rules that no linter checks, as functions from a tree of files to complaints.

Each complaint is a line "path:line: problem: remedy". A rule reads only its argument, so that a test can plant a fault
in a small tree.
"""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from tests import words

SOURCE_ROOTS = ("clients/python", "service", "gpu_worker")
OUR_CODE = (*SOURCE_ROOTS, "scripts")

MAX_FUNCTION_LINES = 70
MAX_CPP_LINE = 120
MAX_MEDIAN_LINES = 9
MAX_P95_LINES = 45
MAX_PARAMETERS = 6
MAX_FILE_LINES = 500
MAX_REPEATED_LINES = 12

# Files that may catch all exceptions: the outermost shell, where an exception would otherwise be lost or end the
# process. Path → reason. An unused entry is a complaint.
BROAD_EXCEPT_ALLOWED: dict[str, str] = {
    "service/kvplane_service/runtime/executors.py": "the caller on the event loop gets every exception of a call",
    "clients/python/kvplane/sansio/driver.py": "every exception of an action is raised where the action was yielded",
    "clients/python/kvplane/aio/transport.py": "who waits for an answer gets every exception of the reader task",
    "clients/python/kvplane/blocking/transport.py": "who waits for an answer gets every exception of the reader thread",
    "service/kvplane_service/replicas/idle_check.py": "a state that raises anything when it is read is a finding",
    "service/kvplane_service/rpc/methods.py": "a bug in a handler is logged and ends its call with INTERNAL",
    "gpu_worker/kvplane_worker/ops/proof.py": "every exception of a trial is the reason for not using the backend",
    "gpu_worker/kvplane_worker/tiers/movers.py": "whatever a job raises fails it, and the thread takes the next one",
    "gpu_worker/kvplane_worker/rpc/handlers.py": "a bug in a handler is logged and ends its call with INTERNAL",
    "service/kvplane_service/auth/files.py": "a file that changes while the service runs keeps its old content",
    "service/kvplane_service/store/loading.py": "a bug in a read is named to its callers, and raised by supervise",
    "service/kvplane_service/store/record.py": "whatever a forged chunk raises when it is read refuses this chunk",
    "service/kvplane_service/store/registration.py": "whatever a forged record raises refuses this record",
}

WORKER_COMMAND = "gpu_worker/kvplane_worker/cli.py"

# Files whose purpose is to print.
PRINTING_ALLOWED = ("service/kvplane_service/cli/", "service/kvplane_service/cli.py", "scripts/")

CORE = "service/kvplane_service/core/"
IMPURE_MODULES = frozenset(
    """
    asyncio concurrent datetime google grpc logging multiprocessing os pathlib random secrets selectors shutil
    signal socket subprocess tempfile threading time urllib uuid warnings
    """.split()
)

# Functions that create objects or code from bytes: on data from the wire, a store or a file they would execute it.
UNSAFE_MODULES = frozenset("marshal shelve dill cloudpickle jsonpickle joblib".split())
UNSAFE_CALLS = frozenset(
    """
    eval exec pickle.load pickle.loads pickle.Unpickler torch.load yaml.load yaml.load_all yaml.unsafe_load
    yaml.unsafe_load_all yaml.full_load yaml.full_load_all numpy.load np.load
    """.split()
)

# Split, so that this file does not match itself.
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
PRIVATE_PLACES = {
    re.compile(r"(?<![\w.])/(work|root|home)\b"): "a path of one machine: take it from the environment",
    re.compile(r"(?<![\w.])/tm" + r"p\b"): "a fixed temporary path: use tempfile, in tests tmp_path",
    re.compile(r"py" + r"pi\.org|pythonhosted\.org|registry\.npm" + r"js|crates\.io"): (
        "the address of a package registry: name the package instead"
    ),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One text file.

    Attributes:
        path: relative to the root of the tree, with slashes.
        text: its content.
    """

    path: str
    text: str

    @property
    def is_generated(self) -> bool:
        return re.search(r"_pb2(_grpc)?\.pyi?$", self.path) is not None

    def is_in(self, *folders: str) -> bool:
        return any(PurePosixPath(self.path).is_relative_to(folder) for folder in folders)


@dataclass(frozen=True)
class Tree:
    """The files that a rule looks at."""

    files: tuple[SourceFile, ...]

    @classmethod
    def of(cls, root: Path, paths: list[str]) -> Tree:
        """Read the paths below `root`; files that are not text are left out."""
        found = []
        for path in paths:
            try:
                found.append(SourceFile(path, (root / path).read_text(encoding="utf-8")))
            except UnicodeDecodeError:
                continue
        return cls(tuple(found))

    @cached_property
    def modules(self) -> list[tuple[SourceFile, ast.Module]]:
        """Parsed Python files of the product, without generated ones."""
        ours = [f for f in self.files if f.path.endswith(".py") and f.is_in(*OUR_CODE) and not f.is_generated]
        return [(f, ast.parse(f.text, f.path)) for f in ours]

    @cached_property
    def functions(self) -> list[tuple[SourceFile, Function]]:
        """Every function and method of `modules`, nested ones too."""
        nodes = ((f, node) for f, module in self.modules for node in ast.walk(module))
        return [(f, node) for f, node in nodes if isinstance(node, Function)]


def length(node: Function) -> int:
    """Lines of a function from `def` to its end, docstring and all."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def arguments(node: Function) -> list[ast.arg]:
    """Every parameter of a function, `self` and `cls` left out."""
    spec = node.args
    given = [arg for arg in (*spec.posonlyargs, *spec.args, spec.vararg, *spec.kwonlyargs, spec.kwarg) if arg]
    return given[1:] if given and given[0].arg in ("self", "cls") else given


def complaint(f: SourceFile, line: int, text: str) -> str:
    return f"{f.path}:{line}: {text}"


def function_length(tree: Tree) -> Iterator[str]:
    for f, node in tree.functions:
        if length(node) > MAX_FUNCTION_LINES:
            what = f"{node.name} has {length(node)} lines, at most {MAX_FUNCTION_LINES}"
            yield complaint(f, node.lineno, f"{what}: move each paragraph into a function with a name")


def compiled_source(tree: Tree) -> Iterator[str]:
    """Format and lengths of C++ files, whose functions begin and end at the start of a line."""
    for f in tree.files:
        if not f.path.endswith((".cpp", ".h")):
            continue
        begin, content = 0, f.text.splitlines()
        if len(content) > MAX_FILE_LINES:
            yield complaint(f, 1, f"{len(content)} lines, at most {MAX_FILE_LINES}: move the second subject out")
        for number, line in enumerate(content, 1):
            if len(line) > MAX_CPP_LINE or line != line.rstrip() or "\t" in line:
                yield complaint(f, number, f"at most {MAX_CPP_LINE} columns, no tab, no space at the end")
            if re.match(r"\w.*\) \{$", line) or (not begin and re.match(r"\w.*\($|\w.*\([^;]*,$", line)):
                begin = begin or number
            elif line.startswith("}"):
                if begin and number - begin + 1 > MAX_FUNCTION_LINES:
                    yield complaint(f, begin, f"{number - begin + 1} lines, at most {MAX_FUNCTION_LINES}: split it")
                begin = 0


def shape(tree: Tree) -> Iterator[str]:
    """Median and 95th percentile of function lengths, per source root."""
    for root in SOURCE_ROOTS:
        lengths = sorted(length(node) for f, node in tree.functions if f.is_in(root))
        if not lengths:
            continue
        median, p95 = statistics.median(lengths), lengths[(len(lengths) * 95 + 99) // 100 - 1]
        if median > MAX_MEDIAN_LINES or p95 > MAX_P95_LINES:
            yield (
                f"{root}:1: functions have median {median} and 95th percentile {p95} lines, at most "
                f"{MAX_MEDIAN_LINES} and {MAX_P95_LINES}: split the longest ones"
            )


def parameters(tree: Tree) -> Iterator[str]:
    for f, node in tree.functions:
        if is_command(f, node) or is_kernel(node):
            continue  # a command's parameters are its flags; a kernel's are what a launch can pass
        count = len(arguments(node))
        if count > MAX_PARAMETERS:
            what = f"{node.name} takes {count} parameters, at most {MAX_PARAMETERS}"
            yield complaint(f, node.lineno, f"{what}: group some of them in a frozen dataclass")


def is_command(f: SourceFile, node: Function) -> bool:
    """True for a function of the command line that implements a command (see COMMANDS there)."""
    return node.name.endswith("command") and (f.is_in("service/kvplane_service/cli") or f.path == WORKER_COMMAND)


def is_kernel(node: Function) -> bool:
    """True for a function that Triton compiles: its types are those of the launch."""
    named = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return any(isinstance(d, ast.Attribute) and d.attr == "jit" for d in named)


def annotated(tree: Tree) -> Iterator[str]:
    for f, node in tree.functions:
        if is_kernel(node):
            continue
        bare = [arg.arg for arg in arguments(node) if arg.annotation is None]
        if bare or node.returns is None:
            what = ", ".join(bare) or "the result"
            yield complaint(f, node.lineno, f"{node.name} has no type for {what}: annotate it")


def broad_except(tree: Tree) -> Iterator[str]:
    used = set()
    for f, module in tree.modules:
        for node in ast.walk(module):
            if not isinstance(node, ast.ExceptHandler) or not catches_everything(node.type):
                continue
            used.add(f.path)
            if f.path not in BROAD_EXCEPT_ALLOWED:
                remedy = "name the expected exceptions; the outermost shell is listed in BROAD_EXCEPT_ALLOWED"
                yield complaint(f, node.lineno, f"broad except: {remedy}")
    present = {f.path for f in tree.files}
    for path in sorted((BROAD_EXCEPT_ALLOWED.keys() & present) - used):
        yield f"{path}:1: listed in BROAD_EXCEPT_ALLOWED and catches nothing broad: remove the entry"


def catches_everything(kind: ast.expr | None) -> bool:
    if kind is None:
        return True
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(isinstance(k, ast.Name) and k.id in ("Exception", "BaseException") for k in kinds)


def printing(tree: Tree) -> Iterator[str]:
    for f, module in tree.modules:
        if f.path.startswith(PRINTING_ALLOWED):
            continue
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                yield complaint(f, node.lineno, "print in library code: return the text, or log it in the shell")


def unsafe_decoding(tree: Tree) -> Iterator[str]:
    remedy = "use a format that contains only data"
    for f, module in tree.modules:
        for line, name in imports(module):
            if name.partition(".")[0] in UNSAFE_MODULES:
                yield complaint(f, line, f"imports {name}: {remedy}")
        for node in ast.walk(module):
            if not isinstance(node, ast.ImportFrom | ast.Attribute | ast.Name):
                continue
            if isinstance(node, ast.ImportFrom):
                names = {f"{node.module}.{one.name}" for one in node.names}
            else:
                names = {ast.unparse(node)}
            for name in names & UNSAFE_CALLS:
                yield complaint(f, node.lineno, f"{name}: {remedy}")


def unfinished(tree: Tree) -> Iterator[str]:
    for f, number, line in lines(tree):
        if UNFINISHED.search(line):
            yield complaint(f, number, "unfinished work: do it now, or open an issue and remove this note")


def private_places(tree: Tree) -> Iterator[str]:
    for f, number, line in lines(tree):
        found = (remedy for place, remedy in PRIVATE_PLACES.items() if place.search(line))
        yield from (complaint(f, number, remedy) for remedy in found)


def lines(tree: Tree) -> Iterator[tuple[SourceFile, int, str]]:
    """Every line of every file that is not generated."""
    for f in tree.files:
        if not f.is_generated:
            yield from ((f, number, line) for number, line in enumerate(f.text.splitlines(), 1))


def file_length(tree: Tree) -> Iterator[str]:
    for f, _ in tree.modules:
        count = len(f.text.splitlines())
        if count > MAX_FILE_LINES:
            remedy = "a file has one subject; name the second subject and move it out"
            yield complaint(f, 1, f"{count} lines, at most {MAX_FILE_LINES}: {remedy}")


def repeated_lines(tree: Tree) -> Iterator[str]:
    """Runs of equal lines in two places of product or tests; empty lines, indentation and imports do not count."""
    first: dict[tuple[str, ...], tuple[SourceFile, int]] = {}
    length = MAX_REPEATED_LINES + 1
    for f in tree.files:
        if not f.path.endswith(".py") or f.is_generated:
            continue
        code = list(code_lines(f))
        last = -length  # start of the previous window, or of the run that was reported
        for at in range(len(code) - length + 1):
            run = tuple(line for _, line in code[at : at + length])
            other, number = first.setdefault(run, (f, code[at][0]))
            overlaps = other is f and number >= code[max(at - length + 1, 0)][0]
            if overlaps:
                continue
            if at > last + 1:
                remedy = "give the lines one home and use it in both places"
                yield complaint(f, code[at][0], f"{length} lines or more are equal to {other.path}:{number}: {remedy}")
            last = at


def code_lines(f: SourceFile) -> Iterator[tuple[int, str]]:
    """Number and stripped text of the lines of a module that are neither empty nor part of an import."""
    nodes = (node for node in ast.walk(ast.parse(f.text, f.path)) if isinstance(node, ast.Import | ast.ImportFrom))
    skipped = {line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    for number, line in enumerate(f.text.splitlines(), 1):
        if line.strip() and number not in skipped:
            yield number, line.strip()


def core_purity(tree: Tree) -> Iterator[str]:
    for f, module in tree.modules:
        if not f.path.startswith(CORE):
            continue
        for line, name in imports(module):
            if name.partition(".")[0] in IMPURE_MODULES:
                remedy = "the core is a function of its arguments; pass the value in, or do it in the shell"
                yield complaint(f, line, f"the core imports {name}: {remedy}")


def imports(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of every absolute import, also of those inside functions."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, node.module or ""


def plain_words(tree: Tree) -> Iterator[str]:
    for f in tree.files:
        if words.is_checked(f.path):
            yield from (complaint(f, line, f"{word!r}: write {remedy}") for line, word, remedy in words.banned(f.text))


RULES: tuple[Callable[[Tree], Iterator[str]], ...] = (
    function_length,
    compiled_source,
    shape,
    parameters,
    annotated,
    broad_except,
    printing,
    unsafe_decoding,
    unfinished,
    private_places,
    file_length,
    repeated_lines,
    core_purity,
    plain_words,
)
