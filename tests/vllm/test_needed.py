"""What the adapter needs of vLLM beyond its imports: complete, recorded, and what is missing is named at the start."""

from __future__ import annotations

import ast
import re
from itertools import chain

import pytest

from kvplane.base.errors import FailedPrecondition
from kvplane_vllm import needed, plugin
from tests.vllm import surface


class Base:
    inherited: int


class Given(Base):
    annotated: int

    def __init__(self):
        self.stored = str(self).loaded  # type: ignore[attr-defined]

    def method(self): ...


def test_what_a_version_lacks_is_named(monkeypatch):
    names = "inherited annotated stored method loaded absent"
    monkeypatch.setattr(needed, "NEEDED", {f"{__name__}:Given": names, f"{__name__}:Renamed": "one"})
    monkeypatch.setattr(needed, "NEEDED_REMOTE", {f"{__name__}:Given": "of_remote"})
    monkeypatch.setattr(needed, "version", lambda name: "0.33.9")
    monkeypatch.setattr(needed, "PACKAGE", "tests.")
    assert list(needed.missing(is_remote=False)) == ["Given.loaded", "Given.absent", "Renamed.one"]
    with pytest.raises(FailedPrecondition, match=r"vLLM 0.33.9 does not have Given.loaded.* Given.of_remote") as raised:
        needed.check(is_remote=True)
    assert raised.value.remedy


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "0.3", "1.0.0", "0.330.0"])
def test_a_version_that_is_not_supported_is_refused_by_name(version, monkeypatch):
    monkeypatch.setattr(needed, "version", lambda name: version)
    with pytest.raises(FailedPrecondition, match=f"vLLM {version} is not supported") as raised:
        needed.check(is_remote=False)
    assert raised.value.remedy == "install vLLM 0.33 (docs/vllm.md)"


@pytest.mark.parametrize("version", ["0.33", "0.33rc1", "0.33+cpu", "0.33.1.post1", "0.32.0+cu129"])
def test_a_build_of_a_supported_release_is_supported(version):
    assert plugin.is_one_of(version, plugin.SUPPORTED)


def test_the_connector_is_refused_on_a_version_that_it_was_not_tested_with(monkeypatch):
    monkeypatch.setattr(needed, "version", lambda name: "0.32.0")
    with pytest.raises(FailedPrecondition, match=r"vLLM 0\.32\.0 is not supported") as raised:
        needed.check_for_tiers()
    assert raised.value.field == "kv_transfer_config.kv_connector"
    monkeypatch.setattr(needed, "version", lambda name: "0.33.1")
    needed.check_for_tiers()


def test_the_versions_of_the_extra_are_those_that_are_supported():
    text = (surface.ROOT / "pyproject.toml").read_text()
    oldest, newest = plugin.SUPPORTED[0], plugin.SUPPORTED[-1].split(".")
    assert f'"vllm>={oldest},<{newest[0]}.{int(newest[1]) + 1}"' in text


def listed(tables):
    return {name for table in tables for name in chain.from_iterable(map(str.split, table.values()))}


def test_each_name_of_the_scheduler_that_mode_remote_reads_is_looked_for():
    found = set()
    for path in (surface.ADAPTER / "remote").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and re.search(
                r"\bself\._scheduler$|^scheduler$", ast.unparse(node.value)
            ):
                found.add(node.attr)
    assert found - listed([needed.NEEDED, needed.NEEDED_REMOTE]) <= {"on_service"}
    assert len(found) > 15


def test_what_the_adapter_names_of_its_scheduler_and_of_requests_is_looked_for():
    text = "\n".join(path.read_text() for path in surface.ADAPTER.rglob("*.py"))
    private = set(re.findall(r"\b(?:scheduler|request)\.(_[a-z]\w+)", text))
    source = ast.parse((surface.ADAPTER / "scheduler.py").read_text())
    (base,) = [one for one in source.body if isinstance(one, ast.ClassDef) and one.name == "OnKvplane"]
    declared = {ast.unparse(one.target) for one in base.body if isinstance(one, ast.AnnAssign)}
    assert {"_preempt_request", "_block_hasher"} <= private | declared
    assert private | declared <= listed([needed.NEEDED, needed.NEEDED_REMOTE])


@pytest.mark.parametrize("where", sorted({*needed.NEEDED, *needed.NEEDED_REMOTE}))
def test_the_names_are_those_of_the_tested_version(where):
    recorded = surface.RECORDED.read_text()
    kind = where.partition(":")[2]
    for table in (needed.NEEDED, needed.NEEDED_REMOTE):
        for name in table.get(where, "").split():
            assert re.search(rf"\b\w*{kind}\w*\.{name}\b", recorded), f"{kind}.{name}: tests.vllm.surface --record"
