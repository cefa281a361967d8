"""The tree keeps the house rules, and each rule can fail."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import tidy

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tree() -> tidy.Tree:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return tidy.Tree.of(ROOT, [name for name in names if name and (ROOT / name).is_file()])


@pytest.mark.parametrize("rule", tidy.RULES, ids=lambda rule: rule.__name__)
def test_tree_has_no_complaints(rule, tree):
    assert tree.files
    complaints = list(rule(tree))
    assert not complaints, "\n".join(["", *complaints])


def function(name: str, body_lines: int) -> str:
    return f"def {name}() -> None:\n" + "    ...\n" * body_lines


def repetition(lines: int) -> str:
    """A module in which two functions have this number of lines in common, and everything else differs."""
    body = "".join(f"    x{number} = f({number})\n\n" for number in range(lines))
    again = body.replace("    ", "        ")
    return f"def f(a: int) -> None:\n{body}\n\nif True:\n\n    def g(b: int) -> None:\n{again}"


def cpp_function(lines: int) -> str:
    return "int Long(int a,\n         int b) {\n" + "    ++a;\n" * (lines - 3) + "}\n"


LIBRARY = "clients/python/kvplane/planted.py"
CORE = "service/kvplane_core/planted.py"
NATIVE = "clients/python/kvplane/planted.cpp"

# rule → (path, content that breaks the rule, nearly equal content that keeps it)
PLANTED = {
    "function_length": (LIBRARY, function("long", 70), function("long", 69)),
    "compiled_source": (NATIVE, cpp_function(71), cpp_function(70)),
    "shape": (LIBRARY, function("f", 9), function("f", 8)),
    "parameters": (
        LIBRARY,
        "def f(a: int, b: int, c: int, /, d: int, *e: int, f: int, **g: int) -> None: ...\n",
        "class C:\n    def f(self, a: int, b: int, c: int, d: int, *, e: int, f: int) -> None: ...\n",
    ),
    "annotated": (LIBRARY, "def f(a) -> None: ...\n", "def f(a: int) -> None: ...\n"),
    "broad_except": (
        LIBRARY,
        "try:\n    x = 1\nexcept (ValueError, Exception):\n    raise\n",
        "try:\n    x = 1\nexcept (ValueError, KeyError):\n    raise\n",
    ),
    "printing": (LIBRARY, "print('x')\n", "x = 'print()'\n"),
    "unsafe_decoding": (LIBRARY, "import pickle\nx = pickle.loads(b'')\n", "import pickle\nx = pickle.dumps(1)\n"),
    "unfinished": ("README.md", "TO" + "DO: more\n", "todos are a kind of list\n"),
    "private_places": ("README.md", "see /tm" + "p/x\n", "see https://example.org/work/x and a/tmp/b\n"),
    "file_length": (LIBRARY, "x = 1\n" * 501, "x = 1\n" * 500),
    "repeated_lines": (LIBRARY, repetition(13), repetition(12)),
    "core_purity": (CORE, "def f() -> None:\n    import time\n", "import math\n"),
    "unpublished": (
        "docs/x.md",
        "pip install -U 'kvp" + "lane[vllm]'\n",
        "pip install '.[vllm]'; helm install kvplane",
    ),
    "words_for_users": (
        "docs/x.md",
        "It begins a new engine\nlife.\n",
        "In state `lapsed`, see KvplaneReplicaLapsed.\n",
    ),
    "plain_words": ("docs/glossary.md", "It is to" + "ld so.\n", "The report is sent.\n"),
}


def planted(path: str, content: str) -> tidy.Tree:
    return tidy.Tree((tidy.SourceFile(path, content),))


@pytest.mark.parametrize("rule", tidy.RULES, ids=lambda rule: rule.__name__)
def test_rule_finds_a_planted_fault_and_accepts_its_neighbour(rule):
    path, bad, good = PLANTED[rule.__name__]
    complaints = list(rule(planted(path, bad)))
    assert len(complaints) == 1
    assert complaints[0].startswith(f"{path}:") or complaints[0].startswith("clients/python:")
    assert list(rule(planted(path, good))) == []


@pytest.mark.parametrize(
    ("rule", "path", "bad"),
    [
        (tidy.shape, LIBRARY, "".join(function(f"f{i}", 1 if i else 45) for i in range(19))),
        (tidy.annotated, LIBRARY, "def f(a: int): ...\n"),
        (tidy.compiled_source, NATIVE, "// " + "x" * 118 + "\n"),
        (tidy.compiled_source, NATIVE, "int x; \n"),
        (tidy.compiled_source, NATIVE, "\tint x;\n"),
        (tidy.compiled_source, NATIVE, "int x;\n" * 501),
        (tidy.annotated, LIBRARY, "def f(*a) -> None: ...\n"),
        (tidy.unsafe_decoding, LIBRARY, "from pickle import loads as safe\n"),
        (tidy.unsafe_decoding, LIBRARY, "import marshal\n"),
        (tidy.unsafe_decoding, LIBRARY, "read = eval\n"),
        (tidy.broad_except, LIBRARY, "try:\n    x = 1\nexcept:\n    raise\n"),
        (tidy.private_places, "tests/test_x.py", "home = '/wor" + "k/x'\n"),
        (tidy.private_places, "notes.md", "https://py" + "pi.org/simple\n"),
        (tidy.repeated_lines, "tests/test_x.py", repetition(30)),
        (tidy.core_purity, CORE, "from google.protobuf import message\n"),
        (tidy.words_for_users, LIBRARY, '"""Text."""\nx = f"the {y} lapsed"\nz = "lapsed"\n'),
        (tidy.words_for_users, "proto/kvplane/v1/x.proto", "// Ask its movers.\n"),
        (tidy.unpublished, LIBRARY, 'remedy = "install kvp' + 'lane[fleet]"\n'),
        (tidy.unpublished, "docs/x.md", "python -m pip install\n  kvp" + "lane\n"),
        (tidy.plain_words, "docs/glossary.md", "class To" + "ldTwice:\n"),
        (tidy.plain_words, "docs/glossary.md", "in pl" + "ace\n# of\n"),
    ],
)
def test_rule_finds_further_faults(rule, path, bad):
    assert len(list(rule(planted(path, bad)))) == 1


def test_unused_broad_except_entry_is_a_complaint(monkeypatch):
    monkeypatch.setitem(tidy.BROAD_EXCEPT_ALLOWED, LIBRARY, "planted")
    assert list(tidy.broad_except(planted(LIBRARY, "try:\n    x = 1\nexcept Exception:\n    raise\n"))) == []
    assert len(list(tidy.broad_except(planted(LIBRARY, "x = 1\n")))) == 1


def test_shape_rules_ignore_generated_code_and_tests():
    for path in ("clients/python/kvplane/v1/step_pb2.py", "tests/test_x.py"):
        assert list(tidy.function_length(planted(path, function("long", 90)))) == []


def test_repeated_lines_of_two_files_are_reported_once():
    lines = "".join(f"x{number} = {number}\n" for number in range(40))
    files = [tidy.SourceFile(f"tests/test_{name}.py", f"{name} = 0\n{lines}{name} = 1\n") for name in "ab"]
    (complaint,) = tidy.repeated_lines(tidy.Tree(tuple(files)))
    assert complaint.startswith("tests/test_b.py:2:")
    assert "tests/test_a.py:2:" in complaint


def test_repeated_lines_ignore_imports_and_generated_code():
    names = "".join(f"    name_{number},\n" for number in range(20))
    imports = f"from x import (\n{names})\n"
    generated = tidy.SourceFile("clients/python/kvplane/v1/step_pb2.py", repetition(20))
    twice = [tidy.SourceFile(f"tests/test_{name}.py", imports) for name in "ab"]
    assert list(tidy.repeated_lines(tidy.Tree((generated, *twice)))) == []


def test_parameters_ignore_flags_of_a_command():
    flags = ", ".join(f"flag{i}: int" for i in range(9))
    command = f"def planted_command({flags}) -> None: ...\n"
    assert list(tidy.parameters(planted("service/kvplane_tools/cli/planted.py", command))) == []
