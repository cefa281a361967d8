"""The lists of tests that run apart name tests that exist, and a target runs whenever a source of it changed."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from tests import targets


@pytest.mark.parametrize("name", [*targets.NIGHTLY, *targets.SAMPLED])
def test_nightly_tests_exist(name):
    file, _, function = name.partition("::")
    path = targets.ROOT / file
    assert path.exists()
    assert not function or re.search(rf"^(async )?def {function}\(", path.read_text(), re.MULTILINE)


def test_a_sample_has_one_case_of_a_number_and_each_recorded_find(tmp_path, monkeypatch):
    (tmp_path / "finds.json").write_text(json.dumps({"a planted fault": "one.py::test[5]"}))
    monkeypatch.setattr(targets, "FINDS", tmp_path / "finds.json")
    monkeypatch.setattr(targets, "SAMPLED", {"one.py::test": 3})
    sample = targets.Sample()
    assert [case for case in range(8) if not sample.leaves_out(f"one.py::test[{case}]")] == [0, 3, 5, 6]
    assert not any(sample.leaves_out(f"one.py::other[{case}]") for case in range(8))


@pytest.mark.parametrize("name", targets.LONGEST)
def test_files_that_a_run_begins_with_exist(name):
    assert (targets.ROOT / name).exists()


@pytest.mark.parametrize("target", targets.GUARDED.values(), ids=targets.GUARDED)
def test_sources_of_a_target_exist(target):
    missing = [name for name in (*target.tests, *target.sources) if not (targets.ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("target", targets.GUARDED.values(), ids=targets.GUARDED)
def test_what_tests_of_a_target_import_of_other_tests_are_sources(target):
    """What they import of the product is listed by hand: the kernels import little, a chart's pods run everything."""
    files = [path for name in target.tests for path in targets.files(targets.ROOT / name) if path.suffix == ".py"]
    imported = {name for path in files for name in re.findall(r"^from (tests\.[\w.]+)", path.read_text(), re.MULTILINE)}
    modules = {f"{name.replace('.', '/')}.py" for name in imported}
    modules = {name for name in modules if (targets.ROOT / name).exists()}
    assert modules
    assert {name for name in modules if not targets.is_in(name, (*target.tests, *target.sources))} == set()


def test_recorded_targets_exist():
    assert targets.recorded().keys() <= targets.GUARDED.keys()


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A target of one test and one folder of sources, and no record."""
    monkeypatch.setattr(targets, "ROOT", tmp_path)
    monkeypatch.setattr(targets, "PASSED", tmp_path / "passed.json")
    monkeypatch.setattr(targets, "GUARDED", {"one": targets.Guarded(("test_one.py",), ("sources",))})
    (tmp_path / "test_one.py").write_text("tests")
    (tmp_path / "sources" / "inner").mkdir(parents=True)
    (tmp_path / "sources" / "inner" / "one.py").write_text("one")
    return tmp_path


def test_a_target_without_a_record_runs(tree):
    assert targets.unchanged() == []
    (tree / "passed.json").write_text(json.dumps({"other": targets.GUARDED["one"].digest()}))
    assert targets.unchanged() == []


@pytest.mark.parametrize("change", ["test_one.py", "sources/inner/one.py", "sources/new.py", "renamed", "removed"])
def test_a_target_that_passed_runs_again_when_a_source_changes(tree, change):
    targets.record("one")
    assert targets.unchanged() == ["one"]
    one = tree / "sources" / "inner" / "one.py"
    if change == "removed":
        one.unlink()
    elif change == "renamed":
        one.rename(one.with_name("two.py"))
    else:
        (tree / change).write_text("changed")
    assert targets.unchanged() == []


def test_a_cache_of_python_is_no_source(tree):
    targets.record("one")
    (tree / "sources" / "__pycache__").mkdir()
    (tree / "sources" / "__pycache__" / "one.pyc").write_text("compiled")
    assert targets.unchanged() == ["one"]


def test_a_library_that_is_gone_is_compiled_again():
    plan = ["make", "-n", "-o", ".venv/kvplane-dev-packages", ".venv/kvplane-dev", "LIBRARIES=build/missing.abi3.so"]
    done = subprocess.run(plan, cwd=targets.ROOT, capture_output=True, text=True, check=True)
    assert "native_build.py" in done.stdout
